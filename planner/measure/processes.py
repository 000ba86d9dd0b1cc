"""Processes that measure at once: started, listened to, and ended whatever happens.

Not multiprocessing: that would run an unguarded user script again. A process says one line after another; it ends when
its parent closes its input, or dies.
"""

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from planner.errors import PlannerError

Worker = subprocess.Popen[str]


def start_process(code: str, rank: int, folder: str, variables: Mapping[str, str]) -> Worker:
    """A process that runs Python `code`; what it writes to stderr goes to a file in `folder`."""
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    with (Path(folder) / f"errors-{rank}").open("w", encoding="utf-8") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables},
        )


def forward_lines(rank: int, worker: Worker, messages: queue.Queue[tuple[int, str]]) -> None:
    """Hand on what a process says; "" when it has ended."""
    if worker.stdout is not None:
        with worker.stdout as lines:
            for line in lines:
                messages.put((rank, line.strip() or " "))
    messages.put((rank, ""))


def stop(workers: Sequence[Worker]) -> None:
    """Ask by closing their input (a worker whose parent dies ends the same way), then kill."""
    for worker in workers:
        if worker.stdin is not None:
            with contextlib.suppress(OSError):
                worker.stdin.close()
    for worker in workers:
        try:
            worker.wait(timeout=1)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def last_line(folder: str, rank: int) -> str:
    """What a process said last on stderr."""
    path = Path(folder) / f"errors-{rank}"
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else f"process {rank} ended without a word"


@contextmanager
def listening(
    code_of: Callable[[int, str], str],
    num_processes: int,
    variables: Mapping[str, str],
    prepare: Callable[[Path], None] = lambda folder: None,
) -> Iterator[Callable[[float], tuple[int, str]]]:
    """Start processes, and give a function that waits for the next (rank, line); all are gone at the end.

    It waits for so many seconds, and gives (-1, "") where nothing came; a line "" says that a process has ended.
    `code_of` a rank and a folder is what it runs; `prepare` puts files there before.

    Raises:
        PlannerError: a process ended with an error, while waiting; its last words are in the message.
    """
    messages: queue.Queue[tuple[int, str]] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="autoplan-") as folder:
        prepare(Path(folder))
        workers: list[Worker] = []
        try:
            for rank in range(num_processes):
                workers.append(start_process(code_of(rank, folder), rank, folder, variables))
                threading.Thread(target=forward_lines, args=(rank, workers[rank], messages), daemon=True).start()

            def wait(seconds: float) -> tuple[int, str]:
                deadline = time.monotonic() + seconds
                while True:  # in short turns, so that Ctrl-C is heard
                    with contextlib.suppress(queue.Empty):
                        rank, line = messages.get(timeout=min(0.2, max(0.0, deadline - time.monotonic())))
                        if not line and workers[rank].wait() != 0:
                            raise PlannerError(f"a measuring process failed: {last_line(folder, rank)}")
                        return rank, line
                    if time.monotonic() >= deadline:
                        return -1, ""

            yield wait
        finally:
            stop(workers)


def say(line: str) -> None:
    """Tell the parent."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def end_with_parent() -> None:
    """From now on this process ends when the parent closes its input, or dies."""

    def wait() -> None:
        # os.read: sys.stdin.read would hold a lock that the interpreter wants at its end.
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
