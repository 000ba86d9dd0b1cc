"""Per ATen operator: which dims may be split over the ranks of an axis, and what that makes of each tensor.

call          what a rule sees, and the einsum-like notation that rules are written in
matmul        products, attention, norms, embedding, losses, dropout, reductions
pointwise     one rule for every operator that works element by element
views         splits through the factors of shapes
convolution   convolutions, pooling, norms of channels
indexing      selecting, joining, sorting
experts       grouped products
nested        what communicates over another axis
own_samples   what the ranks of `ep` do, which have samples of their own
special       what operators of `planner.*` communicate inside

A new operator is one line of a table; `tests/test_shard_rules.py` proves every operator of the tables.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from planner.graph import Node, Tensor
from planner.shard.placement import Option, Placement, operands_of
from planner.shard.rules import convolution, experts, indexing, matmul, nested, own_samples, pointwise, views
from planner.shard.rules.call import Call, Rule, options_of

TABLE: Mapping[str, Rule] = {
    **pointwise.TABLE, **views.TABLE, **matmul.TABLE, **convolution.TABLE, **indexing.TABLE, **experts.TABLE,
    **nested.TABLE,
}  # fmt: skip


def line_of(op: str) -> str | None:
    """The line of the table for an operator: that of the overload, else of all overloads, else of the one not in place.

    >>> line_of("aten.add_.Tensor"), line_of("aten.var.correction"), line_of("aten.nonzero.default")
    ('aten.add', 'aten.var.correction', None)
    """
    packet, _, overload = op.rpartition(".")
    if overload == "out" or overload.endswith("_out"):
        return None  # what it writes into keeps its whole size
    return next((name for name in (op, packet, packet.removesuffix("_")) if name in TABLE), None)


def _rule_of(op: str) -> Rule | None:
    line = line_of(op)
    return None if line is None else TABLE[line]


def has_rule(op: str) -> bool:
    """Whether an operator may be split at all.

    >>> has_rule("aten.add_.Tensor"), has_rule("aten.nonzero.default")
    (True, False)
    """
    return line_of(op) is not None


def options(
    node: Node,
    tensors: Sequence[Tensor],
    degree: int,
    seeds: Mapping[int, Collection[Placement]] = {},
    gradients: Collection[int] = frozenset(),
    axis: str = "tp",
) -> tuple[Option, ...]:
    """Every way to run a node on `degree` ranks of a mesh axis, the replicated one first.

    `seeds` are splits that the node's neighbours may have, by tensor: each that the rule allows gives an option. Splits
    of a whole dim that is no batch are always given. `gradients` are the tensors that a gradient flows through; others
    are R where these would be Q. On `ep` ranks have samples of their own, and only experts are split.
    """
    if axis == "ep":
        plain = {t: [replace(seed, order=()) for seed in found] for t, found in seeds.items()}
        whole = options_of(Call(node, tensors, degree, plain, frozenset()), _allowed)
        return own_samples.options(node, tensors, degree, seeds, whole)
    found = options_of(Call(node, tensors, degree, seeds, gradients), _allowed)
    touched = (*operands_of(node), *(t for t in node.outputs if t is not None))
    sent = {t for t in touched if (order := tensors[t].order) is not None and order.form == "sent"}
    return experts.of_sent(node, found, sent) if sent else found


def _allowed(call: Call) -> Iterator[Option]:
    """By the operator's rule, and by the order of rows that the node is in."""
    if (rule := _rule_of(call.node.op)) is not None:
        yield from rule(call)
    yield from experts.in_order(call)
