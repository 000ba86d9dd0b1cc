"""Operators that communicate over one axis, split over a second: every option is proven on a 2 x 2 grid of ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from planner.graph import CONVERSIONS as CONVERSION_NAMES
from planner.graph import Node, Ref
from planner.shard.placement import Option, Placement, conversion, local_shape, operands_of
from planner.shard.rules import line_of, nested, options
from planner.trace.parallel import Communicator, Grid, bound, piece_of
from tests.shard_proofs import MICRO_BATCH, Example, Made, _run, example, integers, make, normal, tensor
from tests.sharded import apart, together

DEGREE = 2
_X = tensor(4, 8, 6, values=normal)
_LOGITS, _TARGETS = tensor(8, 6, values=normal), tensor(8, values=integers(6))
# What the first axis makes of these calls are operators that communicate.
CALLS = [
    example("aten.softmax.int", _X, 1),
    example("aten.log_softmax.int", _X, -2),
    example("aten.cross_entropy_loss.default", _LOGITS, _TARGETS),
    example("aten.cross_entropy_loss.default", _LOGITS, _TARGETS, None, 1, 3, 0.1),
    example("aten.dropout.default", _X, 0.4, True),
    *(
        example("aten.scaled_dot_product_attention.default", *(tensor(2, heads, 8, 4, values=normal)
                for heads in (4, kv_heads, kv_heads)), None, 0.0, causal, enable_gqa=kv_heads < 4)
        for causal in (True, False) for kv_heads in (4, 2)
    ),
    example("aten.scaled_dot_product_attention.default", *(tensor(2, 4, 6, 4, values=normal) for _ in range(3)),
            None, 0.0, True),
]  # fmt: skip
PLACED = [Placement.parse(text) for text in ("R", "Q", "P", "S0[4]", "S1[8]", "S1*2[4]", "S2[4,2]")]
CONVERSIONS = [(one, two) for one in PLACED for two in PLACED if conversion(one, two, has_gradient=True) is not None]


def _of_axis(node: Node, option: Option, axis: str) -> Node:
    """The node of a rank of an axis, as `localize` makes it."""
    is_new = option.op.startswith("planner.") and option.op != node.op
    return replace(
        node, op=option.op, args=option.args, kwargs=option.kwargs + ((("axis", axis),) if is_new else ())
    )  # fmt: skip


def _placed(node: Node, option: Option) -> dict[int, Placement]:
    pairs = (*zip(operands_of(node), option.operands, strict=True), *zip(node.outputs, option.outputs, strict=True))
    return {t: p for t, p in pairs if t is not None and p is not None}


def _of_example(given: Example) -> Iterator[tuple[Made, Option]]:
    made = make(given)
    for option in made.options(DEGREE):
        if option.op.startswith("planner."):
            yield made, option


def _of_conversion(source: Placement, target: Placement) -> tuple[Made, Option]:
    made = make(example("aten.clone.default", _X))
    found = conversion(source, target, has_gradient=True)
    assert found is not None
    return made, Option(operands=(source,), outputs=(target,), op=found.op, args=(Ref(0), *found.args))


def _second(made: Made, first: Option) -> tuple[Node, tuple[Option, ...]]:
    """The node of a rank of the first axis, and how the second may split it."""
    node, placed = _of_axis(made.node, first, "cp"), _placed(made.node, first)
    held = [
        replace(t, shape=local_shape(t.shape, placed[i], DEGREE)) if i in placed else t
        for i, t in enumerate(made.tensors)
    ]
    return node, options(node, held, DEGREE, {}, made.gradients)


def _dropped(communicators: Mapping[str, Communicator]) -> Any:
    """Dropout that is decided for the whole, of which a rank has a part of a part."""

    def run(
        x: torch.Tensor, p: float, train: bool, dim: int, parts: Sequence[int], repeats: int, *, axis: str, of: Any = ()
    ) -> torch.Tensor:
        cuts = [*([of] if of else []), (axis, dim, parts, repeats)]
        shape = list(x.shape)
        for name, cut_dim, _, _ in cuts:
            shape[cut_dim] *= communicators[name].size
        kept = torch.rand(shape, generator=torch.Generator().manual_seed(1)) >= p
        for name, cut_dim, cut_parts, cut_repeats in cuts:
            place = communicators[name]
            kept = piece_of(kept, cut_dim, cut_parts, cut_repeats, place.rank, place.size)
        return x * kept / (1 - p)

    return run


def _prove(made: Made, first: Option, node: Node, second: Option) -> None:
    """Values and gradients on the grid, put together axis by axis, are those of the whole."""
    inner, chain = _of_axis(node, second, "tp"), (_placed(made.node, first), _placed(node, second))
    what = f"{first} then {second}"

    def parts(value: torch.Tensor, t: int, *, is_gradient: bool = False) -> list[torch.Tensor]:
        held = [value]
        for placed in chain:
            held = [
                x for one in held
                for x in apart(one, placed[t], DEGREE, micro_batch=MICRO_BATCH, is_gradient=is_gradient)
            ]  # fmt: skip
        return held

    def joined(held: Sequence[torch.Tensor], t: int, *, is_gradient: bool = False) -> torch.Tensor:
        for placed in reversed(chain):
            groups = [held[i : i + DEGREE] for i in range(0, len(held), DEGREE)]
            held = [together(g, placed[t], micro_batch=MICRO_BATCH, is_gradient=is_gradient) for g in groups]
        return held[0]

    def clones() -> dict[int, torch.Tensor]:
        return {t: v.clone() for t, v in made.values.items()}

    draws = torch.Generator().manual_seed(5)
    plain = _run(made.node, made, clones(), {}, {})
    incoming = {
        t: torch.randn(plain.values[t].shape, generator=draws, dtype=torch.float64)
        for t in made.node.outputs if t is not None and t in made.gradients
    }  # fmt: skip
    whole = _run(made.node, made, clones(), incoming, {})
    held = {t: parts(v, t) for t, v in made.values.items()}
    given = {t: parts(g, t, is_gradient=True) for t, g in incoming.items()}

    def work(rank: int, communicators: Mapping[str, Communicator]) -> Any:
        dropped = _dropped(communicators)
        operators = {
            **bound(communicators), "planner.dropout.default": dropped, "planner.dropout_of_parts.default": dropped
        }  # fmt: skip
        own = {t: x[rank].clone() for t, x in held.items()}
        return _run(inner, made, own, {t: g[rank] for t, g in given.items()}, operators)

    ranks = Grid([("cp", DEGREE), ("tp", DEGREE)]).run(work)
    for t in incoming:
        found = joined([ran.values[t] for ran in ranks], t)
        torch.testing.assert_close(found, whole.values[t], rtol=1e-9, atol=1e-10, msg=f"{what}: value")
    for t, gradient in whole.gradients.items():
        found = joined([ran.gradients[t] for ran in ranks], t, is_gradient=True)
        torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-10, msg=f"{what}: gradient {t}")


def test_every_operator_that_may_be_split_again_is_proven_as_the_whole() -> None:
    lines = set()
    cases = [case for given in CALLS for case in _of_example(given)]
    for made, first in [*cases, *(_of_conversion(*pair) for pair in CONVERSIONS)]:
        node, found = _second(made, first)
        for second in found:
            _prove(made, first, node, second)
            if any(p is not None and p.is_part for p in (*second.operands, *second.outputs)):
                lines.add(line_of(node.op))
    assert lines == set(nested.TABLE)
    assert {f"planner.{name}" for name in CONVERSION_NAMES} <= lines


@pytest.mark.parametrize("form", ["planner.causal_attention.default", "planner.balanced_causal_attention.default"])
def test_heads_are_split_where_the_queries_are_shared_out(form: str) -> None:
    found = [
        str(second)
        for given in CALLS
        for made, first in _of_example(given)
        if first.op == form
        for second in _second(made, first)[1]
        if second.share < 1
    ]
    assert "S1[4],S1[4],S1[4]>S1[4]" in found
    assert not any("S2" in text for text in found)  # the dim of the queries


def test_a_loss_of_a_part_of_the_targets_splits_its_classes() -> None:
    made, first = next((m, o) for m, o in _of_example(CALLS[2]) if "of_part" in o.op)
    node, found = _second(made, first)
    (second,) = [option for option in found if option.share < 1]
    assert str(second) == "S1[6],R>R"
    assert dict(_of_axis(node, second, "tp").kwargs) == {"counted_over": "cp", "axis": "tp"}
