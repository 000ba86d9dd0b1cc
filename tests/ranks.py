"""Run functions on several gloo ranks of this machine and return what each rank returned.

    run_ranks(4, fn, x, tmp_path=tmp_path)          one case: ranks are made for it and end with it

    with RankPool(4, tmp_path) as pool:             many cases: the ranks stay, each case gets fresh process groups
        first = pool.run(fn, x)
        second = pool.run(other, y)

A failing rank's traceback is the assertion's text. It ends all ranks; the pool makes new ones for its next case.
Functions, arguments and values are pickled: functions must be importable by name.
"""

import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock

# Imported once in the fork server: a rank then starts in tenths of a second. Never planner: the reference process
# (tests.eager_oracle) starts from here too.
PRELOAD = [
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "transformers.models.bert.modeling_bert",  # those of tests.models: three seconds once, not in every rank
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
]
GROUP_TIMEOUT = timedelta(seconds=30)
GRACE_SECONDS = 1.0  # for other ranks to tell of the same failure: the earliest is the cause


def _turn(world_size: int) -> AbstractContextManager[object]:
    """Where tests run side by side (pytest-xdist) ranks take turns: several sets on a few cores run out of time."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None or world_size == 1:
        return nullcontext()
    return FileLock(Path(tempfile.gettempdir()) / f"autoplan-ranks-{run}.lock")


def _context() -> ForkServerContext:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _serve(rank: int, world_size: int, connection: Connection) -> None:
    """One rank: run what comes, answer, until the connection closes or a case fails."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            os._exit(0)
        try:
            store, fn, args = pickle.loads(request)
            if store is not None:
                dist.init_process_group(
                    "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT
                )
            value = fn(*args)
            if store is not None:
                dist.barrier()
                dist.destroy_process_group()
                _forget_meshes()
            answer = pickle.dumps((None, value, None))
        except BaseException:
            connection.send_bytes(pickle.dumps((time.monotonic(), None, traceback.format_exc())))
            os._exit(1)  # nothing of a failed case may hang or clean up
        connection.send_bytes(answer)


def _forget_meshes() -> None:
    """Clear what torch keeps of DTensor operators: a later, equal mesh would get this one, whose groups are gone."""
    from torch.distributed.tensor import debug

    for name in ("_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        getattr(debug, name, lambda: None)()  # not in every release; without them a cache may be too old


class RankPool:
    """`world_size` ranks that run one case after another."""

    def __init__(self, world_size: int, tmp_path: Path, *, timeout_seconds: float = 60.0, groups: bool = True) -> None:
        self.world_size = world_size
        self._tmp_path = tmp_path
        self._timeout_seconds = timeout_seconds
        self._groups = groups
        self._cases = 0
        self._ranks: list[tuple[ForkServerProcess, Connection]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout_seconds: float | None = None) -> list[Any]:
        """[fn(*args) on rank 0, on rank 1, ...].

        Raises:
            AssertionError: a rank failed or died; the text has its traceback.
            TimeoutError: a rank gave no result in time.
        """
        if not self._ranks:
            self._start()
        self._cases += 1
        store = self._tmp_path / f"store-{os.getpid()}-{id(self):x}-{self._cases}" if self._groups else None
        request = pickle.dumps((store, fn, args))
        limit = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            with _turn(self.world_size):
                return self._run(request, limit)
        except BaseException:
            self._kill()
            raise
        finally:
            if store is not None:
                store.unlink(missing_ok=True)

    def close(self) -> None:
        """End all ranks: those that wait for a case by themselves, others by force."""
        for _, connection in self._ranks:
            connection.close()
        for process, _ in self._ranks:
            process.join(timeout=5)
        self._kill()

    def _start(self) -> None:
        context = _context()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, theirs), daemon=True)
            process.start()
            theirs.close()  # so that the end of the rank is the end of the connection
            self._ranks.append((process, ours))

    def _run(self, request: bytes, limit_seconds: float) -> list[Any]:
        for rank, (process, connection) in enumerate(self._ranks):
            try:
                connection.send_bytes(request)
            except OSError:
                raise AssertionError(f"rank {rank} has ended ({process.exitcode}) before the case") from None
        values: dict[int, Any] = {}
        failures: list[tuple[float, int, str]] = []
        pending = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        deadline = time.monotonic() + limit_seconds
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in [connection for connection in pending if connection in ready]:
                rank = pending.pop(connection)
                try:
                    when, value, error = pickle.loads(connection.recv_bytes())
                except EOFError:
                    self._ranks[rank][0].join(timeout=5)
                    code = self._ranks[rank][0].exitcode
                    # A rank that lost its partner has a traceback; one that has none died first.
                    when, value, error = 0.0, None, f"it died with exit code {code} and no traceback"
                if error is None:
                    values[rank] = value
                    continue
                if not failures:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                failures.append((when, rank, error))
        if failures:
            _, rank, error = min(failures)
            others = sorted(other for _, other, _ in failures if other != rank)
            raise AssertionError(f"rank {rank} failed{f' (then {others})' if others else ''}:\n{error}")
        if pending:
            raise TimeoutError(f"ranks {sorted(pending.values())} gave no result in {limit_seconds} s")
        return [values[rank] for rank in range(self.world_size)]

    def _kill(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            if process.is_alive():
                process.kill()
            process.join()
        self._ranks = []


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, tmp_path: Path, timeout_seconds: float = 60.0
) -> list[Any]:
    """[fn(*args) on rank 0, on rank 1, ...] of a fresh world; raises as `RankPool.run` does."""
    with RankPool(world_size, tmp_path, timeout_seconds=timeout_seconds) as pool:
        return pool.run(fn, *args)


def run_alone(fn: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0) -> Any:
    """fn(*args) in one child process without a process group; raises as `RankPool.run` does."""
    with RankPool(1, Path(), timeout_seconds=timeout_seconds, groups=False) as pool:
        return pool.run(fn, *args)[0]


def fsdp_groups(module: Any) -> list[Any]:
    """The groups of parameters that FSDP has for one module: private, one alone up to torch 2.12."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
