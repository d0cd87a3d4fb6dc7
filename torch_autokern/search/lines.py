"""Append-only files of checksummed lines: what is written is read back whole, and a torn tail costs one line.

A line is ``<first 16 hex digits of the body's SHA-256> <body>``; the body is JSON without line breaks. A kill or a power cut in
the middle of a write leaves a line that fails its checksum, and the next line starts fresh.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

CHECKSUM_DIGITS = 16


def append_line(path: Path, body: bytes) -> None:
    """Add one line durably.

    Raises:
        OSError: the disk is full, or the file cannot be written; at most a torn line is left.
    """
    line = hashlib.sha256(body).hexdigest()[:CHECKSUM_DIGITS].encode() + b" " + body + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = b"\n" + line if torn else line
        written = os.write(descriptor, data)
        if written != len(data):
            raise OSError(28, "no space left for a whole line", str(path))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def whole_lines(data: bytes) -> Iterator[bytes]:
    """The bodies of all lines that pass their checksum, in order."""
    for line in data.split(b"\n"):
        checksum, _, body = line.partition(b" ")
        if body and hashlib.sha256(body).hexdigest()[:CHECKSUM_DIGITS].encode() == checksum:
            yield body
