"""Shardings as a plan holds them: the placements of every node and tensor as text; rules tell the rest again."""

import re
from collections.abc import Sequence

from planner.errors import PlanError
from planner.graph import Block, Graph
from planner.plan import ShardingPlan
from planner.shard.localize import text
from planner.shard.placement import Option, Placement, Sharding, differentiable, operands_of
from planner.shard.rules import options

_BETWEEN = re.compile(r",(?![^\[]*\])")  # a comma that is not in brackets
_UNREAD = "-"


def stored(shardings: Sequence[Sharding], axis: str = "tp") -> tuple[tuple[ShardingPlan, ...], tuple[int, ...]]:
    """The distinct shardings of an axis as text in order of first use, and for each block which one it has."""
    found: dict[ShardingPlan, int] = {}
    of_block = []
    for sharding in shardings:
        nodes, parameters, buffers, inputs, outputs = text(sharding)
        plan = ShardingPlan(
            axis=axis, nodes=nodes, parameters=parameters, buffers=buffers, inputs=inputs, outputs=outputs
        )
        of_block.append(found.setdefault(plan, len(found)))
    return tuple(found), tuple(of_block)


def restored(
    graph: Graph, shardings: Sequence[ShardingPlan], of_block: Sequence[int], degree: int
) -> tuple[Sharding, ...]:
    """The inverse of `stored`: the options are found again by the rules.

    Raises:
        PlanError: a block has no sharding or one that does not fit it, or a node cannot run as it says.
    """
    if len(of_block) != len(graph.blocks):
        raise PlanError(
            f"{graph.name} has {len(graph.blocks)} blocks, the plan says of {len(of_block)} how they are split"
        )
    moving = differentiable(graph)
    result = []
    for block, index in zip(graph.blocks, of_block, strict=True):
        if not 0 <= index < len(shardings):
            raise PlanError(f"block {block.name} has sharding {index}; the plan has {len(shardings)} of them")
        plan = shardings[index]
        _check_lengths(block, plan)
        result.append(
            Sharding(
                options=tuple(
                    _option(graph, block, node, words, degree, moving, plan.axis)
                    for node, words in zip(block.nodes, plan.nodes, strict=True)
                ),
                parameters=tuple(map(Placement.parse, plan.parameters)),
                buffers=tuple(map(Placement.parse, plan.buffers)),
                inputs=tuple(map(Placement.parse, plan.inputs)),
                outputs=tuple(map(Placement.parse, plan.outputs)),
            )
        )
    return tuple(result)


def _check_lengths(block: Block, plan: ShardingPlan) -> None:
    for name in ("nodes", "parameters", "buffers", "inputs", "outputs"):
        given, there = len(getattr(plan, name)), len(getattr(block, name))
        if given != there:
            raise PlanError(f"block {block.name} has {there} {name}, its sharding {given}; plan again")


def _option(
    graph: Graph, block: Block, index: int, words: str, degree: int, moving: frozenset[int], axis: str
) -> Option:
    """The option of a node that has the placements in `words`."""
    node = graph.nodes[index]
    operands, outputs = placements_of(words)
    seeds: dict[int, list[Placement]] = {}
    for tensor, placement in (
        *zip(operands_of(node), operands, strict=False),
        *zip(node.outputs, outputs, strict=False),
    ):
        if tensor is not None and placement is not None and placement.is_part:
            seeds.setdefault(tensor, []).append(placement)
    for option in options(node, graph.tensors, degree, seeds, moving, axis):
        if (option.operands, option.outputs) == (operands, outputs):
            return option
    raise PlanError(
        f"block {block.name}, {node.source}: no rule lets {node.op} run as {words} on {degree} ranks; plan again"
    )


def placements_of(words: str) -> tuple[tuple[Placement, ...], tuple[Placement | None, ...]]:
    """Operands and outputs of an option from its text.

    >>> [[str(p) for p in part] for part in placements_of("R,S0*2[64,32]>-,P")]
    [['R', 'S0*2[64,32]'], ['None', 'P']]

    Raises:
        PlanError: the text is none of an option.
    """
    if words.count(">") != 1:
        raise PlanError(f"{words!r} does not say what a node takes and makes, such as R,S0[64]>S1[64]")
    before, after = ([word for word in _BETWEEN.split(part) if word] for part in words.split(">"))
    return (
        tuple(map(Placement.parse, before)),
        tuple(None if word == _UNREAD else Placement.parse(word) for word in after),
    )
