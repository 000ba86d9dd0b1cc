"""What of a model is to be measured, and the rows of this machine that `autoplan run` plans by."""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from planner.cluster import Cluster
from planner.errors import PlannerError, ProfileError
from planner.graph import Graph
from planner.measure.local import cache_folder, machine_digest, write_if_possible
from planner.measure.operators import measure_operators
from planner.measure.passes import Case, cases
from planner.operators import class_seconds, measured_share
from planner.profile import SOURCE, Profile, measured_graph, measured_part
from planner.runtime.machine import this_machine

_log = logging.getLogger(__name__)
RUN_BUDGET_SECONDS = 25.0
_PASSES = 12  # of a case at least: they must fit into the budget, or it is left out
_SHARE_OF_BUDGET = 0.25  # that one case may take
_SHARE_OF_MEMORY = 0.5
_SHARE_OF_PARTS = 0.4  # of what is left for parts, that one way to split a model may take

_PARTS_BUDGET_SECONDS = 10.0  # for all parts of a model together
Progress = Callable[[str, int, int], None]  # what, done, of


def run_micro_batches(global_batch: int) -> tuple[int, ...]:
    """Micro-batches to measure for a run: what lies between is interpolated.

    Two is among them, as torch has kernels of its own for one sample (convolutions).

    >>> run_micro_batches(16), run_micro_batches(6), run_micro_batches(1)
    ((1, 2, 4, 16), (1, 2, 4, 6), (1,))
    """
    sizes = {global_batch, min(2, global_batch)}
    size = 1
    while size < global_batch:
        sizes.add(size)
        size *= 4
    return tuple(sorted(sizes))


def affordable(
    todo: Sequence[Case], cluster: Cluster, budget_seconds: float, *, estimate: Callable[[Case], float] | None = None
) -> list[Case]:
    """Cases whose passes are expected to end in time and to fit into memory; the others keep the roofline."""

    def seconds(case: Case) -> float:
        return float(class_seconds(cluster.device, case.kind, case.micro_batch)[0].sum())

    expected = estimate or seconds
    return [
        case
        for case in todo
        if _PASSES * expected(case) <= _SHARE_OF_BUDGET * budget_seconds
        and _held_bytes(case) <= _SHARE_OF_MEMORY * cluster.capacity_bytes
    ]


def _held_bytes(case: Case) -> float:
    block = next(b for b in case.graph.blocks if b.class_index == case.class_index)
    parameters = sum(case.graph.tensors[p].num_bytes.fixed for p in block.parameters)
    kind, size = case.kind, case.micro_batch
    return 2 * parameters + kind.saved.at(size) + max(kind.forward_peak.at(size), kind.backward_peak.at(size))


class Measuring(Protocol):
    """What measures a model's blocks, or those of the part that one rank of `axes` has."""

    def __call__(self, graph: Graph, axes: Mapping[str, int] = {}) -> Profile:
        """All rows so far."""


def local_measuring(
    cluster: Cluster, global_batch: int, progress: Progress, *, budget_seconds: float = RUN_BUDGET_SECONDS
) -> Measuring:
    """What measures a model's blocks on the CPU of this machine, once: rows are kept in the user's cache directory.

    Parts of a model are measured while the search asks for them, within a budget of their own. A fault costs the rows,
    not the run: without them the device's measured rates count.
    """
    left_for_parts = _PARTS_BUDGET_SECONDS

    def measure(graph: Graph, axes: Mapping[str, int] = {}) -> Profile:
        nonlocal left_for_parts
        processes = cluster.num_devices
        machine = replace(this_machine("cpu", processes), pace_seconds=cluster.device.pace_seconds or 0.0)
        profile = Profile(machine=machine)
        folder = cache_folder()
        path = None if folder is None else folder / f"operators-{machine_digest(processes)}.json"
        if path is not None and path.exists():
            with contextlib.suppress(ProfileError):
                kept = Profile.load(path)
                is_alike = kept.machine.pace_seconds == machine.pace_seconds  # else the machine was measured again
                profile = kept if is_alike and not kept.machine.differences(machine) else profile
        budget = left_for_parts if axes else budget_seconds
        todo = affordable(cases([(graph, axes)], run_micro_batches(global_batch)), cluster, budget)
        if budget <= 0 or all(case.key in profile.block_rows for case in todo):
            return profile

        def keep(found: Profile) -> None:
            if path is not None:
                write_if_possible(path, found.dumps())

        begin = time.monotonic()
        try:
            # The search asks for a few ways to split a model, one after the other.
            share = _SHARE_OF_PARTS * budget if axes else budget
            return measure_operators(todo, profile, budget_seconds=share, keep=keep, progress=progress)
        except PlannerError as error:
            _log.warning("planning by the rates of this machine alone: %s", error)
            return profile
        finally:
            left_for_parts -= time.monotonic() - begin if axes else 0.0

    return measure


def as_measured(graph: Graph, profile: Profile | Measuring | None) -> tuple[Graph, Profile | None]:
    """The graph with measured seconds, and the profile that they are from."""
    if profile is None:
        return graph, None
    found = profile if isinstance(profile, Profile) else profile(graph)
    return measured_graph(graph, found), found


def part_as_measured(part: Graph, whole: Graph, axes: Mapping[str, int], profile: Profile | Measuring | None) -> Graph:
    """One rank's part of a graph that is `as_measured`, with measured seconds; of tensor parallelism they are its own.

    Parts on other axes are as far from the roofline as the whole.
    """
    if profile is None:
        return part
    if not isinstance(profile, Profile):
        profile = profile(part, axes) if set(axes) == {"tp"} else profile(whole)
    return measured_part(part, whole, profile)


def share_of_step(graph: Graph, cluster: Cluster, micro_batch: int, parts_seconds: Mapping[str, float]) -> float:
    """Of a step, the share that rests on rows of a profile: of computing by its kernels, of communication by its links.

    `parts_seconds` are those of a prediction. A bubble is no work: it counts as what it waits for does.
    """
    links = [cluster.intra_node_link] + ([cluster.inter_node_link] if cluster.num_nodes > 1 else [])
    of_links = float(all(link.source.get("*") == SOURCE for link in links))
    shares = {
        "compute": measured_share(cluster.device, graph, micro_batch), "communication": of_links, "sync": of_links,
        "optimizer": float(cluster.device.source.get("optimizer_seconds") == SOURCE),
    }  # fmt: skip
    work = sum(seconds for name, seconds in parts_seconds.items() if name != "bubble")
    return sum(shares.get(name, 0.0) * s for name, s in parts_seconds.items()) / work if work > 0 else 0.0


def split_cases(
    graphs: Sequence[tuple[Graph, Mapping[Literal["tp", "cp"], int]]], micro_batches: Sequence[int]
) -> list[Case]:
    """The cases of whole graphs and of those of one rank of an axis."""
    return cases([(graph, {str(axis): size for axis, size in axes.items()}) for graph, axes in graphs], micro_batches)
