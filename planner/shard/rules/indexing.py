"""Selecting, joining and sorting.

Most operators go along one dim and treat the others alike. Along that dim itself a split stays where the pieces that
are joined or cut apart are parts of the whole's pattern: a fused projection `S2*3[64]` falls into three `S2[64]`.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from planner.graph import Arg, Batch, Ref, Size, refs
from planner.shard.placement import Option, P, Placement, Q, R, divides, is_floating, split, times
from planner.shard.rules.call import Call, Letters, Rewritten, Rule
from planner.shard.rules.convolution import in_units
from planner.shard.rules.pointwise import aligned, partial_in

_END = (1 << 63) - 1  # of a slice that has none
_MOST_PARTS = 64  # of a pattern that is cut at given places
_INDEX = "index"

# --- along a dim ----------------------------------------------------------------------------------


def _dims(call: Call, position: int, name: str, default: Arg, rank: int) -> set[int] | None:
    """The dims that an argument names; None if it names no certain ones."""
    given = call.arg(position, name, default)
    items = given if isinstance(given, tuple) else (given,)
    if rank == 0 or not items or not all(isinstance(d, int) for d in items):
        return None
    return {d % rank for d in items if isinstance(d, int)}


def along(position: int, name: str = "dim", default: Arg = None, *, is_linear: bool = False) -> Rule:
    """All dims but those that the argument names, in all operands and outputs alike: sorting, running sums, shifts."""

    def rule(call: Call) -> Iterator[Option]:
        x = call.operand(0)
        gone = None if x is None else _dims(call, position, name, default, call.rank(x))
        if x is None or gone is None or any(call.rank(t) != call.rank(x) for t in call.operands):
            return
        letters = [None if d in gone else d for d in range(call.rank(x))]
        yield from call.einsum([(t, letters) for t in call.operands], [letters] * len(call.node.outputs))
        if is_linear:
            yield from partial_in(call, x)

    return rule


def without(position: int, name: str = "dim", default: Arg = None, *, keeps: int | None = None) -> Rule:
    """The dim that the argument names is not in the output: an extreme with its place, a similarity."""

    def rule(call: Call) -> Iterator[Option]:
        x, made = call.operand(0), call.output
        gone = None if x is None else _dims(call, position, name, default, call.rank(x))
        if x is None or gone is None or any(call.shape(t) != call.shape(x) for t in call.operands):
            return
        letters = [None if d in gone else d for d in range(call.rank(x))]
        keeps_dims = keeps is not None and call.arg(keeps, "keepdim") is True
        out = [d for d in letters if keeps_dims or d is not None]
        if all(t is None or call.rank(t) == len(out) for t in (made, *call.node.outputs)):
            yield from call.einsum([(t, letters) for t in call.operands], [out] * len(call.node.outputs), reduces=False)

    return rule


def last(count: int, *, is_linear: bool = False) -> Rule:
    """All dims but the last ones, which the output has as well, or has not."""

    def rule(call: Call) -> Iterator[Option]:
        x = call.operand(0)
        if x is None:
            return
        leading = range(call.rank(x) - count)
        yield from call.einsum([(x, _padded(leading, call.rank(x)))], [
            _padded(leading, 0 if t is None else call.rank(t)) for t in call.node.outputs
        ])  # fmt: skip
        if is_linear:
            yield from partial_in(call, x)

    return rule


def _padded(letters: Sequence[Hashable], rank: int) -> Letters:
    return [*letters, *(None for _ in range(rank - len(letters)))]


def select(call: Call) -> Iterator[Option]:
    """One place of a dim, which goes."""
    x = call.operand(0)
    if x is None:
        return
    dim = call.integer(1, "dim") % call.rank(x)
    letters = [None if d == dim else d for d in range(call.rank(x))]
    yield from call.einsum([(x, letters)], [[*letters[:dim], *letters[dim + 1 :]]])
    yield from partial_in(call, x)


def unbind(call: Call) -> Iterator[Option]:
    """All places of a dim, each a tensor."""
    x = call.operand(0)
    if x is None:
        return
    dim = call.integer(1, "dim") % call.rank(x)
    letters = [None if d == dim else d for d in range(call.rank(x))]
    yield from call.einsum([(x, letters)], [[*letters[:dim], *letters[dim + 1 :]]] * len(call.node.outputs))
    yield from partial_in(call, x)


def stack(call: Call) -> Iterator[Option]:
    """A new dim."""
    made = call.output
    if made is None:
        return
    dim = call.integer(1, "dim") % call.rank(made)
    letters = [d for d in range(call.rank(made)) if d != dim]
    yield from call.einsum([(t, letters) for t in call.operands], [[*letters[:dim], None, *letters[dim:]]])
    yield from _all_partial(call)


def _all_partial(call: Call) -> Iterator[Option]:
    """A sum of parts where all operands are."""
    if call.output is not None and all(is_floating(call.tensors[t]) for t in (*call.operands, call.output)):
        yield call.same(P)


# --- cutting and joining along the dim itself -----------------------------------------------------


def _pieced(
    call: Call, whole: int, dim: int, pieces: Sequence[tuple[int | None, int]]
) -> Iterator[tuple[Placement, tuple[Placement, ...]]]:
    """Splits along the dim in which pieces follow one another: of the whole, and of each piece.

    `pieces` are tensors (None: nobody has it) with their sizes along `dim`. The pattern of the whole is made of those
    of the pieces, one after the other.
    """
    if any(size == 0 for _, size in pieces):
        return
    found: dict[tuple[tuple[Size, ...], ...], None] = {}
    for parts, repeats in call.patterns([(whole, dim)]):
        cut = _cut(_expanded(parts, repeats), [size for _, size in pieces])
        if cut is not None:
            found[cut] = None
    plain = [(size,) if size % call.degree == 0 else None for _, size in pieces]
    for tensor, size in pieces:
        known = () if tensor is None else call.patterns([(tensor, dim)])
        for pattern in [e for parts, repeats in known if (e := _expanded(parts, repeats)) is not None] or [(size,)]:
            chosen = [pattern if own == size else other for (_, own), other in zip(pieces, plain, strict=True)]
            complete = tuple(c for c in chosen if c is not None)
            if len(complete) == len(pieces):
                found[complete] = None
    for patterns in found:
        of_pieces = tuple(split(dim, pattern) for pattern in patterns)
        of_whole = split(dim, [part for pattern in patterns for part in pattern])
        if all(divides(call.degree, p) for p in (of_whole, *of_pieces)):
            yield of_whole, of_pieces


def _expanded(parts: Sequence[Size], repeats: Size) -> tuple[int, ...] | None:
    """The parts one by one; None where there is no fixed number of them."""
    fixed = tuple(part for part in parts if isinstance(part, int))
    if isinstance(repeats, Batch) or len(fixed) < len(parts) or len(fixed) * repeats > _MOST_PARTS:
        return None
    return fixed * repeats


def _cut(parts: Sequence[int] | None, sizes: Sequence[int]) -> tuple[tuple[Size, ...], ...] | None:
    """Consecutive parts that add up to each size."""
    if parts is None:
        return None
    left = list(parts)
    result: list[tuple[Size, ...]] = []
    for size in sizes:
        taken: list[int] = []
        while left and sum(taken) < size:
            taken.append(left.pop(0))
        if sum(taken) != size:
            return None
        result.append(tuple(taken))
    return None if left else tuple(result)


def cat(call: Call) -> Iterator[Option]:
    """Tensors one after the other along a dim."""
    given, made = call.arg(0), call.output
    order = list(refs(given))
    if made is None or any(call.rank(t) != call.rank(made) for t in order):
        return
    dim = call.integer(1, "dim") % call.rank(made)
    letters = [None if d == dim else d for d in range(call.rank(made))]
    yield from call.einsum([(t, letters) for t in order], [letters])
    sizes = [call.shape(t)[dim] for t in order]
    fixed = [size for size in sizes if isinstance(size, int)]
    if len(fixed) == len(sizes):
        for of_whole, of_pieces in _pieced(call, made, dim, list(zip(order, fixed, strict=True))):
            placed = dict(zip(order, of_pieces, strict=True))
            if all(placed[t] == piece for t, piece in zip(order, of_pieces, strict=True)):
                yield call.option(placed, [of_whole])
    yield from _all_partial(call)


def pieces_of(call: Call) -> Iterator[Option]:
    """`split`, `chunk` and their like: along the dim itself, too, by local sizes."""
    x = call.operand(0)
    if x is None:
        return
    dim = call.integer(2, "dim") % call.rank(x)
    letters = [None if d == dim else d for d in range(call.rank(x))]
    yield from call.einsum([(x, letters)], [letters] * len(call.node.outputs))
    sizes = _piece_sizes(call, call.shape(x)[dim])
    if len(sizes) == len(call.node.outputs):
        for of_whole, of_pieces in _pieced(call, x, dim, list(zip(call.node.outputs, sizes, strict=True))):
            local = tuple(size // call.degree for size in sizes)
            rewritten = Rewritten(op="aten.split_with_sizes.default", args=(call.node.args[0], local, dim), kwargs=())
            yield call.option({x: of_whole}, of_pieces, rewritten)
    yield from partial_in(call, x)


def _piece_sizes(call: Call, size: Size) -> list[int]:
    """Sizes of what is cut apart; none where they depend on the batch."""
    given = call.arg(1, "split_size")
    if call.name in ("chunk", "unsafe_chunk"):
        given = call.arg(1, "chunks")
    if not isinstance(size, int):
        return []
    if isinstance(given, tuple):
        return [s for s in given if isinstance(s, int)]
    if not isinstance(given, int) or given < 1:
        return []
    step = -(-size // given) if call.name in ("chunk", "unsafe_chunk") else given
    return [min(step, size - start) for start in range(0, size, step)] if step else []


def glu(call: Call) -> Iterator[Option]:
    """One half times the sigmoid of the other, along a dim."""
    x, made = call.operand(0), call.output
    if x is None or made is None:
        return
    dim = call.integer(1, "dim", -1) % call.rank(x)
    letters = [None if d == dim else d for d in range(call.rank(x))]
    yield from call.einsum([(x, letters)], [letters])
    half = call.shape(made)[dim]
    if isinstance(half, int):
        for of_whole, (one, two) in _pieced(call, x, dim, [(made, half), (None, half)]):
            if one == two:
                yield call.option({x: of_whole}, [one])


def slices(call: Call) -> Iterator[Option]:
    """A range of a dim: all of it, whole parts of its pattern, or every n-th element of each part."""
    x, made = call.operand(0), call.output
    if x is None or made is None:
        return
    dim = call.integer(1, "dim") % call.rank(x)
    size = call.shape(x)[dim]
    letters = [None if d == dim else d for d in range(call.rank(x))]
    yield from call.einsum([(x, letters)], [letters])
    bounds = _range(call, size)
    if bounds is not None and isinstance(size, int):
        yield from _ranged(call, x, made, dim, size, bounds)
    elif call.shape(made)[dim] == size:  # all samples
        everything = Rewritten(op="aten.alias.default", args=(Ref(x),), kwargs=())
        whole = [d if d == dim else None for d in range(call.rank(x))]
        yield from call.einsum([(x, whole)], [whole], lambda _: everything)
    yield from partial_in(call, x)


def _range(call: Call, size: Size) -> tuple[int, int, int] | None:
    """Start, end and step of a `slice` or `narrow` within a dim of fixed size."""
    start, end, step = call.arg(2, "start"), call.arg(3, "end"), call.arg(4, "step", 1)
    start = 0 if start is None else start
    if not isinstance(start, int) or not isinstance(size, int):
        return None
    if call.name == "narrow":
        length = call.arg(3, "length")
        start = start % size if size else 0
        end = start + length if isinstance(length, int) else length
    end = _END if end is None else end
    if not isinstance(end, int) or not isinstance(step, int):
        return None
    first, after, by = slice(start, end, step).indices(size)
    return first, max(first, after), by


def _ranged(call: Call, x: int, made: int, dim: int, size: int, bounds: tuple[int, int, int]) -> Iterator[Option]:
    """Splits along the dim of a slice itself, whose bounds become those of a rank."""
    start, end, step = bounds

    def local(first: int, after: int, by: int = 1) -> Rewritten:
        return Rewritten(op="aten.slice.Tensor", args=(Ref(x), dim, first, after, by), kwargs=())

    if step > 1:
        if start < step and end == size and size % step == 0:
            yield from in_units(call, {x: (dim, step)}, [(dim, 1)], lambda _: local(start, _END, step))
        return
    around = [(None, start), (made, end - start), (None, size - end)]
    pieces = [(tensor, length) for tensor, length in around if length or tensor is not None]
    place = [tensor for tensor, _ in pieces].index(made)
    for of_whole, of_pieces in _pieced(call, x, dim, pieces):
        after = end // call.degree if end < size else _END
        yield call.option({x: of_whole}, [of_pieces[place]], local(start // call.degree, after))


def repeat(call: Call) -> Iterator[Option]:
    """Tensors one after the other in every dim: the pattern is repeated; what is 1 may be cut instead."""
    x, made, given = call.operand(0), call.output, call.arg(1, "repeats")
    if x is None or made is None or not isinstance(given, tuple) or len(given) > call.rank(made):
        return
    counts = (*(1 for _ in range(call.rank(made) - len(given))), *given)
    new = call.rank(made) - call.rank(x)
    letters = [d + new if counts[d + new] == 1 else None for d in range(call.rank(x))]
    yield from call.einsum([(x, letters)], [[*(None for _ in range(new)), *letters]])
    for dim, count in enumerate(counts):
        if not isinstance(count, int) or isinstance(count, bool) or count < 2:
            continue
        size = 1 if dim < new else call.shape(x)[dim - new]
        if size == 1:
            fewer = (*counts[:dim], count // call.degree, *counts[dim + 1 :])
            local = Rewritten(op="aten.repeat.default", args=(Ref(x), fewer), kwargs=())
            for parts, repeats in call.patterns([(made, dim)]):
                yield call.option({x: Q}, [split(dim, parts, repeats)], local)
            continue
        for parts, repeats in call.patterns([(x, dim - new)]):
            yield call.option({x: split(dim - new, parts, repeats)}, [split(dim, parts, times(repeats, count))])
    yield from partial_in(call, x)


def repeat_interleave(call: Call) -> Iterator[Option]:
    """Every element of a dim several times."""
    x, count, dim = call.operand(0), call.arg(1, "repeats"), call.arg(2, "dim")
    if x is None or not isinstance(count, int) or count < 1:
        return
    if not isinstance(dim, int):
        if call.rank(x) != 1:
            return
        dim = 0
    dim %= call.rank(x)
    letters = [None if d == dim else d for d in range(call.rank(x))]
    yield from call.einsum([(x, letters)], [letters])
    yield from in_units(call, {x: (dim, 1)}, [(dim, count)])
    yield from partial_in(call, x)


# --- by indices -----------------------------------------------------------------------------------


def index_select(call: Call) -> Iterator[Option]:
    """Input, dim, indices `[K]`."""
    x, index = call.operand(0), call.operand(2, "index")
    if x is None or index is None or call.rank(index) != 1:
        return
    dim = call.integer(1, "dim") % call.rank(x)
    letters = [None if d == dim else d for d in range(call.rank(x))]
    yield from call.einsum([(x, letters), (index, (_INDEX,))], [[*letters[:dim], _INDEX, *letters[dim + 1 :]]])
    yield from partial_in(call, x)


def gather(call: Call) -> Iterator[Option]:
    """`out[i][j] = x[index[i][j]][j]` along dim 0: indices may be split along it, the others with the input."""
    at_dim, at_index = (2, 1) if call.name == "take_along_dim" else (1, 2)
    x, index, dim = call.operand(0), call.operand(at_index, "index"), call.arg(at_dim, "dim")
    if index is None:
        index = call.operand(at_index, "indices")
    if x is None or index is None or not isinstance(dim, int) or call.rank(x) != call.rank(index) or not call.rank(x):
        return
    dim %= call.rank(x)
    same = [d if d != dim and call.shape(x)[d] == call.shape(index)[d] else None for d in range(call.rank(x))]
    if call.name == "take_along_dim" and same.count(None) > 1:
        return
    of_index: list[Hashable | None] = [_INDEX if d == dim else letter for d, letter in enumerate(same)]
    yield from call.einsum([(x, same), (index, of_index)], [of_index])
    yield from partial_in(call, x)


def scatter(*, adds: bool = False) -> Rule:
    """Input, dim, indices, source. What is added may be split along the dim: a partial sum."""

    def rule(call: Call) -> Iterator[Option]:
        x, index, source = call.operand(0), call.operand(2, "index"), call.operand(3, "src")
        if x is None or index is None or not call.rank(x):
            return
        dim = call.integer(1, "dim") % call.rank(x)
        operands = [t for t in (x, index, source) if t is not None]
        if any(call.rank(t) != call.rank(x) for t in operands):
            return
        is_alike = [len({call.shape(t)[d] for t in operands}) == 1 for d in range(call.rank(x))]
        same = [d if d != dim and is_alike[d] else None for d in range(call.rank(x))]
        may_add = adds and source is not None and call.shape(source) == call.shape(index)
        along_dim: list[Hashable | None] = [_INDEX if d == dim and may_add else s for d, s in enumerate(same)]
        named: list[tuple[int | None, Letters]] = [(x, same), (index, along_dim), (source, along_dim)]
        yield from call.einsum(named, [same], summands=[x])

    return rule


def index_add(*, adds: bool) -> Rule:
    """Input, dim, indices `[K]`, source with K in the place of the dim, or none."""

    def rule(call: Call) -> Iterator[Option]:
        x, index, source = call.operand(0), call.operand(2, "index"), call.operand(3, "source")
        if x is None or index is None or call.rank(index) != 1 or not call.rank(x):
            return
        dim = call.integer(1, "dim") % call.rank(x)
        if source is not None and call.rank(source) != call.rank(x):
            return
        letters = [None if d == dim else d for d in range(call.rank(x))]
        of_index = _INDEX if adds else None
        of_source = [of_index if d == dim else letter for d, letter in enumerate(letters)]
        named: list[tuple[int | None, Letters]] = [(x, letters), (index, [of_index]), (source, of_source)]
        yield from call.einsum(named, [letters], summands=[x])

    return rule


def _indexed(call: Call) -> tuple[int, list[Hashable | None], list[tuple[int, Letters]], list[Hashable | None]] | None:
    """Of `x[indices]`: x with its letters, those of the indices, and of what is taken; None for masks."""
    x, given = call.operand(0), call.arg(1, "indices")
    if x is None or not isinstance(given, tuple) or len(given) > call.rank(x):
        return None
    places = [d for d, item in enumerate(given) if item is not None]
    tensors = [item.tensor for item in given if isinstance(item, Ref)]
    if not places or len(tensors) != len(places) or any(call.tensors[t].dtype in ("bool", "uint8") for t in tensors):
        return None
    widest = max(tensors, key=lambda t: (call.rank(t), sum(size != 1 for size in call.shape(t))))
    for tensor in tensors:  # broadcast to one of them
        for mine, its in zip(reversed(call.shape(tensor)), reversed(call.shape(widest)), strict=False):
            if mine not in (1, its):
                return None
    letters: list[Hashable | None] = [None if d in places else d for d in range(call.rank(x))]

    def named(tensor: int) -> list[Hashable | None]:
        return [None if a is None else (_INDEX, a) for a in aligned(call, tensor, widest)]

    is_together = places[-1] - places[0] == len(places) - 1
    kept = [letter for d, letter in enumerate(letters) if d not in places]
    front = places[0] if is_together else 0
    return x, letters, [(t, named(t)) for t in tensors], [*kept[:front], *named(widest), *kept[front:]]


def index(call: Call) -> Iterator[Option]:
    """Advanced indexing by integers: dims that are not indexed, and those of the indices."""
    found = _indexed(call)
    if found is None or call.output is None or call.rank(call.output) != len(found[3]):
        return
    x, letters, named, out = found
    yield from call.einsum([(x, letters), *named], [out])
    yield from partial_in(call, x)


def index_put(call: Call) -> Iterator[Option]:
    """Values for indexed places; those that are added may be split with their indices: a partial sum."""
    found, values = _indexed(call), call.operand(2, "values")
    if found is None or values is None:
        return
    x, letters, named, taken = found
    if call.rank(values) > len(taken):
        return
    sizes = {letter: call.shape(t)[d] for t, own in ((x, letters), *named) for d, letter in enumerate(own)}
    of_values = [
        letter if letter is not None and sizes[letter] == size else None
        for letter, size in zip(taken[len(taken) - call.rank(values) :], call.shape(values), strict=True)
    ]
    adds = call.arg(3, "accumulate", False) is True
    frozen = set() if adds else {letter for _, own in named for letter in own if letter is not None}
    yield from call.einsum([(x, letters), *named, (values, of_values)], [letters], summands=[x], frozen=frozen)


def one_hot(call: Call) -> Iterator[Option]:
    """A new last dim for the classes."""
    x = call.operand(0)
    if x is not None:
        yield from call.einsum([(x, range(call.rank(x)))], [[*range(call.rank(x)), None]])


def bucketize(call: Call) -> Iterator[Option]:
    """Places of values in an ordered row."""
    values, row = (0, 1) if call.name == "bucketize" else (1, 0)
    x, ordered = call.operand(values), call.operand(row)
    if x is not None and ordered is not None and call.rank(ordered) == 1 and x != ordered:
        yield from call.einsum([(x, range(call.rank(x)))], [range(call.rank(x))])


def histogram(call: Call) -> Iterator[Option]:
    """Counts of a part are a partial sum, if the range of the bins is given."""
    x = call.operand(0)
    if x is not None and call.arg(2, "min", 0) != call.arg(3, "max", 0):
        yield from call.einsum([(x, range(call.rank(x)))], [[None]])


# --- others ---------------------------------------------------------------------------------------


def like(call: Call) -> Iterator[Option]:
    """The shape of the operand, which is not read: uninitialised memory."""
    x = call.operand(0)
    if x is not None:
        yield from call.einsum([(x, range(call.rank(x)))], [range(call.rank(x))])


def new(call: Call) -> Iterator[Option]:
    """A constant of a given size, in the dtype of an operand that is not read: it may be split in any way."""
    x, made = call.operand(0), call.output
    if x is None or made is None:
        return
    for dim in range(call.rank(made)):
        for parts, repeats in call.patterns([(made, dim)]):
            placed = split(dim, parts, repeats)
            yield call.option({x: R}, [placed], call.with_args({1: call.local(made, placed)}, ("self", "size")))
    for seed in (*call.seeds.get(x, ()), P):
        if seed.kind in ("S", "P") and divides(call.degree, seed) and (seed != P or is_floating(call.tensors[x])):
            yield call.option({x: seed}, [R], share=1.0)


def windows(call: Call) -> Iterator[Option]:
    """`unfold`: a dim becomes windows of it, and a last dim the places in a window."""
    x = call.operand(0)
    if x is None or not call.rank(x):
        return
    dim = call.integer(1, "dimension") % call.rank(x)
    letters = [None if d == dim else d for d in range(call.rank(x))]
    yield from call.einsum([(x, letters)], [[*letters, None]])
    yield from partial_in(call, x)


def diagonal(call: Call) -> Iterator[Option]:
    """Two dims go, the last is their diagonal."""
    x = call.operand(0)
    if x is None or call.rank(x) < 2:
        return
    rank = call.rank(x)
    gone = {call.integer(2, "dim1", 0) % rank, call.integer(3, "dim2", 1) % rank}
    letters = [None if d in gone else d for d in range(rank)]
    yield from call.einsum([(x, letters)], [[*(d for d in letters if d is not None), None]])
    yield from partial_in(call, x)


def distances(call: Call) -> Iterator[Option]:
    """`[..., P, M]` and `[..., R, M]` -> `[..., P, R]`."""
    x, y, made = call.operand(0), call.operand(1), call.output
    if x is None or y is None or made is None or call.shape(x)[:-2] != call.shape(y)[:-2] or x == y:
        return
    leading = range(call.rank(x) - 2)
    yield from call.einsum([(x, (*leading, "p", None)), (y, (*leading, "r", None))], [(*leading, "p", "r")])


def _named(rule: Callable[[Call], Iterator[Option]], names: str) -> Mapping[str, Rule]:
    return {f"aten.{name}": rule for name in names.split()}


TABLE: Mapping[str, Rule] = {
    **_named(along(1), "cumprod logcumsumexp cummax cummin"),
    "aten.cumsum": along(1, is_linear=True),
    **_named(along(1, default=-1), "sort argsort"),
    "aten.topk": along(2, default=-1),
    "aten.flip": along(1, "dims", is_linear=True),
    "aten.roll": along(2, "dims", is_linear=True),
    "aten.diff": along(2, default=-1),
    "aten.slice_scatter": along(2, default=0),
    **{f"aten.{name}.dim": without(1, keeps=2) for name in ("max", "min", "median", "nanmedian")},
    **_named(without(1, keeps=2), "argmax argmin"),
    "aten.mode": without(1, default=-1, keeps=2),
    "aten.kthvalue": without(2, default=-1, keeps=3),
    "aten.cosine_similarity": without(2, default=1),
    "aten.cdist": distances,
    **_named(last(2, is_linear=True), "tril triu"),
    "aten.view_as_real": last(0, is_linear=True),
    "aten.view_as_complex": last(1, is_linear=True),
    **_named(along(2, default=-1, is_linear=True), "fft_fft fft_ifft fft_rfft fft_irfft"),
    **_named(along(2, default=(-2, -1), is_linear=True), "fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2"),
    "aten.select": select,
    "aten.unbind": unbind,
    "aten.stack": stack,
    **_named(cat, "cat concat concatenate"),
    **_named(pieces_of, "split split_with_sizes chunk unsafe_split unsafe_split_with_sizes unsafe_chunk"),
    "aten.glu": glu,
    **_named(slices, "slice narrow"),
    **_named(repeat, "repeat tile"),
    "aten.repeat_interleave.self_int": repeat_interleave,
    "aten.index_select": index_select,
    **_named(gather, "gather take_along_dim"),
    "aten.scatter": scatter(),
    "aten.scatter_reduce": scatter(),
    "aten.scatter_add": scatter(adds=True),
    "aten.index_add": index_add(adds=True),
    **_named(index_add(adds=False), "index_copy index_fill"),
    "aten.index": index,
    "aten.index_put": index_put,
    "aten.one_hot": one_hot,
    **_named(bucketize, "bucketize searchsorted"),
    "aten.histc": histogram,
    "aten.empty_like": like,
    **_named(new, "new_empty new_zeros new_ones new_full"),
    "aten.unfold": windows,
    "aten.diagonal": diagonal,
}
