"""What a Triton candidate declares, and how its plan is kept in step with what Triton decides.

The source starts with one comment line for each kernel, so that the declaration is part of the candidate's identity::

    # autokern: {"entry": "soft", "signature": {"x": "*fp32", "y": "*fp32", "n": "i32"}, "constexprs": {"B": 1024}}

Triton decides block, dynamic shared memory, cluster and scratch memory. The plan must say the same: `plan_problems` names each
value that differs with the one that is needed, `complete_plan` writes them in. A grid counts blocks: programs times `num_ctas`.
"""

from __future__ import annotations

import math
import re

import msgspec

from torch_autokern.errors import BuildError
from torch_autokern.runtime.plan import (
    MAX_ARGS,
    InputArg,
    IntArg,
    KernelArg,
    KernelStep,
    LaunchPlan,
    OutputArg,
    Workspace,
    WorkspaceArg,
)
from torch_autokern.store.key import KernelKey

MAX_KERNELS = 8
_LINE = re.compile(r"^# autokern: (\{.*\})[ \t]*$", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w{0,255}")
_TYPE = re.compile(r"\*?(?:i1|i8|i16|i32|i64|u1|u8|u16|u32|u64|fp16|bf16|fp32|fp64|fp8e4nv|fp8e5)")
NULL = IntArg(0, 64)


class TritonKernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kernel to build. `signature`: every argument that is no constexpr, in order, with Triton's type names;
    `divisible_by_16`: names whose value (for a pointer: address) is a multiple of 16, which the plan and the key must keep.
    The rest are Triton's own options."""

    entry: str
    signature: dict[str, str]
    constexprs: dict[str, bool | int | float | str | None] = {}
    divisible_by_16: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    maxnreg: int = 0
    enable_fp_fusion: bool = True
    cooperative: bool = False
    programmatic: bool = False


class TritonMetadata(msgspec.Struct, frozen=True):
    """What Triton says of a kernel that it built. Sizes in bytes; scratch is per block."""

    shared: int
    num_warps: int
    num_ctas: int
    warp_size: int
    global_scratch_size: int
    global_scratch_align: int
    profile_scratch_size: int
    launch_cooperative_grid: bool
    launch_pdl: bool
    tmem_size: int
    tensor_descriptors: int


def read_header(source: str) -> tuple[TritonKernel, ...]:
    """The kernels that a source declares.

    Raises:
        BuildError: none, too many, two of one name, or a declaration that is not valid.
    """
    kernels = []
    for line in _LINE.findall(source):
        try:
            kernel = msgspec.json.decode(line, type=TritonKernel)
        except msgspec.DecodeError as error:
            raise BuildError(f"a '# autokern:' line is not valid: {error}") from error
        _check(kernel)
        kernels.append(kernel)
    if not 1 <= len(kernels) <= MAX_KERNELS or len({kernel.entry for kernel in kernels}) != len(kernels):
        raise BuildError(
            f"{len(kernels)} kernels declared, expected 1 to {MAX_KERNELS} of different names, each as a line such as"
            ' # autokern: {"entry": "f", "signature": {"x": "*fp32"}, "constexprs": {"B": 128}, "num_warps": 4}'
        )
    return tuple(kernels)


def _check(kernel: TritonKernel) -> None:
    names = [kernel.entry, *kernel.signature, *kernel.constexprs, *kernel.divisible_by_16]
    if not all(_NAME.fullmatch(name) for name in names):
        raise BuildError(f"{kernel.entry[:80]!r}: not all names are plain names")
    if not all(_TYPE.fullmatch(kind) for kind in kernel.signature.values()):
        raise BuildError(f"{kernel.entry}: types {sorted(set(kernel.signature.values()))}; expected such as *fp32, i32, bf16")
    if not set(kernel.divisible_by_16) <= set(kernel.signature):
        raise BuildError(f"{kernel.entry}: divisible_by_16 names {kernel.divisible_by_16}, which the signature lacks")
    if kernel.num_warps not in (1, 2, 4, 8, 16, 32) or not 1 <= kernel.num_stages <= 32 or not 1 <= kernel.num_ctas <= 16:
        raise BuildError(f"{kernel.entry}: {kernel.num_warps} warps, {kernel.num_stages} stages, {kernel.num_ctas} CTAs")
    if not 0 <= kernel.maxnreg <= 255 or len(kernel.signature) > MAX_ARGS - 2:
        raise BuildError(f"{kernel.entry}: maxnreg {kernel.maxnreg} with {len(kernel.signature)} arguments (at most 255, 22)")


def complete_plan(plan: LaunchPlan, kernels: tuple[TritonKernel, ...], metadata: dict[str, TritonMetadata]) -> LaunchPlan:
    """The plan with block, shared bytes, cluster, flags and the two trailing scratch pointers as Triton needs them."""
    by_name = {kernel.entry: kernel for kernel in kernels}
    workspaces = {workspace.name: workspace for workspace in plan.workspaces}
    steps = []
    for step in plan.steps:
        if isinstance(step, KernelStep) and step.entry in metadata:
            step, scratch = _completed(step, by_name[step.entry], metadata[step.entry])
            if scratch is not None and scratch.size_bytes > getattr(workspaces.get(scratch.name), "size_bytes", 0):
                workspaces[scratch.name] = scratch
        steps.append(step)
    return LaunchPlan(plan.version, tuple(steps), tuple(workspaces.values()))


def _completed(step: KernelStep, kernel: TritonKernel, metadata: TritonMetadata) -> tuple[KernelStep, Workspace | None]:
    scratch = None
    pointer: KernelArg = NULL
    if metadata.global_scratch_size:
        size = metadata.global_scratch_size * math.prod(step.grid)
        scratch = Workspace(f"scratch_{kernel.entry}", size)
        pointer = WorkspaceArg(scratch.name)
    own = step.args[: len(kernel.signature)]
    changed = msgspec.structs.replace(
        step,
        block=(metadata.num_warps * metadata.warp_size, 1, 1),
        shared_bytes=metadata.shared,
        cluster=(metadata.num_ctas, 1, 1),
        cooperative=metadata.launch_cooperative_grid,
        programmatic=metadata.launch_pdl,
        args=(*own, pointer, NULL),
    )
    return changed, scratch


def plan_problems(plan: LaunchPlan, kernels: tuple[TritonKernel, ...], metadata: dict[str, TritonMetadata]) -> tuple[str, ...]:
    """Each value of the plan that is not what Triton needs, with the one that is."""
    found = []
    by_name = {kernel.entry: kernel for kernel in kernels}
    sizes = {workspace.name: workspace.size_bytes for workspace in plan.workspaces}
    for step in plan.steps:
        if not isinstance(step, KernelStep) or step.entry not in metadata:
            continue
        kernel = by_name[step.entry]
        want, scratch = _completed(step, kernel, metadata[step.entry])
        for name in ("block", "shared_bytes", "cluster", "cooperative", "programmatic"):
            if getattr(step, name) != getattr(want, name):
                found.append(f"{step.entry}: {name} is {getattr(step, name)}, Triton needs {getattr(want, name)}")
        count = len(kernel.signature)
        if len(step.args) != count + 2:
            found.append(
                f"{step.entry}: {len(step.args)} arguments; needed are the {count} of the signature"
                f" ({', '.join(kernel.signature)}) and two scratch pointers, {_spelled(want.args[count])} and {_spelled(NULL)}"
            )
        elif scratch is not None:
            given = step.args[count]
            room = sizes.get(given.name, 0) - given.offset_bytes if isinstance(given, WorkspaceArg) else 0
            if room < scratch.size_bytes:
                found.append(
                    f"{step.entry}: argument {count} must be a workspace of {scratch.size_bytes} bytes (Triton's scratch)"
                )
    return tuple(dict.fromkeys(found))


def _spelled(arg: KernelArg) -> str:
    return msgspec.json.encode(arg).decode()


def alignment_problems(plan: LaunchPlan, kernels: tuple[TritonKernel, ...], key: KernelKey | None) -> tuple[str, ...]:
    """Arguments that a kernel takes to be multiples of 16 and that the plan, or the key's promise, does not keep so."""
    found = []
    by_name = {kernel.entry: kernel for kernel in kernels}
    for step in plan.steps:
        if not isinstance(step, KernelStep) or step.entry not in by_name:
            continue
        kernel = by_name[step.entry]
        for name, arg in zip(kernel.signature, step.args, strict=False):
            if name in kernel.divisible_by_16 and not _is_multiple_of_16(arg, key):
                found.append(f"{step.entry}: {name} is declared divisible_by_16, and {_spelled(arg)} is not known to be")
    return tuple(dict.fromkeys(found))


def _is_multiple_of_16(arg: KernelArg, key: KernelKey | None) -> bool:
    if isinstance(arg, IntArg):
        return arg.value % 16 == 0
    if isinstance(arg, WorkspaceArg):
        return arg.offset_bytes % 16 == 0
    if not isinstance(arg, InputArg | OutputArg) or arg.offset_bytes % 16:
        return False
    if key is None:
        return True  # the address is the key's matter, and the caller gave none
    tensors = key.tensors if isinstance(arg, InputArg) else key.outputs
    tensor = tensors[arg.index] if arg.index < len(tensors) else None
    return tensor is not None and tensor.alignment_bytes >= 16
