"""What tracing found in a model: as plain data with stable keys, and as a table with what is out of the ordinary."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.graph import Batch, Block, Graph, Node, Ref, Tensor
from planner.units import format_bytes, format_count

MOST_NAMES = 4  # of parameters, nodes and the like in one line of text
LONGEST_NAME = 32  # of a block that joins several modules
SHOWN_BYTES = 1024  # of what a block keeps whatever the batch; less is left out of the table
_TORCH_OPERATORS = ("aten", "prim", "prims", "operator", "_operator", "math")
_ATTENTION = "scaled_dot_product_attention"


def trace_data(graph: Graph, *, precision: str) -> dict[str, Any]:
    """All that `autoplan trace --json` prints. Bytes and FLOP are of one sample unless a key ends with `_fixed`.

    Keys
        model, precision, has_graph, fingerprint
        parameters      total, trainable, frozen, unused (elements), unused_names
        flop            forward, backward: of all blocks
        inputs          name, shape (the batch is "batch"), dtype
        classes         index, blocks (how many), example (its first block), and the costs of one block
        blocks          name, kind, class, parameters, costs, outputs that cross the cut after it, and their bytes
            costs       flop_forward, flop_backward, saved_bytes (kept for backward), saved_bytes_fixed, input_bytes
        ties            names of one parameter, blocks that read it
        attention       how many calls are causal, full (no mask) or masked
        dropout, custom_operators, updated_buffers
                        block and source of each, with rate, operator or buffer
        prelude         nodes, bytes, makes: what depends on inputs only and is computed on every stage
        samples         couples, not_separable, unweighed: why a batch may not be split or weighed, "" = it may
        fallbacks       source, reason, cure: why there is no graph
    """
    parameters = [t for t in graph.tensors if t.kind == "parameter"]
    unused = set(graph.unused_parameters)
    return {
        "model": graph.name,
        "precision": precision,
        "has_graph": not graph.fallbacks,
        "fingerprint": graph.fingerprint,
        "parameters": {
            "total": _elements(parameters),
            "trainable": _elements(t for t in parameters if t.requires_grad),
            "frozen": _elements(t for t in parameters if not t.requires_grad),
            "unused": _elements(t for t in parameters if t.name in unused),
            "unused_names": list(graph.unused_parameters),
        },
        "flop": {phase: _flop(graph, graph.blocks, phase) for phase in ("forward", "backward")},
        "inputs": [_described(graph.tensors[i]) for i in graph.inputs],
        "classes": _classes(graph),
        "blocks": _blocks(graph),
        "ties": [
            {
                "names": _names_of(graph, graph.tensors[tensor].name),
                "blocks": [graph.blocks[i].name for i in readers],
            }
            for tensor, readers in graph.tie_groups
        ],
        "attention": _attention(graph),
        "dropout": [
            {**_place(graph, i), "operator": graph.nodes[i].op, "rate": _rate(graph.nodes[i])}
            for i in graph.dropout_nodes
        ],
        "custom_operators": [
            {**_place(graph, i), "operator": node.op, "name": _called(node)}
            for i, node in enumerate(graph.nodes)
            if node.op.split(".")[0] not in _TORCH_OPERATORS
        ],
        "updated_buffers": [
            {**_place(graph, i), "buffer": graph.tensors[t].name}
            for i, node in enumerate(graph.nodes)
            for t in node.mutates
            if graph.tensors[t].kind == "buffer"
        ],
        "prelude": {
            "nodes": len(graph.prelude.nodes),
            "bytes": graph.prelude.num_bytes.at(1),
            "makes": [
                _described(graph.tensors[t])
                for t in dict.fromkeys(t for block in graph.blocks for t in block.shared)
                if graph.tensors[t].kind != "input"
            ],
        },
        "samples": {
            "couples": graph.couples_samples,
            "not_separable": graph.not_separable,
            "unweighed": graph.unweighed,
        },
        "fallbacks": [{"source": f.source, "reason": f.reason, "cure": f.cure} for f in graph.fallbacks],
    }


def _elements(tensors: Iterable[Tensor]) -> int:
    return int(sum(t.num_elements.fixed for t in tensors))


def _flop(graph: Graph, blocks: Iterable[Block], phase: str) -> float:
    return sum(graph.classes[block.class_index].flop(phase).at(1) for block in blocks)


def _described(tensor: Tensor) -> dict[str, Any]:
    shape = [
        ("batch" if size.per_sample == 1 else f"{size.per_sample} batch") if isinstance(size, Batch) else size
        for size in tensor.shape
    ]
    return {"name": tensor.name, "shape": shape, "dtype": tensor.dtype}


def _names_of(graph: Graph, name: str) -> list[str]:
    return list(next((group for group in graph.aliases if name in group), (name,)))


def _costs(graph: Graph, block: Block) -> dict[str, Any]:
    return {
        "parameters": _elements(graph.tensors[p] for p in block.parameters),
        "flop_forward": _flop(graph, [block], "forward"),
        "flop_backward": _flop(graph, [block], "backward"),
        "saved_bytes": block.saved.per_sample,
        "saved_bytes_fixed": block.saved.fixed,
        "input_bytes": block.input_bytes.at(1),
    }


def _classes(graph: Graph) -> list[dict[str, Any]]:
    counts = Counter(block.class_index for block in graph.blocks)
    firsts: dict[int, Block] = {}
    for block in graph.blocks:
        firsts.setdefault(block.class_index, block)
    return [
        {"index": index, "blocks": counts[index], "example": first.name, **_costs(graph, first)}
        for index, first in sorted(firsts.items())
    ]


def _blocks(graph: Graph) -> list[dict[str, Any]]:
    rows = []
    for index, block in enumerate(graph.blocks):
        is_cut = bool(block.nodes) and index < len(graph.blocks) - 1
        crossing = graph.carried[index] if is_cut else ()
        rows.append(
            {
                "name": block.name,
                "kind": block.kind,
                "class": block.class_index,
                **_costs(graph, block),
                "crosses": [_described(graph.tensors[t]) | {"bytes": _bytes(graph.tensors[t])} for t in crossing],
                "crosses_bytes": sum(_bytes(graph.tensors[t]) for t in crossing),
            }
        )
    return rows


def _bytes(tensor: Tensor) -> float:
    return tensor.num_bytes.at(1)


def _place(graph: Graph, node: int) -> dict[str, str]:
    block = next((block.name for block in graph.blocks if node in block.nodes), "prelude")
    return {"block": block, "source": graph.nodes[node].source}


def _argument(node: Node, position: int, name: str, default: Any) -> Any:
    if position < len(node.args):
        return node.args[position]
    return dict(node.kwargs).get(name, default)


def _rate(node: Node) -> float | None:
    """The share of elements that a node drops, as far as an argument says it."""
    position, name = (4, "dropout_p") if _ATTENTION in node.op else (1, "p")
    rate = _argument(node, position, name, None)
    return float(rate) if isinstance(rate, int | float) and not isinstance(rate, bool) else None


def _attention(graph: Graph) -> dict[str, int]:
    """Calls of the fused kernel by what its mask has become."""
    counts = {"causal": 0, "full": 0, "masked": 0}
    for node in graph.nodes:
        if _ATTENTION in node.op:
            is_masked = isinstance(_argument(node, 3, "attn_mask", None), Ref)
            is_causal = _argument(node, 5, "is_causal", False) is True
            counts["masked" if is_masked else "causal" if is_causal else "full"] += 1
    return counts


def _called(node: Node) -> str:
    """What a node calls that is no operator of torch: the first text among its arguments, or the operator.

    The text is a name with a digest of the code behind `#`.
    """
    return next((a.partition("#")[0] for a in node.args if isinstance(a, str)), node.op)


def trace_text(graph: Graph, *, precision: str) -> RenderableType:
    """A table of the blocks, equal neighbours in one line, and a line for each thing that is out of the ordinary."""
    data = trace_data(graph, precision=precision)
    parameters, flop = data["parameters"], data["flop"]
    classes = f"{len(graph.blocks)} blocks of {len(data['classes'])} classes" if data["has_graph"] else "no graph"
    head = Text(
        f"{graph.name}: {format_count(parameters['total'])} parameters, {classes}, {precision}\n"
        f"one sample: {_flop_text(flop['forward'])} forward, {_flop_text(flop['backward'])} backward, "
        f"{format_bytes(sum(b['saved_bytes'] for b in data['blocks']))} kept for backward",
        style="bold",
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    columns = ("", "block" if data["has_graph"] else "module", "class", "parameters")
    for heading in (*columns, "forward\nFLOP", "backward\nFLOP", "kept for\nbackward", "crosses\nthe cut"):
        table.add_column(
            heading, justify="left" if heading in ("block", "module", "class") else "right", overflow="fold"
        )
    for run in _runs(data["blocks"]):
        first, last = run[0], run[-1]
        name = _short(first["name"])
        table.add_row(
            str(len(run)),
            name if len(run) == 1 else f"{name} .. {_short(last['name'])}",
            _letters(first["class"]),
            format_count(first["parameters"]),
            format_count(first["flop_forward"]),
            format_count(first["flop_backward"]),
            _fixed_and_sampled(first["saved_bytes_fixed"], first["saved_bytes"]),
            format_bytes(last["crosses_bytes"]) if data["has_graph"] and last is not data["blocks"][-1] else "-",
        )
    if any(block["saved_bytes_fixed"] >= SHOWN_BYTES for block in data["blocks"]):
        table.caption = "a + b kept: a for each sample, b once for a micro-batch of any size"
        table.caption_justify = "left"
    lines = _remarks(data)
    return Group(head, table, "", *(Text(line) for line in lines))


def _runs(blocks: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Neighbours of one class that keep and pass on as much."""
    keys = ("class", "saved_bytes", "saved_bytes_fixed", "crosses_bytes")
    inner = [list(run) for _, run in groupby(blocks[:-1], key=lambda block: [block[k] for k in keys])]
    if not inner:
        return [[block] for block in blocks]
    last = blocks[-1]
    if all(inner[-1][-1][k] == last[k] for k in keys[:3]):
        return [*inner[:-1], [*inner[-1], last]]
    return [*inner, [last]]


def _short(name: str) -> str:
    """A block's name for a column: of a block that joins several modules the first, and how many more.

    >>> _short("blocks.1"), _short("embed.tokens+embed.norm"), _short("encoder.layer_norm+encoder.head+decoder")
    ('blocks.1', 'embed.tokens+embed.norm', 'encoder.layer_norm + 2 more')
    """
    parts = name.split("+")
    if len(name) <= LONGEST_NAME or len(parts) == 1:
        return name or "the rest"
    return f"{parts[0]} + {len(parts) - 1} more"


def _letters(index: int) -> str:
    """A, B, ..., Z, AA, AB, ...

    >>> [_letters(i) for i in (0, 25, 26, 27)]
    ['A', 'Z', 'AA', 'AB']
    """
    return (_letters(index // 26 - 1) if index >= 26 else "") + chr(ord("A") + index % 26)


def _flop_text(flop: float) -> str:
    """FLOP with the decimal prefix joined to the unit.

    >>> _flop_text(3.2e12), _flop_text(4.0e16), _flop_text(12)
    ('3.2 TFLOP', '40 PFLOP', '12 FLOP')
    """
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if flop >= size:
            return f"{flop / size:.3g} {unit}FLOP"
    return f"{flop:.3g} FLOP"


def _fixed_and_sampled(fixed: float, per_sample: float) -> str:
    text = format_bytes(per_sample)
    return f"{text} + {format_bytes(fixed)}" if fixed >= SHOWN_BYTES else text


def _remarks(data: Mapping[str, Any]) -> list[str]:
    """One line for each thing that a plan has to mind."""
    parameters, samples, prelude = data["parameters"], data["samples"], data["prelude"]
    lines = []
    for fallback in data["fallbacks"]:
        lines.append(f"no graph: {fallback['source']}: {fallback['reason']}; {fallback['cure']}")
    if data["fallbacks"]:
        lines.append("without a graph: data parallelism and ZeRO, no pipeline, no recomputation")
    for tie in data["ties"]:
        lines.append(f"tied: {' = '.join(tie['names'])}, read by {_listed([_short(b) for b in tie['blocks']])}")
    if parameters["frozen"]:
        lines.append(f"frozen: {format_count(parameters['frozen'])} of {format_count(parameters['total'])} parameters")
    if parameters["unused_names"]:
        names = _listed(parameters["unused_names"])
        lines.append(f"unused: {format_count(parameters['unused'])} parameters that the loss does not read ({names})")
    if calls := [f"{count} {kind}" for kind, count in data["attention"].items() if count]:
        lines.append(f"attention: {', '.join(calls)}")
    if dropout := data["dropout"]:
        rates = sorted({d["rate"] for d in dropout if d["rate"] is not None})
        at = f" at rate {', '.join(f'{rate:g}' for rate in rates)}" if rates else ""
        lines.append(f"dropout: {len(dropout)} places{at} ({_sources(dropout)})")
    for kind, heading, key in (
        ("custom_operators", "your own code, called as it is", "name"),
        ("updated_buffers", "buffers that forward updates", "buffer"),
    ):
        if found := data[kind]:
            names = _listed([item[key] for item in found])
            lines.append(f"{heading}: {len(found)} ({names}; {_sources(found)})")
    if prelude["makes"]:
        made = _listed([f"{m['dtype']} {'x'.join(map(str, m['shape']))}" for m in prelude["makes"]])
        lines.append(
            f"made of inputs alone, on every stage anew: {made} "
            f"({prelude['nodes']} operators, {format_bytes(prelude['bytes'])})"
        )
    if samples["couples"]:
        lines.append(f"compares samples, so a batch is not split: {samples['couples']}")
    if samples["not_separable"]:
        lines.append(f"depends on how a batch is split: {samples['not_separable']}")
    if samples["unweighed"]:
        lines.append(f"micro-batches must have equally many valid targets: {samples['unweighed']}")
    return lines


def _listed(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - MOST_NAMES} more" if len(distinct) > MOST_NAMES else ""
    return ", ".join(distinct[:MOST_NAMES]) + more


def _sources(items: Sequence[Mapping[str, Any]]) -> str:
    """`file:line` of the first few, the file without its folder."""
    return _listed([Path(item["source"]).name for item in items if item["source"]])
