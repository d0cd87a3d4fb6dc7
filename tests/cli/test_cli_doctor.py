"""`autokern doctor`: every line says what is so, and what to run about it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torch_autokern.cli import doctor
from torch_autokern.runtime import extension


def by_name(findings: list[doctor.Finding]) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in findings}


def test_a_healthy_machine_has_no_failing_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOKERN_STORE", str(tmp_path / "store"))
    found = by_name(doctor.examine())
    assert {
        "system",
        "torch",
        "extension",
        "kill switch",
        "overrides",
        "cpu",
        "gpu",
        "compiler",
        "box",
        "store",
        "pool",
    } <= set(found)
    assert not [finding for finding in found.values() if finding.status == "fail"]
    assert str(tmp_path / "store") in found["store"].detail
    assert "AUTOKERN_STORE" in found["store"].detail


def test_a_missing_extension_is_a_failing_line_with_the_rebuild_command(monkeypatch: pytest.MonkeyPatch) -> None:
    state = extension.ExtensionState(None, "the C++ extension was built for torch 2.12.0, this is torch 2.13.0; rebuild it: x")
    monkeypatch.setattr(extension, "extension_state", lambda: state)
    line = by_name(doctor.examine())["extension"]
    assert line.status == "fail"
    assert "2.12.0" in line.detail and "stock" in line.detail
    assert "--no-build-isolation" in line.fix and sys.executable in line.fix


def test_the_kill_switch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOKERN_DISABLE", "1")
    line = by_name(doctor.examine())["kill switch"]
    assert (line.status, line.fix) == ("warn", "unset AUTOKERN_DISABLE")


def test_a_machine_without_compiler_still_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    line = by_name(doctor.examine())["compiler"]
    assert line.status == "warn"
    assert "g++" in line.fix


def test_a_refused_store_folder_is_said_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    (tmp_path / "link").symlink_to(target)
    monkeypatch.setenv("AUTOKERN_STORE", str(tmp_path / "link"))
    lines = [finding for finding in doctor.examine() if finding.name == "store"]
    assert lines[0].status == "warn"
    assert "symbolic link" in lines[0].detail


def test_a_bad_pool_setting_is_a_line_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOKERN_POOL_MB", "lots")
    found = by_name(doctor.examine())
    assert found["pool"].status == "fail"
    assert "lots" in found["pool"].detail


def test_doctor_leaves_the_router_as_it_was() -> None:
    native = extension.extension()
    before = [overload.installed for overload in native.installed_overloads()]
    doctor.examine()
    assert [overload.installed for overload in native.installed_overloads()] == before


def test_json_lists_the_same_findings(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "torch_autokern.cli.main", "doctor", "--json"], capture_output=True, text=True, timeout=120
    )
    value = json.loads(result.stdout)
    assert value["healthy"] == (result.returncode == 0)
    assert all(finding["status"] in ("ok", "warn", "fail") for finding in value["findings"])
