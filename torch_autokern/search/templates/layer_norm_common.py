"""What both LayerNorm templates share: the layout of a call, and the C++ for moments and for applying them.

Variance is two-pass and corrected (Chan, Golub, LeVeque 1983, eq. 1.7): with any m0 near the mean and d = x - m0,
``mean = m0 + sum d / n`` and ``M2 = sum d^2 - (sum d)^2 / n``. In long rows the mean of the first elements serves as m0, unless
the correction turns out to be more than a quarter of the sum of squares. Constant rows come out with a variance of exactly 0
although m0 carries the rounding of a plain sum. Mean and rstd are applied in two parts each (the float nearest to them, and the
rest), so that a large offset costs no accuracy and the rounding of rstd does not tilt a whole row. Rows that float cannot carry
(overflow, underflow without eps, NaN, infinities) are redone in double.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_autokern.runtime.plan import InputArg, OutputArg, PointerArg
from torch_autokern.search.templates.cpp_half import CPP_TYPES, DTYPES
from torch_autokern.search.templates.layout import (
    Loop,
    collapse,
    dense_tensors,
    distinct_elements,
    loops_over,
    offset,
    steps_in,
)
from torch_autokern.store.key import KernelKey, TensorKey


@dataclass(frozen=True)
class NormLayout:
    """`length` neighbouring elements are normalised, once per step of `outer` (strides of input, mean, rstd, output).

    `stride` is the step in the input; where it is not 1 the input was permuted, and the output, which ATen makes contiguous,
    was not. ATen lets 16-bit inputs have float32 parameters, and then gives mean and rstd in float32 too.
    """

    length: int
    outer: tuple[Loop, ...]
    eps: float
    has_weight: bool
    has_bias: bool
    dtype: str
    parameter_dtype: str
    statistic_dtype: str
    stride: int = 1

    @property
    def rows(self) -> int:
        """Number of independent rows."""
        return steps_in(self.outer)

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of input and output, of parameters, of mean and rstd."""
        return self.dtype, self.parameter_dtype, self.statistic_dtype

    @property
    def args(self) -> tuple[PointerArg, ...]:
        """Pointers in the order that the C++ expects: x, weight, bias, y, mean, rstd."""
        return (InputArg(0), InputArg(1), InputArg(2), OutputArg(0), OutputArg(1), OutputArg(2))


def norm_layout(key: KernelKey) -> NormLayout | None:
    """Layout of a LayerNorm on a CPU whose normalised elements are neighbours; None for any other call."""
    if key.op != "native_layer_norm" or key.device_type != "cpu" or not dense_tensors(key, DTYPES):
        return None
    shape = key.scalars["normalized_shape"]
    x, weight, bias = key.tensors
    y, mean, rstd = key.outputs
    if x is None or y is None or mean is None or rstd is None or not isinstance(shape, tuple) or not shape:
        return None
    if not all(distinct_elements(t) for t in (y, mean, rstd)) or len(mean.sizes) != len(x.sizes):
        return None
    parameters = {t.dtype for t in (weight, bias) if t is not None} or {x.dtype}
    if y.dtype != x.dtype or len(parameters) > 1 or mean.dtype != rstd.dtype:
        return None
    first = len(x.sizes) - len(shape)
    stride = 1
    if not one_run([t for t in (x, weight, bias, y) if t is not None], len(shape)):
        stride = x.strides[-1]
        if len(shape) > 1 or not one_run([t for t in (weight, bias, y) if t is not None], 1):
            return None
    length = 1
    for size in shape:
        length *= int(size)
    outer = loops_over(range(first), (x, mean, rstd, y))
    eps = float(key.scalars["eps"])  # type: ignore[arg-type]
    return NormLayout(length, outer, eps, weight is not None, bias is not None, x.dtype, parameters.pop(), mean.dtype, stride)


def one_run(tensors: Sequence[TensorKey], dims: int) -> bool:
    """Whether the last `dims` dimensions are the same run of neighbours in every tensor."""
    loops = [Loop(tensors[0].sizes[place - dims], tuple(t.strides[place - dims] for t in tensors)) for place in range(dims)]
    joined = collapse(loops)
    return not joined or (len(joined) == 1 and set(joined[0].strides) == {1})


_CODE = """
typedef @ELEM@ elem;
typedef @PARAM@ param;
typedef @STAT@ stat;
constexpr int64_t D = @D@;
constexpr double EPS = @EPS@;
constexpr bool HAS_WEIGHT = @WEIGHT@, HAS_BIAS = @BIAS@, STREAM = @STREAM@, PREFETCH = @PREFETCH@;
constexpr int U = @U@;
AK_INLINE int64_t x_offset(int64_t row) { return @X@; }
AK_INLINE int64_t mean_offset(int64_t row) { return @MEAN@; }
AK_INLINE int64_t rstd_offset(int64_t row) { return @RSTD@; }
AK_INLINE int64_t y_offset(int64_t row) { return @Y@; }
struct moments {
  double mean, m2;  // m2: sum of squared distances from the mean
};
__attribute__((noinline, cold)) moments moments_in_double(const elem* x, int64_t n) {
  double sum = 0, d1 = 0, d2 = 0;
  for (int64_t i = 0; i < n; i++) sum += (double)x[i];
  const double mean = sum / (double)n;
  if (!(mean - mean == 0)) return {mean, mean - mean};  // infinite or NaN: the mean is what it is, the variance NaN
  for (int64_t i = 0; i < n; i++) {
    const double d = (double)x[i] - mean;
    d1 += d;
    d2 += d * d;
  }
  return {mean + d1 / (double)n, d2 - d1 * d1 / (double)n};
}
// Calls f(chain, vector) on N elements in a fixed order, U chains in turn; `fill` completes the last vector.
template <int64_t N, class F>
AK_INLINE void each(const elem* x, vf fill, F f) {
  constexpr int64_t WHOLE = N / (U * L) * (U * L), VECTORS = N / L * L;
  for (int64_t i = 0; i < WHOLE; i += U * L)
    AK_UNROLL for (int u = 0; u < U; u++) f(u, ak_load(x + i + u * L));
  AK_UNROLL for (int u = 0; u < (int)((VECTORS - WHOLE) / L); u++) f(u, ak_load(x + WHOLE + u * L));
  if (N % L) f(0, ak_load_part<N % L ? N % L : 1>(x + VECTORS, fill));
}
AK_INLINE vf join(vf* s) {
  AK_UNROLL for (int step = U / 2; step > 0; step /= 2)
    AK_UNROLL for (int u = 0; u < step; u++) s[u] += s[u + step];
  return s[0];
}
constexpr int64_t SHORT_SUM = 16;
template <int64_t N>
AK_INLINE void add_distances(const elem* x, vf m0, double& s1, double& s2) {
  vf d1[U] = {}, d2[U] = {};
  each<N>(x, m0, [&](int u, vf v) __attribute__((always_inline)) {
    const vf d = v - m0;
    d1[u] += d;
    d2[u] += d * d;
  });
  s1 += (double)ak_reduce(join(d1), ak_op_sum{});
  s2 += (double)ak_reduce(join(d2), ak_op_sum{});
}
// Moments from the sums of distances from m0; `good` tells whether float carried them. The correction may take a quarter of the
// sum of squares: the roundings of that sum then weigh at most 4/3 of what they would with m0 at the mean.
template <int64_t N>
AK_INLINE moments moments_near(const elem* x, vf m0, bool& good) {
  // Float sums of at most SHORT_SUM terms, added up in double: beside an outlier a longer chain's roundings point the same way.
  constexpr int64_t PIECE = SHORT_SUM * U * L, PIECES = N > PIECE ? (N - 1) / PIECE : 0;
  double s1 = 0, s2 = 0;
  for (int64_t piece = 0; piece < PIECES; piece++) add_distances<PIECE>(x + piece * PIECE, m0, s1, s2);
  add_distances<N - PIECES * PIECE>(x + PIECES * PIECE, m0, s1, s2);
  const double shift = s1 * (1.0 / (double)N), correction = s1 * shift, m2 = s2 - correction;
  good = s2 < 1e37 && correction <= 0.25 * s2 && (EPS >= 1e-20 || m2 > 1e-25);
  return {(double)m0[0] + shift, m2 > 0 ? m2 : 0};
}
template <int64_t N>
AK_INLINE moments moments_of(const elem* x) {
  vf s[U] = {};
  each<N>(x, vf{}, [&](int u, vf v) __attribute__((always_inline)) { s[u] += v; });
  bool good;
  const moments found = moments_near<N>(x, ak_reduce_all(join(s), ak_op_sum{}) * (float)(1.0 / (double)N), good);
  return good ? found : moments_in_double(x, N);
}
// Merges the moments of N elements into those of `count` (Chan, Golub, LeVeque 1983, eq. 2.1).
AK_INLINE moments merge(moments a, int64_t count, moments b, int64_t n) {
  const double share = (double)n / (double)(count + n), d = b.mean - a.mean;
  if (!(d - d == 0)) return {a.mean + b.mean, d - d};
  return {a.mean + d * share, a.m2 + b.m2 + d * d * (double)count * share};
}
// One pass where it can: the mean of the first HEAD elements stands in for m0; a rest that lies too far from it gets its own.
constexpr int64_t HEAD = 1024, SEGMENT = 32768;
template <int64_t N>
AK_INLINE moments moments_of_segment(const elem* x) {
  if constexpr (N < 3 * HEAD) {
    return moments_of<N>(x);
  } else {
    const moments head = moments_of<HEAD>(x);
    bool good;
    moments rest = moments_near<N - HEAD>(x + HEAD, ak_splat((float)head.mean), good);
    if (__builtin_expect(!good, 0)) rest = moments_of<N - HEAD>(x + HEAD);
    return merge(head, HEAD, rest, N - HEAD);
  }
}
template <int64_t N>
AK_INLINE moments moments_of_long(const elem* x) {
  moments all = moments_of_segment<N < SEGMENT ? N : SEGMENT>(x);
  constexpr int64_t LAST_START = (N - 1) / SEGMENT * SEGMENT;
  for (int64_t at = SEGMENT; at < LAST_START; at += SEGMENT) all = merge(all, at, moments_of_segment<SEGMENT>(x + at), SEGMENT);
  if (N > SEGMENT) all = merge(all, LAST_START, moments_of_segment<N - LAST_START>(x + LAST_START), N - LAST_START);
  return all;
}
struct statistics {
  double mean, rstd;
  AK_INLINE_MEMBER bool fits_float() const { return rstd > 1e-30 && rstd < 1e30 && mean > -1e30 && mean < 1e30; }
};
AK_INLINE statistics statistics_of(moments m) { return {m.mean, 1.0 / __builtin_sqrt(m.m2 * (1.0 / (double)D) + EPS)}; }
__attribute__((noinline, cold)) void apply_in_double(const elem* x, const param* w, const param* b, elem* y, int64_t n,
                                                     statistics s) {
  for (int64_t i = 0; i < n; i++) {
    double v = ((double)x[i] - s.mean) * s.rstd;
    if (HAS_WEIGHT) v *= (double)w[i];
    if (HAS_BIAS) v += (double)b[i];
    y[i] = (float)v;
  }
}
// What normalises a row: mean and rstd in two parts each.
struct line {
  vf high, rstd, rstd_low, low;
  AK_INLINE_MEMBER vf at(vf x) const {
    const vf d = x - high;
    return d * rstd + (d * rstd_low + low);
  }
};
AK_INLINE line line_of(statistics s) {
  const float high = (float)s.mean, rstd = (float)s.rstd;
  return {ak_splat(high), ak_splat(rstd), ak_splat((float)(s.rstd - (double)rstd)),
          ak_splat((float)(((double)high - s.mean) * s.rstd))};
}
AK_INLINE vf affine(vf v, vf w, vf b) {
  if (HAS_WEIGHT && HAS_BIAS) return v * w + b;
  if (HAS_WEIGHT) return v * w;
  return HAS_BIAS ? v + b : v;
}
// `next` is what will be read after this: its lines are fetched while this is written.
template <int64_t N>
AK_INLINE void apply(const elem* x, const param* w, const param* b, elem* y, statistics s, const elem* next) {
  if (!s.fits_float()) return apply_in_double(x, w, b, y, N, s);
  constexpr int64_t WHOLE = N / (U * L) * (U * L), VECTORS = N / L * L;
  constexpr int TAIL = N % L, PART = TAIL ? TAIL : 1;
  const line f = line_of(s);
  auto at = [&](int64_t i) __attribute__((always_inline)) {
    if (PREFETCH) __builtin_prefetch(next + i, 0, 2);
    vf v = f.at(ak_load(x + i));
    return affine(v, HAS_WEIGHT ? ak_load(w + i) : vf{}, HAS_BIAS ? ak_load(b + i) : vf{});
  };
  if (STREAM && VECTORS) {
    // The first and the last vector are stored unaligned; what lies between starts at a vector boundary.
    const int64_t first = (int64_t)((0 - (uintptr_t)y / 4) % L);
    ak_store(y, at(0));
    for (int64_t i = first; i + L <= N; i += L) ak_stream(y + i, at(i));
    ak_store(y + N - L, at(N - L));
    return;
  }
  for (int64_t i = 0; i < WHOLE; i += U * L)
    AK_UNROLL for (int u = 0; u < U; u++) ak_store(y + i + u * L, at(i + u * L));
  AK_UNROLL for (int u = 0; u < (int)((VECTORS - WHOLE) / L); u++) ak_store(y + WHOLE + u * L, at(WHOLE + u * L));
  if (TAIL) {
    vf v = f.at(ak_load_part<PART>(x + VECTORS, vf{}));
    const vf wv = HAS_WEIGHT ? ak_load_part<PART>(w + VECTORS, vf{}) : vf{};
    const vf bv = HAS_BIAS ? ak_load_part<PART>(b + VECTORS, vf{}) : vf{};
    ak_store_part<PART>(y + VECTORS, affine(v, wv, bv));
  }
}
"""


def norm_code(layout: NormLayout, unroll: int, stream: bool, prefetch: bool) -> str:
    """C++ text (inside the anonymous namespace) with `moments_of<N>`, `statistics_of` and `apply<N>` for one layout."""
    values = {
        "ELEM": CPP_TYPES[layout.dtype], "PARAM": CPP_TYPES[layout.parameter_dtype], "STAT": CPP_TYPES[layout.statistic_dtype],
        "D": layout.length, "EPS": repr(layout.eps), "U": unroll, "STREAM": str(stream).lower(),
        "PREFETCH": str(prefetch).lower(),
        "WEIGHT": str(layout.has_weight).lower(), "BIAS": str(layout.has_bias).lower(),
        "X": offset(layout.outer, 0, "row"), "MEAN": offset(layout.outer, 1, "row"),
        "RSTD": offset(layout.outer, 2, "row"), "Y": offset(layout.outer, 3, "row"),
    }  # fmt: skip
    code = _CODE.replace("AK_INLINE_MEMBER", "inline __attribute__((always_inline))")
    for name, value in values.items():
        code = code.replace(f"@{name}@", str(value))
    return code
