"""`autokern explain` and `autokern stats`: what this machine would do with a workload, and what the store holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torch_autokern.cli import explain, main, shell, stats
from torch_autokern.errors import InvalidInputError
from torch_autokern.report.cases import Case
from torch_autokern.runtime import session as session_module
from torch_autokern.runtime.session import Session
from torch_autokern.runtime.target import local_target
from torch_autokern.store.folders import FolderChoice
from torch_autokern.store.store import KernelStore, open_store
from torch_autokern.store.workload import SCHEMA, Workload, WorkloadEntry


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    target = local_target()
    keys = [Case("softmax", (4, 8)).key(), Case("layer_norm", (4, 8)).key()]
    entries = tuple(WorkloadEntry(key, 10, 500.0) for key in keys)
    path = tmp_path / "w.json"
    Workload(SCHEMA, "2.13.0", target.name, target.threads, 2000.0, entries).save(path)
    return path


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelStore:
    """A store of this test's own behind the command line."""
    opened = open_store(choice=FolderChoice(tmp_path / "store", "named by the test"))
    monkeypatch.setenv("AUTOKERN_STORE", str(tmp_path / "store"))
    own = Session(opened)
    monkeypatch.setattr(session_module, "session", lambda: own)
    return opened


def output_of(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        shell.run(lambda: main.app(list(arguments)))
    captured = capsys.readouterr()
    assert stop.value.code == 0, captured.err
    return captured.out


def test_with_an_empty_store_every_key_says_that_there_is_no_record(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = output_of("explain", str(workload), capsys=capsys)
    assert words.count("stock: no record of this op in the store") == 2
    assert "0 of 2 keys are served" in words


def test_explain_json_has_one_object_a_key_with_its_share(workload: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(output_of("explain", str(workload), "--json", capsys=capsys))
    assert [row["share"] for row in rows] == [0.25, 0.25]
    assert all(row["served_by"] is None and row["candidates"] == [] for row in rows)


def test_a_workload_of_another_schema_is_refused(workload: Path) -> None:
    workload.write_text(workload.read_text().replace(SCHEMA, "autokern.workload/99"))
    with pytest.raises(InvalidInputError, match=r"autokern\.workload/99"):
        explain.explain(str(workload))


def test_an_unknown_key_names_both_things_that_it_could_have_been() -> None:
    with pytest.raises(InvalidInputError, match="is no file, and no key"):
        explain.explain("abc123")


def test_stats_of_an_empty_store_name_the_folder_and_the_next_step(
    tmp_path: Path, store: KernelStore, capsys: pytest.CaptureFixture[str]
) -> None:
    words = output_of("stats", capsys=capsys)
    assert str(tmp_path / "store") in words
    assert "autokern record" in words
    assert stats.store_stats(store).ops == {}
