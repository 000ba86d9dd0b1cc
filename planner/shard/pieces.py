"""Which pieces of a split dim a rank holds, in plain integers: parameters and buffers have no batch.

A parameter is stored permuted along the dim that is split, so that the equal contiguous parts of what is stored are the
ranks' pieces: those of rank 0 in the order of the dim, then those of rank 1, and so on.
"""

from collections.abc import Iterable, Sequence

from planner.errors import PlanError
from planner.graph import Batch
from planner.shard.placement import Placement, divides, total_size

Span = tuple[int, int]  # [start, stop)


def pieces(placement: Placement, degree: int, rank: int) -> tuple[Span, ...]:
    """What `rank` of `degree` holds of the dim that an S splits, in the order in which it holds them.

    >>> pieces(Placement.parse("S0*3[64]"), 2, 1)
    ((32, 64), (96, 128), (160, 192))
    >>> pieces(Placement.parse("S0[64]"), 4, 1), pieces(Placement.parse("S0[4@3.0.1.2]"), 2, 0)
    (((16, 32),), ((3, 4), (0, 1)))

    Raises:
        ValueError: the placement is no S, or has a batch.
    """
    sizes = [part for part in placement.parts if not isinstance(part, Batch)]
    if not placement.is_split or len(sizes) < len(placement.parts) or isinstance(placement.repeats, Batch):
        raise ValueError(f"{placement} does not split a dim of fixed size")
    found: list[Span] = []
    if placement.order:
        own = len(placement.order) // degree
        return _joined((one, one + 1) for one in placement.order[rank * own : (rank + 1) * own])
    start = 0
    for size in sizes * placement.repeats:
        piece = size // degree
        found.append((start + rank * piece, start + (rank + 1) * piece))
        start += size
    return _joined(found)


def stored_order(placement: Placement, degree: int) -> tuple[Span, ...]:
    """The spans of the dim in the order in which they are stored.

    >>> stored_order(Placement.parse("S0[4,2]"), 2)
    ((0, 2), (4, 5), (2, 4), (5, 6))
    """
    return _joined(span for rank in range(degree) for span in pieces(placement, degree, rank))


def original(placement: Placement, degree: int, start: int, stop: int) -> tuple[Span, ...]:
    """Where the stored positions from `start` to `stop` are in the dim.

    >>> original(Placement.parse("S0[4,2]"), 2, 1, 4)
    ((1, 2), (4, 5), (2, 3))
    """
    found: list[Span] = []
    position = 0
    for first, last in stored_order(placement, degree):
        begin, end = max(start - position, 0), min(stop - position, last - first)
        if begin < end:
            found.append((first + begin, first + end))
        position += last - first
    return _joined(found)


def check_splits(name: str, shape: Sequence[int], placement: Placement, degree: int) -> None:
    """Refuse a placement that the ranks of an axis cannot hold of a parameter or buffer of this shape.

    Raises:
        PlanError: it is neither whole nor split, of another size, or `degree` does not divide its parts.
    """
    if placement.kind not in ("R", "Q", "S"):
        raise PlanError(f"the plan gives {name} the placement {placement}; it must be whole or split: plan again")
    if not placement.is_split:
        return
    if placement.dim >= len(shape) or total_size(placement) != shape[placement.dim]:
        raise PlanError(f"the plan splits {name} by {placement}, and its shape is {list(shape)}; plan again")
    if not divides(degree, placement):
        raise PlanError(
            f"the plan splits {name} by {placement} over {degree} ranks, which do not divide it; plan again"
        )


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Neighbours that touch as one."""
    found: list[Span] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return tuple(found)
