"""Hostile folders: every place of a store taken by something that is not ours, and every user, owner, mode and umask."""

from __future__ import annotations

import functools
import itertools
import os
import random
import resource
import signal
import socket
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar
from unittest import mock

from tests.torture.books import Books, faults, guarded, misread, open_at, sample
from tests.torture.places import as_user, in_child
from torch_autokern.errors import StoreError
from torch_autokern.store.folders import choose_folder
from torch_autokern.store.layout import lock_file, new_index_file, note_file, pending_folder, pending_name, record_file
from torch_autokern.store.store import KernelStore, open_store

Trial = Callable[[Path], list[str]]
_Case = TypeVar("_Case")
NOBODY, STRANGER = 65534, 54321
_OLD, _OTHER, _NEW = sample(1), sample(2, 3), sample(3)
_SECONDS = 20
_MEMORY_BYTES = 4 << 30

# -- what takes a place --------------------------------------------------------------------------------------------------


def _link_to(target: str) -> Callable[[Path, Path], None]:
    return lambda place, elsewhere: place.symlink_to(elsewhere / target)


def _socket(place: Path, elsewhere: Path) -> None:
    here = os.open(".", os.O_RDONLY)
    os.chdir(place.parent)  # a socket's whole path is limited to 108 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(place.name)
    os.fchdir(here)
    os.close(here)


def _device(major: int, minor: int) -> Callable[[Path, Path], None]:
    return lambda place, _elsewhere: os.mknod(place, stat.S_IFCHR | 0o600, os.makedev(major, minor))


def _sparse(place: Path, elsewhere: Path) -> None:
    place.touch(mode=0o600)
    os.truncate(place, 1 << 40)


def _full_folder(place: Path, elsewhere: Path) -> None:
    place.mkdir(mode=0o700)
    for number in range(300):
        (place / f"{number:032x}.akr").touch(mode=0o600)
        (place / os.fsdecode(b"\xff\n" + str(number).encode())).touch(mode=0o600)


def _deep_folder(place: Path, elsewhere: Path) -> None:
    place.mkdir(mode=0o700)
    here = os.open(".", os.O_RDONLY)
    os.chdir(place)
    for _ in range(300):
        os.mkdir("d" * 40)
        os.chdir("d" * 40)
    os.fchdir(here)
    os.close(here)


def _file(body: bytes, mode: int) -> Callable[[Path, Path], None]:
    def make(place: Path, elsewhere: Path) -> None:
        place.write_bytes(body)
        place.chmod(mode)

    return make


def _folder(mode: int) -> Callable[[Path, Path], None]:
    def make(place: Path, elsewhere: Path) -> None:
        place.mkdir()
        place.chmod(mode)

    return make


def _foreign(body: bytes | None) -> Callable[[Path, Path], None]:
    def make(place: Path, elsewhere: Path) -> None:
        _folder(0o755)(place, elsewhere) if body is None else _file(body, 0o644)(place, elsewhere)
        os.chown(place, STRANGER, STRANGER)

    return make


_THINGS: dict[str, Callable[[Path, Path], None]] = {
    "a link to a folder": _link_to("folder"),
    "a link to a whole record": _link_to("record"),
    "a dangling link": _link_to("nothing"),
    "a link to itself": lambda place, _elsewhere: place.symlink_to(place),
    "a fifo": lambda place, _elsewhere: os.mkfifo(place, 0o600),
    "a socket": _socket,
    "the null device": _device(1, 3),
    "the endless device": _device(1, 5),
    "a file of a terabyte": _sparse,
    "an empty file": _file(b"", 0o600),
    "a file of junk": _file(b"junk" * 1000, 0o600),
    "a file that all may write": _file(_OLD.raw, 0o666),
    "a file of no mode": _file(_OLD.raw, 0),
    "a stranger's file": _foreign(_OLD.raw),
    "an empty folder": _folder(0o700),
    "a folder that all may write": _folder(0o777),
    "a folder of no mode": _folder(0),
    "a folder full of names": _full_folder,
    "a deep folder": _deep_folder,
    "a stranger's folder": _foreign(None),
}
_ONLY_ROOT = {"the null device", "the endless device", "a stranger's file", "a stranger's folder"}
_NO_RECORD = {name for name in _THINGS if name not in ("a file of no mode",)}  # root reads a file of no mode

_PLACES: dict[str, Callable[[Path], Path]] = {
    "the root": lambda root: root,
    "v1": lambda root: root / "v1",
    "keys": lambda root: root / "v1" / "keys",
    "two letters": lambda root: record_file(root, _OLD.key_digest, _OLD.record_id).parents[1],
    "a key's folder": lambda root: record_file(root, _OLD.key_digest, _OLD.record_id).parent,
    "a record": lambda root: record_file(root, _OLD.key_digest, _OLD.record_id),
    "the new record": lambda root: record_file(root, _NEW.key_digest, _NEW.record_id),
    "a quarantine": lambda root: note_file(root, _OLD.key_digest, _OLD.record_id, "quarantine"),
    "an approval": lambda root: note_file(root, _OLD.key_digest, _OLD.record_id, "approval"),
    "the index folder": lambda root: root / "v1" / "index",
    "a list": new_index_file,
    "pending": lambda root: root / "v1" / "pending",
    "an announcement": lambda root: pending_folder(root) / pending_name(_NEW.key_digest, _NEW.record_id),
    "damaged": lambda root: root / "v1" / "damaged",
    "locks": lambda root: root / "v1" / "locks",
    "a lock": lambda root: lock_file(root, _OLD.key_digest),
}


def _shuffled(cases: Iterable[_Case]) -> list[_Case]:
    """In an order that never changes, so that any part of them has some of each."""
    ordered = list(cases)
    random.Random(7).shuffle(ordered)
    return ordered


def hostile_places(folder: Path) -> Iterator[Trial]:
    """Every thing in every place, for root and for an ordinary user."""
    users = (0, NOBODY) if os.geteuid() == 0 else (os.geteuid(),)
    for uid, place, thing in _shuffled(itertools.product(users, _PLACES, _THINGS)):
        if os.geteuid() == 0 or thing not in _ONLY_ROOT:
            yield functools.partial(_hostile, uid, place, thing)


def _hostile(uid: int, place: str, thing: str, folder: Path) -> list[str]:
    """Prepared as this user (root may plant what others cannot); user `uid` lives in it, without hanging or touching others'
    files."""
    os.chmod(folder, 0o755)
    home = folder / "store"
    home.mkdir()
    root, elsewhere = home / "root", home / "elsewhere"
    for each in (_OLD, _OTHER):
        each.publish(open_at(root))
    open_at(root).index()
    (elsewhere / "folder").mkdir(parents=True)
    (elsewhere / "record").write_bytes(_OLD.raw)
    (elsewhere / "record").chmod(0o600)
    for name in ("precious.akr", "1" * 32 + ".akr", "precious.json", "2" * 32 + ".idx"):
        (elsewhere / "folder" / name).write_bytes(b"mine")
    for path in (home, *home.rglob("*")):
        if os.geteuid() == 0:
            os.chown(path, uid, uid)
    target = _PLACES[place](root)
    _plant(target, _THINGS[thing], elsewhere, uid)
    if os.geteuid() == 0 and thing not in _ONLY_ROOT:
        os.chown(target, uid, uid, follow_symlinks=False)
    before = _content(elsewhere)

    def prepare() -> None:
        as_user(uid)()
        signal.alarm(_SECONDS)
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))

    wrong = guarded(lambda: in_child(lambda: _live_in(root, home, place, thing), prepare))
    if _content(elsewhere) != before:
        wrong.append("files outside the store were changed")
    _make_removable(home)
    return [f"{thing} for {place}, uid {uid}: {each}" for each in wrong]


def _plant(target: Path, make: Callable[[Path, Path], None], elsewhere: Path, uid: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in (target.parent, *target.parents):
        if path == elsewhere.parent:
            break
        if os.geteuid() == 0:
            os.chown(path, uid, uid)
    if target.exists():
        target.rename(elsewhere.parent / "what-was-there")
    make(target, elsewhere)


def _live_in(root: Path, home: Path, place: str, thing: str) -> list[str]:
    """Everything that a program does with its store."""
    with mock.patch.dict(os.environ, {"AUTOKERN_STORE": str(root), "XDG_CACHE_HOME": str(home / "cache")}):
        choice = choose_folder()
        store = open_store(choice=choice)
    wrong = []
    usable = ("an empty folder", "a folder full of names", "a deep folder", "a folder of no mode")  # the last only for root
    if place == "the root" and thing not in usable and choice.path == root:
        wrong.append("the folder was taken for a store")
    found, misreads = misread(store, (_OLD, _OTHER, _NEW))
    wrong += misreads
    if place == "a record" and thing in _NO_RECORD and _OLD.record_id in found:
        wrong.append("a file that is not ours was read as a record")
    store.index().rows()
    wrong += _work(store)
    if choice.path == root:
        with mock.patch.dict(os.environ, {"AUTOKERN_STORE": str(root)}):
            wrong += _work(KernelStore(store.layers))
    return wrong


def _work(store: KernelStore) -> list[str]:
    _NEW.publish(store)
    if store.get(_NEW.key_digest, _NEW.record_id) is None:
        return ["the process lost its own record"]
    store.quarantine(_OLD.key_digest, _OLD.record_id, "failed")
    if store.notes(_OLD.key_digest, _OLD.record_id).quarantine is None:
        return ["the process forgot its own quarantine"]
    with store.work_lock(_OLD.key_digest, timeout_s=0.05):
        store.verify()
    store.repair()
    store.clean()
    store.index().lookup(_OLD.key_digest)
    store.clear(_OLD.key_digest)
    store.clear()
    return []


def _content(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def _make_removable(home: Path) -> None:
    for path in (home, *home.glob("*"), *home.glob("*/*"), *home.glob("*/*/*"), *home.glob("*/*/*/*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)


# -- users, owners, modes, umasks ----------------------------------------------------------------------------------------

_UMASKS = (0o000, 0o002, 0o022, 0o027, 0o077, 0o177, 0o277, 0o377, 0o477, 0o577, 0o677, 0o777)
_STATES = ("absent", "own 0700", "own 0755", "own 0500", "own 0000", "own 0777", "foreign 0700", "foreign 0755", "root's 0755")


def users(folder: Path) -> Iterator[Trial]:
    """Every umask, for root, an ordinary user and one without an account, with the folder in each state."""
    uids = (0, NOBODY, STRANGER) if os.geteuid() == 0 else (os.geteuid(),)
    for uid, umask, state in _shuffled(itertools.product(uids, _UMASKS, _STATES)):
        if os.geteuid() == 0 or state.startswith(("absent", "own")):
            yield functools.partial(_as_user, uid, umask, state)


def _as_user(uid: int, umask: int, state: str, folder: Path) -> list[str]:
    os.chmod(folder, 0o755)
    home = folder / "store"
    home.mkdir()
    home.chmod(0o777)
    root = home / "root"
    if state != "absent":
        owner, mode = state.split()
        root.mkdir()
        root.chmod(int(mode, 8))
        if os.geteuid() == 0:
            os.chown(root, {"own": uid, "foreign": 4242, "root's": 0}[owner], -1)

    def work() -> list[str]:
        environment = {"AUTOKERN_STORE": str(root), "XDG_CACHE_HOME": str(home / "cache"), "HOME": str(home / "home")}
        with mock.patch.dict(os.environ, environment):
            try:
                store = open_store()
            except StoreError as error:
                return [f"raised: {error}"]
        wrong = [] if store.write_root is not None else ["memory only, though the home folder is free"]
        _NEW.publish(store)
        if "memory_only" in (_OTHER.publish(store), _OTHER.publish(open_store(choice=store.choice))):
            wrong.append(f"stuck: {store.write_root} was chosen and cannot be written")
        if store.write_root is not None:
            wrong += faults(store.write_root, Books((_NEW, _OTHER)))
            bad = [p for p in store.write_root.rglob("*") if p.lstat().st_mode & 0o077 and p.lstat().st_size and p.is_file()]
            wrong += [f"others may read {path.name}" for path in bad]
        return wrong

    wrong = guarded(lambda: in_child(work, as_user(uid, umask)))
    _make_removable(home)
    return [f"uid {uid}, umask {umask:04o}, folder {state}: {each}" for each in wrong]
