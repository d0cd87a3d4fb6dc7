"""One door to every compiler: the candidate's language picks it, the target names the architecture."""

from __future__ import annotations

from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.build.compile_cpp import compile_cpp, find_compiler
from torch_autokern.build.compile_cuda import compile_cuda
from torch_autokern.build.compile_triton import compile_triton
from torch_autokern.build.cuda_toolkit import find_nvrtc, find_triton
from torch_autokern.errors import StaticRuleError, ToolchainError
from torch_autokern.store.key import DeviceType, KernelKey, Target

_DEVICES: dict[str, DeviceType] = {"cpp": "cpu", "cuda": "cuda", "triton": "cuda"}


def compile_candidate(
    candidate: Candidate, target: Target, *, key: KernelKey | None = None, allow_weak_box: bool = False
) -> Artifact:
    """Build a candidate in the box, for a target.

    A Triton plan is completed with what Triton decided, so the artifact's candidate may be another one than was given. With
    `key` a Triton kernel's demands on alignment are held against the key's.

    Raises:
        StaticRuleError: source, plan or binary breaks a rule, or the language does not run on the target.
        BuildError: it does not compile, or exceeds a limit; with the compiler's words.
        ToolchainError: the compiler is missing, or does not know the target.
        BoxError: the box does not hold here.
    """
    if _DEVICES[candidate.language] != target.device_type:
        raise StaticRuleError(f"a {candidate.language} candidate does not run on a {target.device_type} target")
    if candidate.language == "cuda":
        return compile_cuda(candidate, target.arch, allow_weak_box=allow_weak_box)
    if candidate.language == "triton":
        return compile_triton(candidate, target.arch, key=key, complete=True, allow_weak_box=allow_weak_box)
    return compile_cpp(candidate, target, allow_weak_box=allow_weak_box)


def toolchain(device_type: DeviceType) -> str:
    """Compilers and versions for a type of device; of a GPU's two, one is enough.

    Raises:
        ToolchainError: there is none.
    """
    if device_type == "cpu":
        return find_compiler().version
    found, missing = [], []
    for name, find in (("nvrtc", find_nvrtc), ("triton", find_triton)):
        try:
            found.append(f"{name} {find().version}")
        except ToolchainError as error:
            missing.append(str(error))
    if not found:
        raise ToolchainError("; ".join(missing))
    return ", ".join(found)
