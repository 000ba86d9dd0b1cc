"""Two axes that split tensors in one plan, in the trainer, beside the equality matrix."""

from pathlib import Path

import pytest

from planner.shard.localize import localize
from tests import random_cases
from tests import tensor_parallel_cases as shared
from tests.distributed_cases import Kind, found_shardings, relative
from tests.ranks import RankPool

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-9
BOTH = Kind(name="", cp=2, tp=2, zero=(3,), variant="lean")


def test_all_ranks_are_checked_evaluate_and_save_what_one_device_has(four: RankPool, tmp_path: Path) -> None:
    for check, evaluated, errors in four.run(shared.checked_and_saved, BOTH, str(tmp_path / "saved")):
        assert "on 4 ranks of cp x tp" in check
        assert evaluated < TOLERANCE
        assert max(errors) < TOLERANCE


@pytest.mark.matrix
def test_gradients_of_several_calls_add_up(four: RankPool) -> None:
    assert max(four.run(shared.accumulated, Kind(name="", cp=2, tp=2, zero=(2,), variant="lean"))) < TOLERANCE


@pytest.mark.matrix
@pytest.mark.parametrize("variant", ["fast", "lean"])
def test_ranks_that_split_twice_drop_what_one_device_drops(four: RankPool, tmp_path: Path, variant: str) -> None:
    what = ("dropout", "nested", "in place", "path")
    graph = random_cases.graph_of(what)
    for axis in ("cp", "tp"):
        found = found_shardings(graph, 2, variant, whole_parameters=axis == "cp")
        graph = localize(graph, found, 2, axis=axis).graph
    assert any(node.op == "planner.dropout_of_parts.default" for node in graph.nodes), "nothing is split twice"
    with RankPool(1, tmp_path) as pool:
        wanted_losses, wanted = pool.run(random_cases.train, Kind(name=""), 1, 0, what)[0]

    kind = Kind(name="", cp=2, tp=2, zero=(1,), variant=variant, recompute=("none", "full"))
    for losses, state in four.run(random_cases.train, kind, 2, 0, what):
        assert max(abs(a / b - 1) for a, b in zip(losses, wanted_losses, strict=True)) < TOLERANCE
        assert max(relative(state[key], value) for key, value in wanted.items()) < TOLERANCE
