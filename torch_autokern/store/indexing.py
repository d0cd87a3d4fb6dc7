"""Keeping the index of a folder: announce before a publish, add what is pending when opening, derive it again when asked.

The index is one or more list files that never change. Merging writes one more file with everything it read, then removes what
it read: the list files and the announcements. Two processes that merge at once both leave complete files, so the lock only
saves the second one's work.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from torch_autokern.store.files import list_folder, make_folders, publish_file, remove_file, sync_folders
from torch_autokern.store.index import Accepts, IndexRow, RecordIndex, encode_index, read_index, row_of
from torch_autokern.store.layout import index_files, key_folder, new_index_file, pending_folder, pending_name
from torch_autokern.store.lock import work_lock
from torch_autokern.store.reading import read_record, record_files
from torch_autokern.store.record import StoredRecord

COMPACT_ABOVE = 256
MERGE_ABOVE_FILES = 4
_LISTING_TRIES = 3
_STALE_PENDING_S = 86_400.0
_LOCK = "index"


class FolderIndex(msgspec.Struct, frozen=True):
    """The records of one folder: the listed ones, and by key those published since."""

    listed: tuple[RecordIndex, ...]
    recent: dict[str, tuple[IndexRow, ...]]

    def lookup(self, key_digest: str) -> tuple[IndexRow, ...]:
        """The rows of one key; a row may be there twice."""
        rows = [row for listed in self.listed for row in listed.lookup(key_digest)]
        return (*rows, *self.recent.get(key_digest, ()))

    def rows(self, accepts: Accepts | None = None) -> list[IndexRow]:
        """All rows, or those whose target and stock build `accepts`; a row may be there twice."""
        rows = [row for listed in self.listed for row in listed.rows(accepts)]
        recent = (row for group in self.recent.values() for row in group)
        return [*rows, *(row for row in recent if accepts is None or accepts(row.target, row.stock_build))]


def announce(root: Path, key_digest: str, record_id: str) -> None:
    """Tell readers of the index that this record may exist from now on.

    Raises:
        OSError: the announcement could not be written.
    """
    path = pending_folder(root) / pending_name(key_digest, record_id)
    try:
        _touch(path, root)
    except FileNotFoundError:  # the folder was wiped between two steps
        _touch(path, root)
    sync_folders(root, path.parent)


def confirm(root: Path, key_digest: str, record_id: str) -> None:
    """Tell readers again, now that the record is there, if the announcement was taken away meanwhile: a clock that jumped, or a
    server's clock that is a day behind, makes it look like one of a publish that died.

    Raises:
        OSError: the announcement could not be written.
    """
    if not os.path.lexists(pending_folder(root) / pending_name(key_digest, record_id)):
        announce(root, key_digest, record_id)  # where a merge has listed the record already, the next one takes this away


def open_index(root: Path, *, writable: bool) -> FolderIndex:
    """The index of a folder with what is pending; derived from the records where it is missing or damaged."""
    pending = list_folder(pending_folder(root))  # before the lists: whoever merges writes its list first
    paths, listed = _read_lists(root)
    if not listed:
        return derive_index(root, writable=writable)
    index = FolderIndex(listed, _recent_rows(root, pending, listed))
    if writable and (len(pending) > COMPACT_ABOVE or len(paths) > MERGE_ABOVE_FILES):
        with work_lock(root, _LOCK, timeout_s=0.0) as held:
            if held:
                _replace(root, index.rows(), paths, pending)
    return index


def derive_index(root: Path, *, writable: bool) -> FolderIndex:
    """Read every record and list the whole ones; write the list where that is possible."""
    pending = list_folder(pending_folder(root))
    paths = index_files(root)
    whole = (stored for stored in map(read_record, record_files(root)) if isinstance(stored, StoredRecord))
    rows = [row_of(stored) for stored in whole]
    if writable and (rows or paths):
        _replace(root, rows, paths, pending)
    return FolderIndex((RecordIndex(encode_index(rows)),), {})


def forget_key(root: Path, key_digest: str) -> None:
    """Take a key's rows out of the lists after its records are gone. Rows left behind would only cost a failed read."""
    paths, listed = _read_lists(root)
    if any(index.lookup(key_digest) for index in listed):
        rows = [row for index in listed for row in index.rows() if row.key_digest != key_digest]
        _replace(root, rows, paths, [])


def _read_lists(root: Path) -> tuple[list[Path], tuple[RecordIndex, ...]]:
    """All list files and their contents; no contents where there is no file or one is damaged."""
    paths: list[Path] = []
    for _ in range(_LISTING_TRIES):
        paths = index_files(root)
        listed = [read_index(path) for path in paths]
        whole = tuple(index for index in listed if index is not None)
        if len(whole) == len(paths):
            return paths, whole
        if all(index is not None or os.path.lexists(path) for path, index in zip(paths, listed, strict=True)):
            break  # damaged, not merged away by another process since the listing
    return paths, ()


def _recent_rows(root: Path, pending: list[str], listed: tuple[RecordIndex, ...]) -> dict[str, tuple[IndexRow, ...]]:
    recent: dict[str, dict[str, IndexRow]] = {}
    for key in sorted({name.split("-")[0] for name in pending}):
        if len(key) != 32 or set(key) - set("0123456789abcdef"):
            continue
        for path in record_files(root, key_folder(root, key).name):
            stored = read_record(path)
            if isinstance(stored, StoredRecord):
                row = row_of(stored)
                if not any(row in index.lookup(row.key_digest) for index in listed):
                    recent.setdefault(row.key_digest, {})[row.record_id] = row
    return {key: tuple(rows.values()) for key, rows in recent.items()}


def _touch(path: Path, root: Path) -> None:
    make_folders(root, path.parent)
    # Exclusive: one that is there already is as good, and may have lost its modes to a umask.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600))


def _replace(root: Path, rows: list[IndexRow], paths: list[Path], pending: list[str]) -> None:
    """Write one list of `rows`, then remove the list files and announcements that it covers; on an error all of them stay."""
    try:
        publish_file(new_index_file(root), encode_index(rows), root)
    except OSError:
        return
    for path in paths:
        remove_file(path)
    listed = {pending_name(row.key_digest, row.record_id) for row in rows}
    for name in pending:
        path = pending_folder(root) / name
        if name in listed or _is_stale(path):
            remove_file(path)


def _is_stale(path: Path) -> bool:
    """Whether an announcement is so old that its publish must have died; a time in the future counts as now."""
    try:
        return time.time() - os.lstat(path).st_mtime > _STALE_PENDING_S
    except OSError:
        return False
