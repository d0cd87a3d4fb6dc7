"""KernelBench's RMSNorm at a size for tests: body, module, key and kernels in C++, right and wrong."""

from __future__ import annotations

import functools

import torch
from torch import nn

import torch_autokern as ak
from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.build.compile_cpp import compile_cpp
from torch_autokern.runtime.decorated import function_of
from torch_autokern.runtime.plan import CpuStep, InputArg, LaunchPlan, OutputArg
from torch_autokern.runtime.target import local_target
from torch_autokern.store.key import KernelKey

N, C, PIXELS = 4, 64, 32 * 32
SHAPE = (N, C, 32, 32)
EPS = 1e-5

# One unit of the range is 64 pixels of one image: the sums of their channels stay in registers.
SOURCE = """
#include <cstdint>
#include <cmath>
static const int64_t C = 64, P = 1024, B = 64;
static void normalise(int64_t begin, int64_t end, void* const* p, int64_t channels, double eps) {
  const float* x = static_cast<const float*>(p[0]);
  float* y = static_cast<float*>(p[1]);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t at = i / (P / B) * C * P + i % (P / B) * B;
    double sum[B] = {};  // one float sum over all channels would err as much as the judge allows
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t k = 0; k < B; ++k) { const double v = x[at + c * P + k]; sum[k] += v * v; }
    float root[B];
    for (int64_t k = 0; k < B; ++k) root[k] = static_cast<float>(std::sqrt(sum[k] / C + eps));
    for (int64_t c = 0; c < C; ++c)
      for (int64_t k = 0; k < B; ++k) y[at + c * P + k] = x[at + c * P + k] / root[k];
  }
}
extern "C" void right(int64_t b, int64_t e, void* const* p) { normalise(b, e, p, C, 1e-5); }
extern "C" void drops_a_channel(int64_t b, int64_t e, void* const* p) { normalise(b, e, p, C - 1, 1e-5); }
extern "C" void copies(int64_t b, int64_t e, void* const* p) {
  for (int64_t i = b * C * B; i < e * C * B; ++i) static_cast<float*>(p[1])[i] = static_cast<const float*>(p[0])[i];
}
extern "C" void marker(int64_t b, int64_t e, void* const* p) {
  for (int64_t i = b * C * B; i < e * C * B; ++i) static_cast<float*>(p[1])[i] = 42.0f;
}
"""


def body(x: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """``x / sqrt(mean(x^2 over dim 1) + eps)``."""
    return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """The same as a module."""

    def __init__(self, eps: float = EPS) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + self.eps)


def key() -> KernelKey:
    """The key of `body` at `SHAPE`."""
    return function_of(ak.kernel(body)).key(torch.empty(SHAPE))


def candidate(entry: str) -> Candidate:
    """A kernel of `SOURCE`."""
    step = CpuStep(entry, N * PIXELS // 64, 1, (InputArg(0, 0), OutputArg(0, 0)))
    return Candidate("cpp", SOURCE, LaunchPlan(1, (step,), ()), f"RMSNorm, {entry}", "tests")


@functools.cache
def artifact(entry: str) -> Artifact:
    """The same, built."""
    return compile_cpp(candidate(entry), local_target())
