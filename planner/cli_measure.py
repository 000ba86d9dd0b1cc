"""The command `autoplan measure`: what to measure, where to keep it, and whether a profile may be used."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from planner.cluster import Cluster
from planner.errors import ProfileError
from planner.graph import Graph
from planner.measure.fabric import KINDS, measure_here, measure_under_torchrun
from planner.measure.imports import nccl_tests_rows, topology_rows
from planner.measure.local import local_cluster
from planner.measure.operators import measure_operators
from planner.profile import Machine, Profile, unlike
from planner.runtime.machine import this_machine, torch_release
from planner.runtime.worker import device_kind
from planner.search import SAMPLES_PER_DEVICE, default_precision, ways_to_split
from planner.search.measuring import affordable, split_cases
from planner.trace import trace
from planner.zoo.load import load_model

DEFAULT_BUDGET_SECONDS = 120.0
DEFAULT_MICRO_BATCHES = (1, 4)
WHAT = ("operators", *KINDS)
_SHARE_OF_OPERATORS = 0.7  # of the budget, where there are models
OnProgress = Callable[[str, int, int], None]  # what, done, of


def add_options(command: argparse.ArgumentParser, model_help: str, seq_help: str, precisions: tuple[str, ...]) -> None:
    """The options of the command."""
    command.add_argument("models", metavar="MODEL", nargs="*", help=f"{model_help}; without one the machine alone")
    command.add_argument("--device", choices=("cuda", "cpu"), help="default cuda where there is one")
    command.add_argument("--out", metavar="FILE", help="where rows are added (default: the user's data directory)")
    command.add_argument(
        "--micro-batch", type=_numbers, default=DEFAULT_MICRO_BATCHES, metavar="N,...",
        help=f"samples of a pass (default {','.join(map(str, DEFAULT_MICRO_BATCHES))})",
    )  # fmt: skip
    command.add_argument(
        "--tp", type=_numbers, default=(1,), metavar="N,...", help="tensor-parallel degrees whose local shapes count"
    )
    command.add_argument("--seq", type=int, metavar="S", help=seq_help)
    command.add_argument("--precision", choices=precisions, help="default bf16, on a CPU fp32")
    command.add_argument("--nproc", type=int, metavar="N", help="devices that measure at once (default all)")
    command.add_argument(
        "--budget", type=_duration, default=DEFAULT_BUDGET_SECONDS, metavar="TIME",
        help=f"such as 60s or 10m (default {DEFAULT_BUDGET_SECONDS:.0f}s); run again to go on",
    )  # fmt: skip
    command.add_argument(
        "--only", type=_kinds, default=WHAT, metavar="WHAT,...", help=f"some of {', '.join(WHAT)} (default all)"
    )
    command.add_argument("--nccl-tests", metavar="FILE", help="import the output of a program of nccl-tests")
    command.add_argument("--topology", metavar="FILE", help="import the output of nvidia-smi topo -m")
    command.add_argument("--any-machine", action="store_true", help="add to a file of another machine or torch")


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 10**6 for part in parts):
        raise argparse.ArgumentTypeError(f"must be whole numbers from 1 on, as in 1,4, is {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def _kinds(text: str) -> tuple[str, ...]:
    unknown = [part for part in text.split(",") if part not in WHAT]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(WHAT)}")
    return tuple(text.split(","))


def _duration(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h)?", text.strip())
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"must be a time such as 60s or 10m, is {text!r}")
    return float(match[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0}[match[2] or "s"]


def measure(arguments: argparse.Namespace, progress: OnProgress) -> tuple[Profile, Path, list[str]]:
    """Measure what the arguments say into their file; the last of the three says what is left.

    Raises:
        PlannerError: a model, a file or the machine is not what it should be.
    """
    kind: Literal["cuda", "cpu"] = arguments.device or device_kind()
    if kind == "cuda" and device_kind() == "cpu":
        raise ProfileError("this machine has no CUDA device that torch can use; measure with --device cpu")
    by_torchrun = "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
    cluster = None if by_torchrun else _cluster(kind, arguments.nproc, progress)
    processes = int(os.environ["WORLD_SIZE"]) if cluster is None else cluster.num_devices
    machine = this_machine(kind, processes)
    if kind == "cpu" and cluster is not None:
        machine = replace(machine, pace_seconds=cluster.device.pace_seconds or 0.0)
    path = Path(arguments.out) if arguments.out else default_path(machine)
    profile = Profile(machine=machine)
    if path.exists():
        profile = Profile.load(path)
        if differences := profile.machine.differences(machine):
            check_is_meant(f"{path} is of {' and '.join(differences)}", arguments.any_machine)
    if not arguments.out:
        path.parent.mkdir(parents=True, exist_ok=True)
    profile = profile.with_rows(_imported(arguments))

    def keep(found: Profile) -> None:
        if is_first_rank():
            found.save(path)

    keep(profile)

    what = [name for name in arguments.only if name != "operators"]
    models = arguments.models if "operators" in arguments.only else []
    share = 0.0 if not models else 1.0 if not what else _SHARE_OF_OPERATORS
    left: list[str] = []
    if cluster is None:
        return measure_under_torchrun(profile, what, budget_seconds=arguments.budget, keep=keep), path, []
    if models:
        graphs = [graph for spec in models for graph in _graphs(spec, cluster, kind, arguments, progress)]
        budget = share * arguments.budget
        every = split_cases(graphs, arguments.micro_batch)
        todo = affordable(every, cluster, budget)
        profile = measure_operators(todo, profile, budget_seconds=budget, keep=keep, progress=progress)
        late = [case for case in todo if case.key not in profile.block_rows]
        dear = [case for case in every if case.key not in {c.key for c in todo} | profile.block_rows.keys()]
        if late:
            left.append(f"{len(late)} of {len(every)} passes are left: run it again to go on")
        if dear:
            left.append(
                f"{len(dear)} of {len(every)} passes would take too long for the budget, or more memory than there is: "
                "give a longer --budget or smaller micro-batches"
            )
    if what:
        budget = (1 - share) * arguments.budget
        profile, is_cut = measure_here(profile, what, budget_seconds=budget, keep=keep, progress=progress)
        if is_cut:
            left.append(f"the budget ended while {', '.join(what)} were measured: run it again to go on")
    return profile, path, left


def is_first_rank() -> bool:
    """Whether this process speaks and writes: under torchrun the first rank does."""
    return int(os.environ.get("RANK", "0")) == 0


def _cluster(kind: str, nproc: int | None, progress: OnProgress) -> Cluster:
    if kind == "cpu" and device_kind() == "cuda":
        raise ProfileError("this machine has CUDA devices, which plans are for; hide them with CUDA_VISIBLE_DEVICES=''")
    return local_cluster(
        num_processes=nproc, progress=lambda part, what: progress(f"this machine: {what}", round(100 * part), 100)
    )


def _graphs(
    spec: str, cluster: Cluster, kind: Literal["cuda", "cpu"], arguments: argparse.Namespace, progress: OnProgress
) -> list[tuple[Graph, Mapping[Literal["tp", "cp"], int]]]:
    """A model, and one rank's part of it for each degree of tensor parallelism."""
    progress(f"tracing {spec}", 0, 0)
    loaded = load_model(spec, sequence_length=arguments.seq, device="meta")
    graph = trace(
        loaded.module, loaded.batch, precision=arguments.precision or default_precision(cluster),
        loss_fn=loaded.loss_fn, name=loaded.name, device_kind=kind,
    )  # fmt: skip
    if graph.fallbacks:
        raise ProfileError(f"{spec} has no graph, so no blocks to measure: {graph.fallbacks[0]}")
    found: list[tuple[Graph, Mapping[Literal["tp", "cp"], int]]] = [(graph, {})] if 1 in arguments.tp else []
    for degree in (degree for degree in arguments.tp if degree > 1):
        progress(f"splitting {spec} over {degree} ranks", 0, 0)
        split = ways_to_split(graph, cluster, SAMPLES_PER_DEVICE * max(degree, cluster.num_devices), kind)
        found += [(way.graph, {"tp": degree}) for way in split(("tp", degree)) if way.divides]
    return found


def _imported(arguments: argparse.Namespace) -> list[Any]:
    rows: list[Any] = []
    for path, read in ((arguments.nccl_tests, nccl_tests_rows), (arguments.topology, topology_rows)):
        if path is not None:
            try:
                text = Path(path).read_text(encoding="utf-8", errors="replace")
            except OSError as error:
                raise ProfileError(f"cannot read {path}: {error.strerror}") from None
            rows += read(text, path)
    return rows


def default_path(machine: Machine) -> Path:
    """Where the user's own profiles lie: one for a device and a release of torch."""
    home = os.environ.get("XDG_DATA_HOME")
    folder = (Path(home) if home else Path.home() / ".local" / "share") / "autoplan" / "profiles"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{machine.device}-x{machine.processes}-torch{machine.torch}").strip("-")
    return folder / f"{name}.json"


def usable_profile(path: str | None, cluster: Cluster, *, is_local: bool, any_machine: bool) -> Profile | None:
    """The profile to plan by: of the cluster's device and of this torch, or the user wants it all the same.

    Raises:
        ProfileError: it is of another machine.
    """
    if path is None:
        return None
    profile = Profile.load(path)
    kind: Literal["cuda", "cpu"] = "cpu" if cluster.device.kind == "cpu" else "cuda"
    here = this_machine(kind, cluster.num_devices) if is_local else None
    differences = unlike(profile, cluster, here)
    if here is None and profile.machine.torch != torch_release():
        differences.append(f"another torch ({profile.machine.torch}, not {torch_release()})")
    if differences:
        check_is_meant(f"{path} is of {' and '.join(differences)}", any_machine)
    return profile


def check_is_meant(fault: str, any_machine: bool) -> None:
    """Ask, where somebody can answer; else refuse.

    Raises:
        ProfileError: it is not meant.
    """
    if any_machine:
        return
    if sys.stdin.isatty() and sys.stderr.isatty():
        sys.stderr.write(f"{fault}. Use it all the same? [y/N] ")
        sys.stderr.flush()
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise ProfileError(f"{fault}; measure here with autoplan measure, or say --any-machine")
