"""What was tried for a key and how it ended, by whichever run: one append-only file a key in the store (`lines.py`), so that
no run repeats a trial of another and a search that was stopped goes on. The story of one run is in its folder (`run.py`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from torch_autokern.search.lines import append_line, whole_lines
from torch_autokern.store.files import make_folders
from torch_autokern.store.key import canonical_json
from torch_autokern.store.layout import version_folder

MAX_JOURNAL_BYTES = 64 << 20

Stage = Literal["screened", "accepted", "refused"]


class Trial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far one candidate came, in one context (target, stock build, judge version, accuracy, compiler).

    `stage`: ``screened`` waits for a verdict, ``accepted`` and ``refused`` are final. `reason` is the judge's, `message` its
    words; ratios are stock over candidate, 0 where it was not timed. `judged` says that a full verdict was spent on it.
    """

    context: str
    candidate_id: str
    stage: Stage
    reason: str = ""
    message: str = ""
    ratio: float = 0.0
    ratio_low: float = 0.0
    ratio_high: float = 0.0
    judged: bool = False


class KeyJournal:
    """The trials of one key. Without a folder, or where it cannot be written, they last as long as this object."""

    def __init__(self, root: Path | None, key_digest: str) -> None:
        self._root = root
        self._path = None if root is None else version_folder(root) / "runs" / f"{key_digest[:32]}.jsonl"
        self._unwritten: list[Trial] = []

    def size_bytes(self) -> int:
        """Length of the file: it grows while another process works on this key."""
        try:
            return 0 if self._path is None else os.stat(self._path).st_size
        except OSError:
            return 0

    def read(self, context: str) -> dict[str, Trial]:
        """The last trial of each candidate in this context."""
        found: dict[str, Trial] = {}
        for trial in self.every():
            if trial.context == context:
                found[trial.candidate_id] = trial
        return found

    def every(self) -> list[Trial]:
        """All trials of all contexts, in the order in which they were noted."""
        return [*self._stored(), *self._unwritten]

    def append(self, trial: Trial) -> None:
        """Add a trial, durably where the disk allows it."""
        if self._root is None or self._path is None:
            self._unwritten.append(trial)
            return
        try:
            make_folders(self._root, self._path.parent)
            append_line(self._path, canonical_json(trial))
        except OSError:
            # A full disk costs a later run some repeated work, never this run its result.
            self._unwritten.append(trial)

    def _stored(self) -> list[Trial]:
        if self._path is None:
            return []
        try:
            with open(self._path, "rb") as file:
                data = file.read(MAX_JOURNAL_BYTES)
        except OSError:
            return []
        return [trial for body in whole_lines(data) if (trial := _decode(body)) is not None]


def _decode(body: bytes) -> Trial | None:
    try:
        return msgspec.json.decode(body, type=Trial)
    except (msgspec.DecodeError, RecursionError):
        return None
