"""A run beside its plan, as a table."""

from rich import box
from rich.console import RenderableType
from rich.table import Table

from planner.audit import Audit
from planner.units import format_bytes, format_seconds


def audit_table(found: Audit) -> RenderableType:
    """The step and its terms, then the memory of each rank; terms that are nothing in both are left out."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, caption_justify="left")
    for heading in ("", "predicted", "measured", "measured / predicted"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    step = (found.predicted_step_seconds, found.measured_step_seconds)
    table.add_row("step", *(format_seconds(value) for value in step), _ratio(*step))
    for term in found.terms:
        pair = (term.predicted_seconds, term.measured_seconds)
        if max(value or 0.0 for value in pair) > 0:
            table.add_row(f"  {term.name}", *("-" if v is None else format_seconds(v) for v in pair), _ratio(*pair))
    peaks = list(zip(found.predicted_peak_bytes, found.measured_peak_bytes, strict=True))
    kind = f" ({found.memory_kind})" if found.memory_kind else ""
    for rank, (predicted, measured) in enumerate(peaks):
        table.add_row(
            f"peak memory{f' of rank {rank}' if len(peaks) > 1 else ''}{kind}",
            format_bytes(predicted),
            "-" if measured is None else format_bytes(measured),
            _ratio(predicted, measured),
        )
    spread = f", the middle half of which are within {found.spread:.0%} of each other" if found.num_steps > 3 else ""
    table.caption = (
        f"measured: the median of {found.num_steps} step{'s' * (found.num_steps > 1)}{spread}; "
        f"{format_seconds(found.between_seconds)} between steps, for the next batch"
    )
    return table


def _ratio(predicted: float | None, measured: float | None) -> str:
    return f"{measured / predicted:.2f}" if predicted and measured is not None else "-"
