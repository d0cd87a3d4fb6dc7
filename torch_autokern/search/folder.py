"""Folders through which people and programs hand something to a run while it runs: read once, then moved aside."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path

import msgspec

TAKEN, REFUSED = "taken", "refused"
# A file that was touched less than this ago and does not parse may still be written.
SETTLED_SECONDS = 2.0


class GivenFile(msgspec.Struct, frozen=True):
    """A file as it was found; `data` is empty where it was too large."""

    name: str
    data: bytes
    age_seconds: float


def given_files(folder: Path, most_bytes: int, suffix: str = ".json") -> list[GivenFile]:
    """The regular files of that suffix, by name; links, hidden files and folders are left alone."""
    found = []
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    for name in names:
        if name.startswith(".") or not name.endswith(suffix):
            continue
        try:
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        with os.fdopen(descriptor, "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                continue
            data = file.read(most_bytes + 1)
        age = time.time() - facts.st_mtime
        found.append(GivenFile(name, b"" if len(data) > most_bytes else data, age))
    return found


def take(folder: Path, file: GivenFile) -> None:
    """Move a file to ``taken/``. Where that fails it is seen again, which is harmless."""
    _move(folder, file.name, TAKEN)


def refuse(folder: Path, file: GivenFile, reason: str) -> None:
    """Move a file to ``refused/`` with ``<name>.error.txt`` beside it."""
    _move(folder, file.name, REFUSED)
    with contextlib.suppress(OSError):
        (folder / REFUSED / f"{file.name}.error.txt").write_text(reason + "\n")


def _move(folder: Path, name: str, where: str) -> None:
    with contextlib.suppress(OSError):
        (folder / where).mkdir(exist_ok=True, mode=0o700)
        os.replace(folder / name, folder / where / name)
