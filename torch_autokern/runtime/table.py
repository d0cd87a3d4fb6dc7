"""From records to the router's table: which records may run here, and which one wins each slot.

The choice is a function of the records, this target and this torch alone, so every process of a job chooses alike.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch_autokern.ops import spec_of
from torch_autokern.ops.function import is_same_op
from torch_autokern.ops.spec import itemsize
from torch_autokern.store.key import KernelKey, Target
from torch_autokern.store.notes import Notes
from torch_autokern.store.record import AccuracyClass, KernelRecord

Regime = Literal["eager", "compiled"]
REGIMES: tuple[Regime, ...] = ("eager", "compiled")  # functional form, out form
CLASSES: tuple[AccuracyClass, ...] = ("exact", "stock", "tolerance")  # each policy admits its own and those before it
_EARN = "run autokern warm here, or for a pack: autokern pack verify NAME --replay"


@dataclass(frozen=True)
class Servable:
    """A record that may run here, with its loaded kernel (the extension's object); `place` is the index of its GPU."""

    record_id: str
    record: KernelRecord
    native: Any
    place: int = 0


def refusal(record: KernelRecord, notes: Notes, target: Target, stock_build: str) -> str | None:
    """The first condition that keeps a record from running here, in words; None when it may run.

    `target.threads` is not compared: the thread count is part of the key's words, so that it may change between calls.
    """
    if notes.quarantine is not None:
        return f"quarantined: {notes.quarantine.reason}"
    if notes.approval is not None and not notes.approval.approved:
        return f"{'banned' if notes.approval.banned else 'refused'} by {notes.approval.by}: {notes.approval.reason}"
    if notes.approval is None and notes.approval_wanted:
        return "approval wanted: this store serves only what a person approved; look at it with: autokern review"
    made_for = record.target
    if (made_for.device_type, made_for.arch) != (target.device_type, target.arch):
        return f"made for {made_for.device_type} {made_for.arch}, this is {target.device_type} {target.arch}"
    if any(
        receipt.stock_build == stock_build
        and (receipt.target.name, receipt.target.arch) == (target.name, target.arch)
        and receipt.target.threads == made_for.threads
        for receipt in notes.receipts
    ):
        return None
    if made_for.name != target.name:
        return f"proved faster on {made_for.name}, not yet on {target.name}: {_EARN}"
    if record.stock_build != stock_build:
        return f"proved faster than torch {record.stock_build}, this is {stock_build}: {_EARN}"
    return None


def slower_in_fresh_pages(record: KernelRecord, pool_bytes: int) -> str | None:
    """Why a record must not run where its outputs get fresh pages at every call: it was timed there and was not faster.

    `pool_bytes` is the cap of the output pool. Outputs that fit find warm pages; without the pool, or past its cap, they come
    as the allocator gives them, and then the timing in fresh pages decides. None when the record may run.
    """
    outputs = [t.numel * itemsize(t.dtype) for t in record.key.outputs if t is not None]
    fresh = next((timing for timing in record.verdict.timings if timing.pages == "fresh"), None)
    if fresh is None or max(outputs, default=0) <= pool_bytes or fresh.ratio_low > 1.0:
        return None
    return (
        f"{fresh.ratio:.2f}x in fresh pages, and its outputs do not fit the pool of {pool_bytes >> 20} MiB (AUTOKERN_POOL_MB)"
    )


def key_difference(key: KernelKey, record: KernelRecord, threads: int) -> str | None:
    """The first field in which a record's key differs from a call's, in words; None when the record fits the call."""
    other = record.key
    if not is_same_op(key.op, other.op):
        return f"op is {key.op}, the record proves {other.op}"
    for name in ("device_type", "scalars", "flush_denormal", "mkldnn", "matmul_precision"):
        if getattr(key, name) != getattr(other, name):
            return f"{name} is {getattr(key, name)}, the record proves {getattr(other, name)}"
    for place, tensors, others in (("input", key.tensors, other.tensors), ("output", key.outputs, other.outputs)):
        for index, (mine, theirs) in enumerate(zip(tensors, others, strict=False)):
            if mine is None or theirs is None:
                if mine is not theirs:
                    return f"{place} {index} is {'absent' if mine is None else 'given'}, the record proves the opposite"
                continue
            for name in ("dtype", "sizes", "strides", "alignment_bytes"):
                if getattr(mine, name) != getattr(theirs, name):
                    return f"{place} {index}: {name} {getattr(mine, name)}, the record proves {getattr(theirs, name)}"
    if record.target.device_type == "cpu" and record.target.threads != threads:
        return f"{threads} threads, the record was proved faster with {record.target.threads}"
    return None


def ratio_low(record: KernelRecord, regime: Regime) -> float | None:
    """Lower bound of the speed-up in a regime, by the timing that the record was accepted by (the first of its regime); None
    where it was not measured there."""
    return next((timing.ratio_low for timing in record.verdict.timings if timing.regime == regime), None)


def winner(servables: Iterable[Servable], regime: Regime, policy: AccuracyClass, *, deterministic: bool) -> Servable | None:
    """The admitted record with the highest lower bound of its speed-up; equal bounds go to the smaller record id."""
    return _winner(_by_bound(servables, regime), policy, deterministic=deterministic)


def _by_bound(servables: Iterable[Servable], regime: Regime) -> list[Servable]:
    """Those that were measured in a regime, the highest lower bound first; equal ones in order of record id."""
    bounds = [(-bound, s.record_id, s) for s in servables if (bound := ratio_low(s.record, regime)) is not None]
    return [servable for _, _, servable in sorted(bounds, key=operator.itemgetter(0, 1))]


def _winner(ordered: Iterable[Servable], policy: AccuracyClass, *, deterministic: bool) -> Servable | None:
    admitted = CLASSES[: CLASSES.index(policy) + 1]
    for servable in ordered:
        verdict = servable.record.verdict
        if verdict.accuracy_class in admitted and not (deterministic and verdict.determinism == "not_guaranteed"):
            return servable
    return None


Row = tuple[tuple[int, ...], list[tuple[int, int, int, Any]]]


def build_rows(servables: Sequence[Servable]) -> list[Row]:
    """Rows for the extension's `set_table`: a key's words, and (regime, class, deterministic, kernel) for each filled slot."""
    by_words: dict[tuple[int, ...], list[Servable]] = {}
    for servable in servables:
        key = servable.record.key
        place = servable.record.target.threads if key.device_type == "cpu" else servable.place
        by_words.setdefault(spec_of(key).encode(key, place), []).append(servable)
    return [
        (words, [(regime, policy, deterministic, best.native) for regime, policy, deterministic, best in _slots(group)])
        for words, group in sorted(by_words.items())
    ]


def served_slots(servables: Sequence[Servable]) -> dict[str, str]:
    """Record id of every filled slot: what two processes must have in common to run the same kernels. The names say key, place
    and slot."""
    groups: dict[str, list[Servable]] = {}
    for servable in servables:
        key = servable.record.key
        place = servable.record.target.threads if key.device_type == "cpu" else servable.place
        groups.setdefault(f"{key.op} {key.digest[:16]} at {place}", []).append(servable)
    return {
        f"{name}, {REGIMES[regime]} {CLASSES[policy]}{' deterministic' if deterministic else ''}": best.record_id
        for name, group in sorted(groups.items())
        for regime, policy, deterministic, best in _slots(group)
    }


def _slots(group: Sequence[Servable]) -> Iterator[tuple[int, int, int, Servable]]:
    """(regime, class, deterministic, winner) of every slot that one key's records fill."""
    for regime_index, regime in enumerate(REGIMES):
        ordered = _by_bound(group, regime)
        for class_index, policy in enumerate(CLASSES):
            for deterministic in (False, True):
                best = _winner(ordered, policy, deterministic=deterministic)
                if best is not None:
                    yield regime_index, class_index, int(deterministic), best
