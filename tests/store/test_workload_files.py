"""Workload files: whole or absent, and one clear error for anything else."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_samples import make_key

import torch_autokern.store.workload as workload
from torch_autokern.errors import InvalidInputError
from torch_autokern.store.workload import SCHEMA, Workload, WorkloadEntry, load_workload

WORKLOAD = Workload(SCHEMA, "2.13.0", "a CPU", 2, 100.0, (WorkloadEntry(make_key(), 3, 25.0),))


def test_a_saved_workload_loads_equal(tmp_path: Path) -> None:
    WORKLOAD.save(tmp_path / "w.json")
    assert load_workload(tmp_path / "w.json") == WORKLOAD
    assert [path.name for path in tmp_path.iterdir()] == ["w.json"]
    assert WORKLOAD.share(WORKLOAD.entries[0]) == 0.25


def test_every_truncation_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    WORKLOAD.save(path)
    raw = path.read_bytes()
    for length in range(0, len(raw) - 1, 5):
        path.write_bytes(raw[:length])
        with pytest.raises(InvalidInputError, match=r"w\.json"):
            load_workload(path)


@pytest.mark.parametrize("body", [b"\xff", b"[" * 200_000, b"{}", b"null"])
def test_other_content_is_an_error(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "w.json"
    path.write_bytes(body)
    with pytest.raises(InvalidInputError, match="is not a workload"):
        load_workload(path)


def test_another_schema_says_to_record_again(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    WORKLOAD.save(path)
    path.write_bytes(path.read_bytes().replace(SCHEMA.encode(), b"autokern.workload/9"))
    with pytest.raises(InvalidInputError, match="record it again"):
        load_workload(path)


def test_a_missing_file_says_how_to_record_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="autokern record"):
        load_workload(tmp_path / "none.json")


def test_a_path_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="cannot write workload"):
        WORKLOAD.save(tmp_path / "file" / "w.json")


def test_a_file_larger_than_any_workload_is_an_error_before_it_fills_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "MAX_WORKLOAD_BYTES", 1000)
    path = tmp_path / "w.json"
    path.write_bytes(b" " * 1001)
    with pytest.raises(InvalidInputError, match="more than 1000 bytes"):
        load_workload(path)
