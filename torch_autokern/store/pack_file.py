"""The bytes of a pack, before anybody trusts or parses them: header, signatures, index, kernels, records.

Little-endian: ``magic (8) | format version u32 | signatures u32 | index bytes u32 | kernels bytes u32 | records bytes u64``,
then 104 bytes a signature, the index and the kernels (canonical JSON, one kernel a line), and the record files one after the
other in order of record id. A folder holds the same parts as ``signatures.bin``, ``index.json``, ``kernels.jsonl`` and
``records/<record id>.akr``. Nothing is compressed, so no size grows while reading. ``docs/pack-format.md`` describes all of it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch_autokern.store.pack_refusal import PackReason, PackRefusal

MAGIC = b"AKPACK\r\n"
FORMAT_VERSION = 1
MAX_PACK_BYTES = 1 << 30
MAX_INDEX_BYTES = 1 << 16
MAX_KERNELS_BYTES = 64 << 20
MAX_SIGNATURES = 16
SUFFIX = ".akpack"
RECORDS = "records"
_HEADER = struct.Struct("<8sIIIIQ")
_SLOT = struct.Struct("<BB6x32s64s")
_SCHEME_ED25519 = 1
_RECORD_NAME = re.compile(r"[0-9a-f]{64}\.akr")
_PARTS = ("signatures.bin", "index.json", "kernels.jsonl")
Role = Literal["kernels", "index"]
ROLES: tuple[Role, ...] = ("kernels", "index")


@dataclass(frozen=True)
class Signature:
    """One signature as it stands in the file. `key_id` is the SHA-256 of the public key, hex."""

    role: Role
    key_id: str
    value: bytes


@dataclass(frozen=True)
class Envelope:
    """A pack cut into its parts. `names` are a folder's record files; None for one file. `records` is not copied."""

    signatures: tuple[Signature, ...]
    index: bytes
    kernels: bytes
    records: memoryview
    names: tuple[str, ...] | None = None

    @property
    def pack_id(self) -> str:
        """SHA-256 of the index, hex. The index holds the hash of the kernels, these the hashes of the records: it names every
        byte but the signatures."""
        return hashlib.sha256(self.index).hexdigest()

    def signed_part(self, role: Role) -> bytes:
        """The bytes that a role signs."""
        return self.index if role == "index" else self.kernels


def split_pack(raw: bytes) -> Envelope | PackRefusal:
    """Cut a file's bytes into parts; every declared size is checked against the real one before it is used."""
    if len(raw) > MAX_PACK_BYTES:
        return PackRefusal(PackReason.TOO_LARGE, f"{len(raw)} bytes, at most {MAX_PACK_BYTES} are allowed")
    if len(raw) < _HEADER.size or not raw.startswith(MAGIC):
        return PackRefusal(PackReason.NOT_A_PACK, f"starts with {raw[:8]!r}, expected {MAGIC!r} and a header")
    _, version, count, index_bytes, kernels_bytes, records_bytes = _HEADER.unpack_from(raw)
    if version != FORMAT_VERSION:
        return PackRefusal(
            PackReason.FORMAT_VERSION, f"pack format {version}, this version reads {FORMAT_VERSION}",
            "pip install --upgrade torch-autokern" if version > FORMAT_VERSION else "",
        )  # fmt: skip
    limits = ((count, MAX_SIGNATURES), (index_bytes, MAX_INDEX_BYTES), (kernels_bytes, MAX_KERNELS_BYTES))
    if any(value > limit for value, limit in limits):
        return PackRefusal(
            PackReason.BAD_HEADER, f"{count} signatures, index of {index_bytes} and kernels of {kernels_bytes} bytes; at most "
            f"{MAX_SIGNATURES}, {MAX_INDEX_BYTES} and {MAX_KERNELS_BYTES}"
        )  # fmt: skip
    expected = _HEADER.size + count * _SLOT.size + index_bytes + kernels_bytes + records_bytes
    if expected != len(raw):
        return PackRefusal(PackReason.SIZE_MISMATCH, f"the file has {len(raw)} bytes, its header says {expected}")
    signatures = _split_signatures(raw[_HEADER.size : _HEADER.size + count * _SLOT.size])
    if isinstance(signatures, PackRefusal):
        return signatures
    start = _HEADER.size + count * _SLOT.size
    middle = start + index_bytes
    end = middle + kernels_bytes
    return Envelope(signatures, raw[start:middle], raw[middle:end], memoryview(raw)[end:])


def join_pack(signatures: Sequence[Signature], index: bytes, kernels: bytes, records: bytes | memoryview) -> bytes:
    """The file's bytes; signatures are put in order, so equal parts give equal bytes."""
    header = _HEADER.pack(MAGIC, FORMAT_VERSION, len(signatures), len(index), len(kernels), len(records))
    return b"".join((header, join_signatures(signatures), index, kernels, records))


def join_signatures(signatures: Sequence[Signature]) -> bytes:
    """The signatures' bytes, in order of role and key."""
    ordered = sorted(signatures, key=lambda s: (s.role, s.key_id))
    return b"".join(_SLOT.pack(ROLES.index(s.role) + 1, _SCHEME_ED25519, bytes.fromhex(s.key_id), s.value) for s in ordered)


def read_pack(path: Path) -> Envelope | PackRefusal:
    """Read a pack, one file or a folder, that a person names. It is opened once; links are followed for the name given only.

    Owner and mode are not asked about: what a pack may do is decided by its signatures.
    """
    try:
        facts = os.stat(path)
        if stat.S_ISDIR(facts.st_mode):
            return _read_folder(path)
        raw = _read_regular(path, MAX_PACK_BYTES)
    except (OSError, ValueError) as error:
        return PackRefusal(PackReason.UNREADABLE, f"{path}: {getattr(error, 'strerror', None) or error}", "name a pack file")
    return raw if isinstance(raw, PackRefusal) else split_pack(raw)


def write_folder(envelope: Envelope, sizes: dict[str, int], folder: Path) -> None:
    """Write a pack as a new folder. `sizes` gives each record's bytes by id.

    Raises:
        OSError: the folder exists, or cannot be written.
    """
    folder.mkdir()
    (folder / RECORDS).mkdir()
    parts = (join_signatures(envelope.signatures), envelope.index, envelope.kernels)
    for name, body in zip(_PARTS, parts, strict=True):
        (folder / name).write_bytes(body)
    at = 0
    for record_id in sorted(sizes):
        (folder / RECORDS / f"{record_id}.akr").write_bytes(envelope.records[at : at + sizes[record_id]])
        at += sizes[record_id]


def _split_signatures(raw: bytes) -> tuple[Signature, ...] | PackRefusal:
    if len(raw) % _SLOT.size or len(raw) // _SLOT.size > MAX_SIGNATURES:
        return PackRefusal(PackReason.BAD_SIGNATURE_SLOT, f"{len(raw)} bytes of signatures, {_SLOT.size} each expected")
    found: list[Signature] = []
    for number in range(len(raw) // _SLOT.size):
        slot = raw[number * _SLOT.size : (number + 1) * _SLOT.size]
        role, scheme, key, value = _SLOT.unpack(slot)
        if role not in (1, 2) or scheme != _SCHEME_ED25519 or any(slot[2:8]):
            words = f"signature {number} has role {role} and scheme {scheme}; expected role 1 or 2, scheme 1 (Ed25519), zeros"
            return PackRefusal(PackReason.BAD_SIGNATURE_SLOT, words)
        found.append(Signature(ROLES[role - 1], key.hex(), value))
    order = [(s.role, s.key_id) for s in found]
    if order != sorted(set(order)):
        return PackRefusal(PackReason.BAD_SIGNATURE_SLOT, "signatures are out of order, or one key signs a part twice")
    return tuple(found)


def _read_folder(folder: Path) -> Envelope | PackRefusal:
    """A folder's parts. A name that is no part is refused here; record files against the listing, later."""
    names = sorted(os.listdir(folder))
    strange = [name for name in names if name not in (*_PARTS, RECORDS)]
    if strange:
        return PackRefusal(PackReason.UNLISTED_FILE, f"{strange[0]!r} does not belong into a pack's folder")
    missing = [name for name in (*_PARTS, RECORDS) if name not in names]
    if missing:
        return PackRefusal(PackReason.MISSING_FILE, f"{missing[0]} is missing in {folder}")
    records = sorted(os.listdir(folder / RECORDS))
    strange = [name for name in records if not _RECORD_NAME.fullmatch(name)]
    if strange:
        return PackRefusal(PackReason.UNLISTED_FILE, f"{strange[0]!r} is not the name of a record")
    limits = (MAX_SIGNATURES * _SLOT.size, MAX_INDEX_BYTES, MAX_KERNELS_BYTES)
    room = MAX_PACK_BYTES
    parts: list[bytes] = []
    paths = [*(folder / name for name in _PARTS), *(folder / RECORDS / name for name in records)]
    for number, path in enumerate(paths):
        raw = _read_regular(path, min(room, limits[number]) if number < len(limits) else room, follow=False)
        if isinstance(raw, PackRefusal):
            return raw
        room -= len(raw)
        parts.append(raw)
    signatures = _split_signatures(parts[0])
    if isinstance(signatures, PackRefusal):
        return signatures
    body = memoryview(b"".join(parts[3:]))
    return Envelope(signatures, parts[1], parts[2], body, tuple(name.removesuffix(".akr") for name in records))


def _read_regular(path: Path, limit: int, *, follow: bool = True) -> bytes | PackRefusal:
    """All bytes of a regular file; its size is asked of the open file before anything is read."""
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags if follow else flags | getattr(os, "O_NOFOLLOW", 0))
    with open(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            return PackRefusal(PackReason.UNREADABLE, f"{path} is not a regular file")
        if facts.st_size > limit:
            return PackRefusal(PackReason.TOO_LARGE, f"{path} has {facts.st_size} bytes, at most {limit} are allowed")
        return file.read(limit)
