"""Plain kernels of tiny keys, so that `overhead.py` has a hit to time. They are right, and nobody claims that they are fast:
they go into this process's table only, never into a store."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_autokern.build.candidate import Candidate
from torch_autokern.build.compile_cpp import compile_cpp
from torch_autokern.report.cases import EPS, Case
from torch_autokern.runtime.kernel import LoadedKernel, load_cpu_kernel
from torch_autokern.runtime.plan import PLAN_VERSION, CpuStep, InputArg, LaunchPlan, OutputArg, PointerArg
from torch_autokern.runtime.target import local_target
from torch_autokern.store.key import KernelKey, TensorKey

SIDE = 8
_SQUARE = TensorKey("float32", (SIDE, SIDE), (SIDE, 1), 4)

_SOFTMAX = """
#include <math.h>
#include <stdint.h>
extern "C" void softmax(int64_t begin, int64_t end, void* const* pointers) {
  const float* x = static_cast<const float*>(pointers[0]);
  float* y = static_cast<float*>(pointers[1]);
  for (int64_t row = begin; row < end; ++row) {
    const float* in = x + row * 8;
    float* out = y + row * 8;
    float top = in[0], sum = 0;
    for (int i = 1; i < 8; ++i) top = in[i] > top ? in[i] : top;
    for (int i = 0; i < 8; ++i) sum += out[i] = expf(in[i] - top);
    for (int i = 0; i < 8; ++i) out[i] /= sum;
  }
}
"""

_LAYER_NORM = f"""
#include <math.h>
#include <stdint.h>
extern "C" void layer_norm(int64_t begin, int64_t end, void* const* pointers) {{
  const float* x = static_cast<const float*>(pointers[0]);
  const float* weight = static_cast<const float*>(pointers[1]);
  const float* bias = static_cast<const float*>(pointers[2]);
  float* y = static_cast<float*>(pointers[3]);
  float* means = static_cast<float*>(pointers[4]);
  float* rstds = static_cast<float*>(pointers[5]);
  for (int64_t row = begin; row < end; ++row) {{
    const float* in = x + row * 8;
    float mean = 0, variance = 0;
    for (int i = 0; i < 8; ++i) mean += in[i];
    mean /= 8;
    for (int i = 0; i < 8; ++i) variance += (in[i] - mean) * (in[i] - mean);
    const float rstd = 1 / sqrtf(variance / 8 + {EPS}f);
    for (int i = 0; i < 8; ++i) y[row * 8 + i] = (in[i] - mean) * rstd * weight[i] + bias[i];
    means[row] = mean;
    rstds[row] = rstd;
  }}
}}
"""

_MM = """
#include <stdint.h>
extern "C" void mm(int64_t begin, int64_t end, void* const* pointers) {
  const float* a = static_cast<const float*>(pointers[0]);
  const float* b = static_cast<const float*>(pointers[1]);
  float* c = static_cast<float*>(pointers[2]);
  for (int64_t row = begin; row < end; ++row)
    for (int column = 0; column < 8; ++column) {
      float sum = 0;
      for (int k = 0; k < 8; ++k) sum += a[row * 8 + k] * b[k * 8 + column];
      c[row * 8 + column] = sum;
    }
}
"""

_SOURCES = {"_softmax": ("softmax", _SOFTMAX), "native_layer_norm": ("layer_norm", _LAYER_NORM), "mm": ("mm", _MM)}

HAND_WRITTEN: tuple[KernelKey, ...] = (
    Case("softmax", (SIDE, SIDE)).key(),
    Case("layer_norm", (SIDE, SIDE)).key(),
    KernelKey("mm", "cpu", (_SQUARE, _SQUARE), {}, (_SQUARE,)),
)


def as_programs_write_it(key: KernelKey, tensors: Sequence[Any]) -> Callable[[], Any]:
    """The call of one of the keys above through PyTorch's public function."""
    if key.op == "_softmax":
        return functools.partial(torch.softmax, tensors[0], -1)
    if key.op == "native_layer_norm":
        return functools.partial(torch.nn.functional.layer_norm, tensors[0], (SIDE,), tensors[1], tensors[2], EPS)
    return functools.partial(torch.mm, tensors[0], tensors[1])


def loaded_kernel(key: KernelKey, *, allow_weak_box: bool = False) -> LoadedKernel:
    """Build and load the plain kernel of one of the keys above.

    Raises:
        ToolchainError: no compiler.
        BoxError: compilers cannot be boxed well here, and `allow_weak_box` is not given.
    """
    entry, source = _SOURCES[key.op]
    inputs = tuple(InputArg(index) for index in range(len(key.tensors)))
    outputs = tuple(OutputArg(index) for index in range(len(key.outputs)))
    args: tuple[PointerArg, ...] = (*inputs, *outputs)
    plan = LaunchPlan(PLAN_VERSION, (CpuStep(entry, SIDE, SIDE, args),))
    candidate = Candidate("cpp", source, plan, idea="the definition, written out", author="benchmarks/overhead_kernels.py")
    artifact = compile_cpp(candidate, local_target("cpu"), allow_weak_box=allow_weak_box)
    return load_cpu_kernel(artifact.binary, artifact.identity, plan, key)
