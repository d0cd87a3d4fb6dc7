"""The gate itself: it stops the child at its real system calls, and what it reports is what the child gets."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.torture.gate import Call, Decision, FailAfter, Go, refusal, run_gated

pytestmark = pytest.mark.skipif(refusal() is not None, reason=str(refusal()))


def _make_three(folder: Path) -> str:
    for number in range(3):
        os.mkdir(folder / str(number))
    return "done"


def test_every_call_is_seen_and_made(tmp_path: Path) -> None:
    ended = run_gated(lambda: _make_three(tmp_path), lambda _call: Go.ON)
    assert (ended.calls, ended.value, ended.raised) == (["mkdir"] * 3, "done", "")
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_kill_before_a_call_leaves_exactly_the_calls_before_it(tmp_path: Path, number: int) -> None:
    ended = run_gated(lambda: _make_three(tmp_path), lambda call: Go.KILL if call.number == number else Go.ON)
    assert ended.was_killed and ended.value == ""
    assert len(list(tmp_path.iterdir())) == number


def _write_ten(path: Path) -> str:
    with path.open("wb", buffering=0) as file:
        return str(file.write(b"0123456789"))


def test_half_of_a_write_then_a_kill(tmp_path: Path) -> None:
    ended = run_gated(lambda: _write_ten(tmp_path / "f"), lambda call: Go.HALF_KILL if call.name == "write" else Go.ON)
    assert ended.was_killed
    assert (tmp_path / "f").read_bytes() == b"01234"


def test_a_short_write_is_made_and_reported(tmp_path: Path) -> None:
    ended = run_gated(lambda: _write_ten(tmp_path / "f"), lambda call: Go.SHORT if call.name == "write" else Go.ON)
    assert ended.value == "5"
    assert (tmp_path / "f").read_bytes() == b"01234"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.ESTALE])
def test_an_error_is_what_the_child_gets(tmp_path: Path, code: int) -> None:
    ended = run_gated(lambda: _make_three(tmp_path), lambda call: code if call.number == 1 else Go.ON)
    assert os.strerror(code) in ended.raised
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_an_error_after_the_call_was_made(tmp_path: Path) -> None:
    ended = run_gated(lambda: _make_three(tmp_path), lambda call: FailAfter(errno.EIO) if call.number == 1 else Go.ON)
    assert "Input/output error" in ended.raised
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_a_lie_reports_a_success_that_was_none(tmp_path: Path) -> None:
    ended = run_gated(lambda: _make_three(tmp_path), lambda call: Go.LIE)
    assert ended.value == "done"
    assert list(tmp_path.iterdir()) == []


def test_names_and_bytes_can_be_read_from_the_child(tmp_path: Path) -> None:
    seen: list[object] = []

    def decide(call: Call) -> Decision:
        if call.name == "openat":
            seen.append(call.text(1))
        elif call.name == "write":
            seen.extend((call.buffer(), call.link_of(call.arguments[0])))
        return Go.ON

    run_gated(lambda: _write_ten(tmp_path / "f"), decide)
    assert seen == [os.fsencode(tmp_path / "f"), b"0123456789", str(tmp_path / "f")]


def test_an_interrupted_call_is_asked_again(tmp_path: Path) -> None:
    ended = run_gated(lambda: os.open(tmp_path, os.O_RDONLY), lambda call: errno.EINTR if call.number < 3 else Go.ON)
    assert ended.calls == ["openat"] * 4
