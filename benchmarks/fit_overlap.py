"""What computing and moving bytes do to one another while both run, fitted on published measurements.

    python -m benchmarks.fit_overlap [INTERFERENCE.csv] [--write]

The data: on 8 A100-40GB, V100-16GB, L4 and A10G each, and on 2 and 4 nodes of them, the time of a matrix product, an
all-gather, and copies to and from host memory, alone and at once. For each pair of a product and a transfer two models
are fitted by the least mean |log error|: one factor on the longer of the two, and the two factors of
`planner.collectives.overlapped_seconds`, which slow each of them down until the shorter is done. Printed are both
errors, and how well the two factors that other settings of the same GPU give predict a setting they have not seen.
With --write the factors, and the host's bandwidth, go to profiles/devices/*.toml.
"""

import argparse
import csv
import itertools
import math
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.cluster import Slowdown
from planner.collectives import overlapped_seconds

FOLDER = Path(__file__).resolve().parent
DEVICES = FOLDER.parent / "profiles" / "devices"
SOURCE = "Dazz993/Mist interference data"

# Which GPU's measurements speak for which device, inside a node and (if on another link) as PCIe card; why.
MEASURED: Mapping[str, str] = {
    "a100-40gb": "A100-SXM4-40GB", "v100-16gb": "V100-SXM2-16GB", "l4": "L4", "a10g": "A10G",
}  # fmt: skip
BORROWED: Mapping[str, tuple[str, str]] = {
    "a100-80gb": ("A100-SXM4-40GB", "the same chip"),
    "a100-80gb-pcie": ("A100-SXM4-40GB", "the same chip"),
    "v100-32gb": ("V100-SXM2-16GB", "the same chip"),
    "h100-80gb": ("A100-SXM4-40GB", "none published for Hopper"),
    "h100-80gb-pcie": ("A100-SXM4-40GB", "none published for Hopper"),
    "h200": ("A100-SXM4-40GB", "none published for Hopper"),
    "b200": ("A100-SXM4-40GB", "none published for Blackwell"),
    "rtx3090": ("A10G", "a chip of the same family"),
    "rtx4090": ("A10G", "none published for RTX 4090"),
    "t4": ("A10G", "none published for T4"),
}
NVLINK = ("A100-SXM4-40GB", "V100-SXM2-16GB")


@dataclass(frozen=True, slots=True)
class Setting:
    """One machine of the data."""

    gpu: str
    nodes: int
    ranks_per_node: int

    @property
    def kind(self) -> str:
        """The link that its all-gathers are slowest on; all its networks are taken to be Ethernet."""
        if self.nodes > 1:
            return "ethernet"
        if self.gpu in NVLINK:
            return "nvlink"
        return "pcie_pair" if self.ranks_per_node == 2 else "pcie"

    @property
    def text(self) -> str:
        return f"{self.gpu} {self.nodes}x{self.ranks_per_node}"


Pair = tuple[float, float, float]  # seconds of the product alone, of the transfer alone, of both at once
Pairs = Mapping[tuple[Setting, str], list[Pair]]
Alone = Mapping[tuple[Setting, str], Mapping[float, float]]
HOST_COPIES = ("h2d_mib", "d2h_mib")


def read(path: Path) -> tuple[Pairs, Alone]:
    """Pairs of a product and a transfer, and transfers alone by MiB; each by setting and what is moved."""
    works = ("matmul_n", "allgather_mib", "h2d_mib", "d2h_mib")
    alone: dict[tuple[Setting, str], dict[float, float]] = {}
    both: dict[tuple[Setting, str], list[tuple[float, float, float]]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            setting = Setting(row["gpu"], int(row["nodes"]), int(row["group_intra"]))
            seconds = float(row["latency_ms"]) * 1e-3
            sizes = {work: float(row[work]) for work in works if float(row[work] or 0) > 0}
            if len(sizes) == 1:
                [(work, size)] = sizes.items()
                alone.setdefault((setting, work), {})[size] = seconds
            elif len(sizes) == 2 and "matmul_n" in sizes:
                work = next(work for work in sizes if work != "matmul_n")
                both.setdefault((setting, work), []).append((sizes["matmul_n"], sizes[work], seconds))
    pairs: dict[tuple[Setting, str], list[Pair]] = {}
    for (setting, work), items in both.items():
        products, moved = alone.get((setting, "matmul_n"), {}), alone.get((setting, work), {})
        known = [(products[n], moved[size], t) for n, size, t in items if n in products and size in moved]
        if known:
            pairs[setting, work] = known
    return pairs, alone


def error(seconds: Callable[[float, float], float], pairs: Sequence[Pair]) -> float:
    """Mean |log(predicted / measured)|."""
    return statistics.fmean(abs(math.log(seconds(compute, link) / both)) for compute, link, both in pairs)


def fit_two(pairs: Sequence[Pair]) -> Slowdown:
    """The factors of the least error, of a grid that is refined once; of equals the smaller ones."""
    best = Slowdown(1.0, 1.0)
    for step, reach in ((0.1, 30), (0.02, 6)):
        around = [max(1.0, value) for value in best]
        grid = [[round(max(1.0, at + step * k), 3) for k in range(-reach, reach + 1)] for at in around]
        best = min(
            (Slowdown(a, b) for a, b in itertools.product(sorted(set(grid[0])), sorted(set(grid[1])))),
            key=lambda slow: (round(two_error(slow, pairs), 5), sum(slow)),
        )
    return best


def fit_one(pairs: Sequence[Pair]) -> float:
    return min((1 + k / 50 for k in range(101)), key=lambda factor: one_error(factor, pairs))


def one_error(factor: float, pairs: Sequence[Pair]) -> float:
    return error(lambda compute, link: min(max(compute, link) * factor, compute + link), pairs)


def two_error(slow: Slowdown, pairs: Sequence[Pair]) -> float:
    return error(lambda compute, link: overlapped_seconds(compute, link, slow), pairs)


def host_rate(by_mib: Mapping[float, float]) -> float:
    """Bytes a second of large copies: the median over those of 96 MiB and more."""
    return statistics.median(mib * 2**20 / seconds for mib, seconds in by_mib.items() if mib >= 96)


def fitted(pairs: Pairs, gpu: str, kind: str) -> Slowdown | None:
    """The factors of all settings of a GPU whose transfers are of this kind, taken together."""
    chosen = [
        pair
        for (setting, work), items in pairs.items()
        for pair in items
        if setting.gpu == gpu and (work != "allgather_mib" if kind == "host" else
                                   work == "allgather_mib" and setting.kind == kind)
    ]  # fmt: skip
    return fit_two(chosen) if chosen else None


def number(value: float) -> str:
    """Three digits, as the profiles write them: 6e09, 4.21e09."""
    mantissa, exponent = f"{value:.2e}".split("e+")
    return f"{mantissa.rstrip('0').rstrip('.')}e{exponent}"


def write(pairs: Pairs, alone: Alone) -> None:
    """Puts factors and the host's bandwidth into the files of all devices that the data speak for."""
    for path in sorted(DEVICES.glob("*.toml")):
        gpu, why = (MEASURED[path.stem], "") if path.stem in MEASURED else BORROWED.get(path.stem, ("", ""))
        if not gpu:
            continue
        text = path.read_text(encoding="utf-8")
        table = "\n".join(f"{kind} = [{v.compute:g}, {v.link:g}]" for kind, v in slowdowns(pairs, gpu).items())
        text = re.sub(r"\[overlap_slowdown\]\n.*?\n\n", f"[overlap_slowdown]\n{table}\n\n", text, flags=re.DOTALL)
        nodes = (
            "" if any(setting.gpu == gpu and setting.nodes > 1 for setting, _ in pairs) else "across nodes as A10G; "
        )
        text = with_source(
            text, "overlap_slowdown",
            f"a matrix product beside an all-gather, and beside copies to and from host memory, fitted by "
            f"benchmarks.fit_overlap on {gpu} ({SOURCE}); {nodes}infiniband as ethernet; "
            f"{'pcie as A10G' if gpu in NVLINK else 'nvlink as pcie'}{f'; {why}' if why else ''}",
        )  # fmt: skip
        # The machine around a borrowed chip is another one.
        if path.stem in MEASURED or path.stem == "v100-32gb":
            to_device, back = (host_rate(alone[Setting(gpu, 1, 8), work]) for work in HOST_COPIES)
            line = f"host_bytes_per_second = {number(min(to_device, back))}"
            text = re.sub(r"^host_bytes_per_second = [\d.e+]+$", line, text, flags=re.MULTILINE)
            text = with_source(
                text, "host_bytes_per_second",
                f"the slower of copies of 96 MiB and more by all devices of a node at once: to the device "
                f"{to_device / 1e9:.1f}, back {back / 1e9:.1f} GB/s each, median ({gpu}, {SOURCE})",
            )  # fmt: skip
        path.write_text(text, encoding="utf-8")


def slowdowns(pairs: Pairs, gpu: str) -> dict[str, Slowdown]:
    """What a device of this GPU has in its file, by what computing runs beside."""
    own = "nvlink" if gpu in NVLINK else "pcie"
    inside, pair, host = (fitted(pairs, gpu, kind) for kind in (own, "pcie_pair", "host"))
    # One node of L4 only; and a card in a slot moves as little beside its computing as A10G's do.
    across = fitted(pairs, gpu, "ethernet") or fitted(pairs, "A10G", "ethernet")
    slots = inside if own == "pcie" else fitted(pairs, "A10G", "pcie")
    values = {
        "nvlink": inside,
        "pcie": slots,
        "pcie_pair": pair,
        "infiniband": across,
        "ethernet": across,
        "host": host,
    }
    return {kind: value for kind, value in values.items() if value is not None}


def with_source(text: str, key: str, source: str) -> str:
    """The file with another source of this key."""
    return re.sub(rf'^{key} = ".*"$', f'{key} = "{source}"', text, flags=re.MULTILINE)


def main(arguments: list[str]) -> int:
    """Print the table; with --write put the numbers into the profiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="?", default=FOLDER / "published" / "interference.csv")
    parser.add_argument("--write", action="store_true", help="put the factors into profiles/devices/*.toml")
    options = parser.parse_args(arguments)
    pairs, alone = read(options.csv)
    print("a matrix product beside     setting               pairs  one factor: error  two factors: error"
          "   by the others' two")  # fmt: skip
    for (setting, work), items in sorted(pairs.items(), key=lambda item: (item[0][1], item[0][0].text)):
        factor, slow = fit_one(items), fit_two(items)
        others = [
            pair
            for (other, moved), more in pairs.items()
            for pair in more
            if other != setting and moved == work and (other.gpu, other.kind) == (setting.gpu, setting.kind)
        ]
        unseen = f"{two_error(fit_two(others), items):>8.1%}" if others else "  no other"
        print(f"{work:<27} {setting.text:<20} {len(items):>6}  {factor:>10.2f} "
              f"{one_error(factor, items):>6.1%}"
              f"  {slow.compute:>6.2f} {slow.link:.2f} {two_error(slow, items):>6.1%} {unseen:>15}")  # fmt: skip
    print("\nhost memory, GB/s of each of the devices that copy at once")
    for (setting, work), by_mib in sorted(alone.items(), key=lambda item: (item[0][0].text, item[0][1])):
        if work in HOST_COPIES:
            print(f"{setting.text:<20} {work[:3]} {host_rate(by_mib) / 1e9:>6.2f}")
    if options.write:
        write(pairs, alone)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
