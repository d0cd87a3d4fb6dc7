"""The search: whichever key promises most gets the next round, until goals are met or a budget is used up.

`warm` is a search of one round whose proposers are the templates and the bank, with nothing but the store to remember it by.
`search` has a run folder, more rounds and more proposers. Both are `_Search`.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from torch_autokern.errors import DeviceError, InvalidInputError, JudgeError, StoreError
from torch_autokern.judge.inputs import check_supported
from torch_autokern.judge.outcome import JUDGE_VERSION, Accuracy, as_accuracy
from torch_autokern.ops import SPECS
from torch_autokern.ops.function import is_function
from torch_autokern.runtime.target import local_target, stock_build
from torch_autokern.search.armed import armed
from torch_autokern.search.bank import Bank
from torch_autokern.search.budget import BudgetOver, Clock, Meter, allot
from torch_autokern.search.effect import effects
from torch_autokern.search.engine import Engine, LocalEngine
from torch_autokern.search.gate import Gate
from torch_autokern.search.journal import KeyJournal
from torch_autokern.search.key_search import Tally
from torch_autokern.search.key_state import KeyState
from torch_autokern.search.limits import effective
from torch_autokern.search.manifest import SCHEMA, Ask, Ceiling, Limits, Manifest
from torch_autokern.search.nodes import Measured, Stop, StopReason
from torch_autokern.search.outcome import Activity, KeyResult, Progress, SearchReport, WarmInterrupted, WarmReport
from torch_autokern.search.people import People
from torch_autokern.search.proposers import Function, FunctionProposer, Proposer, built_in
from torch_autokern.search.rounds import KeyRounds
from torch_autokern.search.run import EndOfJournal, Run
from torch_autokern.store.folders import FolderChoice, folder_refusal
from torch_autokern.store.key import DeviceType, KernelKey, Target, canonical_json
from torch_autokern.store.record import StoredRecord
from torch_autokern.store.store import KernelStore, open_store, utc_now
from torch_autokern.store.workload import Workload, WorkloadEntry

__all__ = ["KeyResult", "Progress", "SearchReport", "WarmInterrupted", "WarmReport", "play", "warm"]

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
    proposers: Sequence[Function] | None = None,
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
        proposers: each maps (key, target) to candidates, best guess first; by default the templates, then the bank.
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
    check_known(workload)
    if not isinstance(store, KernelStore):
        store = open_store() if store is None else open_store(choice=_named_folder(store))
    targets = targets_of(workload) if target is None else {target.device_type: target}
    ask = Ask(limits=Limits(seconds=budget_seconds))
    run = Run(None, make_manifest(ask, workload, as_accuracy(accuracy), targets))
    named = None if proposers is None else [FunctionProposer(f"p{n}", function) for n, function in enumerate(proposers)]
    search = _Search(
        run, ask, store, engine or LocalEngine(allow_weak_box=allow_weak_box), named or [built_in(), Bank(store)], on_event
    )
    return search.go()


def play(
    run: Run, ask: Ask, store: KernelStore, engine: Engine, proposers: Sequence[Proposer], meter: Meter | None = None,
    on_event: Callable[[Progress], None] | None = None, clock: Clock | None = None,
) -> SearchReport:  # fmt: skip
    """Start a run, go on with it, or replay it: all the same (`run.py`).

    Raises:
        RunError: the run's folder takes no more.
        ModelError: a model's server refuses to serve.
        WarmInterrupted: Ctrl-C.
        The errors of `warm`.
    """
    check_known(run.manifest.workload)
    search = _Search(run, ask, store, engine, [People(run), *proposers], on_event, meter, clock, searching=True)
    report = search.go()
    spent = search.meter.spent()
    return SearchReport(
        report, search.stopped.reason, search.stopped.message, msgspec.to_builtins(spent), str(run.folder or ""),
        tuple(effects(run)),
    )  # fmt: skip


def check_known(workload: Workload) -> None:
    """Refuse keys of ops that nobody knows.

    Raises:
        InvalidInputError: names them.
    """
    unknown = sorted({entry.key.op for entry in workload.entries if not is_function(entry.key.op)} - SPECS.keys())
    if unknown:
        raise InvalidInputError(f"the workload asks for unknown ops: {', '.join(unknown)}; known: {', '.join(SPECS)}")


def make_manifest(ask: Ask, workload: Workload, accuracy: Accuracy, targets: dict[DeviceType, Target]) -> Manifest:
    """The head of a new run on this machine."""
    from torch_autokern import __version__

    return Manifest(
        SCHEMA,
        __version__,
        utc_now(),
        ask,
        accuracy,
        workload,
        {str(kind): found for kind, found in targets.items()},
        stock_build(),
    )


def _named_folder(folder: Path) -> FolderChoice:
    reason = folder_refusal(folder)
    if reason is not None:
        raise StoreError(f"store {folder} cannot be used: {reason}; name a folder that only you can write")
    return FolderChoice(folder.absolute(), "named by the caller")


def targets_of(workload: Workload) -> dict[DeviceType, Target]:
    """This machine's target for each type of device that the workload has keys of, as far as it is here."""
    # Threads are part of the key: kernels proved with another count would not be served to the recorded program.
    fits = 0 < workload.threads <= len(os.sched_getaffinity(0))
    found: dict[DeviceType, Target] = {"cpu": local_target(threads=workload.threads if fits else None)}
    if any(entry.key.device_type == "cuda" for entry in workload.entries) and torch.cuda.is_available():
        found["cuda"] = local_target("cuda", device_index=torch.cuda.current_device())
    return found


class _Search:
    """One run over a workload. `searching`: it has a story of its own (a folder, ceilings), and a record that is there already
    is something to beat."""

    def __init__(
        self, run: Run, ask: Ask, store: KernelStore, engine: Engine, proposers: Sequence[Proposer],
        on_event: Callable[[Progress], None] | None, meter: Meter | None = None,
        clock: Clock | None = None, *, searching: bool = False,
    ) -> None:  # fmt: skip
        self.run = run
        self.ask = ask
        self.store = store
        self.accuracy = run.manifest.accuracy
        self.targets = run.manifest.targets
        self.engine = engine
        self.proposers = proposers
        self.on_event = on_event or (lambda progress: None)
        self.workload = run.manifest.workload
        self.meter = meter or Meter(run, ask.limits, ask.prices)
        self.searching = searching
        entries = sorted(self.workload.entries, key=lambda entry: -entry.stock_time_us)
        self.keys = [KeyState(place, entry) for place, entry in enumerate(entries)]
        self.clock = clock or Clock(None if run.replaying else ask.limits.seconds, run.elapsed())
        self.gate = Gate(run, self.clock, lambda activity, message: self.say(activity, None, message=message))
        self.tally = Tally()
        self.results: list[KeyResult] = []
        self.judge_failures = 0
        self.gave_up = False
        self.stopped = Stop("stop", 0.0, "rounds", "every round was played")

    def go(self) -> WarmReport:
        """Play rounds until there is nothing left to do, or nothing left to spend."""
        interrupted = False
        try:
            while (state := self._next()) is not None:
                self._turn(state)
            reason: StopReason = "goal" if all(self._is_good(state) for state in self.keys) else "rounds"
            self._stop("stuck" if self.gave_up else reason, "nothing is left to do")
        except BudgetOver as over:
            self._stop(over.reason, over.message)
        except EndOfJournal:
            ends = self.run.every(Stop)
            self.stopped = ends[-1] if ends else Stop("stop", 0.0, "asked", "the journal ends here")
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self.engine.close()
        for state in self.keys:
            if state.closed is None:
                self._close(state, self._so_far(state, "interrupted" if interrupted else "budget over"))
        if interrupted:
            raise WarmInterrupted(self._report(interrupted=True)) from None
        self.say("finished", None)
        return self._report()

    def _next(self) -> KeyState | None:
        """The open key with the largest share of time x headroom; before its first round a key is all headroom. What the
        journal has is played in the journal's order, and keys that wait for a person let the others go first."""
        self.gate.wait_while_paused()
        if self.gate.take_limits():
            self.retune()
            for state in self.keys:
                if state.rounds is not None and state.closed is None and self._is_enough(state):
                    self._close(state, state.rounds.result())
        waiting = [state for state in self.keys if state.closed is None]
        begun = [(place, state) for state in waiting if (place := self.run.begun(state.next_round)) is not None]
        if begun:
            return min(begun, key=lambda item: item[0])[1]
        asking = {state.place: state.question for state in waiting if self._asks(state)}
        if asking and len(asking) == len(waiting):
            self.gate.wait_for_answer(asking, self.ask.answer_seconds)
            return self._next()
        ready = [state for state in waiting if state.place not in asking]
        return max(ready, key=lambda state: (self._promise(state), -state.place), default=None)

    def _asks(self, state: KeyState) -> bool:
        """Whether a key is stuck and waits for a person's word."""
        return self.ask.stuck == "ask" and state.is_stuck(self.run) and not self.gate.is_answered_now(state.place)

    def retune(self) -> None:
        """See `rounds.Parent`."""
        self.ask = effective(self.run)
        if not self.run.replaying:
            self.meter.limits = self.ask.limits
            self.clock.budget_seconds = self.ask.limits.seconds

    def _promise(self, state: KeyState) -> float:
        headroom = 1.0
        if state.rounds is not None and self.searching:
            headroom = max(0.0, 1.0 - state.rounds.limit_share(self._ceiling_of(state)))
        return max(state.entry.stock_time_us, 1e-9) * headroom

    def _turn(self, state: KeyState) -> None:
        """One round of one key."""
        if state.rounds is None and not self._open(state):
            return
        rounds = state.rounds
        assert rounds is not None
        try:
            fresh = rounds.play(self._ceiling_of(state))
        except BudgetOver:
            if not self.searching:
                self._close(state, rounds.result())
            raise
        if self.run.begun(state.next_round) is not None:
            pass  # it was gone on with, whatever is asked for by now
        elif rounds.found_elsewhere is not None:
            self._close(state, _already(state.entry.key, self.workload.share(state.entry), rounds.found_elsewhere))
        elif not rounds.tried:
            words = "no proposer has a candidate for this" if not rounds.dropped else "every candidate was dropped for this"
            if rounds.rounds >= self.ask.rounds or not self.searching or not fresh:
                self._close(state, self._lost(state, f"{words} {state.entry.key.op} key"))
        elif self._is_enough(state) or (not fresh and self.ask.stuck != "ask"):
            self._close(state, rounds.result())
        elif self.ask.stuck == "stop" and state.is_stuck(self.run):
            self.gave_up = True
            self._close(state, rounds.result())
        if rounds.asked_to_stop:
            raise BudgetOver("asked", "a person asked the run to stop")

    def _open(self, state: KeyState) -> bool:
        """Begin with a key, where there is anything to do."""
        entry = state.entry
        there = None if self.searching else self._armed(entry.key)
        if there is not None:
            self._close(state, _already(entry.key, self.workload.share(entry), there))
            return False
        if self.clock.is_over():
            if self.searching:
                raise BudgetOver("time", "the time is used up")
            self._close(state, self._so_far(state, "budget over"))
            return False
        unsupported = self._unsupported(entry.key)
        if unsupported is not None:
            self._close(state, self._lost(state, unsupported))
            return False
        rest = [other.entry.stock_time_us for other in self.keys if other.closed is None and other is not state]
        allotted = math.inf if self.searching else allot(self.clock, [entry.stock_time_us, *rest])
        self._measure(state)
        context = "" if self.run.replaying else self._context(entry.key)
        state.rounds = KeyRounds(self, state.place, entry, context, allotted)
        return True

    def _measure(self, state: KeyState) -> None:
        """What the machine can do for a key, once a run."""
        name = f"k{state.place}.ceiling"
        if self.searching and self.run.recall(Measured, name) is None:
            with self.quiet():
                ceiling = self.engine.ceiling(state.entry.key, self.target_for(state.entry.key))
            self.run.add(Measured(name, self.run.now(), ceiling))

    def _ceiling_of(self, state: KeyState) -> Ceiling | None:
        node = self.run.known(Measured, f"k{state.place}.ceiling")
        return None if node is None else node.ceiling

    def _is_enough(self, state: KeyState) -> bool:
        """Whether a key had all the rounds that are asked for, or is good; never while the journal has a later round of it."""
        if state.rounds is None or self.run.begun(state.next_round) is not None:
            return False
        return state.rounds.rounds >= self.ask.rounds or self._is_good(state)

    def _is_good(self, state: KeyState) -> bool:
        """Whether a key has reached the goal; without a goal none ever has."""
        goal, rounds = self.ask.goal, state.rounds
        best = None if rounds is None else rounds.best()
        if rounds is None or best is None:
            return False
        reached = bool(goal.ratio) and best.ratio >= goal.ratio
        return reached or (bool(goal.limit) and rounds.limit_share(self._ceiling_of(state)) >= goal.limit)

    def _stop(self, reason: StopReason, message: str) -> None:
        self.stopped = Stop("stop", self.run.now(), reason, message)
        last = self.run.nodes[-1] if self.run.nodes else None
        if self.searching and not self.run.replaying and not (isinstance(last, Stop) and last.reason == reason):
            self.run.add(self.stopped)

    def _close(self, state: KeyState, result: KeyResult) -> None:
        state.closed = result
        self.results.append(result)
        self.say("key_done", state.entry, message=str(result))

    def _so_far(self, state: KeyState, reason: str) -> KeyResult:
        if state.rounds is not None and state.rounds.tried and self.searching:
            return state.rounds.result()
        return KeyResult(state.entry.key, self.workload.share(state.entry), "not_tried", reason=reason)

    def _lost(self, state: KeyState, reason: str) -> KeyResult:
        return KeyResult(state.entry.key, self.workload.share(state.entry), "not_won", reason=reason)

    def _report(self, *, interrupted: bool = False) -> WarmReport:
        over = self.stopped.reason in ("time", "tokens", "money", "candidates")
        over |= any(result.reason.startswith("budget over") for result in self.results)
        seconds = self.clock.elapsed()
        return WarmReport(tuple(self.results), seconds, self.tally.finished, interrupted=interrupted, budget_over=over)

    def _unsupported(self, key: KernelKey) -> str | None:
        if key.device_type not in self.targets:
            return f"a {key.device_type} key cannot be judged here: the target is {', '.join(self.targets)}"
        return check_supported(key)

    def target_for(self, key: KernelKey) -> Target:
        return self.targets[key.device_type]

    def _context(self, key: KernelKey) -> str:
        """What a trial's outcome holds for; anything else may end differently."""
        compiler = self.engine.toolchain(key.device_type)
        parts = (self.target_for(key), stock_build(), JUDGE_VERSION, self.accuracy, compiler)
        return hashlib.sha256(canonical_json(parts)).hexdigest()[:16]

    def _armed(self, key: KernelKey) -> StoredRecord | None:
        target = self.targets.get(key.device_type)
        return None if target is None else armed(self.store, key, target, self.accuracy)

    @contextmanager
    def hold(self, entry: WorkloadEntry, journal: KeyJournal) -> Iterator[StoredRecord | None]:
        """Keep other processes from repeating this key's work, and wait while one is at it. Gives the record that one of them
        made meanwhile; a search goes on to beat it."""
        if self.run.replaying:
            yield None
            return
        digest = entry.key.digest
        patience = 0.0
        while True:
            before = journal.size_bytes()
            with self.store.work_lock(digest, patience) as held:
                alone = patience > 0 and journal.size_bytes() == before
                if held or alone or self.clock.is_over() or self.store.write_root is None:
                    yield None if self.searching else self._armed(entry.key)
                    return
            self.say("waiting", entry, message="another process works on this key")
            there = None if self.searching else self._armed(entry.key)
            if there is not None:
                yield there
                return
            patience = _LOCK_PATIENCE_S

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """One measuring process a machine; goes on alone where the lock cannot be had."""
        if self.run.replaying:
            yield
            return
        self.gate.wait_while_paused()
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
                keys_total=len(self.keys),
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


def _already(key: KernelKey, share: float, stored: StoredRecord) -> KeyResult:
    timing = stored.record.verdict.timings[0]
    return KeyResult(key, share, "already_there", timing.ratio, timing.ratio_low, timing.ratio_high, stored.record_id)
