"""Hostile packs, each made from the real one by a small change, named, with the reason for which it must be refused.

Half of them are changed in flight, so signatures no longer hold. The other half are signed by a publisher who is trusted and
lies: what stands between him and the process are the checks behind the signature.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pack_samples import (
    Parts,
    good,
    parts,
    records,
    resigned,
    secret,
    secrets,
    split,
    unsigned,
)

from torch_autokern.store.key import canonical_json
from torch_autokern.store.pack_build import pack_bytes, sign_pack
from torch_autokern.store.pack_file import Signature
from torch_autokern.store.pack_refusal import PackReason as R
from torch_autokern.store.record import encode_record

Make = Callable[[], bytes]
CASES: dict[str, tuple[Make, R]] = {}
_HEADER = struct.Struct("<8sIIIIQ")
_SLOT = 104


def case(reason: R, name: str = "") -> Callable[[Make], Make]:
    """Register a hostile pack under its function's name."""

    def register(make: Make) -> Make:
        put(name or make.__name__, reason, make)
        return make

    return register


def put(name: str, reason: R, make: Make) -> None:
    """Register a hostile pack."""
    assert name not in CASES, name
    CASES[name] = (make, reason)


# -- the bytes: header, sizes, truncation, flips ------------------------------------------------------------------------------


def with_header(**fields: int) -> bytes:
    """The pack with other numbers in its header."""
    raw = good()
    names = ("version", "signatures", "index", "kernels", "records")
    values = dict(zip(names, _HEADER.unpack_from(raw)[1:], strict=True)) | fields
    return _HEADER.pack(raw[:8], *(values[name] for name in names)) + raw[_HEADER.size :]


def flipped(offset: int) -> bytes:
    """One bit changed."""
    raw = bytearray(good())
    raw[offset] ^= 1
    return bytes(raw)


def _start(part: str) -> int:
    _, _, count, index, kernels, _ = _HEADER.unpack_from(good())
    start = _HEADER.size + count * _SLOT
    return {"signatures": _HEADER.size, "index": start, "kernels": start + index, "records": start + index + kernels}[part]


put("empty file", R.NOT_A_PACK, lambda: b"")
put("magic alone", R.NOT_A_PACK, lambda: good()[:8])
put("header without its last byte", R.NOT_A_PACK, lambda: good()[: _HEADER.size - 1])
put("other magic", R.NOT_A_PACK, lambda: b"AKPACK\n\n" + good()[8:])
put("line ends changed in transfer", R.NOT_A_PACK, lambda: good().replace(b"\r\n", b"\n", 1))
put("a zip file", R.NOT_A_PACK, lambda: b"PK\x03\x04" + bytes(100))
put("a pickle", R.NOT_A_PACK, lambda: b"\x80\x04\x95" + b"cos\nsystem\n(S'true'\ntR." * 4)
put("a record alone", R.NOT_A_PACK, lambda: encode_record(records()[0].record, records()[0].data))
put("format of tomorrow", R.FORMAT_VERSION, lambda: with_header(version=2))
put("format zero", R.FORMAT_VERSION, lambda: with_header(version=0))
put("four billion signatures", R.BAD_HEADER, lambda: with_header(signatures=0xFFFFFFFF))
put("seventeen signatures", R.BAD_HEADER, lambda: with_header(signatures=17))
put("index of four gigabytes", R.BAD_HEADER, lambda: with_header(index=0xFFFFFFFF))
put("kernels of four gigabytes", R.BAD_HEADER, lambda: with_header(kernels=0xFFFFFFFF))
put("records of 16 exabytes", R.SIZE_MISMATCH, lambda: with_header(records=0xFFFFFFFFFFFFFFFF))
put("records one byte longer than the file", R.SIZE_MISMATCH, lambda: with_header(records=len(split(good()).records) + 1))
put("index one byte short", R.SIZE_MISMATCH, lambda: with_header(index=len(split(good()).index) - 1))
put("sizes wrap around", R.SIZE_MISMATCH, lambda: with_header(records=2**64 - len(good())))
put("one byte appended", R.SIZE_MISMATCH, lambda: good() + b"\0")
put("a megabyte appended", R.SIZE_MISMATCH, lambda: good() + bytes(1 << 20))
put("a second pack appended", R.SIZE_MISMATCH, lambda: good() + good())
for _share in (10, 35, 60, 85, 99):
    put(f"truncated at {_share} %", R.SIZE_MISMATCH, lambda s=_share: good()[: len(good()) * s // 100])  # type: ignore[misc]
put("truncated by one byte", R.SIZE_MISMATCH, lambda: good()[:-1])
put("flip in the role", R.BAD_SIGNATURE_SLOT, lambda: flipped(_start("signatures")))
put("flip in the scheme", R.BAD_SIGNATURE_SLOT, lambda: flipped(_start("signatures") + 1))
put("flip in a reserved byte", R.BAD_SIGNATURE_SLOT, lambda: flipped(_start("signatures") + 5))
put("flip in a key id", R.UNTRUSTED_KEY, lambda: flipped(_start("signatures") + 8))
put("flip in a signature", R.BAD_SIGNATURE, lambda: flipped(_start("signatures") + 41))
put("flip in the last byte of a signature", R.BAD_SIGNATURE, lambda: flipped(_start("signatures") + _SLOT - 1))
put("flip in the index", R.BAD_SIGNATURE, lambda: flipped(_start("index") + 30))
put("flip in the kernels", R.BAD_SIGNATURE, lambda: flipped(_start("kernels") + 30))
put("flip in a record's magic", R.RECORD_DAMAGED, lambda: flipped(_start("records")))
put("flip in a record's header", R.RECORD_DAMAGED, lambda: flipped(_start("records") + 200))
put("flip in machine code", R.RECORD_DAMAGED, lambda: flipped(_start("records") + 20_000))
put("flip in the last byte", R.RECORD_DAMAGED, lambda: flipped(len(good()) - 1))

# -- signatures ---------------------------------------------------------------------------------------------------------------


def signed(*keys: Any) -> bytes:
    """The pack signed by these keys."""
    return pack_bytes(sign_pack(unsigned(), keys))


put("no signature", R.UNSIGNED, lambda: pack_bytes(unsigned()))
put("index signed alone", R.UNSIGNED, lambda: signed(secret("index")))
put("kernels signed alone", R.UNSIGNED, lambda: signed(secret("kernels")))
put("signed by a stranger", R.UNTRUSTED_KEY, lambda: signed(*secrets("stranger")))
put("kernels signed by a stranger", R.UNTRUSTED_KEY, lambda: signed(secret("kernels", "stranger"), secret("index")))
put("index signed by a stranger", R.UNTRUSTED_KEY, lambda: signed(secret("kernels"), secret("index", "stranger")))


@case(R.UNTRUSTED_KEY)
def index_key_signs_the_kernels() -> bytes:
    """One key cannot do the other's work, even where its signature is right."""
    envelope = unsigned()
    key = secret("index")
    value = key.sign("kernels", envelope.kernels)
    return resigned(good(), (Signature("kernels", value.key_id, value.value), key.sign("index", envelope.index)))


@case(R.BAD_SIGNATURE)
def signature_of_the_other_part() -> bytes:
    envelope = unsigned()
    kernels, index = secrets()
    wrong = kernels.sign("kernels", envelope.index)
    return resigned(good(), (Signature("kernels", wrong.key_id, wrong.value), index.sign("index", envelope.index)))


@case(R.BAD_SIGNATURE)
def signature_for_another_purpose() -> bytes:
    envelope = unsigned()
    kernels, index = secrets()
    wrong = index.sign("statement", envelope.index)
    return resigned(good(), (kernels.sign("kernels", envelope.kernels), Signature("index", wrong.key_id, wrong.value)))


@case(R.BAD_SIGNATURE)
def signature_of_zeros() -> bytes:
    return resigned(good(), tuple(Signature(s.role, s.key_id, bytes(64)) for s in split(good()).signatures))


@case(R.BAD_SIGNATURE)
def signatures_of_another_pack() -> bytes:
    other = split(parts_with(version=4).sealed())
    return resigned(good(), other.signatures)


@case(R.BAD_SIGNATURE_SLOT)
def one_key_signs_twice() -> bytes:
    found = split(good()).signatures
    return resigned(good(), (found[0], found[0], found[1]))


@case(R.BAD_SIGNATURE_SLOT)
def signatures_out_of_order() -> bytes:
    raw = good()
    first, second = raw[32 : 32 + _SLOT], raw[32 + _SLOT : 32 + 2 * _SLOT]
    return raw[:32] + second + first + raw[32 + 2 * _SLOT :]


# -- the index, signed by a trusted key ---------------------------------------------------------------------------------------


def parts_with(**fields: Any) -> Parts:
    """The pack with other fields in its index; None takes a field away."""
    whole = parts()
    index = {name: value for name, value in {**whole.index, **fields}.items() if value is not None}
    return replace(whole, index=index)


def index_case(label: str, reason: R, /, **fields: Any) -> None:
    """Register a pack whose index has other fields, everything else made to fit."""
    put(f"index: {label}", reason, lambda: parts_with(**fields).sealed())


index_case("another schema", R.BAD_FIELD, schema="autokern.pack/2")
index_case("an unknown field", R.BAD_FIELD, entry_point="setup:run")
index_case("a field is missing", R.BAD_FIELD, licence=None)
index_case("a reader of tomorrow", R.READER_TOO_OLD, min_reader=2)
index_case("reader zero", R.BAD_FIELD, min_reader=0)
index_case("an unknown critical extension", R.UNKNOWN_CRITICAL, critical=["delta"], extensions={"delta": "1"})
index_case("a name that climbs", R.BAD_FIELD, name="../../etc/cron.d/x")
index_case("a name with a slash", R.BAD_FIELD, name="a/b")
index_case("a name that begins with a dot", R.BAD_FIELD, name=".hidden")
index_case("a name with a line break", R.BAD_FIELD, name="tiny\n")
index_case("a name with capitals", R.BAD_FIELD, name="Tiny")
index_case("an empty name", R.BAD_FIELD, name="")
index_case("a name of 65 letters", R.BAD_FIELD, name="a" * 65)
index_case("a name with a zero byte", R.BAD_FIELD, name="a\0b")
index_case("version zero", R.BAD_FIELD, version=0)
index_case("a negative version", R.BAD_FIELD, version=-1)
index_case("a version above 2^53", R.BAD_FIELD, version=2**53)
index_case("a fractional version", R.BAD_FIELD, version=1.5)
index_case("a version that is text", R.BAD_FIELD, version="3")
index_case("terminal colours in the publisher", R.BAD_FIELD, publisher="\x1b[31mroot\x1b[0m")
index_case("notes of 20 kB", R.BAD_FIELD, notes="n" * 20_000)
index_case("65 extensions", R.BAD_FIELD, extensions={f"e{i}": "" for i in range(65)})
index_case("a nested extension", R.BAD_FIELD, extensions={"a": {"b": "c"}})
put("index: another hash of the kernels", R.DIGEST_MISMATCH,
    lambda: parts_with(kernels_sha256="0" * 64, kernel_count=4,
                       records_bytes=sum(map(len, parts().records))).sealed(fix=False))  # fmt: skip
put("index: a hash in capitals", R.BAD_FIELD, lambda: parts_with(kernels_sha256="A" * 64).sealed(fix=False))
put("index: a kernel too many", R.SIZE_MISMATCH, lambda: index_counts(kernel_count=5))
put("index: a kernel too few", R.SIZE_MISMATCH, lambda: index_counts(kernel_count=3))
put("index: ten thousand and one kernels", R.BAD_FIELD, lambda: index_counts(kernel_count=10_001))
put("index: no kernel", R.BAD_FIELD, lambda: index_counts(kernel_count=0))
put("index: records a byte longer", R.SIZE_MISMATCH, lambda: index_counts(records_bytes=len(split(good()).records) + 1))


def index_counts(**fields: int) -> bytes:
    """The pack with wrong counts in its index."""
    return parts_with(**fields).sealed(fix=False)


def raw_index(change: Callable[[bytes], bytes]) -> Make:
    """A pack whose index's bytes are changed and signed."""
    return lambda: parts().sealed(index_raw=change(split(good()).index))


for _name, _reason, _change in (
    ("a duplicate key", R.NOT_CANONICAL, lambda raw: raw[:-1] + b',"version":3}'),
    ("white space", R.NOT_CANONICAL, lambda raw: raw.replace(b":", b": ", 1)),
    ("a line break at its end", R.NOT_CANONICAL, lambda raw: raw + b"\n"),
    ("another order", R.NOT_CANONICAL, lambda raw: b'{"version":3,' + raw[1:].replace(b',"version":3', b"")),
    ("a number with an exponent", R.BAD_FIELD, lambda raw: raw.replace(b'"version":3', b'"version":3e0')),
    ("a number with a fraction", R.BAD_FIELD, lambda raw: raw.replace(b'"version":3', b'"version":3.5')),
    ("an escape that is not needed", R.NOT_CANONICAL, lambda raw: raw.replace(b'"tiny"', b'"\\u0074iny"')),
    ("a comment", R.BAD_FIELD, lambda raw: raw[:-1] + b"/* */}"),
    ("bytes that are no UTF-8", R.BAD_FIELD, lambda raw: raw.replace(b"the tests", b"the\xff\xfe\xfdts", 1)),
    ("half of a surrogate pair", R.BAD_FIELD, lambda raw: raw.replace(b"the tests", b"the\\ud800", 1)),
    ("nothing", R.BAD_FIELD, lambda raw: b""),
    ("null", R.BAD_FIELD, lambda raw: b"null"),
    ("a list", R.BAD_FIELD, lambda raw: b"[" + raw + b"]"),
    ("60,000 brackets", R.BAD_FIELD, lambda raw: b"[" * 60_000),
    ("60,000 objects deep", R.BAD_FIELD, lambda raw: b'{"a":' * 12_000),
    ("deep inside of a known field", R.BAD_FIELD, lambda raw: raw.replace(b'"critical":[]', b'"critical":' + b"[" * 30_000)),
    ("a list of 30,000 nothings", R.BAD_FIELD, lambda raw: raw.replace(b"[]", b"[" + b'"",' * 20_000 + b'""]', 1)),
    ("a number of 4,000 digits", R.BAD_FIELD, lambda raw: raw.replace(b'"version":3', b'"version":' + b"9" * 4000)),
    ("NaN", R.BAD_FIELD, lambda raw: raw.replace(b'"version":3', b'"version":NaN')),
):
    put(f"index bytes: {_name}", _reason, raw_index(_change))

# -- the kernels' lines, signed by a trusted key ------------------------------------------------------------------------------


def line_case(name: str, reason: R, *path: str | int, value: Any) -> None:
    """Register a pack in which one field of the first kernel's line says something else."""

    def make() -> bytes:
        whole = parts()
        place: Any = whole.kernels[0]
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        return whole.sealed()

    put(f"line: {name}", reason, make)


_LIB = ("binaries", 0)
line_case("another architecture", R.BINARY_MISMATCH, *_LIB, "arch", value="aarch64")
line_case("an entry that is not there", R.BINARY_MISMATCH, *_LIB, "entries", 0, "name", value="system")
line_case("registers of another kernel", R.BINARY_MISMATCH, *_LIB, "entries", 0, "registers", value=32)
line_case("shared memory", R.BINARY_MISMATCH, *_LIB, "entries", 0, "static_shared_bytes", value=1024)
line_case("parameters", R.BINARY_MISMATCH, *_LIB, "entries", 0, "parameter_bytes", value=[8, 8])
line_case("no entry at all", R.BINARY_MISMATCH, *_LIB, "entries", value=[])
line_case("another hash of the binary", R.BINARY_MISMATCH, *_LIB, "sha256", value="0" * 64)
line_case("another size of the binary", R.BINARY_MISMATCH, *_LIB, "size_bytes", value=1)
line_case("imports left out", R.BINARY_MISMATCH, *_LIB, "imports", value=[])
line_case("another library", R.BINARY_MISMATCH, *_LIB, "libraries", value=["libssl.so.3"])
line_case("another layout", R.BINARY_MISMATCH, *_LIB, "abi", value=8)
line_case("no binary", R.BINARY_MISMATCH, "binaries", value=[])
line_case("another op", R.RECORD_MISMATCH, "contract", "op", value="mm")
line_case("another key", R.RECORD_MISMATCH, "contract", "key_digest", value="0" * 64)
line_case("other sizes", R.RECORD_MISMATCH, "contract", "inputs", 0, value="float32[9,8] strides 8,1 aligned 4")
line_case("other scalars", R.RECORD_MISMATCH, "contract", "scalars", value=["dim=0", "half_to_float=False"])
line_case("other flags", R.RECORD_MISMATCH, "contract", "flags", value=[])
line_case("another device", R.RECORD_MISMATCH, "place", "name", value="NVIDIA H100")
line_case("other threads", R.RECORD_MISMATCH, "place", "threads", value=64)
line_case("another stock build", R.RECORD_MISMATCH, "place", "stock_build", value="9.9")
line_case("a better class", R.RECORD_MISMATCH, "verification", "accuracy_class", value="exact")
line_case("better determinism", R.RECORD_MISMATCH, "verification", "determinism", value="gpu_to_gpu")
line_case("more trials", R.RECORD_MISMATCH, "verification", "trials", value=1000)
line_case("a smaller error", R.RECORD_MISMATCH, "verification", "stock_error_max_nano", value=5)
line_case("ten times as fast", R.RECORD_MISMATCH, "speed", 0, "ratio_low_milli", value=15000)
line_case("a regime that was not timed", R.RECORD_MISMATCH, "speed", 0, "regime", value="graph")
line_case("another author", R.RECORD_MISMATCH, "origin", "author", value="somebody else")
line_case("another candidate", R.RECORD_MISMATCH, "origin", "candidate_id", value="0" * 64)
line_case("another source", R.RECORD_MISMATCH, "source", "sha256", value="0" * 64)
line_case("private words that are none", R.BAD_FIELD, "privacy", "private_words", value=1)
line_case("a device of a kind that is not known", R.BAD_FIELD, "place", "device_type", value="tpu")
line_case("a regime that is not known", R.BAD_FIELD, "speed", 0, "regime", value="warp")
line_case("an unknown field", R.BAD_FIELD, "python", value="import os")
line_case("an id that is a path", R.BAD_FIELD, "record_id", value="../" * 21 + "x")
line_case("a record of another length", R.SIZE_MISMATCH, "record_bytes", value=7)
line_case("a record of negative length", R.BAD_FIELD, "record_bytes", value=-1)
line_case("the id of another record", R.BAD_ORDER, "record_id", value="f" * 64)
line_case("an id that no record has", R.DIGEST_MISMATCH, "record_id", value="0" * 64)
line_case("4,097 entries", R.BAD_FIELD, *_LIB, "entries", value=[{"name": "e"}] * 257)


def lines_case(name: str, reason: R, change: Callable[[Parts], Parts | bytes]) -> None:
    """Register a pack whose kernels are changed as a whole."""

    def make() -> bytes:
        outcome = change(parts())
        return outcome if isinstance(outcome, bytes) else outcome.sealed()

    put(f"kernels: {name}", reason, make)


def _lines(whole: Parts) -> bytes:
    return b"".join(canonical_json(kernel) + b"\n" for kernel in whole.kernels)


lines_case("in another order", R.BAD_ORDER, lambda p: replace(p, kernels=p.kernels[::-1], records=p.records[::-1]))
lines_case(
    "one twice", R.BAD_ORDER, lambda p: replace(p, kernels=[*p.kernels, p.kernels[-1]], records=[*p.records, p.records[-1]])
)
lines_case("one not listed", R.SIZE_MISMATCH, lambda p: replace(p, kernels=p.kernels[:-1]))
lines_case("one listed and not there", R.SIZE_MISMATCH, lambda p: replace(p, records=p.records[:-1]))
lines_case("two records swapped", R.RECORD_DAMAGED, lambda p: replace(p, records=[p.records[1], p.records[0], *p.records[2:]]))
lines_case("no line break at the end", R.SIZE_MISMATCH, lambda p: p.sealed(kernels_raw=_lines(p)[:-1]))
lines_case("an empty line", R.BAD_FIELD, lambda p: p.sealed(kernels_raw=_lines(p) + b"\n"))
lines_case("as one list", R.BAD_FIELD, lambda p: p.sealed(kernels_raw=canonical_json(p.kernels) + b"\n"))
lines_case("with Windows line ends", R.NOT_CANONICAL, lambda p: p.sealed(kernels_raw=_lines(p).replace(b"\n", b"\r\n")))
lines_case("a line of 70 kB", R.TOO_LARGE, lambda p: p.sealed(kernels_raw=b"[" * 70_000 + b"\n"))
lines_case("a million nothings", R.TOO_LARGE, lambda p: p.sealed(kernels_raw=b"1," * 1_000_000 + b"\n"))
lines_case("ten thousand empty lines", R.BAD_FIELD, lambda p: p.sealed(kernels_raw=b"\n" * 10_000))
lines_case(
    "a duplicate key", R.NOT_CANONICAL, lambda p: p.sealed(kernels_raw=_lines(p).replace(b'{"abi":0,', b'{"abi":0,"abi":0,', 1))
)
lines_case("tabs", R.NOT_CANONICAL, lambda p: p.sealed(kernels_raw=_lines(p).replace(b",", b",\t", 1)))
