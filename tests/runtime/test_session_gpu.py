"""GPU records in the session: nothing happens where there is no GPU; where there is one, a stored cubin serves calls."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_sources import needs_nvrtc
from tiny_kernels import record_for

import torch_autokern as ak
from torch_autokern.build.candidate import Candidate
from torch_autokern.build.compile_cuda import CUBIN_BLOB, compile_cuda
from torch_autokern.errors import BuildError
from torch_autokern.ops import SPECS
from torch_autokern.runtime.kernel import load_cuda_kernel
from torch_autokern.runtime.plan import InputArg, IntArg, KernelStep, LaunchPlan, OutputArg, encode_plan
from torch_autokern.runtime.session import session
from torch_autokern.runtime.target import local_target
from torch_autokern.store.key import KernelKey, Target, TensorKey

SOFTMAX = r"""extern "C" __global__ void softmax_rows(const float* x, float* y, int columns) {
  x += (long long)blockIdx.x * columns; y += (long long)blockIdx.x * columns;
  float top = __int_as_float(0xff800000), sum = 0;
  for (int i = threadIdx.x; i < columns; i += 32) top = fmaxf(top, x[i]);
  for (int o = 16; o; o /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
  for (int i = threadIdx.x; i < columns; i += 32) sum += expf(x[i] - top);
  for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  for (int i = threadIdx.x; i < columns; i += 32) y[i] = expf(x[i] - top) / sum;
}
"""


def softmax_plan(key: KernelKey) -> LaunchPlan:
    assert key.tensors[0] is not None
    columns = key.tensors[0].sizes[-1]
    args = (InputArg(0), OutputArg(0), IntArg(columns, 32))
    return LaunchPlan(1, (KernelStep("softmax_rows", (math.prod(key.tensors[0].sizes[:-1]), 1, 1), (32, 1, 1), args),))


def softmax_candidate(key: KernelKey) -> Candidate:
    return Candidate("cuda", SOFTMAX, softmax_plan(key), "one warp a row", "test")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_record_of_a_gpu_kernel_waits_where_there_is_no_gpu() -> None:
    tensor = TensorKey("float32", (64, 200), (200, 1), 16)
    key = KernelKey("_softmax", "cuda", (tensor,), {"dim": 1, "half_to_float": False}, (tensor,))
    record = record_for(key, target=Target("cuda", "NVIDIA H200", "sm_90a", 0))
    data = {CUBIN_BLOB: b"never read here", "plan.json": encode_plan(softmax_plan(key))}
    store = session().store
    store.publish(record, data)
    (row,) = store.index().lookup(key.digest)
    try:
        ak.refresh()
        assert row.record_id not in session().loaded and row.record_id not in session().load_failures
        assert store.notes(key.digest, row.record_id).quarantine is None
        assert not torch.cuda.is_initialized()
    finally:
        store.clear(key.digest)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_stored_cubin_serves_calls_of_every_device_that_fits() -> None:
    needs_nvrtc()
    x = torch.randn(64, 200, device="cuda")
    key = SPECS["_softmax"].key([x], {"dim": -1, "half_to_float": False})
    target = local_target("cuda")
    artifact = compile_cuda(softmax_candidate(key), target.arch)
    data = {CUBIN_BLOB: artifact.binary, "plan.json": encode_plan(artifact.candidate.plan)}
    store = session().store
    store.publish(record_for(key, target=target), data)
    try:
        ak.refresh()
        twins = [s for s in session().loaded.values() if s.record.key == key]
        assert {s.place for s in twins} == {
            index for index in range(torch.cuda.device_count()) if local_target("cuda", device_index=index) == target
        }
        with ak.enabled():
            for servable in twins:
                y = x.to(f"cuda:{servable.place}")
                served = torch.softmax(y, -1)
                assert servable.native.hits == 1
                assert torch.allclose(served.cpu().double(), torch.softmax(y.cpu().double(), -1), atol=1e-6)
    finally:
        store.clear(key.digest)
        session().loaded.clear()
        ak.refresh()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cubin_that_breaks_a_rule_never_reaches_the_driver() -> None:
    needs_nvrtc()
    x = torch.randn(64, 200, device="cuda")
    key = SPECS["_softmax"].key([x], {"dim": -1, "half_to_float": False})
    binary = compile_cuda(softmax_candidate(key), local_target("cuda").arch).binary
    step = KernelStep("softmax_rows", (64, 1, 1), (32, 1, 1), (InputArg(0), OutputArg(0)))
    with pytest.raises(BuildError, match="passes 2 arguments"):
        load_cuda_kernel(binary, LaunchPlan(1, (step,)), key, 0)
    with pytest.raises(BuildError, match="malformed"):
        load_cuda_kernel(binary[:-64], softmax_plan(key), key, 0)
