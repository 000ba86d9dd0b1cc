"""The oracle: try every cut and every strategy. And random programs small enough for it."""

import functools
import itertools
from dataclasses import dataclass

import numpy as np

from planner.problem import Choice, Problem


@dataclass(frozen=True)
class Tried:
    """What trying everything gives: the best plan that fits, and the best if memory were free."""

    seconds: float  # inf: nothing fits
    choice: Choice | None
    seconds_without_memory: float


def try_all(problem: Problem) -> Tried:
    """The optimum by enumeration, written apart from `planner.problem.evaluate`."""
    num_blocks, num_strategies = problem.num_blocks, problem.num_strategies
    picks = np.array(list(itertools.product(range(num_strategies), repeat=num_blocks)))
    blocks = np.arange(num_blocks)
    zero = problem.strategy_zero[picks]
    legal = problem.allowed[blocks, picks].all(1)
    for group in problem.tie_groups:
        legal &= np.ptp(zero[:, list(group)], axis=1) == 0
    picks, zero = picks[legal], zero[legal]
    table = {
        name: getattr(problem, name)[blocks, picks]
        for name in (
            "seconds", "sync_seconds", "state_bytes", "activation_bytes", "transient_bytes",
        )
    }  # fmt: skip
    family = np.minimum(zero, 2)
    best, choice, free = np.inf, None, np.inf
    for cuts in itertools.combinations(range(1, num_blocks), problem.num_stages - 1):
        edges = (0, *cuts, num_blocks)
        total, slowest, synced = (np.zeros(len(picks)) for _ in range(3))
        fits = np.ones(len(picks), bool)
        legal = np.ones(len(picks), bool)
        for p, (a, b) in enumerate(itertools.pairwise(edges)):
            if problem.num_stages > 1:
                legal &= np.ptp(family[:, a:b], axis=1) == 0
            seconds = table["seconds"][:, a:b].sum(1) + problem.stage_seconds
            held = (
                table["state_bytes"][:, a:b].sum(1)
                + problem.in_flight[p] * table["activation_bytes"][:, a:b].sum(1)
                + table["transient_bytes"][:, a:b].max(1)
                + problem.stage_bytes
            )
            if p:
                seconds = seconds + problem.cut_seconds[a - 1]
                held = held + problem.cut_bytes[a - 1]
            fits &= held <= problem.capacity_bytes[p]
            total = total + seconds
            slowest = np.maximum(slowest, seconds)
            synced = np.maximum(synced, table["sync_seconds"][:, a:b].sum(1))
        step = total + (problem.num_microbatches - 1) * slowest + synced + problem.fixed_seconds
        free = min(free, float(step[legal].min(initial=np.inf)))
        value = np.where(fits & legal, step, np.inf)
        at = int(value.argmin()) if len(value) else -1
        if at >= 0 and value[at] < best:
            best = float(value[at])
            stages = np.repeat(np.arange(problem.num_stages), np.diff(edges))
            choice = Choice(stages=tuple(int(p) for p in stages), strategies=tuple(int(s) for s in picks[at]))
    return Tried(best, choice, free)


def program(
    rng: np.random.Generator,
    *,
    num_blocks: int,
    num_stages: int,
    zeros: tuple[int, ...] = (0, 1, 2, 3),
    recompute: tuple[int, ...] = (0, 1),
    num_kinds: int | None = None,
    num_ties: int = 0,
    tightness: float = 0.5,
    num_microbatches: int | None = None,
    one_f_one_b: bool = True,
    pinned: bool = False,
) -> Problem:
    """A random program that looks like training: states shrink with ZeRO, activations with recomputation.

    `tightness` 0 leaves memory free, 1 is about the least that anything needs. `num_kinds`: blocks come in runs of so
    many kinds; None makes all different.
    """
    kinds = num_kinds or num_blocks
    ranks = float(rng.choice([2, 4, 8]))
    m = num_microbatches or int(rng.integers(1, 9))
    work = rng.uniform(0.5, 2.0, kinds) * 1e-2
    state = rng.uniform(0.5, 2.0, kinds) * 2e9
    activation = rng.uniform(0.3, 2.0, kinds) * 8e8 / m
    options = list(itertools.product(zeros, recompute))
    columns = []
    for zero, again in options:
        gather = work * rng.uniform(0.02, 0.3, kinds) * (0, 0, 0.5, 1.5)[zero]
        share = (1.0, 0.25 + 0.75 / ranks, 0.2 + 0.8 / ranks, 1 / ranks)[zero]
        columns.append(
            (
                work * (1 + again / 3) + gather,
                work * rng.uniform(0.1, 0.5, kinds) * (1, 1.1, 0.6, 0.1)[zero],
                np.round(state * share),
                np.round(activation * (0.15 if again else 1.0)),
                np.round(activation * (0.2 + again) + state * (0.1 if zero == 3 else 0)),
            )
        )
    seconds, synced, held, saved, working = (np.stack(column, axis=1) for column in zip(*columns, strict=True))
    if num_kinds:
        edges = np.sort(rng.choice(np.arange(1, num_blocks), kinds - 1, replace=False))
        kind = np.searchsorted(edges, np.arange(num_blocks), side="right")
    else:
        kind = np.arange(num_blocks)
    flight = [min(m, num_stages - p) if one_f_one_b else m for p in range(num_stages)]
    cut_seconds = rng.uniform(0, 2e-3, num_blocks - 1)
    cut_bytes = rng.integers(0, 200_000_000, num_blocks - 1).astype(float)
    if num_kinds:
        cut_seconds[:], cut_bytes[:] = cut_seconds[0], cut_bytes[0]
        for cut in np.flatnonzero(np.diff(kind)):
            cut_seconds[cut], cut_bytes[cut] = rng.uniform(0, 2e-3), float(rng.integers(10**8))
    peak = float(np.mean(flight))
    per_block = held + peak * saved
    most = per_block[kind].max(1).sum() / num_stages + working.max()
    least = per_block[kind].min(1).sum() / num_stages + working.min()
    capacity = (least + (1 - tightness) * (most - least)) * rng.uniform(0.9, 1.1, num_stages)
    ties: list[tuple[int, ...]] = []
    left = list(rng.permutation(num_blocks))
    for _ in range(num_ties):
        if len(left) >= 2:
            ties.append(tuple(sorted(int(left.pop()) for _ in range(2))))
    allowed = np.ones((num_blocks, len(options)), bool)
    if pinned:
        allowed[int(rng.integers(num_blocks))] = rng.random(len(options)) < 0.5
        allowed[~allowed.any(1)] = True
    return Problem(
        num_stages=num_stages,
        num_microbatches=m,
        seconds=seconds[kind],
        sync_seconds=synced[kind],
        state_bytes=held[kind],
        activation_bytes=saved[kind],
        transient_bytes=working[kind],
        cut_seconds=cut_seconds,
        cut_bytes=cut_bytes,
        stage_seconds=float(rng.uniform(0, 1e-3)),
        stage_bytes=float(rng.integers(10**8)),
        fixed_seconds=float(rng.uniform(0, 1e-2)),
        in_flight=np.array(flight),
        capacity_bytes=capacity,
        strategy_zero=np.array([zero for zero, _ in options]),
        strategy_recompute=np.array([again for _, again in options]),
        tie_groups=tuple(ties),
        allowed=allowed,
    )


def small_programs(count: int, seed: int = 0) -> list[Problem]:
    """Programs of 3 to 6 blocks on 1 to 3 stages for the oracle."""
    rng = np.random.default_rng(seed)
    programs = []
    for _ in range(count):
        num_blocks = int(rng.integers(3, 7))
        wide = num_blocks <= 4
        zeros = (0, 1, 2, 3) if wide else ((0, 1), (0, 3), (2, 3), (1, 2))[rng.integers(4)]
        programs.append(
            program(
                rng,
                num_blocks=num_blocks,
                num_stages=int(rng.integers(1, 4)),
                zeros=zeros,
                num_kinds=int(rng.integers(1, 4)) if rng.random() < 0.4 else None,
                num_ties=int(rng.random() < 0.35) + int(rng.random() < 0.1),
                tightness=float(rng.uniform(0.2, 1.0)),
                one_f_one_b=bool(rng.random() < 0.6),
                pinned=bool(rng.random() < 0.2),
            )
        )
    return programs


@functools.cache
def small_cases() -> tuple[tuple[Problem, Tried], ...]:
    """200 small programs with their optima."""
    return tuple((problem, try_all(problem)) for problem in small_programs(200))
