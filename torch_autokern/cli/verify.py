"""`autokern verify` and `autokern bench`: stored kernels before the judge again, on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from torch_autokern.cli import shell
from torch_autokern.errors import InvalidInputError

if TYPE_CHECKING:
    from torch_autokern.judge.stored import Benchmark, Verification
    from torch_autokern.store.record import StoredRecord
    from torch_autokern.store.store import KernelStore

EXIT_BROKEN = 1
ALL = "all"
_BASELINES = ("stock", "compile", "max-autotune")
_WeakBox = Annotated[
    bool, typer.Option("--allow-weak-box", help="Run stored kernels although this system cannot box them well.")
]


def verify(
    record: Annotated[str, typer.Argument(help="Record id, its first digits, or: all.")],
    allow_weak_box: _WeakBox = False,
    as_json: shell.AsJson = False,
) -> None:
    """Replay the evidence of stored records on this machine and say which still hold.

    Every trial runs again with its recorded seed. Exit code 0: all hold. 1: one does not. 2: it cannot be replayed here.
    """
    from torch_autokern.judge.stored import verify_record
    from torch_autokern.runtime.target import here_for

    store = _open()
    stored = list(store.records()) if record == ALL else [store.find(record)]
    found = []
    for one in stored:
        result = verify_record(one, here_for(one.record.target), allow_weak_box=allow_weak_box)
        found.append(result)
        if not as_json:
            _show(one, result)
    counts = {status: sum(result.status == status for result in found) for status in ("holds", "broken", "not_here")}
    if as_json:
        shell.print_json({"records": msgspec.to_builtins(found), **counts})
    elif record == ALL:
        typer.echo(f"{counts['holds']} hold, {counts['broken']} do not, {counts['not_here']} cannot be replayed here")
    if counts["broken"]:
        raise typer.Exit(EXIT_BROKEN)
    if record != ALL and counts["not_here"]:
        raise typer.Exit(shell.EXIT_MISTAKE)


def bench(
    record: Annotated[str, typer.Argument(help="Record id, or its first digits.")],
    against: Annotated[str, typer.Option(help="Baselines, with commas between them: stock, compile, max-autotune.")] = "stock",
    processes: Annotated[int, typer.Option(min=1, max=20, help="Repetitions; the interval is the union of theirs.")] = 3,
    allow_weak_box: _WeakBox = False,
    as_json: shell.AsJson = False,
) -> None:
    """Time a stored kernel anew: random ABBA blocks on changing contents, every output checked.

    Against stock in boxed processes with resident pages; against a compiled call in this process, fresh pages on both sides.
    Exit code 1: an output was wrong. 2: the machine is too busy to tell.
    """
    from torch_autokern.judge.outcome import Refusal
    from torch_autokern.judge.stored import bench_record, cannot_run_here
    from torch_autokern.runtime.target import here_for

    baselines = list(dict.fromkeys(against.split(",")))
    strange = [name for name in baselines if name not in _BASELINES]
    if strange:
        raise InvalidInputError(f"--against {strange[0]!r} is unknown; use {', '.join(_BASELINES)}, or several, as in a,b")
    stored = _open().find(record)
    reason = cannot_run_here(stored.record, here_for(stored.record.target))
    if reason is not None:
        raise InvalidInputError(f"record {stored.record_id[:12]} cannot run here: {reason}")
    found: list[Benchmark] = []
    for baseline in baselines:
        result = bench_record(stored, baseline, processes=processes, allow_weak_box=allow_weak_box)  # type: ignore[arg-type]
        if isinstance(result, Refusal):
            typer.echo(f"refused: {result.reason.value}\n{shell.plain(result.message)}")
            raise typer.Exit(EXIT_BROKEN)
        if result.timing is None:
            raise InvalidInputError(f"could not be timed against {baseline}: {result.disturbed}")
        found.append(result)
    _show_benchmarks(stored, found, as_json)


def _open() -> KernelStore:
    from torch_autokern.store.folders import require_folder
    from torch_autokern.store.store import open_store

    return open_store(choice=require_folder(to_write=False))


def _show(stored: StoredRecord, result: Verification) -> None:
    from torch_autokern.search.outcome import describe_key

    words = {"holds": "holds", "broken": "DOES NOT HOLD", "not_here": "not here"}[result.status]
    typer.echo(
        f"{result.record_id[:12]}  {shell.plain(describe_key(stored.record.key))}  {words}: {shell.plain(result.message)}"
    )


def _show_benchmarks(stored: StoredRecord, found: list[Benchmark], as_json: bool) -> None:
    from torch_autokern.runtime.target import here_for, stock_build
    from torch_autokern.search.outcome import describe_key
    from torch_autokern.store.store import utc_now

    record = stored.record
    here = here_for(record.target)
    timings = [(result.baseline, result.timing) for result in found if result.timing is not None]
    if as_json:
        document = {
            "record_id": stored.record_id,
            "baselines": [{"against": name, "timing": msgspec.to_builtins(timing)} for name, timing in timings],
            "target": msgspec.to_builtins(here), "torch": stock_build(), "when": utc_now(),
        }  # fmt: skip
        shell.print_json(document)
        return
    typer.echo(f"{stored.record_id[:12]}  {shell.plain(describe_key(record.key))}")
    typer.echo(f"{here.name} {here.arch}, {here.threads} threads, torch {stock_build()}, {utc_now()}")
    for name, timing in timings:
        typer.echo(
            f"{name} {timing.stock_us:.1f} us, kernel {timing.candidate_us:.1f} us: {timing.ratio:.2f}x "
            f"({timing.ratio_low:.2f} to {timing.ratio_high:.2f}, {timing.blocks} blocks in {timing.processes} repetitions, "
            f"{timing.pages} pages)"
        )
