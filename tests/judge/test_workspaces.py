"""Workspaces as further results: the same steps on memory of the judge's, and the same numbers."""

from __future__ import annotations

import pytest
import torch

from tests.judge.samples import ROOT, Sample, checked
from torch_autokern.judge.workspaces import exposed, load_candidate
from torch_autokern.report.cases import HEADLINE
from torch_autokern.runtime.plan import (
    IntArg,
    KernelStep,
    LaunchPlan,
    MemsetStep,
    OutputArg,
    TensorMapArg,
    Workspace,
    WorkspaceArg,
    validate,
)

SPLIT = Sample(ROOT / "honest" / "layer_norm_split.cpp")


def test_every_workspace_becomes_a_result_of_bytes() -> None:
    plan, key = exposed(SPLIT.candidate.plan, SPLIT.key)
    assert not plan.workspaces
    assert plan.steps[0].args[1] == OutputArg(3)  # type: ignore[union-attr]
    layout = key.outputs[3]
    assert layout is not None and (layout.dtype, layout.sizes, layout.alignment_bytes) == ("uint8", (512,), 64)


def test_gpu_steps_are_pointed_at_the_judges_memory_wherever_they_name_a_workspace() -> None:
    room = WorkspaceArg("room", 256)
    tile = TensorMapArg(room, 7, (8, 8), (32,), (8, 8), (1, 1))
    steps = (
        MemsetStep(room, 64, 1),
        KernelStep("f", (1, 1, 1), (32, 1, 1), (OutputArg(0), room, tile, IntArg(3, 32)), shared_bytes=512),
    )
    plan, key = exposed(
        LaunchPlan(1, steps, (Workspace("other", 64), Workspace("room", 4096, zeroed=True))), HEADLINE[0].key("cuda")
    )
    validate(plan)
    memory = OutputArg(2, 256)  # after the one result and the other workspace
    memset, step = plan.steps
    assert isinstance(memset, MemsetStep) and memset.target == memory
    assert isinstance(step, KernelStep) and step.args[:2] == (OutputArg(0), memory) and step.shared_bytes == 512
    assert isinstance(step.args[2], TensorMapArg) and step.args[2].base == memory
    assert [t.sizes for t in key.outputs[1:] if t is not None] == [(64,), (4096,)]


def test_both_ways_give_the_same_bits() -> None:
    artifact = SPLIT.build()
    code = load_candidate(artifact.binary, artifact.identity, SPLIT.candidate.plan, SPLIT.key)
    x, shape = torch.randn(2, 8, 32, 32), (8, 32, 32)
    tensors = x, torch.randn(shape), torch.randn(shape)
    plain = code.run(tensors)
    outputs = [torch.empty_like(t) for t in plain if t is not None]
    code.run_into(tensors, (*outputs, torch.full((512,), 0xC1, dtype=torch.uint8)))
    assert all(torch.equal(a, b) for a, b in zip(outputs, plain, strict=True) if b is not None)


@pytest.mark.parametrize("name", ["stale_workspace", "writes_past_workspace"])
def test_misuse_of_a_workspace_is_refused(name: str) -> None:
    sample = Sample(ROOT / "cheats" / f"{name}.cpp")
    refusal = checked(sample)
    assert refusal is not None and refusal.reason.value in sample.reasons, refusal


def test_a_workspace_that_is_declared_zeroed_is() -> None:
    assert checked(Sample(ROOT / "honest" / "softmax_zeroed_workspace.cpp")) is None
