"""The box holds: what boxed code tries, and that it does not get through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torch_autokern.build import box_launcher
from torch_autokern.build.box import SYSTEM_PATHS, BoxResult, Limits, run_boxed
from torch_autokern.build.box_seccomp import filter_program
from torch_autokern.errors import BoxError

PYTHON = [str(Path(sys.executable).resolve()), "-I", "-S", "-c"]
ROOT = str(Path(box_launcher.__file__).parents[2])
SINGLE = {**os.environ, "PYTHONPATH": ROOT, "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
READABLE = (*SYSTEM_PATHS, Path(sys.base_prefix))


def boxed(code: str, scratch: Path, **options: object) -> BoxResult:
    return run_boxed([*PYTHON, code], scratch=scratch, readable=READABLE, **options)  # type: ignore[arg-type]


def alive(mark: str) -> list[str]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                line = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in line and b"pytest" not in line:
                found.append(name)
    return found


def test_level_names_what_holds(tmp_path: Path) -> None:
    result = boxed("print('hi')", tmp_path)
    assert result.stdout == b"hi\n" and result.returncode == 0
    assert "seccomp" in result.level.split("+") and "rlimits" in result.level


def test_exit_code_signal_and_input_come_through(tmp_path: Path) -> None:
    assert boxed("import sys; sys.exit(7)", tmp_path).returncode == 7
    assert boxed("import os; os.kill(os.getpid(), 11)", tmp_path).returncode == -signal.SIGSEGV
    assert boxed("import sys; print(sys.stdin.read())", tmp_path, stdin=b"words").stdout == b"words\n"


def test_only_scratch_is_writable_and_private_files_are_closed(tmp_path: Path) -> None:
    scratch, store = tmp_path / "scratch", tmp_path / "store"
    scratch.mkdir(), store.mkdir()
    (store / "record").write_bytes(b"secret")
    code = f"""
open('mine', 'w').write('ok')
attempts = ('{store}/record', 'r'), ('{store}/record', 'a'), ('{store}/new', 'w'), ('/etc/passwd', 'r'), ('/tmp/x', 'w')
for path, mode in attempts:
    try:
        open(path, mode)
    except PermissionError:
        continue
    print('got through', path, mode)
import os
for act in (lambda: os.chmod('{store}', 0o777), lambda: os.unlink('{store}/record'), lambda: os.rename('mine', '{store}/mine')):
    try:
        act()
    except OSError:
        continue
    print('got through', act)
"""
    result = boxed(code, scratch)
    assert result.stdout == b"" and result.returncode == 0, result.stderr
    assert (scratch / "mine").read_text() == "ok" and (store / "record").read_bytes() == b"secret"
    assert sorted(os.listdir(store)) == ["record"]


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET"])
def test_sockets_are_refused(family: str, tmp_path: Path) -> None:
    attempt = f"socket.socket(socket.{family}, socket.SOCK_DGRAM)"
    code = f"import socket\ntry:\n    {attempt}\nexcept PermissionError:\n    print('refused')"
    assert boxed(code, tmp_path).stdout == b"refused\n"


def test_forbidden_system_calls_are_refused(tmp_path: Path) -> None:
    code = """
import ctypes, platform
libc = ctypes.CDLL(None, use_errno=True)
x86 = platform.machine() == 'x86_64'
calls = dict(ptrace=101 if x86 else 117, bpf=321 if x86 else 280, keyctl=250 if x86 else 219, perf=298 if x86 else 241,
             userfaultfd=323 if x86 else 282, io_uring=425, mount=165 if x86 else 40, unshare=272 if x86 else 97,
             setns=308 if x86 else 268, kexec=246 if x86 else 104, process_vm=310 if x86 else 270)
for name, number in calls.items():
    result = libc.syscall(number, 0, 0, 0, 0, 0, 0)
    if result != -1 or ctypes.get_errno() != 1:
        print(name, result, ctypes.get_errno())
"""
    result = boxed(code, tmp_path)
    assert result.stdout == b"" and result.returncode == 0, result.stderr


def test_environment_and_descriptors_are_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "t0ps3cret")
    with open(tmp_path / "open", "w") as file:
        os.set_inheritable(file.fileno(), True)
        code = """import os
print(dict(os.environ))
for number in range(3, 64):
    try:
        os.fstat(number)
    except OSError:
        continue
    print('open', number)
"""
        result = boxed(code, tmp_path)
    assert b"t0ps3cret" not in result.stdout and b"open" not in result.stdout.splitlines()[-1], result.stdout


@pytest.mark.parametrize("namespaces", [True, False])
def test_double_forked_child_leaves_no_survivor(namespaces: bool, tmp_path: Path) -> None:
    mark = f"survivor-{os.getpid()}-{namespaces}"
    code = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, '-I', '-S', '-c', 'import time; time.sleep(60)', '{mark}'])
    os._exit(0)
import time; time.sleep(0.3)
"""
    result = boxed(code, tmp_path, namespaces=namespaces)
    assert result.returncode == 0 and result.seconds < 20, result.stderr
    assert alive(mark) == []


@pytest.mark.parametrize("namespaces", [True, False])
def test_wall_limit_ends_the_whole_tree(namespaces: bool, tmp_path: Path) -> None:
    mark = f"sleeper-{os.getpid()}-{namespaces}"
    code = f"""
import os, sys, time
if os.fork():
    time.sleep(60)
os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', '{mark}'])
"""
    result = boxed(code, tmp_path, namespaces=namespaces, limits=Limits(wall_seconds=1.0))
    assert result.timed_out and result.seconds < 15
    assert alive(mark) == []


def test_box_ends_when_the_process_that_opened_it_is_killed(tmp_path: Path) -> None:
    mark = f"orphan-{os.getpid()}"
    inner = f"import time; time.sleep(60) # {mark}"
    code = (
        "from pathlib import Path\nfrom torch_autokern.build.box import run_boxed, SYSTEM_PATHS\n"
        f"run_boxed({[*PYTHON, inner]!r}, scratch=Path({str(tmp_path)!r}), readable=(*SYSTEM_PATHS, Path({sys.base_prefix!r})))"
    )
    opener = subprocess.Popen([sys.executable, "-c", code], env=SINGLE)
    deadline = time.monotonic() + 20
    while not alive(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    assert alive(mark)
    opener.kill()
    opener.wait()
    while alive(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert alive(mark) == []


def test_limits_end_memory_processor_and_file_bombs(tmp_path: Path) -> None:
    small = Limits(cpu_seconds=1, memory_bytes=256 << 20, file_bytes=1 << 20, wall_seconds=20)
    assert b"MemoryError" in boxed("b'x' * (1 << 29)", tmp_path, limits=small).stderr
    assert boxed("while True: pass", tmp_path, limits=small).returncode in (-signal.SIGXCPU, -signal.SIGKILL)
    boxed("open('big', 'wb').write(bytes(1 << 24))", tmp_path, limits=small)
    assert (tmp_path / "big").stat().st_size <= 1 << 20


def test_weak_box_is_refused_unless_the_risk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The same launcher, on a kernel without seccomp: its filter is made to report that it could not be installed.
    weak = tmp_path / "weak"
    weak.mkdir()
    for name in ("box_launcher.py", "box_seccomp.py"):
        text = (Path(box_launcher.__file__).parent / name).read_text()
        (weak / name).write_text(text.replace("platform.machine() if", "'vax' if"))
    monkeypatch.setattr("torch_autokern.build.box._LAUNCHER", weak / "box_launcher.py")
    with pytest.raises(BoxError, match="--allow-weak-box"):
        boxed("print('ran')", tmp_path)
    result = boxed("print('ran')", tmp_path, allow_weak_box=True)
    assert result.stdout == b"ran\n" and "seccomp" not in result.level


@pytest.mark.parametrize(
    ("layer", "text", "instead", "namespaces"),
    [
        ("seccomp", "filtered = install_filter(_libc, allow_processes=allow_processes)", "filtered = False", True),
        ("landlock", "abi = landlock_abi()\n", "abi = 0\n", False),
        ("no_new_privs", "if not _prctl(_PR_SET_NO_NEW_PRIVS, 1)", "if True", True),
        ("rlimits", "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))", "raise OSError('no limits')", True),
    ],
    ids=["seccomp", "landlock without namespaces", "no_new_privs", "rlimits"],
)
def test_a_layer_that_is_needed_and_missing_is_refused(
    layer: str, text: str, instead: str, namespaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(text, instead, tmp_path, monkeypatch)
    with pytest.raises(BoxError):
        boxed("print('ran')", tmp_path, namespaces=namespaces)


@pytest.mark.parametrize(
    ("layer", "text", "instead"),
    [
        ("nocaps", "without_powers = drop_capabilities()", "without_powers = False"),
        ("pidns", "enter_namespaces() if self.wants_namespaces else []", "[]"),
    ],
    ids=["capabilities", "namespaces"],
)
def test_a_layer_that_others_stand_in_for_is_missing_in_the_level(
    layer: str, text: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(text, instead, tmp_path, monkeypatch)
    level = boxed("print('ran')", tmp_path).level.split("+")
    assert layer not in level and "seccomp" in level


def without(text: str, instead: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher on a kernel that lacks a layer."""
    folder = folder / "launcher"
    folder.mkdir()
    for name in ("box_launcher.py", "box_seccomp.py"):
        source = (Path(box_launcher.__file__).parent / name).read_text()
        assert name != "box_launcher.py" or source.count(text) == 1
        (folder / name).write_text(source.replace(text, instead))
    monkeypatch.setattr("torch_autokern.build.box._LAUNCHER", folder / "box_launcher.py")


def test_program_that_does_not_exist_is_a_box_error(tmp_path: Path) -> None:
    with pytest.raises(BoxError, match="/nowhere/cc"):
        run_boxed(["/nowhere/cc"], scratch=tmp_path)


def test_filter_has_a_program_for_both_machines_and_refuses_others() -> None:
    for machine in ("x86_64", "aarch64"):
        program = filter_program(machine, allow_processes=False, own_pid=1)
        assert len(program) % 8 == 0 and len(program) // 8 < 4096
    with pytest.raises(KeyError):
        filter_program("vax", allow_processes=True, own_pid=1)


ENTER = """
import os, sys
from pathlib import Path
from torch_autokern.build.box import enter_box
level = enter_box(readable=(Path('/usr'),))
assert 'seccomp' in level, level
def refused(act):
    try:
        act()
    except OSError:
        return True
    return False
assert refused(lambda: open('/etc/passwd')) and refused(lambda: open('/tmp/x', 'w'))
assert refused(os.fork) and refused(lambda: os.execv('/bin/true', ['true'])) and refused(lambda: os.kill(os.getppid(), 0))
assert refused(lambda: os.sched_setaffinity(0, {0}))
import threading
done = []
worker = threading.Thread(target=lambda: done.append(1)); worker.start(); worker.join()
assert done == [1]
descriptor = os.memfd_create('library')
os.write(descriptor, b'bytes')
print('held')
"""


def test_running_process_can_enter_the_box_and_keeps_threads_only() -> None:
    run = subprocess.run([sys.executable, "-c", ENTER], capture_output=True, text=True, env=SINGLE)
    assert run.stdout == "held\n", run.stderr


def test_process_with_running_threads_may_not_enter() -> None:
    code = (
        "import threading, time\nfrom torch_autokern.build.box import enter_box\nfrom torch_autokern.errors import BoxError\n"
        "threading.Thread(target=time.sleep, args=(2,), daemon=True).start()\n"
        "try:\n    enter_box()\nexcept BoxError as error:\n    print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=SINGLE)
    assert "2 threads are running" in run.stdout, run.stderr


DEVICE_PROGRAM = """
import pathlib, sys, threading
from torch_autokern.build.box import Limits, enter_box
wait = threading.Event()
threading.Thread(target=wait.wait, daemon=True).start()
level = enter_box(readable=[pathlib.Path(sys.prefix)], devices=[pathlib.Path("/dev/full")], allow_weak_box=True)
print(level)
for path, mode in (("/dev/full", "rb+"), (sys.argv[1], "rb")):
    try:
        open(path, mode, buffering=0).close()
        print("opened")
    except OSError as error:
        print(type(error).__name__)
"""


def test_a_box_with_devices_lets_a_drivers_threads_be_and_says_so(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("precious")
    run = subprocess.run([sys.executable, "-c", DEVICE_PROGRAM, str(secret)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    level, device, file = run.stdout.split()
    assert level.endswith("mainthread") and "seccomp" in level
    assert device == "opened"
    assert file == ("PermissionError" if "landlock" in level else "opened")
