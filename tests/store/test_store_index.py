"""The index: derived, complete, rebuilt when damaged, and never trusted for bytes."""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path

import msgspec
import pytest
from store_faults import run_together
from store_samples import make_data, make_key, make_record

import torch_autokern.store.indexing as indexing
import torch_autokern.store.store as store_module
from torch_autokern.store.index import RecordIndex, encode_index, row_of
from torch_autokern.store.layout import index_files, index_folder, pending_folder, record_file
from torch_autokern.store.record import StoredRecord, decode_record, encode_record
from torch_autokern.store.store import KernelStore, Layer


def open_at(root: Path, *, writable: bool = True) -> KernelStore:
    return KernelStore([Layer("cache", root, writable=writable)])


def make_stored(seed: int) -> StoredRecord:
    return decode_record(encode_record(make_record(seed, make_key(seed // 2)), {}))


def test_rows_survive_encoding() -> None:
    rows = [row_of(make_stored(seed)) for seed in range(50)]
    index = RecordIndex(encode_index(rows))
    assert len(index) == 50
    assert sorted(index.rows(), key=lambda row: row.record_id) == sorted(rows, key=lambda row: row.record_id)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 255, 256, 1000])
def test_every_key_is_found_and_no_other(count: int) -> None:
    rows = [row_of(make_stored(seed)) for seed in range(count)]
    index = RecordIndex(encode_index(rows))
    for row in rows:
        assert row in index.lookup(row.key_digest)
        assert all(found.key_digest == row.key_digest for found in index.lookup(row.key_digest))
    assert index.lookup("00" * 32) == index.lookup("ff" * 32) == ()


def test_rows_for_one_target_and_build_only(root: Path) -> None:
    store = open_at(root)
    here, elsewhere = make_record(0), msgspec.structs.replace(make_record(1), stock_build="2.12")
    store.publish(here, {})
    store.repair()
    store.publish(elsewhere, {})
    for build in ("2.12", "2.13"):
        rows = open_at(root).index().rows(lambda target, stock: target == here.target and stock == build)  # noqa: B023
        assert [row.stock_build for row in rows] == [build]
    assert open_at(root).index().rows(lambda target, stock: False) == []


def test_order_of_rows_does_not_change_the_bytes() -> None:
    rows = [row_of(make_stored(seed)) for seed in range(20)]
    assert encode_index(rows) == encode_index(rows[:1] + rows)


def test_any_flip_or_cut_of_the_file_is_refused() -> None:
    raw = encode_index([row_of(make_stored(seed)) for seed in range(3)])
    for place in range(len(raw)):
        flipped = bytearray(raw)
        flipped[place] ^= 1 << (place % 8)
        with pytest.raises(ValueError):
            RecordIndex(bytes(flipped))
        with pytest.raises(ValueError):
            RecordIndex(raw[:place])


def test_published_records_are_in_the_next_index_at_once(root: Path) -> None:
    store = open_at(root)
    for seed in range(5):
        store.publish(make_record(seed, make_key(seed)), make_data(seed))
        assert len(open_at(root).index().rows()) == seed + 1
    assert len(open_at(root).index().lookup(make_key(4).digest)) == 1


def test_opening_reads_no_record_that_is_listed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_at(root)
    for seed in range(5):
        store.publish(make_record(seed), make_data(seed))
    store.repair()

    def refuse(path: Path) -> None:
        raise AssertionError(f"read {path}")

    monkeypatch.setattr(indexing, "read_record", refuse)
    monkeypatch.setattr(store_module, "read_record", refuse)
    assert len(open_at(root).index().rows()) == 5


def test_many_pending_records_are_merged_into_the_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "COMPACT_ABOVE", 3)
    store = open_at(root)
    for seed in range(9):
        store.publish(make_record(seed), make_data(seed))
        store.index()
    assert len(list(pending_folder(root).iterdir())) <= 4
    assert len(open_at(root).index().rows()) == 9


@pytest.mark.parametrize("damage", ["missing", "flipped", "empty", "folder"])
def test_damaged_or_missing_index_is_derived_again(root: Path, damage: str) -> None:
    store = open_at(root)
    for seed in range(4):
        store.publish(make_record(seed), make_data(seed))
    store.repair()
    (path,) = index_files(root)
    if damage == "flipped":
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    if damage == "folder":
        path.mkdir()
    assert len(open_at(root, writable=False).index().rows()) == 4
    assert len(open_at(root).index().rows()) == 4


def test_a_row_whose_record_is_gone_is_a_miss_when_read(root: Path) -> None:
    store = open_at(root)
    record_id = store.publish(make_record(), make_data()).record_id
    store.repair()
    digest = make_key().digest
    record_file(root, digest, record_id).unlink()
    assert [row.record_id for row in open_at(root).index().lookup(digest)] == [record_id]
    assert open_at(root).get(digest, record_id) is None


def test_an_announced_record_that_never_came_is_no_row(root: Path) -> None:
    store = open_at(root)
    store.publish(make_record(), make_data())
    indexing.announce(root, make_key(9).digest, "ab" * 32)
    assert len(open_at(root).index().rows()) == 1
    store.repair()
    assert len(list(pending_folder(root).iterdir())) == 1, "its publisher may still be at work"


def test_records_in_memory_only_are_in_the_index() -> None:
    store = KernelStore([])
    record_id = store.publish(make_record(), make_data()).record_id
    assert [row.record_id for row in store.index().lookup(make_key().digest)] == [record_id]


@pytest.mark.parametrize("lock_lies", [False, True])
def test_readers_and_writers_at_once_lose_no_record(root: Path, monkeypatch: pytest.MonkeyPatch, lock_lies: bool) -> None:
    monkeypatch.setattr(indexing, "COMPACT_ABOVE", 2)
    if lock_lies:
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)

    def write(start: int) -> object:
        for seed in range(start, start + 12):
            open_at(root).publish(make_record(seed, make_key(seed % 5)), make_data(seed))
            open_at(root).index()
        return None

    run_together([lambda start=start: write(start) for start in (0, 100, 200, 300)])
    listed = {row.record_id for row in open_at(root).index().rows()}
    assert listed == {stored.record_id for stored in open_at(root).records()}
    assert len(listed) == 48
    assert len(index_files(root)) <= 5


def _resealed(raw: bytearray) -> bytes:
    return bytes(raw[:-32]) + hashlib.sha256(raw[:-32]).digest()


def test_a_row_that_names_what_its_list_has_not_is_no_row() -> None:
    """A faulty writer can seal nonsense with a good checksum; the rest of the list still serves."""
    rows = sorted((row_of(make_stored(seed)) for seed in range(4)), key=lambda row: (row.key_digest, row.record_id))
    whole = bytearray(encode_index(rows))
    row_bytes = 32 + 32 + 2 + 2 + 1 + 1 + 24
    last = len(whole) - 32 - row_bytes
    for place in (64, 66, 68, 69):  # target, stock build, accuracy class, determinism
        raw = bytearray(whole)
        raw[last + place] = 0xEE
        index = RecordIndex(_resealed(raw))
        assert list(index.rows()) == list(index.rows(lambda *_: True)) == rows[:-1]
        assert rows[-1] not in index.lookup(rows[-1].key_digest)


def test_a_bucket_that_reaches_past_the_list_ends_with_it() -> None:
    rows = [row_of(make_stored(seed)) for seed in range(2)]
    raw = bytearray(encode_index(rows))
    names_length = int.from_bytes(raw[16:20], "little")
    bits = int.from_bytes(raw[12:16], "little")
    end = 20 + names_length + 4 * ((int(rows[0].key_digest[:8], 16) >> (32 - bits)) + 1)
    raw[end : end + 4] = b"\xff\xff\xff\xff"
    assert rows[0] in RecordIndex(_resealed(raw)).lookup(rows[0].key_digest)


def test_an_index_folder_behind_a_link_is_not_read_and_not_emptied(root: Path, memory_folder: Path) -> None:
    stored = open_at(root).publish(make_record(), make_data()).record_id
    open_at(root).index()
    elsewhere = memory_folder / "elsewhere"
    index_folder(root).rename(elsewhere)
    index_folder(root).symlink_to(elsewhere)
    before = sorted(elsewhere.iterdir())
    assert [row.record_id for row in open_at(root).index().rows()] == [stored]
    open_at(root).clear()
    assert sorted(elsewhere.iterdir()) == before


def test_a_record_is_listed_although_a_wrong_clock_made_its_announcement_look_dead(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose clock is days behind, and a merge between the announcement and the record's name."""
    open_at(root).publish(make_record(0), make_data(0))
    real, merges = os.link, [1]

    def merge_then_link(first: object, second: object) -> None:
        if str(second).endswith(".akr") and merges[0]:
            merges[0] = 0
            for path in pending_folder(root).iterdir():
                os.utime(path, (0, 0))
            open_at(root).repair()
            assert list(pending_folder(root).iterdir()) == [], "the merge took it for a dead writer's"
        real(first, second)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", merge_then_link)
    record_id = open_at(root).publish(make_record(1), make_data(1)).record_id
    assert record_id in {row.record_id for row in open_at(root).index().rows()}
