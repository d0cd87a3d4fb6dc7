"""One line for a mistake, exit codes, and a command line that starts quickly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torch_autokern.cli import shell
from torch_autokern.errors import InvalidInputError, StoreError

COMMANDS = ("record", "warm", "explain", "stats", "cache", "doctor", "demo")


def autokern(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch_autokern.cli.main", *arguments], capture_output=True, text=True, timeout=120
    )


def test_help_lists_every_command() -> None:
    result = autokern("--help")
    assert result.returncode == 0
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json(command: str) -> None:
    arguments = (command, "list", "--help") if command == "cache" else (command, "--help")
    assert "--json" in autokern(*arguments).stdout


def test_a_mistake_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise StoreError("no folder\ncan be written; set AUTOKERN_STORE")

    with pytest.raises(SystemExit) as stop:
        shell.run(fails)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "autokern: no folder can be written; set AUTOKERN_STORE\n"


def test_ctrl_c_is_exit_code_130() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stop:
        shell.run(interrupted)
    assert stop.value.code == 130


def test_a_fault_of_ours_is_not_hidden() -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shell.run(broken)


@pytest.mark.parametrize("arguments", [("nonsense",), ("explain",), ("explain", "missing.json"), ("warm", "missing.json")])
def test_bad_input_is_exit_code_2_without_traceback(arguments: tuple[str, ...]) -> None:
    result = autokern(*arguments)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.strip()


def test_a_writable_file_is_probed_without_leaving_anything(tmp_path: Path) -> None:
    assert shell.writable_file(tmp_path / "new.json") == tmp_path / "new.json"
    assert not list(tmp_path.iterdir())
    with pytest.raises(InvalidInputError, match="is a folder"):
        shell.writable_file(tmp_path)
    with pytest.raises(InvalidInputError, match="cannot write"):
        shell.writable_file(tmp_path / "no" / "file.json")
