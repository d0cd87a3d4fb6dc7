"""Rounds: ideas, kernels, mending, parents, goals, headroom, budgets. A pretend judge, the real client, a scripted server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from search_samples import KEY, KEY_SECRET, PLAN, PretendEngine, ask_for, ideas, kernel, search, start, store_at, story
from warm_samples import TARGET, softmax_key

from torch_autokern.build.candidate import Candidate
from torch_autokern.errors import InvalidInputError
from torch_autokern.runtime.plan import decode_plan
from torch_autokern.search.budget import Clock
from torch_autokern.search.limits import Changes, note
from torch_autokern.search.llm import pick
from torch_autokern.search.manifest import Ask, Goal, Limits, ModelShare, Price, check
from torch_autokern.search.near import distance, fingerprint
from torch_autokern.search.nodes import Idea, Intervention, Lesson, Offered, Outcome, Reply, RoundEnd, Stop
from torch_autokern.search.run import open_run
from torch_autokern.search.scripted_server import Rule, Script, ScriptedServer
from torch_autokern.search.tried import Tried, parents


@pytest.fixture
def serve() -> Iterator[Any]:
    """Start scripted servers that end with the test."""
    servers: list[ScriptedServer] = []

    def start_one(*rules: Rule) -> ScriptedServer:
        servers.append(ScriptedServer(Script(rules, KEY_SECRET)))
        return servers[-1]

    yield start_one
    for server in servers:
        server.close()


def endless(*extra: Rule) -> tuple[Rule, ...]:
    """A model that always has two ideas; every kernel is new because its prompt's round is in its source."""
    return (*extra, Rule("## This round", reply={"lessons": []}), Rule("Give 2 new ideas", reply=ideas("a", "b")),
            Rule("## The idea", reply=kernel("ratio=1.1")))  # fmt: skip


def test_three_rounds_mend_learn_and_publish_the_best(tmp_path: Path, serve: Any) -> None:
    server = serve(*story())
    report = search(tmp_path / "run", ask_for(server.url))
    run = open_run(tmp_path / "run")
    assert report.search.keys[0].status == "won" and report.search.keys[0].ratio == 2.1
    assert [node.best_ratio for node in run.every(RoundEnd)] == [1.4, 1.6, 2.1]
    assert [round(node.limit_share, 2) for node in run.every(RoundEnd)] == [0.28, 0.32, 0.42]
    mended = next(node for node in run.every(Offered) if node.repairs)
    assert mended.repairs == "k0.r1.llm.i1.c0" and run.every(Lesson)[0].text == "wide vectors help"
    stored = store_at(tmp_path / "store").get(KEY.digest, report.search.keys[0].record_id)
    assert stored is not None and b"ratio=2.1" in stored.data["source.cpp"]
    assert stored.record.provenance.author == "scripted" and len(stored.record.provenance.parents) == 3


def test_prompts_carry_outcomes_parents_and_lessons_on(tmp_path: Path, serve: Any) -> None:
    server = serve(*story())
    search(tmp_path / "run", ask_for(server.url))
    asked = [prompt for _, prompt in server.prompts if "Give 2 new ideas" in prompt]
    assert "None yet." in asked[0] and "wide vectors help" not in asked[0]
    assert "wide vectors help" in asked[1] and "proved, 1.40x" in asked[1] and "refused: build_failed" in asked[1]
    mend = next(prompt for _, prompt in server.prompts if "## Why it was refused\nwrong_value" in prompt)
    for words in ("spikes", "seed 77", "[3, 17]", "got 0.5, expected 0.25", "refused=wrong_value"):
        assert words in mend
    compiler = next(prompt for _, prompt in server.prompts if "## Why it was refused\nbuild_failed" in prompt)
    assert "expected ';' before '}' token" in compiler


def test_goal_ends_a_run_as_soon_as_it_is_reached(tmp_path: Path, serve: Any) -> None:
    server = serve(*story())
    report = search(tmp_path / "run", ask_for(server.url, rounds=9, goal=Goal(ratio=1.5)))
    assert report.stop == "goal" and len(open_run(tmp_path / "run").every(RoundEnd)) == 2
    limited = search(tmp_path / "run2", ask_for(serve(*story()).url, rounds=9, goal=Goal(limit=0.3)), store=tmp_path / "store2")
    assert limited.stop == "goal" and limited.search.keys[0].ratio == 1.6


def test_effort_goes_where_share_of_time_times_headroom_is_largest(tmp_path: Path, serve: Any) -> None:
    rules = (Rule("## This round", reply={"lessons": []}), Rule("sizes .8, 38.(.|\n)*Give 2", reply=ideas("a", "b")),
             Rule("sizes .9, 38.(.|\n)*Give 2", reply=ideas("c", "d")))  # fmt: skip
    good = [Rule(f"## The idea\n{letter}", reply=kernel("ratio=4.9", place)) for place, letter in enumerate("ab")]
    poor = [Rule(f"## The idea\n{letter}", reply=kernel("ratio=1.1", place)) for place, letter in enumerate("cd")]
    search(tmp_path / "run", ask_for(serve(*rules, *good, *poor).url, rounds=2), softmax_key(8), softmax_key(9))
    order = [node.key for node in open_run(tmp_path / "run").every(RoundEnd)]
    # Key 0 takes twice the time of key 1, but after its first round it is at 98 % of the limit: the rest goes to key 1 first.
    assert order[:3] == [0, 1, 1], order


@pytest.mark.parametrize("most", [1, 2, 3, 5, 7])
def test_candidates_are_never_more_than_allowed(tmp_path: Path, serve: Any, most: int) -> None:
    server, engine = serve(*story()), PretendEngine()
    report = search(tmp_path / "run", ask_for(server.url, limits=Limits(candidates=most)), engine=engine)
    assert len(engine.asked("build")) >= most and report.stop == "candidates" and report.spent["candidates"] == most
    assert len(set(engine.asked("build"))) == most


@pytest.mark.parametrize("most", [1500, 6000, 9000, 13000])
def test_tokens_are_never_more_than_allowed(tmp_path: Path, serve: Any, most: int) -> None:
    server = serve(*story())
    report = search(tmp_path / "run", ask_for(server.url, limits=Limits(tokens=most), reply_tokens=2000))
    assert report.spent["tokens_in"] + report.spent["tokens_out"] <= most and report.stop == "tokens"
    for body, (_, prompt) in zip(server.bodies, server.prompts, strict=True):
        assert body["max_completion_tokens"] <= most - len(prompt.encode()), "what the server may use at most fits"


def test_money_is_never_more_than_allowed(tmp_path: Path, serve: Any) -> None:
    prices = {"scripted": Price(1000.0, 4000.0)}
    report = search(tmp_path / "run", ask_for(serve(*story()).url, limits=Limits(money=9.0), prices=prices, reply_tokens=600))
    replies = open_run(tmp_path / "run").every(Reply)
    assert report.stop == "money" and 0 < report.spent["money"] <= 9.0
    assert report.spent["money"] == pytest.approx(sum(r.tokens_in * 1e-3 + r.tokens_out * 4e-3 for r in replies))


def test_time_that_is_over_begins_nothing_more(tmp_path: Path, serve: Any) -> None:
    engine = PretendEngine(seconds=0.3)
    report = search(tmp_path / "run", ask_for(serve(*story()).url, limits=Limits(seconds=2.0)), engine=engine)
    assert report.stop == "time" and report.spent["seconds"] < 3.0


def test_clock_begins_no_step_that_would_not_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("torch_autokern.search.budget.time.monotonic", lambda: now[0])
    clock = Clock(100.0, before=40.0)
    with clock.timed("judge"):
        now[0] += 25.0
    assert not clock.is_over("judge") and clock.left() == 35.0
    now[0] += 11.0
    assert clock.is_over("judge") and not clock.is_over("screen") and not clock.is_over()


def test_steps_of_a_smaller_key_are_expected_to_be_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds are too few for what took thirty, and enough for a key of which stock's call is a hundredth."""
    now = [0.0]
    monkeypatch.setattr("torch_autokern.search.budget.time.monotonic", lambda: now[0])
    clock = Clock(45.0)
    with clock.timed("judge", 10_000.0):
        now[0] += 30.0
    assert clock.is_over("judge", 10_000.0) and clock.is_over("judge", 20_000.0) and not clock.is_over("judge", 100.0)
    with clock.timed("judge", 100.0):
        now[0] += 6.0
    assert not clock.is_over("judge", 5_000.0) and clock.is_over("judge", 10_000.0) and not clock.is_over("judge", 1.0)


def test_run_goes_on_with_a_larger_budget_where_the_first_ended(tmp_path: Path, serve: Any) -> None:
    server, engine = serve(*story()), PretendEngine()
    search(tmp_path / "run", ask_for(server.url, limits=Limits(candidates=2)), engine=engine)
    note(open_run(tmp_path / "run"), Changes(limits=Limits(candidates=50)), "somebody")
    report = search(tmp_path / "run", ask_for(server.url), engine=engine)
    assert report.stop == "rounds" and report.search.keys[0].ratio == 2.1
    assert len(engine.asked("screen")) == len(set(engine.asked("screen"))), "nothing was repeated"
    (change,) = open_run(tmp_path / "run").every(Intervention)
    assert (change.action, change.author) == ("limits", "somebody")


def test_models_share_the_requests(tmp_path: Path, serve: Any) -> None:
    models = (ModelShare("big", 1.0), ModelShare("small", 3.0))
    counts = {name: [pick(models, number) for number in range(200)].count(name) for name in ("big", "small")}
    assert counts == {"big": 50, "small": 150}
    for begin in range(0, 200, 20):
        assert 4 <= [pick(models, number) for number in range(begin, begin + 20)].count("big") <= 6
    server = serve(*story())
    search(tmp_path / "run", ask_for(server.url, models=models, kernels=2))
    assert {model for model, _ in server.prompts} == {"big", "small"}


def test_person_steers_with_hint_idea_and_ban_while_the_run_goes_on(tmp_path: Path, serve: Any) -> None:
    server = serve(Rule("## The idea\nturn it round", reply=kernel("ratio=3.0", 70)), *story())
    run = start(tmp_path / "run", ask_for(server.url))
    steer = tmp_path / "run" / "steer"
    for name, words in {
        "1.json": {"action": "hint", "text": "rows are short", "author": "ada"},
        "2.json": {"action": "idea", "text": "turn it round", "author": "ada"},
        "3.json": {"action": "ban", "text": "ratio=1\\.2", "author": "ada"},
        "4.json": {"action": "dance"},
    }.items():
        (steer / name).write_bytes(msgspec.json.encode(words))
    del run
    search(tmp_path / "run", ask_for(server.url))
    run = open_run(tmp_path / "run")
    assert [(node.action, node.author, node.id) for node in run.every(Intervention)] == [
        ("hint", "ada", "k0.r1.steer.0"), ("idea", "ada", "k0.r1.steer.1"), ("ban", "ada", "k0.r1.steer.2"),
    ]  # fmt: skip
    assert all("- rows are short" in prompt for _, prompt in server.prompts)
    assert any(node.text == "turn it round" for node in run.every(Idea))
    assert {node.dropped for node in run.every(Offered)} == {None, "banned"}
    assert (
        "action" in (steer / "refused" / "4.json.error.txt").read_text() and sorted(p.name for p in steer.glob("*.json")) == []
    )


def test_near_duplicates_are_dropped_and_named(tmp_path: Path, serve: Any) -> None:
    twin = kernel("ratio=1.3", 1)
    twin["source"] = "// the same thing\n" + twin["source"].replace("long long b", "long long  b")
    rules = (Rule("## This round", reply={"lessons": []}), Rule("Give 2", reply=ideas("x", "y")),
             Rule("## The idea\nx", reply=kernel("ratio=1.3", 1)), Rule("## The idea\ny", reply=twin))  # fmt: skip
    engine = PretendEngine()
    search(tmp_path / "run", ask_for(serve(*rules).url, rounds=1), engine=engine)
    dropped = [node for node in open_run(tmp_path / "run").every(Offered) if node.dropped]
    assert [(node.dropped, node.dropped_for) for node in dropped] == [("near_duplicate", "k0.r1.llm.i0.c0")]
    assert len(engine.asked("build")) == 1


def made(source: str) -> Candidate:
    return Candidate("cpp", source, decode_plan(msgspec.json.encode(PLAN)), "", "")


def test_names_and_comments_make_no_new_kernel_and_numbers_do() -> None:
    one = made("int f() { int a = 4; float x = 1.0f; return a + (int)x; } // one")
    assert fingerprint(one) == fingerprint(made("int f() {\n int count = 4; float y = 1.0f; return count + (int)y; }"))
    assert fingerprint(one) != fingerprint(made("int f() { int a = 8; float x = 1.0f; return a + (int)x; }"))
    assert fingerprint(made("f(_mm256_max_ps(a, b));")) != fingerprint(made("f(_mm256_min_ps(a, b));"))
    assert distance(one, one) == 0 and distance(one, made("while (q) { z[3] <<= 2; }")) == 1


def test_parents_are_the_best_and_then_the_farthest() -> None:
    from torch_autokern.judge.outcome import ScreenResult

    body = " ".join(f"a{n} += b{n};" for n in range(30))
    sources = {"best": body, "twin": body + " c;", "other": " ".join(f"x[{n}] = y;" for n in range(30)), "slow": "q;"}
    ratios = {"best": 2.0, "twin": 1.9, "other": 1.0, "slow": 0.2}
    tried = []
    for name, source in sources.items():
        node = Offered(name, 0.0, "", "", "cpp", "", "", "", "")
        ratio = ratios[name]
        tried.append(Tried(node, made(source), ScreenResult(ratio, ratio, ratio, 1.0, 1.0, (), 0.1)))
    best, diverse = parents(tried, best=1, diverse=1)
    assert [one.node.id for one in best] == ["best"] and [one.node.id for one in diverse] == ["other"]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (Ask(rounds=0), "rounds"), (Ask(repairs=-1), "repairs"), (Ask(limits=Limits(tokens=0)), "tokens"),
        (Ask(proposers=("llm",)), "--model"), (Ask(models=(ModelShare("m"),), limits=Limits(money=1.0)), "--prices"),
        (Ask(goal=Goal(limit=2.0)), "limit"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(ask: Ask, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        check(ask)


def test_every_outcome_is_in_the_journal_once(tmp_path: Path, serve: Any) -> None:
    search(tmp_path / "run", ask_for(serve(*story()).url))
    run = open_run(tmp_path / "run")
    outcomes = [(node.id, node.stage) for node in run.every(Outcome)]
    assert len(outcomes) == len(set(outcomes))
    assert {name for name, stage in outcomes if stage == "screen"} == {n.id for n in run.every(Offered) if n.dropped is None}
    assert isinstance(run.nodes[-1], Stop) and run.manifest.targets["cpu"] == TARGET
