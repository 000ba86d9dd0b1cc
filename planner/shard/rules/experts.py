"""Matrices of experts times groups of rows, and what is between: an order of rows by expert that cancels out.

A product may be split in three ways.

    features     the dims of all matrices
    masked       every rank has all tokens, cuts out the rows of its experts (D), and adds its part of the result (P)
    dispatched   every rank has its own tokens (L), and sends their rows to the experts' ranks (D with parts) and back

Tracing has proven of the tensors that are marked (`Tensor.order`) that each of their rows depends on one token alone.
So any operator between them may be run on the rows of a rank's own tokens, or of its experts, whatever it is.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from planner.graph import DTYPE_BYTES, Arg, Batch, Node, Ref, Size, refs
from planner.shard.placement import (
    Option,
    P,
    Placement,
    Q,
    divides,
    is_floating,
    local_size,
    operands_of,
    split,
    times,
    total_size,
)
from planner.shard.rules.call import AS_IT_IS, Call, Rewritten, Rule
from planner.shard.rules.pointwise import partial_in
from planner.shard.rules.special import DISPATCHED, MASKED, ROWS_OF_EXPERTS

_ALIGNED_BYTES = 16  # of strides in torch._grouped_mm (check_valid_strides_and_return_transposed)
_WITH_SIZES = ("view", "reshape", "_unsafe_view", "expand", "new_empty", "new_zeros")


def grouped_mm(call: Call) -> Iterator[Option]:
    """Rows [n, i] times matrices [experts, i, o], by where the runs of experts end [experts]."""
    rows, matrices, ends, made = call.operand(0), call.operand(1, "mat2"), call.operand(2, "offs"), call.output
    if rows is None or matrices is None or ends is None or made is None:
        return
    if (call.rank(rows), call.rank(matrices)) != (2, 3) or any(
        call.arg(position, name) is not None for position, name in ((3, "bias"), (4, "out_dtype"))
    ):
        return
    for option in call.einsum([(rows, [None, "i"]), (matrices, [None, "i", "o"])], [[None, "o"]]):
        if _is_aligned(call, matrices, option.operands[call.operands.index(matrices)]):
            yield option
    yield from partial_in(call, rows)
    num_experts, num_rows = call.shape(matrices)[0], call.shape(rows)[0]
    if not isinstance(num_experts, int) or num_experts % call.degree:
        return
    spread = split(0, [num_experts])
    is_ordered = all(form_of(call, t) == form for t, form in ((rows, "rows"), (made, "rows"), (ends, "ends")))

    def product(op: str, source: Placement, target: Placement, counted: Placement) -> Option:
        flags = (source.kind != "D", target.kind != "D", _own(num_rows, counted, call.degree))
        own = Rewritten(op=op, args=(Ref(rows), Ref(matrices), Ref(ends), *flags), kwargs=())
        return call.option({rows: source, matrices: spread, ends: counted}, [target], own)

    yield product(MASKED, Q, P, Q)
    if not is_ordered:
        return
    here = Placement("D")
    for source, target in ((Q, here), (here, here), (here, P)):
        yield product(MASKED, source, target, Q)
    for local in _local_splits(call):
        sent = Placement("D", 0, local.parts, local.repeats)
        for source, target in ((local, sent), (sent, sent), (sent, local), (local, local)):
            yield product(DISPATCHED, source, target, local)
        yield call.option({rows: local, matrices: Q, ends: local}, [local])


def _is_aligned(call: Call, matrices: int, placement: Placement) -> bool:
    """Whether torch's kernel takes a rank's part: rows of matrices begin at multiples of 16 bytes.

    In float64, for which there is no kernel, the product is a loop.
    """
    size = call.shape(matrices)[placement.dim]
    if not placement.is_split or not isinstance(size, int) or call.tensors[matrices].dtype == "float64":
        return True
    return size // call.degree * DTYPE_BYTES[call.tensors[matrices].dtype] % _ALIGNED_BYTES == 0


def _own(num_rows: Size, counted: Placement, degree: int) -> Size:
    """How many rows the runs of experts have together."""
    return local_size(num_rows, degree) if counted.kind == "L" else num_rows


def in_order(call: Call) -> Iterator[Option]:
    """Options of any node that makes, uses or undoes an order of rows that cancels out."""
    touched = [*call.operands, *(t for t in call.node.outputs if t is not None)]
    if not call.operands or call.name == "_grouped_mm" or all(form_of(call, t) is None for t in touched):
        return
    first = call.operands[0]
    made = [form_of(call, t) for t in call.node.outputs if t is not None]
    if form_of(call, first) is None and call.name in ("sort", "argsort", "sum", "histc") and all(made):
        yield from _begun(call, first)
    elif call.name.rstrip("_") in ("index", "index_select", "embedding"):
        yield from _picked(call)
    elif call.name.rstrip("_") == "index_put":
        yield from _put(call)
    elif all(made):
        yield from _kept(call)


def form_of(call: Call, tensor: int) -> str | None:
    """What a tensor is in an order of rows that cancels out; None for others."""
    order = call.tensors[tensor].order
    return None if order is None else order.form


def _local_splits(call: Call, *tensors: int) -> tuple[Placement, ...]:
    """The L that a node may meet: those of its neighbours."""
    touched = tensors or (*call.operands, *(t for t in call.node.outputs if t is not None))
    seeds = (seed for t in touched for seed in call.seeds.get(t, ()) if seed.kind in ("L", "D") and seed.parts)
    return tuple(dict.fromkeys(Placement("L", 0, seed.parts, seed.repeats) for seed in seeds))


def _begun(call: Call, unsorted: int) -> Iterator[Option]:
    """Every rank orders its own rows, or counts its own keys."""
    for parts, repeats in call.patterns([(unsorted, 0)]):
        operands = {t: split(0, parts, repeats) if t == unsorted else Q for t in call.operands}
        yield call.option(operands, [Placement("L", 0, parts, repeats)] * len(call.node.outputs))


def _picked(call: Call) -> Iterator[Option]:
    """Rows by number: into the order, out of it, or of a table by their keys."""
    table, made = call.operand(0), call.output
    others = [t for t in call.operands if t != table]
    if table is None or made is None or len(others) != 1:
        return
    (index,) = others
    order = call.tensors[index].order
    if order is not None and order.form == "places" and form_of(call, table) is None and call.tensors[table].is_batched:
        for rows in _scaled(call, table, order.group):
            yield call.option({table: rows, index: _local(rows, order.group)}, [_local(rows, order.group)])
    if order is not None and order.form == "keys" and not call.tensors[table].is_batched:
        yield from _of_experts(call, table, index)
    for local in _local_splits(call):
        if order is not None and order.form == "inverse" and form_of(call, table) is not None:
            yield call.option({table: local, index: local}, [split(0, local.parts, local.repeats)])
        elif order is not None and order.form in ("rows", "keys") and not call.tensors[table].is_batched:
            yield call.option({table: Q, index: local}, [local])


def _of_experts(call: Call, table: int, keys: int) -> Iterator[Option]:
    """What each expert adds to its rows, of a table that is spread as the experts are."""
    num_experts = call.shape(table)[0]
    if not isinstance(num_experts, int) or num_experts % call.degree:
        return
    spread = split(0, [num_experts])

    def rows(keys_as: Placement, target: Placement) -> Option:
        flags = (keys_as.kind == "L", target == P)
        own = Rewritten(op=ROWS_OF_EXPERTS, args=(Ref(table), Ref(keys), *flags), kwargs=())
        return call.option({table: spread, keys: keys_as}, [target], own)

    yield rows(Q, Placement("D"))
    if is_floating(call.tensors[table]):
        yield rows(Q, P)
    for local in _local_splits(call):
        yield rows(local, Placement("D", 0, local.parts, local.repeats))


def _scaled(call: Call, table: int, group: int) -> Iterator[Placement]:
    """Splits of the rows of a table, each of which is in the order `group` times."""
    found = [split(0, parts, repeats) for parts, repeats in call.patterns([(table, 0)])]
    for local in _local_splits(call):
        if not divides(group, local):
            continue
        rows = split(0, [local_size(part, group) for part in local.parts], local.repeats)
        if divides(call.degree, rows) and total_size(rows) == call.shape(table)[0]:
            found.append(rows)
    yield from dict.fromkeys(found)


def _local(rows: Placement, group: int) -> Placement:
    """The L of rows that are `group` times as many."""
    scaled = split(0, [times(part, group) for part in rows.parts], rows.repeats)
    return Placement("L", 0, scaled.parts, scaled.repeats)


def _put(call: Call) -> Iterator[Option]:
    """`inverse[places] = numbers of all rows`: of a rank's own rows, which it numbers itself."""
    target, made = call.operand(0), call.output
    indices = list(refs(call.arg(1)))  # numbers of tensors
    if target is None or made is None or len(indices) != 1 or form_of(call, made) != "inverse":
        return
    is_written = call.name.endswith("_")
    op = "planner.put_inverse_order.default" if is_written else "planner.inverse_order.default"
    args = (Ref(target), Ref(indices[0])) if is_written else (Ref(indices[0]),)
    for local in _local_splits(call):
        operands = {t: local if t in (target, indices[0]) else Q for t in call.operands}
        yield call.option(operands, [local], Rewritten(op=op, args=args, kwargs=()))


def _kept(call: Call) -> Iterator[Option]:
    """Whatever is done to each row alone."""
    ordered = [t for t in call.operands if form_of(call, t) is not None]
    if not ordered or any(call.tensors[t].is_batched for t in call.operands if t not in ordered):
        return
    touched = [*ordered, *(t for t in call.node.outputs if t is not None)]
    for local in _local_splits(call):
        if (rewritten := resized(call, local)) is not None:
            yield _all_as(call, ordered, local, rewritten)
    if all(form_of(call, t) == "rows" for t in touched):
        sent = (Placement("D", 0, local.parts, local.repeats) for local in _local_splits(call))
        for here in (Placement("D"), *sent):
            if (rewritten := resized(call, here)) is not None:
                yield _all_as(call, ordered, here, rewritten)


def _all_as(call: Call, ordered: list[int], placement: Placement, rewritten: Rewritten) -> Option:
    operands = {t: placement if t in ordered else Q for t in call.operands}
    return call.option(operands, [placement] * len(call.node.outputs), rewritten)


def resized(call: Call, placement: Placement) -> Rewritten | None:
    """The call on the rows of one rank, of which there are other numbers; None where an argument hides the number."""
    made = call.output
    if call.name in _WITH_SIZES and made is not None:
        sizes: tuple[Arg, ...] = call.local(made, placement)
        if placement.kind in ("D", "E"):
            sizes = (-1, *sizes[1:])
        return Rewritten(args=(call.node.args[0], sizes))
    if call.name == "slice":  # of other dims, or of all rows; of those that came to experts there are other numbers
        is_of_rows = call.arg(1, "dim") in (None, 0) or (made is not None and call.arg(1, "dim") == -call.rank(made))
        return None if is_of_rows and placement.kind in ("D", "E") else AS_IT_IS
    has_size = any(_has_batch(arg) for arg in (*call.node.args, *(value for _, value in call.node.kwargs)))
    return None if has_size else AS_IT_IS


def _has_batch(arg: Arg) -> bool:
    return isinstance(arg, Batch) or (isinstance(arg, tuple) and any(_has_batch(item) for item in arg))


def of_sent(node: Node, options: Sequence[Option], sent: Collection[int]) -> tuple[Option, ...]:
    """Options of a node that uses rows which came to a rank's experts over `ep`: no rule may count on their number."""
    first = operands_of(node)
    result = []
    for option in options:
        placed = (*zip(first, option.operands, strict=True), *zip(node.outputs, option.outputs, strict=True))
        if any(t in sent and p is not None and p.is_part and (not p.is_split or p.dim == 0) for t, p in placed):
            continue
        sizes = option.args[1] if len(option.args) > 1 else None
        if node.op.split(".")[1] in _WITH_SIZES and isinstance(sizes, tuple):
            option = replace(option, args=(option.args[0], (-1, *sizes[1:]), *option.args[2:]))
        result.append(option)
    return tuple(result)


def sent_product(call: Call) -> Iterator[Option]:
    """A product of rows that travel over `ep`, on ranks that have the same tokens: split by features."""
    rows, matrices = call.operand(0), call.operand(1)
    if rows is None or matrices is None:
        return
    for option in call.einsum([(rows, [None, "i"]), (matrices, [None, "i", "o"])], [[None, "o"]]):
        if _is_aligned(call, matrices, option.operands[call.operands.index(matrices)]):
            yield option
    yield from partial_in(call, rows)


def sent_rows(call: Call) -> Iterator[Option]:
    """What each expert adds to the rows that came over `ep`: split by features."""
    table, made = call.operand(0), call.output
    if table is not None and made is not None and call.rank(table) == 2:
        yield from call.einsum([(table, [None, "f"])], [[None, "f"]])


TABLE: Mapping[str, Rule] = {
    "aten._grouped_mm": grouped_mm,
    DISPATCHED.removesuffix(".default"): sent_product,
    ROWS_OF_EXPERTS.removesuffix(".default"): sent_rows,
}
