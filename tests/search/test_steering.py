"""People and a run: words at any time, a question when it is stuck, and what each word brought."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from search_samples import KEY_SECRET, PretendEngine, ask_for, forgetful_story, ideas, kernel, search, start, story, timeless
from warm_samples import softmax_key

from torch_autokern.errors import InvalidInputError
from torch_autokern.search.effect import effects
from torch_autokern.search.limits import Changes, note
from torch_autokern.search.manifest import Goal, Limits
from torch_autokern.search.nodes import Intervention, Offered, RoundEnd, Stop, Stuck
from torch_autokern.search.replay import replay
from torch_autokern.search.run import Run, open_run
from torch_autokern.search.scripted_server import Rule, Script, ScriptedServer
from torch_autokern.search.steer import SteerFile, check_words, write_steering


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_autokern.search.gate._POLL_S", 0.02)


@pytest.fixture
def serve() -> Iterator[Callable[..., ScriptedServer]]:
    servers: list[ScriptedServer] = []

    def make(*rules: Rule) -> ScriptedServer:
        servers.append(ScriptedServer(Script(rules, KEY_SECRET)))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def say(folder: Path, action: Any, text: str = "", key: int | None = None, author: str = "ada") -> None:
    write_steering(folder, SteerFile(action, text, author, key))


def no_gain_story(*more: Rule) -> tuple[Rule, ...]:
    """New ideas for ever, none of them better than the first."""
    rules = [*more, Rule("## This round", reply={"lessons": ["nothing helps"]})]
    for number in range(30):
        rules.append(Rule(f"## The idea\nidea {number}a", reply=kernel(f"ratio={1.5 - number / 100}", number)))
        rules.append(Rule(f"## The idea\nidea {number}b", reply=kernel(f"ratio={1.1 - number / 1000}", 50 + number)))
        rules.append(Rule("Give 2 new ideas", times=1, reply=ideas(f"idea {number}a", f"idea {number}b")))
    return tuple(rules)


def wait_for(what: Callable[[], Any], seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
    return found


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    return thread, results


def nodes_of(folder: Path, kind: type[Any]) -> list[Any]:
    return [] if not (folder / "manifest.json").exists() else open_run(folder, replaying=True).every(kind)


def test_kernel_of_a_person_is_tried_and_credited(tmp_path: Path, serve: Any) -> None:
    folder = tmp_path / "run"
    start(folder, ask_for(serve(*story()).url))
    say(folder, "kernel", msgspec.json.encode(kernel("ratio=2.5", 70)).decode())
    report = search(folder, ask_for())
    run = open_run(folder)
    assert report.search.keys[0].ratio == 2.5
    (brought,) = [node for node in run.every(Offered) if node.author == "ada"]
    assert brought.id == "k0.r1.people.i0.c0"
    (effect,) = effects(run)
    assert (effect.action, effect.candidates, effect.proved, effect.best) == ("kernel", 1, 1, 2.5)
    assert report.said == (effect,) and "1 proved, best 2.50x" in str(effect)
    assert replay(folder, records=False).holds


def test_ban_keeps_candidates_of_every_key_out(tmp_path: Path, serve: Any) -> None:
    folder = tmp_path / "run"
    start(folder, ask_for(serve(*forgetful_story()).url), softmax_key(8), softmax_key(9))
    say(folder, "ban", "ratio=1\\.[26]")
    engine = PretendEngine()
    search(folder, ask_for(), engine=engine)
    run = open_run(folder)
    kept_out = [node for node in run.every(Offered) if node.dropped == "banned"]
    assert {node.id.split(".")[0] for node in kept_out} == {"k0", "k1"}
    assert not any("ratio=1.2" in source or "ratio=1.6" in source for source in engine.asked("build"))
    assert effects(run)[0].dropped == len(kept_out) == 4
    assert replay(folder, records=False).holds


def test_words_for_one_key_are_not_heard_by_another(tmp_path: Path, serve: Any) -> None:
    folder, server = tmp_path / "run", serve(*forgetful_story())
    start(folder, ask_for(server.url, rounds=1), softmax_key(8), softmax_key(9))
    say(folder, "hint", "only for nine rows", key=1)
    search(folder, ask_for())
    about = {"8x38": False, "9x38": False, "(9, 38)": False}
    for _, prompt in server.prompts:
        if "only for nine rows" in prompt:
            assert "(9, 38)" in prompt or "9, 38" in prompt or "9x38" in prompt
            about["9x38"] = True
    assert about["9x38"], "its own key hears it"


def test_lower_goal_ends_the_run_and_replays(tmp_path: Path, serve: Any) -> None:
    folder = tmp_path / "run"
    start(folder, ask_for(serve(*story()).url, goal=Goal(ratio=9.0), rounds=30))

    class Steering(PretendEngine):
        def judge(self, *words: Any) -> Any:
            if len(self.asked("judge")) == 1:  # in the second round
                say(folder, "limits", msgspec.json.encode(Changes(goal=Goal(ratio=1.2))).decode())
            return super().judge(*words)

    report = search(folder, ask_for(), engine=Steering())
    run = open_run(folder)
    assert report.stop == "goal" and len(run.every(RoundEnd)) == 2, "heard before a third round begins"
    assert replay(folder, records=False).holds, "a replay does not stop before the goal was lowered"


def test_larger_budget_is_heard_while_the_run_goes_on(tmp_path: Path, serve: Any) -> None:
    folder = tmp_path / "run"
    start(folder, ask_for(serve(*story()).url, limits=Limits(candidates=1)))
    say(folder, "limits", msgspec.json.encode(Changes(limits=Limits(candidates=50))).decode())
    report = search(folder, ask_for())
    assert report.stop == "rounds" and report.spent["candidates"] == 8


def test_paused_run_stands_still_until_it_is_resumed(tmp_path: Path, serve: Any) -> None:
    folder = tmp_path / "run"
    start(folder, ask_for(serve(*story()).url))
    say(folder, "pause")
    engine = PretendEngine()
    thread, results = in_background(lambda: search(folder, ask_for(), engine=engine))
    wait_for(lambda: nodes_of(folder, Intervention))
    time.sleep(0.4)
    assert engine.calls == [], "nothing is built while it stands still"
    say(folder, "resume")
    thread.join(30)
    assert results[0].search.keys[0].ratio == 2.1
    run = open_run(folder)
    assert [node.action for node in run.every(Intervention)] == ["pause", "resume"]
    assert results[0].spent["seconds"] < 3.0 and replay(folder, records=False).holds


def test_stop_ends_this_life_of_a_run_and_not_the_next(tmp_path: Path, serve: Any) -> None:
    folder = tmp_path / "run"
    start(folder, ask_for(serve(*story()).url))
    say(folder, "stop")
    assert search(folder, ask_for()).stop == "asked"
    assert search(folder, ask_for()).search.keys[0].ratio == 2.1
    assert replay(folder, records=False).holds


def test_stop_ends_a_paused_run(tmp_path: Path, serve: Any) -> None:
    folder = tmp_path / "run"
    start(folder, ask_for(serve(*story()).url))
    say(folder, "pause")
    say(folder, "stop")
    assert search(folder, ask_for()).stop == "asked"


def test_stuck_run_asks_and_goes_on_with_the_answer(tmp_path: Path, serve: Any) -> None:
    folder = tmp_path / "run"
    server = serve(*no_gain_story(Rule("## The idea\nuse the other axis", reply=kernel("ratio=3.0", 99))))
    start(folder, ask_for(server.url, rounds=5, stuck="ask", stuck_rounds=2))
    thread, results = in_background(lambda: search(folder, ask_for()))
    (stuck,) = wait_for(lambda: nodes_of(folder, Stuck))
    # 1.5x is found in round 1; rounds 2 and 3 bring nothing.
    assert (stuck.id, stuck.why) == ("k0.r3.stuck", "no_gain")
    assert "takes 66.7 us where 20.0 us is the limit" in stuck.question
    report = (folder / "stuck" / "k0-r3.md").read_text()
    for words in (
        "idea 0a (by scripted): 1 kernels, best 1.50x",
        "- stock: 100.0 us, 2432 bytes at 0.02 GB/s",
        "(proved), 30% of the limit, 2432",
    ):
        assert words in report
    time.sleep(0.3)
    assert len(nodes_of(folder, RoundEnd)) == 3, "it waits"
    say(folder, "idea", "use the other axis")
    thread.join(30)
    assert results[0].search.keys[0].ratio == 3.0 and results[0].stop == "rounds"
    (effect,) = results[0].said
    assert (effect.proved, effect.best, effect.keys[0].before, effect.keys[0].after) == (1, 3.0, 1.5, 3.0)
    assert replay(folder, records=False).holds


def test_goal_that_is_met_already_is_an_answer_that_ends_the_run(tmp_path: Path, serve: Any) -> None:
    folder = tmp_path / "run"
    start(folder, ask_for(serve(*no_gain_story()).url, rounds=9, stuck="ask", stuck_rounds=1))
    thread, results = in_background(lambda: search(folder, ask_for()))
    wait_for(lambda: nodes_of(folder, Stuck))
    say(folder, "limits", msgspec.json.encode(Changes(goal=Goal(limit=0.3))).decode())
    thread.join(30)
    assert results[0].stop == "goal" and len(nodes_of(folder, RoundEnd)) == 2, "no further round is played"
    assert replay(folder, records=False).holds


def test_stuck_key_lets_the_others_go_first(tmp_path: Path, serve: Any) -> None:
    folder = tmp_path / "run"
    ask = ask_for(serve(*no_gain_story()).url, rounds=4, stuck="ask", stuck_rounds=1, answer_seconds=0.3)
    start(folder, ask, softmax_key(8), softmax_key(9))
    report = search(folder, ask)
    run = open_run(folder)
    assert {node.key for node in run.every(Stuck)} == {0, 1}, "the second key got its rounds while the first one asked"
    assert report.stop == "stuck" and "nobody answered" in report.message
    assert replay(folder, records=False).holds, "the order of the keys is the journal's"


@pytest.mark.parametrize(("policy", "stop", "rounds"), [("stop", "stuck", 3), ("continue", "rounds", 5)])
def test_policy_decides_what_a_stuck_key_does(tmp_path: Path, serve: Any, policy: Any, stop: str, rounds: int) -> None:
    folder = tmp_path / "run"
    ask = ask_for(serve(*no_gain_story()).url, rounds=5, stuck=policy, stuck_rounds=2)
    start(folder, ask)
    report = search(folder, ask)
    run = open_run(folder)
    assert (report.stop, len(run.every(RoundEnd))) == (stop, rounds)
    assert [node.round for node in run.every(Stuck)] == ([3] if policy == "stop" else [3, 5])
    assert isinstance(run.nodes[-1], Stop) and replay(folder, records=False).holds


def test_same_failure_again_and_again_is_told_apart(tmp_path: Path, serve: Any) -> None:
    folder = tmp_path / "run"
    rules = [Rule("## This round", reply={"lessons": []}), Rule("Give 2", reply=ideas("a", "b"))]
    rules += [Rule(f"## The idea\n{name}", reply=kernel(f"refused=wrong_value {name}", n)) for n, name in enumerate("ab")]
    rules += [Rule("## Why it was refused", reply=kernel("refused=wrong_value mended", 9))]
    ask = ask_for(serve(*rules).url, rounds=5, stuck="stop")
    start(folder, ask)
    report = search(folder, ask)
    (stuck,) = open_run(folder).every(Stuck)
    assert (stuck.round, stuck.why, report.stop) == (1, "same_failure", "stuck")
    assert "refused as wrong_value (too far from the truth; inputs spikes, seed 77)" in stuck.question


def test_killed_run_that_asks_asks_again_and_once(tmp_path: Path, serve: Any) -> None:
    folder = tmp_path / "run"
    ask = ask_for(serve(*no_gain_story()).url, rounds=4, stuck="ask", stuck_rounds=2, answer_seconds=0.2)
    start(folder, ask)
    assert search(folder, ask).stop == "stuck"
    calm = timeless(open_run(folder).nodes)
    assert search(folder, ask).stop == "stuck"
    assert timeless(open_run(folder).nodes) == calm, "asking again notes nothing again"
    note(open_run(folder), Changes(stuck="continue"), "ada")
    assert search(folder, ask).stop == "rounds"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (SteerFile("ban", "("), "regular expression"), (SteerFile("hint", "  "), "needs words"),
        (SteerFile("idea", "x", key=1), "keys 0 to 0"), (SteerFile("limits", '{"rounds": 0}'), "--rounds"),
        (SteerFile("limits", "{"), "not understood"), (SteerFile("kernel", "{}"), "JSON"),
        (SteerFile("kernel", '{"language": "cuda", "source": "x", "plan": {}}'), "does not run on a cpu key"),
    ],
)  # fmt: skip
def test_words_that_cannot_be_used_are_refused_with_the_reason(
    tmp_path: Path, serve: Any, words: SteerFile, message: str
) -> None:
    folder = tmp_path / "run"
    run: Run = start(folder, ask_for(serve(*story()).url, rounds=1))
    with pytest.raises(InvalidInputError, match=message):
        check_words(run, words)
    path = write_steering(folder, words)
    search(folder, ask_for())
    assert message in (folder / "steer" / "refused" / f"{path.name}.error.txt").read_text()
    assert open_run(folder).every(Intervention) == []
