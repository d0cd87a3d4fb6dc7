"""`KernelStore`: layers of immutable records, read with every check, written durably or kept in memory."""

from __future__ import annotations

import datetime
import itertools
import logging
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from torch_autokern.errors import InvalidInputError, StoreError
from torch_autokern.store import notes as note_files
from torch_autokern.store.files import publish_file, remove_file, set_aside
from torch_autokern.store.folders import FolderChoice, choose_folder, folder_refusal
from torch_autokern.store.index import Accepts, IndexRow, row_of
from torch_autokern.store.indexing import FolderIndex, announce, confirm, open_index
from torch_autokern.store.layout import damaged_folder, may_have_key, note_file, record_file
from torch_autokern.store.lock import work_lock
from torch_autokern.store.notes import Approval, Note, Notes, Quarantine, Receipt, merge_notes
from torch_autokern.store.policy import read_policy
from torch_autokern.store.reading import Damaged, read_record, record_files
from torch_autokern.store.record import KernelRecord, StoredRecord, decode_record, encode_record
from torch_autokern.store.upkeep import (
    FolderReport,
    UpkeepCount,
    clean_folder,
    clear_folder,
    repair_folder,
    verify_folder,
)

if TYPE_CHECKING:
    from torch_autokern.store.pack import Pack

_LOG = logging.getLogger("torch_autokern.store")


class Layer(msgspec.Struct, frozen=True):
    """One folder of records. `name` is "project", "cache" or a pack's name."""

    name: str
    root: Path
    writable: bool


class PublishOutcome(msgspec.Struct, frozen=True):
    """``published``: durable. ``already_there``: an equal record was. ``memory_only``: kept for this process, `reason` says
    why the disk has it not."""

    status: Literal["published", "already_there", "memory_only"]
    record_id: str
    reason: str = ""


class StoreCounters(msgspec.Struct):
    """What this process met since the store was opened."""

    read: int = 0
    damaged: int = 0
    set_aside: int = 0
    refused: int = 0
    published: int = 0
    memory_only: int = 0


class StoreIndex(msgspec.Struct, frozen=True):
    """Rows of all layers: what there is to choose from, before any record is read. Read the chosen record with
    `KernelStore.get` and decide by what the record itself says."""

    layers: tuple[FolderIndex | Pack, ...]
    memory: dict[str, tuple[IndexRow, ...]]

    def lookup(self, key_digest: str) -> tuple[IndexRow, ...]:
        """The rows of one key, each record once, in order of record id."""
        rows = {row.record_id: row for row in self.memory.get(key_digest, ())}
        for layer in self.layers:
            rows.update((row.record_id, row) for row in layer.lookup(key_digest))
        return tuple(row for _, row in sorted(rows.items()))

    def rows(self, accepts: Accepts | None = None) -> list[IndexRow]:
        """All rows, or those whose target and stock build `accepts`; each record once, in order of key digest and record id."""
        groups = [[row for rows in self.memory.values() for row in rows]]
        groups[0] = [row for row in groups[0] if accepts is None or accepts(row.target, row.stock_build)]
        groups.extend(layer.rows(accepts) for layer in self.layers)
        rows = {(row.key_digest, row.record_id): row for group in groups for row in group}
        return [rows[name] for name in sorted(rows)]


class KernelStore:
    """Records of several layers, first layer first; whatever is published goes to the first writable one. `packs` come after
    all folders; whoever opens the store sets them, and sets them anew when they change.

    Safe to use from threads and after a fork: it holds no lock and no open file between calls.
    """

    def __init__(self, layers: Sequence[Layer], choice: FolderChoice | None = None) -> None:
        self.layers = tuple(layers)
        self.choice = choice
        self.packs: tuple[Pack, ...] = ()
        self.counters = StoreCounters()
        self._memory: dict[tuple[str, str], StoredRecord] = {}
        self._memory_notes: dict[str, list[Note]] = {}
        self._seen_bad: set[tuple[int, int]] = set()

    @property
    def write_root(self) -> Path | None:
        """Folder of the first writable layer, or None: memory only."""
        return next((layer.root for layer in self.layers if layer.writable), None)

    # -- records ---------------------------------------------------------------------------------------------------------

    def publish(self, record: KernelRecord, data: dict[str, bytes]) -> PublishOutcome:
        """Keep a record with its bytes, durably if any disk allows it. A compiled kernel is never lost to a disk error.

        Raises:
            RecordError: the record cannot be written so that it reads back equal (too large, or a NaN in it).
        """
        raw = encode_record(record, data)
        stored = decode_record(raw)
        digest, record_id = stored.record.key.digest, stored.record_id
        root = self.write_root
        if root is None:
            return self._keep_in_memory(stored, self.choice.why if self.choice else "no layer is writable")
        path = record_file(root, digest, record_id)
        try:
            announce(root, digest, record_id)
            made_visible = publish_file(path, raw, root)
            if not made_visible and self._read(path, writable=True) is not None:
                return PublishOutcome("already_there", record_id)
            if made_visible or publish_file(path, raw, root):  # a damaged file in its place is set aside now
                confirm(root, digest, record_id)
                self.counters.published += 1
                return PublishOutcome("published", record_id)
        except OSError as error:
            return self._keep_in_memory(stored, f"{root}: {error.strerror or error}")
        return self._keep_in_memory(stored, f"{path} is there and cannot be used; remove it")

    def records(self, key_digest: str | None = None) -> Iterator[StoredRecord]:
        """Whole records of one key, or of all; each once. Order: layer, key digest, record id; then those in memory only, then
        those of packs.

        Files that fail a check are counted, set aside once where the layer is writable, and left out.
        """
        given: set[str] = set()
        for layer in self.layers:
            for path in record_files(layer.root, key_digest):
                stored = self._read(path, writable=layer.writable)
                if stored is not None and stored.record_id not in given and key_digest in (None, stored.record.key.digest):
                    given.add(stored.record_id)
                    yield stored
        packed = (stored for pack in self.packs for stored in pack.records(key_digest))
        kept = (stored for (digest, _), stored in sorted(self._memory.items()) if key_digest in (None, digest))
        for stored in itertools.chain(kept, packed):
            if stored.record_id not in given:
                given.add(stored.record_id)
                yield stored

    def layers_with(self, key_digest: str) -> tuple[Layer, ...]:
        """Layers that may hold something of a key: of a pack's thousand keys most have no folder, and a look spares a dozen.
        Who asks several things about one key hands them on."""
        return tuple(layer for layer in self.layers if may_have_key(layer.root, key_digest))

    def get(self, key_digest: str, record_id: str, *, layers: Sequence[Layer] | None = None) -> StoredRecord | None:
        """One record by its key and id, from the first layer that has it whole."""
        for layer in self.layers_with(key_digest) if layers is None else layers:
            stored = self._read(record_file(layer.root, key_digest, record_id), writable=layer.writable)
            if stored is not None and (stored.record.key.digest, stored.record_id) == (key_digest, record_id):
                return stored
        kept = self._memory.get((key_digest, record_id))
        packed = (pack.get(key_digest, record_id) for pack in self.packs if kept is None)
        return next((stored for stored in packed if stored is not None), kept)

    def is_own(self, key_digest: str, record_id: str) -> bool:
        """Whether a record lies in a folder or in memory, so that it was judged or imported here, and not in a pack alone."""
        places = (record_file(layer.root, key_digest, record_id) for layer in self.layers_with(key_digest))
        return (key_digest, record_id) in self._memory or any(os.path.lexists(path) for path in places)

    def index(self) -> StoreIndex:
        """Rows of all records: opens 100,000 of them without reading any record."""
        memory: dict[str, tuple[IndexRow, ...]] = {}
        for (digest, _), stored in sorted(self._memory.items()):
            memory[digest] = (*memory.get(digest, ()), row_of(stored))
        folders = (open_index(layer.root, writable=layer.writable) for layer in self.layers)
        return StoreIndex((*folders, *self.packs), memory)

    def find(self, prefix: str) -> StoredRecord:
        """The one record whose id starts with `prefix` (hex).

        Raises:
            InvalidInputError: no record, or more than one.
        """
        wanted = prefix.strip().lower()
        rows = [row for row in self.index().rows() if row.record_id.startswith(wanted)] if wanted else []
        if len(rows) != 1:
            raise InvalidInputError(
                f"{len(rows)} records start with {prefix!r}, expected one; list them with: autokern cache list"
            )
        stored = self.get(rows[0].key_digest, rows[0].record_id)
        if stored is None:
            raise InvalidInputError(f"record {rows[0].record_id[:12]} cannot be read; run: autokern cache repair")
        return stored

    # -- notes -----------------------------------------------------------------------------------------------------------

    def quarantine(self, key_digest: str, record_id: str, reason: str, driver_words: str = "") -> str:
        """Stop a record from running: in this process at once, on this machine once the note is written.

        Returns why the note was not written, or "".
        """
        return self.add_note(key_digest, Quarantine(record_id, reason, driver_words, utc_now(), platform.node()))

    def add_note(self, key_digest: str, note: Note) -> str:
        """Keep a note: in memory at once, and beside the record. Returns why it was not written, or ""."""
        kept = [other for other in self._memory_notes.get(note.record_id, ()) if _differs(other, note)]
        self._memory_notes[note.record_id] = [note, *kept]
        root = self.write_root
        if root is None:
            return "no layer is writable"
        try:
            note_files.write_note(root, key_digest, note)
        except OSError as error:
            return f"{root}: {error.strerror or error}"
        return ""

    def notes(
        self, key_digest: str, record_id: str, *, approval_wanted: bool | None = None, layers: Sequence[Layer] | None = None
    ) -> Notes:
        """What is noted about a record, this process's own notes first, then layer by layer. Who asks about many records says
        `approval_wanted` once asked (`demands_approval`)."""
        own = self._memory_notes.get(record_id, [])
        merged = Notes(
            next((note for note in own if isinstance(note, Quarantine)), None),
            next((note for note in own if isinstance(note, Approval)), None),
            tuple(note for note in own if isinstance(note, Receipt)),
            approval_wanted=self.demands_approval() if approval_wanted is None else approval_wanted,
        )
        for layer in self.layers_with(key_digest) if layers is None else layers:
            merged = merge_notes(merged, note_files.read_notes(layer.root, key_digest, record_id))
        return merged

    def demands_approval(self) -> bool:
        """Whether a layer's owner lets only records be served that a person approved."""
        return any(read_policy(layer.root).approval for layer in self.layers)

    def lift_quarantine(self, key_digest: str, record_id: str) -> None:
        """Let a record run again: forget the note here and in every writable layer."""
        own = self._memory_notes.get(record_id, [])
        self._memory_notes[record_id] = [note for note in own if not isinstance(note, Quarantine)]
        for layer in self.layers:
            if layer.writable:
                remove_file(note_file(layer.root, key_digest, record_id, "quarantine"))

    # -- work and upkeep -------------------------------------------------------------------------------------------------

    def work_lock(self, key_digest: str, timeout_s: float = 30.0) -> AbstractContextManager[bool]:
        """Hold while searching for a key, so that others wait and then find the result. Yields whether it is held; read the
        key's records again after entering, and go on either way."""
        return work_lock(self.write_root, key_digest, timeout_s)

    def verify(self) -> tuple[FolderReport, ...]:
        """Read every record of every layer again; changes nothing."""
        return tuple(verify_folder(layer.root) for layer in self.layers)

    def repair(self) -> UpkeepCount:
        """Set damaged records aside and derive the index again, in every writable layer."""
        return _total([repair_folder(layer.root) for layer in self.layers if layer.writable])

    def clean(self) -> UpkeepCount:
        """Remove left-over temporary files and files set aside, in every writable layer; leaves it to another process that
        is at it already."""
        counts = []
        for layer in self.layers:
            if layer.writable:
                with work_lock(layer.root, "clean", timeout_s=0.0) as held:
                    counts.append(clean_folder(layer.root) if held else UpkeepCount())
        return _total(counts)

    def clear(self, key_digest: str | None = None) -> UpkeepCount:
        """Remove records and notes of one key or of all, in every writable layer and in memory."""
        for digest, record_id in list(self._memory):
            if key_digest in (None, digest):
                self._memory.pop((digest, record_id), None)
        return _total([clear_folder(layer.root, key_digest) for layer in self.layers if layer.writable])

    def _read(self, path: Path, *, writable: bool) -> StoredRecord | None:
        outcome = read_record(path)
        if isinstance(outcome, StoredRecord):
            self.counters.read += 1
            return outcome
        if isinstance(outcome, Damaged):
            if outcome.identity not in self._seen_bad:
                self._seen_bad.add(outcome.identity)
                self.counters.damaged += 1
                _LOG.info("set aside %s: %s", path, outcome.reason)
            if writable and set_aside(path, outcome.identity, damaged_folder(path.parents[4]), path.parents[4]):
                self.counters.set_aside += 1
        elif outcome.kind != "absent":
            self.counters.refused += 1
            _LOG.info("not used %s: %s", path, outcome.reason)
        return None

    def _keep_in_memory(self, stored: StoredRecord, reason: str) -> PublishOutcome:
        self._memory[(stored.record.key.digest, stored.record_id)] = stored
        self.counters.memory_only += 1
        _LOG.info("record %s is kept in memory only: %s", stored.record_id[:12], reason)
        return PublishOutcome("memory_only", stored.record_id, reason)


def open_store(
    project: Path | None = None, packs: Sequence[tuple[str, Path]] = (), choice: FolderChoice | None = None
) -> KernelStore:
    """The store of this user: the project folder if one is named, the user cache, then installed packs (name, folder).

    A project folder is used only where the caller names it. Looking for one in the working folder would let anybody whose
    checkout one stands in put machine code into the process.

    Raises:
        StoreError: the named project folder exists and is not safe to load code from.
    """
    layers: list[Layer] = []
    if project is not None:
        refusal = folder_refusal(project)
        if refusal is not None:
            raise StoreError(f"project store {project} cannot be used: {refusal}; make it a folder that only you can write")
        if os.path.isdir(project):
            layers.append(Layer("project", Path(project).absolute(), writable=True))
    choice = choice or choose_folder()
    if choice.path is not None:
        layers.append(Layer("cache", choice.path, writable=True))
    layers.extend(Layer("read-only", path, writable=False) for path in choice.read_only)
    layers.extend(Layer(name, path, writable=False) for name, path in packs)
    return KernelStore(layers, choice)


def utc_now() -> str:
    """ISO 8601 UTC to the second."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _differs(first: Note, second: Note) -> bool:
    return type(first) is not type(second) or note_files.note_kind(first) != note_files.note_kind(second)


def _total(counts: Sequence[UpkeepCount]) -> UpkeepCount:
    return UpkeepCount(**{name: sum(getattr(count, name) for count in counts) for name in UpkeepCount.__struct_fields__})
