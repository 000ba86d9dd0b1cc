"""A user's batch as the tensors of a graph, shared out to micro-batches, and what each micro-batch weighs."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from planner.errors import ModelError, PlannerError, RunError
from planner.graph import Batch, Graph
from planner.runtime.blocks import dtype_of, lower_prelude, weight_layout
from planner.trace.batch import Leaf, leaves, map_leaves, settings

_ODD = 0x9E3779B97F4A7C15 - 2**64  # spreads small numbers over 64 bits
_LEAST_PIECE, _MOST_PIECES = 2**13, 64
# Names of a batch's tensors with their sizes; None is the batch.
Form = tuple[tuple[str, tuple[int | None, ...]], ...]


@dataclass(frozen=True)
class Fed:
    """A batch that was checked: its tensors by name on the rank's device, and their shapes without the batch."""

    tensors: Mapping[str, torch.Tensor]
    samples: int
    form: Form

    @property
    def digest(self) -> int:
        """A number of 48 bits that batches of different values hardly share; it waits for the device.

        It is made piece by piece: 64-bit numbers of a whole batch of images would be more than a small model holds.
        """
        total = 0
        for name, value in sorted(self.tensors.items()):
            bits = (torch.view_as_real(value) if value.is_complex() else value).contiguous()
            kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[bits.element_size()]
            pieces = bits.reshape(-1).view(kind).split(max(_LEAST_PIECE, -(-bits.numel() // _MOST_PIECES)))  # type: ignore[no-untyped-call]
            mixed = torch.zeros((), dtype=torch.int64, device=value.device)  # modulo 2**64, so in any order the same
            first = 1
            for piece in pieces:
                places = torch.arange(first, first + piece.numel(), device=value.device)
                mixed += _scattered(places).mul_(_scattered(piece.long() + 1)).sum()
                first += piece.numel()
            total = (total * 31 + len(name) + int(mixed)) % 2**48
        return total


def _scattered(numbers: torch.Tensor) -> torch.Tensor:
    """Other numbers of 64 bits in place of these, one for each: sums of products are to cancel by chance alone.

    A multiple would not do: in a batch with halves swapped, of sizes and values with many zeros at the end, the sums
    differ by a multiple of a high power of 2.
    """
    numbers.mul_(_ODD)
    numbers.bitwise_xor_(numbers >> 29)
    return numbers.mul_(_ODD)


class Inputs:
    """Checks batches against the graph that a plan was made for.

    The number of samples and other sizes may differ from the planned ones: `form` tells what a graph must be made for.
    """

    def __init__(self, graph: Graph, *, device: torch.device) -> None:
        self.graph = graph
        self.device = device
        self.index_of = {graph.tensors[i].name: i for i in graph.inputs}
        self.form: Form = tuple(sorted((name, self._sizes(name)) for name in self.index_of))

    def check(self, batch: object, *, optional: Sequence[str] = ()) -> Fed:
        """The tensors of a batch. Floating tensors are cast to the dtype that the graph was traced in.

        Raises:
            RunError: names, dtypes or numbers of dims differ from the graph's, or numbers of samples from each other.
        """
        try:
            named = {leaf.name: leaf.tensor for leaf in leaves(batch)}
        except ModelError as error:
            raise RunError(f"step: {error}") from error
        if missing := [name for name in self.index_of if name not in named and name not in optional]:
            raise RunError(f"the batch lacks {missing[0]!r}; the model was planned with {sorted(self.index_of)}")
        if unknown := [name for name in named if name not in self.index_of]:
            raise RunError(
                f"the batch has {unknown[0]!r}, which the model was not planned with; it takes {sorted(self.index_of)}"
            )
        if wrong := [f"{name}={value}" for name, value in settings(batch) if (name, value) not in self.graph.settings]:
            raise RunError(
                f"the batch has {wrong[0]}, which the model was not traced with; plan and apply with such a batch"
            )
        samples: dict[str, int] = {}
        tensors = {name: self._checked(name, value, samples) for name, value in named.items()}
        if not samples:
            raise RunError(f"the batch has none of {sorted(n for n, s in self.form if None in s)}, which hold samples")
        first, count = next(iter(samples.items()))
        for name, other in samples.items():
            if other != count:
                raise RunError(f"{first!r} has {count} samples and {name!r} {other}; give as many of each")
        form = tuple(
            (name, tuple(None if size is None else int(got) for size, got in zip(sizes, value.shape, strict=True)))
            for name, sizes in self.form
            if (value := tensors.get(name)) is not None
        )
        return Fed(tensors, count, form)

    def example(self, form: Form, batch: object) -> Any:
        """A batch on meta of the structure of `batch` and the sizes of `form`, to trace the model with."""
        sizes_of = dict(form)
        fixed = {size for sizes in sizes_of.values() for size in sizes}
        samples = next(n for n in itertools.count(2) if n not in fixed)

        def empty(leaf: Leaf) -> torch.Tensor:
            shape = [samples if size is None else size for size in sizes_of[leaf.name]]
            return torch.empty(shape, dtype=dtype_of(self.graph, self.index_of[leaf.name]), device="meta")

        return map_leaves(batch, empty)

    def _sizes(self, name: str) -> tuple[int | None, ...]:
        shape = self.graph.tensors[self.index_of[name]].shape
        return tuple(None if isinstance(size, Batch) else size for size in shape)

    def _checked(self, name: str, value: torch.Tensor, samples: dict[str, int]) -> torch.Tensor:
        """`value` on the device; its number of samples is noted."""
        index = self.index_of[name]
        planned = self._sizes(name)
        if value.ndim != len(planned):
            sizes = ["samples" if size is None else size for size in planned]
            raise RunError(
                f"{name!r} has shape {list(value.shape)}, the plan was made for {sizes}; plan again with such a batch"
            )
        if None in planned:
            samples[name] = int(value.shape[planned.index(None)])
        dtype = dtype_of(self.graph, index)
        if value.dtype != dtype and not (value.is_floating_point() and dtype.is_floating_point):
            raise RunError(f"{name!r} is {value.dtype}, the plan was made for {dtype}")
        return value.to(device=self.device, dtype=dtype)


def tensors_of(graph: Graph, fed: Fed) -> dict[int, torch.Tensor]:
    """A batch by tensor index of a graph that was made for its form."""
    return {index: fed.tensors[graph.tensors[index].name] for index in graph.inputs}


def batch_dim(graph: Graph, tensor: int) -> int | None:
    """The dim of an input that counts samples; None if it belongs to all samples."""
    dims = [d for d, s in enumerate(graph.tensors[tensor].shape) if isinstance(s, Batch)]
    return dims[0] if dims else None


def split(graph: Graph, tensors: Mapping[int, torch.Tensor], sizes: Sequence[int]) -> list[dict[int, torch.Tensor]]:
    """Micro-batches of `sizes` samples in order."""
    parts: dict[int, Sequence[torch.Tensor]] = {}
    for tensor, value in tensors.items():
        dim = batch_dim(graph, tensor)
        parts[tensor] = [value] * len(sizes) if dim is None else value.split(list(sizes), dim)  # type: ignore[no-untyped-call]
    return [{t: values[i] for t, values in parts.items()} for i in range(len(sizes))]


@dataclass(frozen=True)
class Shares:
    """How all data ranks together cut a batch: every rank into as many micro-batches.

    `samples` are those of each data rank; `sizes` this rank's micro-batches, in order, `first_sample` the place of the
    first in the global batch. With `runs` of (size, count) a pipeline has one schedule for each run of equal
    micro-batches; the runs of all data ranks begin and end together.
    """

    samples: tuple[int, ...]
    rank: int
    sizes: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]

    @property
    def first_sample(self) -> int:
        """Of this rank, counted from the first of the global batch."""
        return sum(self.samples[: self.rank])

    @property
    def num_microbatches(self) -> int:
        """On all data ranks."""
        return len(self.sizes) * len(self.samples)


def shared_out(
    samples: Sequence[int], rank: int, *, micro_batch: int, num_microbatches: int, needs_two: str = ""
) -> Shares:
    """The shares of a batch with `samples` on each data rank: as few micro-batches of at most `micro_batch` as can be.

    `needs_two` says why none may be one sample ("" = it may).

    >>> shared_out([5, 4], 0, micro_batch=2, num_microbatches=4).sizes
    (2, 2, 1)
    >>> shared_out([5, 4], 1, micro_batch=2, num_microbatches=4).runs
    ((2, 1), (1, 1), (1, 1))

    Raises:
        RunError: a rank has more samples than planned, fewer than other ranks have micro-batches, or too few of them.
    """
    planned = micro_batch * num_microbatches
    most = max(samples)
    if most > planned:
        raise RunError(
            f"the batch has {most} samples, this data rank takes {planned} a step ({num_microbatches} micro-batches of "
            f"{micro_batch}); give every data rank its own global_batch / data_world samples"
        )
    count = -(-most // micro_batch)
    least = min(samples)
    if least < count:
        raise RunError(
            f"data rank {list(samples).index(least)} has {least} samples and another one {most}, which are {count} "
            f"micro-batches of {micro_batch}; give all data ranks about as many samples"
        )
    if needs_two and least < 2 * count:
        raise RunError(
            f"{needs_two}, and data rank {list(samples).index(least)} has {least} samples for {count} micro-batches; "
            "give at least 2 for each"
        )
    sizes = [total // count + (i < total % count) for total in [samples[rank]] for i in range(count)]
    ends = sorted({total % count for total in samples} | {0, count})
    runs = tuple((sizes[start], end - start) for start, end in itertools.pairwise(ends))
    return Shares(tuple(samples), rank, tuple(sizes), runs)


def evaluation_sizes(samples: Sequence[int], rank: int, micro_batch: int) -> tuple[list[int], int]:
    """Micro-batches of a rank that evaluates, and how many of them count.

    All data ranks gather parameters as often, so those with fewer samples repeat their first one at the end.

    >>> evaluation_sizes([5, 2], 1, 2)
    ([2, 1, 1], 1)
    """
    own, rest = divmod(samples[rank], micro_batch)
    sizes = [micro_batch] * own + [rest] * (rest > 0)
    return sizes + [1] * (-(-max(samples) // micro_batch) - len(sizes)), len(sizes)


def exchanged(row: Sequence[float], failure: Exception | None, device: torch.device) -> list[list[float]]:
    """The rows of all ranks; a failure on any of them is raised on all.

    Raises:
        RunError: this rank's failure, or the first one of another rank.
    """
    known = torch.zeros(dist.get_world_size(), 1 + len(row), dtype=torch.float64)
    known[dist.get_rank()] = torch.tensor([failure is not None, *row])
    known = known.to(device)
    dist.all_reduce(known)
    rows: list[list[float]] = known.tolist()
    if any(has_failed for has_failed, *_ in rows):
        sentence = None if failure is None else str(failure).strip().split("\n")[0]
        sentences: list[str | None] = [None] * len(rows)
        dist.all_gather_object(sentences, sentence)
        if isinstance(failure, PlannerError):
            raise RunError(str(failure)) from failure
        if failure is not None:
            raise failure
        rank = next(rank for rank, found in enumerate(sentences) if found is not None)
        raise RunError(f"rank {rank}: {sentences[rank]}")
    return [row for _, *row in rows]


class Weights:
    """What a micro-batch's parts of the loss are multiplied by, so that their mean is the loss of the whole batch.

    With n micro-batches on all data ranks: a mean over valid targets becomes their sum times n / (valid targets of the
    batch); another reduction is weighed by (samples / mean samples of a micro-batch) ** power; a divisor becomes the
    batch's, over n ** degree.
    """

    def __init__(self, graph: Graph, attributes: Mapping[int, torch.Tensor], device: torch.device) -> None:
        self.graph = graph
        self.device = device
        self.width = max((stop for _, stop in weight_layout(graph).values()), default=0)
        self._targets = [term for term in graph.loss_terms if term.target is not None]
        self._sums = {tensor: degree for divisor in graph.divisors for tensor, degree in divisor.sums}
        wanted = [*(term.target for term in self._targets if term.target is not None), *self._sums]
        self._counted = lower_prelude(graph, wanted, attributes=attributes, micro_batch=1, device=device)
        self._whole = lower_prelude(
            graph, [divisor.tensor for divisor in graph.divisors], attributes=attributes, micro_batch=1, device=device,
            given=tuple(self._sums),
        )  # fmt: skip

    @property
    def fits_any_form(self) -> bool:
        """Whether micro-batches of other sequence lengths add up: all parts are counted or divided, none is a mean."""
        return all(term.target is not None or term.power == 0 for term in self.graph.loss_terms)

    def of(
        self, micro_batches: Sequence[Mapping[int, torch.Tensor]], shares: Shares, *, kept: int | None = None
    ) -> torch.Tensor:
        """[micro-batch, position]; collective over all ranks.

        `kept` micro-batches count, the others (repeats that fill a rank up) weigh nothing.

        Raises:
            RunError: numbers of valid targets differ where the loss is not linear in their mean.
        """
        rows = torch.ones(len(micro_batches), self.width, dtype=torch.float64, device=self.device)
        if not self.width:
            return rows
        kept = len(micro_batches) if kept is None else kept
        total, number = sum(shares.samples), shares.num_microbatches
        counts, sums = self._counts(micro_batches[:kept], shares.sizes)
        whole = torch.cat([counts.sum(0), *sums.values()])
        ranks = dist.get_world_size() // len(shares.samples)  # ranks of one data rank count the same
        dist.all_reduce(whole)
        whole = whole / ranks
        if self.graph.unweighed:
            self._refuse_unequal(counts)
        layout = weight_layout(self.graph)
        for position, term in enumerate(self._targets):
            rows[:, layout[term.tensor][0]] = number / whole[position]
        for term in self.graph.loss_terms:
            if term.target is None:
                share = torch.tensor(shares.sizes, dtype=torch.float64, device=self.device) * number / total
                rows[:, layout[term.tensor][0]] = share**term.power
        found: dict[int, torch.Tensor] = {}
        position = len(self._targets)
        for tensor, degree in self._sums.items():
            like = sums[tensor]
            value = whole[position : position + len(like)] / (1 if degree else total)
            position += len(like)
            dtype = dtype_of(self.graph, tensor)
            sizes = [size for size in self.graph.tensors[tensor].shape if isinstance(size, int)]
            found[tensor] = (value if dtype.is_floating_point else value.round()).to(dtype).reshape(sizes)
        if self._whole is not None:
            env = dict(micro_batches[0]) | found
            with torch.no_grad():
                made = self._whole(*(env[t] for t in self._whole.inputs), micro_batch=total)
            found.update(zip(self._whole.outputs, made, strict=True))
        for divisor in self.graph.divisors:
            start, stop = layout[divisor.tensor]
            rows[:, start:stop] = found[divisor.tensor].double().reshape(-1) / number**divisor.degree
        rows[kept:, : len(self.graph.loss_terms)] = 0.0
        return rows

    def _counts(
        self, micro_batches: Sequence[Mapping[int, torch.Tensor]], sizes: Sequence[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """[micro-batch, target] valid targets, and this rank's part of every sum of a divisor."""
        counts = torch.zeros(len(micro_batches), len(self._targets), dtype=torch.float64, device=self.device)
        sums: dict[int, torch.Tensor] = {}
        for row, (inputs, size) in enumerate(zip(micro_batches, sizes, strict=False)):
            env = dict(inputs)
            if self._counted is not None:
                # Copies: the stage runs the same nodes again, and they may write their inputs.
                with torch.no_grad():
                    made = self._counted(*(env[t].clone() for t in self._counted.inputs), micro_batch=size)
                env.update(zip(self._counted.outputs, made, strict=True))
            for column, term in enumerate(self._targets):
                assert term.target is not None
                counts[row, column] = (env[term.target] != term.ignore_index).sum()
            for tensor, degree in self._sums.items():
                value = env[tensor].double().reshape(-1) * (1 if degree else size)
                sums[tensor] = sums[tensor] + value if tensor in sums else value
        return counts, sums

    def _refuse_unequal(self, counts: torch.Tensor) -> None:
        bounds = torch.stack([counts.amax(0), -counts.amin(0)])
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        for high, low in zip(bounds[0].tolist(), (-bounds[1]).tolist(), strict=True):
            if low != high:
                raise RunError(
                    f"micro-batches have between {low:.0f} and {high:.0f} targets that count (the others are the "
                    f"ignored index), and {self.graph.unweighed}; pack or pad so that all have as many"
                )
