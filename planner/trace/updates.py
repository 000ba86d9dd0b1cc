"""Buffers that forward updates: which of them data-parallel ranks can bring to the value that one device has.

The reference is one device that runs the micro-batches of all data ranks in order. A running mean, a counter, a moving
average is a recursion s <- decay * s + x where x does not depend on s: from what each rank has after its own
micro-batches, one sum over the ranks gives exactly the reference (`planner.runtime.statistics`). Here the decay is read
off the graph: every tensor is followed as a linear function of the values that buffers have when forward starts.

A buffer that is no such recursion, or whose value the loss or another buffer uses, makes ranks go apart from one
device: more than one data rank is refused. Where its update depends on no sample (power iteration, a schedule) all
ranks stay equal to each other and to one device with as many, larger micro-batches: nothing needs to be done.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planner.graph import Arg, Batch, BatchNumber, BufferUpdate, Node, Ref, Tensor, reads, refs

# The value itself, in another place or shape.
_KEEPS = {
    "clone", "detach", "alias", "view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "flatten", "unflatten",
    "contiguous", "to", "_to_copy", "lift_fresh_copy",
}  # fmt: skip
# Operators with running statistics at arguments 3 and 4, written if argument 5 is set, decaying by 1 - argument 6.
_NORMS = ("aten.batch_norm.default", "aten.instance_norm.default")


@dataclass(frozen=True, slots=True)
class _Value:
    """A tensor as `sum of factor * buffer at the start` plus the rest; `mixed` are buffers it depends on otherwise."""

    factors: Mapping[int, float] = field(default_factory=dict)
    mixed: frozenset[int] = frozenset()
    sees_samples: bool = False

    @property
    def buffers(self) -> frozenset[int]:
        """All buffers it depends on."""
        return self.mixed | {buffer for buffer, factor in self.factors.items() if factor}

    def times(self, factor: float) -> "_Value":
        """Its multiple."""
        return _Value({b: f * factor for b, f in self.factors.items()}, self.mixed, self.sees_samples)

    def plus(self, other: "_Value") -> "_Value":
        """The sum of both."""
        factors = {b: self.factors.get(b, 0.0) + other.factors.get(b, 0.0) for b in (*self.factors, *other.factors)}
        return _Value(factors, self.mixed | other.mixed, self.sees_samples or other.sees_samples)

    def tangled(self) -> "_Value":
        """Something of it that is not linear."""
        return _Value({}, self.buffers, self.sees_samples)


def updates(tensors: Sequence[Tensor], nodes: Sequence[Node], loss: int) -> tuple[tuple[BufferUpdate, ...], str]:
    """(recursions that data ranks have to merge, why there may be only one data rank or ""); `nodes` in order."""
    updated = list(dict.fromkeys(t for n in nodes for t in n.mutates if tensors[t].kind == "buffer"))
    if not updated:
        return (), ""
    followed = _Followed(tensors, nodes, updated)
    for node in nodes:
        followed.run(node)
    final = {buffer: followed.value(buffer) for buffer in updated}
    sees_samples = {buffer for buffer, value in final.items() if value.sees_samples}
    while more := {b for b, v in final.items() if v.buffers & sees_samples} - sees_samples:
        sees_samples |= more
    of_loss = followed.value(loss).buffers
    found = []
    for buffer, value in final.items():
        users = [b for b, other in final.items() if b != buffer and buffer in other.buffers]
        is_used = buffer in of_loss or bool(users)
        is_recursion = not value.mixed and not value.buffers - {buffer}
        if is_recursion and not is_used and not tensors[buffer].dtype.startswith("complex"):
            found.append(BufferUpdate(buffer=buffer, decay=value.factors.get(buffer, 0.0)))
        elif buffer in sees_samples:
            source = next(n.source for n in reversed(nodes) if buffer in n.mutates)
            reason = (
                "and the loss uses it" if buffer in of_loss
                else "mixed with another buffer" if users or value.buffers - {buffer}
                else "in another way than as a running mean"
            )  # fmt: skip
            return (), f"{source}: forward updates buffer {tensors[buffer].name} by its samples, {reason}"
    return tuple(found), ""


class _Followed:
    """Values of tensors as the nodes run."""

    def __init__(self, tensors: Sequence[Tensor], nodes: Sequence[Node], updated: Sequence[int]) -> None:
        self.tensors = tensors
        self.updated = frozenset(updated)
        self.values: dict[int, _Value] = {}
        self.shares: dict[int, set[int]] = {}  # tensor -> all tensors that may have its storage
        for node in nodes:
            for alias in node.aliases:
                group = self.shares.setdefault(alias, {alias})
                for made in node.outputs:
                    if made is not None:
                        group |= self.shares.get(made, {made})
                self.shares.update((t, group) for t in tuple(group))

    def value(self, tensor: int) -> _Value:
        """What is known of a tensor now."""
        if tensor not in self.values:
            described = self.tensors[tensor]
            sees_samples = described.kind == "input" or described.is_batched
            self.values[tensor] = _Value({tensor: 1.0} if tensor in self.updated else {}, sees_samples=sees_samples)
        return self.values[tensor]

    def run(self, node: Node) -> None:
        """Follow one node."""
        if node.op in _NORMS and node.mutates:
            self._norm(node)
            return
        result = self._result(node)
        made = [t for t in node.outputs if t is not None]
        for tensor in made:
            is_batched = self.tensors[tensor].is_batched
            self.values[tensor] = _Value(result.factors, result.mixed, result.sees_samples or is_batched)
        for tensor in node.mutates:
            self._write(tensor, result, node)

    def _write(self, tensor: int, result: _Value, node: Node) -> None:
        """All of a storage has the new value; if only a part of it was written, what it holds is tangled."""
        written = {t for t in node.mutates if self.tensors[t].kind != "buffer"} or {tensor}
        sizes = {self.tensors[t].num_elements for t in written}
        for other in self.shares.get(tensor, {tensor}):
            if sizes == {self.tensors[other].num_elements}:
                self.values[other] = result
            else:
                self.values[other] = self.value(other).plus(result).tangled()

    def _norm(self, node: Node) -> None:
        """Batch statistics normalise; the running ones decay."""
        operand = self.value(next(refs(node.args[0])))
        momentum = node.args[6]
        assert isinstance(momentum, int | float)
        for tensor in node.outputs:
            if tensor is not None:
                self.values[tensor] = _Value({}, operand.buffers, True)
        for statistics in (*refs(node.args[3]), *refs(node.args[4])):
            old = self.value(statistics).times(1.0 - momentum)
            for other in self.shares.get(statistics, {statistics}):
                self.values[other] = _Value(old.factors, old.mixed | operand.buffers, True)

    def _result(self, node: Node) -> _Value:
        """What the node makes, or writes."""
        _, _, name = node.op.partition(".")
        name, _, overload = name.partition(".")
        name = name.rstrip("_")
        kwargs = dict(node.kwargs)
        given = list(refs(node.args)) if overload == "out" else list(reads(node))
        values = [self.value(t) for t in dict.fromkeys(given)]
        result = _Value(sees_samples=any(v.sees_samples for v in values))
        if not any(v.buffers for v in values):
            return result
        first, second = (*(self._operand(arg) for arg in node.args[:2]), None, None)[:2]
        made = next((t for t in node.outputs if t is not None), None)
        if name in _KEEPS and first is not None and made is not None and self._keeps_kind(node, made):
            return first
        if name == "copy" and second is not None:
            return second
        if name in ("fill", "zero"):
            return second or _Value()
        if name == "neg" and first is not None:
            return first.times(-1.0)
        if name in ("add", "sub", "rsub") and first is not None and second is not None:
            alpha = kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
            if isinstance(alpha, int | float):
                scaled = second.times(alpha if name == "add" else -alpha)
                return first.plus(scaled) if name != "rsub" else second.plus(first.times(-alpha))
        factor = node.args[1] if len(node.args) > 1 else None
        if name in ("mul", "div") and first is not None and isinstance(factor, int | float) and not kwargs:
            return first.times(factor if name == "mul" else 1.0 / factor)
        weight = node.args[2] if len(node.args) > 2 else None
        if name == "lerp" and first is not None and second is not None and isinstance(weight, int | float):
            return first.times(1.0 - weight).plus(second.times(weight))
        for value in values:
            result = result.plus(value)
        return result.tangled()

    def _operand(self, arg: Arg) -> _Value | None:
        """The value of a tensor or number."""
        if isinstance(arg, Ref):
            return self.value(arg.tensor)
        return _Value() if isinstance(arg, int | float | Batch | BatchNumber) else None

    def _keeps_kind(self, node: Node, made: int) -> bool:
        """Whether no digit is lost: a float that becomes an integer is rounded."""
        before = self.tensors[next(refs(node.args))].dtype
        after = self.tensors[made].dtype
        return before == after or not after.startswith(("int", "uint", "bool"))
