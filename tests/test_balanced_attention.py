"""Causal attention of a part of the queries without a mask: equal work on every rank, and when it is used."""

import threading
from collections import Counter

import pytest
import torch
from torch.nn import functional

from planner.graph import Batch, Node, Ref, Tensor
from planner.shard.placement import local_shape
from planner.shard.rules import options
from planner.trace import parallel_attention
from planner.trace.parallel import Threads, bound
from planner.trace.parallel_attention import lower_right_attention
from planner.trace.pricing import price_nodes

BALANCED, MASKED = "planner.balanced_causal_attention.default", "planner.causal_attention.default"
LENGTH, HEAD, HEADS = 4096, 64, 8


def attention(
    degree, length=LENGTH, *, dropout=0.0, keys=None, dtype="bfloat16", kv_heads=HEADS, width=HEAD, scale=None
):
    """A causal attention of [samples, heads, length, head], and the option that splits its queries."""
    sizes = [(HEADS, length), (kv_heads, keys or length), (kv_heads, keys or length), (HEADS, length)]
    tensors = [
        Tensor(name="", shape=(Batch(1), heads, size, wide), dtype=dtype, kind="activation")
        for (heads, size), wide in zip(sizes, (width, width, HEAD, HEAD), strict=True)
    ]
    given = {"enable_gqa": kv_heads < HEADS, "scale": scale}
    kwargs = tuple((name, value) for name, value in given.items() if value)
    node = Node(
        name="n", op="aten.scaled_dot_product_attention.default",
        args=(Ref(0), Ref(1), Ref(2), None, dropout, True), kwargs=kwargs, outputs=(3,),
    )  # fmt: skip
    found = options(node, tensors, degree, {}, frozenset(range(4)))
    return node, tensors, next(o for o in found if str(o).startswith(f"S2[{length}],"))


def priced(degree, **given):
    """What a rank of a GPU runs for two samples."""
    node, tensors, option = attention(degree, **given)
    placed = dict(enumerate((*option.operands, *option.outputs)))
    local = [
        Tensor(name="", shape=local_shape(t.shape, placed[i], degree), dtype=t.dtype, kind=t.kind)
        for i, t in enumerate(tensors)
    ]
    kwargs = (*option.kwargs, ("axis", "cp"))
    of_rank = Node(name="n", op=option.op, args=option.args, kwargs=kwargs, outputs=node.outputs)
    return price_nodes(local, [of_rank], (0, 1, 2), (), (3,), axes={"cp": degree})


@pytest.mark.parametrize("degree", [2, 3, 4, 5])
def test_every_rank_sees_as_many_keys_and_gets_its_own_queries_back(degree, monkeypatch):
    length = 12 * degree
    q, k, v = (torch.randn(2, 3, length, 8, dtype=torch.float64) for _ in range(3))
    pairs: Counter[int] = Counter()

    def counted(query, key, value, **kwargs):
        rows, columns = query.shape[-2], key.shape[-2]
        pairs[threading.get_ident()] += rows * (columns - rows) + rows * (rows + 1) // 2
        return lower_right_attention(query, key, value, **kwargs)

    monkeypatch.setattr(parallel_attention, "lower_right_attention", counted)
    made = Threads(degree).run(
        lambda c: bound({"cp": c})[BALANCED](q.chunk(degree, -2)[c.rank], k, v, scale=0.5, axis="cp")
    )

    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)
    torch.testing.assert_close(torch.cat(made, -2), expected, rtol=1e-9, atol=1e-12)
    assert list(pairs.values()) == [length * (length + 1) // 2 // degree] * degree


@pytest.mark.parametrize(("queries", "keys"), [(3, 3), (3, 9), (1, 4)])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_last_query_sees_the_last_key(queries, keys, kv_heads):
    query = torch.randn(2, 4, queries, 8, dtype=torch.float64)
    key, value = (torch.randn(2, kv_heads, keys, 8, dtype=torch.float64) for _ in range(2))
    mask = torch.arange(keys) <= torch.arange(keys - queries, keys).unsqueeze(-1)
    scores = torch.einsum("bhqe,bhke->bhqk", query, key.repeat_interleave(4 // kv_heads, 1)) * 8**-0.5
    expected = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value.repeat_interleave(4 // kv_heads, 1)

    made = lower_right_attention(query, key, value, enable_gqa=kv_heads < 4)

    torch.testing.assert_close(made, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "kv_heads", "kernel"),
    [
        ("bfloat16", HEADS, "aten._scaled_dot_product_flash_attention"),
        ("bfloat16", 2, "aten._scaled_dot_product_flash_attention"),
        ("float32", 2, "aten._efficient_attention"),
    ],
)
def test_on_a_gpu_it_is_a_fair_share_of_the_work_by_kernels_that_need_no_mask(degree, dtype, kv_heads, kernel):
    kind = priced(degree, dtype=dtype, kv_heads=kv_heads)
    triangle = 2 * 2 * 2 * HEADS * HEAD * LENGTH**2 / 2  # of two samples; a multiply-add is two, QK^T and PV
    for phase, passes in (("forward", 1.0), ("backward", 2.5)):
        kernels = [k for k in kind.kernels if k.kind == "attention" and k.phase == phase]
        assert sum(k.flop.at(2) for k in kernels) == pytest.approx(passes * triangle / degree, rel=1e-12)
        assert all(k.op.startswith(kernel) or k.op.startswith("aten._scaled_dot_product") for k in kernels)
    assert kernel in {k.op[: len(kernel)] for k in kind.kernels}
    made = {k.op for k in kind.kernels}
    assert not {op for op in made if "mask" in op or "tril" in op or "where" in op}, made


def test_wider_queries_with_a_scale_of_their_own_have_a_price():
    # As multi-latent attention has them.
    kind = priced(2, width=96, scale=0.1)
    made = sum(k.flop.at(2) for k in kind.kernels if k.kind == "attention" and k.phase == "backward")

    assert made == pytest.approx(2.5 * 2 * 2 * HEADS * (96 + HEAD) * LENGTH**2 / 2 / 2, rel=1e-12)


@pytest.mark.parametrize(
    ("given", "op"),
    [
        ({}, BALANCED),
        ({"kv_heads": 2}, BALANCED),
        ({"length": 4092}, MASKED),  # four parts, but not eight
        ({"dropout": 0.1}, MASKED),
        ({"keys": 2048}, MASKED),
    ],
    ids=["plain", "shared heads", "halves of another size", "dropout", "fewer keys"],
)
def test_it_is_used_where_halves_of_parts_are_equal_and_nothing_is_drawn(given, op):
    assert attention(4, **given)[2].op == op


def test_a_rank_is_priced_by_a_fair_share_or_by_what_a_mask_leaves_in():
    assert attention(4)[2].share == 0.25
    assert attention(4, 4092)[2].share == 0.5
