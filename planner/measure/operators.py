"""Measure the operators of models' blocks with all of a machine's processes busy, into a profile.

Whatever ends it, what is measured is kept: rows are handed over case by case, and a case that a profile has is not
measured again.
"""

import json
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from planner.errors import ProfileError
from planner.measure.local import CPU_VARIABLES
from planner.measure.passes import Case, measure_passes
from planner.measure.processes import end_with_parent, listening, say
from planner.profile import BlockRow, OperatorRow, Profile

_CASES, _READY = "cases.pickle", "ready"
_LEAST_SECONDS, _MOST_SECONDS = 0.1, 6.0  # of one case
_GRACE_SECONDS = 60.0  # a case may take so much longer than its budget

Progress = Callable[[str, int, int], None]  # what, done, of


def measure_operators(
    todo: Sequence[Case],
    profile: Profile,
    *,
    budget_seconds: float,
    keep: Callable[[Profile], None],
    progress: Progress,
) -> Profile:
    """The profile with rows of the cases that it lacks, as many as the budget allows; `keep` is told after each.

    Raises:
        ProfileError: nothing could be measured.
    """
    todo = [case for case in todo if case.key not in profile.block_rows]
    if not todo:
        return profile
    each = min(_MOST_SECONDS, max(_LEAST_SECONDS, 0.8 * budget_seconds / len(todo)))
    machine = profile.machine
    num_processes = machine.processes if machine.kind == "cpu" else 1

    def code_of(rank: int, folder: str) -> str:
        arguments = f"{rank}, {num_processes}, {folder!r}, {machine.kind!r}, {each}, {machine.pace_seconds}"
        return f"from planner.measure.operators import work; work({arguments})"

    def prepare(folder: Path) -> None:
        (folder / _CASES).write_bytes(pickle.dumps(list(todo)))

    variables = CPU_VARIABLES if machine.kind == "cpu" else {}
    found: list[list[dict[str, Any]]] = [[] for _ in todo]
    failed: dict[int, str] = {}
    done, begin = 0, 0.0
    with listening(code_of, num_processes, variables, prepare) as wait:
        while done < len(todo):
            progress(f"measuring {todo[done].name}, micro-batch {todo[done].micro_batch}", done, len(todo))
            rank, line = wait(each + _GRACE_SECONDS)
            if not line:
                raise ProfileError(
                    f"measuring {todo[done].name} gave nothing in {each + _GRACE_SECONDS:.0f} s; is this machine busy?"
                    if rank < 0
                    else f"measuring {todo[done].name} ended without a result"
                )
            begin = begin or time.monotonic()  # not counted: the processes import torch
            if line == _READY:
                continue
            answer = json.loads(line)
            found[answer["case"]].append(answer)
            while done < len(todo) and len(found[done]) == num_processes:
                errors = [answer["error"] for answer in found[done] if "error" in answer]
                if errors:
                    failed[done] = errors[0]
                else:
                    # An operator of several blocks keeps its first row, so that going on changes none that is kept.
                    known = profile.row_keys()
                    rows = _slowest(found[done])
                    profile = profile.with_rows(row for row in rows if ("operators", row.key) not in known)
                    keep(profile)
                done += 1
            if done and time.monotonic() - begin > budget_seconds:
                break
    progress("measured", done, len(todo))
    if failed and len(failed) == done:
        raise ProfileError(f"no block could be measured: {todo[min(failed)].name}: {failed[min(failed)]}")
    return profile


def _slowest(answers: Sequence[dict[str, Any]]) -> list[BlockRow | OperatorRow]:
    """The rows of all processes as one: of each, those of the slowest, which the others would wait for."""
    blocks = [BlockRow(**answer["block"]) for answer in answers]
    operators: dict[str, OperatorRow] = {}
    for answer in answers:
        for values in answer["operators"]:
            row = OperatorRow(**{**values, "operands": tuple(values["operands"])})
            if row.key not in operators or operators[row.key].seconds < row.seconds:
                operators[row.key] = row

    def seconds(row: BlockRow) -> float:
        return row.forward_seconds + row.backward_seconds + row.forward_host_seconds + row.backward_host_seconds

    return [max(blocks, key=seconds), *operators.values()]


def work(rank: int, num_processes: int, folder: str, kind: str, seconds: float, pace: float = 0.0) -> None:
    """Measure all cases, the body of a process: one JSON line each. Seconds are scaled to a `pace` that is not 0."""
    end_with_parent()
    if kind == "cpu":
        torch.set_num_threads(1)
    todo: list[Case] = pickle.loads((Path(folder) / _CASES).read_bytes())
    device = torch.device(kind)
    if num_processes > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_processes,
            timeout=timedelta(seconds=_GRACE_SECONDS),
        )  # fmt: skip
    say(_READY)
    for index, case in enumerate(todo):
        if num_processes > 1:
            dist.barrier()
        try:
            passes = measure_passes(case, device, seconds, pace=pace)
        except Exception as error:  # too little memory, values that a user's operator does not take, and so on
            words = str(error).partition("\n")[0]
            say(json.dumps({"case": index, "error": f"{type(error).__name__}: {words}"}))
            continue
        rows = [asdict(row) for row in passes.operators]
        say(json.dumps({"case": index, "block": asdict(passes.block), "operators": rows}))
    if num_processes > 1:
        dist.barrier()
        dist.destroy_process_group()
