"""Making packs: choose records, look for private words, write index and kernels, sign; the same records give the same bytes."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import io
import re
import zipfile
from collections.abc import Iterable, Sequence

import msgspec

from torch_autokern.errors import InvalidInputError
from torch_autokern.store.key import canonical_json
from torch_autokern.store.pack import Pack, check_pack, parse_pack
from torch_autokern.store.pack_file import SUFFIX, Envelope, Signature, join_pack
from torch_autokern.store.pack_manifest import (
    MAX_KERNELS,
    READER_VERSION,
    BinaryReader,
    PackIndex,
    decode_document,
    derive_manifest,
    join_kernels,
)
from torch_autokern.store.pack_refusal import PackReason, PackRefusal
from torch_autokern.store.record import StoredRecord, encode_record
from torch_autokern.store.trust_keys import SecretKey
from torch_autokern.store.workload import Workload

WHEEL_FOLDER = "autokern_packs"
# Where people's names stand in paths. What a compiler says of itself (/usr/lib/gcc) names nobody.
_PRIVATE = re.compile(rb"/(?:home|root|Users|tmp|var/tmp|mnt|scratch)/[\w.+-]+|[A-Z]:\\\\?Users\\\\?[\w.+-]+")
_WHEEL_DATE = (1980, 1, 1, 0, 0, 0)


class PackOptions(msgspec.Struct, frozen=True):
    """What a person says of a pack. `licence` is an SPDX expression."""

    name: str
    version: int
    licence: str
    publisher: str = ""
    notes: str = ""
    supersedes: tuple[str, ...] = ()


class Choice(msgspec.Struct, frozen=True):
    """Which records of a store go in. Empty tuples choose all. `ops` and `targets` are shell patterns, a target's on its device
    name or its architecture; `min_share` is the least part of the workload's time that a key must have."""

    ops: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    workload: Workload | None = None
    min_share: float = 0.0


def choose_records(records: Iterable[StoredRecord], choice: Choice) -> list[StoredRecord]:
    """The records that fit, each once, in order of record id."""
    shares: dict[str, float] | None = None
    if choice.workload is not None:
        shares = {entry.key.digest: choice.workload.share(entry) for entry in choice.workload.entries}
    found: dict[str, StoredRecord] = {}
    for stored in records:
        record = stored.record
        if choice.ops and not any(fnmatch.fnmatchcase(record.key.op, pattern) for pattern in choice.ops):
            continue
        names = (record.target.name, record.target.arch)
        if choice.targets and not any(fnmatch.fnmatchcase(name, p) for name in names for p in choice.targets):
            continue
        if shares is not None and shares.get(record.key.digest, -1.0) < choice.min_share:
            continue
        found[stored.record_id] = stored
    return [found[name] for name in sorted(found)]


def build_pack(records: Sequence[StoredRecord], options: PackOptions, reader: BinaryReader) -> Envelope | PackRefusal:
    """An unsigned pack of these records, or the first reason why one of them cannot be shipped.

    Raises:
        InvalidInputError: nothing to pack, too much of it, or an option that the format has no room for.
    """
    if not 1 <= len(records) <= MAX_KERNELS:
        raise InvalidInputError(f"{len(records)} records fit; a pack has 1 to {MAX_KERNELS}: see autokern cache list")
    ordered = sorted(records, key=lambda stored: stored.record_id)
    kernels, bodies = [], []
    for stored in ordered:
        body = encode_record(stored.record, stored.data)
        binaries = reader(stored)
        if isinstance(binaries, PackRefusal):
            return msgspec.structs.replace(binaries, kernel=stored.record_id)
        kernel = derive_manifest(stored, len(body), binaries)
        refusal = kernel if isinstance(kernel, PackRefusal) else private_words(body, stored.record_id)
        if refusal is not None:
            return refusal
        assert not isinstance(kernel, PackRefusal)
        kernels.append(kernel)
        bodies.append(body)
    lines = join_kernels(kernels)
    index = PackIndex(
        schema="autokern.pack/1", min_reader=READER_VERSION, name=options.name, version=options.version,
        publisher=options.publisher,
        licence=options.licence, notes=options.notes, created=max(stored.record.provenance.created for stored in ordered),
        kernel_count=len(kernels), kernels_sha256=hashlib.sha256(lines).hexdigest(),
        records_bytes=sum(map(len, bodies)), supersedes=options.supersedes,
    )  # fmt: skip
    raw = canonical_json(index)
    again = decode_document(raw, PackIndex)
    if isinstance(again, PackRefusal):
        raise InvalidInputError(f"name, version, licence, publisher or notes do not fit the format: {again.message}")
    envelope = Envelope((), raw, lines, memoryview(b"".join(bodies)))
    pack = parse_pack(envelope, reader)  # what cannot be read again is not written
    return pack if isinstance(pack, PackRefusal) else envelope


def private_words(body: bytes, record_id: str = "") -> PackRefusal | None:
    """The first path in a record's bytes that names a user's or a temporary folder."""
    found = _PRIVATE.search(body)
    if found is None:
        return None
    words = f"a record names the path {found.group()[:60].decode('ascii', 'replace')!r}"
    return PackRefusal(PackReason.PRIVATE_WORDS, words, "autokern cache show RECORD, then search it again elsewhere", record_id)


def sign_pack(envelope: Envelope, keys: Iterable[SecretKey]) -> Envelope:
    """The pack with signatures of these keys added; one of the same key is replaced."""
    signatures = {(s.role, s.key_id): s for s in envelope.signatures}
    for key in keys:
        signature = key.sign(key.role, envelope.signed_part(key.role))
        signatures[signature.role, signature.key_id] = signature
    ordered: tuple[Signature, ...] = tuple(signatures[name] for name in sorted(signatures))
    return Envelope(ordered, envelope.index, envelope.kernels, envelope.records)


def pack_bytes(envelope: Envelope) -> bytes:
    """The bytes of a pack as one file."""
    return join_pack(envelope.signatures, envelope.index, envelope.kernels, envelope.records)


def file_name(index: PackIndex) -> str:
    """What a pack's file is called."""
    return f"{index.name}-{index.version}{SUFFIX}"


def build_wheel(pack: Pack) -> tuple[str, bytes]:
    """(file name, bytes) of a wheel that carries the pack as data: no module, no entry point, nothing that pip would run."""
    index = pack.index
    project = re.sub(r"[-_.]+", "_", f"autokern_pack_{index.name}")
    folder = f"{project}-{index.version}.dist-info"
    metadata = (
        f"Metadata-Version: 2.4\nName: {project.replace('_', '-')}\nVersion: {index.version}\n"
        f"Summary: A pack of verified kernels for torch-autokern\nLicense-Expression: {index.licence}\n"
    )
    wheel = "Wheel-Version: 1.0\nGenerator: torch-autokern\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {
        f"{WHEEL_FOLDER}/{index.name}{SUFFIX}": pack_bytes(pack.envelope),
        f"{folder}/METADATA": metadata.encode(),
        f"{folder}/WHEEL": wheel.encode(),
    }
    rows = []
    for name, body in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(body)}\n")
    files[f"{folder}/RECORD"] = "".join([*rows, f"{folder}/RECORD,,\n"]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in files.items():
            entry = zipfile.ZipInfo(name, _WHEEL_DATE)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, body)
    return f"{project}-{index.version}-py3-none-any.whl", buffer.getvalue()


def check_whole(pack: Pack) -> list[PackRefusal]:
    """Every check that needs no device: each record against its line and its ELF, and a search for private words."""
    found = check_pack(pack)
    seen = {refusal.kernel for refusal in found}
    start = 0
    for record_id, size in pack.sizes.items():
        refusal = private_words(bytes(pack.envelope.records[start : start + size]), record_id)
        start += size
        if refusal is not None and record_id not in seen:
            found.append(refusal)
    return found
