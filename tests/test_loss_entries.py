"""Entries of a batch that forward has no parameter for are the loss function's: labels."""

import pytest
import torch
from torch import nn

from planner.errors import ModelError
from planner.trace import trace
from planner.trace.batch import not_taken
from tests.distributed_cases import Kind
from tests.loss_cases import Branching, Classifier, batch_of, eager_losses, loss_fn, planned_losses
from tests.ranks import RankPool

KINDS = {
    "data parallel": Kind(name="", dp=2, zero=(1,)),
    "pipeline": Kind(name="", pp=2),
    "tensor parallel": Kind(name="", tp=2),
}


@pytest.mark.distributed
@pytest.mark.parametrize("batch", ["tuple", "dict", "nested"])
@pytest.mark.parametrize("kind", KINDS)
def test_labels_that_only_the_loss_reads_train_as_on_one_device(two: RankPool, kind: str, batch: str) -> None:
    wanted = eager_losses(Classifier)

    for losses, evaluated in two.run(planned_losses, Classifier, KINDS[kind], batch):
        assert [*losses, evaluated] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.distributed
def test_labels_go_to_the_loss_alone_without_a_graph_too(two: RankPool) -> None:
    wanted = eager_losses(Branching)

    for losses, evaluated in two.run(planned_losses, Branching, KINDS["data parallel"], "tuple"):
        assert [*losses, evaluated] == pytest.approx(wanted, rel=1e-9)


def test_what_forward_takes_is_read_from_its_signature() -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor, *more: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
            return x

    assert not_taken(Classifier(), batch_of("tuple")) == ("1",)
    assert not_taken(Classifier(), batch_of("dict")) == ("labels",)
    assert not_taken(Classifier(), torch.ones(2)) == ()
    assert not_taken(Wide(), batch_of("tuple")) == ()
    assert not_taken(Wide(), batch_of("dict")) == ()


def test_an_entry_that_neither_forward_nor_the_loss_reads_is_refused() -> None:
    batch = {**batch_of("dict"), "wieght": torch.ones(12)}

    with pytest.raises(ModelError, match=r"neither forward\(x.*nor loss_fn computes with 'wieght'.*leave it out"):
        trace(Classifier().double(), batch, loss_fn=loss_fn, precision="fp64", device_kind="cpu")


def test_without_a_loss_function_every_entry_goes_to_forward() -> None:
    with pytest.raises(ModelError, match=r"takes 2 positional arguments.*loss_fn\(output, batch\)"):
        trace(Classifier().double(), batch_of("tuple"), precision="fp64", device_kind="cpu")
