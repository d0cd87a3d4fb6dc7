"""One key's trials: build a batch, screen one by one, judge the finalists, publish what is proved.

Every step is asked of the run's ledger first, so a run that is taken up again repeats nothing, and a replay does nothing."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from torch_autokern.build.candidate import BINARY_BLOBS, Artifact, Candidate
from torch_autokern.errors import JudgeError
from torch_autokern.judge.outcome import ACCEPT_RATIO, Accuracy, Reason, Refusal, ScreenResult
from torch_autokern.runtime.target import stock_build
from torch_autokern.search.budget import Clock
from torch_autokern.search.engine import Engine, Spreading
from torch_autokern.search.journal import KeyJournal, Trial
from torch_autokern.search.nodes import Failure, Found, Proof, Stage
from torch_autokern.search.outcome import Activity, KeyResult
from torch_autokern.store.key import KernelKey, Target
from torch_autokern.store.record import KernelRecord, Provenance, Timing, Verdict, encode_record, record_id_of
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


class Ledger(Protocol):
    """The story of the run that trials belong to: what it holds already is not done again, and what happens is noted there."""

    def recall(self, name: str, stage: Stage) -> Found | None:
        """How that step of a candidate ended, where the run knows it."""

    def note(self, name: str, stage: Stage, found: Found, *, earlier: bool = False) -> None:
        """Keep how it ended; `earlier`: another run's word."""

    def earlier_verdict(self, name: str) -> Found | None:
        """The verdict on a candidate where it is another run's word."""


class Parent(Protocol):
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
    """The trials of one key: `screen` batches of candidates, `judge` the best of them, and `result` says how it stands.

    `allotted` is the time in seconds that it should not exceed. Without `publishing` nothing is stored (a replay).
    """

    def __init__(
        self, run: Parent, entry: WorkloadEntry, journal: KeyJournal, context: str, ledger: Ledger, allotted: float, *,
        publishing: bool = True,
    ) -> None:  # fmt: skip
        self.parent = run
        self.entry = entry
        self.key = entry.key
        self.size = entry.stock_time_us / max(entry.calls, 1)
        self.target = run.target_for(entry.key)
        self.candidates: dict[str, Candidate] = {}
        self.journal = journal
        self.context = context
        self.ledger = ledger
        self.trials: dict[str, Trial] = {}
        self.artifacts: dict[str, Artifact] = {}
        self.won: tuple[Timing, PublishOutcome] | None = None
        self.started = time.monotonic()
        self.allotted = allotted
        self.publishing = publishing
        self.out_of_time = False
        self.failure = ""

    @property
    def best_ratio(self) -> float:
        """The best that was timed, right or not clearly faster; 0: none."""
        return max((trial.ratio for trial in self.trials.values()), default=0.0)

    def screen(self, candidates: Sequence[Candidate]) -> None:
        """Build what was not tried, and screen it; stops where time is up."""
        self.candidates.update((candidate.candidate_id, candidate) for candidate in candidates)
        settled = self.journal.read(self.context) if self.publishing else {}
        waiting: list[Candidate] = []
        for name, candidate in {candidate.candidate_id: candidate for candidate in candidates}.items():
            found = self.ledger.recall(name, "screen")
            if found is None and name in settled and _is_settled(settled[name]):
                found = self._take_word(settled[name])
            if found is None:
                waiting.append(candidate)
                continue
            self._remember(name, found)
            verdict = self.ledger.earlier_verdict(name)
            if isinstance(verdict, Proof):
                self._win_again(name, verdict)
            elif verdict is not None:
                self._remember(name, verdict)
        if not waiting or not self.publishing:
            return
        ready = set(self._build(waiting))
        in_order = [candidate.candidate_id for candidate in waiting if candidate.candidate_id in ready]
        self._ahead("screen", in_order)
        for name in in_order:
            # The first one is always screened: a budget that allows a build should allow an answer.
            self.out_of_time |= self.parent.clock.is_over("screen", self.size)
            if name != in_order[0] and (self._is_late(_SCREEN_PART) or self.out_of_time):
                return
            self._screen(name)

    def judge(self, candidates: Sequence[Candidate], count: int = FINALISTS) -> None:
        """Judge the best `count` of these that could beat what is proved, and publish each that does."""
        names = {candidate.candidate_id for candidate in candidates}
        earlier = sum(self.ledger.earlier_verdict(name) is not None for name in names)
        finalists = self._finalists(names, count - earlier)
        unknown = [trial.candidate_id for trial in finalists if self.publishing and trial.candidate_id in self.artifacts]
        self._ahead("judge", unknown)
        for trial in finalists:
            if self.won is not None and (self._is_late(1.0) or trial.ratio_high <= self.won[0].ratio_low):
                break
            name = trial.candidate_id
            found = self.ledger.recall(name, "judge")
            if isinstance(found, Proof):
                self._win_again(name, found)
                continue
            if found is not None:
                self._remember(name, found)
                continue
            self.out_of_time |= self.parent.clock.is_over("judge", self.size)
            if self.out_of_time or not self.publishing:
                break
            verdict = self._judge(trial)
            if verdict is not None:
                self._win(trial, verdict)

    def result(self) -> KeyResult:
        """How the key stands now."""
        return self._lost() if self.won is None else self._result(*self.won)

    def _remember(self, name: str, found: Found) -> None:
        """Take over what the run knows already."""
        if isinstance(found, ScreenResult):
            self.trials[name] = Trial(self.context, name, "screened", "", "", found.ratio, found.ratio_low, found.ratio_high)
        elif isinstance(found, Refusal):
            words = found.reason.value, found.message[:1000]
            self.trials[name] = Trial(self.context, name, "refused", *words, found.best_ratio or 0.0)
        elif name in self.trials:
            self.trials[name] = msgspec.structs.replace(self.trials[name], stage="accepted")  # not to be judged again

    def _take_word(self, trial: Trial) -> Found:
        """Note what another run found out about a candidate, and return its screen."""
        name = trial.candidate_id
        ratios = trial.ratio, trial.ratio_low, trial.ratio_high
        screened: Found = ScreenResult(*ratios, 0.0, 0.0, (), 0.0)
        if trial.stage == "refused":
            refusal = Refusal(Reason(trial.reason), trial.message, best_ratio=trial.ratio or None)
            if trial.judged:
                self.ledger.note(name, "judge", refusal, earlier=True)
            else:
                screened = refusal
        elif trial.stage == "accepted":
            gone = Failure("proved by another run, whose record is not served any more")
            self.ledger.note(name, "judge", self._stored_proof(name) or gone, earlier=True)
        self.ledger.note(name, "screen", screened, earlier=True)
        return screened

    def _stored_proof(self, name: str) -> Proof | None:
        """The record that another run made of a candidate. (Triton completes plans: then only the source tells.)"""
        source = hashlib.sha256(self.candidates[name].source.encode()).hexdigest()
        for stored in self.parent.store.records(self.key.digest):
            record, notes = stored.record, self.parent.store.notes(self.key.digest, stored.record_id)
            origin = record.provenance
            is_it = origin.candidate_id == name or origin.source_sha256 == source
            turned_down = notes.quarantine is not None or (notes.approval is not None and not notes.approval.approved)
            if is_it and record.target == self.target and not turned_down:
                digest = hashlib.sha256(stored.data.get(BINARY_BLOBS[self.key.device_type], b"")).hexdigest()
                parts = origin.candidate_id, origin.tools, origin.box_level, digest
                return Proof(record.verdict, stored.record_id, origin.created, record.stock_build, *parts)
        return None

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

    def _ahead(self, step: Stage, names: Sequence[str]) -> None:
        """Several machines begin at once, where time allows each of them another step."""
        engine = self.parent.engine
        if isinstance(engine, Spreading) and names and not self.parent.clock.is_over(step, self.size):
            artifacts = [self.artifacts[name] for name in names]
            engine.ahead(step, artifacts, self.key, self.target, self.parent.accuracy)

    def _screen(self, name: str) -> None:
        try:
            with self.parent.quiet(), self.parent.clock.timed("screen", self.size):
                found = self.parent.engine.screen(self.artifacts[name], self.key, self.target, self.parent.accuracy)
        except JudgeError as error:
            self._judge_failed(name, "screen", error)
            return
        self.parent.judge_failures = 0
        self.parent.tally.screened += 1
        if isinstance(found, Refusal):
            self._refuse(name, found, judged=False)
        elif found.ratio_high > ACCEPT_RATIO:
            self.parent.tally.finished += 1
            self.ledger.note(name, "screen", found)
            self._note(Trial(self.context, name, "screened", "", "", found.ratio, found.ratio_low, found.ratio_high))
        else:
            message = f"screened at {found.ratio:.3f} ({found.ratio_low:.3f} to {found.ratio_high:.3f})"
            self._refuse(name, Refusal(Reason.NOT_FASTER, message, best_ratio=found.ratio), judged=False)
        self._say("screening")

    def _finalists(self, names: Collection[str], count: int) -> list[Trial]:
        waiting = [trial for name, trial in self.trials.items() if trial.stage == "screened" and name in names]
        return sorted(waiting, key=lambda trial: (-trial.ratio, trial.candidate_id))[: max(0, count)]

    def _artifact(self, name: str) -> Artifact | None:
        """The built candidate, built again where this process has not done it."""
        if name not in self.artifacts:
            list(self._build([self.candidates[name]]))
        return self.artifacts.get(name)

    def _judge(self, trial: Trial) -> Verdict | None:
        name = trial.candidate_id
        artifact = self._artifact(name)
        if artifact is None:
            return None
        self._say("judging")
        try:
            with self.parent.quiet(), self.parent.clock.timed("judge", self.size):
                found = self.parent.engine.judge(artifact, self.key, self.target, self.parent.accuracy)
        except JudgeError as error:
            self._judge_failed(name, "judge", error)
            return None
        self.parent.judge_failures = 0
        self.parent.tally.judged += 1
        if isinstance(found, Refusal):
            self._refuse(name, found, judged=True)
            self._say("judging")
            return None
        return found

    def _judge_failed(self, name: str, stage: Stage, error: JudgeError) -> None:
        self.failure = str(error)
        self.parent.judge_failed(error)
        self.ledger.note(name, stage, Failure(str(error)[:1000]))

    def _win(self, trial: Trial, verdict: Verdict) -> None:
        """Run's journal, store, key's journal, in this order: a kill in between repeats a step and loses nothing."""
        artifact = self.artifacts[trial.candidate_id]
        proof = proof_of(self.key, self.target, artifact, verdict, utc_now())
        self.ledger.note(trial.candidate_id, "judge", proof)
        self._publish(artifact, proof)
        self._settle(trial.candidate_id, verdict)
        self._say("judging")

    def _win_again(self, name: str, proof: Proof) -> None:
        """A verdict that the run has already; its record is written where the store misses it."""
        digest = self.key.digest
        if not self.publishing or self.parent.store.get(digest, proof.record_id) is not None:
            self._keep_best(proof.verdict, PublishOutcome("already_there", proof.record_id))
        else:
            artifact = self._artifact(name)
            if artifact is not None:
                self._publish(artifact, proof)
        self._settle(name, proof.verdict, noting=False)

    def _publish(self, artifact: Artifact, proof: Proof) -> None:
        timing = proof.verdict.timings[0]
        if self.won is not None and timing.ratio_low <= self.won[0].ratio_low:
            return  # proved, and slower than what is proved: it stays in the run's journal
        record = record_of(self.key, self.target, artifact.candidate, proof)
        self._keep_best(proof.verdict, self.parent.store.publish(record, artifact.blobs()))

    def _keep_best(self, verdict: Verdict, published: PublishOutcome) -> None:
        timing = verdict.timings[0]
        if self.won is None or timing.ratio_low > self.won[0].ratio_low:
            self.won = timing, published

    def _settle(self, name: str, verdict: Verdict, *, noting: bool = True) -> None:
        timing = verdict.timings[0]
        ratios = timing.ratio, timing.ratio_low, timing.ratio_high
        trial = Trial(self.context, name, "accepted", "", "", *ratios, judged=True)
        self.trials[name] = trial
        if noting:
            self.journal.append(trial)

    def _refuse(self, name: str, refusal: Refusal, *, judged: bool) -> None:
        ratio = refusal.best_ratio or 0.0
        self.parent.tally.refused += 1
        self.parent.tally.finished += 0 if judged else 1
        self.ledger.note(name, "judge" if judged else "screen", refusal)
        self._note(Trial(self.context, name, "refused", refusal.reason.value, refusal.message[:1000], ratio, judged=judged))

    def _note(self, trial: Trial) -> None:
        self.trials[trial.candidate_id] = trial
        self.journal.append(trial)

    def _is_late(self, part: float) -> bool:
        return time.monotonic() - self.started > self.allotted * part

    def _say(self, activity: Activity) -> None:
        self.parent.say(activity, self.entry, best=self.best_ratio)

    def _result(self, timing: Timing, published: PublishOutcome) -> KeyResult:
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
        waiting = bool(self._finalists(self.candidates, FINALISTS - sum(trial.judged for trial in self.trials.values())))
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


def proof_of(key: KernelKey, target: Target, artifact: Artifact, verdict: Verdict, created: str) -> Proof:
    """An accepted candidate, with the id that its record has or will have."""
    digest = hashlib.sha256(artifact.binary).hexdigest()
    proof = Proof(verdict, "", created, stock_build(), artifact.identity, artifact.tools, artifact.box_level, digest)
    record = record_of(key, target, artifact.candidate, proof)
    return msgspec.structs.replace(proof, record_id=record_id_of(encode_record(record, artifact.blobs())))


def record_of(key: KernelKey, target: Target, candidate: Candidate, proof: Proof) -> KernelRecord:
    """The record of a proof: the same value whenever it is made."""
    return KernelRecord(
        key=key,
        target=target,
        stock_build=proof.stock_build,
        verdict=proof.verdict,
        provenance=Provenance(
            candidate_id=proof.identity,
            author=candidate.author,
            idea=candidate.idea,
            language=candidate.language,
            template=candidate.template,
            parameters=candidate.parameters,
            parents=candidate.parents,
            source_sha256=hashlib.sha256(candidate.source.encode()).hexdigest(),
            tools=proof.tools,
            box_level=proof.box_level,
            created=proof.created,
        ),
        blobs=(),
    )


def _is_settled(trial: Trial) -> bool:
    return trial.stage != "refused" or trial.reason not in _WORTH_ANOTHER_TRY
