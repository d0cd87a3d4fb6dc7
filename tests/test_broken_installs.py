"""Broken installs, each a named case: the import works, stock runs bit for bit, and `autokern doctor` says why."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torture.installs import CASES

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[1]


@functools.cache
def _outcomes() -> dict[str, dict[str, object]]:
    """All cases, from one process that imports torch once and forks for each."""
    command = [sys.executable, "-m", "tests.torture.installs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return {str(outcome["name"]): outcome for outcome in map(json.loads, done.stdout.splitlines())}


def test_there_are_at_least_forty() -> None:
    assert len(CASES) - 1 >= 40


@pytest.mark.parametrize("name", CASES)
def test_import_works_stock_runs_and_doctor_says_why(name: str) -> None:
    case, outcome = CASES[name], _outcomes()[name]
    if "skipped" in outcome:
        pytest.skip(str(outcome["skipped"]))
    assert "raised" not in outcome, outcome["raised"]
    assert outcome["stock_equal"] is True
    doctor = str(outcome["doctor"])
    assert "Traceback" not in doctor
    assert case.stays_silent or doctor.splitlines()
    if case.says:
        lines = [line for line in doctor.splitlines() if re.search(case.says, line)]
        assert lines, f"no line of doctor says {case.says!r}:\n{doctor}"
