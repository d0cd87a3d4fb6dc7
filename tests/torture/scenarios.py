"""What the store is doing when it is struck: every way in which a program publishes, reads, notes and looks after a folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from tests.torture.books import Books, guarded, open_at, sample
from torch_autokern.errors import InvalidInputError
from torch_autokern.store import indexing
from torch_autokern.store.folders import choose_folder
from torch_autokern.store.layout import damaged_folder, new_index_file, record_file, temporary_name
from torch_autokern.store.notes import Approval, Receipt
from torch_autokern.store.store import KernelStore, Layer, open_store
from torch_autokern.store.workload import SCHEMA, Workload, load_workload

SIZES_BYTES = (1280, 40, 70_000, 9 << 20)


class Scenario(NamedTuple):
    """`prepare` makes a store folder and says what it holds; `work` is struck, in a process of its own, and returns a word for
    how it went; `check` finds faults that only this scenario can have."""

    name: str
    prepare: Callable[[Path, int], Books]
    work: Callable[[Path, int], object]
    check: Callable[[Path, int], list[str]] = lambda _root, _seed: []


def size_of(seed: int) -> int:
    """Mostly small binaries; one larger than a write, now and then."""
    return SIZES_BYTES[(0, 1, 0, 2, 0, 1, 2, 0, 0, 3)[seed % 10]]


def _nothing(root: Path, seed: int) -> Books:
    return Books((), (sample(seed, 0, size_of(seed)),))


def _other_key(root: Path, seed: int) -> Books:
    old = sample(1000 + seed, 5)
    old.publish(open_at(root))
    return Books((old,), (sample(seed, 0, size_of(seed)),))


def _same_key(root: Path, seed: int) -> Books:
    old = sample(1000 + seed, 0)
    old.publish(open_at(root))
    open_at(root).index()
    return Books((old,), (sample(seed, 0, size_of(seed)),))


def _there_already(root: Path, seed: int) -> Books:
    old = sample(seed, 0, size_of(seed))
    old.publish(open_at(root))
    return Books((old,))


def _half_there(root: Path, seed: int) -> Books:
    books = _same_key(root, seed)
    new = books.may[0]
    path = record_file(root, new.key_digest, new.record_id)
    path.write_bytes(new.raw[: 100 + seed % 200])
    path.chmod(0o600)
    return books._replace(was_damaged=True)


def _several(root: Path, seed: int) -> Books:
    olds = [sample(1000 + seed + number, number % 3) for number in range(4)]
    for old in olds:
        old.publish(open_at(root))
    open_at(root).index()
    last = sample(1100 + seed, 7)
    last.publish(open_at(root))  # announced and not listed yet
    return Books((*olds, last))


def _many_lists(root: Path, seed: int) -> Books:
    books = _several(root, seed)
    whole = next((root / "v1" / "index").iterdir()).read_bytes()
    for _ in range(indexing.MERGE_ABOVE_FILES):
        path = new_index_file(root)
        path.write_bytes(whole)
        path.chmod(0o600)
    return books


def _no_list(root: Path, seed: int) -> Books:
    books = _several(root, seed)
    for path in (root / "v1" / "index").iterdir():
        path.unlink()
    return books


def _with_left_overs(root: Path, seed: int) -> Books:
    books = _several(root, seed)
    damaged_folder(root).mkdir(exist_ok=True)
    for folder in (damaged_folder(root), record_file(root, books.must[0].key_digest, "0" * 64).parent, root):
        path = folder / temporary_name()
        path.write_bytes(b"half")
        os.utime(path, (1, 1))
    (damaged_folder(root) / "old.akr.1234").write_bytes(b"bad")
    return books


def _noted(root: Path, seed: int) -> Books:
    books = _there_already(root, seed)
    open_at(root).quarantine(books.must[0].key_digest, books.must[0].record_id, "first")
    return books


def _publish(root: Path, seed: int) -> str:
    return sample(seed, 0, size_of(seed)).publish(open_at(root))


def _publish_and_list(root: Path, seed: int) -> str:
    with mock.patch.object(indexing, "COMPACT_ABOVE", 0):
        status = _publish(root, seed)
        return status + str(len(open_at(root).index().rows()) * 0)


def _publish_locked(root: Path, seed: int) -> str:
    store = open_at(root)
    with store.work_lock("a" * 64, timeout_s=0.0):
        return sample(seed, 0, size_of(seed)).publish(store)


def _publish_to_chosen_folder(root: Path, seed: int) -> str:
    with mock.patch.dict(os.environ, {"AUTOKERN_STORE": str(root)}):
        store = open_store(choice=choose_folder())
    if store.write_root != root:  # refused under fire: another folder or memory serves this process
        store = KernelStore([Layer("cache", root, writable=True)])
    return sample(seed, 0, size_of(seed)).publish(store)


def _read(root: Path, seed: int) -> int:
    store = open_at(root)
    list(store.records())
    old = sample(1000 + seed, 0)
    store.get(old.key_digest, old.record_id)
    store.notes(old.key_digest, old.record_id)
    return 0


def _list(root: Path, seed: int) -> int:
    index = open_at(root).index()
    index.rows()
    index.lookup(sample(1000 + seed, 0).key_digest)
    return 0


def _find(root: Path, seed: int) -> str:
    try:
        return open_at(root).find(sample(1000 + seed, 0).record_id[:12]).record_id
    except InvalidInputError:
        return "not found, which it says in words"


def _quarantine(root: Path, seed: int) -> str:
    old = sample(seed, 0, size_of(seed))
    store = open_at(root)
    store.quarantine(old.key_digest, old.record_id, "again")
    if store.notes(old.key_digest, old.record_id).quarantine is None:
        raise AssertionError("the process forgot its own quarantine")
    return "noted"


def _still_quarantined(root: Path, seed: int) -> list[str]:
    old = sample(seed, 0, size_of(seed))
    note = open_at(root).notes(old.key_digest, old.record_id).quarantine
    return [] if note is not None and note.reason in ("first", "again") else [f"quarantine lost or half: {note}"]


def _approve(root: Path, seed: int) -> str:
    old = sample(seed, 0, size_of(seed))
    store = open_at(root)
    target = store.records(old.key_digest)
    store.add_note(old.key_digest, Approval(old.record_id, True, "me", "read it", "2025-01-01T00:00:00Z"))
    for stored in target:
        receipt = Receipt(old.record_id, stored.record.target, "2.13", 1.2, "2025-01-01T00:00:00Z")
        store.add_note(old.key_digest, receipt)
    return "noted"


def _repair(root: Path, seed: int) -> int:
    return open_at(root).repair().damaged * 0


def _clean(root: Path, seed: int) -> int:
    return open_at(root).clean().records


def _verify(root: Path, seed: int) -> int:
    return sum(report.whole * 0 for report in open_at(root).verify())


def _clear_one(root: Path, seed: int) -> int:
    return open_at(root).clear(sample(0, 9).key_digest).records * 0


def _with_one_to_clear(root: Path, seed: int) -> Books:
    books = _several(root, seed)
    gone = sample(seed, 9)
    gone.publish(open_at(root))
    return books._replace(may=(gone,))


def _save_workload(root: Path, seed: int) -> str:
    try:
        _workload(2).save(root / "w.json")
    except InvalidInputError as error:
        return str(error)[:4]
    return "saved"


def _with_workload(root: Path, seed: int) -> Books:
    root.mkdir(mode=0o700, parents=True)
    _workload(1).save(root / "w.json")
    return Books(())


def _workload(threads: int) -> Workload:
    return Workload(SCHEMA, "2.13", "cpu", threads, 1.0, ())


def _whole_workload(root: Path, seed: int) -> list[str]:
    return guarded(lambda: [] if load_workload(root / "w.json").threads in (1, 2) else ["another workload"])


SCENARIOS = (
    Scenario("first publish into no folder", _nothing, _publish),
    Scenario("publish beside another key", _other_key, _publish),
    Scenario("publish for a key that has a record", _same_key, _publish),
    Scenario("publish of what is there", _there_already, _publish),
    Scenario("publish over a damaged file", _half_there, _publish),
    Scenario("publish and list", _same_key, _publish_and_list),
    Scenario("publish under the lock", _other_key, _publish_locked),
    Scenario("choose the folder and publish", _nothing, _publish_to_chosen_folder),
    Scenario("read all, one, and its notes", _several, _read),
    Scenario("read a folder with damage", _half_there, _read),
    Scenario("open the index", _several, _list),
    Scenario("merge the index", _many_lists, _list),
    Scenario("derive the index", _no_list, _list),
    Scenario("find by prefix", _several, _find),
    Scenario("quarantine again", _noted, _quarantine, _still_quarantined),
    Scenario("approve, and a receipt", _there_already, _approve),
    Scenario("repair", _half_there, _repair),
    Scenario("clean", _with_left_overs, _clean),
    Scenario("verify", _half_there, _verify),
    Scenario("clear one key", _with_one_to_clear, _clear_one),
    Scenario("save a workload", _with_workload, _save_workload, _whole_workload),
)
