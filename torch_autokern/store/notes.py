"""Small files beside a record: what people and machines found out about it later. A record itself never changes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypeVar

import msgspec

from torch_autokern.store.files import FileBytes, Unread, list_folder, publish_file, read_file
from torch_autokern.store.key import Target, canonical_json
from torch_autokern.store.layout import key_folder, note_file

MAX_NOTE_BYTES = 1 << 16


class Quarantine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A kernel failed here and must not run. `driver_words` is the error as the driver or the loader gave it; `when` is
    ISO 8601 UTC; `machine` is where it happened."""

    record_id: str
    reason: str
    driver_words: str
    when: str
    machine: str


class Approval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A person's word on a record: approved, refused (this record) or `banned` (its source, whenever a search meets it again).
    `when` is ISO 8601 UTC."""

    record_id: str
    approved: bool
    by: str
    reason: str
    when: str
    banned: bool = False


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Local proof that a record made elsewhere is faster here too: on `target` against torch `stock_build`, with the lower
    bound `ratio_low` of stock time over its own. `when` is ISO 8601 UTC."""

    record_id: str
    target: Target
    stock_build: str
    ratio_low: float
    when: str


Note = Quarantine | Approval | Receipt
NoteT = TypeVar("NoteT", Quarantine, Approval, Receipt)


class Notes(msgspec.Struct, frozen=True):
    """All that was noted about one record. `approval_wanted`: the store's policy serves only what a person approved."""

    quarantine: Quarantine | None = None
    approval: Approval | None = None
    receipts: tuple[Receipt, ...] = ()
    approval_wanted: bool = False

    @property
    def may_be_shipped(self) -> bool:
        """Whether nothing speaks against giving the record to others: it did not fail, nobody turned it down, and it was
        approved where that is demanded."""
        if self.approval is None:
            return self.quarantine is None and not self.approval_wanted
        return self.quarantine is None and self.approval.approved


def note_kind(note: Note) -> str:
    """The part of the file name that says which note it is; one receipt for each target and stock build."""
    if isinstance(note, Quarantine):
        return "quarantine"
    if isinstance(note, Approval):
        return "approval"
    return "receipt-" + hashlib.sha256(canonical_json((note.target, note.stock_build))).hexdigest()[:8]


def write_note(root: Path, key_digest: str, note: Note) -> None:
    """Write durably; a later note of the same kind takes the place of an earlier one.

    Raises:
        OSError: nothing changed on disk.
    """
    path = note_file(root, key_digest, note.record_id, note_kind(note))
    publish_file(path, canonical_json(note), root, replace=True)


def read_notes(root: Path, key_digest: str, record_id: str) -> Notes:
    """Notes of one record in one layer.

    A damaged approval or receipt gives no right and is ignored. A damaged quarantine still holds: it was put there because
    the kernel failed, and `repair` or a person lifts it.
    """
    folder = key_folder(root, key_digest)
    names = list_folder(folder)
    if not names:  # as with most records of a pack: one call instead of four
        return Notes()
    quarantine = _read(note_file(root, key_digest, record_id, "quarantine"), Quarantine, record_id)
    if isinstance(quarantine, str):
        quarantine = Quarantine(record_id, f"the quarantine note is damaged ({quarantine})", "", "", "")
    approval = _read(note_file(root, key_digest, record_id, "approval"), Approval, record_id)
    prefix = note_file(root, key_digest, record_id, "receipt-").name.removesuffix(".json")
    receipts = [_read(folder / name, Receipt, record_id) for name in names if name.startswith(prefix)]
    return Notes(
        quarantine=quarantine,
        approval=approval if isinstance(approval, Approval) else None,
        receipts=tuple(receipt for receipt in receipts if isinstance(receipt, Receipt)),
    )


def merge_notes(first: Notes, second: Notes) -> Notes:
    """Notes of two layers about one record: the first layer's word goes before the second's, receipts add up."""
    return Notes(
        quarantine=first.quarantine or second.quarantine,
        approval=first.approval or second.approval,
        receipts=first.receipts + tuple(receipt for receipt in second.receipts if receipt not in first.receipts),
        approval_wanted=first.approval_wanted or second.approval_wanted,
    )


def _read(path: Path, kind: type[NoteT], record_id: str) -> NoteT | str | None:
    """The note; None where there is none; a reason where the file is not a note about this record."""
    content = read_file(path, MAX_NOTE_BYTES)
    if isinstance(content, Unread):
        return None if content.kind == "absent" else content.reason
    return _decode(content, kind, record_id)


def _decode(content: FileBytes, kind: type[NoteT], record_id: str) -> NoteT | str:
    try:
        note = msgspec.json.decode(content.data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        return str(error)
    if note.record_id != record_id:
        return f"it is about record {note.record_id[:12]}"
    return note
