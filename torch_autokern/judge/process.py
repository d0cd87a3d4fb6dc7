"""Runner processes as the parent sees them: started, fed, watched, and killed when they hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import torch

from torch_autokern.errors import JudgeError
from torch_autokern.judge import protocol
from torch_autokern.judge.outcome import Reason, Refusal
from torch_autokern.judge.protocol import Answer, Entering, Finished, Job, Message, Ready, Refused

_START_LIMIT_S = 120.0
_SILENCE_LIMIT_S = 300.0  # no phase may ask for more
_BOOT = "import sys; sys.path[:] = sys.argv[4:]; from torch_autokern.judge.runner import main; sys.exit(main(sys.argv[1:4]))"
# glibc hands blocks above these sizes back to the system: raised, output pages stay resident on both sides.
_RESIDENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_ARENA_MAX": "1",
}
# The box must close before a second thread exists; torch sets its own thread count per job.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class RunnerProcess:
    """One runner. `resident` keeps freed pages in its heap. Use as a context manager, or `close` it."""

    def __init__(self, *, resident: bool = True, allow_weak_box: bool = False) -> None:
        self._messages, theirs = os.pipe()
        jobs, self._jobs = os.pipe()
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        settings = [f"{name}={value}" for name, value in {**_ONE_THREAD, **(_RESIDENT if resident else {})}.items()]
        weak = "1" if allow_weak_box else "0"
        command = ["/usr/bin/env", *settings, sys.executable, "-c", _BOOT, str(jobs), str(theirs), weak, *_search_path()]
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
        try:
            protocol.send(self._jobs, job)
            protocol.write_frame(self._jobs, binary)
        except BrokenPipeError:
            yield self._ended()
            return
        allowed = _SILENCE_LIMIT_S
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
        self._process.wait()

    def _hung(self, allowed: float) -> Refused:
        self._kill()
        message = f"no answer for {allowed:.0f} s during {self.phase!r}: an endless loop, or a kernel that is far too slow."
        return Refused(Refusal(Reason.HUNG, message, *_family_and_seed(self.phase)))

    def _ended(self) -> Refused:
        """The pipe closed: the candidate's fault when a signal ended the process, ours when Python did."""
        code = self._process.wait()
        if code >= 0:
            raise JudgeError(f"the runner ended with code {code} during {self.phase!r}: {self._last_words()}")
        name = signal.Signals(-code).name
        message = f"{name} during {self.phase!r}: {_EXPLAIN.get(name, 'the process was ended by a signal')}."
        return Refused(Refusal(Reason.CRASHED, message, *_family_and_seed(self.phase)))

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


def _family_and_seed(phase: str) -> tuple[str, int | None]:
    """From "family NAME, seed N", which is what the runner calls a trial's phase."""
    words = phase.replace(",", "").split()
    if len(words) == 4 and words[0] == "family" and words[3].isdigit():
        return words[1], int(words[3])
    return "", None


def _search_path() -> list[str]:
    """Our own import path, so that the runner finds the same package and torch."""
    return [entry or os.getcwd() for entry in sys.path]
