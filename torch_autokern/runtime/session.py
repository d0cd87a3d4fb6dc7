"""The process's one connection between store and router: what is loaded, who is served, and when the router is installed.

Nothing here runs inside an op call. The router is installed when the first scope opens and taken back when the last is gone.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from typing import Any

from torch_autokern import config
from torch_autokern.errors import AutokernError, PlanError
from torch_autokern.ops import SPECS
from torch_autokern.runtime.extension import extension_state
from torch_autokern.runtime.kernel import load_cpu_kernel
from torch_autokern.runtime.plan import decode_plan
from torch_autokern.runtime.table import CLASSES, Servable, build_rows, refusal
from torch_autokern.runtime.target import local_target, stock_build
from torch_autokern.store.key import KernelKey
from torch_autokern.store.key import Target
from torch_autokern.store.record import AccuracyClass, StoredRecord
from torch_autokern.store.store import KernelStore, open_store

_LOG = logging.getLogger("torch_autokern")
_LOG.addHandler(logging.NullHandler())

DEFAULT_POOL_BYTES = 1 << 30
POOL_MEMORY_SHARE = 16


class Session:
    """Store, loaded kernels, and the users of the router (models, blocks, the process). Use `session()`."""

    def __init__(self, store: KernelStore) -> None:
        self.store = store
        self.loaded: dict[str, Servable] = {}
        self.load_failures: dict[str, str] = {}
        self._lock = threading.RLock()
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._blocks = 0
        self._filled = False

    @property
    def unavailable(self) -> str | None:
        """Why nothing can be served in this process, or None."""
        if config.disabled():
            return "switched off by AUTOKERN_DISABLE=1: every call is stock"
        return extension_state().reason or None

    def refresh(self) -> int:
        """Load what the store holds for this machine and publish a new table. Returns the number of keys in it."""
        native = extension_state().module
        if native is None:
            return 0
        with self._lock:
            self._filled = True
            servables = [s for s in map(self._load, self._candidates()) if s is not None]
            rows = build_rows(servables)
            native.set_table(rows)
            return len(rows)

    def add_user(self, user: object) -> None:
        """Install the router for as long as `user` (weakly held) is served."""
        with self._lock:
            self._open()
            self._users.add(user)

    def remove_user(self, user: object) -> None:
        """Undo `add_user`; the last one takes the router back."""
        with self._lock:
            self._users.discard(user)
            self._close_when_idle()

    def open_block(self) -> None:
        """Install the router for a block of code; pairs with `close_block`."""
        with self._lock:
            self._open()
            self._blocks += 1

    def close_block(self) -> None:
        """Undo `open_block`."""
        with self._lock:
            self._blocks -= 1
            self._close_when_idle()

    def has_user(self, user: object) -> bool:
        """Whether `user` was added and not removed."""
        return user in self._users

    def _open(self) -> None:
        native = extension_state().module
        if native is None or config.disabled():
            return
        if not self._filled:
            native.pool_set_limit(pool_limit_bytes())
            self.refresh()
        native.install()

    def _close_when_idle(self) -> None:
        native = extension_state().module
        if native is not None and not self._blocks and not len(self._users):
            native.uninstall()

    def _candidates(self) -> list[StoredRecord]:
        target, build = local_target(), stock_build()
        found = []

        def fits(made_for: Target, _stock_build: str) -> bool:
            return (made_for.device_type, made_for.arch) == (target.device_type, target.arch)

        for row in self.store.index().rows(fits):
            stored = self.store.get(row.key_digest, row.record_id)
            if stored is None:
                continue
            why = refusal(stored.record, self.store.notes(row.key_digest, row.record_id), target, build)
            if why is None:
                found.append(stored)
            else:
                _LOG.debug("record %s does not run here: %s", row.record_id[:12], why)
        return found

    def _load(self, stored: StoredRecord) -> Servable | None:
        record_id = stored.record_id
        if record_id in self.loaded:
            return self.loaded[record_id]
        if record_id in self.load_failures:
            return None
        try:
            _check_outputs(stored.record.key)
            plan = decode_plan(stored.data["plan.json"])
            identity = stored.record.provenance.candidate_id
            kernel = load_cpu_kernel(stored.data["kernel.so"], identity, plan, stored.record.key, record_id)
        except (AutokernError, KeyError, RuntimeError) as error:
            self.load_failures[record_id] = str(error)
            self.store.quarantine(stored.record.key.digest, record_id, f"does not load: {error}")
            _LOG.warning("record %s does not load and is set aside: %s", record_id[:12], error)
            return None
        self.loaded[record_id] = Servable(record_id, stored.record, kernel.native)
        return self.loaded[record_id]


def _check_outputs(key: KernelKey) -> None:
    """A hit of the functional form returns `key.outputs`: they must be laid out as stock's results are."""
    for mine, stock in zip(key.outputs, SPECS[key.op].stock_outputs(key), strict=True):
        if mine is None or stock is None:
            continue
        if (mine.dtype, mine.sizes, mine.strides) != (stock.dtype, stock.sizes, stock.strides):
            raise PlanError(f"results of {key.op} have strides {mine.strides}, stock's have {stock.strides}: record it again")


def pool_limit_bytes() -> int:
    """Cap of the output pool: the environment's, else 1 GiB and at most a sixteenth of memory."""
    asked = config.pool_limit_bytes()
    if asked is not None:
        return asked
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0
    return min(DEFAULT_POOL_BYTES, memory // POOL_MEMORY_SHARE)


@functools.cache
def session() -> Session:
    """The process's session; opened at the first use, never at import."""
    return Session(open_store())


def accuracy_code(accuracy: AccuracyClass) -> int:
    """The router's number of an accuracy policy."""
    return CLASSES.index(accuracy)
