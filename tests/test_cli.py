import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from planner import cli as cli_module
from planner.plan import AXES, Plan
from tests.command_line import A100S, TWO_CORES, CommandLine

ROOT = Path(__file__).resolve().parent.parent
ON_A100S = ("--cluster", A100S, "--global-batch", 64)
MODELS = """
import torch
from torch import nn
import sys

class Two(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(width, 8)

    def forward(self, x):
        hidden = self.first(x)
        return self.second(hidden).square().mean()

class Branches(Two):
    def forward(self, x):
        hidden = self.first(x)
        if hidden.sum() > 0:
            hidden = -hidden
        return self.second(hidden).square().mean()

def branches():
    return Branches(), torch.randn(2, 8)

def good():
    print("noise on stdout")
    return Two(), torch.randn(2, 8)

def loud():
    import os
    os.write(1, b"noise below Python")
    return good()

def raises():
    raise ValueError("no weights\\nhere")

def ends():
    sys.exit(3)

def nothing():
    return None

def narrow():
    return Two(), torch.randn(2, 9)

def other_name():
    return Two(), {"y": torch.randn(2, 8)}

def wrong_shape():
    return Two(9), torch.randn(2, 8)

def no_loss():
    return nn.Sequential(nn.Linear(8, 8)), torch.randn(2, 8)

value = 3
"""


@pytest.fixture
def cli(capsys):
    return CommandLine(capsys)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in, with a file of models."""
    (tmp_path / "own.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def _left(folder):
    return {path.name for path in folder.rglob("*")} - {"own.py", "__pycache__"}


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt-2", *ON_A100S], "there is no model 'gpt-2'; did you mean gpt2 or"),
        (["gpt2", "--cluster", "1x8xA100-90GB"], "no cluster or device is named 'A100-90GB'; nearest are A100-80GB"),
        (["gpt2", "--cluster", "none/x.toml"], "none/x.toml: cannot be read: No such file"),
        (["none.py:make", *ON_A100S], "there is no file none.py"),
        (["config.json", *ON_A100S], "there is no file config.json"),
        (["own.py", *ON_A100S], "own.py names no factory; write own.py:NAME, where the file offers branches, ends"),
        (["own.py:value", *ON_A100S], "own.py has no factory 'value'; it offers branches, ends"),
        (["own.py:raises", *ON_A100S], r"the factory raises ValueError: no weights here \(.*own.py:36\)"),
        (["own.py:ends", *ON_A100S], "the model's code ends the program with exit code 3"),
        (["own.py:nothing", *ON_A100S], r"own.py:nothing: the factory returns None; it must return \(model, batch\)"),
        (["own.py:narrow", *ON_A100S], r"own.py:1[34]\b.*\[2, 9\]"),
        (["own.py:wrong_shape", *ON_A100S], r"own.py:14\b.*\[2, 8\]"),
        (["own.py:other_name", *ON_A100S], "unexpected keyword argument 'y'"),
        (["own.py:no_loss", *ON_A100S], r"the model returns a tensor of shape .*; return a scalar loss"),
        (["mlp-tiny", "--cluster", A100S, "--global-batch", 7, "--fix", "dp=2"], "7 is not divisible by 2 .*use a"),
        (["mlp-tiny", *ON_A100S, "--fix", "devices=8,dp=3"], "64 is not divisible by 3"),
        (["mlp-tiny", *ON_A100S, "--fix", "foo=1"], "'foo' is none of pp, dp, dp_shard, tp, cp, ep, zero"),
        (["mlp-tiny", *ON_A100S, "--fix", "dp"], "'dp' has no value"),
        (["mlp-tiny", *ON_A100S, "--fix", "dp=2,dp=4"], "dp is fixed twice"),
        (["mlp-tiny", *ON_A100S, "--fix", "dp=2", "--fix", "dp=4"], "dp is fixed twice"),
        (["mlp-tiny", *ON_A100S, "--fix", "dp=²"], "dp must be a whole number"),
        (
            ["mlp-tiny", *ON_A100S, "--fix", "zero=7,recompute=some,schedule=zb,pp=0"],
            "recompute must be one of none, full, is 'some'; schedule must be one of .*; pp must be .*; zero must be",
        ),
        (["mlp-tiny", *ON_A100S, "--fix", "zero=3,dp=1"], "zero=3 shards over data-parallel ranks, but dp is"),
        (["mlp-tiny", *ON_A100S, "--fix", "pp=100"], "pp=100 needs as many blocks, the model has"),
        (["mlp-tiny", *ON_A100S, "--fix", "devices=16"], "need 16 devices, the cluster has 8"),
        (["mlp-tiny", *ON_A100S, "--fix", "pp=4,dp=4"], "need 16 devices, the cluster has 8"),
        (["mlp-tiny", *ON_A100S, "--fix", "tp=16"], "need 16 devices, the cluster has 8"),
        (["gpt2", *ON_A100S, "--seq", 4096], "gpt2 has learned positions for 1024 tokens, 4096 do not fit"),
        (["resnet-tiny", *ON_A100S, "--seq", 64], "resnet-tiny has no sequence"),
        (["mlp-tiny", "--cluster", "8xV100-32GB", "--precision", "bf16"], "V100-32GB does not compute in bfloat16"),
        (["mlp-tiny", *ON_A100S, "--out", "none/plan.json"], "cannot write none/plan.json: there is no folder none"),
        (["mlp-tiny", *ON_A100S, "--out", "."], "cannot write .: it is a folder"),
    ],
)  # fmt: skip
def test_bad_input_of_plan_is_one_sentence(arguments, message, cli, folder):
    with_out = arguments if "--out" in arguments else [*arguments, "--out", "plan.json"]

    assert re.search(message, cli.error("plan", *with_out))
    assert _left(folder) == set()


def test_a_missing_folder_is_found_before_the_search(cli, folder, monkeypatch):
    monkeypatch.setattr(cli_module, "load_model", lambda *_a, **_k: pytest.fail("the model was loaded"))

    assert "there is no folder none" in cli.error("plan", "gpt2", *ON_A100S, "--out", "none/plan.json")


def test_a_cluster_on_which_nothing_fits_says_the_least_memory(cli, folder):
    message = cli.error("plan", "gpt3-175b", "--cluster", "1x2xA10G", "--global-batch", 2, "--out", "plan.json")

    assert re.match(
        r"gpt3-175b does not fit on 1x2xA10G with a global batch of 2: the leanest plan \(.*\) needs [\d.]+ [GT]iB on "
        r"a device, which has [\d.]+ GiB; .*use more devices",
        message,
    )
    assert _left(folder) == set()


def test_a_pinned_plan_that_does_not_fit_is_priced_and_says_so(cli, folder):
    pinned = "devices=1,pp=1,zero=0,recompute=full,micro_batch=1"
    arguments = ("plan", "gpt3-6.7b", "--cluster", "1xA10G", "--global-batch", 2, "--fix", pinned)
    outcome = cli(*arguments, "--json")
    [plan] = outcome.json["plans"]

    assert outcome.code == 0
    assert plan["fits"] is False
    assert max(plan["peak_bytes"]) > plan["capacity_bytes"]
    assert plan["step_seconds"] > 0
    assert "DOES NOT FIT in memory: 1" in cli(*arguments).out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND; see autoplan --help"),
        (["nothing"], "invalid choice: 'nothing'"),
        (["plan"], "required: MODEL; see autoplan plan --help"),
        (["plan", "gpt2", "--global-batch", "x"], "--global-batch: must be a whole number, is 'x'"),
        (["plan", "gpt2", "--seq", "-5"], "--seq: must not be negative, is '-5'"),
        (["plan", "gpt2", "--global-batch", "9" * 5000], "--global-batch: must be at most 1000000000"),
        (["plan", "gpt2", "--top", "0"], "--top: must be at least 1, is 0"),
        (["plan", "gpt2", "--seq", "-1"], "--seq"),
        (["plan", "gpt2", "--precision", "int8"], "--precision: invalid choice: 'int8'"),
        (["plan", "gpt2", "--time-limit", "nan"], "--time-limit: must be above 0"),
        (["plan", "gpt2", "--glob", "3"], "unrecognized arguments: --glob 3"),
        (["run", "--lr", "-1"], "--lr"),
        (["run", "--seed", "1.5"], "--seed: must be a whole number, is '1.5'"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(arguments, message, cli, folder):
    assert message in cli.error(*arguments, code=2)


@pytest.mark.parametrize("command", [["show"], ["run", "--cluster", TWO_CORES, "--plan"], ["diff", "good.json"]])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the plan plan.json: No such file"),
        (b"", "plan.json is no JSON"),
        (b"half", "plan.json is no JSON"),
        (b"\x00\xff", "not a text file"),
        (b"{}", "schema version null"),
        (b'{"schema_version": 2}', "plan.json is no valid plan: model is missing; "),
        ("folder", "Is a directory"),
    ],
)
def test_a_file_that_is_no_plan_is_one_sentence(command, content, message, cli, folder):
    from tests.test_plan import PLAN

    PLAN.save(folder / "good.json")
    if content == "folder":
        (folder / "plan.json").mkdir()
    elif content is not None:
        (folder / "plan.json").write_bytes(PLAN.dumps()[:400].encode() if content == b"half" else content)

    assert message in cli.error(*command, "plan.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mlp-tiny", "--cluster", A100S], f"{A100S} has A100-80GB devices, this machine trains on cpu"),
        (["mlp-tiny", "--cluster", TWO_CORES, "--nproc", 2], "--nproc says how many devices local has"),
        (["mlp-tiny", "--cluster", TWO_CORES, "--data", "own.py:none"], "own.py has no function 'none'"),
        (["mlp-tiny", "--cluster", TWO_CORES, "--data", "none.py:make"], "there is no file none.py"),
        (["mlp-tiny", "--cluster", TWO_CORES, "--data", "make"], "make names no function"),
        (["mlp-tiny", "--cluster", TWO_CORES, "--plan", "plan.json"], "the plan was made for another cluster"),
        (["--cluster", TWO_CORES, "--plan", "plan.json", "--fix", "dp=2"], "--fix cannot change a plan that is made"),
        (["--cluster", TWO_CORES, "--plan", "plan.json"], "the plan is for gpt-small; name the model"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines that train on CPUs")
def test_bad_input_of_run_is_one_sentence(arguments, message, cli, folder):
    from tests.test_plan import PLAN

    PLAN.save(folder / "plan.json")

    assert message in cli.error("run", *arguments)


def test_a_plan_for_another_model_is_refused(cli, folder):
    assert cli("plan", "mlp-tiny", "--cluster", TWO_CORES, "--global-batch", 8, "--out", "plan.json").code == 0

    message = cli.error("run", "resnet-tiny", "--cluster", TWO_CORES, "--plan", "plan.json")

    assert message.startswith("the plan was made for another model, sequence length or release (mlp-tiny, graph ")


def test_a_fault_of_our_own_is_one_sentence_that_says_so(cli, folder, monkeypatch):
    monkeypatch.setattr(cli_module, "load_model", lambda *_a, **_k: dict[str, int]()["lost"])
    outcome = cli("plan", "gpt2", *ON_A100S)

    assert outcome.code == 1
    assert re.fullmatch(
        r"error: a fault in autoplan, please report it: KeyError: 'lost' \(.*:\d+; --verbose .*\)\n", outcome.err
    )


def test_ctrl_c_while_planning_is_130(cli, folder, monkeypatch):
    def interrupted(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_module, "search_model", interrupted)
    outcome = cli("plan", "mlp-tiny", *ON_A100S, "--out", "plan.json")

    assert outcome == (130, "", "interrupted\n")
    assert _left(folder) == set()


# --- what is printed ------------------------------------------------------------------------------


def test_the_json_of_plan_has_the_published_shape(cli, folder):
    outcome = cli("plan", "gpt-tiny", *ON_A100S, "--top", 3, "--json", "--out", "plan.json")
    data = outcome.json

    assert (outcome.code, outcome.err) == (0, "")
    assert list(data) == ["search", "plans"]
    assert {"seconds", "configurations", "solved_exactly", "gap"} <= set(data["search"])
    assert 0 <= data["search"]["gap"] <= 0.001
    assert [plan["rank"] for plan in data["plans"]] == [1, 2, 3]
    for plan in data["plans"]:
        mesh = plan["mesh"]
        sizes = plan["micro_batch"] * plan["num_microbatches"] * mesh["dp_replicate"] * mesh["dp_shard"]
        assert list(mesh) == list(AXES)
        assert sizes == 64
        assert plan["schedule"] in ("1f1b", "gpipe")
        assert len(plan["stages"]) == len(plan["peak_bytes"]) == mesh["pp"]
        assert plan["fits"] is True
        assert max(plan["peak_bytes"]) <= plan["capacity_bytes"]
        assert 0 <= plan["bubble"] < 1
        assert 0 <= plan["gap"] <= 0.001
    keys = [(p["mesh"]["pp"], p["micro_batch"], p["schedule"], *p["mesh"].values()) for p in data["plans"]]
    assert len(set(keys)) == 3
    assert data["plans"][0].pop("rank") == 1
    assert data["plans"][0].pop("tied_with_first") is False
    assert Plan.load("plan.json").to_dict() == data["plans"][0]


@pytest.mark.parametrize("factory", ["good", "loud"])
def test_what_a_model_prints_is_not_in_the_json(factory, folder, capfd):
    """At the level of the file descriptors: libraries in C write there."""
    code = cli_module.main(["plan", f"own.py:{factory}", "--cluster", A100S, "--global-batch", "8", "--json"])
    out, err = capfd.readouterr()

    assert code == 0
    assert json.loads(out)["plans"]
    assert "noise on stdout" in err


def test_json_of_an_integer_program_has_no_banner_of_the_solver(capfd, folder):
    arguments = ["plan", "gpt2-xl", "--cluster", "1x4xA10G", "--global-batch", "8", "--fix", "pp=4,micro_batch=1"]
    code = cli_module.main([*arguments, "--json"])
    out, err = capfd.readouterr()

    assert (code, err) == (0, "")
    assert json.loads(out)["plans"][0]["mesh"]["pp"] == 4


def test_the_table_and_what_the_search_did(cli, folder):
    outcome = cli("plan", "mlp-tiny", *ON_A100S, "--out", "plan.json")
    lines = outcome.out.splitlines()

    assert outcome.err == ""
    assert lines[0].startswith("mlp-tiny on 1x8xA100-80GB (8 x A100-80GB, ")
    assert re.search(
        r"^\d+ configurations considered, \d+ bounded, (\d+ solved as integer programs|the bounds of which prove the "
        r"ranking), in ",
        outcome.out,
        re.M,
    )
    assert lines[-1] == "the first is written to plan.json; autoplan show prints it block by block"
    assert max(map(len, lines)) <= 120


def test_the_default_global_batch_is_stated(cli, folder):
    out = cli("plan", "mlp-tiny", "--cluster", A100S).out

    assert "global batch 64" in out
    assert "note: no global batch was given: 64, 8 per device, is assumed" in out


def test_show_and_diff(cli, folder):
    for name, batch in (("one.json", 8), ("two.json", 16)):
        cli("plan", "mlp-tiny", "--cluster", A100S, "--global-batch", batch, "--fix", "pp=1,dp=1", "--out", name)

    assert cli("show", "one.json").out.startswith("mlp-tiny on 1x8xA100-80GB: 1 device\n  global batch 8 = 1")
    assert cli("show", "one.json", "--json").json == Plan.load("one.json").to_dict()
    assert cli("diff", "one.json", "one.json").out == "the plans are equal\n"
    assert re.search(r"^global_batch +8 +16$", cli("diff", "one.json", "two.json").out, re.M)
    rows = cli("diff", "one.json", "two.json", "--json").json
    assert {"what": "global_batch", "here": "8", "there": "16"} in rows


def test_show_says_how_a_model_is_split(cli, folder):
    arguments = ("--cluster", A100S, "--global-batch", 16, "--fix", "tp=2,dp=1,pp=1,micro_batch=2")
    cli("plan", "gpt-tiny", *arguments, "--out", "plan.json")
    text = cli("show", "plan.json", "--sharding").out
    data = cli("show", "plan.json", "--sharding", "--json").json

    assert text.startswith(
        "gpt-tiny on 1x8xA100-80GB: split over 2 tensor-parallel ranks, collectives of one micro-batch of 2\n"
    )
    assert re.search(r"^    \S+weight: (input|output) features split 2 ways", text, re.M)
    assert re.search(
        r"^    forward: \d+ x (all_reduce|all_gather|all_to_all|reduce_scatter) of [\d.]+ [KM]iB", text, re.M
    )
    names = [name for group in data for name in group["blocks"]]
    assert names == [b.name for b in Plan.load("plan.json").block_plans]
    assert all(made["num_bytes"] > 0 for group in data for made in group["collectives"])
    assert "tp 2" in cli("show", "plan.json").out


def test_models(cli):
    rows = {row["name"]: row for row in cli("models", "--json").json}

    assert rows["gpt3-175b"]["parameters"] == pytest.approx(175e9, rel=0.01)
    assert rows["llama3-70b"]["parameters"] == pytest.approx(70.6e9, rel=0.01)
    assert re.search(r"^gpt2 +124 M +GPT, 12 layers, width 768, context 1024$", cli("models", "gpt2").out, re.M)
    assert "there is no model 'gpt-2' in the zoo; did you mean gpt2" in cli.error("models", "gpt-2")


def test_trace_prints_a_table_or_json(cli):
    text = cli("trace", "gpt-tiny", "--device", "cpu").out
    data = cli("trace", "gpt-tiny", "--device", "cpu", "--json").json

    assert text.startswith("gpt-tiny: 875 k parameters, 6 blocks of 3 classes, fp32\n")
    assert re.search(r"^4 +blocks.0 .. blocks.3 +B", text, re.M)
    assert data["precision"] == "fp32"
    assert [c["blocks"] for c in data["classes"]] == [1, 4, 1]
    assert data["attention"]["causal"] == 4


def test_trace_of_a_model_without_a_graph_is_an_answer(cli, folder):
    outcome = cli("trace", "own.py:branches")
    data = cli("trace", "own.py:branches", "--json").json

    assert outcome.code == 0
    assert "no graph: " in outcome.out
    assert not data["has_graph"]
    assert re.search(r"own\.py:\d+$", data["fallbacks"][0]["source"])
    assert _left(folder) == set()


def test_trace_keeps_what_a_model_prints_off_its_json(cli, folder):
    outcome = cli("trace", "own.py:good", "--json")

    assert outcome.code == 0
    assert outcome.json["parameters"]["total"] == 2 * 72
    assert "noise on stdout" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt-2"], "there is no model 'gpt-2'; did you mean gpt2 or"),
        (["own.py:narrow"], r"own.py:1[34]\b.*\[2, 9\]"),
        (["own.py:no_loss"], r"the model returns a tensor of shape .*; return a scalar loss"),
        (["gpt2", "--seq", 4096], "gpt2 has learned positions for 1024 tokens, 4096 do not fit"),
    ],
)
def test_trace_refuses_in_one_line(cli, folder, arguments, message):
    assert re.search(message, cli.error("trace", *arguments))


def test_clusters(cli):
    names = cli("cluster", "--json").json
    data = cli("cluster", A100S, "--json").json

    assert {"local", "dgx-h100"} <= set(names["presets"])
    assert {"A100-80GB", "H100-80GB", "V100-32GB"} <= set(names["devices"])
    assert "dgx-h100" in cli("cluster").out
    assert data["device"]["source"]["peak_flop_per_second"]
    assert len(data["fingerprint"]) == 64
    assert re.search(r"memory_bytes_per_second +2039 GB/s +NVIDIA A100 datasheet", cli("cluster", A100S).out)


def test_nothing_but_the_answer_without_a_terminal(cli, folder):
    assert cli("plan", "mlp-tiny", *ON_A100S).err == ""


def test_on_a_terminal_planning_shows_what_it_does(folder, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(
        cli_module, "Console", lambda **_options: Console(file=screen, force_terminal=True, width=80, color_system=None)
    )
    with cli_module._working(quiet=False) as progress:
        progress("solving", 2, 5)
        time.sleep(0.3)
    assert "solving 2 of 5" in screen.getvalue()
    before = len(screen.getvalue())
    with cli_module._working(quiet=True) as progress:
        progress("solving", 2, 5)
    assert len(screen.getvalue()) == before


def test_on_a_terminal_training_shows_a_bar_with_the_loss(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(
        cli_module, "Console", lambda **_options: Console(file=screen, force_terminal=True, width=80, color_system=None)
    )
    with cli_module._training(quiet=False, steps=4) as on_step:
        for step in range(4):
            on_step(step, 5.5 - step, 0.1)

    assert "4/4" in screen.getvalue()
    assert "loss 2.500" in screen.getvalue()


def test_without_a_terminal_training_prints_a_tenth_of_the_lines(capsys):
    with cli_module._training(quiet=False, steps=100) as on_step:
        for step in range(100):
            on_step(step, 5.0, 0.1)
    lines = capsys.readouterr().err.splitlines()

    assert lines[0] == "step 1 of 100  loss 5.000  0.100 s"
    assert len(lines) == 11


# --- the surface ----------------------------------------------------------------------------------


def test_the_options_are_frozen():
    [subparsers] = [a for a in cli_module.parser()._actions if hasattr(a, "choices") and a.choices]
    planning = ["--fix", "--global-batch", "--objective", "--optimizer", "--precision", "--seq", "--time-limit"]
    planning.append("--expert-loads")
    found = {
        name: sorted(option for action in command._actions for option in (action.option_strings or [action.metavar]))
        for name, command in subparsers.choices.items()  # type: ignore[union-attr]
    }
    always = ["--help", "--json", "--verbose", "-h"]

    assert found == {
        "plan": sorted(
            [*always, *planning, "--any-machine", "--cluster", "--engine", "--out", "--profile", "--top", "MODEL"]
        ),
        "trace": sorted([*always, "--device", "--precision", "--seq", "MODEL"]),
        "show": sorted([*always, "--sharding", "PLAN"]),
        "diff": sorted([*always, "OTHER", "PLAN"]),
        "audit": sorted([*always, "--any-machine", "--update-profile", "PLAN", "RUN"]),
        "run": sorted(
            [
                *always,
                *planning,
                "--any-machine",
                "--check",
                "--cluster",
                "--count-experts",
                "--data",
                "--lr",
                "--no-check",
                "--no-measure",
                "--nproc",
                "--plan",
                "--profile",
                "--record",
                "--seed",
                "--steps",
                "--weights",
                "MODEL",
            ]
        ),
        "measure": sorted(
            [
                *always,
                "--any-machine",
                "--budget",
                "--device",
                "--micro-batch",
                "--nccl-tests",
                "--nproc",
                "--only",
                "--out",
                "--precision",
                "--seq",
                "--topology",
                "--tp",
                "MODEL",
            ]
        ),
        "validate": sorted([*always, "--engine", "--explain", "--html", "FILE.csv"]),
        "models": sorted([*always, "NAME"]),
        "cluster": sorted([*always, "--nproc", "NAME"]),
    }


@pytest.mark.parametrize("command", ["", "plan", "show", "diff", "run", "models", "cluster", "measure", "validate"])
def test_every_option_is_explained(command, cli):
    outcome = cli(*filter(None, [command]), "--help")
    [action] = [a for a in cli_module.parser()._actions if hasattr(a, "choices") and a.choices]
    command_parser = action.choices[command] if command else cli_module.parser()  # type: ignore[index]

    assert outcome.code == 0
    assert outcome.out.startswith(f"usage: autoplan {command}".rstrip())
    assert all(option.help for option in command_parser._actions if option.option_strings)
    if command:
        assert f"Example: autoplan {command}" in " ".join(outcome.out.split())


# --- processes ------------------------------------------------------------------------------------


def _start(arguments, folder, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "planner", *map(str, arguments)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.mark.timeout(300)
def test_the_same_inputs_give_the_same_bytes_under_load(tmp_path):
    load = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        runs = [
            _start(["plan", "gpt2", *ON_A100S, "--fix", "tp=2", "--out", f"{seed}.json"], tmp_path, PYTHONHASHSEED=seed)
            for seed in ("1", "2")
        ]
        ends = [run.communicate(timeout=250) for run in runs]
    finally:
        load.kill()
        load.wait()

    assert [run.returncode for run in runs] == [0, 0], ends
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"1.json", "2.json"}


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    with _start(["models"], tmp_path) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        message = run.stderr.read()

    assert message == ""
    assert run.returncode == 1


def test_ctrl_c_on_a_real_terminal(tmp_path):
    terminal, its_end = os.openpty()
    arguments = ["plan", "gpt3-175b", "--cluster", "128x8xA100-80GB", "--global-batch", "1536", "--out", "plan.json"]
    run = subprocess.Popen(
        [sys.executable, "-m", "planner", *arguments],
        cwd=tmp_path,
        stdin=its_end,
        stdout=subprocess.PIPE,
        stderr=its_end,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm"},
    )
    os.close(its_end)
    shown = b""
    try:
        while b"loading the model" not in shown:
            shown += os.read(terminal, 4096)
        run.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # at the end of a terminal
            while more := os.read(terminal, 4096):
                shown += more
        out, _ = run.communicate(timeout=20)
    finally:
        run.kill()
        run.wait()
        os.close(terminal)

    assert run.returncode == 130
    assert shown.decode().splitlines()[-1].endswith("interrupted")
    assert b"Traceback" not in shown
    assert out == b""
    assert list(tmp_path.iterdir()) == []
