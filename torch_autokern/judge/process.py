"""Runner processes as the parent sees them: started, fed, watched, and killed when they hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext

import torch

from torch_autokern.errors import DeviceError, JudgeError
from torch_autokern.judge import protocol
from torch_autokern.judge.outcome import Reason, Refusal
from torch_autokern.judge.protocol import (
    NO_BOX,
    Answer,
    Entering,
    Finished,
    Job,
    Message,
    Ready,
    Refused,
    family_and_seed,
)
from torch_autokern.store.key import DeviceType

_START_LIMIT_S = 120.0
_CANARY_LIMIT_S = 1.0
_CANARY_PAUSE_S = 3.0
_END_LIMIT_S = 60.0  # a driver takes a while to end a process whose kernel hangs
_SILENCE_LIMIT_S = 900.0  # no phase may ask for more
_BOOT = "import sys; sys.path[:] = sys.argv[5:]; from torch_autokern.judge.runner import main; sys.exit(main(sys.argv[1:5]))"
# glibc hands blocks above these sizes back to the system: raised, output pages stay resident on both sides.
_RESIDENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_ARENA_MAX": "1",
}
# The box must close before a second thread exists; torch sets its own thread count per job.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_DEVICE = {"CUDA_CACHE_DISABLE": "1"}
_without_box: set[DeviceType] = set()  # where a person named the risk, and the device did not work inside the box


class RunnerProcess:
    """One runner. `resident` keeps freed pages in its heap. Use as a context manager, or `close` it."""

    def __init__(
        self, device_type: DeviceType = "cpu", *, resident: bool = True, allow_weak_box: bool = False, box: str = ""
    ) -> None:
        self.device_type = device_type
        self._messages, theirs = os.pipe()
        jobs, self._jobs = os.pipe()
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        special = _DEVICE if device_type == "cuda" else _RESIDENT if resident else {}
        settings = [f"{name}={value}" for name, value in {**_ONE_THREAD, **special}.items()]
        told = [str(jobs), str(theirs), box or ("weak" if allow_weak_box else "strong"), device_type]
        command = ["/usr/bin/env", *settings, sys.executable, "-c", _BOOT, *told, *_search_path()]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._words, pass_fds=(jobs, theirs),
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        os.close(jobs)
        self.box_level = ""
        self.phase = "starting"
        self.go_on = True

    def __enter__(self) -> RunnerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def wait_ready(self) -> Refusal | None:
        """Wait for torch and the box; a refusal where the box does not hold.

        Raises:
            JudgeError: the process ended or stayed silent.
        """
        if self.box_level:
            return None
        try:
            message = protocol.receive(self._messages, time.monotonic() + _START_LIMIT_S)
        except TimeoutError as error:
            raise JudgeError(f"the runner was not ready after {_START_LIMIT_S:.0f} s") from error
        if isinstance(message, Refused):
            return message.refusal
        if not isinstance(message, Ready):
            raise JudgeError(f"the runner ended while starting: {self._last_words()}")
        ours = torch.backends.cpu.get_cpu_capability()
        if message.instructions != ours:
            raise JudgeError(
                f"stock runs with {message.instructions} in the runner and with {ours} here: it would be no baseline"
            )
        if message.canary_s > _CANARY_LIMIT_S:
            raise JudgeError(f"the device took {message.canary_s:.1f} s for a sum of a million numbers")
        self.box_level = message.box_level
        return None

    def run(self, job: Job, binary: bytes) -> Iterator[Message]:
        """Send a job and yield its reports; the last message is `Finished` or `Refused`.

        Set `go_on` to False while a report is out, and the runner ends the job there. A crash or a hang of the candidate is a
        `Refused`, and the process is gone.

        Raises:
            JudgeError: the runner failed in our own code.
        """
        self.phase = "loading"
        self.go_on = True
        allowed = _SILENCE_LIMIT_S
        try:
            protocol.send(self._jobs, job, time.monotonic() + allowed)
            protocol.write_frame(self._jobs, binary, time.monotonic() + allowed)
        except BrokenPipeError:
            yield self._ended()
            return
        except TimeoutError:
            yield self._hung(allowed)
            return
        while True:
            try:
                message = protocol.receive(self._messages, time.monotonic() + allowed)
            except TimeoutError:
                yield self._hung(allowed)
                return
            if message is None:
                yield self._ended()
                return
            if isinstance(message, Entering):
                self.phase = message.phase
                allowed = min(max(message.allowed_s, 1.0), _SILENCE_LIMIT_S)
                continue
            if isinstance(message, Refused) and message.refusal.reason is Reason.CRASHED:
                self._kill()  # it is ending itself: its device's context is lost
            yield message
            if isinstance(message, (Finished, Refused)):
                return
            try:
                protocol.send(self._jobs, Answer(self.go_on))
            except BrokenPipeError:
                yield self._ended()
                return
            allowed = _SILENCE_LIMIT_S

    def close(self) -> None:
        """End the process and everything in its session, and free its descriptors. Repeating is harmless."""
        self._kill()
        for name in ("_messages", "_jobs"):
            descriptor = getattr(self, name)
            if descriptor >= 0:
                os.close(descriptor)
                setattr(self, name, -1)
        self._words.close()

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise DeviceError(
                f"a runner did not end within {_END_LIMIT_S:.0f} s of being killed: its device hangs; look at it (nvidia-smi)"
            ) from None

    def _hung(self, allowed: float) -> Refused:
        self._kill()
        message = f"no answer for {allowed:.0f} s during {self.phase!r}: an endless loop, or a kernel that is far too slow."
        return Refused(Refusal(Reason.HUNG, message, *family_and_seed(self.phase)))

    def _ended(self) -> Refused:
        """The pipe closed: the candidate's fault when a signal ended the process, ours when Python did."""
        code = self._process.wait()
        if code >= 0:
            raise JudgeError(f"the runner ended with code {code} during {self.phase!r}: {self._last_words()}")
        name = signal.Signals(-code).name
        message = f"{name} during {self.phase!r}: {_EXPLAIN.get(name, 'the process was ended by a signal')}."
        return Refused(Refusal(Reason.CRASHED, message, *family_and_seed(self.phase)))

    def _last_words(self) -> str:
        self._words.seek(0)
        return self._words.read().decode(errors="replace").strip()[-1500:] or "it said nothing"


_EXPLAIN = {
    "SIGSEGV": "memory was touched that belongs to nobody, often one element beyond the end (or before the start) of a tensor",
    "SIGBUS": "memory was touched that belongs to nobody",
    "SIGILL": "an instruction that this processor lacks, or a trap",
    "SIGFPE": "an integer division by zero",
    "SIGABRT": "the C library aborted: a heap block was overwritten, or abort was called",
    "SIGSYS": "a system call that the box forbids",
    "SIGKILL": "out of memory, or killed from outside",
}


def start_runner(
    device_type: DeviceType = "cpu", *, resident: bool = True, allow_weak_box: bool = False
) -> RunnerProcess | Refusal:
    """A runner that is ready, or the box's refusal.

    On a GPU that includes the canary: a second process gets a second chance, and after that nothing more is started. Where a
    person named the risk (`allow_weak_box`) and the device works only outside of the box, it runs there and the level says so.

    Raises:
        JudgeError: the runner failed in our own code.
        DeviceError: two canaries failed.
    """
    if device_type == "cpu":
        return _ready(RunnerProcess(resident=resident, allow_weak_box=allow_weak_box))
    tries = [NO_BOX] if device_type in _without_box else ["", "", *([NO_BOX] if allow_weak_box else [])]
    words: list[str] = []
    for number, box in enumerate(tries):
        try:
            runner = _ready(RunnerProcess(device_type, allow_weak_box=allow_weak_box, box=box))
        except DeviceError:
            raise
        except JudgeError as error:
            words.append(str(error))
            if number + 1 < len(tries):
                time.sleep(_CANARY_PAUSE_S)
            continue
        if box == NO_BOX:
            _without_box.add(device_type)
        return runner
    raise DeviceError(
        f"{len(words)} fresh processes could not use the {device_type} device, the search stops; look at the device, and"
        f" never reset it from here. Seen: {words[-1]}"
    )


@contextmanager
def fresh_runners(
    device_type: DeviceType = "cpu",
    count: int = 1,
    *,
    resident: bool = True,
    allow_weak_box: bool = False,
    together: bool = True,
) -> Iterator[Iterator[RunnerProcess | Refusal]]:
    """`count` fresh processes, one after the other, each gone before the next does anything.

    All of them start `together`, and wait: importing torch takes seconds, starting CUDA more, and nothing may start while
    another one times. Otherwise each starts when the one before is gone, for what the first one nearly always decides.
    """

    def start() -> RunnerProcess | Refusal:
        return start_runner(device_type, resident=resident, allow_weak_box=allow_weak_box)

    def one_by_one(started: Iterable[RunnerProcess | Refusal]) -> Generator[RunnerProcess | Refusal]:
        for runner in started:
            with nullcontext() if isinstance(runner, Refusal) else runner:
                yield runner

    if count == 1 or not together:
        with closing(one_by_one(start() for _ in range(count))) as runners:
            yield runners
        return
    with ThreadPoolExecutor(count) as pool:
        waiting = [pool.submit(start) for _ in range(count)]
    with ExitStack() as stack:
        for future in waiting:
            if future.exception() is None and not isinstance(runner := future.result(), Refusal):
                stack.enter_context(runner)
        yield one_by_one([future.result() for future in waiting])


def _ready(runner: RunnerProcess) -> RunnerProcess | Refusal:
    try:
        refused = runner.wait_ready()
    except BaseException:
        runner.close()
        raise
    if refused is None:
        return runner
    runner.close()
    return refused


def _search_path() -> list[str]:
    """Our own import path, so that the runner finds the same package and torch."""
    return [entry or os.getcwd() for entry in sys.path]
