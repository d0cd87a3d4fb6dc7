"""`autokern explain`: for each key of a workload, which record serves it on this machine, or why none does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from torch_autokern.cli import shell
from torch_autokern.errors import InvalidInputError

if TYPE_CHECKING:
    from torch_autokern.store.key import KernelKey
    from torch_autokern.store.record import StoredRecord
    from torch_autokern.store.workload import Workload

_SHOWN_CANDIDATES = 3


class Candidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A record of the same op that does not serve the key, and the first condition that it fails."""

    record_id: str
    reason: str


class ExplainedKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key. `served_by` is a record id, or None; then `candidates` says why not, records of this very key first, and
    `cure` is the cheapest thing that would turn the miss into a hit. `ratio_low` is the lower bound of the serving record's
    speed-up; `share` the key's part of the recorded time, 0 if unknown.
    """

    call: str
    key_digest: str
    calls: int
    share: float
    served_by: str | None
    ratio_low: float | None
    accuracy_class: str | None
    candidates: tuple[Candidate, ...]
    cure: str = ""


def explain(
    what: Annotated[str, typer.Argument(metavar="WORKLOAD|KEY", help="A workload file, or a key's first digits.")],
    show_all: Annotated[bool, typer.Option("--all", help="Every candidate record, not only the nearest ones.")] = False,
    as_json: shell.AsJson = False,
) -> None:
    """Say for each key which record serves it here, or else the first failed condition of each candidate record."""
    explained = explain_workload(_workload(what)) if _is_file(what) else [explain_digest(what)]
    if as_json:
        shell.print_json(explained)
        return
    for key in explained:
        _print(key, None if show_all else _SHOWN_CANDIDATES)
    served = [key for key in explained if key.served_by]
    share = f" ({sum(key.share for key in served):.0%} of the recorded time)" if _is_file(what) else ""
    for line in _families(explained) if _is_file(what) else ():
        typer.echo(line)
    typer.echo(f"{len(served)} of {len(explained)} keys are served on this machine{share}")


def explain_workload(workload: Workload) -> list[ExplainedKey]:
    """Every key of a workload, by falling share of time."""
    from torch_autokern.runtime.session import session

    session().refresh()
    records = list(session().store.records())
    return [_explained(entry.key, records, entry.calls, workload.share(entry)) for entry in workload.entries]


def explain_digest(prefix: str) -> ExplainedKey:
    """The key in the store whose digest starts with `prefix`.

    Raises:
        InvalidInputError: no such key, or several.
    """
    from torch_autokern.runtime.session import session

    session().refresh()
    records = list(session().store.records())
    keys = {stored.record.key.digest: stored.record.key for stored in records}
    found = [key for digest, key in keys.items() if digest.startswith(prefix.lower())]
    if len(found) != 1:
        seen = "no key" if not found else f"{len(found)} keys"
        raise InvalidInputError(
            f"{prefix!r} is no file, and {seen} in the store starts with it; name a workload (autokern record -o FILE -- ...) "
            "or a key from: autokern cache list --json"
        )
    return _explained(found[0], records)


def _explained(key: KernelKey, records: Sequence[StoredRecord], calls: int = 0, share: float = 0.0) -> ExplainedKey:
    from torch_autokern.report.cures import cheapest_cure
    from torch_autokern.report.explanation import explain_key, summarise_key
    from torch_autokern.runtime.session import session
    from torch_autokern.runtime.table import ratio_low

    best, refusals = explain_key(key, session(), records=records)
    same_key = {stored.record_id for stored in records if stored.record.key.digest == key.digest}
    nearest_first = sorted(refusals, key=lambda refusal: refusal.record_id not in same_key)
    return ExplainedKey(
        call=summarise_key(key),
        key_digest=key.digest,
        calls=calls,
        share=share,
        served_by=best.record_id if best else None,
        ratio_low=ratio_low(best.record, "eager") if best else None,
        accuracy_class=best.record.verdict.accuracy_class if best else None,
        candidates=tuple(Candidate(refusal.record_id, refusal.why) for refusal in nearest_first),
        cure="" if best else cheapest_cure(key, session(), records),
    )


def _families(explained: Sequence[ExplainedKey]) -> list[str]:
    """A line an op family, by falling share: keys served and not, with their shares of the recorded time."""
    rows: dict[str, list[ExplainedKey]] = {}
    for key in explained:
        rows.setdefault(key.call.split()[0], []).append(key)
    lines = []
    for op, keys in sorted(rows.items(), key=lambda item: -sum(key.share for key in item[1])):
        served, missed = ([key for key in keys if bool(key.served_by) is wanted] for wanted in (True, False))
        shares = [sum(key.share for key in group) for group in (served, missed)]
        lines.append(f"{op}: {len(served)} keys served ({shares[0]:.1%}), {len(missed)} not ({shares[1]:.1%})")
    return lines


def _is_file(what: str) -> bool:
    return Path(what).exists() or "/" in what or what.endswith(".json")


def _workload(what: str) -> Workload:
    from torch_autokern.store.workload import load_workload

    return load_workload(Path(what))


def _print(key: ExplainedKey, limit: int | None) -> None:
    share = f"{key.share:6.1%}  {key.calls} calls  " if key.calls else ""
    typer.echo(f"{share}{key.call}")
    if key.served_by:
        typer.echo(f"        served by {key.served_by[:12]}, class {key.accuracy_class}, at least {key.ratio_low:.2f}x")
        return
    if not key.candidates:
        typer.echo("        stock: no record of this op in the store")
    for candidate in key.candidates[:limit]:
        typer.echo(f"        stock: record {candidate.record_id[:12]}: {candidate.reason}")
    rest = 0 if limit is None else len(key.candidates) - limit
    if rest > 0:
        typer.echo(f"        and {rest} more records of this op (--all)")
    typer.echo(f"        cheapest cure: {key.cure}")
