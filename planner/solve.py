"""Solve configurations exactly with PuLP and HiGHS (`planner.highs`).

The integer program of one configuration c. Blocks come in units u = 0..U-1 of L_u equal blocks in a row: runs
("counts"), or every block a unit of its own ("assignment"). w_c is 1 when the configuration is taken, and everything
below is homogeneous in it, so that several configurations stand side by side in one program.

    x[u,s,p]   how many blocks of unit u take strategy s on stage p               integer, 0..L_u
    N[u,p]     how many blocks of unit u lie on stages 0..p                       integer, 0..L_u
    g, f[u,p]  unit u has begun, has ended by stage p                             binary (N itself where L_u = 1)
    k[p,c]     stage p takes strategies of class c                                binary (P > 1)
    t[j,z]     tie group j takes ZeRO stage z                                     binary
    h[p,l]     stage p holds a block with a transient of level l or more          binary
    W[p]       largest transient of stage p;  slowest = max_p T_p;  synced = max_p G_p

    minimise   sum_c weight_c (sum_p T_p + (m - 1) slowest + synced + fixed_seconds w)

    T_p = stage_seconds w + sum seconds x + cut_seconds where p receives       `_Part._seconds`, `_Part._cut_terms`
          the cut behind stage p is inside u: g[u,p] - f[u,p];  behind u: f[u,p] - g[u+1,p]

    sum_c w_c = 1                                                       `_Program`
    sum_s x[u,s,p] = N[u,p] - N[u,p-1],  N[u,P-1] = L_u w               `_Part._add_order`
    L_u f <= N <= (L_u - 1) w + f,  g <= N <= L_u g                     `_Part._add_order`
    g[u+1,p] <= f[u,p]   contiguous;   f[u,p] <= g[u+1,p+1]             `_Part._add_order`
    sum_us x[u,s,p] >= w   no stage empty                               `_Part._add_order`
    sum_(s in c) x[u,s,p] <= L_u k[p,c],  sum_c k[p,c] = w              `_Part._add_classes`
    sum_(s of z, p) x[u,s,p] = t[j,z]   u in group j                    `_Part._add_ties`
    T_p <= slowest,  sum sync_seconds x <= synced                       `_Part._add_seconds`
    sum (state + in_flight_p activation) x + W + cut bytes + stage_bytes w <= capacity_p w
    W >= transient x (L_u = 1),  W >= levels h,  x <= L_u h             `_Part._add_memory`

Given a plan of known value (`planner.bound` nearly always has one) only better ones are sought: first and last stage of
each block, slowest <= most (`_Part`), the objective at least the bound (`_Part._add_limits`) and at most that value
(`_Program`).

The solver sees milliseconds and GiB, for its tolerances are absolute. Whatever it proposes is judged by `evaluate`,
to the byte; where rounding made it too large, the program is solved again with a little less memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.bound import WORK, Bound, Windows, bound, least_bytes, windows
from planner.errors import InfeasibleError, SolverError, TimeLimitError
from planner.highs import Program, Terms, Variable
from planner.problem import Choice, Problem, canonical, evaluate, thin
from planner.units import GIB, format_bytes

MILLISECONDS = 1e3
NODE_LIMIT = 20_000
_MAX_RUNS = 8
_PATIENCE = 5  # times the usual work of a bound, before HiGHS is asked
_OPTIMAL = 1e-6  # a relative gap at which a value is called the optimum: HiGHS' own tolerance
_SHRINK_BYTES = (0, 1 << 11, 1 << 14, 1 << 20)  # of every capacity, when rounding broke a plan

Form = Literal["counts", "assignment"]


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A plan and what is proven about it.

    `status`: "optimal", no plan is faster by more than one part in a million; "gap", within the gap asked for;
    "stopped", a limit (or rounding) ended the search before that: `lower_bound_seconds` says what is known.
    `nodes` is HiGHS' count, 0 when the bound alone proved it.
    """

    choice: Choice
    seconds: float
    lower_bound_seconds: float
    status: Literal["optimal", "gap", "stopped"]
    nodes: int

    @property
    def gap(self) -> float:
        """How much faster a plan may still be, relative."""
        return 1.0 - self.lower_bound_seconds / self.seconds if self.seconds > 0 else 0.0


def solve(
    problem: Problem,
    *,
    gap: float = 1e-4,
    incumbent: Choice | None = None,
    lower_bound: float | None = None,
    node_limit: int = NODE_LIMIT,
    time_limit_seconds: float | None = None,
    form: Form | None = None,
    bounded: bool = True,
    confirm: bool = False,
) -> Solution:
    """The fastest plan that fits.

    Stops on `gap` or `node_limit`, never on seconds unless asked to: a clock would make plans differ between runs.
    `incumbent` and `lower_bound` are what is known already. `form` forces a formulation; `bounded=False` leaves all to
    HiGHS, without the bound. `confirm` asks HiGHS even where the bound has proven the plan already, and without telling
    it that bound: a second proof.

    Raises:
        InfeasibleError: no plan fits, proven.
        TimeLimitError: none was found within the limits; one may exist.
    """
    _, solution = solve_together(
        [problem],
        gap=gap,
        incumbents=[incumbent],
        lower_bounds=[lower_bound],
        node_limit=node_limit,
        time_limit_seconds=time_limit_seconds,
        form=form,
        bounded=bounded,
        confirm=confirm,
    )
    return solution


def solve_together(
    problems: Sequence[Problem],
    *,
    gap: float = 1e-4,
    weights: Sequence[float] | None = None,
    incumbents: Sequence[Choice | None] | None = None,
    lower_bounds: Sequence[float | None] | None = None,
    node_limit: int = NODE_LIMIT,
    time_limit_seconds: float | None = None,
    form: Form | None = None,
    bounded: bool = True,
    confirm: bool = False,
) -> tuple[int, Solution]:
    """(index, Solution) of the best of a few configurations, by one integer program and one proof.

    Minimises `weights[j]` (1) times the seconds of configuration j. `lower_bound_seconds` is that of the whole, in
    seconds of the winner. Of equals the first wins. The other arguments are those of `solve`.

    Raises:
        InfeasibleError: no plan of any configuration fits, proven.
        TimeLimitError: none was found within the limits; one may exist.
    """
    if not problems:
        raise ValueError("solve_together needs at least one problem")
    search = _Search(list(problems), list(weights or [1.0] * len(problems)), gap)
    search.begin(incumbents or [], lower_bounds or [], bounded=bounded)
    if confirm or not search.proven():
        search.run(node_limit, time_limit_seconds, form, bounded=bounded, confirm=confirm)
    return search.answer()


class _Search:
    """The best plan and the bounds so far. Values are weighted seconds."""

    def __init__(self, problems: list[Problem], weights: list[float], gap: float) -> None:
        self.problems, self.weights, self.gap = problems, weights, gap
        self.lower = [0.0] * len(problems)
        self.value, self.winner = float("inf"), -1
        self.seconds = float("inf")
        self.choice: Choice | None = None
        self.nodes = 0
        self.stopped = False

    def begin(
        self,
        incumbents: Sequence[Choice | None],
        lower_bounds: Sequence[float | None],
        *,
        bounded: bool,
    ) -> None:
        """Take what is known, and what the bounds find; the most promising configuration first."""
        for j, choice in enumerate(incumbents):
            if choice is not None:
                self.offer(j, choice)
        for j, known in enumerate(lower_bounds):
            if known is not None:
                self.lower[j] = self.weights[j] * known
        if not bounded:
            return
        for j in sorted(range(len(self.problems)), key=lambda j: (self.lower[j], j)):
            if self.lower[j] >= self._enough():
                continue
            cutoff = self.value / self.weights[j]
            found: Bound = bound(self.problems[j], cutoff=cutoff, gap=self.gap, max_work=_PATIENCE * WORK)
            self.lower[j] = max(self.lower[j], self.weights[j] * found.seconds)
            if found.stages is not None and found.strategies is not None:
                self.offer(j, Choice(stages=found.stages, strategies=found.strategies))

    def offer(self, j: int, choice: Choice) -> bool:
        """Take `choice` if it fits and is better; whether it fits."""
        choice = canonical(self.problems[j], choice)
        judged = evaluate(self.problems[j], choice)
        if not judged.feasible:
            return False
        value = self.weights[j] * judged.seconds
        if self.choice is None or (value, j, choice) < (self.value, self.winner, self.choice):
            self.value, self.winner = value, j
            self.seconds, self.choice = judged.seconds, choice
        return True

    def _enough(self) -> float:
        """A lower bound from here on proves the best value."""
        return self.value * (1 - max(self.gap, 1e-9))

    def proven(self) -> bool:
        """Whether the best value is within the gap, or nothing fits."""
        return min(self.lower) >= self._enough() or not np.isfinite(min(self.lower))

    def run(
        self,
        node_limit: int,
        time_limit_seconds: float | None,
        form: Form | None,
        *,
        bounded: bool,
        confirm: bool,
    ) -> None:
        """Let HiGHS search the configurations that may still hold a better plan.

        Raises:
            SolverError: HiGHS ended in a way that says nothing, or contradicts a plan that is known.
        """
        enough = self.value if confirm else self._enough()
        open_ = [j for j, lower in enumerate(self.lower) if lower < enough]
        if not open_:
            return
        for attempt, shrink in enumerate(_SHRINK_BYTES):
            program = _Program(self, open_, form, shrink, bounded=bounded, confirm=confirm)
            outcome = program.solve(self.gap, node_limit, time_limit_seconds)
            self.nodes += outcome.nodes
            if confirm and shrink == 0 and self.choice is not None and outcome.lower > self.value * (1 + _OPTIMAL):
                raise SolverError(
                    f"HiGHS says that nothing takes less than {outcome.lower} s, a plan of {self.value} s is at hand"
                )
            if attempt == 0:  # with less memory the bound would not hold
                for j in open_:
                    self.lower[j] = max(self.lower[j], min(outcome.lower, self.value))
                self.stopped = outcome.stopped
            if outcome.winner is None or outcome.choice is None:
                return
            if self.offer(outcome.winner, outcome.choice):
                return

    def answer(self) -> tuple[int, Solution]:
        """The result, or why there is none."""
        lower = min(self.lower)
        if self.choice is None:
            if np.isfinite(lower) and not self.stopped:
                raise SolverError(
                    "plans fit only to within the solver's rounding; a few KiB of capacity more or less decide"
                )
            if np.isfinite(lower):
                raise TimeLimitError(
                    "the search was stopped before it found a plan that fits; one may exist: allow more nodes or time"
                )
            raise InfeasibleError(_why_infeasible(self.problems))
        bound_seconds = min(lower / self.weights[self.winner], self.seconds)
        within = bound_seconds >= self.seconds * (1 - max(self.gap, _OPTIMAL))
        optimal = bound_seconds >= self.seconds * (1 - _OPTIMAL)
        return self.winner, Solution(
            choice=self.choice,
            seconds=self.seconds,
            lower_bound_seconds=bound_seconds,
            status="optimal" if optimal else "gap" if within else "stopped",
            nodes=self.nodes,
        )


def _why_infeasible(problems: Iterable[Problem]) -> str:
    """One sentence on the configuration that comes closest to fitting."""
    needs = [(least_bytes(p) - float(p.capacity_bytes.min()), p) for p in problems]
    short, problem = min(needs, key=lambda need: need[0])
    has = float(problem.capacity_bytes.min())
    if short <= 0:
        return "no plan fits: memory, tied parameters and pinned choices exclude one another"
    return (
        f"no plan fits: a device needs at least {format_bytes(has + short)} and has "
        f"{format_bytes(has)}; use more devices, a smaller micro-batch, or allow recomputation"
    )


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """What HiGHS says. `lower` in weighted seconds; inf when there is no (better) plan."""

    lower: float
    winner: int | None
    choice: Choice | None
    nodes: int
    stopped: bool


class _Program:
    """One integer program over some configurations of a search."""

    def __init__(
        self, search: _Search, open_: list[int], form: Form | None, shrink: float, *, bounded: bool, confirm: bool
    ) -> None:
        self.lp = Program("plan")
        self.scale = MILLISECONDS / max(search.weights[j] for j in open_)
        self.parts: dict[int, _Part] = {}
        objective: Terms = []
        for j in open_:
            limit = search.value / search.weights[j]
            problem = thin(search.problems[j])
            frame = windows(problem, limit) if bounded and np.isfinite(limit) else None
            if bounded and np.isfinite(limit) and frame is None:
                continue  # nothing in this configuration is as good
            lower = 0.0 if confirm else search.lower[j] / search.weights[j]
            part = _Part(self.lp, f"c{j}", problem, form, frame, lower, shrink)
            self.parts[j] = part
            weight = self.scale * search.weights[j] / MILLISECONDS
            objective += [(variable, weight * factor) for variable, factor in part.objective]
        if not self.parts:
            return
        self.lp.row([(part.on, 1.0) for part in self.parts.values()], "==", 1.0)
        self.lp.minimise(objective)
        if np.isfinite(search.value) and bounded:
            self.lp.row(objective, "<=", search.value * self.scale * (1 + 1e-9))

    def solve(self, gap: float, node_limit: int, time_limit_seconds: float | None) -> _Outcome:
        """Run HiGHS.

        Raises:
            SolverError: HiGHS ended in a way that says nothing.
        """
        nothing = _Outcome(lower=float("inf"), winner=None, choice=None, nodes=0, stopped=False)
        if not self.parts:
            return nothing
        end = self.lp.solve(gap=gap / 2, node_limit=node_limit, time_limit_seconds=time_limit_seconds)
        if end.lower == float("inf"):
            return nothing
        lower = max(0.0, end.lower / self.scale * (1 - 1e-9)) if np.isfinite(end.lower) else 0.0
        if not end.found:
            return _Outcome(lower=lower, winner=None, choice=None, nodes=end.nodes, stopped=end.stopped)
        winner = max(self.parts, key=lambda j: float(self.parts[j].on.varValue))
        choice = self.parts[winner].choice()
        return _Outcome(lower=lower, winner=winner, choice=choice, nodes=end.nodes, stopped=end.stopped)


class _Part:
    """The variables and rows of one configuration, in milliseconds and GiB."""

    def __init__(
        self,
        lp: Program,
        name: str,
        problem: Problem,
        form: Form | None,
        frame: Windows | None,
        lower_seconds: float,
        shrink_bytes: float,
    ) -> None:
        self.lp, self.name, self.problem = lp, name, problem
        self.units = _units(problem, form)
        self.num_stages = problem.num_stages
        self.blocks = frame or Windows(
            np.zeros(problem.num_blocks, np.int64),
            np.full(problem.num_blocks, problem.num_stages - 1),
            float("inf"),
        )
        self.on = self._variable("on", 1, integer=True)
        self.x = {
            (u, s, p): self._variable(f"x_{u}_{s}_{p}", self._most(u, p), integer=True)
            for u, (first, _) in enumerate(self.units)
            for s in np.flatnonzero(problem.allowed[first]).tolist()
            for p in range(self.num_stages)
            if self._most(u, p)
        }
        # What the cut in front of stage p is, as (variable, sign, cut).
        self.cuts: list[list[tuple[Variable, float, int]]] = [[] for _ in range(self.num_stages)]
        self._add_order()
        self._add_classes()
        self._add_ties()
        self.objective = self._add_seconds()
        self._add_memory(shrink_bytes)
        self._add_limits(lower_seconds)

    def choice(self) -> Choice:
        """The plan the solver found; equal blocks of a stage take strategies in their order."""
        stages: list[int] = []
        strategies: list[int] = []
        for u in range(len(self.units)):
            for p in range(self.num_stages):
                for s in range(self.problem.num_strategies):
                    if (u, s, p) in self.x:
                        number = round(self.x[u, s, p].varValue)
                        stages += [p] * number
                        strategies += [s] * number
        return Choice(stages=tuple(stages), strategies=tuple(strategies))

    def _variable(self, name: str, most: float | None, *, integer: bool = False) -> Variable:
        return self.lp.variable(f"{self.name}_{name}", most, integer=integer)

    def _row(self, terms: Terms, sense: Literal["<=", ">=", "=="], right: float = 0.0) -> None:
        self.lp.row(terms, sense, right)

    def _most(self, u: int, p: int) -> int:
        """How many blocks of unit u may lie on stage p."""
        first, last = self.units[u]
        here = (self.blocks.first_stage[first:last] <= p) & (p <= self.blocks.last_stage[first:last])
        return int(here.sum())

    def _of(self, u: int, p: int, strategies: Iterable[int] | None = None) -> Terms:
        """Blocks of unit u on stage p, of the given strategies."""
        chosen = range(self.problem.num_strategies) if strategies is None else strategies
        return [(self.x[u, s, p], 1.0) for s in chosen if (u, s, p) in self.x]

    def _add_order(self) -> None:
        """Units in order, contiguous, no stage empty. Fills `cuts`."""
        last_stage = self.num_stages - 1
        begun: dict[tuple[int, int], Terms] = {}
        ended: dict[tuple[int, int], Terms] = {}
        for u, (first, last) in enumerate(self.units):
            size = last - first
            before: Terms = []
            for p in range(self.num_stages):
                if p == last_stage:
                    upto: Terms = [(self.on, float(size))]
                else:
                    number = int((self.blocks.first_stage[first:last] <= p).sum())
                    at_least = int((self.blocks.last_stage[first:last] <= p).sum())
                    variable = self._variable(f"N_{u}_{p}", number, integer=True)
                    upto = [(variable, 1.0)]
                    self._row([*upto, (self.on, -float(at_least))], ">=")
                    begun[u, p] = ended[u, p] = upto
                    if size > 1:
                        f = self._variable(f"f_{u}_{p}", 1, integer=True)
                        g = self._variable(f"g_{u}_{p}", 1, integer=True)
                        ended[u, p], begun[u, p] = [(f, 1.0)], [(g, 1.0)]
                        self._row([(f, float(size)), (variable, -1.0)], "<=")
                        self._row([(variable, 1.0), (self.on, 1.0 - size), (f, -1.0)], "<=")
                        self._row([(g, 1.0), (variable, -1.0)], "<=")
                        self._row([(variable, 1.0), (g, -float(size))], "<=")
                self._row([*self._of(u, p), *_less(upto), *before], "==")
                before = upto
        for p in range(self.num_stages):
            held = [term for u in range(len(self.units)) for term in self._of(u, p)]
            self._row([*held, (self.on, -1.0)], ">=")
            for u in range(len(self.units) - 1):
                if p < last_stage:
                    self._row([*begun[u + 1, p], *_less(ended[u, p])], "<=")
                if p + 1 < last_stage:
                    self._row([*ended[u, p], *_less(begun[u + 1, p + 1])], "<=")
        for p in range(last_stage):
            for u, (first, last) in enumerate(self.units):
                if last - first > 1:
                    self._add_cut(p, first, begun[u, p], ended[u, p])
                if u + 1 < len(self.units):
                    self._add_cut(p, last - 1, ended[u, p], begun[u + 1, p])

    def _add_cut(self, p: int, cut: int, begun: Terms, ended: Terms) -> None:
        """The cut behind stage p is `cut` (or one like it) where begun - ended is 1."""
        for terms, sign in ((begun, 1.0), (ended, -1.0)):
            self.cuts[p + 1] += [(variable, sign * factor, cut) for variable, factor in terms]

    def _cut_terms(self, p: int, cost: NDArray[np.float64]) -> Terms:
        """What stage p pays for the cut where it receives."""
        return [(variable, sign * float(cost[cut])) for variable, sign, cut in self.cuts[p]]

    def _add_classes(self) -> None:
        """All strategies of a stage are of one class."""
        of = self.problem.strategy_class
        classes = sorted(set(of.tolist()))
        if self.num_stages == 1 or len(classes) == 1:
            return
        for p in range(self.num_stages):
            takes = {c: self._variable(f"k_{p}_{c}", 1, integer=True) for c in classes}
            self._row([*((k, 1.0) for k in takes.values()), (self.on, -1.0)], "==")
            for u in range(len(self.units)):
                for c, k in takes.items():
                    held = self._of(u, p, np.flatnonzero(of == c).tolist())
                    if held:
                        self._row([*held, (k, -float(self._most(u, p)))], "<=")

    def _add_ties(self) -> None:
        """Blocks that share a parameter take the same ZeRO stage, wherever they are."""
        unit_of = {first: u for u, (first, _) in enumerate(self.units)}
        for j, group in enumerate(self.problem.tie_groups):
            for zero in range(4):
                strategies = np.flatnonzero(self.problem.strategy_zero == zero).tolist()
                taken = self._variable(f"t_{j}_{zero}", 1, integer=True)
                for i in group:
                    held = [term for p in range(self.num_stages) for term in self._of(unit_of[i], p, strategies)]
                    self._row([*held, (taken, -1.0)], "==")

    def _table(self, p: int, table: NDArray[np.float64]) -> Terms:
        """Sum of a table of blocks and strategies over what stage p holds."""
        return [
            (self.x[u, s, p], float(table[first, s]))
            for u, (first, _) in enumerate(self.units)
            for s in range(self.problem.num_strategies)
            if (u, s, p) in self.x
        ]

    def _seconds(self, p: int) -> Terms:
        """T_p in milliseconds."""
        problem = self.problem
        return [
            *self._table(p, problem.seconds * MILLISECONDS),
            *self._cut_terms(p, problem.cut_seconds * MILLISECONDS),
            (self.on, problem.stage_seconds * MILLISECONDS),
        ]

    def _add_seconds(self) -> Terms:
        """The step in milliseconds: the objective."""
        problem = self.problem
        most = self.blocks.most_seconds * MILLISECONDS
        slowest = self._variable("slowest", most if np.isfinite(most) else None)
        synced = self._variable("synced", None)
        objective: Terms = [(slowest, problem.num_microbatches - 1.0), (synced, 1.0)]
        objective.append((self.on, problem.fixed_seconds * MILLISECONDS))
        for p in range(self.num_stages):
            seconds = self._seconds(p)
            objective += seconds
            self._row([*seconds, (slowest, -1.0)], "<=")
            once = self._table(p, problem.sync_seconds * MILLISECONDS)
            self._row([*once, (synced, -1.0)], "<=")
        return objective

    def _add_memory(self, shrink_bytes: float) -> None:
        """What each stage holds fits."""
        problem = self.problem
        for p in range(self.num_stages):
            capacity = float(problem.capacity_bytes[p]) - shrink_bytes - problem.stage_bytes
            each = problem.state_bytes + problem.in_flight[p] * problem.activation_bytes
            working = self._variable(f"W_{p}", None)
            held = [*self._table(p, each / GIB), *self._cut_terms(p, problem.cut_bytes / GIB)]
            self._row([*held, (working, 1.0), (self.on, -capacity / GIB)], "<=")
            self._add_transients(p, working)

    def _add_transients(self, p: int, working: Variable) -> None:
        """`working` is at least the largest transient of what stage p holds."""
        transient = self.problem.transient_bytes
        runs = []
        for u, (first, last) in enumerate(self.units):
            if last - first > 1:
                runs += [(u, s) for s in np.flatnonzero(self.problem.allowed[first]).tolist()]
            else:
                held = [(v, float(transient[first, s]) / GIB) for s, v in self._by_strategy(u, p)]
                self._row([*held, (working, -1.0)], "<=")
        levels = sorted({float(transient[self.units[u][0], s]) for u, s in runs})
        above: list[Variable] = []
        rise: Terms = []
        for level, previous in zip(levels, [0.0, *levels], strict=False):
            at_least = self._variable(f"h_{p}_{len(above)}", 1, integer=True)
            for u in sorted({u for u, _ in runs}):
                first = self.units[u][0]
                high = [s for s in range(self.problem.num_strategies) if transient[first, s] >= level]
                held = self._of(u, p, high)
                if held:
                    self._row([*held, (at_least, -float(self._most(u, p)))], "<=")
            if above:
                self._row([(at_least, 1.0), (above[-1], -1.0)], "<=")
            above.append(at_least)
            rise.append((at_least, (level - previous) / GIB))
        if rise:
            self._row([*rise, (working, -1.0)], "<=")

    def _by_strategy(self, u: int, p: int) -> list[tuple[int, Variable]]:
        return [(s, self.x[u, s, p]) for s in range(self.problem.num_strategies) if (u, s, p) in self.x]

    def _add_limits(self, lower_seconds: float) -> None:
        """The bound of this configuration, as a row: what the relaxation of a choice among several lacks."""
        if lower_seconds > 0:
            least = lower_seconds * MILLISECONDS * (1 - 1e-9)
            self._row([*self.objective, (self.on, -least)], ">=")


def _units(problem: Problem, form: Form | None) -> list[tuple[int, int]]:
    """(first, last + 1) of each unit: runs of equal blocks and equal cuts if they are few, else single blocks."""
    tied = {i for group in problem.tie_groups for i in group}
    tables = (
        problem.seconds, problem.sync_seconds, problem.state_bytes,
        problem.activation_bytes, problem.transient_bytes, problem.allowed,
    )  # fmt: skip
    cuts = (problem.cut_seconds, problem.cut_bytes)
    runs = [(0, 1)]
    for i in range(1, problem.num_blocks):
        first, _ = runs[-1]
        same = all(bool((table[i] == table[first]).all()) for table in tables)
        same &= i not in tied and first not in tied
        # The cut in front of block i must be like the first inside the run.
        same &= i - first < 2 or all(cut[i - 1] == cut[first] for cut in cuts)
        if same:
            runs[-1] = (first, i + 1)
        else:
            runs.append((i, i + 1))
    if form == "counts" or (form is None and len(runs) <= _MAX_RUNS):
        return runs
    return [(i, i + 1) for i in range(problem.num_blocks)]


def _less(terms: Terms) -> Terms:
    return [(variable, -factor) for variable, factor in terms]
