"""What a step's batch may differ in from the one that was traced."""

import pytest
import torch
from torch import Tensor, nn

from planner.errors import RunError
from planner.runtime.inputs import Inputs
from planner.trace import trace


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        loss: Tensor = (self.linear(x) * scale).square().mean()
        return loss


def test_a_setting_that_differs_from_the_traced_one_is_refused():
    x = torch.randn(4, 4)
    graph = trace(Scaled(), {"x": x, "scale": 2.0})
    inputs = Inputs(graph, device=torch.device("cpu"))

    assert inputs.check({"x": x, "scale": 2.0}).samples == 4
    for batch in ({"x": x, "scale": 3.0}, {"x": x, "scale": 2.0, "flag": "on"}):
        with pytest.raises(RunError, match="which the model was not traced with"):
            inputs.check(batch)


def test_a_setting_is_part_of_what_a_plan_was_made_for():
    x = torch.randn(4, 4)

    assert trace(Scaled(), {"x": x, "scale": 2.0}).fingerprint != trace(Scaled(), {"x": x, "scale": 3.0}).fingerprint
