"""A list of all records that opens fast, derived from them and never trusted for a kernel's bytes.

The list is a hint without false blanks: whoever publishes first leaves an empty file in ``pending/`` that names the record, and
readers add what is pending to what is listed. A row whose record is gone is a miss when the record is read.

File, little-endian: ``MAGIC (8) | rows u32 | bucket bits u32 | names length u32 | names (JSON) | bucket starts
u32 x (2^bits + 1) | rows, sorted by key digest and record id | SHA-256 (32)``. A bucket holds the keys that share their first
`bits` bits, about one row each, so a look-up does not depend on the number of rows.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec

from torch_autokern.store.files import Unread, read_file
from torch_autokern.store.key import Target, canonical_json
from torch_autokern.store.record import AccuracyClass, Determinism, StoredRecord

MAGIC = b"AKINDEX1"
MAX_INDEX_BYTES = 1 << 30
_PREFIX = struct.Struct("<8sIII")
_ROW = struct.Struct("<32s32sHHBBddd")
_ACCURACIES: tuple[AccuracyClass, ...] = get_args(AccuracyClass)
_DETERMINISMS: tuple[Determinism, ...] = get_args(Determinism)
# Whether records for a target, measured against a stock build (torch major.minor), are wanted.
Accepts = Callable[[Target, str], bool]
_REGIMES = ("eager", "compiled", "graph")


class IndexRow(msgspec.Struct, frozen=True, gc=False):
    """What a table needs to choose among a key's records without reading them. `ratio_low` has the lower bound of the speed-up
    for each regime that was timed."""

    key_digest: str
    record_id: str
    target: Target
    stock_build: str
    accuracy_class: AccuracyClass
    determinism: Determinism
    ratio_low: dict[str, float]


class RecordIndex:
    """The bytes of an index file after their checksum; rows are decoded when asked for."""

    def __init__(self, raw: bytes) -> None:
        """Raises ValueError: not a whole index file."""
        if len(raw) < _PREFIX.size + 36 or hashlib.sha256(memoryview(raw)[:-32]).digest() != raw[-32:]:
            raise ValueError("the checksum does not match")
        magic, count, bits, names_length = _PREFIX.unpack_from(raw)
        self._count: int = count
        buckets = (1 << bits) + 1 if bits <= 30 else 0
        self._starts = _PREFIX.size + names_length
        self._rows = self._starts + 4 * buckets
        if magic != MAGIC or not buckets or self._rows + self._count * _ROW.size + 32 != len(raw):
            raise ValueError("the lengths do not fit the file")
        names = msgspec.json.decode(raw[_PREFIX.size : self._starts], type=tuple[tuple[Target, ...], tuple[str, ...]])
        self._targets, self._stock_builds = names
        self._shift = 32 - bits
        self._raw = raw

    def __len__(self) -> int:
        return self._count

    def rows(self, accepts: Accepts | None = None) -> Iterator[IndexRow]:
        """All rows in order, or those whose target and stock build `accepts`; it is asked once for each pair, so that rows made
        for other machines cost nothing but their bytes."""
        answers: dict[tuple[int, int], bool] = {}
        for row in _ROW.iter_unpack(memoryview(self._raw)[self._rows : -32]):
            if accepts is not None:
                pair = (row[2], row[3])
                if pair not in answers:
                    is_known = row[2] < len(self._targets) and row[3] < len(self._stock_builds)
                    answers[pair] = is_known and accepts(self._targets[row[2]], self._stock_builds[row[3]])
                if not answers[pair]:
                    continue
            decoded = self._decode(row)
            if decoded is not None:
                yield decoded

    def lookup(self, key_digest: str) -> tuple[IndexRow, ...]:
        """The rows of one key, in order of record id."""
        digest = bytes.fromhex(key_digest)
        bucket = int.from_bytes(digest[:4], "big") >> self._shift
        first, last = struct.unpack_from("<II", self._raw, self._starts + 4 * bucket)
        found = []
        for number in range(first, min(last, self._count)):
            offset = self._rows + number * _ROW.size
            if self._raw[offset : offset + 32] == digest:
                found.append(self._decode(_ROW.unpack_from(self._raw, offset)))
        return tuple(row for row in found if row is not None)

    def _decode(self, row: tuple[Any, ...]) -> IndexRow | None:
        """The row; None where it names what the file does not list: a faulty writer can seal that with a good checksum."""
        key, record, target, build, accuracy, determinism, *ratios = row
        limits = (len(self._targets), len(self._stock_builds), len(_ACCURACIES), len(_DETERMINISMS))
        if any(number >= limit for number, limit in zip((target, build, accuracy, determinism), limits, strict=True)):
            return None
        return IndexRow(
            key_digest=key.hex(),
            record_id=record.hex(),
            target=self._targets[target],
            stock_build=self._stock_builds[build],
            accuracy_class=_ACCURACIES[accuracy],
            determinism=_DETERMINISMS[determinism],
            ratio_low={regime: ratio for regime, ratio in zip(_REGIMES, ratios, strict=True) if not math.isnan(ratio)},
        )


def row_of(stored: StoredRecord) -> IndexRow:
    """The row of a record; of several timings of one regime the lowest bound counts."""
    verdict = stored.record.verdict
    ratios: dict[str, float] = {}
    for timing in verdict.timings:
        ratios[timing.regime] = min(timing.ratio_low, ratios.get(timing.regime, math.inf))
    return IndexRow(
        key_digest=stored.record.key.digest,
        record_id=stored.record_id,
        target=stored.record.target,
        stock_build=stored.record.stock_build,
        accuracy_class=verdict.accuracy_class,
        determinism=verdict.determinism,
        ratio_low=ratios,
    )


def encode_index(rows: Iterable[IndexRow]) -> bytes:
    """The file's bytes; equal sets of rows give equal bytes."""
    ordered = sorted({(row.key_digest, row.record_id): row for row in rows}.items())
    targets: dict[Target, int] = {}
    builds: dict[str, int] = {}
    packed: list[bytes] = []
    bits = max(1, min(24, len(ordered).bit_length()))
    counts = [0] * ((1 << bits) + 1)
    for (key, record), row in ordered:
        ratios = (row.ratio_low.get(regime, math.nan) for regime in _REGIMES)
        target = targets.setdefault(row.target, len(targets))
        build = builds.setdefault(row.stock_build, len(builds))
        accuracy, determinism = _ACCURACIES.index(row.accuracy_class), _DETERMINISMS.index(row.determinism)
        packed.append(_ROW.pack(bytes.fromhex(key), bytes.fromhex(record), target, build, accuracy, determinism, *ratios))
        counts[(int(key[:8], 16) >> (32 - bits)) + 1] += 1
    for number in range(1, len(counts)):
        counts[number] += counts[number - 1]
    names = canonical_json((tuple(targets), tuple(builds)))
    prefix = _PREFIX.pack(MAGIC, len(ordered), bits, len(names))
    body = prefix + names + struct.pack(f"<{len(counts)}I", *counts) + b"".join(packed)
    return body + hashlib.sha256(body).digest()


def read_index(path: Path) -> RecordIndex | None:
    """One index file, or None where it is absent or damaged: it can be derived again."""
    content = read_file(path, MAX_INDEX_BYTES)
    if isinstance(content, Unread):
        return None
    try:
        return RecordIndex(content.data)
    except (ValueError, struct.error, msgspec.MsgspecError):
        return None
