"""A run's folder: resume after kills, replay, two searches on one store, a full disk, ten thousand nodes."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from search_samples import (
    KEY,
    KEY_SECRET,
    PretendEngine,
    ask_for,
    forgetful_story,
    ideas,
    kernel,
    search,
    start,
    store_at,
    story,
    timeless,
)

from torch_autokern.errors import InvalidInputError, RunError
from torch_autokern.search.lines import append_line, whole_lines
from torch_autokern.search.manifest import Ask, Limits
from torch_autokern.search.nodes import Idea, Offered, Outcome, RoundEnd, Stop
from torch_autokern.search.replay import replay
from torch_autokern.search.run import JOURNAL, alone, open_run
from torch_autokern.search.scripted_server import Rule, Script, ScriptedServer
from torch_autokern.store.key import canonical_json

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def url() -> Iterator[str]:
    server = ScriptedServer(Script(forgetful_story(), KEY_SECRET))
    yield server.url
    server.close()


def slow_search(folder: Path, ask: Ask, seconds: float) -> None:
    search(folder, ask, engine=PretendEngine(seconds=seconds))


def killed_and_resumed(folder: Path, ask: Ask, seed: int, most: int) -> int:
    """Kill a run at random moments, at most `most` times, then let it end; how often it was killed."""
    source = random.Random(seed)
    kills = 0
    while kills < most:
        process = FORK.Process(target=slow_search, args=(folder, ask, 0.02))
        process.start()
        process.join(source.uniform(0.05, 0.35))
        if process.exitcode is not None:
            assert process.exitcode == 0
            break
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
    slow_search(folder, ask, 0.0)
    return kills


def kill_until(tmp_path: Path, ask: Ask, wanted: int) -> None:
    search(tmp_path / "calm" / "run", ask)
    calm = timeless(open_run(tmp_path / "calm" / "run").nodes)
    kills, seed = 0, 0
    while kills < wanted:
        folder = tmp_path / f"{seed}" / "run"
        kills += killed_and_resumed(folder, ask, seed, wanted - kills)
        seed += 1
        run = open_run(folder)
        assert timeless(run.nodes) == calm, "a run that was killed reads as one that was not"
        assert len({(type(n), n.id, getattr(n, "stage", "")) for n in run.nodes}) == len(run.nodes), "nothing is noted twice"
        best = list(store_at(folder.parent / "store").records(KEY.digest))
        assert any(b"ratio=2.1" in stored.data["source.cpp"] for stored in best)
        again = replay(folder, records=False)
        assert again.holds and not again.other_prompts


def test_twenty_kills_at_random_moments_change_nothing(tmp_path: Path, url: str) -> None:
    kill_until(tmp_path, ask_for(url), 20)


@pytest.mark.long
def test_a_hundred_kills_at_random_moments_change_nothing(tmp_path: Path, url: str) -> None:
    kill_until(tmp_path, ask_for(url), 100)


def test_every_cut_of_a_journal_is_gone_on_from(tmp_path: Path, url: str) -> None:
    search(tmp_path / "run", ask_for(url))
    path = tmp_path / "run" / JOURNAL
    whole = path.read_bytes()
    calm = timeless(open_run(tmp_path / "run").nodes)
    source = random.Random(5)
    for cut in source.sample(range(len(whole)), 3):
        path.write_bytes(whole[:cut])
        engine = PretendEngine()
        search(tmp_path / "run", ask_for(url), engine=engine, store=tmp_path / f"store-{cut}")
        assert timeless(open_run(tmp_path / "run").nodes) == calm
        done = len(list(open_run(tmp_path / "run").every(Outcome)))
        assert len(engine.asked("screen") + engine.asked("judge")) <= done


def test_replay_derives_the_story_and_two_replays_agree(tmp_path: Path, url: str) -> None:
    search(tmp_path / "run", ask_for(url))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    first, second = (replay(tmp_path / "run", records=False) for _ in range(2))
    assert first == second and first.holds and not first.other_prompts and (first.rounds, first.candidates) == (3, 8)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_replay_gives_records_their_ids_again(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = search(tmp_path / "run", ask_for(url))
    monkeypatch.setattr("torch_autokern.search.replay.cannot_run_here", lambda record, target: "pretend")
    again = replay(tmp_path / "run", engine=PretendEngine())
    assert [record.same_record for record in again.records] == [True] * 3 and again.holds
    assert report.search.keys[0].record_id in {record.record_id for record in again.records}


def test_replay_sees_an_altered_reply(tmp_path: Path, url: str) -> None:
    search(tmp_path / "run", ask_for(url))
    run = open_run(tmp_path / "run")
    reply = next(node for node in run.every(Offered) if node.id == "k0.r2.llm.i0.c0")
    path = tmp_path / "run" / "blobs" / run.known(type(run.nodes[1]), reply.id).text  # type: ignore[union-attr]
    altered = path.read_text().replace("ratio=1.6", "ratio=9.9")
    path.write_text(altered)
    with pytest.raises(RunError, match="altered"):
        replay(tmp_path / "run", records=False)


def test_replay_of_a_run_that_a_budget_ended_ends_there_too(tmp_path: Path, url: str) -> None:
    for place, limits in enumerate((Limits(candidates=3), Limits(tokens=9000), Limits(candidates=1))):
        folder = tmp_path / f"run{place}"
        report = search(folder, ask_for(url, limits=limits, reply_tokens=2000), store=tmp_path / f"store{place}")
        again = replay(folder, records=False)
        assert again.holds, again
        assert again.candidates == report.spent["candidates"]


def both(root: Path, name: str, ask: Ask, results: Any) -> None:
    report = search(root / name, ask, engine=PretendEngine(seconds=0.01), store=root / "store")
    results.put((name, report.search.keys[0].status, report.search.keys[0].ratio))


def test_two_searches_on_one_store_each_end_well(tmp_path: Path, url: str) -> None:
    results = FORK.Queue()
    processes = [FORK.Process(target=both, args=(tmp_path, name, ask_for(url), results)) for name in ("one", "two")]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(60)
    assert found == [("one", "won", 2.1), ("two", "won", 2.1)]
    store = store_at(tmp_path / "store")
    assert {b"ratio=2.1" in stored.data["source.cpp"] for stored in store.records(KEY.digest)} >= {True}
    assert store.counters.damaged == 0
    for name in ("one", "two"):
        assert replay(tmp_path / name, records=False).holds


def test_second_run_takes_the_word_of_the_first_and_repeats_nothing(tmp_path: Path, url: str) -> None:
    search(tmp_path / "first", ask_for(url))
    engine = PretendEngine()
    report = search(tmp_path / "second", ask_for(url), engine=engine)
    assert report.search.keys[0].ratio == 2.1 and engine.calls == []
    run = open_run(tmp_path / "second")
    assert all(node.earlier for node in run.every(Outcome)) and replay(tmp_path / "second", records=False).holds


def test_one_process_works_on_a_run(tmp_path: Path) -> None:
    with alone(tmp_path / "run"), pytest.raises(InvalidInputError, match="another process"), alone(tmp_path / "run"):
        pass


def test_full_disk_stops_the_run_whole_and_it_goes_on_when_there_is_room(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    written = [0]
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        if JOURNAL in os.readlink(f"/proc/self/fd/{descriptor}"):
            written[0] += 1
            if written[0] > 12:
                real(descriptor, bytes(data)[:20])
                raise OSError(28, "No space left on device")
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr("torch_autokern.search.lines.os.write", write)
        with pytest.raises(RunError, match="No space left"):
            search(tmp_path / "run", ask_for(url))
    assert len(open_run(tmp_path / "run").nodes) == 12
    search(tmp_path / "run", ask_for(url))
    search(tmp_path / "calm", ask_for(url), store=tmp_path / "calm-store")
    assert timeless(open_run(tmp_path / "run").nodes) == timeless(open_run(tmp_path / "calm").nodes)


def test_ten_thousand_nodes_open_in_a_second(tmp_path: Path) -> None:
    run = start(tmp_path / "run", ask_for())
    path = tmp_path / "run" / JOURNAL
    node = Offered("k0.r1.llm.i0.c0", 1.0, "k0.r1.llm.i0", "ab" * 32, "cpp", "cd" * 32, "ef" * 32, "words " * 20, "scripted")
    append_line(path, canonical_json(Idea("k0.r1.llm.i0", 0.5, "an idea " * 10, "llm", "scripted")))
    lines = []
    for number in range(10_000):
        body = canonical_json(msgspec.structs.replace(node, id=f"k0.r1.llm.i{number}.c0"))
        lines.append(hashlib.sha256(body).hexdigest()[:16].encode() + b" " + body + b"\n")
    with path.open("ab") as file:
        file.writelines(lines)
    # The best of several: other processes of a test machine only ever add time.
    took = []
    for _ in range(3):
        began = time.perf_counter()
        run = open_run(tmp_path / "run")
        took.append(time.perf_counter() - began)
    assert len(run.nodes) == 10_001 and min(took) < 1.0


def test_torn_and_altered_lines_cost_only_themselves(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for number in range(3):
        append_line(path, b'{"n": %d}' % number)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"n": 1', b'"n": 7') + b"0123456789abcdef {torn")
    append_line(path, b'{"n": 9}')
    assert list(whole_lines(path.read_bytes())) == [b'{"n": 0}', b'{"n": 2}', b'{"n": 9}']


def test_no_folder_of_another_kind_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(InvalidInputError, match="not empty"):
        start(tmp_path, ask_for())
    with pytest.raises(InvalidInputError, match="no run"):
        open_run(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "keep"


def test_rounds_without_anything_new_end_the_run(tmp_path: Path) -> None:
    same = (
        Rule("## This round", reply={"lessons": []}),
        Rule("Give 2", reply=ideas("a", "b")),
        Rule("idea", reply=kernel("ratio=1.3")),
    )
    server = ScriptedServer(Script((*same, *story()), KEY_SECRET))
    report = search(tmp_path / "run", ask_for(server.url, rounds=50))
    server.close()
    run = open_run(tmp_path / "run")
    assert len(run.every(RoundEnd)) == 2 and report.search.keys[0].ratio == 1.3 and isinstance(run.nodes[-1], Stop)
