"""`autokern record`: run a Python program unchanged and write down which kernels it asked for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from torch_autokern.cli import shell
from torch_autokern.errors import InvalidInputError
from torch_autokern.store.workload import Workload, load_workload

# Options after the program's name are the program's.
CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_EXAMPLE = "autokern record -o workload.json -- python script.py"
_FLAGS_WITH_VALUE = ("-X", "-W")
_SHOWN_GROUPS = 10


@dataclass(frozen=True)
class PythonProgram:
    """A Python command line, taken apart. `interpreter` runs it with `flags`; `target` is a path, a module name or code."""

    interpreter: str
    flags: tuple[str, ...]
    kind: Literal["script", "module", "code"]
    target: str
    args: tuple[str, ...]


class RecordedGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys alike but for one length, `lengths`; `call` is the most expensive of them. `share` is of the recorded time;
    `candidates` is what warming all its keys would build and judge at most, 0 where no template answers (then warming it wins
    nothing unless somebody brings a kernel)."""

    call: str
    keys: int
    lengths: tuple[int, ...]
    calls: int
    share: float
    candidates: int


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


def grouped(workload: Workload) -> list[RecordedGroup]:
    """The workload's keys in groups, by falling time, with what warming each would cost on this machine."""
    from torch_autokern.report.explanation import summarise_key
    from torch_autokern.report.grouping import group_keys
    from torch_autokern.runtime.target import local_target
    from torch_autokern.search.templates import propose

    rows = []
    for group in group_keys(workload):
        leading = group.entries[0].key
        target = local_target(leading.device_type)
        candidates = sum(len(propose(entry.key, target)) for entry in group.entries)
        share = sum(workload.share(entry) for entry in group.entries)
        rows.append(RecordedGroup(summarise_key(leading), len(group.entries), group.lengths, group.calls, share, candidates))
    return rows


def _summary(workload: Workload, path: Path, code: int) -> dict[str, object]:
    groups = grouped(workload)
    return {
        "workload": str(path),
        "exit_code": code,
        "keys": len(workload.entries),
        "calls": sum(entry.calls for entry in workload.entries),
        "share": sum(workload.share(entry) for entry in workload.entries),
        "candidates": sum(group.candidates for group in groups),
        "groups": groups,
    }


def _say_summary(workload: Workload, path: Path) -> None:
    calls = sum(entry.calls for entry in workload.entries)
    share = sum(workload.share(entry) for entry in workload.entries)
    shell.say(
        f"autokern: {len(workload.entries)} keys, {calls} calls, {share:.0%} of {workload.wall_time_us / 1e6:.1f} s, "
        f"written to {path}"
    )
    if not workload.entries:
        shell.say("autokern: no op that kernels can serve was called; docs/why-is-nothing-replaced.md lists what is ours")
        return
    groups = grouped(workload)
    for group in groups[:_SHOWN_GROUPS]:
        shell.say(f"autokern: {group.share:6.1%}  {_in_words(group)}")
    if len(groups) > _SHOWN_GROUPS:
        shell.say(f"autokern: and {len(groups) - _SHOWN_GROUPS} more groups (--json lists all)")
    total = sum(group.candidates for group in groups)
    shell.say(
        f"autokern: warming it all builds and judges up to {total} candidates; --budget MINUTES takes the costliest first"
    )
    shell.say(f"autokern: next: autokern warm {path}")


def _in_words(group: RecordedGroup) -> str:
    from torch_autokern.report.grouping import shown_lengths

    alike = f", {group.keys} keys alike but for a length of {shown_lengths(group.lengths)}" if group.keys > 1 else ""
    cost = f"up to {group.candidates} candidates" if group.candidates else "no template answers"
    return f"{group.call}{alike}: {group.calls} calls, {cost}"
