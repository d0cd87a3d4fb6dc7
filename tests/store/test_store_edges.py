"""Rare turns: other systems, limits of sizes, files that change or vanish between two looks, layers that are not writable."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest
from store_samples import make_data, make_key, make_record

import torch_autokern.store.files as files
import torch_autokern.store.folders as folders
import torch_autokern.store.index as index_module
import torch_autokern.store.indexing as indexing
import torch_autokern.store.record as record_module
import torch_autokern.store.upkeep as upkeep
from torch_autokern.errors import InvalidInputError, RecordError
from torch_autokern.store.files import Unread, make_folders, read_file, set_aside
from torch_autokern.store.folders import choose_folder, folder_refusal, require_folder
from torch_autokern.store.key import TensorKey
from torch_autokern.store.layout import index_files, key_folder, keys_folder, new_index_file, pending_folder, record_file
from torch_autokern.store.record import decode_record, encode_record
from torch_autokern.store.store import KernelStore, Layer

DIGEST = make_key().digest


def open_at(root: Path, *, writable: bool = True) -> KernelStore:
    return KernelStore([Layer("cache", root, writable=writable)])


# -- files ---------------------------------------------------------------------------------------------------------------


def test_a_root_that_somebody_made_read_only_is_not_opened_again(tmp_path: Path) -> None:
    tmp_path.joinpath("root").mkdir(mode=0o500)
    make_folders(tmp_path / "root", tmp_path / "root")
    assert tmp_path.joinpath("root").stat().st_mode & 0o777 == 0o500


def test_a_system_without_owners_publishes_and_reads(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_HAS_OWNERS", False)
    record_id = open_at(root).publish(make_record(), make_data()).record_id
    record_file(root, DIGEST, record_id).chmod(0o666)
    assert open_at(root).get(DIGEST, record_id) is not None


def test_a_damaged_file_that_can_neither_be_moved_nor_deleted_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"bad")
    facts = path.stat()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("mkdir", "rename", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    assert not set_aside(path, (facts.st_dev, facts.st_ino), tmp_path / "damaged", tmp_path)
    assert path.exists()


def test_a_file_that_grows_past_the_limit_while_it_is_read_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    path.chmod(0o600)
    monkeypatch.setattr(os, "read", lambda *_: b"123456")
    outcome = read_file(path, 5)
    assert isinstance(outcome, Unread) and outcome.kind == "unreadable"


def _failing_folder_sync(monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
    real = getattr(os, name)

    def fail(target: object, *args: object) -> object:
        if os.path.isdir(str(target) if name == "open" else f"/proc/self/fd/{target}"):
            raise OSError(code, os.strerror(code))
        return real(target, *args)

    monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize("name", ["fsync", "open"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.ESTALE], ids=lambda code: errno.errorcode[code])
def test_a_folder_that_fails_to_sync_is_not_called_durable(
    store: KernelStore, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    """Found by a power cut: the disk failed between a record's name and its folder's sync, and yet it was acknowledged."""
    _failing_folder_sync(monkeypatch, name, code)
    outcome = store.publish(make_record(), make_data())
    assert (outcome.status, outcome.reason.endswith(os.strerror(code))) == ("memory_only", True)
    assert len(list(store.records(DIGEST))) == 1


@pytest.mark.parametrize(("name", "code"), [("fsync", errno.EINVAL), ("fsync", errno.ENOSYS), ("open", errno.EACCES)])
def test_a_file_system_that_cannot_sync_folders_is_good_enough(
    store: KernelStore, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    _failing_folder_sync(monkeypatch, name, code)
    assert store.publish(make_record(), make_data()).status == "published"


# -- folders -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def only_explicit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One candidate: the folder that the person named."""
    path = tmp_path / "store"
    monkeypatch.setenv("AUTOKERN_STORE", str(path))
    monkeypatch.setattr(folders, "_candidates", lambda: [(path, "AUTOKERN_STORE")])
    return path


def test_a_usable_folder_satisfies_a_person(only_explicit: Path) -> None:
    assert require_folder().path == only_explicit


def test_a_folder_that_can_only_be_read_will_do_for_reading(only_explicit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_explicit.mkdir(mode=0o700)
    monkeypatch.setattr(folders, "_write_refusal", lambda _path: "Read-only file system")
    choice = require_folder(to_write=False)
    assert (choice.path, choice.read_only) == (None, (only_explicit,))
    with pytest.raises(InvalidInputError, match="Read-only"):
        require_folder()


def test_a_folder_that_cannot_be_made_is_refused_and_not_read(only_explicit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_write_refusal", lambda _path: "No space left on device")
    choice = choose_folder()
    assert (choice.path, choice.read_only) == (None, ())


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert folder_refusal(tmp_path / "file") == "is not a folder"


def test_roots_folder_is_read_by_others_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    facts = tmp_path.stat()
    if facts.st_uid != 12345:
        assert "owner is uid" in str(folders._write_refusal(tmp_path))


def test_a_disk_that_takes_half_a_page_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda *_: 7)
    assert folders._write_refusal(tmp_path) == "the disk is full"


# -- records and keys ----------------------------------------------------------------------------------------------------


def test_number_of_elements() -> None:
    assert TensorKey("float32", (3, 0, 5), (0, 5, 1), 4).numel == 0
    assert TensorKey("float32", (), (), 4).numel == 1


@pytest.mark.parametrize(("name", "words"), [("MAX_HEADER_BYTES", "header has"), ("MAX_RECORD_BYTES", "record has")])
def test_a_record_beyond_a_limit_is_refused_before_it_is_written(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_module, name, 100)
    with pytest.raises(RecordError, match=f"{words} .* at most 100"):
        encode_record(make_record(), make_data())


def test_a_header_longer_than_the_file_is_refused_though_the_hash_fits() -> None:
    raw = bytearray(encode_record(make_record(), {}))
    raw[12:16] = struct.pack("<I", len(raw))
    resealed = bytes(raw[:-32]) + record_module.hashlib.sha256(raw[:-32]).digest()
    with pytest.raises(RecordError, match="does not fit the file"):
        decode_record(resealed)


# -- lists ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [8, 12])
def test_a_list_whose_lengths_do_not_fit_is_no_list(place: int) -> None:
    raw = bytearray(index_module.encode_index([index_module.row_of(decode_record(encode_record(make_record(), {})))]))
    raw[place : place + 4] = struct.pack("<I", 99)
    resealed = bytes(raw[:-32]) + index_module.hashlib.sha256(raw[:-32]).digest()
    with pytest.raises(ValueError, match="lengths"):
        index_module.RecordIndex(resealed)


def test_a_list_that_is_merged_away_between_two_looks_is_looked_for_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_id = open_at(root).publish(make_record(), make_data()).record_id
    open_at(root).repair()
    real = index_files
    gone = [new_index_file(root)]
    monkeypatch.setattr(indexing, "index_files", lambda folder: [*real(folder), gone.pop()] if gone else real(folder))
    assert [row.record_id for row in open_at(root).index().rows()] == [record_id]


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EPERM, errno.EIO], ids=lambda code: errno.errorcode[code])
def test_a_list_that_can_neither_be_read_nor_looked_at_is_derived_anew(
    root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    record_id = open_at(root).publish(make_record(), make_data()).record_id
    open_at(root).repair()

    def failing(name: str) -> None:
        real = getattr(os, name)

        def fail(path: object, *args: object, **kwargs: object) -> object:
            if str(path).endswith(".idx"):
                raise OSError(code, os.strerror(code))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, name, fail)

    for name in ("open", "stat", "lstat"):
        failing(name)
    assert [row.record_id for row in open_at(root, writable=False).index().rows()] == [record_id]


def test_lists_that_vanish_at_every_look_are_derived_anew(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_id = open_at(root).publish(make_record(), make_data()).record_id
    open_at(root).repair()
    real = index_files
    monkeypatch.setattr(indexing, "index_files", lambda folder: [*real(folder), new_index_file(folder)])
    assert [row.record_id for row in open_at(root, writable=False).index().rows()] == [record_id]


def test_names_in_pending_that_announce_nothing_are_left_alone(root: Path) -> None:
    record_id = open_at(root).publish(make_record(), make_data()).record_id
    open_at(root).repair()
    for name in ("README", "g" * 32 + "-" + "0" * 31, "0" * 32 + "-" + "0" * 31):
        (pending_folder(root) / name).touch(mode=0o600)
    folder = key_folder(root, "0" * 64)
    folder.mkdir(parents=True, mode=0o700)
    (folder / ("0" * 32 + ".akr")).touch(mode=0o600)
    assert [row.record_id for row in open_at(root).index().rows()] == [record_id]


def test_a_merge_that_another_process_is_at_is_left_to_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "COMPACT_ABOVE", 0)
    open_at(root).publish(make_record(0), make_data(0))
    open_at(root).repair()
    open_at(root).publish(make_record(1), make_data(1))
    before = index_files(root)
    with indexing.work_lock(root, "index", timeout_s=1.0):
        assert len(open_at(root).index().rows()) == 2
        assert index_files(root) == before
    open_at(root).index()
    assert index_files(root) != before


def test_an_announcement_that_vanishes_is_not_stale(root: Path) -> None:
    assert not indexing._is_stale(root / "gone")
    assert not upkeep._is_old(root / "gone")
    assert upkeep._size_bytes(root / "gone") == 0


def test_folders_that_are_no_keys_hold_no_records(root: Path) -> None:
    open_at(root).publish(make_record(), make_data())
    (keys_folder(root) / "zz").mkdir()
    (keys_folder(root) / DIGEST[:2] / "notes").mkdir()
    assert len(list(open_at(root).records())) == 1


# -- the store -----------------------------------------------------------------------------------------------------------


def test_find_by_prefix(store: KernelStore, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record_id = store.publish(make_record(), make_data()).record_id
    assert store.find(f" {record_id[:9].upper()} ").record_id == record_id
    for prefix in ("", "  ", "not hex"):
        with pytest.raises(InvalidInputError, match="0 records start with"):
            store.find(prefix)
    store.repair()
    record_file(root, DIGEST, record_id).unlink()
    with pytest.raises(InvalidInputError, match="cache repair"):
        store.find(record_id[:9])


def test_a_file_that_vanishes_while_a_folder_is_verified_is_no_fault(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_at(root).publish(make_record(), make_data())
    monkeypatch.setattr(upkeep, "record_files", lambda folder: iter([folder / "v1" / "keys" / "aa" / "b" / "gone.akr"]))
    (report,) = open_at(root).verify()
    assert (report.whole, report.faults) == (0, ())


def test_records_in_memory_are_given_and_cleared_by_key(memory_folder: Path) -> None:
    store = KernelStore([Layer("pack", memory_folder / "pack", writable=False)])
    other = make_key(4)
    first = store.publish(make_record(), make_data()).record_id
    store.publish(make_record(1, other), make_data(1))
    assert [stored.record_id for stored in store.records(DIGEST)] == [first]
    assert store.clean() == store.clear(other.digest) == upkeep.UpkeepCount()
    assert [stored.record_id for stored in store.records()] == [first]


def test_lifting_a_quarantine_leaves_layers_that_cannot_be_written(memory_folder: Path) -> None:
    pack = memory_folder / "pack"
    record_id = open_at(pack).publish(make_record(), make_data()).record_id
    open_at(pack).quarantine(DIGEST, record_id, "failed")
    store = open_at(pack, writable=False)
    store.quarantine(DIGEST, record_id, "failed here")
    store.lift_quarantine(DIGEST, record_id)
    note = store.notes(DIGEST, record_id).quarantine
    assert note is not None and note.reason == "failed"


def test_a_note_that_cannot_be_written_says_why_and_holds_in_this_process(
    store: KernelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_id = store.publish(make_record(), make_data()).record_id

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert "No space left" in store.quarantine(DIGEST, record_id, "failed")
    assert store.notes(DIGEST, record_id).quarantine is not None


# -- which layers know a key ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("errors", "known"), [
    ((errno.ENOENT, None), True), ((errno.ENOENT, errno.ENOENT), False), ((errno.ESTALE,), True), ((errno.EACCES,), True),
    ((errno.ENOTDIR, errno.ENOTDIR), False),
])  # fmt: skip
def test_a_key_is_unknown_only_where_its_folder_is_twice_absent(
    root: Path, monkeypatch: pytest.MonkeyPatch, errors: tuple[int | None, ...], known: bool
) -> None:
    """A network disk that denies for a moment what is there, or cannot tell, hides no record and no quarantine."""
    record_id = open_at(root).publish(make_record(), make_data()).record_id
    real, left = os.lstat, list(errors)

    def fail(path: object, **options: object) -> os.stat_result:
        number = left.pop(0) if left and str(path).endswith(DIGEST[:32]) else None
        if number is not None:
            raise OSError(number, os.strerror(number))
        return real(path, **options)  # type: ignore[arg-type]

    store = open_at(root)
    monkeypatch.setattr(os, "lstat", fail)
    assert (store.get(DIGEST, record_id) is not None) is known
    assert not left
