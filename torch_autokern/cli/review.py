"""`autokern review`: kernels that wait for a person's word, one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from torch_autokern.cli import shell
from torch_autokern.errors import InvalidInputError, StoreError

if TYPE_CHECKING:
    from torch_autokern.search.review import Decision, Pending
    from torch_autokern.store.record import StoredRecord
    from torch_autokern.store.store import KernelStore

_ANSWERS: dict[str, Decision] = {"a": "approve", "r": "refuse", "b": "ban"}
_ASK = "[a]pprove, [r]efuse, [b]an, [s]kip, [q]uit"


def review(
    record: Annotated[str | None, typer.Argument(help="One record: its id or first digits. Without: all that wait.")] = None,
    approve: Annotated[bool, typer.Option("--approve", help="Approve the named record.")] = False,
    refuse: Annotated[bool, typer.Option("--refuse", help="Refuse the named record: it is not served.")] = False,
    ban: Annotated[bool, typer.Option("--ban", help="Ban the named record's source: neither served nor built again.")] = False,
    reason: Annotated[str, typer.Option(help="Why; kept with the word.")] = "",
    author: Annotated[str | None, typer.Option(help="Whose word it is (default: your user name).")] = None,
    run: Annotated[Path | None, typer.Option(help="A run's folder, to show differences to parents that were not kept.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Slower kernels than what is approved too.")] = False,
    require: Annotated[
        bool | None,
        typer.Option("--require-approval/--no-require-approval", help="Set the store's policy: serve approved kernels only."),
    ] = None,
    as_json: shell.AsJson = False,
) -> None:
    """Look at winners before they are served: source, idea, evidence, what deserves a second look, difference to the parent.

    A word is a note beside the record. Programs that run already hear of it at torch_autokern.refresh().
    """
    from torch_autokern.search import review as reviews
    from torch_autokern.store.folders import require_folder
    from torch_autokern.store.store import open_store

    words = [name for name, given in (("approve", approve), ("refuse", refuse), ("ban", ban)) if given]
    if len(words) > 1:
        raise InvalidInputError(f"--{' and --'.join(words)} contradict each other; give one")
    if words and (record is None or not reason.strip()):
        raise InvalidInputError(f"--{words[0]} needs a record and a reason: autokern review RECORD --{words[0]} --reason TEXT")
    store = open_store(choice=require_folder(to_write=bool(words) or require is not None))
    who = shell.user_name() if author is None else author
    if require is not None:
        _set_policy(store, require, who, as_json)
        return
    waiting = [store.find(record)] if record is not None else reviews.pending_records(store, all_records=every)
    known = {} if run is None else _sources(run)
    if words:
        _keep(store, waiting[0], words[0], who, reason, as_json)  # type: ignore[arg-type]
    elif as_json:
        shown = [msgspec.to_builtins(reviews.look_at(stored, store, known)) for stored in waiting]
        shell.print_json({"approval_demanded": store.demands_approval(), "pending": shown})
    else:
        _one_by_one(store, waiting, known, who)


def _one_by_one(store: KernelStore, waiting: Sequence[StoredRecord], known: dict[str, str], who: str) -> None:
    from torch_autokern.search.review import look_at
    from torch_autokern.store.store import open_store

    demand = "served once approved" if store.demands_approval() else "served unless refused"
    typer.echo(f"{len(waiting)} kernels wait for a word ({demand})")
    if not shell.is_interactive():
        for stored in waiting:
            _show(look_at(stored, store, known), brief=True)
        return
    writable = open_store(choice=store.choice)
    for stored in waiting:
        _show(look_at(stored, store, known))
        answer = ""
        while answer not in (*_ANSWERS, "s", "q"):
            answer = typer.prompt(_ASK, default="s", show_default=False).strip().lower()[:1]
        if answer == "q":
            return
        if answer in _ANSWERS:
            reason = ""
            while not reason:
                reason = typer.prompt("reason").strip()
            _keep(writable, stored, _ANSWERS[answer], who, reason, as_json=False)


def _keep(store: KernelStore, stored: StoredRecord, decision: Decision, who: str, reason: str, as_json: bool) -> None:
    from torch_autokern.search.review import decide

    try:
        given = decide(store, stored, decision, who, reason)
    except OSError as error:
        raise StoreError(f"the word was not kept: {error}") from error
    if as_json:
        shell.print_json({"decision": decision, "by": who, "reason": reason, "records": given})
        return
    done = {"approve": "approved", "refuse": "refused", "ban": "banned"}[decision]
    typer.echo(f"{done}: {', '.join(record_id[:12] for record_id in given)}")


def _set_policy(store: KernelStore, wanted: bool, who: str, as_json: bool) -> None:
    from torch_autokern.store.policy import Policy, write_policy
    from torch_autokern.store.store import utc_now

    root = store.write_root
    if root is None:
        raise StoreError("no folder of this store can be written, so it can hold no policy; set AUTOKERN_STORE")
    policy = Policy(wanted, who, utc_now())
    try:
        write_policy(root, policy)
    except OSError as error:
        raise StoreError(f"the policy was not kept: {error}") from error
    if as_json:
        shell.print_json({"folder": str(root), **msgspec.to_builtins(policy)})
        return
    typer.echo(f"{root}: {'only approved kernels are served' if wanted else 'kernels are served unless refused or banned'}")


def _sources(folder: Path) -> dict[str, str]:
    """A run's sources by candidate id."""
    from torch_autokern.errors import RunError
    from torch_autokern.search.nodes import Offered
    from torch_autokern.search.run import open_run

    opened = open_run(folder, replaying=True)
    found: dict[str, str] = {}
    for node in opened.every(Offered):
        with contextlib.suppress(RunError):
            found[node.candidate_id] = opened.text(node.source)
    return found


def _show(one: Pending, *, brief: bool = False) -> None:
    lines = [f"\n{one.record_id[:12]}  {one.call}", f"  {one.target}, torch {one.stock_build}"]
    lines += [
        f"  {t.regime}, {t.pages} pages: {t.ratio:.2f}x ({t.ratio_low:.2f} to {t.ratio_high:.2f}), {t.candidate_us:.1f} us"
        for t in one.timings
    ]
    lines += [f"  idea: {one.idea} (by {one.author}, {one.created})"]
    lines += [f"  evidence: {words}" for words in one.evidence]
    lines += [f"  look at: {words}" for words in one.risks] or ["  look at: nothing unusual was seen"]
    if not brief:
        lines += [f"  {one.language} source:", *(f"    {number:4} {line}" for number, line in _numbered(one.source))]
        if one.parent:
            lines += [f"  difference to {one.parent[:12]}:", *(f"    {line}" for line in one.difference.splitlines())]
        else:
            lines += ["  no parent is known"]
    typer.echo(shell.plain("\n".join(lines)))


def _numbered(source: str) -> list[tuple[int, str]]:
    return list(enumerate(source.splitlines(), 1))
