"""CUDA C++ to a cubin for a named architecture, by NVRTC in the box. No GPU is needed, and no toolkit."""

from __future__ import annotations

import json
import re
import tempfile
import time
from pathlib import Path

from torch_autokern.build.boxed_python import failure_words, private_words, read_output, run_child
from torch_autokern.build.candidate import BINARY_BLOBS, Artifact, Candidate, KernelResources
from torch_autokern.build.cuda_source import OWN_HEADERS, source_problems
from torch_autokern.build.cuda_toolkit import find_nvrtc
from torch_autokern.errors import BuildError, StaticRuleError, ToolchainError
from torch_autokern.runtime.cubin import read_cubin
from torch_autokern.runtime.cubin_rules import check_cubin, parse_arch
from torch_autokern.runtime.plan import entries

MAX_SOURCE_BYTES = 1 << 20
CUBIN_BLOB = BINARY_BLOBS["cuda"]
_CHILD = Path(__file__).with_name("nvrtc_child.py")
# IEEE division and square root and no flush to zero, as ATen's own kernels are built; -v reports spills.
_OPTIONS = (
    "--std=c++17", "--fmad=true", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--extra-device-vectorization",
    "--define-macro=NDEBUG", "--disable-warnings", "--ptxas-options=-v",
)  # fmt: skip
_SPILLS = re.compile(
    r"Function properties for (\S+)\s*\n[^\n]*?\d+ bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)


def compile_cuda(candidate: Candidate, arch: str = "sm_90a", *, allow_weak_box: bool = False) -> Artifact:
    """Build a CUDA C++ candidate in the box. Flags are fixed; launch bounds and cluster sizes come from the source.

    The cubin is checked against the plan (`runtime.cubin_rules`) and carries no path and no name of this machine; equal
    candidates give equal bytes.

    Raises:
        StaticRuleError: the source or the cubin breaks a rule.
        BuildError: it does not compile, or exceeds a limit; with the compiler's words.
        ToolchainError: no NVRTC, or an architecture that it does not know.
        BoxError: the box cannot be set up at the level that foreign code needs.
    """
    _check_arch(arch)
    toolkit = find_nvrtc()
    size = len(candidate.source.encode())
    if size > MAX_SOURCE_BYTES:
        raise BuildError(f"source has {size} bytes; at most {MAX_SOURCE_BYTES} are allowed")
    problems = source_problems(candidate.source)
    if problems:
        raise StaticRuleError(f"refused before compiling: {'; '.join(problems)}")
    options = [f"--gpu-architecture={arch}", *_OPTIONS]
    request = {
        "libraries": [str(path) for path in toolkit.libraries],
        "links": toolkit.links,
        "arch": arch,
        "options": [*options, *(f"--include-path={path}" for path in toolkit.include)],
        "headers": OWN_HEADERS,
        "source": candidate.source,
    }
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="autokern-build-") as folder:
        scratch = Path(folder).resolve()
        readable = (*{path.parent for path in toolkit.libraries}, *toolkit.include)
        raw = json.dumps(request).encode()
        result = run_child(_CHILD, toolkit.packages, raw, scratch=scratch, readable=readable, allow_weak_box=allow_weak_box)
        if result.timed_out or result.returncode:
            raise _failure(failure_words(result, scratch, "NVRTC"), arch)
        binary = read_output(scratch / CUBIN_BLOB)
        refuse_private(binary, scratch)
    answer = json.loads(result.stdout)
    resources = checked_resources(binary, candidate, arch, spills_of(str(answer["log"])))
    version = ".".join(str(part) for part in answer["version"])
    tools = {"compiler": f"nvrtc {version}", "flags": " ".join(options)}
    seconds = time.perf_counter() - started
    return Artifact(
        candidate, binary, candidate.candidate_id, tools, result.level, seconds, kind="cuda", arch=arch, resources=resources
    )


def checked_resources(
    binary: bytes, candidate: Candidate, arch: str, spilled_bytes: dict[str, int] | None = None
) -> dict[str, KernelResources]:
    """Check a fresh cubin against the candidate's plan and read what each of its entries takes.

    Raises:
        StaticRuleError: it breaks a rule.
    """
    broken = check_cubin(binary, candidate.plan, arch)
    if broken:
        raise StaticRuleError(f"the cubin breaks the rules: {'; '.join(broken)}")
    found = read_cubin(binary).entries
    spills = spilled_bytes or {}
    return {
        name: KernelResources(
            found[name].registers, found[name].static_shared_bytes, found[name].stack_bytes, spills.get(name, -1)
        )
        for name in entries(candidate.plan)
    }


def refuse_private(binary: bytes, scratch: Path) -> None:
    """Refuse a binary that carries a path or a name of this machine.

    Raises:
        StaticRuleError: it does.
    """
    words = private_words(binary, scratch)
    if words:
        raise StaticRuleError(f"the binary carries names of the machine that built it ({len(words)} of them)")


def spills_of(log: str) -> dict[str, int]:
    """Bytes of registers spilled, stores and loads together, by function, from the assembler's report."""
    return {name: int(stores) + int(loads) for name, stores, loads in _SPILLS.findall(log)}


def _check_arch(arch: str) -> None:
    try:
        parse_arch(arch)
    except ValueError as error:
        raise ToolchainError(f"no CUDA build: {error}") from error


def _failure(words: str, arch: str) -> BuildError | ToolchainError:
    if "invalid value for --gpu-architecture" in words:
        return ToolchainError(f"this NVRTC does not build for {arch}; a newer one may: pip install -U nvidia-cuda-nvrtc")
    return BuildError(words)
