"""What a trainer promises beside equality: its optimizer, its state, and what it refuses."""

import pytest

from planner.runtime.zero import sends_integers
from planner.schedule import actions
from tests import distributed_cases as cases
from tests.distributed_cases import NUM_MICROBATCHES, Kind
from tests.ranks import RankPool

pytestmark = pytest.mark.distributed


SENTENCES = {
    "world": "the plan is for 4 processes, one per device, and 2 were started",
    "fingerprint": "the plan was made for another model",
    "unequal": "blocks.1.mlp.up.bias of rank 0 and blocks.1.mlp.up.bias of rank 1 differ",
    "another model": "the model has no parameter head.weight",
    "coupled": "model.py:7: it compares samples",
    "tp": "tp=2",
    "mixed": "mixes ZeRO-0",
    "batch": "24 samples, not its global batch of 25",
    "class": "one pipeline stage has ZeRO stages [1, 2]",
    "few micro-batches": "1f1b needs as many micro-batches as stages: 1 < 2",
    "another plan": "rank 1 has another plan than rank 0",
    "precision": "trains in fp32, the graph was traced in float64",
}


@pytest.mark.parametrize("change", SENTENCES)
def test_a_plan_that_cannot_be_run_as_stated_is_refused(two: RankPool, change: str) -> None:
    for sentence in two.run(cases.refusal, change):
        assert SENTENCES[change] in sentence
        assert "\n" not in sentence


def test_a_batch_that_does_not_fit_is_refused_in_one_sentence(two: RankPool) -> None:
    for answers in two.run(cases.bad_batches):
        assert "lacks 'labels'" in answers["missing"]
        assert "has 'mask'" in answers["unknown"]
        assert "'input_ids' has 11 samples and 'labels' 12" in answers["samples"]
        assert "has 24 samples, this data rank takes 12" in answers["more"]
        assert "the model does not run on the batch" in answers["shape"]
        assert "'labels' has shape [12], the plan was made for ['samples', 12]" in answers["dims"]
        assert "is torch.int32, the plan was made for torch.int64" in answers["dtype"]
        assert "no tensor with a batch dim" in answers["empty"]
        assert answers["uneven"] == answers["even"] == ""


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_torch_runs_the_passes_in_the_order_that_the_planner_prices(two: RankPool, schedule: str) -> None:
    for stage, passes in enumerate(two.run(cases.schedule_order, schedule)):
        wanted = [f"{a.phase[0]}{a.micro_batch}" for a in actions(schedule, stage, 2, NUM_MICROBATCHES)]

        assert passes == wanted


FROZEN_FRONT = ("layers.0", "layers.1", "layers.2", "gain")


@pytest.mark.parametrize(
    "kind",
    [
        Kind(name="ZeRO-0", dp=2),
        Kind(name="ZeRO-1", dp=2, zero=(1,)),
        Kind(name="ZeRO-3", dp=2, zero=(3,), recompute=("full",)),
        Kind(name="1F1B", pp=2, sizes=(2,), longest=1),
        Kind(name="GPipe", pp=2, sizes=(2,), longest=1, schedule="gpipe", recompute=("full",)),
        Kind(name="CP2", cp=2, zero=(2,)),
    ],
    ids=lambda kind: kind.name,
)
@pytest.mark.parametrize("frozen", [(), FROZEN_FRONT, ("layers.3.weight", "head.bias")])
def test_frozen_parameters_schedulers_and_names(two: RankPool, kind: Kind, frozen: tuple[str, ...]) -> None:
    results = two.run(cases.train_frozen, kind, frozen)

    given = {name for result in results for name in result["given"]}
    trained = [n for n, p in cases.frozen_model(frozen).named_parameters() if p.requires_grad and n != "spare"]
    assert given == set(trained)
    for result in results:
        assert result["error"] < 1e-9
        assert result["keys"]
        assert result["optimizer"] == bool(result["given"])
    if kind.pp == 2 and frozen == FROZEN_FRONT:
        assert [result["optimizer"] for result in results] == [False, True]


def test_one_device_trains_the_users_own_parameter_objects(one: RankPool) -> None:
    (result,) = one.run(cases.train_frozen, Kind(name=""), ())

    assert result["error"] < 1e-9
    assert result["meta"] == []


@pytest.mark.parametrize("kind", [Kind(name=""), Kind(name="", zero=(3,), recompute=("full",))])
def test_an_error_inside_a_block_names_the_users_line(one: RankPool, kind: Kind) -> None:
    (note,) = one.run(cases.failing_note, kind)

    assert "in block tokens+positions" in note
    assert "gpt.py:" in note
    assert "aten.embedding.default" in note


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bf16_follows_fp32(one: RankPool, two: RankPool, zero: int) -> None:
    exact = one.run(cases.low_precision, Kind(name=""), "fp32")[0]
    alone = one.run(cases.low_precision, Kind(name="", zero=(zero,)), "bf16")[0]
    both = two.run(cases.low_precision, Kind(name="", dp=2, zero=(zero,)), "bf16")

    assert alone == pytest.approx(exact, rel=5e-3)
    assert both[0] == both[1]
    assert both[0] == pytest.approx(exact, rel=5e-3)


def test_fp32_in_a_pipeline_and_with_zero_equals_one_device(one: RankPool, two: RankPool) -> None:
    exact = one.run(cases.low_precision, Kind(name=""), "fp32")[0]

    for kind in (Kind(name="", pp=2), Kind(name="", dp=2, zero=(3,))):
        assert two.run(cases.low_precision, kind, "fp32")[0] == pytest.approx(exact, rel=1e-5)


def test_bf16_in_a_pipeline_trains(one: RankPool, two: RankPool) -> None:
    exact = one.run(cases.low_precision, Kind(name=""), "fp32")[0]

    for zero in (0, 1, 2):
        losses = two.run(cases.low_precision, Kind(name="", pp=2, zero=(zero,)), "bf16")[0]
        assert losses == pytest.approx(exact, rel=5e-3)


def test_apply_traces_from_what_the_plan_says_of_a_batch(two: RankPool) -> None:
    for loss, eager in two.run(cases.apply_by_the_plan_alone):
        assert loss == pytest.approx(eager, rel=1e-12)


@pytest.mark.parametrize(
    "kind",
    [
        Kind(name="1F1B", pp=4),
        Kind(name="GPipe", pp=4, schedule="gpipe", recompute=("full",)),
        Kind(name="1F1B ZeRO-3", pp=2, dp=2, zero=(3,)),
    ],
    ids=lambda kind: kind.name,
)
@pytest.mark.skipif(not sends_integers(), reason="this torch sends no bool from stage to stage, which is refused")
def test_activations_that_skip_stages_are_relayed(four: RankPool, kind: Kind) -> None:
    for error, carried in four.run(cases.train_skipping, kind):
        assert error < 1e-9
        assert all(len(cut) > 1 for cut in carried[1:-1])
        assert "bool" in carried[2]


def test_a_torch_that_sends_no_integers_refuses_a_cut_that_needs_it(four: RankPool) -> None:
    said = four.run(cases.refused_cut, Kind(name="1F1B", pp=4))

    assert any("hands on a tensor of bool" in each for each in said)
    assert all("pp=1" in each for each in said if each)


def test_an_error_inside_a_pipeline_names_the_users_line(one: RankPool) -> None:
    (notes,) = one.run(cases.note_of_a_failed_schedule)

    assert notes == ["in block b, model.py:3 (operator aten.embedding.default)"]


def test_a_mean_that_inputs_divide_is_that_of_the_whole_batch(two: RankPool) -> None:
    for losses, eager in two.run(cases.masked_means):
        assert losses == pytest.approx(eager, rel=1e-12)


def test_a_shared_parameter_that_one_stage_only_reads_trains_as_on_one_device(two: RankPool) -> None:
    for losses, eager in two.run(cases.detached_tie):
        assert losses == pytest.approx(eager, rel=1e-9)
