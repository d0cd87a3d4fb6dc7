"""Inside the box: what a process does to itself before it runs code that nobody trusts.

Standard library only, because this file also runs as a script (``python -I -S box_launcher.py CONFIG``): it makes the
namespaces, starts the command, waits, and ends every process the command left behind. Numbers are from the Linux UAPI headers
(``linux/landlock.h``, ``linux/seccomp.h``, ``linux/prctl.h``, ``linux/sched.h``, ``linux/capability.h``).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from typing import NoReturn

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from box_seccomp import install_filter
else:
    from torch_autokern.build.box_seccomp import install_filter

_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 24, 36, 38
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET, _CLONE_NEWIPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
_LANDLOCK_CREATE, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT = 444, 445, 446
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63

# Landlock file rights by the ABI that brought them: 13 in the first, then refer, truncate, (4: TCP), device ioctl.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | 1 << 15
_RIGHTS_BY_ABI = ((5, (1 << 16) - 1), (3, (1 << 15) - 1), (2, (1 << 14) - 1), (1, (1 << 13) - 1))
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


class BoxSetupError(Exception):
    """A layer that had to hold could not be set up."""


def close_inherited(keep: Iterable[int]) -> None:
    """Close every descriptor but `keep`."""
    low = 0
    for number in (*sorted(set(keep)), 1 << 20):
        # An empty range would close everything: the C library's close_range takes the last number, not the one after.
        if low < number:
            os.closerange(low, number)
        low = number + 1


def _prctl(option: int, value: int) -> bool:
    zero = ctypes.c_ulong(0)
    return bool(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero) == 0)


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, int(signal_number))


def set_limits(limits: dict[str, int | None]) -> None:
    """Set the rlimits named in `limits` (cpu_seconds, memory_bytes, file_bytes, open_files, processes); None leaves one."""
    kinds = {
        "cpu_seconds": resource.RLIMIT_CPU,
        "memory_bytes": resource.RLIMIT_AS,
        "file_bytes": resource.RLIMIT_FSIZE,
        "open_files": resource.RLIMIT_NOFILE,
        "processes": resource.RLIMIT_NPROC,
    }
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, kind in kinds.items():
        value = limits.get(name)
        if value is None:
            continue
        hard = resource.getrlimit(kind)[1]
        soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # One second between the catchable SIGXCPU and the kill.
        spare = 1 if kind == resource.RLIMIT_CPU else 0
        resource.setrlimit(kind, (soft, soft + spare if hard == resource.RLIM_INFINITY else min(soft + spare, hard)))


def drop_capabilities() -> bool:
    """Give up every capability for good; a root user keeps its uid but none of its powers."""
    for capability in range(_LAST_CAPABILITY + 1):
        _prctl(_PR_CAPBSET_DROP, capability)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), 8)
    return bool(_libc.capset(header, ctypes.create_string_buffer(bytes(24), 24)) == 0)


def forbid_new_privileges() -> None:
    """Set no_new_privs, without which Landlock and seccomp need root.

    Raises:
        BoxSetupError: the kernel refused.
    """
    if not _prctl(_PR_SET_NO_NEW_PRIVS, 1):
        raise BoxSetupError("the kernel refused no_new_privs")


def landlock_abi() -> int:
    """Version of Landlock in this kernel, 0 where there is none."""
    return max(0, int(_libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def restrict_files(readable: Iterable[str], writable: Iterable[str], devices: Iterable[str] = ()) -> int:
    """Allow this thread to read below `readable`, to write below `writable`, to use `devices` (ioctl included), and no other
    file; refuse TCP from ABI 4, signals and abstract sockets to the outside from ABI 6. Missing paths are left out.

    Returns:
        The Landlock version used; 0 where the kernel has none and nothing was restricted.
    """
    abi = landlock_abi()
    if abi < 1:
        return 0
    handled = next(rights for version, rights in _RIGHTS_BY_ABI if abi >= version)
    attributes = struct.pack("=QQQ", handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _libc.syscall(_LANDLOCK_CREATE, ctypes.c_char_p(attributes), ctypes.c_size_t(size), ctypes.c_uint32(0))
    if ruleset < 0:
        return 0
    try:
        for path in readable:
            _allow(ruleset, path, (_EXECUTE | _READ_FILE | _READ_DIR) & handled)
        for path in writable:
            _allow(ruleset, path, handled & ~(1 << 15))
        for path in _DEVICES:
            _allow(ruleset, path, (_READ_FILE | _WRITE_FILE | 1 << 14) & handled)
        for path in devices:
            _allow(ruleset, path, (_READ_FILE | _WRITE_FILE | _READ_DIR | 1 << 15) & handled)
        restricted = _libc.syscall(_LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0)) == 0
    finally:
        os.close(ruleset)
    return abi if restricted else 0


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        rule = ctypes.c_char_p(struct.pack("=Qi", rights, descriptor))
        _libc.syscall(_LANDLOCK_ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0))
    finally:
        os.close(descriptor)


def enter_namespaces() -> list[str]:
    """Move this process's future children into new pid, network and IPC namespaces, where the system allows it.

    Raises:
        BoxSetupError: a user namespace was made but could not be mapped; only a fresh process can go on without one.
    """
    spaces = _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0 and _libc.unshare(spaces) == 0:
        return ["pidns", "netns"]
    if _libc.unshare(spaces | _CLONE_NEWUSER):
        return []
    try:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError as error:
        raise BoxSetupError(f"user namespace without a map: {error}") from error
    return ["pidns", "netns", "userns"]


def restrict_self(
    readable: Sequence[str], writable: Sequence[str], limits: dict[str, int | None], *, allow_processes: bool,
    devices: Sequence[str] = (),
) -> list[str]:  # fmt: skip
    """Apply, to the calling thread and those that it starts, and for good: limits, no capabilities, Landlock, seccomp.

    Returns:
        The layers that hold, such as ``["landlock7", "seccomp", "nocaps", "rlimits"]``.
    """
    set_limits(limits)
    without_powers = drop_capabilities()
    forbid_new_privileges()
    version = restrict_files(readable, writable, devices)
    filtered = install_filter(_libc, allow_processes=allow_processes)
    layers = {f"landlock{version}": version > 0, "seccomp": filtered, "nocaps": without_powers, "rlimits": True}
    return [name for name, holds in layers.items() if holds]


def is_strong(layers: Sequence[str]) -> bool:
    """The least that untrusted native code may run in: seccomp, and Landlock or namespaces (`judge.md`, "The box")."""
    return "seccomp" in layers and any(layer.startswith("landlock") or layer == "pidns" for layer in layers)


class _Launch:
    """One boxed command: the launcher process outside the namespaces, an init inside, the command below it."""

    def __init__(self, config: dict[str, object]) -> None:
        self.argv: list[str] = config["argv"]  # type: ignore[assignment]
        self.readable: list[str] = config["readable"]  # type: ignore[assignment]
        self.writable: list[str] = config["writable"]  # type: ignore[assignment]
        self.limits: dict[str, int | None] = config["limits"]  # type: ignore[assignment]
        self.wall_seconds = float(config["wall_seconds"])  # type: ignore[arg-type]
        self.status = int(config["status"])  # type: ignore[call-overload]
        self.wants_namespaces = bool(config["namespaces"])
        self.allow_weak = bool(config["allow_weak_box"])
        self.parent = int(config["parent"])  # type: ignore[call-overload]

    def report(self, **values: object) -> None:
        os.write(self.status, json.dumps(values).encode() + b"\n")

    def main(self) -> None:
        close_inherited((0, 1, 2, self.status))
        os.set_inheritable(self.status, False)
        # Without a pid namespace the launcher must outlive its parent long enough to end the tree.
        die_with_parent(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: self.end_tree())
        if os.getppid() != self.parent:
            sys.exit(1)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            namespaces = enter_namespaces() if self.wants_namespaces else []
        except BoxSetupError as error:
            self.report(retry=str(error))
            sys.exit(1)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with_parent()
            if namespaces:
                self.init(namespaces)
            self.command(namespaces)
        self.supervise(child)

    def init(self, namespaces: list[str]) -> NoReturn:
        """Process 1 of the pid namespace: its end ends every process in it, double-forked ones included."""
        child = os.fork()
        if child == 0:
            self.command(namespaces)
        status = _wait_for(child)
        code = os.waitstatus_to_exitcode(status)
        self.report(returncode=code)
        os._exit(0)

    def command(self, namespaces: list[str]) -> NoReturn:
        try:
            os.setsid()
            layers = restrict_self(self.readable, self.writable, self.limits, allow_processes=True) + namespaces
            if not is_strong(layers) and not self.allow_weak:
                self.report(weak="+".join(layers))
                os._exit(125)
            self.report(level="+".join(layers))
            os.execv(self.argv[0], self.argv)
        except (OSError, ValueError, BoxSetupError) as error:
            self.report(failed=str(error))
        os._exit(126)

    def supervise(self, child: int) -> NoReturn:
        deadline = time.monotonic() + self.wall_seconds
        pause = 0.001
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                self.report(timed_out=True)
                self.end_tree()
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        self.report(last=os.waitstatus_to_exitcode(status))
        self.end_tree()

    def end_tree(self) -> NoReturn:
        """Kill what is left. Orphans come to this process, a subreaper, so two generations of forks do not hide."""
        for _ in range(5_000):
            try:
                if os.waitpid(-1, os.WNOHANG)[0]:
                    continue
            except ChildProcessError:
                break
            for pid in _children_of(os.getpid()):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        os._exit(0)


def _wait_for(child: int) -> int:
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except InterruptedError:
            continue
        if pid == child:
            return status


def _children_of(parent: int) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESRCH):
                raise
            continue
        # After the command name: state, parent. A dead one only waits to be reaped.
        if int(fields[1]) == parent and fields[0] != b"Z":
            found.append(int(name))
    return found


if __name__ == "__main__":
    _Launch(json.loads(sys.argv[1])).main()
