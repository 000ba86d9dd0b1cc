"""Context parallelism in the trainer, beside the equality matrix: what is communicated, drawn, added up and refused."""

from pathlib import Path

import pytest

from planner.shard.localize import localize
from tests import check_cases, random_cases
from tests import tensor_parallel_cases as shared
from tests.distributed_cases import Kind, found_shardings, low_precision, relative
from tests.ranks import RankPool

TOLERANCE = 1e-9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("context_parallel")


@pytest.mark.distributed
@pytest.mark.parametrize(("variant", "collective"), [("fast", "all_gather"), ("lean", "all_to_all")])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_a_step_communicates_what_the_plan_says(two: RankPool, model: str, variant: str, collective: str) -> None:
    kind = Kind(name="", cp=2, zero=(3,), variant=variant)
    for found, planned, sums in two.run(shared.counted_and_planned, model, kind):
        assert found == planned
        assert collective in {name for name, _ in found}
        assert sums == 0  # FSDP sums the parts of gradients


@pytest.mark.distributed
@pytest.mark.parametrize("variant", [pytest.param("fast", marks=pytest.mark.matrix), "lean"])
def test_ranks_that_split_the_sequence_drop_what_one_device_drops(two: RankPool, folder: Path, variant: str) -> None:
    what = ("dropout", "nested", "in place", "path")
    graph = random_cases.graph_of(what)
    local = localize(graph, found_shardings(graph, 2, variant, whole_parameters=True), 2).graph
    assert sum(node.op == "planner.dropout.default" for node in local.nodes) >= 2, "nothing is split"
    with RankPool(1, folder) as pool:
        wanted_losses, wanted = pool.run(random_cases.train, Kind(name=""), 1, 0, what)[0]

    kind = Kind(name="", cp=2, zero=(1,), variant=variant, recompute=("none", "full"))
    for losses, state in two.run(random_cases.train, kind, 2, 0, what):
        assert max(abs(a / b - 1) for a, b in zip(losses, wanted_losses, strict=True)) < TOLERANCE
        assert max(relative(state[key], value) for key, value in wanted.items()) < TOLERANCE


@pytest.mark.matrix
@pytest.mark.distributed
def test_gradients_of_several_calls_add_up(two: RankPool, four: RankPool) -> None:
    assert max(two.run(shared.accumulated, Kind(name="", cp=2, zero=(2,)))) < TOLERANCE
    assert max(four.run(shared.accumulated, Kind(name="", cp=2, dp=2, zero=(1,)))) < TOLERANCE
    assert max(four.run(shared.accumulated, Kind(name="", cp=2, pp=2, zero=(3,)))) < TOLERANCE


@pytest.mark.distributed
def test_bf16_follows_fp32(two: RankPool) -> None:
    exact = two.run(low_precision, Kind(name="", dp=2, zero=(1,)), "fp32")[0]
    split = two.run(low_precision, Kind(name="", cp=2, zero=(3,)), "bf16")

    assert split[0] == split[1]
    assert split[0] == pytest.approx(exact, rel=5e-3)


@pytest.mark.distributed
def test_an_operator_at_fault_is_refused_or_replicated_and_the_model_trains_right(two: RankPool) -> None:
    first, second = two.run(check_cases.refused_then_trained, "gradient of a weight that is a part", "cp")

    assert first == second
    sentence, report, replicated, errors = first
    assert "on the 2 ranks of cp" in sentence
    assert "aten.layer_norm.default" in sentence
    assert replicated == ("aten.layer_norm.default",)
    assert report.endswith("; aten.layer_norm.default run replicated")
    assert max(errors) < TOLERANCE


@pytest.mark.distributed
def test_ranks_of_one_data_rank_are_given_the_same_batch(two: RankPool) -> None:
    for values, counts, same in two.run(shared.different_batches, Kind(name="", cp=2, zero=(1,))):
        assert "ranks 0 and 1 split the tensors of one data rank and were given batches of different values" in values
        assert "ranks 0 and 1 are of one data rank and were given different batches (23 and 24 samples)" in counts
        assert same == ""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("cp with ZeRO-0", "ZeRO-0 blocks use dp_replicate and all blocks or none; the plan has dp_replicate=1"),
        ("cp with parts of parameters", "on the ranks of cp, which have all of each parameter (Q); plan again"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_in_a_sentence(two: RankPool, change: str, sentence: str) -> None:
    first, second = two.run(shared.refusal, change)

    assert sentence in first
    assert first == second


@pytest.mark.distributed
def test_a_plan_that_lacks_the_shardings_of_an_axis_is_refused(four: RankPool) -> None:
    for message in four.run(shared.refusal, "cp without its shardings"):
        assert "the plan has cp=2, tp=2 and does not say how block " in message
