"""Operators of a graph that was made for one rank of a mesh axis: they know the other ranks by a communicator.

The graph of a rank (`planner.shard.localize`) is the same on every rank; what differs is inside of these operators. A
conversion from one placement to another (`planner.shard.placement.conversion`) is one of them; so are the operators
that rules put in the place of ATen's where a rank must know which part it has. `bound` gives them the communicators of
each axis; without, they have a name and raise.

The gradient of an operator is a gradient as the placements say, partial or whole: that makes every backward local
knowledge. No operator writes into what it is given: autograd, or another reader, may still need it.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from planner.errors import PlanError, TraceError

T = TypeVar("T")
Function = Callable[..., Any]


# --- communicators --------------------------------------------------------------------------------


class Communicator(Protocol):
    """The ranks of one mesh axis as a rank sees them. Every rank calls the same in the same order.

    Results are new, contiguous tensors; what is given may have any strides.
    """

    @property
    def rank(self) -> int:
        """This rank's coordinate on the axis."""

    @property
    def size(self) -> int:
        """How many ranks the axis has."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over ranks."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """`x` of all ranks, one after the other along dim 0."""

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's piece along dim 0 of the sum of `x` over ranks."""

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """`x[r]` goes to rank r; the result's `[r]` came from it. `x` is `[size, ...]`."""

    def all_to_all_rows(self, x: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        """The next `sends[r]` rows of `x` go to rank r; the next `receives[r]` of the result came from it."""


# Torch 2.13 gave both another name; 2.11 and 2.12 have only the old one.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ProcessGroup:
    """The ranks of a torch process group (gloo or nccl)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks."""
        result = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, group=self._group)
        return result

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's, along dim 0."""
        if x.dtype == torch.bool:  # gloo has none
            return self.all_gather(x.to(torch.uint8)).to(torch.bool)
        result = x.new_empty((x.shape[0] * self.size, *x.shape[1:]))
        _all_gather_single(result, x.contiguous(), group=self._group)
        return result

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's piece of the sum."""
        result = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        _reduce_scatter_single(result, x.contiguous(), group=self._group)
        return result

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """One row for each rank."""
        if x.dtype == torch.bool:
            return self.all_to_all(x.to(torch.uint8)).to(torch.bool)
        result = x.new_empty(x.shape)
        dist.all_to_all_single(result, x.contiguous(), group=self._group)
        return result

    def all_to_all_rows(self, x: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        """As many rows for each rank as it wants."""
        result = x.new_empty((sum(receives), *x.shape[1:]))
        dist.all_to_all_single(result, x.contiguous(), list(receives), list(sends), group=self._group)
        return result


class Pretended:
    """The shapes of what the first of `size` ranks would get, and the copies that `ProcessGroup` makes; no ranks.

    `seen` is told of every collective: its name, and its bytes as `planner.collectives` counts them. How many rows the
    experts of a rank get is not known from shapes: it is `expert_imbalance` times a fair share.
    """

    rank = 0

    def __init__(
        self,
        size: int,
        seen: Callable[[str, int], None] = lambda collective, num_bytes: None,
        *,
        expert_imbalance: float = 1.0,
    ) -> None:
        self.size = size
        self.expert_imbalance = expert_imbalance
        self._seen = seen

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor like `x`."""
        self._seen("all_reduce", x.numel() * x.itemsize)
        return x.clone(memory_format=torch.contiguous_format)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """As many times as long."""
        x = x.contiguous()
        self._seen("all_gather", x.numel() * x.itemsize * self.size)
        return x.new_empty((x.shape[0] * self.size, *x.shape[1:]))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """As many times as short."""
        x = x.contiguous()
        self._seen("reduce_scatter", x.numel() * x.itemsize)
        return x.new_empty((x.shape[0] // self.size, *x.shape[1:]))

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor like `x`."""
        x = x.contiguous()
        self._seen("all_to_all", x.numel() * x.itemsize)
        return x.new_empty(x.shape)

    def all_to_all_rows(self, x: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        """As many rows as are received."""
        x = x.contiguous()
        result = x.new_empty((sum(receives), *x.shape[1:]))
        self._seen("all_to_all", max(x.numel(), result.numel()) * x.itemsize)
        return result


class Threads:
    """Ranks that are threads of this process: `run` calls one function on each of them.

    A rank that fails, or that is not met within `timeout_seconds`, ends the run: nothing hangs.
    """

    def __init__(self, size: int, *, timeout_seconds: float = 60.0) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=timeout_seconds)
        self._slots: list[Any] = [None] * size

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """Those of the ranks, to be used within `run`, each on its own thread."""
        return tuple(_Thread(self, rank) for rank in range(self.size))

    def run(self, function: Callable[[Communicator], T]) -> list[T]:
        """What `function` returns on each rank, in order.

        Raises:
            Exception: the first that a rank raised.
        """
        return run_threads([partial(function, each) for each in self.communicators], [self])

    def abort(self) -> None:
        """Whoever waits for another rank, or will, fails."""
        self._barrier.abort()

    def reset(self) -> None:
        """Ranks can meet again."""
        self._barrier.reset()

    def meet(self, rank: int, value: T) -> list[T]:
        """What every rank brought to this meeting."""
        self._slots[rank] = value
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found


def run_threads(functions: Sequence[Callable[[], T]], groups: Sequence[Threads]) -> list[T]:
    """What each function returns, each on a thread; where one fails, nobody waits in any of the groups.

    Raises:
        Exception: the first that one raised.
    """
    results: list[Any] = [None] * len(functions)
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            # Backward stays on the rank's own thread, on a GPU as well: one thread for all of them would wait
            # for itself.
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = functions[rank]()
        except BaseException as error:
            if not isinstance(error, threading.BrokenBarrierError) or not failures:
                failures.append(error)
            for group in groups:
                group.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        for group in groups:
            group.reset()
        raise next((f for f in failures if not isinstance(f, threading.BrokenBarrierError)), failures[0])
    return results


class Grid:
    """Ranks of several axes that are threads of this process; they are counted with the last axis innermost."""

    def __init__(self, sizes: Sequence[tuple[str, int]], *, timeout_seconds: float = 60.0) -> None:
        """`sizes` are those of the axes by name, outermost first."""
        self.size = prod(size for _, size in sizes)
        self._groups: list[Threads] = []
        self.communicators: tuple[dict[str, Communicator], ...] = tuple({} for _ in range(self.size))
        inner = self.size
        for axis, size in sizes:
            inner //= size
            for first in (r for r in range(self.size) if r // inner % size == 0):
                group = Threads(size, timeout_seconds=timeout_seconds)
                self._groups.append(group)
                for rank, communicator in enumerate(group.communicators):
                    self.communicators[first + rank * inner][axis] = communicator

    def run(self, function: Callable[[int, Mapping[str, Communicator]], T]) -> list[T]:
        """What `function` returns on each rank, given its number and its communicators by axis.

        Raises:
            Exception: the first that a rank raised.
        """
        each = [partial(function, rank, mine) for rank, mine in enumerate(self.communicators)]
        return run_threads(each, self._groups)


class _Thread:
    """One rank of `Threads`."""

    def __init__(self, ranks: Threads, rank: int) -> None:
        self._ranks = ranks
        self.rank = rank
        self.size = ranks.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """In the same order on every rank, so that all get the same."""
        first, *others = self._ranks.meet(self.rank, x)
        result = first.clone(memory_format=torch.contiguous_format)
        for other in others:
            result += other
        self._ranks.meet(self.rank, None)  # nobody changes what another one still reads
        return result

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's, along dim 0."""
        result = torch.cat(self._ranks.meet(self.rank, x))
        self._ranks.meet(self.rank, None)
        return result

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's piece of the sum."""
        return self.all_reduce(x).chunk(self.size)[self.rank].clone()

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """One row for each rank."""
        result = torch.stack([other[self.rank] for other in self._ranks.meet(self.rank, x)])
        self._ranks.meet(self.rank, None)
        return result

    def all_to_all_rows(self, x: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        """As many rows for each rank as it wants."""
        met = self._ranks.meet(self.rank, (x, sends))
        result = torch.cat([torch.split(other, list(counts))[self.rank] for other, counts in met])
        self._ranks.meet(self.rank, None)
        return result


# --- pieces of a dim ------------------------------------------------------------------------------


def _unflattened(x: torch.Tensor, dim: int, outer: int, inner: int) -> torch.Tensor:
    """A dim as two."""
    return x.view(*x.shape[:dim], outer, inner, *x.shape[dim + 1 :])


def piece_of(x: torch.Tensor, dim: int, parts: Sequence[int], repeats: int, rank: int, size: int) -> torch.Tensor:
    """What a rank holds of a whole tensor that is split along `dim`: its piece of every part, in order.

    It may be a view.

    >>> piece_of(torch.arange(8), 0, [4], 2, 1, 2).tolist(), piece_of(torch.arange(6), 0, [4, 2], 1, 0, 2).tolist()
    ([2, 3, 6, 7], [0, 1, 4])
    """
    rows = _unflattened(x, dim, repeats, sum(parts)) if repeats != 1 else x
    inner = dim + (repeats != 1)
    found, start = [], 0
    for part in parts:
        piece = part // size
        found.append(rows.narrow(inner, start + rank * piece, piece))
        start += part
    result = found[0] if len(found) == 1 else torch.cat(found, inner)
    return result.flatten(dim, inner) if repeats != 1 else result


def put_together(stacked: torch.Tensor, dim: int, parts: Sequence[int], repeats: int) -> torch.Tensor:
    """The whole of `[size, ...]`, the pieces of all ranks: the inverse of `piece_of`.

    >>> put_together(torch.tensor([[0, 1, 4], [2, 3, 5]]), 0, [4, 2], 1).tolist()
    [0, 1, 2, 3, 4, 5]
    """
    size = stacked.shape[0]
    rows = _unflattened(stacked, dim + 1, repeats, sum(parts) // size)  # [size, ..., repeats, pieces, ...]
    found = []
    for piece in torch.split(rows, [part // size for part in parts], dim + 2):
        found.append(piece.movedim(0, dim + 1).flatten(dim + 1, dim + 2))  # [..., repeats, part, ...]
    whole = found[0] if len(found) == 1 else torch.cat(found, dim + 1)
    return whole.flatten(dim, dim + 1)


def _own_piece(x: torch.Tensor, c: Communicator, dim: int, parts: Sequence[int], repeats: int) -> torch.Tensor:
    """A copy of this rank's piece: the whole may go."""
    piece = piece_of(x, dim, parts, repeats, c.rank, c.size)
    is_copy = piece.untyped_storage()._cdata != x.untyped_storage()._cdata
    return piece if is_copy else piece.clone(memory_format=torch.contiguous_format)


def _pieces(x: torch.Tensor, size: int, dim: int, parts: Sequence[int], repeats: int) -> torch.Tensor:
    """`[size, ...]`: the pieces of all ranks."""
    return torch.stack([piece_of(x, dim, parts, repeats, rank, size) for rank in range(size)])


def _around(piece: torch.Tensor, c: Communicator, dim: int, parts: Sequence[int], repeats: int) -> torch.Tensor:
    """The whole with zeros where other ranks have their pieces."""
    stacked = piece.new_zeros((c.size, *piece.shape))
    stacked[c.rank] = piece
    return put_together(stacked, dim, parts, repeats)


def _gathered(x: torch.Tensor, c: Communicator, dim: int, parts: Sequence[int], repeats: int) -> torch.Tensor:
    return put_together(c.all_gather(x.unsqueeze(0)), dim, parts, repeats).contiguous()


def _scattered(x: torch.Tensor, c: Communicator, dim: int, parts: Sequence[int], repeats: int) -> torch.Tensor:
    return c.reduce_scatter(_pieces(x, c.size, dim, parts, repeats)).squeeze(0)


Split = tuple[int, Sequence[int], int]


def _exchanged(x: torch.Tensor, c: Communicator, source: Split, target: Split) -> torch.Tensor:
    """Split as `target` instead of as `source`, which is another dim."""
    return put_together(c.all_to_all(_pieces(x, c.size, *target)), *source).contiguous()


# --- operators ------------------------------------------------------------------------------------

# By name in a graph; each takes the communicator of its axis first, then the node's arguments.
OPERATORS: dict[str, Function] = {}


def operator(name: str) -> Callable[[Function], Function]:
    """Makes a function `(communicator, *args, **kwargs)` the operator `planner.<name>.default`."""

    def register(function: Function) -> Function:
        OPERATORS[f"planner.{name}.default"] = function
        return function

    return register


def bound(communicators: Mapping[str, Communicator]) -> Mapping[str, Function]:
    """The operators by name, for the axes that there are; the keyword `axis` tells which one.

    An operator that is given `counted_over`, a further axis, gets its communicator under this name. Calling one raises
    `PlanError` where its axis has no communicator.
    """
    return {name: partial(_call, name, function, communicators) for name, function in OPERATORS.items()}


def _call(
    name: str, function: Function, communicators: Mapping[str, Communicator], *args: Any, axis: str, **kwargs: Any
) -> Any:
    for wanted in (axis, *([kwargs["counted_over"]] if "counted_over" in kwargs else [])):
        if wanted not in communicators:
            raise PlanError(f"operator {name} communicates over mesh axis {wanted!r}, which has no communicator here")
    if "counted_over" in kwargs:
        kwargs["counted_over"] = communicators[kwargs["counted_over"]]
    return function(communicators[axis], *args, **kwargs)


def unbound(name: str) -> Function:
    """What has the name of an operator where there are no communicators: it raises."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise TraceError(
            f"operator {name} needs a communicator of its mesh axis; run it with those of planner.trace.parallel.bound"
        )

    return refuse


class _Linear(torch.autograd.Function):
    """A function, and another one for its gradient. Nothing is saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Function, backward: Function) -> torch.Tensor:
        ctx.backward_of = backward
        made: torch.Tensor = forward(x)
        if made is x:
            return made.view_as(made)
        # autograd lets nobody write into views of a view that a function made; of this storage there is no other
        return torch.ops.aten._unsafe_view.default(made, made.shape) if made._is_view() else made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.backward_of(gradient), None, None


def linear_map(x: torch.Tensor, forward: Function, backward: Function) -> torch.Tensor:
    """`forward(x)`, with `backward` for its gradient."""
    made: torch.Tensor = _Linear.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return made


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


@operator("copy")
def copy(c: Communicator, x: torch.Tensor) -> torch.Tensor:
    """R to Q."""
    return linear_map(x, _same, c.all_reduce)


@operator("reduce")
def reduce(c: Communicator, x: torch.Tensor) -> torch.Tensor:
    """P to R."""
    return linear_map(x, c.all_reduce, _same)


@operator("reduce_copy")
def reduce_copy(c: Communicator, x: torch.Tensor) -> torch.Tensor:
    """P to Q."""
    return linear_map(x, c.all_reduce, c.all_reduce)


@operator("cut")
def cut(c: Communicator, x: torch.Tensor, dim: int, parts: Sequence[int], repeats: int) -> torch.Tensor:
    """R to S."""
    return linear_map(
        x, lambda v: _own_piece(v, c, dim, parts, repeats), lambda g: _gathered(g, c, dim, parts, repeats)
    )


@operator("take")
def take(c: Communicator, x: torch.Tensor, dim: int, parts: Sequence[int], repeats: int) -> torch.Tensor:
    """Q to S."""
    return linear_map(x, lambda v: _own_piece(v, c, dim, parts, repeats), lambda g: _around(g, c, dim, parts, repeats))


@operator("gather")
def gather(c: Communicator, x: torch.Tensor, dim: int, parts: Sequence[int], repeats: int) -> torch.Tensor:
    """S to R."""
    return linear_map(
        x, lambda v: _gathered(v, c, dim, parts, repeats), lambda g: _own_piece(g, c, dim, parts, repeats)
    )


@operator("gather_sum")
def gather_sum(c: Communicator, x: torch.Tensor, dim: int, parts: Sequence[int], repeats: int) -> torch.Tensor:
    """S to Q."""
    return linear_map(
        x, lambda v: _gathered(v, c, dim, parts, repeats), lambda g: _scattered(g, c, dim, parts, repeats)
    )


@operator("scatter")
def scatter(c: Communicator, x: torch.Tensor, dim: int, parts: Sequence[int], repeats: int) -> torch.Tensor:
    """P to S."""
    return linear_map(
        x, lambda v: _scattered(v, c, dim, parts, repeats), lambda g: _gathered(g, c, dim, parts, repeats)
    )


@operator("exchange")
def exchange(
    c: Communicator,
    x: torch.Tensor,
    dim: int,
    parts: Sequence[int],
    repeats: int,
    to_dim: int,
    to_parts: Sequence[int],
    to_repeats: int,
) -> torch.Tensor:
    """S to S of another dim."""
    source, target = (dim, parts, repeats), (to_dim, to_parts, to_repeats)
    return linear_map(x, lambda v: _exchanged(v, c, source, target), lambda g: _exchanged(g, c, target, source))


@operator("share")
def share(c: Communicator, x: torch.Tensor) -> torch.Tensor:
    """R to P. Integers are all on the first rank."""

    def part(value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point() or value.is_complex():
            return value / c.size
        return value.clone() if c.rank == 0 else torch.zeros_like(value)

    return linear_map(x, part, _same)


@operator("unshare")
def unshare(c: Communicator, x: torch.Tensor) -> torch.Tensor:
    """Q to R."""
    return linear_map(x, _same, lambda gradient: gradient / c.size)
