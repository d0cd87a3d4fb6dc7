"""Folders and stores for the store's tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_faults import NOBODY

from torch_autokern.store.store import KernelStore, Layer


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder in memory where there is one: tests that publish a thousand times need no disk to sync."""
    folder = Path(tempfile.mkdtemp(prefix="autokern-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def root(memory_folder: Path) -> Path:
    """A private store folder that does not exist yet."""
    return memory_folder / "store"


@pytest.fixture
def store(root: Path) -> KernelStore:
    """A store with one writable layer."""
    return KernelStore([Layer("cache", root, writable=True)])


@pytest.fixture
def ordinary_folder() -> Iterator[Path]:
    """A folder of an ordinary user, reachable for one: root ignores permissions, so such tests run as uid 65534 there."""
    folder = Path(tempfile.mkdtemp(prefix="autokern-test-"))
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
