"""Start torchrun for a plan, follow the training, and end it cleanly whatever happens."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from planner.audit import RunRecord
from planner.errors import RunError
from planner.plan import Plan
from planner.runtime import parent
from planner.runtime.worker import Job

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 5.0
_LOG_TAIL = 4000  # characters of torchrun's own words, where no rank left any


@dataclass(frozen=True, kw_only=True)
class Training:
    """What was measured: loss of each step, seconds of a step (median), peak bytes of each rank (None: not known).

    `check` is what the self-check before training found, in words; `expert_loads` the tokens of each expert by layer;
    `data` where batches came from: the user's loader, "text" or "random".
    `record` has the phases of the steps; None if there were too few.
    """

    losses: tuple[float, ...]
    measured_step_seconds: float
    peak_bytes: tuple[int | None, ...]
    check: str
    data: str
    expert_loads: Mapping[str, list[int]] = field(default_factory=dict)
    record: RunRecord | None = None


class RankError(RunError):
    """A rank failed; `details` is its traceback."""

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details


class Terminated(BaseException):
    """This process was asked to end (SIGTERM, SIGHUP)."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def launch(job: Job, plan: Plan, on_step: Callable[[int, float, float], None]) -> Training:
    """Train by `plan` on processes of this machine; `on_step(step, loss, seconds)` as they come.

    All ranks are gone when this returns or raises, KeyboardInterrupt included, and so are all files.

    Raises:
        RankError: a rank failed or was killed.
    """
    with _signals_raise(), tempfile.TemporaryDirectory(prefix="autoplan-") as name:
        folder = Path(name)
        plan.save(folder / "plan.json")
        job = replace(job, folder=str(folder))
        (folder / "job.json").write_text(job.dumps(), encoding="utf-8")
        losses: list[float] = []
        with _torchrun(folder, plan.devices) as process:
            lines = _follow(folder / "events.jsonl")
            while True:
                code = process.poll()
                for line in lines():
                    losses.append(line["loss"])
                    on_step(line["step"], line["loss"], line["seconds"])
                if code is not None:
                    break
                time.sleep(_POLL_SECONDS)
        if code != 0:
            raise _failure(folder, code)
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return Training(
            losses=tuple(losses),
            measured_step_seconds=result["measured_step_seconds"],
            peak_bytes=tuple(result["peak_bytes"]),
            check=result["check"],
            data=result["data"],
            expert_loads=result["expert_loads"],
            record=None if (record := result["record"]) is None else RunRecord.from_dict(record),
        )


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP become an exception, so that everything is ended and removed as on Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, _frame: FrameType | None) -> None:
        raise Terminated(number)

    before = {number: signal.signal(number, terminate) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _torchrun(folder: Path, num_ranks: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Torchrun in a session of its own, so that Ctrl-C reaches only this process, which ends it."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", parent.PARENT_VARIABLE: str(os.getpid())}
    environment.setdefault("OMP_NUM_THREADS", "1")
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)  # ranks start in the user's folder
    command = [
        sys.executable, parent.__file__, "--standalone", f"--nproc-per-node={num_ranks}",
        "-m", "planner.runtime.worker", str(folder / "job.json"),
    ]  # fmt: skip
    with (folder / "torchrun.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            yield process
        finally:
            try:
                if process.poll() is None:
                    process.terminate()
                    process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                pass
            finally:
                process.kill()  # nothing if it has ended; else the ranks die with it: they asked for that
                process.wait()


def _follow(path: Path) -> Callable[[], list[dict[str, Any]]]:
    """A function that returns the whole lines written since it was last called."""
    position = 0

    def read() -> list[dict[str, Any]]:
        nonlocal position
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(position)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        position += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    return read


def _failure(folder: Path, code: int) -> RankError:
    """The first rank that failed, in its own words.

    A rank that loses its partner fails with a connection error a moment after the true cause.
    """
    reports = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("error-*.json"))]
    log = (folder / "torchrun.log").read_text(encoding="utf-8", errors="replace")
    causes = [r for r in reports if r["expected"] or not _lost_a_partner(r)]
    killed = _killed(log)
    if killed and not causes:
        rank, number = killed
        name = signal.Signals(number).name
        hint = " (by a person, or because memory ran out)" if number == signal.SIGKILL else ""
        return RankError(f"rank {rank} was killed by {name}{hint}; all other ranks were ended", "")
    if not reports:
        return RankError(f"torchrun ended with exit code {code}, its last words are above", log[-_LOG_TAIL:])
    first = min(causes or reports, key=lambda r: (not r["expected"], r["time"], r["rank"]))
    details = [text for text in (*first["notes"], first["place"]) if text]
    text = first["message"] + (f" ({'; '.join(details)})" if details else "")
    if first["expected"]:
        return RankError(text, "")
    return RankError(f"rank {first['rank']} failed: {first['type']}: {text}", first["traceback"])


def _lost_a_partner(report: dict[str, Any]) -> bool:
    return bool(re.search(r"connection|\bpeer\b|socket|gloo|nccl", report["message"], re.IGNORECASE))


def _killed(log: str) -> tuple[int, int] | None:
    """(rank, signal) of the first rank that a signal ended, from torchrun's summary.

    SIGTERM is what torchrun itself ends the other ranks with: one that had another signal died before.
    """
    found = [
        (int(match[1]), -int(match[2]))
        for match in re.finditer(r"^\s*rank\s*:\s*(\d+).*\n\s*exitcode\s*:\s*(-\d+)", log, re.MULTILINE)
    ]
    return min(found, key=lambda rank: rank[1] == signal.SIGTERM, default=None)
