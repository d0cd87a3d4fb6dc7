"""What a run is asked for now: its manifest, and what was changed while it ran or when it was taken up again."""

from __future__ import annotations

import msgspec

from torch_autokern.errors import RunError
from torch_autokern.search.manifest import Ask, Goal, Limits, StuckPolicy
from torch_autokern.search.nodes import Intervention
from torch_autokern.search.run import Run
from torch_autokern.store.store import utc_now

ACTION = "limits"


class Changes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """New values; None: as before."""

    rounds: int | None = None
    goal: Goal | None = None
    limits: Limits | None = None
    stuck: StuckPolicy | None = None


def effective(run: Run, round_name: str = "") -> Ask:
    """The manifest's ask with all changes, the last one counting; or those that a round ("k0.r2") began with.

    Raises:
        RunError: a change cannot be read.
    """
    ask = run.manifest.ask
    for node in run.interventions(round_name):
        if node.action != ACTION:
            continue
        try:
            changes = msgspec.json.decode(node.text, type=Changes)
        except msgspec.DecodeError as error:
            raise RunError(f"intervention {node.id} cannot be read: {error}") from error
        ask = changed(ask, changes)
    return ask


def changed(ask: Ask, changes: Changes) -> Ask:
    """An ask with new values."""
    new = {name: value for name in ("rounds", "goal", "stuck") if (value := getattr(changes, name)) is not None}
    if changes.limits is not None:
        limits = {name: value for name in Limits.__struct_fields__ if (value := getattr(changes.limits, name)) is not None}
        new["limits"] = msgspec.structs.replace(ask.limits, **limits)
    return msgspec.structs.replace(ask, **new)


def note(run: Run, changes: Changes, author: str) -> None:
    """Keep a change as a node, where it changes anything."""
    if changed(effective(run), changes) == effective(run):
        return
    number = len(run.interventions())
    text = msgspec.json.encode(changes).decode()
    run.add(Intervention(f"run.{ACTION}.{number}", run.now(), ACTION, text, author, utc_now(), ""))
