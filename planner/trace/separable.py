"""Is the loss a mean over samples? If not, micro-batches and data-parallel ranks compute another loss.

Every tensor that depends on the batch has a degree: how it grows when the batch does. A tensor with a batch dim starts
at 0, a sum over samples adds 1, a mean adds nothing, dividing by the batch size takes 1 away. After the reduction only
linear operators keep the degree. A loss of degree 0 is a mean over samples; of another degree it is a sum; and a
nonlinear operator on a reduced value (a product of two means, a norm of a mean) has none.

A division by a value that inputs alone determine, such as the number of unmasked tokens, keeps the loss a mean only
where that value is the same in all micro-batches: the runtime gives each of them its part of the whole batch's value.

Beside the degree the *parts* of the loss are followed: reductions over the samples that the loss is linear in. The
runtime weighs each part in each micro-batch, so that their mean is the part of the whole batch although micro-batches
differ in samples, valid targets or divisors. A part that a divisor of degree d divides is weighed by
(samples / mean samples) ** (1 - d): a masked sum over its masked count is not weighed at all.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.graph import KEEPS_ORDER, Batch, Node, Ref, Tensor, reads, sample_runs
from planner.trace import aten
from planner.trace.dispatch import cancelled_orders

KEEP = {
    "neg", "view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "expand", "clone", "contiguous", "to", "_to_copy",
    "detach", "alias", "permute", "transpose", "t", "flatten", "slice", "select", "lift_fresh_copy", "copy", "float",
    "type_as", "where", "index_select", "narrow", "unbind", "split", "chunk",
}  # fmt: skip
ADD = {"add", "sub", "rsub", "cat", "stack"}
CLAMP = {"clamp", "clamp_min", "maximum", "max"}
CONTRACT = {"mm", "matmul", "dot", "mv", "vdot", "bmm"}
ALONG_DIM = {
    "softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "argsort", "flip", "roll",
    "topk",
}  # fmt: skip
INDEX = {"index", "index_select", "gather", "take", "take_along_dim", "index_put", "scatter", "scatter_add"}
BAG = {"embedding_bag": 1, "_embedding_bag": 1}  # sum parts of the rows that this argument names
# Operators that normalise over the last dims, as many as `normalized_shape` names.
NORMALISE_LAST = {"layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"}
# Operators with windows over the last dims, as many as their names say: `conv2d`, `max_pool1d_with_indices`.
WINDOW = re.compile(r"(conv|conv_transpose|(?:adaptive_)?(?:avg|max)_pool|upsample_\w+?)([123])d")
MEAN, SUM = 1, 2


@dataclass(frozen=True, slots=True)
class State:
    """What is known of a tensor: `degree` None = not linear in the samples; `why` is where and what made it so."""

    depends: bool
    is_given: bool  # inputs alone determine it
    degree: int | None = 0
    why: str = ""
    is_position: bool = False  # the numbers of the samples, fit to index with and for nothing else
    starts_of: Batch | None = None  # of as many rows, those at which equal parts begin, one for each sample


@dataclass(frozen=True, slots=True)
class Given:
    """A value that the loss is divided (or multiplied) by, of the samples of a batch, from inputs alone.

    `sums` are the reductions over samples that it is made of, with their degrees: what can be added up over
    micro-batches.
    """

    tensor: int
    degree: int
    sums: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Separability:
    """`sums`: why the loss is a sum; `mixes`: why it is no mean.

    `parts` are the reductions that the loss is linear in, with the power of the samples' share that weighs them;
    `divisors` what they are divided by.
    """

    sums: str = ""
    mixes: str = ""
    parts: tuple[tuple[int, int], ...] = ()
    divisors: tuple[Given, ...] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    """What divided a tensor so far: net degree, and by which tensors."""

    degree: int = 0
    by: frozenset[int] = frozenset()

    def divided(self, other: "_Part") -> "_Part":
        return _Part(self.degree + other.degree, self.by | other.by)


def separability(tensors: Sequence[Tensor], nodes: Sequence[Node], loss: int) -> Separability:
    """Whether the loss is a mean over samples; `nodes` are the live ones in order."""
    states: dict[int, State] = {}
    parts: dict[int, dict[int, _Part]] = {}  # of a tensor without batch dim: the reductions it is linear in
    scaled: dict[int, _Part] = {}  # of a tensor with one: what its samples were divided by

    def state(tensor: int) -> State:
        found = tensors[tensor]
        given = found.kind not in ("parameter", "activation")
        return states.get(tensor, State(depends=found.is_batched, is_given=given))

    cancelled = cancelled_orders(tensors, nodes)
    runs = sample_runs(tensors, nodes)
    for position, node in enumerate(nodes):
        operands = list(dict.fromkeys(reads(node)))
        used: list[int] = []
        known = [(t, state(t)) for t in operands]
        is_plain = position in cancelled and not any(s.degree for _, s in known if s.depends and not s.is_position)
        made = _row_by_row(known) if is_plain else _result(node, tensors, known, runs, used)
        outputs = [*(t for t in node.outputs if t is not None), *node.mutates]
        _follow(node, tensors, known, outputs, used, parts, scaled)
        for tensor in outputs:
            states[tensor] = made
    final = state(loss)
    found = parts.get(loss, {})
    by = sorted({d for part in found.values() for d in part.by})
    maker = {t: node for node in nodes for t in node.outputs if t is not None}
    rest: dict[str, Any] = {
        "parts": tuple((tensor, 1 - part.degree) for tensor, part in sorted(found.items())),
        "divisors": tuple(_given(tensor, tensors, maker, states) for tensor in by),
    }
    if final.degree is None:
        return Separability(mixes=final.why, **rest)
    if final.degree != 0:
        return Separability(sums=f"{final.why}: the loss is a sum over samples, not their mean", **rest)
    return Separability(**rest)


def _row_by_row(operands: Sequence[tuple[int, State]]) -> State:
    """What an operator makes that computes every row from the same row of its operands."""
    broken = next((s for _, s in operands if s.depends and s.degree is None and not s.is_position), None)
    given = all(s.is_given for _, s in operands)
    return State(depends=True, is_given=given) if broken is None else replace(broken, is_given=given)


def _follow(
    node: Node,
    tensors: Sequence[Tensor],
    operands: list[tuple[int, State]],
    outputs: Sequence[int],
    used: Sequence[int],
    parts: dict[int, dict[int, _Part]],
    scaled: dict[int, _Part],
) -> None:
    """Note the parts of what a node makes."""
    name = _name(node)
    moving = [] if _takes_shape_only(name) else [t for t, state in operands if state.depends]
    states = dict(operands)
    used = [t for t in used if not tensors[t].is_batched]
    sign = 1 if name == "div" else -1
    divided = _Part(sum(sign * (states[t].degree or 0) for t in used), frozenset(used))
    samples = [t for t in moving if tensors[t].is_batched]
    for tensor in outputs:
        if tensors[tensor].is_batched:
            scaled[tensor] = _of_samples(name, [scaled.get(t, _Part()) for t in samples]).divided(divided)
        elif samples:
            known = [scaled.get(t, _Part()) for t in samples]
            parts[tensor] = {tensor: _of_samples("mul" if name in CONTRACT else name, known)}
        elif moving:
            linear = [t for t in moving if t not in used]
            is_scaled = len(linear) == 1 and (name == "mul" or (name == "div" and node.args[0] == Ref(linear[0])))
            if name in KEEP or name in ADD or name in ("sum", "mean") or is_scaled:
                parts[tensor] = {
                    reduction: part.divided(divided) for t in linear for reduction, part in parts.get(t, {}).items()
                }
            else:  # not linear: what it makes of a micro-batch is a part itself
                parts[tensor] = {tensor: _Part()}


def _of_samples(name: str, operands: Sequence[_Part]) -> _Part:
    """What divided the result of an operator on tensors with a batch dim."""
    if name == "mul" or (name == "div" and len(operands) == 2):
        first, *others = operands or [_Part()]
        for other in others:
            first = first.divided(other if name == "mul" else _Part(-other.degree, other.by))
        return first
    return max(operands, key=lambda part: abs(part.degree), default=_Part())


def _given(tensor: int, tensors: Sequence[Tensor], maker: Mapping[int, Node], states: Mapping[int, State]) -> Given:
    """A divisor, and the reductions that it is made of."""
    sums: dict[int, int] = {}
    todo = [tensor]
    while todo:
        current = todo.pop()
        read = list(reads(maker[current])) if current in maker else []
        if any(tensors[t].is_batched for t in read):
            sums[current] = states[current].degree or 0
        else:
            todo += [t for t in read if t in states and states[t].depends]
    return Given(tensor=tensor, degree=states[tensor].degree or 0, sums=tuple(sorted(sums.items())))


def _takes_shape_only(name: str) -> bool:
    """Whether an operator reads no value of its first operand."""
    return name.endswith("_like") or name.startswith("new_")


def _starts(node: Node, tensors: Sequence[Tensor]) -> Batch | None:
    """`rows` of `arange(0, rows, step)` where each sample has one element."""
    limits = [arg for arg in node.args if isinstance(arg, int | Batch) and not isinstance(arg, bool)]
    begin, end, step = {1: [0, *limits, 1], 2: [*limits, 1], 3: limits}.get(len(limits), [1, 0, 1])
    made = node.outputs[0]
    if begin != 0 or not isinstance(end, Batch) or made is None or tensors[made].shape != (Batch(1),):
        return None
    return end if end.per_sample == step else None


def _shape(node: Node, position: int, tensors: Sequence[Tensor]) -> tuple[int | Batch, ...]:
    arg = node.args[position] if len(node.args) > position else None
    return tensors[arg.tensor].shape if isinstance(arg, Ref) else ()


def _name(node: Node) -> str:
    """`mul` of `aten.mul_.Tensor`."""
    return node.op.split(".")[1].rstrip("_") if node.op.count(".") > 1 else node.op


def _result(
    node: Node,
    tensors: Sequence[Tensor],
    operands: list[tuple[int, State]],
    runs: Mapping[int, int | None],
    used: list[int],
) -> State:
    """The state of what a node makes; divisors that it relies on are added to `used`."""
    made = [t for t in node.outputs if t is not None]
    is_batched = any(tensors[t].is_batched for t in made)
    is_given = all(state.is_given for _, state in operands)
    name = _name(node)
    moving = [] if _takes_shape_only(name) else [(t, state) for t, state in operands if state.depends]
    if not moving and name == "arange" and is_batched:
        why = f"{node.source}: forward computes with the positions of samples in a batch"
        starts_of = _starts(node, tensors)
        return State(depends=True, is_given=True, degree=None, why=why, is_position=True, starts_of=starts_of)
    if name not in ("mul", "div", "arange") and _has_batch_as_value(node):
        why = f"{node.source}: {name} computes with the number of samples"
        return State(depends=True, is_given=is_given, degree=None, why=why)
    if not moving:
        return State(depends=is_batched, is_given=is_given)
    if name in INDEX:
        picked = [state for t, state in moving if _picks_samples(node, t, tensors) and not state.is_position]
        if picked:
            why = f"{node.source}: {name} picks samples of a batch by number"
            return State(depends=True, is_given=is_given, degree=None, why=why)
        moving = [(t, state) for t, state in moving if not state.is_position] or moving
    if name in BAG:
        rows = _shape(node, BAG[name], tensors)[:1]
        moving = [(t, state) for t, state in moving if not rows or (state.starts_of,) != rows]

    def none(reason: str) -> State:
        return State(depends=True, is_given=is_given, degree=None, why=f"{node.source}: {reason}")

    broken = next((state for _, state in moving if state.degree is None), None)
    if broken is not None:
        is_position = name in KEEP and all(state.is_position for _, state in moving)
        return State(depends=True, is_given=is_given, degree=None, why=broken.why, is_position=is_position)
    samples = [(t, state) for t, state in moving if tensors[t].is_batched]
    if name in ALONG_DIM and _along_batch(node, tensors):
        return none(f"{name} runs over the samples of a batch")
    mixed = _mixes_samples(node, name, tensors, runs)
    if mixed:
        return none(mixed)
    degree: int | None
    if samples and not is_batched:
        degree = _reduced(node, name, samples, len(moving))
        if degree is None:
            return none(f"{name} over the samples of a batch is neither their sum nor their mean")
        return State(depends=True, is_given=is_given, degree=degree, why=node.source if degree else "")
    reduced = [(t, state) for t, state in moving if not tensors[t].is_batched]
    if samples and reduced:
        degree = _scaled(node, name, moving, reduced, used)
        if degree is None:
            return none(f"{name} uses a value of the whole batch in each of its samples")
        return State(depends=True, is_given=is_given, degree=degree)
    degrees = [state.degree or 0 for _, state in moving]
    if samples and not any(degrees) and not any(isinstance(arg, Batch) and name in ("mul", "div") for arg in node.args):
        return State(depends=True, is_given=is_given, degree=0)
    degree = _linear(node, name, moving, degrees, len(operands), is_given, used)
    if degree is None:
        return none(f"{name} of a value that was reduced over the batch makes the loss no mean over samples")
    why = next((state.why for _, state in moving if state.why), node.source) if degree else ""
    return State(depends=True, is_given=is_given, degree=degree, why=why)


def _reduced(node: Node, name: str, samples: list[tuple[int, State]], num_moving: int) -> int | None:
    """Degree after a reduction over the batch dim, or None."""
    degrees = {state.degree or 0 for _, state in samples}
    if name in CONTRACT and len(samples) <= 2:
        return sum(state.degree or 0 for _, state in samples) + 1
    if len(degrees) > 1 or num_moving > len(samples):
        return None
    (degree,) = degrees
    if name == "mean":
        return degree
    if name in ("sum", "count_nonzero"):
        return degree + 1
    reduction = _reduction(node)
    if reduction in (MEAN, SUM) and degree == 0:
        return 0 if reduction == MEAN else 1
    return None


def _scaled(
    node: Node, name: str, moving: list[tuple[int, State]], reduced: list[tuple[int, State]], used: list[int]
) -> int | None:
    """Degree of samples multiplied or divided by a value that inputs determine, or None."""
    if name not in ("mul", "div") or len(moving) != 2 or len(reduced) != 1 or not reduced[0][1].is_given:
        return None
    tensor, divisor = reduced[0]
    other = next(state for t, state in moving if t != tensor)
    is_second = len(node.args) > 1 and node.args[1] == Ref(tensor)
    if name == "div" and not is_second:
        return None
    used.append(tensor)
    return (other.degree or 0) + (1 if name == "mul" else -1) * (divisor.degree or 0)


def _linear(
    node: Node,
    name: str,
    moving: list[tuple[int, State]],
    degrees: list[int],
    num_operands: int,
    is_given: bool,
    used: list[int],
) -> int | None:
    """Degree after an operator on values that all have, or all have not, a batch dim; None if it is not linear."""
    batch = sum(isinstance(arg, Batch) for arg in node.args)
    if name in KEEP or name in ("sum", "mean"):
        return degrees[0] if len(set(degrees)) == 1 else None
    if name in CLAMP and is_given:
        return degrees[0] if len(set(degrees)) == 1 else None
    if name in ADD:
        if len(set(degrees)) > 1:
            return None
        alone = len(moving) == num_operands and all(
            isinstance(arg, Ref | tuple) for arg in node.args[: max(2, len(moving))]
        )
        return degrees[0] if alone or degrees[0] == 0 or is_given else None
    if name in ("mul", "div"):
        if len(moving) == 1:
            is_first = node.args[0] == Ref(moving[0][0])
            if name == "div" and not is_first:
                return None
            return degrees[0] + (batch if name == "mul" else -batch)
        if is_given:
            return degrees[0] + (1 if name == "mul" else -1) * degrees[1]
        tensor, divisor = moving[1] if name == "div" or moving[1][1].is_given else moving[0]
        if not divisor.is_given:
            return None
        used.append(tensor)
        other = next(state for t, state in moving if t != tensor)
        return (other.degree or 0) + (1 if name == "mul" else -1) * (divisor.degree or 0)
    return None


def _has_batch_as_value(node: Node) -> bool:
    """Whether the batch size is a number that an operator computes with, rather than a size or an index."""
    if not any(isinstance(arg, Batch) for arg in (*node.args, *(value for _, value in node.kwargs))):
        return False
    named = dict(node.kwargs)
    schema = getattr(aten.torch_operator(node.op), "_schema", None)
    return any(
        isinstance(node.args[position] if position < len(node.args) else named.get(argument.name), Batch)
        and str(argument.type).removeprefix("Optional[").removesuffix("]") in ("Tensor", "number", "float")
        for position, argument in enumerate(schema.arguments if schema is not None else ())
    )


def _along_batch(node: Node, tensors: Sequence[Tensor]) -> bool:
    """Whether an operator with dims runs along the batch dim of its first operand."""
    first = node.args[0]
    if not isinstance(first, Ref):
        return False
    shape = tensors[first.tensor].shape
    given = _argument(node, ("dim", "dims", "axis"))
    dims = [d for d in (given if isinstance(given, tuple | list) else [given]) if type(d) is int]
    # Without dims `roll` and `flip` take the flat tensor.
    return any(isinstance(shape[d], Batch) for d in dims or [0] if -len(shape) <= d < len(shape))


def _mixes_samples(node: Node, name: str, tensors: Sequence[Tensor], runs: Mapping[int, int | None]) -> str:
    """How an operator whose result has a batch dim makes a sample's part of it from other samples ("" = it does not).

    Statistics and windows mix the samples if the batch dim of the first operand is among the dims that they run over;
    a view does if it splits the batch dim elsewhere than between samples.
    """
    first = node.args[0] if node.args else None
    made = node.outputs[0] if node.outputs else None
    if not isinstance(first, Ref) or made is None:
        return ""
    shape = tensors[first.tensor].shape
    dims = [d for d, size in enumerate(shape) if isinstance(size, Batch)]
    if len(dims) != 1 or sum(isinstance(size, Batch) for size in tensors[made].shape) != 1:
        return ""  # without batch dim it is a reduction; with two the samples are coupled, and that is told elsewhere
    (dim,) = dims
    if name in KEEPS_ORDER:
        is_lost = runs.get(first.tensor) is not None and runs.get(made) is None
        return f"{name} puts elements of several samples where one sample's were" if is_lost else ""
    over = _dims_run_over(node, name, tensors, dim, runs.get(first.tensor))
    return f"{name} runs over the samples of a batch" if dim in over else ""


def _dims_run_over(node: Node, name: str, tensors: Sequence[Tensor], batch_dim: int, runs: int | None) -> Sequence[int]:
    """The dims of its first operand that an operator computes statistics of, or has windows over; [] if none."""
    assert isinstance(node.args[0], Ref)
    rank = len(tensors[node.args[0].tensor].shape)
    if name in NORMALISE_LAST:
        last = _argument(node, ("normalized_shape",))
        return range(rank - (len(last) if isinstance(last, tuple) else 1), rank)
    if name in ("batch_norm", "native_batch_norm", "instance_norm"):
        # With running statistics it is the updates of buffers that are told.
        has_statistics = _argument(node, ("running_mean",)) is not None
        if has_statistics or not _argument(node, ("training", "use_input_stats")):
            return ()
        return range(2, rank) if name == "instance_norm" else (0, *range(2, rank))
    if name in ("group_norm", "native_group_norm"):  # groups that grow with the batch are of one sample each
        return range(2 if isinstance(_argument(node, ("num_groups", "group")), Batch) else 1, rank)
    window = WINDOW.match(name)
    if window is None:
        return ()
    spatial = rank - int(window[2])
    if window[1].startswith("conv") and batch_dim == spatial - 1:  # channels
        return () if isinstance(_argument(node, ("groups",)), Batch) else (batch_dim,)
    return () if batch_dim < spatial or _tiles(node, tensors, batch_dim, spatial, runs) else (batch_dim,)


def _tiles(node: Node, tensors: Sequence[Tensor], dim: int, spatial: int, runs: int | None) -> bool:
    """Whether windows lie side by side along the batch dim, each within the rows of one sample."""
    assert isinstance(node.args[0], Ref)
    size = tensors[node.args[0].tensor].shape[dim]
    weight = node.args[1] if len(node.args) > 1 else None

    def along(name: str) -> object:
        given = _argument(node, (name,))
        if isinstance(given, tuple | list):
            return given[min(dim - spatial, len(given) - 1)] if given else None
        return given

    kernel = tensors[weight.tensor].shape[dim - spatial + 2] if isinstance(weight, Ref) else along("kernel_size")
    stride = along("stride")
    if type(kernel) is not int or not isinstance(size, Batch) or not runs:
        return False
    is_plain = along("padding") in (0, "valid") and (kernel == 1 or along("dilation") in (None, 1))
    return is_plain and stride in (None, kernel) and (size.per_sample // runs) % kernel == 0


def _argument(node: Node, names: Sequence[str]) -> object:
    """The argument of a node that its operator calls by one of `names`: given, or its default; None if it has none."""
    schema: Any = getattr(aten.torch_operator(node.op), "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name in names:
            given = node.args[position] if position < len(node.args) else dict(node.kwargs).get(argument.name)
            return argument.default_value if given is None else given
    return None


def _picks_samples(node: Node, tensor: int, tensors: Sequence[Tensor]) -> bool:
    """Whether `tensor` is an index into the batch dim of the first operand."""
    first = node.args[0]
    if not isinstance(first, Ref) or tensor == first.tensor:
        return False
    shape = tensors[first.tensor].shape
    if isinstance(node.args[1], tuple):  # one index per dim; None takes all of it
        return any(
            index == Ref(tensor) and dim < len(shape) and isinstance(shape[dim], Batch)
            for dim, index in enumerate(node.args[1])
        )
    dim = node.args[1]
    return type(dim) is int and -len(shape) <= dim < len(shape) and isinstance(shape[dim], Batch)


def _reduction(node: Node) -> object:
    """The `reduction` argument of a loss operator: given, or its default."""
    return _argument(node, ("reduction",))
