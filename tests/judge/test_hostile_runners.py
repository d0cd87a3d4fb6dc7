"""A runner may lie, hang, die or be stopped, and its box may miss a layer: each is said, and none of it becomes a verdict."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.judge.samples import samples, softmax_key, target
from tests.judge.stand_ins import task_of
from torch_autokern.errors import JudgeError
from torch_autokern.judge import process, protocol, verdict
from torch_autokern.judge.accuracy import OutputReport, Pool, Tally
from torch_autokern.judge.collect import Found, collect, make_job
from torch_autokern.judge.evidence import Evidence
from torch_autokern.judge.measure import TimingReport, TimingRequest
from torch_autokern.judge.outcome import Reason, Refusal
from torch_autokern.judge.process import RunnerProcess, start_runner
from torch_autokern.judge.protocol import Finished, Message, StateReport, Trial
from torch_autokern.judge.speed import speed_of
from torch_autokern.judge.verify import FamilyReport

KEY = softmax_key(4, 64)
TASK = task_of(KEY)
TRIALS = (Trial("normal", 11, 0), Trial("uniform", 12, 1))
REQUEST = TimingRequest(13, 0.1, 4, 8)
JOB = make_job(None, TASK, target(), TRIALS, (REQUEST,), state_seed=14)
TIMES = TimingReport((10.0,) * 16, (5.0,) * 16, 1, 4, 0.0, 16)


def right(trial: Trial) -> FamilyReport:
    output = OutputReport(256, Tally(Pool(0.0, 256, 0.0)), (Pool(0.0, 256, 0.0),), Pool(0.0, 256, 0.0))
    return FamilyReport(trial.family, trial.seed, (output,), True)


TRUE: tuple[Message, ...] = (right(TRIALS[0]), right(TRIALS[1]), StateReport({}, True), TIMES, Finished())


class Liar:
    """A runner that says what it was told to say."""

    go_on = True

    def __init__(self, *messages: Message) -> None:
        self._messages = messages

    def run(self, job: protocol.Job, binary: bytes) -> Iterator[Message]:
        yield from self._messages


def heard(*messages: Message) -> Found | Refusal:
    return collect(Liar(*messages), JOB, b"", Evidence(TASK))  # type: ignore[arg-type]


def test_the_reports_that_were_asked_for_are_believed() -> None:
    found = heard(*TRUE)
    assert isinstance(found, Found) and found.timings["eager"] == TIMES


@pytest.mark.parametrize(
    "messages",
    [
        (Finished(),),
        (*TRUE[:3], Finished()),
        (TIMES, *TRUE[:3], Finished()),
        (TRUE[1], TRUE[0], *TRUE[2:]),
        (right(Trial("normal", 99, 0)), *TRUE[1:]),
        (right(Trial("calm", 11, 0)), *TRUE[1:]),
        (TRUE[0], TRUE[0], *TRUE[2:]),
        (*TRUE[:4], TIMES, Finished()),
        (*TRUE[:3], TimingReport((10.0,) * 16, (5.0,) * 16, 1, 4, 0.0, 16, "cold"), Finished()),
    ],
    ids=["nothing", "no times", "times first", "another order", "another seed", "another family", "one twice", "one more",
         "another figure"],
)  # fmt: skip
def test_reports_that_nobody_asked_for_are_no_verdict(messages: tuple[Message, ...]) -> None:
    with pytest.raises(JudgeError, match="not used"):
        heard(*messages)


@pytest.mark.parametrize(
    ("stock", "candidate"),
    [((10.0,) * 16, (-5.0,) * 16), ((10.0,) * 15 + (0.0,), (5.0,) * 16), ((10.0,) * 16, (5.0,) * 8), ((), ())],
    ids=["the clock went back", "the clock stood still", "half of the samples", "no samples"],
)
def test_times_that_no_clock_gives_are_no_verdict(stock: tuple[float, ...], candidate: tuple[float, ...]) -> None:
    seen = speed_of(TimingReport(stock, candidate, 1, 4, 0.0, 16))
    assert isinstance(seen, Refusal) and seen.reason is Reason.TIMING_UNSTABLE


def test_a_clock_that_jumps_ahead_in_some_brackets_changes_no_ratio() -> None:
    stock, candidate = [10.0] * 80, [5.0] * 80
    stock[7] = candidate[41] = 3.6e9  # an hour
    seen = speed_of(TimingReport(tuple(stock), tuple(candidate), 1, 4, 0.0, 80))
    assert not isinstance(seen, Refusal) and (seen.interval.low, seen.interval.high) == (2.0, 2.0)


def test_a_jumped_clock_ends_a_screen_without_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = next(s for s in samples("honest") if s.name == "softmax_rows")

    def jumped(runner: object, job: protocol.Job, binary: bytes, evidence: Evidence) -> Found:
        found = Found(evidence)
        found.timings["eager"] = TimingReport((10.0,) * 16, (0.0,) * 16, 1, 4, 0.0, 16)
        return found

    monkeypatch.setattr(verdict, "collect", jumped)
    seen = verdict.screen(sample.build(), sample.key, target())
    assert isinstance(seen, Refusal) and seen.reason is Reason.TIMING_UNSTABLE


def test_a_runner_that_is_stopped_counts_as_hung_and_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_SILENCE_LIMIT_S", 1.0)
    with RunnerProcess() as runner:
        assert runner.wait_ready() is None
        os.kill(runner._process.pid, signal.SIGSTOP)
        # More than a pipe holds: the parent must not wait in its own write.
        (last,) = runner.run(JOB, bytes(1 << 20))
        assert isinstance(last, protocol.Refused) and last.refusal.reason is Reason.HUNG
        assert not runner.alive


def test_a_runner_that_is_stopped_while_starting_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_START_LIMIT_S", 0.5)
    with RunnerProcess() as runner:
        os.kill(runner._process.pid, signal.SIGSTOP)
        with pytest.raises(JudgeError, match="not ready"):
            runner.wait_ready()
    assert not runner.alive


def test_a_runner_that_is_killed_in_the_middle_is_said_to_be() -> None:
    with RunnerProcess() as runner:
        assert runner.wait_ready() is None
        messages = runner.run(make_job(None, TASK, target(), TRIALS * 20, ()), b"")
        assert isinstance(next(messages), FamilyReport)
        os.kill(runner._process.pid, signal.SIGKILL)
        last = list(messages)[-1]
    assert isinstance(last, protocol.Refused) and "SIGKILL" in last.refusal.message
    assert last.refusal.reason is Reason.CRASHED


BOOT = process._BOOT


@pytest.mark.parametrize(
    ("patch", "layer"),
    [
        ("b.install_filter = lambda *a, **k: False", "seccomp"),
        ("b.landlock_abi = lambda: 0", "landlock"),
        ("def no(): raise b.BoxSetupError('no')\nb.forbid_new_privileges = no", ""),
    ],
    ids=["seccomp", "landlock", "no_new_privs"],
)
def test_a_runner_without_a_layer_is_refused_or_says_so(patch: str, layer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        process,
        "_BOOT",
        f"import sys; sys.path[:] = sys.argv[5:]\nimport torch_autokern.build.box_launcher as b\n{patch}\n{BOOT}",
    )
    refused = start_runner()
    assert isinstance(refused, Refusal) and refused.reason is Reason.BOX_REFUSED
    named = start_runner(allow_weak_box=True)
    if not layer:  # without it no layer holds for good, whatever a person accepts
        assert isinstance(named, Refusal)
        return
    assert isinstance(named, RunnerProcess)
    with named:
        assert layer not in named.box_level and "rlimits" in named.box_level


def test_stock_in_a_candidates_place_passes_everything_but_its_speed() -> None:
    with RunnerProcess() as runner:
        assert runner.wait_ready() is None
        found = collect(runner, JOB, b"", Evidence(TASK))
    assert isinstance(found, Found) and found.evidence.check() is None
    assert found.checks["repeats"].startswith("passed") and found.timings["eager"].checked
