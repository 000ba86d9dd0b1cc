"""Predictions beside published measurements: a table by source, and one page of HTML with every row."""

from collections.abc import Mapping, Sequence
from html import escape
from math import log10
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape as escape_markup
from rich.table import Table

from planner.units import format_bytes, format_seconds

FIGURES = ("median_ape", "mean_ape", "p90_ape", "bias")
RANKINGS = ("tau", "regret")
_FEW_ROWS = 20
_SIZE, _MARGIN = 520, 46  # of the plot, in pixels


def accuracy_table(data: Mapping[str, Any]) -> RenderableType:
    """By source and over all; `data` is what `autoplan validate --json` prints. Errors in percent."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("source", "tier"):
        table.add_column(heading, no_wrap=True)
    for heading in ("rows", "priced", "time:\nmedian", "mean", "p90", "bias", "tau", "regret", "memory:\nmedian", "p90",
                    "bias", "OOM\nright"):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    parts = [*data["by_source"].items(), ("all", data)]
    for place, (name, part) in enumerate(parts, 2):
        table.add_row(name, *accuracy_cells(part), end_section=place == len(parts))
    told = accuracy_remarks(data)
    few: list[RenderableType] = [_rows_table(data["each"]), ""] if len(data["each"]) <= _FEW_ROWS else []
    return Group(*few, table, *([""] if told else []), *told)


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Each row, where there are few."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("row")
    for heading in ("measured", "predicted", "error", "peak", "predicted", "error", "outcome", "fits"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        seconds = [
            format_seconds(value) if (value := row[key]) else "" for key in ("measured_seconds", "predicted_seconds")
        ]
        peaks = [format_bytes(value) if (value := row[key]) else "" for key in ("measured_bytes", "predicted_bytes")]
        fits = "" if row["fits"] is None else "yes" if row["fits"] else "no"
        table.add_row(
            escape_markup(row["id"]), *seconds, _signed(row["time_error"]), *peaks, _signed(row["memory_error"]),
            escape_markup(row["outcome"] or ""), fits,
        )  # fmt: skip
    return table


def accuracy_remarks(data: Mapping[str, Any]) -> list[str]:
    """What has to be known beside the figures, a sentence each."""
    told = []
    for reason, count in data["refused"]["reasons"].items():
        ids = [row["id"] for row in data["each"] if row["refused"] == reason]
        told.append(f"{count} rows are not priced: {reason} ({', '.join([*ids[:3], *(['...'] if count > 3 else [])])})")
    told += [
        f"{count} rows of sources that are not known are taken to have run on {engine}; --engine names another"
        for engine, count in data["assumed_engines"].items()
    ]
    if not (data["time"]["count"] or data["memory"]["count"] or sum(data["oom"].values())):
        told.append("no row that is priced was measured: there is nothing to compare")
    return told + list(data["remarks"])


def accuracy_cells(part: Mapping[str, Any]) -> list[str]:
    """One row of the table as text."""
    time, memory, oom = part["time"], part["memory"], part["oom"]
    known = sum(oom.values())
    right = f"{oom['tp'] + oom['tn']}/{known}" if known else ""
    return [
        part.get("tier", ""), str(part["rows"]), str(part["priced"]),
        *(_percent(time[key]) for key in FIGURES), _number(time["tau"]), _percent(time["regret"]),
        *(_percent(memory[key]) for key in ("median_ape", "p90_ape", "bias")), right,
    ]  # fmt: skip


def accuracy_html(data: Mapping[str, Any], rows: Sequence[tuple[str, str, float, float]]) -> str:
    """A page of its own: the table, and predicted over measured seconds of every row as a plot.

    `rows` are (id, source, measured seconds, predicted seconds).
    """
    head = ("source", "tier", "rows", "priced", "time: median %", "mean %", "p90 %", "bias %", "tau", "regret %",
            "memory: median %", "p90 %", "bias %", "OOM right")  # fmt: skip
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in (name, *accuracy_cells(part))) + "</tr>"
        for name, part in [*data["by_source"].items(), ("all", data)]
    )
    reasons = "".join(f"<li>{escape(sentence)}</li>" for sentence in accuracy_remarks(data))
    lines = "".join(
        f"<tr><td>{escape(name)}</td><td>{measured:.4g}</td><td>{predicted:.4g}</td>"
        f"<td>{100 * (predicted / measured - 1):+.1f}</td></tr>"
        for name, _, measured, predicted in rows
    )
    return (
        "<!doctype html><meta charset='utf-8'><title>autoplan validate</title>"
        "<style>body{font:14px sans-serif;margin:2em}td,th{padding:2px 8px;text-align:right}"
        "td:first-child,th:first-child{text-align:left}table{border-collapse:collapse}tr:hover{background:#eee}"
        "circle{opacity:.5}</style><h1>Predictions beside published measurements</h1>"
        f"<table><tr>{''.join(f'<th>{escape(each)}</th>' for each in head)}</tr>{body}</table><ul>{reasons}</ul>"
        f"{_plot(rows)}<table><tr><th>row</th><th>measured s</th><th>predicted s</th><th>error %</th></tr>{lines}"
        "</table>\n"
    )


def _plot(rows: Sequence[tuple[str, str, float, float]]) -> str:
    """Predicted over measured seconds on logarithmic axes; the line is where they are equal."""
    if not rows:
        return ""
    values = [value for *_, measured, predicted in rows for value in (measured, predicted)]
    low, high = log10(min(values)), log10(max(values))
    span = max(high - low, 1e-9)

    def at(value: float) -> float:
        return _MARGIN + (log10(value) - low) / span * (_SIZE - 2 * _MARGIN)

    sources = list(dict.fromkeys(source for _, source, _, _ in rows))
    dots = "".join(
        f"<circle cx='{at(measured):.1f}' cy='{_SIZE - at(predicted):.1f}' r='3' "
        f"fill='hsl({360 * sources.index(source) // len(sources)},70%,45%)'><title>{escape(name)}: measured "
        f"{measured:.4g} s, predicted {predicted:.4g} s</title></circle>"
        for name, source, measured, predicted in rows
    )
    near, far = _MARGIN, _SIZE - _MARGIN
    return (
        f"<svg width='{_SIZE}' height='{_SIZE}'><line x1='{near}' y1='{far}' x2='{far}' y2='{near}' stroke='#888'/>"
        f"<text x='{_SIZE // 2}' y='{_SIZE - 10}'>measured, {10**low:.3g} to {10**high:.3g} s</text>"
        f"<text x='14' y='{_SIZE // 2}' transform='rotate(-90 14 {_SIZE // 2})'>predicted</text>{dots}</svg>"
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _signed(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
