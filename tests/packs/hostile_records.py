"""Hostile packs whose records or binaries no builder would ship, signed by a publisher who is trusted and lies."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec
from hostile import CASES, Make, R, put
from pack_samples import claiming, library, parts, records, softmax_key, stored, with_binary
from tiny_kernels import plan_for, record_data, record_for

from torch_autokern.runtime.plan import CpuStep, InputArg, LaunchPlan, encode_plan
from torch_autokern.store.key import canonical_json
from torch_autokern.store.record import StoredRecord, encode_record

__all__ = ["CASES"]


def record_case(name: str, reason: R, make: Callable[[], StoredRecord]) -> None:
    """Register a pack of one record whose line is right about it."""
    put(f"record: {name}", reason, lambda: claiming(make()).sealed())


def _with(**data: bytes) -> StoredRecord:
    key = softmax_key(3)
    return stored(record_for(key), {name.replace("__", "."): body for name, body in data.items()})


def _so(change: Callable[[bytearray], None]) -> Callable[[], StoredRecord]:
    def make() -> StoredRecord:
        binary = bytearray(library())
        change(binary)
        return with_binary(bytes(binary))

    return make


def _segment(binary: bytearray, kind: int) -> int:
    start, count = struct.unpack_from("<Q", binary, 32)[0], struct.unpack_from("<H", binary, 56)[0]
    return next(start + 56 * i for i in range(count) if struct.unpack_from("<I", binary, start + 56 * i)[0] == kind)


def _poke(layout: str, place: Callable[[bytearray], int], value: int) -> Callable[[bytearray], None]:
    return lambda binary: struct.pack_into(layout, binary, place(binary), value)


def _plan(*steps: CpuStep) -> bytes:
    return canonical_json(LaunchPlan(1, steps))


_PLAN = encode_plan(LaunchPlan(1, (CpuStep("softmax", 3, 2, (InputArg(0),)),)))
_GOOD_PLAN = lambda: encode_plan(plan_for(softmax_key(3)))  # noqa: E731 - needs torch, at the time of the test
record_case("a Python file", R.FOREIGN_BLOB, lambda: _with(kernel__so=library(), plan__json=_PLAN, __init____py=b"x"))
record_case("a blob that climbs", R.BAD_BINARY, lambda: _with(**{"../kernel__so": library(), "plan__json": _PLAN}))
record_case("no library", R.BAD_BINARY, lambda: _with(plan__json=_PLAN))
record_case("no plan", R.BAD_BINARY, lambda: _with(kernel__so=library()))
record_case("a cubin beside the library", R.BAD_BINARY,
            lambda: _with(kernel__so=library(), kernel__cubin=library(), plan__json=_PLAN))  # fmt: skip
record_case("a library of nothing", R.BAD_BINARY, lambda: with_binary(b""))
record_case("a script as the library", R.BAD_BINARY, lambda: with_binary(b"#!/bin/sh\n"))
record_case("half of the library", R.BAD_BINARY, lambda: with_binary(library()[: len(library()) // 2]))
record_case("a 32-bit library", R.BAD_BINARY, _so(_poke("<B", lambda b: 4, 1)))
record_case("a library for another machine", R.BAD_BINARY, _so(_poke("<H", lambda b: 18, 183)))
record_case("an executable", R.BAD_BINARY, _so(_poke("<H", lambda b: 16, 2)))
record_case("65,535 segments", R.BAD_BINARY, _so(_poke("<H", lambda b: 56, 0xFFFF)))
record_case("segments outside of the file", R.BAD_BINARY, _so(_poke("<Q", lambda b: 32, 1 << 60)))
record_case("an executable stack", R.BAD_BINARY, _so(_poke("<I", lambda b: _segment(b, 0x6474E551) + 4, 7)))
record_case("writable code", R.BAD_BINARY, _so(_poke("<I", lambda b: _segment(b, 1) + 4, 7)))
record_case("no dynamic table", R.BAD_BINARY, _so(_poke("<I", lambda b: _segment(b, 2), 4)))
record_case("an unknown CPU", R.BAD_BINARY,
            lambda: with_binary(library(), target=msgspec.structs.replace(record_for(softmax_key(3)).target, arch="x86-64-v9")))  # fmt: skip  # noqa: E501
record_case("an entry that the library lacks", R.BAD_BINARY,
            lambda: _with(kernel__so=library(), plan__json=_plan(CpuStep("system", 3, 1, ()))))  # fmt: skip
record_case("a plan that is no JSON", R.BAD_PLAN, lambda: _with(kernel__so=library(), plan__json=b"os.system('true')"))
record_case("a plan of 60,000 brackets", R.BAD_PLAN, lambda: _with(kernel__so=library(), plan__json=b"[" * 60_000))
record_case("a plan of 70 kB", R.BAD_PLAN, lambda: _with(kernel__so=library(), plan__json=b" " * 70_000))
record_case("a plan of 17 steps", R.BAD_PLAN,
            lambda: _with(kernel__so=library(), plan__json=_plan(*[CpuStep("softmax", 1, 1, ())] * 17)))  # fmt: skip
record_case("a plan with a shell step", R.BAD_PLAN,
            lambda: _with(kernel__so=library(), plan__json=b'{"version":1,"steps":[{"kind":"shell","run":"true"}]}'))  # fmt: skip  # noqa: E501
record_case("an op that is not known", R.UNKNOWN_OP,
            lambda: stored(record_for(msgspec.structs.replace(softmax_key(3), op="system")), record_data(softmax_key(3))))  # fmt: skip  # noqa: E501
record_case("a CPU key for a GPU", R.UNKNOWN_OP,
            lambda: stored(record_for(msgspec.structs.replace(softmax_key(3), device_type="cuda")), record_data(softmax_key(3))))  # fmt: skip  # noqa: E501
record_case("a home folder in the source", R.PRIVATE_WORDS,
            lambda: _with(kernel__so=library(), plan__json=_GOOD_PLAN(), source__cpp=b"// /home/alice/secret/kernel.cpp"))  # fmt: skip  # noqa: E501
record_case("a temporary folder in its idea", R.PRIVATE_WORDS, lambda: _idea("as in /tmp/job-17/plan"))
record_case("a header of 70 kB", R.TOO_LARGE, lambda: _idea("i" * 70_000))


def _idea(words: str) -> StoredRecord:
    record = records()[0].record
    origin = msgspec.structs.replace(record.provenance, idea=words)
    return stored(msgspec.structs.replace(record, provenance=origin), records()[0].data)


def _tail(change: Callable[[bytes], bytes]) -> Make:
    """The last record's bytes changed; its line and the index say the new length."""

    def make() -> bytes:
        whole = parts()
        whole.records[-1] = change(whole.records[-1])
        whole.kernels[-1]["record_bytes"] = len(whole.records[-1])
        return whole.sealed()

    return make


put("record bytes: cut", R.RECORD_DAMAGED, _tail(lambda raw: raw[:-100]))
put("record bytes: longer", R.RECORD_DAMAGED, _tail(lambda raw: raw + b"\0"))
put("record bytes: none", R.RECORD_DAMAGED, _tail(lambda raw: b""))
put("record bytes: another format", R.RECORD_DAMAGED, _tail(lambda raw: raw[:8] + b"\2" + raw[9:]))
put("record bytes: a header of 4 GB", R.TOO_LARGE, _tail(lambda raw: raw[:12] + b"\xff\xff\xff\xff" + raw[16:]))
put("record bytes: another whole record", R.DIGEST_MISMATCH,
    lambda: _tail(lambda raw: encode_record(_idea("new").record, records()[0].data))())  # fmt: skip
