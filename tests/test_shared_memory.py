"""Parameters and buffers that are views of one another are refused where that would show."""

from typing import cast

import pytest
import torch
from torch import Tensor, nn

from planner.errors import ModelError
from planner.trace import trace


class Views(nn.Module):
    """A buffer, and a view of it that forward reads before and after it writes to the buffer."""

    base: Tensor
    view: Tensor

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("base", torch.ones(8))
        self.register_buffer("view", self.base.view(2, 4))
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        before = self.view * 2
        if self.writes:
            self.base.add_(1.0)
        after = self.view * 2
        loss: Tensor = (self.linear(x) * before.flatten() + after.flatten()).square().mean()
        return loss


def test_a_buffer_written_behind_the_back_of_its_view_is_refused() -> None:
    batch = torch.randn(4, 8)

    with pytest.raises(ModelError, match="base and view share memory, and forward writes to it; make one of the other"):
        trace(Views(writes=True), batch, device_kind="cpu")
    assert not trace(Views(writes=False), batch, device_kind="cpu").fallbacks


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_that_share_memory_without_being_one_are_refused(device: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    model[1].weight = nn.Parameter(cast("Tensor", model[0].weight).detach().T)

    with pytest.raises(ModelError, match=r"0\.weight and 1\.weight share memory without being one parameter"):
        trace(model, torch.randn(4, 8), loss_fn=lambda y, _: y.square().mean(), device_kind="cpu")


def test_pieces_of_one_allocation_and_tied_parameters_are_none_of_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    flat = torch.randn(2, 8, 8)
    for layer, weight in zip(model, flat, strict=False):
        layer.weight = nn.Parameter(weight)
    model[2].weight = model[0].weight

    assert not trace(model, torch.randn(4, 8), loss_fn=lambda y, _: y.square().mean(), device_kind="cpu").fallbacks
