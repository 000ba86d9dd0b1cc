"""How far measurements are from predictions: the interval of a step and of a peak, and which plans are tied.

`profiles/published/residuals.toml` has quantiles of ln(measured / predicted), written by
`python -m benchmarks.residuals`: of published runs whose own source took no part in any constant. What is off in the
same way in two plans for one model, cluster and batch cancels in their difference, so that of a difference is smaller
than that of a step. Where a step rests on measured times of the machine itself, other quantiles hold; in between,
logarithms are mixed by the measured share. Peaks are predicted from the graph alone, and measured in another way on a
CPU than on a GPU.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

from planner.errors import ProfileError
from planner.plan import Prediction
from planner.resources import profiles_path

# A difference is that of the steps of two plans that differ in nothing else.
Quantity = Literal["step", "difference", "memory"]
# What quantiles are of: predictions by rates, and by measured times; peaks of a GPU, and of a CPU.
_OF: Mapping[Quantity, tuple[str, str]] = {
    "step": ("published", "measured"), "difference": ("published", "measured"), "memory": ("published", "cpu"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """Quantiles of ln(measured / predicted): of 10 measurements one is below `low`, one above `high`.

    `rows` and `sources` are how many are behind it; 0: it is an estimate, which `source` gives reasons for.
    """

    low: float
    median: float
    high: float
    rows: int
    sources: int
    source: str

    def around(self, predicted: float) -> tuple[float, float]:
        """Where 8 of 10 measurements are.

        >>> halves = Residuals(low=-math.log(2), median=0.0, high=math.log(2), rows=0, sources=0, source="an example")
        >>> tuple(round(end, 6) for end in halves.around(3.0))
        (1.5, 6.0)
        """
        return predicted * math.exp(self.low), predicted * math.exp(self.high)


def residuals(quantity: Quantity, share: float = 0.0) -> Residuals:
    """Those of a prediction of which this share rests on rows of a profile; of a peak on a CPU with 1.

    Raises:
        ProfileError: the installation's data is damaged.
    """
    published, measured = (_table()[quantity, basis] for basis in _OF[quantity])
    if share <= 0:
        return published
    if share >= 1:
        return measured

    def mixed(one: float, other: float) -> float:
        return (1 - share) * one + share * other

    return Residuals(
        low=mixed(published.low, measured.low),
        median=mixed(published.median, measured.median),
        high=mixed(published.high, measured.high),
        rows=published.rows + measured.rows,
        sources=published.sources + measured.sources,
        source=f"{published.source}; {measured.source}",
    )


def with_interval(prediction: Prediction, *, on_cpu: bool = False) -> Prediction:
    """A prediction that says where 8 of 10 measurements of its step and of its fullest stage are."""
    step_low, step_high = residuals("step", prediction.measured_share).around(prediction.step_seconds)
    peak_low, peak_high = residuals("memory", float(on_cpu)).around(max(prediction.peak_bytes))
    return replace(
        prediction,
        step_seconds_low=step_low,
        step_seconds_high=step_high,
        peak_bytes_low=peak_low,
        peak_bytes_high=peak_high,
    )


def are_tied(one: Prediction, other: Prediction, weights: tuple[float, float] = (1.0, 1.0)) -> bool:
    """Whether two plans for one model, cluster and batch differ by less than such differences are known.

    Steps count times `weights`: where plans are ranked by device-seconds, the devices of each.
    """
    first, second = weights[0] * one.step_seconds, weights[1] * other.step_seconds
    if not first > 0 or not second > 0:
        return first == second
    return abs(math.log(second / first)) < known_difference(one, other)


def known_difference(one: Prediction, other: Prediction) -> float:
    """The ln(step / step) from which on the one that is predicted to be slower is slower in 9 of 10 measurements."""
    return residuals("difference", min(one.measured_share, other.measured_share)).high


@cache
def _table() -> Mapping[tuple[str, str], Residuals]:
    path = profiles_path() / "published" / "residuals.toml"
    try:
        text = tomllib.loads(path.read_text(encoding="utf-8"))
        return {
            (quantity, basis): _row(text[quantity][basis], f"{quantity}.{basis}")
            for quantity, bases in _OF.items()
            for basis in bases
        }
    except (OSError, ValueError, KeyError) as error:
        raise ProfileError(f"{path} does not say how far predictions are off ({error}); install again") from None


def _row(text: Mapping[str, Any], where: str) -> Residuals:
    names = {item.name for item in fields(Residuals)}
    if set(text) != names:
        raise ProfileError(f"profiles/published/residuals.toml: {where} must have {', '.join(sorted(names))}")
    row = Residuals(**text)
    if not -10 < row.low <= row.median <= row.high < 10:
        raise ProfileError(f"profiles/published/residuals.toml: {where} must have low <= median <= high")
    return row
