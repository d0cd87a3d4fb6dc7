"""One key's search: build the batch, screen one by one, judge the finalists, publish what is proved."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.errors import JudgeError
from torch_autokern.judge.outcome import ACCEPT_RATIO, Accuracy, Reason, Refusal, ScreenResult
from torch_autokern.runtime.target import stock_build
from torch_autokern.search.engine import Engine
from torch_autokern.search.journal import KeyJournal, Trial
from torch_autokern.search.outcome import Activity, KeyResult
from torch_autokern.store.key import KernelKey, Target
from torch_autokern.store.record import KernelRecord, Provenance, Verdict
from torch_autokern.store.store import KernelStore, PublishOutcome, utc_now
from torch_autokern.store.workload import Workload, WorkloadEntry

FINALISTS = 3
# The part of a key's time that building and screening may take; the rest is for verdicts.
_SCREEN_PART = 0.5
# Refusals that another try may turn round: the machine was busy, or the box was missing.
_WORTH_ANOTHER_TRY = frozenset({Reason.TIMING_UNSTABLE.value, Reason.BOX_REFUSED.value})


@dataclass
class Tally:
    """What a run has done so far."""

    built: int = 0
    screened: int = 0
    judged: int = 0
    refused: int = 0
    finished: int = 0


class Clock:
    """A run's time and its budget (seconds, or None for no end)."""

    def __init__(self, budget_seconds: float | None) -> None:
        self._started = time.monotonic()
        self._budget = budget_seconds

    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started

    def left(self) -> float | None:
        """Seconds left, never negative; None without a budget."""
        return None if self._budget is None else max(0.0, self._budget - self.elapsed())

    def is_over(self) -> bool:
        """Whether the budget is used up."""
        return self.left() == 0.0

    def allot(self, times_us: Sequence[float]) -> float:
        """Seconds from now that the first of the keys with these stock times may take: by the square root of their times, so
        that one long key does not starve the others. Infinite without a budget."""
        left = self.left()
        if left is None:
            return math.inf
        weights = [math.sqrt(max(time_us, 1.0)) for time_us in times_us]
        return left * weights[0] / sum(weights)


class Run(Protocol):
    """What a key's search needs of the run that it belongs to."""

    store: KernelStore
    accuracy: Accuracy
    engine: Engine
    workload: Workload
    clock: Clock
    tally: Tally
    judge_failures: int

    def target_for(self, key: KernelKey) -> Target:
        """What a key is tuned for: this machine's CPU, or its GPU."""

    def quiet(self) -> AbstractContextManager[None]:
        """Nothing else is built or timed on this machine meanwhile."""

    def judge_failed(self, error: JudgeError) -> None:
        """The judge itself failed; raises when that is the second time in a row."""

    def say(self, activity: Activity, entry: WorkloadEntry | None, *, best: float = 0.0, message: str = "") -> None:
        """Report progress."""


class KeySearch:
    """The trials of one key. `allotted` is the time in seconds that it should not exceed."""

    def __init__(
        self,
        run: Run,
        entry: WorkloadEntry,
        candidates: Sequence[Candidate],
        journal: KeyJournal,
        context: str,
        allotted: float,
    ) -> None:
        self.parent = run
        self.entry = entry
        self.key = entry.key
        self.target = run.target_for(entry.key)
        self.candidates = {candidate.candidate_id: candidate for candidate in candidates}
        self.journal = journal
        self.context = context
        self.trials = {name: trial for name, trial in journal.read(context).items() if _is_settled(trial)}
        self.artifacts: dict[str, Artifact] = {}
        self.best_ratio = max((trial.ratio for trial in self.trials.values()), default=0.0)
        self.started = time.monotonic()
        self.allotted = allotted
        self.failure = ""

    def run(self) -> KeyResult:
        """Screen what was not tried, judge the finalists, publish the best."""
        self._build_and_screen()
        won: tuple[Verdict, PublishOutcome] | None = None
        judged = sum(trial.judged for trial in self.trials.values())
        for trial in self._finalists(FINALISTS - judged):
            if won is not None and (self._is_late(1.0) or trial.ratio_high <= won[0].timings[0].ratio_low):
                break
            if self.parent.clock.is_over():
                break
            verdict = self._judge(trial)
            if verdict is not None and (won is None or verdict.timings[0].ratio_low > won[0].timings[0].ratio_low):
                won = verdict, self._publish(self.artifacts[trial.candidate_id], verdict)
                self._settle(trial, verdict)
            elif verdict is not None:
                self._settle(trial, verdict)
        return self._lost() if won is None else self._result(*won)

    def _build_and_screen(self) -> None:
        waiting = [candidate for name, candidate in self.candidates.items() if name not in self.trials]
        if not waiting:
            return
        ready = set(self._build(waiting))
        in_order = [name for name in self.candidates if name in ready]
        for name in in_order:
            # The first one is always screened: a budget that allows a build should allow an answer.
            if name != in_order[0] and (self._is_late(_SCREEN_PART) or self.parent.clock.is_over()):
                return
            self._screen(name)

    def _build(self, candidates: Sequence[Candidate]) -> Iterator[str]:
        """Build, keep the artifacts, and yield the ids of the candidates that have one. (An artifact's own candidate may be
        another: Triton completes the plan.)"""
        with self.parent.quiet():
            for candidate, built in self.parent.engine.build(candidates, self.target, self.key):
                if isinstance(built, Artifact):
                    self.artifacts[candidate.candidate_id] = built
                    self.parent.tally.built += 1
                    yield candidate.candidate_id
                else:
                    self._refuse(candidate.candidate_id, built, judged=False)
                self._say("building")

    def _screen(self, name: str) -> None:
        try:
            with self.parent.quiet():
                found = self.parent.engine.screen(self.artifacts[name], self.key, self.target, self.parent.accuracy)
        except JudgeError as error:
            self.failure = str(error)
            self.parent.judge_failed(error)
            return
        self.parent.judge_failures = 0
        self.parent.tally.screened += 1
        if isinstance(found, ScreenResult):
            self.best_ratio = max(self.best_ratio, found.ratio)
            if found.ratio_high > ACCEPT_RATIO:
                self.parent.tally.finished += 1
                self._note(Trial(self.context, name, "screened", "", "", found.ratio, found.ratio_low, found.ratio_high))
            else:
                message = f"screened at {found.ratio:.3f} ({found.ratio_low:.3f} to {found.ratio_high:.3f})"
                self._refuse(name, Refusal(Reason.NOT_FASTER, message, best_ratio=found.ratio), judged=False)
        else:
            self._refuse(name, found, judged=False)
        self._say("screening")

    def _finalists(self, count: int) -> list[Trial]:
        waiting = [t for name, t in self.trials.items() if t.stage == "screened" and name in self.candidates]
        return sorted(waiting, key=lambda trial: -trial.ratio)[: max(0, count)]

    def _judge(self, trial: Trial) -> Verdict | None:
        name = trial.candidate_id
        if name not in self.artifacts and not list(self._build([self.candidates[name]])):
            return None
        self._say("judging")
        try:
            with self.parent.quiet():
                found = self.parent.engine.judge(self.artifacts[name], self.key, self.target, self.parent.accuracy)
        except JudgeError as error:
            self.failure = str(error)
            self.parent.judge_failed(error)
            return None
        self.parent.judge_failures = 0
        self.parent.tally.judged += 1
        if isinstance(found, Refusal):
            self._refuse(name, found, judged=True)
            self._say("judging")
            return None
        self.best_ratio = max(self.best_ratio, found.timings[0].ratio)
        self._say("judging")
        return found

    def _publish(self, artifact: Artifact, verdict: Verdict) -> PublishOutcome:
        """Before the journal says accepted: a kill in between repeats a verdict and loses nothing."""
        candidate = artifact.candidate
        record = KernelRecord(
            key=self.key,
            target=self.target,
            stock_build=stock_build(),
            verdict=verdict,
            provenance=Provenance(
                candidate_id=artifact.identity,
                author=candidate.author,
                idea=candidate.idea,
                language=candidate.language,
                template=candidate.template,
                parameters=candidate.parameters,
                parents=candidate.parents,
                source_sha256=hashlib.sha256(candidate.source.encode()).hexdigest(),
                tools=artifact.tools,
                box_level=artifact.box_level,
                created=utc_now(),
            ),
            blobs=(),
        )
        return self.parent.store.publish(record, artifact.blobs())

    def _settle(self, trial: Trial, verdict: Verdict) -> None:
        timing = verdict.timings[0]
        ratios = timing.ratio, timing.ratio_low, timing.ratio_high
        self._note(Trial(self.context, trial.candidate_id, "accepted", "", "", *ratios, judged=True))

    def _refuse(self, name: str, refusal: Refusal, *, judged: bool) -> None:
        ratio = refusal.best_ratio or 0.0
        if refusal.reason is Reason.NOT_FASTER:
            self.best_ratio = max(self.best_ratio, ratio)
        self.parent.tally.refused += 1
        self.parent.tally.finished += 0 if judged else 1
        self._note(Trial(self.context, name, "refused", refusal.reason.value, refusal.message[:1000], ratio, judged=judged))

    def _note(self, trial: Trial) -> None:
        self.trials[trial.candidate_id] = trial
        self.journal.append(trial)

    def _is_late(self, part: float) -> bool:
        return time.monotonic() - self.started > self.allotted * part

    def _say(self, activity: Activity) -> None:
        self.parent.say(activity, self.entry, best=self.best_ratio)

    def _result(self, verdict: Verdict, published: PublishOutcome) -> KeyResult:
        timing = verdict.timings[0]
        reason = f"kept in memory only: {published.reason}" if published.status == "memory_only" else ""
        ratios = timing.ratio, timing.ratio_low, timing.ratio_high
        share = self.parent.workload.share(self.entry)
        return KeyResult(self.key, share, "won", *ratios, published.record_id, reason, len(self.trials))

    def _lost(self) -> KeyResult:
        share, tried = self.parent.workload.share(self.entry), len(self.trials)
        best = max((t.ratio for t in self.trials.values() if t.reason in ("", Reason.NOT_FASTER.value)), default=0.0)
        return KeyResult(self.key, share, "not_won", best, reason=self._why_lost(best), tried=tried)

    def _why_lost(self, best: float) -> str:
        untried = len(self.candidates.keys() - self.trials.keys())
        waiting = bool(self._finalists(FINALISTS - sum(trial.judged for trial in self.trials.values())))
        words: list[str] = []
        if self.parent.clock.is_over() or untried or waiting:
            left = f"{untried} candidates not tried" if untried else "finalists not judged" if waiting else "time is up"
            words.append(f"the judge failed: {self.failure}" if self.failure else f"budget over ({left})")
        refused = [trial for trial in self.trials.values() if trial.stage == "refused"]
        counts = Counter(trial.reason for trial in refused)
        if best and counts[Reason.NOT_FASTER.value] == len(self.trials):
            words.append(f"all slower, or not clearly faster (best {best:.2f}x)")
        elif refused:
            listed = ", ".join(f"{reason} {count}x" for reason, count in counts.most_common())
            worst = next((t for t in refused if t.reason != Reason.NOT_FASTER.value), refused[0])
            words.append(f"refused: {listed}; for example: {worst.message}" + (f"; best {best:.2f}x" if best else ""))
        return "; ".join(words) or "nothing was clearly faster"


def _is_settled(trial: Trial) -> bool:
    return trial.stage != "refused" or trial.reason not in _WORTH_ANOTHER_TRY
