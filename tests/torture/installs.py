"""Broken installs: whatever is missing or damaged around the package, importing it works, stock runs, and `doctor` says why.

    python -m tests.torture.installs [NAME ...]

One process imports torch once and forks for each case, so that a case costs a fraction of a second; each prints one JSON line
with what its child saw. A child breaks the install in its own way first, then imports the package for the first time.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.torture.places import as_user, command, private_mounts

_PACKAGE = Path(__file__).parents[2] / "torch_autokern"
_SECONDS = 60


class Case(NamedTuple):
    """`break_it` runs in the child with the folder of a private copy of the package; `says` is a pattern that one line of what
    `doctor` prints must have ("" where all is well all the same); `needs_root` cases mount or change the user."""

    break_it: Callable[[Path], object]
    says: str = ""
    needs_root: bool = False
    stays_silent: bool = False  # nobody can read what doctor prints


class _Missing:
    """An import hook: these packages are not installed."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Refuse what is missing."""
        if name.split(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _without(*names: str) -> Callable[[Path], None]:
    def break_it(_: Path) -> None:
        for module in list(sys.modules):
            if module.split(".")[0] in names:
                del sys.modules[module]
        sys.meta_path.insert(0, _Missing(*names))  # type: ignore[arg-type]

    return break_it


def _extension_file(folder: Path) -> Path:
    return next((folder / "torch_autokern").glob("_C*.so"))


def _extension(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def break_it(folder: Path) -> None:
        path = _extension_file(folder)
        change(path)

    return break_it


def _cut(path: Path, length: float) -> None:
    body = path.read_bytes()
    path.unlink()
    path.write_bytes(body[: int(len(body) * length)])


def _patched(path: Path, place: int, words: bytes) -> None:
    body = bytearray(path.read_bytes())
    body[place : place + len(words)] = words
    path.unlink()
    path.write_bytes(body)


def _replaced(path: Path, body: bytes) -> None:
    path.unlink()
    path.write_bytes(body)


def _of_another_module(path: Path) -> None:
    """A whole library that is not ours: it has no `PyInit__C`."""
    import _struct

    body = Path(_struct.__file__).read_bytes() if hasattr(_struct, "__file__") else b""
    other = body or next(Path(p) for p in sys.path if (Path(p) / "lib-dynload").exists()).read_bytes()
    _replaced(path, other)


def _undefined_symbol(path: Path) -> None:
    """Another ABI: one of the symbols that it imports from torch is called otherwise."""
    body = path.read_bytes()
    name = re.search(rb"_ZN(2at|3c10)[A-Za-z0-9_]{20,}", body)
    assert name is not None
    _replaced(path, body.replace(name.group() + b"\0", name.group()[:-2] + b"zz\0"))


def _as_python(text: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.unlink()
        (path.parent / "_C.py").write_text(text)

    return _extension(change)


def _environment(**words: str | None) -> Callable[[Path], None]:
    def break_it(_: Path) -> None:
        for name, value in words.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return break_it


def _shared_store(folder: Path) -> None:
    (folder / "shared").mkdir()
    (folder / "shared").chmod(0o777)
    os.environ["AUTOKERN_STORE"] = str(folder / "shared")


def _nowhere(folder: Path) -> None:
    (folder / "file").write_text("")
    nowhere = str(folder / "file" / "x")
    _environment(AUTOKERN_STORE=nowhere, HOME=nowhere, XDG_CACHE_HOME=nowhere, TMPDIR=nowhere)(folder)
    tempfile.tempdir = nowhere


def _linked_store(folder: Path) -> None:
    (folder / "link").symlink_to("/")
    os.environ["AUTOKERN_STORE"] = str(folder / "link")


def _covered(path: str) -> Callable[[Path], None]:
    def break_it(_: Path) -> None:
        private_mounts()
        command("mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", path)

    return break_it


def _read_only(folder: Path) -> None:
    private_mounts()
    command("mount", "--bind", str(folder), str(folder))
    command("mount", "-o", "remount,bind,ro", str(folder))


def _user(uid: int) -> Callable[[Path], None]:
    def break_it(folder: Path) -> None:
        _environment(HOME=None, XDG_CACHE_HOME=None, AUTOKERN_STORE=None)(folder)
        as_user(uid)()

    return break_it


def _no_working_folder(folder: Path) -> None:
    (folder / "gone").mkdir()
    os.chdir(folder / "gone")
    (folder / "gone").rmdir()


def _platform(name: str) -> Callable[[Path], None]:
    def break_it(_: Path) -> None:
        # On the real system these find what they need; here they would look for its modules in vain.
        for module in ("typer", "rich.console", "platformdirs"):
            importlib.import_module(module)
        sys.platform = name

    return break_it


def _no_owners(_: Path) -> None:
    del os.geteuid


def _torch_version(version: str) -> Callable[[Path], None]:
    def break_it(_: Path) -> None:
        import torch

        torch.__version__ = version  # type: ignore[assignment]

    return break_it


def _few_descriptors(_: Path) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))


def _closed_streams(_: Path) -> None:
    sys.stdout = sys.stderr = sys.stdin = None  # type: ignore[assignment]


def _ascii_streams(_: Path) -> None:
    for name in ("LC_ALL", "LANG"):
        os.environ[name] = "C"
    os.environ.update(PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="ascii")  # type: ignore[union-attr]


def _warnings_are_errors(_: Path) -> None:
    """All but the one that says that nothing is served: who turns that into an error gets it."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="no verified kernel")


def _broken_torch_library(_: Path) -> None:
    class Broken:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "torch":
                raise OSError("libtorch_cpu.so: cannot open shared object file: No such file or directory")

    for module in [name for name in sys.modules if name.split(".")[0] == "torch"]:
        del sys.modules[module]
    sys.meta_path.insert(0, Broken())  # type: ignore[arg-type]


CASES: dict[str, Case] = {
    "nothing broken": Case(lambda folder: None),
    # -- a dependency is missing
    "no torch": Case(_without("torch"), "torch"),
    "torch whose library is missing": Case(_broken_torch_library, "libtorch_cpu"),
    "no msgspec": Case(_without("msgspec"), "msgspec"),
    "no platformdirs": Case(_without("platformdirs"), "platformdirs"),
    "no filelock": Case(_without("filelock")),
    "no typer": Case(_without("typer"), "typer"),
    "no rich": Case(_without("rich"), "rich"),
    "no openai": Case(_without("openai")),
    "no triton": Case(_without("triton")),
    "no numpy": Case(_without("numpy")),
    "no cuda bindings": Case(_without("cuda")),
    "no cryptography": Case(_without("cryptography")),
    "none of the upper rooms' packages": Case(_without("openai", "rich", "typer", "triton", "ray"), "typer|rich"),
    # -- the extension
    "no extension": Case(_extension(lambda path: path.unlink()), "extension.*rebuild|extension .*No module|_C"),
    "an empty extension": Case(_extension(lambda path: _replaced(path, b"")), "extension"),
    "an extension of text": Case(_extension(lambda path: _replaced(path, b"not a library\n" * 99)), "extension"),
    "an extension cut in the middle": Case(_extension(lambda path: _cut(path, 0.5)), "extension.*cut short"),
    "an extension cut in its header": Case(_extension(lambda path: _cut(path, 0.00005)), "extension"),
    "an extension without its last bytes": Case(_extension(lambda path: _cut(path, 0.999)), "extension.*cut short"),
    "an extension for another processor": Case(_extension(lambda path: _patched(path, 18, b"\xb7\0")), "extension"),
    "an extension for 32 bits": Case(_extension(lambda path: _patched(path, 4, b"\x01")), "extension"),
    "an extension of another ABI": Case(_extension(_undefined_symbol), "extension.*undefined symbol"),
    "another library in the extension's place": Case(_extension(_of_another_module), "extension"),
    "an extension that is a folder": Case(_extension(lambda path: (path.unlink(), path.mkdir())), "extension"),
    "an extension that is a dangling link": Case(
        _extension(lambda path: (path.unlink(), path.symlink_to("gone"))), "extension"
    ),
    "an extension for another torch": Case(_as_python("built_for_torch = '2.12.1+cpu'\n"), "extension.*2.12.1"),
    "an extension that raises": Case(_as_python("raise RuntimeError('static initialiser failed')\n"), "static initialiser"),
    # -- folders and accounts
    "no HOME": Case(_environment(HOME=None, XDG_CACHE_HOME=None, AUTOKERN_STORE=None)),
    "HOME that is not there": Case(_environment(HOME="/nonexistent/x", XDG_CACHE_HOME=None, AUTOKERN_STORE=None)),
    "HOME that is a file": Case(_environment(HOME="/etc/passwd", XDG_CACHE_HOME=None, AUTOKERN_STORE=None), "store"),
    "XDG_CACHE_HOME that is no path": Case(_environment(XDG_CACHE_HOME="::\n*", AUTOKERN_STORE=None)),
    "no folder anywhere": Case(_nowhere, "no folder can be written"),
    "a store that others can write": Case(_shared_store, "store.*lets others write"),
    "a store that is a link": Case(_linked_store, "store.*symbolic link"),
    "a store inside a device": Case(_environment(AUTOKERN_STORE="/dev/null/store"), "store.*refused"),
    "a store of no name": Case(_environment(AUTOKERN_STORE="   "), ""),
    "a store with a name too long": Case(_environment(AUTOKERN_STORE="/" + "x" * 5000), "store.*refused"),
    "a package folder that is read-only": Case(_read_only, "", needs_root=True),
    "a user without account": Case(_user(54321), "", needs_root=True),
    "a working folder that was removed": Case(_no_working_folder),
    # -- values of switches
    "a pool limit of words": Case(_environment(AUTOKERN_POOL_MB="lots"), "pool.*lots"),
    "a pool limit below nothing": Case(_environment(AUTOKERN_POOL_MB="-1"), "pool.*-1"),
    "a compiler that is not there": Case(_environment(AUTOKERN_CXX="/nonexistent/c++"), "compiler"),
    "strict that is neither": Case(_environment(AUTOKERN_STRICT="perhaps")),
    "switched off": Case(_environment(AUTOKERN_DISABLE="1"), "AUTOKERN_DISABLE"),
    "no PATH": Case(_environment(PATH=""), "compiler"),
    # -- the system
    "no /proc": Case(_covered("/proc"), "", needs_root=True),
    "no /sys": Case(_covered("/sys"), "", needs_root=True),
    "no /dev/shm": Case(_covered("/dev/shm"), "", needs_root=True),
    "a locale that is not UTF-8": Case(_ascii_streams),
    "closed standard streams": Case(_closed_streams, stays_silent=True),
    "24 descriptors": Case(_few_descriptors),
    "warnings that are errors": Case(_warnings_are_errors),
    "macOS": Case(_platform("darwin"), "system.*Linux only"),
    "Windows": Case(_platform("win32"), "system.*Linux only"),
    "a system without owners": Case(_no_owners),
    "torch too old": Case(_torch_version("2.10.1"), "torch.*2.11 or newer"),
    "torch of next year": Case(_torch_version("2.99.0.dev20270101+cpu"), "extension.*2.99.0|nightly"),
    "torch with a strange version": Case(_torch_version("2.13.0a0+git1234"), ""),
}


def look(case: Case, folder: Path) -> dict[str, object]:
    """Break the install, then import, run a model both ways, and let `doctor` speak. Runs in a child of its own."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.LayerNorm(17), torch.nn.Softmax(-1))
    batch = torch.randn(5, 33)
    expected = model(batch)
    case.break_it(folder)
    seen: dict[str, object] = {}
    with warnings.catch_warnings(record=True) as said:
        if not any(each[0] == "error" for each in warnings.filters[:2]):
            warnings.simplefilter("always")
        import torch_autokern

        seen["imported"] = torch_autokern.__file__
        seen["stock_equal"] = bool(torch.equal(torch_autokern.optimize(model)(batch), expected))
    seen["warnings"] = [str(each.message) for each in said]
    seen["doctor"], seen["exit_code"] = _doctor(folder, case.stays_silent)
    return seen


def _doctor(folder: Path, stays_silent: bool) -> tuple[str, object]:
    """What `autokern doctor` prints, and its exit code."""
    with os.fdopen(os.memfd_create("doctor"), "w+b") as file:
        kept = os.dup(1), os.dup(2)
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        code: object = 0
        sys.argv = ["autokern", "doctor"]
        try:
            from torch_autokern.cli.main import main

            main()
        except SystemExit as ended:
            code = ended.code
            if isinstance(code, str):
                os.write(2, code.encode())
                code = 1
        finally:
            for stream in (sys.stdout, sys.stderr):
                if not stays_silent:
                    stream.flush()
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
        file.seek(0)
        return file.read().decode(errors="replace"), code


def run_case(name: str) -> dict[str, object]:
    """The outcome of one case, from a forked child with a private copy of the package."""
    folder = Path(tempfile.mkdtemp(prefix="autokern-install-"))
    folder.chmod(0o755)
    shutil.copytree(_PACKAGE, folder / "torch_autokern", ignore=shutil.ignore_patterns("__pycache__"))
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer: dict[str, object] = {}
        try:
            os.close(read_end)
            threading.Timer(_SECONDS, os._exit, (3,)).start()
            sys.path[:] = [str(folder)] + [p for p in sys.path if Path(p or ".").resolve() != _PACKAGE.parent]
            # An editable install finds the package's files by a hook of its own, whatever is missing from the copy.
            sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in repr(finder)]
            sys.dont_write_bytecode = True
            os.environ.update(AUTOKERN_STORE=str(folder / "store"), XDG_CACHE_HOME=str(folder / "cache"))
            answer = look(CASES[name], folder)
        except BaseException:  # noqa: BLE001 - the test wants to see it
            answer = {"raised": traceback.format_exc()}
        finally:
            os.write(write_end, json.dumps(answer).encode()[:60_000])
            os._exit(0)
    os.close(write_end)
    body = b"".join(iter(lambda: os.read(read_end, 1 << 16), b""))
    os.close(read_end)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        shutil.rmtree(folder)
    return {"name": name, **(json.loads(body) if body else {"raised": f"the process died, status {status}"})}


def main(names: list[str]) -> int:
    """Run the named cases, or all; one JSON line each."""
    import torch  # noqa: F401 - once for all children

    for name in names or CASES:
        if CASES[name].needs_root and os.geteuid() != 0:
            print(json.dumps({"name": name, "skipped": "needs root"}), flush=True)
            continue
        print(json.dumps(run_case(name)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
