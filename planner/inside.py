"""Collectives inside of blocks, over the axes that split tensors: seconds of each pass, on the group of each axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Cluster
from planner.collectives import COLLECTIVE_SECONDS, Group, axis_group
from planner.graph import Graph
from planner.plan import AXES, Mesh

Floats = NDArray[np.float64]
Groups = tuple[tuple[str, Group], ...]  # of the axes that split tensors


@dataclass(frozen=True, slots=True)
class Same:
    """A graph as a cache key: equal only to itself, as hashing all of it takes longer than pricing."""

    value: Graph

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value


@dataclass(frozen=True, eq=False, slots=True)
class Inside:
    """Arrays [L, 2] of forward and backward: seconds and number of the collectives of each axis, which wait in turn."""

    groups: Groups
    by_axis: tuple[tuple[Floats, Floats], ...]
    num_blocks: int

    @property
    def seconds(self) -> Floats:
        """Of all axes together."""
        return self._sum([seconds for seconds, _ in self.by_axis])

    @property
    def number(self) -> Floats:
        """Of all axes together."""
        return self._sum([number for _, number in self.by_axis])

    def beside(self, other: Group) -> Floats:
        """Seconds of those that leave the links of another group free."""
        pairs = zip(self.groups, self.by_axis, strict=True)
        return self._sum([seconds for (_, group), (seconds, _) in pairs if not share_links(other, group)])

    def _sum(self, arrays: Sequence[Floats]) -> Floats:
        return sum(arrays, np.zeros((self.num_blocks, 2)))


def split_groups(cluster: Cluster, mesh: Mesh) -> Groups:
    """The groups of the axes that split tensors."""
    sizes = {name: getattr(mesh, name) for name in AXES}
    return tuple((axis, axis_group(cluster, sizes, axis)) for axis, _ in mesh.splits)


def inside(graph: Same, groups: Groups, micro_batch: int) -> Inside:
    """What the blocks of a rank's graph communicate for one micro-batch."""
    by_axis = tuple(_of_axis(graph, axis, group, micro_batch) for axis, group in groups)
    return Inside(groups, by_axis, len(graph.value.blocks))


@lru_cache(maxsize=4096)
def _of_axis(graph: Same, axis: str, group: Group, micro_batch: int) -> tuple[Floats, Floats]:
    """[L, 2] seconds and number of the collectives that blocks make over an axis, in forward and backward."""
    model = graph.value
    seconds, number = np.zeros((len(model.classes), 2)), np.zeros((len(model.classes), 2))
    for index, kind in enumerate(model.classes):
        for made in kind.collectives:
            if made.axis == axis:
                phase = int(made.phase == "backward")
                seconds[index, phase] += COLLECTIVE_SECONDS[made.collective](made.num_bytes.at(micro_batch), group)
                number[index, phase] += 1
    kinds = [block.class_index for block in model.blocks]
    return seconds[kinds], number[kinds]


def share_links(one: Group, other: Group) -> bool:
    """Whether collectives of two groups pass the same kind of link, inside nodes or between them."""
    return min(one.num_nodes, other.num_nodes) > 1 or min(one.ranks_per_node, other.ranks_per_node) > 1
