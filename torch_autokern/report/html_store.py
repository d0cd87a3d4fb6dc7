"""A store as a page tells it: its keys with their proved kernels, people's and machines' notes, and what was refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec

from torch_autokern.report.html_run import Winner, shortened
from torch_autokern.search.journal import KeyJournal
from torch_autokern.search.outcome import describe_key
from torch_autokern.store.key import KernelKey, Target
from torch_autokern.store.layout import version_folder
from torch_autokern.store.notes import Notes
from torch_autokern.store.record import StoredRecord
from torch_autokern.store.store import KernelStore, Layer

# A page of more kernels is no longer read by anybody; the fastest are kept, and the rest is counted.
MOST_RECORDS = 300


class StoredTold(msgspec.Struct, frozen=True):
    """A stored kernel with its evidence, where it was proved, and what was noted about it since."""

    winner: Winner
    target: Target
    notes: Notes


class StoredKey(msgspec.Struct, frozen=True):
    """A key and its kernels, fastest first."""

    name: str
    key: KernelKey
    digest: str
    records: tuple[StoredTold, ...]


class StoredReason(msgspec.Struct, frozen=True):
    """How often a reason refused a kernel, and the judge's words the last time."""

    reason: str
    count: int
    example: str


class StoreStory(msgspec.Struct, frozen=True):
    """All that a page shows of a store. `left_out` counts the kernels beyond `MOST_RECORDS`, `damaged` the files that failed a
    check; `trials` are all that searches noted here, `refusals` why some of them ended."""

    folder: str
    keys: tuple[StoredKey, ...]
    records: int
    left_out: int
    damaged: int
    trials: int
    refusals: tuple[StoredReason, ...]


def is_store(folder: Path) -> bool:
    """Whether a folder holds a store of this format version."""
    return version_folder(folder).is_dir()


def tell_store(folder: Path) -> StoreStory:
    """Read every record of a store's folder; changes nothing."""
    store = KernelStore([Layer("store", folder, writable=False)])
    found = sorted(store.records(), key=lambda stored: (-_ratio(stored), stored.record_id))
    keys: dict[str, list[StoredTold]] = {}
    names: dict[str, KernelKey] = {}
    for stored in found[:MOST_RECORDS]:
        digest = stored.record.key.digest
        names[digest] = stored.record.key
        notes = store.notes(digest, stored.record_id)
        keys.setdefault(digest, []).append(StoredTold(_winner(stored), stored.record.target, notes))
    told = tuple(StoredKey(describe_key(names[digest]), names[digest], digest, tuple(mine)) for digest, mine in keys.items())
    trials, refusals = _refusals(folder)
    return StoreStory(
        folder.resolve().name, told, len(found), max(0, len(found) - MOST_RECORDS), store.counters.damaged, trials, refusals
    )


def _ratio(stored: StoredRecord) -> float:
    timings = stored.record.verdict.timings
    return timings[0].ratio if timings else 0.0


def _winner(stored: StoredRecord) -> Winner:
    record, made = stored.record, stored.record.provenance
    body = next((body for name, body in sorted(stored.data.items()) if name.startswith("source.")), None)
    source, missing = ("", "the record holds no source") if body is None else shortened(body.decode("utf-8", "replace"))
    plan = stored.data.get("plan.json", b"").decode("utf-8", "replace")
    return Winner(
        "", stored.record_id, made.idea, made.author, made.language, made.parameters, record.verdict, made.created,
        record.stock_build, made.tools, made.box_level, source, plan, missing,
    )  # fmt: skip


def _refusals(folder: Path) -> tuple[int, tuple[StoredReason, ...]]:
    """From the journals of all keys, those without a kernel too."""
    counts: Counter[str] = Counter()
    words: dict[str, str] = {}
    trials = 0
    for path in sorted((version_folder(folder) / "runs").glob("*.jsonl")):
        last = {(trial.context, trial.candidate_id): trial for trial in KeyJournal(folder, path.stem).every()}
        trials += len(last)
        for trial in last.values():
            if trial.stage == "refused":
                counts[trial.reason] += 1
                words[trial.reason] = trial.message
    return trials, tuple(StoredReason(reason, count, words[reason]) for reason, count in counts.most_common())
