"""A record made elsewhere, proved on this machine: its evidence replayed, its speed measured anew, and a receipt for both."""

from __future__ import annotations

from typing import Literal

import msgspec

from torch_autokern.judge.outcome import Refusal
from torch_autokern.judge.stored import bench_record, cannot_run_here, verify_record
from torch_autokern.runtime.target import here_for, stock_build
from torch_autokern.store.notes import Receipt
from torch_autokern.store.record import StoredRecord
from torch_autokern.store.store import KernelStore, utc_now

# As for a verdict: the lower bound of the speed-up, over the union of the processes' intervals.
MIN_RATIO_LOW = 1.02
ProofStatus = Literal["proved", "not_faster", "broken", "not_here", "disturbed"]


class Proof(msgspec.Struct, frozen=True):
    """How proving one record here went. ``broken``: it is not right here. ``not_faster``: right, and not faster. ``not_here``:
    it cannot be replayed on this machine. ``disturbed``: the machine was too busy to time it."""

    record_id: str
    status: ProofStatus
    message: str
    receipt: Receipt | None = None


def prove_here(stored: StoredRecord, store: KernelStore, *, processes: int = 3, allow_weak_box: bool = False) -> Proof:
    """Replay a record's trials, time it against stock in fresh boxed processes, and keep a receipt where it holds and is
    faster. A record that does not hold is quarantined.

    Raises:
        JudgeError: the judge itself failed.
    """
    record, name = stored.record, stored.record_id
    here = here_for(record.target)
    reason = cannot_run_here(record, here)
    if reason is not None:
        return Proof(name, "not_here", reason)
    verification = verify_record(stored, here, allow_weak_box=allow_weak_box)
    if verification.status == "broken":
        store.quarantine(record.key.digest, name, f"its evidence does not hold here: {verification.message}")
        return Proof(name, "broken", verification.message)
    if verification.status == "not_here":
        return Proof(name, "not_here", verification.message)
    benchmark = bench_record(stored, "stock", processes=processes, allow_weak_box=allow_weak_box)
    if isinstance(benchmark, Refusal):
        store.quarantine(record.key.digest, name, f"refused while it was timed here: {benchmark.message}")
        return Proof(name, "broken", f"{benchmark.reason.value}: {benchmark.message}")
    timing = benchmark.timing
    if timing is None:
        return Proof(name, "disturbed", benchmark.disturbed)
    words = f"{timing.ratio:.2f}x ({timing.ratio_low:.2f} to {timing.ratio_high:.2f})"
    if timing.ratio_low <= MIN_RATIO_LOW:
        return Proof(name, "not_faster", f"right, but {words} here; {MIN_RATIO_LOW} is needed")
    receipt = Receipt(name, here, stock_build(), timing.ratio_low, utc_now())
    unwritten = store.add_note(record.key.digest, receipt)
    return Proof(
        name, "proved", f"{verification.message}; {words}{f'; kept in memory: {unwritten}' if unwritten else ''}", receipt
    )
