"""Measured beside predicted, term by term, and what that corrects in later predictions.

The terms of a step, in seconds of the mean rank, add up to it:

    forward, backward  the passes, without what they wait for; recomputation is part of backward
    collectives        communication that nothing hides, with the copies around it; predictions count the sum of the
                       micro-batches' gradients as well, which a run has in backward
    optimizer          its step
    data               checking, splitting and weighing the batch; nothing is predicted
    idle               waiting for other ranks: the bubble of a pipeline, and ranks that are late
    rest               what no timer sees, such as Python between the phases; nothing is predicted

What a collective took on the rank that came last is its transfer; the others waited for that one before.
"""

import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from planner.costs import Costs
from planner.errors import PlanError, RunError
from planner.plan import Plan, write_atomically
from planner.profile import Machine, RunRow, read_row
from planner.units import format_seconds

RECORD_VERSION = 1
TERMS = ("forward", "backward", "collectives", "optimizer", "data", "idle", "rest")
PHASES = ("data", "forward", "backward", "sync", "optimizer")  # that timers see; `rest` is what is outside of them
CORRECTED = ("forward", "backward", "collectives", "optimizer")
_LARGEST_FACTOR = 20.0  # of a correction: what is further off is another thing than was priced
_LEAST_SECONDS = 1e-6  # of a term that a factor can correct
_CLOSE = 0.05
_AGAIN = "record it again with autoplan run --record"


class Work(NamedTuple):
    """One collective as a rank saw it: the phase it was in, its name, seconds from its call to its end."""

    phase: str
    name: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a profiler saw of one step of one rank, in seconds by phase.

    `exposed` is communication beside no computation, waiting included; `copies` are those around it.
    """

    exposed: Mapping[str, float]
    copies: Mapping[str, float]
    works: Sequence[Work]


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """Medians of one rank over its steps, in seconds by phase.

    `collectives` and `idle` are parts of the phases, and `rest` beside them; None where no step was sampled.
    """

    phases: Mapping[str, float]
    collectives: Mapping[str, float] | None
    idle: Mapping[str, float] | None
    peak_bytes: float | None


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run by a plan measured. `step_seconds` are of its slowest rank, each step; warm-up is left out.

    `between_seconds` is the median time between two steps, in which the loop makes the next batch. `spread` is the
    distance of the quartiles of the steps over the median.
    """

    plan: Plan
    machine: Machine | None
    step_seconds: tuple[float, ...]
    between_seconds: float
    ranks: tuple[RankRecord, ...]
    memory_kind: str

    @property
    def step(self) -> float:
        """The median step, in seconds."""
        return statistics.median(self.step_seconds)

    @property
    def spread(self) -> float:
        """As above; 0 of one step."""
        if len(self.step_seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.step_seconds, n=4, method="inclusive")
        return (high - low) / self.step

    def terms(self) -> dict[str, float | None]:
        """Seconds of each term; None for what needs a sampled step and has none.

        Without samples `forward` and `backward` include what they waited for.
        """
        found: dict[str, float | None] = dict.fromkeys(TERMS, 0.0)
        is_sampled = all(rank.collectives is not None for rank in self.ranks)
        for name in ("forward", "backward", "optimizer", "data"):
            found[name] = statistics.fmean(
                max(0.0, rank.phases.get(name, 0.0) - (_waited(rank, name) if is_sampled else 0.0))
                for rank in self.ranks
            )
        found["collectives"] = statistics.fmean(_sum(r.collectives) for r in self.ranks) if is_sampled else None
        found["idle"] = statistics.fmean(_sum(r.idle) for r in self.ranks) if is_sampled else None
        known = sum(value for value in found.values() if value is not None)
        found["rest"] = max(0.0, self.step - known)
        return found

    def to_dict(self) -> dict[str, Any]:
        """As plain data: seconds, bytes."""
        return {
            "record_version": RECORD_VERSION,
            "plan_digest": plan_digest(self.plan),
            "machine": None if self.machine is None else asdict(self.machine),
            "step_seconds": list(self.step_seconds),
            "between_seconds": self.between_seconds,
            "memory_kind": self.memory_kind,
            "ranks": [
                {
                    "phases": dict(rank.phases),
                    "collectives": None if rank.collectives is None else dict(rank.collectives),
                    "idle": None if rank.idle is None else dict(rank.idle),
                    "peak_bytes": rank.peak_bytes,
                }
                for rank in self.ranks
            ],
            "plan": self.plan.to_dict(),
        }

    def save(self, path: str | Path) -> None:
        """Write atomically: the file is whole or not there.

        Raises:
            RunError: the folder does not exist or cannot be written.
        """
        try:
            write_atomically(Path(path), json.dumps(self.to_dict(), indent=1) + "\n")
        except PlanError as error:
            raise RunError(str(error)) from None

    @classmethod
    def from_dict(cls, data: object, *, origin: str = "the record") -> "RunRecord":
        """Read plain data back.

        Raises:
            RunError: it is no record of this version, or of another plan than it says; the first faults are named.
        """
        if not isinstance(data, Mapping) or "record_version" not in data:
            raise RunError(f"{origin} is no record of a run; {_AGAIN}")
        if data["record_version"] != RECORD_VERSION:
            raise RunError(
                f"{origin} has record version {json.dumps(data['record_version'])[:40]}, this release reads "
                f"{RECORD_VERSION}; {_AGAIN}"
            )
        faults: list[str] = []
        try:
            plan = Plan.loads(json.dumps(data.get("plan")), origin="its plan")
        except PlanError as error:
            raise RunError(f"{origin} is broken: {error}") from None
        machine = None if data.get("machine") is None else read_row(Machine, data["machine"], "machine", faults)
        steps = _numbers(data.get("step_seconds"), "step_seconds", faults)
        between = _number(data.get("between_seconds"), "between_seconds", faults)
        kind = data.get("memory_kind")
        if not isinstance(kind, str):
            faults.append("memory_kind must be text")
        rows = data.get("ranks")
        rows = rows if isinstance(rows, list) else []
        if len(rows) != plan.devices:
            faults.append(f"ranks has {len(rows)} entries, the plan {plan.devices} devices")
        ranks = tuple(_read_rank(row, f"ranks[{index}]", faults) for index, row in enumerate(rows))
        if data.get("plan_digest") != plan_digest(plan):
            faults.append("plan_digest is not that of its plan")
        if faults:
            more = f"; and {len(faults) - 5} more" if len(faults) > 5 else ""
            raise RunError(f"{origin} is broken: {'; '.join(faults[:5])}{more}; {_AGAIN}")
        return cls(
            plan=plan, machine=machine, step_seconds=tuple(steps), between_seconds=between, ranks=ranks,
            memory_kind=str(kind),
        )  # fmt: skip

    @classmethod
    def load(cls, path: str | Path) -> "RunRecord":
        """Read a record's file.

        Raises:
            RunError: the file is missing, broken or of another version.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # a ValueError: no UTF-8, or a null byte in the path
            reason = getattr(error, "strerror", None) or "not a text file"
            raise RunError(f"cannot read the record {path}: {reason}") from None
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RunError(f"{path} is no JSON ({error}), so it is truncated or no record; {_AGAIN}") from None
        return cls.from_dict(data, origin=str(path))


def plan_digest(plan: Plan) -> str:
    """SHA-256 of a plan's file."""
    return hashlib.sha256(plan.dumps().encode()).hexdigest()


def rank_record(
    phases: Sequence[Mapping[str, float]],
    samples: Sequence[Sequence[Sample]],
    rank: int,
    *,
    num_ranks: int,
    peak_bytes: float | None,
) -> RankRecord:
    """The medians of a rank: of its steps' `phases`, and of the `samples` [sampled step][rank] of all ranks.

    A step has its whole under the name "".

    With one rank there is nothing to sample: it communicates with no one.
    """
    of_phases = {name: statistics.median([step.get(name, 0.0) for step in phases] or [0.0]) for name in PHASES}
    if not samples:
        nothing: dict[str, float] | None = {} if num_ranks == 1 else None
        return RankRecord(phases=of_phases, collectives=nothing, idle=nothing, peak_bytes=peak_bytes)
    collectives, idle = [], []
    for step in samples:
        share = idle_shares([sample.works for sample in step])[rank]
        mine = step[rank]
        names = {*mine.exposed, *mine.copies}
        idle.append({name: mine.exposed.get(name, 0.0) * share.get(name, 0.0) for name in names})
        collectives.append(
            {name: mine.exposed.get(name, 0.0) - idle[-1][name] + mine.copies.get(name, 0.0) for name in names}
        )
    whole = statistics.median([step.get("", 0.0) for step in phases] or [0.0])
    room = {**of_phases, "rest": max(0.0, whole - sum(of_phases.values()))}
    talked, waited = _medians(collectives), _medians(idle)
    # The sampled steps are others than those of the medians: a phase has no more of them than it took.
    for name in talked:
        seconds = talked[name] + waited[name]
        part = min(1.0, room.get(name, 0.0) / seconds) if seconds > 0 else 1.0
        talked[name], waited[name] = part * talked[name], part * waited[name]
    return RankRecord(phases=of_phases, collectives=talked, idle=waited, peak_bytes=peak_bytes)


def idle_shares(works: Sequence[Sequence[Work]]) -> list[dict[str, float]]:
    """Of each rank's collectives, by phase, the share of their time that is waiting for others.

    Where all ranks made equally many of a name, the k-th of each are taken to be one collective, which takes what it
    took on the rank that came last. A message takes what the quickest of its name does, and so does what some ranks
    made more often than others.

    >>> late, early = [Work("backward", "gloo:all_reduce", 0.1)], [Work("backward", "gloo:all_reduce", 0.4)]
    >>> [round(share["backward"], 6) for share in idle_shares([late, early])]
    [0.0, 0.75]
    """
    by_name: list[dict[str, list[float]]] = []
    for rank in works:
        found: dict[str, list[float]] = {}
        for work in rank:
            found.setdefault(work.name, []).append(work.seconds)
        by_name.append(found)
    transfer: dict[str, list[float]] = {}
    for name in sorted({name for found in by_name for name in found}):
        rows = [found.get(name, []) for found in by_name]
        is_message = name.partition(":")[2] in ("send", "recv", "recvAnySource", "coalesced")
        if is_message or len({len(row) for row in rows}) > 1:
            least = min(value for row in rows for value in row)
            transfer[name] = [least] * max(len(row) for row in rows)
        else:
            transfer[name] = [min(column) for column in zip(*rows, strict=True)]
    result = []
    for rank in works:
        position: dict[str, int] = {}
        waited: dict[str, float] = {}
        took: dict[str, float] = {}
        for work in rank:
            k = position.get(work.name, 0)
            position[work.name] = k + 1
            took[work.phase] = took.get(work.phase, 0.0) + work.seconds
            waited[work.phase] = waited.get(work.phase, 0.0) + max(0.0, work.seconds - transfer[work.name][k])
        result.append({phase: waited[phase] / took[phase] if took[phase] > 0 else 0.0 for phase in took})
    return result


def predicted_terms(plan: Plan) -> dict[str, float | None]:
    """What a plan says of each term; None of forward and backward where it is of an earlier release."""
    parts = dict(plan.prediction.parts_seconds)
    forward = plan.prediction.forward_seconds
    return {
        "forward": forward,
        "backward": None if forward is None else max(0.0, parts.get("compute", 0.0) - forward),
        "collectives": parts.get("communication", 0.0) + parts.get("sync", 0.0),
        "optimizer": parts.get("optimizer", 0.0),
        "data": 0.0,
        "idle": parts.get("bubble", 0.0),
        "rest": 0.0,
    }


@dataclass(frozen=True, kw_only=True)
class Term:
    """One row: seconds, predicted and measured; None where that is not known."""

    name: str
    predicted_seconds: float | None
    measured_seconds: float | None

    @property
    def off_seconds(self) -> float:
        """Measured less predicted."""
        return (self.measured_seconds or 0.0) - (self.predicted_seconds or 0.0)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """A run beside its plan: the step, its terms, the memory of each rank, and which term was off, in words."""

    predicted_step_seconds: float
    measured_step_seconds: float
    num_steps: int
    spread: float
    between_seconds: float
    terms: tuple[Term, ...]
    predicted_peak_bytes: tuple[float, ...]  # of each rank
    measured_peak_bytes: tuple[float | None, ...]
    memory_kind: str
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """As plain data: seconds, bytes, fractions."""
        return {
            **asdict(self),
            "terms": {
                term.name: {"predicted_seconds": term.predicted_seconds, "measured_seconds": term.measured_seconds}
                for term in self.terms
            },
            "predicted_peak_bytes": list(self.predicted_peak_bytes),
            "measured_peak_bytes": list(self.measured_peak_bytes),
        }


def audit(record: RunRecord, plan: Plan | None = None) -> Audit:
    """Compare a run with its plan; `plan` is the file that a person says it was, to be sure.

    Raises:
        RunError: the run was by another plan, or it has no step beyond warm-up.
    """
    if plan is not None and (given := plan_digest(plan)) != (mine := plan_digest(record.plan)):
        differences = plan.diff(record.plan)
        what = " ({} {}, not {})".format(*differences[0]) if differences else ""
        raise RunError(
            f"the run was by another plan than this one: digest {mine[:12]}, not {given[:12]}{what}; give its plan, or "
            "the record alone, which holds it"
        )
    if not record.step_seconds:
        raise RunError("the run has no step beyond warm-up, so nothing was measured; train for more steps")
    plan = record.plan
    predicted, measured = predicted_terms(plan), record.terms()
    rows = {name: (predicted[name], measured[name]) for name in TERMS}
    if predicted["forward"] is None or measured["collectives"] is None:
        # One row for what cannot be told apart.
        joined = ["forward", "backward"] + (["collectives", "idle"] if measured["collectives"] is None else [])
        parts = dict(plan.prediction.parts_seconds)
        of_passes = parts.get("compute", 0.0) + sum(predicted[name] or 0.0 for name in joined[2:])
        seen = sum(measured[name] or 0.0 for name in joined)
        if measured["collectives"] is None:  # what `sync` waits for is communication as well
            seen += measured["rest"] or 0.0
            rows["rest"] = (0.0, 0.0)
        rows = {_joined(joined): (of_passes, seen), **{n: row for n, row in rows.items() if n not in joined}}
    terms = tuple(Term(name=n, predicted_seconds=p, measured_seconds=m) for n, (p, m) in rows.items())
    per_stage = plan.devices // plan.mesh.pp
    return Audit(
        predicted_step_seconds=plan.prediction.step_seconds,
        measured_step_seconds=record.step,
        num_steps=len(record.step_seconds),
        spread=record.spread,
        between_seconds=record.between_seconds,
        terms=terms,
        predicted_peak_bytes=tuple(plan.prediction.peak_bytes[rank // per_stage] for rank in range(plan.devices)),
        measured_peak_bytes=tuple(rank.peak_bytes for rank in record.ranks),
        memory_kind=record.memory_kind,
        sentence=_sentence(plan.prediction.step_seconds, record, terms),
    )


def _joined(names: Sequence[str]) -> str:
    """`forward, backward and idle`."""
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _sentence(predicted: float, record: RunRecord, terms: Sequence[Term]) -> str:
    """Which term was off."""
    ratio = record.step / predicted if predicted > 0 else math.inf
    is_close = abs(ratio - 1) <= max(_CLOSE, record.spread)
    direction = 0.0 if is_close else math.copysign(1.0, ratio - 1)
    worst = max(terms, key=lambda term: term.off_seconds * direction if direction else abs(term.off_seconds))
    took, said = (format_seconds(value or 0.0) for value in (worst.measured_seconds, worst.predicted_seconds))
    start = f"The step took {ratio:.2f} times the predicted one"
    if is_close:
        start += f", which is right within {max(_CLOSE, record.spread):.0%}; of its terms {worst.name} is off most"
    else:
        start += f"; of its terms {worst.name} is {'longer' if direction > 0 else 'shorter'} by most"
    return f"{start}: {took} measured, {said} predicted."


def run_row(record: RunRecord) -> RunRow:
    """What a run teaches a profile: each term as measured, and as it is priced without any run.

    Raises:
        RunError: its plan does not say all terms, or nothing was sampled.
    """
    plan = record.plan
    if not record.step_seconds:
        raise RunError("the run has no step beyond warm-up, so it corrects nothing; train for more steps")
    predicted, measured = predicted_terms(plan), record.terms()
    if predicted["forward"] is None:
        raise RunError("the plan is of an earlier release and does not state its terms; make it again, and train by it")
    if measured["collectives"] is None:
        raise RunError("no step of the run was sampled, so its collectives are not known; train for 7 steps or more")
    before = dict(plan.prediction.corrections)
    seconds = {name: measured[name] or 0.0 for name in CORRECTED}
    base = {name: (predicted[name] or 0.0) / before.get(name, 1.0) for name in CORRECTED}
    return RunRow(
        graph=plan.graph_fingerprint,
        way=_way_digest(plan),
        name=plan.model,
        mesh=str(plan.mesh),
        micro_batch=plan.micro_batch,
        num_microbatches=plan.num_microbatches,
        **{f"{name}_seconds": seconds[name] for name in CORRECTED},
        **{f"{name}_priced_seconds": base[name] for name in CORRECTED},
        step_seconds=record.step,
        spread=record.spread,
        repeats=len(record.step_seconds),
    )


def _way_digest(plan: Plan) -> str:
    """What tells ways to train one model apart."""
    choices = [[(block.zero, block.recompute) for block in stage.blocks] for stage in plan.stages]
    split = [sharding.fingerprint for sharding in plan.shardings]
    way = (str(plan.mesh), plan.micro_batch, plan.num_microbatches, plan.schedule, plan.optimizer, choices, split)
    return hashlib.sha256(repr(way).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Factors:
    """By how much terms are corrected, in the order of `CORRECTED`."""

    forward: float = 1.0
    backward: float = 1.0
    collectives: float = 1.0
    optimizer: float = 1.0

    @property
    def least(self) -> float:
        """No second is corrected to less than this."""
        return min(1.0, self.forward, self.backward, self.collectives)

    def named(self) -> tuple[tuple[str, float], ...]:
        """As a plan states them."""
        return tuple((name, getattr(self, name)) for name in CORRECTED)


def factors_of(rows: Iterable[RunRow], mesh: str, micro_batch: int) -> Factors | None:
    """The corrections for one mesh and micro-batch: of the runs with them, else of all; None without a run.

    `rows` are of one model. Several are averaged, by ratio.
    """
    rows = list(rows)
    alike = [row for row in rows if (row.mesh, row.micro_batch) == (mesh, micro_batch)]
    chosen = alike or rows
    if not chosen:
        return None
    found = {}
    for name in CORRECTED:
        logs = [
            math.log(min(_LARGEST_FACTOR, max(1 / _LARGEST_FACTOR, measured / priced)))
            for row in chosen
            if (measured := getattr(row, f"{name}_seconds")) > _LEAST_SECONDS
            and (priced := getattr(row, f"{name}_priced_seconds")) > _LEAST_SECONDS
        ]
        found[name] = float(f"{math.exp(statistics.fmean(logs)):.6g}") if logs else 1.0
    return Factors(**found)


def corrected(costs: Costs, factors: Factors | None) -> Costs:
    """The costs with every term by its factor; nothing else changes."""
    if factors is None:
        return costs
    links = factors.collectives
    in_forward = costs.exposed_forward_seconds
    in_backward = costs.exposed_seconds - in_forward
    return replace(
        costs,
        forward_seconds=factors.forward * (costs.forward_seconds - in_forward) + links * in_forward,
        backward_seconds=factors.backward * (costs.backward_seconds - in_backward) + links * in_backward,
        exposed_seconds=links * costs.exposed_seconds,
        exposed_forward_seconds=links * in_forward,
        gather_seconds=links * costs.gather_seconds,
        reduce_seconds=links * costs.reduce_seconds,
        tie_seconds=links * costs.tie_seconds,
        hop_seconds=links * costs.hop_seconds,
        norm_seconds=links * costs.norm_seconds,
        agreement_seconds=links * costs.agreement_seconds,
        optimizer_seconds=factors.optimizer * costs.optimizer_seconds,
        prelude_seconds=factors.forward * costs.prelude_seconds,
        pass_seconds=(factors.forward + factors.backward) / 2 * costs.pass_seconds,  # one of each
    )


def _waited(rank: RankRecord, phase: str) -> float:
    """Of a phase, what was communication or waiting."""
    return (rank.collectives or {}).get(phase, 0.0) + (rank.idle or {}).get(phase, 0.0)


def _sum(values: Mapping[str, float] | None) -> float:
    return sum((values or {}).values())


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for row in rows for name in row})
    return {name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}


def _number(value: object, where: str, faults: list[str]) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return float(value)
    faults.append(f"{where} must be a number, at least 0")
    return 0.0


def _numbers(value: object, where: str, faults: list[str]) -> list[float]:
    if not isinstance(value, list):
        faults.append(f"{where} must be a list")
        return []
    return [_number(item, f"{where}[{index}]", faults) for index, item in enumerate(value)]


def _read_rank(row: object, where: str, faults: list[str]) -> RankRecord:
    data = row if isinstance(row, Mapping) else {}
    if not isinstance(row, Mapping):
        faults.append(f"{where} must be an object")

    def seconds(key: str) -> dict[str, float]:
        value = data.get(key)
        if not isinstance(value, Mapping):
            faults.append(f"{where}.{key} must be an object")
            return {}
        return {str(name): _number(item, f"{where}.{key}.{name}", faults) for name, item in value.items()}

    peak = data.get("peak_bytes")
    return RankRecord(
        phases=seconds("phases"),
        collectives=None if data.get("collectives") is None else seconds("collectives"),
        idle=None if data.get("idle") is None else seconds("idle"),
        peak_bytes=None if peak is None else _number(peak, f"{where}.peak_bytes", faults),
    )
