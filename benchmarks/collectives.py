"""Predicted against published seconds of collectives, row by row.

    python benchmarks/collectives.py COLLECTIVES.csv [--rows]

The CSV has the columns collective, gpu, n_gpus, nodes, interconnect, message_bytes, algbw_GBps,
busbw_GBps, latency_us. Printed are, per group of rows with one machine, collective and size of
group, the least and largest message and the median error of `predicted / published - 1`.
"""

import argparse
import csv
import dataclasses
import re
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from planner.cluster import Cluster, link_named
from planner.collectives import (
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    axis_group,
    reduce_scatter_seconds,
    send_recv_seconds,
)

SECONDS: Mapping[str, Callable[[float, Group], float]] = {
    "all_reduce": all_reduce_seconds,
    "all_gather": all_gather_seconds,
    "reduce_scatter": reduce_scatter_seconds,
    "send_recv": send_recv_seconds,
    "all_reduce (gloo)": all_reduce_seconds,
}

# (pattern of the GPU's name, pattern of its interconnect, cluster of one node, its links' names,
# cards per node); the first that matches counts.
MACHINES: tuple[tuple[str, str, str, str, str, int], ...] = (
    (r"A100", r"EFA 4x100", "8xA100-80GB", "nvlink3", "efa-100g", 4),
    (r"A100", r"InfiniBand", "8xA100-80GB", "nvlink3", "infiniband-hdr", 4),
    (r"A100-SXM4", r"x [24] nodes", "8xA100-40GB", "nvlink3", "ethernet-100g", 1),
    (r"A100(?! PCIe)", r"^(?!.*Omni).*(NVLink|NVSwitch)", "8xA100-80GB", "nvlink3", "infiniband-hdr", 8),
    (r"H100", r"EFA 3200", "8xH100", "nvlink4", "efa2-100g", 32),
    (r"H100", r"1 GPU per node", "1xH100", "nvlink4", "infiniband-ndr", 1),
    (r"H100", r"8x NDR", "8xH100", "nvlink4", "infiniband-ndr", 8),
    (r"H[12]00(?! PCIe)", r"NVSwitch(?! \+)", "8xH200", "nvlink4", "infiniband-ndr", 8),
    (r"^B200", r"EFA", "p6-b200", "nvlink5", "", 8),
    (r"^B200", r"NVSwitch", "8xB200", "nvlink5", "infiniband-ndr", 8),
    (r"^L4", r"PCIe", "8xL4", "pcie4-l4", "ethernet-100g", 1),
    (r"V100-SXM2", r"NVLink", "p3.16xlarge", "nvlink2", "", 1),
    (r"V100", r"Ethernet", "8xV100", "nvlink2", "ethernet-100g", 1),
    (r"V100", r"single node|NVLink 2$|intra-node", "8xV100", "nvlink2", "ethernet-100g", 1),
    (r"A10G", r"PCIe", "a10g-box", "pcie4-g5", "ethernet-100g", 1),
    (r"RTX 4090", r"P2P", "8x4090", "pcie4", "ethernet-100g", 1),
    (r"RTX 5090", r"PCIe 5", "8x4090", "pcie5", "ethernet-100g", 1),
    (r"CPU", r"40Gb/s", "1x4090", "gloo", "gloo", 1),
)


def group_of(row: Mapping[str, str]) -> Group | None:
    """Where the row's ranks lie; None if it is not said, or the machine is not among ours."""
    if not row["n_gpus"] or not row["nodes"]:
        return None
    num_ranks, num_nodes = int(row["n_gpus"]), int(row["nodes"])
    for gpu, interconnect, text, intra, inter, num_cards in MACHINES:
        if re.search(gpu, row["gpu"]) and re.search(interconnect, row["interconnect"]):
            cluster = Cluster.load(text)
            cluster = dataclasses.replace(
                cluster,
                num_nodes=num_nodes,
                nics_per_node=num_cards,
                intra_node_link=link_named(intra),
                inter_node_link=link_named(inter) if inter else cluster.inter_node_link,
                device=dataclasses.replace(
                    cluster.device,
                    overlap_slowdown={**cluster.device.overlap_slowdown, "gloo": 1.0},
                ),
            )
            break
    else:
        return None
    in_node, per_node = num_ranks // num_nodes, cluster.devices_per_node
    if in_node > per_node or num_ranks % num_nodes:
        return None
    at_once = re.search(r"(\d+) such groups run at once", row["interconnect"])
    rivals = int(at_once[1]) if at_once else 1
    if num_nodes == 1:
        return axis_group(cluster, {"rival": rivals, "own": num_ranks}, "own")
    if in_node == per_node:
        return axis_group(cluster, {"own": num_ranks}, "own")
    # `in_node` neighbours on every node: two mesh axes that are no neighbours.
    one = axis_group(cluster, {"own": num_nodes, "rival": per_node}, "own")
    inside = axis_group(cluster, {"rival": per_node // in_node, "own": in_node}, "own")
    return dataclasses.replace(
        inside,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        inter_bytes_per_second=one.inter_bytes_per_second * in_node,
    )


def published_seconds(row: Mapping[str, str]) -> float | None:
    """The row's time: as printed, or from its bandwidth."""
    if row["latency_us"]:
        return float(row["latency_us"]) * 1e-6
    size, n = float(row["message_bytes"] or 0), int(row["n_gpus"] or 0)
    share = {"all_reduce": 2 * (n - 1) / n, "send_recv": 1.0}.get(row["collective"], (n - 1) / n)
    if size and row["busbw_GBps"]:
        return size * share / float(row["busbw_GBps"]) / 1e9
    if size and row["algbw_GBps"]:
        return size / float(row["algbw_GBps"]) / 1e9
    return None


def main(arguments: list[str]) -> int:
    """Print one line per group of rows, then the whole."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--rows", action="store_true", help="print every row too")
    options = parser.parse_args(arguments)
    errors: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    skipped = 0
    with options.csv.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            seconds = published_seconds(row) if row["n_gpus"] else None
            group = group_of(row) if row["collective"] in SECONDS else None
            if seconds is None or group is None or not row["message_bytes"]:
                skipped += 1
                continue
            size = float(row["message_bytes"])
            predicted = SECONDS[row["collective"]](size, group)
            name = (row["gpu"], row["interconnect"][:40], row["collective"])
            key = (*name, f"{group.ranks_per_node}x{group.num_nodes}")
            errors.setdefault(key, []).append((size, predicted / seconds - 1))
            if options.rows:
                print(f"{' | '.join(key)} | {size:.3g} B | {predicted * 1e6:.0f} us"
                      f" | {seconds * 1e6:.0f} us | {predicted / seconds - 1:+.0%}")  # fmt: skip
    print(f"{'rows':>5} {'median error':>13} {'median |error|':>15}  machine")
    for machine, pairs in sorted(errors.items()):
        sizes, values = [size for size, _ in pairs], [error for _, error in pairs]
        absolute = statistics.median(map(abs, values))
        print(f"{len(pairs):>5} {statistics.median(values):>+13.0%} {absolute:>15.0%}  "
              f"{' | '.join(machine)} | {min(sizes):.1g} to {max(sizes):.1g} B")  # fmt: skip
    every = [error for pairs in errors.values() for _, error in pairs]
    large = [error for pairs in errors.values() for size, error in pairs if size >= 1e6]
    for label, values in (("all rows", every), ("1 MB and more", large)):
        print(f"{label}: {len(values)}, median |error| {statistics.median(map(abs, values)):.1%}")
    print(f"groups: {len(errors)}, median of their median |error| "
          f"{statistics.median(statistics.median(abs(e) for _, e in p) for p in errors.values()):.1%}"
          f"; rows without a machine of ours or without a time: {skipped}")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
