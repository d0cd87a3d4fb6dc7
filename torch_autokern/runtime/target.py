"""What this machine is: the `Target` that records are matched against, and the torch build that was the baseline."""

from __future__ import annotations

import functools
import platform

import torch

from torch_autokern.runtime.extension import major_minor
from torch_autokern.store.key import DeviceType, Target

# x86-64 psABI micro-architecture levels; the flags are those of /proc/cpuinfo.
_LEVEL_FLAGS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"},
    "x86-64-v2": {"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"},
}


def parse_cpu(cpuinfo: str, machine: str) -> tuple[str, str]:
    """(model family, ISA level) from the text of /proc/cpuinfo and `platform.machine()`.

    The family is vendor, family and model number ("AuthenticAMD-25-17"): steppings run the same code at the same speed.
    """
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    if machine in ("x86_64", "AMD64"):
        flags = set(fields.get("flags", "").split())
        arch = "x86-64"
        for level in ("x86-64-v2", "x86-64-v3", "x86-64-v4"):
            if not _LEVEL_FLAGS[level] <= flags:
                break
            arch = level
        name = "-".join(fields.get(part, "unknown") for part in ("vendor_id", "cpu family", "model"))
        return name, arch
    name = "-".join(fields.get(part, "unknown") for part in ("CPU implementer", "CPU variant", "CPU part"))
    return name, machine


@functools.cache
def _local_cpu() -> tuple[str, str]:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            text = file.read()
    except OSError:
        text = ""
    return parse_cpu(text, platform.machine())


def local_target(device_type: DeviceType = "cpu", threads: int | None = None, device_index: int = 0) -> Target:
    """This machine's target. `threads` defaults to torch's intra-op threads. A GPU's capability keeps its suffix: 9.0 has
    instructions of its own, so it is "sm_90a"."""
    if device_type == "cuda":
        major, minor = torch.cuda.get_device_capability(device_index)
        suffix = "a" if major >= 9 else ""
        return Target("cuda", torch.cuda.get_device_name(device_index), f"sm_{major}{minor}{suffix}", 0)
    name, arch = _local_cpu()
    return Target("cpu", name, arch, torch.get_num_threads() if threads is None else threads)


def here_for(made_for: Target) -> Target:
    """What this machine has of the kind that `made_for` names: its GPU, or its CPU with as many threads; the CPU as it is where
    there is no such device."""
    if made_for.device_type == "cuda":
        return local_target("cuda", device_index=torch.cuda.current_device()) if torch.cuda.is_available() else local_target()
    return local_target("cpu", made_for.threads)


def stock_build() -> str:
    """The baseline's build: torch "major.minor"."""
    return major_minor(torch.__version__)
