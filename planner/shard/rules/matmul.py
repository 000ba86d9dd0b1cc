"""Products, attention, norms over hidden dims, embedding, losses, dropout, reductions.

Where a rank must know which part of a dim it has stands an operator of `planner.trace.parallel_operators`.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence

from planner.graph import Arg, Ref, Size
from planner.shard.placement import Option, P, Placement, Q, R, divides, is_floating, split
from planner.shard.rules.call import AS_IT_IS, Call, Letters, Rewritten, Rule, Split
from planner.shard.rules.pointwise import linear_in_one, partial_in, pointwise
from planner.shard.rules.special import BALANCED_CAUSAL_ATTENTION

_NONE, _MEAN, _SUM = 0, 1, 2  # `reduction` of losses


# --- products -------------------------------------------------------------------------------------


def linear(call: Call) -> Iterator[Option]:
    """...i, oi, +o -> ...o."""
    x, weight, bias = call.operand(0), call.operand(1), call.operand(2, "bias")
    if x is None or weight is None:
        return
    leading = range(call.rank(x) - 1)
    into = ["o"] if call.rank(weight) > 1 else []
    operands = [(x, (*leading, "i")), (weight, (*into, "i")), (bias, into)]
    yield from call.einsum(operands, [(*leading, *into)], summands=[] if bias is None else [bias])


def product(*terms: str) -> Rule:
    """Operands and output by letters; a term that starts with + is a summand, which broadcasts from the right.

    `product("+no", "ni", "io", "no")` is addmm.
    """

    def rule(call: Call) -> Iterator[Option]:
        operands: list[tuple[int | None, Letters]] = []
        summands = []
        for position, term in enumerate(terms[:-1]):
            tensor = call.operand(position)
            if term.startswith("+") and tensor is not None and call.output is not None:
                operands.append((tensor, broadcast(call, tensor, call.output, term[1:])))
                summands.append(tensor)
            else:
                operands.append((tensor, term))
        yield from call.einsum(operands, [terms[-1]], summands=summands)

    return rule


def broadcast(call: Call, tensor: int, against: int, letters: Letters) -> Letters:
    """Letters of a tensor that broadcasts against another one, which has `letters`."""
    return _broadcast(call.shape(tensor), call.shape(against), letters)


def _broadcast(shape: Sequence[Size], other: Sequence[Size], letters: Letters) -> Letters:
    """Letters of `shape` against `other`, counted from the right: None where it is 1 and repeated."""
    start = len(other) - len(shape)
    return [
        letter if size == its and size != 1 else None
        for size, its, letter in zip(shape, other[start:], letters[start:], strict=True)
    ]


def matmul(call: Call) -> Iterator[Option]:
    """Batch dims broadcast; one-dim operands are vectors."""
    x, y, made = call.operand(0), call.operand(1), call.output
    if x is None or y is None or made is None:
        return
    left = ("n", "i") if call.rank(x) > 1 else ("i",)
    right = ("i", "o") if call.rank(y) > 1 else ("i",)
    tail = (*left[:-1], *right[1:])
    leading = range(call.rank(made) - len(tail))
    out = (*leading, *tail)

    def of(tensor: int, last: Sequence[str]) -> Letters:
        batch = call.shape(tensor)[: call.rank(tensor) - len(last)]
        return (*_broadcast(batch, call.shape(made)[: len(leading)], leading), *last)

    yield from call.einsum([(x, of(x, left)), (y, of(y, right))], [out])


def einsum(call: Call) -> Iterator[Option]:
    """By the equation that it is given; the dims of an ellipsis are counted from the right."""
    equation, given = call.arg(0), call.arg(1)
    if not isinstance(equation, str) or not isinstance(given, tuple) or call.output is None:
        return
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or len(terms) != len(given):
        return
    operands: list[tuple[int | None, Letters]] = [
        (arg.tensor, _spelled(term, call.rank(arg.tensor)))
        for arg, term in zip(given, terms, strict=True)
        if isinstance(arg, Ref)
    ]
    repeated = {x for _, letters in operands for x in letters if list(letters).count(x) > 1}
    yield from call.einsum(operands, [_spelled(out, call.rank(call.output))], frozen=repeated)


def _spelled(term: str, rank: int) -> list[Hashable]:
    before, dots, after = term.partition("...")
    return [*before, *range(len(before) + len(after) - rank, 0), *after] if dots else list(term)


# --- attention ------------------------------------------------------------------------------------


def attention(call: Call) -> Iterator[Option]:
    """Query `[..., L, E]`, key `[..., S, E]`, value `[..., S, V]`, mask that broadcasts to `[..., L, S]`.

    Leading dims (samples, heads) and the queries are split. Where several query heads share a head of keys and values
    (`enable_gqa`), both have their heads split, or every rank has all of the latter and a part of the queries of each
    (`S1*kv[queries per kv]`), or the kv heads of a contiguous part of the query heads. Causal attention of a part of
    the queries is balanced over the ranks without a mask, where twice as many parts are equal; elsewhere the operator
    makes a mask.
    """
    q, k, v, made = call.operand(0, "query"), call.operand(1, "key"), call.operand(2, "value"), call.output
    mask = call.operand(3, "attn_mask")
    if q is None or k is None or v is None or made is None:
        return
    leading: tuple[Hashable, ...] = tuple(range(call.rank(q) - 2))
    heads, kv_heads = (call.shape(t)[-3] if call.rank(t) > 2 else 1 for t in (q, k))
    is_grouped = heads != kv_heads
    is_causal = call.arg(5, "is_causal", False) is True
    balanced = _balanced(call, q, k, v) if mask is None else None

    def rewrite(found: Split) -> Rewritten | None:
        if found.letter != "l" or not is_causal:
            return AS_IT_IS
        if balanced is not None and found.parts == call.shape(q)[-2:-1] and found.repeats == 1:
            return balanced
        return Rewritten(
            op="planner.causal_attention.default",
            kwargs=(*call.node.kwargs, ("parts", found.parts), ("repeats", found.repeats)),
            share=min(1.0, 2 / call.degree),  # of a triangle: a mask leaves out nothing
        )

    scores = (*call.shape(q)[:-1], call.shape(k)[-2])
    operands: list[tuple[int | None, Letters]] = [(q, (*leading, "l", None))]
    operands += [(t, (*_broadcast(call.shape(t)[:-2], scores[:-2], leading), None, None)) for t in (k, v)]
    if mask is not None:
        operands.append((mask, _broadcast(call.shape(mask), scores, (*leading, "l", None))))
    frozen = set(leading[-1:]) if is_grouped else set()
    if call.node.op.startswith("planner."):  # another axis has shared out the queries
        frozen.add("l")
    yield from call.einsum(operands, [(*leading, "l", None)], rewrite, frozen=frozen)
    if is_grouped and isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads and heads % kv_heads == 0:
        yield from _grouped_heads(call, q, k, v, mask, heads, kv_heads)


def _balanced(call: Call, q: int, k: int, v: int) -> Rewritten | None:
    """The call that shares out causal attention equally; None where halves of the ranks' parts are not equal.

    It needs as many queries as keys, and every sample's own keys and values. What is dropped is drawn inside a kernel,
    for each of its queries: without.
    """
    queries, keys, values = (call.shape(t) for t in (q, k, v))
    is_grouped = dict(call.node.kwargs).get("enable_gqa") is True
    own = len(queries) - 2 - is_grouped  # dims that keys have as well: heads that share some need not be as many
    length = queries[-2]
    is_square = isinstance(length, int) and length == keys[-2] and length % (2 * call.degree) == 0
    if not is_square or keys[:own] != queries[:own] or keys[:-1] != values[:-1] or len(keys) != len(queries):
        return None
    if call.arg(4, "dropout_p", 0.0) not in (0, 0.0):
        return None
    kept = tuple((name, arg) for name, arg in call.node.kwargs if name in ("scale", "enable_gqa"))
    return Rewritten(op=BALANCED_CAUSAL_ATTENTION, args=(Ref(q), Ref(k), Ref(v)), kwargs=kept)


def _grouped_heads(call: Call, q: int, k: int, v: int, mask: int | None, heads: int, kv_heads: int) -> Iterator[Option]:
    """Splits of heads where `heads / kv_heads` query heads share each head of keys and values."""
    dim = call.rank(q) - 3
    group = heads // kv_heads
    made = call.output
    if made is None or len({q, k, v}) < 3 or call.rank(k) != call.rank(q):
        return

    def option(of_queries: Placement, of_keys: Placement, rewritten: Rewritten = AS_IT_IS) -> Option:
        placed = {q: of_queries, k: of_keys, v: of_keys}
        if mask is not None:
            shape = call.shape(mask)
            mask_dim = dim + len(shape) - call.rank(q)
            has_heads = mask_dim >= 0 and shape[mask_dim] != 1
            placed[mask] = split(mask_dim, of_queries.parts, of_queries.repeats) if has_heads else Q
        return call.option(placed, [of_queries], rewritten)

    for parts, repeats in call.patterns([(q, dim), (made, dim)]):
        of_queries = split(dim, parts, repeats)
        if all(isinstance(p, int) and p % group == 0 for p in parts):
            of_keys = split(dim, [p // group for p in parts if isinstance(p, int)], repeats)
            if divides(call.degree, of_keys):
                yield option(of_queries, of_keys)
    for parts, repeats in call.patterns([(k, dim), (v, dim)]):
        of_keys = split(dim, parts, repeats)
        yield option(split(dim, [p * group for p in parts if isinstance(p, int)], repeats), of_keys)
    if group % call.degree == 0 and group > 1:
        yield option(split(dim, [group], kv_heads), Q)
    if heads % call.degree == 0 and kv_heads % call.degree:
        shared = Rewritten(
            op="planner.shared_heads_attention.default",
            args=call.node.args,
            kwargs=(*((n, a) for n, a in call.node.kwargs if n != "enable_gqa"), ("heads", heads)),
        )
        if len(call.node.args) <= 7:
            yield option(split(dim, [heads]), Q, shared)


# --- norms and softmax ----------------------------------------------------------------------------


def normalized(call: Call) -> Iterator[Option]:
    """A norm over the last dims, as many as `normalized_shape` has; weights lack the others.

    Statistics that come with the output have 1 in the place of what is normalized.
    """
    x, shape = call.operand(0), call.arg(1, "normalized_shape")
    if x is None or not isinstance(shape, tuple):
        return
    letters = [*range(call.rank(x) - len(shape)), *(None for _ in shape)]
    yield from call.einsum([(x, letters)], [letters] * len(call.node.outputs))


def along(position: int, name: str = "dim") -> Rule:
    """Like its operand, in every dim but the one that the argument names: softmax, and others that go along a dim."""

    def rule(call: Call) -> Iterator[Option]:
        x, dim = call.operand(0), call.arg(position, name)
        if x is None or not isinstance(dim, int):
            return
        letters = [None if d == dim % call.rank(x) else d for d in range(call.rank(x))]
        yield from call.einsum([(x, letters)], [letters] * len(call.node.outputs))

    return rule


def softmax(call: Call) -> Iterator[Option]:
    """Along the dim itself, too: maxima and sums are exchanged, one number for each row."""
    yield from along(1)(call)
    x, dim = call.operand(0), call.arg(1, "dim")
    if x is None or not isinstance(dim, int) or call.name not in ("softmax", "log_softmax"):
        return
    dim %= call.rank(x)
    for parts, repeats in call.patterns([(x, dim)]):
        placed = split(dim, parts, repeats)
        yield call.option({x: placed}, [placed], Rewritten(op=f"planner.{call.name}.default"))


# --- embedding, losses, dropout -------------------------------------------------------------------


def embedding(call: Call) -> Iterator[Option]:
    """Weight `[vocabulary, hidden]`, ids `[...]` -> `[..., hidden]`. Rows of other ranks are zero: a partial sum."""
    weight, ids = call.operand(0), call.operand(1)
    if weight is None or ids is None:
        return
    counts = call.arg(3, "scale_grad_by_freq", False) is True  # over all ids
    letters = range(call.rank(ids))

    def rewrite(found: Split) -> Rewritten | None:
        if found.letter != "v":
            return AS_IT_IS
        return Rewritten(op="planner.embedding.default") if found.parts == (call.shape(weight)[0],) else None

    frozen = {*letters, "v"} if counts else set()
    yield from call.einsum([(weight, "vh"), (ids, letters)], [(*letters, "h")], rewrite, frozen=frozen)


def cross_entropy(call: Call) -> Iterator[Option]:
    """Logits `[N, C, ...]` and class indices `[N, ...]`.

    Classes are split without weights for them: maxima and sums are exchanged, one number for each target. Targets are
    split with their logits: losses are kept, summed, or divided by the number of valid targets of all ranks.
    """
    x, target, weight = call.operand(0), call.operand(1), call.operand(2, "weight")
    reduction = call.integer(3, "reduction", _MEAN)
    if x is None or target is None or is_floating(call.tensors[target]) or len(call.node.outputs) > 1:
        return
    classes = 1 if call.rank(x) > 1 else 0
    is_cross_entropy = call.name == "cross_entropy_loss"
    size = call.shape(x)[classes]
    if weight is None and is_cross_entropy and isinstance(size, int) and size % call.degree == 0:
        placed = {x: split(classes, [size]), target: R}
        yield call.option(placed, [R], Rewritten(op="planner.cross_entropy.default"))
    if reduction != _MEAN or is_cross_entropy:
        letters = [d for d in range(call.rank(x)) if d != classes]
        of_x = [None if d == classes else d for d in range(call.rank(x))]
        part = Rewritten(op="planner.cross_entropy_of_part.default") if reduction == _MEAN else AS_IT_IS
        made = letters if reduction == _NONE else ()
        yield from call.einsum([(x, of_x), (target, letters)], [made], lambda _: part)


def loss(position: int) -> Rule:
    """A pointwise loss of equal shapes, `reduction` at a position: kept, summed, or a mean over equal parts."""

    def rule(call: Call) -> Iterator[Option]:
        reduction = call.integer(position, "reduction", _MEAN)
        if reduction == _NONE:
            yield from pointwise(call)
            return
        x = call.operand(0)
        if x is None or any(len(call.shape(t)) > call.rank(x) for t in call.operands):
            return
        letters = range(call.rank(x))
        operands = [(t, broadcast(call, t, x, letters)) for t in call.operands]
        if any(t in call.operands[:2] and call.shape(t) != call.shape(x) for t in call.operands):
            return
        yield from call.einsum(operands, [()], lambda _: _part_of_mean(call) if reduction == _MEAN else AS_IT_IS)

    return rule


def _part_of_mean(call: Call) -> Rewritten:
    """The mean over a rank's part, divided by the number of ranks: parts are equal, so these add up to the mean."""
    return Rewritten(op="planner.part_of_mean.default", args=(call.node.op, *call.node.args))


def dropout(call: Call) -> Iterator[Option]:
    """What is dropped of the whole is decided by the operator, which knows the part."""
    rate, train = call.arg(1, "p"), call.arg(2, "train")
    if train is False or rate == 0:
        yield from linear_in_one(call)
        return
    x = call.operand(0)
    if x is None or call.node.mutates:
        return

    def rewrite(found: Split) -> Rewritten:
        dim = found.letter
        args: tuple[Arg, ...] = (Ref(x), rate, train, dim if isinstance(dim, int) else 0, found.parts, found.repeats)
        return Rewritten(op="planner.dropout.default", args=args, kwargs=())

    letters = range(call.rank(x))
    yield from call.einsum([(x, letters)], [letters], rewrite)


# --- reductions -----------------------------------------------------------------------------------


def _reduced(
    call: Call, position: int, keepdim_position: int
) -> tuple[int, list[Hashable], list[Hashable | None]] | None:
    """The operand, its letters, and those of the output of a reduction."""
    x, made = call.operand(0), call.output
    if x is None or made is None:
        return None
    rank = call.rank(x)
    given = call.arg(position, "dim")
    if given is None or given == ():
        dims = set(range(rank))
    else:
        items = given if isinstance(given, tuple) else (given,)
        if not all(isinstance(d, int) for d in items):
            return None
        dims = {d % rank for d in items if isinstance(d, int)} if rank else set()
    keeps = call.arg(keepdim_position, "keepdim", False) is True and call.rank(made) == rank
    letters: list[Hashable] = list(range(rank))
    out: list[Hashable | None] = [None if d in dims else d for d in range(rank) if keeps or d not in dims]
    return (x, letters, out) if len(out) == call.rank(made) else None


def reduction(position: int = 1, keepdim_position: int = 2) -> Rule:
    """Dims that stay: `amax`, `var`, `norm`, `prod` and so on; every output has the same."""

    def rule(call: Call) -> Iterator[Option]:
        found = _reduced(call, position, keepdim_position)
        if found is not None:
            x, letters, out = found
            yield from call.einsum([(x, letters)], [out] * len(call.node.outputs), reduces=False)

    return rule


def total(call: Call) -> Iterator[Option]:
    """Sums: a partial sum where a dim that goes is split."""
    found = _reduced(call, 1, 2)
    if found is not None:
        x, letters, out = found
        yield from call.einsum([(x, letters)], [out])
        yield from partial_in(call, x)


def mean(call: Call) -> Iterator[Option]:
    """Means: parts are equal, so each rank adds its part's mean over their number."""
    found = _reduced(call, 1, 2)
    if found is None:
        return
    x, letters, out = found

    def rewrite(split_: Split) -> Rewritten:
        return _part_of_mean(call) if split_.outputs[0] == P else AS_IT_IS

    yield from call.einsum([(x, letters)], [out], rewrite)
    yield from partial_in(call, x)


TABLE: Mapping[str, Rule] = {
    "aten.linear": linear,
    "aten.addmm": product("+no", "ni", "io", "no"),
    "aten.mm": product("ni", "io", "no"),
    "aten.bmm": product("bni", "bio", "bno"),
    "aten.baddbmm": product("+bno", "bni", "bio", "bno"),
    "aten.mv": product("ni", "i", "n"),
    "aten.dot": product("i", "i", ""),
    "aten.outer": product("n", "m", "nm"),
    "aten.matmul": matmul,
    "aten.einsum": einsum,
    "aten.scaled_dot_product_attention": attention,
    "aten.layer_norm": normalized,
    "aten.native_layer_norm": normalized,
    "aten.rms_norm": normalized,
    "aten._fused_rms_norm": normalized,
    "aten.softmax": softmax,
    "aten.log_softmax": softmax,
    "aten._softmax": along(1),
    "aten._log_softmax": along(1),
    "aten.embedding": embedding,
    "aten.cross_entropy_loss": cross_entropy,
    "aten.nll_loss": cross_entropy,
    "aten.nll_loss_nd": cross_entropy,
    "aten.mse_loss": loss(2),
    "aten.l1_loss": loss(2),
    "aten.smooth_l1_loss": loss(2),
    "aten.huber_loss": loss(2),
    "aten.binary_cross_entropy": loss(3),
    "aten.binary_cross_entropy_with_logits": loss(4),
    "aten.kl_div": loss(2),
    "aten.dropout": dropout,
    "aten.sum": total,
    "aten.mean": mean,
    "aten.amax": reduction(),
    "aten.amin": reduction(),
    "aten.logsumexp": reduction(),
    "aten.prod": reduction(),
    "aten.any": reduction(),
    "aten.all": reduction(),
    "aten.var.correction": reduction(1, 3),
    "aten.std.correction": reduction(1, 3),
    "aten.var.dim": reduction(1, 3),
    "aten.std.dim": reduction(1, 3),
    "aten.linalg_vector_norm": reduction(2, 3),
    "aten.norm.ScalarOpt_dim": reduction(2, 3),
}
