"""One rule for every operator that works element by element, and which of them are linear."""

from collections.abc import Callable, Iterator, Mapping

from planner.graph import Ref, refs
from planner.shard.placement import Option, P, Q, is_floating
from planner.shard.rules.call import Call, Letters, Rule


def aligned(call: Call, tensor: int, against: int) -> Letters:
    """Letters of an operand that broadcasts against another: positions counted from the right, None where it is 1.

    Operand `[8, 1]` against `[4, 8, 3]` has (-2, None).
    """
    shape, other = call.shape(tensor), call.shape(against)
    dims = range(-len(shape), 0)
    return [d if -d <= len(other) and shape[d] == other[d] and shape[d] != 1 else None for d in dims]


def pointwise(call: Call) -> Iterator[Option]:
    """Any dim of the output; operands that broadcast along it are whole."""
    made = call.output
    if made is None or any(t is None or call.shape(t) != call.shape(made) for t in call.node.outputs):
        return
    letters = aligned(call, made, made)
    yield from call.einsum([(t, aligned(call, t, made)) for t in call.operands], [letters] * len(call.node.outputs))


def sums(call: Call) -> Iterator[Option]:
    """Partial values where every operand has them: a sum of tensors."""
    yield from pointwise(call)
    is_sum = all(isinstance(call.arg(p), Ref) for p in (0, 1))
    if is_sum and all(is_floating(call.tensors[t]) for t in call.operands):
        yield call.same(P)


def products(call: Call) -> Iterator[Option]:
    """Partial values in one factor."""
    yield from pointwise(call)
    if len(set(refs(call.node.args))) == len(list(refs(call.node.args))):
        for factor in call.operands:
            yield from partial_in(call, factor)


def quotients(call: Call) -> Iterator[Option]:
    """Partial values in the dividend."""
    yield from pointwise(call)
    dividend, divisor = call.operand(0), call.operand(1)
    exact = dict(call.node.kwargs).get("rounding_mode") is None
    if dividend is not None and dividend != divisor and exact:
        yield from partial_in(call, dividend)


def linear_in_one(call: Call) -> Iterator[Option]:
    """Partial values of the one operand."""
    yield from pointwise(call)
    for tensor in call.operands[:1]:
        yield from partial_in(call, tensor)


def masked(call: Call) -> Iterator[Option]:
    """Partial values where zero is filled in."""
    yield from pointwise(call)
    if call.arg(2, "value") in (0, 0.0, False):
        yield from partial_in(call, call.operands[0])


def partial_in(call: Call, tensor: int) -> Iterator[Option]:
    """The value is linear in one operand, which may be a sum of parts; the others are whole."""
    made = [t for t in call.node.outputs if t is not None]
    if all(is_floating(call.tensors[t]) for t in (tensor, *made)):
        placed = {t: P if t == tensor else Q for t in call.operands}
        yield call.option(placed, [P] * len(call.node.outputs), share=1.0)


def _table(rule: Callable[[Call], Iterator[Option]], names: str) -> Mapping[str, Rule]:
    return {f"aten.{name}": rule for name in names.split()}


TABLE: Mapping[str, Rule] = {
    **_table(sums, "add sub"),
    **_table(products, "mul"),
    **_table(quotients, "div true_divide"),
    **_table(masked, "masked_fill"),
    **_table(linear_in_one, "neg clone contiguous alias detach lift_fresh_copy to _to_copy type_as real conj"),
    **_table(
        pointwise,
        "__and__ __lshift__ __or__ __rshift__ __xor__ _prelu_kernel abs acos acosh addcdiv addcmul angle asin asinh "
        "atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil "
        "celu clamp clamp_max clamp_min clip copysign cos cosh deg2rad digamma elu eq erf erfc erfinv exp exp2 expm1 "
        "fill floor floor_divide fmax fmin fmod frac full_like ge gelu gt hardshrink hardsigmoid hardswish hardtanh "
        "heaviside hypot isfinite isinf isnan le leaky_relu lerp lgamma log log10 log1p log2 log_sigmoid logaddexp "
        "logaddexp2 logical_and logical_not logical_or logical_xor logit lt maximum minimum mish nan_to_num ne "
        "ones_like polar positive pow rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign "
        "silu sin sinc sinh softplus softshrink special_expit sqrt square tan tanh threshold trunc where xlogy zero "
        "zeros_like",
    ),
}
