"""`autokern warm`: search kernels for a recorded workload, offline, and store what is proved faster."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table

from torch_autokern.cli import shell
from torch_autokern.cli.accuracy import chosen
from torch_autokern.cli.progress import progress_bar
from torch_autokern.errors import InvalidInputError

if TYPE_CHECKING:
    from torch_autokern.search import outcome

_MARKS = {"won": "won", "already_there": "already there", "not_won": "not won", "not_tried": "not tried"}


def warm(
    workload: Annotated[Path, typer.Argument(help="What `autokern record` wrote.")],
    budget: Annotated[float | None, typer.Option(metavar="MINUTES", help="Stop after so long (default: try all).")] = None,
    accuracy: Annotated[str, typer.Option(help="The class to prove: stock, exact or tolerance.")] = "stock",
    atol: Annotated[float, typer.Option(help="Absolute bound for --accuracy tolerance.")] = 0.0,
    rtol: Annotated[float, typer.Option(help="Relative bound for --accuracy tolerance.")] = 0.0,
    allow_weak_box: Annotated[
        bool, typer.Option("--allow-weak-box", help="Run untrusted kernels although this system cannot box them well.")
    ] = False,
    as_json: shell.AsJson = False,
) -> None:
    """Search kernels for a recorded workload and store what is proved faster than stock.

    Stop it at any time: what is finished is stored, and running it again continues.
    """
    from torch_autokern.search import loop
    from torch_autokern.store.folders import require_folder
    from torch_autokern.store.store import open_store
    from torch_autokern.store.workload import load_workload

    if budget is not None and not (math.isfinite(budget) and budget > 0):
        raise InvalidInputError(f"--budget {budget} is no time; give minutes above 0")
    loaded = load_workload(workload)
    store = open_store(choice=require_folder())
    interrupted = False
    with progress_bar(quiet=as_json) as show:
        try:
            report = loop.warm(
                loaded,
                budget_seconds=None if budget is None else budget * 60,
                store=store,
                accuracy=chosen(accuracy, atol, rtol, "--accuracy"),
                on_event=show,
                allow_weak_box=allow_weak_box,
            )
        except loop.WarmInterrupted as stopped:
            report, interrupted = stopped.report, True
    if as_json:
        shell.print_json({"workload": str(workload), "store": str(store.write_root), **msgspec.to_builtins(report)})
    else:
        shell.results().print(_table(report))
        typer.echo(f"{report}, in {store.write_root}")
    if interrupted:
        shell.say(f"autokern: interrupted; what was finished is stored, continue with: autokern warm {workload}")
        raise typer.Exit(shell.EXIT_INTERRUPTED)
    if report.budget_over:
        shell.say(f"autokern: the budget ended before everything was tried; continue with: autokern warm {workload}")


def _table(report: outcome.WarmReport) -> Table:
    from torch_autokern.search.outcome import describe_key

    table = Table(box=None, pad_edge=False)
    for name in ("share", "key", "result", "ratio", "why"):
        table.add_column(name, justify="right" if name in ("share", "ratio") else "left", overflow="fold")
    for result in report.keys:
        ratio = f"{result.ratio:.2f}x" if result.ratio else ""
        if result.status in ("won", "already_there"):
            ratio += f" ({result.ratio_low:.2f}-{result.ratio_high:.2f})"
        table.add_row(f"{result.share:.1%}", describe_key(result.key), _MARKS[result.status], ratio, _plain(result.reason))
    return table


def _plain(text: str) -> str:
    """A candidate's or compiler's words must not be read as markup."""
    from rich.markup import escape

    return escape(text if len(text) <= 240 else text[:240] + " ...")
