"""What the public names do in a broken install: a program keeps running, in stock, and is told once what is missing.

A deployment whose torch or msgspec is damaged must not learn it from a kernel library. Names that serve give back what they
were given; names that a person asks for an answer raise ImportError with the reason.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

from torch_autokern import config

_warned: set[str] = set()


class AutokernWarning(UserWarning):
    """Said once: nothing is replaced here, and why."""


def stand_in(name: str, error: Exception) -> Any:
    """The public name `name` in an install that `error` broke.

    Raises:
        ImportError: the name asks for an answer that there is none to, or strict mode is on.
    """
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    message = f"torch_autokern serves nothing, every call is stock: {reason}; install it again: {INSTALL_COMMAND}"
    if name == "AutokernWarning":
        return AutokernWarning
    if name not in _STAND_INS or config.strict():
        raise ImportError(message) from error
    return _saying(message, _STAND_INS[name])


INSTALL_COMMAND = "pip install --force-reinstall --no-build-isolation torch_autokern"


def _saying(message: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def say_and_call(*args: Any, **kwargs: Any) -> Any:
        if message not in _warned:
            _warned.add(message)
            warnings.warn(message, AutokernWarning, stacklevel=2)
        return function(*args, **kwargs)

    return say_and_call


def _given_back(target: Any = None, *_: object, **__: object) -> Any:
    return target if target is not None else _given_back


def _scope(*_: object, **__: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _nothing(*_: object, **__: object) -> None:
    return None


def _no(*_: object, **__: object) -> bool:
    return False


def _zero(*_: object, **__: object) -> int:
    return 0


_STAND_INS: dict[str, Callable[..., Any]] = {
    "optimize": _given_back,
    "kernel": _given_back,
    "restore": _given_back,
    "enabled": _scope,
    "enable": _nothing,
    "disable": _nothing,
    "empty_cache": _nothing,
    "is_optimized": _no,
    "refresh": _zero,
}
