"""Damaged files: records, lists, notes and workloads with bits flipped, cut, joined, swapped and sealed again.

A reader may call such a file a miss, or read it where the bytes say the same; it must never give other bytes than were
published, and never raise.

*Sealed again* means that the checksum was computed anew over the damage: it gets past the hash to the parser,
as a fault in a writer of another version would.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.torture.books import Sample, guarded, misread, open_at, sample
from torch_autokern.errors import InvalidInputError, RecordError
from torch_autokern.store import notes as note_files
from torch_autokern.store.index import RecordIndex, encode_index, row_of
from torch_autokern.store.key import canonical_json
from torch_autokern.store.layout import new_index_file, note_file, record_file
from torch_autokern.store.notes import Approval, Quarantine
from torch_autokern.store.record import decode_record, encode_record
from torch_autokern.store.workload import SCHEMA, Workload, load_workload

Trial = Callable[[Path], list[str]]
_IN_FOLDER_EVERY = 20  # the others are given to the parser without a disk
BATCH = 50


@functools.cache
def _records() -> tuple[Sample, ...]:
    return tuple(sample(number, number % 2, (40, 1280, 3000)[number % 3]) for number in range(6))


@functools.cache
def _list() -> bytes:
    return encode_index(row_of(decode_record(each.raw)) for each in _records())


def damage(raw: bytes, chance: random.Random) -> bytes:
    """One damaged copy; never equal to `raw`."""
    other = chance.choice(_records()).raw
    body = bytearray(raw)
    place, length = chance.randrange(len(raw)), chance.choice((1, 2, 4, 8, 64, 512))
    kind = chance.randrange(10)
    if kind == 0:
        del body[place:]
    elif kind == 1:
        body[place] ^= 1 << chance.randrange(8)
    elif kind == 2:
        body[place : place + length] = bytes(len(body[place : place + length]))
    elif kind == 3:
        body[place : place + length] = chance.randbytes(length)
    elif kind == 4:
        del body[place : place + length]
    elif kind == 5:
        body[place:place] = body[place : place + length]
    elif kind == 6:
        body[place:] = other[place:]  # halves of two writers
    elif kind == 7:
        body = bytearray(other) + body[place:]
    elif kind == 8:
        number = chance.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, chance.getrandbits(32)))
        body[min(place, 20) : min(place, 20) + 4] = number.to_bytes(4, "little")  # the lengths at the front
    else:
        body += chance.randbytes(length)
    return bytes(body) if body != raw else bytes(body[:-1])


def sealed(raw: bytes) -> bytes:
    """The same with a checksum that fits."""
    return raw[:-32] + hashlib.sha256(raw[:-32]).digest()


def mutations(folder: Path) -> Iterator[Trial]:
    """Batches of 50 damaged files each; kinds of file in turn."""
    kinds = (_damaged_record, _damaged_record, _damaged_record, _damaged_list, _damaged_note, _damaged_workload)
    for number in itertools.count():
        yield functools.partial(_batch, kinds[number % len(kinds)], number)


def _batch(kind: Callable[[random.Random, bool, Path], list[str]], number: int, folder: Path) -> list[str]:
    wrong: list[str] = []
    for each in range(BATCH):
        chance = random.Random(number * BATCH + each)
        is_sealed = each % 3 == 2
        found = guarded(lambda chance=chance, is_sealed=is_sealed: kind(chance, is_sealed, folder))  # type: ignore[misc]
        wrong += [f"{kind.__name__.strip('_')} {number * BATCH + each}: {fault}" for fault in found]
    return wrong


def _damaged_record(chance: random.Random, is_sealed: bool, folder: Path) -> list[str]:
    whole = chance.choice(_records())
    raw = damage(whole.raw, chance)
    raw = sealed(raw) if is_sealed else raw
    if chance.randrange(_IN_FOLDER_EVERY) == 0 and raw != whole.raw:  # sealing mends a damaged checksum
        return _record_in_folder(whole, raw, folder / "store")
    try:
        stored = decode_record(raw)
    except RecordError:
        return []
    known = {each.raw for each in _records()}
    if encode_record(stored.record, stored.data) != raw or (raw not in known and not is_sealed):
        return ["wrong bytes: damage was read as a record"]
    return []


def _record_in_folder(whole: Sample, raw: bytes, root: Path) -> list[str]:
    """The damaged file lies where the record was: it is a miss, the next publish repairs it."""
    path = record_file(root, whole.key_digest, whole.record_id)
    whole.publish(open_at(root))
    path.write_bytes(raw)
    path.chmod(0o600)
    store = open_at(root)
    found, wrong = misread(store, _records())
    if whole.record_id in found:
        wrong.append("wrong bytes: damage was read in the record's place")
    if whole.publish(open_at(root)) != "published":
        wrong.append("stuck: the next publish did not repair it")
    if open_at(root).get(whole.key_digest, whole.record_id) is None:
        wrong.append("lost: not there after the repair")
    return wrong


def _damaged_list(chance: random.Random, is_sealed: bool, folder: Path) -> list[str]:
    raw = damage(_list(), chance)
    raw = sealed(raw) if is_sealed else raw
    if chance.randrange(_IN_FOLDER_EVERY) == 0:
        return _list_in_folder(raw, folder / "store")
    try:
        index = RecordIndex(raw)
    except ValueError:
        return []
    for each in _records():
        index.lookup(each.key_digest)
    list(index.rows())
    return [] if is_sealed else ["wrong row: damage was read as a list"]


def _list_in_folder(raw: bytes, root: Path) -> list[str]:
    """A damaged list hides no record and gives none that is not there."""
    for each in _records():
        each.publish(open_at(root))
    path = new_index_file(root)
    path.parent.mkdir(exist_ok=True)
    for old in path.parent.iterdir():
        old.unlink()
    path.write_bytes(raw)
    path.chmod(0o600)
    store = open_at(root)
    ids = {row.record_id for row in store.index().rows()}
    missing = {each.record_id for each in _records()} - ids
    wrong = [f"hidden: {len(missing)} records"] if missing else []
    for row in store.index().rows():
        stored = store.get(row.key_digest, row.record_id)
        if stored is not None and stored.record_id != row.record_id:
            wrong.append("wrong bytes: another record than was asked for")
    return wrong


def _damaged_note(chance: random.Random, is_sealed: bool, folder: Path) -> list[str]:
    """A damaged quarantine holds; a damaged approval gives no right that was not in its bytes."""
    root, about = folder / "store", _records()[0]
    note = chance.choice(
        (
            Quarantine(about.record_id, "failed", "", "2025-01-01T00:00:00Z", "here"),
            Approval(about.record_id, False, "me", "banned", "2025-01-01T00:00:00Z"),
        )
    )
    note_files.write_note(root, about.key_digest, note)
    path = note_file(root, about.key_digest, about.record_id, note_files.note_kind(note))
    path.write_bytes(damage(canonical_json(note), chance))
    notes = open_at(root).notes(about.key_digest, about.record_id)
    path.unlink()
    if isinstance(note, Quarantine) and notes.quarantine is None:
        return ["a damaged quarantine set the kernel free"]
    if isinstance(note, Approval) and notes.approval is not None and notes.approval.approved:
        return ["a damaged ban became an approval"]
    return []


def _damaged_workload(chance: random.Random, is_sealed: bool, folder: Path) -> list[str]:
    """A workload file holds no proof, so it has no checksum: read where it still says a workload, else refused in words."""
    path = folder / "store.json"
    if not path.exists():
        Workload(SCHEMA, "2.13", "cpu", 2, 1.0, ()).save(path)
    whole = path.read_bytes()
    try:
        path.write_bytes(damage(whole, chance))
        load_workload(path)
    except InvalidInputError:
        return []
    finally:
        path.write_bytes(whole)
    return []
