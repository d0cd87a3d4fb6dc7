"""Finds the C++ extension, without ever failing an import: a missing or mismatched one is a value with its reason."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import struct
import sys
from dataclasses import dataclass
from types import ModuleType

import torch

from torch_autokern.errors import ExtensionError

REBUILD_COMMAND = "pip install --force-reinstall --no-deps --no-build-isolation torch_autokern"


@dataclass(frozen=True)
class ExtensionState:
    """`module` is None when nothing can be served, and then `reason` says why in one line."""

    module: ModuleType | None
    reason: str = ""


def major_minor(version: str) -> str:
    """ "2.13.0+cpu" -> "2.13"."""
    return ".".join(version.split("+")[0].split(".")[:2])


@functools.cache
def extension_state() -> ExtensionState:
    """Load the extension once per process and say how that went."""
    if sys.platform != "linux":
        return ExtensionState(None, f"kernels run on Linux only, this is {sys.platform}: every call is stock")
    try:
        _check_whole()
        module = importlib.import_module("torch_autokern._C")
    except (ImportError, OSError, RuntimeError, SystemError) as error:
        reason = " ".join(str(error).split())
        return ExtensionState(None, f"the C++ extension cannot be loaded ({reason}); rebuild it: {REBUILD_COMMAND}")
    if major_minor(module.built_for_torch) != major_minor(torch.__version__):
        return ExtensionState(
            None,
            f"the C++ extension was built for torch {module.built_for_torch}, this is torch {torch.__version__}; "
            f"rebuild it: {REBUILD_COMMAND}",
        )
    return ExtensionState(module)


def _check_whole() -> None:
    """Refuse an extension file that was cut short: the system's loader maps past its end, and the process dies of SIGBUS.

    An ELF file's section headers come last (System V ABI, chapter 4), so a file that ends before them is not whole.

    Raises:
        ImportError: the file is shorter than its own header says.
    """
    try:
        found = importlib.util.find_spec("torch_autokern._C")
    except ValueError:  # somebody put a module in its place that comes from no file
        return
    if found is None or not found.has_location or not str(found.origin).endswith(".so"):
        return
    with open(str(found.origin), "rb") as file:
        header = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":
        return  # the loader says what it is
    section_offset, entry_size, count = struct.unpack_from("<Q", header, 40) + struct.unpack_from("<HH", header, 58)
    if size < section_offset + entry_size * count:
        raise ImportError(f"{found.origin} is cut short: {size} bytes")


def extension() -> ModuleType:
    """The extension module.

    Raises:
        ExtensionError: it is missing, or was built for another torch.
    """
    state = extension_state()
    if state.module is None:
        raise ExtensionError(state.reason)
    return state.module
