"""`autokern explain` and `autokern stats`: what this machine would do with a workload, and what the store holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torch_autokern.report.cases import Case
from torch_autokern.runtime.target import local_target
from torch_autokern.store.workload import SCHEMA, Workload, WorkloadEntry


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    target = local_target()
    keys = [Case("softmax", (4, 8)).key(), Case("layer_norm", (4, 8)).key()]
    entries = tuple(WorkloadEntry(key, 10, 500.0) for key in keys)
    path = tmp_path / "w.json"
    Workload(SCHEMA, "2.13.0", target.name, target.threads, 2000.0, entries).save(path)
    return path


def autokern(*arguments: str, store: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch_autokern.cli.main", *arguments],
        capture_output=True, text=True, timeout=120, env={"PATH": "/usr/bin:/bin", "AUTOKERN_STORE": str(store)},
    )  # fmt: skip


def test_with_an_empty_store_every_key_says_that_there_is_no_record(workload: Path, tmp_path: Path) -> None:
    result = autokern("explain", str(workload), store=tmp_path / "store")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("stock: no record of this op in the store") == 2
    assert "0 of 2 keys are served" in result.stdout


def test_explain_json_has_one_object_a_key_with_its_share(workload: Path, tmp_path: Path) -> None:
    rows = json.loads(autokern("explain", str(workload), "--json", store=tmp_path / "store").stdout)
    assert [row["share"] for row in rows] == [0.25, 0.25]
    assert all(row["served_by"] is None and row["candidates"] == [] for row in rows)


def test_a_workload_of_another_schema_is_refused_in_one_line(workload: Path, tmp_path: Path) -> None:
    workload.write_text(workload.read_text().replace(SCHEMA, "autokern.workload/99"))
    result = autokern("explain", str(workload), store=tmp_path / "store")
    assert result.returncode == 2
    assert "autokern.workload/99" in result.stderr and result.stderr.count("\n") == 1


def test_an_unknown_key_names_both_things_that_it_could_have_been(tmp_path: Path) -> None:
    result = autokern("explain", "abc123", store=tmp_path / "store")
    assert result.returncode == 2
    assert "no file" in result.stderr and "no key" in result.stderr


def test_stats_of_an_empty_store_name_the_folder_and_the_next_step(tmp_path: Path) -> None:
    result = autokern("stats", store=tmp_path / "store")
    assert result.returncode == 0, result.stderr
    assert str(tmp_path / "store") in result.stdout
    assert "autokern record" in result.stdout
    value = json.loads(autokern("stats", "--json", store=tmp_path / "store").stdout)
    assert value["ops"] == {} and value["folder"] == str(tmp_path / "store")
