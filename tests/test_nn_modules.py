"""Every module of torch.nn in a tiny model: split over ranks it is what one device computes, or there is a sentence."""

import pytest
import torch

from planner.errors import PlannerError
from planner.search import search_model
from planner.shard.localize import localize
from planner.shard.program import variants
from planner.shard.stored import restored, stored
from planner.trace import priced, trace
from tests.nn_modules import BATCH, CASES
from tests.sharded import assert_equal, run_localized, run_whole, values_of
from tests.test_shard_families import SLOW_ARITHMETIC

# What has no graph, no price or no place in a plan, and what is said of it; each with the user's line.
REFUSED = {
    "LSTM of time first": "put the samples in dim 0 and time in dim 1",
    "FractionalMaxPool3d": "the backward of aten.fractional_max_pool3d.default cannot run on fake tensors",
    "MultiLabelMarginLoss": "the backward of aten.multilabel_margin_loss.default cannot run on fake tensors",
    "SyncBatchNorm": "use BatchNorm, whose running statistics are merged",
    "AdaptiveLogSoftmaxWithLoss": "the model cannot run on fake tensors",
    "CTCLoss": "the model cannot run on fake tensors",
    "GaussianNLLLoss": "the model cannot run on fake tensors",
}
SOME = ("Bilinear", "cdist", "EmbeddingBag, max", "TripletMarginLoss", "ReLU in place")


def assert_planned_and_equal(name):
    case = CASES[name]
    model, batch = case.model(), case.batch()
    graph = trace(case.model(), batch, precision="fp64")
    assert not graph.fallbacks
    values = values_of(graph, model, batch)
    loss = model(**batch)
    wanted = run_whole(graph, values, BATCH)
    torch.testing.assert_close(wanted.loss, loss.detach(), rtol=1e-9, atol=0)
    for variant in variants(graph, 2, SLOW_ARITHMETIC):
        local = localize(graph, variant.shardings, 2)
        assert_equal(graph, run_localized(local, 2, values, BATCH), wanted)
        assert restored(graph, *stored(variant.shardings), 2) == variant.shardings
        for kind in ("cpu", "cuda"):
            priced(local.graph, graph, 2, kind)
    search_model(case.model(), "1x2xA100-80GB", batch=batch, precision="fp32", global_batch=8, top=1)


@pytest.mark.parametrize("name", SOME)
def test_a_module_is_planned_and_its_parts_give_what_one_device_gives(name):
    assert_planned_and_equal(name)


@pytest.mark.parametrize("name", ["LSTM of time first", "MultiLabelMarginLoss", "GaussianNLLLoss"])
def test_a_module_that_cannot_be_planned_is_refused_with_its_line(name):
    assert_refused(name)


def assert_refused(name):
    case = CASES[name]
    try:
        graph = trace(case.model(), case.batch(), precision="fp64")
        said = str(graph.fallbacks[0])  # it trains without a graph
    except PlannerError as error:
        said = str(error)
    assert REFUSED[name] in said
    assert "nn_modules.py:" in said or name == "SyncBatchNorm"


@pytest.mark.families
@pytest.mark.parametrize("name", list(CASES))
def test_every_module_is_planned_and_equal_or_refused_with_its_line(name):
    (assert_refused if name in REFUSED else assert_planned_and_equal)(name)
