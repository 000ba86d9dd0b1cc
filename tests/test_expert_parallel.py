"""Experts over ranks that have samples of their own (`ep`): as one device that runs the samples of all ranks."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from planner.errors import PlanError
from planner.runtime.parts import piece
from planner.shard import program
from planner.shard.loads import expert_layers
from planner.shard.localize import localize
from planner.shard.placement import E, R
from planner.shard.program import variants
from planner.shard.rules import options
from planner.shard.rules.special import DISPATCHED
from planner.shard.spread import numbers_of_experts, spread_experts
from planner.shard.stored import restored, stored
from planner.trace import trace
from planner.trace.parallel import Threads, bound
from tests import models
from tests.distributed_cases import graph_of
from tests.float64 import explicit_float32_as_float64
from tests.sharded import _run, apart, assert_equal, run_whole, together, values_of
from tests.test_dispatch import Experts
from tests.test_shard_experts import SPARSE, _model
from tests.test_shard_program import toy_prices


def _own(graph, values, rank, samples):
    """A batch of a rank: those of rank 0 with others' tokens."""
    draws = torch.Generator().manual_seed(100 + rank)
    found = {}
    for tensor, value in values.items():
        if graph.tensors[tensor].kind == "input" and value.is_floating_point():
            value = torch.randn(samples, *value.shape[1:], dtype=value.dtype, generator=draws)
        elif graph.tensors[tensor].kind == "input":
            value = torch.randint(3, int(value.max()) + 1, (samples, *value.shape[1:]), generator=draws)
        found[tensor] = value
    return found


class Weighed(nn.Module):
    """[batch, 8, 6] through two of four experts each, weighed by their scores between the two products."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 6, 10)), nn.Parameter(torch.randn(4, 10, 6))

    def forward(self, x: Tensor) -> Tensor:
        """A loss of all rows."""
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        experts, order = chosen.flatten().sort()
        ends = torch.histc(experts.double(), 4, 0, 3).cumsum(0).to(torch.int32)
        inner = torch._grouped_mm(tokens[order // 2], self.up, ends).relu()
        inner = inner * weights.flatten()[order].unsqueeze(-1)
        rows = torch._grouped_mm(inner, self.down, ends)
        loss: Tensor = rows[order.argsort()].view(-1, 2, 6).sum(1).square().mean()
        return loss


def _in_parts(x, placement, degree):
    return [piece(x, placement, rank, degree) for rank in range(degree)]


def _check(graph, values, degree, samples=None, loads=None):
    """Every rank with its own samples against their mean on one device."""
    samples = samples or [2] * degree
    batches = [_own(graph, values, rank, samples[rank]) for rank in range(degree)]
    whole = [run_whole(graph, batch, n) for batch, n in zip(batches, samples, strict=True)]
    shardings = spread_experts(graph, degree, loads=loads)
    local = localize(graph, shardings, degree, axis="ep")
    assert restored(graph, *stored(shardings, "ep"), degree) == shardings
    placed = {t: p for t, p in local.placements.items() if graph.tensors[t].kind == "parameter" and p.is_split}
    assert placed

    def work(c):
        mine = {
            t: _in_parts(x, local.placements[t], degree)[c.rank] if t in placed else x
            for t, x in batches[c.rank].items()
        }
        return _run(local.graph, mine, samples[c.rank], bound({"ep": c}))

    found = Threads(degree).run(work)
    for mine, theirs in zip(found, whole, strict=True):
        torch.testing.assert_close(mine.loss, theirs.loss, rtol=1e-9, atol=0)
    # An owner's gradient is that of the rows of all ranks already; all others are added up over ranks.
    gradients = {t: together([f.gradients[t] for f in found], placed[t]) for t in placed}
    for t in placed:
        if placed[t].order:
            gradients[t] = gradients[t][torch.tensor(placed[t].order).argsort()]
    gradients |= {t: _sum([f.gradients[t] for f in found]) for t in found[0].gradients if t not in placed}
    wanted = {t: _sum([w.gradients[t] for w in whole]) for t in gradients}
    assert_equal(
        graph,
        replace(found[0], gradients=gradients, loss=whole[0].loss, buffers={}),
        replace(whole[0], gradients=wanted),
    )
    return local


def _sum(gradients):
    return None if gradients[0] is None else torch.stack(gradients).sum(0)


def _mode(name):
    is_explicit = name in models.MODELS and models.MODELS[name].needs_float64_mode
    return explicit_float32_as_float64() if is_explicit else nullcontext()


@pytest.mark.parametrize("busy", [(), (1,), (0, 3)], ids=str)
@pytest.mark.parametrize("degree", [2, 4])
def test_ranks_with_idle_experts_and_other_numbers_of_samples(degree, busy):
    graph, values = _model("routed")
    (bias,) = [i for i, t in enumerate(graph.tensors) if t.name == "router.bias"]
    skewed = values[bias].clone()
    skewed[list(busy)] += 50.0
    local = _check(graph, values | {bias: skewed}, degree, [2, 3, 1, 2][:degree])
    split = {graph.tensors[t].name for t, p in local.placements.items() if p.is_split}
    assert split == {"up", "down", "up_bias"}  # what is added after the last product is added at home


@pytest.mark.parametrize(
    ("name", "layer"),
    [("routed", ""), ("moe", "blocks.1.mlp"), pytest.param("mixtral+router", "", marks=pytest.mark.families)],
)
def test_experts_are_put_together_by_measured_loads(name, layer):
    with _mode(name):
        graph, values = _model(name)
        loads = {each.name: [8, 6, 1, 1] for each in expert_layers(graph) if layer in each.name}
        assert loads
        local = _check(graph, values, 2, [3, 2], loads)
    placed = {graph.tensors[t].name: p for t, p in local.placements.items() if p.is_split}
    assert {p.order for p in placed.values()} == ({(0, 3, 1, 2)} if not layer else {(0, 3, 1, 2), ()})
    assert len({block.class_index for block in local.graph.blocks}) <= len(graph.classes)  # priced once
    again = localize(graph, spread_experts(graph, 2, placed), 2, axis="ep")
    assert again.placements == local.placements


class Odd(nn.Module):
    """Two of four experts for each of [batch, 8, 6], in ways whose rows or tables are not one for each expert."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.router = nn.Linear(6, 6 if way == "rows of no expert" else 4)
        self.up, self.down = nn.Parameter(torch.randn(4, 6, 10)), nn.Parameter(torch.randn(4, 10, 6))
        if way == "flat":
            self.up = nn.Parameter(torch.randn(4 * 6, 10))
        self.bias = nn.Parameter(torch.randn(6, 10))
        with torch.no_grad():
            self.router.bias[:2] += 3.0  # the experts of rank 0 get more rows than a rank has

    def forward(self, x: Tensor) -> Tensor:
        """A loss of all rows."""
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        experts, order = chosen.flatten().sort()
        ends = torch.histc(experts.double(), 4, 0, 3).cumsum(0).to(torch.int32)
        inner = torch._grouped_mm(tokens[order // 2], self.up.view(4, 6, 10), ends)
        if self.way == "slice of all rows":
            inner = inner[: order.shape[0]]
        elif self.way == "rows of no expert":  # their keys are 4 and 5
            inner = inner + self.bias[experts]
        rows = torch._grouped_mm(inner.tanh(), self.down, ends) * weights.flatten()[order].unsqueeze(-1)
        loss: Tensor = rows[order.argsort()].view(-1, 2, 6).sum(1).square().mean()
        return loss


@pytest.mark.parametrize("loads", [None, [8, 6, 1, 1]], ids=["in order", "by loads"])
@pytest.mark.parametrize("way", ["slice of all rows", "rows of no expert", "flat"])
def test_what_is_not_simply_one_for_each_expert_is_right_too(way, loads):
    torch.manual_seed(0)
    module = Odd(way).double()
    graph = trace(module, torch.randn(4, 8, 6).double(), precision="fp64", device_kind="cpu")
    values = values_of(graph, module, {"0": torch.randn(2, 8, 6).double()})
    by_layer = {each.name: loads for each in expert_layers(graph)} if loads else None

    local = _check(graph, values, 2, [3, 2], by_layer)

    held = ((graph.tensors[t], p) for t, p in local.placements.items() if p.is_split)
    split = {tensor.name: p for tensor, p in held if tensor.kind == "parameter"}
    assert split.keys() == {"up", "down"}
    assert {p.order for p in split.values()} == ({(0, 3, 1, 2)} if loads and way != "flat" else {()})


@pytest.mark.parametrize(("name", "degree"), [("moe", 2), ("moe", 4), ("mixtral+router", 2)])
def test_models_have_the_loss_and_gradients_of_one_device(name, degree):
    with _mode(name):
        graph, values = _model(name)
        _check(graph, values, degree)


@pytest.mark.families
@pytest.mark.parametrize("name", ["qwen2-moe", "qwen2-moe+router", *SPARSE])
def test_families_have_the_loss_and_gradients_of_one_device(name):
    with _mode(name):
        graph, values = _model(name)
        _check(graph, values, 2)


def test_rows_travel_once_to_their_experts_and_once_back():
    graph, _ = _model("moe")
    shardings = spread_experts(graph, 2)
    products = [o for s in shardings for o in s.options if o.op == DISPATCHED]
    assert [(o.operands[0] == E, o.outputs[0] == E) for o in products] == [(False, True), (True, False)] * 4


def test_rows_come_home_for_what_depends_on_their_tokens():
    torch.manual_seed(0)
    module, x = Weighed().double(), torch.randn(2, 8, 6, dtype=torch.float64)
    graph = trace(module, {"x": torch.randn(4, 8, 6, dtype=torch.float64)}, precision="fp64", device_kind="cpu")
    products = [o for s in spread_experts(graph, 2) for o in s.options if o.op == DISPATCHED]
    assert [(o.operands[0], o.outputs[0]) for o in products] == [(R, R)] * 2
    _check(graph, values_of(graph, module, {"x": x}), 2)


# --- tensor parallelism within --------------------------------------------------------------------


def _split_features(node, *rest):
    found = options(node, *rest)
    return tuple(o for o in found if o.operands[1].is_split) if node.op == DISPATCHED else found


@pytest.mark.parametrize("name", ["moe", pytest.param("mixtral+router", marks=pytest.mark.families)])
def test_features_of_experts_are_split_within(name):
    """2 ranks of `ep` by 2 of `tp`, whose matrices of experts are split both ways."""
    with _mode(name), pytest.MonkeyPatch.context() as patch:
        graph, values = _model(name)
        batches = [_own(graph, values, rank, 2) for rank in range(2)]
        whole = [run_whole(graph, batch, 2) for batch in batches]
        outer = localize(graph, spread_experts(graph, 2), 2, axis="ep")
        patch.setattr(program, "options", _split_features)
        inner = localize(outer.graph, variants(outer.graph, 2, toy_prices(1e12, 1e11, 1e-6, 1e10))[0].shardings, 2)
        placed = {t: (outer.placements.get(t, R), inner.placements.get(t, R)) for t in values}
        assert any(one.is_split and other.is_split for one, other in placed.values())
        columns, rows = [Threads(2), Threads(2)], [Threads(2), Threads(2)]

        def work(c):
            ep, tp = divmod(c.rank, 2)
            mine = {}
            for t, x in batches[ep].items():
                one, other = placed[t]
                mine[t] = apart(_in_parts(x, one, 2)[ep], other, 2, micro_batch=2)[tp]
            peers = {"ep": columns[tp].communicators[ep], "tp": rows[ep].communicators[tp]}
            return _run(inner.graph, mine, 2, bound(peers))

        found = Threads(4).run(work)
    assert [f.loss.item() for f in found] == pytest.approx([w.loss.item() for w in whole for _ in range(2)], rel=1e-9)
    gradients = {}
    for t in found[0].gradients:
        halves = [f.gradients[t] for f in found]
        if halves[0] is not None:
            of_ep = [together(halves[i : i + 2], placed[t][1], is_gradient=True) for i in (0, 2)]
            gradients[t] = torch.cat(of_ep) if placed[t][0].is_split else _sum(of_ep)
    wanted = {t: _sum([w.gradients[t] for w in whole]) for t in gradients}
    assert_equal(graph, replace(whole[0], gradients=gradients, buffers={}), replace(whole[0], gradients=wanted))


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "degree", "message"),
    [
        ("gpt", 2, "no grouped product"),
        ("moe", 3, "ep=3 does not divide the 4 experts"),
    ],
)
def test_what_cannot_be_spread_is_said(name, degree, message):
    with pytest.raises(PlanError, match=message):
        spread_experts(graph_of(name), degree)
    assert numbers_of_experts(graph_of(name)) == ({4} if name == "moe" else set())


@pytest.mark.parametrize("fault", ["over rows", "not undone", "counts in the loss"])
def test_an_order_that_shows_is_not_spread(fault):
    x = {"x": torch.randn(3, 6, 8)}
    with pytest.raises(PlanError, match="no grouped product"):
        spread_experts(trace(Experts(fault), x), 2)
    assert spread_experts(trace(Experts(), x, device_kind="cpu"), 2)
