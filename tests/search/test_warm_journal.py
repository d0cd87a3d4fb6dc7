"""The journal: what is written is read back, and damage costs one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torch_autokern.search.journal import KeyJournal, Trial

DIGEST = "ab" * 32
FIRST = Trial("ctx", "one", "screened", ratio=1.5, ratio_low=1.4, ratio_high=1.6)
SECOND = Trial("ctx", "two", "refused", "wrong_value", "seen 3, limit 1", judged=True)


def path_of(root: Path) -> Path:
    return root / "v1" / "runs" / f"{DIGEST[:32]}.jsonl"


def test_trials_come_back_by_candidate_and_context(tmp_path: Path) -> None:
    journal = KeyJournal(tmp_path, DIGEST)
    for trial in (FIRST, SECOND, Trial("other", "one", "refused", "hung")):
        journal.append(trial)
    assert KeyJournal(tmp_path, DIGEST).read("ctx") == {"one": FIRST, "two": SECOND}


def test_later_trial_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    journal = KeyJournal(tmp_path, DIGEST)
    journal.append(FIRST)
    journal.append(Trial("ctx", "one", "accepted", ratio=1.5, judged=True))
    assert journal.read("ctx")["one"].stage == "accepted"


def test_every_torn_tail_costs_only_its_own_line(tmp_path: Path) -> None:
    journal = KeyJournal(tmp_path, DIGEST)
    journal.append(FIRST)
    whole = path_of(tmp_path).read_bytes()
    journal.append(SECOND)
    both = path_of(tmp_path).read_bytes()
    for length in range(len(whole), len(both) - 1):
        path_of(tmp_path).write_bytes(both[:length])
        assert set(journal.read("ctx")) == {"one"}
        journal.append(SECOND)
        assert journal.read("ctx") == {"one": FIRST, "two": SECOND}, f"torn after {length} bytes"


def test_flipped_byte_costs_its_line(tmp_path: Path) -> None:
    journal = KeyJournal(tmp_path, DIGEST)
    journal.append(FIRST)
    journal.append(SECOND)
    raw = bytearray(path_of(tmp_path).read_bytes())
    raw[40] ^= 1
    path_of(tmp_path).write_bytes(bytes(raw))
    assert journal.read("ctx") == {"two": SECOND}


def test_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    for journal in (KeyJournal(blocked, DIGEST), KeyJournal(None, DIGEST)):
        journal.append(FIRST)
        assert journal.read("ctx") == {"one": FIRST}


def test_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    path_of(tmp_path).parent.mkdir(parents=True)
    os.symlink(target, path_of(tmp_path))
    KeyJournal(tmp_path, DIGEST).append(FIRST)
    assert target.read_text() == "precious"


@pytest.mark.parametrize("line", [b"", b" ", b"0" * 16 + b" {}", b"\xff\xfe\n", b"\0" * 100])
def test_foreign_bytes_are_skipped(tmp_path: Path, line: bytes) -> None:
    journal = KeyJournal(tmp_path, DIGEST)
    journal.append(FIRST)
    path_of(tmp_path).write_bytes(line + b"\n" + path_of(tmp_path).read_bytes())
    assert journal.read("ctx") == {"one": FIRST}
