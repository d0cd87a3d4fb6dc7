"""What a store must hold and may hold, and whether it does: the one judgement that every part of the campaign ends with."""

from __future__ import annotations

import hashlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from tests.store.store_samples import make_key, make_record
from torch_autokern.store.index import row_of
from torch_autokern.store.record import decode_record, encode_record
from torch_autokern.store.store import KernelStore, Layer

TALLY: Counter[str] = Counter()  # what trials counted besides their faults; the campaign takes it over part by part


class Sample(NamedTuple):
    """A record that the campaign publishes, with the bytes that any read of it must give."""

    key_digest: str
    record_id: str
    raw: bytes
    number: int
    key_number: int
    size_bytes: int

    def publish(self, store: KernelStore) -> str:
        """Publish it; the outcome's status, checked against what the process itself can read afterwards."""
        record, data = make_record(self.number, make_key(self.key_number)), sample_data(self.number, self.size_bytes)
        outcome = store.publish(record, data)
        kept = store.get(self.key_digest, self.record_id)
        if outcome.status == "memory_only" and (kept is None or kept.data != data):
            raise AssertionError(f"the compiled kernel was lost: {outcome.reason}")
        return outcome.status


class Books(NamedTuple):
    """`must`: acknowledged, so readable whatever happens. `may`: on their way, so whole or absent. `was_damaged`: the scenario
    itself planted damage, so that damage counted by a reader is no news."""

    must: tuple[Sample, ...]
    may: tuple[Sample, ...] = ()
    was_damaged: bool = False


def sample(number: int, key_number: int = 0, size_bytes: int = 1280) -> Sample:
    """A record for softmax key `key_number` with a binary of `size_bytes`."""
    key = make_key(key_number)
    raw = encode_record(make_record(number, key), sample_data(number, size_bytes))
    return Sample(key.digest, decode_record(raw).record_id, raw, number, key_number, size_bytes)


def sample_data(number: int, size_bytes: int) -> dict[str, bytes]:
    """A binary that differs for every number, and a plan."""
    seed = hashlib.sha256(str(number).encode()).digest()
    return {"binary": (seed * (size_bytes // 32 + 1))[:size_bytes], "plan": b'{"version":1}'}


def open_at(root: Path) -> KernelStore:
    """A store with one writable layer, as a fresh process would open it."""
    return KernelStore([Layer("cache", root, writable=True)])


def guarded(check: Callable[[], Iterable[str]]) -> list[str]:
    """The faults that a check finds; an exception is one."""
    try:
        return list(check())
    except Exception:  # noqa: BLE001 - a store that raises is what the campaign looks for
        return ["raised: " + traceback.format_exc(limit=-4)]


def faults(root: Path, books: Books) -> list[str]:
    """Everything wrong with the store at `root` for a process that comes now; then whether it can still be published to."""
    return guarded(lambda: _faults(root, books))


def misread(store: KernelStore, known: Iterable[Sample]) -> tuple[set[str], list[str]]:
    """Ids of all records that can be read, and a fault for each whose bytes were never published: a bad read."""
    raws = {each.record_id: each.raw for each in known}
    wrong = []
    found = set()
    for stored in store.records():
        found.add(stored.record_id)
        if raws.get(stored.record_id) != encode_record(stored.record, stored.data):
            wrong.append(f"wrong bytes: record {stored.record_id[:12]} was never published so")
    return found, wrong


def _faults(root: Path, books: Books) -> list[str]:
    store = open_at(root)
    found, wrong = misread(store, (*books.must, *books.may))
    must, all_ids = {each.record_id for each in books.must}, {each.record_id for each in (*books.must, *books.may)}
    wrong += [f"lost: acknowledged record {name[:12]}" for name in sorted(must - found)]
    if not books.was_damaged and store.counters.damaged:
        wrong.append(f"half visible: {store.counters.damaged} damaged files")
    if store.counters.refused:
        wrong.append(f"refused: {store.counters.refused} of its own files")
    rows = store.index().rows()
    listed = {row.record_id for row in rows}
    wrong += [f"hidden: record {name[:12]} is there and not listed" for name in sorted(found - listed)]
    for row in rows:
        stored = store.get(row.key_digest, row.record_id)
        if stored is not None and row_of(stored) != row:
            wrong.append(f"wrong row: the list contradicts record {row.record_id[:12]}")
    for each in books.may:
        status = each.publish(open_at(root))
        if status == "memory_only":
            wrong.append(f"stuck: record {each.record_id[:12]} cannot be published any more")
    if books.may:
        after = open_at(root)
        if {stored.record_id for stored in after.records()} != all_ids:
            wrong.append("lost: after a second publish")
        if {row.record_id for row in after.index().rows()} != all_ids:
            wrong.append("hidden: after a second publish")
    return wrong
