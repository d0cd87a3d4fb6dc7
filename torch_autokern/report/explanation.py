"""Which kernel serves a call, or why none does: `autokern.explain(...)` and `autokern explain`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec
import torch

from torch_autokern.ops import SPECS
from torch_autokern.ops.function import is_same_op
from torch_autokern.report.cures import cheapest_cure
from torch_autokern.report.hidden import Event, HiddenWork, hidden_work, place_of
from torch_autokern.runtime.extension import extension_state
from torch_autokern.runtime.session import Session, pool_limit_bytes, session
from torch_autokern.runtime.table import (
    Regime,
    Servable,
    key_difference,
    ratio_low,
    refusal,
    slower_in_fresh_pages,
    winner,
)
from torch_autokern.runtime.target import local_target, stock_build
from torch_autokern.store.key import KernelKey, TensorKey
from torch_autokern.store.record import AccuracyClass, StoredRecord
from torch_autokern.store.workload import Workload, WorkloadEntry

MAX_REFUSALS = 5
MAX_UNTOUCHED = 20


class Refusal(msgspec.Struct, frozen=True):
    """A record that was considered, and the first condition that it fails."""

    record_id: str
    why: str


class KeyExplanation(msgspec.Struct, frozen=True):
    """One key. `record_id` serves it ("" when none does), `ratio` as the judge measured it; `reason` is the miss in words and
    `cure` the cheapest thing that would turn it into a hit."""

    call: str
    calls: int
    time_us: float
    share: float
    record_id: str
    ratio: float
    reason: str
    cure: str
    refusals: tuple[Refusal, ...]


class FamilyExplanation(msgspec.Struct, frozen=True):
    """One op family: calls served and missed with their shares of the time; `why` and `cure` are those of its most expensive
    missed key ("" when none was missed)."""

    op: str
    served: int
    missed: int
    served_share: float
    missed_share: float
    why: str
    cure: str


class UntouchedOp(msgspec.Struct, frozen=True):
    """An op that ran and is not ours, with its own time (children excluded) and its share of the whole."""

    op: str
    calls: int
    time_us: float
    share: float
    why: str


class Explanation(msgspec.Struct, frozen=True):
    """One call of a model or function, taken apart. Shares are of `wall_time_us`. `families` sums up `keys`; `hidden` is work
    of our op families that never reached us; `untouched` are the most expensive ops that are not ours."""

    wall_time_us: float
    families: tuple[FamilyExplanation, ...]
    keys: tuple[KeyExplanation, ...]
    hidden: tuple[HiddenWork, ...]
    untouched: tuple[UntouchedOp, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.wall_time_us / 1e3:.3g} ms"]
        for row in self.families:
            lines.append(
                f"{row.op}: {row.served} calls served ({row.served_share:.1%}), {row.missed} missed ({row.missed_share:.1%})"
            )
            if row.missed:
                lines += [f"    missed: {row.why}", f"    cheapest cure: {row.cure}"]
        for place in self.hidden:
            lines.append(f"{', '.join(place.families)}, never reached us: {place.why} ({place.calls} calls, {place.share:.1%})")
            lines.append(f"    cheapest cure: {place.cure}")
        others = sum(op.share for op in self.untouched if not place_of(op.op))
        return "\n".join([*lines, f"other ops: {others:.1%}", *(f"note: {note}" for note in self.notes)])


def summarise_key(key: KernelKey) -> str:
    """A key in a line: "native_layer_norm f32[32, 38, 384] normalized_shape=(384,)"."""
    tensors = ", ".join(_summarise_tensor(tensor) for tensor in key.tensors if tensor is not None)
    shown = {"dim", "normalized_shape", "beta", "alpha", "output_mask"}
    scalars = " ".join(f"{name}={value}" for name, value in key.scalars.items() if name in shown)
    return f"{key.op} {tensors} {scalars}".strip()


def _summarise_tensor(tensor: TensorKey) -> str:
    dense = []
    step = 1
    for size in reversed(tensor.sizes):
        dense.append(step)
        step *= size
    strides = "" if tensor.strides == tuple(reversed(dense)) else f" strides {list(tensor.strides)}"
    return f"{tensor.dtype}{list(tensor.sizes)}{strides}"


def explain_key(
    key: KernelKey,
    current: Session,
    *,
    policy: AccuracyClass = "stock",
    regime: Regime = "eager",
    threads: int | None = None,
    records: Sequence[StoredRecord] | None = None,
) -> tuple[Servable | None, tuple[Refusal, ...]]:
    """The loaded kernel that serves a key under a policy, and for each other record of the op the first condition it fails."""
    threads = torch.get_num_threads() if threads is None else threads
    if key.device_type == "cuda" and not torch.cuda.is_available():
        return None, ()
    target, build = local_target(key.device_type), stock_build()
    fitting: list[Servable] = []
    refusals: list[Refusal] = []
    for stored in current.store.records() if records is None else records:
        record = stored.record
        if not is_same_op(record.key.op, key.op):
            continue
        why = key_difference(key, record, threads)
        if why is None:
            why = refusal(record, current.store.notes(record.key.digest, stored.record_id), target, build)
            why = why or slower_in_fresh_pages(record, pool_limit_bytes())
        if why is None and stored.record_id not in current.loaded:
            held_back = current.held_back.get(stored.record_id, "not loaded yet: call torch_autokern.refresh()")
            why = current.load_failures.get(stored.record_id, held_back)
        if why is None and ratio_low(record, regime) is None:
            why = f"not measured in the {regime} regime"
        if why is None:
            fitting.append(current.loaded[stored.record_id])
        else:
            refusals.append(Refusal(stored.record_id, why))
    best = winner(fitting, regime, policy, deterministic=torch.are_deterministic_algorithms_enabled())
    for servable in fitting:
        if best is None:
            refusals.append(Refusal(servable.record_id, f"its class {servable.record.verdict.accuracy_class} is not admitted"))
    return best, tuple(refusals)


class Recorded(Protocol):
    """What a recording gives back."""

    def workload(self) -> Workload: ...


def explain_call(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    record: Callable[[], AbstractContextManager[Recorded]],
    accuracy: AccuracyClass | None,
) -> Explanation:
    """Run `target` once under the recorder and the profiler, and explain what was seen. `accuracy` is the policy that it was
    optimised with; None: it was not, and the default policy is explained."""
    with record() as recording, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        target(*args, **kwargs)
    workload = recording.workload()
    events = [(e.key, e.count, e.self_cpu_time_total) for e in profile.key_averages()]
    wall = sum(time for _, _, time in events) or 1.0
    current = session()
    current.refresh()
    records = list(current.store.records())
    keys = []
    for entry in workload.entries:
        regime: Regime = "compiled" if entry.out_calls == entry.calls else "eager"
        policy = accuracy or "stock"
        best, refusals = explain_key(entry.key, current, policy=policy, regime=regime, records=records)
        cure = "" if best else cheapest_cure(entry.key, current, records, policy=policy, regime=regime)
        keys.append(_key_row(entry, wall, best, _ratio(best, regime), refusals, current, cure))
    families = _families([entry.key.op for entry in workload.entries], keys)
    notes = _notes(target, accuracy is not None, current)
    return Explanation(wall, families, tuple(keys), hidden_work(events, wall), _untouched(events, wall), notes)


def _families(ops: Sequence[str], keys: Sequence[KeyExplanation]) -> tuple[FamilyExplanation, ...]:
    """A row an op family, by falling share; `ops` are the families of `keys`."""
    rows = []
    for op in dict.fromkeys(ops):
        mine = [key for name, key in zip(ops, keys, strict=True) if name == op]
        served, missed = ([key for key in mine if bool(key.record_id) is wanted] for wanted in (True, False))
        worst = max(missed, key=lambda key: key.time_us, default=None)
        rows.append(
            FamilyExplanation(
                op,
                sum(key.calls for key in served),
                sum(key.calls for key in missed),
                sum(key.share for key in served),
                sum(key.share for key in missed),
                worst.reason if worst else "",
                worst.cure if worst else "",
            )
        )
    return tuple(sorted(rows, key=lambda row: -(row.served_share + row.missed_share)))


def _ratio(best: Servable | None, regime: Regime) -> float:
    timings = best.record.verdict.timings if best is not None else ()
    return next((timing.ratio for timing in timings if timing.regime == regime), 0.0)


def _key_row(
    entry: WorkloadEntry,
    wall_us: float,
    best: Servable | None,
    ratio: float,
    refusals: tuple[Refusal, ...],
    current: Session,
    cure: str,
) -> KeyExplanation:
    record_id, reason = "", ""
    if best is not None:
        record_id = best.record_id
    else:
        reason = current.unavailable or (refusals[0].why if refusals else "no record of this op in the store")
    time_us = entry.stock_time_us
    call, shown = summarise_key(entry.key), refusals[:MAX_REFUSALS]
    return KeyExplanation(call, entry.calls, time_us, time_us / wall_us, record_id, ratio, reason, cure, shown)


def _untouched(events: Sequence[Event], wall_us: float) -> tuple[UntouchedOp, ...]:
    ours = {f"aten::{name}" for name in SPECS}
    rows = [
        UntouchedOp(name, count, time, time / wall_us, place_of(name) or "not an op of ours")
        for name, count, time in events
        if name not in ours and time > 0
    ]
    return tuple(sorted(rows, key=lambda row: -row.time_us)[:MAX_UNTOUCHED])


def _notes(target: object, is_optimised: bool, current: Session) -> tuple[str, ...]:
    notes = []
    if current.unavailable:
        notes.append(f"nothing is served: {current.unavailable}")
    native = extension_state().module
    process_wide = native is not None and native.process_policy_active()
    if isinstance(target, torch.nn.Module):
        if not is_optimised and not process_wide:
            notes.append("this model is not optimised (a copy of an optimised model is stock): call optimize(model)")
        if isinstance(target, torch.nn.DataParallel):
            notes.append("DataParallel replicates the wrapped module; optimise the module inside it")
        if hasattr(target, "_orig_mod"):
            notes.append("a compiled wrapper calls the model from outside its scope: optimise the wrapper, or call enable()")
    elif not is_optimised and not process_wide:
        notes.append("a function is served inside enabled(), after enable(), or when wrapped by optimize()")
    return tuple(notes)
