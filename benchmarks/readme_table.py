"""Puts the committed results into README.md, between its two markers: ``python -m benchmarks.readme_table``.

Numbers are copied from `demo.json`, `overhead.json` and `headline.json` in `benchmarks/results/`, never typed.
"""

from __future__ import annotations

from pathlib import Path

from torch_autokern.report.measurement import Measurement, Row, load_measurement
from torch_autokern.report.tables import milliseconds

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- results: begin", "<!-- results: end -->"


def _head(result: Measurement, more: str = "") -> list[str]:
    return [
        f"{result.device}, torch {result.versions['torch']}, {result.date[:10]}. Milliseconds; ratio is stock over autokern",
        f"with its 99 % interval; {more}errors are the largest, against float64.",
        "",
    ]


def _ratio(row: Row) -> str:
    high = "" if row.ratio_high is None else f", {row.ratio_high:.2f}"
    return f"{row.ratio:.2f}x [{row.ratio_low:.2f}{high}]"


def _served(row: Row) -> str:
    return "yes" if row.served is True else f"no: `{row.served}`"


def headline_lines(result: Measurement) -> list[str]:
    """The GPU's table in Markdown: the fastest other library and the time of the bytes alone beside stock and ours."""
    lines = [
        *_head(result, "limit is what moving the bytes takes; "),
        "| case | stock | autokern | ratio | best other library | limit | error | stock's error | served |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result.rows:
        peer = "" if row.best_peer_ms is None else f"{milliseconds(row.best_peer_ms)} ({row.best_peer})"
        limit = "" if row.limit_ms is None else milliseconds(row.limit_ms)
        lines.append(
            f"| {row.case} | {milliseconds(row.stock_ms)} | {milliseconds(row.autokern_ms)} | "
            f"{_ratio(row)} | {peer} | {limit} | "
            f"{row.error:.1e} | {row.stock_error:.1e} | {_served(row)} |"
        )
    return lines


def demo_lines(result: Measurement) -> list[str]:
    """The demo's table in Markdown, and its model in a sentence."""
    lines = [
        *_head(result),
        "| case | output pages | stock | autokern | ratio | error | stock's error | served |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result.rows:
        pages = ", ".join(part for part in (row.pages, row.note) if part)
        lines.append(
            f"| {row.case} | {pages} | {milliseconds(row.stock_ms)} | {milliseconds(row.autokern_ms)} | "
            f"{_ratio(row)} | {row.error:.1e} | {row.stock_error:.1e} | {_served(row)} |"
        )
    model = result.model
    if model is not None:
        lines += [
            "",
            f"{model.name}: stock {model.stock_ms:.1f} ms, optimised {model.autokern_ms:.1f} ms, **{model.ratio:.3f}x**; "
            f"smallest cosine between embeddings {model.min_cosine:.7f}.",
        ]
    return lines


def overhead_lines(result: Measurement) -> list[str]:
    """What the router costs a call, in Markdown."""
    lines = [
        "",
        f"Host time of one call, one thread, {result.device}, {result.date[:10]}; added to stock, median and spread:",
        "",
        "| call | stock us | added us | spread |",
        "|---|---|---|---|",
    ]
    for row in result.rows:
        if row.added_us is not None and row.added_us_low is not None:
            spread = f"{row.added_us_low:+.2f} to {row.added_us_high:+.2f}"
            lines.append(f"| {row.case} | {row.stock_ms * 1000:.2f} | {row.added_us:+.2f} | {spread} |")
    return lines


def main() -> None:
    """Rewrite README.md between its markers."""
    results = ROOT / "benchmarks" / "results"
    lines = [
        *headline_lines(load_measurement(results / "headline.json")),
        "",
        *demo_lines(load_measurement(results / "demo.json")),
        *overhead_lines(load_measurement(results / "overhead.json")),
    ]
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    marker, _, _ = rest.partition("\n")
    _, _, after = rest.partition(END)
    readme.write_text(before + BEGIN + marker + "\n" + "\n".join(lines) + "\n" + END + after)


if __name__ == "__main__":
    main()
