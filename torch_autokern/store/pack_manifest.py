"""What a pack says of itself and of each kernel: typed, closed, and in canonical JSON (RFC 8785).

Numbers are integers within 2^53 with their unit in the name, keys are ASCII: for such values `canonical_json` and RFC 8785
agree byte for byte, and a reader in any language gets the same numbers. A document is accepted only if encoding what was read
gives the same bytes again, so a duplicate key, another order, white space or another form of a number is refused without a word
about them in the grammar. Unknown fields are refused; room for more is in `extensions`, whose names `critical` may make
mandatory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from torch_autokern.store.index import IndexRow
from torch_autokern.store.key import KernelKey, Target, TensorKey, canonical_json
from torch_autokern.store.pack_refusal import PackReason, PackRefusal
from torch_autokern.store.record import AccuracyClass, Determinism, StoredRecord, Timing

READER_VERSION = 1
MAX_KERNELS = 10_000
MAX_INTEGER = (1 << 53) - 1
_MAX_FLOAT = float(MAX_INTEGER)
# A line or a record's header beyond this is no honest one; what decoding allocates for it is bounded by it.
MAX_LINE_BYTES = 1 << 16
_ALLOWED_BLOBS = frozenset({"kernel.so", "kernel.cubin", "plan.json", "source.cpp", "source.cu", "source.py"})

Sha = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z", min_length=64, max_length=64)]
Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]*\Z", min_length=1, max_length=64)]
Line = Annotated[str, Meta(max_length=1024, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
Text = Annotated[str, Meta(max_length=16384)]
Count = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Version = Annotated[int, Meta(ge=1, le=MAX_INTEGER)]
# ASCII names: only there does the order of code units equal the order of bytes.
Extensions = Annotated[dict[Name, Text], Meta(max_length=64)]
Lines = Annotated[tuple[Line, ...], Meta(max_length=256)]


class _Closed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A group of fields; any other field is refused."""


class PackIndex(_Closed, frozen=True, gc=False):
    """The pack as a whole: what the index key signs. `version` only rises; `created` is the newest record's, so that two builds
    of the same records are equal; `licence` is an SPDX expression."""

    schema: Literal["autokern.pack/1"]
    min_reader: Version
    name: Name
    version: Version
    publisher: Line
    licence: Line
    notes: Text
    created: Line
    kernel_count: Annotated[int, Meta(ge=1, le=MAX_KERNELS)]
    kernels_sha256: Sha
    records_bytes: Count
    supersedes: Annotated[tuple[Sha, ...], Meta(max_length=256)] = ()
    critical: Lines = ()
    extensions: Extensions = {}


class EntryFacts(_Closed, frozen=True, gc=False):
    """One entry point as the ELF says it; all but the name are 0 or empty on a CPU."""

    name: Line
    registers: Count = 0
    static_shared_bytes: Count = 0
    stack_bytes: Count = 0
    max_threads: Count = 0
    parameter_bytes: Annotated[tuple[Count, ...], Meta(max_length=256)] = ()


class BinaryFacts(_Closed, frozen=True, gc=False):
    """One binary as the ELF says it. `arch` has the suffix of a cubin; on a CPU it is the ELF's machine. `imports` are the
    symbols that it wants from outside, `libraries` what it names as needed; `abi` is a cubin's layout (0 on a CPU)."""

    blob: Line
    size_bytes: Count
    sha256: Sha
    arch: Line
    abi: Count
    entries: Annotated[tuple[EntryFacts, ...], Meta(max_length=256)]
    imports: Lines
    libraries: Lines


class Contract(_Closed, frozen=True, gc=False):
    """Which calls the kernel answers, in words; the exact key is in the record, and `key_digest` names it."""

    key_digest: Sha
    op: Line
    inputs: Lines
    outputs: Lines
    scalars: Lines
    flags: Lines


class Place(_Closed, frozen=True, gc=False):
    """Where it was proved: as `Target`, and torch's major.minor."""

    device_type: Literal["cpu", "cuda"]
    name: Line
    arch: Line
    threads: Count
    stock_build: Line


class Source(_Closed, frozen=True, gc=False):
    """What the binary was made from. `blob` is "" where the source is not in the record."""

    language: Line
    blob: Line
    sha256: Sha
    template: Line
    tools: Lines
    box_level: Line


class Origin(_Closed, frozen=True, gc=False):
    """Where the idea came from. Never used to decide anything."""

    candidate_id: Line
    author: Line
    idea: Text
    parents: Lines
    created: Line


class Verification(_Closed, frozen=True, gc=False):
    """What was proved, in short; seeds and every family's errors are in the record. Errors in billionths of the natural scale,
    rounded up; `atol_pico` and `rtol_pico` in 1e-12."""

    accuracy_class: AccuracyClass
    determinism: Determinism
    atol_pico: Count
    rtol_pico: Count
    judge_version: Count
    families: Count
    trials: Count
    worst_family: Line
    error_max_nano: Count
    stock_error_max_nano: Count
    checks: Count
    probes: Count


class Speed(_Closed, frozen=True, gc=False):
    """One timing: times in nanoseconds, ratios (stock over kernel) in thousandths, bounds rounded against the kernel."""

    regime: Literal["eager", "compiled", "graph"]
    pages: Literal["fresh", "resident", "device"]
    inputs: Literal["warm", "cold"]
    stock_ns: Count
    kernel_ns: Count
    ratio_milli: Count
    ratio_low_milli: Count
    ratio_high_milli: Count
    blocks: Count
    processes: Count


class Privacy(_Closed, frozen=True, gc=False):
    """That no blob and no line names a home folder or a user; the reader looks again."""

    private_words: Literal[0]
    debug_sections: Literal[0]


class KernelManifest(_Closed, frozen=True, gc=False):
    """One kernel: claims that `derive_manifest` makes again from the record's bytes."""

    record_id: Sha
    record_bytes: Count
    contract: Contract
    place: Place
    binaries: Annotated[tuple[BinaryFacts, ...], Meta(max_length=4)]
    source: Source
    origin: Origin
    verification: Verification
    speed: Annotated[tuple[Speed, ...], Meta(max_length=64)]
    privacy: Privacy
    extensions: Extensions = {}


# Facts of a record's binaries; given from the room above that reads ELF files.
BinaryReader = Callable[[StoredRecord], "tuple[BinaryFacts, ...] | PackRefusal"]
DocumentT = TypeVar("DocumentT")


def decode_document(raw: bytes, kind: type[DocumentT]) -> DocumentT | PackRefusal:
    """One canonical document, or why it is not one. Its size is bounded by the caller, its depth by `kind`."""
    try:
        document = msgspec.json.decode(raw, type=kind)
        again = canonical_json(document)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        return PackRefusal(PackReason.BAD_FIELD, f"not the expected document: {str(error)[:200]}")
    if again != raw:
        return PackRefusal(PackReason.NOT_CANONICAL, "a duplicate key, other order, white space, or another form of a number")
    return document


def decode_index(raw: bytes) -> PackIndex | PackRefusal:
    """The index, if this version may read it."""
    index = decode_document(raw, PackIndex)
    if isinstance(index, PackRefusal):
        return index
    if index.min_reader > READER_VERSION:
        return PackRefusal(
            PackReason.READER_TOO_OLD, f"needs reader {index.min_reader}, this is {READER_VERSION}",
            "pip install --upgrade torch-autokern",
        )  # fmt: skip
    unknown = sorted(set(index.critical))
    if unknown:
        return PackRefusal(
            PackReason.UNKNOWN_CRITICAL, f"the critical extension {unknown[0]!r} is unknown to this version",
            "pip install --upgrade torch-autokern",
        )  # fmt: skip
    return index


def split_kernels(raw: bytes, index: PackIndex) -> list[bytes] | PackRefusal:
    """The lines of the kernels that an index names: their hash and number are right, none is too long. Not parsed yet."""
    if hashlib.sha256(raw).hexdigest() != index.kernels_sha256:
        return PackRefusal(PackReason.DIGEST_MISMATCH, "the kernels do not have the hash that the index names")
    count = raw.count(b"\n")
    if count != index.kernel_count or not raw.endswith(b"\n"):
        return PackRefusal(PackReason.SIZE_MISMATCH, f"{count} lines of kernels, the index says {index.kernel_count}")
    lines = raw[:-1].split(b"\n")
    longest = max(map(len, lines))
    if longest > MAX_LINE_BYTES:
        return PackRefusal(PackReason.TOO_LARGE, f"a kernel of {longest} bytes, at most {MAX_LINE_BYTES} are allowed")
    return lines


def join_kernels(kernels: Sequence[KernelManifest]) -> bytes:
    """The lines of kernels, in order of record id."""
    return b"".join(canonical_json(kernel) + b"\n" for kernel in sorted(kernels, key=lambda k: k.record_id))


def derive_manifest(stored: StoredRecord, record_bytes: int, binaries: tuple[BinaryFacts, ...]) -> KernelManifest | PackRefusal:
    """What the manifest of a record must say, made from the record and from what its binaries say of themselves."""
    foreign = sorted(set(stored.data) - _ALLOWED_BLOBS)
    if foreign:
        return PackRefusal(PackReason.FOREIGN_BLOB, f"blob {foreign[0][:80]!r} has no place in a pack", kernel=stored.record_id)
    record = stored.record
    target, verdict, origin = record.target, record.verdict, record.provenance
    sources = [name for name in stored.data if name.startswith("source.")]
    worst = max(verdict.families, key=lambda f: f.error_max, default=None)
    key = record.key
    return KernelManifest(
        record_id=stored.record_id,
        record_bytes=record_bytes,
        contract=Contract(
            key.digest,
            key.op,
            _tensors(key.tensors),
            _tensors(key.outputs),
            tuple(f"{name}={value!r}" for name, value in sorted(key.scalars.items())),
            _flags(key),
        ),
        place=Place(target.device_type, target.name, target.arch, target.threads, record.stock_build),
        binaries=binaries,
        source=Source(
            origin.language,
            sources[0] if sources else "",
            origin.source_sha256,
            origin.template,
            tuple(f"{name}: {words}"[:1024] for name, words in sorted(origin.tools.items())),
            origin.box_level,
        ),
        origin=Origin(origin.candidate_id, origin.author, origin.idea, origin.parents, origin.created),
        verification=Verification(
            verdict.accuracy_class,
            verdict.determinism,
            _scaled(verdict.atol, 1e12, math.ceil),
            _scaled(verdict.rtol, 1e12, math.ceil),
            verdict.judge_version,
            len(verdict.families),
            sum(len(family.seeds) for family in verdict.families),
            worst.family if worst else "",
            _scaled(worst.error_max if worst else 0.0, 1e9, math.ceil),
            _scaled(worst.stock_max if worst else 0.0, 1e9, math.ceil),
            len(verdict.checks),
            len(verdict.vacuity_probes),
        ),
        speed=tuple(_speed(timing) for timing in verdict.timings),
        privacy=Privacy(0, 0),
    )


def manifest_row(kernel: KernelManifest) -> IndexRow:
    """A kernel's row among the rows of a store; the record itself decides later."""
    place, ratios = kernel.place, dict[str, float]()
    for speed in kernel.speed:
        ratios[speed.regime] = min(speed.ratio_low_milli / 1000, ratios.get(speed.regime, math.inf))
    return IndexRow(
        kernel.contract.key_digest, kernel.record_id, Target(place.device_type, place.name, place.arch, place.threads),
        place.stock_build, kernel.verification.accuracy_class, kernel.verification.determinism, ratios,
    )  # fmt: skip


def _tensors(tensors: tuple[TensorKey | None, ...]) -> tuple[str, ...]:
    """``float32[64,38] strides 38,1 aligned 4`` for each tensor, ``none`` for an absent one."""
    words = []
    for tensor in tensors:
        if tensor is None:
            words.append("none")
            continue
        sizes, strides = (",".join(map(str, numbers)) for numbers in (tensor.sizes, tensor.strides))
        words.append(f"{tensor.dtype}[{sizes}] strides {strides} aligned {tensor.alignment_bytes}")
    return tuple(words)


def _flags(key: KernelKey) -> tuple[str, ...]:
    return (f"flush_denormal={key.flush_denormal}", f"matmul_precision={key.matmul_precision}", f"mkldnn={key.mkldnn}")


def _speed(timing: Timing) -> Speed:
    return Speed(
        timing.regime, timing.pages, timing.inputs, _scaled(timing.stock_us, 1e3, math.floor),
        _scaled(timing.candidate_us, 1e3, math.ceil), _scaled(timing.ratio, 1e3, math.floor),
        _scaled(timing.ratio_low, 1e3, math.floor), _scaled(timing.ratio_high, 1e3, math.floor),
        max(0, timing.blocks), max(0, timing.processes),
    )  # fmt: skip


def _scaled(value: float, factor: float, rounded: Callable[[float], int]) -> int:
    return max(0, min(MAX_INTEGER, rounded(min(value * factor, _MAX_FLOAT))))
