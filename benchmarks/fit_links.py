"""Fits profiles/links/*.toml on published measurements of collectives, and says how well that predicts a source unseen.

    python -m benchmarks.fit_links [COLLECTIVES.csv] [--write] [--only LINK]

Per fabric, what `planner.collectives` reads of a link is fitted to the rows of `benchmarks.collectives` by least
squares on log(predicted / published), with Huber's loss: launch and latency, the rate (of each collective that has rows
of its own, of the switch, of small groups), and a share of it that rises with the bytes sent as
(1 + (half / bytes)^sharpness)^(-1/sharpness), times small corrections at every second size. Weak priors hold what
the data do not tell: launch and latency stay near the values in the file, corrections near nothing. A source with
more rows of a collective and group weighs more, by the root of their number; rows that a source calls noisy are left
out.

A fabric with fewer than eight rows of known size has its rate fitted alone, and keeps the shapes of its file.
InfiniBand is left as it is: its few rows contradict one another.

Cross-validation: a source is predicted by a fit on the other sources of the fabric. The median over sources of their
median |error|, over messages of 64 KiB and more, is written as `spread`; where fewer than two sources could be
predicted, `spread` is the median of the other fabrics', and twice that where nothing is published.
"""

import argparse
import dataclasses
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.collectives import LEAST_BYTES, PUBLISHED, SECONDS, Measured, read
from planner.cluster import Curve, Link, all_links, link_named
from planner.collectives import Group

LINKS = Path(__file__).resolve().parent.parent / "profiles" / "links"
Floats = npt.NDArray[np.float64]

# Not fitted: the rows are figures of users who asked for help with them, and tell less than the shapes in the files.
CONTRADICTED = ("infiniband-hdr", "infiniband-ndr")
CLASSES: Mapping[str, str] = {
    "all_reduce": "all_reduce",
    "all_gather": "any",
    "reduce_scatter": "any",
    "send_recv": "send_recv",
    "all_to_all": "all_to_all",
}
FEW_ROWS = 8
RATE_BYTES = 2**20  # smaller messages say nothing of the rate
# Nobody published these: the shape of one that somebody did, at sizes in proportion to the rate.
LIKE: Mapping[str, str] = dict.fromkeys(("ethernet-10g", "ethernet-25g", "ethernet-50g"), "ethernet-32g")
HUBER = 0.1  # of a residual, beyond which it counts in proportion only
NOISE = 0.02  # of a published figure that repeats
STEP = 2.0  # between two points of a curve
LEAST_SHARE_BYTES = 2e4  # smaller messages take little but launch and latency
STRAIGHT = 0.01  # error of a curve's point by the line between its neighbours, up to which it is left out


@dataclass(frozen=True, slots=True)
class Prior:
    """A parameter by the logarithm of a factor on its start, and how far it may go."""

    name: str
    start: float
    width: float
    least: float = -math.inf
    most: float = math.inf


class _Asked(Link):
    """A link that notes the sizes at which its curves are asked."""

    __slots__ = ()

    def fraction(self, collective: str, num_bytes: float) -> float:
        ASKED.append((collective, num_bytes))
        return 1.0


ASKED: list[tuple[str, float]] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is fitted of a link, and the link that parameters make."""

    base: Link
    classes: tuple[str, ...]  # curves with rows of their own
    knots: Mapping[str, tuple[float, ...]]
    group_sizes: tuple[int, ...]  # small groups inside a node, whose share is fitted
    largest_group: int
    rate_only: bool
    small: bool  # there are messages that launch and latency decide
    switch: bool

    def priors(self) -> list[Prior]:
        if self.rate_only:
            return [Prior("rate", 0.0, 3.0)]
        result = [Prior("latency", 0.0, 0.5), Prior("launch", 0.0, 0.5)] if self.small else []
        for name in self.classes:
            first = name == self.classes[0]
            result.append(Prior("rate", 0.0, 3.0) if first else Prior(f"{name} top", 0.0, 1.0))
            result.append(Prior(f"{name} half", math.log(self.base.bytes_per_second * 3e-5), 2.0))
            result.append(Prior(f"{name} sharp", math.log(0.8), 0.4, math.log(0.3), math.log(3.0)))
            result += [Prior(f"{name} {k}", 0.0, 0.1) for k in range(len(self.knots[name]))]
        halves = ((size, 0.5 * math.log(size / self.largest_group)) for size in self.group_sizes)
        result += [Prior(f"group {size}", start, 1.0, most=0.0) for size, start in halves]
        if self.switch:
            result.append(Prior("switch", 0.0, 1.0))
        return result

    def link(self, theta: Mapping[str, float]) -> Link:
        """The link of these parameters; rates are such that the best share is 1."""
        base, rate = self.base, math.exp(theta.get("rate", 0.0))
        changes: dict[str, object] = {}
        scale = rate
        if not self.rate_only:
            changes["latency_seconds"] = base.latency_seconds * math.exp(theta.get("latency", 0.0))
            changes["launch_seconds"] = base.launch_seconds * math.exp(theta.get("launch", 0.0))
            logs = {name: self._logs(name, theta) for name in self.classes}
            best = max(values[-1] for values in logs.values())
            scale = rate * math.exp(best)
            curves = {
                name: Curve(points=tuple(
                    (size, math.exp(min(0.0, log - best))) for size, log in zip(self.knots[name], values, strict=True)
                ))
                for name, values in logs.items()
            }  # fmt: skip
            # A message between two ranks keeps its rate where nobody measured it.
            lent = {} if "send_recv" in curves or "send_recv" not in base.efficiency else {
                "send_recv": _scaled(base.efficiency["send_recv"], 1 / scale)
            }  # fmt: skip
            if "any" not in curves:
                curves["any"] = curves.pop("all_reduce") if "all_reduce" in curves else base.efficiency["any"]
            changes["efficiency"] = {**curves, **lent}
            changes["group_efficiency"] = self._group_efficiency(theta)
        changes["bytes_per_second"] = base.bytes_per_second * scale
        if base.node_bytes_per_second is not None:
            changes["node_bytes_per_second"] = base.node_bytes_per_second * scale
        if base.in_switch_all_reduce_bytes_per_second is not None:
            best = scale / rate
            switch = base.in_switch_all_reduce_bytes_per_second * math.exp(theta.get("switch", 0.0)) * best
            changes["in_switch_all_reduce_bytes_per_second"] = switch
        return dataclasses.replace(base, **changes)  # type: ignore[arg-type]

    def _logs(self, name: str, theta: Mapping[str, float]) -> list[float]:
        top, half, sharp = theta.get(f"{name} top", 0.0), theta[f"{name} half"], math.exp(theta[f"{name} sharp"])
        logs: list[float] = []
        for k, size in enumerate(self.knots[name]):
            ratio = sharp * (half - math.log(size))
            log = top - (ratio if ratio > 50 else math.log1p(math.exp(ratio))) / sharp + theta[f"{name} {k}"]
            if logs:  # never falls, and never rises faster than the size
                log = min(max(log, logs[-1]), logs[-1] + math.log(size / self.knots[name][k - 1]))
            logs.append(log)
        return logs

    def _group_efficiency(self, theta: Mapping[str, float]) -> Curve | None:
        if not self.group_sizes:
            return self.base.group_efficiency
        points = [(float(size), math.exp(theta[f"group {size}"])) for size in self.group_sizes]
        points.append((float(self.largest_group), 1.0))
        # From the largest down: a larger group is no slower, and no faster than in proportion.
        for k in range(len(points) - 2, -1, -1):
            (size, share), (more, above) = points[k], points[k + 1]
            points[k] = (size, min(above, max(share, above * size / more)))
        return Curve(points=tuple(points))


def _scaled(curve: Curve, factor: float) -> Curve:
    return Curve(points=tuple((size, min(1.0, share * factor)) for size, share in curve.points))


def rounded(value: float) -> float:
    return float(f"{value:.3g}")


def model_of(base: Link, rows: Sequence[Measured]) -> Model:
    """What the rows of a fabric can tell of it."""
    inside = [row for row in rows if row.num_nodes == 1]
    asked: dict[str, list[float]] = {}
    noting = _Asked(**{item.name: getattr(base, item.name) for item in dataclasses.fields(base)})
    for row in rows:
        ASKED.clear()
        links = (noting, None) if row.num_nodes == 1 else (None, noting)
        row.predicted(*links)
        for collective, size in ASKED:
            asked.setdefault(CLASSES[collective], []).append(size)
    sized = [row for row in rows if row.sized]
    counts = Counter(CLASSES[row.collective] for row in sized)
    classes = tuple(sorted((name for name in counts if counts[name] >= 4), key=lambda name: -counts[name]))
    sizes = sorted({row.ranks_per_node for row in inside if CLASSES[row.collective] in ("any", "all_reduce")})
    knots = {}
    for name in classes:
        most = max(asked[name])
        least = max(min(asked[name]), min(LEAST_SHARE_BYTES, most / 8))
        count = max(3, math.ceil(math.log(most / least) / math.log(STEP)) + 1)
        points = np.linspace(math.log(least), math.log(most), count)
        # Below the rows' sizes the shape goes on.
        below = [size for size in (least / 64, least / 16, least / 4) if size >= LEAST_SHARE_BYTES]
        knots[name] = tuple(rounded(x) for x in (*below, *(math.exp(x) for x in points)))
    switch_ranks = base.in_switch_min_ranks or 2
    switch = base.in_switch_all_reduce_bytes_per_second is not None
    # Where the switch reduces for large groups, the ring is seen in small ones only.
    return Model(
        base=base,
        classes=classes,
        knots=knots,
        group_sizes=tuple(sizes[:-1]) if not switch else (),
        largest_group=sizes[-1] if sizes else 1,
        rate_only=len(sized) < FEW_ROWS or not classes,
        small=sum(row.num_bytes < 4 * LEAST_BYTES for row in rows) >= 2,
        switch=switch and any(row.switch and row.ranks_per_node >= switch_ranks for row in rows),
    )


def weights(rows: Sequence[Measured]) -> Floats:
    """A source's rows of a collective and group weigh the root of their number together."""
    keys = [(row.source, row.collective, row.ranks_per_node, row.num_nodes) for row in rows]
    counts = Counter(keys)
    raw = np.array([counts[key] ** -0.25 for key in keys])
    return np.asarray(raw / math.sqrt(float(np.mean(raw**2))))


def predicted(rows: Sequence[Measured], own: Link) -> list[float]:
    """Seconds of each row of the link; what else it passes is taken from the bundled profiles."""
    groups: dict[tuple[object, ...], Group] = {}
    result = []
    for row in rows:
        if row.shape not in groups:
            pair = (own, link_named(row.inter)) if row.num_nodes == 1 else (link_named(row.intra), own)
            groups[row.shape] = row.group(*pair)
        result.append(SECONDS[row.collective](row.num_bytes, groups[row.shape]))
    return result


def fit(base: Link, rows: Sequence[Measured]) -> Link:
    """The link, fitted on its rows."""
    model = model_of(base, rows)
    priors = model.priors()
    weight = weights(rows)
    published = np.array([row.seconds for row in rows])

    def link(theta: Floats) -> Link:
        return model.link({prior.name: float(value) for prior, value in zip(priors, theta, strict=True)})

    def loss(theta: Floats) -> tuple[Floats, float]:
        raw = np.log(np.array(predicted(rows, link(theta))) / published)
        size = np.abs(raw)
        huber = np.sign(raw) * np.where(size <= HUBER, size, np.sqrt(np.maximum(2 * HUBER * size - HUBER**2, 0.0)))
        far = np.array([(value - prior.start) / prior.width for prior, value in zip(priors, theta, strict=True)])
        together = np.concatenate([weight * huber / NOISE, far])
        return together, float(together @ together)

    low, high = np.array([p.least for p in priors]), np.array([p.most for p in priors])
    theta = np.clip(np.array([prior.start for prior in priors]), low, high)
    values, best = loss(theta)
    damping = 1.0
    for _ in range(40):
        jacobian = np.stack([(loss(theta + 1e-4 * unit)[0] - values) / 1e-4 for unit in np.eye(len(theta))], axis=1)
        square, slope = jacobian.T @ jacobian, jacobian.T @ values
        for _ in range(8):
            step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), -slope)
            trial = np.clip(theta + step, low, high)
            trial_values, trial_loss = loss(trial)
            if trial_loss < best:
                break
            damping *= 4
        else:
            break
        gained = best - trial_loss
        theta, values, best, damping = trial, trial_values, trial_loss, max(damping / 5, 1e-6)
        if gained < 1e-3 * best:
            break
    return link(theta)


def median_error(rows: Sequence[Measured], link: Link) -> float:
    large = [row for row in rows if row.num_bytes >= LEAST_BYTES] or rows
    return statistics.median(abs(s / row.seconds - 1) for s, row in zip(predicted(large, link), large, strict=True))


def unseen(base: Link, rows: Sequence[Measured]) -> dict[str, float]:
    """By source, the median |error| of a fit on the other sources, where those tell more than a rate."""
    result = {}
    for source in sorted({row.source for row in rows}):
        others = [row for row in rows if row.source != source]
        own = [row for row in rows if row.source == source]
        if others and len(others) >= min(FEW_ROWS, len(rows) // 4):
            result[source] = median_error(own, fit(base, others))
    return result


def main(arguments: list[str]) -> int:
    """Print the table; with --write put the numbers into the profiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="?", default=PUBLISHED)
    parser.add_argument("--write", action="store_true", help="put all links' numbers into profiles/links/*.toml")
    parser.add_argument("--only", help="fit this link alone")
    options = parser.parse_args(arguments)
    rows = [
        row for row in read(options.csv)[0]
        if row.witness and not row.noisy
    ]  # fmt: skip
    bases = {link.name: link for link in all_links()}
    # Inside a node first: across nodes its links count too.
    names = sorted(bases, key=lambda name: (bases[name].kind not in ("nvlink", "pcie"), name))
    print(f"{'fabric':<16} {'rows':>5} {'sources':>7} {'before':>7} {'fitted':>7} {'unseen':>7}   by source, unseen")
    found: dict[str, tuple[Link, list[Measured], float | None]] = {}
    for name in names:
        base, own = bases[name], [row for row in rows if row.fabric == name]
        if not own or options.only not in (None, name):
            continue
        by_source = {s: [row for row in own if row.source == s] for s in sorted({row.source for row in own})}
        kept = name in CONTRADICTED or (len(own) < FEW_ROWS and all(row.num_bytes < RATE_BYTES for row in own))
        link = base if kept else fit(base, own)
        errors = {s: median_error(part, base) for s, part in by_source.items()} if kept else unseen(base, own)
        spread = statistics.median(errors.values()) if len(errors) > 1 else None
        found[name] = (link, own, spread)
        print(f"{name:<16} {len(own):>5} {len(by_source):>7} {median_error(own, base):>7.1%}"
              f" {'kept' if kept else format(median_error(own, link), '.1%'):>7}"
              f" {'' if spread is None else f'{spread:.1%}':>7}   "
              + ", ".join(f"{source} {error:.0%}" for source, error in errors.items()))  # fmt: skip
        sys.stdout.flush()
    if options.write and options.only is None:
        write(found, bases)
    return 0


def write(found: Mapping[str, tuple[Link, list[Measured], float | None]], bases: Mapping[str, Link]) -> None:
    tested = [spread for _, _, spread in found.values() if spread is not None]
    usual = statistics.median(tested)
    for name in bases:
        path = LINKS / f"{name}.toml"
        link, rows, spread = found.get(name, (bases[name], [], None))
        if name in LIKE:
            link = _alike(bases[name], found[LIKE[name]][0])
        known = spread if spread is not None else usual if rows else 2 * usual
        how = (
            "median over sources of what the numbers here miss them by" if name in CONTRADICTED else
            "median over sources of what a fit on the others misses them by" if spread is not None else
            "too few sources to test: as other fabrics miss a source that they have not seen" if rows else
            "no published figures: twice what other fabrics miss a source by that they have not seen"
        )  # fmt: skip
        path.write_text(
            edited(path.read_text(encoding="utf-8"), dataclasses.replace(link, spread=rounded(known)), rows,
                   f"{how} (benchmarks.fit_links)", like=LIKE.get(name)),
            encoding="utf-8",
        )  # fmt: skip


def _alike(link: Link, other: Link) -> Link:
    """The link with the shapes of another at sizes in proportion to the rate."""
    ratio = link.bytes_per_second / other.bytes_per_second
    curves = {
        name: Curve(points=tuple((rounded(size * ratio), share) for size, share in curve.points))
        for name, curve in other.efficiency.items()
    }
    return dataclasses.replace(link, efficiency=curves)


def edited(text: str, link: Link, rows: Sequence[Measured], how: str, like: str | None) -> str:
    """The file with the numbers of the link; sources of what the rows did not tell stay as they are."""
    head, sources = text.split("\n[source]\n")
    old = dict(re.findall(r'^(\w+) = "(.*)"$', sources, flags=re.MULTILINE))
    by_source = Counter(row.source for row in rows)
    witness = "fitted by benchmarks.fit_links on " + ", ".join(
        f"{count} row{'s' if count > 1 else ''} of {source}" for source, count in sorted(by_source.items())
    )
    before = link_named(link.name)
    fields = ("bytes_per_second", "latency_seconds", "launch_seconds", "node_bytes_per_second",
              "in_switch_all_reduce_bytes_per_second", "in_switch_min_ranks", "group_efficiency", "spread")  # fmt: skip
    kind = re.search(r'^kind = ".*"$', head, flags=re.MULTILINE)
    lines = [f'name = "{link.name}"', kind[0] if kind else f'kind = "{link.kind}"']
    new: dict[str, str] = {}
    for key in fields:
        value = getattr(link, key)
        if value is None:
            continue
        if isinstance(value, Curve):
            lines.append(f"{key} = {points_text(value)}")
        else:
            lines.append(f"{key} = {value if isinstance(value, int) else number_text(value)}")
        changed = value != getattr(before, key)
        new[key] = how if key == "spread" else witness if changed else old[key]
        witness = "the same fit" if changed and key != "spread" else witness
    lines += ["", "[efficiency]"]
    lines += [f"{name} = {points_text(link.efficiency[name])}" for name in sorted(link.efficiency)]
    new["efficiency"] = old["efficiency"]
    if link.efficiency != before.efficiency:
        kept = sorted(set(link.efficiency) - {CLASSES[row.collective] for row in rows} - {"any"})
        new["efficiency"] = (
            f"as {like}, at sizes in proportion to the rate" if like
            else f"{witness}; sizes below and beyond theirs by the fitted shape"
        )  # fmt: skip
        if not like and "any" not in {CLASSES[row.collective] for row in rows}:
            new["efficiency"] += "; any: as all_reduce"
        if kept and not like:
            new["efficiency"] += f"; {', '.join(kept)}: estimate"
    lines += ["", "[source]", *(f'{key} = "{text}"' for key, text in new.items())]
    return "\n".join(lines) + "\n"


def number_text(value: float) -> str:
    """Three digits: 2.35e11, 5e-06, 0.25."""
    if 0.001 <= value < 1000:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{exponent.lstrip('+') if value >= 1 else exponent}"


def points_text(curve: Curve) -> str:
    """A curve in three digits, still rising no faster than its size."""
    points: list[tuple[float, float]] = []
    for size, share in curve.points:
        share = min(1.0, rounded(share))
        steepest = points[-1][1] * size / points[-1][0] if points else math.inf
        if share > steepest:
            share = rounded(steepest) if rounded(steepest) <= steepest * (1 + 1e-12) else rounded(steepest * 0.995)
        points.append((size, share))
    return "[" + ", ".join(f"[{number_text(size)}, {share:g}]" for size, share in _bends(points)) + "]"


def _bends(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points without those that lie on the line between others (Douglas and Peucker 1973, on logarithms)."""
    if len(points) < 3:
        return points
    line = Curve(points=(points[0], points[-1]))
    errors = [abs(math.log(line.at(size) / share)) for size, share in points[1:-1]]
    worst = max(range(len(errors)), key=errors.__getitem__)
    if errors[worst] <= STRAIGHT:
        return [points[0], points[-1]]
    return _bends(points[: worst + 2])[:-1] + _bends(points[worst + 1 :])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
