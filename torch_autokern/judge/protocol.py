"""What parent and runner say to each other: length-prefixed JSON over two pipes, typed on arrival, never pickle.

Frame: u32 little-endian length, then that many bytes. The parent sends a `Job` and, as a second frame, the artifact's bytes;
the runner answers with a run of messages that ends in `Finished` or `Refused`. After each report it waits for an `Answer`:
eleven more families are of no use for a kernel that failed the first.
"""

from __future__ import annotations

import os
import select
import selectors
import struct
import time

import msgspec

from torch_autokern.errors import JudgeError
from torch_autokern.judge.measure import TimingReport, TimingRequest
from torch_autokern.judge.outcome import Accuracy, Refusal
from torch_autokern.judge.verify import FamilyReport
from torch_autokern.runtime.plan import LaunchPlan
from torch_autokern.store.key import KernelKey

MAX_FRAME_BYTES = 64 << 20
NO_BOX = "none"  # named by a person (--allow-weak-box) where the device does not work inside a box
_LENGTH = struct.Struct("<I")


class Trial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One family with the seed that the parent drew for it. `number` is the trial's place in its process, which decides where
    its buffers lie."""

    family: str
    seed: int
    number: int


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One candidate on one key. `state_seed`: also check repeats, thread counts, callers, streams; None skips them.
    Of large results some rows are compared with the truth; in the trial with number 0 all of them, unless `sampled`.
    Without a `plan` stock itself is the candidate."""

    identity: str
    plan: LaunchPlan | None
    key: KernelKey
    threads: int
    accuracy: Accuracy
    trials: tuple[Trial, ...]
    state_seed: int | None
    with_probes: bool
    timings: tuple[TimingRequest, ...]
    sampled: bool = False


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """The runner is in its box; `instructions` is the vector level that stock runs with there ("AVX512"), `canary_s` how long
    the device took for a sum whose result is known."""

    box_level: str
    instructions: str
    canary_s: float = 0.0


class Entering(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="entering"):
    """What the runner does next, and how long it may take before it counts as hung."""

    phase: str
    allowed_s: float


class StateReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="state"):
    """Check name to what passed."""

    checks: dict[str, str]
    deterministic: bool


class Refused(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refused"):
    """A rule without a measure was broken."""

    refusal: Refusal


class Finished(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="finished"):
    """The job is done; the runner waits for the next one."""


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parent to the runner, after a report."""

    go_on: bool


Message = Ready | Entering | FamilyReport | StateReport | TimingReport | Refused | Finished
_DECODER = msgspec.json.Decoder(Message)
_JOB_DECODER = msgspec.json.Decoder(Job)
_ANSWER_DECODER = msgspec.json.Decoder(Answer)


def family_and_seed(phase: str) -> tuple[str, int | None]:
    """From "family NAME, seed N", "state, seed N" and the like, which is what the runner calls its phases."""
    name, _, seed = phase.partition(", seed ")
    if not seed.isdigit():
        return "", None
    return name.removeprefix("family "), int(seed)


def write_frame(descriptor: int, body: bytes, deadline: float | None = None) -> None:
    """Send one frame. With a `deadline` (`time.monotonic()`) no more is written at once than a pipe surely takes: a process
    that was stopped reads nothing, and a larger write would wait for it for ever.

    Raises:
        BrokenPipeError: the other side is gone.
        TimeoutError: `deadline` passed.
    """
    view = memoryview(_LENGTH.pack(len(body)) + body)
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_WRITE)
        while view:
            if deadline is not None and not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            # A pipe that is writable takes PIPE_BUF bytes without waiting.
            view = view[os.write(descriptor, view if deadline is None else view[: select.PIPE_BUF]) :]


def send(descriptor: int, message: Message | Job | Answer, deadline: float | None = None) -> None:
    """Send one message; `deadline` as in `write_frame`."""
    write_frame(descriptor, msgspec.json.encode(message), deadline)


def receive_job(descriptor: int) -> tuple[Job, bytes] | None:
    """The runner's side: the next job with its artifact, None when the parent has closed the pipe."""
    body = _read_frame(descriptor, None)
    if body is None:
        return None
    binary = _read_frame(descriptor, None)
    return None if binary is None else (_JOB_DECODER.decode(body), binary)


def receive_answer(descriptor: int) -> bool:
    """The runner's side: whether the parent wants more; False also when it is gone."""
    body = _read_frame(descriptor, None)
    return body is not None and _ANSWER_DECODER.decode(body).go_on


def receive(descriptor: int, deadline: float) -> Message | None:
    """The parent's side: the next message, None when the runner is gone.

    Raises:
        TimeoutError: `time.monotonic()` passed `deadline`.
        JudgeError: bytes that are no message.
    """
    body = _read_frame(descriptor, deadline)
    if body is None:
        return None
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise JudgeError(f"the runner sent something that is no message ({error}); its results are not used") from error


def _read_frame(descriptor: int, deadline: float | None) -> bytes | None:
    head = _read(descriptor, _LENGTH.size, deadline)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise JudgeError(f"a frame of {length} bytes was announced; at most {MAX_FRAME_BYTES} are allowed")
    return _read(descriptor, length, deadline)


def _read(descriptor: int, length: int, deadline: float | None) -> bytes | None:
    parts: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while length:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not selector.select(wait):
                raise TimeoutError
            part = os.read(descriptor, min(length, 1 << 20))
            if not part:
                return None
            parts.append(part)
            length -= len(part)
    return b"".join(parts)
