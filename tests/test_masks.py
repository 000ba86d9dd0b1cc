"""Masks that export made of a flag are folded back; a mask that says anything else stays."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.graph import Graph, Node
from planner.trace import trace
from planner.trace.masks import ATTENTION
from tests import models
from tests.float64 import explicit_float32_as_float64
from tests.test_trace import assert_equals_eager

SEQUENCE = 6


def attention(graph: Graph) -> list[Node]:
    live = {i for b in graph.blocks for i in b.nodes}
    return [n for i, n in enumerate(graph.nodes) if n.op == ATTENTION and i in live]


@pytest.mark.parametrize(
    ("name", "is_causal"), [("hf-gpt2", True), ("hf-llama", True), ("hf-bert", False), ("gpt", True)]
)
def test_masks_of_hugging_face_models_are_folded(name, is_causal):
    model = models.build(name)
    with explicit_float32_as_float64() if models.MODELS[name].needs_float64_mode else nullcontext():
        graph = trace(model, models.batch(name, 2, step=0), precision="fp64", device_kind="cpu")
    found = attention(graph)
    assert len(found) == models.LAYERS
    for node in found:
        arguments = dict(node.kwargs)
        assert len(node.args) == 3 or node.args[3] is None
        assert arguments.get("attn_mask") is None
        assert bool(arguments.get("is_causal", len(node.args) > 5 and node.args[5])) == is_causal
    assert_equals_eager(
        graph, model, models.batch(name, 3, step=1), float64_mode=models.MODELS[name].needs_float64_mode
    )


class Attention(nn.Module):
    """One attention layer with a mask that `mask` makes; the loss reads the batch's `padding` if there is one."""

    def __init__(self, mask) -> None:
        super().__init__()
        self.mask = mask
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("causal", torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril())

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(self, x, padding)).square().mean()


def positions(x: Tensor) -> tuple[Tensor, Tensor]:
    index = torch.arange(x.shape[1], device=x.device)
    return index[:, None], index[None, :]


def causal(self, x, padding):
    rows, columns = positions(x)
    return columns <= rows


def causal_added(self, x, padding):
    rows, columns = positions(x)
    return torch.zeros(len(rows), len(rows), dtype=x.dtype).masked_fill(columns > rows, float("-inf"))


def full(self, x, padding):
    rows, columns = positions(x)
    return (columns >= 0) & (rows >= 0)


def sliding_window(self, x, padding):
    rows, columns = positions(x)
    return (columns <= rows) & (columns > rows - 3)


def shifted(self, x, padding):
    rows, columns = positions(x)
    return columns <= rows + 1


def bias(self, x, padding):
    rows, columns = positions(x)
    return -(rows - columns).abs().to(x.dtype)


def written_in_place(self, x, padding):
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
    mask[1:, 0] = False
    return mask


def padded(self, x, padding):
    rows, columns = positions(x)
    return (columns <= rows) & padding[:, None, None, :]


def from_buffer(self, x, padding):
    return self.causal


@pytest.mark.parametrize(
    ("mask", "folded"),
    [
        (causal, {"is_causal": True}),
        (causal_added, {"is_causal": True}),
        (full, {"is_causal": False}),
        (sliding_window, None),
        (shifted, None),
        (bias, None),
        (written_in_place, None),
        (padded, None),
        (from_buffer, None),  # its values may differ when it runs
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_only_causal_and_full_masks_are_folded(mask, folded):
    torch.manual_seed(0)
    model = Attention(mask).double()

    def batch(samples: int) -> dict[str, Tensor]:
        valid = torch.arange(SEQUENCE) < torch.arange(samples)[:, None] + 3
        return {"x": torch.randn(samples, SEQUENCE, 8, dtype=torch.float64), "padding": valid}

    graph = trace(model, batch(2), precision="fp64", device_kind="cpu")
    assert not graph.fallbacks, graph.fallbacks
    (node,) = attention(graph)
    arguments = dict(node.kwargs)
    if folded:
        assert len(node.args) == 3
        assert arguments["attn_mask"] is None
        assert arguments["is_causal"] == folded["is_causal"]
    else:
        assert arguments.get("attn_mask", node.args[3] if len(node.args) > 3 else None) is not None
        assert not arguments.get("is_causal")
    assert_equals_eager(graph, model, batch(3))
