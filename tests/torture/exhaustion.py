"""Disks, inodes, file sizes and descriptors that run out, at every size at which they can."""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.torture.books import Books, faults, open_at, sample
from tests.torture.places import command, in_child, make_ext4, mount_tmpfs, private_mounts
from torch_autokern.store.layout import is_temporary_file

Trial = Callable[[Path], list[str]]
_RECORDS = 24


def full_disks(folder: Path) -> Iterator[Trial]:
    """A tmpfs of every size from 2 to 44 pages, and one of every number of inodes from 4 to 60."""
    for number in range(57):  # by turns, so that a part of them has some of each
        yield functools.partial(_full_tmpfs, f"nr_inodes={4 + number}")
        if number < 43:
            yield functools.partial(_full_tmpfs, f"size={(2 + number) * 4}k")


def full_ext4(folder: Path) -> Iterator[Trial]:
    """A small ext4 with little room, and one with few inodes."""
    for options in (("1M", "-O", "^has_journal", "-m", "0"), ("4M", "-N", "32"), ("2M", "-N", "24", "-O", "^has_journal")):
        yield functools.partial(_full_ext4, options)


def limits(folder: Path) -> Iterator[Trial]:
    """A limit on a file's size at every 23rd byte of a record, and on open descriptors from none to a dozen."""
    for more in range(13):
        yield functools.partial(_limited, resource.RLIMIT_NOFILE, more)
    for limit_bytes in range(0, len(sample(0).raw) + 23, 23):
        yield functools.partial(_limited, resource.RLIMIT_FSIZE, limit_bytes)


def _full_tmpfs(options: str, folder: Path) -> list[str]:
    def work() -> list[str]:
        return _fill_up(mount_tmpfs(folder / "small", options) / "store")

    return [f"tmpfs {options}: {each}" for each in in_child(work, private_mounts)]


def _full_ext4(options: tuple[str, ...], folder: Path) -> list[str]:
    image, mounted = folder / "small.img", folder / "small"
    mounted.mkdir(exist_ok=True)
    image.unlink(missing_ok=True)
    make_ext4(image, *options)

    def work() -> list[str]:
        command("mount", "-o", "loop", str(image), str(mounted))
        wrong = _fill_up(mounted / "store", records=120)
        command("umount", str(mounted))
        return wrong

    return [f"ext4 {' '.join(options)}: {each}" for each in in_child(work, private_mounts)]


def _fill_up(root: Path, records: int = _RECORDS) -> list[str]:
    """Publish until nothing fits, read, list and note meanwhile; then make room and go on."""
    samples = [sample(number, number % 3, 2000 + 700 * (number % 4)) for number in range(records)]
    store, statuses = open_at(root), []
    for number, each in enumerate(samples):
        statuses.append(each.publish(store))
        if number % 5 == 4:
            store.index()
            store.quarantine(each.key_digest, each.record_id, "failed")
    wrong = [] if "memory_only" in statuses else ["the disk never ran out"]
    if len(list(store.records())) != len(samples):
        wrong.append("a compiled kernel was lost to the disk")
    if any(store.notes(each.key_digest, each.record_id).quarantine is None for each in samples[4::5]):
        wrong.append("the process forgot its own quarantine")
    durable = tuple(each for each, status in zip(samples, statuses, strict=True) if status != "memory_only")
    wrong += faults(root, Books(durable))
    wrong += [f"left over: {path.name}" for path in root.rglob("*") if is_temporary_file(path.name)]
    store.clear()
    open_at(root).clean()
    if len(durable) > 2:  # so one record fits again, beside the lock's file and the folders
        wrong += faults(root, Books((), durable[:1]))
    return wrong


def _limited(kind: int, limit: int, folder: Path) -> list[str]:
    root, new, old = folder / "store", sample(1), sample(0, 3)
    old.publish(open_at(root))

    def work() -> list[str]:
        lowest = os.open("/", os.O_RDONLY) + limit if kind == resource.RLIMIT_NOFILE else limit
        if kind == resource.RLIMIT_NOFILE:
            os.close(lowest - limit)
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (lowest, hard))
        store = open_at(root)
        status = new.publish(store)
        store.index()
        store.quarantine(new.key_digest, new.record_id, "failed")
        with store.work_lock(new.key_digest, timeout_s=0.0):
            seen = {stored.record_id for stored in store.records()}
        resource.setrlimit(kind, (hard, hard))
        # What is on the disk needs a descriptor to be read: without one it is a miss. What is in memory needs none.
        is_lost = status == "memory_only" and new.record_id not in seen
        return [status, "the process lost its own record" if is_lost else ""]

    status, lost = in_child(work)
    durable = (new, old) if status != "memory_only" else (old,)
    wrong = [lost] if lost else []
    wrong += [f"left over: {path.name}" for path in root.rglob("*") if is_temporary_file(path.name)]
    wrong += faults(root, Books(durable, () if status != "memory_only" else (new,)))
    return [f"limit {kind} of {limit}: {each}" for each in wrong]
