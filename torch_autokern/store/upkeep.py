"""Looking after one folder: check everything, set damaged files aside, clear, clean. Never fatal, never at import."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from torch_autokern.store.files import Unread, list_folder, remove_file, set_aside
from torch_autokern.store.indexing import derive_index, forget_key
from torch_autokern.store.layout import (
    damaged_folder,
    index_files,
    index_folder,
    is_temporary_file,
    key_folder,
    pending_folder,
    version_folder,
)
from torch_autokern.store.reading import Damaged, key_folders, read_record, record_files

STALE_TEMPORARY_S = 3_600.0


class FileFault(msgspec.Struct, frozen=True):
    """A file in a record's place that gives no record."""

    path: str
    kind: Literal["damaged", "foreign", "unreadable"]
    reason: str


class FolderReport(msgspec.Struct, frozen=True):
    """What a folder holds: whole records and their bytes, and every file that gives none."""

    root: str
    whole: int
    size_bytes: int
    faults: tuple[FileFault, ...]


class UpkeepCount(msgspec.Struct, frozen=True):
    """How many files an upkeep step took away: records, notes beside them, unfinished writes, files set aside before, and
    damaged files set aside now."""

    records: int = 0
    notes: int = 0
    temporary_files: int = 0
    set_aside_files: int = 0
    damaged: int = 0


def verify_folder(root: Path) -> FolderReport:
    """Read every record again and report; changes nothing."""
    whole = size = 0
    faults: list[FileFault] = []
    for path in record_files(root):
        outcome = read_record(path)
        if isinstance(outcome, Damaged):
            faults.append(FileFault(str(path), "damaged", outcome.reason))
        elif not isinstance(outcome, Unread):
            whole += 1
            size += _size_bytes(path)
        elif outcome.kind != "absent":
            faults.append(FileFault(str(path), outcome.kind, outcome.reason))
    return FolderReport(str(root), whole, size, tuple(faults))


def repair_folder(root: Path) -> UpkeepCount:
    """Set damaged records aside and derive the index again."""
    damaged = 0
    for path in record_files(root):
        outcome = read_record(path)
        if isinstance(outcome, Damaged):
            damaged += set_aside(path, outcome.identity, damaged_folder(root), root)
    derive_index(root, writable=True)
    return UpkeepCount(damaged=damaged)


def clean_folder(root: Path) -> UpkeepCount:
    """Remove what died writers left more than an hour ago, and everything that was set aside."""
    temporary = sum(remove_file(path) for path in _temporary_files(root) if _is_old(path))
    folder = damaged_folder(root)
    aside = sum(remove_file(folder / name) for name in list_folder(folder) if not is_temporary_file(name))
    return UpkeepCount(temporary_files=temporary, set_aside_files=aside)


def clear_folder(root: Path, key_digest: str | None = None) -> UpkeepCount:
    """Remove the records and notes of one key, or of all keys; whole entries only, records first."""
    records = notes = 0
    folders = list(key_folders(root)) if key_digest is None else [key_folder(root, key_digest)]
    for folder in folders:
        names = list_folder(folder)
        records += sum(remove_file(folder / name) for name in names if name.endswith(".akr"))
        notes += sum(remove_file(folder / name) for name in names if name.endswith(".json"))
        _remove_empty(folder)
    if key_digest is not None:
        forget_key(root, key_digest)
    else:
        for path in index_files(root):
            remove_file(path)
        for name in list_folder(pending_folder(root)):
            remove_file(pending_folder(root) / name)
    return UpkeepCount(records=records, notes=notes)


def _temporary_files(root: Path) -> Iterator[Path]:
    for folder in (root, version_folder(root), index_folder(root), damaged_folder(root), *key_folders(root)):
        for name in list_folder(folder):
            if is_temporary_file(name):
                yield folder / name


def _is_old(path: Path) -> bool:
    """Whether the file's own time is long past; a time in the future counts as now. Only eviction looks at times."""
    try:
        facts = os.lstat(path)
    except OSError:
        return False
    is_own = not hasattr(os, "geteuid") or facts.st_uid == os.geteuid()
    return is_own and time.time() - facts.st_mtime > STALE_TEMPORARY_S


def _size_bytes(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return 0


def _remove_empty(folder: Path) -> None:
    """A publisher that loses its folder here makes it again."""
    try:
        os.rmdir(folder)
    except OSError:
        return
