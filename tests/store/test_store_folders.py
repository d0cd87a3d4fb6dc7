"""Which folder is chosen, which are refused, and that nothing about a machine's accounts or disks breaks it."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest
from store_faults import NOBODY, count_calls, killed_at, run_in_child
from store_samples import make_data, make_key, make_record

from torch_autokern.errors import InvalidInputError, StoreError
from torch_autokern.store import folders
from torch_autokern.store.folders import choose_folder, folder_refusal, require_folder
from torch_autokern.store.store import KernelStore, Layer, open_store


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home and a temporary folder of their own, and no explicit setting."""
    for name in ("AUTOKERN_STORE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    yield tmp_path / "home"


def _no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: object) -> None:
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(pwd, "getpwnam", unknown)


def test_explicit_setting_comes_first(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOKERN_STORE", str(tmp_path / "mine" / "store"))
    choice = choose_folder()
    assert choice.path == tmp_path / "mine" / "store"
    assert choice.path.stat().st_mode & 0o777 == 0o700
    assert choice.tried == ()


def test_user_cache_folder_comes_next_and_the_probe_leaves_nothing(home: Path) -> None:
    choice = choose_folder()
    assert choice.path == Path(platformdirs.user_cache_dir("autokern", appauthor=False))
    assert home in choice.path.parents
    assert list(choice.path.iterdir()) == []


def test_no_home_and_unmapped_user_fall_to_a_private_temporary_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_account(monkeypatch)
    choice = choose_folder()
    assert choice.path == tmp_path / "tmp" / f"autokern-{os.geteuid()}"
    assert choice.path.stat().st_mode & 0o777 == 0o700
    assert "no home" in choice.tried[0][1]


def test_nothing_writable_is_memory_and_the_store_still_works(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_account(monkeypatch)
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    monkeypatch.setenv("AUTOKERN_STORE", str(tmp_path / "file" / "store"))
    choice = choose_folder()
    assert choice.path is None
    assert len(choice.tried) == 3
    store = open_store()
    outcome = store.publish(make_record(), make_data())
    assert outcome.status == "memory_only"
    assert "no folder can be written" in outcome.reason
    assert len(list(store.records())) == len(store.index().rows()) == 1
    with store.work_lock(make_key().digest) as held:
        assert not held


def test_no_usable_temporary_folder_at_all(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    _no_account(monkeypatch)
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    assert choose_folder().path is None


@pytest.mark.parametrize("text", ["~nobody-of-this-name/store", "\0", "a" * 5000, "/dev/null/store", "/proc/autokern"])
def test_impossible_settings_are_refused_with_a_reason_and_the_next_folder_is_taken(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.chdir(tmp_path / "tmp")
    monkeypatch.setattr("torch_autokern.config.store_folder", lambda: text)
    choice = choose_folder()
    if text.startswith("~"):  # a plain relative name when there is no such user
        assert choice.path is not None
        return
    assert choice.path is not None
    assert home in choice.path.parents
    assert choice.tried[0][1].startswith("AUTOKERN_STORE: ")
    with pytest.raises(InvalidInputError, match="AUTOKERN_STORE"):
        require_folder()


def test_symlinked_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    refusal = folder_refusal(tmp_path / "link")
    assert refusal is not None
    assert "symbolic link" in refusal


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_folder_that_others_may_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(mode)
    refusal = folder_refusal(tmp_path / "shared")
    assert refusal is not None
    assert "lets others write" in refusal
    monkeypatch.setenv("AUTOKERN_STORE", str(tmp_path / "shared"))
    with pytest.raises(InvalidInputError, match="lets others write"):
        require_folder()
    assert choose_folder().path != tmp_path / "shared"


def test_foreign_folder_is_refused(home: Path, ordinary_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = ordinary_folder if os.geteuid() == 0 else Path("/usr")
    if foreign.stat().st_uid == os.geteuid():
        pytest.skip("inside this user namespace no folder belongs to anybody else")
    monkeypatch.setenv("AUTOKERN_STORE", str(foreign))
    choice = choose_folder()
    assert choice.path != foreign
    assert "owner is uid" in choice.tried[0][1]


def test_a_planted_temporary_folder_of_another_user_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_account(monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tmp" / f"autokern-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    assert choose_folder().path is None
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_read_only_folder_is_read_and_the_next_one_written(ordinary_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, home = ordinary_folder / "shared", ordinary_folder / "home"
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("AUTOKERN_STORE", str(shared))
    monkeypatch.setenv("HOME", str(home))

    def work() -> object:
        home.mkdir()
        first = open_store().publish(make_record(0), make_data(0)).status
        for folder in [*shared.rglob("*"), shared]:
            folder.chmod(0o500 if folder.is_dir() else 0o400)
        store = open_store()
        second = store.publish(make_record(1), make_data(1)).status
        for folder in [shared, *shared.rglob("*")]:
            folder.chmod(0o700)
        return [first, second, len(list(store.records())), str(store.write_root), shared.stat().st_mode & 0o777]

    first, second, count, written, _ = run_in_child(work, uid=NOBODY)
    assert (first, second, count) == ("published", "published", 2)
    assert written.startswith(str(home))


def test_folder_made_read_only_later_stays_so(ordinary_folder: Path) -> None:
    root = ordinary_folder / "store"

    def work() -> object:
        root.mkdir(mode=0o700)
        root.chmod(0o500)
        status = KernelStore([Layer("cache", root, writable=True)]).publish(make_record(), make_data()).status
        return [status, root.stat().st_mode & 0o777]

    assert run_in_child(work, uid=NOBODY) == ["memory_only", 0o500]


@pytest.mark.parametrize("umask", [0o000, 0o027, 0o077, 0o277, 0o777])
def test_any_umask(ordinary_folder: Path, umask: int) -> None:
    root = ordinary_folder / "a" / "store"

    def publish() -> object:
        return KernelStore([Layer("cache", root, writable=True)]).publish(make_record(), make_data()).status

    def read() -> object:
        store = KernelStore([Layer("cache", root, writable=True)])
        with store.work_lock("lock") as held:
            return [len(list(store.records())), len(store.index().rows()), held, root.stat().st_mode & 0o777]

    assert run_in_child(publish, uid=NOBODY, umask=umask) == "published"
    assert run_in_child(publish, uid=NOBODY, umask=0o022) == "already_there"
    assert run_in_child(read, uid=NOBODY, umask=umask) == [1, 1, True, 0o700]


def test_killed_between_making_a_folder_and_its_mode_under_a_hostile_umask(ordinary_folder: Path) -> None:
    def publish(root: Path) -> object:
        return KernelStore([Layer("cache", root, writable=True)]).publish(make_record(), make_data()).status

    calls = run_in_child(lambda: count_calls(lambda: publish(ordinary_folder / "dry")), uid=NOBODY)
    places = [number for number, name in enumerate(calls) if name == "mkdir"]
    assert len(places) >= 6
    for number in places:
        root = ordinary_folder / str(number)
        assert run_in_child(killed_at(number, "after", lambda root=root: publish(root)), uid=NOBODY, umask=0o777) is None
        assert run_in_child(lambda root=root: publish(root), uid=NOBODY) == "published"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user that has no account")
def test_a_real_user_without_account_or_home(ordinary_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "AUTOKERN_STORE"):
        monkeypatch.delenv(name, raising=False)
    ordinary_folder.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(ordinary_folder))

    def work() -> object:
        store = open_store()
        return [str(store.write_root), store.publish(make_record(), make_data()).status]

    assert run_in_child(work, uid=54321) == [str(ordinary_folder / "autokern-54321"), "published"]


def test_no_folder_for_a_person_is_one_clear_error(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _no_account(monkeypatch)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(StoreError, match="set AUTOKERN_STORE"):
        require_folder()


def test_project_folder_is_a_layer_only_when_named_existing_and_safe(home: Path, tmp_path: Path) -> None:
    project = tmp_path / ".autokern"
    assert [layer.name for layer in open_store(project=project).layers] == ["cache"]
    project.mkdir(mode=0o700)
    assert [layer.name for layer in open_store().layers] == ["cache"]
    store = open_store(project=project)
    assert [layer.name for layer in store.layers] == ["project", "cache"]
    assert store.write_root == project
    project.chmod(0o777)
    with pytest.raises(StoreError, match="lets others write"):
        open_store(project=project)


def test_first_layer_goes_before_later_ones_and_each_record_is_given_once(tmp_path: Path) -> None:
    project, cache = (Layer(name, tmp_path / name, writable=True) for name in ("project", "cache"))
    KernelStore([cache]).publish(make_record(0), make_data(0))
    for layer in (project, cache):
        KernelStore([layer]).publish(make_record(1), make_data(1))
    store = KernelStore([project, cache])
    assert [stored.data for stored in store.records()] == [make_data(1), make_data(0)]
    assert len(store.index().lookup(make_key().digest)) == 2


def test_importing_the_store_touches_no_disk_and_no_torch(tmp_path: Path) -> None:
    package = Path(folders.__file__).parents[1]
    code = (
        "import sys, types\n"
        "sys.modules['torch'] = None\n"
        "package = sys.modules['torch_autokern'] = types.ModuleType('torch_autokern')\n"  # without its public names
        f"package.__path__ = [{str(package)!r}]\n"
        "import torch_autokern.store.store, torch_autokern.store.folders, torch_autokern.store.workload\n"
        "assert not {'rich', 'typer', 'openai'} & set(sys.modules)\n"
    )
    paths = os.pathsep.join(sys.path)
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
