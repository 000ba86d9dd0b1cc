"""A forward with too many operators for a graph is refused in one sentence, before hours have passed."""

import pytest
import torch
from torch import Tensor, nn

from planner.errors import ModelError
from planner.trace import bounded, trace


class Recurrence(nn.Module):
    """A state that is updated step by step along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = torch.tanh(self.linear(x[:, step]) + state)
        return state.square().mean()


def test_a_long_loop_over_a_sequence_is_refused_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "MOST_CALLS", 1500)
    assert not trace(Recurrence(), {"x": torch.randn(2, 20, 4)}, device_kind="cpu").fallbacks

    with pytest.raises(ModelError, match=r"test_bounded.py:\d+: forward calls more than 1,500 .* a shorter sequence"):
        trace(Recurrence(), {"x": torch.randn(2, 400, 4)}, device_kind="cpu")
