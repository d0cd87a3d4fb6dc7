"""May this cubin run this plan here? Checked when a candidate is built, and again before the driver sees the bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from torch_autokern.runtime.cubin import CubinInfo, EntryInfo, MalformedCubinError, read_cubin
from torch_autokern.runtime.plan import CPU_STEPS, FloatArg, IntArg, KernelArg, KernelStep, LaunchPlan, TensorMapArg

# Most shared memory of one block with the driver's KiB taken off, by capability: CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability". A capability that is not listed gets what every block may have.
_SHARED_LIMITS = {
    80: 166912, 86: 101376, 87: 166912, 88: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 110: 232448, 120: 101376,
    121: 101376,
}  # fmt: skip
_SHARED_EVERYWHERE = 49152
_REGISTERS_OF_A_BLOCK = 65536
_ARCH = re.compile(r"sm_(\d{1,2})(\d)([af]?)")
# A family suffix means every capability of these groups ("f" targets: 10.0 with 10.3, 12.0 with 12.1).
_FAMILIES = ({(10, 0), (10, 3)}, {(12, 0), (12, 1)})


def parse_arch(arch: str) -> tuple[int, int, str]:
    """(major, minor, suffix) of "sm_90a".

    Raises:
        ValueError: not an architecture.
    """
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise ValueError(f"{arch!r} is not an architecture such as sm_80 or sm_90a")
    return int(match[1]), int(match[2]), match[3]


def runs_on(built_for: str, device: str) -> bool:
    """Whether code built for one architecture runs on a device: the same major and no smaller minor; with suffix `a` the very
    same capability; with `f` its family (CUDA C++ Programming Guide, "Compute Capabilities")."""
    major, minor, suffix = parse_arch(built_for)
    device_major, device_minor, _ = parse_arch(device)
    if suffix == "a":
        return (major, minor) == (device_major, device_minor)
    if suffix == "f":
        same = any({(major, minor), (device_major, device_minor)} <= family for family in _FAMILIES)
        return same and device_minor >= minor
    return major == device_major and minor <= device_minor


def shared_limit_bytes(arch: str) -> int:
    """Most shared memory, static and dynamic, that one block may have."""
    major, minor, _ = parse_arch(arch)
    return _SHARED_LIMITS.get(10 * major + minor, _SHARED_EVERYWHERE)


def check_cubin(binary: bytes, plan: LaunchPlan, arch: str) -> tuple[str, ...]:
    """Check a cubin against the plan that launches it and the device's architecture (`runtime.target.local_target().arch`).

    Returns:
        The rules that it breaks, each with what was expected; empty when it may be loaded. No bytes make it raise.
    """
    try:
        info = read_cubin(binary)
        parse_arch(arch)
    except (MalformedCubinError, ValueError) as error:
        return (f"malformed: {error}",)
    return tuple(dict.fromkeys((*_image_problems(info, arch), *_plan_problems(info, plan, arch))))


def _image_problems(info: CubinInfo, arch: str) -> Iterator[str]:
    if not runs_on(info.arch, arch):
        yield f"built for {info.arch}, which does not run on {arch}"
    for name in info.undefined:
        yield f"needs {name} from the driver's device runtime (no printf, assert, malloc or launches inside a kernel)"
    if info.global_bytes:
        yield f"{info.global_bytes} bytes of global variables, which outlive a launch: pass a workspace, or use __constant__"
    for section in info.debug_sections:
        yield f"carries debug information ({section})"


def _plan_problems(info: CubinInfo, plan: LaunchPlan, arch: str) -> Iterator[str]:
    for step in plan.steps:
        if isinstance(step, CPU_STEPS):
            yield "a GPU kernel's plan has cpu steps"
        elif isinstance(step, KernelStep):
            entry = info.entries.get(step.entry)
            if entry is None:
                yield f'has no kernel {step.entry} (it has {", ".join(sorted(info.entries)) or "none"}): declare it extern "C"'
            else:
                yield from _step_problems(entry, step, arch)


def _step_problems(entry: EntryInfo, step: KernelStep, arch: str) -> Iterator[str]:
    given, taken = [_size_of(arg) for arg in step.args], [parameter.size_bytes for parameter in entry.parameters]
    if given != taken:
        yield f"{entry.name}: the plan passes {len(given)} arguments of {given} bytes, the kernel takes {len(taken)} of {taken}"
    threads = math.prod(step.block)
    if entry.required_block is not None and entry.required_block != step.block:
        yield f"{entry.name}: block {step.block}, the kernel requires {entry.required_block}"
    elif threads > entry.max_threads:
        yield f"{entry.name}: {threads} threads a block, the kernel is bounded to {entry.max_threads}"
    # Registers are handed out to warps in units of 8 a thread.
    registers = -(-entry.registers // 8) * 8 * -(-threads // 32) * 32
    if registers > _REGISTERS_OF_A_BLOCK:
        yield f"{entry.name}: {threads} threads of {entry.registers} registers do not fit {_REGISTERS_OF_A_BLOCK}"
    if entry.cluster is not None and entry.cluster != step.cluster:
        yield f"{entry.name}: cluster {step.cluster}, the kernel requires {entry.cluster}"
    if step.cluster != (1, 1, 1) and parse_arch(arch)[0] < 9:
        yield f"{entry.name}: clusters need capability 9.0, this is {arch}"
    shared = entry.static_shared_bytes + step.shared_bytes
    if shared > shared_limit_bytes(arch):
        yield (
            f"{entry.name}: {entry.static_shared_bytes} static and {step.shared_bytes} dynamic bytes of shared memory; at most"
            f" {shared_limit_bytes(arch)} on {arch}"
        )


def _size_of(arg: KernelArg) -> int:
    if isinstance(arg, IntArg | FloatArg):
        return arg.bits // 8
    return 128 if isinstance(arg, TensorMapArg) else 8
