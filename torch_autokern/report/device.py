"""Where and with what a measurement was made: device in words, versions, settings that change times."""

from __future__ import annotations

import datetime
import platform
from importlib import metadata

import torch

from torch_autokern.runtime.target import local_target

# Only what can change a result or a time; each is listed where it is installed.
_PACKAGES = ("torch-autokern", "torch", "triton", "transformers", "numpy")


def describe_device(device_type: str = "cpu") -> str:
    """One line: the device's name, its ISA or capability, and on a CPU the threads that torch uses."""
    if device_type == "cuda":
        target = local_target("cuda", device_index=torch.cuda.current_device())
        return f"{target.name} ({target.arch})"
    target = local_target("cpu")
    return f"{cpu_model()} ({target.name}, {target.arch}, {target.threads} threads)"


def cpu_model() -> str:
    """The processor's marketing name, or what the platform calls it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux, or no /proc: the platform's word is the best there is
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Python's, and of each package that can change a result or a time."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def utc_date() -> str:
    """Now, UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
