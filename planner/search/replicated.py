"""What the ranks of an axis do alike, and why: operators that are not split, those with the most FLOP first."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.graph import Graph, Node
from planner.search.sharded import ShardedGraph
from planner.shard.placement import Sharding, differentiable, operands_of
from planner.shard.rules import has_rule, options

_MOST_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """An operator at one line that every rank runs whole, or partly so, in some blocks."""

    op: str
    source: str
    blocks: tuple[str, ...]
    share: float  # of the FLOP of the model
    why: str

    def __str__(self) -> str:
        where = self.blocks[0] or "the model"
        others = f" and {len(self.blocks) - 1} more" if len(self.blocks) > 1 else ""
        return f"{self.op} of {where}{others} ({self.source or 'line unknown'}, {self.share:.1%}): {self.why}"


def splits_nothing(way: ShardedGraph, fixed: str) -> str:
    """The sentence for degrees that a user has fixed and that share out nothing."""
    why = "; ".join(
        f"over {split.axis} {named(run_whole(whole, split.shardings, split.degree, split.axis)) or 'there is no FLOP'}"
        for split, whole in zip(way.splits, way.wholes, strict=True)
    )
    return f"{fixed} would share out nothing: {why}; leave it out or fix another degree"


def run_whole(graph: Graph, shardings: Sequence[Sharding], degree: int, axis: str) -> tuple[Whole, ...]:
    """Operators of a graph that an axis does not split further, those with the most FLOP first.

    An operator that splits half of its work counts by half.
    """
    total = graph.flop_per_sample() or 1.0
    moving = differentiable(graph)
    shares: dict[tuple[str, str, str], float] = {}
    blocks: dict[tuple[str, str, str], dict[str, None]] = {}
    for block, sharding in zip(graph.blocks, shardings, strict=True):
        flop = [0.0] * len(block.nodes)
        for kernel in graph.classes[block.class_index].kernels:
            if kernel.node >= 0:
                flop[kernel.node] += kernel.flop.at(1)
        for index, option, work in zip(block.nodes, sharding.options, flop, strict=True):
            excess = work / total * (option.share - 1 / degree) / (1 - 1 / degree)
            if excess > 0:
                node = graph.nodes[index]
                key = (node.op, node.source, why_whole(graph, node, degree, moving, axis))
                shares[key] = shares.get(key, 0.0) + excess
                blocks.setdefault(key, {})[block.name] = None
    found = [
        Whole(op=op, source=source, why=why, share=share, blocks=tuple(blocks[op, source, why]))
        for (op, source, why), share in shares.items()
    ]
    return tuple(sorted(found, key=lambda whole: -whole.share))


def why_whole(graph: Graph, node: Node, degree: int, moving: frozenset[int], axis: str) -> str:
    """Why a node is run whole on every rank."""
    if any(option.share < 1 for option in options(node, graph.tensors, degree, {}, moving, axis)):
        return "to split it costs more than it saves"
    if not has_rule(node.op):
        return "there is no sharding rule for it"
    touched = (*operands_of(node), *(t for t in node.outputs if t is not None))
    sizes = sorted({size for t in touched for size in graph.tensors[t].shape if isinstance(size, int) and size > 1})
    odd = [size for size in sizes if size % degree]
    if odd:
        return f"{degree} does not divide {', '.join(map(str, odd))}"
    return "none of its dims may be split"


def named(found: Sequence[Whole]) -> str:
    """The first few in words.

    >>> mix = Whole(op="mylib.mix.default", source="model.py:3", blocks=("a", "b"), share=0.5, why="no rule")
    >>> named([mix] * 5)[-40:], named([])
    ('3, 50.0%): no rule; and 2 more operators', '')
    """
    more = len(found) - _MOST_NAMED
    rest = f"and {more} more operator{'s' * (more > 1)}"
    return "; ".join([*map(str, found[:_MOST_NAMED]), *([rest] if more > 0 else [])])
