"""Keeping the index of a folder: announce before a publish, add what is pending when opening, derive it again when asked."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from torch_autokern.store.files import list_folder, make_folders, publish_file, remove_file, sync_folders
from torch_autokern.store.index import Accepts, IndexRow, RecordIndex, encode_index, read_index, row_of
from torch_autokern.store.layout import index_file, key_folder, pending_folder, pending_name
from torch_autokern.store.lock import work_lock
from torch_autokern.store.reading import read_record, record_files
from torch_autokern.store.record import StoredRecord

COMPACT_ABOVE = 256
_STALE_PENDING_S = 86_400.0
_LOCK = "index"


class FolderIndex(msgspec.Struct, frozen=True):
    """The records of one folder: the listed ones, and by key those published since."""

    listed: RecordIndex
    recent: dict[str, tuple[IndexRow, ...]]

    def lookup(self, key_digest: str) -> tuple[IndexRow, ...]:
        """The rows of one key."""
        return self.listed.lookup(key_digest) + self.recent.get(key_digest, ())

    def rows(self, accepts: Accepts | None = None) -> list[IndexRow]:
        """All rows, or those whose target and stock build `accepts`."""
        recent = (row for rows in self.recent.values() for row in rows)
        kept = (row for row in recent if accepts is None or accepts(row.target, row.stock_build))
        return [*self.listed.rows(accepts), *kept]


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


def open_index(root: Path, *, writable: bool) -> FolderIndex:
    """The index of a folder with what is pending; derived from the records where it is missing or damaged."""
    pending = list_folder(pending_folder(root))  # before the list: whoever merges writes the list first
    listed = read_index(root)
    if listed is None:
        return derive_index(root, writable=writable)
    if writable and len(pending) > COMPACT_ABOVE:
        _merge_pending(root)
    return FolderIndex(listed, _recent_rows(root, pending, listed))


def derive_index(root: Path, *, writable: bool) -> FolderIndex:
    """Read every record and list the whole ones; write the list where that is possible."""
    with work_lock(root if writable else None, _LOCK, timeout_s=0.0) as held:
        pending = list_folder(pending_folder(root))
        whole = (stored for stored in map(read_record, record_files(root)) if isinstance(stored, StoredRecord))
        rows = [row_of(stored) for stored in whole]
        if held and (rows or os.path.lexists(index_file(root))):
            _write(root, rows, pending)
    return FolderIndex(RecordIndex(encode_index(rows)), {})


def forget_key(root: Path, key_digest: str) -> None:
    """Take a key's rows out of the list after its records are gone. Rows left behind would only cost a failed read."""
    with work_lock(root, _LOCK, timeout_s=5.0) as held:
        listed = read_index(root)
        if held and listed is not None and listed.lookup(key_digest):
            _write(root, [row for row in listed.rows() if row.key_digest != key_digest], [])


def _merge_pending(root: Path) -> None:
    """Write what is listed and what is pending as one list. Both are read under the lock: a list read before it could lack
    what another process merged, and announced no longer, meanwhile."""
    with work_lock(root, _LOCK, timeout_s=0.0) as held:
        pending = list_folder(pending_folder(root))
        listed = read_index(root)
        if held and listed is not None:
            _write(root, FolderIndex(listed, _recent_rows(root, pending, listed)).rows(), pending)


def _recent_rows(root: Path, pending: list[str], listed: RecordIndex) -> dict[str, tuple[IndexRow, ...]]:
    recent: dict[str, dict[str, IndexRow]] = {}
    for key in sorted({name.split("-")[0] for name in pending}):
        if len(key) != 32 or set(key) - set("0123456789abcdef"):
            continue
        for path in record_files(root, key_folder(root, key).name):
            stored = read_record(path)
            if isinstance(stored, StoredRecord):
                row = row_of(stored)
                if row not in listed.lookup(row.key_digest):
                    recent.setdefault(row.key_digest, {})[row.record_id] = row
    return {key: tuple(rows.values()) for key, rows in recent.items()}


def _touch(path: Path, root: Path) -> None:
    make_folders(root, path.parent)
    # Exclusive: one that is there already is as good, and may have lost its modes to a umask.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600))


def _write(root: Path, rows: list[IndexRow], pending: list[str]) -> None:
    """Replace the list, then drop the announcements that it covers. Only for a holder of the lock, and only a saving: on an
    error the old list and all announcements stay."""
    try:
        publish_file(index_file(root), encode_index(rows), root, replace=True)
    except OSError:
        return
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
