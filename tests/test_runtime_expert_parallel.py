"""Expert parallelism over data ranks in the trainer, beside the equality matrix."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import expert_cases, weight_cases
from tests import expert_parallel_cases as cases
from tests.distributed_cases import Kind
from tests.ranks import RankPool

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-9
EP2 = Kind(name="", dp=2, ep=2, zero=(1,))
OTHERS = pytest.mark.matrix  # not by default


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mixtral", Kind(name="", dp=2, ep=2, zero=(3,), recompute=("full", "none"))),
        pytest.param("mixtral+router", EP2, marks=OTHERS),
        pytest.param("qwen2-moe", Kind(name="", dp=2, ep=2, zero=(2,)), marks=OTHERS),
    ],
)
def test_models_of_hugging_face_train_as_on_one_device(two: RankPool, name: str, kind: Kind) -> None:
    for errors in two.run(cases.trained, name, kind):
        worst = max(errors, key=lambda what: errors[what])
        assert errors[worst] < TOLERANCE, worst


def test_a_rank_holds_its_experts_and_gradients_add_up(two: RankPool) -> None:
    for rank, shapes in enumerate(two.run(cases.held, EP2)):
        assert shapes["blocks.0.mlp.gate_up"][0] == 2, rank  # of four experts
        assert shapes["blocks.0.mlp.router.weight"][0] == 2  # of four rows, as FSDP shards them
    assert max(two.run(cases.accumulated, Kind(name="", dp=2, ep=2, zero=(2,)))) < TOLERANCE
    assert max(two.run(cases.uneven, EP2)) < TOLERANCE


def test_other_batches_are_evaluated(two: RankPool) -> None:
    for found, wanted in two.run(cases.evaluated, EP2):
        assert found == pytest.approx(wanted, rel=TOLERANCE)


def test_a_step_communicates_what_the_plan_says(two: RankPool) -> None:
    for found, planned in two.run(cases.counted_and_planned, EP2):
        assert found == planned
        assert set(found) == {"all_to_all"}


def test_tokens_are_counted_once(two: RankPool) -> None:
    wanted = expert_cases.directly(expert_cases.batches(shorter=False)[0])
    kind = Kind(name="", dp=2, ep=2, zero=(3,), recompute=("none", "full"))
    for seen, _ in two.run(expert_cases.counted, kind, None, False):
        assert seen[0] == wanted


def test_weights_are_drawn_and_saved_as_by_one_device(two: RankPool, tmp_path: Path) -> None:
    kind = Kind(name="", dp=2, ep=2, zero=(3,))
    for found in two.run(weight_cases.drawn, "moe", kind, 1):
        assert found["different"] == []
        assert found["error"] < TOLERANCE
    saved, _ = two.run(weight_cases.saved, "moe", kind, tmp_path / "weights", 10**9, None)
    assert weight_cases.different(load_file(tmp_path / "weights" / "model.safetensors"), saved["state"]) == []


def test_experts_are_held_in_the_order_of_the_plan(two: RankPool, tmp_path: Path) -> None:
    kind = Kind(name="", dp=2, ep=2, zero=(3,), recompute=("full",))
    assert max(two.run(cases.in_an_order, cases.uneven, kind)) < TOLERANCE
    for found, wanted in two.run(cases.in_an_order, cases.evaluated, EP2):
        assert found == pytest.approx(wanted, rel=TOLERANCE)
    for drawn in two.run(cases.in_an_order, weight_cases.drawn, "moe", kind, 1):
        assert drawn["different"] == []
        assert drawn["error"] < TOLERANCE
    arguments = ("moe", kind, tmp_path / "weights", 10**9, None)
    saved, _ = two.run(cases.in_an_order, weight_cases.saved, *arguments)
    assert weight_cases.different(load_file(tmp_path / "weights" / "model.safetensors"), saved["state"]) == []


@OTHERS
def test_ranks_that_share_an_expert_have_a_part_each(eight: RankPool) -> None:
    for zero in (1, 3):
        kind = Kind(name="", dp=8, ep=4, zero=(zero,), recompute=("full", "none"))
        assert max(eight.run(cases.with_fewer_experts_than_owners, kind)) < TOLERANCE
        assert max(eight.run(cases.in_an_order, cases.with_fewer_experts_than_owners, kind)) < TOLERANCE


@OTHERS
def test_experts_in_an_order_on_four_ranks(four: RankPool) -> None:
    for kind in (Kind(name="", dp=4, ep=2, zero=(2,)), Kind(name="", dp=2, ep=2, tp=2, zero=(3,))):
        for drawn in four.run(cases.in_an_order, weight_cases.drawn, "moe", kind, 1):
            assert drawn["different"] == []
            assert drawn["error"] < TOLERANCE


def test_a_torch_that_cannot_is_told(two: RankPool) -> None:
    for sentence in two.run(cases.without_meshes_of_parameters):
        assert "ep needs an FSDP that shards each parameter over ranks of its own, as torch 2.13 has" in sentence


@OTHERS
def test_four_ranks(four: RankPool) -> None:
    kind = Kind(name="", dp=4, ep=2, zero=(2,))
    assert max(four.run(cases.accumulated, kind)) < TOLERANCE
    assert max(four.run(cases.accumulated, Kind(name="", dp=4, shards=2, ep=2, zero=(3,)))) < TOLERANCE
    assert max(four.run(cases.accumulated, Kind(name="", pp=2, dp=2, ep=2, zero=(1,)))) < TOLERANCE
    assert max(four.run(cases.accumulated, Kind(name="", dp=2, ep=2, tp=2, zero=(3,)))) < TOLERANCE
