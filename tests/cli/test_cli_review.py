"""`autokern review` at the shell: what a person sees, and what a word does to what is served."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "search"))
from search_samples import KEY, KEY_SECRET, PretendEngine, ask_for, forgetful_story, search, store_at
from warm_samples import TARGET

from torch_autokern.cli import shell as shells
from torch_autokern.cli.main import app
from torch_autokern.errors import AutokernError
from torch_autokern.runtime.table import refusal
from torch_autokern.runtime.target import stock_build
from torch_autokern.search.nodes import Offered
from torch_autokern.search.run import open_run
from torch_autokern.search.scripted_server import Script, ScriptedServer
from torch_autokern.store.record import StoredRecord


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A store with the three winners of a scripted run (1.4x, 1.6x and 2.1x), and a shell."""
    server = ScriptedServer(Script(forgetful_story(), KEY_SECRET))
    search(tmp_path / "run", ask_for(server.url))
    server.close()
    monkeypatch.setenv("AUTOKERN_STORE", str(tmp_path / "store"))

    def run(*words: str, typed: str = "") -> Any:
        result = CliRunner().invoke(app, ["review", *words], input=typed)
        if isinstance(result.exception, AutokernError):
            raise result.exception
        return result

    return run


def records(tmp_path: Path) -> list[StoredRecord]:
    """By falling speed."""
    found = store_at(tmp_path / "store").records(KEY.digest)
    return sorted(found, key=lambda stored: -stored.record.verdict.timings[0].ratio)


def served(tmp_path: Path) -> list[float]:
    """The speeds of what may run, by falling speed."""
    store, found = store_at(tmp_path / "store"), []
    for stored in records(tmp_path):
        if refusal(stored.record, store.notes(KEY.digest, stored.record_id), TARGET, stock_build()) is None:
            found.append(stored.record.verdict.timings[0].ratio)
    return found


def test_pending_shows_source_idea_evidence_risks_and_the_difference_to_the_parent(command: Any, tmp_path: Path) -> None:
    shown = json.loads(command("--run", str(tmp_path / "run"), "--json").stdout)
    assert not shown["approval_demanded"] and len(shown["pending"]) == 3
    best = shown["pending"][0]
    assert best["timings"][0]["ratio"] == 2.1 and "ratio=2.1" in best["source"] and best["author"] == "scripted"
    assert best["idea"] == "kernel: ratio=2.1" and "1 input families" in best["evidence"][0]
    assert any("above 2x" in words for words in best["risks"])
    assert '-const char* words_1 = "ratio=1.6";' in best["difference"].splitlines()
    assert '+const char* words_2 = "ratio=2.1";' in best["difference"].splitlines()


def test_demanded_approval_is_a_miss_reason_until_a_person_approves(command: Any, tmp_path: Path) -> None:
    assert served(tmp_path) == [2.1, 1.6, 1.4]
    assert "only approved kernels" in command("--require-approval", "--author", "ada").stdout
    assert served(tmp_path) == []
    store, best = store_at(tmp_path / "store"), records(tmp_path)[0]
    why = refusal(best.record, store.notes(KEY.digest, best.record_id), TARGET, stock_build())
    assert why is not None and why.startswith("approval wanted")
    command(best.record_id[:10], "--approve", "--reason", "read every line", "--author", "ada")
    assert served(tmp_path) == [2.1]
    note = store_at(tmp_path / "store").notes(KEY.digest, best.record_id).approval
    assert note is not None and (note.by, note.reason) == ("ada", "read every line")
    assert json.loads(command("--json").stdout)["pending"] == [], "slower ones than what is approved need no word"
    assert len(json.loads(command("--all", "--json").stdout)["pending"]) == 2
    command("--no-require-approval")
    assert served(tmp_path) == [2.1, 1.6, 1.4]


def test_one_by_one_with_a_word_and_a_reason_for_each(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shells, "is_interactive", lambda: True)
    result = command(typed="r\n\ntoo clever\nx\na\nclean\ns\n")
    assert result.exit_code == 0 and "3 kernels wait for a word" in result.stdout
    assert served(tmp_path) == [1.6, 1.4]
    notes = [store_at(tmp_path / "store").notes(KEY.digest, stored.record_id).approval for stored in records(tmp_path)]
    assert [(note.approved, note.banned, note.reason) if note else None for note in notes] == [
        (False, False, "too clever"), (True, False, "clean"), None,
    ]  # fmt: skip


def test_quitting_leaves_the_rest_pending(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shells, "is_interactive", lambda: True)
    command(typed="q\n")
    assert len(json.loads(command("--json").stdout)["pending"]) == 3


def test_without_a_terminal_it_lists_and_asks_nothing(command: Any) -> None:
    result = command()
    assert result.stdout.count("idea: ") == 3 and "[a]pprove" not in result.stdout


def test_banned_source_is_not_built_again(command: Any, tmp_path: Path) -> None:
    best = records(tmp_path)[0]
    assert best.record_id[:12] in command(best.record_id, "--ban", "--reason", "drifts after an hour").stdout
    assert served(tmp_path) == [1.6, 1.4]
    server, engine = ScriptedServer(Script(forgetful_story(), KEY_SECRET)), PretendEngine()
    report = search(tmp_path / "again", ask_for(server.url), engine=engine)
    server.close()
    assert report.search.keys[0].ratio == 1.6 and not any("ratio=2.1" in source for source in engine.asked("build"))
    (dropped,) = [node for node in open_run(tmp_path / "again").every(Offered) if node.dropped == "banned"]
    assert "review" in dropped.dropped_for


def test_refused_kernel_does_not_win_a_later_search(command: Any, tmp_path: Path) -> None:
    command(records(tmp_path)[0].record_id, "--refuse", "--reason", "cannot be read")
    server = ScriptedServer(Script(forgetful_story(), KEY_SECRET))
    report = search(tmp_path / "again", ask_for(server.url))
    server.close()
    assert report.search.keys[0].ratio == 1.6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--approve",), "needs a record and a reason"), (("ab", "--ban"), "needs a record and a reason"),
        (("ab", "--ban", "--approve", "--reason", "x"), "contradict"), (("zz", "--approve", "--reason", "x"), "0 records"),
        (("--run", "nowhere"), "holds no run"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(command: Any, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(AutokernError, match=message):
        command(*words)
