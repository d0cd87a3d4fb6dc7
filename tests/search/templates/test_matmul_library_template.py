"""Stock's product and an addend of our own: right against float64 for every addend that broadcasts."""

from __future__ import annotations

import pytest
import torch

from tests.search.templates.template_driver import wrong
from torch_autokern.build.compile_cpp import compile_cpp
from torch_autokern.ops import SPECS
from torch_autokern.runtime.kernel import load_cpu_kernel
from torch_autokern.runtime.target import local_target
from torch_autokern.search.templates import matmul_library

ADDENDS: list[tuple[tuple[int, ...], float, float]] = [
    ((19,), 1.0, 1.0), ((1, 19), -0.5, 2.0), ((7, 1), 1.0, 1.0), ((7, 19), 2.0, 1.0), ((), 1.0, -1.0),
]  # fmt: skip


@pytest.mark.parametrize("batches", [0, 3])
@pytest.mark.parametrize(("sizes", "beta", "alpha"), ADDENDS)
def test_the_addend_is_added_once_everywhere(sizes: tuple[int, ...], beta: float, alpha: float, batches: int) -> None:
    torch.manual_seed(5)
    front = (batches,) if batches else ()
    tensors = [torch.randn(sizes), torch.randn(*front, 7, 40), torch.randn(*front, 19, 40).transpose(-1, -2)]
    spec = SPECS["baddbmm" if batches else "addmm"]
    key = spec.key(tensors, {"beta": beta, "alpha": alpha})
    (candidate,) = matmul_library.propose(key, local_target())
    artifact = compile_cpp(candidate, local_target())
    result = load_cpu_kernel(artifact.binary, artifact.identity, candidate.plan, key).run(tensors)
    assert wrong(key, tensors, key.scalars, [t for t in result if t is not None]) == []


def test_what_has_no_addend_is_left_alone() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    assert not matmul_library.propose(SPECS["mm"].key([a, b], {}), local_target())
    ignored = SPECS["addmm"].key([torch.randn(5), a, b], {"beta": 0.0, "alpha": 1.0})
    assert not matmul_library.propose(ignored, local_target())
    half = SPECS["addmm"].key([t.bfloat16() for t in (torch.randn(5), a, b)], {"beta": 1.0, "alpha": 1.0})
    assert not matmul_library.propose(half, local_target())
