"""Plans on a GPU: real cubins launched through the driver, alone and through the router."""

from __future__ import annotations

import pytest
import torch

import torch_autokern as autokern
from torch_autokern.ops import SPECS
from torch_autokern.runtime.extension import extension
from torch_autokern.runtime.kernel import LoadedKernel, load_cuda_kernel
from torch_autokern.runtime.plan import (
    FloatArg,
    InputArg,
    IntArg,
    KernelStep,
    LaunchPlan,
    MemsetStep,
    OutputArg,
    TensorMapArg,
    Workspace,
    WorkspaceArg,
)
from torch_autokern.runtime.session import family_bit
from torch_autokern.store.key import KernelKey

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SOURCE = r"""
#include <cuda_fp16.h>
extern "C" __global__ void softmax_rows(const float* x, float* y, int columns) {
  x += (long long)blockIdx.x * columns; y += (long long)blockIdx.x * columns;
  float top = __int_as_float(0xff800000), sum = 0;
  for (int i = threadIdx.x; i < columns; i += 32) top = fmaxf(top, x[i]);
  for (int o = 16; o; o /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
  for (int i = threadIdx.x; i < columns; i += 32) sum += expf(x[i] - top);
  for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  for (int i = threadIdx.x; i < columns; i += 32) y[i] = expf(x[i] - top) / sum;
}
extern "C" __global__ void scalars(float* y, int a, long long b, float c, double d, __half e) {
  y[0] = a; y[1] = (float)b; y[2] = c; y[3] = (float)d; y[4] = __half2float(e);
}
extern "C" __global__ void fill_from(float* y, const float* scratch, float add) { y[threadIdx.x] = scratch[threadIdx.x] + add; }
extern "C" __global__ void big_shared(float* y) {
  extern __shared__ float room[];
  room[threadIdx.x * 400] = threadIdx.x; __syncthreads();
  y[threadIdx.x] = room[(127 - threadIdx.x) * 400];
}
extern "C" __global__ void both_kinds_of_shared(float* y) {
  extern __shared__ float room[];
  __shared__ float own[128];
  room[12287] = 1; own[threadIdx.x] = threadIdx.x; __syncthreads();
  y[threadIdx.x] = own[127 - threadIdx.x] + room[12287];
}
extern "C" __global__ void cluster_rank(float* y) {
  unsigned rank; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) y[blockIdx.x] = rank;
}
struct alignas(64) Map { char bytes[128]; };
extern "C" __global__ void tma_copy(float* y, const __grid_constant__ Map map) {
  __shared__ alignas(128) float tile[64];
  __shared__ alignas(8) unsigned long long bar;
  unsigned tile_at = (unsigned)__cvta_generic_to_shared(tile), bar_at = (unsigned)__cvta_generic_to_shared(&bar);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(bar_at));
    asm volatile("fence.proxy.async.shared::cta;");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 256;" :: "r"(bar_at));
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(tile_at), "l"(&map), "r"(8), "r"(8), "r"(bar_at) : "memory");
  }
  __syncthreads();
  unsigned done = 0;
  while (!done)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(bar_at));
  y[threadIdx.x] = tile[threadIdx.x];
}
"""


@pytest.fixture(scope="module")
def cubin() -> bytes:
    core = pytest.importorskip("cuda.core", reason="cuda-core compiles the test kernels: pip install torch_autokern[cuda]")
    options = core.ProgramOptions(arch="sm_90a", std="c++17", include_path=["/usr/local/cuda/include"])
    return bytes(core.Program(SOURCE, "c++", options).compile("cubin").code)


def _key(x: torch.Tensor) -> KernelKey:
    return SPECS["_softmax"].key([x], {"dim": -1, "half_to_float": False})


def _load(
    cubin: bytes, x: torch.Tensor, *steps: KernelStep | MemsetStep, workspaces: tuple[Workspace, ...] = ()
) -> LoadedKernel:
    return load_cuda_kernel(cubin, LaunchPlan(1, steps, workspaces), _key(x), x.get_device(), "record")


def _softmax(cubin: bytes, x: torch.Tensor, **changes: object) -> LoadedKernel:
    args = (InputArg(0), OutputArg(0), IntArg(x.shape[-1], 32))
    return _load(cubin, x, KernelStep("softmax_rows", (x.numel() // x.shape[-1], 1, 1), (32, 1, 1), args, **changes))  # type: ignore[arg-type]


def _serve(kernel: LoadedKernel) -> None:
    """Inside an open scope: past the session, which cannot know the family and so would not have it watched."""
    words = SPECS["_softmax"].encode(kernel.key, kernel.native_device)
    extension().set_table([(words, [(0, 1, 0, kernel.native)])])
    extension().watch(family_bit(words))


def test_scalars_of_every_width_arrive(cubin: bytes) -> None:
    x = torch.zeros(1, 8, device="cuda")
    args = (OutputArg(0), IntArg(-7, 32), IntArg(-(1 << 40), 64), FloatArg(0.1, 32), FloatArg(0.1, 64), FloatArg(1.5, 16))
    (y,) = _load(cubin, x, KernelStep("scalars", (1, 1, 1), (1, 1, 1), args)).run([x])
    assert y is not None
    assert y[0, :5].tolist() == pytest.approx([-7, -(2.0**40), 0.1, 0.1, 1.5], rel=1e-7)


def test_zeroed_workspace_memset_and_step_order(cubin: bytes) -> None:
    x = torch.zeros(1, 64, device="cuda")
    fill = KernelStep("fill_from", (1, 1, 1), (64, 1, 1), (OutputArg(0), WorkspaceArg("room"), FloatArg(2.0, 32)))
    zeroed = _load(cubin, x, fill, workspaces=(Workspace("room", 256, zeroed=True),))
    (y,) = zeroed.run([x])
    assert y is not None
    assert torch.equal(y, torch.full_like(x, 2.0))
    ones = MemsetStep(WorkspaceArg("room"), 256, 0x3F)  # 0x3f3f3f3f is 0.747059...
    (y,) = _load(cubin, x, ones, fill, workspaces=(Workspace("room", 256),)).run([x])
    assert y is not None
    assert torch.allclose(y, torch.full_like(x, 2.7470588))


def test_more_than_48_kb_of_shared_memory(cubin: bytes) -> None:
    x = torch.zeros(1, 128, device="cuda")
    (y,) = _load(cubin, x, KernelStep("big_shared", (1, 1, 1), (128, 1, 1), (OutputArg(0),), shared_bytes=204800)).run([x])
    assert y is not None
    assert torch.equal(y[0], torch.arange(127, -1, -1, device="cuda", dtype=torch.float32))


def test_48_kb_of_shared_memory_beside_what_the_kernel_declares(cubin: bytes) -> None:
    x = torch.zeros(1, 128, device="cuda")
    step = KernelStep("both_kinds_of_shared", (1, 1, 1), (128, 1, 1), (OutputArg(0),), shared_bytes=49152)
    (y,) = _load(cubin, x, step).run([x])
    assert y is not None
    assert torch.equal(y[0], torch.arange(128, 0, -1, device="cuda", dtype=torch.float32))


def test_clusters_up_to_sixteen_blocks(cubin: bytes) -> None:
    x = torch.zeros(1, 32, device="cuda")
    (y,) = _load(cubin, x, KernelStep("cluster_rank", (32, 1, 1), (32, 1, 1), (OutputArg(0),), cluster=(16, 1, 1))).run([x])
    assert y is not None
    assert torch.equal(y[0], (torch.arange(32, device="cuda") % 16).float())


def test_tensor_map_reads_a_tile(cubin: bytes) -> None:
    x = torch.randn(32, 32, device="cuda")
    tile = TensorMapArg(InputArg(0), 7, (32, 32), (128,), (8, 8), (1, 1))  # 7: CU_TENSOR_MAP_DATA_TYPE_FLOAT32
    (y,) = _load(cubin, x, KernelStep("tma_copy", (1, 1, 1), (64, 1, 1), (OutputArg(0), tile))).run([x])
    assert y is not None
    assert torch.equal(y.flatten()[:64].view(8, 8), x[8:16, 8:16])


@pytest.mark.parametrize("changes", [{}, {"cooperative": True}, {"programmatic": True}])
def test_a_served_call_runs_our_kernel(cubin: bytes, changes: dict[str, object]) -> None:
    x = torch.randn(64, 200, device="cuda")
    kernel = _softmax(cubin, x, **changes)
    with autokern.enabled():
        _serve(kernel)
        y = torch.softmax(x, -1)
    assert kernel.native.hits == 1
    assert torch.allclose(y, torch.softmax(x, -1))


def test_a_served_call_is_captured_and_replays_with_new_contents(cubin: bytes) -> None:
    x = torch.randn(64, 200, device="cuda")
    kernel = _softmax(cubin, x)
    with autokern.enabled():
        _serve(kernel)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = torch.softmax(x, -1)
    assert kernel.native.hits == 1
    x.copy_(torch.randn_like(x) * 3)
    graph.replay()
    assert torch.allclose(y, torch.softmax(x, -1))


def test_a_served_call_runs_on_the_current_stream(cubin: bytes) -> None:
    x = torch.randn(64, 200, device="cuda")
    kernel = _softmax(cubin, x)
    stream = torch.cuda.Stream()
    with autokern.enabled():
        _serve(kernel)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            x.mul_(2)  # the kernel must wait for this
            y = torch.softmax(x, -1)
            assert not stream.query(), "the launch went to another stream, or waited"
    stream.synchronize()
    assert torch.allclose(y, torch.softmax(x, -1))


def test_a_refused_launch_is_quarantined_and_stock_runs(cubin: bytes) -> None:
    x = torch.randn(64, 200, device="cuda")
    kernel = _softmax(cubin, x, cluster=(16, 1, 1), shared_bytes=204800)
    with autokern.enabled():
        _serve(kernel)
        extension().forget_misses()
        first = torch.softmax(x, -1)
        second = torch.softmax(x, -1)
    want = torch.softmax(x, -1)
    assert torch.equal(first, want)
    assert torch.equal(second, want)
    if kernel.native.hits == 0:  # this card could not place sixteen such blocks: the launch was refused
        assert "CUDA_ERROR" in kernel.native.fault
        assert kernel.native.quarantined


def test_autograd_and_inference_mode_above_a_served_call(cubin: bytes) -> None:
    x = torch.randn(64, 200, device="cuda", requires_grad=True)
    kernel = _softmax(cubin, x.detach())
    grads: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        return torch.softmax(x, -1)

    for served in (False, True):
        if served:
            with autokern.enabled():
                _serve(kernel)
                y = run()
        else:
            y = run()
        grads.append(torch.autograd.grad(y.square().sum(), x)[0])
    assert kernel.native.hits == 1
    assert torch.allclose(*grads)
    with autokern.enabled(), torch.inference_mode():
        _serve(kernel)
        assert torch.softmax(x, -1).is_inference()
