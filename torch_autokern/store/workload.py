"""Which keys a program asked for: what `record` writes and `warm` reads."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from torch_autokern.errors import InvalidInputError
from torch_autokern.store.files import remove_file
from torch_autokern.store.key import KernelKey
from torch_autokern.store.layout import temporary_name

SCHEMA = "autokern.workload/1"
MAX_WORKLOAD_BYTES = 64 << 20


class WorkloadEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key: how many calls, their summed time in stock (us, host clock on a CPU), and how many came by an `out` form."""

    key: KernelKey
    calls: int
    stock_time_us: float
    out_calls: int = 0


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys by falling time. `wall_time_us` is the length of the recorded scope, so shares have a denominator."""

    schema: str
    torch_version: str
    device_name: str
    threads: int
    wall_time_us: float
    entries: tuple[WorkloadEntry, ...]

    def share(self, entry: WorkloadEntry) -> float:
        """Part of the recorded wall time spent in this key (0 where the scope's length is unknown)."""
        return entry.stock_time_us / self.wall_time_us if self.wall_time_us > 0 else 0.0

    def save(self, path: Path) -> None:
        """Write as indented JSON; the file appears whole or not at all, and survives a power cut.

        Raises:
            InvalidInputError: the path cannot be written.
        """
        temporary = path.with_name(temporary_name())
        try:
            with temporary.open("xb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(self), indent=2))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            remove_file(temporary)
            raise InvalidInputError(
                f"cannot write workload {path}: {error.strerror}; name a file in a writable folder"
            ) from error


def load_workload(path: Path) -> Workload:
    """Read a workload file.

    Raises:
        InvalidInputError: missing, unreadable, not JSON, or of another schema.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_WORKLOAD_BYTES + 1)
    except OSError as error:
        raise InvalidInputError(
            f"cannot read workload {path}: {error.strerror}; record one with: autokern record -o {path} -- python script.py"
        ) from error
    if len(data) > MAX_WORKLOAD_BYTES:
        raise InvalidInputError(f"{path} is no workload: more than {MAX_WORKLOAD_BYTES} bytes; expected schema {SCHEMA}")
    try:
        workload = msgspec.json.decode(data, type=Workload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInputError(f"{path} is not a workload ({error}); expected schema {SCHEMA}") from error
    if workload.schema != SCHEMA:
        raise InvalidInputError(f"{path} has schema {workload.schema!r}; this version reads {SCHEMA!r}: record it again")
    return workload
