"""What happened in this process: `autokern.stats()`."""

from __future__ import annotations

import functools

import msgspec
import torch

from torch_autokern.ops import SPECS, spec_for_words
from torch_autokern.report.explanation import summarise_key
from torch_autokern.runtime.extension import extension_state
from torch_autokern.runtime.session import Session

MAX_MISSED_KEYS = 50


class OpStats(msgspec.Struct, frozen=True):
    """Calls of one op family inside optimised scopes; `misses` counts by reason."""

    op: str
    calls: int
    hits: int
    misses: dict[str, int]


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


@functools.cache
def lookup_cost_us() -> float:
    """What reading a key and looking it up costs on this machine, measured once."""
    native = extension_state().module
    return native.measure_lookup_seconds(torch.zeros(8, 8)) * 1e6 if native else 0.0


def collect(session: Session) -> Stats:
    """Counters of all threads, summed, with the kernels and the keys behind them."""
    native = extension_state().module
    if native is None:
        return Stats(session.unavailable or "", tuple(SPECS), 0, (), (), (), 0.0, 0.0, PoolStats(0, 0, 0, 0))
    names = native.reason_names
    ops = []
    for name, counts in zip((*SPECS, "function"), native.counts(), strict=True):
        misses = {name: count for name, count in zip(names[1:], counts[1:], strict=True) if count}
        if sum(counts):
            ops.append(OpStats(name, sum(counts), counts[0], misses))
    kernels = _kernels(session)
    cost = lookup_cost_us()
    missed_calls = sum(sum(op.misses.values()) for op in ops)
    return Stats(
        unavailable=session.unavailable or "",
        unwatched=session.unwatched(),
        table_generation=native.table_generation(),
        ops=tuple(ops),
        kernels=kernels,
        missed=_missed(native),
        lookup_cost_us=cost,
        time_saved_us=sum(kernel.saved_us for kernel in kernels) - missed_calls * cost,
        pool=PoolStats(*native.pool_stats()),
    )


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
    rows = [
        MissedKey(summarise_key(spec_for_words(words).decode(words, ())), reason, calls)
        for words, reason, calls in native.missed_keys()  # type: ignore[attr-defined]
    ]
    return tuple(sorted(rows, key=lambda row: (-row.calls, row.call))[:MAX_MISSED_KEYS])
