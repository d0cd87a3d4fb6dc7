"""Several searches at once, and searches that are killed: one record set, nothing lost, little repeated."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from warm_samples import TARGET, ScriptedEngine, candidate, softmax_key, workload

from torch_autokern.build.candidate import Candidate
from torch_autokern.search.loop import WarmReport, warm
from torch_autokern.store.folders import FolderChoice
from torch_autokern.store.key import KernelKey, Target
from torch_autokern.store.store import KernelStore, open_store

FORK = multiprocessing.get_context("fork")
KEYS = [softmax_key(rows) for rows in (5, 6, 7)]
SCREENS = {"a": 1.3, "b": 1.6, "c": 0.8, "d": 1.5}


class SlowEngine(ScriptedEngine):
    """Takes a while for each answer and writes down, in a file that outlives it, what it was asked."""

    def __init__(self, log: Path, seconds: float) -> None:
        super().__init__(dict(SCREENS))
        self.log = log
        self.seconds = seconds

    def _answer(self, what: str, idea: str, outcome: object) -> float:
        time.sleep(self.seconds)
        with open(self.log, "a") as file:
            file.write(f"{what} {idea}\n")
        return super()._answer(what, idea, outcome)  # type: ignore[arg-type,return-value]


def propose(key: KernelKey, target: Target) -> Sequence[Candidate]:
    return [candidate(f"{idea}") for idea in SCREENS]


def store_at(root: Path) -> KernelStore:
    root.mkdir(mode=0o700, exist_ok=True)
    return open_store(choice=FolderChoice(root, "test"))


def search(root: Path, log: Path, keys: Sequence[KernelKey], seconds: float) -> WarmReport:
    engine = SlowEngine(log, seconds)
    return warm(workload(*keys), store=store_at(root), engine=engine, proposers=[propose], target=TARGET)


def test_sixteen_processes_warming_one_key_do_the_work_once(tmp_path: Path) -> None:
    root, log = tmp_path / "store", tmp_path / "log"
    answers = FORK.Queue()

    def work() -> None:
        report = search(root, log, KEYS[:1], 0.05)
        answers.put((report.keys[0].status, report.keys[0].record_id))

    processes = [FORK.Process(target=work) for _ in range(16)]
    for process in processes:
        process.start()
    results = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert sorted(status for status, _ in results) == ["already_there"] * 15 + ["won"]
    assert len({record_id for _, record_id in results}) == 1
    assert len(list(store_at(root).records())) == 1
    assert sorted(log.read_text().split("\n")).count("screen b") == 1


def kill_and_continue(tmp_path: Path, seed: int) -> None:
    root, log = tmp_path / f"store-{seed}", tmp_path / f"log-{seed}"
    source = random.Random(seed)
    kills = 0
    for _ in range(30):
        process = FORK.Process(target=search, args=(root, log, KEYS, 0.01))
        process.start()
        process.join(source.uniform(0.01, 0.25))
        if process.exitcode is not None:
            break
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        store = store_at(root)
        list(store.records())
        assert store.counters.damaged == 0, "a kill never leaves half a record"
    report = search(root, log, KEYS, 0.0)
    assert {result.status for result in report.keys} <= {"already_there", "won"}
    best = {key.digest: next(store_at(root).records(key.digest)).record.provenance.idea for key in KEYS}
    assert set(best.values()) == {"b"}
    screens = [line for line in log.read_text().splitlines() if line.startswith("screen")]
    assert len(screens) <= len(KEYS) * len(SCREENS) + kills, "a kill repeats at most the screen it interrupted"


def test_killed_searches_continue_and_lose_nothing(tmp_path: Path) -> None:
    for seed in range(4):
        kill_and_continue(tmp_path, seed)


@pytest.mark.long
def test_hundreds_of_kills_lose_nothing(tmp_path: Path) -> None:
    for seed in range(100, 180):
        kill_and_continue(tmp_path, seed)


def test_dead_holder_of_a_key_does_not_stop_the_next_search(tmp_path: Path) -> None:
    root, log = tmp_path / "store", tmp_path / "log"
    holder = FORK.Process(target=search, args=(root, log, KEYS[:1], 5.0))
    holder.start()
    time.sleep(0.5)
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    started = time.monotonic()
    assert search(root, log, KEYS[:1], 0.0).keys[0].status == "won"
    assert time.monotonic() - started < 20


def test_hung_holder_is_waited_for_and_then_passed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_autokern.search.loop._LOCK_PATIENCE_S", 0.5)
    monkeypatch.setattr("torch_autokern.search.loop._QUIET_PATIENCE_S", 0.2)
    root, log = tmp_path / "store", tmp_path / "log"
    holder = FORK.Process(target=search, args=(root, log, KEYS[:1], 120.0))
    holder.start()
    time.sleep(0.5)
    try:
        assert search(root, log, KEYS[:1], 0.0).keys[0].status == "won"
    finally:
        holder.kill()
        holder.join()
