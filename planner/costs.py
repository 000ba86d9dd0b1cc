"""Seconds and bytes of every strategy of every block on one mesh, for one micro-batch size and schedule.

A strategy is a ZeRO stage with or without full recomputation. What overlaps with what is that of stock FSDP2
(torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py):

- forward, the all-gather of block i runs while block i - 1 computes; copy-out is on the compute stream;
- backward, the all-gather of block i and the reduce-scatter of block i + 2 share the time of block i + 1, and a block's
  reduction must end before the next block's begins (`reduce_scatter_max_input_buffers` = 1);
- hybrid sharding gathers and reduce-scatters over dp_shard, and once a step sums its shards of the gradients over
  dp_replicate, on a stream of its own (`all_reduce_stream`): beside the last backward pass, and beside gathers and
  reduce-scatters where these do not use the same links;
- computing and communicating at once slows both (`collectives.overlapped_seconds`);
- on a CPU nothing overlaps;
- the collectives of tensor and context parallelism wait for what they read and are waited for: nothing of their own
  block hides them, and recomputation repeats those of the forward pass. Collectives of data parallelism run beside them
  where they do not use the same links;
- a pipeline stage of ZeRO-0 or ZeRO-1 reduces after its last backward pass (`PipelineStage.perform_reduce_grad`), and
  every stage of a pipeline gathers what ZeRO-1 and ZeRO-2 keep at the beginning of the step, all stages at once.

The runtime has to start those gathers before the first receive; in the forward pass they would line up over the stages.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Cluster, Device, Slowdown
from planner.collectives import (
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    axis_group,
    group_slowdown,
    reduce_scatter_seconds,
    send_recv_seconds,
)
from planner.errors import PlanError
from planner.graph import Affine, Graph, total
from planner.inside import Groups, Same, inside, share_links, split_groups
from planner.memory import (
    MOST_COALESCED_BYTES,
    Elements,
    Precision,
    Working,
    bounded_transient_bytes,
    elements_of_blocks,
    fixed_shape,
    gradient_bytes,
    is_wrapped,
    optimizer_moments,
    precision_named,
    receive_buffer_bytes,
    shard_elements,
    state_bytes,
    working,
)
from planner.operators import check_dtype, class_seconds, kernel_seconds, memory_seconds, phase_seconds
from planner.plan import AXES, Mesh
from planner.schedule import in_flight
from planner.shard.chain import AxisSplit, spread_parameters
from planner.shard.placement import Q

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Small all-reduces of our runtime in a step, beside that of loss and gradient norm: samples of all ranks and the digest
# of what they run (`runtime.inputs.exchanged`), valid targets (`runtime.inputs.Weights`).
AGREEMENTS = 2

# Kernels of one optimizer step per parameter and bytes moved per element in units of the master's width: the loop and
# the foreach form of torch.optim do one elementwise kernel after the other (torch/optim/adamw.py, sgd.py).
_OPTIMIZER_KERNELS = {"adamw": 8, "adam": 7, "momentum": 3, "sgd": 1}
_OPTIMIZER_PASSES = {"adamw": 20, "adam": 18, "momentum": 8, "sgd": 3}


@dataclass(frozen=True, slots=True, order=True)
class Strategy:
    """What is done with a block; `recompute` is 0 or 1 (full)."""

    zero: int
    recompute: int

    def __str__(self) -> str:
        return f"ZeRO-{self.zero}{' recompute' if self.recompute else ''}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Costs:
    """One configuration priced: seconds and bytes of L blocks under S strategies on P stages.

    Names shared with `problem.Problem` mean the same. Seconds are per micro-batch unless said
    otherwise, bytes per rank.
    """

    mesh: Mesh
    micro_batch: int
    num_microbatches: int
    schedule: str
    precision: str
    optimizer: str
    strategies: tuple[Strategy, ...]
    forward_seconds: Floats  # [L, S] kernels, dispatch, exposed communication
    backward_seconds: Floats  # [L, S] recomputation included
    exposed_seconds: Floats  # [L, S] part of the two that is communication
    exposed_forward_seconds: Floats  # [L, S] of that, in the forward pass
    gather_seconds: Floats  # [L, S] once a step, exposed: what ZeRO-1 and ZeRO-2 keep; the cast copy of ZeRO-0
    reduce_seconds: Floats  # [L, S] once a step, exposed: gradients of ZeRO-0 and ZeRO-1
    optimizer_seconds: Floats  # [L, S] once a step
    tie_seconds: Floats  # [L, S] once a step: the sum of a shared gradient over stages, on each owner
    state_bytes: Floats  # [L, S]
    gradient_bytes: Floats | None = None  # [L, S] of these, gradients; None: unknown, taken to be always there
    activation_bytes: Floats  # [L, S] per micro-batch in flight
    received_bytes: Floats | None = None  # [L, S] of these, inputs that earlier blocks made; None: unknown, taken as 0
    transient_bytes: Floats  # [L, S] bound that holds between any neighbours
    working: Working  # [L, S] each: what the exact transient is made of
    hop_seconds: Floats  # [L - 1] one message over the cut, in one direction
    hop_bytes: Floats  # [L - 1] of one micro-batch over the cut
    prelude_seconds: float  # on every stage
    pass_seconds: float  # on every stage, per pass: the pipeline schedule itself
    prelude_bytes: float  # on every stage, per micro-batch in flight
    input_bytes: float  # the rank's part of the batch, all micro-batches, on every stage
    unused_bytes: float  # parameters that nothing reads: every rank keeps them whole
    norm_seconds: float  # once a step
    in_flight: Ints  # [P]
    capacity: float
    tie_groups: tuple[tuple[int, ...], ...]  # blocks that share parameters: one ZeRO stage for all
    agreement_seconds: float = 0.0  # once a step: what our runtime's ranks tell each other of a batch
    basis: "Basis | None" = None  # set by `price`

    @property
    def num_stages(self) -> int:
        """P."""
        return self.mesh.pp

    @property
    def strategy_zero(self) -> Ints:
        """[S] ZeRO stages."""
        return np.array([strategy.zero for strategy in self.strategies], np.int64)

    @property
    def strategy_recompute(self) -> Ints:
        """[S] 0 or 1."""
        return np.array([strategy.recompute for strategy in self.strategies], np.int64)

    @property
    def seconds(self) -> Floats:
        """[L, S] forward and backward of one micro-batch."""
        return self.forward_seconds + self.backward_seconds

    @property
    def sync_seconds(self) -> Floats:
        """[L, S] once a step: gathers, gradient reduction, tied gradients, optimizer."""
        return self.gather_seconds + self.reduce_seconds + self.tie_seconds + self.optimizer_seconds

    @property
    def cut_seconds(self) -> Floats:
        """[L - 1] per micro-batch: one message forward, one backward.

        Stock `torch.distributed.pipelining` hides neither: a receive is posted when it is waited for, and in the steady
        state of 1F1B a send waits with it (`fwd_send_bwd_recv`).
        """
        return 2 * self.hop_seconds

    @property
    def cut_bytes(self) -> Floats:
        """[L - 1] receive buffers of activations, all micro-batches, on the stage that receives.

        Less what its first block is sure to keep of them: that is among its activations already.
        """
        buffers = self.num_microbatches * self.hop_bytes
        if self.received_bytes is None or self.num_stages == 1:
            return buffers
        return np.asarray(buffers - int(self.in_flight[1:].min()) * self.received_bytes[1:].min(axis=1))

    @property
    def stage_seconds(self) -> float:
        """On every stage, per micro-batch: the prelude, and the schedule's work for both passes."""
        return self.prelude_seconds + 2 * self.pass_seconds

    @property
    def stage_bytes(self) -> Floats:
        """[P] what a stage holds whatever its blocks are.

        Its part of the batch, unused parameters, the prelude, and at the widest cut the outputs it keeps and the
        gradients it receives.
        """
        widest = float(self.hop_bytes.max(initial=0.0)) if self.num_stages > 1 else 0.0
        behind = np.where(np.arange(self.num_stages) < self.num_stages - 1, widest, 0.0)
        sent = (self.num_microbatches + self.in_flight) * behind
        return np.asarray(self.input_bytes + self.unused_bytes + self.in_flight * self.prelude_bytes + sent)

    @property
    def capacity_bytes(self) -> Floats:
        """[P] what is left for blocks: the device's capacity less `stage_bytes`, at least 0."""
        return np.maximum(self.capacity - self.stage_bytes, 0.0)

    @property
    def fixed_seconds(self) -> float:
        """Once a step, whatever is chosen: what all ranks agree on, the norm of all gradients at the end."""
        return self.norm_seconds + self.agreement_seconds

    def boundary_bytes(self, stage: int, first: int, end: int) -> float:
        """What `stage` holds besides its blocks first..end-1: buffers, prelude, its part of the batch."""
        received = float(self.hop_bytes[first - 1]) if stage else 0.0
        sent = float(self.hop_bytes[end - 1]) if stage < self.num_stages - 1 else 0.0
        flying = int(self.in_flight[stage])
        buffers = receive_buffer_bytes(received, sent, self.num_microbatches, flying)
        return buffers + flying * self.prelude_bytes + self.input_bytes + self.unused_bytes

    def sync_at_end(self, zero: int) -> bool:
        """Whether gradients are reduced after the last backward pass, beside nothing."""
        return self.num_stages > 1 and zero < 2


def strategies_of(mesh: Mesh) -> tuple[Strategy, ...]:
    """What a block may choose on a mesh, in fixed order.

    >>> [str(s) for s in strategies_of(Mesh(dp_shard=2))][:3]
    ['ZeRO-1', 'ZeRO-1 recompute', 'ZeRO-2']
    """
    zeros = (1, 2, 3) if mesh.shards > 1 else (0,)
    return tuple(Strategy(zero, recompute) for zero in zeros for recompute in (0, 1))


def check_mesh(mesh: Mesh) -> None:
    """Refuse a mesh that this cost model does not price.

    Raises:
        PlanError: a mesh with expert and context parallelism at once.
    """
    if min(mesh.ep, mesh.cp) > 1:
        raise PlanError(f"mesh {_mesh_text(mesh)}: ep and cp together cannot be planned yet; leave one of them out")


def price(
    graph: Graph,
    cluster: Cluster,
    *,
    mesh: Mesh,
    micro_batch: int,
    num_microbatches: int,
    schedule: str,
    precision: str,
    optimizer: str,
    splits: Sequence[AxisSplit] = (),
) -> Costs:
    """The costs of one configuration. Pure; what does not depend on the mesh is computed once per graph.

    Where axes of the mesh split tensors, `graph` is that of one rank, and `splits` is how it was made, an axis after
    the other (`planner.shard.chain`). Ranks of `cp` and `ep` shard parameters together with those of `dp_shard`, but
    for experts that are spread over `ep`: these are sharded over the others.

    Raises:
        PlannerError: the mesh, the precision or the optimizer cannot be priced on this cluster.
    """
    check_mesh(mesh)
    given = {split.axis: len(split.shardings) for split in splits if split.degree == getattr(mesh, split.axis)}
    for axis, degree in mesh.splits:
        if given.get(axis) != len(graph.blocks):
            raise PlanError(
                f"{axis}={degree} needs the sharding of {len(graph.blocks)} blocks, {given.get(axis, 0)} are given"
            )
    policy = precision_named(precision)
    device, key = cluster.device, Same(graph)
    check_dtype(device, policy.compute_dtype)
    strategies = strategies_of(mesh)
    blocks = _measured(key, device, micro_batch)
    count, of_experts = _counted(key, mesh.shards, mesh.pp > 1, spread_parameters(graph, splits), mesh.ep)
    wrapped = is_wrapped(mesh.dp * mesh.cp, policy)
    hooked = (count.full > 0) & wrapped
    sizes = {name: getattr(mesh, name) for name in AXES}
    shards, replicas, pipe, tensor = (
        axis_group(cluster, sizes, axis) for axis in (("dp_shard", "cp", "ep"), "dp_replicate", "pp", "tp")
    )
    owners = axis_group(cluster, sizes, ("dp_shard", "cp"))  # that share an expert
    within = inside(key, split_groups(cluster, mesh), micro_batch)
    hop_bytes = _hop_bytes(key, micro_batch) if mesh.pp > 1 else np.zeros(len(graph.blocks) - 1)
    kernels, num_kernels = blocks.kernels + within.seconds, blocks.num_kernels + within.number
    traffic = _Traffic(
        forward=_computed(device, kernels, num_kernels, hooked, passes=(1, 0)),
        backward=_computed(device, kernels, num_kernels, hooked, passes=(0, 1)),
        rerun=_computed(device, kernels, num_kernels, hooked, passes=(1, 1))
        + _checkpoint_seconds(device, num_kernels[:, 0]),
        inside=within.seconds,
        gather=_per_distinct(all_gather_seconds, policy.compute_bytes * (count.gathered - of_experts.gathered), shards)
        + _per_distinct(all_gather_seconds, policy.compute_bytes * of_experts.gathered, owners),
        scatter=_per_distinct(
            reduce_scatter_seconds, policy.reduce_bytes * (count.reduced - of_experts.reduced), shards
        )
        + _per_distinct(reduce_scatter_seconds, policy.reduce_bytes * of_experts.reduced, owners),
        reduce=_per_distinct(all_reduce_seconds, policy.reduce_bytes * count.trainable_shard, replicas),
        slowdown=group_slowdown(cluster, shards),
        reduce_slowdown=group_slowdown(cluster, replicas),
        shares_links=share_links(shards, replicas),
        beside_shards=within.beside(shards),
        beside_replicas=within.beside(replicas),
        reductions=num_microbatches if graph.fallbacks else 1,
        overlaps=not device.synchronous_dispatch,
        num_stages=mesh.pp,
    )
    columns = [
        _strategy_seconds(device, traffic, count, policy, strategy, num_microbatches, wrapped=wrapped)
        for strategy in strategies
    ]
    forward, backward, exposed, gather, reduce, in_forward = (
        np.stack(column, axis=1) for column in zip(*columns, strict=True)
    )
    # The stock schedules reduce nothing before the last backward pass: they accumulate even if m is 1.
    accumulations = num_microbatches if mesh.pp == 1 else max(2, num_microbatches)
    partial_bytes = _partial_bytes(graph, splits, mesh, policy)
    partial = _summed_seconds(partial_bytes, tensor)
    reduce = reduce + partial[:, None]
    state = [
        state_bytes(count, s.zero, policy, optimizer, accumulations, wrapped=wrapped) + blocks.buffer_bytes
        for s in strategies
    ]
    gradients = [gradient_bytes(count, s.zero, policy, accumulations, wrapped=wrapped) for s in strategies]
    parts = [
        _with_sum(working(count, s.zero, policy, accumulations, *_peaks(blocks, s), wrapped=wrapped), partial_bytes)
        for s in strategies
    ]
    optimizing = [
        _optimizer_seconds(device, count, policy, optimizer, zero=s.zero, wrapped=wrapped or mesh.tp > 1)
        for s in strategies
    ]
    small = sum(
        all_reduce_seconds(4.0, group) for group in (shards, replicas, pipe, *([tensor] if mesh.tp > 1 else []))
    )
    return Costs(
        mesh=mesh,
        micro_batch=micro_batch,
        num_microbatches=num_microbatches,
        schedule=schedule,
        precision=precision,
        optimizer=optimizer,
        strategies=strategies,
        forward_seconds=forward,
        backward_seconds=backward,
        exposed_seconds=exposed,
        exposed_forward_seconds=in_forward,
        gather_seconds=gather,
        reduce_seconds=reduce,
        optimizer_seconds=np.stack(optimizing, axis=1),
        tie_seconds=_tie_seconds(graph, mesh, policy, strategies, pipe),
        state_bytes=np.stack(state, axis=1),
        gradient_bytes=np.stack(gradients, axis=1),
        activation_bytes=np.stack([blocks.kept[:, s.recompute] for s in strategies], axis=1),
        received_bytes=np.stack([blocks.received[:, s.recompute] for s in strategies], axis=1),
        transient_bytes=np.stack(_bounded(mesh, strategies, parts), axis=1),
        working=Working.stacked(parts),
        hop_seconds=_per_distinct(send_recv_seconds, hop_bytes, pipe),
        hop_bytes=hop_bytes,
        prelude_seconds=blocks.prelude_seconds,
        pass_seconds=device.pass_seconds if mesh.pp > 1 else 0.0,
        prelude_bytes=graph.prelude.num_bytes.at(micro_batch),
        input_bytes=num_microbatches * blocks.model_input_bytes,
        unused_bytes=policy.master_bytes * _unused_elements(key),
        norm_seconds=small,
        agreement_seconds=AGREEMENTS * small,
        in_flight=np.array([in_flight(schedule, p, mesh.pp, num_microbatches) for p in range(mesh.pp)], np.int64),
        capacity=float(cluster.capacity_bytes),
        tie_groups=_tie_groups(key),
        basis=Basis(
            traffic=traffic,
            count=count,
            num_inside=within.number,
            hooked=hooked,
            wrapped=wrapped,
            partial=partial,
            splits=splits,
        ),
    )


def inside_seconds(costs: Costs) -> Floats:
    """[L, 2] of forward and backward, the collectives of axes that split tensors; priced costs have them."""
    if costs.basis is None:
        raise ValueError("only costs that were priced have collectives")
    return costs.basis.traffic.inside


def strategy_seconds(
    device: Device,
    costs: Costs,
    strategy: Strategy,
    kernels: Floats,
    num_kernels: Floats,
    *,
    inside: Floats,
    overlap: float = 1.0,
    overlaps: bool = True,
    apart: bool = False,
    called: Floats | float = 1.0,
) -> "StrategySeconds":
    """Seconds of one strategy of priced blocks whose kernels take others than stock PyTorch's.

    `kernels` and `num_kernels` are [L, 2] of forward and backward, without collectives; those are `inside`. `overlap`
    scales the slow-down of computing and communicating at once; without `overlaps` nothing runs beside anything. With
    `apart` the processor is not ahead when a recomputed forward pass ends. `called` [L] is how often a pass through a
    block takes the processor the device's `block_seconds`.
    """
    basis = costs.basis
    if basis is None:
        raise ValueError("only costs that were priced can be priced again")
    base = basis.traffic
    seconds, number = kernels + inside, num_kernels + basis.num_inside
    slowdown, reduce_slowdown = (
        Slowdown(*(1 + overlap * (factor - 1) for factor in each)) for each in (base.slowdown, base.reduce_slowdown)
    )
    forward, backward = (
        _computed(device, seconds, number, basis.hooked, passes=each, called=called) for each in ((1, 0), (0, 1))
    )
    traffic = replace(
        base,
        forward=forward,
        backward=backward,
        rerun=forward + backward
        if apart
        else _computed(device, seconds, number, basis.hooked, passes=(1, 1), called=called),
        inside=inside,
        slowdown=slowdown,
        reduce_slowdown=reduce_slowdown,
        overlaps=base.overlaps and overlaps,
    )
    policy = precision_named(costs.precision)
    return _strategy_seconds(
        device, traffic, basis.count, policy, strategy, costs.num_microbatches, wrapped=basis.wrapped
    )


def least_seconds(graph: Graph, cluster: Cluster, *, mesh: Mesh, micro_batch: int) -> float:
    """Seconds of one micro-batch through all blocks, forward and backward, with the collectives inside of them alone.

    No strategy takes less: a lower bound that is looked up, not computed, for all but the first of equal questions.
    """
    return _least(Same(graph), cluster.device, split_groups(cluster, mesh), micro_batch, mesh.pp > 1)


def exposed_seconds(compute: Floats, link: Floats, slowdown: Slowdown, *, overlaps: bool = True) -> Floats:
    """What `link` seconds of communication add to `compute` seconds that run at the same time.

    `collectives.overlapped_seconds` less the computation, of many at once.

    >>> exposed_seconds(np.array([1.0, 1.0, 0.0]), np.array([0.6, 2.0, 0.5]), Slowdown(1.5, 1.25)).round(6).tolist()
    [0.25, 1.3, 0.5]
    """
    if not overlaps:
        return link
    slow_compute, slow_link = slowdown.compute * compute, slowdown.link * link
    link_first = slow_link * (1 - 1 / slowdown.compute)
    compute_first = link - compute + slow_compute * (1 - 1 / slowdown.link)
    return np.asarray(np.minimum(np.where(slow_compute <= slow_link, compute_first, link_first), link))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Blocks:
    """What a device needs for each block [L] and one micro-batch, before any parallelism."""

    kernels: Floats  # [L, 2] seconds of kernels, forward and backward
    num_kernels: Floats  # [L, 2]
    kept: Floats  # [L, 2] from forward to backward, without and with recomputation
    received: Floats  # [L, 2] of that, what earlier blocks made
    forward_peak: Floats
    backward_peak: Floats
    buffer_bytes: Floats
    prelude_seconds: float
    model_input_bytes: float


@dataclass(frozen=True, kw_only=True, eq=False)
class _Traffic:
    """Seconds of computation and of collectives of each block [L], each alone."""

    forward: Floats
    backward: Floats
    rerun: Floats  # forward again, then backward
    inside: Floats  # [L, 2] of forward and backward, the collectives of axes that split tensors
    gather: Floats  # one all-gather of the block
    scatter: Floats  # one reduce-scatter of its gradient
    reduce: Floats  # one all-reduce of its gradient, or of this rank's shard of it, over the replicas
    slowdown: Slowdown  # beside gather and scatter
    reduce_slowdown: Slowdown  # beside reduce
    shares_links: bool  # reduce and the other two use the same links
    beside_shards: Floats  # [L, 2] of `inside`, what gather and scatter may run beside, by other links
    beside_replicas: Floats  # [L, 2] what reduce may
    reductions: int  # all-reduces of ZeRO-2 and ZeRO-3 a step: the runtime waits for the last if it has a graph
    overlaps: bool
    num_stages: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Basis:
    """What the seconds of strategies follow from, besides those of the kernels."""

    traffic: _Traffic
    count: Elements
    num_inside: Floats  # [L, 2] collectives of axes that split tensors
    hooked: NDArray[np.bool_]  # [L] FSDP2 modules
    wrapped: bool
    partial: Floats  # [L] once a step: gradients that each rank of tp has a part of
    splits: Sequence[AxisSplit]  # of which the priced graph is one rank's part


class _Room(NamedTuple):
    """What collectives of data parallelism run beside, of each block [L].

    `idle` are seconds in which the device waits for collectives inside of the block on other links: nothing is slowed
    down then.
    """

    compute: Floats
    idle: Floats

    def shifted(self, by: int) -> "_Room":
        """That of the block `by` further on."""
        return _Room(_shifted(self.compute, by), _shifted(self.idle, by))

    def scaled(self, share: Floats) -> "_Room":
        """A share of it."""
        return _Room(self.compute * share, self.idle * share)

    def exposed(self, link: Floats, traffic: _Traffic) -> Floats:
        """What `link` seconds of communication add."""
        if not traffic.overlaps:
            return link
        return exposed_seconds(self.compute, np.maximum(link - self.idle, 0.0), traffic.slowdown)


class StrategySeconds(NamedTuple):
    """Arrays [L] of one strategy; names as in `Costs`."""

    forward: Floats
    backward: Floats
    exposed: Floats
    gather: Floats
    reduce: Floats
    exposed_forward: Floats


def _mesh_text(mesh: Mesh) -> str:
    return " ".join(f"{name}={getattr(mesh, name)}" for name in AXES if getattr(mesh, name) > 1)


def _per_distinct(seconds: Callable[[float, Group], float], num_bytes: Floats, group: Group) -> Floats:
    """A collective's seconds for each entry, computed once per distinct size."""
    sizes, where = np.unique(num_bytes, return_inverse=True)
    return np.array([seconds(float(size), group) for size in sizes], float)[where]


@lru_cache(maxsize=256)
def _measured(graph: Same, device: Device, micro_batch: int) -> _Blocks:
    model = graph.value
    priced = [class_seconds(device, kind, micro_batch) for kind in model.classes]
    sums, counts = (np.array(values, float).reshape(-1, 2) for values in zip(*priced, strict=True))
    kinds = [block.class_index for block in model.blocks]
    classes = [model.classes[kind] for kind in kinds]
    prelude = kernel_seconds(device, model.prelude.kernels, micro_batch)
    keeps = _keeps(model)
    return _Blocks(
        kernels=sums[kinds],
        num_kernels=counts[kinds],
        kept=np.array([[num_bytes.at(micro_batch) for num_bytes in block.kept] for block in keeps]),
        received=np.array([[num_bytes.at(micro_batch) for num_bytes in block.received] for block in keeps]),
        forward_peak=np.array([kind.forward_peak.at(micro_batch) for kind in classes]),
        backward_peak=np.array([kind.backward_peak.at(micro_batch) for kind in classes]),
        buffer_bytes=np.array([_total_bytes(model, block.buffers, micro_batch) for block in model.blocks]),
        prelude_seconds=float(phase_seconds(device, prelude.sum(), len(prelude))),
        model_input_bytes=_total_bytes(model, model.inputs, micro_batch),
    )


def _total_bytes(graph: Graph, tensors: Sequence[int], micro_batch: int) -> float:
    return _sum_bytes(graph, tensors).at(micro_batch)


class _Keeps(NamedTuple):
    """Bytes that a block keeps from forward to backward, without and with recomputation."""

    kept: tuple[Affine, Affine]
    received: tuple[Affine, Affine]  # of that, what earlier blocks made


def _keeps(graph: Graph) -> list[_Keeps]:
    """What each block keeps, such that any mix of strategies is covered.

    A tensor between blocks counts where it is first read and saved: there recomputation keeps it as well. Where no
    reader saves it, it counts at the block that made it, and at each that recomputes with it.
    """
    readers = [dict(zip(b.inputs, graph.classes[b.class_index].saves_input, strict=False)) for b in graph.blocks]
    saved_by_reader = {tensor for reads in readers for tensor, is_saved in reads.items() if is_saved}
    counted: set[int] = set()
    result = []
    for block, reads in zip(graph.blocks, readers, strict=True):
        kind = graph.classes[block.class_index]
        saved = {tensor for tensor in reads if reads[tensor]} - counted
        again = set(block.inputs) - counted
        counted |= saved
        made = {t for t, is_saved in zip(block.outputs, kind.saves_output, strict=False) if is_saved} - saved_by_reader
        received = (_sum_bytes(graph, saved), _sum_bytes(graph, again))
        result.append(_Keeps((kind.saved + received[0] + _sum_bytes(graph, made), received[1]), received))
    return result


def _sum_bytes(graph: Graph, tensors: Collection[int]) -> Affine:
    return total(graph.tensors[tensor].num_bytes for tensor in sorted(tensors))


@lru_cache(maxsize=256)
def _unused_elements(graph: Same) -> float:
    read = {parameter for block in graph.value.blocks for parameter in block.parameters}
    return sum(
        tensor.num_elements.fixed
        for index, tensor in enumerate(graph.value.tensors)
        if tensor.kind == "parameter" and index not in read
    )


@lru_cache(maxsize=256)
def _counted(
    graph: Same, num_ranks: int, pipelined: bool, spread: frozenset[int], num_owners: int
) -> tuple[Elements, Elements]:
    return elements_of_blocks(graph.value, num_ranks, pipelined=pipelined, spread=spread, num_owners=num_owners)


@lru_cache(maxsize=256)
def _tie_groups(graph: Same) -> tuple[tuple[int, ...], ...]:
    """All blocks that share a parameter with another, as one group.

    On one stage a single FSDP group holds all shared parameters, so they have one ZeRO stage; groups are joined
    wherever they lie, so that every plan can be run.
    """
    owners = sorted({block for _, readers in graph.value.tie_groups for block in readers})
    return (tuple(owners),) if owners else ()


@lru_cache(maxsize=1024)
def _hop_bytes(graph: Same, micro_batch: int) -> Floats:
    model = graph.value
    return np.array([model.carried_bytes(cut).at(micro_batch) for cut in range(len(model.blocks) - 1)], float)


def _computed(
    device: Device,
    kernels: Floats,
    num_kernels: Floats,
    hooked: NDArray[np.bool_],
    *,
    passes: tuple[int, int],
    called: Floats | float = 1.0,
) -> Floats:
    """[L] seconds of this many forward and backward passes as one eager phase; `hooked` are FSDP2 modules."""
    times = np.array(passes, float)
    return phase_seconds(device, kernels @ times, num_kernels @ times, times.sum() * hooked, times.sum() * called)


def _checkpoint_seconds(device: Device, num_kernels: Floats) -> Floats:
    """[L] what recomputing takes the processor besides, where it is known; `num_kernels` are those of forward."""
    if device.checkpoint_seconds is None:
        return np.zeros_like(num_kernels)
    return device.checkpoint_seconds.block + device.checkpoint_seconds.kernel * num_kernels


@lru_cache(maxsize=1024)
def _least(graph: Same, device: Device, groups: Groups, micro_batch: int, pipelined: bool) -> float:
    blocks = _measured(graph, device, micro_batch)
    within = inside(graph, groups, micro_batch)
    kernels, num_kernels = blocks.kernels + within.seconds, blocks.num_kernels + within.number
    unhooked = np.zeros(len(kernels), bool)
    passes = [_computed(device, kernels, num_kernels, unhooked, passes=each) for each in ((1, 0), (0, 1))]
    every_stage = blocks.prelude_seconds + 2 * (device.pass_seconds if pipelined else 0.0)
    return float(sum(seconds.sum() for seconds in passes)) + every_stage


def _partial_bytes(graph: Graph, splits: Sequence[AxisSplit], mesh: Mesh, policy: Precision) -> Floats:
    """[L] gradients that each rank of tp has a part of, each rank's own shard of them: they are summed once a step."""
    if mesh.tp == 1:
        return np.zeros(len(graph.blocks))
    shardings = next(split.shardings for split in splits if split.axis == "tp")
    partial = [
        sum(
            shard_elements(fixed_shape(graph.tensors[parameter]), mesh.shards)
            for parameter, placement in zip(block.parameters, sharding.parameters, strict=True)
            if placement == Q and graph.tensors[parameter].requires_grad
        )
        for block, sharding in zip(graph.blocks, shardings, strict=True)
    ]
    return policy.master_bytes * np.array(partial, float)


def _summed_seconds(num_bytes: Floats, tensor: Group) -> Floats:
    """[L] one all-reduce of a stage over tp, divided among the blocks by their bytes."""
    total = float(num_bytes.sum())
    return num_bytes / total * all_reduce_seconds(total, tensor) if total else np.zeros_like(num_bytes)


def _with_sum(block: Working, partial_bytes: Floats) -> Working:
    """With the buffer in which gradients are summed over tp, as if all blocks were of one stage."""
    together = min(float(partial_bytes.sum()), float(MOST_COALESCED_BYTES))
    return replace(block, summed=np.where(partial_bytes > 0, together, 0.0))


def _peaks(blocks: _Blocks, strategy: Strategy) -> tuple[Floats, Floats]:
    """Peaks of the passes; recomputation saves everything anew inside the backward pass."""
    if not strategy.recompute:
        return blocks.forward_peak, blocks.backward_peak
    again = blocks.kept[:, 0] + np.maximum(blocks.forward_peak, blocks.backward_peak)
    return blocks.forward_peak, again


def _bounded(mesh: Mesh, strategies: Sequence[Strategy], parts: Sequence[Working]) -> list[Floats]:
    """[L] of each strategy: transient bytes beside any neighbours; a stage of ZeRO-0 or ZeRO-1 has no ZeRO-3."""
    may_gather = np.max([part.gathered for part in parts], axis=0)
    result = []
    for strategy, part in zip(strategies, parts, strict=True):
        at_end = mesh.pp > 1 and strategy.zero < 2
        gathered = np.zeros_like(may_gather) if at_end else may_gather
        result.append(bounded_transient_bytes(part, gathered, sync_at_end=at_end))
    return result


def _tie_seconds(graph: Graph, mesh: Mesh, policy: Precision, strategies: Sequence[Strategy], pipe: Group) -> Floats:
    """[L, S] a ring of the stages that own a shared parameter sums their gradients, each rank its part."""
    result = np.zeros((len(graph.blocks), len(strategies)))
    if mesh.pp == 1:
        return result
    for parameter, owners in graph.tie_groups:
        num_bytes = policy.reduce_bytes * graph.tensors[parameter].num_elements.fixed / mesh.shards
        steps = 2 * (len(owners) - 1)
        result[list(owners)] += steps * send_recv_seconds(num_bytes / len(owners), pipe)
    return result


def _shifted(values: Floats, by: int) -> Floats:
    """`values[i + by]` at i, 0 outside."""
    index = np.arange(len(values)) + by
    inside = (index >= 0) & (index < len(values))
    return np.where(inside, values[np.clip(index, 0, len(values) - 1)], 0.0)


def _strategy_seconds(
    device: Device,
    traffic: _Traffic,
    count: Elements,
    policy: Precision,
    strategy: Strategy,
    num_microbatches: int,
    *,
    wrapped: bool,
) -> StrategySeconds:
    """Seconds of all blocks [L] when the neighbours of each take the same strategy."""
    zero, none = strategy.zero, np.zeros_like(count.full)
    passes = (traffic.forward, traffic.rerun if strategy.recompute else traffic.backward)
    inside = (traffic.inside[:, 0], traffic.inside[:, 1] + strategy.recompute * traffic.inside[:, 0])
    idle, freed = (
        (beside[:, 0], beside[:, 1] + strategy.recompute * beside[:, 0])
        for beside in (traffic.beside_shards, traffic.beside_replicas)
    )
    forward, backward = (
        _Room(seconds - taken, free) for seconds, taken, free in zip(passes, inside, idle, strict=True)
    )
    before_replicas = passes[1] - inside[1] + freed[1]
    # At the ends of a stage nothing runs beside a collective. With pp = 1 these are the model's ends,
    # else any block is one by chance.
    end_share = traffic.num_stages / len(none) if traffic.num_stages > 1 else 0.0

    def beside(room: _Room, link: Floats) -> Floats:
        return (1 - end_share) * room.exposed(link, traffic) + end_share * link

    copies = _copy_seconds(device, count, policy, zero, num_microbatches, wrapped=wrapped)
    in_forward, in_backward, gather, reduce = none, copies.accumulate, copies.gather, copies.reduce
    if zero == 3:
        in_forward = beside(forward.shifted(-1), traffic.gather) + copies.gather
        # In the time of block j: the gather of block j - 1 and the reduction of block j + 1, one after the other.
        both = traffic.gather + _shifted(traffic.scatter, 2)
        share = np.divide(traffic.gather, both, out=np.ones_like(both), where=both > 0)
        in_backward = in_backward + beside(backward.shifted(1).scaled(share), traffic.gather) + copies.gather
        share_left = 1 - _shifted(share, -2) if len(none) > 2 else np.ones_like(none)
        in_backward = in_backward + beside(backward.shifted(-1).scaled(share_left), traffic.scatter) + copies.reduce
        gather, reduce = (
            none,
            traffic.reductions * _replica_seconds(before_replicas, traffic.gather + traffic.scatter, traffic),
        )
    elif zero == 2:
        in_backward = in_backward + beside(backward.shifted(-1), traffic.scatter) + copies.reduce
        gather = gather + _first_gather(traffic)
        reduce = traffic.reductions * _replica_seconds(before_replicas, traffic.scatter, traffic)
    elif zero == 1 and traffic.num_stages > 1:
        gather, reduce = gather + _first_gather(traffic), reduce + _last_seconds(traffic)
    elif zero == 1:
        gather = gather + _first_gather(traffic)
        scatter = backward.shifted(-1).exposed(traffic.scatter, traffic)
        reduce = reduce + scatter + _replica_seconds(before_replicas, traffic.scatter, traffic)
    else:
        reduce = reduce + (traffic.reduce if traffic.num_stages > 1 else _queued_seconds(before_replicas, traffic))
    return StrategySeconds(
        forward=passes[0] + in_forward,
        backward=passes[1] + in_backward,
        exposed=in_forward + in_backward + inside[0] + inside[1],
        gather=gather,
        reduce=reduce,
        exposed_forward=in_forward + inside[0],
    )


def _first_gather(traffic: _Traffic) -> Floats:
    """Once a step: in a pipeline before the first receive, else ahead of the first forward pass, block by block."""
    if traffic.num_stages > 1:
        return traffic.gather
    inside = traffic.inside[:, 0]
    forward = _Room(traffic.forward - inside, traffic.beside_shards[:, 0])
    return forward.shifted(-1).exposed(traffic.gather, traffic)


def _queued_seconds(backward: Floats, traffic: _Traffic) -> Floats:
    """What all-reduces add to a backward pass of the whole model, divided among the blocks by their length.

    They queue on a stream of their own: when block k is done, those of blocks k..0 are still to come, beside the
    backward passes of blocks k-1..0.
    """
    link = traffic.reduce
    if not traffic.overlaps or not link.any():
        return link
    late = np.cumsum(link) - (np.cumsum(backward) - backward)
    tail = max(0.0, float(late.max()))
    beside = float(link.sum()) - tail
    slowdown = traffic.reduce_slowdown
    # Seconds of computing lost beside what a link alone would do in a second.
    lost = min(1.0, slowdown.link * (1 - 1 / slowdown.compute))
    return np.asarray(link / link.sum() * (tail + lost * beside))


def _replica_seconds(backward: Floats, occupied: Floats, traffic: _Traffic) -> Floats:
    """[L] what the sums over replicas add to one backward pass, in which other collectives take `occupied` seconds.

    In a pipeline the neighbours of a block are not known: each sum is beside the block in front, as in `beside`.
    """
    room = np.maximum(backward - occupied, 0.0) if traffic.shares_links else backward
    if traffic.num_stages == 1:
        return _queued_seconds(room, traffic)
    end_share = traffic.num_stages / len(room)
    hidden = exposed_seconds(_shifted(room, -1), traffic.reduce, traffic.reduce_slowdown, overlaps=traffic.overlaps)
    return (1 - end_share) * hidden + end_share * traffic.reduce


def _last_seconds(traffic: _Traffic) -> Floats:
    """[L] ZeRO-1 in a pipeline reduces after the last backward pass, beside nothing.

    The sum over replicas of one block runs beside the reduce-scatter of the next, if it uses other links.
    """
    scatter, reduce = traffic.scatter, traffic.reduce
    if traffic.shares_links or not traffic.overlaps:
        return scatter + reduce
    return np.maximum(scatter, reduce) + traffic.num_stages / len(scatter) * np.minimum(scatter, reduce)


class _Copies(NamedTuple):
    """Arrays [L]: seconds of FSDP2's own kernels on the compute stream, once each."""

    gather: Floats
    reduce: Floats
    accumulate: Floats


def _copy_seconds(
    device: Device,
    count: Elements,
    policy: Precision,
    zero: int,
    num_microbatches: int,
    *,
    wrapped: bool,
) -> _Copies:
    """Bytes read and written by what FSDP2 does around the collectives, over the memory's bandwidth.

    Where the processor itself computes, the time of its code for a collective is in them, if it is known.

    Gather: the cast of the own parameters, then copy-out of the gathered buffer. Reduce: copy-in of the gradient to
    the buffer (and of the buffer to the output where `replicate` scatters nothing). Accumulate, averaged
    over micro-batches: the gradient is added to the accumulated one; ZeRO-2 and ZeRO-3 add shards.
    """
    master, compute, reduce = policy.master_bytes, policy.compute_bytes, policy.reduce_bytes
    later = (num_microbatches - 1) / num_microbatches
    none = np.zeros_like(count.full)
    if not wrapped:
        return _Copies(none, none, later * memory_seconds(device, 3 * master * count.trainable))
    if zero > 1:
        added = later * memory_seconds(device, 3 * master * count.trainable_shard)
        moved = memory_seconds(device, (compute + reduce) * count.trainable)
    elif policy.casts:
        added = later * memory_seconds(device, (compute + 2 * reduce) * count.trainable)
        added = added + (1 - later) * memory_seconds(device, (compute + reduce) * count.trainable)
        moved = memory_seconds(device, 2 * reduce * count.trainable)
    else:
        added = later * memory_seconds(device, 3 * reduce * count.trainable)
        moved = memory_seconds(device, 2 * reduce * count.trainable)
    if zero == 0:
        copied = memory_seconds(device, (master + compute) * count.full)
        moved = moved + memory_seconds(device, 2 * reduce * count.trainable)
    else:
        copied = memory_seconds(device, (master + compute) * count.shard + 2 * compute * count.gathered)
    if (host := device.sharding_seconds) is not None and device.synchronous_dispatch:
        copied = copied + (count.full > 0) * (host.gather + host.gather_tensor * count.tensors)
        moved = moved + (count.trainable > 0) * (host.reduce + host.reduce_tensor * count.tensors)
    return _Copies(copied, moved, added)


def _optimizer_seconds(
    device: Device,
    count: Elements,
    policy: Precision,
    optimizer: str,
    *,
    zero: int,
    wrapped: bool,
) -> Floats:
    """[L] the optimizer step on a rank's own parameters: as measured, or elementwise kernels, one after the other.

    Source: the passes of torch.optim's non-fused form; each reads and writes whole tensors.
    """
    optimizer_moments(optimizer)  # refuses an unknown one
    own = count.trainable if zero == 0 else count.trainable_shard
    measured = (device.optimizer_seconds or {}).get(optimizer)
    if measured is not None:
        each = measured.per_tensor
        if wrapped and measured.per_sharded_tensor is not None:
            each = measured.per_sharded_tensor
        return measured.per_byte * policy.master_bytes * own + each * count.tensors
    kernels = _OPTIMIZER_KERNELS[optimizer]
    one = memory_seconds(device, _OPTIMIZER_PASSES[optimizer] / kernels * policy.master_bytes * own)
    return phase_seconds(device, kernels * one, kernels * count.tensors)
