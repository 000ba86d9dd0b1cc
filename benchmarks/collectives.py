"""Predicted against published seconds of collectives, row by row.

    python -m benchmarks.collectives [COLLECTIVES.csv] [--rows]

The CSV has the columns collective, gpu, n_gpus, nodes, interconnect, message_bytes, algbw_GBps, busbw_GBps,
latency_us, source, notes. Printed are, per fabric, collective and range of sizes, how many rows there are and the
median |predicted / published - 1| and median error with its sign; then the same by fabric for messages of
64 KiB and more, and why the rest was not priced. A row without a size has the bandwidth that the fabric reaches
with large messages, and is priced at 1 GiB.
"""

import argparse
import csv
import dataclasses
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.cluster import LINK_KINDS, Cluster, Link, Slowdown, device_named, link_named
from planner.collectives import (
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    axis_group,
    reduce_scatter_seconds,
    send_recv_seconds,
)

PUBLISHED = Path(__file__).resolve().parent / "published" / "collectives.csv"
SECONDS: Mapping[str, Callable[[float, Group], float]] = {
    "all_reduce": all_reduce_seconds,
    "all_gather": all_gather_seconds,
    "reduce_scatter": reduce_scatter_seconds,
    "all_to_all": all_to_all_seconds,
    "send_recv": send_recv_seconds,
}
# What the sources call them.
NAMES: Mapping[str, str] = {
    "all_reduce (gloo)": "all_reduce",
    "all_reduce (NCCL)": "all_reduce",
    "send_recv (pipeline)": "send_recv",
    "copy (unidirectional pair)": "send_recv",
    "cudaMemcpyPeer": "send_recv",
}
LARGE_BYTES = 2**30  # of a row without a size
LEAST_BYTES = 2**16  # smaller messages take the launch and the latency alone

# (pattern of the GPU, of the interconnect, of the collective; devices and network cards of a node; the links inside
# and between nodes); the first that matches counts.
MACHINES: tuple[tuple[str, str, str, int, int, str, str], ...] = (
    (r"^A100", r"EFA 4x100", "", 8, 4, "nvlink3", "efa-100g"),
    (r"^A100", r"4x (HDR|200)", "", 8, 4, "nvlink3", "infiniband-hdr"),
    (r"^A100", r"Omni-Path", "", 8, 4, "nvlink3", "omni-path-100g"),
    (r"^A100-SXM4", r"x [24] nodes", "", 8, 1, "nvlink3", "ethernet-100g"),
    (r"^A100", r"one RoCE", "", 8, 1, "nvlink3", "roce-100g"),
    (r"^A100(?! PCIe)", r"(NVLink|NVSwitch)", "", 8, 8, "nvlink3", "infiniband-hdr"),
    (r"^A100 PCIe", r"NV12", "", 2, 1, "nvlink-bridge", "ethernet-100g"),
    (r"^H100 PCIe", r"bridge", "", 2, 1, "nvlink-bridge", "ethernet-100g"),
    (r"^H100", r"EFA 3200", "", 8, 32, "nvlink4", "efa2-100g"),
    (r"^H100", r"1 GPU per node", "", 1, 1, "nvlink4", "infiniband-ndr"),
    (r"^H[12]00", r"", "", 8, 8, "nvlink4", "infiniband-ndr"),
    (r"^B200", r"EFA", "", 8, 8, "nvlink5", "efa4-400g"),
    (r"^B200", r"", "", 8, 8, "nvlink5", "infiniband-ndr"),
    (r"^GB200", r"NVL72", "", 72, 72, "nvlink5", "infiniband-ndr"),
    (r"^GB10", r"", "", 1, 1, "pcie5", "roce-200g"),
    (r"^L4$", r"PCIe", "", 8, 1, "pcie4-l4", "ethernet-100g"),
    (r"^A10G$", r"PCIe", "", 8, 1, "pcie4-g5", "ethernet-100g"),
    (r"^V100-SXM2", r"NVLink", "", 8, 1, "nvlink2", "ethernet-32g"),
    (r"^V100", r"Omni-Path", "", 4, 4, "nvlink2-quad", "omni-path-100g"),
    (r"^V100", r"NVLink 2$", "", 4, 4, "nvlink2-quad", "omni-path-100g"),
    (r"^V100", r"100Gb/s Ethernet", "", 8, 1, "nvlink2", "ethernet-100g"),
    (r"^V100", r"inter-node", "", 8, 4, "nvlink2", "infiniband-edr"),
    (r"^V100", r"", "", 8, 4, "nvlink2", "infiniband-edr"),
    (r"^RTX 4090", r"P2P", "", 8, 1, "pcie4", "ethernet-100g"),
    (r"^RTX 5090", r"PCIe 5", "", 8, 1, "pcie5", "ethernet-100g"),
    (r"^RTX 2080", r"bridge", "", 2, 1, "nvlink2-bridge", "ethernet-100g"),
    (r"^CPU", r"40Gb/s", "", 1, 1, "gloo", "gloo"),
    (r"^not stated", r"InfiniBand", "NCCL", 1, 1, "gloo", "infiniband-edr"),
    (r"^not stated", r"TCP/IP", "gloo", 1, 1, "gloo", "gloo"),
    (r"^not stated", r"TCP/IP", "NCCL", 1, 1, "gloo", "ethernet-100g"),
    # Two GPUs at 150 GB/s of bus bandwidth by NVLink are those of A800, whose 8 links give 200.
    (r"^$", r"intra-node|crosses", "", 8, 8, "nvlink3-a800", "infiniband-edr"),
)
# What a row says of itself that its figures do not.
NO_SWITCH = r"NCCL_NVLS_ENABLE=0|NVSwitch, ring"
NOISY = r"NOISY"
LISTS = r"list-based"
# Rows whose fabric is a guess from their figures, or unlike others of its name: networks that reduce in their own
# switches, racks of 72 that are one node, one rank that waits for torch. They are priced, and no witness for a fit.
NO_WITNESS = r"^crosses|fabric not stated|same servers|InfiniBand RDMA|SHARP|NVL72"
COPIED = ("all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row: a collective of a group of ranks on one machine, and its published seconds."""

    collective: str
    num_bytes: float
    seconds: float
    num_ranks: int
    num_nodes: int
    devices_per_node: int
    nics_per_node: int
    rivals: int  # groups at once
    intra: str
    inter: str
    switch: bool  # NCCL may reduce in the switch
    noisy: bool  # the source's own standard deviation is more than a tenth
    sized: bool  # the size is published
    witness: bool  # that tells what its fabric does
    source: str

    @property
    def fabric(self) -> str:
        """The link that the group is slowest on."""
        return self.inter if self.num_nodes > 1 else self.intra

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.num_nodes

    @property
    def shape(self) -> tuple[object, ...]:
        """All that the group depends on."""
        return (self.num_ranks, self.num_nodes, self.devices_per_node, self.nics_per_node, self.rivals, self.intra,
                self.inter, self.switch)  # fmt: skip

    def group(self, intra: Link, inter: Link) -> Group:
        """The group on these links."""
        if not self.switch:
            intra = dataclasses.replace(intra, in_switch_all_reduce_bytes_per_second=None)
        cluster = _cluster(self, intra, inter)
        if self.num_nodes == 1:
            return axis_group(cluster, {"rival": self.rivals, "own": self.num_ranks}, "own")
        if self.ranks_per_node == self.devices_per_node:
            return axis_group(cluster, {"own": self.num_ranks}, "own")
        # Neighbours on every node: two mesh axes that are no neighbours.
        in_node, per_node = self.ranks_per_node, self.devices_per_node
        inside = axis_group(cluster, {"rival": per_node // in_node, "own": in_node}, "own")
        node_rate = inter.bytes_per_second * self.nics_per_node
        share = node_rate / min(self.rivals, per_node // in_node)
        # A rank alone leaves by the card that is its own.
        share = min(share, inter.bytes_per_second * max(1.0, self.nics_per_node / per_node) * in_node)
        return dataclasses.replace(
            inside,
            num_ranks=self.num_ranks,
            num_nodes=self.num_nodes,
            inter_bytes_per_second=share,
            inter_hop_bytes_per_second=min(share, inside.inter_hop_bytes_per_second),
        )

    def predicted(self, intra: Link | None = None, inter: Link | None = None) -> float:
        """Seconds by the model, with the bundled links or these."""
        group = self.group(intra or link_named(self.intra), inter or link_named(self.inter))
        return SECONDS[self.collective](self.num_bytes, group)


def _cluster(row: Measured, intra: Link, inter: Link) -> Cluster:
    base = Cluster.load("8xH100")
    nothing = {kind: Slowdown(1.0, 1.0) for kind in LINK_KINDS}
    return dataclasses.replace(
        base,
        num_nodes=row.num_nodes,
        devices_per_node=row.devices_per_node,
        nics_per_node=row.nics_per_node,
        intra_node_link=intra,
        inter_node_link=inter,
        device=dataclasses.replace(base.device, overlap_slowdown=nothing),
    )


def read(path: Path) -> tuple[list[Measured], Counter[str]]:
    """The rows that can be priced, and how many others there are for each reason."""
    rows: list[Measured] = []
    refused: Counter[str] = Counter()
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            row = _measured(line)
            if isinstance(row, str):
                refused[row] += 1
            else:
                rows.append(row)
    return rows, refused


def _measured(line: Mapping[str, str]) -> Measured | str:
    """The row, or the reason why it cannot be priced."""
    collective = NAMES.get(line["collective"], line["collective"])
    if collective not in SECONDS:
        return f"{line['collective']}: nothing that the planner prices"
    if not line["n_gpus"]:
        return "the number of ranks is not stated"
    texts = (line["gpu"], line["interconnect"], line["collective"])
    machines = (m for m in MACHINES if all(re.search(p, text) for p, text in zip(m[:3], texts, strict=True)))
    machine = next(machines, None)
    if machine is None:
        return f"no profile of the fabric: {line['gpu'] or 'GPU not stated'}, {line['interconnect']}"
    per_node, cards, intra, inter = machine[3:]
    num_ranks = int(line["n_gpus"])
    num_nodes = int(line["nodes"] or -(-num_ranks // per_node))
    if num_ranks % num_nodes or num_ranks // num_nodes > per_node:
        return f"{num_ranks} ranks do not lie on {num_nodes} nodes of {per_node}"
    size = float(line["message_bytes"] or LARGE_BYTES)
    seconds = _published_seconds(line, collective, size, num_ranks)
    if seconds is None:
        return "neither time nor bandwidth is stated"
    if collective in COPIED and re.search(LISTS, line["notes"]):
        # Calls of torch.distributed with a list of tensors copy the whole of it from or to NCCL's buffer.
        seconds -= 2 * size / device_named("V100-32GB").copy_bytes_per_second(2 * size)
    at_once = re.search(r"(\d+) such groups run at once", line["interconnect"])
    return Measured(
        collective=collective,
        num_bytes=size,
        seconds=seconds,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        devices_per_node=per_node,
        nics_per_node=cards,
        rivals=int(at_once[1]) if at_once else 1,
        intra=intra,
        inter=inter,
        switch=not re.search(NO_SWITCH, line["interconnect"] + line["notes"]),
        noisy=bool(re.search(NOISY, line["notes"])),
        sized=bool(line["message_bytes"]),
        witness=not re.search(NO_WITNESS, line["interconnect"]),
        source=_source(line["source"]),
    )


def _source(text: str) -> str:
    """The people who measured: `owner/repository`, or that with the number of an issue."""
    issue = re.match(r"(\S+/\S+) (?:issue|PR) (\d+)", text)
    return f"{issue[1]} issue {issue[2]}" if issue else text.split(" ")[0]


def _published_seconds(line: Mapping[str, str], collective: str, size: float, num_ranks: int) -> float | None:
    if line["latency_us"]:
        return float(line["latency_us"]) * 1e-6
    share = {"all_reduce": 2 * (num_ranks - 1) / num_ranks, "send_recv": 1.0}.get(
        collective, (num_ranks - 1) / num_ranks
    )
    if line["busbw_GBps"]:
        return size * share / float(line["busbw_GBps"]) / 1e9
    if line["algbw_GBps"]:
        return size / float(line["algbw_GBps"]) / 1e9
    return None


def size_range(row: Measured) -> str:
    """The decade and a half of its size."""
    for bound, name in ((2**16, "under 64 KiB"), (2**20, "64 KiB to 1 MiB"), (2**24, "1 to 16 MiB"),
                        (2**28, "16 to 256 MiB")):  # fmt: skip
        if row.num_bytes < bound:
            return name
    return "256 MiB and more" if row.sized else "large, not stated"


def median_errors(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Median |predicted / published - 1| and median of predicted / published - 1."""
    errors = [predicted / published - 1 for predicted, published in pairs]
    return statistics.median(map(abs, errors)), statistics.median(errors)


def table(rows: Sequence[Measured], predicted: Sequence[float], key: Callable[[Measured], str]) -> list[str]:
    """One line for each value of `key`: rows, noisy ones of them, median |error| and error of the others."""
    groups: dict[str, list[tuple[Measured, float]]] = {}
    for row, seconds in zip(rows, predicted, strict=True):
        groups.setdefault(key(row), []).append((row, seconds))
    lines = []
    for name, items in sorted(groups.items()):
        steady = [(seconds, row.seconds) for row, seconds in items if not row.noisy]
        noisy = len(items) - len(steady)
        absolute, signed = median_errors(steady or [(s, row.seconds) for row, s in items])
        lines.append(f"{len(items):>5} {noisy:>6} {absolute:>8.1%} {signed:>+8.1%}  {name}")
    return lines


def main(arguments: list[str]) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="?", default=PUBLISHED)
    parser.add_argument("--rows", action="store_true", help="print every row too")
    options = parser.parse_args(arguments)
    rows, refused = read(options.csv)
    predicted = [row.predicted() for row in rows]
    if options.rows:
        for row, seconds in zip(rows, predicted, strict=True):
            print(f"{seconds * 1e6:>10.0f} {row.seconds * 1e6:>10.0f} us {seconds / row.seconds - 1:>+7.0%}"
                  f"  {row.fabric} {row.collective} {row.ranks_per_node}x{row.num_nodes} {row.num_bytes:.3g} B"
                  f"  {row.source}")  # fmt: skip
    print(" rows  noisy |error|   error  fabric | collective | ranks in a node x nodes | message")
    print("\n".join(table(rows, predicted, lambda row: f"{row.fabric} | {row.collective} | "
                          f"{row.ranks_per_node}x{row.num_nodes} | {size_range(row)}")))  # fmt: skip
    large = [(row, seconds) for row, seconds in zip(rows, predicted, strict=True) if row.num_bytes >= LEAST_BYTES]
    print("\n rows  noisy |error|   error  fabric, messages of 64 KiB and more")
    print("\n".join(table([row for row, _ in large], [seconds for _, seconds in large], lambda row: row.fabric)))
    steady = [(seconds, row.seconds) for row, seconds in large if not row.noisy]
    absolute, signed = median_errors(steady)
    print(f"all {len(rows)} rows priced; of 64 KiB and more {len(large)}, {len(large) - len(steady)} of them noisy; "
          f"the others {absolute:.1%}, bias {signed:+.1%}")  # fmt: skip
    print(f"not priced: {refused.total()}")
    for reason, count in sorted(refused.items()):
        print(f"{count:>5}  {reason}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
