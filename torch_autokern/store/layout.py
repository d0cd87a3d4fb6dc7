"""Names inside a store folder: ``<root>/v1/keys/<aa>/<key>/<record>.akr`` and small notes beside each record.

Names carry the first 128 bits of a SHA-256; the file carries all 256 and is checked against its place. No name is longer than
64 characters and no path below the root longer than 100, because whole paths are limited to 260 on some systems. The format
version is a folder, so versions that share a root do not see each other's files.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

VERSION_FOLDER = "v1"
RECORD_SUFFIX = ".akr"
_DIGITS = 32
_KEY_FOLDER = re.compile(r"[0-9a-f]{32}")
_RECORD_FILE = re.compile(r"[0-9a-f]{32}\.akr")
_INDEX_FILE = re.compile(r"[0-9a-f]{32}\.idx")
_TEMPORARY_FILE = re.compile(r"\.[0-9a-f]{32}\.tmp")


def version_folder(root: Path) -> Path:
    """Everything of this format version."""
    return root / VERSION_FOLDER


def keys_folder(root: Path) -> Path:
    """Parent of all key folders."""
    return root / VERSION_FOLDER / "keys"


def damaged_folder(root: Path) -> Path:
    """Where damaged files are set aside."""
    return root / VERSION_FOLDER / "damaged"


def locks_folder(root: Path) -> Path:
    """Where lock files live."""
    return root / VERSION_FOLDER / "locks"


def index_folder(root: Path) -> Path:
    """Where the derived lists of records live."""
    return root / VERSION_FOLDER / "index"


def index_files(root: Path) -> list[Path]:
    """All list files, sorted; none where the folder is absent, unreadable or a link."""
    folder = index_folder(root)
    try:
        names = [] if os.path.islink(folder) else sorted(os.listdir(folder))
    except OSError:
        return []
    return [folder / name for name in names if _INDEX_FILE.fullmatch(name)]


def new_index_file(root: Path) -> Path:
    """A list file of a name that nobody else picks."""
    return index_folder(root) / f"{secrets.token_hex(16)}.idx"


def pending_folder(root: Path) -> Path:
    """One empty file for each record that the index may not list yet."""
    return root / VERSION_FOLDER / "pending"


def key_folder(root: Path, key_digest: str) -> Path:
    """Folder of one key's records."""
    return keys_folder(root) / key_digest[:2] / key_digest[:_DIGITS]


def may_have_key(root: Path, key_digest: str) -> bool:
    """Whether a key has a folder; True also where that cannot be told. Asked by joined text, because paths cost more than the
    call, and twice, because network disks deny for a moment what is there."""
    folder = f"{root}/{VERSION_FOLDER}/keys/{key_digest[:2]}/{key_digest[:_DIGITS]}"
    for _ in range(2):
        try:
            os.lstat(folder)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError):
            return True
        return True
    return False


def record_file(root: Path, key_digest: str, record_id: str) -> Path:
    """File of one record."""
    return key_folder(root, key_digest) / (record_id[:_DIGITS] + RECORD_SUFFIX)


def note_file(root: Path, key_digest: str, record_id: str, kind: str) -> Path:
    """File of one note; `kind` is "quarantine", "approval" or "receipt-xxxxxxxx"."""
    return key_folder(root, key_digest) / f"{record_id[:_DIGITS]}.{kind}.json"


def policy_file(root: Path) -> Path:
    """What the owner of a folder demands of its records."""
    return root / VERSION_FOLDER / "policy.json"


def pending_name(key_digest: str, record_id: str) -> str:
    """Name of the file that announces a record to readers of the index."""
    return f"{key_digest[:_DIGITS]}-{record_id[: _DIGITS - 1]}"


def lock_file(root: Path, name: str) -> Path:
    """Lock file for a key digest or another short name."""
    return locks_folder(root) / f"{name[:_DIGITS]}.lock"


def temporary_name() -> str:
    """A name that no other writer picks: 128 random bits, never a process id (ids repeat across machines)."""
    return f".{secrets.token_hex(16)}.tmp"


def is_key_folder(name: str) -> bool:
    """Whether a folder name is a key's."""
    return _KEY_FOLDER.fullmatch(name) is not None


def is_record_file(name: str) -> bool:
    """Whether a file name is a record's."""
    return _RECORD_FILE.fullmatch(name) is not None


def is_temporary_file(name: str) -> bool:
    """Whether a file name is an unfinished write's."""
    return _TEMPORARY_FILE.fullmatch(name) is not None
