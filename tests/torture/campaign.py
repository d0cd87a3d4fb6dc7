"""The parts of the campaign, their sizes, and how a run is cut into slices that can be resumed."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from tests.torture.books import TALLY

Trial = Callable[[Path], list[str]]
_FAULTS_KEPT = 20
_FAULTS_A_TRIAL = 4


class Part(msgspec.Struct, frozen=True):
    """One way of striking. `trials` gives the trials of a scratch folder in an order that never changes; None as a size means
    all of them. One trial counts as `units`. `refusal` says why this machine cannot run it, or None."""

    name: str
    trials: Callable[[Path], Iterator[Trial]]
    short: int | None
    long: int | None
    refusal: Callable[[Path], str | None] = lambda _folder: None
    units: int = 1


class Figure(msgspec.Struct):
    """What a part has shown so far. `trials` were made, in `bad` of them something was wrong; `done` says that its size is
    reached. `also` counts what trials counted by the way."""

    trials: int = 0
    bad: int = 0
    done: bool = False
    seconds: float = 0.0
    skipped: str = ""
    faults: list[str] = []
    also: dict[str, int] = {}


def run_part(part: Part, size: int | None, figure: Figure, until: float) -> Figure:
    """Go on with a part where `figure` left off, until its size is reached or the clock (`time.monotonic`) says `until`."""
    folder = scratch_folder()
    try:
        figure.skipped = part.refusal(folder) or ""
        if figure.skipped:
            figure.done = True
            return figure
        started = time.monotonic()
        first = figure.trials // part.units
        last = None if size is None else -(-size // part.units)
        for trial in itertools.islice(part.trials(folder), first, last):
            if time.monotonic() > until:
                break
            _try(trial, folder, figure, part.units)
        else:
            figure.done = True
        figure.seconds = round(figure.seconds + time.monotonic() - started, 1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return figure


def _try(trial: Trial, folder: Path, figure: Figure, units: int) -> None:
    TALLY.clear()
    wrong = trial(folder)
    figure.trials += units
    figure.bad += bool(wrong)
    figure.faults = (figure.faults + [_shortened(each) for each in wrong[:_FAULTS_A_TRIAL]])[:_FAULTS_KEPT]
    for name, count in TALLY.items():
        figure.also[name] = figure.also.get(name, 0) + count
    shutil.rmtree(folder / "store", ignore_errors=True)


def _shortened(fault: str) -> str:
    """The first line and the last two of a traceback."""
    lines = fault.strip().splitlines()
    return (" ... ".join([lines[0], *lines[-2:]]) if len(lines) > 3 else fault)[:600]


def scratch_folder() -> Path:
    """A private folder, in memory where there is such a disk: syncing thousands of files there costs nothing."""
    in_memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="autokern-torture-", dir=in_memory if in_memory.is_dir() else None))
