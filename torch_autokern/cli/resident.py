"""Timing with resident pages: a child process whose allocator never gives pages back, for both sides alike.

``python -m torch_autokern.cli.resident SECONDS < keys.json > rows.json``
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from torch_autokern.errors import JudgeError
from torch_autokern.report.measurement import Row
from torch_autokern.store.key import KernelKey

# mallopt(3): nothing by mmap, the top of the heap is never trimmed.
RESIDENT_ENVIRONMENT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(64 << 20)}


def measure_in_child(keys: Sequence[KernelKey], seconds: float) -> list[Row]:
    """Rows of these keys from a process with resident pages; it reads the same store.

    Raises:
        JudgeError: the child failed; its words are in the message.
    """
    child = subprocess.run(
        [sys.executable, "-m", "torch_autokern.cli.resident", str(seconds)],
        input=msgspec.json.encode(list(keys)),
        capture_output=True,
        env={**os.environ, **RESIDENT_ENVIRONMENT},
        check=False,
        timeout=600,
    )
    if child.returncode != 0:
        words = child.stderr.decode(errors="replace").strip().splitlines()
        raise JudgeError(f"timing with resident pages failed: {words[-1] if words else child.returncode}")
    return msgspec.json.decode(child.stdout, type=list[Row])


def main() -> None:
    """The child: keys on stdin, rows on stdout."""
    from torch_autokern import api
    from torch_autokern.report.keyrow import measure_key

    keys = msgspec.json.decode(sys.stdin.buffer.read(), type=list[KernelKey])
    rows = [measure_key(key, api.enabled, float(sys.argv[1]), pages="resident") for key in keys]
    sys.stdout.buffer.write(msgspec.json.encode(rows))


if __name__ == "__main__":
    main()
