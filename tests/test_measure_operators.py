"""Timing a model's blocks: what is measured, under which keys, and that an interruption loses nothing."""

import json
from contextlib import contextmanager
from dataclasses import asdict, replace

import pytest
import torch

from planner.cluster import Cluster
from planner.costs import least_seconds
from planner.errors import ProfileError
from planner.graph import BlockClass, Prelude
from planner.measure import operators
from planner.measure.operators import measure_operators
from planner.measure.passes import Case, Passes, cases, measure_passes, spread
from planner.operators import measured_share
from planner.plan import Mesh
from planner.profile import BlockRow, Machine, OperatorRow, Profile, measured_graph, operator_key, operator_name
from planner.search.measuring import affordable, run_micro_batches
from planner.trace import trace
from planner.zoo.gpt import GPT, GPTConfig
from planner.zoo.resnet import ResNet, ResNetConfig

CPU = torch.device("cpu")
TWO_CORES = Cluster.load("tests/two_cores.json")
MACHINE = Machine(
    device="cpu", kind="cpu", capability="none", driver="none", torch="2.13.0", python="3.11.7", host="0", processes=2,
    threads=1, date="2026-01-01",
)  # fmt: skip


@pytest.fixture(scope="module")
def graph():
    config = GPTConfig(layers=2, width=32, heads=2, context=16, vocabulary=64, tied_embeddings=False)
    batch = {name: torch.zeros(2, 16, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}
    with torch.device("meta"):
        model = GPT(config)
    return trace(model, batch, precision="fp32", device_kind="cpu", name="small")


@pytest.fixture(scope="module")
def convolutions():
    batch = {
        "images": torch.zeros(2, 3, 16, 16, device="meta"), "labels": torch.zeros(2, dtype=torch.int64, device="meta"),
    }  # fmt: skip
    with torch.device("meta"):
        model = ResNet(ResNetConfig(blocks=(1, 1, 1, 1), channels=4, classes=4, image=16))
    return trace(model, batch, precision="fp32", device_kind="cpu", name="convolutions")


def measured(case):
    return measure_passes(case, CPU, 0.02)


@pytest.mark.parametrize("name", ["graph", "convolutions"])
def test_rows_have_the_keys_by_which_kernels_are_priced(name, request):
    of = request.getfixturevalue(name)
    for case in cases([(of, {})], [3]):
        rows = {row.key: row for row in measured(case).operators}

        assert set(rows) == {operator_key(kernel, 3) for kernel in case.kind.kernels}
        assert all(row.seconds > 0 and row.repeats >= 5 for row in rows.values())


def test_what_a_block_saves_is_what_was_priced(graph):
    for case in cases([(graph, {})], [2]):
        block = measured(case).block

        assert block.saved_bytes == case.kind.saved.at(2)
        assert block.forward_peak_bytes <= case.kind.forward_peak.at(2) + 1
        assert block.backward_peak_bytes >= case.kind.backward_peak.at(2) * 0.5


def test_saved_bytes_belong_to_the_operators_that_made_them(graph):
    case = next(c for c in cases([(graph, {})], [2]) if "blocks.0" in c.name)

    passes = measured(case)

    of_attention = next(row for row in passes.operators if row.op == "attention" and row.phase == "forward")
    assert of_attention.saved_bytes == 4 * 2 * 16 * 32 + 4 * 2 * 2 * 16  # its output, and a logarithm for each row
    assert not any(row.saved_bytes for row in passes.operators if row.phase == "backward")


def test_kernels_and_host_add_up_to_the_pass(graph, monkeypatch):
    """The clock ticks once a call: a pass is two readings apart, an operator one."""
    ticks = iter(range(10**9))
    monkeypatch.setattr("planner.measure.passes.time.thread_time", lambda: float(next(ticks)))
    monkeypatch.setattr("planner.measure.passes._call_seconds", lambda timer: 0.0)
    case = next(c for c in cases([(graph, {})], [1]) if "blocks.0" in c.name)

    passes = measured(case)

    assert {row.seconds for row in passes.operators} == {1.0}
    block = passes.block
    assert block.forward_seconds + block.forward_host_seconds == pytest.approx(1.0)
    assert block.backward_seconds + block.backward_host_seconds == pytest.approx(1.0)
    assert min(block.forward_host_seconds, block.backward_host_seconds) > 0  # however long its operators took alone


def test_passes_and_operators_are_scaled_to_the_pace_that_is_asked_for(graph, monkeypatch):
    class Slow:
        def measure(self, work):
            return work(), 4.0

    ticks = iter(range(10**9))
    monkeypatch.setattr("planner.measure.passes.Paced", Slow)
    monkeypatch.setattr("planner.measure.passes.time.thread_time", lambda: float(next(ticks)))
    monkeypatch.setattr("planner.measure.passes._call_seconds", lambda timer: 0.0)
    case = next(c for c in cases([(graph, {})], [1]) if "blocks.0" in c.name)

    passes = measure_passes(case, CPU, 0.02, pace=1.0)

    assert {row.seconds for row in passes.operators} == {0.25}
    assert passes.block.forward_seconds + passes.block.forward_host_seconds == pytest.approx(0.25)


def test_the_step_of_a_measured_model_is_the_sum_of_its_passes(graph):
    todo = cases([(graph, {})], [2])
    rows = [row for case in todo for row in (measured(case).block,)]
    profile = Profile(machine=MACHINE).with_rows(rows)
    of = replace(measured_graph(graph, profile), prelude=Prelude())
    by_key = {row.key: row for row in rows}

    seconds = least_seconds(of, TWO_CORES, mesh=Mesh(), micro_batch=2)

    expected = 0.0
    for block in graph.blocks:
        row = by_key[Case(graph=graph, class_index=block.class_index, micro_batch=2).key]
        for kernels, host in (
            (row.forward_seconds, row.forward_host_seconds), (row.backward_seconds, row.backward_host_seconds),
        ):  # fmt: skip
            call = TWO_CORES.device.block_seconds
            expected += kernels + max(host - call, 0.1 * host) + call
    assert seconds == pytest.approx(expected, rel=1e-6)
    assert measured_share(TWO_CORES.device, of, 2) == pytest.approx(1.0)
    assert measured_share(TWO_CORES.device, of, 8) == 0.0
    assert measured_share(TWO_CORES.device, graph, 2) == 0.0


def test_equal_blocks_are_one_case_and_small_micro_batches_come_first(graph):
    todo = cases([(graph, {}), (graph, {})], [1, 2])

    assert len(todo) == 2 * len(graph.classes) < 2 * len(graph.blocks)
    assert [case.micro_batch for case in todo] == sorted(case.micro_batch for case in todo)


def test_what_takes_too_long_or_too_much_memory_is_left_out(graph):
    todo = cases([(graph, {})], [1])

    assert affordable(todo, TWO_CORES, 10.0, estimate=lambda case: 1e-3) == todo
    assert affordable(todo, TWO_CORES, 10.0, estimate=lambda case: 1.0) == []
    device = replace(TWO_CORES.device, memory_bytes=TWO_CORES.device.context_bytes + 10_000)
    assert affordable(todo, replace(TWO_CORES, device=device), 10.0, estimate=lambda case: 1e-3) == []
    assert run_micro_batches(1) == (1,)


# --- what ends, and goes on -----------------------------------------------------------------------


def fake_rows(case, seconds=1e-3):
    block = BlockRow(
        key=case.key, name=case.name, micro_batch=case.micro_batch, forward_seconds=seconds, backward_seconds=seconds,
        forward_host_seconds=seconds, backward_host_seconds=seconds, spread=0.0, repeats=5, saved_bytes=0.0,
        forward_peak_bytes=0.0, backward_peak_bytes=0.0,
    )  # fmt: skip
    rows = tuple(
        OperatorRow(
            op=operator_name(k), phase=k.phase, operands=tuple(o.text(case.micro_batch) for o in k.operands),
            flop=k.flop.at(case.micro_batch), seconds=seconds, spread=0.0, repeats=5, made_bytes=0.0, saved_bytes=0.0,
            peak_bytes=0.0,
        )
        for k in case.kind.kernels
    )  # fmt: skip
    return Passes(block=block, operators=rows)


class Ranks:
    """Stands for the processes: rank r takes (1 + r) ms for everything, each case `growth` times the last."""

    def __init__(self, todo, fail=(), stop_after=None, growth=1.0):
        self.todo, self.fail, self.stop_after, self.growth = todo, fail, stop_after, growth
        self.started = 0

    @contextmanager
    def __call__(self, code_of, num_processes, variables, prepare=None):
        self.started += 1
        lines = iter(self.lines(num_processes))

        def wait(seconds):
            return next(lines)

        yield wait

    def lines(self, num_processes):
        for rank in range(num_processes):
            yield rank, "ready"
        for index, case in enumerate(self.todo):
            if index == self.stop_after:
                raise KeyboardInterrupt
            for rank in range(num_processes):
                if index in self.fail:
                    yield rank, json.dumps({"case": index, "error": "RuntimeError: out of memory"})
                    continue
                passes = fake_rows(case, 1e-3 * (1 + rank) * self.growth**index)
                rows = [asdict(row) for row in passes.operators]
                yield rank, json.dumps({"case": index, "block": asdict(passes.block), "operators": rows})


def run(monkeypatch, todo, profile, kept, **options):
    missing = [case for case in todo if case.key not in profile.block_rows]
    ranks = Ranks(missing, **options)
    monkeypatch.setattr(operators, "listening", ranks)
    return measure_operators(todo, profile, budget_seconds=60.0, keep=kept.append, progress=lambda what, done, of: None)


def test_interrupted_and_resumed_gives_the_same_rows(graph, monkeypatch):
    todo = cases([(graph, {})], [1, 2])
    start = Profile(machine=MACHINE)
    whole = run(monkeypatch, todo, start, [])
    kept: list[Profile] = []

    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, todo, start, kept, stop_after=3)
    assert len(kept[-1].blocks) == 3
    resumed = run(monkeypatch, todo, kept[-1], kept)

    assert resumed == whole
    assert resumed.row_keys() == whole.row_keys()
    assert {row.seconds for row in resumed.operators} == {2e-3}  # of the slower rank


def test_going_on_changes_no_row_that_is_kept(graph, monkeypatch):
    """Blocks share operators: what the first block took of one stays, however fast it is in a later block."""
    todo = cases([(graph, {})], [1])
    kept: list[Profile] = []
    last = run(monkeypatch, todo, Profile(machine=MACHINE), kept, growth=2.0)

    keys = [{row.key for row in fake_rows(case).operators} for case in todo]
    assert sum(map(len, keys)) > len(set.union(*keys))
    for profile in kept:
        assert {*profile.operators} <= {*last.operators}
        assert {*profile.blocks} <= {*last.blocks}


def test_what_is_measured_is_not_measured_again(graph, monkeypatch):
    todo = cases([(graph, {})], [1])
    whole = run(monkeypatch, todo, Profile(machine=MACHINE), [])
    monkeypatch.setattr(operators, "listening", None)  # would fail if called

    kept: list[Profile] = []

    again = measure_operators(todo, whole, budget_seconds=1.0, keep=kept.append, progress=lambda what, done, of: None)

    assert not kept

    assert again == whole


def test_the_budget_ends_it_with_what_there_is(graph, monkeypatch):
    todo = cases([(graph, {})], [1, 2])
    times = iter([10.0 * n for n in range(1, 1000)])
    monkeypatch.setattr("planner.measure.operators.time.monotonic", lambda: next(times))

    profile = run(monkeypatch, todo, Profile(machine=MACHINE), [])

    assert 0 < len(profile.blocks) < len(todo)


def test_a_block_that_cannot_run_costs_its_rows_alone(graph, monkeypatch):
    todo = cases([(graph, {})], [1])

    profile = run(monkeypatch, todo, Profile(machine=MACHINE), [], fail=(1,))

    assert len(profile.blocks) == len(todo) - 1
    with pytest.raises(ProfileError, match=r"no block could be measured: .*out of memory"):
        run(monkeypatch, todo, Profile(machine=MACHINE), [], fail=range(len(todo)))


def test_the_spread_is_that_of_the_quartiles():
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
    assert spread([1.0]) == 0.0


@pytest.mark.distributed
def test_processes_measure_a_model(graph):
    todo = cases([(graph, {})], [1])[:2]
    kept: list[Profile] = []

    profile = measure_operators(
        todo, Profile(machine=MACHINE), budget_seconds=0.5, keep=kept.append, progress=lambda what, done, of: None
    )

    assert {row.key for row in profile.blocks} <= {case.key for case in todo}
    assert profile.blocks
    assert kept[-1] == profile
    assert isinstance(todo[0].kind, BlockClass)
