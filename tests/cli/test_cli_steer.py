"""`autokern steer` at the shell: what is left for a run, what is refused, and what is shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "search"))
from search_samples import KEY_SECRET, ask_for, forgetful_story, kernel, search, start

from torch_autokern.cli.main import app
from torch_autokern.errors import AutokernError
from torch_autokern.search.nodes import Intervention
from torch_autokern.search.run import open_run
from torch_autokern.search.scripted_server import Script, ScriptedServer


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run that has not begun."""
    server = ScriptedServer(Script(forgetful_story(), KEY_SECRET))
    start(tmp_path / "run", ask_for(server.url))
    yield tmp_path / "run"
    server.close()


def command(*words: str) -> Any:
    result = CliRunner().invoke(app, list(words))
    if isinstance(result.exception, AutokernError):
        raise result.exception
    return result


def test_every_word_reaches_the_journal_with_author_and_time(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "kernel.json").write_text(json.dumps(kernel("ratio=2.5", 70)))
    by_hand = tmp_path / "mine"
    by_hand.mkdir()
    (by_hand / "kernel.cpp").write_text("// ratio=2.6\n" + kernel("x", 71)["source"])
    (by_hand / "plan.json").write_text(json.dumps(kernel("x")["plan"]))
    said = [
        ("hint", "rows are short"), ("idea", "turn it round"), ("kernel", str(tmp_path / "kernel.json")),
        ("kernel", str(by_hand)), ("ban", "ratio=1\\.2"), ("answer", "it is the stores"), ("goal", "ratio=2"),
    ]  # fmt: skip
    for word, text in said:
        assert command("steer", str(folder), word, text, "--author", "ada").exit_code == 0
    left = json.loads(command("steer", str(folder), "budget", "--rounds", "2", "--candidates", "40", "--json").stdout)
    assert left["action"] == "limits" and json.loads(left["text"]) == {"rounds": 2, "limits": {
        "seconds": None, "tokens": None, "money": None, "candidates": 40}}  # fmt: skip
    assert "not heard yet: hint rows are short (by ada)" in command("steer", str(folder)).stdout
    search(folder, ask_for())
    nodes = open_run(folder).every(Intervention)
    assert sorted(node.action for node in nodes) == sorted([*(word for word, _ in said if word != "goal"), "limits", "limits"])
    assert {node.author for node in nodes} >= {"ada"} and all(node.time.startswith("20") for node in nodes)
    shown = json.loads(command("steer", str(folder), "--json").stdout)
    assert shown["waiting"] == [] and not shown["paused"]
    brought = {one["action"]: one for one in shown["said"]}
    assert brought["kernel"]["proved"] == 1 and brought["ban"]["dropped"] == 1
    assert "1 candidates kept out" in command("steer", str(folder)).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("hint",), "needs its words"), (("ban", "("), "regular expression"), (("goal", "speed=2"), "--goal"),
        (("kernel", "nowhere.json"), "cannot be read"), (("budget",), "takes options"),
        (("budget", "--rounds", "0"), "--rounds"),
        (("budget", "--stuck", "cry"), "budget"), (("hint", "x", "--rounds", "3"), "only with the word budget"),
        (("hint", "x", "--key", "7"), "keys 0 to 0"), (("idea", " "), "needs words"),
    ],
)  # fmt: skip
def test_bad_words_are_one_clear_error_and_nothing_is_left(folder: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(AutokernError, match=message):
        command("steer", str(folder), *words)
    assert list((folder / "steer").glob("*.json")) == []


def test_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(AutokernError, match="holds no run"):
        command("steer", str(tmp_path), "pause")
