"""The launch plan: a candidate's host side, as data. A closed vocabulary with limits, and nothing that can be executed.

Everything is fixed when the record is made: grids, ranges and sizes are numbers, so the runner (`csrc/plan.cpp`) has no
expression to evaluate.
"""

from __future__ import annotations

import re

import msgspec

from torch_autokern.errors import PlanError
from torch_autokern.store.key import canonical_json

PLAN_VERSION = 1
MAX_STEPS = 16
MAX_ARGS = 24
MAX_WORKSPACES = 8
MAX_WORKSPACE_BYTES = 4 << 30
MAX_PLAN_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")


class InputArg(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="input", tag_field="kind"):
    """Address of tensor argument `index` (schema order, absent ones counted; null when absent) plus `offset_bytes`."""

    index: int
    offset_bytes: int = 0


class OutputArg(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="output", tag_field="kind"):
    """Address of result `index` plus `offset_bytes`."""

    index: int
    offset_bytes: int = 0


class WorkspaceArg(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="workspace", tag_field="kind"):
    """Address of the workspace `name` plus `offset_bytes`."""

    name: str
    offset_bytes: int = 0


PointerArg = InputArg | OutputArg | WorkspaceArg


class Workspace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scratch memory for one call, 64-byte aligned. `zeroed`: the runner clears it before the first step."""

    name: str
    size_bytes: int
    zeroed: bool = False


class CpuStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="cpu", tag_field="kind"):
    """``entry(begin, end, pointers)`` over ``[0, range)``, cut by `at::parallel_for` into pieces of at least `grain`.

    The exported function is ``extern "C" void entry(int64_t begin, int64_t end, void* const* pointers)``; `args` gives the
    pointers in order. A step starts when the one before has finished.
    """

    entry: str
    range: int
    grain: int
    args: tuple[PointerArg, ...]


Step = CpuStep


class LaunchPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Workspaces and ordered steps. Build with `validate`d values only."""

    version: int
    steps: tuple[Step, ...]
    workspaces: tuple[Workspace, ...] = ()


def encode_plan(plan: LaunchPlan) -> bytes:
    """Canonical JSON of a valid plan."""
    validate(plan)
    return canonical_json(plan)


def decode_plan(raw: bytes) -> LaunchPlan:
    """Parse and validate.

    Raises:
        PlanError: not JSON, an unknown field or step, or a limit broken.
    """
    if len(raw) > MAX_PLAN_BYTES:
        raise PlanError(f"plan has {len(raw)} bytes; at most {MAX_PLAN_BYTES} are allowed")
    try:
        plan = msgspec.json.decode(raw, type=LaunchPlan)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PlanError(f"not a launch plan: {error}") from error
    validate(plan)
    return plan


def validate(plan: LaunchPlan) -> None:
    """Check names, counts and limits.

    Raises:
        PlanError: the first rule that is broken.
    """
    if plan.version != PLAN_VERSION:
        raise PlanError(f"plan version {plan.version}; this version runs {PLAN_VERSION}")
    if not 1 <= len(plan.steps) <= MAX_STEPS:
        raise PlanError(f"a plan has 1 to {MAX_STEPS} steps, this one has {len(plan.steps)}")
    if len(plan.workspaces) > MAX_WORKSPACES:
        raise PlanError(f"a plan has at most {MAX_WORKSPACES} workspaces, this one has {len(plan.workspaces)}")
    sizes: dict[str, int] = {}
    for workspace in plan.workspaces:
        _check_name(workspace.name)
        if not 1 <= workspace.size_bytes <= MAX_WORKSPACE_BYTES:
            raise PlanError(f"workspace {workspace.name!r} has {workspace.size_bytes} bytes; 1 to {MAX_WORKSPACE_BYTES}")
        if workspace.name in sizes:
            raise PlanError(f"workspace {workspace.name!r} is declared twice")
        sizes[workspace.name] = workspace.size_bytes
    for step in plan.steps:
        _check_step(step, sizes)


def _check_step(step: CpuStep, workspace_sizes: dict[str, int]) -> None:
    _check_name(step.entry)
    if not 1 <= step.range < 1 << 62 or not 1 <= step.grain < 1 << 62:
        raise PlanError(f"step {step.entry!r}: range {step.range} and grain {step.grain} must be positive")
    if len(step.args) > MAX_ARGS:
        raise PlanError(f"step {step.entry!r} has {len(step.args)} pointers; at most {MAX_ARGS}")
    for arg in step.args:
        if arg.offset_bytes < 0:
            raise PlanError(f"step {step.entry!r}: negative offset {arg.offset_bytes}")
        if isinstance(arg, WorkspaceArg):
            if arg.offset_bytes >= workspace_sizes.get(arg.name, 0):
                raise PlanError(f"step {step.entry!r}: workspace {arg.name!r} is not declared or shorter than the offset")
        elif not 0 <= arg.index < MAX_ARGS:
            raise PlanError(f"step {step.entry!r}: tensor index {arg.index} is out of range")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise PlanError(f"{name!r} is not a plain C name")
