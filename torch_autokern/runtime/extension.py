"""Finds the C++ extension, without ever failing an import: a missing or mismatched one is a value with its reason."""

from __future__ import annotations

import functools
import importlib
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
        module = importlib.import_module("torch_autokern._C")
    except ImportError as error:
        return ExtensionState(None, f"the C++ extension cannot be loaded ({error}); rebuild it: {REBUILD_COMMAND}")
    if major_minor(module.built_for_torch) != major_minor(torch.__version__):
        return ExtensionState(
            None,
            f"the C++ extension was built for torch {module.built_for_torch}, this is torch {torch.__version__}; "
            f"rebuild it: {REBUILD_COMMAND}",
        )
    return ExtensionState(module)


def extension() -> ModuleType:
    """The extension module.

    Raises:
        ExtensionError: it is missing, or was built for another torch.
    """
    state = extension_state()
    if state.module is None:
        raise ExtensionError(state.reason)
    return state.module
