"""A search over GPU keys: the target is the key's device, records carry a cubin, a lost device ends it; and real builds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from gpu_sources import needs_nvrtc
from warm_samples import ScriptedEngine, softmax_key, workload

from benchmarks.gpu_stages import padded
from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.errors import DeviceError, JudgeError
from torch_autokern.judge.outcome import Refusal
from torch_autokern.report.cases import HEADLINE
from torch_autokern.runtime.plan import InputArg, KernelStep, LaunchPlan, OutputArg
from torch_autokern.search import templates
from torch_autokern.search.engine import LocalEngine
from torch_autokern.search.loop import WarmReport, warm
from torch_autokern.store.folders import FolderChoice
from torch_autokern.store.key import KernelKey, Target
from torch_autokern.store.store import KernelStore, open_store
from torch_autokern.store.workload import Workload

H200 = Target("cuda", "NVIDIA H200", "sm_90a", 0)
KEY = HEADLINE[0].key("cuda")


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    root = tmp_path / "store"
    root.mkdir(mode=0o700)
    return open_store(choice=FolderChoice(root, "test"))


def candidate(name: str) -> Candidate:
    step = KernelStep("entry", (1, 1, 1), (32, 1, 1), (InputArg(0), OutputArg(0)))
    return Candidate("cuda", f"// {name}", LaunchPlan(1, (step,)), name, "test")


class GpuEngine(ScriptedEngine):
    """Its artifacts' plans are completed after the build, as Triton's are."""

    def build(
        self, candidates: Sequence[Candidate], target: Target, key: KernelKey
    ) -> Iterator[tuple[Candidate, Artifact | Refusal]]:
        assert target == H200 and key == KEY
        for one, built in super().build(candidates, target, key):
            if isinstance(built, Artifact):
                step = msgspec.structs.replace(one.plan.steps[0], shared_bytes=4096)
                done = msgspec.structs.replace(one, plan=LaunchPlan(1, (step,)))
                built = Artifact(done, b"cubin", done.candidate_id, {}, "box", 0.1, kind="cuda", arch="sm_90a")
            yield one, built


@pytest.fixture
def run(store: KernelStore, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def go(engine: ScriptedEngine, wanted: Workload | None = None) -> WarmReport:
        def propose(key: KernelKey, target: Target) -> Sequence[Candidate]:
            assert target.device_type == key.device_type
            return [candidate(idea) for idea in engine.screens]

        return warm(wanted or workload(KEY), store=store, engine=engine, proposers=[propose], target=H200)

    return go


def test_the_winner_of_a_gpu_key_is_published_with_its_cubin_and_completed_plan(run, store: KernelStore) -> None:  # type: ignore[no-untyped-def]
    report = run(GpuEngine({"slow": 0.9, "fast": 2.0}))
    (result,) = report.keys
    assert result.status == "won"
    stored = store.get(KEY.digest, result.record_id)
    assert stored is not None and stored.record.target == H200
    assert stored.data["kernel.cubin"] == b"cubin" and stored.data["source.cu"] == b"// fast"
    assert b"4096" in stored.data["plan.json"]
    again = GpuEngine({"slow": 0.9, "fast": 2.0})
    assert run(again).keys[0].status == "already_there" and again.calls == []


def test_keys_of_a_device_that_is_not_the_target_are_not_judged(run) -> None:  # type: ignore[no-untyped-def]
    report = run(GpuEngine({"fast": 2.0}), workload(KEY, softmax_key(8)))
    assert [result.status for result in report.keys] == ["won", "not_won"]
    assert report.keys[1].reason == "a cpu key cannot be judged here: the target is cuda"


def test_a_lost_device_ends_the_search_at_once(run) -> None:  # type: ignore[no-untyped-def]
    engine = GpuEngine({"a": DeviceError("2 fresh processes could not use the cuda device"), "b": 2.0})
    with pytest.raises(DeviceError, match="fresh processes"):
        run(engine)
    assert engine.asked("screen") == ["a"]
    assert issubclass(DeviceError, JudgeError)


def test_without_a_gpu_a_gpu_key_says_what_is_missing(store: KernelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = warm(workload(KEY), store=store, engine=ScriptedEngine({"a": 2.0}))
    assert report.keys[0].status == "not_won" and "cuda" in report.keys[0].reason


def test_padding_makes_as_many_different_candidates_as_are_asked_for() -> None:
    found = padded(templates.propose(KEY, H200), 60)
    assert len(found) == len({one.candidate_id for one in found}) == 60
    assert padded([], 60) == []


@pytest.mark.long
@pytest.mark.parametrize("case", HEADLINE, ids=lambda case: case.op)
def test_every_template_of_the_headline_shapes_builds_in_parallel(case) -> None:  # type: ignore[no-untyped-def]
    needs_nvrtc()
    key = case.key("cuda")
    candidates = templates.propose(key, H200)
    began = time.monotonic()
    built = list(LocalEngine().build(candidates, H200, key))
    refused = [found.message for _, found in built if isinstance(found, Refusal)]
    assert candidates and not refused, refused
    assert all(found.kind == "cuda" for _, found in built if isinstance(found, Artifact))
    print(f"{len(built)} built in {time.monotonic() - began:.1f} s")


def test_a_gpus_runner_starts_beside_the_compilers_and_its_failure_is_the_screens_to_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []

    def fails(device_type: str, *, allow_weak_box: bool) -> None:
        opened.append(device_type)
        raise DeviceError("no device")

    monkeypatch.setattr("torch_autokern.search.engine.verdict.open_screen", fails)
    monkeypatch.setattr("torch_autokern.search.engine.toolchain", lambda device_type: "scripted")
    monkeypatch.setattr(LocalEngine, "_build_one", lambda self, candidate, target, key: "built")
    built = list(LocalEngine().build([candidate("a"), candidate("b")], H200, KEY))
    assert [result for _, result in built] == ["built", "built"] and opened == ["cuda"]
    assert list(LocalEngine().build([], Target("cpu", "x", "x86-64-v3", 1), softmax_key(8))) == [] and opened == ["cuda"]
