"""One script for one GPU: measure it, train on it, and print what was predicted beside what it took.

    python -m benchmarks.gpu_check [SUBJECT ...] [--device cuda|cpu] [--budget 11m] [--steps 20] [--out DIR]
                                   [--without equality,compile] [--json]

A subject is MODEL/PRECISION/MICRO_BATCHES with an optional sequence length, as in `gpt2-xl/bf16/2,8` or
`llama3-1b/bf16/1,4/2048`; the precision tf32 is fp32 with TensorFloat-32 products. Without subjects those of SUBJECTS
are taken: on a GPU models of up to 1.6 billion parameters, on a CPU a tiny one of each kind.

For each subject the passes of its blocks are measured into a profile; then it is trained by the plans of its two
micro-batches, with and without recomputation. Each step is predicted twice: from data sheets, and by the profile. Peaks
are those of torch's allocator. Then two ranks share the GPU over gloo and train as one device does, in float64; and
plain modules train under torch.compile, as it is and with CUDA graphs: there the predicted and measured seconds are
those of forward and backward alone.

What the budget leaves no time for is said to be left out. Ctrl-C ends it and prints what is known by then. `--out`
takes `gpu_check.json` with all figures, `profile.json` and, where there is a subject in it, `profile-tf32.json`.
"""

import argparse
import contextlib
import gc
import json
import multiprocessing as mp
import os
import pickle
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from planner.cluster import Cluster
from planner.engine import STOCK, Engine, engine_named
from planner.engine_seconds import least_engine_seconds
from planner.errors import PlannerError, ProfileError
from planner.graph import Graph
from planner.measure import local_cluster
from planner.measure.fabric import measure_here
from planner.measure.local import CPU_VARIABLES
from planner.measure.operators import measure_operators
from planner.measure.passes import cases
from planner.plan import Mesh, Plan
from planner.profile import Profile, measured_cluster, measured_graph
from planner.runtime.allocated import held_bytes, with_peak
from planner.runtime.machine import this_machine
from planner.runtime.parent import PARENT_VARIABLE, die_with_parent
from planner.runtime.trainer import apply_plan
from planner.search import search, ways_to_split
from planner.trace import trace
from planner.zoo.load import load_model
from planner.zoo.text import random_batch

SEED = 0
WARM_UP_STEPS = 3
EQUALITY_MODEL, EQUALITY_SAMPLES, EQUALITY_STEPS = "gpt-tiny", 4, 3
EQUALITY_PLANS = ("dp=2,zero=0", "dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2")
EQUALITY_SECONDS = 120.0  # of each plan, imports included
SAME = 1e-9  # relative difference of float64 weights after some steps
PASSES_SECONDS = 25.0  # that the blocks of a subject may be measured
MACHINE_SECONDS = 40.0  # that the optimizer and copies may be measured
COMPILE_SECONDS = 150.0  # that one way to compile may take
TF32_VARIABLES = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
COMPILED: dict[str, dict[str, Any]] = {"torch.compile": {}, "CUDA graphs": {"mode": "reduce-overhead"}}
Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to train, and how."""

    model: str
    precision: str  # bf16, fp32, or tf32: fp32 whose products are in TensorFloat-32
    micro_batches: tuple[int, ...]
    sequence_length: int | None = None

    @classmethod
    def of(cls, text: str) -> "Subject":
        """As it is written on the command line.

        >>> Subject.of("gpt2/bf16/8,32").micro_batches
        (8, 32)

        Raises:
            ValueError: it is written otherwise.
        """
        parts = text.split("/")
        if len(parts) not in (3, 4) or parts[1] not in ("bf16", "fp32", "tf32"):
            raise ValueError(f"{text!r} is not MODEL/PRECISION/MICRO_BATCHES, as in gpt2/bf16/8,32")
        sizes = tuple(sorted({int(size) for size in parts[2].split(",")}))
        if sizes[0] < 1 or any(sizes[-1] % size for size in sizes):
            raise ValueError(f"the micro-batches of {text!r} must divide the largest of them")
        return cls(
            model=parts[0], precision=parts[1], micro_batches=sizes,
            sequence_length=int(parts[3]) if len(parts) == 4 else None,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.model} {self.precision}"

    @property
    def graph_precision(self) -> str:
        """What the planner calls it."""
        return "fp32" if self.precision == "tf32" else self.precision

    @property
    def variables(self) -> dict[str, str]:
        """Of the environment of processes that run it."""
        return TF32_VARIABLES if self.precision == "tf32" else {}


SUBJECTS: dict[str, tuple[str, ...]] = {
    "cuda": (
        "gpt2/bf16/4,16", "bert-large/bf16/8,32", "resnet50/bf16/32,128", "vit-l16/bf16/16,64",
        "llama3-1b/bf16/1,4/2048", "gpt2-xl/bf16/2,8", "gpt2/fp32/4,16", "gpt2/tf32/4,16",
    ),
    "cpu": ("gpt-tiny/fp32/2,8", "resnet-tiny/fp32/8,32"),
}  # fmt: skip


@dataclass(kw_only=True)
class Row:
    """One way to train, predicted and measured; seconds are medians, bytes what torch's allocator gave out at most."""

    subject: str
    way: str
    predicted_seconds: float | None = None
    by_profile_seconds: float | None = None
    measured_share: float | None = None  # of the prediction by the profile
    measured_seconds: float | None = None
    spread: float | None = None  # distance of the quartiles over the median
    predicted_bytes: float | None = None
    measured_bytes: float | None = None
    reserved_bytes: float | None = None
    device_bytes: float | None = None  # in use on the device, as nvidia-smi says it
    failure: str = ""

    def error(self, predicted: float | None) -> float | None:
        """Predicted over measured, less 1."""
        return predicted / self.measured_seconds - 1 if predicted and self.measured_seconds else None

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured, less 1."""
        return self.predicted_bytes / self.measured_bytes - 1 if self.predicted_bytes and self.measured_bytes else None


@dataclass(kw_only=True)
class Report:
    """All that was found."""

    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    equality: dict[str, str] = field(default_factory=dict)  # plan: worst difference, or why there is none
    left_out: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "summary": summary(self.rows)}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Median absolute errors, fractions; None without rows."""

    def median(values: Sequence[float | None]) -> float | None:
        known = [abs(value) for value in values if value is not None]
        return statistics.median(known) if known else None

    return {
        "rows": len(rows), "measured": sum(row.measured_seconds is not None for row in rows),
        "time_median_error": median([row.error(row.predicted_seconds) for row in rows]),
        "time_by_profile_median_error": median([row.error(row.by_profile_seconds) for row in rows]),
        "memory_median_error": median([row.memory_error for row in rows]),
    }  # fmt: skip


# --- a process that does one thing ----------------------------------------------------------------


class FailedError(Exception):
    """What a process was to do did not work; one line."""


class Child:
    """A process that does one thing and sends what it finds; `close` ends it."""

    def __init__(self, work: Callable[..., None], arguments: Sequence[Any], variables: dict[str, str]) -> None:
        context = mp.get_context("spawn")
        self.connection, theirs = context.Pipe()
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        self.process = context.Process(target=_child, args=(work, theirs, *arguments), daemon=True)
        with _set(variables):
            self.process.start()
        theirs.close()

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def answers(children: Sequence[Child], limit_seconds: float) -> Iterator[Any]:
    """What processes send, in the order of coming, until all have ended; they are gone then.

    Raises:
        FailedError: one raised, died, or all were silent for too long.
    """
    end = time.monotonic() + limit_seconds
    pending = {child.connection for child in children}
    try:
        while pending:
            ready = wait(list(pending), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise FailedError(f"took more than {limit_seconds:.0f} s")
            for connection in ready:
                try:
                    kind, value = cast("Connection", connection).recv()
                except EOFError:
                    raise FailedError("the process died") from None
                if kind == "failed":
                    raise FailedError(value)
                if kind == "end":
                    pending.discard(cast("Connection", connection))
                else:
                    yield value
    finally:
        for child in children:
            child.close()


def _child(work: Callable[..., None], connection: Connection, *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    die_with_parent()
    try:
        work(connection, *arguments)
        connection.send(("end", None))
    except BaseException as error:
        if not isinstance(error, PlannerError | torch.OutOfMemoryError):
            traceback.print_exc()
        connection.send(("failed", _line(error)))


def _line(error: BaseException) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0] or repr(error)}"


def _batch(subject: Subject, loaded: Any, samples: int) -> Any:
    return random_batch(loaded.batch, global_batch=samples, seed=SEED, step=0)


# --- training by plans ----------------------------------------------------------------------------


def train(connection: Connection, subject: Subject, kind: str, graph: bytes, plans: Sequence[str], steps: int) -> None:
    """Train by each plan; one answer each, the keys those of a `Row`."""
    traced: Graph = pickle.loads(graph)
    if kind == "cpu":
        torch.set_num_threads(1)
    for text in plans:
        try:
            found = _trained(subject, kind, traced, Plan.loads(text), steps)
        except Exception as error:
            if not isinstance(error, PlannerError | torch.OutOfMemoryError):
                traceback.print_exc()
            found = {"failure": _line(error)}
        connection.send(("row", found))
        gc.collect()
        if kind == "cuda":
            torch.cuda.empty_cache()


def _trained(subject: Subject, kind: str, graph: Graph, plan: Plan, steps: int) -> dict[str, Any]:
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    gc.collect()
    before = torch.cuda.memory_allocated(device) if kind == "cuda" else held_bytes()
    loaded = load_model(subject.model, sequence_length=subject.sequence_length, device=kind, seed=SEED)
    batch = _batch(subject, loaded, plan.global_batch)
    trainer = apply_plan(plan, loaded.module, graph=graph, loss_fn=loaded.loss_fn, batch=batch, check=False)
    if kind == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        trainer.step(batch)
        if kind == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    found = _times(seconds)
    if kind == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return found | {
            "measured_bytes": float(torch.cuda.max_memory_allocated(device) - before),
            "reserved_bytes": float(torch.cuda.max_memory_reserved(device)), "device_bytes": float(total - free),
        }  # fmt: skip
    trainer.zero_grad()  # as a step does first
    _, peak = with_peak(lambda: trainer.step(batch), before_bytes=before)
    return found | {"measured_bytes": None if peak is None else float(peak)}


def _times(seconds: Sequence[float]) -> dict[str, float]:
    """Median and spread, without the first steps."""
    counted = list(seconds[min(WARM_UP_STEPS, len(seconds) - 1) :])
    middle = statistics.median(counted)
    low, _, high = statistics.quantiles(counted, n=4, method="inclusive") if len(counted) > 1 else (middle,) * 3
    return {"measured_seconds": middle, "spread": (high - low) / middle}


# --- the plain module, compiled -------------------------------------------------------------------


def compiled(
    connection: Connection, subject: Subject, kind: str, micro_batch: int, options: dict[str, Any], steps: int
) -> None:
    """Train the plain module under torch.compile; seconds of forward and backward."""
    if kind == "cpu":
        torch.set_num_threads(1)
    device = torch.device(kind)
    loaded = load_model(subject.model, sequence_length=subject.sequence_length, device=kind, seed=SEED)
    dtype = torch.bfloat16 if subject.precision == "bf16" else torch.float32
    module = loaded.module.to(dtype)
    batch = {
        name: value.to(device, dtype if value.is_floating_point() else None)
        for name, value in _batch(subject, loaded, micro_batch).items()
    }
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=kind == "cuda")
    run = torch.compile(module, **options)
    seconds = []
    for _ in range(steps):
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        start = _now(device)
        out = run(**batch)
        loss = out if isinstance(out, torch.Tensor) else out["loss"] if isinstance(out, dict) else out[0]
        loss.backward()
        seconds.append(_now(device) - start)
        optimizer.step()
    connection.send(("row", _times(seconds)))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def compiling_engine(way: str) -> Engine:
    """Plain PyTorch under torch.compile: other traffic, and with CUDA graphs no time to send kernels."""
    stock = engine_named(STOCK)
    engine = replace(stock, memory_traffic=stock.compiled_memory_traffic)
    return engine if way == "torch.compile" else replace(engine, dispatch=0.0, block_dispatches=0.0)


# --- ranks that share a device --------------------------------------------------------------------


def equal(connection: Connection, rank: int, store: str, kind: Literal["cuda", "cpu"], pins: str) -> None:
    """One of two ranks that train by a plan; the first sends the worst relative difference to one device."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    loaded = load_model(EQUALITY_MODEL, device=kind, seed=SEED)
    graph = trace(loaded.module, loaded.batch, precision="fp64", name=EQUALITY_MODEL, device_kind=kind)
    cluster = Cluster.load("1x2xH100-80GB")  # only what is fixed matters, not the price
    plan = search(
        graph, cluster, global_batch=EQUALITY_SAMPLES, precision="fp64", pins=pins, top=1,
        sharded=ways_to_split(graph, cluster, EQUALITY_SAMPLES, kind),
    ).plans[0]  # fmt: skip
    batch = random_batch(loaded.batch, global_batch=EQUALITY_SAMPLES, seed=SEED, step=0)
    assert isinstance(batch, dict)
    alone = load_model(EQUALITY_MODEL, device=kind, seed=SEED).module.double()
    optimizer = torch.optim.AdamW(alone.parameters())
    for _ in range(EQUALITY_STEPS):
        optimizer.zero_grad()
        out = alone(**{name: value.to(device) for name, value in batch.items()})
        (out if isinstance(out, torch.Tensor) else out[0]).backward()
        optimizer.step()
    trainer = apply_plan(
        plan, loaded.module.double(), graph=graph, optimizer=lambda named: torch.optim.AdamW([p for _, p in named]),
        check=False, device=device,
    )  # fmt: skip
    part = {name: value.chunk(trainer.data_world)[trainer.data_rank] for name, value in batch.items()}
    for _ in range(EQUALITY_STEPS):
        trainer.step(part)
    weights = trainer.state_dict()
    worst = max(
        float((weights[name].double() - value.cpu()).abs().max() / value.abs().max().cpu().clamp(min=1e-12))
        for name, value in alone.state_dict().items()
        if value.is_floating_point()
    )
    connection.send(("worst", worst))


def check_equality(
    kind: Literal["cuda", "cpu"], folder: Path, variables: dict[str, str], progress: Progress
) -> dict[str, str]:
    """For each plan the worst difference of the weights, or why there is none."""
    found = {}
    for number, pins in enumerate(EQUALITY_PLANS):
        progress(f"two ranks on one device: {pins}")
        store = str(folder / f"store-{number}")
        ranks = [Child(equal, (rank, store, kind, pins), variables) for rank in range(2)]
        try:
            worst = max(answers(ranks, EQUALITY_SECONDS))
            found[pins] = f"{'equal' if worst <= SAME else 'NOT EQUAL'}, worst difference {worst:.1e}"
        except FailedError as failure:
            found[pins] = f"not run: {failure}"
    return found


# --- all of it ------------------------------------------------------------------------------------


class Check:
    """One run; `report` is what is known by now."""

    def __init__(self, kind: Literal["cuda", "cpu"], out: Path, budget_seconds: float, steps: int, progress: Progress):
        self.kind, self.out, self.steps, self.progress = kind, out, steps, progress
        self.start = time.monotonic()
        self.end = self.start + budget_seconds
        self.cluster = local_cluster(num_processes=1)
        self.machine = this_machine(kind, 1)
        self.report = Report(machine=asdict(self.machine))
        self.variables = dict(CPU_VARIABLES) if kind == "cpu" else {}
        self.graphs: dict[Subject, Graph] = {}
        self.profiles: dict[str, Profile] = {}

    def left_seconds(self) -> float:
        """Of the budget."""
        return self.end - time.monotonic()

    def save(self) -> None:
        """Write all that is known."""
        self.report.seconds = round(time.monotonic() - self.start, 1)
        (self.out / "gpu_check.json").write_text(json.dumps(self.report.to_dict(), indent=1) + "\n", encoding="utf-8")

    def profile_of(self, subject: Subject) -> tuple[Profile, Path]:
        """Rows so far. Operators in TensorFloat-32 have the names of those in fp32, so they have their own file."""
        name = "profile-tf32.json" if subject.precision == "tf32" else "profile.json"
        path = self.out / name
        if name not in self.profiles and path.exists():
            kept = Profile.load(path)
            if not kept.machine.differences(self.machine):
                self.profiles[name] = kept
        return self.profiles.get(name, Profile(machine=self.machine)), path

    def keep(self, profile: Profile, path: Path) -> None:
        """A profile with new rows."""
        self.profiles[path.name] = profile
        profile.save(path)

    def cluster_of(self, subject: Subject) -> Cluster:
        """This machine, with the rate of products that a subject has."""
        device = self.cluster.device
        if subject.precision != "tf32":
            return self.cluster
        peaks = {**device.peak_flop_per_second, "float32": device.peak_flop_per_second["tf32"]}
        return replace(self.cluster, device=replace(device, peak_flop_per_second=peaks))

    def measure_machine(self) -> None:
        """The optimizer step and copies, into the profile."""
        profile, path = self.profile_of(Subject(model="", precision="bf16", micro_batches=(1,)))
        try:
            profile, _ = measure_here(
                profile, ("optimizer", "copies"), budget_seconds=MACHINE_SECONDS,
                keep=lambda found: self.keep(found, path), progress=lambda what, *_: self.progress(what),
            )  # fmt: skip
        except PlannerError as error:
            self.report.left_out.append(f"the machine's own rows: {error}")
        self.keep(profile, path)

    def run(self, subject: Subject) -> None:
        """Profile and train one subject."""
        if subject.precision == "tf32" and "tf32" not in self.cluster.device.peak_flop_per_second:
            raise ProfileError(f"{self.cluster.device.name} has no rate of tf32")
        self.progress(f"{subject.name}: tracing")
        loaded = load_model(subject.model, sequence_length=subject.sequence_length, device="meta")
        graph = trace(
            loaded.module, loaded.batch, precision=subject.graph_precision, loss_fn=loaded.loss_fn, name=loaded.name,
            device_kind=self.kind,
        )  # fmt: skip
        self.graphs[subject] = graph
        profile, path = self.profile_of(subject)
        with _set(subject.variables):
            try:
                profile = measure_operators(
                    cases([(graph, {})], subject.micro_batches), profile,
                    budget_seconds=min(PASSES_SECONDS, 0.3 * max(1.0, self.left_seconds())),
                    keep=lambda found: self.keep(found, path), progress=lambda what, *_: self.progress(what),
                )  # fmt: skip
            except PlannerError as error:
                self.report.left_out.append(f"passes of {subject.name}: {error}")
        rows, plans = self.planned(subject, graph, profile)
        self.report.rows += rows
        self.progress(f"{subject.name}: training")
        arguments = (subject, self.kind, pickle.dumps(graph), [plan.dumps() for plan in plans], self.steps)
        done = 0
        try:
            limit = max(30.0, self.left_seconds())
            for values in answers([Child(train, arguments, self.variables | subject.variables)], limit):
                for name, value in values.items():
                    setattr(rows[done], name, value)
                done += 1
                self.save()
        except FailedError as failure:
            for row in rows[done:]:
                row.failure = str(failure)
        self.save()

    def planned(self, subject: Subject, graph: Graph, profile: Profile) -> tuple[list[Row], list[Plan]]:
        """The ways to train a subject, as predicted from data sheets and by the profile."""
        cluster, rows, plans = self.cluster_of(subject), [], []
        measured, place = measured_graph(graph, profile), measured_cluster(cluster, profile)
        batch = subject.micro_batches[-1]
        for micro_batch in subject.micro_batches:
            for recompute in ("none", "full"):
                pins = {"devices": 1, "micro_batch": micro_batch, "recompute": recompute}
                plan, better = (
                    search(g, c, global_batch=batch, precision=subject.graph_precision, pins=pins, top=1).plans[0]
                    for g, c in ((graph, cluster), (measured, place))
                )
                recomputed = ", recompute" if recompute == "full" else ""
                rows.append(
                    Row(
                        subject=subject.name, way=f"{batch // micro_batch} x {micro_batch}{recomputed}",
                        predicted_seconds=plan.prediction.step_seconds,
                        by_profile_seconds=better.prediction.step_seconds,
                        measured_share=better.prediction.measured_share,
                        predicted_bytes=max(plan.prediction.peak_bytes),
                    )
                )  # fmt: skip
                plans.append(plan)
        return rows, plans

    def compile(self, subject: Subject) -> None:
        """Passes of one subject's larger micro-batch under torch.compile; none without a graph to price."""
        graph, cluster, micro_batch = self.graphs[subject], self.cluster_of(subject), subject.micro_batches[-1]
        for way, options in COMPILED.items():
            if way == "CUDA graphs" and self.kind == "cpu":
                continue
            name = f"{subject.name} under {way}"
            if self.left_seconds() < 20:
                self.report.left_out.append(f"{name}: no time was left")
                continue
            self.progress(name)
            row = Row(
                subject=subject.name, way=f"{way}, passes of {micro_batch}",
                predicted_seconds=least_engine_seconds(
                    graph, cluster, engine=compiling_engine(way), mesh=Mesh(), micro_batch=micro_batch
                ),
            )  # fmt: skip
            self.report.rows.append(row)
            limit = min(COMPILE_SECONDS, self.left_seconds())
            arguments = (subject, self.kind, micro_batch, options, self.steps)
            try:
                for values in answers([Child(compiled, arguments, self.variables | subject.variables)], limit):
                    row.measured_seconds, row.spread = values["measured_seconds"], values["spread"]
            except FailedError as failure:
                row.failure = str(failure)
            self.save()

    def all(self, subjects: Sequence[Subject], without: Sequence[str]) -> None:
        """Everything, in the order of what matters most."""
        if "equality" not in without:
            with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
                self.report.equality = check_equality(self.kind, Path(folder), self.variables, self.progress)
                self.save()
        self.measure_machine()
        for subject in subjects:
            if self.left_seconds() < 20:
                self.report.left_out.append(f"{subject.name}: no time was left")
                continue
            try:
                self.run(subject)
            except PlannerError as error:
                self.report.left_out.append(f"{subject.name}: {error}")
        for subject in subjects if "compile" not in without else ():
            if subject in self.graphs:
                self.compile(subject)


@contextlib.contextmanager
def _set(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def table(report: Report) -> str:
    """For people."""
    lines = [f"{report.machine['device']}, torch {report.machine['torch']}", ""]
    lines.append(
        f"{'subject':18}{'way':32}{'measured':>11}{'data sheet':>12}{'error':>8}{'profile':>11}{'error':>8}"
        f"{'peak':>11}{'predicted':>11}{'error':>8}"
    )
    for row in report.rows:
        cells = [
            _ms(row.measured_seconds, 11), _ms(row.predicted_seconds, 12), _percent(row.error(row.predicted_seconds)),
            _ms(row.by_profile_seconds, 11), _percent(row.error(row.by_profile_seconds)),
            _mib(row.measured_bytes), _mib(row.predicted_bytes), _percent(row.memory_error),
        ]  # fmt: skip
        lines.append(f"{row.subject:18}{row.way:32}{''.join(cells)}  {row.failure}".rstrip())
    found = summary(report.rows)
    named = {"time_median_error": "by data sheets", "time_by_profile_median_error": "by the profile",
             "memory_median_error": "of the peak"}  # fmt: skip
    told = [f"{words} {found[name]:.1%}" for name, words in named.items() if found[name] is not None]
    lines += ["", f"{found['measured']} of {found['rows']} rows measured; median errors: {', '.join(told) or 'none'}"]
    lines += [f"two ranks on one device, {pins}: {said}" for pins, said in report.equality.items()]
    lines += [f"left out: {what}" for what in report.left_out]
    return "\n".join(lines)


def _ms(seconds: float | None, width: int) -> str:
    return f"{'-':>{width}}" if seconds is None else f"{seconds * 1e3:>{width - 3}.1f} ms"


def _mib(num_bytes: float | None) -> str:
    return f"{'-':>11}" if num_bytes is None else f"{num_bytes / 2**20:>7.0f} MiB"


def _percent(error: float | None) -> str:
    return f"{'-':>8}" if error is None else f"{error:>+8.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help="MODEL/PRECISION/MICRO_BATCHES[/TOKENS]")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default cuda where there is one")
    parser.add_argument("--budget", default="11m", help="as 90s or 11m (default)")
    parser.add_argument("--steps", type=int, default=20, help="of each way to train (default 20)")
    parser.add_argument("--out", default="gpu_check", metavar="DIR", help="where results and profiles go")
    parser.add_argument("--without", default="", metavar="WHAT,...", help="some of equality, compile")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    kind: Literal["cuda", "cpu"] = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if (kind == "cuda") != torch.cuda.is_available():
        sys.exit(
            f"error: --device {kind}, but this machine {'has a' if kind == 'cpu' else 'has no'} GPU that torch sees"
        )
    try:
        subjects = [Subject.of(text) for text in given.subjects or SUBJECTS[kind]]
        budget = float(given.budget.rstrip("sm")) * (60 if given.budget.endswith("m") else 1)
    except ValueError as error:
        sys.exit(f"error: {error}")
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()

    def progress(what: str) -> None:
        end = "" if sys.stderr.isatty() else "\n"
        before = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{before}{time.monotonic() - start:4.0f} s  {what}", end=end, file=sys.stderr, flush=True)

    try:
        check = Check(kind, out, budget, given.steps, progress)
    except PlannerError as error:
        sys.exit(f"error: {error}")
    interrupted = False
    try:
        check.all(subjects, given.without.split(","))
    except KeyboardInterrupt:
        interrupted = True
        print("interrupted", file=sys.stderr)
    check.save()
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    print(json.dumps(check.report.to_dict(), indent=1) if given.json else table(check.report))
    sys.exit(130 if interrupted else 0)


if __name__ == "__main__":
    main()
