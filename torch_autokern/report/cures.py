"""The cheapest thing that would turn a miss into a hit, by what the store holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from torch_autokern.report.grouping import differing_length
from torch_autokern.runtime.session import Session, pool_limit_bytes
from torch_autokern.runtime.table import CLASSES, Regime, ratio_low, refusal, slower_in_fresh_pages
from torch_autokern.runtime.target import local_target, stock_build
from torch_autokern.store.key import KernelKey, TensorKey
from torch_autokern.store.record import AccuracyClass, StoredRecord

WARM = "autokern record -- python your_script.py, then autokern warm WORKLOAD"


class Effort(IntEnum):
    """What a cure asks of a person, cheapest first."""

    SWITCH = 1  # a flag or an argument, nothing is computed anew
    THREADS = 2
    RESTART = 3  # an environment variable, or a refresh
    PADDING = 4  # another length, where the program allows
    COPY = 5  # a copy to other strides: may cost more than it gains
    WARM = 6


@dataclass(frozen=True)
class Cure:
    """What to do, and what it asks for."""

    effort: Effort
    text: str


def cheapest_cure(
    key: KernelKey,
    current: Session,
    records: Iterable[StoredRecord],
    *,
    policy: AccuracyClass = "stock",
    regime: Regime = "eager",
    threads: int | None = None,
) -> str:
    """What to do about a key that is not served, in words: the least effort among all records that one change would admit.

    `threads`: intra-op threads of the calls (None: this process's).
    """
    if current.unavailable:
        return "unset AUTOKERN_DISABLE" if "AUTOKERN_DISABLE" in current.unavailable else "run: autokern doctor"
    threads = torch.get_num_threads() if threads is None else threads
    found = [Cure(Effort.WARM, WARM)]
    for stored in records:
        if (stored.record.key.op, stored.record.key.device_type) != (key.op, key.device_type):
            continue
        obstacles = list(_obstacles(key, stored, current, policy, regime, threads))
        if len(obstacles) == 1:  # a record that needs several changes is a gamble: proving this key is not
            found.append(obstacles[0])
    return min(found, key=lambda cure: (cure.effort, cure.text == WARM, cure.text)).text  # what names its reason goes first


def _obstacles(
    key: KernelKey, stored: StoredRecord, current: Session, policy: AccuracyClass, regime: Regime, threads: int
) -> Iterator[Cure]:
    """Everything that keeps a record from serving a key, each as what would remove it."""
    record = stored.record
    notes = current.store.notes(record.key.digest, stored.record_id)
    if notes.quarantine is not None:
        yield Cure(Effort.WARM, f"see autokern cache show {stored.record_id[:12]}, then: {WARM}")
    elif notes.approval is None and notes.approval_wanted:
        yield Cure(Effort.RESTART, f"approve it: autokern review {stored.record_id[:12]}")
    elif refusal(record, notes, local_target(key.device_type), stock_build()) is not None:
        yield Cure(Effort.WARM, f"prove it here: {WARM}")
    elif slower_in_fresh_pages(record, pool_limit_bytes()) is not None:
        outputs_mb = sum(t.numel for t in record.key.outputs if t is not None) * 8 >> 20
        yield Cure(Effort.RESTART, f"give the output pool room: AUTOKERN_POOL_MB={outputs_mb + 1} or more")
    elif stored.record_id not in current.loaded:
        yield Cure(Effort.RESTART, "torch_autokern.refresh()")
    yield from _differences(key, record.key)
    if record.target.device_type == "cpu" and record.target.threads != threads:
        yield Cure(Effort.THREADS, f"torch.set_num_threads({record.target.threads}), or warm with {threads}")
    verdict = record.verdict
    if ratio_low(record, regime) is None:
        yield Cure(Effort.WARM, f"it was not timed in the {regime} regime: {WARM}")
    if CLASSES.index(verdict.accuracy_class) > CLASSES.index(policy):
        yield Cure(Effort.SWITCH, f'admit the class that was proved: optimize(model, accuracy="{verdict.accuracy_class}")')
    if torch.are_deterministic_algorithms_enabled() and verdict.determinism == "not_guaranteed":
        yield Cure(Effort.SWITCH, "torch.use_deterministic_algorithms(False), if the program may")


def _differences(key: KernelKey, proved: KernelKey) -> Iterator[Cure]:
    if key.mkldnn != proved.mkldnn:
        yield Cure(Effort.SWITCH, f"torch.backends.mkldnn.enabled = {proved.mkldnn}, as it was when the record was proved")
    if key.flush_denormal != proved.flush_denormal:
        yield Cure(Effort.SWITCH, f"torch.set_flush_denormal({proved.flush_denormal}), as it was when the record was proved")
    if key.matmul_precision != proved.matmul_precision:
        wanted = "highest" if proved.matmul_precision == "ieee" else f"the setting that gives {proved.matmul_precision}"
        yield Cure(Effort.SWITCH, f"torch.set_float32_matmul_precision: {wanted}, if the program may")
    if _plain(key) == _plain(proved):
        return
    length = differing_length(key, proved)
    if length is not None and length[0] < length[1] and _same_flags(key, proved):
        yield Cure(Effort.PADDING, f"pad from {length[0]} to {length[1]} where the program allows, or: {WARM}")
    elif _only_strides_differ(key.tensors, proved.tensors) and key.scalars == proved.scalars:
        yield Cure(Effort.COPY, f"the record wants other strides (.contiguous() makes a copy); better: {WARM}")
    else:
        yield Cure(Effort.WARM, WARM)


def _plain(key: KernelKey) -> object:
    return key.tensors, tuple(sorted(key.scalars.items(), key=lambda item: item[0]))


def _same_flags(one: KernelKey, other: KernelKey) -> bool:
    names = ("mkldnn", "flush_denormal", "matmul_precision")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _only_strides_differ(one: Sequence[TensorKey | None], other: Sequence[TensorKey | None]) -> bool:
    def without_strides(tensors: Sequence[TensorKey | None]) -> list[object]:
        return [None if t is None else (t.dtype, t.sizes) for t in tensors]

    return without_strides(one) == without_strides(other)
