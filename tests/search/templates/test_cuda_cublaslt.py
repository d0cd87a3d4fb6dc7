"""Every algorithm that cuBLASLt offers on this GPU, through a plan: right against float64, captured, on any stream, served; and
plans of another version or with an algorithm that is none are refused when they are loaded."""

from __future__ import annotations

import functools

import msgspec
import pytest
import torch
from cublaslt_samples import CASES, case
from gpu_sources import needs_nvrtc
from test_cuda_templates import HAS_GPU, no_worse

import torch_autokern as autokern
from torch_autokern.build.candidate import Candidate
from torch_autokern.build.compile_cuda import compile_cuda
from torch_autokern.errors import OtherLibraryError
from torch_autokern.judge.workspaces import load_candidate
from torch_autokern.ops import SPECS
from torch_autokern.runtime.extension import extension
from torch_autokern.runtime.kernel import LoadedKernel, load_cuda_kernel
from torch_autokern.runtime.plan import CublasLtAlgorithm, CublasLtStep, LaunchPlan
from torch_autokern.runtime.session import family_bit
from torch_autokern.runtime.target import local_target
from torch_autokern.search.templates import matmul_cublaslt
from torch_autokern.store.key import KernelKey

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCALE = 40  # products of 320 x 960 x 640: a wave is not filled, so that the heuristic splits K too


@functools.cache
def cubin() -> bytes:
    needs_nvrtc()
    empty = Candidate("cuda", matmul_cublaslt.SOURCE, LaunchPlan(1, (_step(_mm()[0])[0],)), "", "")
    return compile_cuda(empty, local_target("cuda").arch, allow_weak_box=True).binary


def proposals(key: KernelKey) -> list[Candidate]:
    return matmul_cublaslt.propose(key, local_target("cuda"))


def load(plan: LaunchPlan, key: KernelKey) -> LoadedKernel:
    return load_cuda_kernel(cubin(), plan, key, 0, "record")


@functools.cache
def _mm(name: str = "addmm row") -> tuple[KernelKey, tuple[torch.Tensor, ...]]:
    op, tensors, scalars = case(name, torch.bfloat16, "cuda", SCALE)
    return SPECS[op].key(list(tensors), scalars), tuple(tensors)


def _step(key: KernelKey) -> tuple[CublasLtStep, LaunchPlan]:
    """The best guess without workspace, as step and plan."""
    plan = next(c.plan for c in proposals(key) if not c.plan.workspaces)
    step = plan.steps[0]
    assert isinstance(step, CublasLtStep)
    return step, plan


def serve(kernel: LoadedKernel) -> None:
    words = SPECS[kernel.key.op].encode(kernel.key, kernel.native_device)
    extension().set_table([(words, [(0, 1, 0, kernel.native)])])
    extension().watch(family_bit(words))


def accepted(mine: torch.Tensor, stock: torch.Tensor, truth: torch.Tensor, scale: torch.Tensor) -> bool:
    try:
        no_worse(mine, stock, truth, scale, "")
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_algorithm_is_right(name: str, dtype: torch.dtype) -> None:
    op, tensors, scalars = case(name, dtype, "cuda", SCALE)
    spec = SPECS[op]
    key, stock, truth = spec.key(tensors, scalars), spec.stock(tensors, scalars)[0], spec.reference(tensors, scalars)[0]
    scale = spec.scale((truth,), tensors, scalars)[0].clamp_min(torch.finfo(dtype).tiny)
    found = proposals(key)
    assert found and len({c.candidate_id for c in found}) == len(found)
    # fp32 sums in any order (Higham 2002, section 3.1), with two bits for tensor cores, which cut instead of rounding.
    depth = tensors[-1].shape[-2]
    passed = 0
    for candidate in found:
        (mine,) = load(candidate.plan, key).run(tensors)
        assert mine is not None and mine.stride() == stock.stride()
        allowed = 4 * (depth + 2) * 2.0**-24 * scale + torch.finfo(dtype).eps * truth.abs()
        assert bool(((mine.double() - truth).abs() <= allowed).all()), candidate.parameters
        passed += accepted(mine, stock, truth, scale)
    assert passed, "the judge would refuse every one of them"


@pytest.mark.parametrize("name", ["mm", "mm of transposed", "addmm row", "bmm"])
def test_every_algorithm_is_captured_and_replays_with_new_contents(name: str) -> None:
    key, originals = _mm(name)
    for candidate in proposals(key):
        tensors = [t.clone() for t in originals]
        kernel = load(candidate.plan, key)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (y,) = kernel.run(tensors)
        for t in tensors:
            t.mul_(-1.5)
        graph.replay()
        (fresh,) = kernel.run(tensors)
        assert y is not None and fresh is not None
        assert torch.equal(y, fresh), candidate.parameters


@pytest.mark.parametrize("name", ["mm", "addmm row"])
def test_every_algorithm_runs_on_the_current_stream(name: str) -> None:
    key, tensors = _mm(name)
    first, stream = tensors[-2].clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for candidate in proposals(key):
        kernel = load(candidate.plan, key)
        given = [*tensors[:-2], first, tensors[-1]]
        (before,) = kernel.run(given)  # loads what the library loads lazily
        with torch.cuda.stream(stream):
            kernel.run(given)  # and memory of this stream is there
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(400_000_000)
            first.mul_(2)  # the product must wait for this
            (y,) = kernel.run(given)
            assert not stream.query(), "the launch went to another stream, or waited"
        stream.synchronize()
        (expected,) = kernel.run(given)
        assert before is not None and y is not None and expected is not None
        assert torch.equal(y, expected) and not torch.equal(y, before), candidate.parameters
        first.copy_(tensors[-2])


def test_a_served_call_runs_it_and_threads_may_share_it() -> None:
    key, (bias, a, b) = _mm()
    kernel = load(_step(key)[1], key)
    expected = torch.addmm(bias, a, b)
    with autokern.enabled():
        serve(kernel)
        y = torch.addmm(bias, a, b)
    assert kernel.native.hits == 1 and not kernel.native.fault
    assert torch.allclose(y, expected, rtol=2**-7, atol=2**-7)


def test_what_the_judge_hands_it_as_workspace_is_room_enough() -> None:
    """On 64 bytes, not on the 256 that cuBLASLt asks for."""
    key, tensors = _mm("mm")
    with_room = [c for c in proposals(key) if c.plan.workspaces]
    if not with_room:
        pytest.skip("no algorithm with a workspace for this product here")
    for candidate in with_room:
        code = load_candidate(cubin(), "", candidate.plan, key)
        (plain,) = code.run(tensors)
        assert plain is not None
        size = candidate.plan.workspaces[0].size_bytes
        memory = torch.full((size + 64,), 0xC1, dtype=torch.uint8, device="cuda")[64:]
        y = torch.empty_like(plain)
        code.run_into(tensors, (y, memory))
        assert torch.equal(y, plain), candidate.parameters


def changed(changes: dict[str, object]) -> tuple[KernelKey, LaunchPlan]:
    key, _ = _mm("mm")
    step, plan = _step(key)
    return key, msgspec.structs.replace(plan, steps=(msgspec.structs.replace(step, **changes),))


def test_another_version_is_refused() -> None:
    key, plan = changed({"version": 120100})
    with pytest.raises(OtherLibraryError, match="chosen under cuBLASLt 120100"):
        load(plan, key)


@pytest.mark.parametrize("changes", [{"id": 2**31 - 1}, {"tile": 60000}, {"stages": 60000}], ids=str)
def test_an_algorithm_that_is_none_is_refused(changes: dict[str, int]) -> None:
    step, _ = _step(_mm("mm")[0])
    wrong: CublasLtAlgorithm = msgspec.structs.replace(step.algorithm, **changes)
    key, plan = changed({"algorithm": wrong})
    with pytest.raises(RuntimeError, match=r"CUBLAS_STATUS|needs \d+ bytes of workspace"):
        load(plan, key)
