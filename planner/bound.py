"""Lower bounds in numpy: which configurations cannot win, and good plans for those that might.

Works on the intervals of the chain of blocks: stage p holding blocks a..b-1 with strategies of class k is one *option*
(p, a, b, k), and a plan is a path of options from cut 0 to cut L. The step time of a path is

    sum_p T + (m - 1) max_p T + max_p G + fixed

so it is enough to know of every option its least T (seconds per micro-batch) and G (seconds once a step).

1. `_stage_options` bounds T of all options at once by Lagrangian relaxation of the memory row. For a transient level l
   (the largest working set the option may have) and a price lam of memory,
       T >= sum_i min_s (t_is + lam mem_is) - lam (capacity - l)
   which is a difference of prefix sums. The best lam is a ratio of two strategies of one block, so the grid holds
   those. Options with the same multiset of block classes and the same memory are computed once.
2. `_Paths.best` finds the best path exactly: branch and bound on the thresholds max T and max G, each node one shortest
   path. With the bounds of step 1 it gives a lower bound, with feasible selections a plan.
3. `_refine` makes options exact where it matters. Guess that the optimum lies below limit = bound (1 + delta): few
   options can be part of such a plan; for each of them `_front` lists every selection that memory allows with T small
   enough (reduced costs prune all but a few). A path of exact options is an optimum; if there is none below the limit,
   the limit is a lower bound, and delta grows.

Tie groups: every assignment of ZeRO stages to the groups is bounded on its own while there are at most 16; otherwise
the ties are dropped from the bound and plans are made with one ZeRO stage for all groups.

With one stage, m T + G is put in place of T: one option, and no trade between T and G is left.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

WORK = 10_000_000  # labels of one call of `bound`: about two seconds

_SAFE = 1 - 1e-10  # bounds give way by this much to rounding
_NUM_PRICES = 24
_NUM_BALANCED_PRICES = 40
_NUM_LEVELS = 4
_NUM_MEMORY_LEVELS = 32
_MAX_LABELS = 200_000  # of one front
_MANY_LABELS = 200  # from here on dominance pays
_LEVEL_WORK = 200  # labels that a transient level costs per block class
_MAX_TIE_ASSIGNMENTS = 16
_DELTAS = (5e-4, 2e-3, 6e-3, 2e-2, 6e-2, 0.2, 1.0, 10.0)


class Program(Protocol):
    """What a bound reads of the integer program; `planner.problem.Problem` explains each field."""

    @property
    def num_stages(self) -> int: ...  # noqa: D102
    @property
    def num_microbatches(self) -> int: ...  # noqa: D102
    @property
    def seconds(self) -> Floats: ...  # noqa: D102
    @property
    def sync_seconds(self) -> Floats: ...  # noqa: D102
    @property
    def state_bytes(self) -> Floats: ...  # noqa: D102
    @property
    def activation_bytes(self) -> Floats: ...  # noqa: D102
    @property
    def transient_bytes(self) -> Floats: ...  # noqa: D102
    @property
    def cut_seconds(self) -> Floats: ...  # noqa: D102
    @property
    def cut_bytes(self) -> Floats: ...  # noqa: D102
    @property
    def stage_seconds(self) -> float: ...  # noqa: D102
    @property
    def stage_bytes(self) -> float: ...  # noqa: D102
    @property
    def fixed_seconds(self) -> float: ...  # noqa: D102
    @property
    def in_flight(self) -> Ints: ...  # noqa: D102
    @property
    def capacity_bytes(self) -> Floats: ...  # noqa: D102
    @property
    def strategy_zero(self) -> Ints: ...  # noqa: D102
    @property
    def strategy_class(self) -> Ints: ...  # noqa: D102
    @property
    def tie_groups(self) -> tuple[tuple[int, ...], ...]: ...  # noqa: D102
    @property
    def allowed(self) -> Bools: ...  # noqa: D102


@dataclass(frozen=True, kw_only=True)
class Bound:
    """`seconds`: no plan is faster (inf: none fits). `stages`, `strategies`: a plan of `plan_seconds`, if there is one.

    The plan is a proposal: `planner.problem.evaluate` is the judge of its feasibility to the last byte.
    """

    seconds: float
    plan_seconds: float = float("inf")
    stages: tuple[int, ...] | None = None
    strategies: tuple[int, ...] | None = None


class Windows(NamedTuple):
    """What every plan within a limit keeps to: first and last stage of each block, most seconds of a stage."""

    first_stage: Ints  # [L]
    last_stage: Ints  # [L]
    most_seconds: float


def compute_only(program: Program) -> float:
    """A lower bound that ignores memory and balances perfectly; costs microseconds."""
    seconds = np.where(program.allowed, program.seconds, np.inf).min(1)
    synced = np.where(program.allowed, program.sync_seconds, np.inf).min(1)
    m, num_stages = program.num_microbatches, program.num_stages
    if num_stages == 1:
        both = m * program.seconds + program.sync_seconds
        step = float(np.where(program.allowed, both, np.inf).min(1).sum())
        return (step + m * program.stage_seconds + program.fixed_seconds) * _SAFE
    total = float(seconds.sum()) + num_stages * program.stage_seconds
    total += float(np.sort(program.cut_seconds)[: num_stages - 1].sum())
    slowest = max(total / num_stages, float(seconds.max()) + program.stage_seconds)
    synced_most = max(float(synced.sum()) / num_stages, float(synced.max()))
    return (total + (m - 1) * slowest + synced_most + program.fixed_seconds) * _SAFE


def balanced(program: Program) -> float:
    """A lower bound that minds memory and lets every stage hold any share of any block; about a millisecond.

    The step weighs stage p by w_p: sum_p T_p + (m - 1) max_p T_p >= sum_p w_p T_p for all w_p >= 1 that add up to
    P + m - 1. With a price of memory for each stage (step 1 of the module's docstring), each block goes where it costs
    least. The price is the best for a stage with 1/P of the blocks, the weights make all stages cost the same.
    inf where the blocks do not fit however they are spread.
    """
    chain = _Chain(program, program.allowed)
    m, num_stages = chain.m, chain.num_stages
    number = np.bincount(chain.kind, minlength=chain.num_kinds)
    flying, where = np.unique(chain.in_flight, return_inverse=True)
    held = chain.state + flying[:, None, None] * chain.activation  # [W, kinds, S]
    seconds = np.where(chain.allowed, chain.seconds, np.inf)
    room = chain.capacity - chain.stage_bytes - chain.transient.min(where=chain.allowed, initial=np.inf)
    room[1:] -= chain.cut_bytes[1:].min(initial=np.inf) if num_stages > 1 else 0.0
    least_held = np.where(chain.allowed, held[0], np.inf).min(1) @ number
    if room.min() <= 0 or least_held > room.sum() * (1 + 1e-12):
        return float("inf")
    scale = float(seconds.min(1) @ number) / float(room.sum())
    prices = scale * np.concatenate([[0.0], np.logspace(-3, 3, _NUM_BALANCED_PRICES)])
    cost = (seconds + prices[:, None, None] * held[:, None]).min(3)  # [W, prices, kinds]
    chosen = ((cost @ number)[where] / num_stages - prices * room[:, None]).argmax(1)  # [P]
    of_stage = cost[where, chosen]  # [P, kinds]
    even = of_stage @ number
    extra = np.maximum((num_stages + m - 1) / (even * (1 / even).sum()) - 1, 0.0)
    weight = 1 + (m - 1) * (extra / extra.sum() if extra.any() else np.full(num_stages, 1 / num_stages))
    spread = float((weight[:, None] * of_stage).min(0) @ number) - float((weight * prices[chosen] * room).sum())
    per_stage = np.full(num_stages, chain.stage_seconds)
    per_stage[1:] += chain.cut_seconds[1:].min(initial=np.inf) if num_stages > 1 else 0.0
    synced = float(np.where(chain.allowed, chain.synced, np.inf).min(1) @ number) / num_stages
    return (spread + float((weight * per_stage).sum()) + synced + chain.fixed) * _SAFE


def relax(program: Program, *, gap: float = 1e-3, cutoff: float = float("inf")) -> Bound:
    """The cheap bound of step 1 and its plan, in milliseconds: to sort configurations by.

    A program whose bound without ties is above `cutoff` is left at that.
    """
    masks, exact = _tie_masks(program)
    if len(masks) > 1 and np.isfinite(cutoff):
        chain = _Chain(program, program.allowed)
        untied, _, _ = _Paths(chain, [stage.bounds for stage in chain.stage_options()]).best(gap)
        if untied * _SAFE + chain.fixed > cutoff:
            return Bound(seconds=untied * _SAFE + chain.fixed)
    found = [_relaxation(_Chain(program, mask), gap) for mask in masks]
    lower = min(f.lower for f in found) if exact else _relaxation(_Chain(program, program.allowed), gap).lower
    return _best(lower, found)


def bound(
    program: Program,
    *,
    cutoff: float = float("inf"),
    gap: float = 1e-4,
    max_work: int = WORK,
) -> Bound:
    """A lower bound and a plan, within `gap` of each other where `max_work` labels suffice.

    Looks for plans faster than `cutoff` seconds only; when there is none, `seconds` reaches it but for `gap`.
    Deterministic: work is counted, not timed.
    """
    masks, exact = _tie_masks(program)
    chains = [_Chain(program, mask) for mask in masks]
    found = [_relaxation(chain, gap) for chain in chains]
    work = _Work(max_work)
    below = min([cutoff, *(f.plan_seconds for f in found)])
    for j in sorted(range(len(chains)), key=lambda j: (found[j].lower, j)):
        found[j] = _refine(chains[j], found[j], below, gap, work)
        below = min(below, found[j].plan_seconds)
    if exact:
        return _best(min(f.lower for f in found), found)
    # The restricted assignments give plans only; the bound is that without ties.
    untied = _Chain(program, program.allowed)
    start = _relaxation(untied, gap)._replace(plan_seconds=float("inf"), plan=None)
    return _best(_refine(untied, start, below, gap, work).lower, found)


def _best(lower: float, found: "list[_Found]") -> Bound:
    plan_seconds, plan = float("inf"), None
    for f in found:
        if f.plan_seconds < plan_seconds:
            plan_seconds, plan = f.plan_seconds, f.plan
    if plan is None:
        return Bound(seconds=lower)
    return Bound(
        seconds=min(lower, plan_seconds),
        plan_seconds=plan_seconds,
        stages=plan.stages,
        strategies=plan.strategies,
    )


def windows(program: Program, limit: float) -> Windows | None:
    """Where the blocks of any plan of at most `limit` seconds lie; None when there is no such plan."""
    chain = _Chain(program, program.allowed)
    options = [stage.bounds for stage in chain.stage_options()]
    viable = _Paths(chain, options).viable((limit - chain.fixed) * (1 + 1e-9))
    if viable is None:
        return None
    first = np.full(chain.num_blocks, chain.num_stages)
    last = np.full(chain.num_blocks, -1)
    most = 0.0
    for p, (keep, allow) in enumerate(viable):
        marks = np.zeros(chain.num_blocks + 1, np.int64)
        np.add.at(marks, options[p].a[keep], 1)
        np.add.at(marks, options[p].b[keep], -1)
        here = np.cumsum(marks)[:-1] > 0
        first[here] = np.minimum(first[here], p)
        last[here] = np.maximum(last[here], p)
        most = max(most, float(allow.max(initial=0.0)))
    return Windows(first, last, most * (1 + 1e-9))


def least_bytes(program: Program) -> float:
    """The least memory with which, the same on every stage, some plan fits (tie groups ignored)."""
    chain = _Chain(program, program.allowed)
    reach = np.full(chain.num_blocks + 1, np.inf)
    reach[0] = 0.0
    for p in range(chain.num_stages):
        stage = chain.stage(p)
        need = _thriftiest(chain, p, chain.between(stage.a, stage.b)).num_bytes.min(0)
        need = need + chain.stage_bytes + stage.cut_bytes
        following = np.full(chain.num_blocks + 1, np.inf)
        np.minimum.at(following, stage.b, np.maximum(need, reach[stage.a]))
        reach = following
    return float(reach[-1])


class _Plan(NamedTuple):
    stages: tuple[int, ...]
    strategies: tuple[int, ...]


class _Found(NamedTuple):
    """Lower bound of the step and the best plan of one chain, fixed seconds included."""

    lower: float
    plan_seconds: float
    plan: _Plan | None


class _Stage(NamedTuple):
    """The intervals one stage may hold."""

    a: Ints
    b: Ints
    cut_seconds: Floats
    cut_bytes: Floats


class _Options(NamedTuple):
    """The options of one stage, ordered by their end b. Least (or exact) T and G, and how to select."""

    a: Ints
    b: Ints
    k: Ints  # class
    seconds: Floats
    synced: Floats
    pick: Ints  # index into a table of selections; -1: none, a bound only


class _StageOptions(NamedTuple):
    """The options of a stage as bounds, and as selections that fit: `pick` is an index into `selections`."""

    bounds: _Options
    plans: _Options
    selections: list[Ints]  # [kinds] a strategy each


class _Modes(NamedTuple):
    """Every class of strategies with every bin of transient levels (below, level]."""

    classes: Ints  # [K]
    masks: Bools  # [K, kinds, S] what the mode allows
    floor: Floats  # [K, L, L + 1] the least transient of blocks a..b-1


class _Work:
    """A budget of labels."""

    def __init__(self, left: int) -> None:
        self.left = left


class _Chain:
    """One program with its choices restricted to `allowed`, prepared: block classes and intervals."""

    def __init__(self, program: Program, allowed: Bools) -> None:
        self.num_stages = program.num_stages
        self.m = program.num_microbatches
        seconds, synced = program.seconds, program.sync_seconds
        self.stage_seconds = program.stage_seconds
        if self.num_stages == 1:  # m T + G is all that counts
            seconds, synced = self.m * seconds + synced, np.zeros_like(synced)
            self.stage_seconds, self.m = self.m * self.stage_seconds, 1
        self.fixed = program.fixed_seconds
        self.stage_bytes = program.stage_bytes
        self.in_flight = program.in_flight
        self.capacity = program.capacity_bytes
        self.cut_seconds = np.concatenate([[0.0], program.cut_seconds])
        self.cut_bytes = np.concatenate([[0.0], program.cut_bytes])
        self.strategy_class = program.strategy_class
        self.num_classes = int(self.strategy_class.max()) + 1
        self.num_blocks = seconds.shape[0]
        rows = np.concatenate(
            [
                seconds,
                synced,
                program.state_bytes,
                program.activation_bytes,
                program.transient_bytes,
                allowed,
            ],
            axis=1,
        )
        _, first, self.kind = np.unique(rows, axis=0, return_index=True, return_inverse=True)
        self.kind = self.kind.ravel()
        # Tables by block class ("kind") from here on.
        self.seconds, self.synced, self.allowed = seconds[first], synced[first], allowed[first]
        self.state = program.state_bytes[first]
        self.activation = program.activation_bytes[first]
        self.transient = program.transient_bytes[first]
        self.num_kinds = len(first)
        ones = np.zeros((self.num_blocks + 1, self.num_kinds), np.int64)
        ones[np.arange(1, self.num_blocks + 1), self.kind] = 1
        self.counts = ones.cumsum(0)  # [L + 1, kinds]
        self._stage_options: list[_StageOptions] | None = None

    def stage_options(self) -> "list[_StageOptions]":
        """Bounds and selections of every stage, computed once."""
        if self._stage_options is None:
            modes = _modes(self)
            self._stage_options = [_stage_options(self, p, modes) for p in range(self.num_stages)]
        return self._stage_options

    def stage(self, p: int) -> _Stage:
        """All intervals that leave a block for each other stage."""
        num_blocks, after = self.num_blocks, self.num_stages - 1 - p
        starts = np.arange(p, num_blocks - after) if p else np.array([0])
        ends = np.arange(p + 1, num_blocks - after + 1) if after else np.array([num_blocks])
        a, b = (grid.ravel() for grid in np.meshgrid(starts, ends, indexing="ij"))
        keep = (a < b) & (b - a <= num_blocks - self.num_stages + 1)
        a, b = a[keep], b[keep]
        return _Stage(a, b, self.cut_seconds[a], self.cut_bytes[a])

    def between(self, a: Ints, b: Ints) -> Floats:
        """[kinds, n] how many blocks of each kind a..b-1 are: a sum over them is values by kind times this."""
        return np.asarray((self.counts[b] - self.counts[a]).T, np.float64)

    def largest(self, per_kind: Floats) -> Floats:
        """[..., L, L + 1] the largest value over blocks a..b-1."""
        per_block = per_kind[..., self.kind]
        num_blocks = self.num_blocks
        later = np.arange(num_blocks)[None, :] >= np.arange(num_blocks)[:, None]
        table = np.where(later, per_block[..., None, :], 0.0)
        table = np.maximum.accumulate(table, axis=-1)
        return np.concatenate([np.zeros((*table.shape[:-1], 1)), table], axis=-1)


def _tie_masks(program: Program) -> tuple[list[Bools], bool]:
    """The masks of allowed choices to bound one by one, and whether they cover all choices."""
    if not program.tie_groups:
        return [program.allowed], True
    zero = program.strategy_zero
    domains = []
    for group in program.tie_groups:
        rows = program.allowed[list(group)]
        values = [z for z in range(4) if (rows & (zero == z)).any(1).all()]
        domains.append(values)
    exact = bool(np.prod([len(domain) for domain in domains]) <= _MAX_TIE_ASSIGNMENTS)
    assignments: Iterator[tuple[int, ...]] = itertools.product(*domains)
    if not exact:
        same = [z for z in range(4) if all(z in domain for domain in domains)]
        assignments = iter([(z,) * len(domains) for z in same])
    masks = []
    for assignment in assignments:
        mask = program.allowed.copy()
        for group, value in zip(program.tie_groups, assignment, strict=True):
            mask[list(group)] &= zero == value
        masks.append(mask)
    return masks, exact


# Step 1: all options at once.


def _modes(chain: _Chain) -> _Modes:
    classes, masks, below = [], [], []
    for k in range(chain.num_classes):
        ok = chain.allowed & (chain.strategy_class == k)
        if not ok.any():
            continue
        levels = np.unique(chain.transient[ok])
        if len(levels) > _NUM_LEVELS:
            at = np.linspace(0, len(levels) - 1, _NUM_LEVELS + 1).round().astype(int)[1:]
            levels = levels[at]
        previous = 0.0
        for level in levels:
            classes.append(k)
            masks.append(ok & (chain.transient <= level))
            below.append(previous)
            previous = float(level)
    all_masks = np.array(masks).reshape(-1, *chain.allowed.shape)
    usable = all_masks.any(2)
    working = np.where(usable, np.where(all_masks, chain.transient, np.inf).min(2), 0.0)
    floor = np.maximum(chain.largest(working), np.array(below)[:, None, None])
    return _Modes(np.array(classes), all_masks, floor)


class _Thriftiest(NamedTuple):
    """The selections that need least memory."""

    num_bytes: Floats  # [classes, n]
    seconds: Floats  # [classes, n]
    synced: Floats  # [classes, n]
    pick: Ints  # [classes, n] index into selections
    selections: list[Ints]  # [kinds] a strategy each
    exact: bool  # all transient levels were tried


def _thriftiest(chain: _Chain, p: int, blocks: Floats) -> _Thriftiest:
    mem = chain.state + chain.in_flight[p] * chain.activation
    num_bytes = np.full((chain.num_classes, blocks.shape[1]), np.inf)
    seconds, synced = num_bytes.copy(), num_bytes.copy()
    pick = np.zeros(num_bytes.shape, np.int64)
    kinds = np.arange(chain.num_kinds)
    selections: list[Ints] = []
    exact = True
    for k in range(chain.num_classes):
        ok = chain.allowed & (chain.strategy_class == k)
        levels = np.unique(chain.transient[ok])
        if len(levels) > _NUM_MEMORY_LEVELS:
            exact = False
            at = np.linspace(0, len(levels) - 1, _NUM_MEMORY_LEVELS + 1).round().astype(int)[1:]
            levels = levels[at]
        for level in levels:
            usable = np.where(ok & (chain.transient <= level), mem, np.inf)
            least = usable.min(1)
            bad = np.isinf(least)
            total = np.where(bad, 0.0, least) @ blocks + level
            total[bad.astype(float) @ blocks > 0.5] = np.inf
            select = usable.argmin(1)
            sums = np.stack([chain.seconds[kinds, select], chain.synced[kinds, select]]) @ blocks
            better = total < num_bytes[k]
            num_bytes[k, better] = total[better]
            seconds[k, better], synced[k, better] = sums[:, better]
            pick[k, better] = len(selections)
            selections.append(select)
    return _Thriftiest(num_bytes, seconds, synced, pick, selections, exact)


def _prices(seconds: Floats, mem: Floats, masks: Bools) -> Floats:
    """[K, prices] of memory, zero first: where the cheapest strategy of some block changes."""
    faster = seconds[:, None, :] - seconds[:, :, None]  # [kinds, S, S]
    smaller = mem[:, :, None] - mem[:, None, :]
    with np.errstate(divide="ignore", invalid="ignore"):
        slope = np.where((faster > 0) & (smaller > 0), faster / smaller, np.inf)
    both = masks[:, :, :, None] & masks[:, :, None, :]
    slopes = np.sort(np.where(both, slope, np.inf).reshape(len(masks), -1), axis=1)
    number = np.isfinite(slopes).sum(1)
    at = np.linspace(0.0, 1.0, _NUM_PRICES)[None, :] * np.maximum(number - 1, 0)[:, None]
    if slopes.shape[1] <= _NUM_PRICES:
        at = np.broadcast_to(np.arange(slopes.shape[1])[None, :], (len(masks), slopes.shape[1]))
    chosen = np.take_along_axis(slopes, at.round().astype(int), axis=1)
    chosen = np.where(np.isfinite(chosen), chosen, 0.0)
    return np.concatenate([np.zeros((len(masks), 1)), chosen], axis=1)


def _stage_options(chain: _Chain, p: int, modes: _Modes) -> _StageOptions:
    """Lower bounds of T and G, and the fastest selection found, for every option of stage p."""
    stage = chain.stage(p)
    classes, masks, floor = modes
    mem = chain.state + chain.in_flight[p] * chain.activation
    capacity = chain.capacity[p] - chain.stage_bytes - stage.cut_bytes
    # Intervals with the same blocks and the same memory are one.
    _, signature = np.unique(capacity, return_inverse=True)
    if (chain.num_blocks + 1.0) ** (chain.num_kinds + 1) < 2.0**63:  # one number each: a sort of rows takes much longer
        for count in (chain.counts[stage.b] - chain.counts[stage.a]).T:
            signature = signature * (chain.num_blocks + 1) + count
        _, first, inverse = np.unique(signature, return_index=True, return_inverse=True)
    else:
        first = inverse = np.arange(len(stage.a))
    a, b, room = stage.a[first], stage.b[first], capacity[first]
    blocks = chain.between(a, b)

    prices = _prices(chain.seconds, mem, masks)  # [K, prices]
    usable = np.asarray(masks.any(2))  # [K, kinds]
    priced = chain.seconds + prices[:, :, None, None] * mem  # [K, prices, kinds, S]
    priced = np.where(masks[:, None], priced, np.inf)
    cheapest = np.where(usable[:, None], priced.min(3), 0.0)
    select = priced.argmin(3)  # [K, prices, kinds]
    kinds = np.arange(chain.num_kinds)
    fits = (~usable).astype(float) @ blocks < 0.5  # [K, n]
    least = np.where(usable, np.where(masks, mem, np.inf).min(2), 0.0)
    budget = room[None] - floor[:, a, b]  # [K, n]
    fits &= least @ blocks <= budget + 1e-9 * np.abs(room)[None]
    dual = cheapest @ blocks - prices[:, :, None] * budget[:, None]  # [K, prices, n]
    lower = np.where(fits, dual.max(1), np.inf)
    synced = np.where(usable, np.where(masks, chain.synced, np.inf).min(2), 0.0)
    synced = synced @ blocks

    # Selections that fit: the fastest over the prices.
    level = np.where(masks, chain.transient, 0.0).max((1, 2))
    held = mem[kinds, select] @ blocks
    took = chain.seconds[kinds, select] @ blocks
    once = chain.synced[kinds, select] @ blocks
    good = (held <= (room[None] - level[:, None])[:, None]) & fits[:, None]
    took = np.where(good, took, np.inf)
    at = took.argmin(1)[:, None]
    took = np.take_along_axis(took, at, axis=1)[:, 0]
    once = np.take_along_axis(once, at, axis=1)[:, 0]

    thrifty = _thriftiest(chain, p, blocks)
    column = np.arange(len(first))
    selections = [*select.reshape(-1, chain.num_kinds), *thrifty.selections]
    extra = stage.cut_seconds + chain.stage_seconds
    bounds, plans = [], []
    for k in np.unique(classes):
        rows = np.flatnonzero(classes == k)
        if not fits[rows].any():
            continue
        of_class = np.full(len(stage.a), k)
        fit = thrifty.num_bytes[k] <= room
        seconds = lower[rows].min(0)
        if thrifty.exact:
            seconds = np.where(thrifty.num_bytes[k] <= room * (1 + 1e-12), seconds, np.inf)
        seconds = seconds[inverse] + extra
        once_least = synced[rows[-1]][inverse]  # the last bin allows most
        bounds.append((stage.a, stage.b, of_class, seconds, once_least, np.full(len(seconds), -1)))
        fastest = rows[took[rows].argmin(0)]
        pick = fastest * prices.shape[1] + at[fastest, 0, column]
        picked_seconds, picked_synced = took[fastest, column], once[fastest, column]
        # Where no price gives a selection that fits, the one that needs least may.
        spare = fit & np.isinf(picked_seconds)
        pick[spare] = masks.shape[0] * prices.shape[1] + thrifty.pick[k][spare]
        picked_seconds[spare] = thrifty.seconds[k][spare]
        picked_synced[spare] = thrifty.synced[k][spare]
        seconds, once_picked = picked_seconds[inverse] + extra, picked_synced[inverse]
        plans.append((stage.a, stage.b, of_class, seconds, once_picked, pick[inverse]))
    return _StageOptions(_ordered(bounds), _ordered(plans), selections)


def _ordered(parts: Sequence[tuple[NDArray[Any], ...]]) -> _Options:
    """The parts as one set of options ordered by (b, a, class), infinite ones left out."""
    if not parts:
        none = np.zeros(0, np.int64)
        return _Options(none, none, none, np.zeros(0), np.zeros(0), none)
    a, b, k, seconds, synced, pick = (np.concatenate(column) for column in zip(*parts, strict=True))
    keep = np.flatnonzero(np.isfinite(seconds))
    order = keep[np.lexsort((k[keep], a[keep], b[keep]))]
    return _Options(a[order], b[order], k[order], seconds[order], synced[order], pick[order])


# Step 2: the best path of options.


class _Paths:
    """Shortest paths over the options of all stages."""

    def __init__(self, chain: _Chain, options: list[_Options]) -> None:
        self.options = options
        self.num_blocks = chain.num_blocks
        self.weight = chain.m - 1  # of the slowest stage
        self.starts = [np.flatnonzero(np.diff(o.b, prepend=-1)) for o in options]
        self.steps = 0
        seconds = np.concatenate([o.seconds for o in options])
        self.all_seconds = np.unique(seconds)
        self.all_synced = np.unique(np.concatenate([o.synced for o in options]))

    def shortest(self, most: float, most_synced: float) -> tuple[float, list[int]]:
        """Least sum of T over paths with T <= most and G <= most_synced; the option of each stage."""
        reach = np.full(self.num_blocks + 1, np.inf)
        reach[0] = 0.0
        values = []
        for option, starts in zip(self.options, self.starts, strict=True):
            ok = (option.seconds <= most) & (option.synced <= most_synced)
            value = np.where(ok, reach[option.a] + option.seconds, np.inf)
            reach = np.full(self.num_blocks + 1, np.inf)
            if len(value):
                reach[option.b[starts]] = np.minimum.reduceat(value, starts)
            values.append(value)
        self.steps += 1
        total = float(reach[-1])
        if not np.isfinite(total):
            return total, []
        end, path = self.num_blocks, []
        for option, value in zip(reversed(self.options), reversed(values), strict=True):
            low, high = np.searchsorted(option.b, (end, end + 1))
            chosen = int(low + value[low:high].argmin())
            path.append(chosen)
            end = int(option.a[chosen])
        return total, path[::-1]

    def smallest_peak(self, *, of_synced: bool, most_synced: float = float("inf")) -> float:
        """The least possible max T (or max G) over paths."""
        reach = np.full(self.num_blocks + 1, np.inf)
        reach[0] = 0.0
        for option, starts in zip(self.options, self.starts, strict=True):
            value = option.synced if of_synced else option.seconds
            value = np.where(option.synced <= most_synced, value, np.inf)
            value = np.maximum(value, reach[option.a])
            reach = np.full(self.num_blocks + 1, np.inf)
            if len(value):
                reach[option.b[starts]] = np.minimum.reduceat(value, starts)
        return float(reach[-1])

    def peak(self, path: list[int], *, of_synced: bool = False) -> float:
        """Max T (or max G) of a path."""
        return max(float((o.synced if of_synced else o.seconds)[j]) for o, j in zip(self.options, path, strict=True))

    def best(self, tolerance: float) -> tuple[float, float, list[int]]:
        """(lower bound, value, path) of the least sum T + (m - 1) max T + max G, relative tolerance."""
        least = self.smallest_peak(of_synced=True)
        if not np.isfinite(least):
            return float("inf"), float("inf"), []
        values = self.all_synced[self.all_synced >= least]
        best, best_path = float("inf"), []
        closed = float("inf")  # least bound among the nodes given up as good enough
        nodes: list[tuple[float, int, int]] = [(least, 0, len(values) - 1)]
        while nodes:
            lower, low, high = heapq.heappop(nodes)
            if lower >= best * (1 - tolerance):
                closed = min(closed, lower)
                break
            balanced, value, path = self._balanced(float(values[high]), tolerance / 2)
            if not path:
                continue
            reached = self.peak(path, of_synced=True)
            if value + reached < best:
                best, best_path = value + reached, path
            # Paths with max G in [values[low], reached): better only by a smaller G.
            closed = min(closed, balanced + reached)
            high = int(np.searchsorted(values, reached)) - 1
            if high >= low:
                middle = (low + high + 1) // 2
                heapq.heappush(nodes, (balanced + float(values[middle]), middle, high))
                if middle > low:
                    heapq.heappush(nodes, (balanced + float(values[low]), low, middle - 1))
        return min(closed, best), best, best_path

    def _balanced(self, most_synced: float, tolerance: float) -> tuple[float, float, list[int]]:
        """(lower bound, value, path) of the least sum T + (m - 1) max T with G <= most_synced."""
        total, path = self.shortest(float("inf"), most_synced)
        if not path:
            return float("inf"), float("inf"), []
        slowest = self.peak(path)
        best, best_path = total + self.weight * slowest, path
        least = self.smallest_peak(of_synced=False, most_synced=most_synced)
        if self.weight == 0 or least >= slowest:
            return best, best, best_path
        values = self.all_seconds
        low = int(np.searchsorted(values, least))
        high = int(np.searchsorted(values, slowest)) - 1
        # Node: thresholds values[low..high] are open, every path under values[high + 1] sums to >= total.
        nodes = [(total + self.weight * least, low, high, total)]
        closed = best
        while nodes:
            lower, low, high, total = heapq.heappop(nodes)
            if lower >= best * (1 - tolerance):
                closed = min(closed, lower)
                break
            middle = (low + high) // 2
            under, path = self.shortest(float(values[middle]), most_synced)
            if middle < high:
                node = total + self.weight * float(values[middle + 1])
                heapq.heappush(nodes, (node, middle + 1, high, total))
            if not path:
                continue
            slowest = self.peak(path)
            if under + self.weight * slowest < best:
                best, best_path = under + self.weight * slowest, path
            reached = int(np.searchsorted(values, slowest)) - 1
            if reached >= low:
                node = under + self.weight * float(values[low])
                heapq.heappush(nodes, (max(lower, node), low, reached, under))
        return min(closed, best), best, best_path

    def viable(self, limit: float) -> list[tuple[Ints, Floats]] | None:
        """Per stage, the options that a path of at most `limit` may hold, and the T each may have."""
        forward = [np.full(self.num_blocks + 1, np.inf)]
        forward[0][0] = 0.0
        for option, starts in zip(self.options, self.starts, strict=True):
            value = forward[-1][option.a] + option.seconds
            forward.append(np.full(self.num_blocks + 1, np.inf))
            if len(value):
                forward[-1][option.b[starts]] = np.minimum.reduceat(value, starts)
        if not np.isfinite(forward[-1][-1]):
            return None
        backward = [np.full(self.num_blocks + 1, np.inf)]
        backward[0][-1] = 0.0
        for option in reversed(self.options):
            value = backward[-1][option.b] + option.seconds
            backward.append(np.full(self.num_blocks + 1, np.inf))
            np.minimum.at(backward[-1], option.a, value)
        backward.reverse()
        slowest = self.smallest_peak(of_synced=False)
        synced = self.smallest_peak(of_synced=True)
        kept = []
        for p, option in enumerate(self.options):
            left = limit - forward[p][option.a] - backward[p + 1][option.b]
            left -= np.maximum(option.synced, synced)
            # T + (m - 1) max(T, slowest) <= left
            under = left - self.weight * slowest
            allow = np.where(under <= slowest, under, left / (1 + self.weight))
            keep = np.flatnonzero(option.seconds <= allow)
            if not len(keep):
                return None
            kept.append((keep, allow[keep]))
        return kept


def _relaxation(chain: _Chain, gap: float) -> _Found:
    """Bound and plan from the Lagrangian options alone."""
    stages = chain.stage_options()
    lower, _, _ = _Paths(chain, [stage.bounds for stage in stages]).best(gap)
    if not np.isfinite(lower):
        return _Found(lower, float("inf"), None)
    plans = [stage.plans for stage in stages]
    _, value, path = _Paths(chain, plans).best(max(gap, 1e-3))
    if not path:
        return _Found(lower * _SAFE + chain.fixed, float("inf"), None)
    stage_of, strategies = [], []
    for p, j in enumerate(path):
        select = stages[p].selections[int(plans[p].pick[j])]
        for i in range(int(plans[p].a[j]), int(plans[p].b[j])):
            stage_of.append(p)
            strategies.append(int(select[chain.kind[i]]))
    plan = _Plan(tuple(stage_of), tuple(strategies))
    return _Found(lower * _SAFE + chain.fixed, value + chain.fixed, plan)


# Step 3: exact options where they matter.


class _Key(NamedTuple):
    """What the selections of an option depend on."""

    counts: tuple[int, ...]  # blocks of each kind
    in_flight: int
    room: float  # bytes
    k: int  # class


class _Point(NamedTuple):
    """One selection of an option: T, G (without the stage's constants) and how many of each."""

    seconds: float
    synced: float
    counts: Ints  # [kinds of the interval, S]


def _refine(chain: _Chain, start: _Found, below: float, gap: float, work: _Work) -> _Found:
    """The optimum among plans faster than `below`, or a lower bound as far as the work allows."""
    lower, plan_seconds, plan = start
    if lower >= below * (1 - gap) or not np.isfinite(lower):
        return start
    options = [stage.bounds for stage in chain.stage_options()]
    paths = _Paths(chain, options)
    fronts: dict[_Key, tuple[float, list[_Point]]] = {}
    base = lower
    below = min(below, plan_seconds)
    for delta in _DELTAS:
        limit = min(base * (1 + delta), below)
        viable = paths.viable((limit - chain.fixed) * (1 + 1e-9))
        if viable is None:
            lower = max(lower, limit)
        else:
            refined = _refined_options(chain, options, viable, fronts, work)
            if refined is None:
                break
            exact, points = refined
            found, value, path = _Paths(chain, exact).best(gap / 4)
            found, value = found * _SAFE + chain.fixed, value + chain.fixed
            lower = max(lower, min(found, limit))
            if value < plan_seconds:
                plan_seconds, plan = value, _decoded(chain, exact, points, path)
        if limit >= below or lower >= min(below, plan_seconds) * (1 - gap):
            break
    return _Found(lower, plan_seconds, plan)


def _refined_options(
    chain: _Chain,
    options: list[_Options],
    viable: list[tuple[Ints, Floats]],
    fronts: dict[_Key, tuple[float, list[_Point]]],
    work: _Work,
) -> tuple[list[_Options], list[_Point]] | None:
    """The viable options with every selection they may have; None when the work runs out."""
    keys: list[list[_Key]] = []
    most: dict[_Key, float] = {}
    for p, (keep, allow) in enumerate(viable):
        option = options[p]
        a, b, k = option.a[keep], option.b[keep], option.k[keep]
        counts = chain.counts[b] - chain.counts[a]
        room = chain.capacity[p] - chain.stage_bytes - chain.cut_bytes[a]
        own = allow - chain.cut_seconds[a] - chain.stage_seconds
        flight = int(chain.in_flight[p])
        here = [
            _Key(tuple(row), flight, free, cls)
            for row, free, cls in zip(counts.tolist(), room.tolist(), k.tolist(), strict=True)
        ]
        keys.append(here)
        for key, value in zip(here, own, strict=True):
            most[key] = max(most.get(key, 0.0), float(value))
    for key, allow_most in most.items():
        known = fronts.get(key)
        if known is None or known[0] < allow_most:
            front = _front(chain, key, allow_most, work)
            if front is None:
                return None
            fronts[key] = (allow_most, front)
    points: list[_Point] = []
    first: dict[_Key, int] = {}
    for key in most:
        first[key] = len(points)
        points += fronts[key][1]
    exact = []
    for p, (keep, allow) in enumerate(viable):
        option = options[p]
        rows = []
        for j, key, value in zip(keep, keys[p], allow, strict=True):
            extra = chain.cut_seconds[option.a[j]] + chain.stage_seconds
            for offset, point in enumerate(fronts[key][1]):
                if point.seconds + extra <= value * (1 + 1e-12):
                    pick = first[key] + offset
                    row = (option.a[j], option.b[j], option.k[j])
                    rows.append((*row, point.seconds + extra, point.synced, pick))
        columns = tuple(np.array(column) for column in zip(*rows, strict=True))
        exact.append(_ordered([columns] if rows else []))
    return exact, points


def _front(chain: _Chain, key: _Key, allow: float, work: _Work) -> list[_Point] | None:
    """Every undominated (T, G) of an option with T <= allow that memory allows; None: too many."""
    counts = np.array(key.counts)
    kinds = np.flatnonzero(counts)
    number = counts[kinds]
    seconds, synced = chain.seconds[kinds], chain.synced[kinds]
    transient = chain.transient[kinds]
    mem = chain.state[kinds] + key.in_flight * chain.activation[kinds]
    ok = chain.allowed[kinds] & (chain.strategy_class == key.k)
    working = np.where(ok, transient, np.inf).min(1).max()
    found: list[_Point] = []
    for level in np.unique(transient[ok]):
        if level < working:
            continue
        work.left -= _LEVEL_WORK
        usable = ok & (transient <= level)
        budget = key.room - float(level)
        if (number * np.where(usable, mem, np.inf).min(1)).sum() > budget:
            continue
        price = _best_price(number, seconds, mem, usable, budget)
        reduced = np.where(usable, seconds + price * mem, np.inf)
        least = reduced.min(1)
        slack = allow - float((number * least).sum()) + price * budget
        slack += 1e-9 * abs(allow)
        if slack < 0:
            continue
        work.left -= _LEVEL_WORK * len(kinds)
        labels = _labels(number, seconds, synced, mem, reduced - least[:, None], slack, work)
        if labels is None:
            return None
        took, once, held, _ = labels
        good = np.flatnonzero((held <= budget) & (took <= allow * (1 + 1e-9)))
        order = good[np.lexsort((once[good], took[good]))]
        lowest = np.inf
        for j in order:
            if once[j] < lowest:
                lowest = once[j]
                counts_j = labels.counts(int(j), seconds.shape)
                found.append(_Point(float(took[j]), float(once[j]), counts_j))
    found.sort(key=lambda point: (point.seconds, point.synced, point.counts.tolist()))
    kept: list[_Point] = []
    for point in found:
        if not kept or point.synced < kept[-1].synced:
            kept.append(point)
    return kept


class _Labels(NamedTuple):
    """Sums over the blocks of an option, one for each way to give them strategies."""

    seconds: Floats
    synced: Floats
    num_bytes: Floats
    # How they came about: (kind, strategy, which label of the step before, how many blocks).
    steps: list[tuple[int, int, Ints, Ints]]

    def counts(self, j: int, shape: tuple[int, ...]) -> Ints:
        """[kinds, S] how many blocks take which strategy in label j."""
        counts = np.zeros(shape, np.int64)
        for c, s, index, take in reversed(self.steps):
            counts[c, s] = take[j]
            j = int(index[j])
        return counts


def _best_price(number: Ints, seconds: Floats, mem: Floats, usable: Bools, budget: float) -> float:
    """The price of memory with the largest Lagrangian bound; exact, for it is a slope."""
    faster = seconds[:, None, :] - seconds[:, :, None]
    smaller = mem[:, :, None] - mem[:, None, :]
    both = usable[:, :, None] & usable[:, None, :] & (faster > 0) & (smaller > 0)
    prices = np.unique(np.concatenate([[0.0], faster[both] / smaller[both]]))

    def dual(price: float) -> float:
        least = np.where(usable, seconds + price * mem, np.inf).min(1)
        return float((number * least).sum()) - price * budget

    low, high = 0, len(prices) - 1
    while low < high:  # the dual is concave
        middle = (low + high) // 2
        if dual(prices[middle]) < dual(prices[middle + 1]):
            low = middle + 1
        else:
            high = middle
    return float(prices[low])


def _labels(
    number: Ints,
    seconds: Floats,
    synced: Floats,
    mem: Floats,
    reduced: Floats,
    slack: float,
    work: _Work,
) -> _Labels | None:
    """Every way to give strategies to the blocks whose reduced costs add up to at most `slack`."""
    took, once, held, spent = (np.zeros(1) for _ in range(4))
    steps: list[tuple[int, int, Ints, Ints]] = []
    within = reduced <= slack
    for c in np.argsort(-number, kind="stable"):
        left = np.full(len(took), number[c])
        order = [s for s in np.argsort(-reduced[c], kind="stable") if within[c, s]]
        for s in order[:-1]:
            if reduced[c, s] > 0:
                most = np.minimum((slack - spent) / reduced[c, s] + 1e-9, left).astype(np.int64)
            else:
                most = left
            ends = np.cumsum(most + 1)
            total = int(ends[-1])
            work.left -= total
            if total > _MAX_LABELS or work.left < 0:
                return None
            index = np.repeat(np.arange(len(left)), most + 1)
            take = np.arange(total) - (ends - most - 1)[index]
            took = took[index] + take * seconds[c, s]
            once = once[index] + take * synced[c, s]
            held = held[index] + take * mem[c, s]
            spent = spent[index] + take * reduced[c, s]
            left = left[index] - take
            steps.append((int(c), int(s), index, take))
        s = order[-1]
        took = took + left * seconds[c, s]
        once = once + left * synced[c, s]
        held = held + left * mem[c, s]
        spent = spent + left * reduced[c, s]
        keep = np.flatnonzero(spent <= slack)
        if len(keep) > _MANY_LABELS:
            keep = keep[_undominated(took[keep], once[keep], held[keep])]
        took, once, held, spent = took[keep], once[keep], held[keep], spent[keep]
        steps.append((int(c), int(s), keep, left[keep]))
    return _Labels(took, once, held, steps)


def _undominated(took: Floats, once: Floats, held: Floats) -> Ints:
    """Indices of labels that no other equals or beats in all three."""
    order = np.lexsort((once, held, took))
    took, once, held = took[order], once[order], held[order]
    if np.ptp(once) <= 1e-12 * np.abs(once).max():  # two criteria left
        least = np.minimum.accumulate(np.concatenate([[np.inf], held[:-1]]))
        return np.asarray(order[held < least])
    kept: list[Ints] = []
    kept_once, kept_held = np.zeros(0), np.zeros(0)
    for start in range(0, len(order), 256):
        part = np.arange(start, min(start + 256, len(order)))
        beaten = (kept_held[None] <= held[part, None]) & (kept_once[None] <= once[part, None])
        part = part[~beaten.any(1)]
        earlier = (held[part][None] <= held[part][:, None]) & (once[part][None] <= once[part][:, None])
        part = part[~(earlier & np.tri(len(part), k=-1, dtype=bool)).any(1)]
        kept.append(part)
        kept_once = np.concatenate([kept_once, once[part]])
        kept_held = np.concatenate([kept_held, held[part]])
    return np.asarray(order[np.concatenate(kept)])


def _decoded(chain: _Chain, options: list[_Options], points: list[_Point], path: list[int]) -> _Plan:
    """The plan of a path of exact options; equal blocks of a stage take strategies in their order."""
    stages, strategies = [], []
    for p, j in enumerate(path):
        a, b = int(options[p].a[j]), int(options[p].b[j])
        counts = chain.counts[b] - chain.counts[a]
        kinds = np.flatnonzero(counts)
        chosen = points[int(options[p].pick[j])].counts
        queue = {int(kind): list(np.repeat(np.arange(chosen.shape[1]), chosen[row])) for row, kind in enumerate(kinds)}
        for i in range(a, b):
            stages.append(p)
            strategies.append(int(queue[int(chain.kind[i])].pop(0)))
    return _Plan(tuple(stages), tuple(strategies))
