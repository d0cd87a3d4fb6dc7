"""The measured ceiling of a device, kept on disk: the least time that copying so many bytes ever took on it.

One measurement on a busy machine is too long, and a floor that is too high refuses honest kernels. So the least of all is kept,
by device and size, in `ceilings.json` beside the store's own folder. A file that is damaged or cannot be written costs only
what it knew.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from torch_autokern.store.folders import choose_folder
from torch_autokern.store.key import Target

_FILE = "ceilings.json"
_VERSION = 1
_MAX_BYTES = 1 << 20
_MAX_SIZES = 1024  # of one device; more are measured, and not kept


class _Ceilings(msgspec.Struct, forbid_unknown_fields=True):
    """Device to size in bytes (as text) to us."""

    version: int = _VERSION
    copies: dict[str, dict[str, float]] = {}


def least_copy_us(target: Target, size_bytes: int, seen_us: float) -> float:
    """The least time for copying `size_bytes` on this device, of `seen_us` and what is kept; a lower one is kept from now on.
    0 ("too small to say") stays 0."""
    if seen_us <= 0:
        return seen_us
    folder = choose_folder().path
    if folder is None:
        return seen_us
    path = folder / _FILE
    kept = _read(path)
    device = f"{target.device_type} {target.name} {target.arch} {target.threads}"
    sizes = kept.copies.setdefault(device, {})
    known_us = sizes.get(str(size_bytes), 0.0)
    if 0 < known_us <= seen_us:
        return known_us
    if str(size_bytes) in sizes or len(sizes) < _MAX_SIZES:
        sizes[str(size_bytes)] = seen_us
        _write(path, kept)
    return seen_us


def _read(path: Path) -> _Ceilings:
    try:
        if path.stat().st_size > _MAX_BYTES:
            return _Ceilings()
        kept = msgspec.json.decode(path.read_bytes(), type=_Ceilings)
    except (OSError, msgspec.DecodeError, RecursionError):
        return _Ceilings()
    return kept if kept.version == _VERSION else _Ceilings()


def _write(path: Path, kept: _Ceilings) -> None:
    """Whole or not at all. Of two writers at once one is lost, and measured again."""
    temporary = path.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        temporary.write_bytes(msgspec.json.encode(kept))
        temporary.replace(path)
    except OSError:
        if temporary.exists():
            os.unlink(temporary)
