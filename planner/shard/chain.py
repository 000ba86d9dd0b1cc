"""Several axes split a model one after the other: each splits the graph of one rank of the axes before it.

The order is that of `Mesh.splits`, outermost first. Tensors keep their index all along the chain, so that the placement
of a tensor on each axis is that of its link.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.graph import Graph
from planner.shard.localize import Localized, localize
from planner.shard.placement import Sharding


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class AxisSplit:
    """How the blocks of a graph are split over the ranks of a mesh axis: a sharding for each."""

    axis: str
    degree: int
    shardings: tuple[Sharding, ...]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Link:
    """One step of a chain: the graph that an axis splits, how, and what one of its ranks has of it."""

    split: AxisSplit
    whole: Graph
    local: Localized


def chained(graph: Graph, splits: Sequence[AxisSplit]) -> tuple[Link, ...]:
    """The links of a chain, outermost axis first; the last one's local graph is what a rank runs.

    Raises:
        PlanError: as `localize`.
    """
    links: list[Link] = []
    for split in splits:
        local = localize(graph, split.shardings, split.degree, axis=split.axis)
        links.append(Link(split=split, whole=graph, local=local))
        graph = local.graph
    return tuple(links)


def spread_parameters(graph: Graph, splits: Sequence[AxisSplit]) -> frozenset[int]:
    """The parameters of experts that are spread over `ep`, by tensor index."""
    return frozenset(
        parameter
        for split in splits
        if split.axis == "ep"
        for block, sharding in zip(graph.blocks, split.shardings, strict=True)
        for parameter, placement in zip(block.parameters, sharding.parameters, strict=True)
        if placement.is_split
    )
