"""Why nothing fits: the block that no choice makes small enough, else the leanest plan and what fills it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from planner.bound import least_bytes, relax
from planner.costs import Costs
from planner.graph import Graph
from planner.problem import Problem
from planner.units import format_bytes

_STATE = "parameters, gradients and optimizer state"
_ACTIVATIONS = "saved activations"
_WORKING = "the working set of a block while it runs"
_BUFFERS = "the batch, the prelude and pipeline buffers"

_CURES = {
    _STATE: "use more or larger devices, or an optimizer with less state",
    _ACTIVATIONS: "use more or larger devices, a shorter sequence, or a smaller global batch",
    _WORKING: "use larger devices, a shorter sequence, or smaller modules",
    _BUFFERS: "use larger devices, a shorter sequence, or a smaller global batch",
}


class Attempt(NamedTuple):
    """One configuration that does not fit: its words, its costs and its program."""

    text: str
    costs: Costs
    problem: Problem


class _Need(NamedTuple):
    """Bytes of one block alone on a device, with the choice that needs least."""

    num_bytes: float
    block: int
    strategy: int
    attempt: Attempt

    def parts(self) -> dict[str, float]:
        """What the bytes are."""
        problem, at = self.attempt.problem, (self.block, self.strategy)
        return {
            _STATE: float(problem.state_bytes[at]),
            _ACTIVATIONS: float(problem.in_flight.min() * problem.activation_bytes[at]),
            _WORKING: float(problem.transient_bytes[at]),
            _BUFFERS: float(self.attempt.costs.stage_bytes.min()),
        }


def why_nothing_fits(graph: Graph, capacity: float, attempts: Sequence[Attempt]) -> str:
    """The second half of a sentence: the leanest plan, what is too large, by how much, and what to do.

    A block that exceeds a device under every configuration and strategy is named; otherwise the largest part of the
    leanest plan's fullest stage.
    """
    least, attempt = min(
        ((least_bytes(a.problem) + float(a.costs.stage_bytes.max()), a) for a in attempts), key=lambda pair: pair[0]
    )
    text = (
        f"the leanest plan ({attempt.text}) needs {format_bytes(least)} on a device, which has {format_bytes(capacity)}"
    )
    if never := _too_large(len(graph.blocks), capacity, attempts):
        need, others = never[0], f" (as {len(never) - 1} more)" if len(never) > 1 else ""
        largest = max(need.parts().items(), key=lambda part: part[1])[0]
        choice = need.attempt.costs.strategies[need.strategy]
        return (
            f"{text}; block {graph.blocks[need.block].name or 'of the whole model'} alone{others} takes "
            f"{format_bytes(need.num_bytes)} or more whatever is chosen (least with {choice}, {need.attempt.text}), "
            f"most of it {largest.replace('a block', 'the block')}; {_cure(largest, one=True)}"
        )
    parts = _fullest(attempt, least - float(attempt.costs.stage_bytes.max()))
    if not parts:
        return f"{text}; use more devices, larger ones, or a shorter sequence"
    largest = max(parts, key=lambda name: parts[name])
    share = parts[largest] / sum(parts.values())
    return f"{text}; {share:.0%} of it is {largest}; {_cure(largest, one=False)}"


def _cure(largest: str, *, one: bool) -> str:
    if one and largest == _STATE:
        return "use more devices to shard it over, larger ones, or split the module"
    return _CURES[largest]


def _too_large(num_blocks: int, capacity: float, attempts: Sequence[Attempt]) -> list[_Need]:
    """The blocks that fit nowhere, not even alone on a pipeline stage, the largest first."""
    best: list[_Need | None] = [None] * num_blocks
    for attempt in attempts:
        problem = attempt.problem
        alone = problem.state_bytes + problem.in_flight.min() * problem.activation_bytes + problem.transient_bytes
        alone = np.where(problem.allowed, alone, np.inf) + float(attempt.costs.stage_bytes.min())
        chosen = alone.argmin(1)
        for block, strategy in enumerate(chosen.tolist()):
            need = _Need(float(alone[block, strategy]), block, strategy, attempt)
            known = best[block]
            if known is None or need.num_bytes < known.num_bytes:
                best[block] = need
    never = [need for need in best if need is not None and need.num_bytes > capacity]
    return sorted(never, key=lambda need: -need.num_bytes)


def _fullest(attempt: Attempt, least: float) -> dict[str, float]:
    """What fills the fullest stage of a plan that needs about `least` bytes for its blocks; empty if none is found."""
    problem = attempt.problem
    found = relax(replace(problem, capacity_bytes=np.full(problem.num_stages, least * (1 + 1e-6))))
    if found.stages is None or found.strategies is None:
        return {}
    stages, strategies = np.array(found.stages), np.array(found.strategies)
    held = []
    for p in range(problem.num_stages):
        blocks = np.flatnonzero(stages == p)
        at = (blocks, strategies[blocks])
        received = float(problem.cut_bytes[blocks[0] - 1]) if p else 0.0
        held.append(
            {
                _STATE: float(problem.state_bytes[at].sum()),
                _ACTIVATIONS: float(problem.in_flight[p] * problem.activation_bytes[at].sum()),
                _WORKING: float(problem.transient_bytes[at].max()),
                _BUFFERS: received + float(attempt.costs.stage_bytes[p]),
            }
        )
    return max(held, key=lambda parts: sum(parts.values()))
