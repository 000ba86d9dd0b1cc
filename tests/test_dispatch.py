"""An order of rows that is undone leaves a loss the mean over samples that it is; any trace of it is told."""

import pytest
import torch
from torch import Tensor, nn

from planner.trace import trace
from planner.trace.grouped import NAME

EXPERTS, CHOSEN, WIDTH = 4, 2, 8


class CountedExperts(nn.Module):
    """The same with other operators: places by argsort, counts from a comparison."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.first = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.matrices = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.first(x.flatten(0, 1))
        experts = self.router(tokens).argmax(-1)
        order = experts.argsort(stable=True)
        counted = (tokens.argmax(-1) % EXPERTS if self.fault == "other keys" else experts).unsqueeze(1)
        first = 1 if self.fault == "keys left out" else 0
        ends = (counted == torch.arange(first, EXPERTS + first)).sum(0).cumsum(0).to(torch.int32)
        rows = torch._grouped_mm(tokens[order], self.matrices, ends)
        back = order if self.fault == "not undone" else order.argsort(descending=self.fault == "undone backwards")
        loss: Tensor = rows[back].square().mul(x.flatten(0, 1)).mean()
        return loss


class Experts(nn.Module):
    """Rows [batch, 6, WIDTH] through two of four experts each, dispatched by a sort; `fault` breaks it."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.first = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.matrices = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 3)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.first(x.flatten(0, 1))
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOSEN, -1)
        experts, order = chosen.flatten().sort(descending=self.fault == "descending")
        group = 4 if self.fault == "other group" else CHOSEN
        low, high = (1 if self.fault == "keys left out" else 0), (0 if self.fault == "any range" else EXPERTS - 1)
        counts = torch.histc(experts.float(), EXPERTS, min=low, max=high)
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = torch._grouped_mm(tokens[order // group], self.matrices, ends)
        if self.fault == "over rows":
            rows = rows.softmax(0)
        if self.fault == "another order":
            rows = rows + tokens.repeat_interleave(CHOSEN, 0)
        rows = self.norm(rows).relu() * weights.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0])
        rows = rows[order if self.fault == "not undone" else back]
        result = rows.view(-1, CHOSEN, WIDTH).sum(1)
        loss: Tensor = result.square().mean()
        if self.fault == "counts in the loss":
            loss = loss + counts.var()
        return loss


@pytest.fixture
def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(0))}


def test_experts_by_a_sort_that_is_undone_treat_samples_one_by_one(batch: dict[str, Tensor]) -> None:
    torch.manual_seed(0)
    model = Experts()
    graph = trace(model, batch, device_kind="cpu")

    assert not graph.fallbacks, graph.fallbacks
    assert (graph.couples_samples, graph.not_separable) == ("", "")
    assert [n.op for n in graph.nodes if "grouped_mm" in n.op] == [NAME]
    parts = [model(x[None]) for x in batch["x"]]
    torch.testing.assert_close(torch.stack(parts).mean(), model(batch["x"]))


@pytest.mark.parametrize("fault", ["", "other keys", "keys left out", "not undone", "undone backwards"])
def test_an_order_is_followed_through_other_operators(batch: dict[str, Tensor], fault: str) -> None:
    graph = trace(CountedExperts(fault), batch, device_kind="cpu")

    assert not graph.fallbacks, graph.fallbacks
    assert bool(graph.not_separable) == bool(fault)


@pytest.mark.parametrize(
    "fault",
    [
        "descending",
        "other group",
        "keys left out",
        "any range",
        "over rows",
        "another order",
        "not undone",
        "counts in the loss",
    ],
)
def test_an_order_that_shows_is_told(batch: dict[str, Tensor], fault: str) -> None:
    graph = trace(Experts(fault), batch, device_kind="cpu")

    assert not graph.fallbacks, graph.fallbacks
    assert "test_dispatch.py:" in graph.not_separable


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_grouped_product_has_one_name_and_one_price_in_every_precision(precision: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 6, WIDTH, dtype=dtype)
    graph = trace(Experts().to(dtype), {"x": x}, precision=precision)
    products = [k for block in graph.classes for k in block.kernels if "grouped_mm" in k.op]

    assert {n.op for n in graph.nodes if "grouped_mm" in n.op} == {NAME}
    assert {k.op for k in products} == {NAME}
    rows = 6 * CHOSEN
    for phase, factor in (("forward", 1), ("backward", 2)):
        flop = sum(k.flop.per_sample for k in products if k.phase == phase)
        assert flop == pytest.approx(factor * 2.0 * rows * WIDTH * WIDTH), phase


def test_a_grouped_product_in_float64_is_the_loop_over_experts() -> None:
    from planner.trace.grouped import grouped_mm

    torch.manual_seed(0)
    rows = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    matrices = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)

    result = grouped_mm(rows, matrices, ends)
    wanted = torch.cat([rows[:2] @ matrices[0], rows[2:6] @ matrices[2], rows.new_zeros(1, 4)])
    torch.testing.assert_close(result, wanted)
    torch.autograd.gradcheck(lambda r, m: grouped_mm(r, m, ends), (rows, matrices))
