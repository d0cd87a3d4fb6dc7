"""torch_autokern: verified kernels at run time, stock PyTorch everywhere else.

Importing changes nothing and loads nothing: the public names below are brought in from `torch_autokern.api` when first used, so
that commands which need no torch start fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_autokern.api import (
        AutokernWarning,
        check_ranks,
        disable,
        empty_cache,
        enable,
        enabled,
        explain,
        install_pack,
        is_optimized,
        kernel,
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
    "check_ranks",
    "disable",
    "empty_cache",
    "enable",
    "enabled",
    "explain",
    "install_pack",
    "is_optimized",
    "kernel",
    "optimize",
    "record",
    "refresh",
    "restore",
    "stats",
    "warm",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from torch_autokern import api
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # what a damaged or foreign torch raises, too
        from torch_autokern.stock_only import stand_in

        return stand_in(name, error)
    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
