"""C++ candidates to CPU libraries: the system's compiler in the box, with flags that no candidate can choose.

Two steps, so that the assembler never sees what the rules refuse: source to assembly text, which is inspected, then assembly to
a library, whose ELF is inspected. Both depend on nothing but source, plan, flags and compiler: two builds are equal byte for
byte.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from torch_autokern import config
from torch_autokern.build.box import SYSTEM_PATHS, BoxResult, Limits, run_boxed
from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.build.source_rules import assembly_problems, build_unit, source_problems
from torch_autokern.errors import BuildError, StaticRuleError, ToolchainError
from torch_autokern.runtime.elf import MAX_LIBRARY_BYTES, check_cpu_library
from torch_autokern.runtime.plan import entries
from torch_autokern.store.key import Target

Sanitizer = Literal["address", "undefined", "thread"]
MAX_SOURCE_BYTES = 1 << 20
MAX_WORDS = 2000
_NAMES = ("c++", "g++", "clang++")
_ARCH_FLAGS = {
    "x86-64-v4": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    "x86-64-v3": ("-march=x86-64-v3",),
    "x86-64-v2": ("-march=x86-64-v2",),
    "aarch64": ("-march=armv8-a",),
}
_MACHINE_OF = {"x86-64-v4": "x86_64", "x86-64-v3": "x86_64", "x86-64-v2": "x86_64", "aarch64": "aarch64"}
_KILLED = re.compile(r"Killed|CPU time limit|out of memory|File size limit|File too large|Terminated")
# -fno-builtin is absent on purpose: loops may become memcpy, which is allowed.
_CODE_FLAGS = (
    "-std=c++17", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-fvisibility-inlines-hidden",
    "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-plt", "-fno-threadsafe-statics",
    "-fno-stack-protector", "-fno-asynchronous-unwind-tables", "-U_FORTIFY_SOURCE", "-w", "-fno-diagnostics-color",
)  # fmt: skip
_LINK_FLAGS = (
    "-shared", "-nostartfiles", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack", "-Wl,--build-id=none", "-Wl,--as-needed",
)  # fmt: skip


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: where it is, the first line that it says of itself, and its family."""

    path: Path
    version: str
    kind: Literal["gcc", "clang"]


def find_compiler() -> Compiler:
    """The compiler that builds CPU kernels: `AUTOKERN_CXX` when set, else the first of c++, g++ and clang++ on PATH.

    Raises:
        ToolchainError: none is there, or it does not answer.
    """
    wanted = config.compiler()
    for name in (wanted,) if wanted else _NAMES:
        found = shutil.which(name)
        if found:
            return _describe(found)
    if wanted:
        raise ToolchainError(f"no C++ compiler found at AUTOKERN_CXX={wanted}: correct or unset it; calls stay stock")
    raise ToolchainError(
        f"no C++ compiler found (looked for {', '.join(_NAMES)}): install one, for example: apt install g++; calls stay stock"
    )


@lru_cache(maxsize=8)
def _describe(path: str) -> Compiler:
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"the C++ compiler {path} does not run ({error}); calls stay stock") from error
    if answer.returncode or not answer.stdout.strip():
        raise ToolchainError(f"the C++ compiler {path} does not answer to --version; calls stay stock")
    version = answer.stdout.splitlines()[0].strip()
    return Compiler(Path(path), version, "clang" if "clang" in answer.stdout.lower() else "gcc")


def toolchain_paths(compiler: Compiler) -> tuple[Path, ...]:
    """What the compiler must be able to read: the system's folders, and its own installation where that is elsewhere."""
    own = compiler.path.resolve().parent
    prefix = own.parent
    home = Path(os.path.expanduser("~"))
    # A compiler in ~/bin must not open the whole home folder.
    if prefix == home or prefix in home.parents or prefix == Path("/"):
        prefix = own
    return (*SYSTEM_PATHS, prefix)


def compile_cpp(
    candidate: Candidate,
    target: Target,
    *,
    sanitizers: tuple[Sanitizer, ...] = (),
    allow_weak_box: bool = False,
    compiler: Compiler | None = None,
) -> Artifact:
    """Build a CPU candidate in the box.

    The plan's entries are declared before the source, so `extern "C" void entry(int64_t, int64_t, void* const*)` is
    exported with the right signature or does not compile. With `sanitizers` the library is for a sanitized judge process only:
    the ELF rules cannot hold for it, and no record may carry it.

    Raises:
        StaticRuleError: the source, its assembly or the library breaks a rule.
        BuildError: it does not compile, or exceeds a limit; with the compiler's words.
        ToolchainError: no compiler, or a target that it cannot build for.
        BoxError: the box cannot be set up at the level that native code needs.
    """
    compiler = compiler or find_compiler()
    if target.device_type != "cpu" or target.arch not in _ARCH_FLAGS:
        raise ToolchainError(f"no C++ build for target {target.arch!r}; expected one of {', '.join(_ARCH_FLAGS)}")
    if _MACHINE_OF[target.arch] != platform.machine():
        raise ToolchainError(f"this machine is {platform.machine()}; its compiler does not build for {target.arch}")
    if len(candidate.source.encode()) > MAX_SOURCE_BYTES:
        raise BuildError(f"source has {len(candidate.source.encode())} bytes; at most {MAX_SOURCE_BYTES} are allowed")
    problems = source_problems(candidate.source)
    if problems:
        raise StaticRuleError(f"refused before compiling: {'; '.join(problems)}")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="autokern-build-") as folder:
        build = _Build(candidate, compiler, Path(folder), allow_weak_box)
        flags = _flags(compiler, target, sanitizers, candidate)
        assembly = build.step([*flags, "-S", "-x", "c++", "-", "-o", "kernel.s"], build_unit(candidate), "kernel.s")
        problems = assembly_problems(assembly.decode(errors="replace"))
        if problems:
            raise StaticRuleError(f"refused after compiling: {'; '.join(problems)}")
        link = [*flags, *_link_flags(sanitizers), "kernel.s", "-o", "kernel.so", *_libraries(sanitizers)]
        binary = build.step(link, b"", "kernel.so")
    broken = () if sanitizers else check_cpu_library(binary, entries(candidate.plan), machine=_MACHINE_OF[target.arch])
    if broken:
        raise StaticRuleError(f"the library breaks the rules: {'; '.join(broken)}")
    tools = {"compiler": compiler.version, "flags": " ".join([*flags, *_link_flags(sanitizers), *_libraries(sanitizers)])}
    seconds = time.perf_counter() - started
    return Artifact(candidate, binary, candidate.candidate_id, tools, build.level, seconds)


def compile_sanitized_program(
    candidate: Candidate, target: Target, harness: str, sanitizers: tuple[Sanitizer, ...], *, allow_weak_box: bool = False
) -> bytes:
    """A candidate and our own `main` around it (C++ text that calls its entries), as one sanitized program that loads nothing.

    Raises:
        BuildError, ToolchainError, BoxError: as `compile_cpp`; also where the sanitizer's library is not installed.
    """
    compiler = find_compiler()
    with tempfile.TemporaryDirectory(prefix="autokern-build-") as folder:
        build = _Build(candidate, compiler, Path(folder), allow_weak_box)
        # gcc defines a left shift of a negative number, as C++20 does.
        flags = [*_flags(compiler, target, sanitizers, candidate), "-g1", "-fno-sanitize-recover=all", "-fno-sanitize=shift-base"]
        flags += ["-U__SANITIZE_ADDRESS__", "-U__SANITIZE_THREAD__"]  # or a candidate could behave where it is looked at
        build.step([*flags, "-c", "-x", "c++", "-", "-o", "kernel.o"], build_unit(candidate), "kernel.o")
        link = [*flags, "-x", "c++", "-", "-x", "none", "kernel.o", "-o", "program", "-lm", "-pthread"]
        return build.step(link, harness.encode(), "program")


def _flags(compiler: Compiler, target: Target, sanitizers: tuple[Sanitizer, ...], candidate: Candidate) -> list[str]:
    flags = ["-O1" if sanitizers else "-O3", *_CODE_FLAGS, *_ARCH_FLAGS[target.arch]]
    if compiler.kind == "gcc":
        flags.append(f"-frandom-seed={candidate.candidate_id[:16]}")
    else:
        flags = [flag for flag in flags if flag != "-fno-diagnostics-color"] + ["-fno-color-diagnostics"]
    if platform.machine() == "x86_64":
        flags.append("-fcf-protection=none")
    if sanitizers:
        flags += [f"-fsanitize={','.join(sanitizers)}", "-fno-omit-frame-pointer"]
    return flags


def _link_flags(sanitizers: tuple[Sanitizer, ...]) -> list[str]:
    return [*_LINK_FLAGS] if sanitizers else [*_LINK_FLAGS, "-nodefaultlibs", "-s"]


def _libraries(sanitizers: tuple[Sanitizer, ...]) -> list[str]:
    return ["-lm"] if sanitizers else ["-lm", "-lc", "-lgcc"]


class _Build:
    """The boxed steps of one build, all in one scratch folder."""

    def __init__(self, candidate: Candidate, compiler: Compiler, scratch: Path, allow_weak_box: bool) -> None:
        self.candidate = candidate
        self.compiler = compiler
        self.scratch = scratch
        self.allow_weak_box = allow_weak_box
        self.level = ""

    def step(self, arguments: list[str], stdin: bytes, output: str) -> bytes:
        """Run the compiler once and read the file that it made."""
        result = run_boxed(
            [str(self.compiler.path), *arguments],
            scratch=self.scratch,
            readable=toolchain_paths(self.compiler),
            limits=Limits(),
            stdin=stdin,
            # Relative, so that no path of this machine can reach the output.
            environment={"SOURCE_DATE_EPOCH": "0", "TMPDIR": ".", "PATH": f"{self.compiler.path.parent}:/usr/bin:/bin"},
            allow_weak_box=self.allow_weak_box,
        )
        self.level = result.level
        if result.timed_out or result.returncode:
            raise BuildError(self._failure(result))
        return _read_output(self.scratch / output)

    def _failure(self, result: BoxResult) -> str:
        words = self._words(result.stderr)
        if result.timed_out:
            return f"the compiler ran past {Limits().wall_seconds:.0f} s and was ended"
        limits = "limits: 60 s CPU, 6 GB memory, 64 MB a file"
        killed = result.returncode < 0 or _KILLED.search(words)
        return f"the compiler was stopped ({limits}): {words}" if killed else f"does not compile: {words}"

    def _words(self, raw: bytes) -> str:
        text = raw.decode(errors="replace").replace(str(self.scratch) + "/", "").replace("<stdin>", "candidate.cpp")
        text = re.sub(r"(?<![\w.])/(?:[^\s/:'\"`]+/)*(?=[^\s/:'\"`]+)", "", text)
        printable = "".join(c if c.isprintable() or c == "\n" else "?" for c in text).strip()
        return printable if len(printable) <= MAX_WORDS else printable[:MAX_WORDS] + " ..."


def _read_output(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise BuildError(f"the compiler made no {path.name}: {error.strerror}") from error
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BuildError(f"{path.name} is not a plain file")
        data = file.read(MAX_LIBRARY_BYTES + 1)
    if len(data) > MAX_LIBRARY_BYTES:
        raise BuildError(f"{path.name} is larger than {MAX_LIBRARY_BYTES} bytes")
    return data
