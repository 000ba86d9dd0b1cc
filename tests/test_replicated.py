"""What a plan says of work that ranks do alike, of degrees that share out nothing, and of what it cannot price."""

import re

import pytest
import torch
from torch import nn

from planner import ranked_plans
from planner.errors import PlanError, PlannerError
from planner.search import search_model
from planner.trace import trace


def notes_of(model, fix, shape=(8, 6, 16), cluster="1x2xA100-80GB", batch_size=8):
    found = search_model(
        model, cluster, batch={"x": torch.zeros(shape)}, precision="fp32", global_batch=batch_size, fix=fix, top=1
    )
    return found.plans[0].notes


def line_of(function, offset=1):
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno + offset}"


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.remembers, self.last = nn.Linear(16, 64), nn.LSTM(64, 15, batch_first=True), nn.Linear(15, 3)

    def forward(self, x):
        x, _ = self.remembers(self.first(x).relu())
        return self.last(x).square().mean()


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(15, 9, bias=False), nn.Linear(9, 15, bias=False)

    def forward(self, x):
        x = self.first(x)
        return self.second(x).square().mean()


def test_what_ranks_do_alike_is_named_with_its_line_its_share_and_the_reason():
    (note,) = notes_of(Recurrent(), "tp=2", shape=(8, 5, 16))

    assert re.match(r"[0-9.]+% of the model's FLOP run on all 2 tensor-parallel ranks alike: ", note)
    assert re.search(
        rf"aten\.lstm\.input of \S+ \({line_of(Recurrent.forward)}, [0-9.]+%\): there is no sharding rule for it", note
    )
    assert re.search(
        rf"aten\.linear\.default of \S+ \({line_of(Recurrent.forward, 2)}, [0-9.]+%\): 2 does not divide 3, 5, 15", note
    )
    assert note.index("lstm") < note.index("linear")  # the larger share first


@pytest.mark.parametrize("fix", ["tp=2", "cp=2"])
def test_a_fixed_degree_that_shares_out_nothing_is_refused_with_the_reason(fix):
    axis = fix[:2]
    with pytest.raises(PlanError) as error:
        notes_of(Odd(), fix, shape=(8, 15))

    assert str(error.value).startswith(f"{fix} would share out nothing: over {axis} aten.linear.default of ")
    assert f"({line_of(Odd.forward)}, " in str(error.value)
    assert "2 does not divide 9, 15" in str(error.value)
    assert str(error.value).endswith("; leave it out or fix another degree")
    assert notes_of(Odd(), None, shape=(8, 15)) == ()


def test_a_fixed_degree_is_taken_where_it_only_costs():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            return self.second(self.first(x).relu()).square().mean()

    for fix, splits in ({"tp": 2}, (("tp", 2),)), ({"cp": 2, "tp": 2}, (("cp", 2), ("tp", 2))):
        batch = torch.randn(8, 4, 16)
        plan = ranked_plans(Small(), "1x4xA100-80GB", batch=batch, precision="fp32", global_batch=8, fix=fix, top=1)[0]
        assert plan.mesh.splits == splits


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)

    def forward(self, x):
        return self.norm(self.first(x)).square().mean()


def test_buffers_that_forward_updates_are_mentioned_where_it_matters_with_the_line():
    one = "dp=1,micro_batch=8"
    several, ranks = "dp=1,micro_batch=4", "dp=2,micro_batch=4"
    told = [[n for n in notes_of(Normed(), fix, (8, 16)) if "updates buffers" in n] for fix in (one, several, ranks)]

    assert told[0] == []
    for (note,) in told[1:]:
        assert note.startswith(f"{line_of(Normed.forward)}: forward updates buffers")


@torch.library.custom_op("planner_tests::mix_mm", mutates_args=())
def mix_mm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


@mix_mm.register_fake
def _(x, weight):
    return x @ weight


def _saved(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _mixed_back(ctx, grad):
    x, weight = ctx.saved_tensors
    return grad @ weight.t(), x.t() @ grad


mix_mm.register_autograd(_mixed_back, setup_context=_saved)


class Mixes(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 16))

    def forward(self, x):
        return mix_mm(x, self.weight).square().mean()


def test_an_operator_without_flop_formula_is_planned_and_mentioned_once():
    notes = [note for note in notes_of(Mixes(), "dp=1,devices=1", (8, 16)) if "FLOP formula" in note]

    assert notes == [
        "operator planner_tests.mix_mm.default has no FLOP formula and is priced by its bytes alone; give it one with "
        "torch.utils.flop_counter.register_flop_formula(torch.ops.planner_tests.mix_mm)"
    ]


class NoLoss(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.first, self.way = nn.Linear(4, 4), way

    def forward(self, x):
        return {
            "vector": lambda: self.first(x),
            "none": lambda: None,
            "of the batch": lambda: x.mean(),
            "constant": lambda: torch.tensor(1.0),
        }[self.way]()


@pytest.mark.parametrize("way", ["vector", "none", "of the batch", "constant"])
def test_what_is_no_loss_is_refused_with_the_line_of_forward(way):
    with pytest.raises(PlannerError, match=rf"^{line_of(NoLoss.forward, 0)}: the (model returns|loss)"):
        trace(NoLoss(way), {"x": torch.zeros(2, 4)}, precision="fp32")


def test_a_loss_function_without_a_loss_is_refused_with_its_line():
    def loss_fn(output, batch):
        return output

    with pytest.raises(PlannerError, match=rf"^{line_of(loss_fn, 0)}: loss_fn returns a tensor of shape \[2, 4\]"):
        trace(NoLoss("vector"), {"x": torch.zeros(2, 4)}, precision="fp32", loss_fn=loss_fn)
