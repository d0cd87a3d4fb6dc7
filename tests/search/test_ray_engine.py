"""The search on a Ray cluster: a real one on this machine, in a home folder of its own, started and ended here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from search_samples import KEY, KEY_SECRET, PretendEngine, ask_for, forgetful_story, ideas, kernel, start, store_at, timeless
from warm_samples import TARGET, candidate

from benchmarks.search_engines import own_cluster
from torch_autokern.build.candidate import Artifact
from torch_autokern.errors import DeviceError, InvalidInputError, JudgeError, PlanError, ToolchainError
from torch_autokern.judge.outcome import Accuracy
from torch_autokern.runtime.plan import LaunchPlan
from torch_autokern.runtime.target import local_target
from torch_autokern.search import ray_engine
from torch_autokern.search.manifest import Ceiling
from torch_autokern.search.nodes import Outcome
from torch_autokern.search.outcome import SearchReport
from torch_autokern.search.ray_engine import RayEngine
from torch_autokern.search.replay import replay
from torch_autokern.search.run import open_run
from torch_autokern.search.scripted_server import Rule, Script, ScriptedServer
from torch_autokern.search.session import go
from torch_autokern.search.wire import Answer, Task, encode, read_answer, read_task

HERE = Path(__file__).parent


def test_missing_extra_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidInputError, match=r"pip install 'torch-autokern\[ray\]'"):
        RayEngine()


def test_what_travels_comes_out_equal() -> None:
    one = candidate("x")
    artifact = Artifact(one, b"\x7fELF\x00\xff", "id", {"cc": "1"}, "box", 0.5, "cpu")
    task = Task("judge", KEY, TARGET, Accuracy("tolerance", 1e-3, 0.0), artifact=artifact)
    assert read_task(encode(task)) == task
    verdict = PretendEngine().judge(artifact, KEY, TARGET, Accuracy())
    for found in (artifact, verdict, Ceiling(1.0, 2.0, 3.0, 4.0)):
        answer = Answer.of(found)
        assert read_answer(encode(answer)) == answer


def test_worker_errors_are_raised_here_as_they_were_there() -> None:
    for error in (ToolchainError("no compiler"), DeviceError("lost"), JudgeError("odd")):
        with pytest.raises(type(error), match=str(error)):
            read_answer(encode(Answer.of(error))).raise_error()
    with pytest.raises(JudgeError, match="KeyError"):
        Answer.of(KeyError("x")).raise_error()


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"step": "dance"})])
def test_other_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(JudgeError, match="over the wire"):
        read_task(raw)


def test_plan_beyond_its_limits_is_refused_on_both_ends() -> None:
    wrong = msgspec.structs.replace(candidate("x"), plan=LaunchPlan(1, ()))
    with pytest.raises(PlanError):
        read_task(encode(Task("build", KEY, TARGET, Accuracy(), candidate=wrong)))
    with pytest.raises(PlanError):
        read_answer(encode(Answer(built=Artifact(wrong, b"", "", {}, "box", 0.0))))


# -- a real cluster ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of this machine, with two CPUs and 100 MB of object store."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    with own_cluster(python_path=(str(HERE),)) as address:
        yield address


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is tuned for this machine: workers of other kinds are not asked for times."""
    monkeypatch.setattr("search_samples.TARGET", local_target(threads=1))


def run_on(engine: Any, folder: Path, rules: tuple[Rule, ...], **options: Any) -> SearchReport:
    server = ScriptedServer(Script(rules, KEY_SECRET))
    try:
        run = start(folder / "run", ask_for(server.url, **options))
        return go(run, store_at(folder / "store"), key=KEY_SECRET, engine=engine)
    finally:
        server.close()


def ray_engine_for(cluster: str, folder: Path) -> RayEngine:
    from ray_workers import PretendMaker

    folder.mkdir(exist_ok=True)
    return RayEngine(cluster, make=PretendMaker(folder), builders=2)


def stored(folder: Path) -> list[Any]:
    """A store's records without the hour at which they were made."""
    found = []
    for one in store_at(folder / "store").records():
        origin = msgspec.structs.replace(one.record.provenance, created="")
        found.append((msgspec.structs.replace(one.record, provenance=origin), sorted(one.data.items())))
    return sorted(found, key=repr)


@pytest.mark.long
def test_same_run_gives_the_same_records_on_both_engines(cluster: str, tmp_path: Path, here: None) -> None:
    for name in ("local", "ray"):
        (tmp_path / name).mkdir()
    run_on(PretendEngine(), tmp_path / "local", forgetful_story())
    engine = ray_engine_for(cluster, tmp_path / "met")
    report = run_on(engine, tmp_path / "ray", forgetful_story())
    assert report.search.keys[0].ratio == 2.1 and engine.replaced == 0
    nodes = [timeless(open_run(tmp_path / name / "run").nodes) for name in ("local", "ray")]
    assert nodes[0] == nodes[1]
    assert stored(tmp_path / "local") == stored(tmp_path / "ray") != []
    assert replay(tmp_path / "ray" / "run", records=False).holds


def trouble(first: str, second: str) -> tuple[Rule, ...]:
    """One round of two kernels, each with its trouble."""
    return (
        Rule("## This round", reply={"lessons": []}), Rule("Give 2", reply=ideas("one", "two")),
        Rule("## The idea\none", reply=kernel(f"ratio=1.8 {first}", 1)),
        Rule("## The idea\ntwo", reply=kernel(f"ratio=1.2 {second}", 2)),
    )  # fmt: skip


def visits(folder: Path, step: str) -> list[list[str]]:
    """The workers that each kernel met at a step, the kernel with fewer of them first."""
    return sorted((path.read_text().split() for path in (folder / "met").glob(f"{step}-*")), key=len)


@pytest.mark.long
def test_worker_that_dies_is_replaced_and_its_candidate_tried_once_more(cluster: str, tmp_path: Path, here: None) -> None:
    engine = ray_engine_for(cluster, tmp_path / "met")
    report = run_on(engine, tmp_path, trouble("dies_in_build", "dies_in_screen"), rounds=1)
    assert report.search.keys[0].ratio == 1.8 and engine.replaced == 2
    for step in ("build", "screen"):
        alone, twice = visits(tmp_path, step)
        assert len(alone) == 1 and len(set(twice)) == 2, "two workers met the one in trouble"
    assert replay(tmp_path / "run", records=False).holds


@pytest.mark.long
def test_worker_that_hangs_is_replaced_and_a_candidate_that_costs_two_is_given_up(
    cluster: str, tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ray_engine.LIMITS_S, "screen", 3.0)
    engine = ray_engine_for(cluster, tmp_path / "met")
    report = run_on(engine, tmp_path, trouble("hangs_in_screen", "always_in_build"), rounds=1, repairs=0)
    assert report.search.keys[0].ratio == 1.8 and engine.replaced == 3
    assert len(set(visits(tmp_path, "screen")[0])) == 2 and len(set(visits(tmp_path, "build")[1])) == 2
    refused = [node.refused for node in open_run(tmp_path / "run").every(Outcome) if node.refused is not None]
    assert [refusal.reason.value for refusal in refused] == ["build_failed"] and "died or hung" in refused[0].message


@pytest.mark.long
def test_machine_of_another_kind_is_not_asked_for_times(cluster: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no worker of the cluster is what this run is tuned for"):
        run_on(ray_engine_for(cluster, tmp_path / "met"), tmp_path, forgetful_story())


def test_no_cluster_is_one_clear_error(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    with pytest.raises(InvalidInputError, match=r"no Ray cluster at 127\.0\.0\.1:1: .*refused"):
        RayEngine("127.0.0.1:1")
