"""Splits through the factors of shapes: view, expand, transpose and their like."""

from collections.abc import Iterator, Mapping
from itertools import accumulate

from planner.graph import Arg, Batch, Size
from planner.shard.placement import Option, Placement, Q, divides, split, times, total_size
from planner.shard.rules.call import Call, Letters, Rewritten, Rule, Split
from planner.shard.rules.pointwise import partial_in, pointwise

_SAMPLES = (1 << 61) - 1  # stands for the micro-batch where sizes are compared: a prime that no product of sizes has


def _number(size: Size) -> int:
    return size.per_sample * _SAMPLES if isinstance(size, Batch) else size


def _quotient(size: Size, by: Size) -> Size | None:
    """`size / by` where that is a whole size."""
    one = size.per_sample if isinstance(size, Batch) else size
    two = by.per_sample if isinstance(by, Batch) else by
    if two == 0 or one % two or (isinstance(by, Batch) and not isinstance(size, Batch)):
        return None
    left = one // two
    return Batch(left) if isinstance(size, Batch) and not isinstance(by, Batch) else left


def reshaped(placement: Placement, source: tuple[Size, ...], target: tuple[Size, ...], degree: int) -> Placement | None:
    """A split of `source` seen in `target`, a shape of as many elements in the same order; None if it is none there.

    The dims in front of the one that is split repeat its pattern, those behind it stretch its parts. In the target the
    pattern must be one of a single dim again, each part of which `degree` divides.

    >>> str(reshaped(Placement.parse("S2*3[64]"), (Batch(1), 128, 192), (Batch(128), 3, 4, 16), 4))
    'S2[4]'
    >>> str(reshaped(Placement.parse("S1[128]"), (Batch(1), 128, 192), (Batch(128), 192), 4))
    'S0*B[128]'
    """
    group = _group(source, target, placement.dim)
    if group is None:
        return None
    sources, targets = group
    before = times(*(source[d] for d in sources if d < placement.dim))
    behind = times(*(source[d] for d in sources if d > placement.dim))
    repeats = times(before, placement.repeats)
    parts = [times(part, behind) for part in placement.parts]
    for dim in targets:
        before = times(*(target[d] for d in targets if d < dim))
        behind = times(*(target[d] for d in targets if d > dim))
        again = _quotient(repeats, before)
        pieces = [q for part in parts if (q := _quotient(part, behind)) is not None]
        if again is not None and len(pieces) == len(parts):
            found = split(dim, pieces, again)
            if divides(degree, found) and total_size(found) == target[dim]:
                return found
    return None


def _group(source: tuple[Size, ...], target: tuple[Size, ...], dim: int) -> tuple[list[int], list[int]] | None:
    """The dims of source and target that are the same elements, around one dim of the source; no dims of 1."""
    ends = _ends(source), _ends(target)
    if 0 in (*ends[0], *ends[1]) or (ends[0] or [1])[-1] != (ends[1] or [1])[-1]:
        return None
    shared = sorted({1, *ends[0]} & {1, *ends[1]})
    low = max((x for x in shared if x < ends[0][dim]), default=None)
    if low is None or source[dim] == 1:
        return None
    high = min(x for x in shared if x >= ends[0][dim])
    found = [
        [d for d, end in enumerate(side) if low < end <= high and shape[d] != 1]
        for side, shape in zip(ends, (source, target), strict=True)
    ]
    return found[0], found[1]


def _ends(shape: tuple[Size, ...]) -> list[int]:
    """How many elements there are up to the end of each dim, counted from the left."""
    return list(accumulate((_number(s) for s in shape), lambda a, b: a * b))


def view(call: Call, *, keeps_args: bool = False) -> Iterator[Option]:
    """Another shape of the same elements: `view`, `reshape`, `flatten`, `unflatten`."""
    source, made = call.operands[0], call.output
    if made is None:
        return
    if call.overload == "dtype":  # the same bytes, read as another dtype
        yield from pointwise(call)
        return
    shapes = call.shape(source), call.shape(made)
    for placement in _splits(call, source):
        seen = reshaped(placement, *shapes, call.degree)
        if seen is not None:
            yield from _viewed(call, placement, seen, keeps_args=keeps_args)
    for seen in _splits(call, made):
        origin = reshaped(seen, shapes[1], shapes[0], call.degree)
        if origin is not None:
            yield from _viewed(call, origin, seen, keeps_args=keeps_args)
    yield from partial_in(call, source)


def _splits(call: Call, tensor: int) -> Iterator[Placement]:
    for dim in range(call.rank(tensor)):
        for parts, repeats in call.patterns([(tensor, dim)]):
            yield split(dim, parts, repeats)


def _viewed(call: Call, source: Placement, made: Placement, *, keeps_args: bool) -> Iterator[Option]:
    """A tensor that only gives its shape (`view_as`) may be placed as the output, too: sizes take its place."""
    if keeps_args or call.output is None:
        rewritten = Rewritten()
    else:
        op = call.node.op if call.name in ("view", "reshape", "_unsafe_view") else "aten.reshape.default"
        rewritten = Rewritten(op=op, args=(call.node.args[0], call.local(call.output, made)), kwargs=())
    for shape_of in (Q, made):
        yield call.option({t: source if t == call.operands[0] else shape_of for t in call.operands}, [made], rewritten)


def flatten(call: Call) -> Iterator[Option]:
    """Its arguments name dims, not sizes."""
    yield from view(call, keeps_args=True)


def expand(call: Call) -> Iterator[Option]:
    """New dims and dims of 1 are repeated: whole where the output is split along them."""
    source, made = call.operands[0], call.output
    if made is None:
        return
    shape, target = call.shape(source), call.shape(made)
    letters = [d if shape[d] == target[d] and shape[d] != 1 else None for d in range(-len(shape), 0)]

    def rewrite(found: Split) -> Rewritten:
        return Rewritten(
            op="aten.expand.default", args=(call.node.args[0], call.local(made, found.outputs[0])), kwargs=()
        )

    yield from call.einsum([(source, letters)], [range(-len(target), 0)], rewrite)
    yield from partial_in(call, source)


def permuted(call: Call) -> Iterator[Option]:
    """Dims change places: `transpose`, `permute`, `t`, `movedim` and so on."""
    source, made = call.operands[0], call.output
    order = _order(call)
    if made is None or order is None:
        return
    yield from call.einsum([(source, range(call.rank(source)))], [order])
    yield from partial_in(call, source)


def _order(call: Call) -> list[int] | None:
    """Which dim of the source each dim of the output is."""
    rank = call.rank(call.operands[0])
    order = list(range(rank))
    match call.name.removesuffix("_"):
        case "permute":
            dims = call.arg(1, "dims")
            return [d % rank for d in dims if isinstance(d, int)] if isinstance(dims, tuple) else None
        case "transpose" | "swapaxes" | "swapdims":
            one, two = (call.integer(position, f"dim{position - 1}") % rank for position in (1, 2))
        case "t" if rank < 2:
            return order
        case "t" | "mT" | "numpy_T" if rank == 2:
            one, two = 0, 1
        case "mT" | "adjoint":
            one, two = rank - 2, rank - 1
        case "movedim" | "moveaxis" if call.overload == "int":
            one, two = (call.integer(position) % rank for position in (1, 2))
            moved = order.pop(one)
            order.insert(two, moved)
            return order
        case _:
            return None
    order[one], order[two] = order[two], order[one]
    return order


def unsqueeze(call: Call) -> Iterator[Option]:
    """A new dim of 1."""
    source, made = call.operands[0], call.output
    if made is None:
        return
    letters: list[int | None] = list(range(call.rank(source)))
    letters.insert(call.integer(1, "dim") % call.rank(made), None)
    yield from call.einsum([(source, range(call.rank(source)))], [letters])
    yield from partial_in(call, source)


def squeeze(call: Call) -> Iterator[Option]:
    """Dims of 1 go, those that are 1 in the whole: a dim of which a rank holds one stays."""
    source, made = call.operands[0], call.output
    if made is None:
        return
    rank = call.rank(source)
    given = call.arg(1, "dim")
    asked = range(rank) if given is None else given if isinstance(given, tuple) else (given,)
    gone = tuple(d % rank for d in asked if isinstance(d, int) and call.shape(source)[d % rank] == 1)
    letters: Letters = range(rank)
    args: tuple[Arg, ...] = (call.node.args[0], gone)
    op = "aten.squeeze_.dims" if call.name.endswith("_") else "aten.squeeze.dims"
    yield from call.einsum(
        [(source, letters)],
        [[d for d in range(rank) if d not in gone]],
        lambda _: Rewritten(op=op, args=args, kwargs=()),
    )
    yield from partial_in(call, source)


def _table(rule: Rule, names: str) -> Mapping[str, Rule]:
    return {f"aten.{name}": rule for name in names.split()}


TABLE: Mapping[str, Rule] = {
    **_table(view, "view reshape _unsafe_view unflatten view_as reshape_as"),
    **_table(flatten, "flatten ravel"),
    **_table(expand, "expand expand_as broadcast_to"),
    **_table(permuted, "transpose permute t swapaxes swapdims mT numpy_T adjoint movedim moveaxis"),
    **_table(unsqueeze, "unsqueeze"),
    **_table(squeeze, "squeeze"),
}
