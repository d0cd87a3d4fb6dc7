"""`autokern replay`: a run again from its kept replies, without any model, down to the records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from torch_autokern.cli import shell

if TYPE_CHECKING:
    from torch_autokern.search.replay import ReplayedRecord

EXIT_DIFFERS = 1
_MARKS = {True: "same", False: "another", None: "not asked"}


def replay(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    records: Annotated[
        bool, typer.Option("--records/--no-records", help="Without records: derive the story only; needs no compiler.")
    ] = True,
    allow_weak_box: Annotated[
        bool, typer.Option("--allow-weak-box", help="Run untrusted kernels although this system cannot box them well.")
    ] = False,
    as_json: shell.AsJson = False,
) -> None:
    """Derive every record of a run again: prompts, replies, candidates, libraries, evidence.

    Exit code 0: all that can be derived here holds. 1: something came out differently.
    """
    from torch_autokern.search import replay as replays

    show = None if as_json else _show
    report = replays.replay(run, records=records, allow_weak_box=allow_weak_box, on_record=show)
    if as_json:
        shell.print_json({**msgspec.to_builtins(report), "holds": report.holds})
    else:
        for words in (*report.differences, *(f"{name}: in the journal, not derived" for name in report.unread)):
            typer.echo(shell.plain(f"differs: {words}"))
        if report.other_prompts:
            typer.echo(
                f"{len(report.other_prompts)} prompts would be worded otherwise by this version; their replies were used"
            )
        typer.echo(
            f"{report.nodes} nodes, {report.rounds} rounds, {report.replies} replies, {report.candidates} candidates: "
            f"{'all derived again' if report.holds else 'not as recorded'}"
        )
    if not report.holds:
        raise typer.Exit(EXIT_DIFFERS)


def _show(record: ReplayedRecord) -> None:
    same = f"record {record.record_id[:12]} {_MARKS[record.same_record]}, library {_MARKS[record.same_binary]}"
    words = f"{record.node}: {record.status}, {record.ratio:.2f}x; {same}, errors {_MARKS[record.same_errors]}"
    typer.echo(shell.plain(f"{words}: {record.message}"))
