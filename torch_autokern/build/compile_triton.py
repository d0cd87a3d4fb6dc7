"""Triton to a cubin for a named architecture, in the box. No GPU is needed, and nothing of Triton at the call."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import msgspec

from torch_autokern.build.boxed_python import failure_words, read_output, run_child
from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.build.compile_cuda import CUBIN_BLOB, MAX_SOURCE_BYTES, checked_resources, refuse_private
from torch_autokern.build.cuda_toolkit import Triton, find_triton
from torch_autokern.build.triton_header import (
    TritonKernel,
    TritonMetadata,
    alignment_problems,
    complete_plan,
    plan_problems,
    read_header,
)
from torch_autokern.errors import BuildError, StaticRuleError, ToolchainError
from torch_autokern.runtime.cubin_rules import parse_arch
from torch_autokern.runtime.plan import entries
from torch_autokern.store.key import KernelKey

_CHILD = Path(__file__).with_name("triton_child.py")
_ANSWER = "answer.json"
_MAX_ANSWER_BYTES = 1 << 16


def compile_triton(
    candidate: Candidate,
    arch: str = "sm_90a",
    *,
    key: KernelKey | None = None,
    complete: bool = False,
    allow_weak_box: bool = False,
) -> Artifact:
    """Build a Triton candidate in the box: the kernels that its header declares (`build.triton_header`), in one cubin.

    Triton decides block, shared memory, cluster and scratch. Without `complete` a plan that says otherwise is refused with the
    values it needs; with it the artifact's candidate carries the completed plan, and so an identity of its own. With `key`
    what the kernel takes to be divisible by 16 is held against the key's alignments.

    Raises:
        StaticRuleError: plan, header and cubin contradict each other, or the cubin breaks a rule.
        BuildError: it does not compile, or exceeds a limit; with Triton's words.
        ToolchainError: no Triton, or not an architecture.
        BoxError: the box cannot be set up at the level that foreign code needs.
    """
    capability = _capability(arch)
    toolkit = find_triton()
    size = len(candidate.source.encode())
    if size > MAX_SOURCE_BYTES:
        raise BuildError(f"source has {size} bytes; at most {MAX_SOURCE_BYTES} are allowed")
    kernels = read_header(candidate.source)
    declared, used = {kernel.entry for kernel in kernels}, set(entries(candidate.plan))
    if declared != used:
        raise StaticRuleError(f"the header declares {sorted(declared)}, the plan launches {sorted(used)}: must be the same")
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="autokern-build-") as folder:
        scratch = Path(folder).resolve()
        binary, metadata, level = _run(candidate.source, kernels, capability, toolkit, scratch, allow_weak_box)
        refuse_private(binary, scratch)
    candidate = _matched(candidate, kernels, metadata, complete=complete)
    problems = alignment_problems(candidate.plan, kernels, key)
    if problems:
        raise StaticRuleError(f"the plan does not keep what the kernel relies on: {'; '.join(problems)}")
    resources = {
        name: msgspec.structs.replace(read, **_asked(metadata[name]))
        for name, read in checked_resources(binary, candidate, arch).items()
    }
    tools = {"compiler": f"triton {toolkit.version}", "flags": f"--gpu-name={arch}"}
    seconds = time.perf_counter() - started
    return Artifact(
        candidate, binary, candidate.candidate_id, tools, level, seconds, kind="cuda", arch=arch, resources=resources
    )


def _asked(metadata: TritonMetadata) -> dict[str, int]:
    return {"dynamic_shared_bytes": metadata.shared, "threads": metadata.num_warps * metadata.warp_size}


def _run(
    source: str, kernels: tuple[TritonKernel, ...], capability: int, toolkit: Triton, scratch: Path, allow_weak_box: bool
) -> tuple[bytes, dict[str, TritonMetadata], str]:
    request = {"source": source, "capability": capability, "kernels": [msgspec.to_builtins(kernel) for kernel in kernels]}
    raw = json.dumps(request).encode()
    result = run_child(_CHILD, toolkit.packages, raw, scratch=scratch, allow_weak_box=allow_weak_box)
    if result.timed_out or result.returncode:
        raise BuildError(failure_words(result, scratch, "Triton", keep="end"))
    answer = read_output(scratch / _ANSWER, _MAX_ANSWER_BYTES)
    try:
        metadata = msgspec.json.decode(answer, type=dict[str, TritonMetadata])
    except msgspec.DecodeError as error:
        raise BuildError(f"the source disturbed the compiler's answer: {error}") from error
    if set(metadata) != {kernel.entry for kernel in kernels}:
        raise BuildError(f"built {sorted(metadata)}, declared were {sorted(kernel.entry for kernel in kernels)}")
    return read_output(scratch / CUBIN_BLOB), metadata, result.level


def _matched(
    candidate: Candidate, kernels: tuple[TritonKernel, ...], metadata: dict[str, TritonMetadata], *, complete: bool
) -> Candidate:
    for name, said in metadata.items():
        if said.profile_scratch_size or said.tensor_descriptors:
            raise StaticRuleError(
                f"{name}: needs profiling scratch or tensor descriptors made on the host; build descriptors inside the kernel"
                " (tl.make_tensor_descriptor)"
            )
    if complete:
        return msgspec.structs.replace(candidate, plan=complete_plan(candidate.plan, kernels, metadata))
    problems = plan_problems(candidate.plan, kernels, metadata)
    if problems:
        raise StaticRuleError(f"the plan is not what Triton built: {'; '.join(problems)}")
    return candidate


def _capability(arch: str) -> int:
    try:
        major, minor, _ = parse_arch(arch)
    except ValueError as error:
        raise ToolchainError(f"no Triton build: {error}") from error
    return 10 * major + minor
