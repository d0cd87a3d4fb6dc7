"""What a search does now, on stderr: a bar for `warm`, `search`, `demo` and the benchmarks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from torch_autokern.cli import shell

if TYPE_CHECKING:
    from torch_autokern.search import outcome

_WORDS = {
    "waiting": "waiting for another process",
    "judging": "judging finalists",
    "key_done": "next key",
    "finished": "done",
}


@contextlib.contextmanager
def progress_bar(*, quiet: bool = False) -> Iterator[Callable[[outcome.Progress], None]]:
    """A function that shows events of a search (`on_event=`): keys done, what happens now, how much was built, screened, judged
    and refused, the best so far, time left. Where a key ends, and where a person is waited for, a line stays. `quiet`: nothing,
    except that a person is waited for."""
    console = shell.messages()
    columns = (
        BarColumn(bar_width=20), TextColumn("{task.completed:.0f}/{task.total:.0f} keys"), TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=quiet, transient=True) as bar:
        task = bar.add_task("starting", total=0)

        def show(event: outcome.Progress) -> None:
            bar.update(task, total=event.keys_total, completed=event.keys_done, description=_line(event))
            if event.activity in ("paused", "asking"):
                shell.say(shell.plain(f"autokern: {event.message}"))
            elif event.activity == "key_done" and event.message and not quiet:
                bar.console.print(shell.plain(event.message), markup=False)

        yield show


def _line(event: outcome.Progress) -> str:
    counts = f"{event.built} built, {event.screened} screened, {event.judged} judged, {event.refused} refused"
    parts = [_WORDS.get(event.activity, event.activity), counts, f"{event.rate_per_minute:.0f} a minute"]
    if event.best_ratio:
        parts.append(f"best {event.best_ratio:.2f}x")
    if event.seconds_left is not None:
        parts.append(f"{event.seconds_left // 60:.0f}:{event.seconds_left % 60:02.0f} left")
    return ", ".join(parts)
