"""Every operator of the tables is proven by examples, and an operator without example fails."""

import math
import random

import pytest
import torch

from planner.graph import HOOKED, OPAQUE, Batch, Node, Ref, Tensor
from planner.shard.placement import Placement, Q, divides, split
from planner.shard.rules import has_rule, line_of, matmul, options, pointwise, views
from planner.shard.rules.views import reshaped
from planner.trace.parallel import Communicator, Threads, bound, piece_of
from tests.shard_proofs import Example, assert_prices, booleans, check, example, integers, make, normal, prove, tensor

B = Batch(1)
_FUSED = ["S2*3[8]"]  # queries, keys and values side by side
_TOKENS = ["S0*B[6]"]  # tokens of a flattened batch


def _pointwise_examples() -> list[Example]:
    """Unary, binary with broadcasting, and those with arguments of their own."""
    one, fixed = tensor(B, 4, 6, values=normal), tensor(B, 4, 6, values=normal, has_gradient=False)
    unary = tensor(B, 4, 6)
    same, row, column, scalar = tensor(B, 4, 6), tensor(6), tensor(4, 1), tensor()
    whole, bits = tensor(B, 4, 6, values=integers(9)), tensor(4, 1, values=integers(5))
    one_bool, two_bool = tensor(B, 4, 6, values=booleans), tensor(4, 6, values=booleans)
    own: dict[str, list[Example]] = {
        name: [example(f"aten.{name}.Tensor", unary, other) for other in (same, row, column)]
        for name in ["add", "sub", "mul", "div", "fmod", "remainder", "eq", "ne", "lt", "le", "gt", "ge", "true_divide"]
    }
    own |= {
        name: [example(f"aten.{name}.default", unary, other) for other in (same, column)]
        for name in ["atan2", "fmax", "fmin", "hypot", "logaddexp", "logaddexp2", "maximum", "minimum", "polar"]
    }
    own |= {
        name: [example(f"aten.{name}.Tensor", whole, bits)]
        for name in (
            "bitwise_and",
            "bitwise_left_shift",
            "bitwise_or",
            "bitwise_right_shift",
            "bitwise_xor",
            "__and__",
            "__or__",
            "__xor__",
            "__lshift__",
            "__rshift__",
        )
    }
    own |= {
        name: [example(f"aten.{name}.default", one_bool, two_bool)]
        for name in ("logical_and", "logical_or", "logical_xor")
    }
    own |= {
        "add": [
            *own["add"],
            example("aten.add_.Tensor", unary, row, mutates=(0,)),
            example("aten.add.Scalar", unary, 2.0),
            example("aten.add.Tensor", unary, same, alpha=0.5),
            example("aten.add.Tensor", unary, unary),
            example("aten.add.Tensor", tensor(Batch(6), 8, seeds=_TOKENS), tensor(8), expected=("S0*B[6],Q>S0*B[6]",)),
            example("aten.add.Tensor", tensor(B, 3, 24, seeds=_FUSED), tensor(24), degrees=(2, 4)),
        ],
        "mul": [
            *own["mul"],
            example("aten.mul.Tensor", unary, 0.5, never=("S0",)),
            example("aten.mul.Tensor", unary, scalar),
            example("aten.mul.Tensor", one, one),
        ],
        "div": [*own["div"], example("aten.div.Tensor_mode", unary, same, rounding_mode="floor", never=("P",))],
        "to": [example("aten.to.dtype", unary, torch.float64)],
        "type_as": [example("aten.type_as.default", unary, row)],
        "acosh": [example("aten.acosh.default", tensor(B, 4, 6, values=lambda g, shape: 1 + normal(g, shape).abs()))],
        "addcdiv": [example("aten.addcdiv.default", unary, same, row)],
        "addcmul": [example("aten.addcmul.default", unary, same, column)],
        "bitwise_not": [example("aten.bitwise_not.default", whole)],
        "clamp": [example("aten.clamp.default", one, -0.5, 0.5), example("aten.clamp.Tensor", one, row)],
        "clip": [example("aten.clip.default", one, -0.5, 0.5)],
        "clamp_max": [example("aten.clamp_max.default", one, 0.5)],
        "clamp_min": [example("aten.clamp_min.default", one, 0.5)],
        "copysign": [example("aten.copysign.Tensor", one, row)],
        "floor_divide": [example("aten.floor_divide.default", whole, 3)],
        "fill": [example("aten.fill.Scalar", one, 0.5)],
        "full_like": [example("aten.full_like.default", one, 0.5)],
        "heaviside": [example("aten.heaviside.default", fixed, fixed)],
        "lerp": [example("aten.lerp.Tensor", unary, row, column), example("aten.lerp.Scalar", unary, row, 0.3)],
        "logical_not": [example("aten.logical_not.default", one_bool)],
        "masked_fill": [
            example("aten.masked_fill.Scalar", one, two_bool, 0.5, never=("P",)),
            example("aten.masked_fill.Scalar", one, two_bool, 0, expected=("P,R>P",)),
            example("aten.masked_fill.Tensor", one, two_bool, scalar),
        ],
        "pow": [example("aten.pow.Tensor_Scalar", unary, 3), example("aten.pow.Tensor_Tensor", unary, column)],
        "_prelu_kernel": [example("aten._prelu_kernel.default", one, tensor(4, 1))],
        "rsub": [example("aten.rsub.Scalar", unary, 1.0)],
        "threshold": [example("aten.threshold.default", one, 0.1, 20.0)],
        "where": [
            example("aten.where.self", two_bool, one, row),
            example("aten.where.ScalarOther", two_bool, one, 1.0),
        ],
        "xlogy": [example("aten.xlogy.Tensor", unary, row)],
        "gelu": [example("aten.gelu.default", one), example("aten.gelu.default", one, approximate="tanh")],
        "relu": [example("aten.relu.default", one), example("aten.relu_.default", one, mutates=(0,))],
    }
    names = [line.removeprefix("aten.") for line in pointwise.TABLE]
    return [e for name in names for e in own.get(name, [example(f"aten.{name}.default", unary)])]


def _view_examples() -> list[Example]:
    return [
        example("aten.view.default", tensor(B, 6, 24, seeds=_FUSED), (Batch(6), 24), expected=("S1[6]>S0*B[6]",)),
        example("aten.view.default", tensor(Batch(6), 24, seeds=_TOKENS), (B, 6, 24), expected=("S0*B[6]>S1[6]",)),
        example("aten.view.default", tensor(B, 6, 24, seeds=_FUSED), (B, 6, 3, 8), expected=("S2*3[8]>S3[8]",)),
        example(
            "aten.view.default",
            tensor(B, 6, 24),
            (B, 6, 3, 2, 4),
            made_seeds={0: ["S3[2]"]},
            expected=("S2*3[8]>S3[2]", "S2*6[4]>S4[4]"),
        ),
        example("aten.view.default", tensor(B, 3, 2, 4), (B, -1)),
        example("aten.view.dtype", tensor(B, 4), torch.int64, never=("P",)),
        example("aten.view.default", tensor(4, 6, 1), (24,), degrees=(2, 4)),
        example("aten.view.default", tensor(24), (2, 3, 4)),
        example("aten.view.default", tensor(2, 12), (8, 3), degrees=(2,)),
        example("aten.view.default", tensor(12, 4, seeds=["S0[8,4]"]), (48,), expected=("S0[8,4]>S0[32,16]",)),
        example("aten.view.default", tensor(6, B, 4), (Batch(6), 4), expected=("S0[6]>S0[6B]",)),
        example("aten.view.default", tensor(2, B, 6, 4), (Batch(12), 4), expected=("S2[6]>S0*2B[6]",)),
        example("aten.reshape.default", tensor(B, 4, 3, 2), (B, 4, 6)),
        example("aten._unsafe_view.default", tensor(Batch(6), 8), (B, 6, 8)),
        example("aten.unflatten.int", tensor(B, 24), 1, (4, 6)),
        example("aten.unflatten.int", tensor(B, 24), 1, (4, -1)),
        example("aten.view_as.default", tensor(B, 24), tensor(B, 4, 6)),
        example("aten.reshape_as.default", tensor(B, 24), tensor(B, 4, 6)),
        example("aten.flatten.using_ints", tensor(B, 4, 6), 1),
        example("aten.flatten.using_ints", tensor(B, 4, 6), 0, 1),
        example("aten.ravel.default", tensor(4, 6)),
        example("aten.expand.default", tensor(B, 1, 6), (B, 4, -1), expected=("Q>S1[4]", "S2[6]>S2[6]")),
        example("aten.expand.default", tensor(6), (B, 4, 6), expected=("Q>S1[4]", "S0[6]>S2[6]")),
        example("aten.expand_as.default", tensor(4, 1), tensor(B, 4, 6, has_gradient=False)),
        example("aten.broadcast_to.default", tensor(4, 1), (B, 4, 6)),
        example("aten.transpose.int", tensor(B, 4, 6), 1, -1),
        example("aten.permute.default", tensor(B, 4, 6), (2, 0, -2)),
        example("aten.t.default", tensor(4, 6)),
        example("aten.t.default", tensor(4)),
        example("aten.swapaxes.default", tensor(B, 4, 6), 1, 2),
        example("aten.swapdims.default", tensor(B, 4, 6), 1, 2),
        example("aten.mT.default", tensor(B, 4, 6)),
        example("aten.numpy_T.default", tensor(4, 6)),
        example("aten.adjoint.default", tensor(B, 4, 6)),
        example("aten.movedim.int", tensor(B, 4, 6, 2), 1, -1),
        example("aten.movedim.int", tensor(B, 4, 6, 2), 3, 1),
        example("aten.moveaxis.int", tensor(B, 4, 6), 1, 2),
        example("aten.unsqueeze.default", tensor(B, 4, 6), 1),
        example("aten.unsqueeze.default", tensor(B, 4, 6), -1),
        example("aten.squeeze.dim", tensor(B, 1, 6), 1),
        example("aten.squeeze.dim", tensor(B, 2, 6), 1, expected=("S1[2]>S1[2]",)),
        example("aten.squeeze.default", tensor(B, 2, 1, 6), expected=("S1[2]>S1[2]",)),
        example("aten.squeeze.dims", tensor(B, 2, 1, 6, 1), (1, 2, -1)),
    ]


def _matmul_examples() -> list[Example]:
    x = tensor(B, 6, 8, values=normal)
    heads = tensor(B, 4, 6, 8, values=normal)
    kv = [tensor(B, 2, 6, 8, values=normal) for _ in range(2)]
    key, value = (tensor(B, 4, 6, 8, values=normal) for _ in range(2))
    sdpa = "aten.scaled_dot_product_attention.default"
    logits, targets = tensor(Batch(6), 8, values=normal, seeds=_TOKENS), tensor(Batch(6), values=integers(8))
    ids = tensor(B, 6, values=integers(8))
    return [
        example("aten.linear.default", x, tensor(4, 8), degrees=(2, 4), expected=("Q,S0[4]>S2[4]", "S2[8],S1[8]>P")),
        example(
            "aten.linear.default",
            x,
            tensor(24, 8),
            tensor(24),
            made_seeds={0: _FUSED},
            expected=("Q,S0*3[8],S0*3[8]>S2*3[8]", "S2[8],S1[8],P>P", "S1[6],Q,Q>S1[6]"),
        ),
        example(
            "aten.linear.default", x, tensor(16, 8), made_seeds={0: ["S2[8,4,4]"]}, expected=("Q,S0[8,4,4]>S2[8,4,4]",)
        ),
        example("aten.addmm.default", tensor(4), tensor(Batch(6), 8, seeds=_TOKENS), tensor(8, 4), degrees=(2,)),
        example("aten.addmm.default", tensor(1, 4), tensor(Batch(6), 8), tensor(8, 4), beta=0.5, alpha=2),
        example("aten.mm.default", tensor(6, 8), tensor(8, 4), degrees=(2,)),
        example("aten.mm.default", tensor(6, 9), tensor(9, 3), degrees=(3,)),
        example("aten.mm.default", tensor(8, 8, values=normal), tensor(8, 8), made_seeds={0: ["S0*2[4]"]}),
        example("aten.bmm.default", tensor(4, 6, 8), tensor(4, 8, 2)),
        example("aten.baddbmm.default", tensor(1, 6, 2), tensor(4, 6, 8), tensor(4, 8, 2)),
        example("aten.mv.default", tensor(4, 6), tensor(6)),
        example("aten.dot.default", tensor(6), tensor(6)),
        example("aten.outer.default", tensor(6), tensor(4)),
        example("aten.matmul.default", heads, tensor(B, 4, 8, 6)),
        example("aten.matmul.default", tensor(B, 1, 6, 8), tensor(4, 8, 2)),
        example("aten.matmul.default", x, tensor(8)),
        example("aten.matmul.default", tensor(8), tensor(B, 8, 6)),
        example("aten.einsum.default", "bnqd,bnkd->bnqk", [heads, key], degrees=(2,)),
        example("aten.einsum.default", "...i,oi->...o", [x, tensor(4, 8)]),
        example("aten.einsum.default", "b...i,i...->b...", [tensor(B, 4, 6), tensor(6, 4)]),
        example(
            sdpa,
            heads,
            key,
            value,
            degrees=(2, 4),
            expected=("S1[4],S1[4],S1[4]>S1[4]",),
        ),
        example(sdpa, heads, key, value, expected=("S2[6],Q,Q>S2[6]",)),
        example(sdpa, heads, key, value, None, 0.0, True, expected=("S2[6],Q,Q>S2[6]",)),
        example(sdpa, heads, key, value, tensor(B, 1, 6, 6, values=booleans), expected=("S2[6],Q,Q,S2[6]>S2[6]",)),
        example(sdpa, heads, key, value, tensor(1, 4, 1, 6, values=normal), scale=0.3),
        example(sdpa, heads, *kv, None, 0.0, True, enable_gqa=True, degrees=(2, 4)),
        *(
            example(
                sdpa,
                *(tensor(B, h, 12, 8, values=normal) for h in (4, shared, shared)),
                None,
                0.0,
                True,
                enable_gqa=shared < 4,
                scale=0.3,
                degrees=(2, 3, 6),
                expected=("S2[12],Q,Q>S2[12]",),
            )
            for shared in (4, 2)
        ),
        example(
            sdpa,
            tensor(B, 8, 6, 4, values=normal),
            tensor(B, 2, 6, 4, values=normal),
            tensor(B, 2, 6, 4),
            is_causal=True,
            enable_gqa=True,
            degrees=(4,),
            expected=("S1[8],Q,Q>S1[8]", "S1*2[4],Q,Q>S1*2[4]"),
        ),
        example(sdpa, heads, *kv, tensor(B, 4, 6, 6, values=normal), 0.0, False, enable_gqa=True, degrees=(2, 4)),
        *(
            example(f"aten.{name}.default", x, (8,), tensor(8), tensor(8), 1e-5, never=("S2",))
            for name in ("layer_norm", "native_layer_norm")
        ),
        example("aten.layer_norm.default", tensor(B, 4, 6, 8, values=normal), (6, 8)),
        example("aten.rms_norm.default", x, (8,), tensor(8)),
        example("aten._fused_rms_norm.default", x, (8,), tensor(8), 1e-6),
        example("aten.softmax.int", heads, -1, expected=("S3[8]>S3[8]",)),
        example("aten.log_softmax.int", heads, 1, degrees=(2, 4)),
        example("aten._softmax.default", heads, -1, False, never=("S3",)),
        example("aten._log_softmax.default", heads, -1, False),
        example("aten.embedding.default", tensor(8, 4), ids, degrees=(2, 4), expected=("S0[8],R>P", "S1[4],R>S2[4]")),
        example("aten.embedding.default", tensor(8, 4), ids, 5, expected=("S0[8],R>P",)),
        example(
            "aten.embedding.default",
            tensor(8, 4),
            tensor(Batch(6), values=integers(8), seeds=_TOKENS),
            0,
            True,
            never=("P",),
        ),
        example(
            "aten.cross_entropy_loss.default",
            logits,
            targets,
            degrees=(2, 4),
            expected=("S1[8],R>R", "S0*B[6],S0*B[6]>P"),
        ),
        example(
            "aten.cross_entropy_loss.default",
            logits,
            targets,
            None,
            1,
            3,
            0.2,
            expected=("S1[8],R>R", "S0*B[6],S0*B[6]>P"),
        ),
        example(
            "aten.cross_entropy_loss.default",
            logits,
            targets,
            tensor(8, has_gradient=False),
            ignore_index=2,
            never=("S1",),
        ),
        example(
            "aten.cross_entropy_loss.default", logits, targets, None, 2, 3, expected=("S1[8],R>R", "S0*B[6],S0*B[6]>P")
        ),
        example(
            "aten.cross_entropy_loss.default", logits, targets, None, 0, 3, 0.1, expected=("S0*B[6],S0*B[6]>S0*B[6]",)
        ),
        example(
            "aten.cross_entropy_loss.default", tensor(B, 8, 4, 6, values=normal), tensor(B, 4, 6, values=integers(8))
        ),
        example("aten.cross_entropy_loss.default", logits, targets, tensor(8, has_gradient=False), 2, never=("S1",)),
        example("aten.nll_loss.default", logits, targets, None, 2),
        example("aten.nll_loss_nd.default", tensor(B, 8, 6), tensor(B, 6, values=integers(8)), None, 0),
        *(
            example(f"aten.{name}.default", x, tensor(B, 6, 8), reduction)
            for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div")
            for reduction in (0, 1, 2)
        ),
        *(example("aten.binary_cross_entropy.default", tensor(B, 6, 8), tensor(B, 6, 8), None, r) for r in (0, 1, 2)),
        example("aten.binary_cross_entropy.default", tensor(B, 6, 8), tensor(B, 6, 8), tensor(8, has_gradient=False)),
        example(
            "aten.binary_cross_entropy_with_logits.default", x, tensor(B, 6, 8), None, tensor(8, has_gradient=False), 1
        ),
        example("aten.dropout.default", x, 0.4, True, degrees=(2,)),
        example("aten.dropout.default", tensor(Batch(6), 24, seeds=["S0*B[6]", "S1*3[8]"]), 0.4, True),
        example("aten.dropout.default", x, 0.4, False, expected=("P>P",)),
        example("aten.sum.default", x),
        example("aten.sum.dim_IntList", x, (1,), True, expected=("S1[6]>P", "S2[8]>S2[8]", "P>P")),
        example("aten.sum.dim_IntList", x, (-1, 1)),
        example("aten.mean.default", x, expected=("S1[6]>P",)),
        example("aten.mean.dim", tensor(Batch(6), 8, seeds=_TOKENS), (0,), expected=("S0*B[6]>P",)),
        example("aten.mean.dim", x, (-1,), True, dtype=None, degrees=(2, 4)),
        *(example(f"aten.{name}.default", x, (-1,), True, never=("S2", "P")) for name in ("amax", "amin")),
        example("aten.logsumexp.default", x, (1,)),
        example("aten.prod.dim_int", x, 1),
        example("aten.any.dim", tensor(B, 6, 8, values=booleans), 1),
        example("aten.all.dim", tensor(B, 6, 8, values=booleans), 1),
        *(example(f"aten.{name}.correction", x, (1,), correction=1, keepdim=True) for name in ("var", "std")),
        *(example(f"aten.{name}.dim", x, (2,), False, True) for name in ("var", "std")),
        example("aten.linalg_vector_norm.default", x, 2, (-1,), True),
        example("aten.norm.ScalarOpt_dim", x, 2, (1,)),
    ]


EXAMPLES = [*_pointwise_examples(), *_view_examples(), *_matmul_examples()]
LINES = sorted({*pointwise.TABLE, *views.TABLE, *matmul.TABLE})


@pytest.mark.parametrize("line", LINES)
def test_every_option_of_every_example_is_the_whole_forward_and_backward(line: str) -> None:
    found = [given for given in EXAMPLES if line_of(given.op) == line]
    assert found, f"{line} has no example"
    for given in found:
        check(given)


def test_a_split_seen_through_a_view_is_the_view_of_what_a_rank_holds() -> None:
    """Whatever `reshaped` finds, for random shapes, parts and repeats."""
    rng = random.Random(3)
    found = 0
    for _ in range(3000):
        factors = [rng.choice((1, 2, 2, 3, 4)) for _ in range(rng.randint(1, 5))]
        source, target = _grouped(factors, rng), _grouped(factors, rng)
        dim, degree = rng.randrange(len(source)), rng.choice((2, 3, 4))
        placement = _random_split(dim, source[dim], rng)
        if not divides(degree, placement):
            continue
        seen = reshaped(placement, source, target, degree)
        whole = torch.arange(math.prod(factors))
        if seen is None:
            continue
        found += 1
        assert reshaped(seen, target, source, degree) == placement
        for rank in range(degree):
            mine = _piece(whole.view(source), placement, rank, degree)
            expected = _piece(whole.view(target), seen, rank, degree)
            assert mine == expected, (source, placement, target, seen)
    assert found > 200


def _grouped(factors: list[int], rng: random.Random) -> tuple[int, ...]:
    """Neighbouring factors multiplied at random: a shape of as many elements."""
    shape = [1]
    for factor in factors:
        if rng.random() < 0.5:
            shape.append(factor)
        else:
            shape[-1] *= factor
    return tuple(shape)


def _random_split(dim: int, size: int, rng: random.Random) -> Placement:
    repeats = rng.choice([r for r in range(1, size + 1) if size % r == 0])
    inner = size // repeats
    first = rng.randint(1, inner)
    return split(dim, [p for p in (first, inner - first) if p], repeats)


def _piece(whole: torch.Tensor, placement: Placement, rank: int, degree: int) -> list[int]:
    parts = [part for part in placement.parts if isinstance(part, int)]
    assert isinstance(placement.repeats, int)
    found: list[int] = piece_of(whole, placement.dim, parts, placement.repeats, rank, degree).flatten().tolist()
    return found


def test_batches_are_split_by_seeds_only_and_indivisible_dims_not_at_all() -> None:
    made = make(example("aten.relu.default", tensor(Batch(8), 9, seeds=["S1[6,3]"])))
    assert [str(option) for option in made.options(2)] == ["R>R", "Q>Q"]
    assert "S1[6,3]>S1[6,3]" in [str(option) for option in made.options(3)]


def test_an_operator_without_rule_is_replicated_and_what_has_no_gradient_is_never_partial_in_it() -> None:
    made = make(example("aten.inverse.default", tensor(B, 4, 4, values=normal)))
    assert line_of("aten.inverse.default") is None
    plain = make(example("aten.relu.default", tensor(B, 4, has_gradient=False)))
    assert all("Q" not in str(option) for option in plain.options(2))
    assert [str(option) for option in made.options(2)] == ["R>R", "Q>Q"]


def test_only_derivatives_run_on_partial_gradients() -> None:
    """The user's own backward may clip: it must see whole gradients."""
    tensors = [Tensor(name=str(i), shape=(4, 8), dtype="float64", kind="activation") for i in range(2)]
    for op, may in (
        ("aten.relu.default", True), (OPAQUE, False), (HOOKED, False), ("mylib.clamped.default", False),
    ):  # fmt: skip
        node = Node(name="n", op=op, args=("key", Ref(0)), outputs=(1,))
        assert any(Q in option.operands for option in options(node, tensors, 2, {}, {0, 1})) == may


def test_what_is_written_in_place_stays_the_part_it_is() -> None:
    tensors = [Tensor(name=str(i), shape=(4, 8), dtype="float64", kind="activation") for i in range(3)]
    node = Node(name="n", op="aten.mul_.Tensor", args=(Ref(0), Ref(1)), outputs=(2,), mutates=(0,), aliases=(0,))
    found = options(node, tensors, 2, {}, {1})

    assert {str(option) for option in found} >= {"R,R>R", "S0[4],S0[4]>S0[4]"}
    assert all(option.operands[0] == option.outputs[0] for option in found)


def test_what_is_written_by_name_is_not_split() -> None:
    tensors = [Tensor(name=str(i), shape=(4, 8), dtype="float64", kind="activation") for i in range(4)]
    out = Node(
        name="n", op="aten.div.out", args=(Ref(0), Ref(1)), kwargs=(("out", Ref(2)),), outputs=(3,), mutates=(2,)
    )

    assert [str(option) for option in options(out, tensors, 2)] == ["R,R,R>R"]
    assert not has_rule("aten.div.out")
    assert has_rule("aten.div.Tensor")


def test_two_operands_that_are_one_tensor_are_never_placed_in_two_ways() -> None:
    square = tensor(8, 8, values=normal)
    made = make(example("aten.mm.default", square, square))
    assert [str(option) for option in made.options(2)] == ["R>R", "Q>Q"]
    for option in made.options(2):
        prove(made, option, 2)


@pytest.mark.parametrize("op", ["embedding", "cross_entropy"])
def test_an_index_that_no_rank_has_is_an_error(op: str) -> None:
    table, ids = torch.rand(4, 4), torch.tensor([0, 9, 1, 2])

    def run(c: Communicator) -> object:
        return bound({"tp": c})[f"planner.{op}.default"](table, ids, axis="tp")

    with pytest.raises(RuntimeError, match="out of range: there are 8"):
        Threads(2).run(run)


@pytest.mark.parametrize(
    "line", ["scaled_dot_product_attention", "softmax", "log_softmax", "cross_entropy_loss", "embedding"]
)
def test_operators_of_a_rank_run_on_shapes_alone_and_communicate_what_they_declare(line: str) -> None:
    found = []
    for made in (make(given) for given in EXAMPLES if line_of(given.op) == f"aten.{line}"):
        for option in made.options(2):
            if option.op.startswith("planner."):
                assert_prices(made, option, 2)
                found.append(option)
    assert found


def test_a_rank_does_its_share_of_the_work_and_under_a_causal_mask_more() -> None:
    q, k, v = (tensor(B, 4, 8, 6, values=normal) for _ in range(3))
    made = make(example("aten.scaled_dot_product_attention.default", q, k, v, None, 0.0, True))
    shares = {str(option): option.share for option in made.options(4)}
    assert shares == {
        "R,R,R>R": 1, "Q,Q,Q>Q": 1, "S1[4],S1[4],S1[4]>S1[4]": 0.25, "S2[8],Q,Q>S2[8]": 0.25,
    }  # fmt: skip
