"""Children in a place of their own: another user, a private mount namespace with small, read-only or ext4 disks, limits."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_LIBC = ctypes.CDLL(None, use_errno=True)


def in_child(work: Callable[[], object], prepare: Callable[[], None] = lambda: None) -> Any:
    """The value of `work` in a forked child, by way of JSON; `prepare` runs there first.

    Raises:
        AssertionError: with the child's traceback, or because it died.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer: dict[str, object] = {}
        try:
            os.close(read_end)
            prepare()
            answer = {"value": work()}
        except BaseException:  # noqa: BLE001 - raised in the parent
            answer = {"raised": traceback.format_exc()}
        finally:
            body = json.dumps(answer).encode()
            while body:
                body = body[os.write(write_end, body) :]
            os._exit(0)
    os.close(write_end)
    body = b"".join(iter(lambda: os.read(read_end, 1 << 16), b""))
    os.close(read_end)
    _, status = os.waitpid(pid, 0)
    if not body:
        raise AssertionError(f"the child died: status {status}")
    answer = json.loads(body)
    if "raised" in answer:
        raise AssertionError(answer["raised"])
    return answer["value"]


def as_user(uid: int, umask: int = 0o022) -> Callable[[], None]:
    """A `prepare` for `in_child`: become user and group `uid` (where this is root) with a umask."""

    def prepare() -> None:
        if os.geteuid() == 0 and uid != 0:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
        os.umask(umask)

    return prepare


def private_mounts() -> None:
    """A `prepare` for `in_child`: mounts made from here on vanish with the child. Ordinary users become root of a namespace.

    Raises:
        OSError: this machine refuses.
    """
    uid, gid = os.geteuid(), os.getegid()
    if _LIBC.unshare(_CLONE_NEWNS | (_CLONE_NEWUSER if uid else 0)):
        raise OSError(ctypes.get_errno(), "unshare: " + os.strerror(ctypes.get_errno()))
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    command("mount", "--make-rprivate", "/")


def command(*words: str) -> str:
    """Run a program; its output.

    Raises:
        OSError: it is missing or failed; with its words.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        raise OSError(done.returncode, f"{' '.join(words)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def mount_tmpfs(folder: Path, options: str) -> Path:
    """A private tmpfs at `folder`."""
    folder.mkdir(exist_ok=True)
    command("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))
    folder.chmod(0o700)
    return folder


@functools.cache
def mounts_refusal() -> str | None:
    """Why no small tmpfs can be mounted here, or None."""
    return _refusal(lambda: command("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/mnt"))


@functools.cache
def ext4_refusal(folder: Path) -> str | None:
    """Why no ext4 image can be mounted here, or None."""
    if os.geteuid() != 0:
        return "loop devices need root"
    if shutil.which("mkfs.ext4") is None:
        return "mkfs.ext4 is missing (Debian: apt-get install e2fsprogs)"
    image = folder / "probe.img"

    def probe() -> None:
        make_ext4(image, "16M")
        command("mount", "-o", "loop", str(image), "/mnt")
        command("umount", "/mnt")

    try:
        return _refusal(probe)
    finally:
        image.unlink(missing_ok=True)


def make_ext4(image: Path, size: str, *options: str) -> None:
    """A fresh ext4 image, tables written out so that no thread initialises them later."""
    command("truncate", "-s", size, str(image))
    command("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", *options, str(image))


def _refusal(probe: Callable[[], object]) -> str | None:
    def work() -> str:
        try:
            private_mounts()
            probe()
        except OSError as error:
            return str(error)
        return ""

    return in_child(work) or None
