"""Measurements as tables for a terminal."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from torch_autokern.report.measurement import Measurement, ModelResult, Row


def measurement_table(measurement: Measurement, title: str | None = None) -> Table:
    """A row a case: both times, the ratio with its interval, both errors, and whether a kernel served it."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("case", overflow="fold", min_width=28)
    table.add_column("output pages")
    for heading in ("stock ms", "own ms", "ratio", "interval", "error", "stock error"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("served", overflow="fold")
    for row in measurement.rows:
        table.add_row(*_cells(row))
    return table


def model_lines(model: ModelResult) -> list[str]:
    """The whole model in a few lines: its ratio, the pool's part on a line of its own, and the cosine."""
    lines = [
        f"{model.name}: stock {model.stock_ms:.1f} ms, optimised {model.autokern_ms:.1f} ms, "
        f"{_ratio(model.ratio)}{_interval(model.ratio_low, model.ratio_high)}"
    ]
    if model.pool_off_ms is not None and model.pool_off_ratio is not None:
        lines.append(
            f"  without the output pool: {model.pool_off_ms:.1f} ms, {_ratio(model.pool_off_ratio)}"
            f"{_interval(model.pool_off_ratio_low, model.pool_off_ratio_high)}; "
            f"the pool's part: {model.ratio / model.pool_off_ratio:.3f}x"
        )
    lines.append(f"  smallest cosine between an embedding of stock and of the optimised model: {model.min_cosine:.9f}")
    if model.note:
        lines.append(f"  {model.note}")
    return lines


def _cells(row: Row) -> list[str]:
    served = "[green]yes[/]" if row.served is True else f"[yellow]no: {escape(str(row.served))}[/]"
    pages = ", ".join(part for part in (row.pages, row.note) if part)
    return [
        escape(row.case),
        escape(pages),
        milliseconds(row.stock_ms),
        milliseconds(row.autokern_ms),
        _ratio(row.ratio),
        _interval(row.ratio_low, row.ratio_high).strip(),
        f"{row.error:.1e}",
        f"{row.stock_error:.1e}",
        served,
    ]


def milliseconds(value: float) -> str:
    """Three significant digits, or whole milliseconds above a hundred."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.3f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}x"


def _interval(low: float | None, high: float | None) -> str:
    if low is None:
        return ""
    return f" [{low:.2f}, {high:.2f}]" if high is not None else f" [{low:.2f}, ..]"
