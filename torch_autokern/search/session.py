"""A run with everything that it needs around it: its proposers, models, meter and engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch_autokern.search.author import Author
from torch_autokern.search.bank import Bank
from torch_autokern.search.budget import Clock, Meter
from torch_autokern.search.engine import Engine, LocalEngine
from torch_autokern.search.inbox import Inbox
from torch_autokern.search.limits import effective
from torch_autokern.search.llm import Models
from torch_autokern.search.loop import play
from torch_autokern.search.outcome import Progress, SearchReport
from torch_autokern.search.proposers import Proposer, built_in
from torch_autokern.search.redact import Redactor
from torch_autokern.search.run import Run
from torch_autokern.store.store import KernelStore


def redactor(key: str | None) -> Redactor:
    """What takes the server's key out of all that is kept.

    Raises:
        InvalidInputError: the key is too short to be found safely.
    """
    return Redactor((key,) if key else ())


def go(
    run: Run, store: KernelStore, *, key: str | None = None, base_url: str | None = None, allow_weak_box: bool = False,
    engine: Engine | None = None, on_event: Callable[[Progress], None] | None = None,
) -> SearchReport:  # fmt: skip
    """Start or go on with a run that has a folder.

    Args:
        key: of the models' server; kept nowhere.
        base_url: of the models' server, with a password if it needs one; by default what the manifest says.

    Raises:
        The errors of `loop.play`.
    """
    ask = effective(run)
    meter = Meter(run, ask.limits, ask.prices)
    clock = Clock(ask.limits.seconds, run.elapsed())
    models = Models(run, ask, meter, lambda: clock, key, base_url=base_url)
    made: dict[str, Callable[[], Proposer]] = {
        "llm": lambda: Author(run, models, run.manifest.accuracy),
        "templates": built_in,
        "bank": lambda: Bank(store),
        "inbox": lambda: Inbox(_inbox(run), run.manifest.accuracy, ask.inbox_seconds, clock),
    }
    proposers = [made[name]() for name in ask.proposers]
    return play(run, ask, store, engine or LocalEngine(allow_weak_box=allow_weak_box), proposers, meter, on_event, clock)


def _inbox(run: Run) -> Path:
    assert run.folder is not None
    return run.folder / "inbox"
