"""torch_autokern: verified kernels at run time, stock PyTorch everywhere else. Importing changes nothing."""

from torch_autokern.api import (
    AutokernWarning,
    disable,
    empty_cache,
    enable,
    enabled,
    explain,
    is_optimized,
    optimize,
    record,
    refresh,
    restore,
    stats,
    warm,
)

__version__ = "0.1.0"

__all__ = [
    "AutokernWarning",
    "disable",
    "empty_cache",
    "enable",
    "enabled",
    "explain",
    "is_optimized",
    "optimize",
    "record",
    "refresh",
    "restore",
    "stats",
    "warm",
]
