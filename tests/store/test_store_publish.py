"""Publishing: whole or not at all, whatever fails or dies, and the compiled kernel is never lost."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_faults import count_calls, failing_calls, killed_at, run_in_child, run_together
from store_samples import make_data, make_key, make_record

import torch_autokern.store.indexing as indexing
from torch_autokern.errors import RecordError
from torch_autokern.store.files import publish_file
from torch_autokern.store.layout import is_temporary_file, record_file
from torch_autokern.store.notes import Quarantine
from torch_autokern.store.record import encode_record
from torch_autokern.store.store import KernelStore, Layer

ERRNOS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.EACCES,
    errno.EPERM,
    errno.ESTALE,
    errno.EBUSY,
    errno.ENOENT,
    errno.EEXIST,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EMLINK,
    errno.EXDEV,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ENOMEM,
)


def open_at(root: Path) -> KernelStore:
    return KernelStore([Layer("cache", root, writable=True)])


def test_published_record_reads_back_equal(store: KernelStore, root: Path) -> None:
    outcome = store.publish(make_record(), make_data())
    assert outcome.status == "published"
    read = open_at(root).get(make_key().digest, outcome.record_id)
    assert read is not None
    assert read.data == make_data()
    assert read.record.key == make_key()


def test_publishing_again_is_already_there(store: KernelStore) -> None:
    first = store.publish(make_record(), make_data())
    second = store.publish(make_record(), make_data())
    assert (first.status, second.status) == ("published", "already_there")
    assert first.record_id == second.record_id
    assert len(list(store.records())) == 1


def test_a_record_that_would_not_read_back_is_refused_before_any_write(store: KernelStore, root: Path) -> None:
    with pytest.raises(RecordError):
        store.publish(make_record(ratio_low=float("nan")), make_data())
    assert not root.exists()


def test_names_are_short_enough_for_every_system(store: KernelStore, root: Path) -> None:
    record_id = store.publish(make_record(), make_data()).record_id
    store.quarantine(make_key().digest, record_id, "failed at launch")
    for path in root.rglob("*"):
        assert len(path.name) <= 64
        assert len(str(path.relative_to(root))) <= 100


def test_files_and_folders_are_private(store: KernelStore, root: Path) -> None:
    store.publish(make_record(), make_data())
    for path in [root, *root.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0 or (path.stat().st_size == 0 and path.is_file())


def test_no_writable_layer_means_memory(root: Path) -> None:
    store = KernelStore([])
    outcome = store.publish(make_record(), make_data())
    assert outcome.status == "memory_only"
    assert [stored.data for stored in store.records(make_key().digest)] == [make_data()]


def test_no_hard_links_on_this_disk(store: KernelStore, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert store.publish(make_record(), make_data()).status == "published"
    assert open_at(root).publish(make_record(), make_data()).status == "already_there"


def test_folder_is_synced_after_the_name_appears(store: KernelStore) -> None:
    calls = count_calls(lambda: store.publish(make_record(), make_data()))
    assert "fsync" in calls[calls.index("write") : calls.index("link")], "the file before its name"
    assert calls[calls.index("link") :].count("fsync") >= 5, "key folder, two levels above, version folder, root"


# -- kill -9 -------------------------------------------------------------------------------------------------------------


def _check_after_kill(root: Path, older: str) -> None:
    """Nothing visible is half: a new process reads the older record, and the new one whole or not at all; then publishes."""
    store = open_at(root)
    new = encode_record(make_record(1), make_data(1))
    found = {stored.record_id for stored in store.records()}
    assert found - {new[-32:].hex()} == {older}
    assert store.counters.damaged == store.counters.refused == 0
    assert {row.record_id for row in store.index().rows()} >= found, "the index hides nothing that is visible"
    assert store.publish(make_record(1), make_data(1)).status in ("published", "already_there")
    assert {stored.record_id for stored in open_at(root).records()} == {older, new[-32:].hex()}
    assert {row.record_id for row in open_at(root).index().rows()} == {older, new[-32:].hex()}


def _kill_everywhere(memory_folder: Path, prepare: Callable[[Path], str], work: Callable[[Path], object]) -> int:
    prepare(memory_folder / "dry")
    calls = count_calls(lambda: work(memory_folder / "dry"))
    points = 0
    for number, name in enumerate(calls):
        for moment in ("before", "half", "after") if name == "write" else ("before", "after"):
            root = memory_folder / f"{number}-{moment}"
            older = prepare(root)
            assert run_in_child(killed_at(number, moment, lambda root=root: work(root))) is None
            _check_after_kill(root, older)
            points += 1
    return points


def _with_one_record(root: Path) -> str:
    return open_at(root).publish(make_record(0), make_data(0)).record_id


def _with_other_key(root: Path) -> str:
    return open_at(root).publish(make_record(0, make_key(5)), make_data(0)).record_id


def _with_damage(root: Path) -> str:
    older = _with_one_record(root)
    raw = encode_record(make_record(1), make_data(1))
    path = record_file(root, make_key().digest, raw[-32:].hex())
    path.write_bytes(raw[:100])
    path.chmod(0o600)
    return older


def _publish(root: Path) -> object:
    return open_at(root).publish(make_record(1), make_data(1)).status


def test_kill_at_any_system_call_of_a_first_publish(memory_folder: Path) -> None:
    assert _kill_everywhere(memory_folder, _with_other_key, _publish) >= 60


@pytest.mark.long
def test_kill_at_any_system_call_with_a_record_there(memory_folder: Path) -> None:
    assert _kill_everywhere(memory_folder, _with_one_record, _publish) >= 60


@pytest.mark.long
def test_kill_at_any_system_call_while_the_index_is_written(memory_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "COMPACT_ABOVE", 0)

    def work(root: Path) -> object:
        _publish(root)
        return len(open_at(root).index().rows())

    assert _kill_everywhere(memory_folder, _with_one_record, work) >= 100


@pytest.mark.long
def test_kill_at_any_system_call_of_the_first_folder(memory_folder: Path) -> None:
    calls = count_calls(lambda: _publish(memory_folder / "dry"))
    for number in range(len(calls)):
        root = memory_folder / str(number)
        for umask in (0o022, 0o777):
            run_in_child(killed_at(number, "after", lambda root=root: _publish(root)), umask=umask)
            assert _publish(root) in ("published", "already_there")
            assert len(list(open_at(root).records())) == 1


@pytest.mark.long
def test_kill_at_any_system_call_of_a_repairing_publish(memory_folder: Path) -> None:
    _with_damage(memory_folder / "dry")
    calls = count_calls(lambda: _publish(memory_folder / "dry"))
    for number in range(len(calls)):
        root = memory_folder / str(number)
        older = _with_damage(root)
        run_in_child(killed_at(number, "after", lambda root=root: _publish(root)))
        assert _publish(root) in ("published", "already_there")
        found = {stored.record_id for stored in open_at(root).records()}
        assert found == {older, encode_record(make_record(1), make_data(1))[-32:].hex()}


def test_kill_while_a_note_is_replaced_leaves_the_old_or_the_new(store: KernelStore, root: Path) -> None:
    record_id = store.publish(make_record(), make_data()).record_id
    digest = make_key().digest

    def write(reason: str) -> None:
        open_at(root).add_note(digest, Quarantine(record_id, reason, "", "2025-01-01T00:00:00Z", "here"))

    write("old")
    for number in range(len(count_calls(lambda: write("old")))):
        run_in_child(killed_at(number, "after", lambda: write("new")))
        note = open_at(root).notes(digest, record_id).quarantine
        assert note is not None
        assert note.reason in ("old", "new")
        write("old")


# -- disks that refuse ---------------------------------------------------------------------------------------------------


def _check_under_error(root: Path, number: int, code: int, *, for_ever: bool) -> None:
    store = open_at(root)
    with failing_calls(number, code, for_ever=for_ever):
        outcome = store.publish(make_record(), make_data())
    kept = store.get(make_key().digest, outcome.record_id)
    assert kept is not None, "the compiled kernel is still used"
    assert kept.data == make_data()
    if outcome.status == "memory_only":
        assert outcome.reason
    else:
        assert open_at(root).get(make_key().digest, outcome.record_id) is not None
        assert [row.record_id for row in open_at(root).index().rows()] == [outcome.record_id]
    for stored in open_at(root).records():
        assert stored.data == make_data()


def _errors_everywhere(memory_folder: Path, codes: tuple[int, ...], step: int) -> None:
    calls = count_calls(lambda: open_at(memory_folder / "dry").publish(make_record(), make_data()))
    for code in codes:
        for number in range(0, len(calls), step):
            for for_ever in (False, True):
                _check_under_error(memory_folder / f"{code}-{number}-{for_ever}", number, code, for_ever=for_ever)


def test_disk_quota_inodes_or_descriptors_run_out_at_any_call(memory_folder: Path) -> None:
    _errors_everywhere(memory_folder, (errno.ENOSPC, errno.EMFILE), step=1)


def test_a_few_other_errors_at_some_calls(memory_folder: Path) -> None:
    _errors_everywhere(memory_folder, ERRNOS, step=9)


@pytest.mark.long
def test_twenty_errors_at_every_call(memory_folder: Path) -> None:
    _errors_everywhere(memory_folder, ERRNOS, step=1)


@pytest.mark.parametrize("code", ERRNOS, ids=lambda code: errno.errorcode[code])
def test_an_error_at_any_call_of_a_read_is_a_miss(root: Path, code: int) -> None:
    expected = open_at(root).publish(make_record(), make_data()).record_id
    calls = count_calls(lambda: list(open_at(root).records()))
    for number in range(len(calls)):
        for for_ever in (False, True):
            with failing_calls(number, code, for_ever=for_ever):
                found = [stored.record_id for stored in open_at(root).records()]
            assert found in ([], [expected])
    assert [stored.record_id for stored in open_at(root).records()] == [expected], "no error set a good file aside"


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EBUSY, errno.ENOENT], ids=lambda code: errno.errorcode[code])
def test_a_network_disk_gets_one_retry_by_name(root: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = open_at(root).publish(make_record(), make_data())
    real, failures = os.open, [1]

    def flaky(path: object, *args: int) -> int:
        if str(path).endswith(".akr") and failures[0]:
            failures[0] -= 1
            raise OSError(code, os.strerror(code))
        return real(path, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", flaky)
    assert open_at(root).get(make_key().digest, outcome.record_id) is not None
    failures[0] = 2
    assert open_at(root).get(make_key().digest, outcome.record_id) is None, "twice is a miss"
    assert open_at(root).get(make_key().digest, outcome.record_id) is not None, "and the file is still there"


@pytest.mark.parametrize("limit_bytes", [0, 1, 100, 1000])
def test_a_write_that_stops_short_keeps_the_record_in_memory(store: KernelStore, root: Path, limit_bytes: int) -> None:
    def work() -> object:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
        outcome = store.publish(make_record(), make_data())
        kept = store.get(make_key().digest, outcome.record_id)
        return [outcome.status, kept is not None and kept.data == make_data()]

    assert run_in_child(work) == ["memory_only", True]
    assert list(open_at(root).records()) == []
    assert not any(is_temporary_file(path.name) for path in root.rglob("*"))


def test_no_file_descriptor_left(store: KernelStore) -> None:
    def work() -> object:
        lowest = os.open("/", os.O_RDONLY)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, lowest + 1))
        outcome = store.publish(make_record(), make_data())
        return [outcome.status, len(list(store.records(make_key().digest)))]

    assert run_in_child(work) == ["memory_only", 1]


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small tmpfs with the given options."""
    mounts: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"mount{len(mounts)}"
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("mounting a small tmpfs needs root; the same faults are injected in other tests")
        mounts.append(folder)
        folder.chmod(0o700)
        return folder

    yield mount
    for folder in mounts:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("options", ["size=64k", "nr_inodes=12"])
def test_full_disk_and_full_inode_table(mounted: Callable[[str], Path], options: str) -> None:
    root = mounted(options)
    store = open_at(root)
    statuses = [store.publish(make_record(seed), {"binary": bytes(9000)}).status for seed in range(20)]
    assert statuses[0] == "published"
    assert statuses[-1] == "memory_only"
    assert len(list(store.records())) == 20
    fresh = open_at(root)
    assert len(list(fresh.records())) == statuses.count("published")
    assert fresh.counters.damaged == 0


def test_read_only_and_noexec_mounts(mounted: Callable[[str], Path]) -> None:
    root = mounted("noexec")
    store = open_at(root)
    assert store.publish(make_record(0), make_data(0)).status == "published", "nothing is executed from the folder"
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    outcome = store.publish(make_record(1), make_data(1))
    assert outcome.status == "memory_only"
    assert "Read-only" in outcome.reason
    assert len(list(store.records())) == 2


# -- others at the same time ---------------------------------------------------------------------------------------------


def test_cache_wiped_under_a_running_job(store: KernelStore, root: Path) -> None:
    for seed in range(3):
        assert store.publish(make_record(seed), make_data(seed)).status == "published"
        subprocess.run(["rm", "-rf", str(root)], check=True)
        assert list(store.records()) == []
        assert store.index().rows() == []
        with store.work_lock(make_key().digest) as held:
            assert held
    assert store.publish(make_record(0), make_data(0)).status == "published"


@pytest.mark.parametrize("victim", ["open", "link"])
def test_folder_wiped_between_two_steps_of_a_publish(root: Path, monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    real, wipes = getattr(os, victim), [1]

    def wipe_then(*args: object, **kwargs: object) -> object:
        if ".tmp" in str(args[0]) and wipes[0]:
            wipes[0] -= 1
            subprocess.run(["rm", "-rf", str(root)], check=True)
        return real(*args, **kwargs)

    root.mkdir(mode=0o700)
    monkeypatch.setattr(os, victim, wipe_then)
    publish_file(root / "v1" / "note", b"body", root)
    assert (root / "v1" / "note").read_bytes() == b"body"


@pytest.mark.parametrize("same", [True, False], ids=["equal records", "different records"])
def test_sixteen_processes_publish_for_one_key(root: Path, same: bool) -> None:
    """First publish wins and the others discard; after that all choose the same kernel, with no lock in play."""

    def work(seed: int) -> object:
        store = open_at(root)
        status = store.publish(make_record(seed, ratio_low=1.0 + seed / 100), make_data(seed)).status
        return [status, store.counters.damaged]

    answers = run_together([lambda seed=seed: work(0 if same else seed) for seed in range(16)])
    statuses = sorted(status for status, _ in answers)
    assert statuses == ["already_there"] * 15 + ["published"] if same else ["published"] * 16
    assert all(damaged == 0 for _, damaged in answers)

    def choose() -> object:
        records = open_at(root).records(make_key().digest)
        return max((s.record.verdict.timings[0].ratio_low, s.record_id) for s in records)[1]

    assert len(set(run_together([choose] * 4))) == 1
    assert len(list(open_at(root).records())) == (1 if same else 16)
    assert not any(is_temporary_file(path.name) for path in root.rglob("*"))


def test_halves_of_two_writers_never_mix(root: Path) -> None:
    """Two writers put different blobs under one key again and again; a reader sees whole records only."""

    def write(seed: int) -> object:
        for round_ in range(15):
            open_at(root).publish(make_record(seed + 10 * round_), make_data(seed))
        return None

    def read() -> object:
        store, seen = open_at(root), 0
        for _ in range(40):
            for stored in store.records():
                assert stored.data in (make_data(1), make_data(2))
                seen += 1
        return store.counters.damaged

    answers = run_together([lambda: write(1), lambda: write(2), read])
    assert answers[2] == 0
    assert len(list(open_at(root).records())) == 30


def test_publish_on_this_machines_real_disk(tmp_path: Path) -> None:
    assert open_at(tmp_path / "store").publish(make_record(), make_data()).status == "published"
    assert len(list(open_at(tmp_path / "store").records())) == 1


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENOTDIR, errno.ELOOP], ids=lambda code: errno.errorcode[code])
def test_a_disk_that_denies_even_the_top_folder_ends_in_memory(root: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Every look at a folder says that it is not there: looking for one that is must end at the top."""

    def deny(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    for name in ("stat", "lstat", "mkdir"):
        monkeypatch.setattr(os, name, deny)
    store = open_at(root)
    assert store.publish(make_record(), make_data()).status == "memory_only"
    assert len(list(store.records(make_key().digest))) == 1
