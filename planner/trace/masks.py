"""Give attention its own kernel back: masks that depend on no input become `is_causal` or nothing.

Export turns the causal flag of Hugging Face models into a mask tensor, which would rule flash
attention out on a GPU. Such a mask is evaluated once, at batch 1.
"""

from dataclasses import replace

import torch

from planner.graph import Arg, Node, Ref, reads
from planner.trace import aten
from planner.trace.convert import FlatGraph
from planner.trace.cut import storages

ATTENTION = "aten.scaled_dot_product_attention.default"
_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
LARGEST_MASK = 2**28  # elements; a larger mask is left as it is


def fold_masks(flat: FlatGraph) -> FlatGraph:
    """The graph with every provably causal or full attention mask removed."""
    maker = {t: i for i, n in enumerate(flat.nodes) for t in n.outputs if t is not None}
    kinds: dict[int, str] = {}
    nodes = list(flat.nodes)
    writers = _writers(flat.nodes)
    for index, node in enumerate(nodes):
        if node.op != ATTENTION:
            continue
        named = {**dict(zip(_POSITIONAL[3:], node.args[3:], strict=False)), **dict(node.kwargs)}
        mask = named.get("attn_mask")
        if not isinstance(mask, Ref) or named.get("is_causal"):
            continue
        if mask.tensor not in kinds:
            kinds[mask.tensor] = mask_kind(flat, mask.tensor, maker, writers)
        kind = kinds[mask.tensor]
        if kind != "other":
            changed: dict[str, Arg] = {**named, "attn_mask": None, "is_causal": kind == "causal"}
            nodes[index] = replace(node, args=node.args[:3], kwargs=tuple(sorted(changed.items(), key=lambda i: i[0])))
    return replace(flat, nodes=tuple(nodes))


def mask_kind(flat: FlatGraph, mask: int, maker: dict[int, int], writers: dict[int, list[int]]) -> str:
    """`causal`, `full` or `other` (also when it depends on an input, a buffer or chance)."""
    needed = _cone(flat, mask, maker, writers)
    if needed is None:
        return "other"
    size = flat.tensors[mask].num_elements.at(1)
    if size > LARGEST_MASK:
        return "other"
    env = {t: _constant(flat, t) for node in needed for t in reads(node) if flat.tensors[t].kind == "constant"}
    aten.run_nodes(flat.tensors, needed, env, micro_batch=1, device=torch.device("cpu"))
    value = env[mask]
    allowed = value if value.dtype == torch.bool else value == 0
    if value.dtype != torch.bool and not bool(((value == 0) | (value <= -1e4)).all()):
        return "other"
    if bool(allowed.all()):
        return "full"
    rows, columns = allowed.shape[-2:] if allowed.ndim >= 2 else (0, 1)
    if rows == columns and bool((allowed == torch.ones(rows, columns, dtype=torch.bool).tril()).all()):
        return "causal"
    return "other"


def _cone(flat: FlatGraph, tensor: int, maker: dict[int, int], writers: dict[int, list[int]]) -> list[Node] | None:
    """Nodes that make a tensor from constants alone, in order; None if it needs anything else.

    `writers` are the nodes that write into a tensor or what shares its storage.
    """
    needed: set[int] = set()
    todo, seen = [tensor], {tensor}
    while todo:
        current = todo.pop()
        if current not in maker and flat.tensors[current].kind != "constant":
            return None
        for index in (*([maker[current]] if current in maker else []), *writers.get(current, ())):
            node = flat.nodes[index]
            if node.is_random:
                return None
            needed.add(index)
            fresh = {*reads(node), *(t for t in node.outputs if t is not None)} - seen
            seen |= fresh
            todo += sorted(fresh)
    return [flat.nodes[i] for i in sorted(needed)]


def _writers(nodes: tuple[Node, ...]) -> dict[int, list[int]]:
    """Tensor -> nodes that write into its storage."""
    storage = storages(nodes)
    groups: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        for tensor in node.mutates:
            groups.setdefault(storage[tensor], []).append(index)
    return {tensor: groups[group] for tensor, group in storage.items()}


def _constant(flat: FlatGraph, tensor: int) -> torch.Tensor:
    found = flat.tensors[tensor]
    dtype = getattr(torch, found.dtype)
    data = bytearray(found.value or b"")
    flat_value = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat_value.reshape([s for s in found.shape if isinstance(s, int)]).clone()
