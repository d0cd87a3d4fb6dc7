"""`autokern doctor`: what works on this machine, what is off or slow, and the command that changes it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import typer

from torch_autokern import config
from torch_autokern.cli import shell
from torch_autokern.errors import AutokernError, BoxError, InvalidInputError, ToolchainError

Status = Literal["ok", "warn", "fail"]
_FIRST_STEPS = "autokern record -- python script.py, then autokern warm workload.json"
_MARKS = {"ok": "[green]ok  [/]", "warn": "[yellow]warn[/]", "fail": "[red]fail[/]"}


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line: `ok`, `warn` (slower than it could be, or off) or `fail` (nothing is served). `fix` is a command or a setting,
    empty where nothing is to be done."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def doctor(as_json: shell.AsJson = False) -> None:
    """Check this machine: compiler, ISA, torch, extension, other overrides, store folder, switches. Changes nothing.

    Exit code 1 when a line fails.
    """
    findings = examine()
    if as_json:
        shell.print_json({"findings": findings, "healthy": not any(f.status == "fail" for f in findings)})
    else:
        console = shell.results()
        for finding in findings:
            console.print(f"{_MARKS[finding.status]} {finding.name:<12}", end=" ")
            console.print(finding.detail, markup=False, soft_wrap=True)
            if finding.fix:
                console.print(f"     {'':<12} -> {finding.fix}", markup=False, soft_wrap=True)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(1)


def examine() -> list[Finding]:
    """Every check, in the order of the way of a call. A check that itself breaks is a finding, not the end of the list."""
    checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("system", _system),
        ("torch", _torch),
        ("extension", _extension),
        ("switches", _switches),
        ("overrides", _overrides),
        ("cpu", _cpu),
        ("gpu", _gpu),
        ("compiler", _compiler),
        ("box", _box),
        ("store", _store),
        ("pool", _pool),
    )
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings += check()
        except (AutokernError, ImportError, OSError, RuntimeError) as error:  # torch itself, or a part of it, may be broken
            what = "" if isinstance(error, AutokernError) else f"{type(error).__name__}: "
            findings.append(Finding(name, "fail", f"{what}{shell.one_line(error)}; every call is stock"))
    return findings


def rebuild_command() -> str:
    """How to build the extension for this torch: from the checkout where there is one, else from the source distribution."""
    root = Path(__file__).resolve().parents[2]
    package = f"-e {root}" if (root / "setup.py").is_file() else "--no-binary torch-autokern torch-autokern"
    return f"{sys.executable} -m pip install --force-reinstall --no-deps --no-build-isolation {package}"


def _system() -> Iterator[Finding]:
    words = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    if sys.platform == "linux":
        yield Finding("system", "ok", words)
    else:
        yield Finding("system", "fail", f"{words}: kernels run on Linux only; every call is stock")


def _torch() -> Iterator[Finding]:
    import torch

    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < (2, 11):
        yield Finding("torch", "fail", f"{torch.__version__}; 2.11 or newer is needed", "pip install 'torch>=2.11'")
        return
    what = "with CUDA " + torch.version.cuda if torch.version.cuda else "ROCm" if torch.version.hip else "CPU only"
    words = f"{torch.__version__} ({what})"
    if ".dev" in torch.__version__ or torch.version.hip:
        yield Finding(
            "torch", "warn", f"{words}: nightly builds and ROCm are untested; stock runs wherever something does not fit"
        )
    else:
        yield Finding("torch", "ok", words)


def _extension() -> Iterator[Finding]:
    from torch_autokern.runtime.extension import extension_state

    state = extension_state()
    if state.module is None:
        reason = state.reason.partition("; rebuild it")[0]
        yield Finding("extension", "fail", f"{reason}; every call is stock", rebuild_command())
    else:
        yield Finding("extension", "ok", f"built for torch {state.module.built_for_torch}")


def _switches() -> Iterator[Finding]:
    if config.disabled():
        yield Finding("kill switch", "warn", "AUTOKERN_DISABLE is set: every call is stock", "unset AUTOKERN_DISABLE")
    else:
        yield Finding("kill switch", "ok", "off (AUTOKERN_DISABLE=1 makes every call stock)")
    if config.strict():
        yield Finding("strict", "warn", "AUTOKERN_STRICT is set: a miss raises", "unset AUTOKERN_STRICT")


def _overrides() -> Iterator[Finding]:
    from torch_autokern.runtime.extension import extension_state

    native = extension_state().module
    if native is None:
        return
    was_installed = any(overload.installed for overload in native.installed_overloads())
    native.install()
    try:
        overloads = native.installed_overloads()
    finally:
        if not was_installed:
            native.uninstall()
    chained = [o for o in overloads if o.installed and o.above_another]
    covered = [o for o in overloads if o.installed and not o.on_top]
    names = ", ".join(sorted({f"{o.name} ({o.captured})" for o in chained}))
    if chained:
        yield Finding("overrides", "ok", f"another library overrides {names}; misses go on to it")
    if covered:
        names = ", ".join(sorted({o.name for o in covered}))
        yield Finding("overrides", "warn", f"another library sits on top of {names}: it is called first, ours after it")
    if not chained and not covered:
        count = sum(o.installed for o in overloads)
        yield Finding("overrides", "ok", f"no other library overrides the {count} overloads that the router takes")


def _cpu() -> Iterator[Finding]:
    import torch

    from torch_autokern.report.device import cpu_model
    from torch_autokern.runtime.target import local_target

    target = local_target("cpu")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = f"{cpu_model()}: {target.name}, {target.arch}, torch uses {target.threads} of {usable} usable cores"
    if target.threads > usable:
        yield Finding("cpu", "warn", f"{words}: more threads than cores is slow", f"export OMP_NUM_THREADS={usable}")
    elif target.threads < usable // 2:
        yield Finding("cpu", "warn", f"{words}; kernels are proved for this thread count only", "unset OMP_NUM_THREADS")
    else:
        yield Finding("cpu", "ok", words)
    if not torch.backends.mkldnn.enabled:
        yield Finding("mkldnn", "warn", "torch.backends.mkldnn is off: stock matmul is slower, and keys differ")


def _gpu() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("gpu", "ok", "none that torch can use; CPU kernels only")
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        yield Finding("gpu", "ok", f"{index}: {torch.cuda.get_device_name(index)}, capability {major}.{minor}")


def _compiler() -> Iterator[Finding]:
    """Serving needs no compiler; finding new CPU kernels does."""
    from torch_autokern.build.compile_cpp import find_compiler

    try:
        compiler = find_compiler()
    except ToolchainError as error:
        yield Finding(
            "compiler", "warn", f"{shell.one_line(error)}; stored kernels run, new CPU kernels cannot be made",
            "install g++ or clang++ (Debian: apt-get install g++), or set AUTOKERN_CXX to one",
        )  # fmt: skip
        return
    yield Finding("compiler", "ok", f"{compiler.path}: {compiler.version}")


def _box() -> Iterator[Finding]:
    """How well a compiler and a kernel under trial are confined; the level is written into each record."""
    from torch_autokern.build.box import run_boxed

    program = shutil.which("true")
    if sys.platform != "linux" or program is None:
        return
    with tempfile.TemporaryDirectory(prefix="autokern-doctor-") as scratch:
        try:
            result = run_boxed([program], scratch=Path(scratch))
        except BoxError as error:
            yield Finding("box", "warn", f"{shell.one_line(error)}; stored kernels run, new ones are not made")
            return
    yield Finding("box", "ok", f"untrusted code is confined by {result.level}")


def _store() -> Iterator[Finding]:
    from torch_autokern.cli.stats import store_stats
    from torch_autokern.store.folders import choose_folder
    from torch_autokern.store.store import open_store

    choice = choose_folder()
    for path, reason in choice.tried:
        yield Finding("store", "warn", f"{path} was refused: {reason}", "export AUTOKERN_STORE=/a/private/writable/folder")
    store = open_store(choice=choice)
    if choice.path is None:
        yield Finding("store", "warn", choice.why, "export AUTOKERN_STORE=/a/private/writable/folder")
        return
    counts = store_stats(store)
    records = sum(op.records for op in counts.ops.values())
    armed = sum(op.armed for op in counts.ops.values())
    words = f"{choice.path} ({choice.why}): {records} records, {armed} armed on this machine"
    if store.counters.damaged:
        yield Finding("store", "warn", f"{words}; {store.counters.damaged} damaged ones", "autokern cache repair")
    elif not armed:
        yield Finding("store", "warn", f"{words}: every call is stock", _FIRST_STEPS)
    else:
        yield Finding("store", "ok", words)


def _pool() -> Iterator[Finding]:
    from torch_autokern.runtime.session import pool_limit_bytes

    try:
        limit = pool_limit_bytes()
    except InvalidInputError as error:
        yield Finding("pool", "fail", str(error), "unset AUTOKERN_POOL_MB")
        return
    if limit:
        yield Finding("pool", "ok", f"keeps at most {limit >> 20} MiB of pages for outputs (AUTOKERN_POOL_MB)")
    else:
        yield Finding("pool", "warn", "off: large outputs touch fresh pages at every call", "unset AUTOKERN_POOL_MB")
