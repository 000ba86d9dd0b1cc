"""How far predictions are from published runs that had no part in them: the intervals of a plan.

    python -m benchmarks.residuals [TRAINING.csv] [--write]
    python -m benchmarks.residuals --compared FILE.json... [--write]

Quantiles of ln(measured / predicted), every source with the same weight, by constants that the source itself had no
part in (`benchmarks.fit`, `benchmarks.fit_memory`): of a step; of the difference of two steps of one source, for one
model, cluster and global batch, whose predictions are within a factor of 1.5 of each other; of the peak that torch
allocated. Also printed is how often the measured order of two such runs is the predicted one, by how far apart the
predictions are. With --write the quantiles go to profiles/published/residuals.toml. What was not looked at stays there.

With --compared the same of what `benchmarks.compare_plans --json` measured on a machine, by its own profile: every
model is a source, all plans of a file are one group.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import fit, fit_memory
from planner.resources import profiles_path

QUANTILES = (0.1, 0.5, 0.9)
COMPARABLE = 1.5  # plans that are further apart are never in question
APART = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, math.inf)  # of |ln(predicted / predicted)|
COMMAND = "`python -m benchmarks.residuals`"

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A measured step beside its prediction by constants of the other sources; equal groups differ in the plan only."""

    source: str
    group: str
    predicted_seconds: float
    measured_seconds: float

    @property
    def residual(self) -> float:
        """ln(measured / predicted)."""
        return math.log(self.measured_seconds / self.predicted_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two steps of a group; the sign is that of one order, which is arbitrary."""

    source: str
    group: str
    predicted: float  # ln(step / step)
    measured: float

    @property
    def residual(self) -> float:
        """What the difference is off."""
        return self.measured - self.predicted


def left_out(model: fit.Model, found: fit.Fit, chosen: Sequence[fit.Run], runs: Sequence[fit.Run]) -> list[Step]:
    """Every run, predicted by a fit without its source."""
    sources = np.array([run.case.row.prefix for run in chosen])
    names = list(dict.fromkeys(run.case.row.prefix for run in runs))
    fits = fit.each_without(model, found, chosen, [sources != name for name in names])
    constants = dict(zip(names, fits, strict=True))
    return [
        Step(
            source=run.case.row.prefix,
            group=run.case.question,
            predicted_seconds=model.seconds(run, constants[run.case.row.prefix]),
            measured_seconds=run.seconds,
        )
        for run in runs
    ]


def differences(steps: Sequence[Step]) -> list[Difference]:
    """All pairs of the groups."""
    groups: dict[str, list[Step]] = {}
    for step in steps:
        groups.setdefault(step.group, []).append(step)
    return [
        Difference(
            source=one.source,
            group=one.group,
            predicted=math.log(one.predicted_seconds / other.predicted_seconds),
            measured=math.log(one.measured_seconds / other.measured_seconds),
        )
        for members in groups.values()
        for one, other in combinations(members, 2)
    ]


def quantiles(
    values: Sequence[float],
    sources: Sequence[str],
    groups: Sequence[str] | None = None,
    *,
    shares: Sequence[float] = QUANTILES,
) -> list[float]:
    """With a line between the two nearest; all sources weigh the same, and all groups of a source.

    >>> quantiles([0.0, 0.0, 0.0, 1.0], ["a", "a", "a", "b"], shares=[0.5])
    [0.25]
    """
    members = Counter(groups or sources)
    groups_of = Counter(source for source, _ in set(zip(sources, groups or sources, strict=True)))
    weight = np.array([1 / members[g] / groups_of[s] for s, g in zip(sources, groups or sources, strict=True)])
    weight /= weight.sum()
    order = np.argsort(np.array(values), kind="stable")
    middle = np.cumsum(weight[order]) - weight[order] / 2
    return [float(x) for x in np.interp(shares, middle, np.array(values)[order])]


def table_of(
    key: str, values: Sequence[float], sources: Sequence[str], words: str, groups: Sequence[str] | None = None
) -> str:
    """A table of the file."""
    low, median, high = quantiles(values, sources, groups)
    names = ", ".join(sorted(set(sources)))
    return "\n".join(
        [
            f"[{key}]",
            f"low = {low:.4f}",
            f"median = {median:.4f}",
            f"high = {high:.4f}",
            f"rows = {len(values)}",
            f"sources = {len(set(sources))}",
            f'source = "{words} ({names})"',
        ]
    )


def tables(steps: Sequence[Step], memory: Sequence[tuple[str, float]]) -> dict[str, str]:
    """What the file says of published runs, by key. `memory` are sources and ln(measured / predicted)."""
    return _tables(
        {
            "step.published": f"{COMMAND}: steps, each source left out of the fit",
            "difference.published": f"{COMMAND}: pairs of steps, both orders, of one model, cluster and batch (all "
            f"such groups alike), predicted within a factor of {COMPARABLE:g}, each source left out of the fit",
            "memory.published": f"{COMMAND}: peaks that torch allocated, without constants that were read off the "
            "source",
        },
        [(step.source, step.residual) for step in steps], steps, memory,
    )  # fmt: skip


def _tables(
    words: Mapping[str, str], residuals: Sequence[tuple[str, float]], rivals: Sequence[Step],
    memory: Sequence[tuple[str, float]],
) -> dict[str, str]:  # fmt: skip
    """Tables of steps, of their differences and of memory, by the keys of `words`, which are in this order."""
    step, difference, peak = words
    return {
        step: table_of(step, [value for _, value in residuals], [source for source, _ in residuals], words[step]),
        difference: difference_table(difference, rivals, words[difference]),
        peak: table_of(peak, [value for _, value in memory], [source for source, _ in memory], words[peak]),
    }


def difference_table(key: str, steps: Sequence[Step], words: str) -> str:
    """Of the pairs of the groups that are near each other."""
    near = [pair for pair in differences(steps) if abs(pair.predicted) <= math.log(COMPARABLE)]
    both_orders = [sign * pair.residual for sign in (1, -1) for pair in near]
    text = table_of(key, both_orders, [pair.source for pair in near] * 2, words, [pair.group for pair in near] * 2)
    return text.replace(f"rows = {len(both_orders)}", f"rows = {len(near)}")


def compared_tables(paths: Sequence[Path]) -> dict[str, str]:
    """What the file says of plans that were run on a machine, by key.

    A step is as the clock had it, for so a user sees it; plans are compared at one pace.
    """
    command = "`python -m benchmarks.compare_plans`, read by `python -m benchmarks.residuals --compared`"
    residuals: list[tuple[str, float]] = []
    steps: list[Step] = []
    memory: list[tuple[str, float]] = []
    for path in paths:
        found = json.loads(path.read_text(encoding="utf-8"))
        model = found["model"]
        for row in found["plans"]:
            if not row["measured_seconds"]:
                continue
            predicted = row["predicted_seconds"]
            residuals.append((model, math.log(row["clock_seconds"] / predicted)))
            steps.append(
                Step(
                    source=model, group=path.stem, predicted_seconds=predicted, measured_seconds=row["measured_seconds"]
                )
            )
            memory += [(model, -math.log1p(error)) for error in row["memory_errors"]]
    return _tables(
        {
            "step.measured": f"{command}: steps on a CPU by the clock, predicted by its own profile",
            "difference.measured": f"{command}: pairs of steps of one model at one pace, both orders, predicted within "
            f"a factor of {COMPARABLE:g}",
            "memory.cpu": f"{command}: peaks that torch allocated on each rank",
        },
        residuals, steps, memory,
    )  # fmt: skip


def measured_peaks(path: Path) -> list[tuple[str, float]]:
    """Source and ln(measured / predicted) of every allocated peak."""
    return [
        (each.row.prefix, -math.log1p(each.error(fit_memory.without_own(each))))
        for each in fit_memory.measured([path])
        if each.row.memory_kind == "allocated"
    ]


def report(steps: Sequence[Step], memory: Sequence[tuple[str, float]]) -> None:
    """By source, and how often an order was right."""
    print(f"{'source':16s}{'steps':>6s}{'10 %':>8s}{'50 %':>8s}{'90 %':>8s}")
    for name in dict.fromkeys(step.source for step in steps):
        own = [step.residual for step in steps if step.source == name]
        print(f"{name:16s}{len(own):6d}" + "".join(f"{x:+8.3f}" for x in np.quantile(own, QUANTILES)))
    for name in dict.fromkeys(source for source, _ in memory):
        own = [value for source, value in memory if source == name]
        print(f"{name:9s} memory{len(own):6d}" + "".join(f"{x:+8.3f}" for x in np.quantile(own, QUANTILES)))
    pairs = differences(steps)
    for low, high in pairwise(APART):
        right: dict[str, list[bool]] = {}
        for pair in pairs:
            if pair.predicted and low <= abs(pair.predicted) < high:
                right.setdefault(pair.source, []).append((pair.predicted > 0) == (pair.measured > 0))
        if right:
            mean = np.mean([np.mean(each) for each in right.values()])
            count = sum(map(len, right.values()))
            upto = f" to {high:.0%}" if math.isfinite(high) else " and more"
            print(f"predictions {low:.0%}{upto} apart: order right in {mean:.0%} of {count} pairs")


def write(found: dict[str, str], path: Path) -> None:
    """Other tables, and the lines above the first one, stay as they are."""
    head, *parts = path.read_text(encoding="utf-8").split("\n[")
    kept = {part.partition("]")[0]: f"[{part.rstrip()}" for part in parts}
    kept |= found
    path.write_text("\n\n".join([head.rstrip(), *kept.values()]) + "\n", encoding="utf-8")


def main() -> None:
    """Fit, leave out, print and perhaps write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("training", nargs="?", type=Path, default=fit.TRAINING)
    parser.add_argument("--compared", nargs="+", type=Path, metavar="FILE.json", help="of benchmarks.compare_plans")
    parser.add_argument("--write", action="store_true", help="write profiles/published/residuals.toml")
    given = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if given.compared:
        told(compared_tables(given.compared), write_it=given.write)
        return
    runs = fit.runs_of(given.training, say)
    model = fit.Model(fit.constants())
    chosen = fit.taking_part(runs)
    judged = [run for run in runs if run.case.row.prefix not in fit.BESIDE]
    steps = left_out(model, fit.fitted(model, chosen, say), chosen, judged)
    memory = measured_peaks(given.training)
    report(steps, memory)
    told(tables(steps, memory), write_it=given.write)


def told(found: dict[str, str], *, write_it: bool) -> None:
    """Print, and perhaps write."""
    print("\n\n".join(found.values()))
    if write_it:
        write(found, profiles_path() / "published" / "residuals.toml")


if __name__ == "__main__":
    main()
