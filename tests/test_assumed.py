"""A forward that looks at values has a price: sizes that depend on values are the largest they can be."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from planner.trace import trace

WIDTH, EXPERTS = 16, 4
WAYS = ("where", "mask", "nonzero", "masked_select", "tolist", "unique")
STATIC = ("mask", "nonzero", "masked_select")  # every forward calls the same modules


class Experts(nn.Module):
    """Each expert gets the tokens that chose it, found in one of the ways that people write."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        share = self.gate(tokens).softmax(-1)
        top, chosen = share.topk(2, -1)
        result = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            wanted = (chosen == index).any(-1)
            if self.way == "where":
                token, place = torch.where(chosen == index)
                if token.numel() == 0:
                    continue
                result.index_add_(0, token, expert(tokens[token]) * top[token, place, None])
            elif self.way == "mask":
                result[wanted] += expert(tokens[wanted]) * share[wanted, index, None]
            elif self.way == "nonzero":
                token = wanted.nonzero().squeeze(-1)
                result = result.index_add(0, token, expert(tokens[token]) * share[token, index, None])
            elif self.way == "masked_select":
                selected = tokens.masked_select(wanted[:, None]).view(-1, WIDTH)
                result = result.masked_scatter(wanted[:, None], expert(selected) * 0.5)
            elif self.way == "tolist":
                if sum(wanted.tolist()):
                    result = result + expert(tokens) * share[:, index, None]
            elif (torch.unique(chosen) == index).any():
                result = result + expert(tokens) * share[:, index, None]
        return result.view_as(x)


class Routed(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(way) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(self.head(x).squeeze(-1).mean(1), y)


@pytest.mark.parametrize("way", WAYS)
def test_experts_that_get_some_of_the_tokens_are_priced_as_if_they_got_all(way: str) -> None:
    torch.manual_seed(0)
    model = Routed(way)
    batch = {"x": torch.randn(4, 8, WIDTH), "y": torch.randn(4)}

    graph = trace(model, batch)

    assert len(graph.fallbacks) == 1
    assert "test_assumed.py:" in graph.fallbacks[0].source
    with FlopCounterMode(display=False) as counter:
        model(**batch).backward()
    real = counter.get_total_flops() / 4
    assert real <= graph.flop_per_sample() <= 2 * EXPERTS * real


@pytest.mark.parametrize("way", WAYS)
def test_only_the_root_is_wrapped_where_ranks_may_call_different_modules(way: str) -> None:
    graph = trace(Routed(way), {"x": torch.randn(4, 8, WIDTH), "y": torch.randn(4)})

    assert [b.name for b in graph.blocks] == (["layers.0", "layers.1", ""] if way in STATIC else [""])


def test_a_refusal_before_the_export_does_not_hide_a_branch() -> None:
    model = Routed("tolist")
    model.head.register_full_backward_hook(lambda module, given, gradient: None)

    graph = trace(model, {"x": torch.randn(4, 8, WIDTH), "y": torch.randn(4)})

    assert "backward hook" in graph.fallbacks[0].reason
    assert [b.name for b in graph.blocks] == [""]
