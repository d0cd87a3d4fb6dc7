"""Turns an artifact's bytes and its plan into something that runs. The search and the serving process share this loader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_autokern.errors import BuildError, PlanError
from torch_autokern.ops.spec import DTYPE_CODES
from torch_autokern.runtime.elf import check_cpu_library
from torch_autokern.runtime.extension import extension
from torch_autokern.runtime.plan import InputArg, LaunchPlan, OutputArg, PointerArg, validate
from torch_autokern.store.key import KernelKey, TensorKey

Tensors = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel of one key, ready to run. `native` is the extension's object, which tables hold."""

    key: KernelKey
    native: Any

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
    validate(plan)
    broken = check_cpu_library(binary, tuple(step.entry for step in plan.steps))
    if broken:
        raise BuildError("the kernel library breaks a rule: " + "; ".join(broken))
    native = extension()
    library = native.Library.load(binary, identity)
    names = {workspace.name: index for index, workspace in enumerate(plan.workspaces)}
    steps = [(step.entry, step.range, step.grain, [_pointer(arg, key, names) for arg in step.args]) for step in plan.steps]
    workspaces = [(workspace.size_bytes, workspace.zeroed) for workspace in plan.workspaces]
    outputs = [_layout(output) for output in key.outputs]
    return LoadedKernel(key, native.Kernel(record_id, library, steps, workspaces, outputs, len(key.tensors)))


def _pointer(arg: PointerArg, key: KernelKey, workspaces: dict[str, int]) -> tuple[int, int, int]:
    if isinstance(arg, InputArg):
        tensors, kind = key.tensors, 0
    elif isinstance(arg, OutputArg):
        tensors, kind = key.outputs, 1
    else:
        return 2, workspaces[arg.name], arg.offset_bytes
    if arg.index >= len(tensors):
        raise PlanError(f"a step points at {arg.kind} {arg.index}; {key.op} has {len(tensors)} for this key")
    return kind, arg.index, arg.offset_bytes


def _layout(output: TensorKey | None) -> tuple[int, list[int], list[int]] | None:
    if output is None:
        return None
    return DTYPE_CODES[output.dtype], list(output.sizes), list(output.strides)
