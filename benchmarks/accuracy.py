"""The accuracy section of the README: every published row, priced, by source. Writes between two markers.

python -m benchmarks.accuracy            # price all rows, write the README
python -m benchmarks.accuracy --check    # print the table only
"""

import sys
import time
from pathlib import Path

from planner.report.accuracy import accuracy_cells
from planner.validate import validate

ROOT = Path(__file__).parent.parent
FILES = ("training.csv", "oom_outcomes.csv")
BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"
HEAD = (
    "source", "tier", "rows", "priced", "time: median %", "mean %", "p90 %", "bias %", "tau", "regret %",
    "memory: median %", "p90 %", "bias %", "OOM right",
)  # fmt: skip


def section(data):
    lines = [f"| {' | '.join(HEAD)} |", f"|---|---|{'---:|' * (len(HEAD) - 2)}"]
    for name, part in [*data["by_source"].items(), ("all", data)]:
        lines.append(f"| {name} | {' | '.join(accuracy_cells(part))} |")
    reasons = "; ".join(f"{reason} ({count})" for reason, count in data["refused"]["reasons"].items())
    return "\n".join([*lines, "", f"Rows without a price, and why: {reasons}."])


def written(text, body):
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"README.md must hold {BEGIN} and {END} once")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{body}\n{END}{rest.split(END)[1]}"


def main():
    start = time.perf_counter()
    found = validate([ROOT / "benchmarks" / "published" / name for name in FILES])
    body = section(found.to_dict())
    print(body)
    print(f"\n{len(found.results)} rows in {time.perf_counter() - start:.0f} s")
    if "--check" not in sys.argv[1:]:
        readme = ROOT / "README.md"
        readme.write_text(written(readme.read_text(encoding="utf-8"), body), encoding="utf-8")


if __name__ == "__main__":
    main()
