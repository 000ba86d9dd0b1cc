"""Numbers made from the batch size, values that forward sets again and again, and conditions that guard errors."""

from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.graph import BatchNumber
from planner.trace import trace
from tests.test_trace import assert_equals_eager


def numbers(samples: int) -> dict[str, Tensor]:
    return {"x": torch.randn(samples, 3, 4, generator=torch.Generator().manual_seed(samples), dtype=torch.float64)}


class ByHand(nn.Module):
    """A mean whose divisor is a float that Python counted, `power` times."""

    def __init__(self, power: int = 1) -> None:
        super().__init__()
        self.power = power
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = 0.0 + x.shape[0] * x.shape[1]
        loss: Tensor = self.linear(x).square().sum() / rows**self.power
        return loss


def test_a_float_that_counts_rows_follows_the_micro_batch() -> None:
    torch.manual_seed(0)
    model = ByHand().double()
    graph = trace(model, numbers(2), precision="fp64", device_kind="cpu")

    assert not graph.fallbacks, graph.fallbacks
    assert (graph.couples_samples, graph.not_separable) == ("", "")
    assert any(BatchNumber(3) in node.args for node in graph.nodes)
    for samples in (1, 2, 5):
        assert_equals_eager(graph, model, numbers(samples))


def test_the_square_of_the_batch_size_is_no_multiple_of_it() -> None:
    graph = trace(ByHand(power=2).double(), numbers(2), precision="fp64", device_kind="cpu")

    assert "square of the batch size" in str(graph.fallbacks[0])
    assert graph.couples_samples


class Remembering(nn.Module):
    """Sets a Python value in forward: to the same each time, or counting, or only after it was read."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(4, 4)
        self.size = 0

    def forward(self, x: Tensor) -> Tensor:
        before = self.size
        self.size = self.size + 1 if self.how == "counts" else x.shape[1]
        scale = before if self.how == "reads before" else self.size
        loss: Tensor = self.linear(x).square().mean() * (1 + scale)
        return loss


def test_a_value_that_forward_sets_to_the_same_again_is_no_obstacle() -> None:
    torch.manual_seed(0)
    model = Remembering("same").double()
    graph = trace(model, numbers(2), precision="fp64", device_kind="cpu")

    assert not graph.fallbacks, graph.fallbacks
    assert_equals_eager(graph, model, numbers(3))


@pytest.mark.parametrize("how", ["counts", "reads before"])
def test_a_value_that_goes_on_changing_has_no_graph(how: str) -> None:
    graph = trace(Remembering(how).double(), numbers(2), precision="fp64", device_kind="cpu")

    assert "forward changes the Python value" in str(graph.fallbacks[0])


class Held:
    """A plain object that a model keeps."""

    calls = 0


class Keeping(nn.Module):
    """Keeps something in a container: over its calls, or filled once, or made anew in each."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(4, 4)
        self.items: list[Any] = [0]
        self.table: dict[Any, Any] = {"calls": 0}
        self.held = Held()
        self.array = np.zeros(1)
        self.memory: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """The scalar loss."""
        y: Tensor = self.linear(x)
        return cast("Tensor", y * getattr(self, f"_{self.how}")(y)).square().mean()

    def _list(self, y: Tensor) -> float:
        self.items.append(1)
        return len(self.items)

    def _dict(self, y: Tensor) -> float:
        self.table["calls"] += 1
        return float(self.table["calls"])

    def _object(self, y: Tensor) -> float:
        self.held.calls += 1
        return self.held.calls

    def _array(self, y: Tensor) -> float:
        self.array += 1
        return float(self.array[0])

    def _grows(self, y: Tensor) -> Tensor | float:
        self.memory.append(y.detach().mean(0))
        return self.memory[-2] if len(self.memory) > 1 else 1.0

    def _replaces(self, y: Tensor) -> Tensor | float:
        before = self.memory[0] if self.memory else 1.0
        self.memory[:1] = [y.detach().mean(0)]
        return before

    def _first(self, y: Tensor) -> Tensor:
        if not self.memory:  # that of the first batch for good
            self.memory.append(y.detach().mean(0))
        return self.memory[0]

    def _cached(self, y: Tensor) -> Tensor:
        if y.shape[1] not in self.table:
            self.table[y.shape[1]] = torch.arange(y.shape[1], dtype=y.dtype)[:, None]
        return cast("Tensor", self.table[y.shape[1]])

    def _cached_number(self, y: Tensor) -> float:
        return float(self.table.setdefault(y.shape[1], 2.5))

    def _anew(self, y: Tensor) -> Tensor:
        self.memory = []
        self.memory.append(y.mean(1, keepdim=True))
        return self.memory[0]


@pytest.mark.parametrize("how", ["list", "dict", "object", "array", "grows", "replaces", "first"])
def test_a_container_that_tells_the_next_forward_something_has_no_graph(how: str) -> None:
    graph = trace(Keeping(how).double(), numbers(2), precision="fp64", device_kind="cpu")

    name = {"list": "items", "dict": "table", "object": "held", "array": "array"}.get(how, "memory")
    assert f"forward changes the Python value {name}" in graph.fallbacks[0].reason
    assert "test_traced_values.py:" in graph.fallbacks[0].source
    assert "keep it in a buffer" in graph.fallbacks[0].cure


@pytest.mark.parametrize("how", ["cached", "cached_number", "anew"])
def test_a_container_filled_once_or_made_anew_is_no_obstacle(how: str) -> None:
    torch.manual_seed(0)
    model = Keeping(how).double()
    graph = trace(model, numbers(2), precision="fp64", device_kind="cpu")

    assert not graph.fallbacks, graph.fallbacks
    assert_equals_eager(graph, model, numbers(3))


class Guarded(nn.Module):
    """Looks at its labels, and has a loss whose shapes torch does not know beforehand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if labels.max() >= 4:
            raise ValueError("labels must be below 4")
        for layer in self.layers:
            x = layer(x)
        lengths = torch.full((x.shape[0],), x.shape[1], device=x.device)
        targets = torch.ones(x.shape[0], dtype=torch.long, device=x.device)
        return F.ctc_loss(x.log_softmax(-1).transpose(0, 1), labels, lengths, targets)


@pytest.mark.parametrize("device_kind", ["cuda", "cpu"])
def test_a_model_that_guards_against_bad_labels_is_priced(device_kind: str) -> None:
    batch = {"x": torch.randn(2, 3, 4), "labels": torch.randint(1, 4, (2, 2))}
    graph = trace(Guarded(), batch, device_kind=device_kind)  # type: ignore[arg-type]

    assert "test_traced_values.py:" in str(graph.fallbacks[0])
    kernels = [k.op for kind in graph.classes for k in kind.kernels]
    assert any("_ctc_loss_backward" in op for op in kernels), kernels
