"""A sharding in words that a person understands: which dim of each parameter is split, and what it means."""

from collections.abc import Iterator, Sequence

from planner.graph import Batch, Block, Graph, Node, Ref
from planner.shard.placement import Placement, Q, Sharding

# What the dims of a parameter mean to the operator that reads it as its n-th argument.
_MEANINGS: dict[tuple[str, int], tuple[str, ...]] = {
    ("linear", 1): ("output features", "input features"),
    ("linear", 2): ("output features",),
    ("addmm", 0): ("output features",),
    ("addmm", 2): ("input features", "output features"),
    ("mm", 1): ("input features", "output features"),
    ("matmul", 1): ("input features", "output features"),
    ("embedding", 0): ("vocabulary", "features"),
    ("convolution", 1): ("output channels", "input channels"),
    ("convolution", 2): ("output channels",),
    ("layer_norm", 2): ("features",),
    ("layer_norm", 3): ("features",),
    ("rms_norm", 2): ("features",),
    ("group_norm", 2): ("channels",),
    ("group_norm", 3): ("channels",),
    ("batch_norm", 1): ("channels",),
    ("batch_norm", 2): ("channels",),
    ("_grouped_mm", 1): ("experts", "input features", "output features"),
    ("dispatched_experts_mm", 1): ("experts", "input features", "output features"),
    ("rows_of_experts", 0): ("experts", "features"),
}
_SAME = {
    "conv1d": "convolution", "conv2d": "convolution", "conv3d": "convolution", "native_layer_norm": "layer_norm",
    "_fused_rms_norm": "rms_norm", "native_group_norm": "group_norm",
}  # fmt: skip


def parameter_words(graph: Graph, block: Block, sharding: Sharding, degree: int) -> tuple[str, ...]:
    """One line for each parameter of a block of the whole graph, named as the block knows it."""
    nodes = [graph.nodes[index] for index in block.nodes]
    lines = []
    for parameter, placement in zip(block.parameters, sharding.parameters, strict=True):
        tensor = graph.tensors[parameter]
        name = tensor.name.removeprefix(f"{block.name}.") if block.name else tensor.name
        if placement.is_split:
            meaning = _meaning(nodes, parameter, placement.dim) or f"dim {placement.dim}"
            lines.append(f"{name}: {meaning} split {degree} ways{_parts_words(placement)}")
        elif placement == Q and tensor.requires_grad:
            lines.append(f"{name}: whole on every rank, its gradient summed once a step")
        else:
            lines.append(f"{name}: whole on every rank")
    return tuple(lines)


def layout_words(placement: Placement) -> str:
    """What a rank has of a tensor between blocks.

    >>> layout_words(Placement.parse("S1[128]")), layout_words(Placement.parse("R"))
    ('split along dim 1', 'whole')
    """
    if placement.is_split:
        return f"split along dim {placement.dim}"
    return "a part of the sum" if placement.kind == "P" else "whole"


def _parts_words(placement: Placement) -> str:
    if placement.order:
        return f", in the order {' '.join(map(str, placement.order))}"
    repeats = placement.repeats.per_sample if isinstance(placement.repeats, Batch) else placement.repeats
    count = len(placement.parts) * repeats
    return f", each of its {count} parts" if count > 1 else ""


def _meaning(nodes: Sequence[Node], parameter: int, dim: int) -> str:
    """What a dim of a parameter is to its first reader that tells; "" if none does."""
    for node in nodes:
        for position in _positions(node, parameter):
            name = node.op.split(".")[1] if node.op.count(".") > 1 else node.op
            meanings = _MEANINGS.get((_SAME.get(name, name), position), ())
            if dim < len(meanings):
                return meanings[dim]
    return ""


def _positions(node: Node, tensor: int) -> Iterator[int]:
    return (index for index, arg in enumerate(node.args) if arg == Ref(tensor))
