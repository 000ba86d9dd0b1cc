"""Tokens sorted by expert and put back: an order of rows that cancels out.

A mixture of experts sorts the rows of all samples by their expert, multiplies each group with its expert's matrix, and
undoes the order. Taken op by op that picks samples of a batch by number; taken together every row is computed from
itself alone. This is proven here for one sort at a time: each tensor that the order reaches must be one of the forms
below, and each operator on it one that keeps a row a function of that row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from planner.graph import Batch, Node, Ref, RowOrder, Tensor, reads
from planner.trace import aten

_INDEX = {"index", "index_select", "embedding"}
_SAME = {"to", "_to_copy", "clone", "contiguous", "detach", "alias", "float"}
_ROW_WISE = {"linear", "matmul", "mm", "layer_norm", "rms_norm", "softmax", "_softmax", "sum", "mean", "chunk", "split",
             "slice", "select", "unsqueeze", "squeeze", "to", "_to_copy", "clone", "contiguous", "detach", "alias",
             "unbind", "view", "reshape", "expand"}  # fmt: skip


def cancelled_orders(tensors: Sequence[Tensor], nodes: Sequence[Node]) -> frozenset[int]:
    """Positions in `nodes` of those that make, use or undo an order of rows without a trace of it in the results."""
    return orders_of_rows(tensors, nodes)[0]


def orders_of_rows(tensors: Sequence[Tensor], nodes: Sequence[Node]) -> tuple[frozenset[int], Mapping[int, RowOrder]]:
    """The positions of `cancelled_orders`, and what tensors (by index) are in these orders."""
    result: set[int] = set()
    forms: dict[int, RowOrder] = {}
    torn: set[int] = set()  # not the same in two orders
    for start, node in enumerate(nodes):
        if _name(node) in ("sort", "argsort") and start not in result and (found := _reach(tensors, nodes, start)):
            reached, known = found
            result |= reached
            torn |= {t for t, form in known.items() if forms.get(t, form) != form}
            forms |= known
    return frozenset(result), {t: form for t, form in forms.items() if t not in torn}


def _reach(
    tensors: Sequence[Tensor], nodes: Sequence[Node], start: int
) -> tuple[set[int], Mapping[int, RowOrder]] | None:
    """The nodes that the order made by `nodes[start]` reaches, and forms of tensors; None if it does not cancel out."""
    first = nodes[start].args[0]
    if _is_descending(nodes[start]):
        return None  # groups are counted upwards
    if not isinstance(first, Ref) or len(shape := tensors[first.tensor].shape) != 1 or not isinstance(shape[0], Batch):
        return None
    count = shape[0].per_sample
    *values, places = nodes[start].outputs
    known = {t: RowOrder("keys") for t in values if t is not None}
    if places is not None:
        known[places] = RowOrder("places")
    unsorted = _Unsorted(count, {first.tensor})
    reached = {start}
    for position, node in enumerate(nodes):
        if counts := unsorted.counts(node, tensors):
            reached.add(position)
            known.update(dict.fromkeys(counts, RowOrder("counts")))
        if position <= start or not any(t in known for t in reads(node)):
            continue
        reached.add(position)
        form = _form(node, tensors, known, unsorted.numbers, count)
        if form is None:
            return None
        for tensor in (*node.mutates, *_made(node)):
            if isinstance(form, RowOrder):
                known[tensor] = form
            else:
                known.pop(tensor, None)
    return reached, known


@dataclass(slots=True)
class _Unsorted:
    """What is known of tensors whose rows are not in the order."""

    count: int
    keys: set[int]
    numbers: set[int] = field(default_factory=set)  # of all rows
    counters: set[int] = field(default_factory=set)  # 0, 1, 2, ... of another length
    hits: set[int] = field(default_factory=set)  # [row, key]: is it the key of the row

    def counts(self, node: Node, tensors: Sequence[Tensor]) -> list[int]:
        """Look at a node; the tensors it makes, if they are how often each key occurs."""
        name, operands, made = _name(node), set(reads(node)), _made(node)
        if name == "arange":
            starts_at_zero = len(node.args) == 1 or (len(node.args) == 2 and node.args[0] == 0)
            if node.args == (Batch(self.count),):
                self.numbers.update(made)
            elif starts_at_zero:
                self.counters.update(made)
        if not operands:
            return []
        if (name in _SAME or name == "unsqueeze") and operands <= self.keys:
            self.keys.update(made)
        elif (name in _SAME and operands <= self.hits) or (
            name == "eq" and operands & self.keys and operands - self.keys <= self.counters
        ):
            self.hits.update(made)
        elif not any(tensors[t].is_batched for t in made):
            is_sum = name == "sum" and operands <= self.hits and node.args[1:2] in ((0,), ((0,),))
            if is_sum or (name == "histc" and operands <= self.keys and _from_zero(node)):
                return made
        return []


def _is_descending(node: Node) -> bool:
    return True in node.args[1:] or bool(dict(node.kwargs).get("descending"))


def _made(node: Node) -> list[int]:
    return [t for t in node.outputs if t is not None]


def _from_zero(node: Node) -> bool:
    """Whether a histogram leaves out no small key, which would shift the ends of all others.

    From 0 to 0 it would run from the smallest key that there is to the largest.
    """
    low, high = node.args[2:4] if len(node.args) > 3 else (None, None)
    return low == 0 and isinstance(high, int | float) and high > 0


def _form(
    node: Node, tensors: Sequence[Tensor], known: Mapping[int, RowOrder], numbers: set[int], count: int
) -> RowOrder | bool | None:
    """The form of what a node makes of ordered tensors; True = none of them; None = the order shows."""
    name = _name(node)
    if name.endswith("_like") or name.startswith("new_"):
        return True  # takes the shape only
    if node.is_random:
        return None
    operands: list[int | None] = [arg.tensor if isinstance(arg, Ref) else None for arg in node.args]
    forms = [known[t].form if t in known else None for t in operands if t is not None]
    first = operands[0] if operands else None

    def is_batched(tensor: int) -> bool:
        shape = tensors[tensor].shape
        return bool(shape) and isinstance(shape[0], Batch)

    if name == "histc" and forms == ["keys"] and _from_zero(node):
        return RowOrder("counts")
    if name == "cumsum" and forms == ["counts"]:
        return RowOrder("ends")
    if name in _SAME and first is not None and first in known:
        return known[first]
    if name == "floor_divide" and forms == ["places"] and isinstance(node.args[1], int) and first is not None:
        group = known[first].group * node.args[1]
        return RowOrder("places", group) if node.args[1] > 0 and count % group == 0 else None
    if name == "argsort" and not _is_descending(node) and first is not None and known.get(first) == RowOrder("places"):
        return RowOrder("inverse")
    if name == "_grouped_mm":
        is_dispatched = forms[:1] == ["rows"] and forms[2:3] == ["ends"] and forms[1] is None
        return RowOrder("rows") if is_dispatched else None
    if name == "index_put":
        return _put(node, known, numbers)
    if name in _INDEX:
        return _picked(node, name, tensors, known, count, is_batched)
    if name in ("softmax", "_softmax") and first is not None and node.args[1] in (0, -len(tensors[first].shape)):
        return None
    if name in ("layer_norm", "rms_norm") and Batch(count) in (node.args[1] or ()):  # type: ignore[operator]
        return None
    is_row_wise = name in _ROW_WISE or torch.Tag.pointwise in getattr(aten.torch_operator(node.op), "tags", ())
    ordered = [known[t].form for t in reads(node) if t in known]
    others = [t for t in reads(node) if t not in known and any(isinstance(s, Batch) for s in tensors[t].shape)]
    if not is_row_wise or others or not set(ordered) <= {"rows", "keys"}:
        return None
    made = [tensors[t].shape for t in _made(node)]
    if all(shape and shape[0] == Batch(count) for shape in made):
        return RowOrder("rows")
    is_reduced = name in ("sum", "mean") and not any(isinstance(s, Batch) for shape in made for s in shape)
    return True if is_reduced else None


def _put(node: Node, known: Mapping[int, RowOrder], numbers: set[int]) -> RowOrder | None:
    """`inverse[places] = numbers of all rows`."""
    target, indices, values = node.args[:3]
    if not (isinstance(target, Ref) and isinstance(values, Ref) and isinstance(indices, tuple) and len(indices) == 1):
        return None
    index = indices[0]
    is_whole = isinstance(index, Ref) and known.get(index.tensor) == RowOrder("places") and target.tensor not in known
    adds = len(node.args) > 3 and node.args[3]
    return RowOrder("inverse") if is_whole and values.tensor in numbers and not adds else None


def _picked(
    node: Node, name: str, tensors: Sequence[Tensor], known: Mapping[int, RowOrder], count: int,
    is_batched: Callable[[int], bool],
) -> RowOrder | bool | None:  # fmt: skip
    """Rows by number: into the order, out of it, or of a table by their keys."""
    table = node.args[0]
    given: Any = node.args[1] if name != "index_select" else (node.args[2] if node.args[1] == 0 else None)
    index = given[0] if isinstance(given, tuple) and len(given) == 1 else given
    if not isinstance(table, Ref) or not isinstance(index, Ref):
        return None
    source, number = known.get(table.tensor), known.get(index.tensor)
    if source is None and number is not None and number.form == "places" and is_batched(table.tensor):
        size = tensors[table.tensor].shape[0]
        return RowOrder("rows") if size == Batch(count // number.group) else None
    if source is not None and source.form in ("rows", "keys") and number == RowOrder("inverse"):
        return True
    if source is None and number is not None and number.form in ("rows", "keys") and not is_batched(table.tensor):
        return RowOrder("rows")
    return None


def _name(node: Node) -> str:
    """`index_put` of `aten.index_put_.default`."""
    return node.op.split(".")[1].rstrip("_") if node.op.count(".") > 1 else node.op
