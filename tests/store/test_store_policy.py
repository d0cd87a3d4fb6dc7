"""What a store's owner demands before a record is served: it holds in every process, and a damaged word is the strict one."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_samples import make_data, make_key, make_record

from torch_autokern.store.layout import policy_file
from torch_autokern.store.notes import Approval, Notes, Quarantine
from torch_autokern.store.policy import Policy, read_policy, write_policy
from torch_autokern.store.record import StoredRecord
from torch_autokern.store.store import KernelStore, Layer

DIGEST = make_key().digest


def open_at(*roots: Path) -> KernelStore:
    return KernelStore([Layer(f"layer{number}", root, writable=number == 0) for number, root in enumerate(roots)])


def test_nothing_is_demanded_where_nobody_said_so(root: Path) -> None:
    record_id = open_at(root).publish(make_record(), make_data()).record_id
    assert read_policy(root) == Policy() and not open_at(root).notes(DIGEST, record_id).approval_wanted


def test_demand_of_any_layer_holds_until_it_is_taken_back(tmp_path: Path) -> None:
    mine, shared = tmp_path / "mine", tmp_path / "shared"
    record_id = open_at(mine).publish(make_record(), make_data()).record_id
    write_policy(shared, Policy(True, "ada", "2026-01-01T00:00:00Z"))
    both = open_at(mine, shared)
    assert both.demands_approval() and both.notes(DIGEST, record_id).approval_wanted
    assert not open_at(mine).notes(DIGEST, record_id).approval_wanted
    write_policy(shared, Policy(False, "ada", "2026-01-02T00:00:00Z"))
    assert not both.demands_approval()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"approval": 3}', b"[" * 100_000, b"\xff\xfe"])
def test_damaged_policy_demands_approval(root: Path, body: bytes) -> None:
    write_policy(root, Policy(False))
    policy_file(root).write_bytes(body)
    assert read_policy(root).approval


def test_policy_survives_clearing_the_store(root: Path) -> None:
    store = open_at(root)
    store.publish(make_record(), make_data())
    write_policy(root, Policy(True))
    store.clear()
    assert store.demands_approval()


QUARANTINE = Quarantine("r", "failed", "", "2026-01-01T00:00:00Z", "here")
APPROVED, TURNED_DOWN = (Approval("r", approved, "ada", "", "2026-01-01T00:00:00Z") for approved in (True, False))


@pytest.mark.parametrize(
    ("notes", "ships"),
    [
        (Notes(), True),
        (Notes(approval_wanted=True), False),
        (Notes(quarantine=QUARANTINE), False),
        (Notes(approval=APPROVED, approval_wanted=True), True),
        (Notes(approval=TURNED_DOWN), False),
        (Notes(approval=APPROVED, quarantine=QUARANTINE), False),
    ],
    ids=["nothing said", "approval demanded", "failed", "approved", "turned down", "approved, then failed"],
)
def test_what_speaks_against_a_record_keeps_it_from_others(notes: Notes, ships: bool) -> None:
    assert notes.may_be_shipped == ships


class _PackOfOne:
    """As much of a pack as the store asks for."""

    def __init__(self, stored: StoredRecord) -> None:
        self.stored = stored

    def records(self, key_digest: str | None) -> list[StoredRecord]:
        return [self.stored]


def test_record_of_a_folder_and_of_a_pack_is_given_once_and_is_ones_own(root: Path) -> None:
    store = open_at(root)
    record_id = store.publish(make_record(), make_data()).record_id
    store.packs = (_PackOfOne(next(store.records())),)  # type: ignore[assignment]
    assert [stored.record_id for stored in store.records()] == [record_id]
    assert store.is_own(DIGEST, record_id) and not store.is_own(DIGEST, "0" * 64)
    assert len(list(KernelStore([]).records())) == 0
