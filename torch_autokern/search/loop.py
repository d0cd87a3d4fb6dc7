"""`warm`: keys by their share of time; propose, build, screen, judge, store; stop and go on at any moment."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from torch_autokern.build.candidate import Candidate
from torch_autokern.errors import DeviceError, InvalidInputError, JudgeError, StoreError
from torch_autokern.judge.inputs import check_supported
from torch_autokern.judge.outcome import JUDGE_VERSION, Accuracy, as_accuracy
from torch_autokern.ops import SPECS
from torch_autokern.ops.function import is_function
from torch_autokern.runtime.table import CLASSES, refusal
from torch_autokern.runtime.target import local_target, stock_build
from torch_autokern.search import templates
from torch_autokern.search.engine import Engine, LocalEngine
from torch_autokern.search.journal import KeyJournal
from torch_autokern.search.key_search import Clock, KeySearch, Tally
from torch_autokern.search.outcome import Activity, KeyResult, Progress, WarmInterrupted, WarmReport
from torch_autokern.store.folders import FolderChoice, folder_refusal
from torch_autokern.store.key import DeviceType, KernelKey, Target, canonical_json
from torch_autokern.store.record import StoredRecord, Timing
from torch_autokern.store.store import KernelStore, open_store
from torch_autokern.store.workload import Workload, WorkloadEntry

__all__ = ["KeyResult", "Progress", "WarmInterrupted", "WarmReport", "warm"]

Proposer = Callable[[KernelKey, Target], Sequence[Candidate]]
DEFAULT_PROPOSERS: tuple[Proposer, ...] = (templates.propose,)
# Another process that holds a key is waited for as long as its journal grows in such a while (`survive.md`: never for ever).
_LOCK_PATIENCE_S = 30.0
_QUIET_PATIENCE_S = 120.0


def warm(
    workload: Workload,
    *,
    budget_seconds: float | None = None,
    store: KernelStore | Path | None = None,
    accuracy: Accuracy | str = "stock",
    on_event: Callable[[Progress], None] | None = None,
    proposers: Sequence[Proposer] = DEFAULT_PROPOSERS,
    engine: Engine | None = None,
    target: Target | None = None,
    allow_weak_box: bool = False,
) -> WarmReport:
    """Search kernels for a workload and store what is proved faster.

    Keys are worked on by falling share of time. A key that the store serves here already is left alone, and a candidate that
    was tried under the same judge, torch and compiler is not tried again, so running it again continues.

    Args:
        budget_seconds: wall time; spread over the keys by their share. None: until every candidate was tried.
        store: where records go; a folder, a store, or the user's own by default.
        accuracy: the class to prove; ``Accuracy("tolerance", atol, rtol)`` states bounds.
        on_event: called with a `Progress` after every step, in the calling thread.
        proposers: each maps (key, target) to candidates, best guess first.
        engine: where builds and judgements run; this machine by default.
        target: what to tune for; by default this machine, its GPU for GPU keys and its CPU, with the workload's thread count,
            for the others.

    Raises:
        InvalidInputError: an unknown op in the workload, or an accuracy that is none.
        StoreError: the named folder is not safe to load code from.
        ToolchainError: a key needs a compiler and there is none.
        BoxError: candidates cannot be boxed here.
        JudgeError: the judge failed twice in a row; nothing that was proved before is lost.
        DeviceError: the device does not answer any more; nothing that was proved before is lost.
        WarmInterrupted: Ctrl-C; a `KeyboardInterrupt` that carries the report.
    """
    unknown = sorted({e.key.op for e in workload.entries if not is_function(e.key.op)} - SPECS.keys())
    if unknown:
        raise InvalidInputError(f"the workload asks for unknown ops: {', '.join(unknown)}; known: {', '.join(SPECS)}")
    if not isinstance(store, KernelStore):
        store = open_store() if store is None else open_store(choice=_named_folder(store))
    search = _Search(
        workload,
        store,
        as_accuracy(accuracy),
        _targets(workload) if target is None else {target.device_type: target},
        engine or LocalEngine(allow_weak_box=allow_weak_box),
        proposers,
        on_event or (lambda progress: None),
        budget_seconds,
    )
    return search.run()


def _named_folder(folder: Path) -> FolderChoice:
    reason = folder_refusal(folder)
    if reason is not None:
        raise StoreError(f"store {folder} cannot be used: {reason}; name a folder that only you can write")
    return FolderChoice(folder.absolute(), "named by the caller")


def _targets(workload: Workload) -> dict[DeviceType, Target]:
    """This machine's target for each type of device that the workload has keys of, as far as it is here."""
    # Threads are part of the key: kernels proved with another count would not be served to the recorded program.
    fits = 0 < workload.threads <= len(os.sched_getaffinity(0))
    found: dict[DeviceType, Target] = {"cpu": local_target(threads=workload.threads if fits else None)}
    if any(entry.key.device_type == "cuda" for entry in workload.entries) and torch.cuda.is_available():
        found["cuda"] = local_target("cuda", device_index=torch.cuda.current_device())
    return found


class _Search:
    """One run over a workload."""

    def __init__(
        self,
        workload: Workload,
        store: KernelStore,
        accuracy: Accuracy,
        targets: dict[DeviceType, Target],
        engine: Engine,
        proposers: Sequence[Proposer],
        on_event: Callable[[Progress], None],
        budget_seconds: float | None,
    ) -> None:
        self.store = store
        self.accuracy = accuracy
        self.targets = targets
        self.engine = engine
        self.proposers = proposers
        self.on_event = on_event
        self.workload = workload
        self.entries = sorted(workload.entries, key=lambda entry: -entry.stock_time_us)
        self.clock = Clock(budget_seconds)
        self.tally = Tally()
        self.results: list[KeyResult] = []
        self.judge_failures = 0

    def run(self) -> WarmReport:
        try:
            for position, entry in enumerate(self.entries):
                self.results.append(self._one(entry, self.entries[position:]))
                self.say("key_done", entry, message=str(self.results[-1]))
        except KeyboardInterrupt:
            done = len(self.results)
            self.results += [self._not_tried(entry, "interrupted") for entry in self.entries[done:]]
            raise WarmInterrupted(self._report(interrupted=True)) from None
        finally:
            self.engine.close()
        self.say("finished", None)
        return self._report()

    def _report(self, *, interrupted: bool = False) -> WarmReport:
        over = any(result.reason.startswith("budget over") for result in self.results)
        seconds = self.clock.elapsed()
        return WarmReport(tuple(self.results), seconds, self.tally.finished, interrupted=interrupted, budget_over=over)

    def _one(self, entry: WorkloadEntry, rest: Sequence[WorkloadEntry]) -> KeyResult:
        key, share = entry.key, self.workload.share(entry)
        there = self._armed(key)
        if there is not None:
            return _already(key, share, there)
        if self.clock.is_over():
            return self._not_tried(entry, "budget over")
        unsupported = self._unsupported(key)
        if unsupported is not None:
            return KeyResult(key, share, "not_won", reason=unsupported)
        candidates = self._propose(key)
        if not candidates:
            return KeyResult(key, share, "not_won", reason=f"no proposer has a candidate for this {key.op} key")
        journal = KeyJournal(self.store.write_root, key.digest)
        with self._hold(entry, journal):
            there = self._armed(key)
            if there is not None:
                return _already(key, share, there)
            deadline = self.clock.allot([other.stock_time_us for other in rest])
            search = KeySearch(self, entry, candidates, journal, self._context(key), deadline)
            return search.run()

    def _unsupported(self, key: KernelKey) -> str | None:
        if key.device_type not in self.targets:
            return f"a {key.device_type} key cannot be judged here: the target is {', '.join(self.targets)}"
        return check_supported(key)

    def target_for(self, key: KernelKey) -> Target:
        return self.targets[key.device_type]

    def _not_tried(self, entry: WorkloadEntry, reason: str) -> KeyResult:
        return KeyResult(entry.key, self.workload.share(entry), "not_tried", reason=reason)

    def _propose(self, key: KernelKey) -> list[Candidate]:
        found: dict[str, Candidate] = {}
        for propose in self.proposers:
            for candidate in propose(key, self.target_for(key)):
                found.setdefault(candidate.candidate_id, candidate)
        return list(found.values())

    def _context(self, key: KernelKey) -> str:
        """What a trial's outcome holds for; anything else may end differently."""
        compiler = self.engine.toolchain(key.device_type)
        parts = (self.target_for(key), stock_build(), JUDGE_VERSION, self.accuracy, compiler)
        return hashlib.sha256(canonical_json(parts)).hexdigest()[:16]

    def _armed(self, key: KernelKey) -> StoredRecord | None:
        """A record that serves this key here, with this accuracy and thread count; the fastest of several."""
        found: list[StoredRecord] = []
        target = self.targets.get(key.device_type)
        if target is None:
            return None
        admitted = CLASSES[: CLASSES.index(self.accuracy.kind) + 1]
        for stored in self.store.records(key.digest):
            record = stored.record
            notes = self.store.notes(key.digest, stored.record_id)
            fits = record.key == key and record.target.threads == target.threads and record.verdict.timings
            if not fits or record.verdict.accuracy_class not in admitted or _is_looser(stored, self.accuracy):
                continue
            if refusal(record, notes, target, stock_build()) is None:
                found.append(stored)
        return max(found, key=lambda stored: timing_of(stored).ratio_low, default=None)

    @contextmanager
    def _hold(self, entry: WorkloadEntry, journal: KeyJournal) -> Iterator[None]:
        """Keep other processes from repeating this key's work, and wait while one is at it."""
        digest = entry.key.digest
        patience = 0.0
        while True:
            before = journal.size_bytes()
            with self.store.work_lock(digest, patience) as held:
                alone = patience > 0 and journal.size_bytes() == before
                if held or alone or self.clock.is_over() or self.store.write_root is None:
                    yield
                    return
            self.say("waiting", entry, message="another process works on this key")
            if self._armed(entry.key) is not None:
                yield
                return
            patience = _LOCK_PATIENCE_S

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """One measuring process a machine; goes on alone where the lock cannot be had."""
        name = "quiet-" + hashlib.sha256(platform.node().encode()).hexdigest()
        with self.store.work_lock(name, _QUIET_PATIENCE_S):
            yield

    def judge_failed(self, error: JudgeError) -> None:
        """Go on after one failure of the judge itself, stop at the second in a row, and at once where the device is lost."""
        self.judge_failures += 1
        if self.judge_failures > 1 or isinstance(error, DeviceError):
            raise error

    def say(self, activity: Activity, entry: WorkloadEntry | None, *, best: float = 0.0, message: str = "") -> None:
        minutes = max(self.clock.elapsed(), 1e-3) / 60
        self.on_event(
            Progress(
                activity=activity,
                key=None if entry is None else entry.key,
                share=0.0 if entry is None else self.workload.share(entry),
                keys_done=len(self.results),
                keys_total=len(self.entries),
                keys_won=sum(result.status == "won" for result in self.results),
                built=self.tally.built,
                screened=self.tally.screened,
                judged=self.tally.judged,
                refused=self.tally.refused,
                rate_per_minute=self.tally.finished / minutes,
                best_ratio=best,
                seconds_left=self.clock.left(),
                message=message,
            )
        )


def timing_of(stored: StoredRecord) -> Timing:
    """The timing that a record was accepted by."""
    return stored.record.verdict.timings[0]


def _is_looser(stored: StoredRecord, wanted: Accuracy) -> bool:
    """Whether a tolerance record proved wider bounds than are wanted now."""
    verdict = stored.record.verdict
    return verdict.accuracy_class == "tolerance" and (verdict.atol > wanted.atol or verdict.rtol > wanted.rtol)


def _already(key: KernelKey, share: float, stored: StoredRecord) -> KeyResult:
    timing = timing_of(stored)
    return KeyResult(key, share, "already_there", timing.ratio, timing.ratio_low, timing.ratio_high, stored.record_id)
