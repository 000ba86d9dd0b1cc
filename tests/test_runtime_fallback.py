"""Models that have no graph train without one, with the user's own gradients."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests import models
from tests.distributed_cases import Result, train_without_graph, unusual, unusual_batch
from tests.distributed_references import STEPS
from tests.ranks import RankPool, run_ranks

pytestmark = pytest.mark.distributed


def eager(what: str) -> Result:
    """Three clipped steps on one device with six micro-batches: those of two ranks with three each."""
    model = unusual(what)
    optimizer = models.sgd(model.named_parameters())
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    for step in range(STEPS):
        batch = unusual_batch(step)
        parts = [{k: v.chunk(6)[i] for k, v in batch.items()} for i in range(6)]
        total = 0.0
        for part in parts:
            loss = model(**part)
            (loss / 6).backward()
            total += loss.item() / 6
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return Result(losses=losses, norms=norms, first_gradients=gradients, state=state)


@pytest.mark.parametrize(
    "what",
    ["function", "parameter hook", "activation hook", "skipped layers", "experts", "containers", "gradient penalty"],
)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_model_without_a_graph_trains_with_the_eager_gradients(two: RankPool, zero: int, what: str) -> None:
    wanted = eager(what)

    for found in two.run(train_without_graph, what, zero):
        assert found.losses == pytest.approx(wanted.losses, rel=1e-9)
        assert found.norms == pytest.approx(wanted.norms, rel=1e-9)
        assert found.first_gradients.keys() == wanted.first_gradients.keys()
        for name, gradient in wanted.first_gradients.items():
            torch.testing.assert_close(found.first_gradients[name], gradient, rtol=1e-9, atol=1e-15)
        for name, value in wanted.state.items():
            torch.testing.assert_close(found.state[name], value, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hybrid_sharding_without_a_graph_trains_with_the_eager_gradients(tmp_path: Path, zero: int) -> None:
    wanted = eager("function")

    for found in run_ranks(4, train_without_graph, "function", zero, 2, tmp_path=tmp_path, timeout_seconds=100):
        assert found.losses == pytest.approx(wanted.losses, rel=1e-9)
        assert found.norms == pytest.approx(wanted.norms, rel=1e-9)
        for name, value in wanted.state.items():
            torch.testing.assert_close(found.state[name], value, rtol=1e-9, atol=1e-15)


def test_the_hook_and_the_function_change_the_gradients() -> None:
    plain = eager("nothing").first_gradients["layers.0.weight"]

    for what in ("function", "parameter hook", "activation hook"):
        assert not torch.allclose(eager(what).first_gradients["layers.0.weight"], plain)


def test_ranks_skip_different_layers_and_some_layer_is_skipped_by_all() -> None:
    called: list[set[int]] = []
    model = unusual("skipped layers")
    assert isinstance(model.layers, nn.ModuleList)
    for index, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: called[-1].add(index))
    by_step = []
    for step in range(STEPS):
        for part in range(6):
            called.append(set())
            model(**{k: v.chunk(6)[part] for k, v in unusual_batch(step).items()})
        by_step.append(set().union(*called[-6:]))

    assert len({frozenset(layers) for layers in called}) > 1
    assert set().union(*called[:3]) != set().union(*called[3:6])
    assert any(len(layers) < 4 for layers in by_step)
