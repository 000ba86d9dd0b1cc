"""What ranks take to communicate, to do so while they compute, to step an optimizer and to copy from and to the host.

All ranks call `measure_fabric` together: processes that this one starts, or those that torchrun started on the nodes of
a cluster. Groups are those of mesh axes: of each size that divides the ranks, with neighbours or with ranks far apart,
one group alone and all of them at once.
"""

import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import ProfileError
from planner.measure.local import CPU_VARIABLES
from planner.measure.passes import spread
from planner.measure.processes import end_with_parent, listening, say
from planner.profile import CollectiveRow, CopyRow, Machine, OptimizerRow, OverlapRow, Profile, Row

KINDS = ("collectives", "overlap", "optimizer", "copies")
_CPU_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 25)
_CUDA_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28)
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
_OVERLAPPED = ("all_gather", "reduce_scatter", "all_reduce")
_LEAST_REPEATS, _MOST_REPEATS = 5, 200
_GRACE_SECONDS = 120.0
_DONE, _CUT = "done", "cut"  # the last word of rank 0: all is measured, or the budget ended
_OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
}
_OPTIMIZER_SHAPES = ((1 << 16, 16), (1 << 22, 16))  # elements together, tensors


@dataclass(frozen=True, slots=True)
class Shape:
    """Groups of one mesh axis: `ranks` in each, `stride` apart; `groups` of them communicate at once."""

    ranks: int
    stride: int
    groups: int

    def members(self, world: int) -> list[list[int]]:
        """The ranks of each group, of those that communicate."""
        block = self.ranks * self.stride
        every = [
            list(range(start + offset, start + block, self.stride))
            for start in range(0, world, block)
            for offset in range(self.stride)
        ]
        return every[: self.groups]


def shapes(world: int) -> list[Shape]:
    """Groups of every size that divides the ranks; neighbours and ranks far apart, one and all at once.

    >>> shapes(4)  # doctest: +NORMALIZE_WHITESPACE
    [Shape(ranks=4, stride=1, groups=1), Shape(ranks=2, stride=1, groups=1), Shape(ranks=2, stride=1, groups=2),
     Shape(ranks=2, stride=2, groups=2)]
    """
    found = []
    for ranks in sorted((n for n in range(2, world + 1) if world % n == 0), reverse=True):
        count = world // ranks
        found += [Shape(ranks, 1, 1)] + ([Shape(ranks, 1, count), Shape(ranks, count, count)] if count > 1 else [])
    return found


def measure_fabric(
    machine: Machine, what: Sequence[str], *, per_node: int, budget_seconds: float, known: set[tuple[str, str]]
) -> Iterator[Row]:
    """Rows of `what` (of KINDS) that are not `known`, the same on every rank; ranks fill nodes of `per_node`.

    A process group is there, and every rank has its device.
    """
    device = torch.device(machine.kind, torch.cuda.current_device()) if machine.kind == "cuda" else torch.device("cpu")
    clock = _Clock(device)
    begin = time.monotonic()
    world = dist.get_world_size()
    num_points = len(shapes(world)) * len(_COLLECTIVES) * len(_CUDA_SIZES)
    each = max(0.01, budget_seconds / (num_points + 30))
    makers: dict[str, Callable[[], Iterator[Row]]] = {
        "optimizer": lambda: _optimizers(clock, each, known),
        "copies": lambda: _copies(clock, each, known) if machine.kind == "cuda" else iter(()),
        "overlap": lambda: _overlaps(clock, each, known) if world > 1 else iter(()),
        "collectives": lambda: _collectives(clock, per_node, each, known) if world > 1 else iter(()),
    }
    for name, make in makers.items():
        for row in make() if name in what else ():
            yield row
            if clock.most(time.monotonic() - begin) > budget_seconds:  # the same on every rank
                return


class _Clock:
    """Times work on a device, as often on every rank, and tells the slowest rank's median."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def measure(
        self, work: Callable[[], object], budget_seconds: float, *, takes_part: bool = True
    ) -> tuple[float, float, int]:
        """(median seconds, spread, repeats); a rank that takes no part waits."""
        once = 0.0
        if takes_part:
            work()
            once = min(self._times(work, 2))
        repeats = max(_LEAST_REPEATS, min(_MOST_REPEATS, math.ceil(budget_seconds / max(self.most(once), 1e-6))))
        dist.barrier()
        times = self._times(work, repeats) if takes_part else [0.0]
        return self.most(statistics.median(times)), self.most(spread(times)), repeats

    def _times(self, work: Callable[[], object], repeats: int) -> list[float]:
        if self.device.type == "cuda":
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
            for mark in marks[:-1]:
                mark.record()
                work()
            marks[-1].record()
            torch.cuda.synchronize(self.device)
            return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return times

    def most(self, value: float) -> float:
        most = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(most)


def _collectives(clock: _Clock, per_node: int, each: float, known: set[tuple[str, str]]) -> Iterator[Row]:
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = _CUDA_SIZES if clock.device.type == "cuda" else _CPU_SIZES
    for shape in shapes(world):
        members = shape.members(world)
        groups = [dist.new_group(ranks) for ranks in members]  # on every rank, in the same order
        mine = next((i for i, ranks in enumerate(members) if rank in ranks), None)
        nodes = max(len({member // per_node for member in ranks}) for ranks in members)
        for size in sizes:
            works = _works(size, members[mine], groups[mine], clock.device) if mine is not None else {}
            for name in _COLLECTIVES:
                row = CollectiveRow(
                    collective=name, ranks=shape.ranks, nodes=nodes, groups=shape.groups, stride=shape.stride,
                    num_bytes=float(_rounded_size(size, shape.ranks)), seconds=0.0, spread=0.0, repeats=0,
                )  # fmt: skip
                if ("collectives", row.key) in known or (name == "all_to_all" and not _has_all_to_all(clock.device)):
                    continue
                found = clock.measure(works.get(name, lambda: None), each, takes_part=mine is not None)
                yield _with(row, found)
        for group in groups:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)


def _with(row: Any, found: tuple[float, float, int]) -> Any:
    seconds, deviation, repeats = found
    kept = {name: getattr(row, name) for name in row.__dataclass_fields__}
    return type(row)(**{**kept, "seconds": _rounded(seconds), "spread": _rounded(deviation), "repeats": repeats})


def _has_all_to_all(device: torch.device) -> bool:
    return device.type == "cuda" or hasattr(dist, "all_to_all_single")


def _rounded_size(size: int, ranks: int) -> int:
    """Bytes of float32 that divide among the ranks."""
    return size // 4 // ranks * ranks * 4


def _works(
    size: int, members: Sequence[int], group: Any, device: torch.device, *, async_op: bool = False
) -> dict[str, Callable[[], Any]]:
    """The collectives on `size` bytes, as `planner.collectives` counts them."""
    ranks = len(members)
    count = _rounded_size(size, ranks) // 4
    whole, part, other = (torch.ones(n, device=device) for n in (count, count // ranks, count))
    place = list(members).index(dist.get_rank())

    def round_trip() -> None:
        """Send to the next rank while receiving from the one before."""
        operations = [
            dist.P2POp(dist.isend, whole, members[(place + 1) % ranks], group),
            dist.P2POp(dist.irecv, other, members[(place - 1) % ranks], group),
        ]
        for pending in dist.batch_isend_irecv(operations):
            pending.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(other.fill_(1.0), group=group, async_op=async_op),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group, async_op=async_op),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group, async_op=async_op),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group, async_op=async_op),
        "broadcast": lambda: dist.broadcast(whole, members[0], group=group, async_op=async_op),
        "send_recv": round_trip,
    }


def _overlaps(clock: _Clock, each: float, known: set[tuple[str, str]]) -> Iterator[Row]:
    """A matmul and a collective of about the same length, alone and at once."""
    world, device = dist.get_world_size(), clock.device
    width = 4096 if device.type == "cuda" else 512
    dtype = torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    left, right = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    size = (1 << 28) if device.type == "cuda" else (1 << 24)
    waiting = _works(size, range(world), dist.group.WORLD, device)
    pending = _works(size, range(world), dist.group.WORLD, device, async_op=True)
    one, _, _ = clock.measure(lambda: torch.mm(left, right), each)
    for name in _OVERLAPPED:
        if ("overlaps", f"{name} {world}") in known:
            continue
        link, _, _ = clock.measure(waiting[name], 4 * each)
        times = max(1, round(link / one))

        def compute(times: int = times) -> None:
            for _ in range(times):
                torch.mm(left, right)

        def both(name: str = name, compute: Callable[[], None] = compute) -> None:
            work = pending[name]()
            compute()
            work.wait()

        alone, _, _ = clock.measure(compute, 4 * each)
        together, _, repeats = clock.measure(both, 4 * each)
        yield OverlapRow(
            collective=name, ranks=world, compute_seconds=_rounded(alone), link_seconds=_rounded(link),
            both_seconds=_rounded(together), repeats=repeats,
        )  # fmt: skip


def _optimizers(clock: _Clock, each: float, known: set[tuple[str, str]]) -> Iterator[Row]:
    for elements, tensors in _OPTIMIZER_SHAPES:
        for name, make in _OPTIMIZERS.items():
            row = OptimizerRow(
                optimizer=name, dtype="float32", elements=elements, tensors=tensors, seconds=0.0, spread=0.0, repeats=0
            )
            if ("optimizers", row.key) in known:
                continue
            parameters = [
                torch.nn.Parameter(torch.randn(elements // tensors, device=clock.device)) for _ in range(tensors)
            ]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            yield _with(row, clock.measure(make(parameters).step, 2 * each))


def _copies(clock: _Clock, each: float, known: set[tuple[str, str]]) -> Iterator[Row]:
    """All devices of the node copy at once."""
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    for size in (1 << 20, 1 << 26, 1 << 28):
        host = torch.ones(size, dtype=torch.uint8).pin_memory()
        there = torch.ones(size, dtype=torch.uint8, device=clock.device)
        works = {
            "h2d": lambda host=host, there=there: there.copy_(host, non_blocking=True),
            "d2h": lambda host=host, there=there: host.copy_(there, non_blocking=True),
        }
        for direction, work in works.items():
            row = CopyRow(
                direction=direction, devices=devices, num_bytes=float(size), seconds=0.0, spread=0.0, repeats=0
            )
            if ("copies", row.key) not in known:
                yield _with(row, clock.measure(work, 2 * each))


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


# --- whose ranks ----------------------------------------------------------------------------------

_TABLES = ("collectives", "overlaps", "optimizers", "copies")
_ROWS = {"CollectiveRow": CollectiveRow, "OverlapRow": OverlapRow, "OptimizerRow": OptimizerRow, "CopyRow": CopyRow}


def measure_here(
    profile: Profile,
    what: Sequence[str],
    *,
    budget_seconds: float,
    keep: Callable[[Profile], None],
    progress: Callable[[str, int, int], None],
) -> tuple[Profile, bool]:
    """The profile with rows of all devices (or cores) of this machine, and whether the budget ended before they did.

    `keep` is told after each row.

    Raises:
        ProfileError: a rank failed.
    """
    machine = profile.machine
    known = sorted(key for key in profile.row_keys() if key[0] in _TABLES)

    def code_of(rank: int, folder: str) -> str:
        arguments = f"{rank}, {folder!r}, {asdict(machine)!r}, {tuple(what)!r}, {budget_seconds}, {known!r}"
        return f"from planner.measure.fabric import work; work({arguments})"

    variables = CPU_VARIABLES if machine.kind == "cpu" else {}
    number = 0
    with listening(code_of, machine.processes, variables) as wait:
        while True:
            rank, line = wait(_GRACE_SECONDS)
            if rank < 0:
                raise ProfileError(f"the ranks said nothing in {_GRACE_SECONDS:.0f} s; is this machine very busy?")
            if line in (_DONE, _CUT):
                return profile, line == _CUT
            if rank == 0 and line.startswith("{"):
                said = json.loads(line)
                row = _ROWS[said["table"]](**said["row"])
                profile = profile.with_rows([row])
                number += 1
                progress(f"measuring {row.key}", number, 0)
                keep(profile)


def work(
    rank: int, folder: str, machine: dict[str, Any], what: Sequence[str], seconds: float, known: Sequence[Any]
) -> None:
    """The body of a rank that this machine's processes are: rank 0 says the rows."""
    end_with_parent()
    where = Machine(**machine)
    if where.kind == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if where.kind == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=rank,
        world_size=where.processes, timeout=timedelta(seconds=_GRACE_SECONDS),
    )  # fmt: skip
    keys = {(table, key) for table, key in known}
    begin = time.monotonic()
    for row in measure_fabric(where, what, per_node=where.processes, budget_seconds=seconds, known=keys):
        if rank == 0:
            say(json.dumps({"table": type(row).__name__, "row": asdict(row)}))
    is_cut = time.monotonic() - begin > seconds
    dist.barrier()
    if rank == 0:
        say(_CUT if is_cut else _DONE)
    dist.destroy_process_group()


def measure_under_torchrun(
    profile: Profile, what: Sequence[str], *, budget_seconds: float, keep: Callable[[Profile], None]
) -> Profile:
    """The same by the ranks that torchrun started, on one node or several; rank 0 keeps the rows."""
    local = int(os.environ["LOCAL_RANK"])
    if profile.machine.kind == "cuda":
        torch.cuda.set_device(local)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if profile.machine.kind == "cuda" else "gloo", timeout=timedelta(seconds=_GRACE_SECONDS)
    )
    told: list[Any] = [sorted(key for key in profile.row_keys() if key[0] in _TABLES)]
    dist.broadcast_object_list(told, 0)  # what rank 0 has: a file may be on its node alone
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    known = {(table, key) for table, key in told[0]}
    for row in measure_fabric(profile.machine, what, per_node=per_node, budget_seconds=budget_seconds, known=known):
        profile = profile.with_rows([row])
        if dist.get_rank() == 0:
            keep(profile)
    dist.barrier()
    dist.destroy_process_group()
    return profile
