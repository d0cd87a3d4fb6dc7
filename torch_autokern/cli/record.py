"""`autokern record`: run a Python program unchanged and write down which kernels it asked for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from torch_autokern.cli import shell
from torch_autokern.errors import InvalidInputError
from torch_autokern.store.workload import Workload, load_workload

# Options after the program's name are the program's.
CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_EXAMPLE = "autokern record -o workload.json -- python script.py"
_FLAGS_WITH_VALUE = ("-X", "-W")


@dataclass(frozen=True)
class PythonProgram:
    """A Python command line, taken apart. `interpreter` runs it with `flags`; `target` is a path, a module name or code."""

    interpreter: str
    flags: tuple[str, ...]
    kind: Literal["script", "module", "code"]
    target: str
    args: tuple[str, ...]


def record(
    command: Annotated[list[str], typer.Argument(help="The program: -- python script.py ..., -- python -m module ...")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the workload goes.")] = Path("workload.json"),
    as_json: shell.AsJson = False,
) -> None:
    """Run a Python program and write down which ops it called, with which shapes, and how long they took.

    The program runs as it would alone, and its exit code is passed on; the workload is written even when it fails. Processes
    that it starts are not recorded.
    """
    program = parse_command(command)
    path = shell.writable_file(output)
    # Written beside it and renamed: an earlier workload is neither lost nor taken for this one's.
    fresh = path.with_name(path.name + ".recording")
    fresh.unlink(missing_ok=True)
    run_in_child = [program.interpreter, *program.flags, "-m", "torch_autokern.cli.recorded", str(fresh), program.kind]
    child = subprocess.Popen(
        # With --json this command's stdout is one JSON value, so the program's goes to stderr.
        [*run_in_child, program.target, *program.args], stdout=sys.stderr.fileno() if as_json else None
    )  # fmt: skip
    code = _wait(child)
    if not fresh.exists():
        shell.say(f"autokern: the program ended with exit code {code} before its workload could be written to {path}")
        raise typer.Exit(code or shell.EXIT_MISTAKE)
    workload = load_workload(fresh)
    fresh.replace(path)
    if as_json:
        shell.print_json(_summary(workload, path, code))
    else:
        _say_summary(workload, path)
    raise typer.Exit(code)


def parse_command(command: list[str]) -> PythonProgram:
    """Take a Python command line apart.

    Raises:
        InvalidInputError: it does not run Python, or what it runs is missing.
    """
    first = command[0]
    if first.endswith(".py"):
        return PythonProgram(sys.executable, (), "script", _existing(first), tuple(command[1:]))
    if not Path(first).name.startswith("python"):
        raise InvalidInputError(f"{first!r} is not Python; only Python programs can be recorded: {_EXAMPLE}")
    interpreter = _interpreter(first)
    flags: list[str] = []
    rest = command[1:]
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        count = 2 if rest[0] in _FLAGS_WITH_VALUE else 1
        flags += rest[:count]
        rest = rest[count:]
    if not rest:
        raise InvalidInputError(f"nothing to run after {' '.join(command)!r}; for example: {_EXAMPLE}")
    if rest[0] in ("-m", "-c"):
        if len(rest) < 2:
            raise InvalidInputError(f"{rest[0]} needs a value; for example: {_EXAMPLE}")
        kind: Literal["module", "code"] = "module" if rest[0] == "-m" else "code"
        return PythonProgram(interpreter, tuple(flags), kind, rest[1], tuple(rest[2:]))
    return PythonProgram(interpreter, tuple(flags), "script", _existing(rest[0]), tuple(rest[1:]))


def _interpreter(name: str) -> str:
    """A bare `python` is the one that this package is installed in; a path is taken at its word."""
    if "/" not in name:
        return sys.executable
    found = shutil.which(name)
    if found is None:
        raise InvalidInputError(f"{name} is not a program that can be run; for example: {_EXAMPLE}")
    return found


def _existing(script: str) -> str:
    path = Path(script).expanduser()
    if not path.is_file():
        raise InvalidInputError(f"there is no script {script}; for example: {_EXAMPLE}")
    return str(path)


def _wait(child: subprocess.Popen[bytes]) -> int:
    """The child's exit code, as a shell gives it (128 + signal). Ctrl-C reaches the child too: wait for it to finish."""
    while True:
        try:
            code = child.wait()
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            continue


def _summary(workload: Workload, path: Path, code: int) -> dict[str, object]:
    return {
        "workload": str(path),
        "exit_code": code,
        "keys": len(workload.entries),
        "calls": sum(entry.calls for entry in workload.entries),
        "share": sum(workload.share(entry) for entry in workload.entries),
    }


def _say_summary(workload: Workload, path: Path) -> None:
    calls = sum(entry.calls for entry in workload.entries)
    share = sum(workload.share(entry) for entry in workload.entries)
    shell.say(
        f"autokern: {len(workload.entries)} keys, {calls} calls, {share:.0%} of {workload.wall_time_us / 1e6:.1f} s, "
        f"written to {path}"
    )
    if workload.entries:
        shell.say(f"autokern: next: autokern warm {path}")
    else:
        shell.say("autokern: no op that kernels can serve was called; docs/why-is-nothing-replaced.md lists what is ours")
