"""What a person is shown before a kernel is signed off, and what becomes of the word that is given.

A word is a note beside the record (`store/notes.py`); the record never changes. Approve: it may be served where the store's
policy demands approval. Refuse: this record is not served. Ban: neither is any other record of the same source in the store,
and no search builds that source for its key again.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from torch_autokern.build.candidate import source_blob
from torch_autokern.search.outcome import describe_key
from torch_autokern.search.risks import risks
from torch_autokern.store.notes import Approval, Notes
from torch_autokern.store.record import KernelRecord, StoredRecord, Timing
from torch_autokern.store.store import KernelStore, utc_now

Decision = Literal["approve", "refuse", "ban"]
MAX_DIFFERENCE_LINES = 400


class Pending(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kernel that waits for a person's word. `difference` is a unified diff to the parent that was found (`parent` ""
    where none was)."""

    record_id: str
    call: str
    target: str
    stock_build: str
    timings: tuple[Timing, ...]
    accuracy_class: str
    determinism: str
    evidence: tuple[str, ...]
    risks: tuple[str, ...]
    idea: str
    author: str
    created: str
    language: str
    source: str
    parent: str
    difference: str


def pending_records(store: KernelStore, *, all_records: bool = False) -> list[StoredRecord]:
    """Winners without a word: records that are faster than whatever is approved for their slot (key, target, stock build and
    accuracy class), fastest of each key first. `all_records`: the slower ones too."""
    approved: dict[tuple[str, ...], float] = {}
    waiting: list[StoredRecord] = []
    for stored in store.records():
        notes = store.notes(stored.record.key.digest, stored.record_id)
        if notes.quarantine is not None or not stored.record.verdict.timings:
            continue
        if notes.approval is None:
            waiting.append(stored)
        elif notes.approval.approved:
            slot = _slot(stored.record)
            approved[slot] = max(approved.get(slot, 0.0), _bound(stored))
    if not all_records:
        waiting = [stored for stored in waiting if _bound(stored) > approved.get(_slot(stored.record), 0.0)]
    return sorted(waiting, key=lambda stored: (_slot(stored.record), -_bound(stored), stored.record_id))


def look_at(stored: StoredRecord, store: KernelStore, known: Mapping[str, str] | None = None) -> Pending:
    """All that a person should see. `known`: sources by candidate id that are in no store, such as a run's."""
    record, origin = stored.record, stored.record.provenance
    source = source_of(stored)
    parent, words = _parent(record, store, known or {})
    diff = "" if not parent else "\n".join(_difference(words, source, parent))
    target = f"{record.target.device_type} {record.target.name} {record.target.arch}, {record.target.threads} threads"
    return Pending(
        stored.record_id, describe_key(record.key), target, record.stock_build, record.verdict.timings,
        record.verdict.accuracy_class, record.verdict.determinism, tuple(evidence(record)), tuple(risks(record, source)),
        origin.idea, origin.author, origin.created, origin.language, source, parent, diff,
    )  # fmt: skip


def decide(store: KernelStore, stored: StoredRecord, decision: Decision, by: str, reason: str) -> list[str]:
    """Keep a person's word; returns the ids of the records that it is beside.

    Raises:
        OSError: it could not be written, and nothing may rely on it.
    """
    given = []
    for other in _same_source(store, stored) if decision == "ban" else (stored,):
        note = Approval(other.record_id, decision == "approve", by, reason, utc_now(), banned=decision == "ban")
        failed = store.add_note(other.record.key.digest, note)
        if failed:
            raise OSError(failed)
        given.append(other.record_id)
    return given


def banned_sources(store: KernelStore, key_digest: str) -> frozenset[str]:
    """SHA-256 of the sources that a person banned for a key."""
    return frozenset(
        stored.record.provenance.source_sha256
        for stored in store.records(key_digest)
        if is_banned(store.notes(key_digest, stored.record_id))
    )


def is_banned(notes: Notes) -> bool:
    """Whether a person banned a record."""
    return notes.approval is not None and notes.approval.banned


def evidence(record: KernelRecord) -> Iterator[str]:
    """What the judge found, a line each."""
    verdict = record.verdict
    if verdict.families:
        worst = max(verdict.families, key=lambda one: one.error_max / one.limit_max if one.limit_max else 0.0)
        seeds = sum(len(one.seeds) for one in verdict.families)
        yield f"{len(verdict.families)} input families, {seeds} seeds, class {verdict.accuracy_class}"
        yield (
            f"nearest to its limit: {worst.family}, worst element {worst.error_max:.3g} of {worst.limit_max:.3g} allowed "
            f"(stock {worst.stock_max:.3g})"
        )
    yield f"determinism: {verdict.determinism}"
    yield from (f"{name}: {found}" for name, found in sorted(verdict.checks.items()))


def source_of(stored: StoredRecord) -> str:
    """A record's source as text."""
    return stored.data.get(source_blob(stored.record.provenance.language), b"").decode(errors="replace")  # type: ignore[arg-type]


def _parent(record: KernelRecord, store: KernelStore, known: Mapping[str, str]) -> tuple[str, str]:
    """The first parent whose source can be had: its id and source."""
    own = (
        {one.record.provenance.candidate_id: one for one in store.records(record.key.digest)}
        if record.provenance.parents
        else {}
    )
    for parent in record.provenance.parents:
        found = own.get(parent)
        if found is None:
            row = next((row for row in store.index().rows() if row.record_id == parent), None)
            found = None if row is None else store.get(row.key_digest, parent)
        if found is not None:
            return parent, source_of(found)
        if parent in known:
            return parent, known[parent]
    return "", ""


def _difference(before: str, after: str, parent: str) -> Iterable[str]:
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), f"parent {parent[:12]}", "this", lineterm=""))
    more = len(lines) - MAX_DIFFERENCE_LINES
    return lines if more <= 0 else [*lines[:MAX_DIFFERENCE_LINES], f"... {more} more lines"]


def _same_source(store: KernelStore, stored: StoredRecord) -> list[StoredRecord]:
    digest = stored.record.provenance.source_sha256
    return [other for other in store.records() if other.record.provenance.source_sha256 == digest]


def _slot(record: KernelRecord) -> tuple[str, ...]:
    target = record.target
    threads = str(target.threads)
    return (
        record.key.op,
        record.key.digest,
        target.name,
        target.arch,
        threads,
        record.stock_build,
        record.verdict.accuracy_class,
    )


def _bound(stored: StoredRecord) -> float:
    return stored.record.verdict.timings[0].ratio_low
