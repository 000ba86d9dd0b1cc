"""One configuration as numbers: what may be chosen, and what a choice costs.

Mesh, micro-batch, number of micro-batches and schedule are fixed outside. What is left to choose for the blocks
i = 0..L-1, in order, is the stage of each (contiguous, every stage nonempty) and one of S strategies (ZeRO stage and
recomputation). With m micro-batches on P stages, one training step takes

    step = sum_p T_p + (m - 1) max_p T_p + max_p G_p + fixed_seconds
    T_p  = stage_seconds + sum of seconds[i, s_i] over the blocks of p + cut_seconds of the cut where p receives
    G_p  = sum of sync_seconds[i, s_i] over the blocks of p

and stage p holds

    sum of (state_bytes + in_flight[p] activation_bytes)[i, s_i] + largest transient_bytes[i, s_i]
    + cut_bytes of the cut where p receives + stage_bytes  <=  capacity_bytes[p].

Two rules couple the blocks: with P > 1 all blocks of a stage take strategies of one class (`strategy_class`), and
blocks that share a parameter (a tie group) take the same ZeRO stage wherever they are.

`evaluate` is the one reference for all of this: every plan that any solver proposes goes through it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.costs import Costs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ZERO_CLASS = (0, 1, 2, 2)  # class of ZeRO stage 0..3: a pipeline stage is {0}, {1} or {2, 3}


def _frozen(values: ArrayLike, dtype: type, shape: tuple[int, ...], name: str) -> NDArray[np.generic]:
    """A read-only copy of `values`, checked."""
    array: NDArray[np.generic] = np.array(values, dtype=dtype)
    if array.shape != shape:
        raise ValueError(f"{name} must have the shape {shape}, got {array.shape}")
    if dtype is float and not (np.isfinite(array.astype(float)) & (array.astype(float) >= 0)).all():
        raise ValueError(f"{name} must be finite and not negative, got {array.min()}")
    array.flags.writeable = False
    return array


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """The integer program of one configuration; seconds and bytes, L blocks, S strategies, P stages.

    `cut_bytes` already counts every micro-batch the receiving stage buffers. `allowed` pins choices.
    Arrays are copied and made read-only.
    """

    num_stages: int
    num_microbatches: int
    seconds: Floats  # [L, S] forward and backward of one micro-batch
    sync_seconds: Floats  # [L, S] once a step
    state_bytes: Floats  # [L, S] parameters, gradients, optimizer state
    activation_bytes: Floats  # [L, S] per micro-batch in flight
    transient_bytes: Floats  # [L, S] working set; the largest of a stage counts
    cut_seconds: Floats  # [L - 1] per micro-batch, on the stage that receives
    cut_bytes: Floats  # [L - 1] on the stage that receives
    in_flight: Ints  # [P] micro-batches held
    capacity_bytes: Floats  # [P]
    strategy_zero: Ints  # [S] ZeRO stage
    strategy_recompute: Ints  # [S] 0 or 1
    stage_seconds: float = 0.0  # on every stage, per micro-batch
    stage_bytes: float = 0.0  # on every stage
    fixed_seconds: float = 0.0  # once a step
    tie_groups: tuple[tuple[int, ...], ...] = ()
    allowed: Bools = None  # type: ignore[assignment]  # [L, S]; None allows all

    def __post_init__(self) -> None:
        """Freeze the arrays; reject what would make every answer meaningless."""
        num_blocks, num_strategies = np.shape(self.seconds)
        if not 1 <= self.num_stages <= num_blocks:
            raise ValueError(f"{num_blocks} blocks do not make {self.num_stages} nonempty stages")
        if self.num_microbatches < 1:
            raise ValueError(f"num_microbatches must be at least 1, got {self.num_microbatches}")
        if cast(Bools | None, self.allowed) is None:
            object.__setattr__(self, "allowed", np.ones((num_blocks, num_strategies), bool))
        table, cuts = (num_blocks, num_strategies), (num_blocks - 1,)
        stages, strategies = (self.num_stages,), (num_strategies,)
        for name, dtype, shape in (
            ("seconds", float, table), ("sync_seconds", float, table),
            ("state_bytes", float, table), ("activation_bytes", float, table),
            ("transient_bytes", float, table), ("cut_seconds", float, cuts),
            ("cut_bytes", float, cuts), ("capacity_bytes", float, stages),
            ("in_flight", np.int64, stages), ("strategy_zero", np.int64, strategies),
            ("strategy_recompute", np.int64, strategies), ("allowed", np.bool_, table),
        ):  # fmt: skip
            object.__setattr__(self, name, _frozen(getattr(self, name), dtype, shape, name))
        tied = [i for group in self.tie_groups for i in group]
        if len(set(tied)) != len(tied) or not all(0 <= i < num_blocks for i in tied):
            raise ValueError(f"tie groups must be disjoint sets of blocks, got {self.tie_groups}")
        if not np.isin(self.strategy_zero, (0, 1, 2, 3)).all():
            raise ValueError(f"ZeRO stages are 0..3, got {self.strategy_zero.tolist()}")

    @property
    def num_blocks(self) -> int:
        """L."""
        return int(self.seconds.shape[0])

    @property
    def num_strategies(self) -> int:
        """S."""
        return int(self.seconds.shape[1])

    @property
    def strategy_class(self) -> Ints:
        """[S] the class that all blocks of a pipeline stage share; all alike when there is no pipeline."""
        if self.num_stages == 1:
            return np.zeros(self.num_strategies, np.int64)
        return np.array(ZERO_CLASS)[self.strategy_zero]


@dataclass(frozen=True, kw_only=True, order=True)
class Choice:
    """The stage and the strategy of every block."""

    stages: tuple[int, ...]
    strategies: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a choice costs: seconds a step, seconds of each stage per micro-batch, bytes of each stage.

    `feasible`: it fits in every stage, to the byte, and keeps every rule (`broken` names the first it does not).
    """

    seconds: float
    feasible: bool
    stage_seconds: tuple[float, ...]
    stage_bytes: tuple[float, ...]
    broken: str | None = None


def evaluate(problem: Problem, choice: Choice) -> Evaluation:
    """The cost of `choice`, by the formulas of this module's docstring and nothing else.

    Raises:
        ValueError: the stages are not contiguous, or a block has no such strategy.
    """
    stage, strategy = np.array(choice.stages), np.array(choice.strategies)
    _check_shape(problem, stage, strategy)
    blocks = np.arange(problem.num_blocks)
    seconds, held, synced = [], [], []
    for p in range(problem.num_stages):
        here = blocks[stage == p]
        picked = (here, strategy[here])
        received = here[0] - 1  # the cut in front of the stage; none in front of stage 0
        seconds.append(
            problem.stage_seconds
            + float(problem.seconds[picked].sum())
            + (float(problem.cut_seconds[received]) if p else 0.0)
        )
        held.append(
            problem.stage_bytes
            + float(problem.state_bytes[picked].sum())
            + float(problem.in_flight[p]) * float(problem.activation_bytes[picked].sum())
            + float(problem.transient_bytes[picked].max())
            + (float(problem.cut_bytes[received]) if p else 0.0)
        )
        synced.append(float(problem.sync_seconds[picked].sum()))
    step = sum(seconds) + (problem.num_microbatches - 1) * max(seconds) + max(synced) + problem.fixed_seconds
    broken = _broken_rule(problem, stage, strategy, held)
    return Evaluation(
        seconds=step,
        feasible=broken is None,
        stage_seconds=tuple(seconds),
        stage_bytes=tuple(held),
        broken=broken,
    )


def _check_shape(problem: Problem, stage: Ints, strategy: Ints) -> None:
    if stage.shape != (problem.num_blocks,) or strategy.shape != (problem.num_blocks,):
        raise ValueError(f"a choice for {problem.num_blocks} blocks is needed, got {len(stage)}")
    steps = np.diff(np.concatenate([[-1], stage, [problem.num_stages]]))
    if steps[0] != 1 or steps[-1] != 1 or not np.isin(steps, (0, 1)).all():
        raise ValueError(f"stages must be 0..{problem.num_stages - 1} in order, got {stage}")
    if not ((strategy >= 0) & (strategy < problem.num_strategies)).all():
        raise ValueError(f"strategies are 0..{problem.num_strategies - 1}, got {strategy}")


def _broken_rule(problem: Problem, stage: Ints, strategy: Ints, held: Sequence[float]) -> str | None:
    """The first rule that a well-formed choice breaks, in words; None when it keeps all."""
    classes = problem.strategy_class[strategy]
    zero = problem.strategy_zero[strategy]
    for i in range(problem.num_blocks):
        if not problem.allowed[i, strategy[i]]:
            return f"strategy {strategy[i]} is not allowed for block {i}"
    for p in range(problem.num_stages):
        if len(set(classes[stage == p].tolist())) > 1:
            return f"stage {p} mixes classes of ZeRO stages"
        if held[p] > problem.capacity_bytes[p]:
            return f"stage {p} needs {held[p]:.0f} bytes and has {problem.capacity_bytes[p]:.0f}"
    for group in problem.tie_groups:
        if len({int(zero[i]) for i in group}) > 1:
            return f"tied blocks {group} differ in their ZeRO stage"
    return None


def thin(problem: Problem, epsilon: float = 0.0) -> Problem:
    """The problem without strategies that another makes superfluous; its optimum is at most (1 + epsilon) times larger.

    Strategy q makes s superfluous for a block when it needs no more bytes of any kind and at most (1 + epsilon) times
    the seconds, is of the same class (so that the stage may hold it) and, for a tied block, of the same ZeRO stage.
    Whoever calls this with epsilon > 0 divides lower bounds by (1 + epsilon).
    """
    tied = {i for group in problem.tie_groups for i in group}
    classes = problem.strategy_class
    zero = problem.strategy_zero
    tables = (problem.state_bytes, problem.activation_bytes, problem.transient_bytes)
    allowed = problem.allowed.copy()
    for i in range(problem.num_blocks):
        num_bytes = np.stack([table[i] for table in tables], axis=1)  # [S, 3]
        num_seconds = np.stack([problem.seconds[i], problem.sync_seconds[i]], axis=1)  # [S, 2]
        # What may dominate comes first: fewer bytes, then fewer seconds, then the smaller index.
        order = np.lexsort((num_seconds.sum(1), num_bytes.sum(1)))
        kept: list[int] = []
        for s in order:
            # Only kept ones may dominate: chains of near-equals must not add up their epsilons.
            superfluous = any(
                classes[q] == classes[s]
                and (i not in tied or zero[q] == zero[s])
                and (num_bytes[q] <= num_bytes[s]).all()
                and (num_seconds[q] <= (1 + epsilon) * num_seconds[s]).all()
                for q in kept
            )
            if allowed[i, s] and superfluous:
                allowed[i, s] = False
            elif allowed[i, s]:
                kept.append(int(s))
    return replace(problem, allowed=allowed)


def canonical(problem: Problem, choice: Choice) -> Choice:
    """The one of all equally good rearrangements that comes first: equal blocks of a stage in order of strategy."""
    group_of = {i: g for g, group in enumerate(problem.tie_groups) for i in group}
    seen: dict[tuple[object, ...], list[int]] = {}
    for i in range(problem.num_blocks):
        tables = (
            problem.seconds, problem.sync_seconds, problem.state_bytes,
            problem.activation_bytes, problem.transient_bytes, problem.allowed,
        )  # fmt: skip
        same = tuple(table[i].tobytes() for table in tables)
        seen.setdefault((choice.stages[i], group_of.get(i), *same), []).append(i)
    strategies = list(choice.strategies)
    for blocks in seen.values():
        for i, strategy in zip(blocks, sorted(strategies[i] for i in blocks), strict=True):
            strategies[i] = strategy
    return Choice(stages=choice.stages, strategies=tuple(strategies))


def formulate(costs: Costs, allowed: Bools | None = None) -> Problem:
    """The integer program of one priced configuration; `allowed` [L, S] leaves some strategies out."""
    return Problem(
        num_stages=costs.num_stages,
        num_microbatches=costs.num_microbatches,
        seconds=costs.seconds,
        sync_seconds=costs.sync_seconds,
        state_bytes=costs.state_bytes,
        activation_bytes=costs.activation_bytes,
        transient_bytes=costs.transient_bytes,
        cut_seconds=costs.cut_seconds,
        cut_bytes=costs.cut_bytes,
        in_flight=costs.in_flight,
        capacity_bytes=costs.capacity_bytes,
        strategy_zero=costs.strategy_zero,
        strategy_recompute=costs.strategy_recompute,
        stage_seconds=costs.stage_seconds,
        fixed_seconds=costs.fixed_seconds,
        tie_groups=costs.tie_groups,
        allowed=allowed,  # type: ignore[arg-type]  # None allows all
    )
