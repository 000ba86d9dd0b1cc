"""The script for one GPU, end to end on a CPU: what it measures, what it predicts, and what it says of failures."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from benchmarks import gpu_check as bench
from planner.engine import engine_named
from planner.errors import PlanError
from planner.profile import Profile
from planner.runtime import trainer

MACHINE = {"device": "a device", "torch": "2.13.0"}


def test_it_measures_trains_and_compares(tmp_path):
    subjects = ["mlp-tiny/fp32/2,4", "mlp-tiny/tf32/2"]
    options = ["--device", "cpu", "--steps", "4", "--budget", "150s", "--without", "equality,compile", "--json"]
    command = [sys.executable, "-m", "benchmarks.gpu_check", *subjects, *options, "--out", str(tmp_path)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "gpu_check.json").read_text())
    assert [row["way"] for row in found["rows"]] == ["2 x 2", "2 x 2, recompute", "1 x 4", "1 x 4, recompute"]
    for row in found["rows"]:
        assert row["failure"] == ""
        assert min(row["measured_seconds"], row["predicted_seconds"], row["by_profile_seconds"]) > 0
        assert row["measured_share"] > 0
        assert row["measured_bytes"] is None or row["measured_bytes"] > 0.5 * row["predicted_bytes"]
    assert ["tf32" in text for text in found["left_out"]] == [True]  # a CPU has none: left out, not run as fp32
    profile = Profile.load(tmp_path / "profile.json")
    assert {row.micro_batch for row in profile.blocks} == {2, 4}
    assert profile.optimizers


def test_a_subject_is_read_or_refused():
    assert bench.Subject.of("llama3-1b/bf16/4,1/2048") == bench.Subject(
        model="llama3-1b", precision="bf16", micro_batches=(1, 4), sequence_length=2048
    )
    assert bench.Subject.of("gpt2/tf32/4").graph_precision == "fp32"
    for odd in ("gpt2", "gpt2/fp8/4", "gpt2/bf16/3,4", "gpt2/bf16/0", "gpt2/bf16/x"):
        with pytest.raises(ValueError, match=r"MODEL/PRECISION|divide|invalid literal"):
            bench.Subject.of(odd)
    for texts in bench.SUBJECTS.values():
        assert all(bench.Subject.of(text).micro_batches for text in texts)


def test_errors_are_of_what_was_measured():
    rows = [
        bench.Row(subject="a", way="1", predicted_seconds=1.2, by_profile_seconds=0.9, measured_seconds=1.0,
                  predicted_bytes=110.0, measured_bytes=100.0),
        bench.Row(subject="a", way="2", predicted_seconds=1.0, measured_seconds=2.0),
        bench.Row(subject="a", way="3", predicted_seconds=1.0, failure="out of memory"),
    ]  # fmt: skip

    found = bench.summary(rows)

    assert found["rows"] == 3
    assert found["measured"] == 2
    assert found["time_median_error"] == pytest.approx(0.35)
    assert found["time_by_profile_median_error"] == pytest.approx(0.1)
    assert found["memory_median_error"] == pytest.approx(0.1)
    text = bench.table(bench.Report(machine=MACHINE, rows=rows, equality={"tp=2": "equal"}, left_out=["b: no time"]))
    assert "+20.0%" in text
    assert "out of memory" in text
    assert "2 of 3 rows measured" in text
    assert "left out: b: no time" in text
    assert "tp=2: equal" in text


def test_a_compiled_module_moves_less_and_a_captured_one_sends_nothing():
    stock, compiled = engine_named("stock"), bench.compiling_engine("torch.compile")
    captured = bench.compiling_engine("CUDA graphs")

    assert compiled.memory_traffic == stock.compiled_memory_traffic < stock.memory_traffic
    assert compiled.dispatch == stock.dispatch
    assert captured.memory_traffic == compiled.memory_traffic
    assert captured.dispatch == captured.block_dispatches == 0


def _dies(connection):
    raise RuntimeError("this is why\nand more")


def _is_silent(connection):
    import time

    time.sleep(60)


def _sends(connection, value):
    connection.send(("row", value))


def test_a_process_gives_answers_or_its_reason():
    children = [bench.Child(_sends, (value,), {"GPU_CHECK_TEST": "1"}) for value in (1, 2)]
    assert sorted(bench.answers(children, 60)) == [1, 2]

    with pytest.raises(bench.FailedError, match=r"RuntimeError: this is why$"):
        list(bench.answers([bench.Child(_dies, (), {}), bench.Child(_is_silent, (), {})], 60))
    with pytest.raises(bench.FailedError, match="more than 1 s"):
        list(bench.answers([bench.Child(_is_silent, (), {})], 1))


def test_the_first_steps_do_not_count():
    assert bench._times([9.0, 9.0, 9.0, 1.0, 1.0, 1.0]) == {"measured_seconds": 1.0, "spread": 0.0}
    assert bench._times([2.0])["measured_seconds"] == 2.0


def test_two_ranks_on_one_device_equal_one(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "EQUALITY_PLANS", ("tp=2",))

    found = bench.check_equality("cpu", tmp_path, {"OMP_NUM_THREADS": "1"}, lambda what: None)

    assert found["tp=2"].startswith("equal, worst difference"), found


def test_a_plan_may_be_run_on_the_device_that_is_given(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    plan: Any = type("OnePlan", (), {"mesh": type("OneMesh", (), {"num_devices": 1}), "precision": "fp32"})

    assert trainer._start(plan, torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(PlanError, match="device=meta does not train"):
        trainer._start(plan, torch.device("meta"))
    assert trainer._start(plan, None).type in ("cpu", "cuda")
