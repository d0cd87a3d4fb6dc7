"""The judge: `screen` for many candidates, `judge` for finalists. Owns seeds, limits and the verdict; runs no candidate itself.

A candidate runs in a child process (`runner.py`) that may crash or hang. The screen keeps one such process; the verdict takes
fresh ones, because one process hides the variance between processes.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from torch_autokern.build.candidate import Artifact
from torch_autokern.judge.accuracy import ENVELOPE_ELEMENTS, PERMUTATIONS, SAMPLE_ELEMENTS, Task
from torch_autokern.judge.ceilings import least_copy_us
from torch_autokern.judge.clock import Figure
from torch_autokern.judge.collect import binary_of, collect, draw_trials, make_job, new_seed
from torch_autokern.judge.evidence import Evidence
from torch_autokern.judge.families import SCREEN_FAMILIES, Family
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
from torch_autokern.judge.process import RunnerProcess, fresh_runners, start_runner
from torch_autokern.judge.sanitizers import sanitized
from torch_autokern.judge.speed import (
    Speed,
    clock_jumped,
    noisy_speed,
    slower_when_cold,
    slower_when_replayed,
    speed_of,
    timing,
    too_fast,
    too_slow,
)
from torch_autokern.ops import SPECS
from torch_autokern.store.key import DeviceType, KernelKey, Target
from torch_autokern.store.record import FamilyError, Timing, Verdict

__all__ = ["Accuracy", "Reason", "Refusal", "ScreenResult", "check", "close_screen", "judge", "open_screen", "screen"]

PROCESSES = 3
STATE_SEEDS, TIMING_SEEDS = "state seeds", "timing seeds"  # in a verdict's `checks`, one seed a process
_BUDGET_S = 1.2
_TIMING_RETRIES = 2
_SHARPER_DRAWS = 10  # each halves the chance that a meaningful task is called vacuous
_SCREENS_PER_PROCESS = 200
_FRESH_FROM_BYTES = 128 << 10  # glibc's default threshold: smaller blocks stay resident anyway
_LARGE_ON_DEVICE = 4 << 30
# After these a GPU is not trusted until a canary has passed in a fresh process.
_SUSPICIOUS = (Reason.CRASHED, Reason.HUNG)
# What a verdict times, seconds for each, and how a record names its pages. The first figure decides.
_FIGURES: dict[DeviceType, dict[Figure, float]] = {
    "cpu": {"eager": _BUDGET_S, "cold": 0.5},
    "cuda": {"eager": _BUDGET_S, "graph": 0.6, "cold": 0.4},
}


class _Screens:
    """The pooled runner of this process; one caller at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._runner: RunnerProcess | None = None
        self._kind: tuple[DeviceType, bool] | None = None
        self._used = 0

    def take(self, device_type: DeviceType, allow_weak_box: bool) -> RunnerProcess | Refusal:
        """A living runner, started where there is none."""
        kind = (device_type, allow_weak_box)
        worn = self._used >= _SCREENS_PER_PROCESS or self._kind != kind
        if self._runner is None or worn or not self._runner.alive:
            self.close()
            started = start_runner(device_type, allow_weak_box=allow_weak_box)
            if isinstance(started, Refusal):
                return started
            self._runner, self._kind, self._used = started, kind, 0
            atexit.register(self.close)
        self._used += 1
        return self._runner

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None
            atexit.unregister(self.close)


_screens = _Screens()


def open_screen(device_type: DeviceType, *, allow_weak_box: bool = False) -> None:
    """Start the pooled runner ahead of the first `screen`, which waits for it. Starting CUDA takes seconds.

    Raises:
        JudgeError: it does not start; the screen will say so again.
    """
    with _screens.lock:
        _screens.take(device_type, allow_weak_box)


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
    trials = draw_trials(SCREEN_FAMILIES)
    request = TimingRequest(new_seed(), budget_s=0.25, min_blocks=6, max_blocks=40)
    job = make_job(artifact, task, target, trials, (request,))
    with _screens.lock:
        runner = _screens.take(key.device_type, allow_weak_box)
        if isinstance(runner, Refusal):
            return runner
        try:
            found = collect(runner, job, artifact.binary, Evidence(task))
        except BaseException:
            _screens.close()  # a message may be half read
            raise
        if isinstance(found, Refusal) and found.reason in _SUSPICIOUS:
            _screens.close()
    if isinstance(found, Refusal):
        return found
    evidence, timed = found.evidence, found.timings.get("eager")
    broken = evidence.check()
    if broken is not None or timed is None:
        return broken or Refusal(Reason.TIMING_UNSTABLE, "no times came back")
    seconds = time.perf_counter() - started
    jumped = clock_jumped(timed)
    if jumped is not None:
        return jumped
    quiet = speed_of(_floored(timed, task, target))
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
    """Right or not, without timing: `trials` of every family and the checks of state in one fresh process, then the sanitizers.

    Raises:
        JudgeError: the judge itself failed (not the candidate's fault).
        InvalidInputError: `accuracy` is not a class.
    """
    task = Task(SPECS[key.op], key, as_accuracy(accuracy))
    unsupported = check_supported(key)
    if unsupported is not None:
        return Refusal(Reason.UNSUPPORTED_KEY, unsupported)
    drawn = draw_trials(families_for(task.spec, key) * trials)
    job = make_job(artifact, task, target, drawn, (), state_seed=new_seed())
    with fresh_runners(key.device_type, allow_weak_box=allow_weak_box) as runners:
        found = collect(next(runners), job, artifact.binary, Evidence(task))
    if isinstance(found, Refusal):
        return found
    broken = found.evidence.check()
    if broken is not None:
        return broken
    clean = sanitized(artifact.candidate, task, target, new_seed(), allow_weak_box=allow_weak_box)
    return clean if isinstance(clean, Refusal) else found.evidence.families()


def judge(
    artifact: Artifact, key: KernelKey, target: Target, accuracy: Accuracy | str = "stock", *, allow_weak_box: bool = False,
    fresh_pages: bool = True,
) -> Verdict | Refusal:  # fmt: skip
    """Everything: every family in each of three fresh processes with new seeds, every check, and timing in each.

    Accepted where the lower end of the union of the processes' 99 % intervals is above 1.02. On a CPU arguments are warm there;
    on cold ones the candidate must at least be level, and with `fresh_pages` a fourth process with the allocator's default
    settings adds a timing for the record. On a GPU calls are timed eagerly, which decides; replayed in a graph, where they may
    not be slower; and with a cold L2, for the record.

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
    speeds: dict[Figure, list[Speed]] = {figure: [] for figure in _FIGURES[key.device_type]}
    if key.device_type == "cuda" and task.spec.bytes_moved(key) > _LARGE_ON_DEVICE:
        close_screen()  # its memory is needed
    with fresh_runners(key.device_type, PROCESSES, allow_weak_box=allow_weak_box) as runners:
        for number, runner in enumerate(runners):
            refusal = _one_process(runner, artifact, task, target, number, evidence, checks, speeds)
            if refusal is not None:
                if key.device_type == "cuda" and refusal.reason in _SUSPICIOUS:
                    close_screen()  # the next screen starts a fresh process, and with it a canary
                return refusal
    clean = sanitized(artifact.candidate, task, target, new_seed(), allow_weak_box=allow_weak_box)
    if isinstance(clean, Refusal):
        return clean
    checks.update(clean)
    timings = _timings(key.device_type, speeds)
    fresh_pages = fresh_pages and key.device_type == "cpu"
    if fresh_pages and max(layout_bytes(t) for t in key.outputs if t is not None) >= _FRESH_FROM_BYTES:
        fresh = _fresh(artifact, task, target, allow_weak_box)
        if isinstance(fresh, Refusal):
            return fresh
        timings += [] if fresh is None else [fresh]
    return _verdict(task, evidence, {**checks, **_passed(task, evidence, speeds["eager"])}, timings)


def judge_times(
    artifact: Artifact | None, key: KernelKey, target: Target, *, allow_weak_box: bool = False
) -> tuple[Timing, ...] | Refusal:
    """The timing part of `judge` alone, by its rules and in as many processes; stock against itself where there is no artifact.

    Raises:
        JudgeError: the judge itself failed (not the candidate's fault).
    """
    task = Task(SPECS[key.op], key, Accuracy())
    unsupported = check_supported(key)
    if unsupported is not None:
        return Refusal(Reason.UNSUPPORTED_KEY, unsupported)
    speeds: dict[Figure, list[Speed]] = {figure: [] for figure in _FIGURES[key.device_type]}
    together = artifact is not None
    with fresh_runners(key.device_type, PROCESSES, allow_weak_box=allow_weak_box, together=together) as runners:
        for runner in runners:
            job = make_job(artifact, task, target, (), _requests(key))
            found = collect(runner, job, binary_of(artifact), Evidence(task))
            if isinstance(found, Refusal):
                return found
            assert isinstance(runner, RunnerProcess)  # a refused one ends in `collect`
            refusal = _add_speeds(runner, artifact, task, target, found.timings, {}, speeds)
            if refusal is not None:
                return refusal
    return tuple(_timings(key.device_type, speeds))


def _timings(device_type: DeviceType, speeds: dict[Figure, list[Speed]]) -> list[Timing]:
    pages: Literal["resident", "device"] = "resident" if device_type == "cpu" else "device"
    found = [timing(speeds["eager"], pages)]
    found += [timing(speeds["graph"], pages, "graph")] if speeds.get("graph") else []
    return found + ([timing(speeds["cold"], pages, inputs="cold")] if speeds["cold"] else [])


def _one_process(
    runner: RunnerProcess | Refusal, artifact: Artifact, task: Task, target: Target, number: int, evidence: Evidence,
    checks: dict[str, str], speeds: dict[Figure, list[Speed]],
) -> Refusal | None:  # fmt: skip
    """One fresh process of a verdict: adds to `evidence`, `checks` and `speeds`, or says why it ends here."""
    trials = draw_trials(families_for(task.spec, task.key))
    requests = _requests(task.key)
    evidence.state_seeds.append(new_seed())
    job = make_job(artifact, task, target, trials, requests, state_seed=evidence.state_seeds[-1], probes=number == 0,
                   sampled=number > 0)  # fmt: skip
    found = collect(runner, job, artifact.binary, evidence)
    if isinstance(found, Refusal):
        return found
    assert isinstance(runner, RunnerProcess)  # a refused one ends in `collect`
    refusal = evidence.check(slack=1.0 if number == PROCESSES - 1 else 1.5)
    if refusal is not None:
        return refusal
    vacuous = _passing_probe(runner, artifact, task, target, evidence) if number == 0 else None
    if vacuous is not None:
        return vacuous
    checks.update(found.checks)
    evidence.timing_seeds.append(requests[0].seed)
    return _add_speeds(runner, artifact, task, target, found.timings, checks, speeds)


def _requests(key: KernelKey) -> tuple[TimingRequest, ...]:
    return tuple(_request(figure, seconds) for figure, seconds in _FIGURES[key.device_type].items())


def _add_speeds(
    runner: RunnerProcess, artifact: Artifact | None, task: Task, target: Target, reports: dict[Figure, TimingReport],
    checks: dict[str, str], speeds: dict[Figure, list[Speed]],
) -> Refusal | None:  # fmt: skip
    """What one process's times say: adds to `speeds`, or says why the candidate is not accepted."""
    for figure, report in reports.items():
        if report.skipped:
            checks[f"timing, {figure}"] = f"not run: {report.skipped}"
            continue
        speed = _timed(runner, artifact, task, target, report)
        if isinstance(speed, Refusal):
            return speed
        speeds[figure].append(speed)
        refusal = too_fast(speed)
        if refusal is not None:
            return refusal
    slower = too_slow(speeds["eager"], PROCESSES) or slower_when_replayed(speeds.get("graph", ()))
    return slower or (slower_when_cold(speeds["cold"]) if task.key.device_type == "cpu" else None)


def _passing_probe(runner: RunnerProcess, artifact: Artifact, task: Task, target: Target, evidence: Evidence) -> Refusal | None:
    """The probe that every family lets pass, after more draws of the sharpest one: of few long rows a draw may leave the tail
    without a say."""
    for _ in range(_SHARPER_DRAWS):
        if evidence.probes()[1] is None:
            return None
        job = make_job(artifact, task, target, draw_trials((Family.SPIKES,)), (), probes=True, sampled=True)
        found = collect(runner, job, artifact.binary, evidence)
        if isinstance(found, Refusal):
            return found
    vacuous = evidence.probes()[1]
    if vacuous is None:
        return None
    return Refusal(Reason.VACUOUS_TASK, f"the probe {vacuous!r} passes every family: the task proves nothing")


def _request(figure: Figure, budget_s: float) -> TimingRequest:
    return TimingRequest(new_seed(), budget_s=budget_s, min_blocks=10, max_blocks=300, figure=figure)


def _timed(
    runner: RunnerProcess, artifact: Artifact | None, task: Task, target: Target, report: TimingReport
) -> Speed | Refusal:
    """What `report` says; timed again in the same process, up to twice, while the machine is noisy."""
    speed = speed_of(_floored(report, task, target))
    for _ in range(_TIMING_RETRIES):
        if isinstance(speed, Speed):
            break
        request = _request(report.figure, 2 * _BUDGET_S)
        found = collect(runner, make_job(artifact, task, target, (), (request,)), binary_of(artifact), Evidence(task))
        if isinstance(found, Refusal):
            return found
        speed = speed_of(_floored(found.timings[report.figure], task, target))
    return speed


def _floored(report: TimingReport, task: Task, target: Target) -> TimingReport:
    """The report with the least copying time that this device ever showed: what keeps a busy machine from refusing."""
    size = task.spec.bytes_moved(task.key) // 2
    return msgspec.structs.replace(report, copy_us=least_copy_us(target, size, report.copy_us))


def _fresh(artifact: Artifact, task: Task, target: Target, allow_weak_box: bool) -> Timing | Refusal | None:
    """One more process, the allocator as users have it: large outputs come in fresh pages on both sides. It decides nothing
    about speed, so a noisy machine only leaves it out."""
    request = TimingRequest(new_seed(), budget_s=0.8, min_blocks=6, max_blocks=100)
    job = make_job(artifact, task, target, (), (request,))
    with fresh_runners("cpu", resident=False, allow_weak_box=allow_weak_box) as runners:
        runner = next(runners)
        found = collect(runner, job, artifact.binary, Evidence(task))
        if isinstance(found, Refusal):
            return found
        assert isinstance(runner, RunnerProcess)
        speed = _timed(runner, artifact, task, target, found.timings["eager"])
    if isinstance(speed, Refusal):
        return None if speed.reason is Reason.TIMING_UNSTABLE else speed
    return timing([speed], "fresh")


def _passed(task: Task, evidence: Evidence, speeds: Sequence[Speed]) -> dict[str, str]:
    numel = max(t.numel for t in (*task.key.tensors, *task.key.outputs) if t is not None)
    on_gpu = task.key.device_type == "cuda"
    truth = "float64, every element"
    if numel > SAMPLE_ELEMENTS:
        truth += f" in the first trial, a random run of rows of about {SAMPLE_ELEMENTS} elements in each of the others"
    orders = f"{PERMUTATIONS} orders of the reduced dimension"
    if numel > ENVELOPE_ELEMENTS:
        orders += f", each on a random run of rows of about {ENVELOPE_ELEMENTS} elements"
    return {
        "truth": truth,
        "envelope": f"stock as called and {orders}",
        "poisoned outputs": "passed: two patterns, every element written",
        "guard zones": f"passed: around inputs and outputs{'' if on_gpu else ', and trapping pages at either end'}",
        "inputs unchanged": "passed: byte for byte",
        "float state": "passed: rounding and denormals of the thread as before",
        "order": "passed: before the reference existed, and after it at new addresses",
        "timed outputs": f"passed: {sum(speed.report.checked for speed in speeds)} outputs equal to verified ones",
        STATE_SEEDS: _listed(evidence.state_seeds),
        TIMING_SEEDS: _listed(evidence.timing_seeds),
        "physics": f"passed: copying the bytes takes {min(speed.report.copy_us for speed in speeds):.1f} us",
    }


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(str(seed) for seed in seeds)


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
