"""Damaged, swapped and foreign files: a miss, set aside once, repaired by the next publish."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
from store_samples import make_data, make_key, make_record

from torch_autokern.errors import RecordError
from torch_autokern.store.layout import damaged_folder, record_file
from torch_autokern.store.record import decode_record, encode_record
from torch_autokern.store.store import KernelStore, Layer

RAW = encode_record(make_record(), make_data())
RECORD_ID = RAW[-32:].hex()
DIGEST = make_key().digest


def open_at(root: Path) -> KernelStore:
    return KernelStore([Layer("cache", root, writable=True)])


def _refused(raw: bytes) -> bool:
    try:
        decode_record(raw)
    except RecordError:
        return True
    return False


def test_every_length_short_of_whole_is_refused() -> None:
    assert not _refused(RAW)
    assert all(_refused(RAW[:length]) for length in range(len(RAW)))


def test_one_byte_more_is_refused() -> None:
    assert _refused(RAW + b"\0")


def test_a_flip_of_any_byte_is_refused() -> None:
    for place in range(len(RAW)):
        flipped = bytearray(RAW)
        flipped[place] ^= 1 << (place % 8)
        assert _refused(bytes(flipped)), place


def test_random_bytes_are_refused() -> None:
    generator = random.Random(7)
    for length in (0, 1, 16, 48, 49, 1000):
        assert _refused(generator.randbytes(length))


def _damage(kind: str, path: Path) -> None:
    raw = bytearray(path.read_bytes())
    if kind == "truncated":
        del raw[len(raw) // 2 :]
    elif kind == "empty":
        raw.clear()
    elif kind == "zeroed":
        raw[:] = bytes(len(raw))
    elif kind == "flipped":
        raw[len(raw) // 2] ^= 1
    elif kind == "grown":
        raw += b"\0" * 10
    path.write_bytes(raw)


@pytest.mark.parametrize("kind", ["truncated", "empty", "zeroed", "flipped", "grown"])
def test_damaged_entry_is_a_miss_set_aside_once_and_repaired_by_the_next_publish(root: Path, kind: str) -> None:
    open_at(root).publish(make_record(), make_data())
    path = record_file(root, DIGEST, RECORD_ID)
    _damage(kind, path)
    reader = open_at(root)
    assert list(reader.records()) == []
    assert reader.get(DIGEST, RECORD_ID) is None
    assert (reader.counters.damaged, reader.counters.set_aside) == (1, 1)
    assert not path.exists()
    assert len(list(damaged_folder(root).iterdir())) == 1
    assert open_at(root).publish(make_record(), make_data()).status == "published"
    assert open_at(root).get(DIGEST, RECORD_ID) is not None


def test_publish_over_a_damaged_entry_repairs_it(root: Path) -> None:
    open_at(root).publish(make_record(), make_data())
    _damage("flipped", record_file(root, DIGEST, RECORD_ID))
    assert open_at(root).publish(make_record(), make_data()).status == "published"
    assert open_at(root).get(DIGEST, RECORD_ID) is not None


def test_swapped_entries_are_damage(root: Path) -> None:
    store = open_at(root)
    first = store.publish(make_record(), make_data()).record_id
    other_key = make_key(3)
    second = store.publish(make_record(1, other_key), make_data(1)).record_id
    one, two = record_file(root, DIGEST, first), record_file(root, other_key.digest, second)
    one_bytes, two_bytes = one.read_bytes(), two.read_bytes()
    one.write_bytes(two_bytes)
    two.write_bytes(one_bytes)
    reader = open_at(root)
    assert reader.get(DIGEST, first) is None
    assert list(reader.records(other_key.digest)) == []
    assert reader.counters.damaged == 2


def test_a_record_in_another_keys_folder_is_damage(root: Path) -> None:
    store = open_at(root)
    record_id = store.publish(make_record(), make_data()).record_id
    wrong = record_file(root, make_key(3).digest, record_id)
    wrong.parent.mkdir(parents=True)
    wrong.write_bytes(record_file(root, DIGEST, record_id).read_bytes())
    wrong.chmod(0o600)
    assert list(open_at(root).records(make_key(3).digest)) == []
    assert [stored.record_id for stored in open_at(root).records()] == [record_id]


def test_damage_in_a_read_only_layer_stays_and_is_counted_once(root: Path) -> None:
    open_at(root).publish(make_record(), make_data())
    path = record_file(root, DIGEST, RECORD_ID)
    _damage("flipped", path)
    reader = KernelStore([Layer("pack", root, writable=False)])
    assert list(reader.records()) == list(reader.records()) == []
    assert (reader.counters.damaged, reader.counters.set_aside) == (1, 0)
    assert path.exists()


def test_a_damaged_entry_that_cannot_be_moved_is_deleted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk has no room for the folder of damaged files; the entry's place must become free all the same."""
    open_at(root).publish(make_record(), make_data())
    path = record_file(root, DIGEST, RECORD_ID)
    _damage("flipped", path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "mkdir", full)
    assert open_at(root).get(DIGEST, RECORD_ID) is None
    assert not path.exists()


def test_a_file_repaired_meanwhile_is_not_set_aside(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_at(root).publish(make_record(), make_data())
    path = record_file(root, DIGEST, RECORD_ID)
    _damage("flipped", path)
    real = os.lstat

    def repaired_by_another(name: object, **kwargs: object) -> os.stat_result:
        if str(name) == str(path):
            fresh = path.with_name("fresh")
            fresh.write_bytes(RAW)
            fresh.chmod(0o600)
            fresh.replace(path)
        return real(name, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "lstat", repaired_by_another)
    assert open_at(root).get(DIGEST, RECORD_ID) is None
    monkeypatch.undo()
    assert open_at(root).get(DIGEST, RECORD_ID) is not None


# -- files that are not ours to trust ------------------------------------------------------------------------------------


@pytest.fixture
def entry(root: Path) -> Path:
    """A whole record's file."""
    open_at(root).publish(make_record(), make_data())
    return record_file(root, DIGEST, RECORD_ID)


def _refusals(root: Path) -> tuple[int, int, bool]:
    reader = open_at(root)
    records = list(reader.records())
    return len(records), reader.counters.refused, record_file(root, DIGEST, RECORD_ID).is_symlink()


def test_symbolic_link_to_a_whole_record_is_not_followed(root: Path, entry: Path, memory_folder: Path) -> None:
    entry.rename(memory_folder / "elsewhere")
    entry.symlink_to(memory_folder / "elsewhere")
    assert _refusals(root) == (0, 1, True)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_entry_that_others_may_write_is_refused(root: Path, entry: Path, mode: int) -> None:
    entry.chmod(mode)
    assert _refusals(root) == (0, 1, False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_entry_of_another_user_is_refused(root: Path, entry: Path) -> None:
    os.chown(entry, 12345, 12345)
    assert _refusals(root) == (0, 1, False)


def test_a_pipe_in_an_entrys_place_does_not_hang(root: Path, entry: Path) -> None:
    entry.unlink()
    os.mkfifo(entry, 0o600)
    assert _refusals(root) == (0, 1, False)


def test_a_folder_in_an_entrys_place_is_refused_and_publish_keeps_the_kernel(root: Path, entry: Path) -> None:
    entry.unlink()
    entry.mkdir(mode=0o700)
    assert _refusals(root) == (0, 1, False)
    store = open_at(root)
    assert store.publish(make_record(), make_data()).status == "memory_only"
    assert store.get(DIGEST, RECORD_ID) is not None


def test_a_file_far_too_large_is_refused_before_it_is_read(root: Path, entry: Path) -> None:
    with entry.open("r+b") as file:
        file.truncate(1 << 40)
    assert _refusals(root) == (0, 1, False)


def test_stray_files_are_left_alone(root: Path, entry: Path) -> None:
    strays = [entry.with_name("README"), root / "v1" / "keys" / "zz", root / "v1" / "pending" / "not a key"]
    for stray in strays:
        stray.write_text("hello")
    store = open_at(root)
    assert len(list(store.records())) == 1
    assert len(store.index().rows()) == 1
    assert store.counters.damaged == 0
    assert all(stray.exists() for stray in strays)


def test_two_format_versions_share_a_folder_and_ignore_each_other(root: Path, entry: Path) -> None:
    """A version 2 with another layout of the same names next to ours."""
    other = root / "v2" / "keys" / entry.parent.parent.name / entry.parent.name / entry.name
    other.parent.mkdir(parents=True)
    other.write_bytes(b"AKRECORD" + (2).to_bytes(4, "little") + bytes(100))
    store = open_at(root)
    assert len(list(store.records())) == 1
    store.repair()
    store.clean()
    store.clear()
    assert other.exists()
    assert store.counters.damaged == 0
    assert list(open_at(root).records()) == []


def test_a_read_that_stops_short_of_the_files_size_sets_nothing_aside(
    root: Path, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that answers with fewer bytes than there are is no proof that the file is damaged."""
    monkeypatch.setattr(os, "read", lambda *_: b"")
    reader = open_at(root)
    assert list(reader.records()) == []
    assert (reader.counters.damaged, reader.counters.refused) == (0, 1)
    monkeypatch.undo()
    assert entry.exists()
    assert len(list(open_at(root).records())) == 1
