"""Which folder the user cache lives in, and why that one. Nothing here raises for what the machine lacks."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import msgspec
import platformdirs

from torch_autokern import config
from torch_autokern.errors import InvalidInputError, StoreError
from torch_autokern.store.files import make_folders, owner_refusal
from torch_autokern.store.layout import temporary_name

_PROBE = bytes(4096)


class FolderChoice(msgspec.Struct, frozen=True):
    """Where records are written, or None: this process's memory only.

    `why` is one sentence; `tried` lists the folders that were refused before, with the reason; `read_only` those of them
    that cannot be written but are safe to read from, such as a store baked into an image.
    """

    path: Path | None
    why: str
    tried: tuple[tuple[Path, str], ...] = ()
    read_only: tuple[Path, ...] = ()


def choose_folder() -> FolderChoice:
    """The explicit setting, else the user's cache folder, else a private temporary folder, else memory. Never raises."""
    tried: list[tuple[Path, str]] = []
    read_only: list[Path] = []
    for path, name in _candidates():
        if path is None:
            tried.append((Path("~"), f"{name}: unknown, no home directory for this user"))
            continue
        refusal = folder_refusal(path)
        if refusal is None:
            refusal = _write_refusal(path)
            if refusal is None:
                return FolderChoice(path, f"{name} is usable", tuple(tried), tuple(read_only))
            if os.path.isdir(path):
                read_only.append(path)
        tried.append((path, f"{name}: {refusal}"))
    return FolderChoice(None, "no folder can be written: records last as long as this process", tuple(tried), tuple(read_only))


def require_folder(*, to_write: bool = True) -> FolderChoice:
    """Like `choose_folder`, for a person who is present; without `to_write` a folder that can only be read will do.

    Raises:
        InvalidInputError: ``AUTOKERN_STORE`` names a folder that cannot be used.
        StoreError: no folder can be used.
    """
    choice = choose_folder()
    explicit = config.store_folder()
    if not to_write and choice.read_only:
        return choice
    if explicit is not None and choice.tried:
        path, reason = choice.tried[0]
        raise InvalidInputError(f"AUTOKERN_STORE={explicit} cannot be used ({path}: {reason}); name a private, writable folder")
    if choice.path is None:
        refused = "; ".join(f"{path}: {reason}" for path, reason in choice.tried)
        raise StoreError(f"no store folder can be written ({refused}); set AUTOKERN_STORE to a private, writable folder")
    return choice


def folder_refusal(path: Path) -> str | None:
    """Why an existing folder must not hold code that will run, or None (also where it does not exist yet)."""
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return _words(error)
    if stat.S_ISLNK(facts.st_mode):
        return "is a symbolic link, which somebody else may turn round"
    if not stat.S_ISDIR(facts.st_mode):
        return "is not a folder"
    return owner_refusal(facts)


def _write_refusal(path: Path) -> str | None:
    """Create the folder where it is missing and try a write of one page; why that failed, or None."""
    try:
        if not path.exists():
            make_folders(path, path)
        facts = os.lstat(path)
        if hasattr(os, "geteuid") and facts.st_uid != os.geteuid():
            return f"owner is uid {facts.st_uid}, expected {os.geteuid()}"
        probe = path / temporary_name()
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            written = os.write(descriptor, _PROBE)
        finally:
            os.close(descriptor)
            os.unlink(probe)
    except (OSError, ValueError) as error:
        return _words(error)
    return None if written == len(_PROBE) else "the disk is full"


def _candidates() -> list[tuple[Path | None, str]]:
    """Folders in order of preference with their names; None where the machine cannot even name one."""
    explicit = config.store_folder()
    candidates: list[tuple[Path | None, str]] = []
    if explicit is not None:
        candidates.append((_explicit_folder(explicit), "AUTOKERN_STORE"))
    candidates.append((_user_cache_folder(), "the user's cache folder"))
    candidates.append((_temporary_folder(), "the temporary folder"))
    return candidates


def _explicit_folder(text: str) -> Path | None:
    try:
        return Path(os.path.abspath(Path(text).expanduser()))
    except (OSError, RuntimeError, KeyError, ValueError):
        return Path(text)


def _user_cache_folder() -> Path | None:
    try:
        return Path(platformdirs.user_cache_dir("autokern", appauthor=False))
    except (OSError, RuntimeError, KeyError, ImportError):  # it imports what a system needs at the first call
        return None


def _temporary_folder() -> Path | None:
    try:
        user = os.geteuid() if hasattr(os, "geteuid") else "user"
        return Path(tempfile.gettempdir()) / f"autokern-{user}"
    except (OSError, RuntimeError, KeyError):
        return None


def _words(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
