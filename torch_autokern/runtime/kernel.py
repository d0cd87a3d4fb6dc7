"""Turns an artifact's bytes and its plan into something that runs. The search and the serving process share this loader."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_autokern.errors import BuildError, PlanError
from torch_autokern.ops.spec import DTYPE_CODES
from torch_autokern.runtime.extension import extension
from torch_autokern.runtime.plan import (
    CPU_STEPS,
    CpuStep,
    CublasLtStep,
    FloatArg,
    InputArg,
    IntArg,
    LaunchPlan,
    LibraryStep,
    MemsetStep,
    OutputArg,
    PointerArg,
    Step,
    TensorMapArg,
    entries,
    validate,
)
from torch_autokern.runtime.target import local_target
from torch_autokern.store.key import KernelKey, TensorKey

Tensors = Sequence[torch.Tensor | None]
_Layout = tuple[int, list[int], list[int]]
_FLOAT_FORMATS = {16: "<e", 32: "<f", 64: "<d"}


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel of one key, ready to run. `native` is the extension's object, which tables hold."""

    key: KernelKey
    native: Any

    @property
    def native_device(self) -> int:
        """Index of the GPU that the kernel was loaded for; -1 on a CPU."""
        return int(self.native.device_index)

    def run(self, tensors: Tensors, *, pooled: bool = False) -> tuple[torch.Tensor | None, ...]:
        """Allocate outputs with the key's layouts and run on the key's tensors (schema order, None where absent). `pooled`
        takes large outputs from the pool, as a served call does."""
        return tuple(self.native.run(list(tensors), pooled))

    def run_into(self, tensors: Tensors, outputs: Tensors) -> None:
        """Run into given outputs. Layouts are the caller's promise: nothing is checked but the counts."""
        self.native.run_into(list(tensors), list(outputs))


def load_cpu_kernel(binary: bytes, identity: str, plan: LaunchPlan, key: KernelKey, record_id: str = "") -> LoadedKernel:
    """Check the library against the static rules, load it from sealed memory, read its identity back, bind its entries.

    Raises:
        BuildError: the library breaks a static rule.
        PlanError: the plan is invalid, or points at a tensor that the key does not have.
        RuntimeError: the bytes do not load, or are not the library that was verified.
    """
    steps = _checked_steps(binary, plan, key)
    return _bind(extension().Library.load(binary, identity), steps, plan, key, record_id)


def begin_cpu_kernel(
    binary: bytes, identity: str, plan: LaunchPlan, key: KernelKey, record_id: str, opener: Any, digest: str
) -> Callable[[], LoadedKernel]:
    """As `load_cpu_kernel` in two halves: every check now, and `opener` (the extension's) loads while the caller goes on; call
    the result to wait for the library and bind its entries. Each half raises its part of what `load_cpu_kernel` raises.
    `digest` is the SHA-256 of `binary`, which the caller has checked."""
    steps = _checked_steps(binary, plan, key, digest)
    number = opener.add(binary, identity)
    return lambda: _bind(opener.take(number), steps, plan, key, record_id)


_Steps = list[tuple[object, ...]]


def _checked_steps(binary: bytes, plan: LaunchPlan, key: KernelKey, digest: str | None = None) -> _Steps:
    validate(plan)
    from torch_autokern.runtime.elf import read_cpu_library  # as with the cubin reader: import time

    broken = read_cpu_library(binary, entries(plan), digest=digest).problems
    if broken:
        raise BuildError("the kernel library breaks a rule: " + "; ".join(broken))
    names = _workspace_names(plan)
    return [_cpu_step(step, key, names) for step in plan.steps]


def _bind(library: Any, steps: _Steps, plan: LaunchPlan, key: KernelKey, record_id: str) -> LoadedKernel:
    return LoadedKernel(key, extension().Kernel(record_id, library, steps, *_memory(plan, key)))


def load_cuda_kernel(cubin: bytes, plan: LaunchPlan, key: KernelKey, device: int, record_id: str = "") -> LoadedKernel:
    """Check a cubin against its plan and the device, load it into the device's primary context now, so that nothing is loaded
    inside a call, and bind its entries.

    Raises:
        BuildError: the cubin breaks a static rule, or contradicts the plan.
        PlanError: the plan is invalid, points at a tensor that the key does not have, or has CPU steps.
        OtherLibraryError: a step's algorithm was chosen under another cuBLASLt.
        RuntimeError: the driver does not load the image, an entry is missing, or cuBLASLt does not run an algorithm; in their
            words.
    """
    validate(plan)
    from torch_autokern.runtime.cubin_rules import check_cubin  # 8 ms of import that CPU-only programs are spared

    broken = check_cubin(cubin, plan, local_target("cuda", device_index=device).arch)
    if broken:
        raise BuildError("the kernel's cubin breaks a rule: " + "; ".join(broken))
    names = _workspace_names(plan)
    torch.cuda.synchronize(device)  # makes the device's primary context, which must exist before a module is loaded into it
    with torch.cuda.device(device):
        steps = [_cuda_step(step, key, names, device) for step in plan.steps]
    native = extension()
    return LoadedKernel(key, native.Kernel.load_cuda(record_id, cubin, device, steps, *_memory(plan, key)))


def _memory(plan: LaunchPlan, key: KernelKey) -> tuple[list[tuple[int, bool]], list[_Layout | None], int]:
    """What the extension wants to know of workspaces, outputs and inputs."""
    workspaces = [(workspace.size_bytes, workspace.zeroed) for workspace in plan.workspaces]
    return workspaces, [_layout(output) for output in key.outputs], len(key.tensors)


def _workspace_names(plan: LaunchPlan) -> dict[str, int]:
    return {workspace.name: index for index, workspace in enumerate(plan.workspaces)}


def _cpu_step(step: Step, key: KernelKey, workspaces: dict[str, int]) -> tuple[object, ...]:
    if isinstance(step, CpuStep):
        return "cpu", step.entry, step.range, step.grain, [_pointer(arg, key, workspaces) for arg in step.args]
    if isinstance(step, LibraryStep):
        return _library_step(step, key)
    raise PlanError("a CPU kernel's plan has GPU steps")


def _library_step(step: LibraryStep, key: KernelKey) -> tuple[object, ...]:
    """A product of the key's own tensors; stock itself checks whether an addend broadcasts."""
    operands = [_tensor(InputArg(index), key) for index in step.operands]
    result = _tensor(OutputArg(step.output), key)
    a, b = operands[-2:]
    rank = 3 if step.function in ("bmm", "baddbmm") else 2
    fits = len(a.sizes) == len(b.sizes) == rank and a.sizes[-1] == b.sizes[-2] and a.sizes[:-2] == b.sizes[:-2]
    if not fits or result.sizes != (*a.sizes[:-1], b.sizes[-1]) or len({t.dtype for t in (*operands, result)}) > 1:
        raise PlanError(
            f"library step {step.function!r}: a {a.dtype} product of {a.sizes} and {b.sizes} is not a {result.dtype} "
            f"{result.sizes}"
        )
    rows = [(index, _layout(tensor)) for index, tensor in zip(step.operands, operands, strict=True)]
    return "library", step.function, rows, step.output, _layout(result), step.alpha, step.beta


def _tensor(arg: InputArg | OutputArg, key: KernelKey) -> TensorKey:
    """The tensor of the key that is pointed at, present."""
    kind, index, _ = _pointer(arg, key, {})
    tensor = (key.outputs if kind else key.tensors)[index]
    if tensor is None:
        raise PlanError(f"a step works on {'output' if kind else 'input'} {index} of {key.op}, which this call does not have")
    return tensor


def _cuda_step(step: Step, key: KernelKey, workspaces: dict[str, int], device: int) -> tuple[object, ...]:
    if isinstance(step, MemsetStep):
        return "memset", _pointer(step.target, key, workspaces), step.size_bytes, step.value
    if isinstance(step, CublasLtStep):
        return _cublaslt_step(step, key, workspaces, device)
    if isinstance(step, CPU_STEPS):
        raise PlanError("a GPU kernel's plan has cpu steps")
    parameters: list[tuple[str, object]] = []
    maps: list[tuple[object, ...]] = []
    for arg in step.args:
        if isinstance(arg, IntArg):
            parameters.append(("bits", arg.value & (1 << arg.bits) - 1))
        elif isinstance(arg, FloatArg):
            parameters.append(("bits", int.from_bytes(struct.pack(_FLOAT_FORMATS[arg.bits], arg.value), "little")))
        elif isinstance(arg, TensorMapArg):
            parameters.append(("map", len(maps)))
            maps.append(
                (_pointer(arg.base, key, workspaces), arg.data_type, arg.sizes, arg.strides_bytes, arg.box,
                 arg.element_strides, arg.interleave, arg.swizzle, arg.l2_promotion, arg.fill)
            )  # fmt: skip
        else:
            parameters.append(("pointer", _pointer(arg, key, workspaces)))
    flags = step.shared_bytes, step.cooperative, step.programmatic
    return "kernel", step.entry, step.grid, step.block, step.cluster, *flags, parameters, maps


def _cublaslt_step(step: CublasLtStep, key: KernelKey, workspaces: dict[str, int], device: int) -> tuple[object, ...]:
    from torch_autokern.runtime import cublaslt  # few plans have such a step: the others are spared the import

    cublaslt.check_step(step, key)
    rows = [None if arg is None else _pointer(arg, key, workspaces) for arg in cublaslt.operands(step)]
    return "cublaslt", cublaslt.native_product(step, key, device), rows


def _pointer(arg: PointerArg, key: KernelKey, workspaces: dict[str, int]) -> tuple[int, int, int]:
    if isinstance(arg, InputArg):
        tensors, kind = key.tensors, 0
    elif isinstance(arg, OutputArg):
        tensors, kind = key.outputs, 1
    else:
        return 2, workspaces[arg.name], arg.offset_bytes
    if arg.index >= len(tensors):
        raise PlanError(
            f"a step points at {'output' if kind else 'input'} {arg.index}; {key.op} has {len(tensors)} for this key"
        )
    return kind, arg.index, arg.offset_bytes


def _layout(output: TensorKey | None) -> _Layout | None:
    if output is None:
        return None
    return DTYPE_CODES[output.dtype], list(output.sizes), list(output.strides)
