"""Notes beside a record: quarantines hold, approvals and receipts give rights only when whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_samples import make_data, make_key, make_record

from torch_autokern.store.key import Target
from torch_autokern.store.layout import key_folder, note_file
from torch_autokern.store.notes import Approval, Notes, Receipt, note_kind
from torch_autokern.store.store import KernelStore, Layer

DIGEST = make_key().digest
TARGET = Target("cpu", "GenuineIntel-6-143", "x86-64-v4", 8)


def open_at(root: Path, *, writable: bool = True) -> KernelStore:
    return KernelStore([Layer("cache", root, writable=writable)])


@pytest.fixture
def record_id(store: KernelStore) -> str:
    return store.publish(make_record(), make_data()).record_id


def test_no_notes_at_first(store: KernelStore, record_id: str) -> None:
    notes = store.notes(DIGEST, record_id)
    assert (notes.quarantine, notes.approval, notes.receipts) == (None, None, ())


def test_quarantine_holds_in_this_process_and_on_this_machine(store: KernelStore, root: Path, record_id: str) -> None:
    assert store.quarantine(DIGEST, record_id, "failed at launch", "error 719") == ""
    for opened in (store, open_at(root)):
        quarantine = opened.notes(DIGEST, record_id).quarantine
        assert quarantine is not None
        assert (quarantine.reason, quarantine.driver_words) == ("failed at launch", "error 719")
    assert store.get(DIGEST, record_id) is not None, "the record itself never changes"


def test_quarantine_holds_in_this_process_where_no_disk_can_be_written(root: Path, record_id: str) -> None:
    reader = open_at(root, writable=False)
    assert reader.quarantine(DIGEST, record_id, "failed") == "no layer is writable"
    assert reader.notes(DIGEST, record_id).quarantine is not None
    assert open_at(root).notes(DIGEST, record_id).quarantine is None


def test_lifting_a_quarantine(store: KernelStore, root: Path, record_id: str) -> None:
    store.quarantine(DIGEST, record_id, "failed")
    store.lift_quarantine(DIGEST, record_id)
    assert store.notes(DIGEST, record_id).quarantine is None
    assert open_at(root).notes(DIGEST, record_id).quarantine is None


def test_later_approval_takes_the_place_of_an_earlier_one(store: KernelStore, root: Path, record_id: str) -> None:
    store.add_note(DIGEST, Approval(record_id, True, "ada", "read it", "2025-01-01T00:00:00Z"))
    store.add_note(DIGEST, Approval(record_id, False, "bob", "drifts", "2025-01-02T00:00:00Z"))
    for opened in (store, open_at(root)):
        approval = opened.notes(DIGEST, record_id).approval
        assert approval is not None
        assert not approval.approved


def test_one_receipt_for_each_target_and_stock_build(store: KernelStore, root: Path, record_id: str) -> None:
    for build, ratio in (("2.13", 1.2), ("2.12", 1.3), ("2.13", 1.4)):
        store.add_note(DIGEST, Receipt(record_id, TARGET, build, ratio, "2025-01-01T00:00:00Z"))
    for opened in (store, open_at(root)):
        receipts = opened.notes(DIGEST, record_id).receipts
        assert sorted((receipt.stock_build, receipt.ratio_low) for receipt in receipts) == [("2.12", 1.3), ("2.13", 1.4)]


def test_notes_of_a_record_in_a_read_only_layer_go_to_the_writable_one(tmp_path: Path) -> None:
    pack, cache = Layer("pack", tmp_path / "pack", writable=False), Layer("cache", tmp_path / "cache", writable=True)
    record_id = open_at(pack.root).publish(make_record(), make_data()).record_id
    store = KernelStore([cache, pack])
    store.add_note(DIGEST, Receipt(record_id, TARGET, "2.13", 1.2, "2025-01-01T00:00:00Z"))
    assert len(KernelStore([cache, pack]).notes(DIGEST, record_id).receipts) == 1
    assert open_at(pack.root).notes(DIGEST, record_id).receipts == ()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"record_id":"x"}', b"[" * 100_000, b"\xff\xfe"])
def test_damaged_approval_and_receipt_are_ignored_and_a_damaged_quarantine_holds(
    store: KernelStore, root: Path, record_id: str, body: bytes
) -> None:
    receipt = Receipt(record_id, TARGET, "2.13", 1.2, "2025-01-01T00:00:00Z")
    for kind in ("approval", note_kind(receipt), "quarantine"):
        path = note_file(root, DIGEST, record_id, kind)
        path.write_bytes(body)
        path.chmod(0o600)
    notes = open_at(root).notes(DIGEST, record_id)
    assert (notes.approval, notes.receipts) == (None, ())
    assert notes.quarantine is not None
    assert "damaged" in notes.quarantine.reason


def test_a_note_about_another_record_is_ignored(store: KernelStore, root: Path, record_id: str) -> None:
    other = store.publish(make_record(1), make_data(1)).record_id
    store.add_note(DIGEST, Approval(other, True, "ada", "", "2025-01-01T00:00:00Z"))
    note_file(root, DIGEST, other, "approval").rename(note_file(root, DIGEST, record_id, "approval"))
    assert open_at(root).notes(DIGEST, record_id).approval is None


def test_an_emptied_folder_holds_no_notes(store: KernelStore, root: Path, record_id: str) -> None:
    for file in key_folder(root, DIGEST).iterdir():
        file.unlink()
    assert store.notes(DIGEST, record_id) == Notes()
