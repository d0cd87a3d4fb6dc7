"""What happened in this process: `autokern.stats()`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from torch_autokern.ops import SPECS
from torch_autokern.ops.spec import op_index
from torch_autokern.report.cures import WARM, cheapest_cure
from torch_autokern.report.explanation import summarise_key
from torch_autokern.runtime.extension import extension_state
from torch_autokern.runtime.session import Session
from torch_autokern.runtime.table import Regime
from torch_autokern.store.key import KernelKey
from torch_autokern.store.workload import Workload

MAX_MISSED_KEYS = 50


class OpStats(msgspec.Struct, frozen=True):
    """Calls of one op family inside optimised scopes; `misses` counts by reason. `why` is the commonest miss in words and
    `cure` the cheapest thing that would turn its most frequent key into a hit ("" without misses). `recorded_share` is the
    family's part of the time in the latest `record()` or `explain()` of this process, None before one: calls are not timed."""

    op: str
    calls: int
    hits: int
    misses: dict[str, int]
    why: str
    cure: str
    recorded_share: float | None


class KernelStats(msgspec.Struct, frozen=True):
    """One kernel in use. `saved_us`: hits times (stock's time - its own), both as the judge measured them, with dispatch."""

    record_id: str
    call: str
    hits: int
    ratio: float
    saved_us: float


class MissedKey(msgspec.Struct, frozen=True):
    """One key that was looked up and not served."""

    call: str
    reason: str
    calls: int


class PoolStats(msgspec.Struct, frozen=True):
    """The output pool: `kept_bytes` idle now, `reused` allocations that found warm pages, `fresh` that did not."""

    limit_bytes: int
    kept_bytes: int
    reused: int
    fresh: int


class Stats(msgspec.Struct, frozen=True):
    """`time_saved_us` is the kernels' saving less `lookup_cost_us` for every miss. `unavailable` says why nothing can be
    served, or is empty. `unwatched` op families have no kernel here: their calls go to stock, uncounted (`record()` and
    strict mode see every call)."""

    unavailable: str
    unwatched: tuple[str, ...]
    table_generation: int
    ops: tuple[OpStats, ...]
    kernels: tuple[KernelStats, ...]
    missed: tuple[MissedKey, ...]
    lookup_cost_us: float
    time_saved_us: float
    pool: PoolStats

    def __str__(self) -> str:
        lines = [f"nothing is served: {self.unavailable}"] if self.unavailable else []
        for op in self.ops:
            share = "" if op.recorded_share is None else f", {op.recorded_share:.1%} of the recorded time"
            lines.append(f"{op.op}: {op.hits} of {op.calls} calls served{share}")
            if op.why:
                lines += [f"    missed: {op.why}", f"    cheapest cure: {op.cure}"]
        if self.unwatched:
            lines.append(f"never reached us, as the store holds no kernel for them here: {', '.join(self.unwatched)}")
        lines.append(f"time saved: {self.time_saved_us / 1e6:.3g} s, net of {self.lookup_cost_us:.2g} us a miss")
        lines.append("work inside fused ops is not seen here: print(torch_autokern.explain(model, batch))")
        return "\n".join(lines)


_WORDS = {
    "subclass": "tensors that are not plain",
    "layout": "tensors that are not strided",
    "dtype": "a dtype or number that keys do not express",
    "rank": "more dimensions than a key holds",
    "empty": "empty tensors, which ATen handles",
    "device": "tensors on several devices",
    "out_layout": "an `out` of another layout than the record proved",
    "out_overlap": "an `out` that overlaps an input",
    "flag_unreadable": "a precision flag that cannot be read",
    "no_record": "no verified kernel for these keys",
    "accuracy": "kernels of a weaker class than the policy admits",
    "determinism": "kernels less deterministic than torch.use_deterministic_algorithms asks",
    "regime": "kernels that were not timed in the calls' regime (eager, or the `out` form of compiled graphs)",
    "quarantined": "kernels set aside after a fault",
    "out_of_memory": "no memory for outputs or workspace",
    "reentrant": "calls from inside another kernel",
    "launch_failed": "launches that the driver refused",
}
# Gates: such calls are never ours, and nothing in the store can change that.
_GATE_CURES = {
    "subclass": "unwrap them before the call, where the program may",
    "layout": "convert them to strided tensors, where the program may",
    "dtype": "use real numbers of 64 bits and less",
    "rank": "fold dimensions, at most 8 are seen",
    "empty": "nothing: there is nothing to compute",
    "device": "bring the tensors to one device",
    "out_layout": "give an `out` laid out as the functional form's result, or none",
    "out_overlap": "give an `out` of its own memory, or none",
    "flag_unreadable": "set one of PyTorch's precision settings, not both kinds",
    "out_of_memory": "torch_autokern.empty_cache(), or a smaller AUTOKERN_POOL_MB",
    "reentrant": "nothing: the outer call is served",
    "launch_failed": "run: autokern doctor",
}


@functools.cache
def lookup_cost_us() -> float:
    """What reading a key and looking it up costs on this machine, measured once."""
    native = extension_state().module
    return native.measure_lookup_seconds(torch.zeros(8, 8)) * 1e6 if native else 0.0


def collect(session: Session, recorded: Workload | None = None) -> Stats:
    """Counters of all threads, summed, with the kernels and the keys behind them. `recorded`: what shares of time come from."""
    native = extension_state().module
    if native is None:
        return Stats(session.unavailable or "", tuple(SPECS), 0, (), (), (), 0.0, 0.0, PoolStats(0, 0, 0, 0))
    ops = _ops(session, native, recorded)
    kernels = _kernels(session)
    cost = lookup_cost_us()
    missed_calls = sum(sum(op.misses.values()) for op in ops)
    return Stats(
        unavailable=session.unavailable or "",
        unwatched=session.unwatched(),
        table_generation=native.table_generation(),
        ops=ops,
        kernels=kernels,
        missed=_missed(native),
        lookup_cost_us=cost,
        time_saved_us=sum(kernel.saved_us for kernel in kernels) - missed_calls * cost,
        pool=PoolStats(*native.pool_stats()),
    )


def _ops(session: Session, native: Any, recorded: Workload | None) -> tuple[OpStats, ...]:
    missed: dict[str, list[tuple[KernelKey, str, int, int]]] = {}
    specs = {spec.index: spec for spec in SPECS.values()}
    for words, reason, calls in native.missed_keys():
        spec = specs[op_index(words)]
        missed.setdefault(spec.name, []).append((spec.decode(words, ()), reason, calls, words[0] >> 32))
    ops = []
    for spec, counts in zip(SPECS.values(), native.counts(), strict=True):
        misses = {name: count for name, count in zip(native.reason_names[1:], counts[1:], strict=True) if count}
        if not sum(counts):
            continue
        common = max(misses, key=lambda name: misses[name], default="")
        why = f"{_WORDS[common]} ({misses[common]} calls)" if common else ""
        cure = _cure(common, missed.get(spec.name, []), session) if common else ""
        ops.append(OpStats(spec.name, sum(counts), counts[0], misses, why, cure, _share(spec.name, recorded)))
    return tuple(ops)


def _cure(reason: str, missed: Sequence[tuple[KernelKey, str, int, int]], session: Session) -> str:
    """For the most frequent key that was missed so, by what the store holds; a gate has a cure of its own."""
    if reason in _GATE_CURES:
        return _GATE_CURES[reason]
    keys = [row for row in missed if row[1] == reason]
    if not keys:  # the list of missed keys is bounded
        return WARM
    key, _, _, place = max(keys, key=lambda row: row[2])
    regime: Regime = "compiled" if reason == "regime" else "eager"
    threads = place if key.device_type == "cpu" else None
    return cheapest_cure(key, session, session.store.records(), regime=regime, threads=threads)


def _share(op: str, recorded: Workload | None) -> float | None:
    return None if recorded is None else sum(recorded.share(entry) for entry in recorded.entries if entry.key.op == op)


def _kernels(session: Session) -> tuple[KernelStats, ...]:
    rows = []
    for servable in list(session.loaded.values()):  # a refresh may be adding to it
        timings = servable.record.verdict.timings
        timing = next((t for t in timings if t.regime == "eager"), timings[0] if timings else None)
        hits = servable.native.hits
        if hits and timing is not None:
            saved = hits * (timing.stock_us - timing.candidate_us)
            rows.append(KernelStats(servable.record_id, summarise_key(servable.record.key), hits, timing.ratio, saved))
    return tuple(sorted(rows, key=lambda row: -row.saved_us))


def _missed(native: object) -> tuple[MissedKey, ...]:
    specs = {spec.index: spec for spec in SPECS.values()}
    rows = [
        MissedKey(summarise_key(specs[op_index(words)].decode(words, ())), reason, calls)
        for words, reason, calls in native.missed_keys()  # type: ignore[attr-defined]
    ]
    return tuple(sorted(rows, key=lambda row: (-row.calls, row.call))[:MAX_MISSED_KEYS])
