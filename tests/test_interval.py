"""Intervals of predictions, which plans are tied, and the residuals behind both."""

import json
import math
import tomllib
from dataclasses import replace

import pytest
from rich.console import Console

from benchmarks import residuals
from planner import interval, report
from planner.cli import main
from planner.cluster import Cluster
from planner.errors import PlanError, ProfileError
from planner.interval import are_tied, known_difference, with_interval
from planner.plan import Plan
from planner.resources import profiles_path
from planner.search import search
from planner.trace import trace
from planner.zoo import build
from tests.test_plan import PLAN

STEP, DIFFERENCE = interval.residuals("step"), interval.residuals("difference")


def predicted(step_seconds, **changes):
    return replace(PLAN.prediction, step_seconds=step_seconds, **changes)


def printed(renderable):
    console = Console(width=160, highlight=False, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


# --- the data ---------------------------------------------------------------------------------------


def test_residuals_say_what_is_behind_them():
    text = (profiles_path() / "published" / "residuals.toml").read_text(encoding="utf-8")
    for quantity in ("step", "difference", "memory"):
        row = interval.residuals(quantity)
        assert row.low < 0 < row.high
        assert row.rows > 100
        assert row.sources > 1
        assert "benchmarks.residuals" in row.source
    assert text.count("estimate, no residuals yet") == sum(
        interval.residuals(quantity, 1.0).rows == 0 for quantity in ("step", "difference")
    )


def test_half_measured_is_half_way_in_logarithms():
    measured, half = interval.residuals("step", 1.0), interval.residuals("step", 0.5)
    assert (half.low, half.high) == pytest.approx(
        ((STEP.low + measured.low) / 2, (STEP.high + measured.high) / 2), rel=1e-12
    )


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("low = ", "least = ", "must have"),
        ("[step.measured]", "[step.other]", "does not say"),
        ("=", "= =", "does not say"),
    ],
)
def test_damaged_data_are_named(tmp_path, monkeypatch, old, new, said):
    text = (profiles_path() / "published" / "residuals.toml").read_text(encoding="utf-8")
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "residuals.toml").write_text(text.replace(old, new), encoding="utf-8")
    monkeypatch.setattr(interval, "profiles_path", lambda: tmp_path)
    interval._table.cache_clear()
    with pytest.raises(ProfileError, match=said):
        interval.residuals("step")
    interval._table.cache_clear()


# --- a plan -----------------------------------------------------------------------------------------


def test_a_prediction_is_inside_its_interval():
    found = with_interval(predicted(2.0))
    assert found.step_seconds_low == pytest.approx(2.0 * math.exp(STEP.low), rel=1e-12)
    assert found.step_seconds_high == pytest.approx(2.0 * math.exp(STEP.high), rel=1e-12)
    peak, memory = max(found.peak_bytes), interval.residuals("memory")
    assert (found.peak_bytes_low, found.peak_bytes_high) == pytest.approx(memory.around(peak), rel=1e-12)
    on_cpu = with_interval(predicted(2.0), on_cpu=True)
    assert on_cpu.peak_bytes_high == pytest.approx(interval.residuals("memory", 1.0).around(peak)[1], rel=1e-12)
    measured = with_interval(predicted(2.0, measured_share=1.0))
    assert measured.step_seconds_high == pytest.approx(interval.residuals("step", 1.0).around(2.0)[1], rel=1e-12)


def test_an_interval_is_read_back_and_an_older_plan_has_none():
    plan = replace(PLAN, prediction=with_interval(PLAN.prediction))
    assert Plan.loads(plan.dumps()) == plan
    assert Plan.loads(PLAN.dumps()).prediction.step_seconds_low is None
    assert "step_seconds_low" not in PLAN.to_dict()
    with pytest.raises(PlanError, match="step_seconds_low must be a number"):
        Plan.loads(json.dumps({**plan.to_dict(), "step_seconds_low": "little"}))


def test_the_text_of_a_plan_has_its_interval():
    text = report.plan_text(replace(PLAN, prediction=with_interval(PLAN.prediction)))
    assert "\n  8 of 10 such steps take " in text
    assert "may not fit" not in text
    tight = with_interval(replace(PLAN.prediction, capacity_bytes=max(PLAN.prediction.peak_bytes)))
    assert text.count("\n") == report.plan_text(PLAN).count("\n") + 1
    assert ", which may not fit\n" in report.plan_text(replace(PLAN, prediction=tight))


# --- ties -------------------------------------------------------------------------------------------


def test_plans_closer_than_their_interval_are_tied():
    known = known_difference(predicted(1.0), predicted(1.0))
    assert known == DIFFERENCE.high
    for sign in (1, -1):
        assert are_tied(predicted(1.0), predicted(math.exp(sign * 0.99 * known)))
        assert not are_tied(predicted(1.0), predicted(math.exp(sign * 1.01 * known)))
    assert not are_tied(predicted(1.0), predicted(1.0), (1, 2))  # twice the devices, by device-seconds
    assert are_tied(predicted(1.0), predicted(0.5), (1, 2))


def test_a_difference_is_known_as_well_as_that_of_the_plan_that_is_measured_less():
    half, whole = predicted(1.0, measured_share=0.5), predicted(1.0, measured_share=1.0)
    assert known_difference(half, whole) == known_difference(whole, half) == interval.residuals("difference", 0.5).high


def test_ties_are_marked_and_explained():
    plans = [replace(PLAN, prediction=with_interval(predicted(seconds))) for seconds in (1.0, 1.01, 3.0)]
    lines = printed(
        report.ranking(plans, cluster=Cluster.load("1x4xA100-80GB"), tied=(False, True, False))
    ).splitlines()
    assert [line.split()[0] for line in lines if "dp 2" in line] == ["1", "2=", "3"]
    assert lines[-1].startswith("= tied with the first: steps predicted less than ")
    assert "8 of 10 measured steps are " in lines[-2]
    alone = printed(report.ranking(plans, cluster=Cluster.load("1x4xA100-80GB"), tied=(False, False, False)))
    assert "tied" not in alone


def test_a_peak_that_may_not_fit_is_marked_and_explained():
    near, far = (replace(predicted(1.0), peak_bytes=(share * 1e9,), capacity_bytes=1e9) for share in (0.99, 0.5))
    cluster = Cluster.load("1x4xA100-80GB")

    marked = printed(report.ranking([replace(PLAN, prediction=with_interval(p)) for p in (near, far)], cluster=cluster))
    plain = printed(report.ranking([replace(PLAN, prediction=with_interval(far))], cluster=cluster))

    assert [" ? " in line for line in marked.splitlines() if "dp 2" in line] == [True, False]
    assert "? fits, but with a peak so much off it does not" in marked
    assert "?" not in plain


def test_diff_says_of_two_files_that_they_are_tied(tmp_path, capsys):
    for name, seconds in (("one", 1.0), ("close", 1.02), ("far", 2.0)):
        replace(PLAN, prediction=with_interval(predicted(seconds))).save(tmp_path / name)
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "close")]) == 0
    text = capsys.readouterr().out
    assert "the two are tied" in text
    assert f"1 ({math.exp(STEP.low):.6g} to {math.exp(STEP.high):.6g})" in text
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "far")]) == 0
    assert "tied" not in capsys.readouterr().out
    replace(PLAN, global_batch=64, num_microbatches=16, prediction=predicted(1.0)).save(tmp_path / "other")
    assert main(["diff", str(tmp_path / "one"), str(tmp_path / "other")]) == 0
    assert "tied" not in capsys.readouterr().out


@pytest.mark.parametrize("objective", ["time", "device-seconds"])
def test_a_search_says_which_plans_are_tied_with_the_first(objective):
    module, batch = build("gpt-tiny", device="meta")
    graph = trace(module, batch, precision="bf16", name="gpt-tiny")
    found = search(graph, Cluster.load("1x4xA100-80GB"), global_batch=8, top=12, objective=objective)
    values = [
        plan.prediction.step_seconds * (plan.devices if objective == "device-seconds" else 1) for plan in found.plans
    ]
    assert found.tied == (False, *(math.log(value / values[0]) < DIFFERENCE.high for value in values[1:]))
    assert any(found.tied) == (objective == "time")  # fewer devices take much fewer of their seconds here
    assert not all(found.tied[1:])
    for plan in found.plans:
        assert plan.prediction == with_interval(plan.prediction)


# --- the command that writes them -------------------------------------------------------------------


def step(source, group, predicted_seconds, measured_seconds):
    return residuals.Step(
        source=source, group=group, predicted_seconds=predicted_seconds, measured_seconds=measured_seconds
    )


def test_sources_weigh_the_same_and_so_do_groups_of_one():
    values, sources = [0.0] * 8 + [1.0, 2.0], ["a"] * 8 + ["b"] * 2
    assert residuals.quantiles(values, sources, shares=[0.75]) == pytest.approx([1.5])
    assert residuals.quantiles(values, ["a"] * 10, shares=[0.75])[0] < 0.5
    groups = ["a1"] * 8 + ["a2", "a3"]
    assert residuals.quantiles(values, ["a"] * 10, groups, shares=[0.5]) == pytest.approx([1.0])


def test_what_is_off_in_both_of_two_runs_cancels():
    steps = [
        step("a", "a1", 1.0, 2.0), step("a", "a1", 1.2, 2.4), step("a", "a1", 9.0, 9.0), step("a", "a2", 1.0, 1.0),
    ]  # fmt: skip
    pairs = residuals.differences(steps)
    assert len(pairs) == 3
    found = residuals.tables(steps, [("a", 0.1), ("b", -0.1)])
    assert (
        "rows = 1\n" in found["difference.published"]
    )  # the third is no rival of the others, the fourth is another question
    assert "low = -0.0000\n" in found["difference.published"].replace("low = 0.0000", "low = -0.0000")
    assert f"median = {math.log(2) / 2:.4f}" in found["step.published"]  # of ln 2 twice, and of 0 twice


def test_writing_keeps_estimates(tmp_path):
    path = tmp_path / "residuals.toml"
    original = (profiles_path() / "published" / "residuals.toml").read_text(encoding="utf-8")
    path.write_text(original, encoding="utf-8")
    residuals.write({}, path)
    assert path.read_text(encoding="utf-8") == original
    residuals.write({"step.published": "[step.published]\nlow = -1.0"}, path)
    text = path.read_text(encoding="utf-8")
    assert "[step.published]\nlow = -1.0\n\n[" in text
    assert text.partition("[step.measured]")[2] == original.partition("[step.measured]")[2]


def test_residuals_of_plans_that_were_run_are_quantiles_by_model(tmp_path):
    plans = [
        {"predicted_seconds": 1.0, "measured_seconds": 1.1, "clock_seconds": 1.3, "memory_errors": [0.0, 0.0]},
        {
            "predicted_seconds": 1.2,
            "measured_seconds": 1.2 * 1.1,
            "clock_seconds": 1.2 * 1.3,
            "memory_errors": [-0.1, -0.1],
        },
        {"predicted_seconds": 2.0, "measured_seconds": None, "clock_seconds": None, "memory_errors": []},
    ]
    paths = []
    for name in ("one", "two"):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps({"model": name, "plans": plans}), encoding="utf-8")

    found = {key: tomllib.loads(text)[key.split(".")[0]][key.split(".")[1]]
             for key, text in residuals.compared_tables(paths).items()}  # fmt: skip

    assert list(found) == ["step.measured", "difference.measured", "memory.cpu"]
    assert found["step.measured"]["median"] == pytest.approx(math.log(1.3), abs=1e-4)  # by the clock
    assert found["step.measured"]["rows"] == 4
    assert found["step.measured"]["sources"] == 2
    assert found["difference.measured"]["high"] == pytest.approx(0.0, abs=1e-4)  # both are as slow
    assert found["difference.measured"]["rows"] == 2
    assert found["memory.cpu"]["high"] == pytest.approx(-math.log(0.9), abs=1e-4)
