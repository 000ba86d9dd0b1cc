"""One training step of a plan, event by event: the judge of what the integer program proposes.

Stages run the actions of `schedule` as `torch.distributed.pipelining` runs them. A message starts when its sender has
posted it and its receiver waits for it, because NCCL and gloo meet at both ends, and takes the hop's seconds:

- `ScheduleGPipe` waits for its receives; its sends are not waited for before the next phase;
- `Schedule1F1B` sends without waiting in the warm-up and in the end, one at a time; in between a send
  and a receive from the same neighbour are one operation, waited for together (`fwd_send_bwd_recv`,
  `bwd_send_fwd_recv`).

Source: torch/distributed/pipelining/schedules.py, torch 2.13.

After its last backward pass a stage reduces gradients, stages sum the gradients of shared parameters, all of them agree
on the norm, and each steps its optimizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from planner.cluster import Cluster
from planner.costs import Costs, Ints
from planner.graph import Graph
from planner.memory import stage_peak_bytes
from planner.schedule import Action, actions

_ROUNDING = 1e-12  # of a sum of seconds
PARTS = ("compute", "communication", "bubble", "sync", "optimizer")


class Event(NamedTuple):
    """One pass of one micro-batch on one stage, in seconds from the start of the step."""

    stage: int
    phase: Literal["forward", "backward"]
    micro_batch: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Seconds of one pipeline stage; `send` is one message to the next stage or back from it."""

    forward_seconds: float
    backward_seconds: float
    send_seconds: float = 0.0
    start_seconds: float = 0.0  # before the first pass
    exposed_seconds: float = 0.0  # of forward and backward, communication that is not hidden
    exposed_forward_seconds: float = 0.0  # of that, in the forward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What happened to the passes: when each stage was done, and how long it sent or received."""

    end_seconds: tuple[float, ...]  # [P]
    transfer_seconds: tuple[float, ...]  # [P] waiting for messages on their way
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """One step. `parts_seconds` are means over the stages and add up to the step.

    `bubble` is the share of the step in which the mean stage waits for others. `sync` holds what is
    exposed once a step: gathers, gradient reduction, tied gradients, norm. Of `compute`, `forward_seconds` are in
    forward passes that are not recomputation.
    """

    step_seconds: float
    bubble: float
    peak_bytes: tuple[float, ...]
    parts_seconds: tuple[tuple[str, float], ...]
    forward_seconds: float
    events: tuple[Event, ...]


def simulate(
    costs: Costs,
    stages: Sequence[Sequence[tuple[int, int]]],
    schedule: str,
    num_microbatches: int,
) -> Simulation:
    """One step of a plan: per stage its blocks in order as (block, strategy), indices into `costs`.

    Raises:
        ValueError: costs are of another schedule or m, or the stages do not hold every block once, in order.
    """
    _check_stages(costs, stages)
    if (schedule, num_microbatches) != (costs.schedule, costs.num_microbatches):
        raise ValueError(
            f"priced for {costs.schedule} with m = {costs.num_microbatches}, "
            f"not for {schedule} with m = {num_microbatches}"
        )
    index = [_index(part) for part in stages]
    passes = [_stage(costs, part) for part in stages]
    pipeline = run_pipeline(passes, costs.schedule, costs.num_microbatches)

    reduce = [float(costs.reduce_seconds[at].sum()) for at in index]
    ready = [end + seconds for end, seconds in zip(pipeline.end_seconds, reduce, strict=True)]
    tied = _sum_tied_gradients(costs, stages, ready)
    optimizer = [float(costs.optimizer_seconds[at].sum()) for at in index]
    step = max(ready) + costs.fixed_seconds + max(optimizer)

    mean = 1 / len(stages)
    busy = sum(stage.forward_seconds + stage.backward_seconds for stage in passes)
    exposed = sum(stage.exposed_seconds for stage in passes)
    parts = {
        "compute": mean * costs.num_microbatches * (busy - exposed),
        "communication": mean * (costs.num_microbatches * exposed + sum(pipeline.transfer_seconds)),
        "sync": costs.fixed_seconds + mean * (sum(stage.start_seconds for stage in passes) + sum(reduce) + sum(tied)),
        "optimizer": mean * sum(optimizer),
    }
    idle = step - sum(parts.values())
    parts["bubble"] = idle if idle > _ROUNDING * step else 0.0
    return Simulation(
        step_seconds=step,
        bubble=parts["bubble"] / step if step else 0.0,
        peak_bytes=peak_bytes(costs, stages),
        parts_seconds=tuple((name, parts[name]) for name in PARTS),
        forward_seconds=mean
        * costs.num_microbatches
        * sum(stage.forward_seconds - stage.exposed_forward_seconds for stage in passes),
        events=pipeline.events,
    )


def peak_bytes(costs: Costs, stages: Sequence[Sequence[tuple[int, int]]]) -> tuple[float, ...]:
    """The most that each stage holds, on its heaviest rank."""
    result = []
    for p, part in enumerate(stages):
        at = _index(part)
        kept = costs.activation_bytes[at]
        if p and costs.received_bytes is not None:
            kept[0] -= costs.received_bytes[part[0]]  # lies in the buffers of `boundary_bytes`
        result.append(
            stage_peak_bytes(
                costs.state_bytes[at],
                kept,
                costs.working.take(at),
                in_flight=int(costs.in_flight[p]),
                boundary_bytes=costs.boundary_bytes(p, part[0][0], part[-1][0] + 1),
                sync_at_end=costs.sync_at_end(costs.strategies[part[0][1]].zero),
                gradients=None if costs.gradient_bytes is None else costs.gradient_bytes[at],
                num_microbatches=costs.num_microbatches,
            )
        )
    return tuple(result)


def run_pipeline(stages: Sequence[Stage], schedule: str, num_microbatches: int) -> Pipeline:
    """When each stage has done all its passes.

    By hand, two stages of 1 s forward and 2 s backward, 3 micro-batches: (3 + 2 - 1) (1 + 2) s.

    >>> even = Stage(forward_seconds=1.0, backward_seconds=2.0)
    >>> run_pipeline([even, even], "1f1b", 3).end_seconds[0]
    12.0
    """
    programs = [_program(schedule, p, len(stages), num_microbatches) for p in range(len(stages))]
    clock = [stage.start_seconds for stage in stages]
    transfers = [0.0] * len(stages)
    posted: dict[tuple[bool, _Message], float] = {}  # when its sender (True) or receiver posted it
    asleep: dict[tuple[bool, _Message], int] = {}  # the stage that waits for this to be posted
    events: list[Event] = []
    position, awake = [0] * len(stages), list(range(len(stages)))
    while awake:
        p = awake.pop()
        while position[p] < len(programs[p]):
            step = programs[p][position[p]]
            if isinstance(step, Action):
                stage, start = stages[p], clock[p]
                clock[p] += stage.forward_seconds if step.phase == "forward" else stage.backward_seconds
                events.append(Event(p, step.phase, step.micro_batch, start, clock[p]))
            elif step.waits:
                missing = [key for m in step.messages if (key := (m.source != p, m)) not in posted]
                if missing:
                    asleep[missing[0]] = p
                    break
                for message in step.messages:
                    hop = stages[min(message.source, message.target)].send_seconds
                    end = max(posted[True, message], posted[False, message]) + hop
                    transfers[p] += max(0.0, min(end - clock[p], hop))
                    clock[p] = max(clock[p], end)
            else:
                for message in step.messages:
                    key = (message.source == p, message)
                    posted[key] = clock[p]
                    if key in asleep:
                        awake.append(asleep.pop(key))
            position[p] += 1
    if asleep:
        raise AssertionError(f"schedule {schedule!r} waits for itself")
    return Pipeline(end_seconds=tuple(clock), transfer_seconds=tuple(transfers), events=tuple(sorted(events)))


def model_flop_utilisation(
    graph: Graph, cluster: Cluster, *, num_devices: int, global_batch: int, step_seconds: float
) -> float:
    """Model FLOP of a step, without recomputation, over what the devices could do in that time.

    Source: Chowdhery et al., "PaLM", 2022 (arXiv 2204.02311), appendix B; the peak is the dense
    one of the compute dtype.
    """
    peak = cluster.device.peak_flop_per_second[graph.dtype]
    return graph.flop_per_sample() * global_batch / (num_devices * peak * step_seconds)


class _Message(NamedTuple):
    source: int
    target: int
    micro_batch: int


class _Talk(NamedTuple):
    """A stage posts its side of these messages, or waits until they have passed."""

    waits: bool
    messages: tuple[_Message, ...]


def _check_stages(costs: Costs, stages: Sequence[Sequence[tuple[int, int]]]) -> None:
    blocks = [block for part in stages for block, _ in part]
    if len(stages) != costs.num_stages or not all(stages):
        raise ValueError(f"{costs.num_stages} nonempty stages are needed, got {len(stages)}")
    if blocks != list(range(len(costs.state_bytes))):
        raise ValueError("the stages must hold every block once and in order")


def _index(part: Sequence[tuple[int, int]]) -> tuple[Ints, Ints]:
    """Blocks and strategies of a stage, as an index into tables [L, S]."""
    pairs = np.array(part, np.int64)
    return pairs[:, 0], pairs[:, 1]


def _stage(costs: Costs, part: Sequence[tuple[int, int]]) -> Stage:
    at, end = _index(part), part[-1][0] + 1
    return Stage(
        forward_seconds=costs.prelude_seconds + costs.pass_seconds + float(costs.forward_seconds[at].sum()),
        backward_seconds=costs.pass_seconds + float(costs.backward_seconds[at].sum()),
        send_seconds=float(costs.hop_seconds[end - 1]) if end <= len(costs.hop_seconds) else 0.0,
        start_seconds=float(costs.gather_seconds[at].sum()),
        exposed_seconds=float(costs.exposed_seconds[at].sum()),
        exposed_forward_seconds=float(costs.exposed_forward_seconds[at].sum()),
    )


def _sum_tied_gradients(costs: Costs, stages: Sequence[Sequence[tuple[int, int]]], ready: list[float]) -> list[float]:
    """Seconds that each stage spends on it; `ready` is moved to when its gradients are final."""
    spent = [0.0] * len(stages)
    place = {block: (p, strategy) for p, part in enumerate(stages) for block, strategy in part}
    for group in costs.tie_groups:
        owners = sorted({place[block][0] for block in group})
        if len(owners) > 1:
            seconds = max(float(costs.tie_seconds[block, place[block][1]]) for block in group)
            done = max(ready[p] for p in owners) + seconds
            for p in owners:
                ready[p] = done
                spent[p] += seconds
    return spent


def _receive(action: Action, stage: int, num_stages: int) -> tuple[_Message, ...]:
    """What a pass needs from a neighbour."""
    source = stage - 1 if action.phase == "forward" else stage + 1
    return (_Message(source, stage, action.micro_batch),) if 0 <= source < num_stages else ()


def _send(action: Action, stage: int, num_stages: int) -> tuple[_Message, ...]:
    """What a neighbour needs from a pass."""
    target = stage + 1 if action.phase == "forward" else stage - 1
    return (_Message(stage, target, action.micro_batch),) if 0 <= target < num_stages else ()


@lru_cache(maxsize=64)
def _program(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> tuple[Action | _Talk, ...]:
    """The passes of a stage with the messages between them, as stock PyTorch posts and awaits them."""
    todo = actions(schedule, stage, num_stages, num_microbatches)
    result: list[Action | _Talk] = []

    def post(messages: tuple[_Message, ...]) -> None:
        if messages:
            result.append(_Talk(False, messages))

    def wait(messages: tuple[_Message, ...]) -> None:
        if messages:
            result.append(_Talk(True, messages))

    pending: tuple[_Message, ...] = ()  # sends not yet waited for
    fused: tuple[_Message, ...] = ()  # sends that go with the next receive
    for action, following in zip(todo, [*todo[1:], None], strict=True):
        together = fused + _receive(action, stage, num_stages)
        post(together)
        wait(together)
        result.append(action)
        sends, fused = _send(action, stage, num_stages), ()
        turns = following is not None and following.phase != action.phase
        if schedule == "1f1b":
            wait(pending)
            pending = ()
        if schedule == "1f1b" and turns:
            fused = sends
            continue
        post(sends)
        pending += sends
        if turns:
            wait(pending)
            pending = ()
    wait(pending)
    return tuple(result)
