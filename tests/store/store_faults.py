"""Children that may die, and system calls that fail or kill: what the store's tests do to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

# Every call by which the store changes or reads a disk.
SYSTEM_CALLS = (
    "chmod",
    "close",
    "fchmod",
    "fstat",
    "fsync",
    "link",
    "listdir",
    "lstat",
    "mkdir",
    "open",
    "read",
    "rename",
    "replace",
    "rmdir",
    "unlink",
    "write",
)
NOBODY = 65534


class CallCounter:
    """How many watched calls were made so far."""

    def __init__(self) -> None:
        self.count = 0
        self.names: list[str] = []


@contextlib.contextmanager
def watched_calls(on_call: Callable[[int, str, Callable[..., Any], tuple[Any, ...]], Any]) -> Iterator[CallCounter]:
    """Route every system call through ``on_call(number, name, real, args)``, numbered from 0."""
    counter = CallCounter()

    def watch(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            number = counter.count
            counter.count += 1
            counter.names.append(name)
            return on_call(number, name, lambda *given: real(*given, **kwargs), args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in SYSTEM_CALLS:
            patch.setattr(os, name, watch(name))
        yield counter


def count_calls(work: Callable[[], object]) -> list[str]:
    """Names of the system calls that `work` makes, in order."""
    with watched_calls(lambda _number, _name, real, args: real(*args)) as counter:
        work()
    return counter.names


def killed_at(number: int, moment: str, work: Callable[[], object]) -> Callable[[], object]:
    """`work`, killed by SIGKILL ``before`` or ``after`` its call `number`, or ``half`` way through it if it is a write."""

    def on_call(now: int, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if now != number:
            return real(*args)
        try:
            if moment == "half" and name == "write":
                real(args[0], args[1][: len(args[1]) // 2])
            elif moment == "after":
                real(*args)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    def run() -> object:
        with watched_calls(on_call):
            return work()

    return run


@contextlib.contextmanager
def failing_calls(number: int, code: int, *, for_ever: bool) -> Iterator[CallCounter]:
    """Call `number` fails with errno `code`, and all later ones too if `for_ever`. `close` still closes."""

    def on_call(now: int, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if now < number or (now > number and not for_ever):
            return real(*args)
        if name == "close":
            real(*args)
        raise OSError(code, os.strerror(code))

    with watched_calls(on_call) as counter:
        yield counter


class Child:
    """A forked process that runs `work` and sends back its value as JSON."""

    def __init__(self, work: Callable[[], object], *, uid: int | None = None, umask: int | None = None) -> None:
        read_end, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(write_end)
            self._pipe = read_end
            return
        status = 1
        try:
            os.close(read_end)
            if umask is not None:
                os.umask(umask)
            if uid is not None and os.geteuid() == 0:
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            answer = {"value": work()}
            status = 0
        except BaseException:  # noqa: BLE001 - sent to the parent, which raises it
            answer = {"error": traceback.format_exc()}
        finally:
            body = json.dumps(answer).encode()
            while body:
                body = body[os.write(write_end, body) :]
            os._exit(status)

    def join(self) -> Any:
        """The value; None where the child was killed. Raises AssertionError with the child's traceback."""
        pieces = []
        while piece := os.read(self._pipe, 1 << 16):
            pieces.append(piece)
        os.close(self._pipe)
        os.waitpid(self.pid, 0)
        if not pieces:
            return None
        answer = json.loads(b"".join(pieces))
        if "error" in answer:
            raise AssertionError(answer["error"])
        return answer["value"]


def run_in_child(work: Callable[[], object], *, uid: int | None = None, umask: int | None = None) -> Any:
    """Run in a forked process and return the value; None where it was killed."""
    return Child(work, uid=uid, umask=umask).join()


def run_together(works: Sequence[Callable[[], object]]) -> list[Any]:
    """Run all at once, each in its own process."""
    children = [Child(work) for work in works]
    return [child.join() for child in children]
