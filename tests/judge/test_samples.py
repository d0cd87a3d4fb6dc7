"""The judge is judged: every file in `tests/cheats/` is refused for its reason, every one in `tests/honest/` is accepted."""

from __future__ import annotations

import pytest
from gpu_sources import needs_nvrtc, needs_triton

from tests.judge.samples import GPU, Sample, built, checked, samples, softmax_key, target, third_of, third_of_today
from torch_autokern.build.compile_cpp import compile_cpp
from torch_autokern.errors import BuildError, StaticRuleError
from torch_autokern.judge.outcome import Reason, Refusal
from torch_autokern.judge.verdict import close_screen, judge, screen
from torch_autokern.runtime.target import local_target
from torch_autokern.search.templates import propose
from torch_autokern.store.record import Verdict

CHEATS = samples("cheats")
HONEST = samples("honest")
GPU_SAMPLES = [*samples("cheats", GPU), *samples("honest", GPU)]
GPU_STATIC = [sample for sample in GPU_SAMPLES if sample.is_refused_before_it_runs]
GPU_RUNNING = [sample for sample in GPU_SAMPLES if not sample.is_refused_before_it_runs]
TODAY = third_of_today()


def _screened(sample: Sample) -> str:
    """The reason that the screen gives, as `warm` would see it."""
    try:
        artifact = sample.build()
    except StaticRuleError:
        return Reason.STATIC_RULE.value
    except BuildError:
        return Reason.BUILD_FAILED.value
    found = screen(artifact, sample.key, target())
    return found.reason.value if isinstance(found, Refusal) else "accepted"


@pytest.mark.parametrize("sample", third_of(CHEATS, TODAY), ids=lambda s: s.name)
def test_the_screen_or_the_check_refuses_a_cheat(sample: Sample) -> None:
    reason = _screened(sample)
    if reason == "accepted":  # three families do not see everything
        refusal = checked(sample)
        assert refusal is not None, "accepted"
        reason = refusal.reason.value
    assert reason in sample.reasons


@pytest.mark.long
@pytest.mark.parametrize("sample", CHEATS, ids=lambda s: s.name)
def test_the_full_check_refuses_a_cheat_and_says_why(sample: Sample) -> None:
    refusal = checked(sample)
    assert refusal is not None, "accepted"
    assert refusal.reason.value in sample.reasons, refusal.message
    assert len(refusal.message) > 20


@pytest.mark.parametrize("sample", third_of(HONEST, TODAY), ids=lambda s: s.name)
def test_an_honest_kernel_is_right(sample: Sample) -> None:
    assert checked(sample) is None


@pytest.mark.long
@pytest.mark.parametrize("sample", HONEST, ids=lambda s: s.name)
def test_every_honest_kernel_is_right(sample: Sample) -> None:
    """Once each; `benchmarks.judge_campaign` repeats them fifty times."""
    refusal = checked(sample)
    assert refusal is None, refusal


def _needs_compiler(sample: Sample) -> None:
    needs_nvrtc() if sample.language == "cuda" else needs_triton()


def _is_refused_by_the_build(sample: Sample) -> None:
    _needs_compiler(sample)
    refusal = built(sample)
    assert isinstance(refusal, Refusal), "it builds"
    assert refusal.reason.value in sample.reasons, refusal.message


@pytest.mark.parametrize("sample", third_of([s for s in GPU_STATIC if s.language == "cuda"], TODAY), ids=lambda s: s.name)
def test_a_gpu_cheat_is_refused_before_it_runs(sample: Sample) -> None:
    _is_refused_by_the_build(sample)


@pytest.mark.long
@pytest.mark.parametrize("sample", GPU_STATIC, ids=lambda s: f"{s.name} ({s.language})")
def test_every_such_gpu_cheat_is_refused_before_it_runs(sample: Sample) -> None:
    _is_refused_by_the_build(sample)


@pytest.mark.long
@pytest.mark.parametrize("sample", GPU_RUNNING, ids=lambda s: f"{s.name} ({s.language})")
def test_gpu_candidates_that_only_a_gpu_can_judge_build(sample: Sample) -> None:
    _needs_compiler(sample)
    artifact = built(sample)
    assert not isinstance(artifact, Refusal), artifact
    assert artifact.kind == "cuda" and artifact.resources


def test_the_corpora_are_as_large_as_promised() -> None:
    assert len(CHEATS) >= 60 and len(HONEST) >= 30
    assert all(s.reasons and set(s.reasons) <= {reason.value for reason in Reason} for s in CHEATS)
    assert not any(s.reasons for s in HONEST)
    assert {s.language for s in GPU_STATIC} == {s.language for s in GPU_RUNNING} == {"cuda", "triton"}
    assert all(set(s.reasons) <= {reason.value for reason in Reason} for s in GPU_SAMPLES)


def test_three_days_run_every_file() -> None:
    for corpus in (CHEATS, HONEST):
        names = [s.name for number in range(3) for s in third_of(corpus, number)]
        assert sorted(names) == sorted(s.name for s in corpus)


def test_a_crash_ends_only_the_pooled_process() -> None:
    crash = next(s for s in CHEATS if s.name == "null_pointer")
    honest = next(s for s in HONEST if s.name == "softmax_bf16")
    assert _screened(crash) == "crashed"
    assert _screened(honest) == "accepted"


@pytest.mark.long
def test_an_endless_loop_is_killed_and_the_next_candidate_runs() -> None:
    endless = next(s for s in CHEATS if s.name == "never_ends")
    honest = next(s for s in HONEST if s.name == "softmax_bf16")
    assert _screened(endless) == "hung"
    assert _screened(honest) == "accepted"


@pytest.mark.long
def test_a_verdict_accepts_a_faster_kernel_with_its_evidence() -> None:
    # Short rows, where stock leaves a factor of three. One thread: a parallel loop on a busy machine waits for its slowest.
    alone = local_target("cpu", 1)
    key = softmax_key(32, 12, 38, 38)
    artifact = compile_cpp(propose(key, alone)[0], alone)
    verdict = judge(artifact, key, alone)
    if isinstance(verdict, Refusal) and verdict.reason is Reason.TIMING_UNSTABLE:
        pytest.skip(f"the machine is not quiet: {verdict.message}")
    assert isinstance(verdict, Verdict), verdict
    assert len(verdict.families) == 13 and all(len(f.seeds) == 3 for f in verdict.families)
    assert {"zeros", "copy of the input", "dropped tail"} <= set(verdict.vacuity_probes)
    assert {"repeats", "threads", "poisoned outputs", "guard zones", "inputs unchanged"} <= set(verdict.checks)
    assert verdict.timings[0].ratio_low > 1.02 and verdict.timings[0].processes == 3
    assert verdict.determinism == "run_to_run"


@pytest.mark.long
def test_a_slow_kernel_is_refused_with_both_times() -> None:
    sample = next(s for s in HONEST if s.name == "softmax_bf16")
    refusal = judge(sample.build(), sample.key, target())
    assert isinstance(refusal, Refusal)
    assert refusal.reason in (Reason.NOT_FASTER, Reason.TIMING_UNSTABLE), refusal
    assert "us" in refusal.message


def test_closing_the_screen_twice_is_harmless() -> None:
    close_screen()
    close_screen()
