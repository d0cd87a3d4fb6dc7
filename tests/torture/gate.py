"""A gate at the real system calls of a child: every call that touches a file waits until this side says what becomes of it.

The kernel's seccomp user notification (Linux 5.9 and newer, `seccomp_unotify(2)`) stops the child *before* each call. So the
gate needs no compiler, no `ptrace` and no privilege, and it sees the calls that libc makes inside `opendir` and `readdir`,
which a preloaded library does not. A child stopped before call n + 1 has done exactly n calls: killing it there is a kill at
any moment between the two, because nothing on a disk changes without a call. The one call that changes a disk in parts is
`write`: the gate can do half of it and kill, or answer with the short count.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import os
import platform
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple

# x86-64, arch/x86/entry/syscalls/syscall_64.tbl: every call by which a program reads or changes a file system or a descriptor
# of one. Memory, signals, clocks and threads are left alone: stopping there is the same as stopping at the next of these.
CALLS = {
    0: "read", 1: "write", 2: "open", 3: "close", 4: "stat", 5: "fstat", 6: "lstat", 8: "lseek", 16: "ioctl", 17: "pread64",
    18: "pwrite64", 19: "readv", 20: "writev", 21: "access", 32: "dup", 33: "dup2", 40: "sendfile", 72: "fcntl", 73: "flock",
    74: "fsync", 75: "fdatasync", 76: "truncate", 77: "ftruncate", 78: "getdents", 82: "rename", 83: "mkdir", 84: "rmdir",
    85: "creat", 86: "link", 87: "unlink", 88: "symlink", 89: "readlink", 90: "chmod", 91: "fchmod", 92: "chown", 93: "fchown",
    132: "utime", 217: "getdents64", 235: "utimes", 257: "openat", 258: "mkdirat", 260: "fchownat", 262: "newfstatat",
    263: "unlinkat", 264: "renameat", 265: "linkat", 267: "readlinkat", 268: "fchmodat", 269: "faccessat", 280: "utimensat",
    285: "fallocate", 292: "dup3", 316: "renameat2", 326: "copy_file_range", 332: "statx", 439: "faccessat2",
}  # fmt: skip
_AUDIT_ARCH_X86_64 = 0xC000003E
_SYS_SECCOMP, _SYS_PIDFD_GETFD = 317, 438
_SET_MODE_FILTER, _NEW_LISTENER = 1, 1 << 3
_PR_SET_NO_NEW_PRIVS = 38
_RECV, _SEND, _SET_FLAGS = 0xC0502100, 0xC0182101, 0x40082104
_SYNC_WAKE_UP = 1
_FLAG_CONTINUE = 1
_NOTIFICATION = struct.Struct("=QIIiIQ6Q")
_ANSWER = struct.Struct("=QqiI")
_WAIT_MS = 60_000
_LIBC = ctypes.CDLL(None, use_errno=True)


class Go(enum.Enum):
    """What becomes of a call, other than an error number."""

    ON = "the call is made"
    KILL = "the child is killed before it"
    HALF_KILL = "half of a write is made, then the child is killed; before any other call it is just killed"
    SHORT = "half of a write is made and reported"
    LIE = "nothing is done and success is reported"


class FailAfter(NamedTuple):
    """The call is made, and `code` is reported all the same: a reply that a network disk lost."""

    code: int


Decision = Go | FailAfter | int


class Call(NamedTuple):
    """One call of the child. `number` counts from 0; `arguments` are the raw six."""

    number: int
    name: str
    pid: int
    arguments: tuple[int, ...]

    def text(self, index: int) -> bytes:
        """The zero-terminated string that argument `index` points to."""
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(self.arguments[index])
            try:
                raw = memory.read(4096)
            except OSError:
                memory.seek(self.arguments[index])
                raw = memory.read(4096 - self.arguments[index] % 4096)
        return raw.split(b"\0", 1)[0]

    def buffer(self) -> bytes:
        """The bytes that a `write` is to write."""
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(self.arguments[1])
            return memory.read(self.arguments[2])

    def link_of(self, descriptor: int) -> str:
        """The path that a descriptor of the child is open at."""
        return os.readlink(f"/proc/{self.pid}/fd/{descriptor}")


class Ended(NamedTuple):
    """How a child ended. `value` is what its work returned, as text; `raised` its traceback; both empty where it was killed."""

    calls: list[str]
    was_killed: bool
    value: str
    raised: str


def refusal() -> str | None:
    """Why this machine has no gate, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"the table of system calls is for Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    try:
        ended = run_gated(lambda: "ok", lambda _call: Go.ON)
    except OSError as error:
        return f"no seccomp user notification here: {error}"
    return None if ended.value == "ok" else f"no seccomp user notification here: {ended.raised.strip().splitlines()[-1]}"


def run_gated(work: Callable[[], object], decide: Callable[[Call], Decision]) -> Ended:
    """Run `work` in a forked child; each of its system calls on files becomes what `decide` says.

    Raises:
        OSError: the child made no call for a minute.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _child(theirs, work)
    theirs.close()
    listener = -1
    try:
        listener = _receive_listener(ours)
        calls, was_killed = _answer_all(listener, ours, decide, pid)
        value, raised = _last_words(ours)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ours.close()
        if listener >= 0:
            os.close(listener)
    return Ended(calls, was_killed, value, raised)


def _child(channel: socket.socket, work: Callable[[], object]) -> None:
    """Put up the gate, hand it over, work, and say how it went: only by calls that the gate does not watch."""
    words = b""
    try:
        listener = _put_up()
        socket.send_fds(channel, [b"g"], [listener])
        channel.recv(1)
        words = b"v" + str(work()).encode()
    except BaseException:  # noqa: BLE001 - told to the parent, which judges it
        words = b"e" + traceback.format_exc().encode()
    finally:
        with contextlib.suppress(OSError):
            channel.sendall(words)
        os._exit(0)


def _put_up() -> int:
    """Install the filter on this thread; the descriptor on which its notifications arrive."""
    numbers = sorted(CALLS)
    code = [(0x20, 0, 0, 4), (0x15, 0, len(numbers) + 1, _AUDIT_ARCH_X86_64), (0x20, 0, 0, 0)]  # load arch, compare, load nr
    code += [(0x15, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]  # jump to the last line if equal
    code += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x7FC00000)]  # allow; ask the listener
    raw = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(raw)))
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return _system_call(_SYS_SECCOMP, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.addressof(program))


def _system_call(*words: int) -> int:
    answer = int(_LIBC.syscall(*(ctypes.c_long(word) for word in words)))
    if answer < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return answer


def _receive_listener(channel: socket.socket) -> int:
    words, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, 1)
    if not descriptors:
        raise OSError(errno.ENOSYS, words[1:].decode(errors="replace").strip().splitlines()[-1])
    with contextlib.suppress(OSError):  # Linux 6.6 and newer: hand the core over at once
        fcntl.ioctl(descriptors[0], _SET_FLAGS, _SYNC_WAKE_UP)
    channel.sendall(b"g")
    return descriptors[0]


def _answer_all(listener: int, channel: socket.socket, decide: Callable[[Call], Decision], pid: int) -> tuple[list[str], bool]:
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(channel, select.POLLIN)
    calls: list[str] = []
    while True:
        ready = dict(poll.poll(_WAIT_MS))
        if not ready:
            raise OSError(errno.ETIMEDOUT, f"the child hung after {calls[-3:]}")
        if not ready.get(listener, 0) & select.POLLIN:
            return calls, False  # it said its last words, or died by itself
        note = bytearray(_NOTIFICATION.size)
        try:
            fcntl.ioctl(listener, _RECV, note)
        except OSError:
            continue  # the caller died between the two
        identity, caller, _, number, _, _, *arguments = _NOTIFICATION.unpack(note)
        call = Call(len(calls), CALLS[number], caller, tuple(arguments))
        calls.append(call.name)
        decision = decide(call)
        if decision in (Go.KILL, Go.HALF_KILL):
            if decision is Go.HALF_KILL and call.name == "write":
                _write_half(call)
            os.kill(pid, signal.SIGKILL)
            return calls, True
        with contextlib.suppress(OSError):
            fcntl.ioctl(listener, _SEND, _ANSWER.pack(identity, *_answer(call, decision)))


def _answer(call: Call, decision: Decision) -> tuple[int, int, int]:
    """Value, negated error and flags of the reply."""
    if decision is Go.LIE:
        return 0, 0, 0
    if decision is Go.SHORT:
        return _write_half(call), 0, 0
    if isinstance(decision, FailAfter):
        _make(call)
        return 0, -decision.code, 0
    if isinstance(decision, int):
        return 0, -decision, 0
    return 0, 0, _FLAG_CONTINUE


def _write_half(call: Call) -> int:
    """Write the first half of what the child was about to, through its own descriptor; the bytes written."""
    body = call.buffer()
    process = os.pidfd_open(call.pid)
    descriptor = _system_call(_SYS_PIDFD_GETFD, process, call.arguments[0], 0)
    os.close(process)
    try:
        return os.write(descriptor, body[: max(1, len(body) // 2)])
    finally:
        os.close(descriptor)


def _make(call: Call) -> None:
    """Make the call in the child's place, where it names files by absolute paths."""
    with contextlib.suppress(OSError):
        if call.name in ("link", "rename"):
            getattr(os, call.name)(call.text(0), call.text(1))
        elif call.name in ("unlink", "rmdir"):
            getattr(os, call.name)(call.text(0))
        elif call.name == "mkdir":
            os.mkdir(call.text(0), 0o700)
        else:
            raise ValueError(f"{call.name} cannot be made from outside")


def _last_words(channel: socket.socket) -> tuple[str, str]:
    pieces = []
    with contextlib.suppress(OSError):
        while piece := channel.recv(1 << 16):
            pieces.append(piece)
    words = b"".join(pieces).decode(errors="replace")
    if words.startswith("v"):
        return words[1:], ""
    return "", words[1:]
