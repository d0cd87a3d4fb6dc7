"""Softmax and log-softmax on a GPU over a dimension whose elements are neighbours: a row is read once into registers, its
maximum and the sum of its exponentials are found by its team of threads (`cuda_rows`), and it is written once.

`split`: few long rows are shared by many blocks in two launches; the first leaves each chunk's maximum and sum, the second
merges them (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax") and writes; the chunk comes from L2.
float32 uses `expf` and a quotient corrected by one step of Newton's iteration, so that it rounds as a division; half types use
`ex2.approx`, whose relative error of 2^-22 disappears in their rounding.
"""

from __future__ import annotations

from torch_autokern.build.candidate import Candidate
from torch_autokern.runtime.plan import InputArg, OutputArg
from torch_autokern.search.templates.cuda_rows import CUDA_TYPES, ITEM_BYTES, RowShape, starts_on_vectors
from torch_autokern.search.templates.cuda_teams import RowKernel
from torch_autokern.search.templates.layout import dense_tensors, distinct_elements, loops_over, offset, steps_in
from torch_autokern.store.key import KernelKey, Target

LOG_OPS = {"_softmax": False, "_log_softmax": True}

MATH = """constexpr bool LOG = @LOG@, EXACT = sizeof(T) == 4;
INLINE float exp2f_fast(float v) {
  float r;
  asm("ex2.approx.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
// d = x - max <= 0
INLINE float power(float d) { return EXACT ? expf(d) : exp2f_fast(d * 1.4426950408889634f); }
INLINE float quotient(float e, float s, float r) {
  const float q = e * r;
  return EXACT ? fmaf(fmaf(-q, s, e), r, q) : q;
}
"""
_CODE = (
    MATH
    + """INLINE int64_t x_offset(int64_t row) { return @X@; }
INLINE int64_t y_offset(int64_t row) { return @Y@; }
INLINE float row_maximum(const pieces<T>* v) {
  float m[4] = {-INF, -INF, -INF, -INF};
#pragma unroll
  for (int j = 0; j < V; ++j)
#pragma unroll
    for (int k = 0; k < E; ++k) m[k % 4] = fmaxf(m[k % 4], to_float(v[j].e[k]));
  return fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
}
// Sum of exponentials; float32 keeps them (or the differences, for the logarithm) in place of the elements.
INLINE float row_sum(pieces<T>* v, float m) {
  float s[4] = {};
#pragma unroll
  for (int j = 0; j < V; ++j)
#pragma unroll
    for (int k = 0; k < E; ++k) {
      const float d = to_float(v[j].e[k]) - m, w = power(d);
      if (EXACT) from_float(LOG ? d : w, v[j].e[k]);
      s[k % 4] += w;
    }
  return (s[0] + s[1]) + (s[2] + s[3]);
}
// `ready`: `row_sum` was here before.
INLINE void write_row(const place& p, O* y, pieces<T>* v, float m, float s, bool ready) {
  const bool wide = stores_wide(p, y);
  const float r = 1.0f / s, l = LOG ? logf(s) : 0.0f;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    pieces<O> out;
#pragma unroll
    for (int k = 0; k < E; ++k) {
      const float value = to_float(v[j].e[k]), d = EXACT && ready ? value : value - m;
      const float w = LOG ? d - l : quotient(EXACT && ready ? value : power(d), s, r);
      from_float(w, out.e[k]);
    }
    store_row_piece(p, y, wide, j, out);
  }
}
INLINE T lowest() {
  T r;
  from_float(-INF, r);
  return r;
}
"""
)
_ROWS = """extern "C" __global__ void __launch_bounds__(THREADS) softmax(const T* __restrict__ x, O* __restrict__ y) {
  __shared__ float slots[2][C * WARPS];
  cluster_arrive();
  place p = my_place();
  x += x_offset(p.row);
  y += y_offset(p.row);
  p.shift = misalignment(x);
  pieces<T> v[V];
  load_row(p, x, lowest(), v);
  float m[1] = {row_maximum(v)};
  reduce<maximum, 1, true>(p, m, slots[0]);
  float s[1] = {row_sum(v, m[0])};
  reduce<total, 1, false>(p, s, slots[1]);
  write_row(p, y, v, m[0], s[0], true);
}
"""

_SPLIT = """extern "C" __global__ void __launch_bounds__(THREADS) measure(const T* __restrict__ x, float2* __restrict__ parts) {
  __shared__ float slots[2][WARPS];
  place p = my_place();
  x += x_offset(p.row);
  p.shift = misalignment(x);
  pieces<T> v[V];
  load_row(p, x, lowest(), v);
  float m[1] = {row_maximum(v)};
  reduce<maximum, 1, true>(p, m, slots[0]);
  // Nothing above -inf here: measured from 0 the sum is 0, or NaN where a NaN hides.
  float s[1] = {row_sum(v, m[0] == -INF ? 0.0f : m[0])};
  reduce<total, 1, false>(p, s, slots[1]);
  if (threadIdx.x == 0) parts[blockIdx.x] = make_float2(m[0], s[0]);
  @LEAVE@
}
extern "C" __global__ void __launch_bounds__(THREADS)
apply(const T* __restrict__ x, O* __restrict__ y, const float2* parts) {
  place p = my_place();
  x += x_offset(p.row);
  y += y_offset(p.row);
  p.shift = misalignment(x);
  pieces<T> v[V];
  load_row(p, x, lowest(), v);
  @WAIT@
  parts += p.row * CHUNKS;
  const int lane = threadIdx.x % 32;
  float m = -INF, s = 0.0f;
  for (int c = lane; c < CHUNKS; c += 32) m = fmaxf(m, __ldcg(&parts[c].x));
#pragma unroll
  for (int o = 16; o > 0; o /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
  // A chunk of -inf only weighs nothing, unless the whole row is so: then exp(-inf - -inf) makes the row NaN, as it must.
  for (int c = lane; c < CHUNKS; c += 32) {
    const float2 part = __ldcg(&parts[c]);
    s += part.y * expf(part.x - m);
  }
#pragma unroll
  for (int o = 16; o > 0; o /= 2) s += __shfl_xor_sync(~0u, s, o);
  write_row(p, y, v, m, s, false);
}
"""


def row_kernel(key: KernelKey) -> RowKernel | None:
    """The op over rows of neighbours; None for any other call."""
    if key.device_type != "cuda" or key.op not in LOG_OPS or not dense_tensors(key, tuple(CUDA_TYPES)):
        return None
    x, y, dim = key.tensors[0], key.outputs[0], key.scalars["dim"]
    if x is None or y is None or x.sizes != y.sizes or not distinct_elements(y) or not isinstance(dim, int):
        return None
    if x.dtype != y.dtype and y.dtype != "float32":
        return None
    length = x.sizes[dim] if x.sizes else 1
    if length > 1 and (x.strides[dim], y.strides[dim]) != (1, 1):
        return None
    outer = loops_over([d for d in range(len(x.sizes)) if d != dim], (x, y))
    strides = tuple(tuple(loop.strides[i] for loop in outer) for i in range(2))
    shape = RowShape(length, ITEM_BYTES[x.dtype], starts_on_vectors((x, y), strides))
    code = _CODE.replace("@LOG@", "true" if LOG_OPS[key.op] else "false")
    code = code.replace("@X@", offset(outer, 0, "row")).replace("@Y@", offset(outer, 1, "row"))
    args = (InputArg(0), OutputArg(0))
    return RowKernel("softmax", steps_in(outer), shape, (x.dtype, y.dtype), args, code, _ROWS, _SPLIT, part_bytes=8)


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for rows of neighbouring elements, best guess first; else []."""
    kernel = row_kernel(key)
    return kernel.candidates(target) if kernel is not None and target.device_type == "cuda" else []
