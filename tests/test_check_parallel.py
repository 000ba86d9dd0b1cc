"""The self-check of tensor parallelism: quiet where the ranks are right, loud and precise about planted faults."""

import json
import time
from contextlib import nullcontext

import pytest
import torch

from planner import cli
from planner.errors import CheckError, RunError
from planner.graph import Graph
from planner.runtime import check as checking
from planner.runtime.check import CheckReport, check_blocks
from planner.runtime.sides import repeats
from planner.runtime.split import Split
from planner.runtime.worker import Job
from planner.shard.chain import AxisSplit
from planner.shard.placement import Sharding
from planner.shard.program import variants
from planner.trace import trace
from tests import check_cases as cases
from tests import models
from tests.check_cases import FAULTS, Layer, Stack, planted, shardings_of, traced
from tests.command_line import TWO_CORES, CommandLine
from tests.distributed_cases import PRICES, found_shardings
from tests.float64 import explicit_float32_as_float64
from tests.ranks import RankPool
from tests.sharded import split_by

CPU = torch.device("cpu")


def checked(
    model: torch.nn.Module, graph: Graph, shardings: tuple[Sharding, ...], degree: int = 2, precision: str = "fp64"
) -> CheckReport:
    return check_blocks(
        model, graph, precision=precision, micro_batch=2, device=CPU, splits=split_by(shardings, degree)
    )  # fmt: skip


# --- no false alarm ---

DEFAULT = {("gpt", "bf16", 2), ("llama", "fp32", 4), ("moe", "fp64", 2)}


@pytest.mark.parametrize(
    ("name", "precision", "degree"),
    [
        pytest.param(
            name, precision, degree, marks=[] if (name, precision, degree) in DEFAULT else pytest.mark.matrix
        )
        for name in models.MODELS
        for precision in ("fp64", "fp32", "bf16")
        for degree in (2, 4)
    ],
)  # fmt: skip
def test_ranks_that_are_right_pass(name: str, precision: str, degree: int) -> None:
    dtype = torch.float64 if precision == "fp64" else torch.float32
    is_patched = precision == "fp64" and models.MODELS[name].needs_float64_mode
    with explicit_float32_as_float64() if is_patched else nullcontext():
        model = models.build(name, dtype=dtype)
        graph = trace(model, models.batch(name, 4, step=0, dtype=dtype), precision=precision, device_kind="cpu")
        found = variants(graph, degree, PRICES)
        for variant in found[:: len(found) - 1 or 1]:
            start = time.process_time()
            report = checked(model, graph, variant.shardings, degree, precision)
            assert time.process_time() - start < 2.0 or name not in ("gpt", "llama")

            if name == "resnet" and precision == "bf16":  # batch norm with statistics in float32 is not on the CPU
                assert "expected scalar type BFloat16" in report.skipped
                continue
            assert report.skipped == ""
            assert report.ranks == degree
            assert f"on {degree} ranks of tp" in str(report)
            assert report.difference <= {"fp64": 1e-12, "fp32": 2e-6, "bf16": 5e-2}[precision], variant.name


def test_the_repeats_of_a_block_that_is_split_alike_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "_WHOLE_FLOP", {"cpu": 0.0})
    affordable = checking._affordable
    monkeypatch.setattr(checking, "_affordable", lambda *a: f if isinstance(f := affordable(*a), str) else f[:1])
    model = models.build("gpt-tied", dtype=torch.float32)
    graph = trace(model, models.batch("gpt-tied", 4, step=0, dtype=torch.float32), precision="fp32", device_kind="cpu")

    report = checked(model, graph, found_shardings(graph, 2, "fast"), precision="fp32")

    assert (report.blocks, report.of_blocks, report.ranks, report.skipped) == (3, 6, 2, "")


def test_the_run_of_the_ranks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("gpt")
    graph = trace(model, models.batch("gpt", 4, step=0), precision="fp64", device_kind="cpu")
    shardings = found_shardings(graph, 2, "fast")
    split = Split.of(graph, split_by(shardings, 2))
    one, both = (checking._flop(graph, (), 1, s) for s in (None, split))

    assert 0.95 < split.flop_ratio() < 1.3
    assert both == one * (1 + split.flop_ratio())
    monkeypatch.setattr(checking, "_WHOLE_FLOP", {"cpu": 0.0})
    left = repeats(model, graph, split.links)
    assert len(left) == 3
    monkeypatch.setattr(checking, "_LEAST_FLOP", {"cpu": 1.5 * checking._flop(graph, left, 1, None)})
    assert "FLOP, too many for cpu" in checked(model, graph, shardings).skipped
    assert checking._bytes(graph, (), 1, torch.float64, split) > checking._bytes(graph, (), 1, torch.float64, None)


# --- planted faults ---


IN_BF16 = {"norm over a split dim", "copy without a sum"}  # by default; the others under the marker


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(
            name,
            precision,
            marks=[] if precision == "fp64" or (precision == "bf16" and name in IN_BF16) else pytest.mark.matrix,
        )
        for name in FAULTS
        for precision in ("fp64", "fp32", "bf16")
    ],
)
def test_a_fault_is_refused_and_named(name: str, precision: str) -> None:
    fault = FAULTS[name]
    model = Stack(fault.make)
    graph = traced(model, precision)
    right = checked(model, graph, shardings_of(graph, fault.variant), precision=precision)
    assert right.difference < {"fp64": 1e-12, "fp32": 1e-5, "bf16": 0.1}[precision]
    with planted(fault), pytest.raises(CheckError) as caught:
        checked(model, graph, shardings_of(graph, fault.variant), precision=precision)

    sentence = str(caught.value)
    assert "\n" not in sentence
    assert "on the 2 ranks of tp" in sentence
    assert "check_cases.py:" in sentence
    assert fault.operator in sentence
    assert fault.placed in sentence
    assert "check=False (--no-check)" in sentence
    assert ("check='replicate' (--check replicate)" in sentence) == bool(fault.operator)


class Rounded(torch.nn.Module):
    """Its choices are the last bits of what ranks add up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(torch.tanh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y * (1 + (y * 2**53).long() % 2)


@pytest.mark.parametrize(("on_one_device", "error"), [(True, RuntimeError), (False, RuntimeError), (True, MemoryError)])
def test_ranks_that_cannot_be_run_are_a_fault_where_one_device_can(
    on_one_device: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Stack(lambda: Layer(torch.tanh))
    graph = traced(model)

    def fails(*_: object, splits: tuple[AxisSplit, ...], **__: object) -> CheckReport:
        if splits or not on_one_device:
            raise error("sizes differ")
        return CheckReport()

    monkeypatch.setattr(checking, "check_blocks", fails)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    shardings = shardings_of(graph, "lean")

    def check() -> CheckReport:
        return checking.check_everywhere(
            model, graph, precision="fp64", micro_batch=2, device=CPU, splits=split_by(shardings, 2)
        )[0]

    if on_one_device and error is RuntimeError:
        with pytest.raises(CheckError, match=r"ranks of tp fail with .*sizes differ"):
            check()
    else:
        assert "sizes differ" in check().skipped


@pytest.mark.parametrize("side", ["chain", "ranks"])
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
    ],
)
def test_memory_that_runs_out_is_no_fault_of_the_model(
    side: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(_: object) -> None:
        raise error

    model = Stack(lambda: Layer(torch.tanh))
    graph = traced(model)
    monkeypatch.setattr(checking._Subject, side, exhausted)

    report = checked(model, graph, shardings_of(graph, "lean"))

    assert report.skipped.startswith(f"it ran out of memory on cpu: {type(error).__name__}")


def test_another_error_of_the_ranks_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise RuntimeError("sizes differ")

    model = Stack(lambda: Layer(torch.tanh))
    graph = traced(model)
    monkeypatch.setattr(checking._Subject, "ranks", fails)

    with pytest.raises(CheckError, match=r"ranks of tp fail where the module runs: RuntimeError: sizes differ"):
        checked(model, graph, shardings_of(graph, "lean"))


def test_a_choice_that_rounding_makes_is_no_fault() -> None:
    model = Stack(Rounded)
    graph = traced(model)
    assert checked(model, graph, ()).skipped == ""

    report = checked(model, graph, shardings_of(graph, "lean"))

    assert report.skipped.startswith("rounding lets the ranks of tp choose otherwise than one device: aten.remainder.")
    assert "test_check_parallel.py:" in report.skipped


def test_a_relu_that_rounding_takes_to_the_other_side_is_no_fault() -> None:
    model = models.build("unet", dtype=torch.float32)
    batch = models.batch("unet", 4, step=0, dtype=torch.float32)
    graph = trace(model, batch, precision="bf16", device_kind="cpu")
    shardings = found_shardings(graph, 2, "lean")

    report = check_blocks(
        model, graph, precision="bf16", micro_batch=2, device=CPU, batch=batch, splits=split_by(shardings, 2)
    )  # fmt: skip

    assert report.skipped == ""  # random samples do
    assert report.ranks == 2


REPLICATED = {"softmax along its own dim", "gradient of a weight that is a part", "copy without a sum"}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in REPLICATED else pytest.mark.matrix)
        for name, fault in FAULTS.items()
        if fault.operator
    ],
)
def test_an_operator_at_fault_is_replicated_where_allowed_and_the_model_trains_right(two: RankPool, name: str) -> None:
    first, second = two.run(cases.refused_then_trained, name)

    assert first == second
    sentence, report, replicated, errors = first
    assert FAULTS[name].operator in sentence
    assert replicated == (FAULTS[name].operator,)
    assert report.endswith(f"; {FAULTS[name].operator} run replicated")
    assert max(errors) < 1e-9


@pytest.mark.parametrize(
    ("given", "check"), [([], True), (["--check", "replicate"], "replicate"), (["--no-check"], False)]
)
def test_the_command_line_says_what_is_done_with_a_fault(
    given: list[str], check: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs: list[Job] = []

    def launch(job: Job, *_: object) -> None:
        jobs.append(Job(**json.loads(job.dumps())))
        raise RunError("that is all")

    monkeypatch.setattr(cli, "launch", launch)
    outcome = CommandLine(capsys)("run", "mlp-tiny", "--cluster", TWO_CORES, "--global-batch", 8, "--json", *given)

    assert (outcome.code, outcome.err) == (1, "error: that is all\n")
    assert [job.check for job in jobs] == [check]
