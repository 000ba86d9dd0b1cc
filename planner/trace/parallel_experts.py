"""Products of rows with the matrices of experts that are spread over the ranks of an axis.

Rank r has the r-th run of experts. Tokens are either whole on every rank, which then cuts out the rows of its experts
(masked), or each rank has its own, whose rows are sent to the ranks that have their experts, and come back
(dispatched). Rows are sorted by expert before; `ends` [experts] is where the run of each ends.

How many rows an expert gets is only known on the device: the host waits for these numbers in every product.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from planner.trace.grouped import grouped_mm
from planner.trace.parallel import Communicator, Pretended, linear_map, operator


@operator("masked_experts_mm")
def masked_experts_mm(
    c: Communicator,
    rows: torch.Tensor,
    matrices: torch.Tensor,
    ends: torch.Tensor,
    enters: bool,
    leaves: bool,
    num_rows: int,
) -> torch.Tensor:
    """Rows [tokens, in] times `matrices` [experts of this rank, in, out], where every rank has all tokens.

    Where the order of experts `enters` here, `rows` are those of all experts, else those of this rank's. Where it
    `leaves`, the result has `num_rows` rows, zero but for this rank's.
    """
    start, stop, own_ends = _own_rows(c, ends, matrices.shape[0], num_rows)
    if enters:
        rows = rows.narrow(0, start, stop - start)
    product = _product(rows, matrices, own_ends)
    return F.pad(product, (0, 0, start, num_rows - stop)) if leaves else product


@operator("dispatched_experts_mm")
def dispatched_experts_mm(
    c: Communicator,
    rows: torch.Tensor,
    matrices: torch.Tensor,
    ends: torch.Tensor,
    enters: bool,
    leaves: bool,
    num_rows: int,
    order: Sequence[int] = (),
) -> torch.Tensor:
    """Rows [tokens, in] times `matrices` [experts of this rank, in, out], where every rank has its own tokens.

    Ranks have experts in `order` one after the other, by default in that of the rows. `ends` counts the rows of this
    rank's tokens, `num_rows` of them. Where they `enter` here, `rows` are those, and are sent to their experts, else
    those that came here. Where they `leave`, they go back to where they came from.
    """
    routes = _routes(c, ends, matrices.shape[0], num_rows, order)
    if enters:
        sent = rows.narrow(0, 0, sum(routes.sends))
        if order:
            sent = _reordered(sent, *_by_owner(c, ends, order, sum(routes.sends)))
        came = linear_map(
            sent,
            lambda x: c.all_to_all_rows(x, routes.sends, routes.receives),
            lambda g: c.all_to_all_rows(g, routes.receives, routes.sends),
        )
        rows = _reordered(came, routes.by_expert, routes.by_rank)
    product = _product(rows, matrices, routes.ends)
    if not leaves:
        return product
    back = linear_map(
        _reordered(product, routes.by_rank, routes.by_expert),
        lambda x: c.all_to_all_rows(x, routes.receives, routes.sends),
        lambda g: c.all_to_all_rows(g, routes.sends, routes.receives),
    )
    if order:
        by_owner, by_expert = _by_owner(c, ends, order, sum(routes.sends))
        back = _reordered(back, by_expert, by_owner)
    rest = num_rows - sum(routes.sends)
    return F.pad(back, (0, 0, 0, rest)) if rest else back


@operator("rows_of_experts")
def rows_of_experts(
    c: Communicator,
    table: torch.Tensor,
    keys: torch.Tensor,
    is_dispatched: bool,
    leaves: bool,
    order: Sequence[int] = (),
) -> torch.Tensor:
    """A row of `table` [experts of this rank, ...] for every row of its experts: their biases.

    `keys` [tokens] are the experts of rows in order, of all tokens, or of this rank's where rows are dispatched. Where
    the order `leaves`, the result has as many rows as `keys`, zero but for this rank's.
    """
    own, num_rows = table.shape[0], keys.shape[0]
    keys = keys.to(torch.int64)
    counts = keys.new_zeros(own * c.size).scatter_add_(0, keys, torch.ones_like(keys))
    if is_dispatched:
        counts = _in_order(counts, order)
        mine = c.all_to_all(counts.view(c.size, own)).sum(0)
        start, stop = 0, _nominal(num_rows, c) if isinstance(c, Pretended) else int(mine.sum())
    else:
        mine = counts.narrow(0, c.rank * own, own)
        start, stop, _ = _own_rows(c, counts.cumsum(0), own, num_rows)
    made = table.repeat_interleave(mine, 0, output_size=stop - start)
    return F.pad(made, (*(0, 0) * (made.ndim - 1), start, num_rows - stop)) if leaves else made


@operator("inverse_order")
def inverse_order(c: Communicator, places: torch.Tensor) -> torch.Tensor:
    """Where each row is, of a permutation that says which row is at each place: of this rank's rows alone."""
    made: torch.Tensor = put_inverse_order(c, torch.empty_like(places), places)
    return made


@operator("put_inverse_order")
def put_inverse_order(c: Communicator, into: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The same, written into a tensor."""
    numbers = torch.arange(places.shape[0], dtype=into.dtype, device=into.device)
    into.scatter_(0, places, numbers)
    return into


@dataclass(frozen=True, slots=True)
class _Routes:
    """Which rows go where. What came is ordered by rank, then by expert; products want it by expert."""

    sends: Sequence[int]  # rows to each rank
    receives: Sequence[int]  # rows from each rank
    ends: torch.Tensor  # [experts of this rank] of what came
    by_expert: torch.Tensor  # [rows] places, by rank, of the rows by expert
    by_rank: torch.Tensor  # the inverse


def _in_order(counts: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Numbers of rows by expert, in the order in which ranks have experts."""
    return counts[torch.tensor(order, device=counts.device)] if order else counts


def _by_owner(
    c: Communicator, ends: torch.Tensor, order: Sequence[int], num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of rows by expert when they are by owner, and the inverse: runs of experts in another order."""
    counts = ends.diff(prepend=ends.new_zeros(1)).to(torch.int64)
    runs, starts = _in_order(counts, order), _in_order(ends.to(torch.int64) - counts, order)
    before = runs.cumsum(0) - runs
    shifts = (starts - before).repeat_interleave(runs, output_size=num_rows)
    by_owner = torch.arange(num_rows, device=ends.device) + shifts
    return by_owner, inverse_order(c, by_owner)


def _routes(c: Communicator, ends: torch.Tensor, own: int, num_rows: int, order: Sequence[int] = ()) -> _Routes:
    """Ranks tell each other how many rows they have for each expert."""
    counts = _in_order(ends.diff(prepend=ends.new_zeros(1)).to(torch.int64), order)
    sent = counts.view(c.size, own)
    received = c.all_to_all(sent)  # [from rank, own expert]
    if isinstance(c, Pretended):
        sends, receives = [num_rows], [_nominal(num_rows, c)]
    else:
        sends, receives = torch.stack((sent.sum(1), received.sum(1))).tolist()
    experts = torch.arange(own, device=ends.device).repeat(c.size)
    by_expert = experts.repeat_interleave(received.flatten(), output_size=sum(receives)).argsort(stable=True)
    return _Routes(
        sends=sends,
        receives=receives,
        ends=received.sum(0).cumsum(0).to(torch.int32),
        by_expert=by_expert,
        by_rank=inverse_order(c, by_expert),
    )


def _own_rows(c: Communicator, ends: torch.Tensor, own: int, num_rows: int) -> tuple[int, int, torch.Tensor]:
    """First and last + 1 of the rows of this rank's experts, and where the run of each ends, counted from the first."""
    first = c.rank * own
    own_ends = ends.narrow(0, first, own)
    if isinstance(c, Pretended):
        return 0, _nominal(num_rows, c, c.size), own_ends
    before = ends.narrow(0, first - 1, 1) if first else ends.new_zeros(1)
    start, stop = torch.cat((before, own_ends[-1:])).tolist()
    return start, stop, own_ends - before


def _nominal(num_rows: int, c: Pretended, ranks: int = 1) -> int:
    """The rows of the rank that counts, where the values that tell are not there; never more than there are."""
    return min(math.ceil(num_rows / ranks * c.expert_imbalance), num_rows * c.size // ranks)


def _reordered(x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """`x[order]` along dim 0, a permutation."""
    return linear_map(x, lambda v: v.index_select(0, order), lambda g: g.index_select(0, inverse))


def _product(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Kernels want a row."""
    return grouped_mm(rows, matrices, ends) if rows.shape[0] else rows @ matrices[0]
