"""A lock that saves work and on which nothing else depends."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch_autokern.store.files import make_folders
from torch_autokern.store.layout import lock_file, locks_folder

if TYPE_CHECKING:
    from filelock import FileLock

_LOG = logging.getLogger("torch_autokern.store")
# filelock's Timeout is an OSError; RuntimeError: would deadlock, or (NotImplementedError) no such locks on this system;
# ImportError: missing, or no descriptor left to import it with
_LOCK_ERRORS = (OSError, RuntimeError, ImportError)


@contextmanager
def work_lock(root: Path | None, name: str, timeout_s: float) -> Iterator[bool]:
    """Hold the lock `name` of a store folder while the body runs; yields whether it is held.

    After `timeout_s`, on any lock error, and without a folder the body runs all the same: a lock may lie on network disks and
    its holder may hang, so whoever enters must be right without it. A forked child that leaves the body does not release its
    parent's lock (filelock 3.30 and newer).
    """
    lock = _acquire(root, name, timeout_s)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            _release(lock)


def _acquire(root: Path | None, name: str, timeout_s: float) -> FileLock | None:
    if root is None:
        return None
    try:
        from filelock import FileLock  # a quarter of the package's import time, and serving takes no lock

        make_folders(root, locks_folder(root))
        # A soft lock would outlive a killed holder, and every later process would wait for the whole timeout.
        lock = FileLock(lock_file(root, name), timeout=timeout_s, mode=0o600, fallback_to_soft=False)
        lock.acquire()
    except _LOCK_ERRORS as error:
        _LOG.info("going on without the lock %s: %s", name, error)
        return None
    return lock


def _release(lock: FileLock) -> None:
    try:
        lock.release()
    except _LOCK_ERRORS as error:
        _LOG.info("releasing %s failed, which is harmless: %s", lock.lock_file, error)
