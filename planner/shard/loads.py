"""How evenly the ranks of an axis are loaded by their experts, and which experts to put together."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.errors import PlanError


@dataclass(frozen=True, slots=True)
class ExpertLoads:
    """The load of the busiest rank in units of the mean: 1 is balanced, the number of ranks the worst.

    `imbalance` is with the experts where they are, each rank having a run of them; `balanced_imbalance` with those of
    `order` one after the other.
    """

    imbalance: float
    balanced_imbalance: float
    order: tuple[int, ...]


def expert_loads(tokens_per_expert: Sequence[int], degree: int) -> ExpertLoads:
    """What measured numbers of tokens mean for `degree` ranks, each of which has as many experts.

    The order is the greedy one (longest processing time first): the busiest expert goes to the least loaded rank that
    has room. `imbalance` is for `Prices.expert_imbalance` and `planner.trace.priced`.

    >>> expert_loads([8, 6, 1, 1], 2)
    ExpertLoads(imbalance=1.75, balanced_imbalance=1.125, order=(0, 3, 1, 2))

    Raises:
        PlanError: `degree` does not divide the experts, or they have no tokens.
    """
    count, total = len(tokens_per_expert), sum(tokens_per_expert)
    if degree < 1 or count % degree or count == 0:
        raise PlanError(f"{count} experts cannot be put on {degree} ranks, as many on each")
    if total <= 0 or min(tokens_per_expert) < 0:
        raise PlanError(f"loads of experts must be numbers of tokens, some of them above 0; got {tokens_per_expert}")
    room = count // degree
    ranks: list[list[int]] = [[] for _ in range(degree)]
    for expert in sorted(range(count), key=lambda e: -tokens_per_expert[e]):
        free = [rank for rank in ranks if len(rank) < room]
        min(free, key=lambda rank: sum(tokens_per_expert[e] for e in rank)).append(expert)
    order = tuple(expert for rank in ranks for expert in sorted(rank))

    def imbalance(experts: Sequence[int]) -> float:
        runs = (experts[start : start + room] for start in range(0, count, room))
        return max(sum(tokens_per_expert[e] for e in run) for run in runs) * degree / total

    return ExpertLoads(imbalance(range(count)), imbalance(order), order)
