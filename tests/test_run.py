"""`autoplan run` from end to end, on the CPU cluster of the tests."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.errors import PlannerError
from planner.runtime import launch as launch_module
from planner.runtime import worker
from planner.zoo.text import text_batch
from tests.command_line import TWO_CORES, CommandLine

ROOT = Path(__file__).resolve().parent.parent
ON_TWO = ("--cluster", TWO_CORES, "--global-batch", 8)
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(240),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the tests' cluster has CPUs"),
]
OWN = """
import itertools
import torch
from torch import nn

class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        return self.head(hidden).square().mean()

class Fails(torch.autograd.Function):  # no graph of it: the user's own code runs
    calls = 0

    @staticmethod
    def forward(context, x):
        import torch.distributed as dist
        if dist.is_initialized() and dist.get_rank() == 1:
            Fails.calls += 1
            if Fails.calls > 2:
                raise ArithmeticError("lost a digit\\nin rank one")
        return x * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * 2

class Failing(Noisy):
    def forward(self, tokens):
        return super().forward(tokens) + Fails.apply(self.head.weight).sum() * 0

def make():
    return Noisy(), {"tokens": torch.arange(8).reshape(2, 4)}

def failing():
    return Failing(), {"tokens": torch.arange(8).reshape(2, 4)}

def batches(global_batch, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield {"tokens": torch.randint(10, (global_batch, 4), generator=generator)}

def two_batches(global_batch, seed):
    yield from itertools.islice(batches(global_batch, seed), 2)

def half_batches(global_batch, seed):
    yield from batches(global_batch // 2, seed)

def out_of_range(global_batch, seed):
    while True:
        yield {"tokens": torch.full((global_batch, 4), 10)}

def broken(global_batch, seed):
    yield next(batches(global_batch, seed))
    raise OSError("the disk is gone")

def number(global_batch, seed):
    return 3
"""


@pytest.fixture
def cli(capsys):
    return CommandLine(capsys)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of the user, and one of its own for temporary files."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert _temporary(tmp_path) == []


def _temporary(folder):
    return [path.name for path in (folder / "temporary").iterdir() if path.name.startswith("autoplan-")]


def _train(cli, *arguments):
    outcome = cli("run", *arguments, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.err == ""
    return outcome.json


def test_the_losses_are_those_of_one_rank_whatever_the_plan(cli, folder):
    alone, sharded, pipelined = (
        _train(cli, "gpt-tiny", *ON_TWO, "--seq", 32, "--steps", 4, "--fix", fix)
        for fix in ("devices=1", "dp=2,zero=3", "pp=2")
    )

    assert [r["plan"]["devices"] for r in (alone, sharded, pipelined)] == [1, 2, 2]
    assert {b["zero"] for b in sharded["plan"]["stages"][0]["blocks"]} == {3}
    assert len(alone["losses"]) == 4
    assert sharded["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert pipelined["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert 4 < alone["losses"][-1] < alone["losses"][0] < 6  # of 256 bytes: ln(256) = 5.5
    for result in (alone, sharded, pipelined):
        assert {"losses", "predicted_step_seconds", "measured_step_seconds", "peak_bytes"} <= set(result)
        assert result["data"] == "text"
        assert len(result["peak_bytes"]) == result["plan"]["devices"]
        assert result["measured_step_seconds"] > 0
        assert result["predicted_step_seconds"] == result["plan"]["step_seconds"]


def test_training_by_a_plan_file_in_text(cli, folder):
    assert cli("plan", "resnet-tiny", *ON_TWO, "--fix", "devices=1", "--out", "plan.json").code == 0
    outcome = cli("run", "--cluster", TWO_CORES, "--plan", "plan.json", "--steps", 4)

    assert outcome.code == 0
    assert outcome.out.startswith("resnet-tiny on two-cores: 1 device")
    assert re.search(r"^loss [\d.]+ -> [\d.]+ in 4 steps$", outcome.out, re.M)
    assert "batches were random values like the example batch" in outcome.out  # images
    assert re.search(r"^step +[\d.]+ m?s +[\d.]+ m?s +[\d.]+$", outcome.out, re.M)
    assert re.search(r"^peak memory \(allocated by torch\) +[\d.]+ .iB", outcome.out, re.M)
    assert re.fullmatch(r"(step \d of 4  loss \d+\.\d{3}  \d+\.\d{3} s\n){4}", outcome.err)


def test_a_hugging_face_config_trains_on_text(cli, folder):
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 256, "n_positions": 32, "n_embd": 32,
        "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    (folder / "small").mkdir()
    (folder / "small" / "config.json").write_text(json.dumps(config))
    result = _train(cli, "small/config.json", *ON_TWO, "--steps", 3, "--fix", "devices=1", "--lr", "0.01")

    assert result["plan"]["model"] == "small"
    assert result["losses"][-1] < result["losses"][0] < 6


def test_training_starts_from_weights_on_disk(cli, folder, capsys):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.save_pretrained(folder / "mine", max_shard_size="30KB")
    assert len(list((folder / "mine").glob("*.safetensors"))) > 1
    capsys.readouterr()  # the library's progress bar
    alone, both = (
        _train(cli, "mine", *ON_TWO, "--steps", 2, "--fix", fix, "--weights", "mine")["losses"]
        for fix in ("devices=1", "dp=2,zero=3")
    )

    batch = text_batch(0, 8, 32, 0)["input_ids"]
    assert alone[0] == pytest.approx(model(input_ids=batch, labels=batch.clone()).loss.item(), rel=1e-5)
    assert both == pytest.approx(alone, rel=1e-5)
    said = cli.error("run", "gpt-tiny", *ON_TWO, "--json", "--weights", "mine")
    assert said.startswith("the weights in mine are not those of this model: 53 of 53 names missing (tokens.weight,")
    assert "no weights no/such" in cli.error("run", "gpt-tiny", *ON_TWO, "--json", "--weights", "no/such")


def test_a_large_model_is_built_on_meta(folder, monkeypatch):
    job = worker.Job(model="gpt-tiny", steps=1, seed=0, learning_rate=1.0)
    assert not next(worker.load_to_train(job).module.parameters()).is_meta

    monkeypatch.setattr(worker, "_LARGE_MODEL_PARAMETERS", 1000)
    loaded = worker.load_to_train(job)

    assert next(loaded.module.parameters()).is_meta
    assert isinstance(loaded.batch, dict)
    assert not loaded.batch["input_ids"].is_meta
    assert not next(worker.load_to_train(replace(job, model="own.py:make")).module.parameters()).is_meta


def test_a_factory_trains_on_the_users_own_data(cli, folder):
    result = _train(cli, "own.py:make", *ON_TWO, "--steps", 3, "--fix", "dp=2", "--data", "own.py:batches", "--seed", 3)

    assert result["plan"]["model"] == "own-make"
    assert result["data"].endswith("own.py:batches")
    assert len(set(result["losses"])) == 3


def test_too_few_batches_are_one_sentence(cli, folder):
    arguments = ("own.py:make", *ON_TWO, "--steps", 3, "--fix", "devices=1", "--data", "own.py:two_batches", "--json")

    assert cli.error("run", *arguments).endswith(
        "own.py:two_batches gave too few batches for 3 steps; give more, or lower --steps"
    )


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ("half_batches", r"the data has 4 samples in tokens, the plan's global batch is 8$"),
        ("broken", r"own.py:broken raised OSError: the disk is gone \(.*own.py:59\)"),
        ("number", r"own.py:number raised TypeError: 'int' object is not iterable"),
        ("none", r"own.py has no function 'none'"),
    ],
)
def test_what_a_loader_does_wrong_is_one_sentence(loader, message, folder):
    def parts():
        return [worker._part_of(batch, 1, 2, 8) for batch in worker._user_batches(f"own.py:{loader}", 8, 0)]

    with pytest.raises(PlannerError, match=message):
        parts()


def test_the_parts_of_a_batch_are_the_batch():
    batch: dict[str, Any] = {"x": torch.arange(8.0), "scale": torch.ones(3), "nested": [torch.arange(16).reshape(8, 2)]}
    parts = [worker._part_of(batch, rank, 4, 8) for rank in range(4)]

    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert torch.equal(torch.cat([part["nested"][0] for part in parts]), batch["nested"][0])
    assert all(torch.equal(part["scale"], batch["scale"]) for part in parts)


def test_random_batches_keep_the_structure_of_the_example():
    example = {"x": torch.zeros(2, 3), "more": [torch.zeros(2, 4, dtype=torch.int64)]}
    first, again, other = (worker._random_batch(example, 6, 0, step) for step in (1, 1, 2))

    assert first["x"].shape == (6, 3)
    assert first["more"][0].shape == (6, 4)
    assert torch.equal(first["x"], again["x"])
    assert not torch.equal(first["x"], other["x"])


def test_an_error_inside_a_block_names_the_users_line(cli, folder):
    outcome = cli(
        "run", "own.py:make", *ON_TWO, "--steps", 3, "--fix", "dp=2", "--json", "--data", "own.py:out_of_range"
    )
    last = outcome.err.splitlines()[-1]

    assert (outcome.code, outcome.out) == (1, "")
    assert "Traceback (most recent call last):" in outcome.err
    assert re.match(r"error: rank [01] failed: IndexError: index out of range in self \(.*own.py:13\b", last)


def test_a_rank_that_raises_in_the_users_code_ends_all(cli, folder):
    start = time.monotonic()
    outcome = cli("run", "own.py:failing", *ON_TWO, "--steps", 1000, "--fix", "dp=2", "--json")
    last = outcome.err.splitlines()[-1]

    assert (outcome.code, outcome.out) == (1, "")
    assert "Traceback (most recent call last):" in outcome.err
    assert re.match(r"error: rank 1 failed: ArithmeticError: lost a digit.*own.py:25\b", last), last
    assert time.monotonic() - start < 200


# --- processes that die ---------------------------------------------------------------------------


def _descendants(pid):
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found[1:]


def _command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []


def _ranks(pid):
    """The ranks under a process, by rank."""
    result = {}
    for child in _descendants(pid):
        variables = Path(f"/proc/{child}/environ").read_bytes().decode().split("\0")
        result.update({int(value[5:]): child for value in variables if value.startswith("RANK=")})
    return result


def _alive(pids):
    return [pid for pid in pids if _command_of(pid) not in ([], [""])]


@contextmanager
def _training_process(folder):
    """`autoplan run` on two ranks, as soon as it trains."""
    process = subprocess.Popen(
        [sys.executable, "-m", "planner", "run", "mlp-tiny", *map(str, ON_TWO), "--fix", "dp=2", "--steps", "1000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert first.startswith("step 1 of 1000000"), first + process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("number", "code", "message"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "ended by a signal")]
)
def test_a_signal_to_the_parent_ends_everything(number, code, message, folder):
    with _training_process(folder) as process:
        everyone = _descendants(process.pid)
        process.send_signal(number)
        _, err = process.communicate(timeout=20)

    assert process.returncode == code
    assert err.splitlines()[-1] == message
    assert len(everyone) >= 3
    assert _alive(everyone) == []
    assert _temporary(folder) == []


def test_a_killed_rank_ends_everything_and_is_named(folder):
    with _training_process(folder) as process:
        everyone = _descendants(process.pid)
        start = time.monotonic()
        os.kill(_ranks(process.pid)[1], signal.SIGKILL)
        _, err = process.communicate(timeout=20)
        seconds = time.monotonic() - start

    assert process.returncode == 1
    assert err.splitlines()[-1] == (
        "error: rank 1 was killed by SIGKILL (by a person, or because memory ran out); all other ranks were ended"
    )
    assert "Traceback" not in err
    assert seconds < 10
    assert _alive(everyone) == []


def test_the_ranks_end_with_a_killed_parent(folder):
    with _training_process(folder) as process:
        everyone = _descendants(process.pid)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 10
        while _alive(everyone) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = _alive(everyone)
        for name in _temporary(folder):  # nobody is left who could
            for path in (folder / "temporary" / name).iterdir():
                path.unlink()
            (folder / "temporary" / name).rmdir()

    assert left == []


# --- whose fault it was ---------------------------------------------------------------------------


def _report(folder, rank, kind, message, *, time_=0.0, expected=False, place=""):
    report = {"rank": rank, "type": kind, "message": message, "notes": [], "place": place, "expected": expected,
              "traceback": f"traceback of {rank}", "time": time_}  # fmt: skip
    (folder / f"error-{rank}.json").write_text(json.dumps(report))


SUMMARY = """
[1]:
  time      : 2025-01-01_00:00:00
  host      : somewhere
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 12)
"""


@pytest.mark.parametrize(
    ("reports", "log", "message"),
    [
        ([(0, "RuntimeError", "Connection closed by peer")], SUMMARY, "rank 1 was killed by SIGKILL"),
        ([(0, "RuntimeError", "Connection closed by peer")], "", "rank 0 failed: RuntimeError: Connection closed"),
        ([(0, "RuntimeError", "Connection reset by peer"), (1, "KeyError", "'x'")], "", "rank 1 failed: KeyError: 'x'"),
        ([(0, "KeyError", "'x'")], SUMMARY, "rank 0 failed: KeyError: 'x'"),
        ([], "no module", "torchrun ended with exit code 1, its last words are above"),
    ],
)
def test_the_cause_is_named_and_not_what_follows_from_it(reports, log, message, tmp_path):
    for rank, kind, text in reports:
        _report(tmp_path, rank, kind, text)
    (tmp_path / "torchrun.log").write_text(log)

    assert str(launch_module._failure(tmp_path, 1)).startswith(message)


def test_the_earliest_of_two_faults_is_named(tmp_path):
    _report(tmp_path, 0, "KeyError", "late", time_=2.0)
    _report(tmp_path, 1, "ValueError", "early", time_=1.0, place="own.py:3")
    (tmp_path / "torchrun.log").write_text("")
    error = launch_module._failure(tmp_path, 1)

    assert str(error) == "rank 1 failed: ValueError: early (own.py:3)"
    assert error.details == "traceback of 1"
