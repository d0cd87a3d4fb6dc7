"""The work lock saves work; nothing breaks when it lies, hangs, is missing or outlives its holder."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock
from store_faults import Child, run_in_child, run_together
from store_samples import make_data, make_key, make_record

from torch_autokern.store.layout import lock_file
from torch_autokern.store.store import KernelStore, Layer

DIGEST = make_key().digest


def open_at(root: Path) -> KernelStore:
    return KernelStore([Layer("cache", root, writable=True)])


def is_free(root: Path) -> bool:
    """Whether another process gets the lock at once."""

    def work() -> object:
        with open_at(root).work_lock(DIGEST, timeout_s=0.0) as held:
            return held

    return bool(run_in_child(work))


def _search_once(root: Path, seed: int) -> object:
    """What a cold process does for a key: wait for the lock, look again, else search and publish, then take the best."""
    store, searched = open_at(root), False
    with store.work_lock(DIGEST):
        if not any(store.records(DIGEST)):
            searched = True
            time.sleep(0.05)
            store.publish(make_record(seed), make_data(seed))
    return [searched, min(stored.record_id for stored in open_at(root).records(DIGEST))]


def test_sixteen_processes_cold_on_one_key_search_once_and_get_the_same_kernel(root: Path) -> None:
    answers = run_together([lambda seed=seed: _search_once(root, seed) for seed in range(16)])
    assert sum(searched for searched, _ in answers) == 1
    assert len({chosen for _, chosen in answers}) == 1


def test_flock_that_lies_costs_work_and_nothing_else(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with open_at(root).work_lock(DIGEST, timeout_s=0.0) as first:
        assert first
        assert is_free(root), "the lock really lies"
    run_together([lambda seed=seed: _search_once(root, seed) for seed in range(6)])
    store = open_at(root)
    assert len(list(store.records())) >= 1
    assert store.counters.damaged == 0
    assert {row.record_id for row in store.index().rows()} == {stored.record_id for stored in store.records()}


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EIO, errno.ESTALE, errno.EOPNOTSUPP])
def test_flock_missing_or_failing(root: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    store, ran = open_at(root), False
    with store.work_lock(DIGEST, timeout_s=0.2):
        ran = store.publish(make_record(), make_data()).status == "published"
    assert ran


def test_error_on_release_is_harmless(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FileLock.release

    def fail(self: FileLock, *args: bool, **kwargs: bool) -> None:
        real(self, *args, **kwargs)
        raise OSError(errno.EIO, "close failed")

    monkeypatch.setattr(FileLock, "release", fail)
    with open_at(root).work_lock(DIGEST) as held:
        assert held


def test_the_bodys_own_error_passes_through_and_the_lock_is_free_again(root: Path) -> None:
    with pytest.raises(OSError, match="the search failed"), open_at(root).work_lock(DIGEST):
        raise OSError("the search failed")
    assert is_free(root)


def test_lock_file_left_by_a_dead_process(root: Path) -> None:
    def die_holding() -> None:
        with open_at(root).work_lock(DIGEST) as held:
            assert held
            os.kill(os.getpid(), signal.SIGKILL)

    assert run_in_child(die_holding) is None
    assert lock_file(root, DIGEST).exists()
    start = time.monotonic()
    with open_at(root).work_lock(DIGEST, timeout_s=5.0) as held:
        assert held
    assert time.monotonic() - start < 2.0


def test_holder_that_hangs_is_waited_for_until_the_limit_and_no_longer(root: Path) -> None:
    read_end, write_end = os.pipe()

    def hang() -> None:
        with open_at(root).work_lock(DIGEST):
            os.write(write_end, b"x")
            time.sleep(60)

    child = Child(hang)
    try:
        os.read(read_end, 1)
        start = time.monotonic()
        with open_at(root).work_lock(DIGEST, timeout_s=0.3) as held:
            waited_s = time.monotonic() - start
            assert not held
            assert open_at(root).publish(make_record(), make_data()).status == "published"
        assert 0.25 <= waited_s < 5.0
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.join()


def test_default_wait_is_thirty_seconds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    real = FileLock.acquire

    def spy(self: FileLock, *args: float) -> object:
        waits.append(self.timeout)
        return real(self, *args)

    monkeypatch.setattr(FileLock, "acquire", spy)
    with open_at(root).work_lock(DIGEST):
        pass
    assert waits == [30.0]


def _publish_in_child(store: KernelStore) -> object:
    with store.work_lock(DIGEST, timeout_s=0.1) as held:
        return [held, store.publish(make_record(1), make_data(1)).status, len(list(store.records()))]


def test_fork_while_holding_a_lock(root: Path) -> None:
    """The child does not own its parent's lock, gets on without it, and its end does not set the lock free."""
    store = open_at(root)
    store.publish(make_record(0), make_data(0))
    with store.work_lock(DIGEST) as held:
        assert held
        assert run_in_child(lambda: _publish_in_child(store)) == [False, "published", 2]
        assert not is_free(root), "the parent still holds it"
    assert is_free(root), "and nothing inherited keeps it"


def test_a_child_that_leaves_the_parents_locked_block_does_not_release_it(root: Path) -> None:
    scope = open_at(root).work_lock(DIGEST)
    assert scope.__enter__()
    run_in_child(lambda: scope.__exit__(None, None, None))
    assert not is_free(root)
    scope.__exit__(None, None, None)
    assert is_free(root)


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("No module named 'filelock'"), OSError(errno.EMFILE, "Too many open files")]
)
def test_a_lock_that_cannot_even_be_imported_is_gone_without(
    root: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """With no descriptor left the import system itself raises, from inside the search for a module."""

    class Refusing:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "filelock":
                raise error

    monkeypatch.delitem(sys.modules, "filelock")
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    with open_at(root).work_lock(DIGEST) as held:
        assert not held
