"""`autoplan measure`, and profiles on the way into a plan."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from planner import cli, cli_measure
from planner.cli_measure import default_path, usable_profile
from planner.cluster import Cluster
from planner.errors import ProfileError
from planner.plan import Plan
from planner.profile import Profile
from planner.runtime.machine import torch_release
from planner.search.measuring import local_measuring
from tests.test_measure_operators import MACHINE, TWO_CORES, fake_rows
from tests.test_profile import collective_row


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """Two cores that take no time to measure."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("AUTOPLAN_CACHE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    here = replace(MACHINE, torch=torch_release())
    asked: list[int] = []

    def blocks(todo, profile, *, budget_seconds, keep, progress):
        missing = [case for case in todo if case.key not in profile.block_rows]
        asked.append(len(missing))
        for case in missing:
            passes = fake_rows(case, case.micro_batch * 1e-3)
            profile = profile.with_rows([passes.block, *passes.operators])
            keep(profile)
        return profile

    def ranks(profile, what, *, budget_seconds, keep, progress):
        profile = profile.with_rows(
            [collective_row("all_reduce", size, 1e-3 + size / 1e9, ranks=2) for size in (4096.0, 1e6, 3e7)]
        )
        keep(profile)
        return profile, budget_seconds < 1

    monkeypatch.setattr(cli_measure, "local_cluster", lambda num_processes, progress: TWO_CORES)
    monkeypatch.setattr(cli_measure, "this_machine", lambda kind, processes: here)
    monkeypatch.setattr("planner.search.measuring.this_machine", lambda kind, processes: here)
    monkeypatch.setattr(cli_measure, "measure_operators", blocks)
    monkeypatch.setattr("planner.search.measuring.measure_operators", blocks)
    monkeypatch.setattr(cli_measure, "measure_here", ranks)
    return here, asked


def test_measured_once_and_planned_by(machine, capsys):
    _, asked = machine
    arguments = ["measure", "mlp-tiny", "--micro-batch", "1,4", "--out", "p.json"]

    assert cli.main(arguments) == 0
    assert cli.main(arguments) == 0

    assert asked[0] > 0
    assert asked[1] == 0
    assert "kept in p.json" in capsys.readouterr().out
    profile = Profile.load("p.json")
    assert profile.blocks
    assert profile.collectives
    planning = ["plan", "mlp-tiny", "--cluster", "two.json", "--global-batch", "8", "--out"]
    cluster = TWO_CORES.to_json()
    with open("two.json", "w") as file:  # noqa: PTH123
        file.write(cluster)
    assert cli.main([*planning, "plain.json"]) == 0
    assert "rests on measured" not in capsys.readouterr().out
    assert cli.main([*planning, "measured.json", "--profile", "p.json"]) == 0
    assert "of the first plan's step rests on measured times" in capsys.readouterr().out
    plain, measured = Plan.load("plain.json"), Plan.load("measured.json")
    assert plain.prediction.measured_share == 0
    assert "measured_share" not in plain.to_dict()
    assert 0.5 < measured.prediction.measured_share <= 1
    assert measured.prediction.step_seconds > 2 * plain.prediction.step_seconds  # a millisecond for everything
    assert cli.main(["show", "measured.json"]) == 0
    assert "rests on measured times" in capsys.readouterr().out


def test_a_budget_that_ended_among_the_collectives_is_said(machine, capsys):
    assert cli.main(["measure", "--budget", "0.5s", "--out", "p.json"]) == 0
    assert "the budget ended while collectives" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["measure", "--budget", "60s", "--out", "p.json"]) == 0
    assert "the budget ended" not in capsys.readouterr().out


def test_without_a_file_it_is_the_users_own(machine, capsys):
    here, _ = machine

    assert cli.main(["measure", "--json"]) == 0

    out = capsys.readouterr().out
    assert json.loads(out)["machine"]["host"] == here.host
    assert default_path(here).read_text() == out


def test_an_interrupted_measurement_says_what_is_kept(machine, monkeypatch, capsys):
    def interrupted(arguments, progress):
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.cli_measure.measure", interrupted)

    assert cli.main(["measure", "mlp-tiny", "--out", "p.json"]) == 130
    assert "is kept; run it again to go on" in capsys.readouterr().err


def test_a_wrong_profile_is_found_before_the_machine_is_measured(machine, monkeypatch, capsys):
    def measured(*args, **kwargs):
        raise AssertionError("measured first")

    Path("p.json").write_text("{")
    monkeypatch.setattr("planner.cli.cluster_named", measured)

    assert cli.main(["plan", "mlp-tiny", "--cluster", "local", "--profile", "p.json"]) == 1
    assert "p.json" in capsys.readouterr().err


def test_names_are_no_markup(capsys):
    assert cli.main(["cluster", "a:fire:[/b]"]) == 1
    assert "a:fire:[/b]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"), [({"host": "other"}, "another machine"), ({"torch": "2.0.0"}, "another torch (2.0.0, not ")]
)
def test_a_file_of_another_machine_is_not_added_to(machine, change, words, capsys):
    here, _ = machine
    Profile(machine=replace(here, **change)).save("p.json")

    assert cli.main(["measure", "mlp-tiny", "--out", "p.json"]) == 1
    assert words in capsys.readouterr().err
    assert not Profile.load("p.json").blocks
    assert cli.main(["measure", "mlp-tiny", "--out", "p.json", "--any-machine"]) == 0


def test_a_profile_of_another_machine_is_refused_or_asked_for(machine, monkeypatch):
    here, _ = machine
    Profile(machine=replace(here, host="other")).save("p.json")

    with pytest.raises(ProfileError, match=r"p.json is of another machine .other, not 0.; measure here"):
        usable_profile("p.json", TWO_CORES, is_local=True, any_machine=False)
    assert usable_profile("p.json", TWO_CORES, is_local=True, any_machine=True) is not None
    assert usable_profile("p.json", TWO_CORES, is_local=False, any_machine=False) is not None
    assert usable_profile(None, TWO_CORES, is_local=True, any_machine=False) is None
    with pytest.raises(ProfileError, match="a cpu device"):
        usable_profile("p.json", Cluster.load("1x8xA100-80GB"), is_local=False, any_machine=False)
    for answer, is_used in (("y\n", True), ("\n", False)):
        monkeypatch.setattr("sys.stdin", _Terminal(answer))
        monkeypatch.setattr("sys.stderr", _Terminal(""))
        if is_used:
            assert usable_profile("p.json", TWO_CORES, is_local=True, any_machine=False) is not None
        else:
            with pytest.raises(ProfileError):
                usable_profile("p.json", TWO_CORES, is_local=True, any_machine=False)


class _Terminal:
    def __init__(self, answer):
        self.answer = answer

    def isatty(self):
        return True

    def readline(self):
        return self.answer

    def write(self, text):
        return len(text)

    def flush(self):
        pass


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budget", "soon"], "must be a time such as 60s"),
        (["--micro-batch", "0"], "must be whole numbers from 1 on"),
        (["--only", "everything"], "none of operators"),
    ],
)
def test_wrong_usage_is_one_line(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["measure", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_missing_import_and_device_are_named(capsys):
    assert cli.main(["measure", "--nccl-tests", "none.txt", "--out", "p.json"]) == 1
    assert "cannot read none.txt" in capsys.readouterr().err
    assert cli.main(["measure", "--device", "cuda", "--out", "p.json"]) == 1
    assert "no CUDA device" in capsys.readouterr().err


def test_a_run_measures_a_model_once_and_a_fault_costs_only_the_rows(machine, monkeypatch):
    from tests.test_costs import gpt_graph

    _, asked = machine
    graph = gpt_graph(num_layers=1, width=32, sequence=16, vocabulary=64, dtype="float32")
    measuring = local_measuring(TWO_CORES, 4, lambda what, done, of: None)

    first = measuring(graph)
    again = measuring(graph)

    assert first.blocks
    assert again == first
    assert len(asked) == 1
    assert asked[0] > 0

    def failing(*args, **kwargs):
        raise ProfileError("busy")

    monkeypatch.setattr("planner.search.measuring.measure_operators", failing)
    assert measuring(graph) == first


def test_a_machine_that_was_measured_again_measures_its_models_again(machine):
    from tests.test_costs import gpt_graph

    _, asked = machine
    graph = gpt_graph(num_layers=1, width=32, sequence=16, vocabulary=64, dtype="float32")
    for pace in (0.001, 0.001, 0.002):
        cluster = replace(TWO_CORES, device=replace(TWO_CORES.device, pace_seconds=pace))
        local_measuring(cluster, 4, lambda what, done, of: None)(graph)

    assert len(asked) == 2  # rows of another pace are not comparable


def test_parts_of_a_model_are_measured_as_the_search_makes_them_and_counted_apart(machine):
    from planner.search import ways_to_split
    from planner.search.measuring import as_measured
    from planner.trace import trace
    from planner.zoo.load import load_model

    _, asked = machine
    loaded = load_model("gpt-tiny", device="meta")
    graph = trace(loaded.module, loaded.batch, precision="fp32", loss_fn=loaded.loss_fn, device_kind="cpu")
    measuring = local_measuring(TWO_CORES, 4, lambda what, done, of: None)
    graph, _ = as_measured(graph, measuring)
    links = replace(TWO_CORES.intra_node_link, latency_seconds=0.0, launch_seconds=0.0, bytes_per_second=1e12)
    cluster = replace(TWO_CORES, intra_node_link=links)

    ways = ways_to_split(graph, cluster, 4, "cpu", None, measuring)(("tp", 2))

    parts = [kind for way in ways if way.divides for kind in way.graph.classes if kind.kernels]
    assert parts
    assert all(kind.measured for kind in parts)
    assert len(asked) > 1
