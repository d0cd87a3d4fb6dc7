"""One line for a mistake, exit codes, and every command behind one entry point."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torch_autokern.cli import main, shell
from torch_autokern.errors import InvalidInputError, StoreError

COMMANDS = ("record", "warm", "explain", "stats", "cache", "doctor", "demo")


def exit_code(*arguments: str) -> int:
    """Run the command line in this process, as its entry point does."""
    with pytest.raises(SystemExit) as stop:
        shell.run(lambda: main.app(list(arguments)))
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--help") == 0
    words = capsys.readouterr().out
    assert all(command in words for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_json(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*((command, "list") if command == "cache" else (command,)), "--help") == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [("nonsense",), ("explain",), ("explain", "missing.json"), ("warm", "missing.json"), ("warm", "x", "--budget", "soon"),
     ("demo", "--json", "/no/such/folder/x.json"), ("record", "--", "ls"), ("cache", "show", "zzz")],
)  # fmt: skip
def test_bad_input_is_exit_code_2_with_words_on_stderr(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.strip()
    assert captured.out == ""


def test_the_installed_command_reports_a_mistake_without_traceback() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "torch_autokern.cli.main", "explain", "missing.json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("autokern: cannot read workload missing.json") and result.stderr.count("\n") == 1


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


def test_a_writable_file_is_probed_without_leaving_anything(tmp_path: Path) -> None:
    assert shell.writable_file(tmp_path / "new.json") == tmp_path / "new.json"
    assert not list(tmp_path.iterdir())
    with pytest.raises(InvalidInputError, match="is a folder"):
        shell.writable_file(tmp_path)
    with pytest.raises(InvalidInputError, match="cannot write"):
        shell.writable_file(tmp_path / "no" / "file.json")
