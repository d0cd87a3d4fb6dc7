"""Workspaces under the judge's eyes: the plan rewritten so that each one is memory of ours, guarded and poisoned.

A workspace is handed to the same code as one more result: the kernel sees an address and cannot tell. So it gets guard zones,
trapping pages and a new pattern before every call (zeros where the plan declares it zeroed), and the loader is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec
import torch

from torch_autokern.runtime.kernel import LoadedKernel, load_cpu_kernel, load_cuda_kernel
from torch_autokern.runtime.plan import (
    CublasLtStep,
    KernelArg,
    LaunchPlan,
    LibraryStep,
    MemsetStep,
    OutputArg,
    Step,
    TensorMapArg,
    Workspace,
    WorkspaceArg,
)
from torch_autokern.store.key import KernelKey, TensorKey

ALIGNMENT_BYTES = 64  # what `Workspace` promises

Tensors = Sequence[torch.Tensor | None]
ArgT = TypeVar("ArgT", bound=KernelArg)


class LoadedCandidate:
    """A candidate as the runner calls it: `run` as served calls do, `run_into` with outputs and workspaces of the judge's."""

    def __init__(self, plain: LoadedKernel, exposed: LoadedKernel, workspaces: tuple[Workspace, ...]) -> None:
        self.kernel = plain
        self._exposed = exposed
        self.workspaces = workspaces

    def run(self, tensors: Tensors) -> tuple[torch.Tensor | None, ...]:
        """Allocate outputs and workspaces as the loader does, and run."""
        return self.kernel.run(tensors)

    def run_into(self, tensors: Tensors, outputs: Tensors) -> None:
        """Run into given outputs, followed by one tensor of bytes for each workspace."""
        self._exposed.run_into(tensors, outputs)


def load_candidate(binary: bytes, identity: str, plan: LaunchPlan, key: KernelKey) -> LoadedCandidate:
    """Load a candidate for judging, on the current device; raises what `load_cpu_kernel` and `load_cuda_kernel` raise."""

    def load(plan: LaunchPlan, key: KernelKey) -> LoadedKernel:
        if key.device_type == "cuda":
            return load_cuda_kernel(binary, plan, key, torch.cuda.current_device())
        return load_cpu_kernel(binary, identity, plan, key)

    plain = load(plan, key)
    return LoadedCandidate(plain, load(*exposed(plan, key)) if plan.workspaces else plain, plan.workspaces)


def exposed(plan: LaunchPlan, key: KernelKey) -> tuple[LaunchPlan, KernelKey]:
    """The same steps with every workspace as a further result, after the key's own."""
    places = {workspace.name: len(key.outputs) + index for index, workspace in enumerate(plan.workspaces)}

    def moved(arg: ArgT) -> ArgT | OutputArg:
        if isinstance(arg, TensorMapArg):
            return msgspec.structs.replace(arg, base=moved(arg.base))
        return OutputArg(places[arg.name], arg.offset_bytes) if isinstance(arg, WorkspaceArg) else arg

    def rewritten(step: Step) -> Step:
        if isinstance(step, LibraryStep):
            return step
        if isinstance(step, CublasLtStep):
            matrices = {
                name: msgspec.structs.replace(matrix, base=moved(matrix.base))
                for name, matrix in (("a", step.a), ("b", step.b), ("d", step.d), ("addend", step.addend))
                if matrix is not None
            }
            pointers = {
                name: moved(arg) for name, arg in (("bias", step.bias), ("workspace", step.workspace)) if arg is not None
            }
            return msgspec.structs.replace(step, **matrices, **pointers)
        if isinstance(step, MemsetStep):
            return msgspec.structs.replace(step, target=moved(step.target))
        return msgspec.structs.replace(step, args=tuple(moved(arg) for arg in step.args))

    outputs = (*key.outputs, *(layout_of(workspace) for workspace in plan.workspaces))
    return LaunchPlan(plan.version, tuple(map(rewritten, plan.steps))), msgspec.structs.replace(key, outputs=outputs)


def layout_of(workspace: Workspace) -> TensorKey:
    """A workspace as a tensor of bytes."""
    return TensorKey("uint8", (workspace.size_bytes,), (1,), ALIGNMENT_BYTES)
