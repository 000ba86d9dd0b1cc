"""Choose everything together: enumerate the outer choices, bound them, solve what may win, simulate, rank.

The outer choices are devices used, pipeline degree, tensor-parallel degree, for long samples the degree of context
parallelism, and one of a few ways to split the model over their ranks, data-parallel degree, over how many of its ranks
parameters are sharded (none, all, or some: hybrid sharding), over how many of these experts are spread, micro-batch and
schedule; micro-batches follow from the global batch. For each configuration an integer program chooses stage cuts, ZeRO
stage and recomputation of every block (`planner.problem`). The program proposes, the simulator judges: every
configuration whose bound lies within (1 + delta) of the last ranked one is simulated, where delta is the largest
difference of program and simulator seen on random plans (`tests/test_simulate.py` prints and asserts it). It is solved
where its bound, times what the simulator makes of the plan that the bound came with, would be ranked.
Between shard degrees of one way to train the program decides alone: they run the same passes on the same stages.
"""

import functools
import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from planner.audit import Factors, corrected, factors_of
from planner.bound import Bound, balanced, bound, compute_only, relax
from planner.cluster import Cluster
from planner.costs import Costs, least_seconds, price
from planner.engine import STOCK, Engine
from planner.engine_seconds import engine_costs, least_engine_seconds
from planner.errors import InfeasibleError, PlanError, PlannerError
from planner.graph import Batch, Graph
from planner.interval import are_tied, with_interval
from planner.memory import precision_named
from planner.operators import check_dtype
from planner.plan import SPLITTING, BlockPlan, InputSpec, Plan, Prediction, ShardingPlan, StagePlan
from planner.problem import Choice, Problem, evaluate, formulate
from planner.profile import RunRow
from planner.search.choices import Configuration, Pins, configurations
from planner.search.communicated import communicated, summed_once_a_step
from planner.search.experts import check_expert_pins, with_experts_spread
from planner.search.measuring import share_of_step
from planner.search.replicated import named, run_whole, splits_nothing
from planner.search.ring import NO_RING, with_ring_attention
from planner.search.sharded import ShardedGraph, has_long_samples, replicated_share
from planner.search.shortfall import Attempt, why_nothing_fits
from planner.shard.stored import stored
from planner.shard.words import parameter_words
from planner.simulate import Simulation, model_flop_utilisation, simulate
from planner.solve import solve, solve_together

DELTA = 0.06  # program against simulator: see the module docstring
GAP = 1e-3  # within a ranked configuration, and of the final program
RATIO_MARGIN = 0.01  # of simulator over program, between plans of one configuration
# Labels of the exact bound before the integer program takes over (3 million take about a second). Long pipelines are
# the bound's strength, short ones HiGHS': GPT-3 with 64 stages takes 1.6 s and 59 s, Llama-3-70B with 2 7 s and 0.2 s.
BOUND_WORK = {"short": 200_000, "long": 10_000_000}
LONG_PIPELINE = 9
SURVIVORS = 5  # configurations of the final program; more makes it hopeless (20 and up)
MENTIONED_SHARE = 0.01  # of the FLOP that tensor parallelism does not divide
OBJECTIVES = ("time", "device-seconds")
Progress = Callable[[str, int, int], None]  # what, done, of
Splits = tuple[tuple[str, int], ...]  # of `Mesh.splits`


class Sharded(Protocol):
    """The ways to split a model over the ranks of axes, best first."""

    def __call__(self, *splits: tuple[str, int]) -> Sequence[ShardedGraph]:
        """Made when the search asks for axes with their degrees, in the order of `Mesh.splits`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What a search did. `gap` is (best - smallest bound of all not proven) / best by the program."""

    configurations: int
    bounded: int
    solved_exactly: int
    gap: float
    delta: float = DELTA


@dataclass(frozen=True, kw_only=True)
class Search:
    """Ranked plans, best first, and what was done to find them."""

    plans: tuple[Plan, ...]
    statistics: Statistics
    tied: tuple[bool, ...] = ()  # of each plan, whether it is tied with the first (`planner.interval`)


@dataclass(frozen=True, kw_only=True)
class _Limits:
    """Weighted seconds that a bound must not exceed to be ranked."""

    last: float  # the last ranked plan's
    any_way: float  # the same with the simulator's margin
    by_way: dict[tuple[object, ...], float]  # the best by the program: it decides between degrees of hybrid sharding

    def of(self, candidate: "_Candidate") -> float:
        """The limit of one candidate."""
        return min(self.any_way, self.by_way.get(candidate.configuration.way, math.inf))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Candidate:
    """A configuration with its costs, its program, and what is known of its optimum (seconds times weight)."""

    configuration: Configuration
    costs: Costs
    problem: Problem
    weight: float
    lower: float
    choice: Choice | None = None
    value: float = math.inf
    solved: bool = False

    @property
    def gap(self) -> float:
        """How much faster than its plan the configuration may be, relative; 1 without a plan."""
        return max(0.0, 1 - self.lower / self.value) if math.isfinite(self.value) else 1.0


def search(
    graph: Graph,
    cluster: Cluster,
    *,
    global_batch: int,
    precision: str = "bf16",
    optimizer: str = "adamw",
    objective: str = "time",
    pins: Pins | Mapping[str, Any] | str | None = None,
    top: int = 5,
    notes: Iterable[str] = (),
    sharded: Sharded | None = None,
    progress: Progress | None = None,
    time_limit_seconds: float | None = None,
    runs: Iterable[RunRow] = (),
    engine: Engine | None = None,
) -> Search:
    """The best plans, each of another configuration. Pure but for a time limit, which makes it say so in the gap.

    `sharded` gives the ways to split the model over ranks of axes, best first; it is asked once for all that a
    configuration has. Without it there is no tensor parallelism and no context parallelism. `runs` of this model
    correct what terms of a step are priced at (`planner.audit`). With an `engine`, seconds are those of another
    training system than stock PyTorch (`planner.engine_seconds`).

    Raises:
        InfeasibleError: nothing fits; says the least memory that would.
        PlanError: the fixed choices contradict each other, the batch or the model.
    """
    return _Searcher(
        graph, cluster, global_batch, precision, optimizer, objective, Pins.of(pins), top, tuple(notes), sharded,
        progress or (lambda *_: None), time_limit_seconds, tuple(runs), engine,
    ).run()  # fmt: skip


@dataclass
class _Searcher:
    """One search; `run` reads top to bottom."""

    graph: Graph
    cluster: Cluster
    global_batch: int
    precision: str
    optimizer: str
    objective: str
    pins: Pins
    top: int
    notes: tuple[str, ...]
    sharded: Sharded | None
    progress: Progress
    time_limit_seconds: float | None
    runs: tuple[RunRow, ...] = ()
    engine: Engine | None = None

    def run(self) -> Search:
        """Enumerate, bound, solve, simulate, rank."""
        if self.objective not in OBJECTIVES:
            raise PlanError(f"objective {self.objective!r} is none of {', '.join(OBJECTIVES)}")
        if self.top < 1 or self.global_batch < 1:
            raise PlanError(f"top and global_batch must be at least 1, are {self.top} and {self.global_batch}")
        check_dtype(self.cluster.device, precision_named(self.precision).compute_dtype)
        self._check_pins()
        found = configurations(
            len(self.graph.blocks), self.cluster.num_devices, self.cluster.devices_per_node, self.global_batch,
            self.pins, may_pipeline=not self.graph.fallbacks and not self.graph.reads_updates,
            may_split=self.sharded is not None and not self.graph.fallbacks,
            may_split_samples=(
                self.sharded is not None
                and not self.graph.fallbacks
                and not self.graph.own_backward
                and has_long_samples(self.graph, self.cluster, self.global_batch)
            ),
        )  # fmt: skip
        found = with_experts_spread(found, self.graph, self.cluster, self.pins, may_split=self.sharded is not None)
        if self.graph.couples_samples:
            found = [c for c in found if c.dp == 1 and c.num_microbatches == 1]
        if self.graph.one_data_rank:
            found = [c for c in found if c.dp == 1]
        if found and self.graph.needs_two_samples:
            found = [c for c in found if c.micro_batch > 1]
            if not found:
                raise PlanError(f"{self.graph.needs_two_samples}, {_NEEDS_TWO}")
        if not found:
            raise PlanError(self._why_none())
        found = self._with_variants(found)
        candidates = self._bounded(found)
        ignoring_memory = False
        if not candidates:
            if not self.pins.settle_all or len({c.mesh.splits for c in found}) > 1:
                raise InfeasibleError(self._least_memory(found))
            ignoring_memory = True
            if self.pins.dp_shard is None:  # of hybrid sharding, only more ranks could help
                found = [c for c in found if c.dp_shard in (1, c.dp)]
            candidates = self._bounded(found, ignoring_memory=True)
        plans, candidates = self._ranked(self._solved(candidates))
        best = min(c.value for c in candidates)
        lowest = min(c.lower for c in candidates)
        notes = self.notes
        if ignoring_memory:
            notes = (*notes, "the fixed choices do not fit; the plan is the fastest that ignores memory")
        return Search(
            plans=tuple(replace(p, notes=(*notes, *p.notes)) for p in plans[: self.top]),
            tied=tuple(place > 0 and self._are_tied(plans[0], p) for place, p in enumerate(plans[: self.top])),
            statistics=Statistics(
                configurations=len(found),
                bounded=self.num_bounded,
                solved_exactly=sum(c.solved for c in candidates),
                gap=max(0.0, (best - min(lowest, best)) / best),
            ),
        )

    def _with_variants(self, found: list[Configuration]) -> list[Configuration]:
        """Each configuration in every way to split the model over the ranks of its axes.

        Ways in which all ranks of an axis do the same are of no use; fixed degrees that have nothing else are an error.
        """
        wanted = sorted({c.mesh.splits for c in found if c.mesh.splits}, key=lambda splits: (len(splits), splits))
        for index, splits in enumerate(wanted):
            self.progress("splitting tensors", index, len(wanted))
            assert self.sharded is not None
            is_fixed = all(getattr(self.pins, axis) is not None for axis, _ in splits)
            try:
                made = self.sharded(*splits)
            except PlannerError as error:
                if is_fixed:
                    raise
                self.notes = (*self.notes, f"{_splits_text(splits)} is left out: {error}")
                made = ()
            self.sharded_graphs[splits] = tuple(each for each in made if each.divides)
            if is_fixed and made and not self.sharded_graphs[splits]:
                raise PlanError(splits_nothing(made[0], _splits_text(splits)))
        return sorted(
            replace(c, variant=variant)
            for c in found
            for splits in [c.mesh.splits]
            for variant in range(len(self.sharded_graphs[splits]) if splits else 1)
        )

    def _local(self, configuration: Configuration) -> ShardedGraph:
        """What one rank of the axes that split tensors runs."""
        splits = configuration.mesh.splits
        return self.sharded_graphs[splits][configuration.variant] if splits else self.whole

    @functools.cached_property
    def whole(self) -> ShardedGraph:
        """The model where nothing is split."""
        return ShardedGraph(name="", graph=self.graph)

    @functools.cached_property
    def sharded_graphs(self) -> dict[Splits, tuple[ShardedGraph, ...]]:
        """For each choice of axes that split and their degrees, what has been made."""
        return {}

    def _check_pins(self) -> None:
        pins = self.pins
        if pins.zero and 1 in (pins.dp, pins.devices, pins.dp_shard) and (pins.cp or 1) == 1:
            which = next(name for name in ("dp", "devices", "dp_shard") if getattr(pins, name) == 1)
            raise PlanError(f"zero={pins.zero} shards over data-parallel ranks, but {which} is fixed to 1")
        if pins.zero == 0 and (pins.dp_shard or 1) > 1:
            raise PlanError(f"zero=0 keeps whole copies, but dp_shard={pins.dp_shard} shards; fix one of them")
        if pins.zero == 0 and (pins.cp or 1) > 1:
            raise PlanError(
                f"zero=0 keeps whole copies, but the ranks of cp={pins.cp} share out the states of all parameters; fix "
                "zero to 1, or one of the two"
            )
        if pins.dp is not None and pins.dp_shard is not None and pins.dp % pins.dp_shard:
            raise PlanError(f"dp_shard={pins.dp_shard} is no divisor of dp={pins.dp}")
        if self.graph.fallbacks:
            if (pins.pp or 1) > 1:
                raise PlanError(f"pp={pins.pp} needs a graph of the model, but {self.graph.fallbacks[0]}")
            if pins.recompute == "full":
                raise PlanError(f"recompute=full needs a graph of the model, but {self.graph.fallbacks[0]}")
            for axis in SPLITTING:
                if (getattr(pins, axis) or 1) > 1:
                    raise PlanError(
                        f"{axis}={getattr(pins, axis)} needs a graph of the model, but {self.graph.fallbacks[0]}"
                    )
        if (pins.cp or 1) > 1 and self.graph.own_backward:
            raise PlanError(
                f"cp={pins.cp} is not possible: {self.graph.own_backward} has a backward of its own, which would see "
                "gradients of another size on ranks that share out samples; leave cp out"
            )
        if (pins.pp or 1) > 1 and self.graph.reads_updates:
            raise PlanError(f"pp={pins.pp} is not possible: {self.graph.reads_updates}; leave pp out")
        if self.graph.one_data_rank:
            for name in ("dp", "dp_shard"):
                if (getattr(pins, name) or 1) > 1:
                    raise PlanError(
                        f"{name}={getattr(pins, name)} is not possible: {self.graph.one_data_rank}; leave {name} out"
                    )
        if (pins.pp or 1) > len(self.graph.blocks):
            raise PlanError(f"pp={pins.pp} needs as many blocks, the model has {len(self.graph.blocks)}")
        check_expert_pins(self.graph, pins)
        for axis in SPLITTING:
            if (getattr(pins, axis) or 1) > 1 and self.sharded is None:
                raise PlanError(
                    f"{axis}={getattr(pins, axis)} is not possible: no way to split the model is given; leave it out"
                )
        wanted = max(pins.dp or 1, pins.dp_shard or 1, pins.ep or 1) * (pins.pp or 1) * (pins.tp or 1) * (pins.cp or 1)
        if wanted > self.cluster.num_devices:
            raise PlanError(f"the fixed choices need {wanted} devices, the cluster has {self.cluster.num_devices}")

    def _why_none(self) -> str:
        if self.graph.couples_samples:
            return (
                f"{self.graph.couples_samples}, so it trains only with one micro-batch on one data-parallel rank; "
                "fix neither dp nor num_microbatches to more than 1"
            )
        fixed = ", ".join(f"{k}={v}" for k, v in asdict(self.pins).items() if v is not None)
        ranks = self.pins.dp or self.pins.dp_shard or 1
        parts = ranks * (self.pins.micro_batch or 1) * (self.pins.num_microbatches or 1)
        if self.global_batch % parts:
            return (
                f"a global batch of {self.global_batch} is not divisible by {parts} (fixed: {fixed}); "
                f"use a multiple of {parts}"
            )
        degrees = {name: getattr(self.pins, name) or 1 for name in ("pp", "dp", "tp", "cp")}
        if (self.pins.devices or 0) % math.prod(degrees.values()):
            product = " x ".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1)
            return f"{product} does not divide devices={self.pins.devices}; fix fewer of them"
        return (
            f"no configuration of {self.cluster.num_devices} devices agrees with a global batch of "
            f"{self.global_batch} and {fixed or 'nothing fixed'}; fix fewer choices or change the global batch"
        )

    def _candidate(self, configuration: Configuration, *, ignoring_memory: bool) -> _Candidate:
        """Price one configuration and write its program."""
        local = self._local(configuration)
        costs = price(
            local.graph, self.cluster, mesh=configuration.mesh, micro_batch=configuration.micro_batch,
            num_microbatches=configuration.num_microbatches, schedule=configuration.schedule,
            precision=self.precision, optimizer=self.optimizer, splits=local.splits,
        )  # fmt: skip
        if self.engine is not None:
            costs = engine_costs(costs, local.graph, self.cluster, self.engine)
        costs = corrected(costs, self._factors(configuration))
        problem = formulate(costs, allowed=self._allowed(costs))
        if ignoring_memory:
            problem = replace(problem, capacity_bytes=np.full(configuration.pp, np.finfo(np.float64).max / 4))
        weight = self._weight(configuration)
        return _Candidate(
            configuration=configuration, costs=costs, problem=problem, weight=weight,
            lower=max(compute_only(problem), balanced(problem)) * weight,
        )  # fmt: skip

    def _factors(self, configuration: Configuration) -> Factors | None:
        """What earlier runs correct its terms by."""
        return factors_of(self.runs, str(configuration.mesh), configuration.micro_batch)

    def _allowed(self, costs: Costs) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which strategies the pins and the model leave to each block."""
        keep = np.ones(len(costs.strategies), bool)
        for index, strategy in enumerate(costs.strategies):
            if self.pins.zero is not None and costs.mesh.dp * costs.mesh.cp > 1:
                keep[index] &= strategy.zero == self.pins.zero
            if self.pins.recompute is not None:
                keep[index] &= strategy.recompute == (self.pins.recompute == "full")
            if self.graph.fallbacks:
                keep[index] &= not strategy.recompute
        return np.tile(keep, (len(self.graph.blocks), 1))

    def _bounded(self, found: list[Configuration], *, ignoring_memory: bool = False) -> list[_Candidate]:
        """Candidates that may be ranked: bounded in the order of cheaper bounds; the worse ones are skipped.

        First comes the time of kernels alone, then the program without cuts, then the relaxation: whatever has the
        least bound is looked at more closely, until that is more than any plan that may be ranked.
        Within one mesh and micro-batch the program of GPipe is that of 1F1B with more memory held, so it cannot win
        where 1F1B runs; it is bounded only where it is fixed or alone.
        """
        by_1f1b = {c.program for c in found if c.schedule == "1f1b" and c.pp > 1}
        able = [c for c in found if not (c.schedule == "gpipe" and c.program in by_1f1b)]
        queue: list[tuple[float, Configuration, int, _Candidate | None]] = [
            (self._least_seconds(c) * self._weight(c), c, index, None) for index, c in enumerate(able)
        ]
        heapq.heapify(queue)  # no two entries are equal up to their index
        kept: list[_Candidate] = []
        self.num_bounded = 0
        limits = self._limits([])
        while queue:
            lower, configuration, index, candidate = heapq.heappop(queue)
            self.progress("bounding", len(able) - len(queue), len(able))
            limit = min(limits.any_way, limits.by_way.get(configuration.way, math.inf))
            if lower > limits.any_way:
                break
            if lower > limit:
                continue
            if candidate is None:
                candidate = self._candidate(configuration, ignoring_memory=ignoring_memory)
                if math.isfinite(candidate.lower):
                    heapq.heappush(queue, (candidate.lower, configuration, index, candidate))
                continue
            found_bound = relax(candidate.problem, gap=GAP, cutoff=limit / candidate.weight)
            self.num_bounded += 1
            if not math.isfinite(found_bound.seconds):
                continue
            improved = _with_bound(candidate, found_bound)
            kept.append(improved)
            limits = self._limits(kept)
        return [c for c in kept if c.lower <= limits.of(c)]

    def _weight(self, configuration: Configuration | Plan) -> int:
        """What the objective multiplies seconds by."""
        return configuration.devices if self.objective == "device-seconds" else 1

    def _are_tied(self, one: Plan, other: Plan) -> bool:
        return are_tied(one.prediction, other.prediction, (self._weight(one), self._weight(other)))

    def _least_seconds(self, configuration: Configuration) -> float:
        """No plan of a configuration is faster: its passes, with nothing else and perfectly balanced."""
        least_of = least_seconds if self.engine is None else functools.partial(least_engine_seconds, engine=self.engine)
        one = least_of(
            self._local(configuration).graph, self.cluster, mesh=configuration.mesh,
            micro_batch=configuration.micro_batch,
        )  # fmt: skip
        factors = self._factors(configuration)
        least = 1.0 if factors is None else factors.least
        return least * one * (configuration.pp + configuration.num_microbatches - 1) / configuration.pp

    def _limits(self, candidates: Iterable[_Candidate]) -> "_Limits":
        """Bounds above these cannot be ranked: the last ranked value, and the best of the same way to train."""
        best: dict[tuple[object, ...], float] = {}
        for c in candidates:
            if c.value < best.get(c.configuration.way, math.inf):
                best[c.configuration.way] = c.value
        last = sorted(best.values())[self.top - 1] if len(best) >= self.top else math.inf
        return _Limits(last=last, any_way=last * (1 + DELTA), by_way=best)

    def _solved(self, candidates: list[_Candidate]) -> list[_Candidate]:
        """Close the gap of every candidate that the program would rank; the best few as one program, with one proof.

        One that only the simulator's margin could bring among them stays as it is, if it has a plan: see `_ranked`.
        """
        done: list[_Candidate] = []
        queue = sorted(candidates, key=lambda c: (c.lower, c.configuration))
        for index, candidate in enumerate(queue):
            self.progress("solving", index, len(queue))
            limits = self._limits([*done, *queue[index + 1 :], candidate])
            rivals = self._limits([*done, *queue[index + 1 :]]).by_way
            limit = min(limits.any_way, rivals.get(candidate.configuration.way, math.inf))
            if candidate.lower > limit:
                continue
            is_ranked = candidate.lower <= limits.last or candidate.choice is None
            done.append(self._closed(candidate, limit) if is_ranked else candidate)
        done = [c for c in done if c.choice is not None]
        if not done:
            raise InfeasibleError(self._least_memory([c.configuration for c in candidates]))
        return self._final_program(done)

    def _closed(self, candidate: _Candidate, limit: float) -> _Candidate:
        """Bound and plan within GAP of each other, by the bound if it can, else by the integer program.

        Without a plan if none is faster than `limit`.
        """
        if candidate.gap <= GAP:
            return candidate
        work = BOUND_WORK["long" if candidate.configuration.pp >= LONG_PIPELINE else "short"]
        cutoff = limit / candidate.weight
        improved = _with_bound(candidate, bound(candidate.problem, cutoff=cutoff, gap=GAP, max_work=work))
        if improved.lower > limit * (1 - GAP):
            return replace(improved, choice=None, value=math.inf)
        if improved.gap <= GAP or not math.isfinite(improved.lower):
            return improved
        try:
            solution = solve(
                improved.problem, gap=GAP, incumbent=improved.choice, lower_bound=improved.lower / improved.weight,
                bounded=False, time_limit_seconds=self.time_limit_seconds,
            )  # fmt: skip
        except InfeasibleError:
            return replace(improved, choice=None, value=math.inf, lower=math.inf, solved=True)
        return replace(
            improved, choice=solution.choice, value=solution.seconds * improved.weight,
            lower=max(improved.lower, solution.lower_bound_seconds * improved.weight), solved=True,
        )  # fmt: skip

    def _final_program(self, done: list[_Candidate]) -> list[_Candidate]:
        """Prove the winner among the few whose bounds lie below the best plan: degrees and cuts in one program."""
        best = min(c.value for c in done)
        rivals = sorted(
            (c for c in done if c.lower < best * (1 - 1e-9)), key=lambda c: (c.value, c.lower, c.configuration)
        )[:SURVIVORS]
        if len(rivals) < 2:
            return done
        winner, solution = solve_together(
            [c.problem for c in rivals],
            gap=GAP / 2,
            weights=[c.weight for c in rivals],
            incumbents=[c.choice for c in rivals],
            lower_bounds=[c.lower / c.weight for c in rivals],
            bounded=False,
            time_limit_seconds=self.time_limit_seconds,
        )
        weight = rivals[winner].weight
        proven = solution.lower_bound_seconds * weight
        changed = {id(c): replace(c, lower=max(c.lower, min(proven, c.value)), solved=True) for c in rivals}
        first = rivals[winner]
        if solution.seconds * weight < first.value:
            better = replace(changed[id(first)], choice=solution.choice, value=solution.seconds * weight)
            changed[id(first)] = better
        return [changed.get(id(c), c) for c in done]

    def _ranked(self, candidates: list[_Candidate]) -> tuple[list[Plan], list[_Candidate]]:
        """The first plans as simulated, the best of each way to train; equal times keep the order of configurations.

        A candidate that was not closed is, if its bound lets it rank: with what the simulator makes of its plan, a
        little less.
        """
        seconds = {c.configuration: self._simulated_seconds(c) for c in candidates}
        closed: set[Configuration] = set()
        while True:
            order = sorted(candidates, key=lambda c: (round(seconds[c.configuration] * c.weight, 12), c.configuration))
            best: dict[tuple[object, ...], _Candidate] = {}
            for c in order:
                best.setdefault(c.configuration.way, c)
            first = list(best.values())[: self.top]
            last = max(seconds[c.configuration] * c.weight for c in first) if len(best) >= self.top else math.inf
            rough = [
                c
                for c in candidates
                if c.configuration not in closed
                and c.gap > GAP
                and seconds[c.configuration] * c.lower / c.value * c.weight * (1 - RATIO_MARGIN) <= last
            ]
            if not rough:
                return [self._plan(c) for c in first], candidates
            found = {c.configuration: self._closed(c, math.inf) for c in rough}
            closed |= found.keys()
            candidates = [found.get(c.configuration, c) for c in candidates]
            seconds |= {configuration: self._simulated_seconds(c) for configuration, c in found.items()}

    def _simulated_seconds(self, candidate: _Candidate) -> float:
        return self._simulated(candidate).step_seconds

    def _simulated(self, candidate: _Candidate) -> Simulation:
        configuration, choice = candidate.configuration, candidate.choice
        assert choice is not None
        rows = _rows(choice, configuration.pp)
        return simulate(candidate.costs, rows, configuration.schedule, configuration.num_microbatches)

    def _plan(self, candidate: _Candidate) -> Plan:
        configuration, costs, choice = candidate.configuration, candidate.costs, candidate.choice
        assert choice is not None
        rows = _rows(choice, configuration.pp)
        local = self._local(configuration)
        shardings, shardings_of = self._plan_shardings(local, configuration)
        simulation = self._simulated(candidate)
        is_split = configuration.cp > 1
        factors = self._factors(configuration)
        is_split &= self.engine is None  # the ring is priced as stock PyTorch has it
        ring = with_ring_attention(costs, rows, local.graph, self.cluster, local.splits, factors) if is_split else None
        stages = tuple(
            StagePlan(
                blocks=tuple(
                    BlockPlan(
                        name=self.graph.blocks[block].name,
                        zero=costs.strategies[strategy].zero,
                        recompute="full" if costs.strategies[strategy].recompute else "none",
                        shardings=shardings_of[block],
                    )
                    for block, strategy in row
                )
            )
            for row in rows
        )
        return Plan(
            model=self.graph.name,
            cluster=self.cluster.name,
            graph_fingerprint=self.graph.fingerprint,
            cluster_fingerprint=self.cluster.fingerprint,
            precision=self.precision,
            optimizer=self.optimizer,
            global_batch=self.global_batch,
            micro_batch=configuration.micro_batch,
            num_microbatches=configuration.num_microbatches,
            schedule=configuration.schedule,  # type: ignore[arg-type]
            mesh=configuration.mesh,
            stages=stages,
            inputs=_inputs(self.graph),
            shardings=shardings,
            engine=STOCK if self.engine is None else self.engine.name,
            notes=(*self._plan_notes(local, configuration), *((NO_RING,) if is_split and ring is None else ())),
            ring_attention=ring,
            prediction=with_interval(Prediction(
                step_seconds=simulation.step_seconds,
                bubble=simulation.bubble,
                peak_bytes=tuple(simulation.peak_bytes),
                capacity_bytes=float(self.cluster.capacity_bytes),
                gap=candidate.gap,
                mfu=model_flop_utilisation(
                    self.graph, self.cluster, num_devices=configuration.devices, global_batch=self.global_batch,
                    step_seconds=simulation.step_seconds,
                ),
                parts_seconds=tuple(simulation.parts_seconds),
                forward_seconds=simulation.forward_seconds,
                corrections=() if factors is None else factors.named(),
                measured_share=share_of_step(
                    local.graph, self.cluster, configuration.micro_batch, dict(simulation.parts_seconds)
                ),
            ), on_cpu=self.cluster.device.kind == "cpu"),
        )  # fmt: skip

    def _plan_shardings(
        self, local: ShardedGraph, configuration: Configuration
    ) -> tuple[tuple[ShardingPlan, ...], list[tuple[int, ...]]]:
        """The shardings of a plan with what people want to know of them, and those of each block, one for each axis."""
        found: dict[ShardingPlan, int] = {}
        of_block: list[tuple[int, ...]] = [() for _ in self.graph.blocks]
        once_a_step = functools.partial(
            summed_once_a_step, shards=configuration.mesh.shards,
            bytes_per_element=precision_named(self.precision).master_bytes,
        )  # fmt: skip
        for split, whole in zip(local.splits, local.wholes, strict=True):
            plans, plan_of = stored(split.shardings, split.axis)
            blocks = zip(whole.blocks, plan_of, split.shardings, local.graph.blocks, strict=True)
            for position, (block, at, sharding, mine) in enumerate(blocks):
                told = replace(
                    plans[at],
                    words=parameter_words(whole, block, sharding, split.degree),
                    collectives=(
                        *communicated(local.graph, mine, split.axis, configuration.micro_batch),
                        *(once_a_step(whole, block, sharding) if split.axis == "tp" else ()),
                    ),
                )
                of_block[position] += (found.setdefault(told, len(found)),)
        return tuple(found), of_block

    def _plan_notes(self, local: ShardedGraph, configuration: Configuration) -> tuple[str, ...]:
        notes: tuple[str, ...] = ()
        if self.pins.zero and configuration.dp * configuration.cp == 1:
            notes = (f"zero={self.pins.zero} has nothing to shard over: this is the way with one data-parallel rank",)
        if self.graph.updates_statistics and max(configuration.dp, configuration.num_microbatches) > 1:
            notes = (*notes, _updates_buffers(self.graph))
        graphs = [*local.wholes, local.graph]
        for split, whole, part in zip(local.splits, graphs, graphs[1:], strict=False):
            share = replicated_share(whole, part, split.degree)
            if share <= MENTIONED_SHARE or split.axis == "ep":  # whose ranks have other samples
                continue
            why = named(run_whole(whole, split.shardings, split.degree, split.axis))
            alike = f"{share:.1%} of the model's FLOP run on all {split.degree} {_AXIS_WORDS[split.axis]} ranks alike"
            notes = (*notes, f"{alike}: {why}" if why else alike)
        return notes

    def _least_memory(self, found: list[Configuration]) -> str:
        """The sentence for a cluster on which nothing fits.

        More micro-batches in flight or larger ones never need less, so of each mesh only the smallest micro-batch
        counts.
        """
        by_size = sorted(found, key=lambda c: (-c.micro_batch, c))  # the last of equal keys, the smallest, stays
        leanest = {(c.mesh, c.variant, c.schedule): c for c in by_size}
        candidates = [self._candidate(c, ignoring_memory=False) for c in sorted(leanest.values())]
        attempts = [Attempt(str(c.configuration), c.costs, c.problem) for c in candidates]
        fixed = ", ".join(f"{k}={v}" for k, v in asdict(self.pins).items() if v is not None)
        return (
            f"{self.graph.name} does not fit on {self.cluster.name} with a global batch of {self.global_batch}"
            f"{f' and {fixed} fixed' if fixed else ''}: "
            f"{why_nothing_fits(self.graph, self.cluster.capacity_bytes, attempts)}"
        )


_NEEDS_TWO = (
    "so a micro-batch needs at least 2 samples, which a global batch and the fixed choices leave to none; use a larger "
    "global batch or fix fewer choices"
)
_AXIS_WORDS: Mapping[str, str] = {"tp": "tensor-parallel", "cp": "context-parallel", "ep": "expert-parallel"}


def _updates_buffers(graph: Graph) -> str:
    """What several micro-batches or data-parallel ranks mean for buffers that forward updates."""
    lines = (n.source for n in graph.nodes if n.source and any(graph.tensors[t].kind == "buffer" for t in n.mutates))
    at = next((f"{line}: " for line in lines), "")
    return (
        f"{at}forward updates buffers, such as the statistics of a batch norm: once in every micro-batch, as one "
        "device that runs the micro-batches of all data-parallel ranks in order; an update that looks at no sample, "
        "such as a power iteration, is each rank's own"
    )


def _splits_text(splits: Splits) -> str:
    """As pins are written.

    >>> _splits_text((("cp", 2), ("tp", 4)))
    'cp=2 with tp=4'
    """
    return " with ".join(f"{axis}={degree}" for axis, degree in splits)


def _rows(choice: Choice, num_stages: int) -> list[list[tuple[int, int]]]:
    """Of each stage its blocks, with their strategies."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(num_stages)]
    for block, (stage, strategy) in enumerate(zip(choice.stages, choice.strategies, strict=True)):
        rows[stage].append((block, strategy))
    return rows


def _with_bound(candidate: _Candidate, found: Bound) -> _Candidate:
    """The candidate with a better bound, and with the plan of the bound if the evaluator agrees that it fits."""
    lower = max(candidate.lower, found.seconds * candidate.weight)
    result = replace(candidate, lower=lower)
    if found.stages is not None and found.strategies is not None:
        choice = Choice(stages=found.stages, strategies=found.strategies)
        evaluation = evaluate(candidate.problem, choice)
        if evaluation.feasible and evaluation.seconds * candidate.weight < candidate.value:
            result = replace(result, choice=choice, value=evaluation.seconds * candidate.weight)
    return result


def _inputs(graph: Graph) -> tuple[InputSpec, ...]:
    """What one sample of a batch looks like, so that ranks can trace without the batch."""
    return tuple(
        InputSpec(
            name=graph.tensors[index].name,
            shape=tuple(-1 if isinstance(size, Batch) else size for size in graph.tensors[index].shape),
            dtype=graph.tensors[index].dtype,
        )
        for index in graph.inputs
    )
