"""The process's one connection between store and router: what is loaded, who is served, and when the router is installed.

Nothing here runs inside an op call. While something is served the router watches the op families that the table holds kernels
for, and all of them while a recording or a strict scope asks for every call; otherwise none. An op that nothing could be won on
is never intercepted.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from torch_autokern import config
from torch_autokern.errors import AutokernError, InvalidInputError, OtherLibraryError, PlanError
from torch_autokern.ops import SPECS, spec_of
from torch_autokern.ops.spec import op_index
from torch_autokern.runtime.extension import extension, extension_state
from torch_autokern.runtime.kernel import LoadedKernel, begin_cpu_kernel, load_cuda_kernel
from torch_autokern.runtime.plan import decode_plan
from torch_autokern.runtime.table import CLASSES, Servable, build_rows, refusal, served_slots, slower_in_fresh_pages
from torch_autokern.runtime.target import local_target, stock_build
from torch_autokern.store.key import KernelKey, Target
from torch_autokern.store.record import AccuracyClass, StoredRecord
from torch_autokern.store.store import KernelStore, open_store

if TYPE_CHECKING:
    from torch_autokern.store.pack_install import FoundPack

_LOG = logging.getLogger("torch_autokern")
_LOG.addHandler(logging.NullHandler())

DEFAULT_POOL_BYTES = 1 << 30
POOL_MEMORY_SHARE = 16
EVERY_FAMILY = 0xFFFFFFFF
_DOES_NOT_LOAD = (AutokernError, KeyError, RuntimeError)


class Session:
    """Store, loaded kernels, and the users of the router (models, blocks, the process). Use `session()`."""

    def __init__(self, store: KernelStore) -> None:
        self.store = store
        self.loaded: dict[str, Servable] = {}
        self.load_failures: dict[str, str] = {}
        self.found_packs: tuple[FoundPack, ...] = ()  # every pack file of this machine, with what came of opening it
        self.held_back: dict[str, str] = {}  # records of packs that failed their smoke test, and why
        self._served: list[Servable] = []
        self._lock = threading.RLock()
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._strict_users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._blocks = 0
        self._blocks_of_every_family = 0
        self._families = 0  # of the table, as bits of the extension's `watch`
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
            self._open_packs()
            self._served = [servable for finish in self.begin_loading() if (servable := finish()) is not None]
            rows = build_rows(self._served)
            native.set_table(rows)
            self._families = functools.reduce(operator.or_, (family_bit(words) for words, _ in rows), 0)
            self._watch()
            return len(rows)

    def add_user(self, user: object, *, strict: bool = False) -> None:
        """Serve `user` (weakly held) until `remove_user`; a strict one wants to see the calls of every op family."""
        with self._lock:
            self._fill()
            self._users.add(user)
            self._strict_users.discard(user)
            if strict:
                self._strict_users.add(user)
            self._watch()

    def remove_user(self, user: object) -> None:
        """Undo `add_user`; the last one takes the router back."""
        with self._lock:
            self._users.discard(user)
            self._strict_users.discard(user)
            self._watch()

    def open_block(self, *, every_family: bool = False) -> None:
        """Watch calls for a block of code, of every op family or of those in the table; pairs with `close_block`."""
        with self._lock:
            self._fill()
            self._blocks += 1
            self._blocks_of_every_family += every_family
            self._watch()

    def close_block(self, *, every_family: bool = False) -> None:
        """Undo `open_block`."""
        with self._lock:
            self._blocks -= 1
            self._blocks_of_every_family -= every_family
            self._watch()

    @contextmanager
    def block(self) -> Iterator[None]:
        """`open_block`, and `close_block` at the end."""
        self.open_block()
        try:
            yield
        finally:
            self.close_block()

    def has_user(self, user: object) -> bool:
        """Whether `user` was added and not removed."""
        return user in self._users

    def unwatched(self) -> tuple[str, ...]:
        """Op families whose calls go straight to stock, because the table holds no kernel for them on any device."""
        bits = self._families | self._families >> 16
        return tuple(spec.name for spec in SPECS.values() if not bits >> spec.index & 1)

    def fill(self) -> None:
        """Read the store now if nothing has been served yet."""
        with self._lock:
            self._fill()

    def served_slots(self) -> dict[str, str]:
        """Record id of every filled slot of the table, by key and slot."""
        with self._lock:
            return served_slots(self._served)

    def _open_packs(self) -> None:
        """Open the packs of this machine anew: what was installed, removed or revoked since counts from now on."""
        from torch_autokern.runtime.pack_facts import read_binaries  # here: 20 ms of import time
        from torch_autokern.store.pack_install import open_packs
        from torch_autokern.store.pack_refusal import PackRefusal

        opened = open_packs(read_binaries)
        self.found_packs, self.store.packs = opened.found, opened.packs
        for found in self.found_packs:
            if isinstance(found.outcome, PackRefusal):
                _LOG.info("pack %s is not used: %s", found.path, found.outcome)

    def _fill(self) -> None:
        native = extension_state().module
        if native is not None and not config.disabled() and not self._filled:
            try:
                native.pool_set_limit(pool_limit_bytes())
            except InvalidInputError as error:
                # A word in a shell must not stop a program that runs in stock as well. `autokern doctor` has a failing line.
                _LOG.warning("the pool is off: %s", error)
                native.pool_set_limit(0)
            self.refresh()

    def _watch(self) -> None:
        native = extension_state().module
        if native is None:
            return
        if self._blocks_of_every_family or (len(self._strict_users) and not config.disabled()):
            native.watch(EVERY_FAMILY)
        elif (self._blocks or len(self._users)) and not config.disabled():
            native.watch(self._families)
        else:
            native.watch(0)

    def begin_loading(self) -> list[Callable[[], Servable | None]]:
        """Read and check what may run here; CPU libraries are opened meanwhile. Each result waits for one kernel and gives it,
        or None where it does not load and is set aside."""
        opener = extension().LibraryOpener()
        return [self._begin(stored, place, opener) for stored, place in self._candidates()]

    def _candidates(self) -> Iterator[tuple[StoredRecord, int]]:
        """Records that may run here, each with the place it may run at: 0 for the CPU, a GPU's index. Each comes as soon as it
        is read and checked; those of packs that no child has tried yet come last, when one has."""
        build, pool_bytes, approval_wanted = stock_build(), _pool_bytes(), self.store.demands_approval()
        untried: list[tuple[StoredRecord, int]] = []
        tried = functools.cache(self._tried)

        def fits(made_for: Target, _stock_build: str) -> bool:
            return any(target.arch == made_for.arch for _, target in _places(made_for))

        for row in self.store.index().rows(fits):
            layers = self.store.layers_with(row.key_digest)
            stored = self.store.get(row.key_digest, row.record_id, layers=layers)
            if stored is None:
                continue
            notes = self.store.notes(row.key_digest, row.record_id, approval_wanted=approval_wanted, layers=layers)
            for place, target in _places(stored.record.target):
                why = refusal(stored.record, notes, target, build) or slower_in_fresh_pages(stored.record, pool_bytes)
                if why is not None:
                    _LOG.debug("record %s does not run here: %s", row.record_id[:12], why)
                elif not self.store.packs or row.record_id in tried(target) or self.store.is_own(row.key_digest, row.record_id):
                    yield stored, place
                else:
                    untried.append((stored, place))
        yield from self._smoke_tested(untried)

    def _tried(self, target: Target) -> frozenset[str]:
        """Records of packs that a child has tried before on a target of this machine, and found good."""
        from torch_autokern.runtime.smoke import passed_before
        from torch_autokern.store.pack_install import state_folder

        return passed_before(target, state_folder())

    def _smoke_tested(self, records: list[tuple[StoredRecord, int]]) -> list[tuple[StoredRecord, int]]:
        """Those of a pack's records that a child has tried on this machine; the others are quarantined."""
        self.held_back = {}
        if not records:
            return []
        from torch_autokern.runtime.smoke import smoke_test
        from torch_autokern.store.pack_install import state_folder

        groups: dict[Target, list[tuple[StoredRecord, int]]] = {}
        for stored, place in records:
            target = local_target(stored.record.target.device_type, device_index=place)
            groups.setdefault(target, []).append((stored, place))
        for target, group in groups.items():
            self.held_back.update(smoke_test(group, target, state_folder()))
        for stored, _ in records:
            why = self.held_back.get(stored.record_id)
            if why is not None and why.startswith("smoke test:"):
                self.store.quarantine(stored.record.key.digest, stored.record_id, why)
                _LOG.warning("record %s of a pack is set aside: %s", stored.record_id[:12], why)
        return [(stored, place) for stored, place in records if stored.record_id not in self.held_back]

    def _begin(self, stored: StoredRecord, place: int, opener: Any) -> Callable[[], Servable | None]:
        record_id = stored.record_id
        if self.loaded.get(self._name(record_id, place)) is None and record_id not in self.load_failures:
            try:
                bind = begin_record(stored, place, opener)
            except _DOES_NOT_LOAD as error:
                self._set_aside(stored, error)
            else:
                bare = msgspec.structs.replace(stored, data={})  # the opener has its bytes: none are kept twice
                return lambda: self._finish(bare, place, bind)
        return lambda: self.loaded.get(self._name(record_id, place))

    def _finish(self, stored: StoredRecord, place: int, bind: Callable[[], LoadedKernel]) -> Servable | None:
        try:
            kernel = bind()
        except _DOES_NOT_LOAD as error:
            self._set_aside(stored, error)
            return None
        servable = Servable(stored.record_id, stored.record, kernel.native, place)
        self.loaded[self._name(stored.record_id, place)] = servable
        return servable

    def _name(self, record_id: str, place: int) -> str:
        """A record is named by its id where it was loaded first; its twins on other devices carry the device too."""
        here = self.loaded.get(record_id)
        return record_id if here is None or here.place == place else f"{record_id}@{place}"

    def _set_aside(self, stored: StoredRecord, error: Exception) -> None:
        self.load_failures[stored.record_id] = str(error)
        if isinstance(error, OtherLibraryError):  # under the library that it was made with it is as good as ever
            _LOG.info("record %s waits: %s", stored.record_id[:12], error)
            return
        self.store.quarantine(stored.record.key.digest, stored.record_id, f"does not load: {error}")
        _LOG.warning("record %s does not load and is set aside: %s", stored.record_id[:12], error)


def _pool_bytes() -> int:
    """Cap of the output pool; 0 where the environment's word is none, because the pool is off then."""
    try:
        return pool_limit_bytes()
    except InvalidInputError:
        return 0


def _places(made_for: Target) -> list[tuple[int, Target]]:
    """The devices of a record's kind here. CUDA is touched only when a record needs it, and never in a fork of a process that
    uses it already, where it cannot start again."""
    if made_for.device_type == "cpu":
        return [(0, local_target())]
    if not torch.cuda.is_available() or torch.cuda._is_in_bad_fork():
        return []
    return [(index, local_target("cuda", device_index=index)) for index in range(torch.cuda.device_count())]


def load_record(stored: StoredRecord, place: int) -> LoadedKernel:
    """Load a record's kernel, on a GPU for the one with index `place`.

    Raises:
        AutokernError, KeyError, RuntimeError: it does not load here, in the words of whoever refused.
    """
    return begin_record(stored, place, extension().LibraryOpener())()


def begin_record(stored: StoredRecord, place: int, opener: Any) -> Callable[[], LoadedKernel]:
    """`load_record` in two halves: every check now, the rest when the result is called; a CPU's library is opened by `opener`
    meanwhile. Each half raises its part of what `load_record` raises."""
    record, data = stored.record, stored.data
    _check_outputs(record.key)
    plan = decode_plan(data["plan.json"])
    if record.target.device_type == "cuda":
        return functools.partial(load_cuda_kernel, data["kernel.cubin"], plan, record.key, place, stored.record_id)
    digest = {blob.name: blob.sha256 for blob in record.blobs}["kernel.so"]  # of these very bytes: the record was decoded
    identity = record.provenance.candidate_id
    return begin_cpu_kernel(data["kernel.so"], identity, plan, record.key, stored.record_id, opener, digest)


def _check_outputs(key: KernelKey) -> None:
    """A hit of the functional form returns `key.outputs`: they must be laid out as stock's results are."""
    for mine, stock in zip(key.outputs, spec_of(key).stock_outputs(key), strict=True):
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
    made = Session(open_store())
    # A child forked while another thread holds the lock, or a native one that is only taken under it, would wait for ever.
    os.register_at_fork(before=made._lock.acquire, after_in_parent=made._lock.release, after_in_child=made._lock.release)
    return made


def family_bit(words: Sequence[int]) -> int:
    """The bit of the extension's `watch` that stands for a key's op family on its device."""
    return 1 << (op_index(words) + (16 if words[0] >> 8 & 1 else 0))


def accuracy_code(accuracy: AccuracyClass) -> int:
    """The router's number of an accuracy policy."""
    return CLASSES.index(accuracy)
