"""Pipeline schedules as lists of actions: the one definition that cost, simulator and runtime use."""

from dataclasses import dataclass
from typing import Literal

SCHEDULES = ("gpipe", "1f1b")


@dataclass(frozen=True, slots=True)
class Action:
    """One stage runs the forward or the backward pass of one micro-batch."""

    phase: Literal["forward", "backward"]
    micro_batch: int


def actions(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """What `stage` (0 is first) does, in order.

    GPipe (Huang et al. 2019, arXiv 1811.06965): all forward passes, then all backward passes, both
    in order, as `torch.distributed.pipelining.ScheduleGPipe` runs them. 1F1B (Narayanan et al.
    2021, arXiv 2104.04473, section 2.2): a warm-up of min(m, P - stage) forward passes, then one
    backward and one forward in turn, then the rest of the backward passes.

    >>> [f"{a.phase[0]}{a.micro_batch}" for a in actions("1f1b", 0, 2, 3)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    forward = [Action("forward", i) for i in range(num_microbatches)]
    backward = [Action("backward", i) for i in range(num_microbatches)]
    if schedule == "gpipe":
        return forward + backward
    if schedule != "1f1b":
        raise ValueError(f"schedule {schedule!r} is none of {SCHEDULES}")
    warm_up = in_flight(schedule, stage, num_stages, num_microbatches)
    result = forward[:warm_up]
    for i in range(num_microbatches - warm_up):
        result += [backward[i], forward[warm_up + i]]
    return result + backward[num_microbatches - warm_up :]


def in_flight(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> int:
    """Micro-batches whose activations `stage` holds at most.

    >>> in_flight("1f1b", 0, 4, 8), in_flight("1f1b", 3, 4, 8), in_flight("gpipe", 3, 4, 8)
    (4, 1, 8)
    """
    if schedule == "gpipe":
        return num_microbatches
    return min(num_microbatches, num_stages - stage)
