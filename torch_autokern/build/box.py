"""The box: where a compiler, or a runner with somebody else's kernel in it, may do no harm.

`run_boxed` starts a command in it; `enter_box` puts the calling process into it. What holds is recorded as text, strongest
first, such as ``landlock7+seccomp+nocaps+rlimits+pidns+netns``, and travels with the record. Nothing is ever lowered silently:
without seccomp, and without both Landlock and namespaces, a command is refused unless the person accepted that risk by name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from torch_autokern.build import box_launcher
from torch_autokern.errors import BoxError

MAX_OUTPUT_BYTES = 1 << 20
_LAUNCHER = Path(box_launcher.__file__)
# The launcher enforces the wall limit; this much later its parent does.
_GRACE_SECONDS = 10.0
# Where compilers, shared libraries and their configuration live.
SYSTEM_PATHS = tuple(
    Path(path)
    for path in (
        "/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/nix/store", "/gnu/store",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """Limits of one boxed command (`judge.md`, "The box"). None leaves a limit as it is.

    `cpu_seconds`, `memory_bytes` (address space), `file_bytes` and `open_files` hold for each process, `processes` for the user
    (the kernel does not apply it to root, whose processes end with the pid namespace), `wall_seconds` for the whole command.
    """

    cpu_seconds: int | None = 60
    memory_bytes: int | None = 6 << 30
    file_bytes: int | None = 64 << 20
    open_files: int | None = 256
    processes: int | None = None
    wall_seconds: float = 90.0


@dataclass(frozen=True)
class BoxResult:
    """How a boxed command ended. A negative `returncode` is the signal that ended it; `stdout` and `stderr` keep their first
    `MAX_OUTPUT_BYTES`; `level` names the layers that held."""

    returncode: int
    stdout: bytes
    stderr: bytes
    timed_out: bool
    seconds: float
    level: str


def run_boxed(
    argv: Sequence[str],
    *,
    scratch: Path,
    readable: Sequence[Path] = SYSTEM_PATHS,
    limits: Limits | None = None,
    stdin: bytes = b"",
    environment: dict[str, str] | None = None,
    allow_weak_box: bool = False,
    namespaces: bool = True,
) -> BoxResult:
    """Run `argv` (an absolute program and its arguments) to its end, in the box, with `scratch` as its only writable folder.

    The command starts in `scratch` with a clean environment (PATH, HOME and TMPDIR in `scratch`, plus `environment`), no open
    descriptors, in its own session; when it ends, so does everything that it started.

    Raises:
        BoxError: the box could not be set up at the level asked for, or the program cannot be started.
    """
    limits = limits or Limits()
    options = {
        "argv": [str(part) for part in argv],
        "readable": [str(path) for path in readable],
        "writable": [str(scratch)],
        "limits": asdict(limits),
        "wall_seconds": limits.wall_seconds,
        "allow_weak_box": allow_weak_box,
        "parent": os.getpid(),
    }
    clean = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(scratch),
        "TMPDIR": str(scratch),
        "LC_ALL": "C",
        **(environment or {}),
    }
    with tempfile.TemporaryFile() as source:
        source.write(stdin)
        started = time.monotonic()
        for wants_namespaces in (True, False) if namespaces else (False,):
            source.seek(0)
            with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as words:
                report = _launch({**options, "namespaces": wants_namespaces}, scratch, clean, (source, output, words))
                if "retry" in report and wants_namespaces:
                    continue
                seconds = time.monotonic() - started
                return _result(report, argv[0], _head(output), _head(words), seconds)
    raise BoxError("the box launcher gave no answer")  # pragma: no cover - the loop above always returns or raises


def enter_box(
    *,
    readable: Sequence[Path] = (),
    writable: Sequence[Path] = (),
    limits: Limits | None = None,
    allow_weak_box: bool = False,
    devices: Sequence[Path] = (),
) -> str:
    """Put the calling process into the box for good, once everything it needs is loaded (torch, and its inputs).

    Afterwards it can read and write only the paths given, start no program and no process (threads it can), open no socket,
    signal nobody else, and change neither its scheduling nor another process's limits. With `devices`, which stay usable, a
    driver may have started threads of its own: those stay outside, and the level says ``mainthread``. A candidate for such a
    device has no code for the host, and the driver reads its image on the thread that enters here.

    Returns:
        The layers that hold, such as ``landlock7+seccomp+nocaps+rlimits``.

    Raises:
        BoxError: other threads are running already (they would stay outside), or the level is below what native code needs.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1 and not devices:
        raise BoxError(
            f"{threads} threads are running, and a thread enters the box alone: enter it before the first parallel call, with"
            " OPENBLAS_NUM_THREADS=1 and MKL_NUM_THREADS=1"
        )
    limits = limits or Limits(cpu_seconds=None, memory_bytes=None, open_files=None)
    paths = [str(path) for path in readable], [str(path) for path in writable]
    nodes = [str(path) for path in devices]
    try:
        layers = box_launcher.restrict_self(*paths, asdict(limits), allow_processes=False, devices=nodes)
    except (box_launcher.BoxSetupError, OSError, ValueError) as error:
        raise BoxError(f"the box could not be set up: {error}") from error
    level = "+".join([*layers, *(["mainthread"] if threads != 1 else [])])
    if not box_launcher.is_strong(layers) and not allow_weak_box:
        raise BoxError(_weak(level))
    return level


def _launch(
    options: dict[str, object], scratch: Path, environment: dict[str, str], files: tuple[IO[bytes], IO[bytes], IO[bytes]]
) -> dict[str, object]:
    read_end, write_end = os.pipe()
    try:
        # Isolated, and without site: nothing that is installed or in the folder takes part in setting up the box.
        command = [sys.executable, "-I", "-S", "-B", str(_LAUNCHER), json.dumps({**options, "status": write_end})]
        process = subprocess.Popen(
            command,
            stdin=files[0],
            stdout=files[1],
            stderr=files[2],
            cwd=scratch,
            env=environment,
            pass_fds=(write_end,),
            start_new_session=True,
        )
        os.close(write_end)
        write_end = -1
        try:
            process.wait(float(str(options["wall_seconds"])) + _GRACE_SECONDS)
        finally:
            # Also on Ctrl-C: the launcher ends its tree when it is asked to, and the kernel does when it dies.
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(_GRACE_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        return _read_report(read_end)
    finally:
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)


def _read_report(descriptor: int) -> dict[str, object]:
    os.set_blocking(descriptor, False)
    try:
        data = os.read(descriptor, 1 << 16)
    except BlockingIOError:
        data = b""
    report: dict[str, object] = {}
    for line in data.splitlines():
        report.update(json.loads(line))
    return report


def _result(report: dict[str, object], program: str, stdout: bytes, stderr: bytes, seconds: float) -> BoxResult:
    if "weak" in report:
        raise BoxError(_weak(str(report["weak"])))
    if "failed" in report:
        raise BoxError(f"cannot start {program} in the box: {report['failed']}")
    if "level" not in report:
        words = stderr.decode(errors="replace").strip()[-500:]
        raise BoxError(f"the box around {program} was not set up: {words or 'no answer from its launcher'}")
    timed_out = bool(report.get("timed_out"))
    code = report.get("returncode", report.get("last", -9))
    return BoxResult(-9 if timed_out else int(str(code)), stdout, stderr, timed_out, seconds, str(report["level"]))


def _weak(level: str) -> str:
    return (
        f"this system allows only {level or 'nothing'} around untrusted code; expected seccomp, and Landlock (Linux 5.13) or"
        " namespaces. Native candidates are refused; allow_weak_box=True (--allow-weak-box) accepts the risk"
    )


def _head(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read(MAX_OUTPUT_BYTES)
