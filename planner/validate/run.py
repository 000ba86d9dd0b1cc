"""Price every row of some files and compare: what `autoplan validate` prints."""

import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner.errors import RunError
from planner.validate.cases import Case, case_of, is_known, tier_of
from planner.validate.metrics import Accuracy, Pair, accuracy
from planner.validate.models import TraceKey, is_made, make
from planner.validate.price import Prediction, features, predict
from planner.validate.rows import RefusedError, Row, read_rows, remarks

Progress = Callable[[str, int, int], None]
NUM_WORKERS = 2


@dataclass(frozen=True, kw_only=True)
class Result:
    """One row with its prediction, or with the reason why there is none."""

    row: Row
    tier: str = "?"
    case: Case | None = None
    prediction: Prediction | None = None
    measured_seconds: float | None = None
    refusal: str = ""

    @property
    def time_error(self) -> float | None:
        """Predicted over measured seconds, less 1."""
        if self.prediction is None or not self.measured_seconds:
            return None
        return self.prediction.seconds / self.measured_seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured bytes, less 1."""
        measured = self.row.peak_memory_bytes
        if self.prediction is None or not measured:
            return None
        return self.prediction.memory_bytes(self.row.memory_kind) / measured - 1

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it; what is not known is null."""
        made = self.prediction
        return {
            "id": self.row.id,
            "refused": self.refusal,
            "measured_seconds": self.measured_seconds,
            "predicted_seconds": made and made.seconds,
            "time_error": self.time_error,
            "measured_bytes": self.row.peak_memory_bytes,
            "predicted_bytes": made and made.memory_bytes(self.row.memory_kind),
            "memory_error": self.memory_error,
            "outcome": self.row.outcome,
            "fits": made and made.fits,
        }


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Counts and errors of some rows."""

    rows: int
    priced: int
    reasons: Mapping[str, int]  # why rows were refused, most frequent first
    time: Accuracy
    memory: Accuracy
    oom: Mapping[str, int]  # tp fp fn tn of rows with an outcome; out of memory is the positive
    tier: str = "?"

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it; errors are fractions."""
        return {
            "rows": self.rows,
            "priced": self.priced,
            "refused": {"count": self.rows - self.priced, "reasons": dict(self.reasons)},
            "time": asdict(self.time),
            "memory": asdict(self.memory),
            "oom": dict(self.oom),
        }


@dataclass(frozen=True, kw_only=True)
class Validation:
    """All rows of all files."""

    results: tuple[Result, ...]
    remarks: tuple[str, ...] = ()  # what a reader of the figures has to know of the files

    @property
    def assumed_engines(self) -> dict[str, int]:
        """Rows whose source is not known by the engine they are taken to have run on."""
        return dict(
            Counter(
                r.case.engine.name for r in self.results if r.case is not None and not is_known(r.row)
            ).most_common()
        )

    @property
    def total(self) -> Summary:
        """Over everything."""
        return summary(self.results)

    @property
    def by_source(self) -> dict[str, Summary]:
        """By the prefix of the rows' ids, in the order of the files."""
        groups: dict[str, list[Result]] = {}
        for result in self.results:
            groups.setdefault(result.row.prefix, []).append(result)
        return {prefix: summary(members) for prefix, members in groups.items()}

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        sources = {prefix: {"tier": each.tier, **each.to_dict()} for prefix, each in self.by_source.items()}
        return {
            **self.total.to_dict(),
            "assumed_engines": self.assumed_engines,
            "remarks": list(self.remarks),
            "by_source": sources,
            "each": [result.to_dict() for result in self.results],
        }


def summary(results: Sequence[Result]) -> Summary:
    """Counts and errors of some rows."""
    return Summary(
        rows=len(results),
        priced=sum(result.prediction is not None for result in results),
        reasons=dict(Counter(result.refusal for result in results if result.refusal).most_common()),
        time=accuracy(
            [
                Pair(
                    group=r.case.question,
                    plan=r.case.plan,
                    predicted=r.prediction.seconds,
                    measured=r.measured_seconds,
                )
                for r in results
                if r.case is not None and r.prediction is not None and r.measured_seconds
            ]
        ),
        memory=accuracy(
            [
                Pair(
                    group=r.case.question,
                    plan=r.case.plan,
                    predicted=r.prediction.memory_bytes(r.row.memory_kind),
                    measured=measured,
                )
                for r in results
                if r.case is not None and r.prediction is not None and (measured := r.row.peak_memory_bytes)
            ]
        ),
        oom=_confusion(results),
        tier=next((result.tier for result in results if result.tier != "?"), "?"),
    )


def validate(paths: Sequence[str | Path], *, engine: str | None = None, progress: Progress | None = None) -> Validation:
    """Every row of the files, priced by the same code as a plan; `engine` is that of rows whose source is not known.

    Raises:
        ProfileError: a file cannot be read.
        RunError: a process that traces models ended.
    """
    say = progress or (lambda *_: None)
    rows = read_rows(paths)
    cases: dict[int, Case] = {}
    refusals: dict[int, str] = {}
    for index, row in enumerate(rows):
        try:
            cases[index] = case_of(row, engine)
        except RefusedError as error:
            refusals[index] = str(error)
    trace_all(cases.values(), say)
    results: dict[int, Result] = {}
    by_model = sorted(range(len(rows)), key=lambda index: repr(cases[index].spec) if index in cases else "")
    for done, index in enumerate(by_model):
        say("pricing rows", done, len(rows))
        results[index] = _result(rows[index], cases.get(index), refusals.get(index, ""))
    say("pricing rows", len(rows), len(rows))
    told = [*remarks(paths, rows), *_not_compared(results.values())]
    return Validation(results=tuple(results[index] for index in range(len(rows))), remarks=tuple(told))


def _not_compared(results: Iterable[Result]) -> list[str]:
    """Rows with a figure of speed that says nothing of seconds, as sources count FLOP in several ways."""
    count = sum(
        result.prediction is not None and not result.measured_seconds and bool(row.tflops_per_gpu or row.mfu)
        for result in results
        for row in (result.row,)
    )
    said = "state tflops_per_gpu or mfu alone and are not compared, as sources count FLOP in several ways"
    return [f"{count} rows {said}; give iter_time_s, samples_per_s or tokens_per_s_per_gpu"] if count else []


def explain(paths: Sequence[str | Path], row_id: str, *, engine: str | None = None) -> dict[str, Any]:
    """The terms of one row's prediction, and what its step is made of.

    Raises:
        ProfileError: a file cannot be read.
        RunError: no row has this id, or it is refused.
    """
    found = [row for row in read_rows(paths) if row.id == row_id]
    if not found:
        raise RunError(f"no row has the id {row_id!r}")
    try:
        case = case_of(found[0], engine)
        prediction = predict(case)
    except RefusedError as error:
        raise RunError(f"row {row_id} is not priced: {found[0].unreadable or error}") from None
    result = Result(row=found[0], case=case, prediction=prediction, measured_seconds=measured_seconds(case))
    return {
        "id": row_id,
        "measured_seconds": result.measured_seconds,
        "predicted_seconds": prediction.seconds,
        "time_error": result.time_error,
        "time": asdict(prediction.terms),
        "measured_bytes": found[0].peak_memory_bytes,
        "predicted_bytes": prediction.memory_bytes(found[0].memory_kind),
        "memory_error": result.memory_error,
        "memory": asdict(prediction.memory),
        "stage_peak_bytes": list(prediction.peak_bytes),
        "fits": prediction.fits,
        "notes": list(prediction.notes),
        "engine": case.engine.name,
        "cluster": case.cluster.name,
        "links": [case.cluster.intra_node_link.name, case.cluster.inter_node_link.name],
        "num_microbatches": case.num_microbatches,
        "stages": [asdict(stage) for stage in case.stages],
        "features": features(case),
    }


def trace_all(cases: Iterable[Case], say: Progress) -> None:
    """Fill the cache of traces with what the cases need, two at a time."""
    wanted: dict[TraceKey, None] = {}
    for case in cases:
        try:
            wanted |= dict.fromkeys(case.keys)
        except RefusedError:
            continue  # said when it is priced
    missing = [key for key in wanted if not is_made(key)]
    if not missing:
        return
    say("tracing models", 0, len(missing))
    pool = ProcessPoolExecutor(
        NUM_WORKERS, mp_context=multiprocessing.get_context("spawn"), initializer=_leave_interrupts_to_the_parent
    )
    try:
        jobs = [pool.submit(make, key) for key in missing]
        for done, job in enumerate(as_completed(jobs), 1):
            job.result()
            say("tracing models", done, len(missing))
    except BrokenProcessPool:
        raise RunError("a process that traces models ended by itself; is there enough memory?") from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _result(row: Row, case: Case | None, refusal: str) -> Result:
    if case is None:
        return Result(row=row, tier=tier_of(row), refusal=refusal)
    try:
        prediction = predict(case)
    except RefusedError as error:
        return Result(row=row, tier=case.tier, refusal=_reason(error))
    return Result(row=row, tier=case.tier, case=case, prediction=prediction, measured_seconds=measured_seconds(case))


def _reason(error: RefusedError) -> str:
    return " ".join(str(error).split())[:160]


def measured_seconds(case: Case) -> float | None:
    """Seconds of a step, or what follows from a published rate by the formula that its source uses."""
    if case.measured_seconds is not None:
        return case.measured_seconds
    row = case.row
    if case.measured_tflops is None or not row.global_batch or not row.n_gpus:
        return None
    rate, kind = case.measured_tflops
    spec = case.spec
    # Narayanan et al. 2021 (arXiv 2104.04473), equation 3, and without the pass that recomputation repeats.
    passes = 96 if kind == "hardware" else 72
    layer = passes * row.global_batch * spec.sequence * case.cp * spec.num_layers * spec.hidden**2
    head = spec.vocabulary * (1 / 16 if kind == "hardware" else 1 / 12)
    flop = layer * (1 + spec.sequence * case.cp / (6 * spec.hidden) + head / (spec.num_layers * spec.hidden))
    return flop / (rate * 1e12 * row.n_gpus)


def _confusion(results: Sequence[Result]) -> dict[str, int]:
    """Of rows that say how it went; out of memory is the positive, and a row that failed counts as such."""
    found = {"tp": 0, "fp": 0, "fn": 0, "tn": 0}
    for result in results:
        if result.prediction is None or not result.row.outcome:
            continue
        ended = result.row.outcome != "ok"
        predicted = not result.prediction.fits
        found[
            {(True, True): "tp", (False, True): "fp", (True, False): "fn", (False, False): "tn"}[ended, predicted]
        ] += 1
    return found
