"""The copy ceiling of a device is kept on disk, only ever gets tighter, and costs nothing where it cannot be kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.judge.samples import softmax_key
from tests.judge.stand_ins import task_of
from torch_autokern.judge.ceilings import least_copy_us
from torch_autokern.judge.measure import TimingReport
from torch_autokern.judge.verdict import _floored
from torch_autokern.store.key import Target

HERE = Target("cpu", "a processor", "x86-64-v3", 2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOKERN_STORE", str(tmp_path / "store"))
    return tmp_path / "store"


def test_the_least_time_is_kept_by_device_and_size(folder: Path) -> None:
    assert least_copy_us(HERE, 1 << 20, 50.0) == 50.0
    assert least_copy_us(HERE, 1 << 20, 80.0) == 50.0  # a busy moment
    assert least_copy_us(HERE, 1 << 20, 40.0) == 40.0
    assert least_copy_us(HERE, 1 << 20, 45.0) == 40.0
    assert least_copy_us(HERE, 1 << 21, 90.0) == 90.0
    assert least_copy_us(Target("cpu", "another one", "x86-64-v3", 2), 1 << 20, 70.0) == 70.0
    assert [path.name for path in folder.iterdir()] == ["ceilings.json"]


def test_calls_too_small_to_say_keep_nothing(folder: Path) -> None:
    assert least_copy_us(HERE, 100, 0.0) == 0.0
    assert not (folder / "ceilings.json").exists()


@pytest.mark.parametrize("text", ["", "[", "[]", '{"version": 2}', '{"copies": {"x": {"1": "fast"}}}', "[" * 100000])
def test_a_damaged_file_is_measured_anew(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "ceilings.json").write_text(text)
    assert least_copy_us(HERE, 1 << 20, 50.0) == 50.0
    assert json.loads((folder / "ceilings.json").read_text())["copies"]


def test_a_kept_time_of_nothing_or_less_does_not_count(folder: Path) -> None:
    least_copy_us(HERE, 1 << 20, 50.0)
    file = folder / "ceilings.json"
    file.write_text(file.read_text().replace("50.0", "-1.0"))
    assert least_copy_us(HERE, 1 << 20, 60.0) == 60.0


def test_without_a_folder_the_time_seen_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_autokern.store.folders._candidates", list)
    assert least_copy_us(HERE, 1 << 20, 50.0) == 50.0


def test_a_verdict_uses_the_kept_ceiling(folder: Path) -> None:
    task = task_of(softmax_key(64, 4096))
    report = TimingReport((10.0,) * 8, (5.0,) * 8, 1, 4, 100.0, 8)
    assert _floored(report, task, HERE).copy_us == 100.0
    assert _floored(TimingReport((10.0,) * 8, (5.0,) * 8, 1, 4, 300.0, 8), task, HERE).copy_us == 100.0
