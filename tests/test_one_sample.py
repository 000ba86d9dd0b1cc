"""A batch norm that has one value per channel in a sample has no variance in a micro-batch of one: eager refuses it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from planner.errors import PlanError, RunError
from planner.runtime.blocks import boundary_examples
from planner.runtime.inputs import shared_out
from planner.runtime.trainer import _check_plan
from planner.search import ranked_plans
from planner.trace import trace

BATCH = {"x": torch.zeros(4, 8)}


class Normed(nn.Module):
    def __init__(self, tokens=1):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.tokens = tokens

    def forward(self, x):
        x = self.first(x)
        return self.last(self.norm(x.view(-1, 8)).relu()).square().mean()


LINE = f"{Normed.forward.__code__.co_filename}:{Normed.forward.__code__.co_firstlineno + 2}"
REASON = f"{LINE}: a batch norm has one value per channel in a sample"


def plans(fix, batch=BATCH, global_batch=2):
    return ranked_plans(
        Normed(), "1x2xA100-80GB", batch=batch, precision="fp32", global_batch=global_batch, fix=fix, top=9
    )


def test_micro_batches_of_one_sample_are_never_planned():
    assert {plan.micro_batch for plan in plans(None)} == {2}
    for fix in ("micro_batch=1", "pp=2,micro_batch=1", "dp=2"):
        with pytest.raises(PlanError, match=f"^{REASON}, so a micro-batch needs at least 2 samples"):
            plans(fix)


def test_a_sample_of_several_tokens_may_be_alone():
    assert plans("micro_batch=1", batch={"x": torch.zeros(4, 2, 8)})[0].micro_batch == 1


def test_such_a_plan_is_refused_before_training():
    graph = trace(Normed(), BATCH, precision="fp32")
    plan = replace(plans("dp=1,devices=1")[0], micro_batch=1, num_microbatches=2)
    with pytest.raises(PlanError, match=f"^{REASON}, and the plan's micro-batches are one sample; plan again"):
        _check_plan(plan, graph)


def test_a_batch_that_leaves_a_micro_batch_one_sample_is_refused():
    with pytest.raises(
        RunError, match="why, and data rank 0 has 3 samples for 2 micro-batches; give at least 2 for each"
    ):
        shared_out([3], 0, micro_batch=2, num_microbatches=2, needs_two="why")
    assert shared_out([4], 0, micro_batch=2, num_microbatches=2, needs_two="why").sizes == (2, 2)
    assert shared_out([3], 0, micro_batch=2, num_microbatches=2).sizes == (2, 1)


def test_an_operator_that_fails_on_what_a_stage_sends_is_said_with_its_line():
    graph = trace(Normed(), BATCH, precision="fp32")
    with pytest.raises(PlanError, match=rf"^{LINE}: operator aten\.batch_norm\.default fails for 1 samples with Zero"):
        boundary_examples(graph, [0], 1)
