"""LayerNorm on a GPU: a row is read once into registers, its moments are found by its team of threads (`cuda_rows`), and it is
written once. `split`: few long rows are shared by many blocks in two launches, the second reads its chunk from L2 again.

The variance is two-pass and corrected (Chan, Golub, LeVeque 1983, eq. 1.7): with m0 near the mean and d = x - m0,
``mean = m0 + sum d / n`` and ``var = sum d^2 / n - (sum d / n)^2``; chunks are merged as in their eq. 2.1, in double. Sums
carry 1 / n inside, so that a row of large numbers does not overflow where its mean does not. rstd is `rsqrtf` and one step of
Newton's iteration.
"""

from __future__ import annotations

import math

from torch_autokern.build.candidate import Candidate
from torch_autokern.runtime.plan import InputArg, OutputArg, PointerArg
from torch_autokern.search.templates.cuda_rows import CUDA_TYPES, ITEM_BYTES, VECTOR_BYTES, RowShape, starts_on_vectors
from torch_autokern.search.templates.cuda_teams import RowKernel
from torch_autokern.search.templates.layout import (
    Loop,
    collapse,
    dense_tensors,
    distinct_elements,
    loops_over,
    offset,
    steps_in,
)
from torch_autokern.store.key import KernelKey, Target, TensorKey

ARGS: tuple[PointerArg, ...] = (InputArg(0), InputArg(1), InputArg(2), OutputArg(0), OutputArg(1), OutputArg(2))

_CODE = """typedef @WT@ W;
constexpr bool HAS_WEIGHT = @WEIGHT@, HAS_BIAS = @BIAS@, PARAMETERS_ALIGNED = @PARAMETERS_ALIGNED@, KEEP = sizeof(T) == 4;
constexpr float EPS = @EPS@;
INLINE int64_t x_offset(int64_t row) { return @X@; }
INLINE int64_t mean_offset(int64_t row) { return @MEAN@; }
INLINE int64_t rstd_offset(int64_t row) { return @RSTD@; }
INLINE int64_t y_offset(int64_t row) { return @Y@; }
INLINE float rstd_of(float var) {
  const float v = (var < 0.0f ? 0.0f : var) + EPS, r = rsqrtf(v);
  // An infinite or a zero variance has no step to take.
  return v > 0.0f && v < INF ? fmaf(r * fmaf(-v * r, r, 1.0f), 0.5f, r) : r;
}
// What distances from m0 add to the mean. Where a row holds an infinity or NaN, m0 is its mean and every distance is NaN or
// infinite: the mean stays as theory has it (infinite for infinities of one sign, else NaN), and rstd and the row are NaN.
INLINE float beside(float m0, float shift) { return fabsf(m0) < INF ? shift : 0.0f; }
INLINE float part_of_mean(const pieces<T>* v, float scale) {
  float s[4] = {};
#pragma unroll
  for (int j = 0; j < V; ++j)
#pragma unroll
    for (int k = 0; k < E; ++k) s[k % 4] = fmaf(to_float(v[j].e[k]), scale, s[k % 4]);
  return (s[0] + s[1]) + (s[2] + s[3]);
}
// sums = {sum d, sum d^2} * scale with d = x - m0; float32 keeps d in place of x.
INLINE void parts_of_variance(const place& p, pieces<T>* v, float m0, float scale, float (&sums)[2]) {
  float a[4] = {}, b[4] = {};
#pragma unroll
  for (int j = 0; j < V; ++j)
#pragma unroll
    for (int k = 0; k < E; ++k) {
      const float d = p.has(j, k) ? to_float(v[j].e[k]) - m0 : 0.0f, scaled = d * scale;
      if (KEEP) from_float(d, v[j].e[k]);
      a[k % 4] += scaled;
      b[k % 4] = fmaf(scaled, d, b[k % 4]);
    }
  sums[0] = (a[0] + a[1]) + (a[2] + a[3]);
  sums[1] = (b[0] + b[1]) + (b[2] + b[3]);
}
INLINE void load_parameters(const place& p, const W* w, int j, float fill, float (&r)[E]) {
  const int64_t begin = p.at(j);
  if (PARAMETERS_ALIGNED && p.whole(j)) {
    const pieces<W> v = load_piece(w + begin);
#pragma unroll
    for (int k = 0; k < E; ++k) r[k] = to_float(v.e[k]);
  } else {
#pragma unroll
    for (int k = 0; k < E; ++k) r[k] = p.has(j, k) ? to_float(__ldg(w + begin + k)) : fill;
  }
}
// `kept`: v holds d = x - m0 already.
INLINE void write_row(
    const place& p, O* y, const W* w, const W* b, const pieces<T>* v, float m0, float rest, float rstd, bool kept) {
  const bool wide = stores_wide(p, y);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    float ws[E], bs[E];
    if (HAS_WEIGHT) load_parameters(p, w, j, 1.0f, ws);
    if (HAS_BIAS) load_parameters(p, b, j, 0.0f, bs);
    pieces<O> out;
#pragma unroll
    for (int k = 0; k < E; ++k) {
      const float value = to_float(v[j].e[k]), d = KEEP && kept ? value : value - m0;
      float r = (d - rest) * rstd;
      if (HAS_WEIGHT && HAS_BIAS) r = fmaf(r, ws[k], bs[k]);
      else if (HAS_WEIGHT) r *= ws[k];
      else if (HAS_BIAS) r += bs[k];
      from_float(r, out.e[k]);
    }
    store_row_piece(p, y, wide, j, out);
  }
}
INLINE T nothing() {
  T r;
  from_float(0.0f, r);
  return r;
}
"""

SIGNATURE = """const T* __restrict__ x, const W* __restrict__ w, const W* __restrict__ b, O* __restrict__ y, float* mean,
           float* rstd"""
_ROWS = (
    """extern "C" __global__ void __launch_bounds__(THREADS)
layer_norm("""
    + SIGNATURE
    + """) {
  __shared__ float slots[3][C * WARPS];
  cluster_arrive();
  place p = my_place();
  x += x_offset(p.row);
  y += y_offset(p.row);
  p.shift = misalignment(x);
  pieces<T> v[V];
  load_row(p, x, nothing(), v);
  constexpr float SCALE = float(1.0 / double(D));
  float m0[1] = {part_of_mean(v, SCALE)};
  reduce<total, 1, true>(p, m0, slots[0]);
  float sums[2];
  parts_of_variance(p, v, m0[0], SCALE, sums);
  reduce<total, 2, false>(p, sums, slots[1]);
  const float r = rstd_of(sums[1] - sums[0] * sums[0]);
  if (p.member == 0 && p.live) {
    mean[mean_offset(p.row)] = m0[0] + beside(m0[0], sums[0]);
    rstd[rstd_offset(p.row)] = r;
  }
  write_row(p, y, w, b, v, m0[0], sums[0], r, true);
}
"""
)

_SPLIT = (
    """INLINE int64_t count_of(int64_t chunk, int shift) {
  const int64_t begin = chunk * TEAM * V * E - shift, end = begin + int64_t(TEAM) * V * E;
  const int64_t count = (end < D ? end : D) - (begin > 0 ? begin : 0);
  return count > 0 ? count : 0;  // the last piece of a row that starts on 16 bytes after all
}
extern "C" __global__ void __launch_bounds__(THREADS) measure(const T* __restrict__ x, float4* __restrict__ parts) {
  __shared__ float slots[3][WARPS];
  place p = my_place();
  x += x_offset(p.row);
  p.shift = misalignment(x);
  pieces<T> v[V];
  load_row(p, x, nothing(), v);
  const float count = float(count_of(blockIdx.x % CHUNKS, p.shift)), scale = 1.0f / fmaxf(count, 1.0f);
  float m0[1] = {part_of_mean(v, scale)};
  reduce<total, 1, true>(p, m0, slots[0]);
  float sums[2];
  parts_of_variance(p, v, m0[0], scale, sums);
  reduce<total, 2, false>(p, sums, slots[1]);
  // Mean in two parts; variance about it.
  if (threadIdx.x == 0) parts[blockIdx.x] = make_float4(m0[0], beside(m0[0], sums[0]), sums[1] - sums[0] * sums[0], 0.0f);
  @LEAVE@
}
INLINE double over_warp(double v) {
#pragma unroll
  for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
extern "C" __global__ void __launch_bounds__(THREADS)
apply("""
    + SIGNATURE
    + """, const float4* parts) {
  place p = my_place();
  x += x_offset(p.row);
  y += y_offset(p.row);
  p.shift = misalignment(x);
  pieces<T> v[V];
  load_row(p, x, nothing(), v);
  @WAIT@
  parts += p.row * CHUNKS;
  const int lane = threadIdx.x % 32;
  double sum = 0, spread = 0;
  for (int c = lane; c < CHUNKS; c += 32) {
    const float4 part = __ldcg(&parts[c]);
    sum += double(count_of(c, p.shift)) * (double(part.x) + double(part.y));
  }
  const double centre = over_warp(sum) / double(D);
  for (int c = lane; c < CHUNKS; c += 32) {
    const float4 part = __ldcg(&parts[c]);
    const double away = (double(part.x) + double(part.y)) - centre;
    spread += double(count_of(c, p.shift)) * (double(part.z) + away * away);
  }
  const float r = rstd_of(float(over_warp(spread) / double(D)));
  const float m0 = float(centre);
  if (p.member == 0 && blockIdx.x % CHUNKS == 0) {
    mean[mean_offset(p.row)] = m0;
    rstd[rstd_offset(p.row)] = r;
  }
  write_row(p, y, w, b, v, m0, float(centre - double(m0)), r, false);
}
"""
)


def row_kernel(key: KernelKey) -> RowKernel | None:
    """The op over rows of neighbours; None for any other call."""
    if key.device_type != "cuda" or key.op != "native_layer_norm" or not dense_tensors(key, tuple(CUDA_TYPES)):
        return None
    shape = key.scalars["normalized_shape"]
    x, weight, bias = key.tensors
    y, mean, rstd = key.outputs
    if x is None or y is None or mean is None or rstd is None or not isinstance(shape, tuple) or not shape:
        return None
    parameters = [t for t in (weight, bias) if t is not None]
    first = len(x.sizes) - len(shape)
    plain = x.dtype == y.dtype and mean.dtype == rstd.dtype == "float32" and len(mean.sizes) == len(x.sizes)
    kinds = {t.dtype for t in parameters}
    if not plain or len(kinds) > 1 or not kinds <= {x.dtype, "float32"}:
        return None
    if not all(distinct_elements(t) for t in (y, mean, rstd)) or not _one_run([x, y, *parameters], len(shape)):
        return None
    outer = loops_over(range(first), (x, mean, rstd, y))
    strides = tuple(tuple(loop.strides[i] for loop in outer) for i in (0, 3))
    rows = RowShape(math.prod(shape), ITEM_BYTES[x.dtype], starts_on_vectors((x, y), strides))
    values = {
        "WT": CUDA_TYPES[parameters[0].dtype if parameters else x.dtype],
        "WEIGHT": "true" if weight is not None else "false",
        "BIAS": "true" if bias is not None else "false",
        "PARAMETERS_ALIGNED": "true"
        if rows.aligned and all(t.alignment_bytes >= VECTOR_BYTES for t in parameters)
        else "false",
        "EPS": f"float({float(key.scalars['eps'])!r})",  # type: ignore[arg-type]
        **{name: offset(outer, i, "row") for i, name in enumerate(("X", "MEAN", "RSTD", "Y"))},
    }
    code = _CODE
    for name, value in values.items():
        code = code.replace(f"@{name}@", value)
    return RowKernel("layer_norm", steps_in(outer), rows, (x.dtype, y.dtype), ARGS, code, _ROWS, _SPLIT, part_bytes=16)


def _one_run(tensors: list[TensorKey], dims: int) -> bool:
    """Whether the last `dims` dimensions are the same run of neighbours in every tensor."""
    loops = [Loop(tensors[0].sizes[place - dims], tuple(t.strides[place - dims] for t in tensors)) for place in range(dims)]
    joined = collapse(loops)
    return not joined or (len(joined) == 1 and set(joined[0].strides) == {1})


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for rows of neighbouring elements, best guess first; else []."""
    kernel = row_kernel(key)
    return kernel.candidates(target) if kernel is not None and target.device_type == "cuda" else []
