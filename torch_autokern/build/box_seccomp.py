"""The system calls that boxed code may not make: a small seccomp program, written out by hand.

Standard library only (the box launcher imports it by file). Numbers are from ``asm/unistd_64.h`` (x86-64) and
``asm-generic/unistd.h`` (aarch64); the instruction encoding is classic BPF (``linux/filter.h``, ``linux/seccomp.h``).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_X32_BIT = 0x40000000
_CLONE_THREAD = 0x00010000
_ARCHES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# name: (x86-64, aarch64); -1 where the machine has no such call.
_FORBIDDEN = {
    "socket": (41, 198), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "bpf": (321, 280), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171), "sethostname": (170, 161),
    "setdomainname": (171, 162), "acct": (163, 89), "quotactl": (179, 60), "syslog": (103, 116), "iopl": (172, -1),
    "ioperm": (173, -1), "lookup_dcookie": (212, 18), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "kcmp": (312, 272), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "process_madvise": (440, 440), "personality": (135, 92), "modify_ldt": (154, -1), "fanotify_init": (300, 262),
    "chown": (92, -1), "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53),
    "fchmodat2": (452, 452), "utime": (132, -1),
    "utimes": (235, -1), "futimesat": (261, -1), "mknod": (133, -1), "mknodat": (259, 33), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "vhangup": (153, 58), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "memfd_secret": (447, 447),
}  # fmt: skip
# What a runner's candidate has no need of, once the process has loaded everything.
_FORBIDDEN_IN_RUNNER = {
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, -1), "vfork": (58, -1), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "tkill": (200, 130),
}  # fmt: skip
# These report "not there", so that the C library takes its older way, which the filter can look into.
_CLONE3 = (435, 435)
_CLONE = (56, 220)
_KILL_CALLS = ((62, 129), (234, 131))  # kill, tgkill
_PRLIMIT = (302, 261)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def filter_program(machine: str, *, allow_processes: bool, own_pid: int) -> bytes:
    """The BPF program for `machine` ("x86_64" or "aarch64"): everything is allowed but the lists above.

    Other processes' limits are out of reach. Without `allow_processes` threads can be made but no processes, no program can be
    started, and only `own_pid` can be signalled.

    Raises:
        KeyError: a machine without a table.
    """
    arch, column = _ARCHES[machine]
    allow, refuse = _instruction(_RETURN, _ALLOW), _instruction(_RETURN, _ERRNO | errno.EPERM)
    program = [
        _instruction(_LOAD, _ARCH_AT),
        _instruction(_JUMP_EQUAL, arch, 1, 0),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER_AT),
    ]
    if machine == "x86_64":
        program += [_instruction(_JUMP_GREATER_EQUAL, _X32_BIT, 0, 1), _instruction(_RETURN, _KILL)]

    def when(number: int, *body: bytes) -> None:
        if number >= 0:
            program.append(_instruction(_JUMP_EQUAL, number, 0, len(body)))
            program.extend(body)

    def only_if_first_argument_is(value: int) -> tuple[bytes, ...]:
        return _instruction(_LOAD, _FIRST_ARGUMENT_AT), _instruction(_JUMP_EQUAL, value, 0, 1), allow, refuse

    forbidden = {**_FORBIDDEN, **({} if allow_processes else _FORBIDDEN_IN_RUNNER)}
    for numbers in forbidden.values():
        when(numbers[column], refuse)
    when(_PRLIMIT[column], *only_if_first_argument_is(0))
    if not allow_processes:
        when(_CLONE3[column], _instruction(_RETURN, _ERRNO | errno.ENOSYS))
        flags = _instruction(_LOAD, _FIRST_ARGUMENT_AT), _instruction(_JUMP_ANY_BIT, _CLONE_THREAD, 0, 1)
        when(_CLONE[column], *flags, allow, refuse)
        for numbers in _KILL_CALLS:
            when(numbers[column], *only_if_first_argument_is(own_pid))
    program.append(allow)
    return b"".join(program)


def install_filter(libc: ctypes.CDLL, *, allow_processes: bool) -> bool:
    """Install the filter for the calling process; False where the machine has no table or the kernel refuses.

    The caller must have set no_new_privs.
    """
    machine = platform.machine() if hasattr(os, "uname") else ""
    if machine not in _ARCHES or struct.calcsize("P") != 8:
        return False
    code = filter_program(machine, allow_processes=allow_processes, own_pid=os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    zero = ctypes.c_ulong(0)
    return bool(libc.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.c_char_p(program), zero, zero) == 0)
