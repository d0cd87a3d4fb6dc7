"""The one door to the compilers: a language has its device, and every language's artifact is what a record keeps."""

from __future__ import annotations

import pytest
import torch
from gpu_sources import cuda, needs_nvrtc, needs_triton, triton

from torch_autokern.build import compile as compilers
from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.build.compile import compile_candidate, toolchain
from torch_autokern.errors import StaticRuleError, ToolchainError
from torch_autokern.ops import SPECS
from torch_autokern.runtime.plan import CpuStep, InputArg, LaunchPlan, OutputArg, encode_plan
from torch_autokern.runtime.target import local_target
from torch_autokern.store.key import Target

H200 = Target("cuda", "NVIDIA H200", "sm_90a", 0)
COPY = """#include <cstdint>
extern "C" void copy(int64_t b, int64_t e, void* const* p) {
  for (int64_t i = b; i < e; ++i) static_cast<float*>(p[1])[i] = static_cast<const float*>(p[0])[i];
}
"""


def cpp() -> Candidate:
    plan = LaunchPlan(1, (CpuStep("copy", 64, 1, (InputArg(0), OutputArg(0))),))
    return Candidate("cpp", COPY, plan, "copy", "test")


def test_a_language_that_does_not_run_on_the_target_is_refused_before_any_compiler_starts() -> None:
    for candidate, target in ((cpp(), H200), (cuda(), local_target()), (triton(), local_target())):
        with pytest.raises(StaticRuleError, match=f"{candidate.language} candidate does not run on a {target.device_type}"):
            compile_candidate(candidate, target)


def _names(artifact: Artifact) -> set[str]:
    assert artifact.blobs()["plan.json"] == encode_plan(artifact.candidate.plan)
    assert artifact.binary in artifact.blobs().values()
    return set(artifact.blobs())


def test_cpp_goes_to_the_processors_compiler() -> None:
    artifact = compile_candidate(cpp(), local_target())
    assert artifact.kind == "cpu" and _names(artifact) == {"plan.json", "kernel.so", "source.cpp"}


def test_cuda_goes_to_nvrtc_for_the_targets_architecture() -> None:
    needs_nvrtc()
    artifact = compile_candidate(cuda(), H200)
    assert (artifact.kind, artifact.arch) == ("cuda", "sm_90a")
    assert _names(artifact) == {"plan.json", "kernel.cubin", "source.cu"}


def test_triton_completes_the_plan_with_what_it_decided() -> None:
    needs_triton()
    candidate = triton()
    key = SPECS["_softmax"].key([torch.zeros(7, 1000)], {"dim": 1, "half_to_float": False})
    artifact = compile_candidate(candidate, H200, key=key)
    assert artifact.candidate.plan != candidate.plan and artifact.identity == artifact.candidate.candidate_id
    assert _names(artifact) == {"plan.json", "kernel.cubin", "source.py"}


def test_one_of_a_gpus_two_compilers_is_enough_and_none_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ToolchainError("not here: pip install torch_autokern[cuda]")

    monkeypatch.setattr(compilers, "find_nvrtc", missing)
    monkeypatch.setattr(compilers, "find_triton", lambda: type("Found", (), {"version": "3.6.0"}))
    assert toolchain("cuda") == "triton 3.6.0"
    monkeypatch.setattr(compilers, "find_triton", missing)
    with pytest.raises(ToolchainError, match="pip install"):
        toolchain("cuda")
    assert toolchain("cpu")
