"""How far predictions are from measurements, and whether they rank plans as the measurements do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_FOR_TAU = 5  # rows of a group: fewer say little about an order
LEAST_FOR_REGRET = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Errors of predicted / measured - 1, as fractions; None where nothing was measured.

    `bias` is the median signed error. `tau` is the mean Kendall's tau-b over groups of at least five rows that differ
    in the plan only, `regret` the mean over groups of how much more the row takes that is predicted best than the best.
    """

    count: int = 0
    median_ape: float | None = None
    mean_ape: float | None = None
    p90_ape: float | None = None
    bias: float | None = None
    tau: float | None = None
    regret: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One prediction beside its measurement; equal groups differ in the plan only."""

    group: str
    plan: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1


def accuracy(pairs: Sequence[Pair]) -> Accuracy:
    """All figures of some rows.

    >>> two = [
    ...     Pair(group="a", plan="dp", predicted=1.1, measured=1.0),
    ...     Pair(group="a", plan="tp", predicted=1.4, measured=2.0),
    ... ]
    >>> found = accuracy(two)
    >>> found.count, round(found.median_ape, 3), round(found.bias, 3), found.tau, found.regret
    (2, 0.2, -0.1, None, 0.0)
    """
    if not pairs:
        return Accuracy()
    signed = [pair.error for pair in pairs]
    errors = [abs(error) for error in signed]
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.group, []).append(pair)
    taus = [
        tau
        for members in groups.values()
        if len(members) >= LEAST_FOR_TAU
        and (tau := kendall_tau([p.predicted for p in members], [p.measured for p in members])) is not None
    ]
    regrets = [
        regret(members) for members in groups.values() if len({pair.plan for pair in members}) >= LEAST_FOR_REGRET
    ]
    return Accuracy(
        count=len(pairs),
        median_ape=quantile(errors, 0.5),
        mean_ape=math.fsum(errors) / len(errors),
        p90_ape=quantile(errors, 0.9),
        bias=quantile(signed, 0.5),
        tau=math.fsum(taus) / len(taus) if taus else None,
        regret=math.fsum(regrets) / len(regrets) if regrets else None,
    )


def quantile(values: Sequence[float], share: float) -> float:
    """With a line between the two nearest.

    >>> quantile([4.0, 1.0, 2.0], 0.5), quantile([0.0, 10.0], 0.9)
    (2.0, 9.0)
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Kendall's tau-b: pairs in the same order less those in the opposite, with ties taken out of both.

    Source: Kendall 1945, "The treatment of ties in ranking problems". None where all of one are tied.

    >>> kendall_tau([1, 2, 3], [1, 3, 2]), kendall_tau([1, 2, 3], [3, 2, 1]), kendall_tau([1, 1], [1, 2])
    (0.3333333333333333, -1.0, None)
    """
    same = opposite = ties_first = ties_second = 0
    for i in range(len(first)):
        for j in range(i):
            a, b = first[i] - first[j], second[i] - second[j]
            ties_first += a == 0
            ties_second += b == 0
            same += a * b > 0
            opposite += a * b < 0
    pairs = len(first) * (len(first) - 1) // 2
    scale = math.sqrt((pairs - ties_first) * (pairs - ties_second))
    return (same - opposite) / scale if scale else None


def regret(members: Sequence[Pair]) -> float:
    """What is lost by taking the plan that is predicted best: its measurement over the best one, less 1.

    A plan that was measured several times has the median of its times. Of plans that are predicted to be equal the
    first one is taken.

    >>> from dataclasses import replace
    >>> once = Pair(group="a", plan="dp", predicted=1.0, measured=1.5)
    >>> tp = replace(once, plan="tp", predicted=1.2, measured=1.0)
    >>> round(regret([once, replace(once, measured=1.1), tp]), 6)
    0.3
    """
    plans: dict[str, list[Pair]] = {}
    for pair in members:
        plans.setdefault(pair.plan, []).append(pair)
    took = [(pairs[0].predicted, quantile([pair.measured for pair in pairs], 0.5)) for pairs in plans.values()]
    chosen = min(took, key=lambda each: each[0])
    return chosen[1] / min(measured for _, measured in took) - 1
