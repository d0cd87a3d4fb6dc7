"""Power cuts: on a real ext4 image that stops dead, and by replaying a recorded stream of calls in every order a disk may keep.

**Real.** A fresh ext4 image (a copy of one that `mkfs.ext4` made) is mounted through a loop device; a writer publishes and
acknowledges; at a random moment the file system is shut down by ext4's own ioctl, journal not flushed, so that what the
kernel held in memory is gone. It is unmounted and mounted again (the journal replays), judged, and read by `e2fsck -n`. This
is how xfstests cuts the power (`godown`). It loses all that the kernel had not written; it cannot show a disk that
acknowledges a flush and forgets it, or that tears a sector. It needs root and a loop device.

**Replayed.** The gate records every write, name and sync of a run. A cut at any moment keeps what the disk model allows:

- `ordered`: ext4 in ordered mode with delayed allocation. Names change in the order in which they were changed, up to some
  moment after the last sync (a sync of anything commits the journal); a file's bytes are there if it was synced, else none, a
  part or all.
- `weakest`: what POSIX promises and no more. Each name is there only for sure once its own folder was synced, whatever became
  of others; unsynced bytes may be missing, a part, zeros, or all there.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import os
import random
import shutil
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from tests.torture.books import TALLY, Books, Sample, faults, open_at, sample
from tests.torture.gate import Call, Decision, Go, run_gated
from tests.torture.places import command, in_child, make_ext4, private_mounts
from torch_autokern.store import indexing

Trial = Callable[[Path], list[str]]
SABOTAGES = ("no file sync", "no folder sync")


# -- the stream ----------------------------------------------------------------------------------------------------------


class Event(NamedTuple):
    """One change or one sync. `what`: mkdir, create, write, link, rename, unlink, sync_file, sync_folder, ack. `path` is
    relative to the recorded folder; `other` the second name or the acknowledged record; `inode` counts files as they appear."""

    what: str
    path: str
    other: str = ""
    inode: int = -1
    body: bytes = b""


class _Recorder:
    """Turns gated calls into events, knowing which names exist. Fault-free runs only: a call is taken to succeed unless its
    name says that it cannot."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self.events: list[Event] = []
        self._inodes: dict[str, int] = {}
        self._folders = {"."}
        self._born = 0

    def decide(self, call: Call) -> Decision:
        """Record, and let the call be made; an acknowledgement is a call that only the recorder sees."""
        handler = getattr(self, "_" + call.name, None)
        return Go.ON if handler is None else handler(call)

    def _name(self, raw: bytes | str) -> str | None:
        text = os.fsdecode(raw)
        return os.path.relpath(text, self._folder) if text.startswith(self._folder) else None

    def _access(self, call: Call) -> Decision:
        text = os.fsdecode(call.text(0))
        if text.startswith("ack:"):
            self.events.append(Event("ack", "", text[4:]))
            return Go.LIE
        return Go.ON

    def _openat(self, call: Call) -> Decision:
        name = self._name(call.text(1))
        if name is not None and call.arguments[2] & os.O_CREAT and name not in self._inodes:
            self._inodes[name] = self._born
            self.events.append(Event("create", name, inode=self._born))
            self._born += 1
        return Go.ON

    def _write(self, call: Call) -> Decision:
        name = self._name(call.link_of(call.arguments[0]))
        if name is not None:
            self.events.append(Event("write", name, inode=self._inodes[name], body=call.buffer()))
        return Go.ON

    def _fsync(self, call: Call) -> Decision:
        name = self._name(call.link_of(call.arguments[0]))
        if name in self._inodes:
            self.events.append(Event("sync_file", name, inode=self._inodes[name]))
        elif name is not None:
            self.events.append(Event("sync_folder", name))
        return Go.ON

    def _mkdir(self, call: Call) -> Decision:
        name = self._name(call.text(0))
        if name is not None and name not in self._folders:
            self._folders.add(name)
            self.events.append(Event("mkdir", name))
        return Go.ON

    def _link(self, call: Call) -> Decision:
        old, new = self._name(call.text(0)), self._name(call.text(1))
        if old is not None and new is not None and new not in self._inodes:
            self._inodes[new] = self._inodes[old]
            self.events.append(Event("link", old, new, self._inodes[old]))
        return Go.ON

    def _rename(self, call: Call) -> Decision:
        old, new = self._name(call.text(0)), self._name(call.text(1))
        if old is not None and new is not None:
            self._inodes[new] = self._inodes.pop(old)
            self.events.append(Event("rename", old, new, self._inodes[new]))
        return Go.ON

    def _unlink(self, call: Call) -> Decision:
        name = self._name(call.text(0))
        if name in self._inodes:
            del self._inodes[name]
            self.events.append(Event("unlink", str(name)))
        return Go.ON


def record(folder: Path, work: Callable[[], object]) -> list[Event]:
    """The events of a run of `work` in `folder`, which is empty."""
    recorder = _Recorder(folder)
    ended = run_gated(work, recorder.decide)
    if ended.raised:
        raise AssertionError(ended.raised)
    return recorder.events


# -- what a disk may have kept -------------------------------------------------------------------------------------------


def rebuild(events: list[Event], cut: int, model: str, chance: random.Random, folder: Path) -> None:
    """Make in `folder` one state that `model` allows after a cut behind the first `cut` events."""
    done = events[:cut]
    synced = max((place for place, event in enumerate(done) if event.what.startswith("sync")), default=-1)
    if model == "whole":
        kept = done
    elif model == "ordered":
        kept = done[: chance.randint(synced + 1, cut)]
    else:
        kept = [event for place, event in enumerate(done) if _is_safe(event, done[place:]) or chance.random() < 0.5]
    sizes = _kept_bytes(done, model, chance)
    _make_names(kept, sizes, folder)


def _is_safe(event: Event, later: list[Event]) -> bool:
    """Whether a change of names is on the disk for sure: its folder was synced after it."""
    name = event.other if event.what in ("link", "rename") else event.path
    parent = os.path.dirname(name) or "."
    return any(each.what == "sync_folder" and each.path == parent for each in later)


def _kept_bytes(done: list[Event], model: str, chance: random.Random) -> dict[int, bytes]:
    """Each file's bytes: what was synced for sure, of the rest none, a part, all, and in the weakest model zeros."""
    bodies: dict[int, bytes] = {}
    safe: dict[int, int] = {}
    for event in done:
        if event.what == "write":
            bodies[event.inode] = bodies.get(event.inode, b"") + event.body
        elif event.what == "sync_file":
            safe[event.inode] = len(bodies.get(event.inode, b""))
    if model == "whole":
        return bodies
    kept = {}
    for inode, body in bodies.items():
        length = safe.get(inode, 0)
        if length < len(body):
            length = chance.choice((length, chance.randint(length, len(body)), len(body)))
        kept[inode] = body[:length]
        if model == "weakest" and length > safe.get(inode, 0) and chance.random() < 0.3:
            kept[inode] = body[: safe.get(inode, 0)] + bytes(length - safe.get(inode, 0))
    return kept


def _make_names(kept: list[Event], bodies: dict[int, bytes], folder: Path) -> None:
    names: dict[str, int] = {}
    folders = {"."}
    for event in kept:
        if event.what == "mkdir":
            folders.add(event.path)
        elif event.what == "create":
            names[event.path] = event.inode
        elif event.what == "link":
            names[event.other] = event.inode
        elif event.what == "rename":
            names[event.other] = event.inode
            names.pop(event.path, None)
        elif event.what == "unlink":
            names.pop(event.path, None)
    for path in sorted(folders):
        if os.path.dirname(path) in (*folders, ""):
            with contextlib.suppress(FileNotFoundError, FileExistsError):  # its own parent was lost
                os.mkdir(folder / path, 0o700)
    for path, inode in names.items():
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(folder / path, os.O_WRONLY | os.O_CREAT, 0o600)
            os.write(descriptor, bodies.get(inode, b""))
            os.close(descriptor)


# -- the run that is cut -------------------------------------------------------------------------------------------------


def _samples(seed: int) -> list[Sample]:
    return [sample(100 * seed + number, number % 3, (1280, 40, 5000)[number % 3]) for number in range(6)]


def _publish_and_acknowledge(root: Path, seed: int) -> None:
    """Publish six records, merging the lists now and then, and note a quarantine; say what is durable."""
    with mock.patch.object(indexing, "COMPACT_ABOVE", seed % 3), mock.patch.object(indexing, "MERGE_ABOVE_FILES", 1):
        for number, each in enumerate(_samples(seed)):
            if each.publish(open_at(root)) != "memory_only":
                os.access("ack:" + each.record_id, os.F_OK)
            if number % 2:
                open_at(root).index()
        last = _samples(seed)[-1]
        for reason in ("first", "second"):
            if not open_at(root).quarantine(last.key_digest, last.record_id, reason):
                os.access("ack:quarantine", os.F_OK)


@functools.cache
def _stream(folder: Path, seed: int, sabotage: str) -> list[Event]:
    recorded = folder / "recorded"
    recorded.mkdir()
    with _sabotaged(sabotage):
        events = record(recorded, lambda: _publish_and_acknowledge(recorded / "store", seed))
    whole = folder / "whole"
    whole.mkdir()
    rebuild(events, len(events), "whole", random.Random(0), whole)
    if _tree(whole) != _tree(recorded):
        raise AssertionError("the recorded events do not rebuild the folder: the recorder misses a call")
    shutil.rmtree(recorded)
    shutil.rmtree(whole)
    return events


def _tree(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@contextlib.contextmanager
def _sabotaged(kind: str) -> Iterator[None]:
    """Switches one promise of the store off, to see that the campaign notices."""
    if kind == SABOTAGES[0]:
        with mock.patch("torch_autokern.store.files._sync_file", lambda _descriptor: None):
            yield
    elif kind == SABOTAGES[1]:
        with mock.patch("torch_autokern.store.files.sync_folders", lambda *_: None):
            with mock.patch("torch_autokern.store.indexing.sync_folders", lambda *_: None):
                yield
    else:
        yield


def replayed_cuts(folder: Path, sabotage: str = "") -> Iterator[Trial]:
    """Cuts at random moments of recorded runs, by both models in turn."""
    for number in itertools.count():
        yield functools.partial(_replay, number, ("ordered", "weakest")[number % 2], sabotage)


def _replay(number: int, model: str, sabotage: str, folder: Path) -> list[str]:
    seed = number % 12
    events = _stream(folder, seed, sabotage)
    chance = random.Random(number)
    cut = chance.randint(0, len(events))
    rebuild(events, cut, model, chance, folder)
    acknowledged = [event.other for event in events[:cut] if event.what == "ack"]
    books = _books(_samples(seed), set(acknowledged))
    wrong = faults(folder / "store", books)
    last = _samples(seed)[-1]
    quarantined = open_at(folder / "store").notes(last.key_digest, last.record_id).quarantine is not None
    if "quarantine" in acknowledged and not quarantined:
        wrong.append("lost: an acknowledged quarantine")
    return [f"cut {number} ({model}, seed {seed}, after {cut} of {len(events)} events): {each}" for each in wrong]


def _books(samples: list[Sample], acknowledged: set[str]) -> Books:
    must = tuple(each for each in samples if each.record_id in acknowledged)
    return Books(must, tuple(each for each in samples if each.record_id not in acknowledged))


# -- the real one --------------------------------------------------------------------------------------------------------

# _IOR('X', 125, __u32) of fs/ext4/ext4.h, and EXT4_GOING_FLAGS_NOLOGFLUSH: stop at once, write nothing more, not the journal.
_EXT4_SHUTDOWN, _NO_LOG_FLUSH = 0x8004587D, struct.pack("=I", 2)
_MOUNT_OPTIONS = ("defaults", "noauto_da_alloc", "data=writeback", "nodelalloc", "commit=1", "data=journal")
_WRITES = 400


def ext4_cuts(folder: Path, sabotage: str = "") -> Iterator[Trial]:
    """Cuts of a real ext4, by each of several mount options in turn."""
    for number in itertools.count():
        yield functools.partial(_cut_ext4, number, _MOUNT_OPTIONS[number % len(_MOUNT_OPTIONS)], sabotage)


@functools.cache
def _pristine(folder: Path) -> Path:
    image = folder / "pristine.img"
    make_ext4(image, "48M")
    return image


def _cut_ext4(number: int, options: str, sabotage: str, folder: Path) -> list[str]:
    pristine = _pristine(folder)
    image, mounted = folder / "store.img", folder / "mounted"
    shutil.copyfile(pristine, image)
    mounted.mkdir(exist_ok=True)
    samples = [sample(1000 * number + each, each % 5, (1280, 40, 5000)[each % 3]) for each in range(_WRITES)]

    def work() -> list[str]:
        command("mount", "-o", f"loop,{options}", str(image), str(mounted))
        told = _write_until_the_cut(mounted / "store", samples, random.Random(number).uniform(0.02, 0.6), sabotage)
        _unmount(mounted)
        command("mount", "-o", "loop", str(image), str(mounted))
        last = max(told, default=-1)
        books = Books(tuple(samples[each] for each in sorted(told)), tuple(samples[last + 1 : last + 3]))
        wrong = faults(mounted / "store", books)
        _unmount(mounted)
        command("e2fsck", "-f", "-n", str(image))
        return [str(len(told)), *wrong]

    acknowledged, *wrong = in_child(work, private_mounts)
    TALLY["acknowledged before a real cut"] += int(acknowledged)
    return [f"real cut {number} ({options}): {each}" for each in wrong]


def _write_until_the_cut(root: Path, samples: list[Sample], seconds: float, sabotage: str) -> set[int]:
    """Publish in another process, stop the file system in the middle; which of the samples were acknowledged."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        with _sabotaged(sabotage):
            for number, each in enumerate(samples):
                if each.publish(open_at(root)) == "memory_only":
                    break  # the file system is gone
                os.write(write_end, struct.pack("=H", number))
                if number % 7 == 6:
                    open_at(root).index()
        os._exit(0)
    os.close(write_end)
    time.sleep(seconds)
    descriptor = os.open(root.parent, os.O_RDONLY)
    fcntl.ioctl(descriptor, _EXT4_SHUTDOWN, _NO_LOG_FLUSH)
    os.close(descriptor)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    words = b"".join(iter(lambda: os.read(read_end, 1 << 16), b""))
    os.close(read_end)
    return {number for (number,) in struct.iter_unpack("=H", words)}


def _unmount(folder: Path) -> None:
    for _ in range(50):
        try:
            command("umount", str(folder))
        except OSError:
            time.sleep(0.02)
        else:
            return
    command("umount", str(folder))
