"""Kill points and error injection: the work is struck at each of its system calls, and the folder is judged afterwards."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.torture.books import Books, faults, guarded, open_at, sample
from tests.torture.gate import Call, Decision, Ended, FailAfter, Go, run_gated
from tests.torture.scenarios import SCENARIOS, Scenario

Trial = Callable[[Path], list[str]]

# What disks, network disks, quotas, permissions and tables that are full answer with.
ERRNOS = (
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.EBUSY, errno.EACCES,
    errno.EPERM, errno.EROFS, errno.ENOENT, errno.EEXIST, errno.ENOMEM, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EXDEV,
    errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.ETIMEDOUT, errno.EFBIG, errno.ELOOP,
)  # fmt: skip
_REMADE = ("link", "rename", "unlink", "rmdir", "mkdir")  # the gate can make these in the child's place
_LIES = ("fsync", "flock", "fchmod", "chmod", "read")  # these may report a success that was none


@functools.cache
def _calls(scenario: Scenario, seed: int, folder: Path) -> tuple[str, ...]:
    """Names of the calls that the work makes undisturbed."""
    root = folder / "dry"
    scenario.prepare(root, seed)
    scenario.work(root, seed)  # whatever it imports is imported now, and not struck
    shutil.rmtree(root)
    scenario.prepare(root, seed)
    ended = run_gated(lambda: scenario.work(root, seed), lambda _call: Go.ON)
    shutil.rmtree(root)
    if ended.raised:
        raise AssertionError(f"{scenario.name} fails undisturbed:\n{ended.raised}")
    return tuple(ended.calls)


def kill_points(folder: Path) -> Iterator[Trial]:
    """SIGKILL before each call, and half way through each write. Every second round another process publishes, merges and
    cleans in the same folder meanwhile."""
    for seed in itertools.count():
        for scenario in SCENARIOS:
            for number, name in enumerate(_calls(scenario, seed, folder)):
                yield functools.partial(_kill, scenario, seed, number, Go.KILL)
                if name == "write":
                    yield functools.partial(_kill, scenario, seed, number, Go.HALF_KILL)


def _kill(scenario: Scenario, seed: int, number: int, how: Go, folder: Path) -> list[str]:
    root = folder / "store"
    books = scenario.prepare(root, seed)
    beside = _Beside(root, seed) if seed % 2 else None
    ended = run_gated(lambda: scenario.work(root, seed), lambda call: how if call.number == number else Go.ON)
    wrong = []
    if beside is not None:
        books, wrong = beside.stop(books)
    elif not ended.was_killed:
        wrong.append(f"not reached: {len(ended.calls)} calls, wanted {number}")
    wrong += _after(scenario, root, seed, books, ended)
    return [f"{scenario.name}, seed {seed}, {how.name} at call {number}: {each}" for each in wrong]


def _after(scenario: Scenario, root: Path, seed: int, books: Books, ended: Ended) -> list[str]:
    wrong = [f"raised: {ended.raised}"] if ended.raised else []
    if ended.value.startswith("published"):
        books = Books((*books.must, *books.may[:1]), books.may[1:], books.was_damaged)
    return wrong + guarded(lambda: scenario.check(root, seed)) + faults(root, books)


def errors(folder: Path) -> Iterator[Trial]:
    """First a dozen errors at every call of a publish and of a read; then every call of everything with one error in turn:
    once, from then on for ever, and after the call was made all the same, short writes and lies among them; then all of these
    at every call of a publish and of a read; then more turns."""
    chief = SCENARIOS[0], next(each for each in SCENARIOS if each.name.startswith("read all"))
    for scenario in chief:
        for number in range(len(_calls(scenario, 0, folder))):
            for code in ERRNOS[:12]:
                yield functools.partial(_fail, scenario, 0, number, code, False)
    yield from _turn(0, folder)
    for scenario in chief:
        for number, name in enumerate(_calls(scenario, 0, folder)):
            for decision, for_ever in _errors_of(name):
                yield functools.partial(_fail, scenario, 0, number, decision, for_ever)
    for turn in itertools.count(1):
        yield from _turn(turn, folder)


def _turn(turn: int, folder: Path) -> Iterator[Trial]:
    for scenario in SCENARIOS:
        for number, name in enumerate(_calls(scenario, turn % 10, folder)):
            kinds = list(_errors_of(name))
            decision, for_ever = kinds[(turn * 7 + number * 5) % len(kinds)]
            yield functools.partial(_fail, scenario, turn % 10, number, decision, for_ever)


def _errors_of(name: str) -> Iterator[tuple[Decision, bool]]:
    for code in ERRNOS:
        yield code, False
        if code != errno.EINTR:  # Python asks again after each: for ever would be for ever
            yield code, True
    if name in _REMADE:
        yield from ((FailAfter(code), False) for code in (errno.ESTALE, errno.EIO, errno.EEXIST, errno.ENOENT))
    if name == "write":
        yield Go.SHORT, False
        yield Go.SHORT, True
    if name in _LIES:
        yield Go.LIE, False


def _fail(scenario: Scenario, seed: int, number: int, decision: Decision, for_ever: bool, folder: Path) -> list[str]:
    root = folder / "store"
    books = scenario.prepare(root, seed)

    def decide(call: Call) -> Decision:
        if call.number < number or (call.number > number and not for_ever):
            return Go.ON
        if decision is Go.SHORT and call.name != "write":
            return Go.ON
        return decision

    ended = run_gated(lambda: scenario.work(root, seed), decide)
    words = errno.errorcode[decision] if isinstance(decision, int) else str(decision)
    place = f"{scenario.name}, seed {seed}, {words}{' from' if for_ever else ' at'} call {number}"
    return [f"{place} ({ended.calls[number : number + 1]}): {each}" for each in _after(scenario, root, seed, books, ended)]


# -- another process in the same folder ----------------------------------------------------------------------------------


class _Beside:
    """A process that publishes, reads, lists and cleans in the same folder until it is stopped; it says what it published."""

    def __init__(self, root: Path, seed: int) -> None:
        self._samples = [sample(2000 + seed * 8 + number, number % 2) for number in range(6)]
        self._read_end, write_end = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(write_end)
            return
        try:
            for number, each in enumerate(self._samples):
                store = open_at(root)
                if each.publish(store) != "memory_only":
                    os.write(write_end, bytes([number]))
                list(store.records())
                store.index()
                store.clean()
            os.write(write_end, b"\xff")
        except BaseException:  # noqa: BLE001 - a missing last byte tells the parent
            os.write(write_end, b"\xfe")
        finally:
            os._exit(0)

    def stop(self, books: Books) -> tuple[Books, list[str]]:
        """Let it end, or kill it in the middle when it takes long; the books with what it has acknowledged."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        words = b"".join(iter(lambda: os.read(self._read_end, 64), b""))
        os.close(self._read_end)
        told = {number for number in words if number < len(self._samples)}
        must = tuple(each for number, each in enumerate(self._samples) if number in told)
        may = tuple(each for number, each in enumerate(self._samples) if number not in told)
        wrong = ["raised: the process beside it"] if 0xFE in words else []
        return Books((*books.must, *must), (*books.may, *may), books.was_damaged), wrong
