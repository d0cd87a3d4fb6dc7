"""Verify, repair, clean and clear: whole entries only, absence tolerated, nothing decided by a time stamp but eviction."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
from store_faults import count_calls, failing_calls
from store_samples import make_data, make_key, make_record

from torch_autokern.store.layout import damaged_folder, key_folder, record_file, temporary_name
from torch_autokern.store.store import KernelStore, Layer
from torch_autokern.store.upkeep import UpkeepCount

DIGEST = make_key().digest


def open_at(root: Path) -> KernelStore:
    return KernelStore([Layer("cache", root, writable=True)])


def _fill(root: Path) -> list[str]:
    store = open_at(root)
    return [store.publish(make_record(seed), make_data(seed)).record_id for seed in range(3)]


def test_everything_tolerates_an_absent_folder(store: KernelStore, root: Path) -> None:
    assert store.verify()[0].whole == 0
    assert store.repair() == store.clear() == store.clear(DIGEST) == UpkeepCount()
    assert list(store.records()) == []
    store.clean()
    assert not (root / "v1" / "keys").exists()


def test_verify_reports_and_changes_nothing(root: Path) -> None:
    first, second, third = _fill(root)
    record_file(root, DIGEST, first).write_bytes(b"half")
    record_file(root, DIGEST, second).chmod(0o666)
    (report,) = open_at(root).verify()
    assert report.whole == 1
    assert report.size_bytes == record_file(root, DIGEST, third).stat().st_size
    assert sorted(fault.kind for fault in report.faults) == ["damaged", "foreign"]
    assert record_file(root, DIGEST, first).exists()


def test_repair_takes_damaged_records_out(root: Path) -> None:
    first, *rest = _fill(root)
    record_file(root, DIGEST, first).write_bytes(b"half")
    assert open_at(root).repair().damaged == 1
    (report,) = open_at(root).verify()
    assert (report.whole, report.faults) == (2, ())
    assert {row.record_id for row in open_at(root).index().rows()} == set(rest)


def _leave(path: Path, age_s: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half")
    moment = time.time() - age_s
    os.utime(path, (moment, moment))
    return path


def test_clean_removes_old_temporary_files_and_keeps_those_at_work(root: Path) -> None:
    _fill(root)
    folder = key_folder(root, DIGEST)
    old = _leave(folder / temporary_name(), 7200)
    fresh = _leave(folder / temporary_name(), 10)
    future = _leave(folder / temporary_name(), -1e6)
    aside = _leave(damaged_folder(root) / "ab.akr.12345678", 0)
    count = open_at(root).clean()
    assert (count.temporary_files, count.set_aside_files) == (1, 1)
    assert [path.exists() for path in (old, fresh, future, aside)] == [False, True, True, False]
    assert len(list(open_at(root).records())) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_clean_leaves_other_users_temporary_files(root: Path) -> None:
    _fill(root)
    foreign = _leave(key_folder(root, DIGEST) / temporary_name(), 7200)
    os.chown(foreign, 12345, 12345)
    assert open_at(root).clean().temporary_files == 0
    assert foreign.exists()


def test_old_records_stay_valid(root: Path) -> None:
    for record_id in _fill(root):
        os.utime(record_file(root, DIGEST, record_id), (0, 0))
    assert len(list(open_at(root).records())) == 3


def test_clear_one_key_keeps_the_others(root: Path) -> None:
    record_id = _fill(root)[0]
    store = open_at(root)
    store.quarantine(DIGEST, record_id, "failed")
    store.publish(make_record(9, make_key(9)), make_data(9))
    store.repair()
    assert store.clear(DIGEST) == UpkeepCount(records=3, notes=1)
    assert [stored.record.key for stored in open_at(root).records()] == [make_key(9)]
    assert [row.key_digest for row in open_at(root).index().rows()] == [make_key(9).digest]


def test_clear_all_then_publish_again(root: Path) -> None:
    _fill(root)
    store = open_at(root)
    assert store.clear().records == 3
    assert list(store.records()) == store.index().rows() == []
    assert store.publish(make_record(), make_data()).status == "published"


def test_clear_forgets_records_in_memory() -> None:
    store = KernelStore([])
    store.publish(make_record(), make_data())
    store.clear()
    assert list(store.records()) == []


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EBUSY, errno.EACCES, errno.ENOTEMPTY, errno.EIO])
def test_clean_up_errors_are_never_fatal(root: Path, code: int) -> None:
    def work() -> None:
        store = open_at(root)
        store.clean()
        store.repair()
        store.clear()

    _fill(root)
    _leave(key_folder(root, DIGEST) / temporary_name(), 7200)
    calls = count_calls(work)
    for number in range(0, len(calls), 3):
        _fill(root)
        with failing_calls(number, code, for_ever=True):
            work()


def test_a_folder_behind_a_link_is_never_cleaned_or_cleared(root: Path, memory_folder: Path) -> None:
    """Somebody moved a folder and put a link in its place: what lies there is theirs."""
    _fill(root)
    elsewhere = memory_folder / "elsewhere"
    elsewhere.mkdir()
    for name in ("notes.json", "thesis.akr", "photo"):
        (elsewhere / name).write_text("mine")
    damaged_folder(root).symlink_to(elsewhere)
    keys = key_folder(root, DIGEST)
    keys.rename(memory_folder / "moved")
    keys.symlink_to(elsewhere)
    store = open_at(root)
    store.clean()
    store.clear(DIGEST)
    store.clear()
    assert sorted(path.name for path in elsewhere.iterdir()) == ["notes.json", "photo", "thesis.akr"]
