"""`autokern search` and `autokern replay` at the shell: options, JSON, exit codes, going on; and once for real."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "search"))
from search_samples import KEY_SECRET, PretendEngine, forgetful_story

from torch_autokern.cli.main import app
from torch_autokern.cli.search import _models, _proposers, read_goal
from torch_autokern.errors import AutokernError, InvalidInputError
from torch_autokern.search.manifest import Goal, ModelShare
from torch_autokern.search.run import open_run
from torch_autokern.search.scripted_server import Script, ScriptedServer

KEY = {"op": "_softmax", "tensors": [{"dtype": "float32", "sizes": [8, 38]}], "scalars": {"dim": 1, "half_to_float": False}}


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command in a folder that has key.json, under the pretend engine; gives exit code and stdout."""
    store = tmp_path / "store"
    store.mkdir(mode=0o700)
    monkeypatch.setenv("AUTOKERN_STORE", str(store))
    monkeypatch.setenv("OPENAI_API_KEY", KEY_SECRET)
    monkeypatch.setattr("torch_autokern.search.session.LocalEngine", lambda allow_weak_box: PretendEngine())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key.json").write_text(json.dumps(KEY))

    def command(*words: str) -> Any:
        result = CliRunner().invoke(app, list(words))
        if isinstance(result.exception, AutokernError):
            raise result.exception
        return result

    return command


def test_search_goes_on_and_replays(shell: Any, tmp_path: Path) -> None:
    server = ScriptedServer(Script(forgetful_story(), KEY_SECRET))
    llm = ("--proposers", "llm", "--model", "scripted", "--base-url", server.url, "--ideas", "2", "--kernels", "1")
    first = json.loads(shell("search", "key.json", "--out", "run", "--rounds", "1", "--threads", "1", *llm, "--json").stdout)
    assert first["stop"] == "rounds" and first["search"]["keys"][0]["ratio"] == 1.4
    more = json.loads(shell("search", "--out", "run", "--rounds", "3", "--json").stdout)
    server.close()
    assert more["search"]["keys"][0]["ratio"] == 2.1 and more["spent"]["candidates"] == 8
    shown = shell("replay", "run", "--no-records")
    assert shown.exit_code == 0 and "all derived again" in shown.stdout
    assert json.loads(shell("replay", "run", "--no-records", "--json").stdout)["holds"] is True
    text = open_run(tmp_path / "run").manifest
    assert KEY_SECRET not in repr(text) and text.ask.base_url == server.url


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("search",), "no run to go on with"), (("search", "nothing.json"), "no file"),
        (("search", "key.json", "--goal", "speed=2"), "--goal"), (("search", "key.json", "--rounds", "0"), "--rounds"),
        (("search", "key.json", "--proposers", "llm"), "--model"), (("search", "key.json", "--proposers", "magic"), "magic"),
        (("search", "key.json", "--base-url", "host"), "--base-url"), (("search", "key.json", "--budget", "-1"), "--budget"),
        (("search", "key.json", "--threads", "9999"), "--threads"), (("search", "key.json", "--tokens", "0"), "--tokens"),
        (("search", "key.json", "--money", "1", "--model", "m"), "--prices"), (("replay", "nowhere"), "holds no run"),
        (("search", "key.json", "--class", "nearly"), "nearly"),
    ],
)  # fmt: skip
def test_bad_input_is_one_clear_error(shell: Any, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(AutokernError, match=message):
        shell(*words, *(() if words[0] == "replay" else ("--out", "run")))


def test_run_about_another_key_is_not_gone_on_with(shell: Any, tmp_path: Path) -> None:
    shell("search", "key.json", "--out", "run", "--threads", "1", "--proposers", "inbox", "--rounds", "1")
    (tmp_path / "other.json").write_text(json.dumps({**KEY, "tensors": [{"dtype": "float32", "sizes": [9, 38]}]}))
    with pytest.raises(InvalidInputError, match="other keys"):
        shell("search", "other.json", "--out", "run")


def test_words_of_options_are_read_as_people_write_them() -> None:
    assert _models(["big:2", "qwen3:8b", "small"]) == (ModelShare("big", 2.0), ModelShare("qwen3:8b"), ModelShare("small"))
    assert read_goal("ratio=2") == Goal(ratio=2.0) and read_goal("limit=0.9") == Goal(limit=0.9) and read_goal(None) == Goal()
    assert _proposers("llm, bank,llm") == ("llm", "bank")
