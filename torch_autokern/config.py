"""The only reader of environment variables.

| variable | meaning | default |
|---|---|---|
| ``AUTOKERN_DISABLE`` | ``1`` is the kill switch: nothing is intercepted, every call is stock | off |
| ``AUTOKERN_STORE`` | folder of the user cache | ``platformdirs`` user cache, then a private temp folder, then memory |
| ``AUTOKERN_CXX`` | C++ compiler for CPU kernels | first of ``c++``, ``g++``, ``clang++`` on PATH |
| ``AUTOKERN_POOL_MB`` | cap on pages that the output pool keeps; ``0`` switches it off | 1024, at most 1/16 of memory |
| ``AUTOKERN_PREBUILT`` | ``0``: packs that come with this package are not used | on |
| ``AUTOKERN_STRICT`` | ``1``: a miss inside an optimised scope raises | off |
"""

from __future__ import annotations

import os

from torch_autokern.errors import InvalidInputError


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in {"1", "true", "yes", "on"}


def disabled() -> bool:
    """Whether the kill switch is on."""
    return _flag("AUTOKERN_DISABLE")


def strict() -> bool:
    """Whether a miss inside an optimised scope raises."""
    return _flag("AUTOKERN_STRICT")


def prebuilt_packs() -> bool:
    """Whether packs that come with this package may be used."""
    return os.environ.get("AUTOKERN_PREBUILT", "").strip().lower() not in {"0", "false", "no", "off"}


def store_folder() -> str | None:
    """The folder the person asked for, or None."""
    return os.environ.get("AUTOKERN_STORE") or None


def compiler() -> str | None:
    """The C++ compiler the person asked for, or None."""
    return os.environ.get("AUTOKERN_CXX") or None


def api_key(variable: str) -> str | None:
    """The key of a model's server, from the variable that the person named, or None. Keys come from nowhere else."""
    return os.environ.get(variable) or None


def pool_limit_bytes() -> int | None:
    """Cap of the output pool in bytes, or None for the default.

    Raises:
        InvalidInputError: the variable is not a whole number of MiB.
    """
    text = os.environ.get("AUTOKERN_POOL_MB")
    if not text:
        return None
    if not text.isdigit():
        raise InvalidInputError(f"AUTOKERN_POOL_MB is {text!r}; expected a whole number of MiB, such as 512 (0: off)")
    return int(text) << 20
