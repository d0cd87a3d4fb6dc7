/* {"op": "mm",
    "tensors": [{"dtype": "bfloat16", "sizes": [23, 70], "strides": [70, 1]}, {"dtype": "bfloat16", "sizes": [70, 40], "strides": [40, 1]}],
    "scalars": {},
    "reason": null,
    "steps": [{"entry": "run", "range": 5, "grain": 11, "args": ["input0", "input1", "output0"]}],
    "idea": "the built-in panels in bfloat16: widened, summed in float32, rounded once"} */
#include <stdint.h>
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
constexpr int WIDTH = 16;
constexpr int L = WIDTH / 4;
typedef float vf __attribute__((vector_size(WIDTH)));
typedef int32_t vi __attribute__((vector_size(WIDTH)));
typedef float vf_any __attribute__((vector_size(WIDTH), aligned(4), may_alias));
constexpr float INF = __builtin_inff();

AK_INLINE vf ak_splat(float s) { return s - vf{}; }
AK_INLINE vf ak_load(const float* p) { return *(const vf_any*)p; }
AK_INLINE void ak_store(float* p, vf v) { *(vf_any*)p = v; }
#if defined(__AVX512VL__) && 16 == 64
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
#elif defined(__AVX512VL__) && 16 == 32
AK_INLINE vf ak_max(vf x, vf m) { return (vf)_mm256_max_ps((__m256)x, (__m256)m); }
template <int N> AK_INLINE vf ak_load_part(const float* p, vf fill) {
  return (vf)_mm256_mask_loadu_ps((__m256)fill, (__mmask8)((1u << N) - 1), p);
}
template <int N> AK_INLINE void ak_store_part(float* p, vf v) {
  _mm256_mask_storeu_ps(p, (__mmask8)((1u << N) - 1), (__m256)v);
}
AK_INLINE void ak_stream(float* p, vf v) { _mm256_stream_ps(p, (__m256)v); }
#else
#if defined(__AVX__) && 16 == 32
AK_INLINE vf ak_max(vf x, vf m) { return (vf)_mm256_max_ps((__m256)x, (__m256)m); }
AK_INLINE void ak_stream(float* p, vf v) { _mm256_stream_ps(p, (__m256)v); }
#elif defined(__x86_64__) && 16 == 16
AK_INLINE vf ak_max(vf x, vf m) { return (vf)_mm_max_ps((__m128)x, (__m128)m); }
AK_INLINE void ak_stream(float* p, vf v) { _mm_stream_ps(p, (__m128)v); }
#else
AK_INLINE vf ak_max(vf x, vf m) { return x > m ? x : m; }
AK_INLINE void ak_stream(float* p, vf v) { ak_store(p, v); }
#endif
template <int N> AK_INLINE vf ak_load_part(const float* p, vf fill) {
  memcpy(&fill, p, N * 4);
  return fill;
}
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
#if defined(__AVX512VL__) && 16 == 64
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
  inline __attribute__((always_inline)) vf operator()(vf a, vf b) const { return ak_max(a, b); }
  inline __attribute__((always_inline)) float operator()(float a, float b) const { return a > b ? a : b; }
};
struct ak_op_sum {
  inline __attribute__((always_inline)) vf operator()(vf a, vf b) const { return a + b; }
  inline __attribute__((always_inline)) float operator()(float a, float b) const { return a + b; }
};

template <class Op>
AK_INLINE vf ak_reduce4(vf a, vf b, vf c, vf d, Op op) {
  vf t = op(AK_SHUFFLE(a, b, 0, 4, 1, 5), AK_SHUFFLE(a, b, 2, 6, 3, 7));
  vf u = op(AK_SHUFFLE(c, d, 0, 4, 1, 5), AK_SHUFFLE(c, d, 2, 6, 3, 7));
  vf q = op(AK_SHUFFLE(t, u, 0, 1, 4, 5), AK_SHUFFLE(t, u, 2, 3, 6, 7));
  return q;
}
// Result k of ak_reduce4 in every lane.
template <int k>
AK_INLINE vf ak_pick(vf q) {
  if constexpr (k == 0) return AK_SHUFFLE(q, q, 0, 0, 0, 0);
  if constexpr (k == 1) return AK_SHUFFLE(q, q, 1, 1, 1, 1);
  if constexpr (k == 2) return AK_SHUFFLE(q, q, 2, 2, 2, 2);
  if constexpr (k == 3) return AK_SHUFFLE(q, q, 3, 3, 3, 3);
}
// All lanes to one, halving; in every lane of the result.
template <class Op>
AK_INLINE vf ak_reduce_all(vf q, Op op) {
  q = op(q, AK_SHUFFLE(q, q, 2, 3, 0, 1));
  q = op(q, AK_SHUFFLE(q, q, 1, 0, 3, 2));
  return q;
}
template <class Op>
AK_INLINE float ak_reduce(vf q, Op op) {
  return ak_reduce_all(q, op)[0];
}
constexpr int64_t M = INT64_C(23);
constexpr int64_t N = INT64_C(40);
constexpr int64_t K = INT64_C(70);
constexpr int64_t AB = INT64_C(0);
constexpr int64_t AR = INT64_C(70);
constexpr int64_t AS = INT64_C(1);
constexpr int64_t BB = INT64_C(0);
constexpr int64_t BS = INT64_C(40);
constexpr int64_t BC = INT64_C(1);
constexpr int64_t OB = INT64_C(0);
constexpr int64_t OR = INT64_C(40);
constexpr int64_t SB = INT64_C(0);
constexpr int64_t SR = INT64_C(0);
constexpr int64_t SC = INT64_C(0);
constexpr int64_t A_ROW = INT64_C(70);
constexpr int64_t A_STEP = INT64_C(1);
constexpr int MR = 6, NV = 2;
constexpr float ALPHA = (float)0x1.0000000000000p+0, BETA = (float)0x1.0000000000000p+0;
constexpr bool ADDS = false;
constexpr int64_t KC = 70;
constexpr int64_t BLOCK_TILES = 4;
constexpr bool WIDEN = true;
constexpr bool PACKED = true;
typedef uint16_t T;
typedef float TA;
typedef float TB;

typedef uint16_t vh __attribute__((vector_size(WIDTH / 2)));
typedef uint16_t vh_any __attribute__((vector_size(WIDTH / 2), aligned(2), may_alias));
typedef uint32_t vu __attribute__((vector_size(WIDTH)));
typedef float vf_whole __attribute__((vector_size(WIDTH), may_alias));
AK_INLINE float number(const float* p) { return *p; }
AK_INLINE float number(const uint16_t* p) {
  uint32_t bits = (uint32_t)*p << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
AK_INLINE vf numbers(const float* p) { return ak_load(p); }
AK_INLINE vf numbers(const uint16_t* p) { return (vf)(__builtin_convertvector(*(const vh_any*)p, vu) << 16); }
template <int C> AK_INLINE vf numbers_part(const float* p) { return ak_load_part<C>(p, vf{}); }
template <int C> AK_INLINE vf numbers_part(const uint16_t* p) {
  vh bits = {};
  memcpy(&bits, p, C * 2);
  return (vf)(__builtin_convertvector(bits, vu) << 16);
}
AK_INLINE vh rounded(vf x) {
  const vu bits = (vu)x;
  const vu even = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return __builtin_convertvector(x == x ? even : vu{} + 0x7fc0, vh);
}
AK_INLINE void put(float* p, vf x) { ak_store(p, x); }
AK_INLINE void put(uint16_t* p, vf x) { *(vh_any*)p = rounded(x); }
template <int C> AK_INLINE void put_part(float* p, vf x) { ak_store_part<C>(p, x); }
template <int C> AK_INLINE void put_part(uint16_t* p, vf x) {
  const vh bits = rounded(x);
  memcpy(p, &bits, C * 2);
}

// alpha * sum + beta * addend for the vector whose first column is `column`; `self` is at its batch and row.
template <int C>
AK_INLINE vf finished(vf sum, const T* self, int64_t column) {
  vf x = ALPHA == 1.0f ? sum : sum * ALPHA;
  if (!ADDS) return x;
  vf s;
  if (SC == 1) {
    if constexpr (C == L) s = numbers(self + column);
    else s = numbers_part<C>(self + column);
  } else if (SC == 0) {
    s = ak_splat(number(self));
  } else {
    s = vf{};
    AK_UNROLL for (int i = 0; i < C; i++) s[i] = number(self + (column + i) * SC);
  }
  return BETA == 1.0f ? x + s : x + s * BETA;
}

constexpr int NR = NV * L;
constexpr int64_t PANELS = (N + NR - 1) / NR, TILES = (M + MR - 1) / MR;
constexpr int LAST_WIDTH = (int)(N - (PANELS - 1) * NR), LAST_V = (LAST_WIDTH + L - 1) / L;
constexpr int LAST_ROWS = (int)(M - (TILES - 1) * MR);
constexpr int LANES = N < L ? (int)N : L;  // of a vector that are used
// First column, within its panel of W columns, of vector v: the last vector ends where the panel ends.
template <int W> constexpr int column_of(int v) { return (v + 1) * L <= W || N < L ? v * L : W - L; }
AK_INLINE vf b_vector(const float* p) { return LANES == L ? numbers(p) : numbers_part<LANES>(p); }
AK_INLINE vf b_vector(const uint16_t* p) { return LANES == L ? numbers(p) : numbers_part<LANES>(p); }

// R rows by V vectors over K elements from `k` on, `count` of them. Sums so far wait in `part`; the last block finishes them.
template <int R, int V, int W>
AK_INLINE void tile(const TA* a, const TB* b, int64_t k, int64_t count, float* part, T* out, const T* self, int64_t column) {
  vf sum[R][V];
  AK_UNROLL for (int r = 0; r < R; r++)
    AK_UNROLL for (int v = 0; v < V; v++) sum[r][v] = vf{};
  constexpr int64_t B_STEP = PACKED ? V * L : BS;
#pragma GCC unroll 4
  for (int64_t i = 0; i < count; i++) {
    vf x[V];
    AK_UNROLL for (int v = 0; v < V; v++) {
      if constexpr (PACKED) x[v] = *(const vf_whole*)(b + i * B_STEP + v * L);
      else x[v] = b_vector(b + i * B_STEP + column_of<W>(v));
    }
    AK_UNROLL for (int r = 0; r < R; r++) {
      const vf y = ak_splat(number(a + r * A_ROW + i * A_STEP));
      AK_UNROLL for (int v = 0; v < V; v++) sum[r][v] += y * x[v];
    }
  }
  if (KC < K && k > 0)
    AK_UNROLL for (int r = 0; r < R; r++)
      AK_UNROLL for (int v = 0; v < V; v++) sum[r][v] += *(const vf_whole*)(part + (r * V + v) * L);
  if (KC < K && k + count < K) {
    AK_UNROLL for (int r = 0; r < R; r++)
      AK_UNROLL for (int v = 0; v < V; v++) *(vf_whole*)(part + (r * V + v) * L) = sum[r][v];
    return;
  }
  AK_UNROLL for (int r = 0; r < R; r++)
    AK_UNROLL for (int v = 0; v < V; v++) {
      const int64_t at = column + column_of<W>(v);
      const vf y = finished<LANES>(sum[r][v], self + r * SR, at);
      if constexpr (LANES == L) put(out + r * OR + at, y);
      else put_part<LANES>(out + r * OR + at, y);
    }
}
// One panel of W columns from `column` on, tiles [first, last); `a`, `out` and `self` are at the first tile's first row.
template <int V, int W>
AK_INLINE void panel(const TA* a, const TB* b, int64_t first, int64_t last, T* out, const T* self, int64_t column) {
  alignas(WIDTH) float part[KC < K ? BLOCK_TILES * MR * V * L : L];
  for (int64_t k = 0; k < K; k += KC) {
    const int64_t count = KC < K && k + KC > K ? K - k : KC;
    const TB* bk = b + k * (PACKED ? V * L : BS);
    for (int64_t t = first; t < last; t++) {
      const int64_t row = (t - first) * MR;
      float* p = part + (KC < K ? row * V * L : 0);
      const TA* ak = a + row * A_ROW + k * A_STEP;
      T* to = out + row * OR;
      const T* add = self + row * SR;
      if (LAST_ROWS != MR && t == TILES - 1) tile<LAST_ROWS, V, W>(ak, bk, k, count, p, to, add, column);
      else tile<MR, V, W>(ak, bk, k, count, p, to, add, column);
    }
  }
}
AK_INLINE void panel_at(int64_t p, const TA* a, const TB* b, int64_t first, int64_t last, T* out, const T* self) {
  if (LAST_WIDTH != NR && p == PANELS - 1) panel<LAST_V, LAST_WIDTH>(a, b, first, last, out, self, p * NR);
  else panel<NV, NR>(a, b, first, last, out, self, p * NR);
}
// Rows [begin, end) of A as dense float32 rows of K elements.
AK_INLINE void widen_rows(const T* a, float* to, int64_t rows) {
  for (int64_t r = 0; r < rows; r++) {
    const T* p = a + r * AR;
    float* q = to + r * K;
    int64_t i = 0;
    if (AS == 1)
      for (; i + L <= K; i += L) ak_store(q + i, numbers(p + i));
    for (; i < K; i++) q[i] = number(p + i * AS);
  }
}
AK_INLINE void transpose_square(vf* r) {
  AK_UNROLL for (int i = 0; i < L; i++) if (!(i & 1)) {
    const vf x = r[i], y = r[i + 1];
    r[i] = AK_SHUFFLE(x, y, 0, 4, 2, 6);
    r[i + 1] = AK_SHUFFLE(x, y, 1, 5, 3, 7);
  }
  AK_UNROLL for (int i = 0; i < L; i++) if (!(i & 2)) {
    const vf x = r[i], y = r[i + 2];
    r[i] = AK_SHUFFLE(x, y, 0, 1, 4, 5);
    r[i + 2] = AK_SHUFFLE(x, y, 2, 3, 6, 7);
  }
}

// Panel of W columns from `column` on: K rows of V vectors, float32.
template <int V, int W>
AK_INLINE void pack(const T* b, float* to, int64_t column) {
  AK_UNROLL for (int v = 0; v < V; v++) {
    const T* p = b + (column + column_of<W>(v)) * BC;
    float* q = to + v * L;
    int64_t k = 0;
    if constexpr (BC == 1) {
      for (; k < K; k++) *(vf_whole*)(q + k * V * L) = b_vector(p + k * BS);
    } else if constexpr (BS == 1 && LANES == L) {
      for (; k + L <= K; k += L) {
        vf r[L];
        AK_UNROLL for (int i = 0; i < L; i++) r[i] = numbers(p + i * BC + k);
        transpose_square(r);
        AK_UNROLL for (int i = 0; i < L; i++) *(vf_whole*)(q + (k + i) * V * L) = r[i];
      }
    }
    for (; k < K; k++) {
      vf x = {};
      AK_UNROLL for (int i = 0; i < LANES; i++) x[i] = number(p + i * BC + k * BS);
      *(vf_whole*)(q + k * V * L) = x;
    }
  }
}
AK_INLINE void pack_panel(const T* b, float* to, int64_t p) {
  if (LAST_WIDTH != NR && p == PANELS - 1) pack<LAST_V, LAST_WIDTH>(b, to, p * NR);
  else pack<NV, NR>(b, to, p * NR);
}
}  // namespace
AK_ENTRY run(int64_t begin, int64_t end, void* const* pointers) {
  const T* const a_all = (const T*)pointers[0];
  const T* const b_all = (const T*)pointers[1];
  T* const out_all = (T*)pointers[2];
  const T* const self_all = ADDS ? (const T*)pointers[3] : nullptr;
  alignas(64) float own[PACKED ? K * NR : 1];
  alignas(64) float wide[WIDEN ? M * K : 1];
  int64_t widened = -1;
  for (int64_t item = begin; item < end; item++) {
    const int64_t batch = item / PANELS, p = item % PANELS;
    const T* a = a_all + batch * AB;
    const T* b = b_all + batch * BB;
    if (WIDEN && widened != batch) widen_rows(a, wide, M);
    widened = batch;
    if (PACKED) pack_panel(b, own, p);
    for (int64_t first = 0; first < TILES; first += BLOCK_TILES) {
      const int64_t last = TILES < first + BLOCK_TILES ? TILES : first + BLOCK_TILES;
      const int64_t row = first * MR;
      const TA* rows = WIDEN ? (const TA*)wide + row * A_ROW : (const TA*)a + row * A_ROW;
      panel_at(p, rows, PACKED ? (const TB*)own : (const TB*)(b + p * NR), first, last, out_all + batch * OB + row * OR,
               self_all + batch * SB + row * SR);
    }
  }
}
