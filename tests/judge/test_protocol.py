"""What comes back from a runner is checked before it is believed."""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.judge.samples import samples
from torch_autokern.errors import InvalidInputError, JudgeError
from torch_autokern.judge import protocol
from torch_autokern.judge.measure import TimingReport, TimingRequest
from torch_autokern.judge.outcome import Accuracy, Reason, Refusal, as_accuracy
from torch_autokern.judge.process import RunnerProcess


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def _soon() -> float:
    return time.monotonic() + 2


def test_a_message_comes_back_as_it_was_sent(pipe: tuple[int, int]) -> None:
    message = protocol.Refused(Refusal(Reason.WRONG_VALUE, "text", "normal", 7, 1, (2, 3), 0.5, None, 1e-3, 1e-7, 2e-7))
    protocol.send(pipe[1], message)
    assert protocol.receive(pipe[0], _soon()) == message


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'{"type":"unknown"}', b'{"type":"finished","extra":1}', b'{"type":"refused"}',
        b'{"type":"timing","stock_us":["1"],"candidate_us":[],"repeat":1,"slots":1,"copy_us":0,"checked":0}',
        b'{"type":"refused","refusal":{"reason":"i_like_it","message":""}}', b"[" * 200000,
        pickle.dumps(Refusal), b"\x1b[2J\x1b]0;title\x07", b"\xff" * 64, b'{"type":"finished"}{"type":"finished"}',
    ],
    ids=range(13),
)  # fmt: skip
def test_bytes_that_are_no_message_are_refused(pipe: tuple[int, int], body: bytes) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", "import os,sys; d=sys.stdin.buffer.read()\nwhile d: d=d[os.write(1,d):]"],
        stdin=subprocess.PIPE, stdout=pipe[1],
    )  # fmt: skip
    assert writer.stdin is not None
    writer.stdin.write(struct.pack("<I", len(body)) + body)
    writer.stdin.close()
    with pytest.raises(JudgeError, match="no message"):
        protocol.receive(pipe[0], time.monotonic() + 20)
    writer.wait()


def test_an_announced_length_beyond_the_limit_is_refused_before_reading(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], struct.pack("<I", protocol.MAX_FRAME_BYTES + 1))
    with pytest.raises(JudgeError, match="at most"):
        protocol.receive(pipe[0], _soon())


def test_half_a_frame_times_out_and_a_closed_pipe_is_the_end(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], struct.pack("<I", 10) + b"half")
    with pytest.raises(TimeoutError):
        protocol.receive(pipe[0], time.monotonic() + 0.05)
    reader, writer = os.pipe()
    os.close(writer)
    assert protocol.receive(reader, _soon()) is None
    os.close(reader)


def test_a_runner_is_boxed_and_ends_with_its_pipe() -> None:
    runner = RunnerProcess()
    assert runner.wait_ready() is None
    assert "seccomp" in runner.box_level
    assert runner.alive
    runner.close()
    assert not runner.alive
    runner.close()


def test_stock_is_as_fast_in_the_box_as_outside() -> None:
    # Behind the box ATen once found no /proc/cpuinfo and ran without vectors: stock took 8.4 ms instead of 0.7.
    sample = next(s for s in samples("honest") if s.name == "softmax_rows")
    x = torch.randn(96, 1000)
    here = min(_once_us(x) for _ in range(50))
    request = TimingRequest(1, 0.2, 10, 20)
    artifact = sample.build()
    job = protocol.Job(
        artifact.identity, sample.candidate.plan, sample.key, 1, Accuracy(), (), None, False, (request,)
    )  # fmt: skip
    with RunnerProcess() as runner:
        assert runner.wait_ready() is None
        reports = [m for m in runner.run(job, artifact.binary) if isinstance(m, TimingReport)]
    assert min(reports[0].stock_us) < 3 * here


def _once_us(x: torch.Tensor) -> float:
    begin = time.perf_counter_ns()
    torch.ops.aten._softmax.default(x, 1, False)
    return (time.perf_counter_ns() - begin) / 1000


@pytest.mark.long
def test_a_runner_ends_when_its_parent_is_killed() -> None:
    program = (
        "from torch_autokern.judge.process import RunnerProcess\n"
        "import time\n"
        "r = RunnerProcess(); r.wait_ready(); print(r._process.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if "State:\tZ" in Path(f"/proc/{child}/status").read_text():
            return
        time.sleep(0.2)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the runner outlived its parent by 20 s")


@pytest.mark.parametrize(
    "value", ["loose", Accuracy("tolerance"), Accuracy("tolerance", -1.0, 1.0), Accuracy("tolerance", float("nan"))]
)
def test_an_accuracy_that_means_nothing_is_an_error(value: Accuracy | str) -> None:
    with pytest.raises(InvalidInputError):
        as_accuracy(value)
    assert as_accuracy("stock") == Accuracy("stock") and as_accuracy("exact").kind == "exact"
