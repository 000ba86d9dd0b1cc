"""What a rule sees of a node, and what it makes of it.

A rule names the dims of the operands and of the outputs of an operator by letters, as an einsum does. Splitting a
letter splits every tensor that has it; the patterns of a split (parts and repeats) travel with the letter. What becomes
of a tensor without the letter:

    operand, some output has the letter     Q: each rank finds a part of its gradient
    operand, no output has it, a summand    P: each rank adds its part
    operand, no output has it, otherwise    Q
    output                                  P: each rank finds a part of the sum
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.graph import Arg, Batch, Node, Ref, Size, Tensor, is_derivative
from planner.shard.placement import (
    Option,
    P,
    Placement,
    Q,
    R,
    divides,
    effective,
    is_floating,
    local_shape,
    operands_of,
    split,
    total_size,
)

Letters = Sequence[Hashable]  # a name per dim; None = this dim is never split
Pattern = tuple[tuple[Size, ...], Size]  # parts and repeats of a split, without the dim


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The call of one rank; None = as in the whole graph, for `share` an equal part of the work."""

    op: str | None = None
    args: tuple[Arg, ...] | None = None
    kwargs: tuple[tuple[str, Arg], ...] | None = None
    share: float | None = None


AS_IT_IS = Rewritten()


@dataclass(frozen=True)
class Split:
    """A letter that is split by a pattern, and what that makes of each tensor (by index)."""

    letter: Hashable
    parts: tuple[Size, ...]
    repeats: Size
    operands: Mapping[int, Placement]
    outputs: tuple[Placement | None, ...]


@dataclass(frozen=True)
class Call:
    """One node, for `degree` ranks.

    `seeds` are splits that neighbours may have, by tensor; `gradients` are the tensors that a gradient flows through.
    """

    node: Node
    tensors: Sequence[Tensor]
    degree: int
    seeds: Mapping[int, Collection[Placement]]
    gradients: Collection[int]

    @property
    def name(self) -> str:
        """`linear` of `aten.linear.default`, `add_` of `aten.add_.Tensor`."""
        return self.node.op.split(".")[1]

    @property
    def overload(self) -> str:
        """`Tensor` of `aten.add_.Tensor`."""
        return self.node.op.split(".")[-1]

    @cached_property
    def operands(self) -> tuple[int, ...]:
        """The distinct tensors that the node reads."""
        return operands_of(self.node)

    def arg(self, position: int, name: str = "", default: Arg = None) -> Arg:
        """The argument at a position of the schema, or of this name."""
        if position < len(self.node.args):
            return self.node.args[position]
        return dict(self.node.kwargs).get(name, default)

    def operand(self, position: int, name: str = "") -> int | None:
        """The tensor at a position; None if the argument is no tensor."""
        found = self.arg(position, name)
        return found.tensor if isinstance(found, Ref) else None

    def integer(self, position: int, name: str = "", default: int = 0) -> int:
        """An integer argument that is no batch size."""
        found = self.arg(position, name, default)
        return found if isinstance(found, int) else default

    def shape(self, tensor: int) -> tuple[Size, ...]:
        """Its whole shape."""
        return self.tensors[tensor].shape

    def rank(self, tensor: int) -> int:
        """How many dims it has."""
        return len(self.tensors[tensor].shape)

    @property
    def output(self) -> int | None:
        """The tensor that the node makes, where it makes one."""
        return self.node.outputs[0] if self.node.outputs else None

    def with_args(self, changed: Mapping[int, Arg], names: Sequence[str] = ()) -> Rewritten:
        """The node's own call with other arguments at some positions (`names` of the schema where given by name)."""
        kwargs = dict(self.node.kwargs)
        args = list(self.node.args)
        for position in sorted(changed):
            if position < len(args):
                args[position] = changed[position]
            elif position < len(names) and names[position] in kwargs:
                kwargs[names[position]] = changed[position]
            elif position == len(args):
                args.append(changed[position])
            else:
                raise ValueError(f"{self.node.op} has no argument {position} to change")
        return Rewritten(args=tuple(args), kwargs=tuple(kwargs.items()))

    def local(self, tensor: int, placement: Placement | None) -> tuple[Size, ...]:
        """What a rank holds of a tensor."""
        return local_shape(self.shape(tensor), placement or R, self.degree)

    def patterns(self, places: Sequence[tuple[int, int]]) -> tuple[Pattern, ...]:
        """How a letter may be split: the dim as one part (unless it is a batch), and every seed on one of its places.

        `places` are (tensor, dim) of one size each.
        """
        found: dict[Pattern, None] = {}
        for tensor, dim in places:
            size = self.shape(tensor)[dim]
            if not isinstance(size, Batch) and size > 0 and size % self.degree == 0:
                found[((size,), 1)] = None
            for seed in self.seeds.get(tensor, ()):
                is_here = seed.is_split and seed.dim == dim and total_size(seed) == size
                if is_here and divides(self.degree, seed):
                    found[(seed.parts, seed.repeats)] = None
        return tuple(found)

    def option(
        self,
        operands: Mapping[int, Placement],
        outputs: Sequence[Placement | None],
        rewritten: Rewritten = AS_IT_IS,
        *,
        share: float | None = None,
    ) -> Option:
        """An option, with R for Q where there is no gradient, and nothing for outputs that nobody reads."""
        made = tuple(
            None if tensor is None else effective(placement or R, has_gradient=tensor in self.gradients)
            for tensor, placement in zip(self.node.outputs, outputs, strict=True)
        )
        return Option(
            operands=tuple(effective(operands[t], has_gradient=t in self.gradients) for t in self.operands),
            outputs=made,
            op=rewritten.op or self.node.op,
            args=self.node.args if rewritten.args is None else rewritten.args,
            kwargs=self.node.kwargs if rewritten.kwargs is None else rewritten.kwargs,
            share=1 / self.degree if share is None else share,
        )

    def same(self, placement: Placement) -> Option:
        """Every tensor that may have it is placed alike, and every rank does all the work."""
        operands = {t: placement if placement != P or self._is_floating(t) else R for t in self.operands}
        return self.option(operands, [placement] * len(self.node.outputs), share=1.0)

    def einsum(
        self,
        operands: Sequence[tuple[int | None, Letters]],
        outputs: Sequence[Letters],
        rewrite: Callable[[Split], Rewritten | None] = lambda _: AS_IT_IS,
        *,
        summands: Collection[int] = (),
        frozen: Collection[Hashable] = (),
        reduces: bool = True,
    ) -> Iterator[Option]:
        """An option for every letter and every pattern of it.

        `operands` are tensors with their letters (a tensor may be there twice, None is skipped; tensors that are not
        named have no letter), `outputs` the letters of each output. `summands` are tensors that are added to what is
        summed over a letter, `frozen` letters that are never split. `rewrite` gives the call of a rank, None where a
        split cannot be run after all. Unless it `reduces`, letters that an output lacks are never split.
        """
        outputs = [tuple(letters) for letters in outputs]
        named = [(tensor, tuple(letters)) for tensor, letters in operands if tensor is not None]
        made = [(t, letters) for t, letters in zip(self.node.outputs, outputs, strict=True) if t is not None]
        letters_in_order = dict.fromkeys(x for _, letters in (*made, *named) for x in letters if x is not None)
        for letter in letters_in_order:
            places = [(t, letters.index(letter)) for t, letters in (*named, *made) if letter in letters]
            is_made = [letter in letters for _, letters in made]
            is_one_size = len({self.shape(t)[dim] for t, dim in places}) == 1
            if letter in frozen or not is_one_size or not (reduces or all(is_made)):
                continue
            for parts, repeats in self.patterns(places):
                found = self._placed(letter, parts, repeats, named, outputs, summands, any(is_made))
                rewritten = None if found is None else rewrite(found)
                if found is not None and rewritten is not None:
                    yield self.option(found.operands, found.outputs, rewritten, share=rewritten.share)

    def _placed(
        self,
        letter: Hashable,
        parts: tuple[Size, ...],
        repeats: Size,
        operands: Sequence[tuple[int, Letters]],
        outputs: Sequence[Letters],
        summands: Collection[int],
        is_made: bool,
    ) -> Split | None:
        """What splitting a letter makes of each tensor; None where one would have to be placed in two ways."""
        placed: dict[int, Placement] = {}
        for tensor, letters in operands:
            if letter in letters:
                placement = split(letters.index(letter), parts, repeats)
            elif tensor in summands and not is_made:
                placement = P
            else:
                placement = Q
            if placed.setdefault(tensor, placement) != placement:
                return None
        for tensor in self.operands:
            placed.setdefault(tensor, Q)
        made = tuple(
            None if t is None else split(letters.index(letter), parts, repeats) if letter in letters else P
            for t, letters in zip(self.node.outputs, outputs, strict=True)
        )
        if any(
            p == P and t is not None and not self._is_floating(t) for t, p in zip(self.node.outputs, made, strict=True)
        ):
            return None
        return Split(letter, parts, repeats, placed, made)

    def _is_floating(self, tensor: int) -> bool:
        return is_floating(self.tensors[tensor])


Rule = Callable[[Call], Iterator[Option]]


def options_of(call: Call, rule: Rule | None) -> tuple[Option, ...]:
    """As it is; in partial gradients, in which derivatives are linear; then what the rule allows, each once."""
    found = [call.same(R)]
    if is_derivative(call.node.op) and any(t in call.gradients for t in call.operands):
        found.append(call.same(Q))
    if rule is not None:
        found += rule(call)
    by_placement: dict[tuple[object, object], Option] = {}
    for option in found:
        if _writes_what_it_makes(call, option):
            by_placement.setdefault((option.operands, option.outputs), option)
    return tuple(by_placement.values())


def _writes_what_it_makes(call: Call, option: Option) -> bool:
    """Whether an operator in place makes of its operand what is stored there already: a part stays the same part."""
    if not call.name.endswith("_") or not call.node.mutates:
        return True
    placed = dict(zip(call.operands, option.operands, strict=True))
    written = [placed[t] for t in call.node.mutates if t in placed]
    # A sum over ranks that is whole where it is written, or the other way round, would be read as something else.
    return all(w == made or {w, made} == {R, Q} for w in written for made in option.outputs if made is not None)
