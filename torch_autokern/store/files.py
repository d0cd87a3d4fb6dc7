"""Single files: written whole or not at all, whatever dies meanwhile; read once and checked, or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import Literal

import msgspec

from torch_autokern.store.layout import temporary_name

_CHUNK_BYTES = 8 << 20
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_CLOSE_ON_EXEC = getattr(os, "O_CLOEXEC", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_FOLDER = getattr(os, "O_DIRECTORY", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_HAS_OWNERS = hasattr(os, "geteuid")
_NO_HARD_LINKS = {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}
_NO_SYNC = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}
_NOT_OURS_TO_OPEN = {errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
_RETRY_BY_NAME = {errno.ESTALE, errno.EBUSY, errno.ENOENT}


class FileBytes(msgspec.Struct, frozen=True):
    """What one open of a file gave. `identity` is (device, inode): it tells whether a later name still means this file."""

    data: bytes
    identity: tuple[int, int]


class Unread(msgspec.Struct, frozen=True):
    """Why a file's bytes are not used.

    ``absent``: no such file. ``unreadable``: the system refused. ``foreign``: not a regular file of this user or root that
    nobody else may write, or larger than allowed.
    """

    kind: Literal["absent", "unreadable", "foreign"]
    reason: str


def read_file(path: Path, limit_bytes: int) -> FileBytes | Unread:
    """Open once without following a link, check the open file, read all of it. Network disks get one retry by name."""
    try:
        return _read_once(path, limit_bytes)
    except OSError as error:
        if error.errno not in _RETRY_BY_NAME:
            return _refused(error)
    try:
        return _read_once(path, limit_bytes)
    except OSError as error:
        return _refused(error)


def publish_file(path: Path, data: bytes, root: Path, *, replace: bool = False) -> bool:
    """Make `data` visible at `path`, whole and durable; `path` lies below the store folder `root`.

    Returns whether this call made it visible; False where a file of that name exists already and `replace` is off.
    A folder that is wiped meanwhile is made again once.

    Raises:
        OSError: nothing was published, or it may not last.
    """
    try:
        made_visible = _publish_once(path, data, root, replace)
    except FileNotFoundError:
        made_visible = _publish_once(path, data, root, replace)
    sync_folders(root, path.parent)
    return made_visible


def make_folders(root: Path, folder: Path) -> None:
    """Create `folder` and what is missing above it, private (0700) whatever the umask.

    Raises:
        OSError: a level could not be made.
    """
    if _is_usable_folder(folder):
        return
    if folder != root:
        make_folders(root, folder.parent)
    elif folder.parent != folder and not folder.parent.is_dir():  # a failing disk may deny even "/"
        make_folders(folder.parent, folder.parent)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        facts = os.lstat(folder)
        if not stat.S_ISDIR(facts.st_mode):
            raise
        if folder == root and facts.st_mode & 0o777:
            return  # whoever made the root read-only meant it
    # A umask may have taken the owner's own bits, also from a process that died between mkdir and here.
    os.chmod(folder, 0o700)


def sync_folders(root: Path, folder: Path) -> None:
    """Make the names in `folder` and in every level up to `root`'s parent durable.

    All levels, because another process may have made a folder and died before it synced the level above. A file system that
    cannot sync a folder, a level that may not be opened and one that is gone cost durability across a power cut and nothing
    else, so they are not raised. An error of the disk is: who gets no error may tell others that the file will last.

    Raises:
        OSError: the names are there, and may not be after a power cut.
    """
    if not _HAS_OWNERS:
        return
    levels = [folder, *folder.parents]
    for level in levels[: levels.index(root) + 2]:
        try:
            descriptor = os.open(level, os.O_RDONLY | _CLOSE_ON_EXEC | _FOLDER)
        except OSError as error:
            if error.errno not in _NOT_OURS_TO_OPEN:
                raise
            continue
        try:
            _sync_file(descriptor)
        finally:
            _close_quietly(descriptor)


def set_aside(path: Path, identity: tuple[int, int], folder: Path, root: Path) -> bool:
    """Move a damaged file out of the way, if `path` still names the file with that identity.

    Where the move is impossible (a full disk cannot make the folder) the file is deleted: it is of no use to anybody.
    Returns whether `path` is free now.
    """
    try:
        facts = os.lstat(path)
        if (facts.st_dev, facts.st_ino) != identity:
            return False
        try:
            make_folders(root, folder)
            os.rename(path, folder / f"{path.name[:40]}.{secrets.token_hex(4)}")
        except OSError:
            os.unlink(path)
    except OSError:
        return False
    return True


def remove_file(path: Path) -> bool:
    """Delete a file; whether this call did it. Absence and refusal are no errors: clean-up is never fatal."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def list_folder(folder: Path) -> list[str]:
    """Names in a folder, sorted; empty where it is absent, unreadable or a link: what lies behind a link is not the store's to
    read, and least of all to clean."""
    try:
        return [] if os.path.islink(folder) else sorted(os.listdir(folder))
    except OSError:
        return []


def owner_refusal(facts: os.stat_result) -> str | None:
    """Why a file or folder cannot be trusted by its owner and mode, or None."""
    if not _HAS_OWNERS:
        return None
    if facts.st_uid not in (os.geteuid(), 0):
        return f"owner is uid {facts.st_uid}, expected {os.geteuid()}"
    if facts.st_mode & 0o022:
        return f"mode {stat.S_IMODE(facts.st_mode):04o} lets others write"
    return None


def _read_once(path: Path, limit_bytes: int) -> FileBytes | Unread:
    descriptor = os.open(path, os.O_RDONLY | _NO_FOLLOW | _CLOSE_ON_EXEC | _NO_WAIT | _BINARY)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            return Unread("foreign", "not a regular file")
        refusal = owner_refusal(facts)
        if refusal is not None:
            return Unread("foreign", refusal)
        if facts.st_size > limit_bytes:
            return Unread("foreign", f"{facts.st_size} bytes, at most {limit_bytes} are allowed")
        data = _read_all(descriptor, limit_bytes, facts.st_size + 1)
        if len(data) != facts.st_size:
            # A disk that stops short, or a writer at work: a miss, but no proof of damage, so the file stays where it is.
            return Unread("unreadable", f"{len(data)} bytes came of {facts.st_size}")
        return FileBytes(data, (facts.st_dev, facts.st_ino))
    finally:
        _close_quietly(descriptor)


def _read_all(descriptor: int, limit_bytes: int, chunk_bytes: int) -> bytes:
    """With chunks of a byte more than the file has, nothing is copied: the first holds all of it, the second is empty."""
    pieces: list[bytes] = []
    total = 0
    while total <= limit_bytes:
        piece = os.read(descriptor, chunk_bytes)
        if not piece:
            break
        pieces.append(piece)
        total += len(piece)
    return b"".join(pieces)


def _refused(error: OSError) -> Unread:
    if isinstance(error, FileNotFoundError):
        return Unread("absent", "no such file")
    if error.errno == errno.ELOOP:
        return Unread("foreign", "a symbolic link")
    return Unread("unreadable", error.strerror or str(error))


def _publish_once(path: Path, data: bytes, root: Path, replace: bool) -> bool:
    make_folders(root, path.parent)
    temporary = path.parent / temporary_name()
    try:
        _write_durably(temporary, data)
        if replace:
            os.replace(temporary, path)
            return True
        return _name_without_replacing(temporary, path)
    finally:
        remove_file(temporary)


def _write_durably(path: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW | _CLOSE_ON_EXEC | _BINARY
    descriptor = os.open(path, flags, 0o600)
    try:
        if _HAS_OWNERS:
            os.fchmod(descriptor, 0o600)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest[:_CHUNK_BYTES]) :]
        _sync_file(descriptor)
    except BaseException:
        _close_quietly(descriptor)
        raise
    os.close(descriptor)  # not quietly: network disks report a full quota here


def _sync_file(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def _name_without_replacing(temporary: Path, path: Path) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        # Names are content hashes: replacing a file that appears between the two calls puts the same bytes there.
        if os.path.lexists(path):
            return False
        os.rename(temporary, path)
    return True


def _is_usable_folder(folder: Path) -> bool:
    try:
        mode = os.lstat(folder).st_mode
    except OSError:
        return False
    return stat.S_ISDIR(mode) and mode & 0o700 == 0o700


def _close_quietly(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:
        return
