"""`autokern record`: any Python command line, run as it would run alone, and its workload on disk whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torch_autokern.cli import record
from torch_autokern.cli.record import PythonProgram, parse_command
from torch_autokern.errors import InvalidInputError
from torch_autokern.report.cases import Case
from torch_autokern.runtime.target import local_target
from torch_autokern.search.templates import propose
from torch_autokern.store.workload import SCHEMA, Workload, WorkloadEntry, load_workload

PROGRAM = """
import sys, torch
print("argv", sys.argv[1:], __name__)
for _ in range(3):
    torch.softmax(torch.randn(4, 8), -1)
"""


def autokern(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch_autokern.cli.main", *arguments], capture_output=True, text=True, cwd=cwd, timeout=120
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_command_lines_of_python_are_taken_apart(script: Path) -> None:
    own = sys.executable
    name = str(script)
    assert parse_command(["python", name, "-x"]) == PythonProgram(own, (), "script", name, ("-x",))
    assert parse_command([name, "a"]) == PythonProgram(own, (), "script", name, ("a",))
    assert parse_command(["python3", "-u", "-m", "pkg.mod", "-m"]) == PythonProgram(own, ("-u",), "module", "pkg.mod", ("-m",))
    assert parse_command(["python", "-X", "dev", "-c", "pass"]) == PythonProgram(own, ("-X", "dev"), "code", "pass", ())
    assert parse_command([own, name]).interpreter == own


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["ls", "-l"], "not Python"),
        (["python"], "nothing to run"),
        (["python", "-m"], "needs a value"),
        (["python", "no_such_file.py"], "no script"),
        (["no_such_file.py"], "no script"),
        (["/no/such/python3", "-c", "pass"], "not a program"),
    ],
)
def test_what_is_not_a_python_program_is_one_clear_error(command: list[str], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        parse_command(command)


def test_a_script_is_recorded_with_its_arguments(script: Path, tmp_path: Path) -> None:
    result = autokern("record", "-o", "w.json", "--", "python", script.name, "--flag", "1", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "argv ['--flag', '1'] __main__\n"
    workload = load_workload(tmp_path / "w.json")
    assert [(entry.key.op, entry.calls) for entry in workload.entries] == [("_softmax", 3)]
    assert workload.entries[0].stock_time_us > 0
    assert "autokern warm" in result.stderr


def test_a_failing_script_keeps_its_exit_code_traceback_and_workload(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(PROGRAM + "raise ValueError('the reason')\n")
    result = autokern("record", "--", "python", "fails.py", cwd=tmp_path)
    assert result.returncode == 1
    assert "ValueError: the reason" in result.stderr
    assert "runpy" not in result.stderr
    assert load_workload(tmp_path / "workload.json").entries


def test_an_exit_code_is_passed_on(tmp_path: Path) -> None:
    code = "import torch; torch.softmax(torch.ones(2, 2), 0); raise SystemExit(7)"
    result = autokern("record", "--", "python", "-c", code, cwd=tmp_path)
    assert result.returncode == 7
    assert len(load_workload(tmp_path / "workload.json").entries) == 1


def test_a_module_is_recorded(script: Path, tmp_path: Path) -> None:
    result = autokern("record", "-o", "m.json", "--", "python", "-m", "program", "x", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "argv ['x'] __main__" in result.stdout


def test_json_is_one_value_on_stdout_and_the_program_prints_to_stderr(script: Path, tmp_path: Path) -> None:
    result = autokern("record", "--json", "-o", "w.json", "--", str(script), cwd=tmp_path)
    summary = json.loads(result.stdout)
    assert summary["calls"] == 3 and summary["keys"] == 1 and summary["exit_code"] == 0
    assert "argv []" in result.stderr
    (group,) = summary["groups"]
    assert group["call"].startswith("_softmax float32[4, 8]") and group["keys"] == 1 and group["lengths"] == []
    assert group["candidates"] == summary["candidates"] > 0


def test_keys_alike_but_for_a_length_are_shown_as_one_with_the_cost_of_warming(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [Case("softmax", (rows, 8)).key() for rows in (4, 5, 6)]
    entries = tuple(WorkloadEntry(key, 10, 100.0) for key in keys)
    workload = Workload(SCHEMA, "2.13.0", "cpu", 1, 1000.0, entries)
    (group,) = record.grouped(workload)
    assert (group.keys, group.lengths, group.calls) == (3, (4, 5, 6), 30) and group.share == pytest.approx(0.3)
    target = local_target()
    assert group.candidates == sum(len(propose(key, target)) for key in keys) > 3
    record._say_summary(workload, Path("w.json"))
    words = capsys.readouterr().err
    assert "3 keys alike but for a length of 4 to 6 (3 lengths): 30 calls" in words
    assert f"up to {group.candidates} candidates" in words and "autokern warm w.json" in words


def test_an_unwritable_output_is_found_before_the_program_runs(script: Path, tmp_path: Path) -> None:
    result = autokern("record", "-o", "no/such/folder/w.json", "--", str(script), cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("autokern: cannot write") and result.stderr.count("\n") == 1


def test_a_program_that_is_killed_loses_no_earlier_workload(script: Path, tmp_path: Path) -> None:
    autokern("record", "-o", "w.json", "--", str(script), cwd=tmp_path)
    before = (tmp_path / "w.json").read_bytes()
    code = "import os; os.kill(os.getpid(), 9)"
    result = autokern("record", "-o", "w.json", "--", "python", "-c", code, cwd=tmp_path)
    assert result.returncode == 128 + signal.SIGKILL
    assert (tmp_path / "w.json").read_bytes() == before


def test_ctrl_c_still_writes_the_workload(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(PROGRAM + "open('ready', 'w').close()\nimport time\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "torch_autokern.cli.main", "record", "--", "python", "waits.py"]
    child = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(child.pid, signal.SIGINT)  # as a terminal does: the whole group
        _, words = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130, words
    assert load_workload(tmp_path / "workload.json").entries
