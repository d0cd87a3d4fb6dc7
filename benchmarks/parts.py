"""Long measurements in parts: every n-th case of a command, and one file that all of its calls add to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from torch_autokern.errors import InvalidInputError
from torch_autokern.report.measurement import Measurement, Row, load_measurement

Item = TypeVar("Item")


def part_of(items: Sequence[Item], part: str) -> list[Item]:
    """Every n-th item from the i-th, for "i/n".

    Raises:
        ValueError: `part` is none.
    """
    number, _, count = part.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise ValueError(f"--part {part}: expected i/n with 1 <= i <= n, such as 1/4")
    return list(items[int(number) - 1 :: int(count)])


def with_best_peer(row: Row) -> Row:
    """The row with the fastest of its peers named."""
    if not row.peers_ms:
        return row
    best = min(row.peers_ms, key=row.peers_ms.__getitem__)
    return msgspec.structs.replace(row, best_peer=best, best_peer_ms=row.peers_ms[best])


def merged(measurement: Measurement, path: Path | None) -> Measurement:
    """What the file holds of other cases, and the new rows in the places of the old ones. A peer that only the old row has
    keeps its time, so that a slow one need not be timed by every call.

    Raises:
        InvalidInputError: the file is no measurement, or one of another device or torch, whose rows would pass for this one's.
    """
    if path is None or not path.exists():
        return measurement
    old = load_measurement(path)
    there, here = (f"{m.device}, torch {m.versions.get('torch')}" for m in (old, measurement))
    if there != here:
        raise InvalidInputError(f"{path} was measured on {there}, this is {here}; name another file with --json")
    rows = {row.case: row for row in old.rows}
    for row in measurement.rows:
        before = rows.get(row.case)
        peers = {**before.peers_ms, **row.peers_ms} if before is not None else row.peers_ms
        rows[row.case] = with_best_peer(msgspec.structs.replace(row, peers_ms=peers))
    return msgspec.structs.replace(measurement, rows=tuple(rows.values()))
