"""Dropout and other random operators: the same elements whatever the plan, and right as random numbers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.graph import Graph
from planner.runtime.random import Draw, Draws, RandomSource, seed_of, seeded
from planner.trace import trace
from tests.distributed_cases import Kind, relative
from tests.random_cases import (
    SAMPLES,
    WHAT,
    batch_of,
    graph_of,
    kept_of_each_sample,
    train,
    without_graph,
)
from tests.ranks import RankPool

TOLERANCE = 1e-9
CPU = torch.device("cpu")

Trained = tuple[list[float], dict[str, Tensor]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("random")


@pytest.fixture(scope="module")
def expected(folder: Path) -> Trained:
    """One rank, the whole batch as one micro-batch."""
    with RankPool(1, folder) as pool:
        found: Trained = pool.run(train, Kind(name=""), 1)[0]
        return found


def check(results: list[Trained], expected: Trained) -> None:
    wanted_losses, wanted = expected
    for losses, state in results:
        assert max(abs(a / b - 1) for a, b in zip(losses, wanted_losses, strict=True)) < TOLERANCE
        assert state.keys() == wanted.keys()
        assert max(relative(state[key], value) for key, value in wanted.items()) < TOLERANCE


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "num_microbatches"),
    [
        (Kind(name="", dp=2), 1),
        (Kind(name="", dp=2, zero=(3,), recompute=("full",)), 2),
        (Kind(name="", pp=2), 2),
        (Kind(name="", pp=2, schedule="gpipe", recompute=("full",)), 4),
    ],
    ids=["dp2", "dp2 zero3 recompute", "pp2", "pp2 gpipe recompute"],
)
def test_the_same_elements_are_dropped_on_two_ranks(
    two: RankPool, expected: Trained, kind: Kind, num_microbatches: int
) -> None:
    check(two.run(train, kind, num_microbatches), expected)


@pytest.mark.distributed
def test_the_same_elements_are_dropped_on_four_ranks(folder: Path, expected: Trained) -> None:
    with RankPool(4, folder) as pool:
        check(pool.run(train, Kind(name="", pp=2, dp=2, zero=(3,), recompute=("none", "full")), 2), expected)
        check(pool.run(train, Kind(name="", dp=4, shards=2, zero=(3,)), 2), expected)


@pytest.mark.distributed
def test_every_sample_layer_and_step_draws_its_own(two: RankPool) -> None:
    """On two data ranks: the ranks' samples, too, differ from each other."""
    (mine, other) = two.run(kept_of_each_sample, Kind(name="", dp=2, zero=(1,)), 3)
    masks = [gradient for step in mine for sample in step for gradient in sample]

    assert all(torch.equal(a, b) for a, b in zip(masks, (g for t in other for s in t for g in s), strict=True))
    assert len(masks) == 3 * SAMPLES * 2
    assert {value for mask in masks for value in mask.tolist()} == {0.0, 1 / 0.75}
    layers = [layer for step in mine for layer in step]
    steps = [(a[0], b[0]) for a, b in zip(mine[0] + mine[1], mine[1] + mine[2], strict=True)]
    samples = [(step[i][0], step[j][0]) for step in mine for i in range(SAMPLES) for j in range(i)]
    for pairs in (layers, steps, samples):
        # Two independent masks of six elements agree with probability (0.75^2 + 0.25^2)^6 = 0.06.
        assert sum(torch.equal(a, b) for a, b in pairs) / len(pairs) < 0.3


@pytest.mark.distributed
def test_a_run_is_repeatable_and_the_seed_matters(two: RankPool) -> None:
    kind = Kind(name="", dp=2)
    (first, _), (again, _), (other, _) = (two.run(train, kind, 2, seed)[0] for seed in (0, 0, 1))

    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


@pytest.mark.distributed
def test_without_a_graph_runs_are_repeatable_and_data_ranks_differ(two: RankPool, folder: Path) -> None:
    (first, _), (again, _), (other, _) = (two.run(without_graph, seed) for seed in (0, 0, 1))
    with RankPool(1, folder) as pool:
        (alone,) = pool.run(without_graph, 0)

    assert first == again
    assert first != other
    assert first != alone  # the second rank has the same samples and drops others


def test_no_random_operator_is_missed() -> None:
    for what in WHAT:
        assert len(graph_of((what,) * 4).dropout_nodes) >= 4, what


def test_the_rate_is_kept_and_the_mean_preserved() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(500))

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x * self.weight, 0.1).mean()

    x = torch.ones(400, 500)
    graph = trace(Alone(), {"x": x}, precision="fp32", device_kind="cpu")
    (index,) = (i for i, node in enumerate(graph.nodes) if node.is_random)
    out = Draw(graph, index, device=CPU)(Draws(0, 0, 0), 400, x)

    kept = (out != 0).double()
    assert kept.mean().item() == pytest.approx(0.9, abs=4 * (0.09 / kept.numel()) ** 0.5)
    assert out.mean().item() == pytest.approx(1.0, abs=4 * (0.1 / 0.9 / kept.numel()) ** 0.5)
    # Samples, and neighbours within one, are independent: the correlation is noise.
    centred = kept - kept.mean()
    for a, b in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
        assert abs((a * b).mean().item() / 0.09) < 5 / a.numel() ** 0.5


def test_a_rate_of_zero_costs_nothing() -> None:
    class Off(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.dropout = nn.Dropout(0.0)
            self.off = nn.Dropout(0.5).eval()

        def forward(self, x: Tensor) -> Tensor:
            return self.off(self.dropout(self.linear(x))).square().mean()  # type: ignore[no-any-return]

    model = Off()
    graph = trace(model, {"x": torch.ones(2, 4)}, device_kind="cpu")

    assert not any(node.is_random for node in graph.nodes)
    assert not graph.dropout_nodes


def test_dropout_keeps_a_mask_of_one_byte_an_element() -> None:
    graph = graph_of(("dropout",) * 4)
    draw = first_draw(graph)
    x = torch.ones(SAMPLES, 6, 8, dtype=torch.float64, requires_grad=True)
    kept: list[tuple[torch.dtype, int]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append((tensor.dtype, tensor.numel()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = draw(Draws(0, 0, 0), SAMPLES, x)

    assert kept == [(torch.bool, x.numel())]
    y.backward(torch.full_like(y, 2.0))
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * y.detach())


def first_draw(graph: Graph) -> Draw:
    return Draw(graph, graph.dropout_nodes[0], device=CPU)


def test_without_draws_numbers_come_from_torch_as_in_the_plain_module() -> None:
    graph = graph_of(("dropout",) * 4)
    draw = first_draw(graph)
    x = torch.ones(SAMPLES, 6, 8)
    torch.manual_seed(5)
    mine = draw(None, SAMPLES, x)
    torch.manual_seed(5)
    assert torch.equal(mine, F.dropout(x, 0.3))


def test_the_users_generator_comes_back_even_after_an_error() -> None:
    before = torch.get_rng_state()
    with pytest.raises(IndexError), seeded(3, CPU):
        torch.rand(3)[3]
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_follow_the_global_batch() -> None:
    one = RandomSource(7).next_step(0, [8])[0]
    parts = [d for rank in range(2) for d in RandomSource(7).next_step(4 * rank, [2, 2])]

    assert [one.of_sample(3, s) for s in range(8)] == [d.of_sample(3, s) for d in parts for s in range(2)]
    assert len({d.of_step(3) for d in parts}) == 1
    assert seed_of(1, 23) != seed_of(12, 3)
    source = RandomSource(7)
    assert source.next_step(0, [8])[0] == one
    assert source.next_step(0, [8])[0] != one


def test_an_order_of_the_samples_is_drawn_for_a_micro_batch_as_one() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return (x + x[torch.randperm(x.shape[0])]).square().mean()

    graph = trace(Mixing(), {"x": torch.ones(2, 4)}, device_kind="cpu")
    draw = Draw(graph, graph.dropout_nodes[0], device=CPU)
    orders = [draw(Draws(0, 0, first), 16).tolist() for first in (0, 16)]

    assert not draw.is_by_sample
    assert all(sorted(order) == list(range(16)) for order in orders)
    assert orders[0] != orders[1]


def test_samples_are_found_behind_a_merged_dim() -> None:
    graph = graph_of(("sequence first",) * 4)
    (rows,) = {graph.sample_runs[n.outputs[0] or 0] for n in graph.nodes if n.op == "aten.dropout.default"}
    assert rows == 6
    assert all(graph.sample_runs[t] == 1 for t in graph.inputs)
    assert batch_of(0).keys() == {"tokens", "labels"}
