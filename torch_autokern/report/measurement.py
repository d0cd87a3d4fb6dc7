"""`Measurement`: the one JSON form of every command that measures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from torch_autokern.errors import InvalidInputError


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One case, both sides timed in one run on the same input bits.

    `ratio` is stock over autokern (above 1: faster) and `ratio_low` the lower bound of its interval. `error` and
    `stock_error` are largest elementwise errors against float64, in units of the op's natural scale. `served` is True, or the
    reason of the miss; a missed case is stock on both sides. `pages`: "default" (the allocator as the user has it) or
    "resident" (it keeps its pages), the same on both sides. `limit_ms` is what the memory system or the arithmetic needs at
    least; `best_peer` the fastest other library, `peers_ms` all that were timed. `added_us` is own time less stock's, with its
    spread (10th and 90th percentile), where host time is the question.
    """

    case: str
    accuracy_class: str
    stock_ms: float
    autokern_ms: float
    ratio: float
    ratio_low: float
    error: float
    stock_error: float
    served: bool | str
    ratio_high: float | None = None
    pages: str | None = None
    limit_ms: float | None = None
    best_peer: str | None = None
    best_peer_ms: float | None = None
    peers_ms: dict[str, float] = {}
    added_us: float | None = None
    added_us_low: float | None = None
    added_us_high: float | None = None
    note: str | None = None


class ModelResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A whole model end to end; `min_cosine` is the smallest cosine between an output vector of stock and of autokern."""

    name: str
    stock_ms: float
    autokern_ms: float
    ratio: float
    min_cosine: float
    ratio_low: float | None = None
    ratio_high: float | None = None
    pool_off_ms: float | None = None
    pool_off_ratio: float | None = None
    pool_off_ratio_low: float | None = None
    pool_off_ratio_high: float | None = None
    note: str | None = None


class Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What was measured, where, with which versions and when (`date`: UTC, ISO 8601)."""

    device: str
    versions: dict[str, str]
    date: str
    rows: tuple[Row, ...]
    model: ModelResult | None = None
    settings: dict[str, str] = {}

    def save(self, path: Path) -> None:
        """Write as indented JSON; the file appears whole or not at all.

        Raises:
            InvalidInputError: the file cannot be written.
        """
        write_json(path, self)


def write_json(path: Path, value: object) -> None:
    """Write any typed value as indented JSON, whole or not at all.

    Raises:
        InvalidInputError: the file cannot be written.
    """
    temporary = path.with_name(path.name + ".partial")
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
        temporary.replace(path)
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror}; name a file in a writable folder") from error


def load_measurement(path: Path) -> Measurement:
    """Read a file that a measuring command wrote.

    Raises:
        InvalidInputError: missing, or not of this form.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Measurement)
    except OSError as error:
        raise InvalidInputError(f"cannot read measurement {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise InvalidInputError(f"{path} is not a measurement ({error}); write one: autokern demo --json {path}") from error


def geometric_mean(ratios: Sequence[float]) -> float:
    """The mean that a set of ratios has.

    Raises:
        ValueError: no ratio, or one that is not positive.
    """
    if not ratios or min(ratios) <= 0:
        raise ValueError(f"needs positive ratios, got {list(ratios)}")
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
