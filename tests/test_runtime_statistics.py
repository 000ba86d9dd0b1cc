"""Buffers that forward updates: after any plan those of one device that runs the same micro-batches in order."""

import itertools
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from planner.cluster import Cluster
from planner.errors import ModelError, PlanError
from planner.graph import Graph
from planner.runtime.statistics import _of_mean, _of_recursion
from planner.search import search
from planner.trace import trace
from tests.distributed_cases import Kind, relative
from tests.ranks import RankPool
from tests.statistics_cases import (
    MERGED,
    REFUSED,
    SAMPLES,
    Keeping,
    Layer,
    Trained,
    batch_of,
    on_one_device,
    refused,
    train,
)

TOLERANCE = 1e-9


def check(results: list[Trained], expected: Trained) -> None:
    wanted_losses, wanted = expected
    for losses, state in results:
        assert max(abs(a / b - 1) for a, b in zip(losses, wanted_losses, strict=True)) < TOLERANCE
        assert state.keys() == wanted.keys()
        errors = {name: relative(state[name], value) for name, value in wanted.items()}
        assert max(errors.values()) < TOLERANCE, errors
        assert all(torch.equal(state[n], v) for n, v in wanted.items() if not v.is_floating_point())


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kind", "num_microbatches"),
    [
        (Kind(name="", dp=2), 1),
        (Kind(name="", dp=2, zero=(1,), recompute=("none", "full")), 4),
        (Kind(name="", dp=2, zero=(3,), recompute=("full",)), 2),
        (Kind(name="", pp=2), 4),
    ],
    ids=["dp2", "dp2 zero1 some recompute", "dp2 zero3 recompute", "pp2"],
)
def test_buffers_are_those_of_one_device_on_two_ranks(two: RankPool, kind: Kind, num_microbatches: int) -> None:
    check(two.run(train, MERGED, kind, num_microbatches), on_one_device(MERGED, kind.dp * num_microbatches))


@pytest.mark.distributed
def test_buffers_are_those_of_one_device_on_four_ranks(tmp_path: Path) -> None:
    with RankPool(4, tmp_path) as pool:
        kind = Kind(name="", pp=2, dp=2, zero=(3,), recompute=("full", "none"))
        check(pool.run(train, MERGED, kind, 2), on_one_device(MERGED, 4))
        check(pool.run(train, MERGED, Kind(name="", dp=4, shards=2, zero=(1,)), 2), on_one_device(MERGED, 8))


@pytest.mark.distributed
def test_without_a_graph_norms_are_merged_and_a_mean_of_all_updates_is_one(two: RankPool) -> None:
    what = ("batch norm", "twice", "cumulative", "instance norm", "frozen", "last only")
    for zero in (0, 3):
        check(two.run(train, what, Kind(name="", dp=2, zero=(zero,)), 4, True), on_one_device(what, 8))


@pytest.mark.distributed
@pytest.mark.parametrize("what", REFUSED)
def test_what_ranks_cannot_merge_is_refused(two: RankPool, what: str) -> None:
    for with_graph, without in two.run(refused, what):
        assert with_graph.startswith("PlanError:")
        assert "statistics_cases.py:" in with_graph
        assert "layers.0.kept" in with_graph
        assert "dp=1" in with_graph
        assert without.startswith("RunError: forward updates buffer layers.0.kept by its samples")


@pytest.mark.distributed
def test_a_schedule_that_the_loss_uses_counts_the_steps_of_each_rank(two: RankPool) -> None:
    """The reference is one device with as many, larger micro-batches: all ranks have seen the same number."""
    what = ("schedule",) * 2
    kind = Kind(name="", dp=2)
    check(two.run(train, what, kind, 1), on_one_device(what, 1))
    check(two.run(train, what, kind, 1, True), on_one_device(what, 1))


def graph_of(*what: str) -> Graph:
    return trace(Keeping(what).double(), batch_of(0), precision="fp64", device_kind="cpu")


def test_decays_are_read_off_the_graph() -> None:
    graph = graph_of(*MERGED)
    decays = {graph.tensors[u.buffer].name.removeprefix("layers."): u.decay for u in graph.buffer_updates}

    assert graph.one_data_rank == ""
    assert decays.pop("3.norm.running_mean") == decays.pop("3.norm.running_var") == 0.0
    wanted = {
        "0.norm.running_mean": 0.8, "0.norm.running_var": 0.8, "0.norm.num_batches_tracked": 1.0,
        "1.norm.running_mean": 0.64, "1.norm.running_var": 0.64, "1.norm.num_batches_tracked": 1.0,
        "3.norm.num_batches_tracked": 1.0, "4.norm.running_mean": 0.9, "4.norm.running_var": 0.9,
        "5.kept": 0.9, "5.count": 1.0, "6.kept": 0.7, "6.count": 1.0, "7.kept": 0.8, "8.kept": 0.7, "9.kept": 1.0,
        "10.kept": 0.9, "11.kept": 1.0, "11.count": 1.0,
    }  # fmt: skip
    assert decays == pytest.approx(wanted)


@pytest.mark.parametrize("what", REFUSED)
def test_no_plan_has_data_ranks_that_cannot_merge(what: str) -> None:
    graph = trace(Keeping((what,) * 4), {k: v.float() for k, v in batch_of(0).items()}, precision="bf16")
    cluster = Cluster.load("1x4xA100-40GB")

    assert "statistics_cases.py:" in graph.one_data_rank
    assert not graph.buffer_updates
    assert all(plan.mesh.dp == 1 for plan in search(graph, cluster, global_batch=SAMPLES).plans)
    with pytest.raises(PlanError, match=r"dp=2 is not possible: .*statistics_cases.py:\d+: forward updates buffer"):
        search(graph, cluster, global_batch=SAMPLES, pins="dp=2")


def test_a_buffer_that_two_blocks_use_rules_a_pipeline_out() -> None:
    class Sharing(Keeping):
        def __init__(self) -> None:
            super().__init__(("instance norm",) * 4)
            for layer in self.layers:
                layer.norm = self.layers[0].norm

    graph = trace(Sharing().double(), batch_of(0), precision="fp64", device_kind="cpu")

    assert "uses buffer layers.0.norm.running_mean, which another block uses, too" in graph.reads_updates
    assert [u.decay for u in graph.buffer_updates] == pytest.approx([0.9**4] * 2)
    assert not graph_of(*MERGED).reads_updates


def test_buffers_that_are_made_from_each_other_need_one_data_rank() -> None:
    class Passing(Keeping):
        def __init__(self) -> None:
            super().__init__(("average",) * 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            first, second = (cast("Layer", layer) for layer in self.layers)
            second.kept.add_(first.kept)
            return super().forward(x, y)

    graph = trace(Passing().double(), batch_of(0), precision="fp64", device_kind="cpu")

    assert "statistics_cases.py:" in graph.one_data_rank
    assert "mixed with another buffer" in graph.one_data_rank


def test_synchronised_batch_norm_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    with pytest.raises(ModelError, match=r"module 1 is a SyncBatchNorm.*use BatchNorm"):
        trace(model, (torch.ones(2, 4),), loss_fn=lambda out, _: out.mean(), device_kind="cpu")


def test_a_view_of_a_buffer_that_is_written_counts_as_the_buffer() -> None:
    for what in ("sum", "part"):
        graph = graph_of(what)
        (written,) = {
            graph.tensors[t].name for n in graph.nodes for t in n.mutates if graph.tensors[t].kind == "buffer"
        }
        assert written == "layers.0.kept"
        assert graph.updates_statistics


@pytest.mark.parametrize("counts", [(1, 1), (3, 3, 3), (2, 0, 5, 1)])
@pytest.mark.parametrize("decay", [1.0, 0.9, 0.0])
def test_one_sum_gives_what_all_updates_in_order_give(counts: tuple[int, ...], decay: float) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, generator=generator, dtype=torch.float64)
    updates = [[torch.randn(4, generator=generator, dtype=torch.float64) for _ in range(n)] for n in counts]
    wanted = start.clone()
    for x in itertools.chain(*updates):
        wanted = decay * wanted + x
    pieces = []
    for rank, own in enumerate(updates):
        value = start.clone()
        for x in own:
            value = decay * value + x
        pieces.append(_of_recursion(start, value, decay, counts, rank))

    assert torch.allclose(pieces[0][0] + sum(part for _, part in pieces), wanted, rtol=1e-12)


def test_one_sum_gives_the_mean_of_all_updates() -> None:
    generator = torch.Generator().manual_seed(0)
    counts, before = (2, 0, 3), 4
    earlier = [torch.randn(4, generator=generator, dtype=torch.float64) for _ in range(before)]
    updates = [[torch.randn(4, generator=generator, dtype=torch.float64) for _ in range(n)] for n in counts]
    start = torch.stack(earlier).mean(0)
    number = torch.tensor(float(before), dtype=torch.float64)
    pieces = [
        _of_mean(start, torch.stack([*earlier, *own]).mean(0), number, counts, rank) for rank, own in enumerate(updates)
    ]
    wanted = torch.stack([*earlier, *itertools.chain(*updates)]).mean(0)

    assert torch.allclose(pieces[0][0] + sum(part for _, part in pieces), wanted, rtol=1e-12)


def test_a_value_that_is_replaced_may_have_been_infinite() -> None:
    start = torch.tensor([float("inf")], dtype=torch.float64)
    base, part = _of_recursion(start, torch.tensor([2.0], dtype=torch.float64), 0.0, (1, 1), 1)
    assert base + part == 2.0
