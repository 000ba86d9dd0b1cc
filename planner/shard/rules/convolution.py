"""Convolutions, pooling, norms of channels, resizing: samples and channels are split, places never.

A pair of convolutions behaves as a pair of linear layers does: the first by output channels, the second by input
channels, and one sum behind it.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from planner.graph import Batch, Size
from planner.shard.placement import Option, Placement, Q, is_floating, split, times
from planner.shard.rules.call import AS_IT_IS, Call, Letters, Pattern, Rewritten, Rule
from planner.shard.rules.pointwise import partial_in

Unit = tuple[int, int]  # a dim, and how many of its elements belong together and are never split
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_GENERAL = ("input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups")


def in_units(
    call: Call,
    operands: Mapping[int, Unit],
    outputs: Sequence[Unit | None],
    rewrite: Callable[[Pattern], Rewritten] = lambda _: AS_IT_IS,
) -> Iterator[Option]:
    """Splits of one letter whose elements come in units, of another size in each tensor.

    The channels of a grouped convolution are such: `C / groups` of the input belong to `O / groups` of the output.
    Other operands are whole. `rewrite` is given parts in units, and repeats.
    """
    pairs = zip(call.node.outputs, outputs, strict=True)
    made = [(t, *unit) for t, unit in pairs if t is not None and unit is not None]
    found: dict[Pattern, None] = {}
    for tensor, dim, unit in (*((t, *unit) for t, unit in operands.items()), *made):
        for parts, repeats in call.patterns([(tensor, dim)]):
            counts = [_count(part, unit, call.degree) for part in parts]
            if None not in counts:
                found[(tuple(c for c in counts if c is not None), repeats)] = None
    for counted, repeats in found:

        def placed(unit: Unit, counted: Sequence[Size] = counted, repeats: Size = repeats) -> Placement:
            return split(unit[0], [times(count, unit[1]) for count in counted], repeats)

        yield call.option(
            {t: placed(operands[t]) if t in operands else Q for t in call.operands},
            [None if unit is None else placed(unit) for unit in outputs],
            rewrite((counted, repeats)),
        )


def _count(size: Size, unit: int, degree: int) -> Size | None:
    """Units in a part, if each rank gets whole ones."""
    number = size.per_sample if isinstance(size, Batch) else size
    if unit == 0 or number % (unit * degree):
        return None
    return Batch(number // unit) if isinstance(size, Batch) else number // unit


# --- convolutions ---------------------------------------------------------------------------------


def convolution(names: Sequence[str]) -> Rule:
    """Input `[N, C, ...]`, weight `[O, C / groups, ...]`, transposed `[C, O / groups, ...]`, bias `[O]`."""

    def rule(call: Call) -> Iterator[Option]:
        x, weight, bias, made = call.operand(0), call.operand(1), call.operand(2, "bias"), call.output
        if x is None or weight is None or made is None:
            return
        place = names.index("groups")
        groups = call.integer(place, "groups", 1)
        is_transposed = names is _TRANSPOSED or (names is _GENERAL and call.arg(6, "transposed") is True)
        samples = [0] if call.rank(x) == call.rank(weight) else []
        channels = len(samples)
        if groups == 1:
            of_weight = ("i", "o") if is_transposed else ("o", "i")
            yield from call.einsum(
                [(x, _led(call, x, (*samples, "i"))), (weight, _led(call, weight, of_weight)), (bias, ("o",))],
                [_led(call, made, (*samples, "o"))],
                summands=[] if bias is None else [bias],
            )
            return
        yield from call.einsum([(x, _led(call, x, samples))], [_led(call, made, samples)])
        taken, given = call.shape(x)[channels], call.shape(made)[channels]
        if not isinstance(taken, int) or not isinstance(given, int) or groups % call.degree:
            return
        units = {x: (channels, taken // groups), weight: (0, (taken if is_transposed else given) // groups)}
        if bias is not None:
            units[bias] = (0, given // groups)
        local = call.with_args({place: groups // call.degree}, names)
        yield from in_units(call, units, [(channels, given // groups)], lambda _: local)

    return rule


def _led(call: Call, tensor: int, letters: Sequence[Hashable]) -> Letters:
    """Letters of the first dims; those behind are never split."""
    return [*letters, *(None for _ in range(call.rank(tensor) - len(letters)))]


# --- norms of channels ----------------------------------------------------------------------------


def channel_norm(*, of_sample: bool) -> Rule:
    """Batch norm, instance norm: input `[N, C, ...]`, everything else `[C]`; running statistics are split with it.

    Statistics over samples do not let samples be split, unless they are the running ones.
    """

    def rule(call: Call) -> Iterator[Option]:
        x = call.operand(0)
        if x is None or call.rank(x) < 2:
            return
        rest = [t for t in call.operands if t != x]
        is_running = call.arg(5) is False and call.operand(3) is not None
        may_split_samples = is_running or (of_sample and call.operand(3) is None)
        of_x = _led(call, x, ("n" if may_split_samples else None, "c"))
        channels = call.shape(x)[1]
        outputs: list[Letters] = [of_x]
        for tensor in call.node.outputs[1:]:
            is_whole = tensor is None or call.shape(tensor) == (channels,)
            outputs.append(("c",) if is_whole else ())
        if all(call.shape(t) == (channels,) for t in rest):
            yield from call.einsum([(x, of_x), *((t, ("c",)) for t in rest)], outputs, reduces=False)

    return rule


def group_norm(call: Call) -> Iterator[Option]:
    """Whole groups of channels on each rank."""
    x, groups = call.operand(0), call.arg(1)
    if x is None or not isinstance(groups, int) or isinstance(groups, bool) or groups < 1:
        return
    yield from call.einsum([(x, _led(call, x, ("n",)))], [_led(call, x, ("n",))])
    channels = call.shape(x)[1]
    if isinstance(channels, int) and groups % call.degree == 0:
        unit = channels // groups
        weights = {t: (0, unit) for t in call.operands if t != x}
        local = call.with_args({1: groups // call.degree})
        yield from in_units(call, {x: (1, unit), **weights}, [(1, unit)], lambda _: local)


def weight_norm(call: Call) -> Iterator[Option]:
    """`v` and its norms `g`, which are 1 in every dim but one."""
    v, g, dim = call.operand(0), call.operand(1), call.integer(2, "dim")
    if v is None or g is None or call.rank(g) != call.rank(v):
        return
    letters = ["o" if d == dim % call.rank(v) else None for d in range(call.rank(v))]
    yield from call.einsum([(v, letters), (g, letters)], [letters] * len(call.node.outputs))


# --- pooling, resizing ----------------------------------------------------------------------------


def pooling(places: int, *, is_linear: bool) -> Rule:
    """All dims but the last `places`; negative: only the first of that number."""

    def rule(call: Call) -> Iterator[Option]:
        x = call.operand(0)
        if x is None:
            return
        count = call.rank(x) - places if places > 0 else -places
        letters = _led(call, x, range(count))
        yield from call.einsum([(x, letters)], [letters] * len(call.node.outputs))
        if is_linear:
            yield from partial_in(call, x)

    return rule


def pad(call: Call) -> Iterator[Option]:
    """Dims that are not padded. `pad` counts from the last dim, two numbers each."""
    x, given = call.operand(0), call.arg(1, "pad")
    if x is None or not isinstance(given, tuple):
        return
    rank = call.rank(x)
    padded = {rank - 1 - i // 2 for i, width in enumerate(given) if width != 0}
    letters = [None if d in padded else d for d in range(rank)]
    yield from call.einsum([(x, letters)], [letters])
    is_named = call.name == "pad"
    mode = call.arg(2, "mode", "constant") if is_named else "constant" if call.name == "constant_pad_nd" else "other"
    value = call.arg(3 if is_named else 2, "value", 0) if mode == "constant" else 0
    if value in (0, None):
        yield from partial_in(call, x)


def pixel_shuffle(call: Call) -> Iterator[Option]:
    """`[..., C r^2, H, W]` -> `[..., C, H r, W r]`, and back."""
    x, factor = call.operand(0), call.arg(1)
    if x is None or not isinstance(factor, int):
        return
    leading = call.rank(x) - 3
    letters = _led(call, x, range(leading))
    yield from call.einsum([(x, letters)], [letters])
    units = (factor**2, 1) if call.name == "pixel_shuffle" else (1, factor**2)
    yield from in_units(call, {x: (leading, units[0])}, [(leading, units[1])])
    yield from partial_in(call, x)


def patches(call: Call) -> Iterator[Option]:
    """`im2col`: `[N, C, H, W]` -> `[N, C k, L]`; `col2im` is its transpose."""
    x, made = call.operand(0), call.output
    kernel, rank = (call.arg(1, "kernel_size"), 4) if call.name == "im2col" else (call.arg(2, "kernel_size"), 3)
    if x is None or made is None or not isinstance(kernel, tuple) or call.rank(x) != rank:
        return
    size = 1
    for width in kernel:
        if not isinstance(width, int):
            return
        size *= width
    yield from call.einsum([(x, _led(call, x, ("n",)))], [_led(call, made, ("n",))])
    units = (1, size) if call.name == "im2col" else (size, 1)
    yield from in_units(call, {x: (1, units[0])}, [(1, units[1])])
    yield from partial_in(call, x)


def grid_sampler(call: Call) -> Iterator[Option]:
    """Input `[N, C, ...]`, places `[N, ..., 2 or 3]` -> `[N, C, ...]`."""
    x, grid = call.operand(0), call.operand(1)
    if x is None or grid is None:
        return
    places = range(call.rank(x) - 2)
    yield from call.einsum([(x, _led(call, x, ("n", "c"))), (grid, ("n", *places, None))], [("n", "c", *places)])
    yield from partial_in(call, x)


def prelu(call: Call) -> Iterator[Option]:
    """One slope for each channel of `[N, C, ...]`, or one for all."""
    x, slope = call.operand(0), call.operand(1, "weight")
    if x is None or slope is None or not is_floating(call.tensors[slope]):
        return
    letters = range(call.rank(x))
    of_slope = [None] if call.shape(slope) == (1,) else [min(1, call.rank(x) - 1)]
    yield from call.einsum([(x, letters), (slope, of_slope)], [letters])


_UPSAMPLE = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
)  # fmt: skip

TABLE: Mapping[str, Rule] = {
    **{f"aten.conv{d}d": convolution(_CONVOLUTION) for d in (1, 2, 3)},
    **{f"aten.conv_transpose{d}d": convolution(_TRANSPOSED) for d in (1, 2, 3)},
    "aten.convolution": convolution(_GENERAL),
    "aten.batch_norm": channel_norm(of_sample=False),
    "aten.native_batch_norm": channel_norm(of_sample=False),
    "aten.instance_norm": channel_norm(of_sample=True),
    "aten.group_norm": group_norm,
    "aten._weight_norm": weight_norm,
    "aten._weight_norm_interface": weight_norm,
    **{f"aten.max_pool{d}d": pooling(d, is_linear=False) for d in (1, 2, 3)},
    **{f"aten.max_pool{d}d_with_indices": pooling(d, is_linear=False) for d in (1, 2, 3)},
    **{f"aten.adaptive_max_pool{d}d": pooling(d, is_linear=False) for d in (1, 2, 3)},
    **{f"aten.avg_pool{d}d": pooling(d, is_linear=True) for d in (1, 2, 3)},
    **{f"aten.adaptive_avg_pool{d}d": pooling(d, is_linear=True) for d in (1, 2, 3)},
    **{f"aten.{name}": pooling(-2, is_linear=True) for name in _UPSAMPLE},
    "aten.pad": pad,
    "aten.constant_pad_nd": pad,
    **{f"aten.{kind}_pad{d}d": pad for kind in ("reflection", "replication") for d in (1, 2, 3)},
    "aten.pixel_shuffle": pixel_shuffle,
    "aten.pixel_unshuffle": pixel_shuffle,
    "aten.im2col": patches,
    "aten.col2im": patches,
    "aten.grid_sampler": grid_sampler,
    "aten.prelu": prelu,
}
