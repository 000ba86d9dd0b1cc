"""The model as one rank of the axes that split it runs it: what the search prices and a plan writes down."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

from planner.cluster import Cluster, Curve
from planner.collectives import COLLECTIVE_SECONDS, axis_group
from planner.graph import Graph, total
from planner.shard.chain import AxisSplit
from planner.shard.placement import Collective, Sharding
from planner.shard.program import Prices

_LARGEST_MICRO_BATCH = 8
# Of memory, for what one sample keeps with everything recomputed: from there on samples are long. Where there are
# fewer samples than devices, only splitting a sample or the model uses them all.
_LONG_SHARE, _LONG_SHARE_OF_FEW = 0.75, 0.25
_SAVED_SHARE = 0.25  # of memory, for the saved activations of one micro-batch


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedGraph:
    """One way to split a model: the graph of one rank, priced, and how each axis splits each block, outermost first.

    `wholes` are the graphs that the axes split: that of the model, then those of a rank of the axes before.
    """

    name: str
    graph: Graph
    splits: tuple[AxisSplit, ...] = ()
    wholes: tuple[Graph, ...] = ()

    @property
    def divides(self) -> bool:
        """Whether on every axis ranks share the work of any node, or hold parts of any parameter."""
        return all(divides(split.shardings) for split in self.splits)


def divides(shardings: Iterable[Sharding]) -> bool:
    """Whether ranks share the work of any node, or hold parts of any parameter."""
    return any(
        any(option.share < 1 for option in sharding.options) or any(p.is_part for p in sharding.parameters)
        for sharding in shardings
    )


def has_long_samples(graph: Graph, cluster: Cluster, global_batch: int) -> bool:
    """Whether one sample fills much of a device even where all blocks recompute what they keep.

    Then a part of a sample for each rank is worth a try; else data parallelism divides the work at less cost.
    """
    inputs = total(block.input_bytes for block in graph.blocks).per_sample
    largest = max((block.saved.per_sample for block in graph.blocks), default=0.0)
    share = _LONG_SHARE_OF_FEW if global_batch < cluster.num_devices else _LONG_SHARE
    return inputs + largest > share * cluster.capacity_bytes


def replicated_share(whole: Graph, local: Graph, degree: int) -> float:
    """The share of the model's FLOP that all ranks do alike; 0 where `degree` divides everything.

    What is divided takes 1/degree of its FLOP on a rank, the rest all of it.
    """
    flop = whole.flop_per_sample()
    if flop <= 0:
        return 0.0
    return max(0.0, (local.flop_per_sample() / flop - 1 / degree) / (1 - 1 / degree))


def prices(
    graph: Graph,
    cluster: Cluster,
    degrees: Mapping[str, int],
    axis: str,
    *,
    global_batch: int,
    expert_imbalance: float = 1.0,
) -> Prices:
    """What work, and communication over an axis, cost on a rank, for the program that splits the operators of a model.

    It is asked once for the `degrees` of the axes that split, so the micro-batch is a likely one: at most 8 samples of
    those that a rank has, whose saved activations fill no more than a quarter of the memory of the ranks that share
    them. `graph` is the whole model's. Ranks that share samples are neighbours, all of the cluster communicate at once.
    """
    device = cluster.device
    degree = prod(size for name, size in degrees.items() if name != "ep")  # whose ranks have their own samples
    data_ranks = max(1, cluster.num_devices // degree)
    sizes = {"dp_shard": max(1, data_ranks // degrees.get("ep", 1)), **degrees}

    def of_axis(name: str) -> Callable[[Collective, float], float]:
        group = axis_group(cluster, sizes, name)
        return lambda collective, num_bytes: COLLECTIVE_SECONDS[collective](num_bytes, group)

    saved_bytes = total(block.saved for block in graph.blocks).per_sample
    room = _SAVED_SHARE * cluster.capacity_bytes * degree / max(1.0, saved_bytes)
    micro_batch = max(1, min(_LARGEST_MICRO_BATCH, global_batch // data_ranks, int(room)))
    return Prices(
        flop_per_second=device.peak_flop_per_second[graph.dtype] * _largest(device.efficiency["matmul"]),
        bytes_per_second=device.memory_bytes_per_second * _largest(device.efficiency["memory"]),
        kernel_seconds=max(device.kernel_launch_seconds, device.dispatch_seconds),
        collective_seconds=of_axis(axis),
        micro_batch=micro_batch,
        num_microbatches=max(1, global_batch // data_ranks // micro_batch),
        expert_imbalance=expert_imbalance,
        outer_seconds={name: of_axis(name) for name in degrees if name != axis},
    )


def _largest(curve: Curve) -> float:
    return max(fraction for _, fraction in curve.points)
