"""Many processes, lying locks, wrong clocks, and two format versions in one folder."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import random
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from tests.torture.books import Books, Sample, faults, guarded, misread, open_at, sample
from tests.torture.gate import Call, Decision, Go, run_gated
from tests.torture.places import in_child
from torch_autokern.store import indexing, layout, record
from torch_autokern.store.layout import damaged_folder, pending_folder, pending_name, record_file, temporary_name
from torch_autokern.store.store import KernelStore, utc_now

Trial = Callable[[Path], list[str]]

# -- fork storms ---------------------------------------------------------------------------------------------------------

_PROCESSES = 24
_OPERATIONS = 6


def storms(folder: Path) -> Iterator[Trial]:
    """24 processes that publish, read, list, clean and fork with threads running; half of them are killed at random moments."""
    for seed in itertools.count():
        yield functools.partial(_storm, seed)


def _storm(seed: int, folder: Path) -> list[str]:
    root = folder / "store"
    samples = [sample(10_000 * seed + number, number % 4) for number in range(40)]
    read_end, write_end = os.pipe()
    pids = [_storming(root, samples, seed * 1000 + number, write_end) for number in range(_PROCESSES)]
    os.close(write_end)
    chance = random.Random(seed)
    for pid in chance.sample(pids, _PROCESSES // 2):
        time.sleep(chance.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)
    words = b"".join(iter(lambda: os.read(read_end, 1 << 16), b""))  # ends when the last grandchild has ended
    os.close(read_end)
    told = {number for (number,) in struct.iter_unpack("=H", words)}
    must = tuple(each for number, each in enumerate(samples) if number in told)
    may = tuple(each for number, each in enumerate(samples) if number not in told)
    wrong = ["raised: a process of the storm"] if 0xFFFF in told else []
    return [f"storm {seed}: {each}" for each in wrong + faults(root, Books(must, may))]


def _storming(root: Path, samples: list[Sample], seed: int, pipe: int, *, is_child: bool = False) -> int:
    pid = os.fork()
    if pid:
        return pid
    chance = random.Random(seed)
    store = open_at(root)
    try:
        for turn in range(_OPERATIONS):
            _one_operation(store, samples, chance, pipe)
            if turn == 2 and not is_child:
                # Fork in the middle: other threads of this process are inside the store, and one holds a lock.
                threads = [threading.Thread(target=_one_operation, args=(store, samples, chance, pipe)) for _ in range(3)]
                for thread in threads:
                    thread.start()
                with store.work_lock("storm", timeout_s=0.01):
                    child = _storming(root, samples, seed + 500, pipe, is_child=True)
                for thread in threads:
                    thread.join()
                os.waitpid(child, 0)
    except BaseException:  # noqa: BLE001 - told to the parent
        os.write(pipe, b"\xff\xff")
    finally:
        os._exit(0)


def _one_operation(store: KernelStore, samples: list[Sample], chance: random.Random, pipe: int) -> None:
    root = store.write_root
    assert root is not None
    kind = chance.randrange(7)
    if kind < 4:
        number = chance.randrange(len(samples))
        if samples[number].publish(store) != "memory_only":
            os.write(pipe, struct.pack("=H", number))
    elif kind == 4:
        if misread(open_at(root), samples)[1]:
            raise AssertionError("a bad read")
    elif kind == 5:
        with mock.patch.object(indexing, "COMPACT_ABOVE", 2):
            store.index().rows()
    else:
        store.clean()
        store.repair()


# -- lying locks ---------------------------------------------------------------------------------------------------------

_LIES: tuple[Decision, ...] = (
    Go.LIE, errno.ENOSYS, errno.ENOLCK, errno.EIO, errno.ESTALE, errno.EOPNOTSUPP, errno.EINVAL, errno.EACCES, errno.EPERM,
    errno.EBADF, errno.EDEADLK, errno.EWOULDBLOCK, errno.ENOSPC,
)  # fmt: skip


def lying_locks(folder: Path) -> Iterator[Trial]:
    """Four processes cold on one key, while flock, or its release, or opening or closing the lock file lies or fails."""
    for when, lie in itertools.product(("every flock", "open", "every second flock", "close", "unlock"), _LIES):
        yield functools.partial(_lie, lie, when)


def _lie(lie: Decision, when: str, folder: Path) -> list[str]:
    root, seen = folder / "store", [0]
    new = [sample(number) for number in range(4)]

    def decide(call: Call) -> Decision:
        if call.name == "flock":
            seen[0] += 1
            is_unlock = call.arguments[1] & 8
            if when == "every flock" or (when == "every second flock" and seen[0] % 2) or (when == "unlock" and is_unlock):
                return lie
        if isinstance(lie, int) and when == "open" and call.name == "openat" and b"/locks/" in call.text(1):
            return lie
        if isinstance(lie, int) and when == "close" and call.name == "close" and "/locks/" in _link(call):
            return lie
        return Go.ON

    def work() -> str:
        pids = [_cold(root, each) for each in new]
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        return str(max(statuses))

    started = time.monotonic()
    ended = run_gated(work, decide)
    wrong = [f"raised: {ended.raised}"] if ended.raised or ended.value != "0" else []
    if time.monotonic() - started > 10:
        wrong.append("it waited for longer than its limit")
    stored = list(open_at(root).records())
    if not stored:
        wrong.append("nothing was published")
    must = tuple(each for each in new if each.record_id in {one.record_id for one in stored})
    return [f"{lie} at {when}: {each}" for each in wrong + faults(root, Books(must))]


def _link(call: Call) -> str:
    try:
        return call.link_of(call.arguments[0])
    except OSError:
        return ""


def _cold(root: Path, new: Sample) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        store = open_at(root)
        with store.work_lock(new.key_digest, timeout_s=0.3):
            if not any(store.records(new.key_digest)):
                new.publish(store)
        status = 0 if any(store.records(new.key_digest)) else 2
    finally:
        os._exit(status)


# -- clocks --------------------------------------------------------------------------------------------------------------

# Start of time, a day later, the last second of 32 bits and one more, the end of ext4's old inodes, and the kernel's own limit.
_CLOCKS = (0, 90_000, 1_500_000_000, (1 << 31) - 1, 1 << 31, (1 << 32) + 1, 8_277_292_036)


def clocks(folder: Path) -> Iterator[Trial]:
    """Every pair of the process's clock and the disk's: at work, while cleaning, with a merge in the middle of a publish."""
    for now, disk in itertools.product(_CLOCKS, _CLOCKS):
        yield functools.partial(_clock, float(now), disk)


def _clock(now: float, disk: int, folder: Path) -> list[str]:
    root = folder / "store"
    old, new = sample(1), sample(2)
    old.publish(open_at(root))
    left_over = record_file(root, old.key_digest, old.record_id).parent / temporary_name()
    left_over.write_bytes(b"half")
    damaged_folder(root).mkdir()
    for path in root.rglob("*"):
        os.utime(path, (disk, disk))
    real = os.link

    def merge_then_link(first: object, second: object) -> None:
        if str(second).endswith(".akr"):
            os.utime(pending_folder(root) / pending_name(new.key_digest, new.record_id), (disk, disk))
            open_at(root).index()  # another process merges, and takes the announcement for a dead writer's
        real(first, second)  # type: ignore[arg-type]

    def work() -> list[str]:
        with mock.patch("time.time", lambda: now), mock.patch.object(indexing, "COMPACT_ABOVE", 0):
            store = open_at(root)
            with mock.patch("os.link", merge_then_link):
                status = new.publish(store)
            listed = {row.record_id for row in open_at(root).index().rows()}
            store.quarantine(old.key_digest, old.record_id, utc_now())
            store.clean()
            wrong = [] if status == "published" else [f"stuck: {status}"]
            if new.record_id not in listed:
                wrong.append("hidden: an acknowledged record")
            if left_over.exists() != (now - disk <= 3600):
                wrong.append("a writer's file was removed too early or never")
            return wrong + faults(root, Books((old, new)))

    return [f"clock {now:.0f}, disk {disk}: {each}" for each in guarded(lambda: in_child(work))]


# -- two format versions -------------------------------------------------------------------------------------------------


def versions(folder: Path) -> Iterator[Trial]:
    """Two processes of different format versions publish, list, repair, clean and clear in one folder at once."""
    for seed in itertools.count():
        yield functools.partial(_two_versions, seed)


def _two_versions(seed: int, folder: Path) -> list[str]:
    root = folder / "store"
    pids = [_of_version(root, version, seed) for version in (1, 2)]
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    wrong = [] if statuses == [0, 0] else [f"raised, or faults of one version: {statuses}"]
    before = {path: path.read_bytes() for path in (root / "v2").rglob("*") if path.is_file()}
    store = open_at(root)
    store.repair()
    store.clean()
    store.clear()
    after = {path: path.read_bytes() for path in (root / "v2").rglob("*") if path.is_file()}
    if before != after or not before:
        wrong.append("one version touched the other's files")
    return [f"versions, seed {seed}: {each}" for each in wrong]


def _of_version(root: Path, version: int, seed: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        layout.VERSION_FOLDER = f"v{version}"
        record.FORMAT_VERSION = version
        mine = tuple(sample(100 * seed + number, number % 3) for number in range(8))
        store = open_at(root)
        for number, each in enumerate(mine):
            if each.publish(store) == "memory_only":
                raise AssertionError("stuck")
            store.index()
            if number % 3 == version:
                store.repair()
                store.clean()
        gone = sample(100 * seed + 50, 9)
        gone.publish(store)
        store.clear(gone.key_digest)
        wrong = faults(root, Books(mine))
        status = 0 if not wrong else 3
    finally:
        os._exit(status)
