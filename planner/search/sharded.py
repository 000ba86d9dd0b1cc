"""The model as one rank of tensor or context parallelism runs it: what the search prices and a plan writes down."""

from dataclasses import dataclass

from planner.cluster import Cluster, Curve
from planner.collectives import COLLECTIVE_SECONDS, axis_group
from planner.graph import Graph, total
from planner.shard.placement import Sharding
from planner.shard.program import Prices

_LARGEST_MICRO_BATCH = 8
# Of memory, for what one sample keeps with everything recomputed: from there on samples are long. Where there are
# fewer samples than devices, only splitting a sample or the model uses them all.
_LONG_SHARE, _LONG_SHARE_OF_FEW = 0.75, 0.25
_SAVED_SHARE = 0.25  # of memory, for the saved activations of one micro-batch


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedGraph:
    """One way to split a model: the graph of one rank, priced, and the sharding of each block."""

    name: str
    graph: Graph
    shardings: tuple[Sharding, ...]

    @property
    def divides(self) -> bool:
        """Whether ranks share the work of any node, or hold parts of any parameter."""
        return any(
            any(option.share < 1 for option in sharding.options) or any(p.is_part for p in sharding.parameters)
            for sharding in self.shardings
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


def prices(graph: Graph, cluster: Cluster, degree: int, *, global_batch: int, expert_imbalance: float = 1.0) -> Prices:
    """What work and communication cost on a rank, for the program that splits the operators of a model.

    It is asked once for a degree, so the micro-batch is a likely one: at most 8 samples of those that a rank has, whose
    saved activations fill no more than a quarter of the memory of the ranks that share them. Ranks of the axis are
    neighbours, and all of the cluster communicate at once.
    """
    device = cluster.device
    data_ranks = max(1, cluster.num_devices // degree)
    group = axis_group(cluster, {"dp_shard": data_ranks, "tp": degree}, "tp")
    saved_bytes = total(block.saved for block in graph.blocks).per_sample
    room = _SAVED_SHARE * cluster.capacity_bytes * degree / max(1.0, saved_bytes)
    micro_batch = max(1, min(_LARGEST_MICRO_BATCH, global_batch // data_ranks, int(room)))
    return Prices(
        flop_per_second=device.peak_flop_per_second[graph.dtype] * _largest(device.efficiency["matmul"]),
        bytes_per_second=device.memory_bytes_per_second * _largest(device.efficiency["memory"]),
        kernel_seconds=max(device.kernel_launch_seconds, device.dispatch_seconds),
        collective_seconds=lambda collective, num_bytes: COLLECTIVE_SECONDS[collective](num_bytes, group),
        micro_batch=micro_batch,
        num_microbatches=max(1, global_batch // data_ranks // micro_batch),
        expert_imbalance=expert_imbalance,
    )


def _largest(curve: Curve) -> float:
    return max(fraction for _, fraction in curve.points)
