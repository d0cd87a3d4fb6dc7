"""`autokern cache`: look at the store, check it, repair it, clear it. Needs no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from torch_autokern.cli import shell
from torch_autokern.errors import AutokernError, InvalidInputError
from torch_autokern.store.folders import require_folder
from torch_autokern.store.key import KernelKey
from torch_autokern.store.notes import Notes
from torch_autokern.store.record import StoredRecord
from torch_autokern.store.store import KernelStore, open_store
from torch_autokern.store.upkeep import FolderReport

app = typer.Typer(no_args_is_help=True, help="Look at the stored kernels, check them, repair or clear the store.")

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command("path")
def show_path(as_json: shell.AsJson = False) -> None:
    """Print the store's folder, why it is that one, and which were refused."""
    with _one_line_errors():
        choice = require_folder()
        if as_json:
            tried = [{"path": str(path), "reason": reason} for path, reason in choice.tried]
            shell.print_json({"path": str(choice.path), "why": choice.why, "tried": tried})
            return
        # The bare path alone on stdout, so that `cd "$(autokern cache path)"` works.
        typer.echo(choice.path)
        for path, reason in choice.tried:
            shell.say(f"refused {path}: {reason}")


@app.command("list")
def list_records(
    op: Annotated[str | None, typer.Option(help="Only this op, such as _softmax.")] = None, as_json: shell.AsJson = False
) -> None:
    """List the stored kernels, one a line: what for, where, how fast, how right."""
    with _one_line_errors():
        store = _open()
        rows = [_row(store, stored) for stored in store.records() if op in (None, stored.record.key.op)]
        if as_json:
            shell.print_json({"folder": _where(store), "records": rows})
            return
        if rows:
            shell.results().print(_record_table(rows))
        typer.echo(f"{len(rows)} records in {_where(store)}")


@app.command("show")
def show_record(
    record: Annotated[str, typer.Argument(help="Record id, or its first digits.")], as_json: shell.AsJson = False
) -> None:
    """Show one record whole: key, target, evidence, times, origin, notes."""
    with _one_line_errors():
        store = _open()
        stored = store.find(record)
        notes = store.notes(stored.record.key.digest, stored.record_id)
        document = {
            "record_id": stored.record_id,
            "key_digest": stored.record.key.digest,
            "record": msgspec.to_builtins(stored.record),
            "notes": msgspec.to_builtins(notes),
        }
        if as_json:
            shell.print_json(document)
            return
        console = shell.results()
        console.print(f"[bold]{stored.record_id}[/]  {_plain(_describe(stored.record.key))}", soft_wrap=True)
        console.print_json(msgspec.json.encode(document).decode())


@app.command("verify")
def verify(as_json: shell.AsJson = False) -> None:
    """Read every record again and check every byte; exit code 1 if any is damaged. Changes nothing."""
    with _one_line_errors():
        reports = _open().verify()
        if as_json:
            shell.print_json({"folders": msgspec.to_builtins(reports)})
        else:
            for report in reports:
                _print_report(report)
    if any(report.faults for report in reports):
        raise typer.Exit(1)


@app.command("repair")
def repair(as_json: shell.AsJson = False) -> None:
    """Set damaged records aside, derive the index again, remove what died writers left."""
    with _one_line_errors():
        store = open_store(choice=require_folder())
        repaired, cleaned = store.repair(), store.clean()
        if as_json:
            removed = msgspec.to_builtins(cleaned)
            shell.print_json({"folder": _where(store), "damaged": repaired.damaged, "removed": removed})
            return
        typer.echo(
            f"{_where(store)}: {repaired.damaged} damaged records taken out, "
            f"{cleaned.temporary_files} unfinished files and {cleaned.set_aside_files} files set aside removed"
        )


@app.command("clear")
def clear(
    record: Annotated[str | None, typer.Option(help="Only the key of this record (id, or its first digits).")] = None,
    yes: Yes = False,
    as_json: shell.AsJson = False,
) -> None:
    """Remove all records and notes, or those of one key. Asks first."""
    with _one_line_errors():
        store = open_store(choice=require_folder())
        stored = store.find(record) if record is not None else None
        what = f"the records of {_describe(stored.record.key)}" if stored else "all records"
        if not yes:
            if as_json:
                raise InvalidInputError("clear asks before it removes anything; with --json add --yes to answer in advance")
            typer.confirm(f"Remove {what} from {_where(store)}?", abort=True)
        count = store.clear(stored.record.key.digest if stored else None)
        if as_json:
            shell.print_json({"folder": _where(store), "records": count.records, "notes": count.notes})
            return
        typer.echo(f"removed {count.records} records and {count.notes} notes from {_where(store)}")


def _open() -> KernelStore:
    """The store, for commands that look and change nothing by intent."""
    return open_store(choice=require_folder(to_write=False))


def _where(store: KernelStore) -> str:
    return ", ".join(str(layer.root) for layer in store.layers)


def _row(store: KernelStore, stored: StoredRecord) -> dict[str, object]:
    record = stored.record
    notes = store.notes(record.key.digest, stored.record_id)
    verdict = record.verdict
    return {
        "record_id": stored.record_id,
        "key_digest": record.key.digest,
        "op": record.key.op,
        "call": _describe(record.key),
        "target": msgspec.to_builtins(record.target),
        "stock_build": record.stock_build,
        "accuracy_class": verdict.accuracy_class,
        "ratio_low": {timing.regime: timing.ratio_low for timing in verdict.timings},
        "author": record.provenance.author,
        "created": record.provenance.created,
        "size_bytes": sum(blob.size_bytes for blob in record.blobs),
        "state": _state(notes),
    }


def _state(notes: Notes) -> str:
    if notes.quarantine is not None:
        return "quarantined"
    if notes.approval is None:
        return "approval wanted" if notes.approval_wanted else ""
    return "approved" if notes.approval.approved else "banned" if notes.approval.banned else "refused"


def _record_table(rows: list[dict[str, object]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("record", "call", "target", "torch", "class", "at least", "author", "state"):
        table.add_column(heading, no_wrap=heading in ("record", "at least"), overflow="fold")
    for row in rows:
        target = msgspec.convert(row["target"], dict[str, object])
        ratios = msgspec.convert(row["ratio_low"], dict[str, float])
        threads = f" x{target['threads']}" if target["threads"] else ""
        table.add_row(
            str(row["record_id"])[:12],
            _plain(row["call"]),
            _plain(f"{target['name']} {target['arch']}{threads}"),
            _plain(row["stock_build"]),
            _plain(row["accuracy_class"]),
            ", ".join(f"{ratio:.2f}x {regime}" for regime, ratio in ratios.items()),
            _plain(row["author"]),
            str(row["state"]),
        )
    return table


def _describe(key: KernelKey) -> str:
    """One call in a line: op, sizes and dtype of each tensor, other arguments."""
    tensors = [f"{tensor.dtype}{list(tensor.sizes)}" if tensor else "None" for tensor in key.tensors]
    scalars = [f"{name}={value}" for name, value in sorted(key.scalars.items())]
    return f"{key.op}({', '.join(tensors + scalars)})"


def _plain(value: object) -> str:
    """Text from a record is data: no markup, no control characters."""
    text = "".join(letter if letter.isprintable() else "?" for letter in str(value))
    return text.replace("[", r"\[")


def _print_report(report: FolderReport) -> None:
    typer.echo(f"{report.root}: {report.whole} whole records, {report.size_bytes / 1e6:.1f} MB, {len(report.faults)} faults")
    for fault in report.faults:
        typer.echo(f"  {fault.kind}: {os.path.relpath(fault.path, report.root)}: {fault.reason}")
    if report.faults:
        typer.echo("  to set damaged records aside run: autokern cache repair")


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """A mistake is one line on stderr and exit code 2, also where this sub-command runs without the main command."""
    try:
        yield
    except AutokernError as error:
        shell.say(f"autokern: {shell.one_line(error)}")
        raise typer.Exit(shell.EXIT_MISTAKE) from error
