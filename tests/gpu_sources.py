"""GPU kernels and plans that the tests of builder and cubin reader share. Nothing here needs a GPU."""

from __future__ import annotations

import pytest

from torch_autokern.build.candidate import Candidate
from torch_autokern.build.cuda_toolkit import find_nvrtc, find_triton
from torch_autokern.errors import ToolchainError
from torch_autokern.runtime.plan import FloatArg, InputArg, IntArg, KernelArg, KernelStep, LaunchPlan, OutputArg

CUDA_SOURCE = r"""#include <cuda_fp16.h>
extern "C" __global__ void __launch_bounds__(256) scale(const float* x, float* y, int n, float by) {
  __shared__ float room[256];
  int i = blockIdx.x * 256 + threadIdx.x;
  room[threadIdx.x] = i < n ? x[i] : 0.0f;
  __syncthreads();
  if (i < n) y[i] = room[threadIdx.x] * by;
}
"""
SCALE_ARGS: tuple[KernelArg, ...] = (InputArg(0), OutputArg(0), IntArg(1000, 32), FloatArg(2.0, 32))
TRITON_SOURCE = """\
# autokern: {"entry": "soft", "signature": {"x": "*fp32", "y": "*fp32", "n": "i32"}, "constexprs": {"B": 1024}}
import triton
import triton.language as tl


@triton.jit
def soft(x, y, n, B: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, B)
    v = tl.load(x + row * n + at, mask=at < n, other=-float("inf"))
    v = tl.exp(v - tl.max(v, 0))
    tl.store(y + row * n + at, v / tl.sum(v, 0), mask=at < n)
"""
SOFT_ARGS: tuple[KernelArg, ...] = (InputArg(0), OutputArg(0), IntArg(1000, 32))


def needs_nvrtc() -> None:
    """Skip where NVRTC is not installed, in the words a user would read."""
    try:
        find_nvrtc()
    except ToolchainError as error:
        pytest.skip(str(error))


def needs_triton() -> None:
    """Skip where Triton is not installed, in the words a user would read."""
    try:
        find_triton()
    except ToolchainError as error:
        pytest.skip(str(error))


def cuda(
    source: str = CUDA_SOURCE, entry: str = "scale", args: tuple[KernelArg, ...] = SCALE_ARGS, **step: object
) -> Candidate:
    """A CUDA C++ candidate of one step; 4 blocks of 256 threads unless `step` says otherwise."""
    fields = {"grid": (4, 1, 1), "block": (256, 1, 1), **step}
    plan = LaunchPlan(1, (KernelStep(entry, args=args, **fields),))  # type: ignore[arg-type]
    return Candidate("cuda", source, plan, "scale it", "test")


def triton(source: str = TRITON_SOURCE, *steps: KernelStep) -> Candidate:
    """A Triton candidate; its plan leaves to Triton what Triton decides."""
    plan = LaunchPlan(1, steps or (KernelStep("soft", (7, 1, 1), (1, 1, 1), SOFT_ARGS),))
    return Candidate("triton", source, plan, "softmax of rows", "test")
