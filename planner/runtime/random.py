"""Random numbers that do not depend on the plan: every draw has a seed of its own.

Sample s of the global batch draws, in operator k of step n, from a generator seeded with hash(seed, n, s, k). The rank
and micro-batch that it is in, what runs before it, and how often a block is recomputed change nothing. `k` counts the
random operators of the graph in order, so a second graph of the model (another sequence length) draws alike wherever it
has the same random operators. Generators of different kinds of device give different numbers for one seed.

What has no batch dim (a noise that all samples share) is drawn once per step: ranks and micro-batches get the same.

Where a tensor is split over ranks, dropout draws for all of it and each rank takes its part. What a fused kernel draws
inside itself cannot be had that way: there each rank draws for its part, from a seed of its own.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from planner.graph import OPAQUE, Arg, Batch, Graph, reads
from planner.runtime.peers import ALONE, DROPOUTS, Peers
from planner.trace.aten import call_node, materialize
from planner.trace.parallel import piece_of

# Elementwise: keep with probability 1 - p, divide by it.
_DROPOUT = "aten.dropout.default"
_DROPOUT_IN_PLACE = "aten.dropout_.default"


def seed_of(*parts: int) -> int:
    """A seed of 63 bits from any integers.

    >>> seed_of(0, 1) == seed_of(0, 1), seed_of(0, 1) == seed_of(1, 0)
    (True, False)
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True)
class Draws:
    """Where the random numbers of one micro-batch come from; `first_sample` is its place in the global batch."""

    seed: int
    step: int
    first_sample: int

    def of_sample(self, operator: int, sample: int, *part: int) -> int:
        """The seed of one sample, counted from the first of the micro-batch, in one operator; or of one part of it."""
        return seed_of(self.seed, self.step, operator, self.first_sample + sample, *part)

    def of_step(self, operator: int, *part: int) -> int:
        """The seed of what all samples of a step share."""
        return seed_of(self.seed, self.step, operator, *part)


class RandomSource:
    """The draws of one data rank, step after step. `step` is the number of the next one: set it to resume."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0

    def next_step(self, first_sample: int, micro_batches: Sequence[int]) -> list[Draws]:
        """Draws of micro-batches of these sizes, in order; `first_sample` is this data rank's in the global batch."""
        result = []
        for size in micro_batches:
            result.append(Draws(self.seed, self.step, first_sample))
            first_sample += size
        self.step += 1
        return result


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's own generators start from `seed` within it; the user's state comes back after it."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class Draw(nn.Module):
    """One random node of a graph, as a module of a lowered block: (draws, samples, what it reads) -> what it makes.

    Without draws the operator runs as it is, from torch's own generator. Where samples cannot be told apart (an order
    of the samples, the user's own Function) the micro-batch draws as one: as on one device with the same micro-batches.
    """

    def __init__(self, graph: Graph, index: int, *, device: torch.device, peers: Peers = ALONE) -> None:
        super().__init__()
        self.node = graph.nodes[index]
        self._peers = peers
        self.operands = tuple(dict.fromkeys(reads(self.node)))
        self.number = sum(node.is_random for node in graph.nodes[:index])
        # A rank that draws for its part alone has a seed of its own.
        self._own = peers.split_draws.get(self.number, ())
        self._device = device
        made = [t for t in self.node.outputs if t is not None]
        places = {t: _Place.of(graph, t) for t in (*self.operands, *made) if graph.tensors[t].is_batched}
        self._is_part = self.node.op in DROPOUTS  # of what one device draws
        self._is_shared = not places
        self._is_in_place = self.node.op.split(".")[1].endswith("_")  # returns the operand that it writes
        self.is_by_sample = (
            bool(places)
            and None not in places.values()
            and all(t in places for t in made)
            and (self._is_part or not any(isinstance(arg, Batch) for arg in self.node.args))  # an order of samples, say
            and self.node.op != OPAQUE  # whether it treats samples alike is not known
        )
        self._places: Mapping[int, _Place] = {t: p for t, p in places.items() if p is not None}

    def forward(self, draws: Draws | None, micro_batch: int, *operands: torch.Tensor) -> Any:
        """The node's result: a tensor, or a list where it returns one."""
        env = dict(zip(self.operands, operands, strict=True))
        if draws is None:
            return self._result(env, micro_batch)
        if not self.is_by_sample:
            own = self._own
            seed = draws.of_step(self.number, *own) if self._is_shared else draws.of_sample(self.number, 0, *own)
            with seeded(seed, self._device):
                if self._is_part:
                    return self._dropped_at_once(operands[0], micro_batch)
                return self._result(env, micro_batch)
        if self._is_part or self.node.op in (_DROPOUT, _DROPOUT_IN_PLACE):
            return self._dropped(draws, operands[0])
        return self._sample_by_sample(draws, env, micro_batch)

    def _result(self, env: Mapping[int, torch.Tensor], micro_batch: int) -> Any:
        """Run the node on whole tensors."""
        return self._packed(dict(self._called(env, micro_batch)))

    def _called(self, env: Mapping[int, torch.Tensor], micro_batch: int) -> Iterator[tuple[int, torch.Tensor]]:
        operators = self._peers.operators
        return call_node(self.node, env, micro_batch=micro_batch, device=self._device, replace=operators)

    def _packed(self, made: Mapping[int, torch.Tensor]) -> Any:
        results = [None if t is None else made[t] for t in self.node.outputs]
        return results if self.node.returns_list else results[0]

    def _dropped(self, draws: Draws, x: torch.Tensor) -> torch.Tensor:
        """Dropout; a mask of one byte an element is kept for backward, as the fused kernel of CUDA keeps it."""
        rate = self.node.args[1]
        assert isinstance(rate, int | float)
        place = self._places[self.operands[0]]
        mask = self._mask(draws, x, place, 1.0 - rate)
        scale = 1.0 / (1.0 - rate) if rate < 1.0 else 0.0
        if self.node.op == _DROPOUT_IN_PLACE:
            return x.mul_(mask).mul_(scale)
        result: torch.Tensor = _Masked.apply(x, mask, scale)  # type: ignore[no-untyped-call]
        return result

    def _mask(self, draws: Draws, x: torch.Tensor, place: "_Place", keep: float) -> torch.Tensor:
        samples = place.samples(x)
        one = list(x.shape)
        one[place.dim] = place.rows
        mask = torch.empty([samples, *one], dtype=torch.bool, device=x.device)
        generator = torch.Generator(x.device)
        split = self._split(1) if self._is_part else None
        for sample in range(samples):
            generator.manual_seed(draws.of_sample(self.number, sample))
            if split is None:
                mask[sample].bernoulli_(keep, generator=generator)
            else:
                all_of_it = torch.empty(split.whole(one), dtype=torch.bool, device=x.device)
                mask[sample] = split.own(all_of_it.bernoulli_(keep, generator=generator), self._peers)
        return place.merged(mask)

    def _dropped_at_once(self, x: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """Dropout of all samples by one draw, as the operator on the whole tensor draws it; this rank's part."""
        split = self._split(micro_batch)
        ones = torch.ones(split.whole(x.shape), dtype=x.dtype, device=x.device)
        return x * split.own(torch.ops.aten.dropout.default(ones, self.node.args[1], True), self._peers)

    def _split(self, micro_batch: int) -> "_Split":
        """How what is dropped is split, in numbers."""

        def numbers(given: Sequence[Arg]) -> Any:
            return [materialize(arg, {}, micro_batch, self._device) for arg in given]

        kwargs = dict(self.node.kwargs)
        cuts = [_Cut(str(kwargs["axis"]), *numbers(self.node.args[3:]))]
        if isinstance(before := kwargs.get("of"), tuple):  # cut by another axis before
            cuts.insert(0, _Cut(str(before[0]), *numbers(before[1:])))
        return _Split(tuple(cuts))

    def _sample_by_sample(self, draws: Draws, env: Mapping[int, torch.Tensor], micro_batch: int) -> Any:
        """Run the node once for every sample: fused kernels draw inside, from torch's own generator."""
        samples = next((self._places[t].samples(x) for t, x in env.items() if t in self._places), micro_batch)
        if samples < 2:
            with seeded(draws.of_sample(self.number, 0, *self._own), self._device):
                return self._result(env, micro_batch)
        made: dict[int, list[torch.Tensor]] = {}
        for sample in range(samples):
            part = {t: self._places[t].one(x, sample) if t in self._places else x for t, x in env.items()}
            with seeded(draws.of_sample(self.number, sample, *self._own), self._device):
                for tensor, value in self._called(part, 1):
                    made.setdefault(tensor, []).append(value)
            for tensor in self.node.mutates:
                self._places[tensor].put(env[tensor], sample, part[tensor])
        if self._is_in_place:
            return env[self.operands[0]]
        return self._packed({t: self._places[t].joined(values) for t, values in made.items()})


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the samples are in a tensor: `dim` has `rows` for each, in `runs` runs through all samples."""

    dim: int
    rows: int
    runs: int

    @classmethod
    def of(cls, graph: Graph, tensor: int) -> "_Place | None":
        """The place in a tensor with a batch dim; None if it is not known."""
        runs = graph.sample_runs[tensor]
        batch = [(d, s.per_sample) for d, s in enumerate(graph.tensors[tensor].shape) if isinstance(s, Batch)]
        return None if runs is None or len(batch) > 1 else cls(*batch[0], runs)

    def samples(self, whole: torch.Tensor) -> int:
        """How many samples a tensor holds."""
        return whole.shape[self.dim] // self.rows

    def one(self, whole: torch.Tensor, sample: int) -> torch.Tensor:
        """One sample's part: a view, so that it can be written, where the samples are in one run."""
        if self.runs == 1:
            return whole.narrow(self.dim, sample * self.rows, self.rows)
        apart = torch.unflatten(whole, self.dim, (self.runs, -1, self.rows // self.runs))
        return apart.select(self.dim + 1, sample).flatten(self.dim, self.dim + 1)

    def put(self, whole: torch.Tensor, sample: int, part: torch.Tensor) -> None:
        """Write one sample's part, where `one` could not give a view."""
        if self.runs > 1:
            apart = torch.unflatten(whole, self.dim, (self.runs, -1, self.rows // self.runs))
            apart.select(self.dim + 1, sample).copy_(torch.unflatten(part, self.dim, (self.runs, -1)))

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole from the samples' parts."""
        return torch.cat(list(parts), self.dim) if self.runs == 1 else self.merged(torch.stack(list(parts)))

    def merged(self, parts: torch.Tensor) -> torch.Tensor:
        """The whole from `[samples, *shape of one part]`; a view where the samples come first."""
        if self.runs == 1:
            return parts.movedim(0, self.dim).flatten(self.dim, self.dim + 1)
        apart = torch.unflatten(parts, self.dim + 1, (self.runs, self.rows // self.runs))
        return apart.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 2)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A split of a dim over the ranks of an axis: of the `parts` of it, `repeats` times, each has its piece."""

    axis: str
    dim: int
    parts: Sequence[int]
    repeats: int


@dataclass(frozen=True, slots=True)
class _Split:
    """Cuts of a tensor, one after the other."""

    cuts: tuple[_Cut, ...]

    def whole(self, shape: Sequence[int]) -> list[int]:
        """The sizes of the whole of a part."""
        sizes = list(shape)
        for cut in reversed(self.cuts):
            sizes[cut.dim] = cut.repeats * sum(cut.parts)
        return sizes

    def own(self, whole: torch.Tensor, peers: Peers) -> torch.Tensor:
        """This rank's part."""
        for cut in self.cuts:
            whole = piece_of(whole, cut.dim, cut.parts, cut.repeats, *peers.places[cut.axis])
        return whole


class _Masked(torch.autograd.Function):
    """`x * mask * scale`; only the mask is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return _masked(x, mask, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return _masked(gradients[0], mask, ctx.scale), None, None


def _masked(x: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """One fused kernel on CUDA, where the operator is the backward pass of dropout: the same product."""
    result: torch.Tensor = torch.ops.aten.native_dropout_backward(x, mask, scale)
    return result
