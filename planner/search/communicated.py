"""What a block communicates over an axis, for people: each collective with the operator that causes it."""

from collections import Counter
from collections.abc import Iterable

from planner.graph import CONVERSIONS, Batch, Block, Graph, Node, reads
from planner.memory import shard_elements
from planner.plan import CollectivePlan, Phase
from planner.shard.placement import Q, Sharding

_ORDER: tuple[Phase, ...] = ("forward", "backward", "step")
_MOST_NAMED = 3


def communicated(local: Graph, block: Block, axis: str, micro_batch: int) -> tuple[CollectivePlan, ...]:
    """What a block of a rank's graph communicates over an axis for one micro-batch; the same of one cause together."""
    counts = Counter(
        (made.phase, made.collective, made.num_bytes.at(micro_batch), _cause(local, block, made.node, made.phase))
        for made in local.classes[block.class_index].collectives
        if made.axis == axis
    )
    return tuple(
        CollectivePlan(collective=collective, phase=phase, count=count, num_bytes=num_bytes, cause=cause)
        for (phase, collective, num_bytes, cause), count in sorted(
            counts.items(), key=lambda row: (_ORDER.index(row[0][0]), row[0])
        )
    )


def summed_once_a_step(
    whole: Graph, block: Block, sharding: Sharding, *, shards: int, bytes_per_element: float
) -> tuple[CollectivePlan, ...]:
    """The sum over tp of gradients of which each rank has a part: of its shard of each, by ZeRO, in one all-reduce."""
    partial = [
        whole.tensors[parameter]
        for parameter, placement in zip(block.parameters, sharding.parameters, strict=True)
        if placement == Q and whole.tensors[parameter].requires_grad
    ]
    if not partial:
        return ()
    shapes = [tuple(size for size in t.shape if not isinstance(size, Batch)) for t in partial]
    elements = sum(shard_elements(shape, shards) for shape in shapes)
    names = [_relative(tensor.name, block) for tensor in partial]
    return (
        CollectivePlan(
            collective="all_reduce", phase="step", count=1, num_bytes=float(elements * bytes_per_element),
            cause=f"gradients of {_listed(names)}",
        ),
    )  # fmt: skip


def _cause(graph: Graph, block: Block, place: int, phase: Phase) -> str:
    """The operator that makes what is communicated, or that reads what has the gradient that is; with its line."""
    if place < 0:
        return ""
    node = graph.nodes[block.nodes[place]]
    if not _is_conversion(node):
        return _named(graph, block, [node])
    nodes = [graph.nodes[i] for i in block.nodes]
    moved = next(reads(node))
    if phase == "forward":
        makers = [other for other in nodes if moved in other.outputs]
        if makers:
            return f"what {_named(graph, block, makers)} makes"
        tensor = graph.tensors[moved]
        return _relative(tensor.name, block) if tensor.kind != "activation" else "what comes in"
    readers = _readers(nodes, node)
    return f"gradient of what {_named(graph, block, readers)} takes" if readers else "gradient of what is handed on"


def _readers(nodes: Iterable[Node], conversion: Node) -> list[Node]:
    """Operators that take what a conversion makes, through others if need be."""
    made, found = set(conversion.outputs), []
    for node in nodes:
        if any(t in made for t in reads(node)):
            if _is_conversion(node) or (node.aliases and not node.mutates):
                made.update(node.outputs)
            else:
                found.append(node)
    return found


def _is_conversion(node: Node) -> bool:
    parts = node.op.split(".")
    return parts[0] == "planner" and parts[1] in CONVERSIONS


def _named(graph: Graph, block: Block, nodes: Iterable[Node]) -> str:
    """`linear of up.weight (model.py:31)`."""
    found: dict[str, None] = {}
    line = ""
    for node in nodes:
        parameters = [_relative(graph.tensors[t].name, block) for t in reads(node) if _is_parameter(graph, t)]
        found[node.op.split(".")[1] + (f" of {parameters[0]}" if parameters else "")] = None
        line = line or node.source.rpartition("/")[2]
    return _listed([*found]) + (f" ({line})" if line else "")


def _is_parameter(graph: Graph, tensor: int) -> bool:
    return graph.tensors[tensor].kind == "parameter"


def _relative(name: str, block: Block) -> str:
    return name.removeprefix(f"{block.name}.") if block.name else name


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
