"""One record: key, target, artifact, verdict and provenance in one immutable file.

File layout, all integers little-endian:
``MAGIC (8) | format version u32 | header length u32 | header (canonical JSON of KernelRecord) | blobs | SHA-256 (32)``.
The header lists each blob's name, length and SHA-256, in the order in which they follow.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Literal

import msgspec

from torch_autokern.errors import RecordError
from torch_autokern.store.key import KernelKey, Target, canonical_json

MAGIC = b"AKRECORD"
FORMAT_VERSION = 1
MAX_HEADER_BYTES = 4 << 20
MAX_RECORD_BYTES = 128 << 20
_PREFIX = struct.Struct("<8sII")

AccuracyClass = Literal["exact", "stock", "tolerance"]
Determinism = Literal["not_guaranteed", "run_to_run", "gpu_to_gpu"]


class FamilyError(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """What one input family showed, worst output, in units of the natural scale: pooled RMS and worst element of candidate and
    of stock's envelope, and the limits that applied. `trials` seeds are listed so that each can be replayed."""

    family: str
    seeds: tuple[int, ...]
    error_rms: float
    stock_rms: float
    limit_rms: float
    error_max: float
    stock_max: float
    limit_max: float


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Paired, interleaved times of one regime. `ratio` is stock over candidate (median of paired ratios); `ratio_low` and
    `ratio_high` bound the union of the processes' 99 % intervals. `pages` says whether output pages were resident; ``device``
    is GPU memory. `inputs` says whether the arguments were as a program's last op leaves them, or had left the caches."""

    regime: Literal["eager", "compiled", "graph"]
    pages: Literal["fresh", "resident", "device"]
    stock_us: float
    candidate_us: float
    ratio: float
    ratio_low: float
    ratio_high: float
    blocks: int
    processes: int
    inputs: Literal["warm", "cold"] = "warm"


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The judge's acceptance, with the evidence that replays it."""

    accuracy_class: AccuracyClass
    atol: float
    rtol: float
    determinism: Determinism
    families: tuple[FamilyError, ...]
    vacuity_probes: dict[str, str]
    checks: dict[str, str]
    timings: tuple[Timing, ...]
    judge_version: int


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Where a kernel came from. Never used to decide anything about it, but for `candidate_id`: the identity that the loaded
    library must export."""

    candidate_id: str
    author: str
    idea: str
    language: str
    template: str
    parameters: dict[str, bool | int | float | str]
    parents: tuple[str, ...]
    source_sha256: str
    tools: dict[str, str]
    box_level: str
    created: str


class Blob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One named byte string that follows the header."""

    name: str
    size_bytes: int
    sha256: str


class KernelRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Key + target + artifact + verdict + provenance. `stock_build` is torch's "major.minor" that was the baseline."""

    key: KernelKey
    target: Target
    stock_build: str
    verdict: Verdict
    provenance: Provenance
    blobs: tuple[Blob, ...]


class StoredRecord(msgspec.Struct, frozen=True, gc=False):
    """A record with its bytes: what is published and what is read back."""

    record: KernelRecord
    data: dict[str, bytes]
    record_id: str


def encode_record(record: KernelRecord, data: dict[str, bytes]) -> bytes:
    """The file's bytes. `record.blobs` is derived from `data` and may be given empty."""
    blobs = tuple(Blob(name, len(body), hashlib.sha256(body).hexdigest()) for name, body in sorted(data.items()))
    header = canonical_json(msgspec.structs.replace(record, blobs=blobs))
    if len(header) > MAX_HEADER_BYTES:
        raise RecordError(f"record header has {len(header)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    body = _PREFIX.pack(MAGIC, FORMAT_VERSION, len(header)) + header + b"".join(data[blob.name] for blob in blobs)
    if len(body) + 32 > MAX_RECORD_BYTES:
        raise RecordError(f"record has {len(body) + 32} bytes; at most {MAX_RECORD_BYTES} are allowed")
    return body + hashlib.sha256(body).digest()


def record_id_of(raw: bytes) -> str:
    """A record's name: the SHA-256 that closes its file, in hex."""
    return raw[-32:].hex()


def decode_record(raw: bytes) -> StoredRecord:
    """Check every byte and return the record.

    Raises:
        RecordError: truncated, altered, not canonical, of another format version, or with blobs that do not fit their list.
    """
    if len(raw) < _PREFIX.size + 32:
        raise RecordError(f"{len(raw)} bytes are too few for a record")
    magic, version, header_length = _PREFIX.unpack_from(raw)
    if magic != MAGIC:
        raise RecordError(f"starts with {magic!r}, expected {MAGIC!r}")
    if version != FORMAT_VERSION:
        raise RecordError(f"format version {version}, this version reads {FORMAT_VERSION}")
    if hashlib.sha256(memoryview(raw)[:-32]).digest() != raw[-32:]:
        raise RecordError("SHA-256 trailer does not match: the file is truncated or altered")
    if header_length > MAX_HEADER_BYTES or _PREFIX.size + header_length > len(raw) - 32:
        raise RecordError(f"header length {header_length} does not fit the file")
    header = raw[_PREFIX.size : _PREFIX.size + header_length]
    try:
        record = msgspec.json.decode(header, type=KernelRecord)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RecordError(f"header is not a record: {error}") from error
    if canonical_json(record) != header:
        raise RecordError("header is not canonical JSON (a duplicate key, other order or white space)")
    return StoredRecord(record, _split_blobs(record, raw, _PREFIX.size + header_length), record_id_of(raw))


def _split_blobs(record: KernelRecord, raw: bytes, start: int) -> dict[str, bytes]:
    data: dict[str, bytes] = {}
    for blob in record.blobs:
        body = raw[start : start + blob.size_bytes]
        start += blob.size_bytes
        if blob.size_bytes < 0 or start > len(raw) - 32 or hashlib.sha256(body).hexdigest() != blob.sha256:
            raise RecordError(f"blob {blob.name!r} does not match its listed length and hash")
        if blob.name in data:
            raise RecordError(f"blob {blob.name!r} is listed twice")
        data[blob.name] = body
    if start != len(raw) - 32:
        raise RecordError(f"{len(raw) - 32 - start} bytes follow the last listed blob")
    return data
