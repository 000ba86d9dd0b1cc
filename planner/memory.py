"""Bytes that a rank holds, as FSDP2 of stock PyTorch really holds them. Read off torch 2.13, not off the ZeRO paper.

A wrapped block (dp > 1, or a compute dtype that is not the master's) that is sharded over N ranks (dp_shard) holds

    ZeRO-0  `replicate`: own parameters in full + a gathered copy; full gradients
    ZeRO-1  a shard + the gathered copy; full gradients between micro-batches, a shard of them in the end
    ZeRO-2  a shard + the gathered copy; a shard of the gradients
    ZeRO-3  a shard, the gathered copy only while the block runs; a shard of the gradients

with masters and optimizer state in float32, the gathered copy in the compute dtype and accumulated gradients in the
reduce dtype (float32). Hybrid sharding holds the same: what is reduce-scattered and not yet summed over the replicas
is a shard in the reduce dtype (`_partial_reduce_output`). Every parameter is padded on dim 0 to a multiple of N, so all
ranks hold the same. Without a wrapper (one rank in float32) a block holds its parameters and gradients once.

Sources: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (`_init_sharded_param`: padding; `init_all_gather_outputs`),
_fsdp_param_group.py (`wait_for_unshard`, `post_backward`: which buffers live how long), _fsdp_collectives.py
(`foreach_all_gather`, `foreach_reduce`), _composable/replicate_with_fsdp.py, pipelining/stage.py (receive buffers).
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.errors import PlannerError
from planner.graph import Batch, Graph, Tensor

Floats = NDArray[np.float64]
Shape = tuple[int, ...]
Moment = Literal["between", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A mixed-precision policy: the compute dtype, and bytes per element of what is kept in which dtype."""

    compute_dtype: str
    master_bytes: int
    compute_bytes: int
    reduce_bytes: int

    @property
    def casts(self) -> bool:
        """Whether parameters are computed with in another dtype than they are kept in."""
        return self.compute_bytes != self.master_bytes


PRECISIONS = {
    "fp32": Precision(compute_dtype="float32", master_bytes=4, compute_bytes=4, reduce_bytes=4),
    "bf16": Precision(compute_dtype="bfloat16", master_bytes=4, compute_bytes=2, reduce_bytes=4),
    "fp64": Precision(compute_dtype="float64", master_bytes=8, compute_bytes=8, reduce_bytes=8),  # equality tests
}

# Moments that torch.optim keeps, in elements per parameter element, in the master's dtype.
OPTIMIZER_MOMENTS = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0}


def precision_named(name: str) -> Precision:
    """The policy of a precision's name.

    Raises:
        PlannerError: there is none of this name.
    """
    if name not in PRECISIONS:
        raise PlannerError(f"precision {name!r} is none of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def optimizer_moments(optimizer: str) -> int:
    """Elements that the optimizer keeps per parameter element.

    >>> optimizer_moments("adamw"), optimizer_moments("sgd")
    (2, 0)

    Raises:
        PlannerError: the optimizer is not known.
    """
    if optimizer not in OPTIMIZER_MOMENTS:
        raise PlannerError(f"optimizer {optimizer!r} is none of {', '.join(OPTIMIZER_MOMENTS)}")
    return OPTIMIZER_MOMENTS[optimizer]


def is_wrapped(num_ranks: int, precision: Precision) -> bool:
    """Whether blocks are FSDP2 modules: for one rank only if the wrapper has to cast."""
    return num_ranks > 1 or precision.casts


def shard_elements(shape: Shape, num_ranks: int) -> int:
    """Elements of a parameter's padded shard, the same on every rank.

    >>> shard_elements((10, 3), 4), shard_elements((2,), 4), shard_elements((), 1)
    (9, 1, 1)
    """
    if not shape:
        return 1
    return math.ceil(shape[0] / num_ranks) * math.prod(shape[1:])


def expert_dim(shape: Sequence[int], num_ranks: int) -> int:
    """The dim along which `num_ranks` shard matrices of experts: the first one, if there is an expert for each of them.

    Else another one that they divide, so that no rank is left without a part.

    >>> expert_dim((4, 6, 8), 2), expert_dim((1, 6, 8), 2), expert_dim((1, 6, 8), 4), expert_dim((1, 5), 2)
    (0, 1, 2, 0)
    """
    if not shape or shape[0] >= num_ranks:
        return 0
    return next((dim for dim, size in enumerate(shape) if dim and size % num_ranks == 0), 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Elements:
    """Parameter elements of each block [L]; `shard` is of one rank, padded.

    `gathered` are those of the all-gathered copy, `reduced` those of a reduce-scatter's input, padding included.
    """

    full: Floats
    trainable: Floats  # of `full`, those with a gradient
    shard: Floats
    trainable_shard: Floats
    largest: Floats  # the largest trainable parameter
    tensors: Floats  # trainable parameters
    gathered: Floats
    reduced: Floats

    def __add__(self, other: "Elements") -> "Elements":
        """Those of two sets of parameters that are sharded over other numbers of ranks."""
        sums = {item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)}
        return Elements(**{**sums, "largest": np.maximum(self.largest, other.largest)})


def elements(blocks: Sequence[Sequence[tuple[Shape, bool]]], num_ranks: int, *, are_experts: bool = False) -> Elements:
    """Counts of blocks given as (shape, requires_grad) of every parameter, sharded over `num_ranks`.

    Those that have a row for each expert are sharded along another dim if need be (`expert_dim`).

    >>> counts = elements([[((10, 3), True), ((10,), False)]], 4)
    >>> [int(x[0]) for x in (counts.full, counts.trainable, counts.shard, counts.trainable_shard)]
    [40, 30, 12, 9]
    """
    if are_experts:  # along the dim that is sharded first, which changes no number but the padding
        blocks = [[(_expert_dim_first(shape, num_ranks), trained) for shape, trained in block] for block in blocks]
    rows = [
        (
            sum(math.prod(shape) for shape, _ in block),
            sum(math.prod(shape) for shape, trained in block if trained),
            sum(shard_elements(shape, num_ranks) for shape, _ in block),
            sum(shard_elements(shape, num_ranks) for shape, trained in block if trained),
            max((math.prod(shape) for shape, trained in block if trained), default=0),
            sum(trained for _, trained in block),
        )
        for block in blocks
    ]
    columns = np.array(rows, float).reshape(-1, 6).T
    return Elements(
        full=columns[0],
        trainable=columns[1],
        shard=columns[2],
        trainable_shard=columns[3],
        largest=columns[4],
        tensors=columns[5],
        gathered=columns[2] * num_ranks,
        reduced=columns[3] * num_ranks,
    )


def elements_of_blocks(
    graph: Graph, num_ranks: int, *, pipelined: bool, spread: Collection[int] = (), num_owners: int = 1
) -> tuple[Elements, Elements]:
    """Counts of a graph's blocks, and of `spread` alone: parameters whose parts on `num_owners` ranks the others shard.

    On one stage a tied parameter belongs to its first reader, else to each of them.
    """
    seen = set[int]()
    blocks: tuple[list[list[tuple[Shape, bool]]], ...] = ([], [])
    for block in graph.blocks:
        own = [p for p in block.parameters if pipelined or p not in seen]
        seen.update(own)
        for is_spread, kind in enumerate(blocks):
            mine = [graph.tensors[p] for p in own if (p in spread) == bool(is_spread)]
            kind.append([(fixed_shape(tensor), tensor.requires_grad) for tensor in mine])
    of_spread = elements(blocks[1], num_ranks // num_owners, are_experts=True)
    return elements(blocks[0], num_ranks) + of_spread, of_spread


def _expert_dim_first(shape: Shape, num_ranks: int) -> tuple[int, ...]:
    dim = expert_dim(shape, num_ranks)
    return (*shape[dim : dim + 1], *shape[:dim], *shape[dim + 1 :])


def fixed_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape of a parameter, which has no batch."""
    return tuple(size.per_sample if isinstance(size, Batch) else size for size in tensor.shape)


def held_bytes(
    parameters: Sequence[tuple[Shape, bool]],
    zero: int,
    num_ranks: int,
    precision: Precision,
    moment: Moment = "between",
    num_microbatches: int = 2,
) -> dict[str, int]:
    """What a block of these (shape, requires_grad) holds on every rank, by storage, outside its own passes.

    `p_shard` own parameters, `p_full` the gathered copy, `g_full` gradients of the gathered copy, `g_shard`
    gradients of the own parameters (for ZeRO-0 these are full as well). `between` two micro-batches, or
    after the backward pass of the `last`. Where `torch.distributed.pipelining` drives ZeRO-0 or ZeRO-1 it
    reduces after the last backward pass and drops the gathered copy then.

    >>> held_bytes([((10, 3), True)], 1, 4, PRECISIONS["bf16"])
    {'p_shard': 36, 'p_full': 72, 'g_full': 120, 'g_shard': 0}
    >>> held_bytes([((10, 3), True)], 3, 4, PRECISIONS["bf16"], "last")
    {'p_shard': 36, 'p_full': 0, 'g_full': 0, 'g_shard': 36}
    """
    ranks = 1 if zero == 0 else num_ranks
    count = elements([parameters], ranks)
    shard, trained_shard = int(count.shard[0]), int(count.trainable_shard[0])
    own = precision.master_bytes * shard
    reduced = precision.master_bytes * trained_shard
    if not is_wrapped(num_ranks, precision):
        return {"p_shard": own, "p_full": 0, "g_full": 0, "g_shard": reduced}
    accumulates = zero < 2 and moment == "between" and num_microbatches > 1
    return {
        "p_shard": own,
        "p_full": 0 if zero == 3 else precision.compute_bytes * shard * ranks,
        "g_full": precision.reduce_bytes * int(count.trainable[0]) if accumulates else 0,
        "g_shard": 0 if accumulates else reduced,
    }


def state_bytes(
    count: Elements,
    zero: int,
    precision: Precision,
    optimizer: str,
    num_microbatches: int,
    *,
    wrapped: bool,
) -> Floats:
    """[L] parameters, gradients and optimizer state that stay from the first backward pass to the optimizer step.

    The larger of "between micro-batches" and "after the last" of `held_bytes`; with a single micro-batch ZeRO-0 and
    ZeRO-1 never accumulate. Optimizer state lies on the own parameters: full under ZeRO-0, a shard otherwise.

    By hand, per parameter with bf16 and AdamW on N ranks: ZeRO-1 4/N + 2 + 4 + 8/N, ZeRO-3 4/N + 4/N + 8/N.

    >>> eight = elements([[((8, 1), True)]], 8)
    >>> [float(state_bytes(eight, z, PRECISIONS["bf16"], "adamw", 4, wrapped=True)[0]) / 8 for z in (1, 2, 3)]
    [7.5, 4.0, 2.0]
    """
    full = zero == 0
    own = count.full if full else count.shard
    own_trained = count.trainable if full else count.trainable_shard
    held = precision.master_bytes * (own + optimizer_moments(optimizer) * own_trained)
    if wrapped and zero < 3:
        held = held + precision.compute_bytes * (count.full if full else count.gathered)
    return held + gradient_bytes(count, zero, precision, num_microbatches, wrapped=wrapped)


def gradient_bytes(count: Elements, zero: int, precision: Precision, num_microbatches: int, *, wrapped: bool) -> Floats:
    """[L] of `state_bytes`, the gradients: they are there from the block's first backward pass on."""
    reduced = precision.master_bytes * (count.trainable if zero == 0 else count.trainable_shard)
    if wrapped and zero < 2 and num_microbatches > 1:
        return np.maximum(precision.reduce_bytes * count.trainable, reduced)
    return reduced


MOST_COALESCED_BYTES = 2**25  # of gradients that ranks of tp sum together, in a buffer of their own


@dataclass(frozen=True, kw_only=True, eq=False)
class Working:
    """Short-lived bytes of each block under one strategy (arrays of one shape): what `transient_bytes` is made of."""

    gathered: Floats  # gathered copy that comes and goes with the pass (ZeRO-3); so is the buffer it is copied out of
    gradient: Floats  # gradients of the block that its running backward pass adds to what is kept
    reduce_input: Floats  # buffer of the block's gradient reduction, alive until the next block reduces
    reduction: Floats  # peak of the reduction itself
    summed: Floats  # buffer in which ranks of tp sum gradients once a step, when nothing is saved any more
    forward: Floats  # peak of the forward pass beyond inputs and what is saved in the end
    backward: Floats  # the same for backward; with recomputation, what it saves anew included

    def take(self, index: tuple[NDArray[np.int64], ...]) -> "Working":
        """The entries at a numpy index."""
        return Working(**{item.name: getattr(self, item.name)[index] for item in fields(self)})

    @staticmethod
    def stacked(strategies: Sequence["Working"]) -> "Working":
        """Of one strategy each [L], as tables [L, S]."""
        return Working(
            **{
                item.name: np.stack([getattr(part, item.name) for part in strategies], axis=1)
                for item in fields(Working)
            }
        )


def working(
    count: Elements,
    zero: int,
    precision: Precision,
    num_microbatches: int,
    forward: Floats,
    backward: Floats,
    *,
    wrapped: bool,
) -> Working:
    """The buffers of FSDP2 around the passes of each block, whose own peaks are `forward` and `backward`.

    - gathered: ZeRO-3 allocates the copy for each pass;
    - gradient: a full gradient in the compute dtype until it is reduced or added to the accumulated one; in the
      accumulator's own dtype autograd adds in place, one parameter at a time;
    - reduction: the input in the reduce dtype, padded, beside the gradient it is copied from, then this rank's part of
      the output. What was accumulated is kept in `state_bytes`, and the output takes its place.
    """
    none = np.zeros_like(count.full)
    in_place = precision.master_bytes * count.largest
    if not wrapped:
        gradient = in_place if num_microbatches > 1 else none
        return Working(
            gathered=none,
            gradient=gradient,
            reduce_input=none,
            reduction=none,
            summed=none,
            forward=forward,
            backward=backward,
        )
    accumulates = zero < 2 and num_microbatches > 1
    same_dtype = precision.compute_bytes == precision.reduce_bytes
    full = precision.compute_bytes * count.trainable
    reduce_input = precision.reduce_bytes * (count.trainable if zero == 0 else count.reduced)
    output = precision.reduce_bytes * (count.trainable if zero == 0 else count.trainable_shard)
    return Working(
        gathered=precision.compute_bytes * count.gathered if zero == 3 else none,
        gradient=in_place if accumulates and same_dtype else full,
        reduce_input=reduce_input,
        reduction=reduce_input if accumulates else reduce_input + np.maximum(full, output),
        summed=none,
        forward=forward,
        backward=backward,
    )


def transient_bytes(
    block: Working,
    gathered_before: Floats,
    reduce_input_after: Floats,
    *,
    sync_at_end: bool = False,
) -> Floats:
    """Bytes beyond state and saved activations while a block runs, at their largest.

    `gathered_before` is the gathered copy of the block in front, 0 where it is kept anyway: forward its buffer is held
    until the next copy-out, backward it is fetched ahead. `reduce_input_after` belongs to the block behind: FSDP2 keeps
    one reduction input (`reduce_scatter_max_input_buffers` = 1) until the next reduction.

    - forward: the block's copy + the larger of its own and the previous buffer + the forward peak;
    - backward: the copy + the one fetched ahead + the gradient + the last reduction's input + the backward peak;
    - reduction: the copy is freed, the one fetched ahead is there.

    `sync_at_end`: ZeRO-0 and ZeRO-1 in a pipeline reduce after the last backward pass, when no pass runs.
    """
    ahead = np.asarray(gathered_before, float)
    forward = block.gathered + np.maximum(block.gathered, ahead) + block.forward
    backward = block.gathered + ahead + block.gradient + block.backward
    if sync_at_end:
        return np.asarray(np.maximum(forward, backward))
    with_input = np.maximum(forward, backward + reduce_input_after)
    return np.asarray(np.maximum(with_input, ahead + block.reduction))


def bounded_transient_bytes(block: Working, gathered: Floats, *, sync_at_end: bool) -> Floats:
    """[L] `transient_bytes` of each block of the whole chain without knowing its neighbours' strategies.

    Never less than what the block needs between any neighbours: `gathered` [L] is what each block would gather if it
    may be ZeRO-3. Reduction inputs do not depend on the strategy where blocks may differ.
    """
    before = np.concatenate([[0.0], gathered[:-1]])
    after = np.concatenate([block.reduce_input[1:], [0.0]])
    at_end = np.maximum(block.reduction, block.summed)
    return np.maximum(transient_bytes(block, before, after, sync_at_end=sync_at_end), at_end)


def receive_buffer_bytes(received: float, sent: float, num_microbatches: int, in_flight: int) -> float:
    """Bytes of a stage's boundary tensors: `received` per micro-batch from the stage before, `sent` to the one behind.

    torch allocates the buffers of all m micro-batches at once, for activations from before and for
    gradients from behind (`_create_act_recv_info`, `_create_grad_recv_info`); outputs stay in `fwd_cache`
    until their backward pass.

    >>> receive_buffer_bytes(10.0, 20.0, 8, 4)
    320.0
    """
    return num_microbatches * (received + sent) + in_flight * sent


def stage_peak_bytes(
    state: Floats,
    activation: Floats,
    blocks: Working,
    *,
    in_flight: int,
    boundary_bytes: float,
    sync_at_end: bool = False,
    gradients: Floats | None = None,
    num_microbatches: int = 2,
) -> float:
    """The most that one stage holds: per chosen block of the stage its state, activations and working set.

    While block i runs for the newest micro-batch, in_flight - 1 others are saved in full and this one up to block i:

        boundary + sum state + max_i ((in_flight - 1) sum activation + sum of activation[0..i] + transient[i])

    or, in a pipeline, a block reduces its gradient after the last backward pass. Of the `gradients` in the state, the
    first micro-batch's backward pass has only those of the blocks that it has been through; later ones have all, and
    at most num_microbatches - 1 in flight.
    The heaviest moment of the heaviest rank (padding makes all ranks equal). `problem` uses the same sum with every
    activation saved, which is never less.
    """
    before = np.concatenate([[0.0], blocks.gathered[:-1]])
    after = np.concatenate([blocks.reduce_input[1:], [0.0]])
    transient = transient_bytes(blocks, before, after, sync_at_end=sync_at_end)
    saved = (in_flight - 1) * activation.sum() + np.cumsum(activation)
    most = (saved + transient).max()
    if gradients is not None:
        to_come = np.cumsum(gradients) - gradients  # of the blocks in front
        most = (saved + transient - to_come).max()
        if later := min(in_flight, num_microbatches - 1):
            saved = (later - 1) * activation.sum() + np.cumsum(activation)
            most = max(most, (saved + transient).max())
    # With `sync_at_end` the reductions come when nothing is saved any more; else they are in `transient`.
    return float(boundary_bytes + state.sum() + max(most, blocks.reduction.max(), blocks.summed.max()))
