"""The judge: `screen` for many candidates, `judge` for finalists. Owns seeds, limits and the verdict; runs no candidate itself.

A candidate runs in a child process (`runner.py`) that may crash or hang. The screen keeps one such process; the verdict takes
fresh ones, because one process hides the variance between processes.
"""

from __future__ import annotations

import atexit
import secrets
import threading
import time
from collections.abc import Sequence

from torch_autokern.build.candidate import Artifact
from torch_autokern.judge.accuracy import ENVELOPE_ELEMENTS, PERMUTATIONS, Task
from torch_autokern.judge.evidence import Evidence
from torch_autokern.judge.families import SCREEN_FAMILIES
from torch_autokern.judge.inputs import check_supported, families_for, layout_bytes
from torch_autokern.judge.measure import TimingReport, TimingRequest
from torch_autokern.judge.outcome import (
    JUDGE_VERSION,
    Accuracy,
    Reason,
    Refusal,
    ScreenResult,
    as_accuracy,
)
from torch_autokern.judge.process import RunnerProcess
from torch_autokern.judge.protocol import Job, Refused, StateReport, Trial
from torch_autokern.judge.speed import Speed, noisy_speed, speed_of, timing, too_fast, too_slow
from torch_autokern.judge.verify import FamilyReport
from torch_autokern.ops import SPECS
from torch_autokern.store.key import KernelKey, Target
from torch_autokern.store.record import FamilyError, Timing, Verdict

__all__ = ["Accuracy", "Reason", "Refusal", "ScreenResult", "check", "close_screen", "judge", "screen"]

PROCESSES = 3
_BUDGET_S = 1.2
_TIMING_RETRIES = 2
_SCREENS_PER_PROCESS = 200
_HOPELESS = 3.0  # no later trial brings a pooled error that is so far outside back
_FRESH_FROM_BYTES = 128 << 10  # glibc's default threshold: smaller blocks stay resident anyway


class _Screens:
    """The pooled runner of this process; one caller at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._runner: RunnerProcess | None = None
        self._weak = False
        self._used = 0

    def take(self, allow_weak_box: bool) -> RunnerProcess:
        """A living runner, started where there is none."""
        worn = self._used >= _SCREENS_PER_PROCESS or self._weak != allow_weak_box
        if self._runner is None or worn or not self._runner.alive:
            self.close()
            self._runner = RunnerProcess(allow_weak_box=allow_weak_box)
            self._weak, self._used = allow_weak_box, 0
            atexit.register(self.close)
        self._used += 1
        return self._runner

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None
            atexit.unregister(self.close)


_screens = _Screens()


def close_screen() -> None:
    """End the pooled runner of `screen`; the next screen starts another. Repeating is harmless."""
    with _screens.lock:
        _screens.close()


def screen(
    artifact: Artifact, key: KernelKey, target: Target, accuracy: Accuracy | str = "stock", *, allow_weak_box: bool = False
) -> ScreenResult | Refusal:
    """Three families, one seed and a short timing in a pooled process: is the candidate worth a verdict?

    Raises:
        JudgeError: the judge itself failed (not the candidate's fault).
        InvalidInputError: `accuracy` is not a class.
    """
    started = time.perf_counter()
    task = Task(SPECS[key.op], key, as_accuracy(accuracy))
    unsupported = check_supported(key)
    if unsupported is not None:
        return Refusal(Reason.UNSUPPORTED_KEY, unsupported)
    trials = tuple(Trial(family.value, _seed()) for family in SCREEN_FAMILIES)
    request = TimingRequest(_seed(), budget_s=0.25, min_blocks=6, max_blocks=40)
    job = _job(artifact, task, target, trials, request)
    with _screens.lock:
        runner = _screens.take(allow_weak_box)
        try:
            found = _collect(runner, job, artifact.binary, Evidence(task))
        except BaseException:
            _screens.close()  # a message may be half read
            raise
    if isinstance(found, Refusal):
        return found
    evidence, timed = found.evidence, found.timing
    broken = evidence.check()
    if broken is not None or timed is None:
        return broken or Refusal(Reason.TIMING_UNSTABLE, "no times came back")
    seconds = time.perf_counter() - started
    quiet = speed_of(timed)
    speed = quiet if isinstance(quiet, Speed) else noisy_speed(timed)  # a screen only ranks
    if isinstance(quiet, Speed) and (refusal := too_fast(quiet)) is not None:
        return refusal
    interval = speed.interval
    return ScreenResult(
        interval.ratio, interval.low, interval.high, speed.stock_us, speed.candidate_us, evidence.families(), seconds
    )


def check(
    artifact: Artifact, key: KernelKey, target: Target, accuracy: Accuracy | str = "stock", *, allow_weak_box: bool = False,
    trials: int = 3,
) -> tuple[FamilyError, ...] | Refusal:  # fmt: skip
    """Right or not, without timing: `trials` of every family and the checks of state, in one fresh process.

    Raises:
        JudgeError: the judge itself failed (not the candidate's fault).
        InvalidInputError: `accuracy` is not a class.
    """
    task = Task(SPECS[key.op], key, as_accuracy(accuracy))
    unsupported = check_supported(key)
    if unsupported is not None:
        return Refusal(Reason.UNSUPPORTED_KEY, unsupported)
    drawn = tuple(Trial(family.value, _seed()) for _ in range(trials) for family in families_for(task.spec, key))
    with RunnerProcess(allow_weak_box=allow_weak_box) as runner:
        found = _collect(runner, _job(artifact, task, target, drawn, None, state=True), artifact.binary, Evidence(task))
    if isinstance(found, Refusal):
        return found
    return found.evidence.check() or found.evidence.families()


def judge(
    artifact: Artifact, key: KernelKey, target: Target, accuracy: Accuracy | str = "stock", *, allow_weak_box: bool = False,
    fresh_pages: bool = True,
) -> Verdict | Refusal:  # fmt: skip
    """Everything: every family in each of three fresh processes with new seeds, every check, and timing in each.

    Accepted where the lower end of the union of the processes' 99 % intervals is above 1.02. With `fresh_pages` a fourth
    process with the allocator's default settings adds a second timing, which decides nothing.

    Raises:
        JudgeError: the judge itself failed (not the candidate's fault).
        InvalidInputError: `accuracy` is not a class.
    """
    task = Task(SPECS[key.op], key, as_accuracy(accuracy))
    unsupported = check_supported(key)
    if unsupported is not None:
        return Refusal(Reason.UNSUPPORTED_KEY, unsupported)
    evidence = Evidence(task)
    checks: dict[str, str] = {}
    speeds: list[Speed] = []
    for number in range(PROCESSES):
        refusal = _one_process(artifact, task, target, number, evidence, checks, speeds, allow_weak_box)
        if refusal is not None:
            return refusal
    timings = [timing(speeds, "resident")]
    if fresh_pages and max(layout_bytes(t) for t in key.outputs if t is not None) >= _FRESH_FROM_BYTES:
        fresh = _fresh(artifact, task, target, allow_weak_box)
        if isinstance(fresh, Refusal):
            return fresh
        timings += [] if fresh is None else [fresh]
    return _verdict(task, evidence, {**checks, **_passed(task, speeds)}, timings)


def _one_process(
    artifact: Artifact, task: Task, target: Target, number: int, evidence: Evidence, checks: dict[str, str],
    speeds: list[Speed], allow_weak_box: bool,
) -> Refusal | None:  # fmt: skip
    """One fresh process of a verdict: adds to `evidence`, `checks` and `speeds`, or says why it ends here."""
    trials = tuple(Trial(family.value, _seed()) for family in families_for(task.spec, task.key))
    request = TimingRequest(_seed(), budget_s=_BUDGET_S, min_blocks=10, max_blocks=300)
    job = _job(artifact, task, target, trials, request, state=True, probes=number == 0)
    with RunnerProcess(allow_weak_box=allow_weak_box) as runner:
        found = _collect(runner, job, artifact.binary, evidence)
        if isinstance(found, Refusal):
            return found
        refusal = evidence.check(slack=1.0 if number == PROCESSES - 1 else 1.5)
        if refusal is not None:
            return refusal
        if number == 0 and (vacuous := evidence.probes()[1]) is not None:
            return Refusal(Reason.VACUOUS_TASK, f"the probe {vacuous!r} passes every family: the task proves nothing")
        checks.update(found.checks)
        speed = _timed(runner, artifact, task, target, found.timing)
    if isinstance(speed, Refusal):
        return speed
    speeds.append(speed)
    return too_fast(speed) or too_slow(speeds, PROCESSES)


class _Found:
    """What one process reported."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.checks: dict[str, str] = {}
        self.timing: TimingReport | None = None


def _collect(runner: RunnerProcess, job: Job, binary: bytes, evidence: Evidence) -> _Found | Refusal:
    """Run a job to its end; the first refusal ends it."""
    refused = runner.wait_ready()
    if refused is not None:
        return refused
    found = _Found(evidence)
    broken: Refusal | None = None
    for message in runner.run(job, binary):
        if isinstance(message, Refused):
            return broken or message.refusal
        if isinstance(message, FamilyReport):
            broken = broken or evidence.add(message) or evidence.check(_HOPELESS)
            runner.go_on = broken is None
        elif isinstance(message, StateReport):
            found.checks = message.checks
        elif isinstance(message, TimingReport):
            found.timing = message
    return broken or found


def _job(
    artifact: Artifact, task: Task, target: Target, trials: Sequence[Trial], timing: TimingRequest | None, *,
    state: bool = False, probes: bool = False,
) -> Job:  # fmt: skip
    return Job(
        identity=artifact.identity, plan=artifact.candidate.plan, key=task.key, threads=target.threads,
        accuracy=task.accuracy, trials=tuple(trials), state_seed=_seed() if state else None, with_probes=probes, timing=timing,
    )  # fmt: skip


def _seed() -> int:
    """From the system's random source, recorded afterwards."""
    return secrets.randbits(62)


def _timed(
    runner: RunnerProcess, artifact: Artifact, task: Task, target: Target, report: TimingReport | None
) -> Speed | Refusal:
    """What `report` says; timed again in the same process, up to twice, while the machine is noisy."""
    speed = Refusal(Reason.TIMING_UNSTABLE, "no times came back") if report is None else speed_of(report)
    for _ in range(_TIMING_RETRIES):
        if isinstance(speed, Speed):
            break
        request = TimingRequest(_seed(), budget_s=2 * _BUDGET_S, min_blocks=10, max_blocks=300)
        found = _collect(runner, _job(artifact, task, target, (), request), artifact.binary, Evidence(task))
        if isinstance(found, Refusal):
            return found
        assert found.timing is not None
        speed = speed_of(found.timing)
    return speed


def _fresh(artifact: Artifact, task: Task, target: Target, allow_weak_box: bool) -> Timing | Refusal | None:
    """One more process, the allocator as users have it: large outputs come in fresh pages on both sides. It decides nothing
    about speed, so a noisy machine only leaves it out."""
    job = _job(artifact, task, target, (), TimingRequest(_seed(), budget_s=0.8, min_blocks=6, max_blocks=100))
    with RunnerProcess(resident=False, allow_weak_box=allow_weak_box) as runner:
        found = _collect(runner, job, artifact.binary, Evidence(task))
        if isinstance(found, Refusal):
            return found
        speed = _timed(runner, artifact, task, target, found.timing)
    if isinstance(speed, Refusal):
        return None if speed.reason is Reason.TIMING_UNSTABLE else speed
    return timing([speed], "fresh")


def _passed(task: Task, speeds: Sequence[Speed]) -> dict[str, str]:
    numel = max(t.numel for t in (*task.key.tensors, *task.key.outputs) if t is not None)
    orders = f"{PERMUTATIONS} orders of the reduced dimension"
    if numel > ENVELOPE_ELEMENTS:
        orders += f", each on a random run of rows of about {ENVELOPE_ELEMENTS} elements"
    return {
        "envelope": f"stock as called and {orders}",
        "poisoned outputs": "passed: two patterns, every element written",
        "guard zones": "passed: around inputs and outputs, and trapping pages at either end",
        "inputs unchanged": "passed: byte for byte",
        "order": "passed: before the reference existed, and after it at new addresses",
        "timed outputs": f"passed: {sum(speed.report.checked for speed in speeds)} outputs equal to verified ones",
        "physics": f"passed: copying the bytes takes {min(speed.report.copy_us for speed in speeds):.1f} us",
    }


def _verdict(task: Task, evidence: Evidence, checks: dict[str, str], timings: Sequence[Timing]) -> Verdict:
    return Verdict(
        accuracy_class=task.accuracy.kind,
        atol=task.accuracy.atol,
        rtol=task.accuracy.rtol,
        determinism="run_to_run" if evidence.deterministic else "not_guaranteed",
        families=evidence.families(),
        vacuity_probes=evidence.probes()[0],
        checks=checks,
        timings=tuple(timings),
        judge_version=JUDGE_VERSION,
    )
