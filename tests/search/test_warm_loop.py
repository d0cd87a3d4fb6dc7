"""The loop's decisions, with a scripted engine: order, finalists, budget, what a second run repeats, what is said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from warm_samples import TARGET, ScriptedEngine, candidate, slower, softmax_key, workload

from torch_autokern.build.candidate import Candidate
from torch_autokern.errors import InvalidInputError, JudgeError
from torch_autokern.judge.outcome import Reason, Refusal
from torch_autokern.runtime.plan import decode_plan
from torch_autokern.runtime.target import stock_build
from torch_autokern.search.loop import WarmInterrupted, WarmReport, warm
from torch_autokern.search.outcome import Progress
from torch_autokern.store.folders import FolderChoice
from torch_autokern.store.key import KernelKey, Target
from torch_autokern.store.store import KernelStore, open_store
from torch_autokern.store.workload import Workload

KEY = softmax_key(8)


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    root = tmp_path / "store"
    root.mkdir(mode=0o700)
    return open_store(choice=FolderChoice(root, "test"))


def run(store: KernelStore, engine: ScriptedEngine, wanted: Workload | None = None, **options: object) -> WarmReport:
    def propose(key: KernelKey, target: Target) -> Sequence[Candidate]:
        return [candidate(idea) for idea in engine.screens]

    options = {"proposers": [propose], "target": TARGET, **options}
    return warm(wanted or workload(KEY), store=store, engine=engine, **options)  # type: ignore[arg-type]


def test_fastest_of_three_finalists_is_published_whole(store: KernelStore) -> None:
    engine = ScriptedEngine({"a": 1.5, "b": 2.0, "c": 1.9, "d": 1.8}, verdicts={"b": slower(0.9), "c": 1.7, "d": 1.9})
    report = run(store, engine)
    assert engine.asked("judge") == ["b", "c", "d"]
    (result,) = report.keys
    assert (result.status, result.ratio) == ("won", 1.9)
    best = store.get(KEY.digest, result.record_id)
    assert best is not None
    assert best.record.provenance.idea == "d" and best.record.target == TARGET and best.record.stock_build == stock_build()
    assert best.data["kernel.so"] == b"library" and best.data["source.cpp"] == b"// d"
    assert decode_plan(best.data["plan.json"]) == candidate("d").plan
    assert best.record.provenance.candidate_id == candidate("d").candidate_id
    assert engine.closed == 1


def test_finalist_that_cannot_beat_what_is_proved_is_not_judged(store: KernelStore) -> None:
    engine = ScriptedEngine({"fast": 3.0, "slow": 1.2})
    run(store, engine)
    assert engine.asked("judge") == ["fast"]


def test_keys_are_worked_on_by_share_of_time(store: KernelStore) -> None:
    keys = [softmax_key(rows) for rows in (5, 6, 7)]
    events: list[Progress] = []
    report = run(store, ScriptedEngine({"a": 2.0}), workload(*keys), on_event=events.append)
    assert [result.key for result in report.keys] == keys
    assert report.keys[0].share == pytest.approx(0.25)
    assert [event.keys_done for event in events if event.activity == "key_done"] == [1, 2, 3]
    assert events[-1].activity == "finished" and events[-1].keys_won == 3


def test_second_run_finds_the_record_and_does_nothing(store: KernelStore) -> None:
    run(store, ScriptedEngine({"a": 2.0}))
    engine = ScriptedEngine({"a": 2.0})
    report = run(store, engine)
    assert engine.calls == [] and report.keys[0].status == "already_there" and report.keys[0].ratio == 2.0


def test_second_run_repeats_nothing_that_was_refused(store: KernelStore) -> None:
    build_failed = {"bad": Refusal(Reason.BUILD_FAILED, "candidate.cpp:1: error")}
    first = ScriptedEngine(
        {"slow": 0.9, "bad": 1.0, "busy": Refusal(Reason.TIMING_UNSTABLE, "noise")}, builds=dict(build_failed)
    )
    run(store, first)
    again = ScriptedEngine(first.screens, builds=dict(build_failed))
    report = run(store, again)
    assert again.calls == [("build", "busy"), ("screen", "busy")], "only what another try may turn round"
    assert "best 0.90x" in report.keys[0].reason and "build_failed 1x" in report.keys[0].reason


@pytest.mark.parametrize("change", ["compiler", "target", "accuracy"])
def test_another_context_tries_again(store: KernelStore, change: str) -> None:
    run(store, ScriptedEngine({"slow": 0.9}))
    engine = ScriptedEngine({"slow": 0.9}, compiler="scripted 2" if change == "compiler" else "scripted 1")
    options: dict[str, object] = {"accuracy": "exact"} if change == "accuracy" else {}
    if change == "target":
        options["target"] = Target("cpu", "other", TARGET.arch, 1)
    run(store, engine, **options)
    assert engine.asked("screen") == ["slow"]


def test_interrupt_keeps_what_is_finished_and_the_next_run_continues(store: KernelStore) -> None:
    keys = [softmax_key(rows) for rows in (5, 6)]
    engine = ScriptedEngine({"a": 2.0, "b": 1.5})
    judged: list[str] = []

    def stop_in_second_key(event: Progress) -> None:
        if event.activity == "screening" and event.key == keys[1]:
            judged.append("screened one")
            raise KeyboardInterrupt

    with pytest.raises(WarmInterrupted) as stopped:
        run(store, engine, workload(*keys), on_event=stop_in_second_key)
    report = stopped.value.report
    assert [result.status for result in report.keys] == ["won", "not_tried"] and report.interrupted
    assert engine.closed == 1
    again = ScriptedEngine(engine.screens)
    final = run(store, again, workload(*keys))
    assert [result.status for result in final.keys] == ["already_there", "won"]
    assert again.asked("screen") == ["b"], "the first candidate's screen was in the journal"
    assert again.asked("judge") == ["a"], "and it went on to its verdict"


def test_budget_that_is_over_stops_and_says_so(store: KernelStore) -> None:
    engine = ScriptedEngine({"a": 2.0})
    report = run(store, engine, workload(KEY, softmax_key(9)), budget_seconds=0.0)
    assert engine.calls == [] and report.budget_over
    assert [(result.status, result.reason) for result in report.keys] == [("not_tried", "budget over")] * 2


def test_long_key_leaves_time_for_the_others(store: KernelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("torch_autokern.search.key_search.time.monotonic", lambda: now[0])
    keys = [softmax_key(5), softmax_key(6)]
    engine = ScriptedEngine(dict.fromkeys("abcdefghij", 1.0))
    real = engine.screen

    def slow_screen(*args: object) -> object:
        now[0] += 10.0
        return real(*args)  # type: ignore[arg-type]

    engine.screen = slow_screen  # type: ignore[method-assign,assignment]
    report = run(store, engine, workload(*keys), budget_seconds=100.0)
    assert all(result.tried > 0 for result in report.keys), "each key had its turn"
    assert now[0] < 120.0


def test_keys_that_cannot_be_won_say_why(store: KernelStore) -> None:
    engine = ScriptedEngine({"slow": 0.9, "slower": 0.8})
    wide = KernelKey("_softmax", "cuda", KEY.tensors, KEY.scalars, KEY.outputs)
    report = run(store, engine, workload(KEY, wide))
    assert report.keys[0].reason == "all slower, or not clearly faster (best 0.90x)"
    assert "cuda" in report.keys[1].reason
    nothing = run(store, engine, workload(softmax_key(11)), proposers=[lambda key, target: []])
    assert nothing.keys[0].reason == "no proposer has a candidate for this _softmax key"
    assert "1 keys won" not in str(report) and "2 not won" in str(report)


def test_wrong_candidates_are_reported_with_the_judges_words(store: KernelStore) -> None:
    wrong = Refusal(Reason.WRONG_VALUE, "family spikes: error 3.0, limit 1.0", family="spikes", seed=7)
    report = run(store, ScriptedEngine({"a": wrong, "b": wrong}))
    assert report.keys[0].reason == "refused: wrong_value 2x; for example: family spikes: error 3.0, limit 1.0"


def test_judge_that_fails_twice_in_a_row_stops_the_search(store: KernelStore) -> None:
    broken = JudgeError("canary died")
    once = ScriptedEngine({"a": broken, "b": 2.0})
    assert run(store, once).keys[0].status == "won"
    with pytest.raises(JudgeError, match="canary"):
        run(store, ScriptedEngine({"c": broken, "d": broken}), workload(softmax_key(9)))


def test_unknown_op_is_refused_before_anything_starts(store: KernelStore) -> None:
    engine = ScriptedEngine({"a": 2.0})
    strange = KernelKey("_softplus", "cpu", KEY.tensors, {}, KEY.outputs)
    with pytest.raises(InvalidInputError, match="_softplus"):
        run(store, engine, workload(KEY, strange))
    assert engine.calls == []


def test_store_in_memory_only_still_wins_and_says_so() -> None:
    report = run(KernelStore([], FolderChoice(None, "no folder can be written")), ScriptedEngine({"a": 2.0}))
    assert report.keys[0].status == "won" and "kept in memory only" in report.keys[0].reason


def test_quarantined_record_is_searched_again(store: KernelStore) -> None:
    record_id = run(store, ScriptedEngine({"a": 2.0})).keys[0].record_id
    store.quarantine(KEY.digest, record_id, "failed")
    engine = ScriptedEngine({"a": 2.0, "b": 1.8})
    report = run(store, engine)
    assert report.keys[0].status == "won" and report.keys[0].record_id != record_id
    assert engine.asked("judge") == ["b"], "the quarantined kernel is not proved again"
