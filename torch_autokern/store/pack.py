"""A pack that may be used: its rows for choosing, and its records, each checked when it is asked for.

Opening checks, in this order: sizes, signatures (by id and hash, before anything is parsed), the index, the hash of the
kernels, each kernel's line, the user's policy by op and version. A record's own bytes are checked against its line when it is
read: hash, canonical form, every claim made again from the record, and what its ELF files say of themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from torch_autokern.errors import RecordError
from torch_autokern.store.index import Accepts, IndexRow
from torch_autokern.store.key import canonical_json
from torch_autokern.store.pack_file import Envelope
from torch_autokern.store.pack_manifest import (
    MAX_LINE_BYTES,
    BinaryReader,
    KernelManifest,
    PackIndex,
    decode_document,
    decode_index,
    derive_manifest,
    manifest_row,
    split_kernels,
)
from torch_autokern.store.pack_refusal import PackReason, PackRefusal
from torch_autokern.store.record import StoredRecord, decode_record
from torch_autokern.store.trust import Admission, Policy, admit, check_ops, check_version

_RECORD_PREFIX = struct.Struct("<8sII")


class Pack:
    """An opened pack. `admission` says why it may be used; what `inspect` parses without asking has tier "untrusted".

    Safe to use from threads: nothing changes after opening but the dictionary of refusals.
    """

    def __init__(self, envelope: Envelope, index: PackIndex, lines: list[bytes], rows: list[IndexRow], sizes: list[int],
                 admission: Admission, reader: BinaryReader) -> None:  # fmt: skip
        self.envelope = envelope
        self.index = index
        self.pack_id = envelope.pack_id
        self.admission = admission
        self.refusals: dict[str, PackRefusal] = {}
        self._lines = lines
        self._rows = rows
        self._reader = reader
        self._numbers = {row.record_id: number for number, row in enumerate(rows)}
        self._starts = [0]
        for size in sizes:
            self._starts.append(self._starts[-1] + size)
        self._by_key: dict[str, list[IndexRow]] = {}
        for row in rows:
            self._by_key.setdefault(row.key_digest, []).append(row)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def record_ids(self) -> tuple[str, ...]:
        """Ids of all records, in order; those held back by policy as well."""
        return tuple(self._numbers)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each record by id."""
        return {name: self._starts[number + 1] - self._starts[number] for name, number in self._numbers.items()}

    def manifests(self) -> Iterator[KernelManifest]:
        """Every kernel's claims, in order of record id."""
        for line in self._lines:
            kernel = decode_document(line, KernelManifest)
            assert isinstance(kernel, KernelManifest)  # decoded once when the pack was opened
            yield kernel

    def rows(self, accepts: Accepts | None = None) -> list[IndexRow]:
        """Rows that may be used, or those of them whose target and stock build `accepts`."""
        return [
            r for r in self._rows if r.record_id not in self.refusals and (accepts is None or accepts(r.target, r.stock_build))
        ]

    def lookup(self, key_digest: str) -> tuple[IndexRow, ...]:
        """Rows of one key that may be used."""
        return tuple(row for row in self._by_key.get(key_digest, ()) if row.record_id not in self.refusals)

    def get(self, key_digest: str, record_id: str) -> StoredRecord | None:
        """One record that may be used; None where there is none, or where a check refuses it, which `refusals` remembers."""
        number = self._numbers.get(record_id)
        if number is None or record_id in self.refusals or self._rows[number].key_digest != key_digest:
            return None
        outcome = self.read(record_id)
        if isinstance(outcome, PackRefusal):
            self.refusals[record_id] = outcome
            return None
        return outcome

    def records(self, key_digest: str | None = None) -> Iterator[StoredRecord]:
        """Records that may be used and pass every check, in order of record id."""
        for row in self._rows if key_digest is None else self._by_key.get(key_digest, []):
            stored = self.get(row.key_digest, row.record_id)
            if stored is not None:
                yield stored

    def read(self, record_id: str) -> StoredRecord | PackRefusal:
        """Read a record and check it against its line, whatever policy says of it."""
        number = self._numbers[record_id]
        raw = bytes(self.envelope.records[self._starts[number] : self._starts[number + 1]])
        stored = _decode(raw, record_id)
        if isinstance(stored, PackRefusal):
            return stored
        return _check_claims(stored, len(raw), self._lines[number], self._reader) or stored


def open_pack(envelope: Envelope, policy: Policy, reader: BinaryReader) -> Pack | PackRefusal:
    """Open a pack for use: trust first, then everything but the records' own bytes."""
    admission = admit(envelope, policy)
    if isinstance(admission, PackRefusal):
        return admission
    pack = parse_pack(envelope, reader, admission)
    if isinstance(pack, PackRefusal):
        return pack
    kernels = tuple(pack.manifests()) if _restricted(policy, admission) else ()
    refusal = check_version(pack.index.name, pack.index.version, pack.pack_id, admission, policy) or check_ops(
        kernels, admission, policy
    )
    if refusal is not None:
        return refusal
    _hold_back(pack, policy)
    return pack


def parse_pack(envelope: Envelope, reader: BinaryReader, admission: Admission | None = None) -> Pack | PackRefusal:
    """Parse a pack without asking whom it is from, for people who look into it. Never enough to load a kernel."""
    index = decode_index(envelope.index)
    if isinstance(index, PackRefusal):
        return index
    # A folder is first asked which file is too much or missing; its records were read under the pack's limit.
    if envelope.names is None and index.records_bytes != len(envelope.records):
        return PackRefusal(
            PackReason.SIZE_MISMATCH, f"records of {len(envelope.records)} bytes, the index says {index.records_bytes}"
        )
    lines = split_kernels(envelope.kernels, index)
    if isinstance(lines, PackRefusal):
        return lines
    rows: list[IndexRow] = []
    sizes: list[int] = []
    for line in lines:
        kernel = decode_document(line, KernelManifest)
        if isinstance(kernel, PackRefusal):
            return kernel
        if rows and kernel.record_id <= rows[-1].record_id:
            return PackRefusal(PackReason.BAD_ORDER, "kernels are not in order of record id, or one is listed twice")
        rows.append(manifest_row(kernel))
        sizes.append(kernel.record_bytes)
    refusal = _files_refusal(envelope, rows)
    if refusal is not None:
        return refusal
    if not sum(sizes) == index.records_bytes == len(envelope.records):
        words = (
            f"kernels list {sum(sizes)} bytes of records, the index {index.records_bytes}, there are {len(envelope.records)}"
        )
        return PackRefusal(PackReason.SIZE_MISMATCH, words)
    return Pack(envelope, index, lines, rows, sizes, admission or Admission("untrusted"), reader)


def check_pack(pack: Pack) -> list[PackRefusal]:
    """Read every record and check it; the refusals, none where all is well."""
    outcomes = (pack.read(record_id) for record_id in pack.record_ids)
    return [outcome for outcome in outcomes if isinstance(outcome, PackRefusal)]


def _decode(raw: bytes, record_id: str) -> StoredRecord | PackRefusal:
    if len(raw) >= _RECORD_PREFIX.size and _RECORD_PREFIX.unpack_from(raw)[2] > MAX_LINE_BYTES:
        return PackRefusal(PackReason.TOO_LARGE, f"a record's header is longer than {MAX_LINE_BYTES} bytes", kernel=record_id)
    try:
        stored = decode_record(raw)
    except RecordError as error:
        return PackRefusal(PackReason.RECORD_DAMAGED, str(error), kernel=record_id)
    if stored.record_id != record_id:
        words = f"these bytes are record {stored.record_id[:16]}, the kernel's line says {record_id[:16]}"
        return PackRefusal(PackReason.DIGEST_MISMATCH, words, kernel=record_id)
    return stored


def _check_claims(stored: StoredRecord, size: int, line: bytes, reader: BinaryReader) -> PackRefusal | None:
    """The manifest is a claim; record and ELF are the facts."""
    binaries = reader(stored)
    if isinstance(binaries, PackRefusal):
        return msgspec.structs.replace(binaries, kernel=stored.record_id)
    fact = derive_manifest(stored, size, binaries)
    if isinstance(fact, PackRefusal):
        return fact
    if canonical_json(fact) == line:  # as nearly always: the line need not be parsed a second time
        return None
    claimed = decode_document(line, KernelManifest)
    assert isinstance(claimed, KernelManifest)  # decoded once when the pack was opened
    if fact.binaries != claimed.binaries:
        words = f"the manifest says {_difference(claimed.binaries, binaries)}"
        return PackRefusal(PackReason.BINARY_MISMATCH, words, kernel=stored.record_id)
    for name in KernelManifest.__struct_fields__:
        if name != "extensions" and getattr(fact, name) != getattr(claimed, name):
            words = f"{name}: the manifest says {_difference(getattr(claimed, name), getattr(fact, name))}"
            return PackRefusal(PackReason.RECORD_MISMATCH, words, kernel=stored.record_id)
    return None


def _difference(claimed: object, fact: object) -> str:
    """The first place in which two values of one kind differ, in words."""
    if isinstance(claimed, tuple) and isinstance(fact, tuple):
        if len(claimed) != len(fact):
            return f"{len(claimed)} of them, there are {len(fact)}"
        return next(_difference(a, b) for a, b in zip(claimed, fact, strict=True) if a != b)
    if isinstance(claimed, msgspec.Struct):
        name = next(n for n in claimed.__struct_fields__ if getattr(claimed, n) != getattr(fact, n))
        return f"{name} {_difference(getattr(claimed, name), getattr(fact, name))}"
    return f"{str(claimed)[:120]!r}, the fact is {str(fact)[:120]!r}"


def _files_refusal(envelope: Envelope, rows: list[IndexRow]) -> PackRefusal | None:
    """A folder's record files against the listing."""
    if envelope.names is None:
        return None
    listed, there = {row.record_id for row in rows}, set(envelope.names)
    if there - listed:
        return PackRefusal(PackReason.UNLISTED_FILE, f"record {min(there - listed)[:16]} is in the folder and not listed")
    if listed - there:
        return PackRefusal(PackReason.MISSING_FILE, f"record {min(listed - there)[:16]} is listed and not in the folder")
    return None


def _restricted(policy: Policy, admission: Admission) -> bool:
    keys = (policy.key(admission.index_key), policy.key(admission.kernels_key))
    return any(key is not None and "*" not in key.ops for key in keys)


def _hold_back(pack: Pack, policy: Policy) -> None:
    """Mark kernels that policy does not let run: revoked ones, and in a pinned pack those without a proof here."""
    signers = tuple(signature.key_id for signature in pack.envelope.signatures)
    pin = policy.pin(pack.pack_id)
    revocable = bool(policy.revocations)
    for record_id in pack.record_ids:
        why = policy.revoked("kernel", record_id, signers) if revocable else None
        if why is not None:
            pack.refusals[record_id] = PackRefusal(
                PackReason.KERNEL_REVOKED, f"kernel {record_id[:16]} is {why}", "autokern pack list", record_id
            )
        elif pack.admission.tier == "pinned" and (pin is None or record_id not in pin.kernels):
            pack.refusals[record_id] = PackRefusal(
                PackReason.NOT_PINNED, f"kernel {record_id[:16]} was not proved on this machine",
                "autokern pack verify FILE --replay --pin", record_id,
            )  # fmt: skip
