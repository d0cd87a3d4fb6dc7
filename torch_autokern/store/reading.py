"""Records of one folder: which files there are, and each file's record after every check."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from torch_autokern.errors import RecordError
from torch_autokern.store.files import Unread, list_folder, read_file
from torch_autokern.store.layout import is_key_folder, is_record_file, key_folder, keys_folder, record_file
from torch_autokern.store.record import MAX_RECORD_BYTES, StoredRecord, decode_record


class Damaged(msgspec.Struct, frozen=True):
    """A file in a record's place whose bytes are not that record. `identity` is the file that was read."""

    reason: str
    identity: tuple[int, int]


def read_record(path: Path) -> StoredRecord | Unread | Damaged:
    """Read once, check every byte, and check that the record belongs under this name: a whole record under another's name
    is damage too."""
    content = read_file(path, MAX_RECORD_BYTES)
    if isinstance(content, Unread):
        return content
    try:
        stored = decode_record(content.data)
    except RecordError as error:
        return Damaged(str(error), content.identity)
    root = path.parents[4]
    if record_file(root, stored.record.key.digest, stored.record_id) != path:
        return Damaged("the record belongs under another name", content.identity)
    return stored


def key_folders(root: Path) -> Iterator[Path]:
    """Every key's folder, in order of the key's digest."""
    keys = keys_folder(root)
    for first in list_folder(keys):
        for name in list_folder(keys / first):
            if is_key_folder(name) and name.startswith(first):
                yield keys / first / name


def record_files(root: Path, key_digest: str | None = None) -> Iterator[Path]:
    """Every record's file, of one key or of all, in order of key digest and record id."""
    folders = key_folders(root) if key_digest is None else (key_folder(root, key_digest),)
    for folder in folders:
        for name in list_folder(folder):
            if is_record_file(name):
                yield folder / name
