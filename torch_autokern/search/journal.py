"""What was tried for a key and how it ended: one append-only file a key, so that a search that was stopped goes on.

A line is ``<first 16 hex digits of the JSON's SHA-256> <JSON>``. A torn line (a kill or a power cut in the middle of a write)
fails its checksum and costs only itself.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Literal

import msgspec

from torch_autokern.store.files import make_folders
from torch_autokern.store.key import canonical_json
from torch_autokern.store.layout import version_folder

MAX_JOURNAL_BYTES = 64 << 20
_CHECKSUM_DIGITS = 16

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
        body = canonical_json(trial)
        line = hashlib.sha256(body).hexdigest()[:_CHECKSUM_DIGITS].encode() + b" " + body + b"\n"
        if self._root is None or self._path is None:
            self._unwritten.append(trial)
            return
        try:
            make_folders(self._root, self._path.parent)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                # After a torn line the next one starts fresh.
                size = os.fstat(descriptor).st_size
                torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
                os.write(descriptor, b"\n" + line if torn else line)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
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
        return [trial for line in data.splitlines() if (trial := _decode(line)) is not None]


def _decode(line: bytes) -> Trial | None:
    checksum, _, body = line.partition(b" ")
    if hashlib.sha256(body).hexdigest()[:_CHECKSUM_DIGITS].encode() != checksum:
        return None
    try:
        return msgspec.json.decode(body, type=Trial)
    except (msgspec.DecodeError, RecursionError):
        return None
