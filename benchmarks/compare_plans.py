"""Ways to train a model on this machine: what the planner predicts of each beside what it takes.

    python -m benchmarks.compare_plans MODEL [--ranks 1,2] [--plans 20] [--steps 12] [--global-batch 16] [--json]

Of all plans that fit (devices; data, tensor and pipeline parallelism; ZeRO stage; recomputation; micro-batches;
schedule) `--plans` are run that are spread over the predicted time, the planner's choice among them, and the usual
recipes as plans: DDP, FSDP, the ZeRO stage by the number of GPUs, Megatron's tensor parallelism inside a node first.

Plans are made as `autoplan run` makes them, from this machine and the model's operators as measured here. They are run
by the trainer on processes of one thread each, one after the other, there and back and again, so that other programs
disturb all alike and none throughout; the first steps do not count. Those that come close to the fastest are run some
more times with the planner's choice: which of them is the fastest is what regret is about. Cores change their speed
within seconds (`planner.measure.pace`): a step's seconds are scaled to the pace at which this machine was measured; the
summary has all figures by the clock alone, too.
`measured` is the median of the steps of a plan, `least` their lower quartile; errors are of the median. Of what a rank
holds the most is taken from torch's own records of its allocator in steps of their own: parameters, gradients,
optimizer states, activations and buffers; not the interpreter, code, and what the C library keeps back.

Ctrl-C ends it and prints what is known by then.
"""

import argparse
import contextlib
import gc
import json
import multiprocessing as mp
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import product
from math import log
from multiprocessing.connection import Connection, wait
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from planner.cluster import Cluster
from planner.errors import ModelError, PlannerError, RunError
from planner.graph import Graph
from planner.measure import local_cluster
from planner.measure.local import CPU_VARIABLES
from planner.measure.pace import Paced
from planner.plan import Plan
from planner.profile import measured_cluster
from planner.runtime.allocated import held_bytes, with_peak
from planner.runtime.parent import PARENT_VARIABLE, die_with_parent
from planner.runtime.trainer import apply_plan
from planner.search import search, ways_to_split
from planner.search.measuring import as_measured, local_measuring
from planner.trace import trace
from planner.validate.metrics import Pair, accuracy
from planner.zoo.load import LoadedModel, load_model
from planner.zoo.text import random_batch

GROUP_TIMEOUT_SECONDS = 120.0
PLAN_SECONDS = 300.0  # that a plan may take to be built and to train for some steps
WARM_UP_STEPS = 2
TURNS = 4  # that the steps of a plan are spread over
CLOSE = 0.15  # to the fastest plan
CLOSE_TURNS = 6  # more for plans so close
MEMORY_STEPS = 2  # before: then optimizer states are there
SEED = 0


# --- which plans ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Planning:
    """A model on this machine, measured."""

    graph: Graph
    cluster: Cluster
    global_batch: int
    loaded: LoadedModel
    sharded: Any

    @property
    def pace(self) -> float:
        """At which it was measured."""
        assert self.cluster.device.pace_seconds is not None
        return self.cluster.device.pace_seconds

    def best(self, **pins: Any) -> Plan:
        """The plan that `autoplan run --fix` would take."""
        found = search(
            self.graph, self.cluster, global_batch=self.global_batch, precision="fp32", pins=pins or None, top=1,
            sharded=self.sharded,
        )  # fmt: skip
        return found.plans[0]


def planning(model: str, num_ranks: int, global_batch: int, progress: Any) -> Planning:
    """Measure what `autoplan run` measures."""
    if torch.cuda.is_available():
        raise RunError(
            "plans are run on cores here, and this machine has CUDA devices; hide them: CUDA_VISIBLE_DEVICES="
        )
    loaded = load_model(model, device="meta")
    cluster = local_cluster(num_processes=num_ranks, progress=lambda part, what: progress(f"this machine: {what}"))
    graph = trace(
        loaded.module, loaded.batch, precision="fp32", loss_fn=loaded.loss_fn, name=loaded.name, device_kind="cpu"
    )
    measuring = local_measuring(cluster, global_batch, lambda what, done, of: progress(what))
    graph, profile = as_measured(graph, measuring)
    assert profile is not None
    place = measured_cluster(cluster, profile)
    return Planning(
        graph=graph, cluster=place, global_batch=global_batch, loaded=loaded,
        sharded=ways_to_split(graph, place, global_batch, "cpu", None, measuring),
    )  # fmt: skip


def all_pins(global_batch: int, ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Every choice that the benchmark looks at; some cannot be planned."""
    for devices in ranks:
        meshes = [(pp, dp, devices // pp // dp) for pp in _divisors(devices) for dp in _divisors(devices // pp)]
        for pp, dp, tp in meshes:
            zeros = range(4) if dp > 1 else [None]
            schedules = ["1f1b", "gpipe"] if pp > 1 else [None]
            for zero, recompute, micro_batch, schedule in product(
                zeros, ("none", "full"), _divisors(global_batch // dp) if global_batch % dp == 0 else (), schedules
            ):
                pins = {"devices": devices, "pp": pp, "dp": dp, "tp": tp, "zero": zero, "recompute": recompute,
                        "micro_batch": micro_batch, "schedule": schedule}  # fmt: skip
                yield {name: value for name, value in pins.items() if value is not None}


def feasible(made: Planning, ranks: Sequence[int]) -> list[Plan]:
    """Plans that fit, fastest by prediction first, each once."""
    found: dict[str, Plan] = {}
    for pins in all_pins(made.global_batch, ranks):
        with contextlib.suppress(PlannerError):
            plan = made.best(**pins)
            if plan.prediction.fits:
                found.setdefault(executed(plan), plan)
    return sorted(found.values(), key=lambda plan: (plan.prediction.step_seconds, executed(plan)))


def executed(plan: Plan) -> str:
    """What two plans that run alike share."""
    blocks = [[(b.zero, b.recompute) for b in stage.blocks] for stage in plan.stages]
    schedule = plan.schedule if plan.mesh.pp > 1 else ""
    splits = [s.fingerprint for s in plan.shardings]
    return json.dumps([asdict(plan.mesh), plan.micro_batch, plan.num_microbatches, schedule, blocks, splits])


def spread(plans: Sequence[Plan], count: int) -> list[Plan]:
    """So many of `plans`, which are sorted: evenly over the logarithm of their predicted time, of many kinds.

    From the slowest to the fastest there is a goal at even distances; of the plans around it the kind is taken of which
    there are fewest yet.
    """
    if len(plans) <= count:
        return list(plans)
    logs = [log(plan.prediction.step_seconds) for plan in plans]
    width = (logs[-1] - logs[0]) / max(1, count - 1)
    left, chosen, kinds = list(range(len(plans))), list[int](), Counter[str]()
    for step in range(count):
        goal = logs[0] + step * width
        near = [i for i in left if abs(logs[i] - goal) <= width / 2] or [min(left, key=lambda i: abs(logs[i] - goal))]
        if step == 0:
            near = [left[0]]
        best = min(near, key=lambda i: (kinds[kind(plans[i])], abs(logs[i] - goal), i))
        kinds[kind(plans[best])] += 1
        left.remove(best)
        chosen.append(best)
    return [plans[i] for i in sorted(chosen)]


def kind(plan: Plan) -> str:
    """The way to train, without sizes."""
    zeros = sorted({b.zero for stage in plan.stages for b in stage.blocks})
    recompute = sorted({b.recompute for stage in plan.stages for b in stage.blocks})
    return f"{plan.mesh} {zeros if plan.mesh.dp > 1 else ''} {recompute}"


def recipes(made: Planning, ranks: int) -> dict[str, Plan]:
    """The usual advice for so many ranks in one node, with the largest micro-batch that fits; none for one rank."""
    if ranks == 1:
        return {}
    rule = 1 if ranks <= 4 else 2 if ranks <= 16 else 3
    pins: dict[str, dict[str, Any]] = {
        "DDP": {"dp": ranks, "zero": 0, "recompute": "none"},
        "FSDP": {"dp": ranks, "zero": 3, "recompute": "none"},
        f"folklore: ZeRO-{rule} on {ranks} GPUs": {"dp": ranks, "zero": rule, "recompute": "none"},
        "Megatron: tp in the node": {"tp": ranks, "dp": 1, "pp": 1, "recompute": "none"},
    }
    found = {}
    for name, choice in pins.items():
        for micro_batch in reversed(_divisors(made.global_batch // choice["dp"])):
            with contextlib.suppress(PlannerError):
                plan = made.best(devices=ranks, **choice, micro_batch=micro_batch)
                if plan.prediction.fits:
                    found[name] = plan
                    break
    return found


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


# --- running them ---------------------------------------------------------------------------------


class RankError(Exception):
    """A rank failed; the text is its reason."""


class Asked(Protocol):
    """What `measure` needs of `Ranks`."""

    def ask(self, command: str, *arguments: Any, limit_seconds: float) -> list[Any]: ...


class Ranks:
    """Processes that train by one plan after another, started when first asked."""

    def __init__(self, size: int, model: str, global_batch: int, folder: Path) -> None:
        self.size, self._model, self._batch, self._folder = size, model, global_batch, folder
        self._processes: list[tuple[Any, Connection]] = []
        self._starts = 0

    def ask(self, command: str, *arguments: Any, limit_seconds: float) -> list[Any]:
        """What each rank answers.

        Raises:
            RankError: one failed, or gave nothing in time; all are gone then.
        """
        if not self._processes:
            self._start()
        try:
            for _, connection in self._processes:
                connection.send((command, arguments))
            return self._answers(limit_seconds)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End them."""
        for process, connection in self._processes:
            connection.close()
            process.kill()
            process.join()
        self._processes = []

    def _start(self) -> None:
        self._starts += 1
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        context = mp.get_context("spawn")
        store = str(self._folder / f"store-{self.size}-{self._starts}")
        variables = {**CPU_VARIABLES, "KINETO_LOG_LEVEL": "99"}  # else the profiler writes lines of its own
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                arguments = (rank, self.size, store, self._model, self._batch, theirs)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._processes.append((process, ours))
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def _answers(self, limit_seconds: float) -> list[Any]:
        found: dict[int, Any] = {}
        pending = {connection: rank for rank, (_, connection) in enumerate(self._processes)}
        end = time.monotonic() + limit_seconds
        while pending:
            ready = wait(list(pending), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise RankError(f"no answer in {limit_seconds:.0f} s")
            for connection in ready:
                rank = pending.pop(cast("Connection", connection))
                try:
                    fine, value = cast("Connection", connection).recv()
                except EOFError:
                    raise RankError(f"rank {rank} died") from None
                if not fine:
                    raise RankError(f"rank {rank}: {value}")
                found[rank] = value
        return [found[rank] for rank in range(self.size)]


def _serve(rank: int, size: int, store: str, model: str, global_batch: int, connection: Connection) -> None:
    """The body of a rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    die_with_parent()
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size,
            timeout=timedelta(seconds=GROUP_TIMEOUT_SECONDS),
        )  # fmt: skip
        served = _Served(model, global_batch)
        while True:
            try:
                command, arguments = connection.recv()
            except EOFError:
                os._exit(0)
            connection.send((True, getattr(served, command)(*arguments)))
    except BaseException as error:
        told = str(error).strip().partition("\n")[0] or repr(error)
        if not isinstance(error, PlannerError):
            traceback.print_exc()
        connection.send((False, f"{type(error).__name__}: {told}"))
        os._exit(1)


class _Served:
    """What a rank does on command."""

    def __init__(self, model: str, global_batch: int) -> None:
        self._loaded = load_model(model, device="meta", batch_device="cpu")
        self._graph = trace(
            self._loaded.module, self._loaded.batch, precision="fp32", loss_fn=self._loaded.loss_fn,
            name=self._loaded.name, device_kind="cpu",
        )  # fmt: skip
        if not isinstance(self._loaded.batch, dict):
            raise ModelError(f"{model} takes a tuple; give a model of the zoo or a config.json, which take names")
        drawn = random_batch(self._loaded.batch, global_batch=global_batch, seed=SEED, step=0)
        assert isinstance(drawn, dict)
        self._batch: dict[str, torch.Tensor] = drawn
        self._model = model

    def train(self, text: str, count: int) -> list[tuple[float, float]]:
        """Seconds of so many steps after warm-up, one by one, each with the core's pace meanwhile.

        No other trainer is there: what it held would stand in the caches, and scatter the memory.
        """
        gc.collect()
        trainer = self._trainer(text)
        part, seconds = self._part(trainer), []

        def step() -> None:
            dist.barrier()
            start = time.perf_counter()
            trainer.step(part)
            seconds.append(time.perf_counter() - start)

        for _ in range(WARM_UP_STEPS):
            step()
        paced = Paced()
        paces = [paced.measure(step)[1] for _ in range(count)]
        return list(zip(seconds[WARM_UP_STEPS:], paces, strict=True))

    def memory(self, text: str) -> int:
        """Bytes: the most that torch's allocator had given out at once in a step of a plan, less what was before it."""
        gc.collect()
        before = held_bytes()
        trainer = self._trainer(text)
        part = self._part(trainer)
        for _ in range(MEMORY_STEPS):
            trainer.step(part)
        trainer.zero_grad()  # as a step does first
        _, peak = with_peak(lambda: trainer.step(part), before_bytes=before)
        if peak is None:
            raise RunError(f"torch {torch.__version__} does not tell what it allocates on a CPU; give --no-memory")
        return peak

    def _trainer(self, text: str) -> Any:
        loaded = load_model(self._model, device="cpu", seed=SEED)
        return apply_plan(
            Plan.loads(text), loaded.module, graph=self._graph, loss_fn=loaded.loss_fn, batch=self._batch, check=False
        )

    def _part(self, trainer: Any) -> dict[str, torch.Tensor]:
        return {name: t.chunk(trainer.data_world)[trainer.data_rank].clone() for name, t in self._batch.items()}


# --- what comes of it -----------------------------------------------------------------------------


@dataclass(kw_only=True)
class Row:
    """One plan, predicted and measured; bytes are of each rank, as all ranks of a stage should hold the same."""

    name: str
    plan: Plan
    is_choice: bool = False
    recipes: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of steps, at the pace at which this machine was measured
    clock_seconds: list[float] = field(default_factory=list)  # as they were
    measured_bytes: list[int] = field(default_factory=list)
    failure: str = ""

    @property
    def predicted_seconds(self) -> float:
        return self.plan.prediction.step_seconds

    @property
    def measured_seconds(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def median_clock_seconds(self) -> float | None:
        return statistics.median(self.clock_seconds) if self.clock_seconds else None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less 1."""
        return self.predicted_seconds / self.measured_seconds - 1 if self.measured_seconds else None

    @property
    def predicted_bytes(self) -> list[float]:
        """Of each rank."""
        peaks = self.plan.prediction.peak_bytes
        return [peak for peak in peaks for _ in range(self.plan.devices // len(peaks))]

    @property
    def memory_errors(self) -> list[float]:
        """Of each rank."""
        return [p / m - 1 for p, m in zip(self.predicted_bytes, self.measured_bytes, strict=False) if m]

    def to_dict(self) -> dict[str, Any]:
        low = statistics.quantiles(self.seconds, n=4, method="inclusive")[0] if len(self.seconds) > 1 else None
        return {
            "plan": self.name, "is_choice": self.is_choice, "recipes": self.recipes, "failure": self.failure,
            "predicted_seconds": self.predicted_seconds, "measured_seconds": self.measured_seconds,
            "clock_seconds": self.median_clock_seconds,
            "least_seconds": low, "num_steps": len(self.seconds), "error": self.error,
            "parts_seconds": dict(self.plan.prediction.parts_seconds),
            "predicted_bytes": self.predicted_bytes, "measured_bytes": self.measured_bytes,
            "memory_errors": self.memory_errors,
        }  # fmt: skip


def words(plan: Plan) -> str:
    """A plan in a few words."""
    blocks = [b for stage in plan.stages for b in stage.blocks]
    zeros = sorted({b.zero for b in blocks})
    recomputed = sum(b.recompute == "full" for b in blocks) / len(blocks)
    parts = [str(plan.mesh)]
    if plan.mesh.dp > 1:
        parts.append("ZeRO-" + "/".join(map(str, zeros)))
    if recomputed:
        parts.append("recompute" if recomputed == 1 else f"recompute {recomputed:.0%}")
    parts.append(f"{plan.num_microbatches} x {plan.micro_batch}")
    if plan.mesh.pp > 1:
        parts.append(plan.schedule)
    return " ".join(parts)


def compared(made: Planning, ranks: Sequence[int], count: int) -> list[Row]:
    """The rows to measure: the spread, the planner's choice, the recipes; each plan once."""
    choice = made.best() if max(ranks) > 1 else made.best(devices=1)
    plans = feasible(made, ranks)
    rows = {executed(choice): Row(name=words(choice), plan=choice, is_choice=True)}
    for plan in spread(plans, count if executed(choice) in map(executed, plans) else count - 1):
        rows.setdefault(executed(plan), Row(name=words(plan), plan=plan))
    for name, plan in recipes(made, max(ranks)).items():
        rows.setdefault(executed(plan), Row(name=words(plan), plan=plan)).recipes.append(name)
    return sorted(rows.values(), key=lambda row: row.predicted_seconds)


def measure(
    rows: Sequence[Row], pools: Mapping[int, Asked], steps: int, progress: Any, *, with_memory: bool, pace: float
) -> None:
    """Fill the rows in: steps of each plan, in some turns there and back, then memory.

    The planner's choice and what is close to the fastest are taken more often. Memory is last: what records it is to
    disturb no time.

    `pace` is that at which this machine was measured, as seconds of `planner.measure.pace`.
    """

    def turn(what: str, some: Sequence[Row], count: int) -> None:
        for row in some:
            if row.failure:
                continue
            progress(f"{what}, {row.name}")
            with _noted(row):
                found = pools[row.plan.devices].ask("train", row.plan.dumps(), count, limit_seconds=PLAN_SECONDS)
                for of_ranks in zip(*found, strict=True):
                    seconds, paces = zip(*of_ranks, strict=True)
                    row.clock_seconds.append(max(seconds))
                    row.seconds.append(max(seconds) * pace / max(paces))

    counts = [steps // TURNS + (number < steps % TURNS) for number in range(TURNS)]
    for number, count in enumerate(filter(None, counts)):
        turn(f"turn {number + 1} of {TURNS}", rows[:: -1 if number % 2 else 1], count)
    few = close(rows)
    for number in range(CLOSE_TURNS if len(few) > 1 else 0):
        turn(f"the fastest, turn {number + 1} of {CLOSE_TURNS}", few[:: -1 if number % 2 else 1], counts[0])
    for row in rows if with_memory else ():
        if not row.failure:
            progress(f"memory of {row.name}")
            with _noted(row):
                row.measured_bytes = pools[row.plan.devices].ask("memory", row.plan.dumps(), limit_seconds=PLAN_SECONDS)


def close(rows: Sequence[Row]) -> list[Row]:
    """The planner's choice and what comes close to the fastest, by one of both clocks."""
    known = [row for row in rows if row.seconds and not row.failure]
    found = {id(row): row for row in known if row.is_choice}
    for seconds_of in (attrgetter("measured_seconds"), attrgetter("median_clock_seconds")):
        best = min(map(seconds_of, known), default=0.0)
        found |= {id(row): row for row in known if seconds_of(row) <= (1 + CLOSE) * best}
    return [row for row in known if id(row) in found]


@contextlib.contextmanager
def _noted(row: Row) -> Iterator[None]:
    try:
        yield
    except RankError as failure:
        row.failure = str(failure)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of all rows that were measured, at one pace and by the clock."""
    memory = sorted(abs(error) for row in rows for error in row.memory_errors)
    at_one_pace = _figures(rows, [row.measured_seconds for row in rows])
    return {
        "rows": len(rows), "failed": sum(bool(row.failure) for row in rows), **at_one_pace,
        "by_clock": _figures(rows, [row.median_clock_seconds for row in rows]),
        "memory_median_error": statistics.median(memory) if memory else None,
        "memory_worst_error": memory[-1] if memory else None,
        "memory_within_10_percent": sum(error <= 0.1 for error in memory) / len(memory) if memory else None,
    }  # fmt: skip


def _figures(rows: Sequence[Row], measured: Sequence[float | None]) -> dict[str, Any]:
    """What predictions are worth by one way to measure."""
    known = [(row, seconds) for row, seconds in zip(rows, measured, strict=True) if seconds is not None]
    found = accuracy(
        [
            Pair(group="", plan=str(number), predicted=row.predicted_seconds, measured=seconds)
            for number, (row, seconds) in enumerate(known)
        ]
    )
    choice = next((seconds for row, seconds in known if row.is_choice), None)
    best = min((seconds for _, seconds in known), default=None)
    return {
        "measured": found.count, "median_error": found.median_ape, "p90_error": found.p90_ape, "bias": found.bias,
        "tau": found.tau, "regret": choice / best - 1 if choice and best else None,
    }  # fmt: skip


class Load:
    """What other programs take of this machine meanwhile, in cores."""

    def __init__(self) -> None:
        self._start, self._busy, self._own = time.monotonic(), self._busy_seconds(), self._own_seconds(())

    def cores(self, pools: Sequence[Ranks]) -> float | None:
        """Mean since the beginning; None where the system does not tell."""
        if self._busy is None:
            return None
        busy = (self._busy_seconds() or 0.0) - self._busy - (self._own_seconds(pools) - self._own)
        return max(0.0, busy) / (time.monotonic() - self._start)

    @staticmethod
    def _busy_seconds() -> float | None:
        try:
            fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
        except OSError:
            return None
        user, nice, system = (int(value) for value in fields[:3])
        return (user + nice + system) / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def _own_seconds(pools: Sequence[Ranks]) -> float:
        times = os.times()
        total = times.user + times.system + times.children_user + times.children_system
        for pool in pools:
            for process, _ in pool._processes:
                with contextlib.suppress(OSError):
                    of = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
                    total += (int(of[11]) + int(of[12])) / os.sysconf("SC_CLK_TCK")
        return total


def _told(figures: Mapping[str, Any]) -> str:
    parts = [f"median error {figures['median_error']:.1%}", f"bias {figures['bias']:+.1%}"]
    parts += [f"tau {figures['tau']:.2f}"] if figures["tau"] is not None else []
    parts += [f"regret {figures['regret']:.1%}"] if figures["regret"] is not None else []
    return ", ".join(parts)


def _print(rows: Sequence[Row], found: Mapping[str, Any]) -> None:
    print(f"{'plan':44}{'predicted':>11}{'measured':>11}{'error':>8}{'memory':>12}{'measured':>12}{'error':>8}")
    for row in rows:
        time_text = f"{row.predicted_seconds:>9.3f} s"
        time_text += f"{row.measured_seconds:>9.3f} s{row.error:>+8.1%}" if row.seconds else f"{'-':>11}{'-':>8}"
        memory = f"{max(row.predicted_bytes) / 2**20:>8.1f} MiB"
        if row.memory_errors:
            worst = max(row.memory_errors, key=abs)
            memory += f"{max(row.measured_bytes) / 2**20:>8.1f} MiB{worst:>+8.1%}"
        notes = (["<- chosen"] if row.is_choice else []) + row.recipes + ([row.failure] if row.failure else [])
        print(f"{row.name:44}{time_text}{memory}  {'; '.join(notes)}".rstrip())
    if found["measured"]:
        print(
            f"\ntime of {found['measured']} plans at one pace: {_told(found)}; by the clock: {_told(found['by_clock'])}"
        )
    if found["memory_median_error"] is not None:
        within = f"{found['memory_within_10_percent']:.0%} of ranks within 10 %"
        errors = f"median error {found['memory_median_error']:.1%}, worst {found['memory_worst_error']:.1%}"
        print(f"memory: {errors}, {within}")
    if found["other_load_cores"] is not None:
        print(f"meanwhile other programs used {found['other_load_cores']:.1f} of {os.cpu_count()} cores")


def compare(
    model: str, ranks: Sequence[int], *, global_batch: int, plans: int, steps: int, with_memory: bool = True,
    progress: Any = lambda what: None,
) -> tuple[list[Row], dict[str, Any]]:  # fmt: skip
    """Rows and summary; what is known by then, where Ctrl-C came."""
    rows: list[Row] = []
    load, other = Load(), None
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        pools = {size: Ranks(size, model, global_batch, Path(name)) for size in ranks}
        try:
            made = planning(model, max(ranks), global_batch, progress)
            progress("planning")
            rows = compared(made, ranks, plans)
            load = Load()
            measure(rows, pools, steps, progress, with_memory=with_memory, pace=made.pace)
            other = load.cores(list(pools.values()))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
        finally:
            for pool in pools.values():
                pool.close()
    return rows, {"model": model, "global_batch": global_batch, **summary(rows), "other_load_cores": other}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", metavar="MODEL", help="of the zoo, or a Hugging Face config.json")
    parser.add_argument("--ranks", default="1,2", help="numbers of processes to plan for (default 1,2)")
    parser.add_argument("--plans", type=int, default=20, help="besides the recipes (default 20)")
    parser.add_argument("--steps", type=int, default=12, help="of each plan that count (default 12)")
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--no-memory", action="store_true", help="time alone")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    ranks = sorted({int(text) for text in given.ranks.split(",")})
    start = time.monotonic()

    def progress(what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{time.monotonic() - start:4.0f} s  {what}", end="", file=sys.stderr, flush=True)

    try:
        rows, found = compare(
            given.model, ranks, global_batch=given.global_batch, plans=given.plans, steps=given.steps,
            with_memory=not given.no_memory, progress=progress,
        )  # fmt: skip
    except PlannerError as error:
        sys.exit(f"error: {error}")
    progress("")
    if given.json:
        print(json.dumps({**found, "plans": [row.to_dict() for row in rows]}, indent=1))
    else:
        _print(rows, found)


if __name__ == "__main__":
    main()
