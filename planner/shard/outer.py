"""What conversions of an axis that has split the graph before cost on a rank of the axis that splits it now.

A conversion whose tensor the second axis splits as well moves the less.
"""

from collections.abc import Callable

from planner.graph import CONVERSIONS, Node
from planner.shard.placement import Collective
from planner.shard.work import base_name

# Collectives forward and backward, and whether their bytes are those of what is made (else of what is read); as
# `planner.shard.placement.conversion` has them.
_MADE: dict[str, tuple[Collective | None, Collective | None, bool]] = {
    "copy": (None, "all_reduce", False), "reduce": ("all_reduce", None, False),
    "reduce_copy": ("all_reduce", "all_reduce", False), "cut": (None, "all_gather", False),
    "gather": ("all_gather", None, True), "gather_sum": ("all_gather", "reduce_scatter", True),
    "scatter": ("reduce_scatter", "all_gather", False), "exchange": ("all_to_all", "all_to_all", False),
}  # fmt: skip


def is_outer(node: Node) -> bool:
    """Whether a node of the graph that is to be split is a conversion already."""
    return node.op.startswith("planner.") and base_name(node) in CONVERSIONS


def conversion_seconds(
    node: Node, read_bytes: float, made_bytes: float, seconds: Callable[[Collective, float], float], *, moves: bool
) -> float:
    """Seconds of the collectives of a conversion; those of gradients where one `moves` through it.

    `read_bytes` and `made_bytes` are those of a rank. Source: `planner.shard.placement.conversion`.
    """
    forward, backward, of_made = _MADE.get(base_name(node), (None, None, False))
    num_bytes = made_bytes if of_made else read_bytes
    return sum(seconds(kind, num_bytes) for kind in (forward, backward if moves else None) if kind is not None)
