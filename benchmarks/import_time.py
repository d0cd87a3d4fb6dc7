"""What importing the package adds to importing torch, in fresh processes: ``python -m benchmarks.import_time --json FILE``."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec

from torch_autokern.report.device import describe_device, utc_date, versions
from torch_autokern.report.measurement import write_json

LIMIT_MS = 50.0
# The public names come in at their first use, so one is used.
_PROBE = """
import time, torch
start = time.perf_counter()
import torch_autokern
torch_autokern.optimize
print((time.perf_counter() - start) * 1e3)
"""


class ImportTime(msgspec.Struct, frozen=True):
    """Milliseconds that the import adds, over `processes` fresh processes with a warm disk cache."""

    device: str
    versions: dict[str, str]
    date: str
    processes: int
    added_ms_median: float
    added_ms_min: float
    added_ms_max: float
    limit_ms: float = LIMIT_MS


def measure(processes: int) -> ImportTime:
    """Start `processes` processes one after the other; the first, which fills the disk cache, is not counted."""
    times = [_once() for _ in range(processes + 1)][1:]
    return ImportTime(describe_device(), versions(), utc_date(), processes, statistics.median(times), min(times), max(times))


def _once() -> float:
    output = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=True).stdout
    return float(output)


def main() -> None:
    """Print the result and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--processes", type=int, default=11)
    options = parser.parse_args()
    result = measure(options.processes)
    print(
        f"import torch_autokern adds {result.added_ms_median:.1f} ms to importing torch "
        f"({result.added_ms_min:.1f} to {result.added_ms_max:.1f} over {result.processes} processes; limit {LIMIT_MS:.0f})"
    )
    if options.json:
        write_json(options.json, result)


if __name__ == "__main__":
    main()
