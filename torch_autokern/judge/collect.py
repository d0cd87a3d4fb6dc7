"""One job of one runner, from its trials to what they showed; a refusal names the cases that replay it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from torch_autokern.build.candidate import Artifact
from torch_autokern.errors import JudgeError
from torch_autokern.judge.accuracy import Task
from torch_autokern.judge.clock import Figure
from torch_autokern.judge.evidence import Evidence
from torch_autokern.judge.families import Family
from torch_autokern.judge.measure import TimingReport, TimingRequest
from torch_autokern.judge.outcome import Refusal
from torch_autokern.judge.process import RunnerProcess
from torch_autokern.judge.protocol import Finished, Job, Message, Refused, StateReport, Trial
from torch_autokern.judge.verify import FamilyReport
from torch_autokern.store.key import Target

# Cases beside the families: the checks of state, the timed calls, the sanitized programs.
STATE, TIMING, SANITIZERS = "state", "timing", "sanitizers"
_HOPELESS = 3.0  # no later trial brings a pooled error that is so far outside back


class _Asked:
    """What a job's reports must be, in their order: a runner that says anything else is not believed."""

    def __init__(self, job: Job) -> None:
        self._left: list[tuple[type[Message], object]] = [(FamilyReport, (t.family, t.seed)) for t in job.trials]
        self._left += [(StateReport, None)] if job.state_seed is not None else []
        self._left += [(TimingReport, request.figure) for request in job.timings]

    def take(self, message: Message, go_on: bool) -> None:
        """Cross one report off.

        Raises:
            JudgeError: it was not asked for, or comes at the wrong time; or the job ends before its reports.
        """
        if isinstance(message, Refused):
            return
        if isinstance(message, Finished):
            if self._left and go_on:
                raise JudgeError(f"the runner ended a job {len(self._left)} reports early; its results are not used")
            return
        kind, what = self._left.pop(0) if self._left else (Finished, None)
        seen: object = None
        if isinstance(message, FamilyReport):
            seen = (message.family, message.seed)
        elif isinstance(message, TimingReport):
            seen = message.figure
        if not isinstance(message, kind) or seen != what:
            words = f"{type(message).__name__} {seen or ''}".strip()
            raise JudgeError(
                f"the runner sent {words} where {kind.__name__} {what or ''} was asked for; its results are not used"
            )


class Found:
    """What one process reported."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.checks: dict[str, str] = {}
        self.timings: dict[Figure, TimingReport] = {}


def collect(runner: RunnerProcess | Refusal, job: Job, binary: bytes, evidence: Evidence) -> Found | Refusal:
    """Run a job to its end; the first refusal ends it, that of a runner's box too."""
    if isinstance(runner, Refusal):
        return runner
    found = Found(evidence)
    broken: Refusal | None = None
    for trial in job.trials:
        evidence.cases.setdefault(Family(trial.family), {})[trial.seed] = case_of(trial)
    asked, go_on = _Asked(job), True
    for message in runner.run(job, binary):
        asked.take(message, go_on)
        if isinstance(message, Refused):
            return broken or _with_case(message.refusal, job)
        if isinstance(message, FamilyReport):
            broken = broken or evidence.add(message) or evidence.check(_HOPELESS)
            runner.go_on = go_on = broken is None
        elif isinstance(message, StateReport):
            found.checks = message.checks
            evidence.deterministic = evidence.deterministic and message.deterministic
        elif isinstance(message, TimingReport):
            found.timings[message.figure] = message
    return broken or found


def make_job(
    artifact: Artifact | None, task: Task, target: Target, trials: Sequence[Trial], timings: tuple[TimingRequest, ...], *,
    state_seed: int | None = None, probes: bool = False, sampled: bool = False,
) -> Job:  # fmt: skip
    """The job that runs `trials`, then the checks of state where `state_seed` is given, then `timings`; of stock itself where
    there is no artifact."""
    plan = artifact.candidate.plan if artifact else None
    return Job(
        identity=artifact.identity if artifact else "", plan=plan, key=task.key, threads=target.threads,
        accuracy=task.accuracy, trials=tuple(trials), state_seed=state_seed, with_probes=probes, sampled=sampled,
        timings=timings,
    )  # fmt: skip


def binary_of(artifact: Artifact | None) -> bytes:
    """What the runner loads; stock is there already."""
    return artifact.binary if artifact else b""


def draw_trials(families: Sequence[Family]) -> tuple[Trial, ...]:
    """One trial each, with seeds from the system's random source."""
    return tuple(Trial(family.value, new_seed(), number) for number, family in enumerate(families))


def new_seed() -> int:
    """From the system's random source, recorded afterwards."""
    return secrets.randbits(62)


def case_of(trial: Trial) -> str:
    """A trial in words that `autokern judge --replay` takes."""
    return f"{trial.family}:{trial.seed}:{trial.number}"


def _with_case(refusal: Refusal, job: Job) -> Refusal:
    """Name the trial that a runner refused, by its seed, which no two trials share."""
    seeds = {trial.seed: case_of(trial) for trial in job.trials}
    if job.state_seed is not None:
        seeds[job.state_seed] = f"{STATE}:{job.state_seed}:0"
    seeds.update({request.seed: f"{TIMING}:{request.seed}:0" for request in job.timings})
    case = None if refusal.seed is None else seeds.get(refusal.seed)
    return refusal if case is None else msgspec.structs.replace(refusal, cases=(case,))
