"""The accuracy class that a command's options ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_autokern.errors import InvalidInputError

if TYPE_CHECKING:
    from torch_autokern.judge.outcome import Accuracy


def chosen(kind: str, atol: float, rtol: float, option: str) -> Accuracy:
    """The class `kind`; `option` is what the command calls it.

    Raises:
        InvalidInputError: an unknown class, bounds without class tolerance, or the reverse.
    """
    from torch_autokern.judge.outcome import Accuracy, as_accuracy

    if kind == "tolerance":
        return as_accuracy(Accuracy("tolerance", atol, rtol))
    if atol or rtol:
        raise InvalidInputError(f"--atol and --rtol belong to {option} tolerance, not to {kind!r}")
    return as_accuracy(kind)
