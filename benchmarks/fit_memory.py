"""The constants of memory that no document states, read off published runs, and what they are worth on other sources.

    python -m benchmarks.fit_memory [FILE.csv...]

Prints what `profiles/published/memory.toml` should say: the work spaces that libraries allocate through torch (what
Megatron-LM's golden values have allocated between steps, less the state of the parameters), and the part of what torch
reserves that is not in use at the peak (runs that print both). Then, for each source, the error of predicted memory
with these constants and without those that were read off the source itself.
"""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from planner.units import GB
from planner.validate.cases import Case, case_of
from planner.validate.metrics import quantile
from planner.validate.price import Prediction, predict
from planner.validate.rows import RefusedError, Row, read_rows

PUBLISHED = Path(__file__).parent / "published" / "training.csv"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A row with measured memory, its case and its prediction."""

    row: Row
    case: Case
    found: Prediction

    def error(self, found: Prediction | None = None) -> float:
        """Predicted over measured, less 1."""
        measured = self.row.peak_memory_bytes
        assert measured
        return (found or self.found).memory_bytes(self.row.memory_kind) / measured - 1


def measured(paths: Sequence[str | Path]) -> list[Measured]:
    """All rows of the files that have memory and can be priced."""
    result = []
    for row in read_rows(paths):
        if not row.peak_memory_bytes:
            continue
        try:
            case = case_of(row)
            result.append(Measured(row=row, case=case, found=predict(case)))
        except RefusedError:
            continue
    return result


def workspaces(rows: Sequence[Measured]) -> dict[str, float]:
    """Median bytes allocated between steps beyond the state of parameters, before Hopper and from Hopper on."""
    found: dict[str, list[float]] = {"workspace_bytes": [], "hopper_workspace_bytes": []}
    for each in rows:
        stated = each.row.note(r"steady allocated ([\d.]+) GB")
        if not stated or each.case.spec.experts or not each.row.memory_is_of_last_rank:
            continue
        memory = each.found.memory
        state = memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes
        hopper = float(each.case.cluster.device.compute_capability) >= 9
        found["hopper_workspace_bytes" if hopper else "workspace_bytes"].append(float(stated[1]) * GB - state)
    return {name: quantile(values, 0.5) for name, values in found.items() if values}


def reserved_fractions(rows: Sequence[Measured]) -> list[float]:
    """Of what torch had reserved at its peak, what it had not allocated at its own."""
    result = []
    for each in rows:
        for allocated, reserved in re.findall(r"peak allocated (\d+) MB reserved (\d+) MB", each.row.notes):
            result.append(1 - float(allocated) / float(reserved))
        stated = each.row.note(r"max reserved ([\d.]+) GiB")
        if stated and each.row.peak_mem_gb:
            result.append(1 - each.row.peak_mem_gb / float(stated[1]))
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the constants, print them and the errors of every source."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("files", nargs="*", default=[PUBLISHED], help="in the format of benchmarks/published")
    rows = measured(parser.parse_args(arguments).files)
    for name, value in workspaces(rows).items():
        print(f"{name} = {round(value / 1e6)}_000_000")
    fractions = reserved_fractions(rows)
    if fractions:
        print(f"reserved_fraction = {quantile(fractions, 0.5):.3f}  # median of {len(fractions)} stages")
    print(f"{'source':16} {'rows':>5} {'median':>7} {'mean':>7} {'bias':>7} {'without its own constants':>26}")
    everything, others = [], []
    for prefix in dict.fromkeys(each.row.prefix for each in rows):
        own = [each for each in rows if each.row.prefix == prefix]
        signed = [each.error() for each in own]
        errors = [abs(error) for error in signed]
        without = [abs(each.error(without_own(each))) for each in own]
        everything += errors
        others += without
        print(
            f"{prefix:16} {len(own):5} {quantile(errors, 0.5):7.1%} {sum(errors) / len(errors):7.1%} "
            f"{quantile(signed, 0.5):+7.1%} {quantile(without, 0.5):26.1%}"
        )
    print(f"{'all':16} {len(rows):5} {quantile(everything, 0.5):7.1%} {sum(everything) / len(everything):7.1%} "
          f"{'':7} {quantile(others, 0.5):26.1%}")  # fmt: skip
    return 0


def without_own(each: Measured) -> Prediction:
    """The prediction without constants that its own source was needed for: no second one says anything of them."""
    changed = replace(each.case.conventions, workspace_bytes=0.0, hopper_workspace_bytes=0.0, loads_whole=False)
    return predict(replace(each.case, conventions=changed))


if __name__ == "__main__":
    raise SystemExit(main())
