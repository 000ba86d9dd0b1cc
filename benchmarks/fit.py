"""Constants of devices and engines that make predicted steps true, fitted on published training runs.

    python -m benchmarks.fit [TRAINING.csv] [--write]

The model is that of `autoplan validate`: kernels of traced graphs, links as they are in profiles/links, pipelines by
their closed formula. Fitted are rates of matrix products and of attention for each device, and what each engine does
(`planner.engine`). The least mean |log error| is sought by Gauss-Newton steps of reweighted least squares, every source
with the same weight, and a weak prior at data-sheet values that decides where rows say nothing. An engine that was
derived from another has that one's constants as its prior. No constant belongs to one row.

Printed are the errors of each source in the fit, and by a fit without it (leave one source out); for the grids of one
node also by folds of its rows; that takes most of 20 minutes. With --write the constants go to
profiles/devices/*.toml and profiles/engines/*.toml.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Curve, Device
from planner.engine import Engine, engine_named
from planner.engine_seconds import USUAL_DISPATCH_SECONDS
from planner.errors import PlannerError
from planner.validate.cases import Case, case_of
from planner.validate.price import shares
from planner.validate.rows import RefusedError, read_rows
from planner.validate.run import measured_seconds, trace_all
from planner.validate.step import Share, step_terms

ROOT = Path(__file__).resolve().parent.parent
DEVICES, ENGINES = ROOT / "profiles" / "devices", ROOT / "profiles" / "engines"
TRAINING = ROOT / "benchmarks" / "published" / "training.csv"
SOURCE = "fitted by `python -m benchmarks.fit` on published runs"

# Sources whose rows state their whole configuration (tier A).
SOURCES = (
    "vtrain-s", "vtrain-m", "mpt", "internevo", "zerobubble", "narayanan21", "korthikanti22", "torchtitan", "mist",
    "mist-aceso", "mist-megatron", "mcore-ci", "amp", "dle",
)  # fmt: skip
# Sources that do not state all of it (tier B), but run at sizes and on devices that the others lack: half the weight.
BESIDE = ("nemo", "megatron-h100")
MISALIGNED = "device.A100.misaligned"
GRID, EVERY = "vtrain-s", 5  # of the rows of this source, every fifth takes part
FOLDS = 5
PRIOR, EPSILON = 0.005, 0.03  # weight of the prior; errors below this count as squares
ENOUGH = 2e-3  # a step that lowers the sum over all sources by less is the last
ATTENTION_KINDS = ("attention_forward", "attention_backward")
SIZES = [10 ** (exponent / 2) for exponent in range(14, 28)]  # FLOP of matrix products

# Files that one device's constants are for, and files of devices without rows: the device of their class, the size of
# products in units of its (by the peak), and their share of its rates (the card's clocks: see the files). Mist's
# authors fix L4 at 1050 of its 2040 MHz (README of Dazz993/Mist, step 2.2); RTX4090 is taken to keep its clock.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "A100": ("a100-80gb", "a100-40gb"), "H100": ("h100-80gb", "h200"), "V100": ("v100-16gb", "v100-32gb"),
    "T4": ("t4",), "A10G": ("a10g",), "L4": ("l4",),
}  # fmt: skip
BY_CLASS: Mapping[str, tuple[str, float, float]] = {
    "a100-80gb-pcie": ("A100", 1.0, 0.86), "h100-80gb-pcie": ("H100", 1.0, 0.85), "b200": ("H100", 2.25, 1.0),
    "rtx3090": ("A10G", 1.0, 1.0), "rtx4090": ("L4", 1.4, 2040 / 1050),
}  # fmt: skip

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Constant:
    """One positive number to be fitted: its prior, the width of that in log, and the constant both are in units of."""

    prior: float
    width: float
    parent: str = ""


def constants() -> dict[str, Constant]:
    """All of them, by device or engine and field."""
    found: dict[str, Constant] = {}
    # Share of the peak of large products (Azure/AI-benchmarking-guide; Dazz993/Mist's interference data, products
    # beside nothing: V100 105, A10G 62, L4 55 TFLOP/s) and the FLOP at which half of it is left. Those of
    # A10G and L4 are by the authors of the runs of mist and mist-aceso, for kinds of machines that they used.
    for family, best, half, width in (
        ("A100", 0.87, 8e9, 0.1), ("H100", 0.75, 2e10, 0.1), ("V100", 0.84, 3e9, 0.1), ("T4", 0.5, 2e9, 0.15),
        ("A10G", 0.89, 4e9, 0.03), ("L4", 0.46, 3e9, 0.03),
    ):  # fmt: skip
        found[f"device.{family}.best"] = Constant(best, width)
        found[f"device.{family}.half"] = Constant(half, 1.5)
    for family in ("A100", "H100"):  # in units of FlashAttention's own measurements
        found[f"device.{family}.attention_forward"] = Constant(1.0, 0.15)
        found[f"device.{family}.attention_backward"] = Constant(1.0, 0.15)
    found[MISALIGNED] = Constant(0.4, 0.5)
    found["device.H100.dispatch"] = Constant(1.0, 0.5)

    def engine(name: str, parent: str = "", /, **fields: tuple[float, float]) -> None:
        for field, (prior, width) in fields.items():
            above = f"engine.{parent}.{field}"
            found[f"engine.{name}.{field}"] = Constant(1.0, width, above) if above in found else Constant(prior, width)

    engine("stock", memory_traffic=(1.0, 0.5), compiled_memory_traffic=(0.6, 0.5), overlap=(1.0, 0.7),
           fp8_speed=(1.6, 0.3))  # fmt: skip
    engine("llm-foundry", "stock", memory_traffic=(1.0, 0.5), overlap=(1.0, 0.7), fp8_speed=(1.6, 0.3),
           attention_speed=(1.0, 0.3), optimizer_traffic=(1.0, 0.5))  # fmt: skip
    engine("internevo", "stock", memory_traffic=(1.0, 0.5), hidden=(0.6, 0.7), attention_speed=(1.0, 0.3))
    engine("ddp", "stock", memory_traffic=(1.0, 0.5), attention_passes=(1.0, 0.7), dispatch=(1.0, 1.0),
           overlap=(1.0, 0.7), optimizer_traffic=(0.3, 0.7), step_seconds=(1e-3, 1.0))  # fmt: skip
    software = {
        "memory_traffic": (0.7, 0.7), "head_traffic": (1.0, 0.7), "dispatch": (1.5, 0.3),
        "block_dispatches": (60.0, 1.0), "collectives": (0.8, 0.5), "straggling": (0.1, 1.0),
        "hop_seconds": (3e-4, 1.0), "pass_seconds": (3e-4, 1.0), "step_seconds": (3e-3, 1.0),
    }  # fmt: skip
    engine("megatron", **software, attention_passes=(1.0, 0.7), optimizer_traffic=(0.3, 0.7))
    for name in ("megatron-core", "megatron-core-tests"):
        engine(name, "megatron", **{**software, "dispatch": (1.0, 1.0), "step_seconds": (1.0, 1.5)})
        # A linear layer of Transformer Engine takes the processor 2.7 times what PyTorch's takes (NVIDIA/
        # TransformerEngine issue 2053: 90.5 to 33.2 us, 99.7 to 37.1 us).
        found[f"engine.{name}.dispatch"] = replace(found[f"engine.{name}.dispatch"], prior=2.7)
    engine("megatron-core", async_collectives=(0.5, 0.7))
    engine("superscaler", "megatron", memory_traffic=(1.0, 0.5), attention_passes=(1.0, 0.5), collectives=(1.0, 0.5),
           hop_seconds=(1.0, 1.0))  # fmt: skip
    # Mist's layers are PyTorch's own, not Megatron's fused ones.
    engine("mist", "stock", memory_traffic=(1.0, 0.5), attention_passes=(1.0, 0.5), hop_seconds=(3e-4, 1.0),
           hidden=(0.6, 0.7))  # fmt: skip
    engine("deepspeed", "megatron", **software)
    # Estimates: most of its rows (amp) are of Megatron-LM 1.1.5, of 2020, taken to be without fused kernels: chains as
    # in eager PyTorch; scaling, mask, a cast to float32 and back are passes of their own.
    found["engine.deepspeed.memory_traffic"] = Constant(1.0, 0.5)
    found["engine.deepspeed.attention_passes"] = Constant(2.5, 0.5)
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """A measured step and all that its prediction needs."""

    case: Case
    shares: tuple[Share, ...]
    seconds: float
    family: str  # "" where no row of the family has a part in the fit


class Model:
    """Predicted seconds as a function of the constants' logarithms."""

    def __init__(self, found: Mapping[str, Constant]) -> None:
        self.names = list(found)
        self.place = {name: index for index, name in enumerate(self.names)}
        self.found = found
        self.start = np.array([np.log(c.prior) for c in found.values()])
        self.width = np.array([c.width for c in found.values()])
        self._device = lru_cache(maxsize=4096)(self._new_device)
        self._engine = lru_cache(maxsize=4096)(self._new_engine)

    def value(self, name: str, x: Sequence[float] | Floats) -> float:
        """One constant."""
        log, parent = x[self.place[name]], self.found[name].parent
        return float(np.exp(log)) * (self.value(parent, x) if parent else 1.0)

    def used(self, run: Run) -> frozenset[int]:
        """Constants that a run depends on."""
        own = [n for n in self.names if n.startswith((f"device.{run.family}.", f"engine.{run.case.engine.name}."))]
        indices: set[int] = set()
        while own:
            indices.update(self.place[name] for name in own)
            own = [parent for name in own if (parent := self.found[name].parent)]
        return frozenset(indices)

    def seconds(self, run: Run, x: Floats) -> float:
        """The predicted step."""
        device = self._device(_Key(run.case.cluster.device), run.family, self.part(f"device.{run.family}.", x))
        engine = self._engine(run.case.engine, self.part(f"engine.{run.case.engine.name}.", x))
        return step_terms(run.case, run.shares, device, engine, exact=False).total_seconds

    def part(self, prefix: str, x: Floats) -> tuple[tuple[str, float], ...]:
        """The constants of one device or engine."""
        return tuple((n.removeprefix(prefix), self.value(n, x)) for n in self.names if n.startswith(prefix))

    def _new_device(self, key: "_Key", family: str, values: tuple[tuple[str, float], ...]) -> Device:
        return fitted_device(key.device, dict(values))

    def _new_engine(self, engine: Engine, values: tuple[tuple[str, float], ...]) -> Engine:
        return replace(engine, **_whole(dict(values)))  # type: ignore[arg-type]


def _whole(values: Mapping[str, float]) -> Mapping[str, float]:
    """Chains outside of layers are as those of layers, where they are not fitted apart."""
    return {"head_traffic": values["memory_traffic"], **values} if "memory_traffic" in values else values


@dataclass(frozen=True, slots=True, eq=False)
class _Key:
    """A device as a key: equal to itself only."""

    device: Device

    def __hash__(self) -> int:
        return id(self.device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.device is other.device


def matmul_curve(best: float, half: float) -> Curve:
    """Share of the peak by FLOP: a fixed time for each product and a rate, best / (1 + half / FLOP)."""
    return Curve(points=tuple((float(f"{s:.4g}"), float(f"{min(best, 1.0) / (1 + half / s):.5g}")) for s in SIZES))


def fitted_device(device: Device, values: Mapping[str, float]) -> Device:
    """A device with fitted rates; attention is scaled from what the library's authors measured."""
    if not values:
        return device
    curves = {"matmul": matmul_curve(values["best"], values["half"])}
    for kind in ATTENTION_KINDS:
        if kind in values:
            curves[kind] = scaled(ATTENTION[device.name[:4]][kind], values[kind])
    return replace(
        device,
        efficiency={**device.efficiency, **curves},
        dispatch_seconds=USUAL_DISPATCH_SECONDS * values.get("dispatch", 1.0),
        misaligned_matmul=values.get("misaligned", device.misaligned_matmul),
    )


BLOCK_SECONDS = 5e-5  # calling a block as a module of its own: the same Python as on a CPU, where it is measured
# FlashAttention-2 (arXiv 2307.08691, figures 4 to 6): what attention is in units of; small sizes are an estimate.
ATTENTION: Mapping[str, Mapping[str, Curve]] = {
    "A100": {
        "attention_forward": Curve(points=((1e8, 0.075), (1e9, 0.225), (1e10, 0.5), (1e12, 0.62))),
        "attention_backward": Curve(points=((1e8, 0.063), (1e9, 0.189), (1e10, 0.42), (1e12, 0.52))),
    },
    "H100": {
        "attention_forward": Curve(points=((1e8, 0.02), (1e9, 0.1), (1e10, 0.27), (1e12, 0.4))),
        "attention_backward": Curve(points=((1e8, 0.02), (1e9, 0.09), (1e10, 0.24), (1e12, 0.34))),
    },
}
ATTENTION = {**ATTENTION, "A800": ATTENTION["A100"]}


def scaled(curve: Curve, factor: float) -> Curve:
    """A curve times a factor, at most 1."""
    return Curve(points=tuple((size, float(f"{min(1.0, share * factor):.5g}")) for size, share in curve.points))


def runs_of(path: Path, say: Callable[[str], None]) -> list[Run]:
    """The measured steps of the fitted sources."""
    cases = []
    for row in read_rows([path]):
        if row.prefix in (*SOURCES, *BESIDE):
            try:
                cases.append(case_of(row))
            except RefusedError:
                continue
    trace_all(cases, lambda what, done, total: say(f"{what} {done} of {total}"))
    found = []
    for case in sorted(cases, key=lambda case: repr(case.spec)):
        seconds = measured_seconds(case)
        if seconds is None:
            continue
        try:
            parts = shares(case)
        except PlannerError:
            continue
        name = case.cluster.device.name
        family = next((f for f in FAMILIES if name.startswith((f, "A800" if f == "A100" else f))), "")
        found.append(Run(case=case, shares=parts, seconds=seconds, family=family))
    return found


def taking_part(runs: Sequence[Run]) -> list[Run]:
    """The runs of a fit: of the grid every fifth, of other sources all."""
    seen = 0
    chosen = []
    for run in runs:
        seen += run.case.row.prefix == GRID
        if run.case.row.prefix != GRID or seen % EVERY == 0:
            chosen.append(run)
    return chosen


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit:
    """The end of a fit: logs, residuals ln(predicted / measured) and their derivatives for the rows of it."""

    x: Floats
    residual: Floats
    slope: Floats  # [rows, constants]


def fitted(model: Model, runs: Sequence[Run], say: Callable[[str], None]) -> Fit:
    """The constants with the least weighted |residual|, sought from their priors."""
    residual = _residuals(model, runs, model.start)
    start = Fit(x=model.start, residual=residual, slope=_slopes(model, runs, model.start, residual))
    x, residual = _descended(model, runs, start, say)
    return Fit(x=x, residual=residual, slope=_slopes(model, runs, x, residual))


def each_without(model: Model, fit: Fit, runs: Sequence[Run], kept: Sequence[NDArray[np.bool_]]) -> list[Floats]:
    """The constants of fits on some of the rows; on all cores.

    Each is sought from where the derivatives of the fit on all rows say that it ends: from that fit itself no step may
    lead down where what is left out decided a constant that others hardly know.
    """

    def refit(number: int) -> Floats:
        keep = kept[number]
        own = [run for run, stays in zip(runs, keep, strict=True) if stays]
        x, weight = fit.x, weights(own)
        for _ in range(8):
            residual = (fit.residual + fit.slope @ (x - fit.x))[keep]
            x = x + _step(model, x, residual, fit.slope[keep], weight)
        residual = _residuals(model, own, x)
        start = Fit(x=x, residual=residual, slope=_slopes(model, own, x, residual))
        return _descended(model, own, start)[0]

    # Forked processes share the runs and what is remembered of them; nothing but numbers is sent.
    with get_context("fork").Pool(initializer=_REFIT.append, initargs=(refit,)) as pool:
        return pool.map(_refitted, range(len(kept)), chunksize=1)


_REFIT: list[Callable[[int], Floats]] = []


def _refitted(number: int) -> Floats:
    return _REFIT[-1](number)


def _descended(
    model: Model, runs: Sequence[Run], start: Fit, say: Callable[[str], None] = lambda _: None
) -> tuple[Floats, Floats]:
    """Constants and residuals at the end of Gauss-Newton steps."""
    weight = weights(runs)
    x, residual, slope = start.x, start.residual, start.slope
    least = _loss(model, x, residual, weight)
    for number in range(25):
        step = _step(model, x, residual, slope, weight)
        for share in (1.0, 0.5, 0.25, 0.1, 0.03):
            there = x + share * step
            new = _residuals(model, runs, there)
            loss = _loss(model, there, new, weight)
            if loss < least:
                break
        else:
            break
        gain, x, residual, least = least - loss, there, new, loss
        say(f"step {number + 1}: {least:.4f}")
        if gain < ENOUGH:
            break
        slope = _slopes(model, runs, x, residual)
    return x, residual


def _residuals(model: Model, runs: Sequence[Run], x: Floats) -> Floats:
    return np.array([np.log(model.seconds(run, x) / run.seconds) for run in runs])


def _slopes(model: Model, runs: Sequence[Run], x: Floats, residual: Floats) -> Floats:
    used = [model.used(run) for run in runs]
    result = np.zeros((len(runs), len(x)))
    for j in range(len(x)):
        moved = x.copy()
        moved[j] += 0.01
        for i, run in enumerate(runs):
            if j in used[i]:
                result[i, j] = (np.log(model.seconds(run, moved) / run.seconds) - residual[i]) / 0.01
    return result


def weights(runs: Sequence[Run]) -> Floats:
    """Of each row; those of a source add up to 1, of a source beside the others to half."""
    names = [run.case.row.prefix for run in runs]
    return np.array([(0.5 if name in BESIDE else 1.0) / names.count(name) for name in names])


def _loss(model: Model, x: Floats, residual: Floats, weight: Floats) -> float:
    size = np.abs(residual)
    each = np.where(size < EPSILON, residual**2 / (2 * EPSILON) + EPSILON / 2, size)
    return float(weight @ each + PRIOR / 2 * (((x - model.start) / model.width) ** 2).sum())


def _step(model: Model, x: Floats, residual: Floats, slope: Floats, weight: Floats) -> Floats:
    reweighted = weight / np.maximum(EPSILON, np.abs(residual))
    curvature = slope.T @ (reweighted[:, None] * slope) + np.diag(PRIOR / model.width**2)
    gradient = slope.T @ (reweighted * residual) + PRIOR * (x - model.start) / model.width**2
    return np.clip(-np.linalg.solve(curvature, gradient), -0.4, 0.4)


def report(model: Model, fit: Fit, chosen: Sequence[Run], runs: Sequence[Run]) -> None:
    """Errors by source, in the fit and without the source."""
    names = np.array([run.case.row.prefix for run in runs])
    of_chosen = np.array([run.case.row.prefix for run in chosen])
    inside = _errors(model, runs, fit.x)
    sources = list(dict.fromkeys(names.tolist()))
    at = np.flatnonzero(of_chosen == GRID)
    fold_of = {id(chosen[int(index)]): place % FOLDS for place, index in enumerate(at)}
    folds = [np.array([fold_of.get(id(run)) != fold for run in chosen]) for fold in range(FOLDS)] if len(at) else []
    found = each_without(model, fit, chosen, [*(of_chosen != name for name in sources), *folds])
    print(f"{'source':16s}{'rows':>6s}{'median':>9s}{'mean':>8s}{'bias':>8s}{'left out':>10s}{'bias':>8s}")
    medians, left_out = [], []
    for name, constants_without in zip(sources, found, strict=False):
        own = [run for run in runs if run.case.row.prefix == name]
        errors = inside[names == name]
        held = _errors(model, own, constants_without)
        median, without_it = np.median(np.abs(errors)), np.median(np.abs(held))
        if name not in BESIDE:
            medians.append(median)
            left_out.append(without_it)
        print(
            f"{name:16s}{len(own):6d}{median:9.1%}{np.abs(errors).mean():8.1%}{np.median(errors):+8.1%}"
            f"{without_it:10.1%}{np.median(held):+8.1%}"
        )
    print(f"{'mean of medians, A':22s}{np.mean(medians):9.1%}{'':16s}{np.mean(left_out):10.1%}")
    grid = [run for run in runs if run.case.row.prefix == GRID]
    if grid:
        held = np.zeros(len(grid))
        for fold, x in enumerate(found[len(sources) :]):
            # Rows that no fit has seen go to the folds in turn.
            members = [i for i, run in enumerate(grid) if fold_of.get(id(run), i % FOLDS) == fold]
            held[members] = _errors(model, [grid[i] for i in members], x)
        print(f"{GRID}, {FOLDS} folds: median {np.median(np.abs(held)):.1%}, mean {np.abs(held).mean():.1%}")


def _errors(model: Model, runs: Sequence[Run], x: Floats) -> Floats:
    return np.array([model.seconds(run, x) / run.seconds - 1 for run in runs])


def write(model: Model, fit: Fit, runs: Sequence[Run]) -> None:
    """The constants, into the files of devices and engines."""
    for family, files in FAMILIES.items():
        own = [run for run in runs if run.family == family]
        for stem in files if own else ():
            _write_device(stem, family, dict(model.part(f"device.{family}.", fit.x)), f"{SOURCE} ({_told(own)})")
    for stem, (family, size, share) in BY_CLASS.items():
        values = dict(model.part(f"device.{family}.", fit.x))
        values |= {"best": values["best"] * share, "half": values["half"] * size}
        values |= {kind: values[kind] * share for kind in ATTENTION_KINDS if kind in values and size == 1}
        rates = f"as {family}{f' at {share:.3g} times its share' if share != 1 else ''}, {SOURCE}"
        is_measured = size == 1 and family in ATTENTION
        _write_device(stem, family, values, f"as {family}, {SOURCE}", rates=rates, is_measured=is_measured)
    # Only the grid on A100 has products of both kinds.
    for stem in (*(stem for files in FAMILIES.values() for stem in files), *BY_CLASS):
        path = DEVICES / f"{stem}.toml"
        text = path.read_text(encoding="utf-8")
        text = _line(text, "misaligned_matmul", f"{model.value(MISALIGNED, fit.x):.3g}", number=True)
        words = f'"{SOURCE}, from a vocabulary of 50257 beside padded ones on A100 ({GRID})"'
        path.write_text(_line(text, "misaligned_matmul", words, number=False), encoding="utf-8")
    for name in dict.fromkeys(n.split(".")[1] for n in model.names if n.startswith("engine.")):
        own = [run for run in runs if run.case.engine.name == name]
        path = ENGINES / f"{name}.toml"
        text = path.read_text(encoding="utf-8")
        for key, value in _whole(dict(model.part(f"engine.{name}.", fit.x))).items():
            text = _line(text, key, f"{value:.4g}", number=True)
            text = _line(text, key, f'"{SOURCE} ({_told(own)})"', number=False)
        path.write_text(text, encoding="utf-8")
        engine_named(name)


def _told(runs: Sequence[Run]) -> str:
    names = [run.case.row.prefix for run in runs]
    return ", ".join(f"{names.count(name)} of {name}" for name in sorted(set(names)))


def _write_device(
    stem: str, family: str, values: Mapping[str, float], words: str, *, rates: str = "", is_measured: bool = True
) -> None:
    path = DEVICES / f"{stem}.toml"
    text = path.read_text(encoding="utf-8")
    curves = {"matmul": matmul_curve(values["best"], values["half"])}
    if is_measured:
        curves |= {k: scaled(ATTENTION[family][k], values[k]) for k in ATTENTION_KINDS if k in values}
    for kind, curve in curves.items():
        points = ", ".join(f"[{size:.4g}, {share:g}]" for size, share in curve.points)
        text = re.sub(rf"(?m)^{kind} = .*$", f"{kind} = [{points}]", text, count=1)
    text = re.sub(
        r'(?m)^(efficiency = ".*?)matmul: .*?(?=\. [a-z_]+: |"$)', rf"\1matmul: {rates or words}", text, count=1
    )
    if len(curves) > 1:
        told = r"(attention(?:_forward|_backward)?): (?!times)"
        head, mark, tail = text.partition("\nefficiency = ")
        text = head + mark + re.sub(told, rf"\1: times a constant {SOURCE}: ", tail)
    if "dispatch" in values and is_measured:
        for key, seconds in (("dispatch_seconds", USUAL_DISPATCH_SECONDS), ("block_seconds", BLOCK_SECONDS)):
            text = _line(text, key, f"{seconds * values['dispatch']:.3g}", number=True)
            text = _line(text, key, f'"{words}; a processor of 2022"', number=False)
    path.write_text(text, encoding="utf-8")


def _line(text: str, key: str, value: str, *, number: bool) -> str:
    """A file with another value of a key, before or behind the `[source]` line."""
    head, mark, tail = text.partition("[source]\n")
    if number:
        head = re.sub(rf"(?m)^{key} = .*$", f"{key} = {value}", head, count=1)
    else:
        tail = re.sub(rf"(?m)^{key} = .*$", lambda _: f"{key} = {value}", tail, count=1)
    return head + mark + tail


def main() -> None:
    """Fit, print and perhaps write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("training", nargs="?", type=Path, default=TRAINING)
    parser.add_argument("--write", action="store_true", help="write profiles/devices and profiles/engines")
    given = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    runs = runs_of(given.training, say)
    model = Model(constants())
    chosen = taking_part(runs)
    fit = fitted(model, chosen, say)
    for name in model.names:
        print(f"{name} = {model.value(name, fit.x):.4g}")
    report(model, fit, chosen, runs)
    if given.write:
        write(model, fit, chosen)


if __name__ == "__main__":
    main()
