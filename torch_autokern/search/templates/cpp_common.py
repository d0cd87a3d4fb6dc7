"""The C++ that every CPU template starts with: vectors of one width, loads and stores that assume element alignment only,
`exp`, and horizontal reductions whose order of additions is fixed (so that any cut of the range gives the same bits).

`exp(x)` for x <= 0: with n = round(x / ln 2) and r = x - n ln 2 (|r| <= ln 2 / 2; ln 2 split so that n * ln2_hi is exact, as in
Cephes `expf`), ``exp x = 2^n P(r)``, P of degree 6 whose coefficients minimise the largest relative error: 3.6e-9 once rounded
to float, against half a unit in the last place of 6.0e-8. Below -104 the result is 0 (the smallest denormal is 2^-149).

The text is C++17 for GCC and Clang; vectors are the compilers' own extension, intrinsics only where that has no words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch_autokern.search.templates.cpp_half import half_types
from torch_autokern.store.key import Target

AUTHOR = "autokern templates"
L1_BYTES = 32 << 10
L2_BYTES = 512 << 10  # what one thread may count on; half of it on the machines with 1 MiB
SCRATCH_BYTES = 256 << 10  # largest array on a thread's stack
STREAM_BYTES = 16 << 20  # outputs above this leave the last-level cache anyway
_WIDTHS: dict[str, tuple[int, ...]] = {"x86-64-v4": (64, 32), "x86-64-v3": (32,), "x86-64-v2": (16,), "x86-64": (16,)}


def vector_widths(target: Target) -> tuple[int, ...]:
    """Vector widths in bytes that are worth trying on an ISA level, widest first."""
    return _WIDTHS.get(target.arch, (16,))


def registers(target: Target) -> int:
    """Vector registers of an ISA level."""
    return 16 if target.arch.startswith("x86-64") and target.arch != "x86-64-v4" else 32


def grain_of(elements_per_step: int, elements_per_piece: int = 8192) -> int:
    """Least number of steps a thread should get: below about 8192 elements waking a thread costs more than it brings."""
    return max(1, -(-elements_per_piece // max(elements_per_step, 1)))


def _shuffle(indices: Sequence[int]) -> str:
    return ", ".join(str(i) for i in indices)


def _reductions(lanes: int) -> str:
    """`ak_reduce4`: four vectors to one that holds, in every block of four lanes, the four results; all in one fixed tree."""
    low = [b + i // 2 + (lanes if i % 2 else 0) for b in range(0, lanes, 4) for i in range(4)]
    high = [i + 2 for i in low]
    low2 = [b + i % 2 + (lanes if i > 1 else 0) for b in range(0, lanes, 4) for i in range(4)]
    high2 = [i + 2 for i in low2]
    across = ""
    distance = lanes // 2
    while distance >= 4:
        swap = [i ^ distance for i in range(lanes)]
        across += f"  q = op(q, AK_SHUFFLE(q, q, {_shuffle(swap)}));\n"
        distance //= 2
    halving = "".join(
        f"  q = op(q, AK_SHUFFLE(q, q, {_shuffle([i ^ step for i in range(lanes)])}));\n"
        for step in (8, 4, 2, 1)
        if step < lanes
    )
    picks = "".join(
        f"  if constexpr (k == {k}) return AK_SHUFFLE(q, q, {_shuffle([i // 4 * 4 + k for i in range(lanes)])});\n"
        for k in range(4)
    )
    return f"""
template <class Op>
AK_INLINE vf ak_reduce4(vf a, vf b, vf c, vf d, Op op) {{
  vf t = op(AK_SHUFFLE(a, b, {_shuffle(low)}), AK_SHUFFLE(a, b, {_shuffle(high)}));
  vf u = op(AK_SHUFFLE(c, d, {_shuffle(low)}), AK_SHUFFLE(c, d, {_shuffle(high)}));
  vf q = op(AK_SHUFFLE(t, u, {_shuffle(low2)}), AK_SHUFFLE(t, u, {_shuffle(high2)}));
{across}  return q;
}}
// Result k of ak_reduce4 in every lane.
template <int k>
AK_INLINE vf ak_pick(vf q) {{
{picks}}}
// All lanes to one, halving; in every lane of the result.
template <class Op>
AK_INLINE vf ak_reduce_all(vf q, Op op) {{
{halving}  return q;
}}
template <class Op>
AK_INLINE float ak_reduce(vf q, Op op) {{
  return ak_reduce_all(q, op)[0];
}}
"""


_HEAD = """#include <stdint.h>
#include <string.h>
#include <math.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#define AK_INLINE static inline __attribute__((always_inline))
#define AK_ENTRY extern "C" __attribute__((visibility("default"))) void
#if defined(__clang__)
#define AK_UNROLL _Pragma("clang loop unroll(full)")
#else
#define AK_UNROLL _Pragma("GCC unroll 32")
#endif
#if defined(__clang__) || __GNUC__ >= 12
#define AK_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define AK_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
namespace {
constexpr int WIDTH = @WIDTH@;
constexpr int L = WIDTH / 4;
typedef float vf __attribute__((vector_size(WIDTH)));
typedef int32_t vi __attribute__((vector_size(WIDTH)));
typedef float vf_any __attribute__((vector_size(WIDTH), aligned(4), may_alias));
constexpr float INF = __builtin_inff();

AK_INLINE vf ak_splat(float s) { return s - vf{}; }
AK_INLINE vf ak_load(const float* p) { return *(const vf_any*)p; }
AK_INLINE void ak_store(float* p, vf v) { *(vf_any*)p = v; }
#if defined(__AVX512VL__) && @WIDTH@ == 64
// `x` where it is above `m`, else `m`: a NaN in x leaves m as it is.
AK_INLINE vf ak_max(vf x, vf m) { return (vf)_mm512_max_ps((__m512)x, (__m512)m); }
template <int N> AK_INLINE vf ak_load_part(const float* p, vf fill) {
  return (vf)_mm512_mask_loadu_ps((__m512)fill, (__mmask16)((1u << N) - 1), p);
}
template <int N> AK_INLINE void ak_store_part(float* p, vf v) {
  if (N <= L / 2) _mm256_mask_storeu_ps(p, (__mmask8)((1u << N) - 1), _mm512_castps512_ps256((__m512)v));
  else _mm512_mask_storeu_ps(p, (__mmask16)((1u << N) - 1), (__m512)v);
}
AK_INLINE void ak_stream(float* p, vf v) { _mm512_stream_ps(p, (__m512)v); }
#elif defined(__AVX512VL__) && @WIDTH@ == 32
AK_INLINE vf ak_max(vf x, vf m) { return (vf)_mm256_max_ps((__m256)x, (__m256)m); }
template <int N> AK_INLINE vf ak_load_part(const float* p, vf fill) {
  return (vf)_mm256_mask_loadu_ps((__m256)fill, (__mmask8)((1u << N) - 1), p);
}
template <int N> AK_INLINE void ak_store_part(float* p, vf v) {
  _mm256_mask_storeu_ps(p, (__mmask8)((1u << N) - 1), (__m256)v);
}
AK_INLINE void ak_stream(float* p, vf v) { _mm256_stream_ps(p, (__m256)v); }
#else
#if defined(__AVX__) && @WIDTH@ == 32
AK_INLINE vf ak_max(vf x, vf m) { return (vf)_mm256_max_ps((__m256)x, (__m256)m); }
AK_INLINE void ak_stream(float* p, vf v) { _mm256_stream_ps(p, (__m256)v); }
#elif defined(__x86_64__) && @WIDTH@ == 16
AK_INLINE vf ak_max(vf x, vf m) { return (vf)_mm_max_ps((__m128)x, (__m128)m); }
AK_INLINE void ak_stream(float* p, vf v) { _mm_stream_ps(p, (__m128)v); }
#else
AK_INLINE vf ak_max(vf x, vf m) { return x > m ? x : m; }
AK_INLINE void ak_stream(float* p, vf v) { ak_store(p, v); }
#endif
#if defined(__AVX2__) && @WIDTH@ == 32
// A copy of a part into a vector would wait for its own stores. (A masked store is slow on AMD's cores, and not needed.)
template <int N> AK_INLINE vf ak_load_part(const float* p, vf fill) {
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7};
  const __m256i mask = (__m256i)(lane < N);
  return (vf)_mm256_blendv_ps((__m256)fill, _mm256_maskload_ps(p, mask), (__m256)mask);
}
#else
template <int N> AK_INLINE vf ak_load_part(const float* p, vf fill) {
  memcpy(&fill, p, N * 4);
  return fill;
}
#endif
template <int N> AK_INLINE void ak_store_part(float* p, vf v) { memcpy(p, &v, N * 4); }
#endif
AK_INLINE void ak_stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}
template <int W> struct ak_vector {
  typedef float f __attribute__((vector_size(W)));
  typedef int32_t i __attribute__((vector_size(W)));
};
template <int W> using ak_f = typename ak_vector<W>::f;
template <int W> using ak_i = typename ak_vector<W>::i;
// p * 2^n, right for denormal results too; k is n as integers.
template <int W>
AK_INLINE ak_f<W> ak_scale2(ak_f<W> p, ak_f<W> n, ak_i<W> k) {
#if defined(__AVX512VL__)
  if constexpr (W == 64) return (ak_f<W>)_mm512_scalef_ps((__m512)p, (__m512)n);
  if constexpr (W == 32) return (ak_f<W>)_mm256_scalef_ps((__m256)p, (__m256)n);
#endif
  (void)n;
  ak_i<W> half = k >> 1;  // two exact factors and one rounding
  ak_i<W> rest = k - half;
  return p * (ak_f<W>)((half + 127) << 23) * (ak_f<W>)((rest + 127) << 23);
}
// With SUMMED, for what is only added up before its logarithm is taken: a polynomial of one term less (1.05e-7 of the result at
// most, of either sign), and ln 2 in one constant (2e-9 off: 3e-7 of the result where that is a denormal, nothing in a sum).
template <int W, bool SUMMED>
AK_INLINE ak_f<W> ak_exp_of(ak_f<W> x) {
  const ak_f<W> magic = 12582912.0f - ak_f<W>{};  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
  ak_f<W> t = x * 1.44269504088896341f + magic;
  ak_f<W> n = t - magic;
  ak_f<W> r = x - n * (SUMMED ? 0.693147182f : 0.693359375f);
  if (!SUMMED) r = r + n * 2.12194440e-4f;
  ak_f<W> p = SUMMED ? r * 0x1.10626ap-7f + 0x1.572a06p-5f : (r * 0x1.6a23cep-10f + 0x1.123a2p-7f) * r + 0x1.5558f2p-5f;
  p = p * r + (SUMMED ? 0x1.5557aep-3f : 0x1.555492p-3f);
  p = p * r + (SUMMED ? 0x1.fffdfcp-2f : 0x1.fffffcp-2f);
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return ak_scale2<W>(p, n, (ak_i<W>)t - (ak_i<W>)magic);
}
// exp(x) for x <= 0; NaN stays NaN, -inf gives 0.
template <bool SUMMED = false>
AK_INLINE vf ak_exp(vf x) { return (vf)ak_exp_of<WIDTH, SUMMED>(ak_max(ak_splat(-104.0f), x)); }
// The same where the upper half holds nothing: it becomes 0. Half the work on cores that run wide vectors in two passes.
template <bool SUMMED = false>
AK_INLINE vf ak_exp_low(vf x) {
#if defined(__AVX512VL__) && @WIDTH@ == 64
  __m512 y = (__m512)ak_max(ak_splat(-104.0f), x);
  return (vf)_mm512_zextps256_ps512((__m256)ak_exp_of<32, SUMMED>((ak_vector<32>::f)_mm512_castps512_ps256(y)));
#else
  return ak_exp<SUMMED>(x);
#endif
}
// log(x) for finite x >= 2^-126; NaN stays NaN. With x = m 2^k, m near 1, and s = (m - 1) / (m + 1):
// log m = 2 (s + s^3/3 + s^5/5 + s^7/7 + s^9/9 + ...), |s| <= 0.172; what is dropped is below 2e-9 of it.
AK_INLINE vf ak_log(vf x) {
  vi bits = (vi)x - 0x3f3504f3;  // sqrt(1/2): m lies in [sqrt(1/2), sqrt(2))
  vi k = bits >> 23;
  vf m = (vf)((bits & 0x7fffff) + 0x3f3504f3);
  vf n = __builtin_convertvector(k, vf);
  vf s = (m - 1.0f) / (m + 1.0f);
  vf z = s * s;
  vf p = z * (2.0f / 9) + 2.0f / 7;
  p = p * z + 2.0f / 5;
  p = p * z + 2.0f / 3;
  p = p * z * s + s * 2.0f;
  return n * 0.693359375f + (p - n * 2.12194440e-4f) + (x - x);
}
struct ak_op_max {
  AK_INLINE_MEMBER vf operator()(vf a, vf b) const { return ak_max(a, b); }
  AK_INLINE_MEMBER float operator()(float a, float b) const { return a > b ? a : b; }
};
struct ak_op_sum {
  AK_INLINE_MEMBER vf operator()(vf a, vf b) const { return a + b; }
  AK_INLINE_MEMBER float operator()(float a, float b) const { return a + b; }
};
"""


def prelude(width: int, dtypes: Iterable[str] = ()) -> str:
    """C++ text that opens an anonymous namespace, `END` closes it; with the types of 16-bit elements where `dtypes` has one."""
    head = _HEAD.replace("@WIDTH@", str(width)).replace("AK_INLINE_MEMBER", "inline __attribute__((always_inline))")
    halves = half_types(width) if any(dtype != "float32" for dtype in dtypes) else ""
    return head + _reductions(width // 4) + halves


def entry(name: str, body: str) -> str:
    """The exported function; `body` sees `begin`, `end` and `pointers`."""
    return f"AK_ENTRY {name}(int64_t begin, int64_t end, void* const* pointers) {{\n{body}}}\n"


END = "}  // namespace\n"
