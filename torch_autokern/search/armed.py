"""Which record of the store makes a search for a key needless."""

from __future__ import annotations

import msgspec

from torch_autokern.judge.outcome import Accuracy
from torch_autokern.runtime.table import CLASSES, refusal
from torch_autokern.runtime.target import stock_build
from torch_autokern.store.key import KernelKey, Target
from torch_autokern.store.record import StoredRecord
from torch_autokern.store.store import KernelStore


def armed(store: KernelStore, key: KernelKey, target: Target, accuracy: Accuracy) -> StoredRecord | None:
    """A record that serves a key on a target, with this accuracy and thread count; the fastest of several. One that only waits
    for a person's approval counts too: searching again would not bring it."""
    found: list[StoredRecord] = []
    admitted = CLASSES[: CLASSES.index(accuracy.kind) + 1]
    for stored in store.records(key.digest):
        record = stored.record
        notes = msgspec.structs.replace(store.notes(key.digest, stored.record_id), approval_wanted=False)
        fits = record.key == key and record.target.threads == target.threads and record.verdict.timings
        if not fits or record.verdict.accuracy_class not in admitted or _is_looser(stored, accuracy):
            continue
        if refusal(record, notes, target, stock_build()) is None:
            found.append(stored)
    return max(found, key=lambda stored: stored.record.verdict.timings[0].ratio_low, default=None)


def _is_looser(stored: StoredRecord, wanted: Accuracy) -> bool:
    """Whether a tolerance record proved wider bounds than are wanted now."""
    verdict = stored.record.verdict
    return verdict.accuracy_class == "tolerance" and (verdict.atol > wanted.atol or verdict.rtol > wanted.rtol)
