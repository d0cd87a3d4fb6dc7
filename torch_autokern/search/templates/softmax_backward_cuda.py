"""Gradient of softmax and log-softmax on a GPU, over a dimension whose elements are neighbours.

With output y and its gradient g: ``y * (g - sum g y)`` for softmax, ``g - exp(y) * sum g`` for log-softmax (ATen's
`_softmax_backward_data`). A row of both tensors is read once into the registers of its team of threads (`cuda_rows`); one sum
goes round the team, and the row is written once. `split`: few long rows in chunks for many blocks, in two launches.
"""

from __future__ import annotations

from torch_autokern.build.candidate import Candidate
from torch_autokern.runtime.plan import InputArg, OutputArg
from torch_autokern.search.templates.cuda_rows import CUDA_TYPES, ITEM_BYTES, RowShape, starts_on_vectors
from torch_autokern.search.templates.cuda_teams import RowKernel
from torch_autokern.search.templates.layout import dense_tensors, distinct_elements, loops_over, offset, steps_in
from torch_autokern.store.key import KernelKey, Target

LOG_OPS = {"_softmax_backward_data": False, "_log_softmax_backward_data": True}

_CODE = """constexpr bool LOG = @LOG@, EXACT = sizeof(O) == 4;
INLINE int64_t g_offset(int64_t row) { return @G@; }
INLINE int64_t y_offset(int64_t row) { return @Y@; }
INLINE int64_t r_offset(int64_t row) { return @R@; }
INLINE float power(float v) {
  if (EXACT) return expf(v);
  float r;
  asm("ex2.approx.f32 %0, %1;" : "=f"(r) : "f"(v * 1.4426950408889634f));
  return r;
}
INLINE T nothing() {
  T r;
  from_float(0.0f, r);
  return r;
}
// The pieces of a second tensor at the places that the first one gave.
INLINE void load_beside(const place& p, const T* x, pieces<T>* v) {
  const bool wide = ALIGNED || ((reinterpret_cast<uintptr_t>(x) - p.shift * sizeof(T)) & 15) == 0;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int64_t begin = p.at(j);
    if (wide && p.whole(j)) {
      v[j] = load_piece_once(x + begin);
    } else {
#pragma unroll
      for (int k = 0; k < E; ++k) v[j].e[k] = p.has(j, k) ? x[begin + k] : nothing();
    }
  }
}
INLINE float row_sum(const pieces<T>* g, const pieces<T>* y) {
  float s[4] = {};
#pragma unroll
  for (int j = 0; j < V; ++j)
#pragma unroll
    for (int k = 0; k < E; ++k) {
      const float value = to_float(g[j].e[k]);
      s[k % 4] = LOG ? s[k % 4] + value : fmaf(value, to_float(y[j].e[k]), s[k % 4]);
    }
  return (s[0] + s[1]) + (s[2] + s[3]);
}
INLINE void write_row(const place& p, O* r, const pieces<T>* g, const pieces<T>* y, float sum) {
  const bool wide = stores_wide(p, r);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    pieces<O> out;
#pragma unroll
    for (int k = 0; k < E; ++k) {
      const float value = to_float(g[j].e[k]), o = to_float(y[j].e[k]);
      from_float(LOG ? fmaf(-power(o), sum, value) : o * (value - sum), out.e[k]);
    }
    store_row_piece(p, r, wide, j, out);
  }
}
"""
_READ = """  place p = my_place();
  g += g_offset(p.row);
  y += y_offset(p.row);
  p.shift = misalignment(g);
  pieces<T> gs[V], ys[V];
  load_row(p, g, nothing(), gs);
  load_beside(p, y, ys);
"""
_ROWS = (
    """extern "C" __global__ void __launch_bounds__(THREADS)
softmax_backward(const T* __restrict__ g, const T* __restrict__ y, O* __restrict__ r) {
  __shared__ float slots[C * WARPS];
  cluster_arrive();
"""
    + _READ
    + """  float sum[1] = {row_sum(gs, ys)};
  reduce<total, 1, true>(p, sum, slots);
  write_row(p, r + r_offset(p.row), gs, ys, sum[0]);
}
"""
)
_SPLIT = (
    """extern "C" __global__ void __launch_bounds__(THREADS)
measure(const T* __restrict__ g, const T* __restrict__ y, float* __restrict__ parts) {
  __shared__ float slots[WARPS];
"""
    + _READ
    + """  float sum[1] = {row_sum(gs, ys)};
  reduce<total, 1, true>(p, sum, slots);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum[0];
  @LEAVE@
}
extern "C" __global__ void __launch_bounds__(THREADS)
apply(const T* __restrict__ g, const T* __restrict__ y, O* __restrict__ r, const float* parts) {
"""
    + _READ
    + """  @WAIT@
  parts += p.row * CHUNKS;
  float sum = 0.0f;
  for (int c = threadIdx.x % 32; c < CHUNKS; c += 32) sum += __ldcg(parts + c);
#pragma unroll
  for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  write_row(p, r + r_offset(p.row), gs, ys, sum);
}
"""
)


def row_kernel(key: KernelKey) -> RowKernel | None:
    """The op over rows of neighbours; None for any other call."""
    if key.device_type != "cuda" or key.op not in LOG_OPS or not dense_tensors(key, tuple(CUDA_TYPES)):
        return None
    (grad, output), result, dim = key.tensors, key.outputs[0], key.scalars["dim"]
    if grad is None or output is None or result is None or not isinstance(dim, int):
        return None
    if not grad.sizes == output.sizes == result.sizes or not distinct_elements(result):
        return None
    if not grad.dtype == output.dtype == result.dtype:
        return None
    tensors = (grad, output, result)
    length = grad.sizes[dim] if grad.sizes else 1
    if length > 1 and any(t.strides[dim] != 1 for t in tensors):
        return None
    outer = loops_over([d for d in range(len(grad.sizes)) if d != dim], tensors)
    strides = tuple(tuple(loop.strides[i] for loop in outer) for i in range(3))
    shape = RowShape(length, ITEM_BYTES[grad.dtype], starts_on_vectors(tensors, strides))
    code = _CODE.replace("@LOG@", "true" if LOG_OPS[key.op] else "false")
    for index, name in enumerate("GYR"):
        code = code.replace(f"@{name}@", offset(outer, index, "row"))
    inputs = (InputArg(0), InputArg(1))
    return RowKernel(
        "softmax_backward",
        steps_in(outer),
        shape,
        (grad.dtype, result.dtype),
        (*inputs, OutputArg(0)),
        code,
        _ROWS,
        _SPLIT,
        part_bytes=4,
        measured=inputs,
    )


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for rows of neighbouring elements, best guess first; else []."""
    kernel = row_kernel(key)
    return kernel.candidates(target) if kernel is not None and target.device_type == "cuda" else []
