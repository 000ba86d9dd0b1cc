"""Measured beside predicted: the terms of a run, which of them was off, and what that corrects."""

import json
import os
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from planner import Cluster
from planner.audit import (
    CORRECTED,
    TERMS,
    RankRecord,
    RunRecord,
    Sample,
    Work,
    audit,
    factors_of,
    idle_shares,
    plan_digest,
    predicted_terms,
    rank_record,
    run_row,
)
from planner.errors import RunError
from planner.graph import Graph
from planner.plan import Plan
from planner.profile import Machine, Profile
from planner.runtime.phases import Phases
from planner.search.engine import search
from planner.trace import trace
from planner.zoo import build
from tests.command_line import TWO_CORES, CommandLine
from tests.ranks import RankPool

MACHINE = Machine(
    device="processor, 2 cores", kind="cpu", capability="none", driver="none", torch="2.13.0", python="3.11.0",
    host="abc", processes=2, threads=1, date="2026-01-01",
)  # fmt: skip


@pytest.fixture(scope="module")
def graph() -> Graph:
    module, batch = build("gpt-tiny", device="meta", sequence_length=32)
    return trace(module, batch, precision="fp32", name="gpt-tiny", device_kind="cpu")


def planned(graph: Graph, fix: str, **options) -> Plan:
    return search(
        graph, Cluster.load(TWO_CORES), global_batch=8, precision="fp32", pins=fix, top=1, **options
    ).plans[0]  # fmt: skip


@pytest.fixture(scope="module")
def plan(graph: Graph) -> Plan:
    return planned(graph, "pp=2")


def record_of(plan: Plan, **factors: float) -> RunRecord:
    """A run that took what the plan says, each term times its factor."""
    terms = {name: (value or 0.0) * factors.get(name, 1.0) for name, value in predicted_terms(plan).items()}
    waited = {"collectives": {"backward": terms["collectives"]}, "idle": {"rest": terms["idle"]}}
    phases = {name: terms[name] for name in ("forward", "optimizer", "data")}
    phases |= {"backward": terms["backward"] + terms["collectives"], "sync": 0.0}
    rank = RankRecord(phases=phases, peak_bytes=2e6, **waited)
    return RunRecord(
        plan=plan, machine=MACHINE, step_seconds=(sum(terms.values()),) * 5, between_seconds=1e-3,
        ranks=(rank,) * plan.devices, memory_kind="allocated",
    )  # fmt: skip


def test_a_plan_states_every_term_and_they_add_up(graph: Graph) -> None:
    for fix in ("devices=1", "dp=2,zero=3", "pp=2,recompute=full"):
        plan = planned(graph, fix)
        terms = predicted_terms(plan)
        assert list(terms) == list(TERMS)
        assert sum(value or 0.0 for value in terms.values()) == pytest.approx(plan.prediction.step_seconds)
        assert 0 < (terms["forward"] or 0.0) < (terms["backward"] or 0.0)
        assert Plan.loads(plan.dumps()) == plan


def test_a_plan_of_an_earlier_release_is_audited_with_its_passes_together(plan: Plan) -> None:
    data = plan.to_dict()
    del data["forward_seconds"]
    old = Plan.loads(json.dumps(data))

    found = audit(record_of(plan, backward=2.0)).terms
    joined = audit(replace(record_of(plan, backward=2.0), plan=old)).terms

    assert joined[0].name == "forward and backward"
    assert joined[0].predicted_seconds == pytest.approx(sum(term.predicted_seconds or 0.0 for term in found[:2]))
    assert joined[0].measured_seconds == pytest.approx(sum(term.measured_seconds or 0.0 for term in found[:2]))


@pytest.mark.parametrize(
    ("factors", "sentence"),
    [
        ({"backward": 2.0}, "of its terms backward is longer by most"),
        ({"collectives": 60.0}, "of its terms collectives is longer by most"),
        ({"backward": 0.25, "optimizer": 2.0}, "of its terms backward is shorter by most"),
        ({"optimizer": 1.3}, "which is right within 5%; of its terms optimizer is off most"),
    ],
)
def test_the_term_that_was_off_is_named(plan: Plan, factors: dict[str, float], sentence: str) -> None:
    found = audit(record_of(plan, **factors))

    assert sentence in found.sentence
    assert sum(term.measured_seconds or 0.0 for term in found.terms) == pytest.approx(found.measured_step_seconds)
    by_name = {term.name: term for term in found.terms}
    for name, factor in factors.items():
        assert by_name[name].measured_seconds == pytest.approx(factor * (by_name[name].predicted_seconds or 0.0))
    assert len(found.predicted_peak_bytes) == len(found.measured_peak_bytes) == 2
    assert found.predicted_peak_bytes == plan.prediction.peak_bytes


def test_without_sampled_steps_what_cannot_be_told_apart_is_one_term(plan: Plan) -> None:
    record = record_of(plan)
    record = replace(record, ranks=tuple(replace(rank, collectives=None, idle=None) for rank in record.ranks))

    first, *others = audit(record).terms

    assert first.name == "forward, backward, collectives and idle"
    assert first.measured_seconds == pytest.approx(first.predicted_seconds)
    assert [term.name for term in others] == ["optimizer", "data", "rest"]
    with pytest.raises(RunError, match=r"^no step of the run was sampled, .* train for 7 steps or more$"):
        run_row(record)


def test_the_rank_that_comes_last_does_not_wait() -> None:
    late = [Work("forward", "gloo:all_reduce", 0.1), Work("backward", "gloo:all_reduce", 0.3)]
    early = [Work("forward", "gloo:all_reduce", 0.4), Work("backward", "gloo:all_reduce", 0.2)]
    assert [round(share["forward"], 6) for share in idle_shares([late, early])] == [0.0, 0.75]
    assert [round(share["backward"], 6) for share in idle_shares([late, early])] == [round(1 / 3, 6), 0.0]

    messages = [[Work("rest", "gloo:recv", 0.5), Work("rest", "gloo:recv", 0.1)], [Work("rest", "gloo:recv", 0.2)]]
    assert [round(share["rest"], 6) for share in idle_shares(messages)] == [round(0.4 / 0.6, 6), 0.5]


def test_a_rank_communicates_no_longer_than_its_phases_take() -> None:
    steps = [{"": 1.0, "forward": 0.3, "backward": 0.5}] * 3
    seen = Sample(
        exposed={"forward": 0.9, "rest": 0.1}, copies={"forward": 0.1}, works=[Work("forward", "gloo:all_reduce", 0.9)]
    )  # fmt: skip
    quick = replace(seen, works=[Work("forward", "gloo:all_reduce", 0.3)])

    rank = rank_record(steps, [[seen, quick]], 0, num_ranks=2, peak_bytes=None)

    assert rank.idle == pytest.approx({"forward": 0.3 * 0.6, "rest": 0.0})
    assert rank.collectives == pytest.approx({"forward": 0.3 * 0.4, "rest": 0.1})
    alone = rank_record(steps, [], 0, num_ranks=1, peak_bytes=None)
    assert (alone.collectives, alone.idle) == ({}, {})


def test_a_record_is_read_as_it_was_written(plan: Plan, tmp_path) -> None:
    record = record_of(plan, forward=1.5)
    record.save(tmp_path / "run.json")
    assert RunRecord.load(tmp_path / "run.json") == record
    assert audit(record, plan) == audit(record)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], r"is no JSON \(.*\), so it is truncated or no record"),
        (lambda text: "[]", "is no record of a run; record it again"),
        (lambda text: text.replace('"record_version": 1', '"record_version": 9'), "record version 9, this release"),
        (lambda text: text.replace('"between_seconds": 0.001', '"between_seconds": -1'), "must be a number, at least"),
        (lambda text: text.replace('"global_batch": 8', '"global_batch": 9'), "is broken: its plan is no valid plan"),
        (lambda text: text.replace('"mfu": 0.', '"mfu": 0.9'), "plan_digest is not that of its plan"),
    ],
)
def test_a_broken_record_is_one_sentence(plan: Plan, tmp_path, change, message: str) -> None:
    path = tmp_path / "run.json"
    record_of(plan).save(path)
    path.write_text(change(path.read_text()))
    with pytest.raises(RunError, match=message) as caught:
        RunRecord.load(path)
    assert "\n" not in str(caught.value)


def test_an_interrupt_leaves_no_half_written_record(plan: Plan, tmp_path, monkeypatch) -> None:
    def interrupt(_descriptor) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        record_of(plan).save(tmp_path / "run.json")
    assert list(tmp_path.iterdir()) == []


def test_another_plan_and_a_run_without_steps_are_refused(graph: Graph, plan: Plan) -> None:
    other = planned(graph, "dp=2")
    with pytest.raises(RunError, match=r"by another plan than this one: .*mesh\.pp"):
        audit(record_of(plan), other)
    with pytest.raises(RunError, match="no step beyond warm-up"):
        audit(replace(record_of(plan), step_seconds=()))


@pytest.mark.parametrize("fix", ["dp=2,zero=3", "pp=2"])
def test_what_a_run_took_corrects_the_next_plan(graph: Graph, fix: str) -> None:
    plan = planned(graph, fix)
    factors = {"forward": 1.6, "backward": 0.7, "collectives": 3.0, "optimizer": 2.0}
    record = record_of(plan, **factors)
    profile = Profile.loads(Profile(machine=MACHINE).with_rows([run_row(record)]).dumps())

    again = planned(graph, fix, runs=profile.runs)

    assert dict(again.prediction.corrections) == pytest.approx(factors, rel=1e-5)
    assert [(len(s.blocks)) for s in again.stages] == [len(s.blocks) for s in plan.stages]  # so terms compare
    measured, said = (
        {name: value or 0.0 for name, value in terms.items()} for terms in (record.terms(), predicted_terms(again))
    )
    passes = ("forward", "backward")  # of which the schedule of a pipeline has its own, half and half
    assert sum(said[name] for name in passes) == pytest.approx(sum(measured[name] for name in passes), rel=1e-4)
    for name in CORRECTED:
        assert said[name] == pytest.approx(measured[name], rel=0.15 if fix == "pp=2" and name in passes else 1e-4)
    off_before = abs(record.step / plan.prediction.step_seconds - 1)
    assert abs(record.step / again.prediction.step_seconds - 1) < 0.5 * off_before

    # A run by the corrected plan is beside what is priced without any run: its factors do not pile up.
    second = run_row(replace(record, plan=again))
    assert second.way == run_row(record).way
    for name in CORRECTED if fix != "pp=2" else ("collectives", "optimizer"):
        assert getattr(second, f"{name}_priced_seconds") == pytest.approx(
            getattr(run_row(record), f"{name}_priced_seconds"), rel=1e-4
        )


def test_corrections_are_of_the_same_mesh_before_others(graph: Graph, plan: Plan) -> None:
    other = planned(graph, "dp=2,zero=2")
    rows = [run_row(record_of(plan, forward=2.0)), run_row(record_of(other, forward=8.0))]
    alike, pooled = factors_of(rows, str(plan.mesh), plan.micro_batch), factors_of(rows, "dp_shard 64", 1)
    assert alike is not None
    assert pooled is not None
    assert alike.forward == pytest.approx(2.0, rel=1e-5)
    assert pooled.forward == pytest.approx(4.0, rel=1e-5)  # by ratio: sqrt(2 x 8)
    assert factors_of([], "dp_shard 64", 1) is None

    # The search still proves its choice: shorter passes must not be cut off by a bound of the uncorrected ones.
    quicker = [run_row(record_of(plan, forward=0.1, backward=0.1, collectives=0.1, optimizer=0.1))]
    assert planned(graph, "", runs=quicker).prediction.step_seconds <= planned(
        graph, "pp=2", runs=quicker
    ).prediction.step_seconds * (1 + 1e-9)
    assert planned(graph, "pp=2").dumps() == plan.dumps()


def late_rank(plan: Plan) -> dict[str, object]:
    """The record, as plain data, where rank 1 comes late to a collective in `backward`."""
    phases = Phases(torch.device("cpu"))
    phases.sample([5])
    for _ in range(7):
        phases.begin()
        with phases.measured("forward"):
            time.sleep(0.01 + 0.2 * dist.get_rank())
        with phases.measured("backward"):
            dist.all_reduce(torch.ones(10))
        phases.finish()
    phases.begin()
    with phases.measured("forward"):
        pass
    phases.begin(anew=True)  # a step that raised is forgotten
    phases.finish()
    record = phases.record(plan, peak_bytes=float(dist.get_rank()), memory_kind="told")
    return record.to_dict()


@pytest.mark.distributed
def test_waiting_for_a_late_rank_is_idle_and_not_communication(graph: Graph, tmp_path) -> None:
    with RankPool(2, tmp_path) as pool:
        one, other = pool.run(late_rank, planned(graph, "dp=2,zero=1"))
    assert one == other
    record = RunRecord.from_dict(one)

    assert len(record.step_seconds) == 3  # 8 but 3 of warm-up, the sampled one and the one after
    assert record.step > 0.2
    early, late = record.ranks  # by wide margins: machines that test are busy
    assert early.phases["backward"] > 0.12 > 1.5 * late.phases["backward"]
    waited = [rank.idle["backward"] for rank in record.ranks if rank.idle is not None]
    assert waited[0] > 0.12 > 3 * waited[1]
    assert early.collectives is not None
    assert early.collectives["backward"] < 0.5 * waited[0]
    assert [rank.peak_bytes for rank in record.ranks] == [0.0, 1.0]


@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests' cluster has CPUs")
def test_a_run_is_recorded_audited_and_fed_back(capsys, tmp_path, monkeypatch) -> None:
    cli = CommandLine(capsys)
    monkeypatch.chdir(tmp_path)
    planning = ("--cluster", TWO_CORES, "--global-batch", 8, "--seq", 16, "--fix", "dp=2,zero=2")
    assert cli("plan", "gpt-tiny", *planning, "--out", "plan.json").code == 0
    running = ("--cluster", TWO_CORES, "--plan", "plan.json", "--seq", 16)
    assert "more than the 3 steps" in cli.error("run", "gpt-tiny", *running, "--steps", 3, "--record", "run.json")
    trained = cli("run", "gpt-tiny", *running, "--steps", 8, "--record", "run.json", "--json")
    assert trained.code == 0

    found = cli("audit", "plan.json", "run.json", "--json").json
    assert found == trained.json["audit"] == cli("audit", "run.json", "--json").json
    assert found["num_steps"] == 2
    assert found["measured_step_seconds"] == trained.json["measured_step_seconds"]
    assert {"forward", "backward", "collectives", "optimizer"} <= found["terms"].keys()
    assert all(found["terms"][n]["measured_seconds"] > 0 for n in ("forward", "backward", "collectives", "optimizer"))
    assert found["measured_peak_bytes"] == trained.json["peak_bytes"]
    text = cli("audit", "run.json").out
    assert "\n  collectives " in text
    assert found["sentence"] in text

    assert cli("audit", "run.json", "--update-profile", "profile.json").code == 0
    again = cli(
        "plan", "gpt-tiny", *planning, "--profile", "profile.json", "--any-machine", "--json"
    ).json["plans"][0]  # fmt: skip
    step = found["measured_step_seconds"]
    assert abs(step - again["step_seconds"]) < abs(step - found["predicted_step_seconds"])
    assert set(again["corrections"]) == set(CORRECTED)

    profile = json.loads((tmp_path / "profile.json").read_text())
    profile["machine"]["host"] = "another"
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    error = cli.error("audit", "run.json", "--update-profile", "profile.json")
    assert "is of another machine" in error
    assert cli("audit", "run.json", "--update-profile", "profile.json", "--any-machine").code == 0
    assert plan_digest(Plan.load("plan.json")) == json.loads((tmp_path / "run.json").read_text())["plan_digest"]
