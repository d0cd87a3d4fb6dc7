"""The judge: `screen` for many candidates, `judge` for finalists. Owns seeds, limits and the verdict; runs no candidate itself.

A candidate runs in a child process (`runner.py`) that may crash or hang. The screen keeps one such process; the verdict takes
fresh ones, because one process hides the variance between processes.
"""

from __future__ import annotations

import atexit
import math
import secrets
import statistics
import threading
import time
from collections.abc import Sequence

from torch_autokern.build.candidate import Artifact
from torch_autokern.judge.accuracy import ENVELOPE_ELEMENTS, PERMUTATIONS, Task
from torch_autokern.judge.evidence import Evidence
from torch_autokern.judge.families import SCREEN_FAMILIES
from torch_autokern.judge.inputs import check_supported, families_for, layout_bytes
from torch_autokern.judge.interval import Interval, ratio_interval
from torch_autokern.judge.measure import TimingReport, TimingRequest
from torch_autokern.judge.outcome import (
    ACCEPT_RATIO,
    JUDGE_VERSION,
    Accuracy,
    Reason,
    Refusal,
    ScreenResult,
    as_accuracy,
)
from torch_autokern.judge.process import RunnerProcess
from torch_autokern.judge.protocol import Job, Refused, StateReport, Trial
from torch_autokern.judge.verify import FamilyReport
from torch_autokern.ops import SPECS
from torch_autokern.store.key import KernelKey, Target
from torch_autokern.store.record import FamilyError, Timing, Verdict

__all__ = ["Accuracy", "Reason", "Refusal", "ScreenResult", "check", "close_screen", "judge", "screen"]

PROCESSES = 3
_PHYSICS_SLACK = 0.5  # a candidate under half the time of copying its bytes did not touch them all
_SCREENS_PER_PROCESS = 200
_UNSTABLE_RATIO = 1.1
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
    timing = TimingRequest(_seed(), budget_s=0.3, min_blocks=4, max_blocks=30)
    job = _job(artifact, task, target, trials, timing)
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
    interval = ratio_interval(timed.stock_us, timed.candidate_us)
    if (refusal := _too_fast(timed, interval)) is not None:
        return refusal
    stock, ours = statistics.median(timed.stock_us), statistics.median(timed.candidate_us)
    seconds = time.perf_counter() - started
    return ScreenResult(interval.ratio, interval.low, interval.high, stock, ours, evidence.families(), seconds)


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
    evidence, checks = Evidence(task), {}
    timed: list[TimingReport] = []
    intervals: list[Interval] = []
    for number in range(PROCESSES):
        trials = tuple(Trial(family.value, _seed()) for family in families_for(task.spec, key))
        request = TimingRequest(_seed(), budget_s=1.2, min_blocks=10, max_blocks=300)
        job = _job(artifact, task, target, trials, request, state=True, probes=number == 0)
        with RunnerProcess(allow_weak_box=allow_weak_box) as runner:
            found = _collect(runner, job, artifact.binary, evidence)
        if isinstance(found, Refusal):
            return found
        refusal = evidence.check(slack=1.0 if number == PROCESSES - 1 else 2.0)
        if refusal is None and number == 0 and (vacuous := evidence.probes()[1]) is not None:
            refusal = Refusal(Reason.VACUOUS_TASK, f"the probe {vacuous!r} passes every family: the task proves nothing")
        if refusal is not None or found.timing is None:
            return refusal or Refusal(Reason.TIMING_UNSTABLE, "no times came back")
        checks.update(found.checks)
        timed.append(found.timing)
        intervals.append(ratio_interval(found.timing.stock_us, found.timing.candidate_us))
        refusal = _too_fast(found.timing, intervals[-1]) or _too_slow(timed, intervals)
        if refusal is not None:
            return refusal
    timings = [_timing(timed, intervals, "resident")]
    if fresh_pages and max(layout_bytes(t) for t in key.outputs if t is not None) >= _FRESH_FROM_BYTES:
        fresh = _fresh(artifact, task, target, allow_weak_box)
        if isinstance(fresh, Refusal):
            return fresh
        timings.append(fresh)
    return _verdict(task, evidence, {**checks, **_passed(task, evidence, timed)}, timings)


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
            broken = broken or evidence.add(message)
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


def _fresh(artifact: Artifact, task: Task, target: Target, allow_weak_box: bool) -> Timing | Refusal:
    """One more process, the allocator as users have it: large outputs come in fresh pages on both sides."""
    job = _job(artifact, task, target, (), TimingRequest(_seed(), budget_s=0.8, min_blocks=6, max_blocks=100))
    with RunnerProcess(resident=False, allow_weak_box=allow_weak_box) as runner:
        found = _collect(runner, job, artifact.binary, Evidence(task))
    if isinstance(found, Refusal):
        return found
    if found.timing is None:
        return Refusal(Reason.TIMING_UNSTABLE, "no times came back")
    interval = ratio_interval(found.timing.stock_us, found.timing.candidate_us)
    return _timing([found.timing], [interval], "fresh")


def _too_fast(timed: TimingReport, interval: Interval) -> Refusal | None:
    ours = statistics.median(timed.candidate_us)
    if ours >= _PHYSICS_SLACK * timed.copy_us:
        return None
    message = f"{ours:.1f} us a call, but copying the same bytes takes {timed.copy_us:.1f} us: some were not touched."
    return Refusal(Reason.FASTER_THAN_PHYSICS, message, best_ratio=interval.ratio)


def _too_slow(timed: Sequence[TimingReport], intervals: Sequence[Interval]) -> Refusal | None:
    """The union's lower end only falls with more processes, so the first one below the line decides."""
    low = min(interval.low for interval in intervals)
    if low > ACCEPT_RATIO:
        return None
    last = intervals[-1]
    stock, ours = statistics.median(timed[-1].stock_us), statistics.median(timed[-1].candidate_us)
    best = max(interval.ratio for interval in intervals)
    text = (
        f"stock {stock:.1f} us, candidate {ours:.1f} us: ratio {last.ratio:.3f}, 99 % interval {last.low:.3f} to "
        f"{last.high:.3f} in process {len(intervals)} of {PROCESSES}; accepted when its lower end is above {ACCEPT_RATIO}."
    )
    if last.ratio > _UNSTABLE_RATIO:
        return Refusal(Reason.TIMING_UNSTABLE, f"{text} The machine was not quiet enough to tell.", best_ratio=best)
    return Refusal(Reason.NOT_FASTER, text, best_ratio=best)


def _timing(timed: Sequence[TimingReport], intervals: Sequence[Interval], pages: str) -> Timing:
    ratio = math.exp(statistics.fmean(math.log(interval.ratio) for interval in intervals))
    return Timing(
        regime="eager",
        pages=pages,  # type: ignore[arg-type]
        stock_us=statistics.median(t for report in timed for t in report.stock_us),
        candidate_us=statistics.median(t for report in timed for t in report.candidate_us),
        ratio=ratio,
        ratio_low=min(interval.low for interval in intervals),
        ratio_high=max(interval.high for interval in intervals),
        blocks=sum(len(report.stock_us) // 2 for report in timed),
        processes=len(timed),
    )


def _passed(task: Task, evidence: Evidence, timed: Sequence[TimingReport]) -> dict[str, str]:
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
        "timed outputs": f"passed: {sum(t.checked for t in timed)} outputs equal to verified ones",
        "physics": f"passed: copying the bytes takes {min(t.copy_us for t in timed):.1f} us",
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
