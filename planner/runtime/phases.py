"""Where the time of a step goes: cheap timers in every step, and a profiler in a few that are asked for.

Timers are a monotonic clock on CPUs and events of the device on CUDA, read later. They cannot tell what a phase
waited for, so for a few steps torch's profiler is on: the ranges of collectives, less what is computed beside them, are
communication that nothing hides. Steps with the profiler, and the one after, count in no median.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from planner.audit import RankRecord, RunRecord, Sample, Work, rank_record
from planner.errors import RunError
from planner.plan import Plan
from planner.profile import Machine

SAMPLED_STEPS = 3  # of a run, under the profiler
WARM_UP_STEPS = 3  # first steps allocate and compile; they are not what a step takes
_MOST_STEPS = 4096  # that are kept
_MARK = "autoplan::"
_COLLECTIVES = ("gloo:", "nccl")  # ranges of gloo's threads, kernels of NCCL
_CALLS = ("c10d::", "_c10d_functional::")  # of the processor
_COPIES = "fsdp::"
_COMPUTING = ("aten::", "planner::")

Interval = tuple[float, float]


@dataclass(eq=False)
class _Step:
    """One step as it runs; `pairs` are device events that are not read yet, the whole step's under no name."""

    number: int
    start: Any  # seconds, or an event
    seconds: dict[str, float] = field(default_factory=dict)
    pairs: list[tuple[str, Any, Any]] = field(default_factory=list)
    is_counted: bool = True


class Phases:
    """The timers of one rank.

    A step begins with `begin` and ends with `finish`; phases inside are `with phases.measured("forward")`. Without a
    step nothing is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._open: _Step | None = None
        self._unread: deque[_Step] = deque()
        self._done: deque[_Step] = deque(maxlen=_MOST_STEPS)
        self._between: deque[float] = deque(maxlen=_MOST_STEPS)
        self._last_end = 0.0
        self._number = 0
        self._sampled: frozenset[int] = frozenset()
        self._profiler: Any = None
        self._samples: list[Sample] = []

    def sample(self, steps: Iterable[int]) -> None:
        """Run these steps, counted from 0, under torch's profiler, beside no other; all ranks must say the same."""
        self._sampled = frozenset(steps)

    def begin(self, *, anew: bool = False) -> None:
        """A step begins, unless one is open; `anew` forgets one that was not finished."""
        if self._open is not None:
            if not anew:
                return
            self._forget()
        if self._number >= WARM_UP_STEPS:
            self._between.append(time.perf_counter() - self._last_end)
        if self._number in self._sampled and dist.get_world_size() > 1:
            dist.barrier()  # ranks read the last trace at their own pace
            activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.device.type == "cuda" else [])
            self._profiler = profile(activities=activities)
            self._profiler.__enter__()
        polluted = {number + after for number in self._sampled for after in (0, 1)}
        self._open = _Step(
            self._number, self._now(), is_counted=self._number >= WARM_UP_STEPS and self._number not in polluted
        )  # fmt: skip

    def measured(self, phase: str) -> "_Span":
        """What runs in this context is part of a phase."""
        return _Span(self, phase)

    def finish(self) -> None:
        """The step has ended."""
        step = self._open
        if step is None:
            return
        end = self._now()
        self._open = None
        self._number += 1
        self._add(step, "", step.start, end)
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            profiler.__exit__(None, None, None)
            self._samples.append(_sample(profiler.events()))
        if step.is_counted:
            self._unread.append(step)
        self._read(wait=False)
        self._last_end = time.perf_counter()

    @property
    def num_steps(self) -> int:
        """Steps beyond warm-up that were timed."""
        return len(self._done) + len(self._unread)

    def record(
        self, plan: Plan, *, peak_bytes: float | None, memory_kind: str, machine: Machine | None = None
    ) -> RunRecord:
        """What all ranks measured; a collective, the same on all of them.

        Raises:
            RunError: there was no step beyond warm-up.
        """
        self._read(wait=True)
        mine = [step.seconds for step in self._done]
        row = (mine, list(self._between), self._samples, peak_bytes)
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, row)
        count = min(len(steps) for steps, *_ in rows)
        if not count:
            raise RunError(
                f"no step beyond the {WARM_UP_STEPS} of warm-up was timed, so nothing can be recorded; train for more"
            )
        samples: Sequence[Sequence[Sample]] = list(zip(*(found for *_, found, _ in rows), strict=True))
        ranks: list[RankRecord] = [
            rank_record(steps, samples, rank, num_ranks=len(rows), peak_bytes=peak)
            for rank, (steps, _, _, peak) in enumerate(rows)
        ]
        between = [gap for _, gaps, *_ in rows for gap in gaps]
        slowest = [max(steps[k][""] for steps, *_ in rows) for k in range(-count, 0)]
        return RunRecord(
            plan=plan, machine=machine, step_seconds=tuple(slowest), ranks=tuple(ranks), memory_kind=memory_kind,
            between_seconds=sorted(between)[len(between) // 2] if between else 0.0,
        )  # fmt: skip

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _add(self, step: _Step, phase: str, start: Any, end: Any) -> None:
        if self.device.type == "cuda":
            step.pairs.append((phase, start, end))
        else:
            step.seconds[phase] = step.seconds.get(phase, 0.0) + (end - start)

    def _read(self, *, wait: bool) -> None:
        """Turn events of steps that the device has done into seconds."""
        while self._unread:
            step = self._unread[0]
            if step.pairs:
                last = step.pairs[-1][2]
                if not wait and not last.query():
                    return
                last.synchronize()
                for phase, start, end in step.pairs:
                    step.seconds[phase] = step.seconds.get(phase, 0.0) + start.elapsed_time(end) / 1e3
                step.pairs = []
            self._done.append(self._unread.popleft())

    def _forget(self) -> None:
        self._open = None
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            with contextlib.suppress(RuntimeError):
                profiler.__exit__(None, None, None)


class _Span:
    """One stretch of a phase."""

    __slots__ = ("_mark", "_phase", "_phases", "_start", "_step")

    def __init__(self, phases: Phases, phase: str) -> None:
        self._phases, self._phase = phases, phase

    def __enter__(self) -> None:
        self._step = self._phases._open
        if self._step is not None:
            self._mark = None if self._phases._profiler is None else record_function(_MARK + self._phase)
            if self._mark is not None:
                self._mark.__enter__()  # type: ignore[no-untyped-call]
            self._start = self._phases._now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._step is not None:
            self._phases._add(self._step, self._phase, self._start, self._phases._now())
            if self._mark is not None:
                self._mark.__exit__(kind, error, trace)


def last_steps(num_steps: int) -> range:
    """The steps of a run to sample: the last ones, so that nothing comes after them; few steps leave some to time.

    >>> [len(last_steps(n)) for n in (4, 5, 6, 100)], last_steps(100)
    ([0, 1, 2, 3], range(97, 100))
    """
    return range(max(num_steps - SAMPLED_STEPS, min(WARM_UP_STEPS + 1, num_steps)), num_steps)


def save_record(record: RunRecord, path: str | Path) -> None:
    """Write a record, on rank 0; every rank must call it.

    Raises:
        RunError: it cannot be written; on all ranks.
    """
    failure: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            record.save(path)
        except RunError as error:
            failure = [str(error)]
    dist.broadcast_object_list(failure)
    if failure[0] is not None:
        raise RunError(failure[0])


def _sample(events: Iterable[Any]) -> Sample:
    """What a trace says of one step: seconds are microseconds there."""
    events = list(events)
    on_device = {id(event): "CUDA" in str(event.device_type) for event in events}
    is_cuda = any(on_device[id(e)] and e.name.startswith("nccl") for e in events)
    windows: dict[str, list[Interval]] = {}
    links: list[tuple[str, Interval]] = []
    calls, copies, computing = [], [], []
    marks_of_device = {e.name for e in events if on_device[id(e)] and e.name.startswith(_MARK)}
    for event in events:
        span = (event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        name, here = event.name, on_device[id(event)]
        is_label = bool(getattr(event, "is_user_annotation", False)) or name.startswith(_MARK)
        if name.startswith(_MARK):
            if here == (name in marks_of_device):
                windows.setdefault(name.removeprefix(_MARK), []).append(span)
        elif is_cuda:  # the device's own time counts
            if here and not is_label:
                links.append((name, span)) if name.startswith("nccl") else computing.append(span)
        elif here:
            continue
        elif name.startswith(_COLLECTIVES):
            links.append((name, span))
        elif name.startswith(_CALLS):
            calls.append(span)
        elif name.startswith(_COPIES):
            copies.append(span)
        elif name.startswith(_COMPUTING):
            computing.append(span)
    copied = united(copies)
    around = united([*calls, *copied])
    busy = without(united(computing), around)
    waiting = without(without(united([*calls, *(span for _, span in links)]), busy), copied)
    phases = {phase: united(spans) for phase, spans in windows.items()}
    phases["rest"] = without([(float("-inf"), float("inf"))], united([s for spans in phases.values() for s in spans]))
    return Sample(
        exposed={phase: length(common(waiting, spans)) for phase, spans in phases.items()},
        copies={phase: length(common(copied, spans)) for phase, spans in phases.items()},
        works=[Work(_phase_of(span, phases), name, span[1] - span[0])
               for name, span in sorted(links, key=lambda link: link[1])],
    )  # fmt: skip


def _phase_of(span: Interval, phases: dict[str, list[Interval]]) -> str:
    """The phase in which most of a stretch is."""
    return max(phases, key=lambda phase: length(common([span], phases[phase])))


def united(spans: Sequence[Interval]) -> list[Interval]:
    """The same stretches of time, in order and without overlaps.

    >>> united([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0)])
    [(0.0, 2.0), (3.0, 4.0)]
    """
    result: list[Interval] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """What is in both; each is in order and without overlaps.

    >>> common([(0.0, 2.0), (3.0, 5.0)], [(1.0, 4.0)])
    [(1.0, 2.0), (3.0, 4.0)]
    """
    result, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            result.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return result


def without(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """What is in the first and not in the second; each is in order and without overlaps.

    >>> without([(0.0, 5.0)], [(1.0, 2.0), (4.0, 6.0)])
    [(0.0, 1.0), (2.0, 4.0)]
    """
    edges = [float("-inf"), *(edge for span in other for edge in span), float("inf")]
    return common(one, list(zip(edges[::2], edges[1::2], strict=True)))


def length(spans: Sequence[Interval]) -> float:
    """Seconds of all stretches together."""
    return sum(end - start for start, end in spans)
