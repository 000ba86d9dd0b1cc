"""What a rank of a mesh axis holds of a tensor: of its value, and of its gradient.

    kind  value             gradient
    R     whole, equal      whole, equal            replicated
    Q     whole, equal      partial                 the gradient of the whole is the sum over ranks
    P     partial           whole, equal            the value of the whole is the sum over ranks
    S     a part of a dim   the same part           split
    L     of own tokens     the same                local
    D     of own experts    the same                dispatched
    E     of own experts    the same                sent (axis `ep` alone)

A tensor that has no gradient is R, P, S, L, D or E. Other pairs (both partial) do not occur: sum one of the two first.

The split of a dim is described by the `parts` that it is made of, one after the other, `repeats` times: each part is
cut into as many equal pieces as there are ranks, and a rank holds its piece of every part. A plain split has one part,
the dim itself. A fused projection of queries, keys and values has three; the tokens of a batch that was flattened
(`[batch, tokens] -> [batch * tokens]`, split by tokens) are one part, repeated for every sample.

L and D are inside of an order of rows by expert that cancels out (`Tensor.order`); only operators begin and end them.
L is what a rank makes of its own tokens alone, as if there were no others: their rows in the order of their experts,
places in this order, how many there are of each expert. It has the split of the rows, unsorted, that it was made of:
rows of two splits never meet. D are the rows of the experts that a rank has, experts one after the other. How many
they are depends on the values; sizes are those of balanced experts. Without parts they are the rows of all tokens in
the order of the whole; with parts, those that were sent by the ranks that have the tokens, which are split so.

Ranks of `ep` have samples of their own, as all data ranks do: there R is what a rank has of these, S is of parameters
alone, and E are the rows that came to a rank's experts from all ranks; balanced, as many as it has itself. There are no
conversions on this axis, and gradients of what is R are added up as those of other data ranks are.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from planner.errors import PlanError
from planner.graph import Arg, Batch, Graph, Node, Size, Tensor, reads

Kind = Literal["R", "Q", "P", "S", "L", "D", "E"]


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """One of the seven kinds; for S, L and D also the dim and what it is made of (see the module docstring)."""

    kind: Kind
    dim: int = 0
    parts: tuple[Size, ...] = ()
    repeats: Size = 1
    order: tuple[int, ...] = ()  # of an S of experts: in which ranks have them one after the other; () = as they are

    @property
    def is_split(self) -> bool:
        """Whether a rank holds a part that its number tells (S)."""
        return self.kind == "S"

    @property
    def is_part(self) -> bool:
        """Whether ranks hold different elements of one whole: S, L, D or E."""
        return self.kind in ("S", "L", "D", "E")

    def __str__(self) -> str:
        if not self.parts:
            return self.kind
        repeats = "" if self.repeats == 1 else f"*{_size_text(self.repeats)}"
        order = f"@{'.'.join(map(str, self.order))}" if self.order else ""
        return f"{self.kind}{self.dim}{repeats}[{','.join(map(_size_text, self.parts))}{order}]"

    @classmethod
    def parse(cls, text: str) -> "Placement":
        """The inverse of `str`.

        >>> [str(Placement.parse(text)) for text in ("S0*B[128]", "S2[64,32,32]", "E", "S0[4@2.0.1.3]")]
        ['S0*B[128]', 'S2[64,32,32]', 'E', 'S0[4@2.0.1.3]']

        Raises:
            PlanError: the text is no placement.
        """
        if text in ("R", "Q", "P", "D", "E"):
            return cls(text)  # type: ignore[arg-type]
        sizes_text = r"(\d{0,12}B?(?:,\d{0,12}B?)*)"
        match = re.fullmatch(rf"([SLD])(\d{{1,3}})(?:\*(\d{{0,12}}B?))?\[{sizes_text}(?:@([\d.]+))?\]", text)
        sizes = [] if match is None else [match[3] or "1", *match[4].split(",")]
        if match is None or "" in sizes:
            raise PlanError(f"{text!r} is no placement: it must be R, Q, P, D, E or such as S1[128]")
        kind, dim = match[1], int(match[2])
        order = tuple(int(number) for number in (match[5] or "").split(".") if number)
        if order and (kind != "S" or sorted(order) != list(range(int(match[4]) if match[4].isdigit() else 0))):
            raise PlanError(f"{text!r} is no placement: behind the @ must be every number of the dim once")
        return cls(kind, dim, tuple(_size_of(size) for size in sizes[1:]), _size_of(sizes[0]), order)  # type: ignore[arg-type]


R, Q, P, E = Placement("R"), Placement("Q"), Placement("P"), Placement("E")


def _size_text(size: Size) -> str:
    if isinstance(size, Batch):
        return "B" if size.per_sample == 1 else f"{size.per_sample}B"
    return str(size)


def _size_of(text: str) -> Size:
    if text.endswith("B"):
        return Batch(int(text[:-1] or "1"))
    return int(text)


def times(*sizes: Size) -> Size:
    """The product of sizes.

    >>> times(3, Batch(2)), times(2, 5)
    (Batch(per_sample=6), 10)

    Raises:
        ValueError: two of them are batches.
    """
    batches = [size.per_sample for size in sizes if isinstance(size, Batch)]
    fixed = prod(size for size in sizes if not isinstance(size, Batch))
    if len(batches) > 1:
        raise ValueError(f"a size has at most one batch, got {sizes}")
    return Batch(batches[0] * fixed) if batches else fixed


def split(dim: int, parts: Sequence[Size], repeats: Size = 1) -> Placement:
    """S in its one canonical form: equal parts are one part, repeated.

    >>> str(split(0, [64, 64, 64])), str(split(1, [128])), str(split(0, [64, 32, 64, 32], Batch(1)))
    ('S0*3[64]', 'S1[128]', 'S0*2B[64,32]')
    """
    parts = tuple(parts)
    for count in range(1, len(parts) + 1):
        if len(parts) % count == 0 and parts == parts[:count] * (len(parts) // count):
            again = len(parts) // count
            return Placement("S", dim, parts[:count], times(repeats, again) if again > 1 else repeats)
    raise AssertionError("a sequence repeats itself")


def total_size(placement: Placement) -> Size:
    """The size of the whole dim that an S splits (of the rows, for an L or D with parts).

    >>> total_size(Placement.parse("S0*2B[64,32]"))
    Batch(per_sample=192)
    """
    batches = [part for part in placement.parts if isinstance(part, Batch)]
    if batches:
        inner: Size = Batch(sum(part.per_sample if isinstance(part, Batch) else 0 for part in placement.parts))
    else:
        inner = sum(part for part in placement.parts if not isinstance(part, Batch))
    return times(placement.repeats, inner)


def divides(degree: int, placement: Placement) -> bool:
    """Whether every part of an S can be cut into `degree` equal pieces (always for other kinds).

    >>> divides(4, Placement.parse("S0[64,32]")), divides(4, Placement.parse("S0[64,6]"))
    (True, False)
    """
    return all((p.per_sample if isinstance(p, Batch) else p) % degree == 0 for p in placement.parts)


def local_size(size: Size, degree: int) -> Size:
    """`size / degree`, which divides it, or else at least that."""
    return Batch(-(-size.per_sample // degree)) if isinstance(size, Batch) else -(-size // degree)


def local_shape(shape: Sequence[Size], placement: Placement, degree: int) -> tuple[Size, ...]:
    """What a rank holds of a tensor of `shape`; for D and E, with balanced experts.

    >>> local_shape((Batch(1), 12, 8), split(1, [12]), 4)
    (Batch(per_sample=1), 3, 8)
    """
    is_counted = placement.kind == "L" and not any(isinstance(size, Batch) for size in shape)  # one of each expert
    if not placement.is_part or placement.kind == "E" or is_counted:
        return tuple(shape)
    return tuple(local_size(s, degree) if d == placement.dim else s for d, s in enumerate(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run a node on the ranks of an axis.

    `operands` are placements of the distinct tensors it reads, in order of first use (`operands_of`); Q means R for one
    without gradient. `outputs` are those of what it makes (None where nothing is used). `op`, `args` and `kwargs` are
    the node's own with the sizes of one rank; operands are `Ref`s to the tensors of the whole graph, which the rewrite
    exchanges for what is converted. An `op` of `planner.*` is one of `planner.trace.parallel`: the rewrite adds the
    keyword `axis`. `share` is the part of the node's work that a rank does: 1 where it is replicated, 1/degree where it
    is split.
    """

    operands: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]
    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    share: float = 1.0

    def __str__(self) -> str:
        made = ",".join("-" if p is None else str(p) for p in self.outputs)
        return f"{','.join(map(str, self.operands))}>{made}"


def operands_of(node: Node) -> tuple[int, ...]:
    """The distinct tensors that a node reads, in order of first use."""
    return tuple(dict.fromkeys(reads(node)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How one block is run: an option per node, and the placement of all that comes in and goes out.

    Positions are those of `Block.nodes`, `.parameters`, `.buffers`, `.inputs` and `.outputs`, so that one sharding
    serves all blocks of a class. `shared` tensors of a block are always R.
    """

    options: tuple[Option, ...]
    parameters: tuple[Placement, ...]
    buffers: tuple[Placement, ...]
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


def differentiable(graph: Graph) -> frozenset[int]:
    """Tensors that a gradient flows through: parameters that train, and what is made of them in floating point.

    A buffer that forward writes (running statistics) has none.
    """
    found = {i for i, t in enumerate(graph.tensors) if t.requires_grad}
    for node in graph.nodes:
        if node.op != "aten.detach.default" and any(t in found for t in reads(node)):
            made = [t for t in (*node.outputs, *node.mutates) if t is not None]
            found.update(t for t in made if is_floating(graph.tensors[t]) and graph.tensors[t].kind != "buffer")
    return frozenset(found)


def effective(placement: Placement, *, has_gradient: bool) -> Placement:
    """Q is R for a tensor without gradient."""
    return R if placement == Q and not has_gradient else placement


def is_floating(tensor: Tensor) -> bool:
    """Whether a tensor may have a gradient."""
    return tensor.dtype.startswith(("float", "bfloat", "complex"))


# --- from one placement to another ----------------------------------------------------------------

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """An operator of `planner.trace.parallel` that turns one placement into another, and what it communicates.

    Bytes are counted as `planner.collectives` does: of the whole tensor for all_reduce (each rank's), all_gather (the
    gathered output) and reduce_scatter (the input), of one rank's part for all_to_all.
    """

    op: str
    args: tuple[Arg, ...]  # after the tensor and the axis
    forward: Collective | None
    backward: Collective | None


def conversion(source: Placement, target: Placement, *, has_gradient: bool) -> Conversion | None:
    """How `source` becomes `target`; None if it does not (in one step).

        R -> Q   copy        nothing; gradients are summed
        P -> R   reduce      values are summed; nothing
        P -> Q   reduce_copy both are summed
        R -> S   cut         nothing; gradients are gathered
        Q -> S   take        nothing; nothing (zeros around the part, summed later)
        S -> R   gather      values are gathered; nothing
        S -> Q   gather_sum  values are gathered; gradients are reduce-scattered
        P -> S   scatter     values are reduce-scattered; gradients are gathered
        S -> S   exchange    all-to-all both ways (between two dims)
        R -> P   share       1/n of the value; nothing
        Q -> R   unshare     nothing; 1/n of the gradient

    >>> conversion(P, R, has_gradient=True).forward, conversion(R, P, has_gradient=True).forward
    ('all_reduce', None)
    """
    if source == target:
        return None
    one, two = _text_args(source), _text_args(target)
    found: Conversion | None
    match source.kind, target.kind:
        case "R", "Q":
            found = _made("copy", (), None, "all_reduce")
        case "P", "R":
            found = _made("reduce", (), "all_reduce", None)
        case "P", "Q":
            found = _made("reduce_copy", (), "all_reduce", "all_reduce")
        case "R", "S":
            found = _made("cut", two, None, "all_gather")
        case "Q", "S":
            found = _made("take", two, None, None)
        case "S", "R":
            found = _made("gather", one, "all_gather", None)
        case "S", "Q":
            found = _made("gather_sum", one, "all_gather", "reduce_scatter")
        case "P", "S":
            found = _made("scatter", two, "reduce_scatter", "all_gather")
        case "S", "S" if source.dim != target.dim:
            found = _made("exchange", (*one, *two), "all_to_all", "all_to_all")
        case "R", "P":
            found = _made("share", (), None, None)
        case "Q", "R":
            found = _made("unshare", (), None, None)
        case _:
            found = None
    if found is None or has_gradient:
        return found
    return Conversion(op=found.op, args=found.args, forward=found.forward, backward=None)


def _made(name: str, args: tuple[Arg, ...], forward: Collective | None, backward: Collective | None) -> Conversion:
    return Conversion(op=f"planner.{name}.default", args=args, forward=forward, backward=backward)


def _text_args(placement: Placement) -> tuple[Arg, ...]:
    """A split as arguments of an operator: dim, parts, repeats."""
    return (placement.dim, placement.parts, placement.repeats) if placement.is_split else ()


def dims_of(tensor: Tensor, degree: int) -> Iterator[Placement]:
    """Plain splits of every dim that `degree` divides and that is no batch."""
    for dim, size in enumerate(tensor.shape):
        if not isinstance(size, Batch) and size and size % degree == 0:
            yield split(dim, [size])


def distinct(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    """Without repetition, in order."""
    return tuple(dict.fromkeys(placements))
