"""The cluster called `local`: this machine's CUDA devices, else its cores as processes on gloo.

CPU numbers are measured with all processes busy at once, as in training, because they share
memory bandwidth. The result is a plain `Cluster` without clock or host name; it is kept in the
user's cache directory, so that later plans for this machine start from the same numbers.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import math
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from planner.cluster import (
    CheckpointSeconds,
    Cluster,
    Curve,
    Device,
    Link,
    OptimizerSeconds,
    ShardingSeconds,
    Slowdown,
    all_devices,
    device_named,
    link_named,
)
from planner.errors import ClusterError
from planner.measure.pace import Paced
from planner.measure.processes import Worker, end_with_parent, forward_lines, last_line, say, start_process, stop
from planner.measure.wrappers import (
    FEW_TENSORS,
    MANY_TENSORS,
    OPTIMIZER_TENSORS,
    OPTIMIZERS,
    message_seconds,
    optimizer_rows,
    pipeline_seconds,
    wrapper_rows,
)
from planner.measure.wrappers import (
    Rows as _Rows,
)
from planner.runtime.machine import cpu_model, num_cores

_log = logging.getLogger(__name__)

_FORMAT = 9  # changes with the meaning of a cached number
_MAX_PROCESSES = 16
_TIMEOUT_SECONDS = 90.0
_BETWEEN_SIZE, _BETWEEN_PRODUCTS = 128, 10  # about half a millisecond of computing between collectives
_COLLECTIVE_SECONDS = 0.15  # for each of them and each size
_CHECKPOINTED_BLOCKS = 5
_WAIT_SECONDS = 120.0  # of ranks for the first one, which measures
_STEPS = (
    "start", "matmul", "memory", "dispatch", "attention", "convolution", "optimizer", "gloo", "wrapper", "schedule",
)  # fmt: skip
_SOURCE = "measured here with all processes busy"
CPU_VARIABLES = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # of a rank on one core

Progress = Callable[[float, str], None]


def local_cluster(
    *,
    num_processes: int | None = None,
    use_cache: bool = True,
    progress: Progress | None = None,
) -> Cluster:
    """This machine as one node: its CUDA devices if it has any, else one CPU process per core.

    Measuring the CPU takes some 20 seconds, once: the result is cached under
    `$XDG_CACHE_HOME/autoplan` (or `~/.cache/autoplan`) unless AUTOPLAN_CACHE=off. `progress` is
    told the done fraction and what is being measured.

    Raises:
        ClusterError: there are fewer devices than `num_processes`, or a measurement failed.
    """
    if num_processes is not None and num_processes < 1:
        raise ClusterError(f"the number of processes must be at least 1, got {num_processes}")
    if num_processes is None and "LOCAL_WORLD_SIZE" in os.environ:
        num_processes = int(os.environ["LOCAL_WORLD_SIZE"])  # under torchrun the ranks are the devices
    if torch.cuda.is_available():
        return _cuda_cluster(num_processes)
    count = num_processes or min(num_cores(), _MAX_PROCESSES)
    if count > max(num_cores(), _MAX_PROCESSES):
        raise ClusterError(
            f"{count} processes are more than a machine of {num_cores()} cores can measure with; "
            f"take at most {max(num_cores(), _MAX_PROCESSES)}"
        )
    path = _cache_path(count) if use_cache and _cache_is_on() else None
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        if path is None:
            raise ClusterError(
                "ranks must plan for the same numbers, so each cannot measure this machine for itself; "
                "leave the cache on, or plan before with autoplan plan --out"
            )
        if int(os.environ.get("LOCAL_RANK", "0")) > 0:
            return _measured_by_first_rank(path)
    if path is not None and path.exists():
        try:
            return Cluster.load(str(path))
        except ClusterError:
            _log.warning("the cached measurement %s is unreadable: measuring again", path)
    cluster = _cpu_cluster(count, _measure_cpu(count, progress or (lambda fraction, text: None)))
    if path is not None:
        write_if_possible(path, cluster.to_json())
    return cluster


def _measured_by_first_rank(path: Path) -> Cluster:
    """Under torchrun the first rank of a machine measures, undisturbed, and the others read what it found."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(ClusterError):  # not there yet, or a corrupt one that the first rank replaces
            return Cluster.load(str(path))
        time.sleep(0.1)
    raise ClusterError(
        f"the first rank measured nothing in {_WAIT_SECONDS:.0f} s, or could not write {path}; "
        "run autoplan cluster local before"
    )


def available_bytes() -> int:
    """Host memory that can be had now without swapping, or less if a control group says so."""
    available = 0
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    if not available:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="ascii"))  # "max" has no limit
        used = int((group / "memory.current").read_text(encoding="ascii"))
        available = min(available, max(0, limit - used))
    return available


def _cuda_cluster(num_processes: int | None) -> Cluster:
    count = torch.cuda.device_count()
    if num_processes is not None and num_processes > count:
        raise ClusterError(f"{num_processes} processes need a CUDA device each, there are {count}")
    count = num_processes or count
    properties = torch.cuda.get_device_properties(0)
    names = {torch.cuda.get_device_name(index) for index in range(count)}
    if len(names) > 1:
        raise ClusterError(
            f"the CUDA devices differ ({', '.join(sorted(names))}); hide all but equal ones with CUDA_VISIBLE_DEVICES"
        )
    memory = min(torch.cuda.get_device_properties(index).total_memory for index in range(count))
    try:
        device = device_named(properties.name)
    except ClusterError:
        device = _unknown_cuda_device(properties.name, f"{properties.major}.{properties.minor}")
    device = dataclasses.replace(
        device,
        memory_bytes=memory,
        source={**device.source, "memory_bytes": "torch.cuda.get_device_properties here"},
    )
    return Cluster(
        name="local",
        device=device,
        num_nodes=1,
        devices_per_node=count,
        nics_per_node=1,
        intra_node_link=link_named(device.intra_node_link),
        inter_node_link=link_named(device.inter_node_link),
        source={"*": "the CUDA devices of this machine; links by the device's file"},
    )


def _unknown_cuda_device(name: str, capability: str) -> Device:
    """A device without a file: measured matmul and copy rates, the rest as the nearest file's."""
    known = [device for device in all_devices() if device.compute_capability <= capability]
    near = max(known or all_devices(), key=lambda device: device.compute_capability)
    peaks = {}
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        if dtype == "bfloat16" and float(capability) < 8.0:
            continue
        left = torch.randn(4096, 4096, device="cuda", dtype=getattr(torch, dtype))
        seconds = _cuda_seconds(lambda left=left: torch.mm(left, left))  # type: ignore[misc]
        peaks[dtype] = 2 * 4096**3 / seconds / near.efficiency["matmul"].at(2 * 4096**3)
    data = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    copy = 2 * data.numel() / _cuda_seconds(lambda: data.clone())
    return dataclasses.replace(
        near,
        name=name,
        aliases=(),
        cuda_names=(name,),
        compute_capability=capability,
        peak_flop_per_second=peaks,
        memory_bytes_per_second=copy / near.efficiency["memory"].at(1e9),
        source={
            **near.source,
            "*": f"as {near.name}",
            "peak_flop_per_second": "measured here, 4096 cubed",
            "memory_bytes_per_second": "measured here, a copy of 256 MiB",
        },
    )


def _cuda_seconds(work: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def _cpu_cluster(num_processes: int, ranks: Sequence[Mapping[str, object]]) -> Cluster:
    """The cluster that the ranks' measurements describe; the slowest rank counts everywhere."""
    slowest = {key: _slowest([rank[key] for rank in ranks]) for key in sorted(ranks[0]) if key != "resident_bytes"}
    matmul = _steady(_rates(slowest["matmul_float32"]))
    copies = _rates(slowest["memory"])
    peak = max(rate for _, rate in matmul)
    bandwidth = max(rate for _, rate in copies)
    peaks = {"float32": peak}
    for dtype in ("float64", "bfloat16"):
        rate = max(rate for _, rate in _rates(slowest[f"matmul_{dtype}"]))
        if dtype == "float64" or rate > peak:
            peaks[dtype] = rate
    kinds = ("attention_forward", "attention_backward", "convolution")
    efficiency = {kind: _curve(_steady(_rates(slowest[kind])), peak) for kind in kinds}
    gloo = _gloo_link(num_processes, slowest)
    device = Device(
        name="cpu",
        kind="cpu",
        compute_capability="none",
        memory_bytes=available_bytes() // num_processes,
        context_bytes=int(max(float(str(rank["resident_bytes"])) for rank in ranks)),
        communicator_bytes=0,
        allocator_slack_fraction=0.05,
        memory_bytes_per_second=bandwidth,
        host_bytes_per_second=_rates(slowest["copy"])[0][1],
        peak_flop_per_second={key: _rounded(value) for key, value in peaks.items()},
        efficiency={
            **efficiency,
            "matmul": _curve(matmul, peak),
            "memory": _curve(copies, bandwidth),
        },
        kernel_launch_seconds=0.0,
        dispatch_seconds=_rounded(slowest["dispatch"][0][1]),
        wrapper_seconds=_rounded(max(seconds for _, seconds in slowest["hooks"])) if num_processes > 1 else 0.0,
        block_seconds=_rounded(max(0.0, slowest["block"][0][1] - slowest["dispatch"][0][1])),
        pass_seconds=_rounded(_pass_seconds(slowest, num_processes)),
        sharding_seconds=_sharding_seconds(slowest, num_processes),
        checkpoint_seconds=_checkpoint_seconds(slowest["checkpoint"]),
        pace_seconds=_rounded(slowest["pace"][0][1]),
        optimizer_seconds=_optimizer_seconds(slowest),
        synchronous_dispatch=True,
        # The ranks have one core each: what gloo's threads take is taken from computing.
        overlap_slowdown={"gloo": Slowdown(2.0, 2.0)},
        devices_per_node=num_processes,
        nics_per_node=1,
        intra_node_link="gloo",
        inter_node_link="gloo",
        source={
            "*": _SOURCE,
            "memory_bytes": "host memory available when measured, divided by the processes",
            "context_bytes": "resident memory of a process after importing torch",
            "communicator_bytes": "gloo keeps no buffers of lasting size",
            "allocator_slack_fraction": "estimate: fragments of the C library's allocator",
            "kernel_launch_seconds": "none: an operation's fixed cost is its dispatch",
            "overlap_slowdown": "one core per process: communication takes it from computing",
        },
    )
    return Cluster(
        name="local",
        device=device,
        num_nodes=1,
        devices_per_node=num_processes,
        nics_per_node=1,
        intra_node_link=gloo,
        inter_node_link=gloo,
        source={"*": "this machine: one process per core, one thread each, gloo between them"},
    )


def _slowest(ranks: Sequence[object]) -> list[tuple[float, float]]:
    """[(size, seconds)] of the slowest rank at each size."""
    rows = [row for row in ranks if isinstance(row, list)]
    return [(float(same[0][0]), max(float(seconds) for _, seconds in same)) for same in zip(*rows, strict=True)]


def _rates(rows: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """[(size, size per second)] of seconds that do not fall with size.

    Noise only ever adds time, so a size that took longer than a larger one gets the larger one's.
    """
    result, least = [], math.inf
    for size, seconds in reversed(rows):
        least = min(least, max(seconds, 1e-9))
        result.append((size, _rounded(size / least)))
    return result[::-1]


def _steady(rates: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Rates that do not fall with size: more work in one operation is not slower on a core, other programs are.

    Nor are small ones faster than the largest: they last hardly longer than the call that is taken off them.
    """
    most = max(rate for _, rate in rates[-2:])
    best = itertools.accumulate((min(rate, most) for _, rate in rates), max)
    return [(size, rate) for (size, _), rate in zip(rates, best, strict=True)]


def _curve(rates: Sequence[tuple[float, float]], peak: float) -> Curve:
    points: list[tuple[float, float]] = []
    for size, rate in rates:
        fraction = _rounded(max(1e-9, min(1.0, rate / peak)))
        if points:
            fraction = min(fraction, points[-1][1] * size / points[-1][0])
        points.append((size, fraction))
    return Curve(points=tuple(points))


def _gloo_link(num_processes: int, slowest: Mapping[str, list[tuple[float, float]]]) -> Link:
    """A link that gives the measured seconds back by the formulas of `planner.collectives`."""
    if num_processes == 1:
        return link_named("gloo")
    steps = {"all_reduce": 2 * (num_processes - 1), "send_recv": 1}
    # Half of the least time belongs to the call, half to its steps: one group size cannot tell.
    least = min(slowest["send_recv"][0][1], slowest["all_reduce"][0][1])
    launch = _rounded(least / 2)
    latency = _rounded(least / 2 / steps["all_reduce"])
    sent_rates = {}
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"):
        share = (num_processes - 1) / num_processes
        share = {"all_reduce": 2 * share, "send_recv": 1.0}.get(collective, share)
        fixed = launch + steps.get(collective, num_processes - 1) * latency
        sent_rates[collective] = _rates(
            [(size * share, max(seconds - fixed, seconds / 10)) for size, seconds in slowest[collective]]
        )
    peak = max(rate for rates in sent_rates.values() for _, rate in rates)
    curves = {name: _curve(rates, peak) for name, rates in sent_rates.items()}
    return Link(
        name="gloo-local",
        kind="gloo",
        bytes_per_second=peak,
        latency_seconds=latency,
        launch_seconds=launch,
        efficiency={**curves, "any": curves["all_gather"]},
        source={"*": _SOURCE},
    )


def _sharding_seconds(slowest: Mapping[str, list[tuple[float, float]]], num_processes: int) -> ShardingSeconds | None:
    """The share of a collective that FSDP2's own code takes: of the call, and of each tensor."""
    if num_processes == 1:
        return None
    found = []
    for name in ("gather", "reduce"):
        few, many = (seconds for _, seconds in slowest[name])
        each = max(0.0, many - few) / (MANY_TENSORS - FEW_TENSORS)
        found += [_rounded(max(0.0, few - FEW_TENSORS * each)), _rounded(each)]
    return ShardingSeconds(*found)


def _checkpoint_seconds(rows: Sequence[tuple[float, float]]) -> CheckpointSeconds:
    """The line through blocks of few and of many operations."""
    (few, of_few), (many, of_many) = rows
    each = max(0.0, of_many - of_few) / (many - few)
    return CheckpointSeconds(_rounded(max(0.0, of_few - few * each)), _rounded(each))


def _pass_seconds(slowest: Mapping[str, list[tuple[float, float]]], num_processes: int) -> float:
    """The schedule's share of a pass: what posting a message and the block's call do not explain."""
    if num_processes == 1:
        return 0.0
    explained = slowest["message"][0][1] + slowest["block"][0][1]
    return max(slowest["pass"][0][1] - explained, slowest["pass"][0][1] / 10)


def _optimizer_seconds(slowest: Mapping[str, list[tuple[float, float]]]) -> dict[str, OptimizerSeconds]:
    """The line through few and many elements, and what a tensor takes that is sharded."""
    found = {}
    for name in OPTIMIZERS:
        (few_bytes, few), (many_bytes, many) = slowest[f"optimizer_{name}"]
        per_byte = max(0.0, many - few) / (many_bytes - few_bytes)
        per_tensor = max(0.0, few - per_byte * few_bytes) / OPTIMIZER_TENSORS
        per_sharded = per_tensor
        for num_bytes, seconds in slowest.get(f"sharded_{name}", []):
            per_sharded = max(per_tensor, (seconds - per_byte * num_bytes) / OPTIMIZER_TENSORS)
        found[name] = OptimizerSeconds(_rounded(per_byte), _rounded(per_tensor), _rounded(per_sharded))
    return found


def _rounded(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")


def _measure_cpu(num_processes: int, progress: Progress) -> list[Mapping[str, object]]:
    """What each rank measured. No process outlives this call, and it never waits for ever."""
    results: dict[int, Mapping[str, object]] = {}
    messages: queue.Queue[tuple[int, str]] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="autoplan-") as folder:
        workers = [_start(rank, num_processes, folder) for rank in range(num_processes)]
        for rank, worker in enumerate(workers):
            threading.Thread(target=forward_lines, args=(rank, worker, messages), daemon=True).start()
        try:
            deadline = time.monotonic() + _TIMEOUT_SECONDS
            while len(results) < num_processes:
                try:
                    left = max(0.0, deadline - time.monotonic())
                    rank, line = messages.get(timeout=left)
                except queue.Empty:
                    raise ClusterError(
                        f"measuring this machine took more than {_TIMEOUT_SECONDS:.0f} s; "
                        "is it very busy? give a cluster file instead of 'local'"
                    ) from None
                if not line:
                    if rank not in results:
                        raise ClusterError(f"measuring this machine failed: {last_line(folder, rank)}")
                elif line.startswith("{"):
                    results[rank] = json.loads(line)
                elif rank == 0 and line in _STEPS:
                    progress(_STEPS.index(line) / len(_STEPS), line)
        finally:
            stop(workers)
    progress(1.0, "done")
    return [results[rank] for rank in range(num_processes)]


def _start(rank: int, num_processes: int, folder: str) -> Worker:
    code = f"from planner.measure.local import _work; _work({rank}, {num_processes}, {folder!r})"
    return start_process(code, rank, folder, CPU_VARIABLES)


def _work(rank: int, num_processes: int, folder: str) -> None:
    """Measure as one of several ranks and print the result: the body of a worker process."""
    end_with_parent()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    resident = _resident_bytes()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_processes,
        timeout=timedelta(seconds=60),
    )
    result: dict[str, object] = {"resident_bytes": resident}
    say("start")
    paced = Paced()
    found: list[tuple[_Rows, float]] = []
    for step, make in _pieces(rank, num_processes).items():
        say(step)
        found.append(paced.measure(make))
    result |= at_one_pace(found)
    dist.barrier()
    say(json.dumps(result))
    dist.destroy_process_group()


def at_one_pace(found: Sequence[tuple[_Rows, float]]) -> _Rows:
    """Rows that were measured at several paces as at the one in the middle, which is a row, too.

    >>> at_one_pace([({"a": [(1, 4.0)]}, 2.0), ({"b": [(1, 4.0)]}, 1.0), ({}, 1.0)])
    {'a': [(1, 2.0)], 'b': [(1, 4.0)], 'pace': [(1, 1.0)]}
    """
    typical = statistics.median(pace for _, pace in found)
    rows = {
        name: [(size, seconds * typical / pace) for size, seconds in points]
        for measured, pace in found
        for name, points in measured.items()
    }
    return {**rows, "pace": [(1, typical)]}


def _pieces(rank: int, num_processes: int) -> dict[str, Callable[[], _Rows]]:
    """What there is to measure, in order, by step; each gives rows by name, of sizes and seconds."""

    def matmul() -> _Rows:
        dtypes = (
            (torch.float32, (16, 32, 64, 128, 256, 512)),
            (torch.float64, (256, 512)),
            (torch.bfloat16, (256, 512)),
        )
        return {f"matmul_{str(dtype).removeprefix('torch.')}": _matmul_rows(dtype, sizes) for dtype, sizes in dtypes}

    alone: dict[str, Callable[[], _Rows]] = {
        "matmul": matmul,
        "memory": lambda: {"memory": _memory_rows(), "copy": [(float(1 << 26), _copy_seconds(1 << 26))]},
        "dispatch": lambda: {
            "dispatch": [(1, _dispatch_seconds())],
            "block": [(1, _block_seconds())],
            "checkpoint": [(operations, _recomputed_seconds(operations)) for operations in (4, 40)],
        },
        "attention": _attention_rows,
        "convolution": lambda: {"convolution": _convolution_rows()},
        "optimizer": lambda: optimizer_rows(num_processes),
    }
    together: dict[str, Callable[[], _Rows]] = {
        "gloo": lambda: _collective_rows(rank, num_processes),
        "wrapper": lambda: wrapper_rows(num_processes),
        "schedule": lambda: {
            "message": [(1, message_seconds(rank, num_processes))],
            "pass": [(1, pipeline_seconds(rank, num_processes))],
        },
    }
    return alone | (together if num_processes > 1 else {})


def _resident_bytes() -> int:
    with contextlib.suppress(OSError):
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    return 300_000_000


def _work_seconds(work: Callable[[], object], budget_seconds: float = 0.1) -> float:
    """Typical seconds of `work`, begun by all ranks at once, repeated for the time given.

    Those of this thread: what other programs take of the core does not count.
    """
    work()
    work()
    dist.barrier()
    times: list[float] = []
    end = time.perf_counter() + budget_seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 1000):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return _typical(times)


def _typical(times: Sequence[float]) -> float:
    """The lower quartile: the ranks disturb each other all the time, other programs now and then."""
    return statistics.quantiles(times, n=4, method="inclusive")[0]


def _matmul_rows(dtype: torch.dtype, sizes: Sequence[int]) -> list[tuple[float, float]]:
    rows = []
    call = _call_seconds(dtype)
    for size in sizes:
        left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
        out = torch.empty(size, size, dtype=dtype)
        seconds = _repeated_seconds(
            lambda left=left, right=right, out=out: torch.mm(left, right, out=out),  # type: ignore[misc]
            repeats=max(1, 10**7 // size**3),
        )
        rows.append((2.0 * size**3, _less_call(seconds, call)))
    return rows


def _call_seconds(dtype: torch.dtype) -> float:
    """Seconds of calling an operation on next to no data: it is priced as dispatch, not as work."""
    data, out = torch.ones(1, 1, dtype=dtype), torch.zeros(1, 1, dtype=dtype)
    return _repeated_seconds(lambda: torch.mm(data, data, out=out), repeats=1000)


def _less_call(seconds: float, call_seconds: float) -> float:
    return max(seconds - call_seconds, 0.1 * seconds)


def _repeated_seconds(work: Callable[[], object], repeats: int) -> float:
    """Seconds of one `work`; small ones are timed in rows, so that the clock does not count."""

    def row() -> None:
        for _ in range(repeats):
            work()

    return _work_seconds(row) / repeats


def _copy_seconds(num_bytes: int) -> float:
    """Seconds to read and write `num_bytes` in all, in main memory."""
    left, right = torch.ones(num_bytes // 8), torch.zeros(num_bytes // 8)
    return _repeated_seconds(lambda: torch.add(left, 1.0, out=right), repeats=1)


def _memory_rows() -> list[tuple[float, float]]:
    """Bytes read plus written, and seconds, of an elementwise kernel, from the first cache to main memory.

    The mean of adding, GELU and layer norm: on a core most of such kernels' time is computing, 20 times that of a copy
    for a GELU, and a model's kernels are a mixture of these.
    """
    rows = []
    call = _call_seconds(torch.float32)
    for size in (1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 26):
        data = torch.randn(size // 8 // 128, 128)

        def work(data: torch.Tensor = data) -> None:
            torch.add(data, data[0])
            torch.nn.functional.gelu(data)
            torch.nn.functional.layer_norm(data, (128,))

        seconds = _repeated_seconds(work, repeats=max(1, (1 << 19) // size)) / 3
        rows.append((float(size), _less_call(seconds, call)))
    return rows


def _dispatch_seconds() -> float:
    """CPU seconds of one small operation, the mean of forward with recording and backward."""
    length = 100
    start = torch.ones(4, requires_grad=True)

    def work() -> None:
        value = start
        for _ in range(length):
            value = value * 1.0001
        value.sum().backward()  # type: ignore[no-untyped-call]
        start.grad = None

    return _work_seconds(work, 0.3) / (2 * length + 3)


def _block_seconds() -> float:
    """Seconds of one pass through a block that does next to nothing, called as the runtime calls it."""
    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.neg.default, (graph.placeholder("x"),)),))
    blocks = [torch.fx.GraphModule({}, graph) for _ in range(20)]
    start = torch.ones(4, requires_grad=True)

    def work() -> None:
        environment = {0: start}
        for index, block in enumerate(blocks):
            try:
                environment.update(zip((index + 1,), block(*[environment[index]]), strict=True))
            finally:
                pass
        environment[len(blocks)].sum().backward()  # type: ignore[no-untyped-call]
        start.grad = None

    return _work_seconds(work, 0.2) / (2 * len(blocks))


def _recomputed_seconds(operations: int) -> float:
    """What recomputing a block of so many small operations takes beyond a second forward pass."""
    start = torch.ones(4, requires_grad=True)

    def block(value: torch.Tensor) -> torch.Tensor:
        for _ in range(operations):
            value = torch.tanh(value)
        return value

    def chain(run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        value = start
        for _ in range(_CHECKPOINTED_BLOCKS):
            value = run(value)
        return value

    def plain() -> None:
        chain(block)
        chain(block).sum().backward()  # type: ignore[no-untyped-call]

    def recomputed() -> None:
        chain(lambda value: checkpoint(block, value, use_reentrant=False, preserve_rng_state=False)).sum().backward()  # type: ignore[no-untyped-call]

    extra = _work_seconds(recomputed, 0.2) - _work_seconds(plain, 0.2)
    start.grad = None
    return max(0.0, extra) / _CHECKPOINTED_BLOCKS


def _attention_rows() -> _Rows:
    forward_rows, backward_rows = [], []
    for length in (128, 512):
        query = torch.randn(2, 4, length, 32, requires_grad=True)
        attention = torch.nn.functional.scaled_dot_product_attention
        flop = 4.0 * 2 * 4 * length**2 * 32 / 2  # causal: half of the products count, as in the prices of kernels

        def forward(
            query: torch.Tensor = query,
            attention: Callable[..., torch.Tensor] = attention,
        ) -> torch.Tensor:
            return attention(query, query, query, is_causal=True)

        def both(query: torch.Tensor = query, forward: Callable[[], torch.Tensor] = forward) -> None:
            forward().sum().backward()  # type: ignore[no-untyped-call]
            query.grad = None

        seconds = _work_seconds(forward)
        forward_rows.append((flop, seconds))
        backward_rows.append((2.5 * flop, max(_work_seconds(both) - seconds, seconds / 2)))
    return {"attention_forward": forward_rows, "attention_backward": backward_rows}


def _convolution_rows() -> list[tuple[float, float]]:
    rows = []
    for channels, width in ((16, 16), (64, 32)):
        data = torch.randn(4, channels, width, width)
        weight = torch.randn(channels, channels, 3, 3)
        seconds = _work_seconds(
            lambda data=data, weight=weight: torch.nn.functional.conv2d(data, weight, padding=1)  # type: ignore[misc]
        )
        rows.append((2.0 * 9 * 4 * channels**2 * width**2, seconds))
    return rows


def _collective_rows(rank: int, num_processes: int) -> _Rows:
    """What a collective adds to a loop that computes in between, in the mean.

    With as many processes as cores, gloo's threads wait for their turn, most calls hardly and some for long. Typical
    seconds do not show that; a step has all of it. Back to back, as no model communicates, its threads are awake.
    """
    rows: _Rows = {name: [] for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")}
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 25):
        count = size // 4 // num_processes * num_processes
        whole, other, part = torch.ones(count), torch.ones(count), torch.ones(count // num_processes)
        works: dict[str, Callable[[], object]] = {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole),  # type: ignore[misc]
            "all_gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),  # type: ignore[misc]
            "reduce_scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole),  # type: ignore[misc]
            "all_to_all": lambda whole=whole, other=other: dist.all_to_all_single(other, whole),  # type: ignore[misc]
            "send_recv": lambda whole=whole: _pass_round(whole, rank, num_processes),  # type: ignore[misc]
        }
        for name, work in works.items():
            rows[name].append((count * 4.0, _added_seconds(work)))
            whole.fill_(1.0)
    return rows


def _added_seconds(communicate: Callable[[], object]) -> float:
    """Mean seconds that a collective adds to computing; all ranks call it together."""
    matrix, out = torch.ones(_BETWEEN_SIZE, _BETWEEN_SIZE), torch.empty(_BETWEEN_SIZE, _BETWEEN_SIZE)

    def compute() -> None:
        for _ in range(_BETWEEN_PRODUCTS):
            torch.mm(matrix, matrix, out=out)

    def loop(repeats: int, *works: Callable[[], object]) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            for work in works:
                work()
        return (time.perf_counter() - start) / repeats

    once = loop(5, compute, communicate)
    shared = torch.tensor([once])
    dist.broadcast(shared, 0)  # all ranks must call as often
    repeats = max(10, min(300, math.ceil(_COLLECTIVE_SECONDS / float(shared))))
    before = loop(repeats, compute)
    both = loop(repeats, compute, communicate)
    alone = (before + loop(repeats, compute)) / 2
    return max(both - alone, 0.1 * both)


def _pass_round(data: torch.Tensor, rank: int, num_processes: int) -> None:
    """Send to the next rank while receiving from the one before."""
    received = torch.empty_like(data)
    operations = [
        dist.P2POp(dist.isend, data, (rank + 1) % num_processes),
        dist.P2POp(dist.irecv, received, (rank - 1) % num_processes),
    ]
    for pending in dist.batch_isend_irecv(operations):
        pending.wait()


def _cache_is_on() -> bool:
    return os.environ.get("AUTOPLAN_CACHE", "").lower() not in ("off", "0", "no")


def cache_folder() -> Path | None:
    """Where measurements of this machine are kept; None where the user wants none kept."""
    if not _cache_is_on():
        return None
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "autoplan"


def machine_digest(num_processes: int) -> str:
    """A word for this machine and torch; another CPU or torch version has another one."""
    key = json.dumps([_FORMAT, cpu_model(), num_cores(), num_processes, torch.__version__])
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _cache_path(num_processes: int) -> Path:
    """Where this machine's measurement lies."""
    folder = cache_folder()
    assert folder is not None
    return folder / f"local-{machine_digest(num_processes)}.json"


def write_if_possible(path: Path, text: str) -> None:
    """Write in one step: a reader sees the old file or the new one. A full disk is no error."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        _log.warning("cannot keep the measurement in %s: %s", path, error)
        with contextlib.suppress(OSError):
            temporary.unlink()
