"""Operators that communicate over another axis, in the graph of one of its ranks: which dims a further axis may split.

A conversion is linear and moves pieces of one dim (of two, if it exchanges them): every other dim may be split by a
further axis, whose ranks then run it side by side on less, and partial values pass. Attention whose queries or keys
another axis has shared out may still have its heads split, and a loss of a part of the targets its classes. What a rank
drops of the whole is known for parts of parts. Operators without a line here run as they are.
"""

from collections.abc import Callable, Collection, Iterator, Mapping

from planner.graph import Ref
from planner.shard.placement import Option, Placement, R, is_floating, split
from planner.shard.rules.call import Call, Rewritten, Rule, Split
from planner.shard.rules.matmul import attention
from planner.shard.rules.pointwise import partial_in

CROSS_ENTROPY_OF_PARTS = "planner.cross_entropy.default"
DROPOUT_OF_PARTS = "planner.dropout_of_parts.default"


def _beside(call: Call, touched: Collection[int]) -> Iterator[Option]:
    """Every dim of the first operand that is not touched, which the output has as well."""
    x = call.operand(0)
    if x is not None and call.output is not None:
        letters = [None if dim in touched else dim for dim in range(call.rank(x))]
        yield from call.einsum([(x, letters)], [letters] * len(call.node.outputs))


def conversion(*positions: int) -> Rule:
    """A conversion whose arguments at `positions` are the dims that it touches."""

    def rule(call: Call) -> Iterator[Option]:
        x = call.operand(0)
        dims = [call.arg(position) for position in positions]
        if x is None or not all(isinstance(dim, int) for dim in dims):
            return
        yield from _beside(call, {dim for dim in dims if isinstance(dim, int)})
        yield from partial_in(call, x)

    return rule


def shared(call: Call) -> Iterator[Option]:
    """A share of the value: floating ones of every rank, of integers all on the first."""
    yield from _beside(call, ())
    x = call.operand(0)
    if x is not None and is_floating(call.tensors[x]):
        yield from partial_in(call, x)


def softmax(call: Call) -> Iterator[Option]:
    """Along a dim that another axis has split."""
    x, dim = call.operand(0), call.arg(1, "dim")
    if x is not None and isinstance(dim, int):
        yield from _beside(call, {dim % call.rank(x)})


def cross_entropy_of_part(call: Call) -> Iterator[Option]:
    """Logits `[N, C, ...]` and class indices of a part of the targets: classes are split as those of all targets are.

    The number of valid targets is that of all ranks of the axis which has shared them out (`counted_over`).
    """
    x, target, weight = call.operand(0), call.operand(1), call.operand(2, "weight")
    if x is None or target is None or weight is not None:
        return
    size = call.shape(x)[1 if call.rank(x) > 1 else 0]
    if isinstance(size, int) and size % call.degree == 0:
        placed: dict[int, Placement] = {x: split(1 if call.rank(x) > 1 else 0, [size]), target: R}
        kwargs = dict(call.node.kwargs)
        outer = kwargs.pop("axis")
        rewritten = Rewritten(op=CROSS_ENTROPY_OF_PARTS, kwargs=(*kwargs.items(), ("counted_over", outer)))
        yield call.option(placed, [R], rewritten)


def dropout(call: Call) -> Iterator[Option]:
    """A part of a part of what one device drops: the call says how both axes cut it."""
    x = call.operand(0)
    if x is None or call.node.mutates:
        return
    kwargs = dict(call.node.kwargs)

    def rewrite(found: Split) -> Rewritten:
        dim = found.letter if isinstance(found.letter, int) else 0
        whole = (kwargs["axis"], *call.node.args[3:])
        args = (Ref(x), *call.node.args[1:3], dim, found.parts, found.repeats)
        return Rewritten(op=DROPOUT_OF_PARTS, args=args, kwargs=(("of", whole),))

    letters = range(call.rank(x))
    yield from call.einsum([(x, letters)], [letters], rewrite)


def _kept(rule: Callable[[Call], Iterator[Option]]) -> Rule:
    """The options of a rule that leave the operator what it is: it goes on communicating as it did."""

    def kept(call: Call) -> Iterator[Option]:
        yield from (option for option in rule(call) if option.op == call.node.op)

    return kept


TABLE: Mapping[str, Rule] = {
    **{f"planner.{name}": conversion() for name in ("copy", "reduce", "reduce_copy", "unshare")},
    **{f"planner.{name}": conversion(1) for name in ("cut", "take", "gather", "gather_sum", "scatter")},
    "planner.exchange": conversion(1, 4),
    "planner.share": shared,
    "planner.softmax": softmax,
    "planner.log_softmax": softmax,
    "planner.causal_attention": _kept(attention),
    "planner.balanced_causal_attention": _kept(attention),
    "planner.cross_entropy_of_part": cross_entropy_of_part,
    "planner.dropout": dropout,
}
