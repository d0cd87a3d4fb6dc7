"""The C++ text of the CPU products: loads of float32 and bfloat16, packing, the register tile, and the loops around it.

A register tile is MR rows by V vectors of the output. Every element is one chain of fused multiply-adds over K in order (in
blocks of KC, whose sums are added up), whatever the cut of the range: the same bits on any number of threads. The last vector
of a row and the last rows are not padded: the vector is moved back so that it ends at the last column, and computes a few
columns twice; fewer rows are a tile of their own.

bfloat16 is widened to float32 (exact), summed up in float32 and rounded once, to nearest even; NaN becomes the quiet NaN.
"""

from __future__ import annotations

ELEMENTS = """
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
"""

EPILOGUE = """
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
"""

TILES = (
    EPILOGUE
    + """
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
#pragma GCC unroll @UNROLL@
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
// `rows` rows of A as dense float32 rows of K elements.
AK_INLINE void copy_rows(const T* a, float* to, int64_t rows) {
  int64_t r = 0;
  if constexpr (AR == 1 && AS != 1) {  // A lies transposed: squares of it are turned in registers
    for (; r + L <= rows; r += L) {
      int64_t i = 0;
      for (; i + L <= K; i += L) {
        vf x[L];
        AK_UNROLL for (int j = 0; j < L; j++) x[j] = numbers(a + r + (i + j) * AS);
        transpose_square(x);
        AK_UNROLL for (int j = 0; j < L; j++) ak_store(to + (r + j) * K + i, x[j]);
      }
      for (; i < K; i++)
        AK_UNROLL for (int j = 0; j < L; j++) to[(r + j) * K + i] = number(a + r + j + i * AS);
    }
  }
  for (; r < rows; r++) {
    const T* p = a + r * AR;
    float* q = to + r * K;
    int64_t i = 0;
    if (AS == 1)
      for (; i + L <= K; i += L) ak_store(q + i, numbers(p + i));
    for (; i < K; i++) q[i] = number(p + i * AS);
  }
}
"""
)


def transpose(lanes: int) -> str:
    """`transpose_square`: L vectors of L lanes, rows to columns, in log2(L) rounds that exchange 1, 2, 4, ... lanes."""
    rounds = ""
    step = 1
    while step < lanes:
        low = [i if not i & step else lanes + i - step for i in range(lanes)]
        high = [i + step if not i & step else lanes + i for i in range(lanes)]
        rounds += f"""  AK_UNROLL for (int i = 0; i < L; i++) if (!(i & {step})) {{
    const vf x = r[i], y = r[i + {step}];
    r[i] = AK_SHUFFLE(x, y, {", ".join(map(str, low))});
    r[i + {step}] = AK_SHUFFLE(x, y, {", ".join(map(str, high))});
  }}
"""
        step *= 2
    return f"AK_INLINE void transpose_square(vf* r) {{\n{rounds}}}\n"


PACKING = """
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
"""

# Range: batches times row tiles. B is read as it is, packed on the stack for each piece, or was packed by the step before.
ROWS_ENTRY = """  const T* const a_all = (const T*)pointers[0];
  const T* const b_all = (const T*)pointers[1];
  T* const out_all = (T*)pointers[2];
  const T* const self_all = ADDS ? (const T*)pointers[3] : nullptr;
  alignas(64) float own[STACK_PACKED ? PANELS * K * NR : 1];
  alignas(64) float dense[COPIES ? BLOCK_TILES * MR * K : 1];
  for (int64_t item = begin; item < end;) {
    const int64_t batch = item / TILES, start = item % TILES;
    const int64_t stop = TILES < start + end - item ? TILES : start + end - item;
    const T* b = b_all + batch * BB;
    if (STACK_PACKED)
      for (int64_t p = 0; p < PANELS; p++) pack_panel(b, own + p * K * NR, p);
    for (int64_t first = start; first < stop; first += BLOCK_TILES) {
      const int64_t last = stop < first + BLOCK_TILES ? stop : first + BLOCK_TILES;
      const int64_t row = first * MR;
      const T* a = a_all + batch * AB + row * AR;
      if (COPIES) copy_rows(a, dense, (last * MR < M ? last * MR : M) - row);
      T* out = out_all + batch * OB + row * OR;
      const T* self = self_all + batch * SB + row * SR;
      for (int64_t p = 0; p < PANELS; p++) {
        const TB* from = STACK_PACKED ? (const TB*)(own + p * K * NR)
                         : PACKED     ? (const TB*)((const float*)pointers[PLACE] + (batch * PANELS + p) * K * NR)
                                      : (const TB*)(b + p * NR);
        panel_at(p, COPIES ? (const TA*)dense : (const TA*)a, from, first, last, out, self);
      }
    }
    item += stop - start;
  }
"""

PACK_ENTRY = """  const T* const b = (const T*)pointers[0];
  float* const to = (float*)pointers[1];
  for (int64_t i = begin; i < end; i++) pack_panel(b + i / PANELS * BB, to + i * K * NR, i % PANELS);
"""

# Range: batches times column panels, all rows of each.
PANELS_ENTRY = """  const T* const a_all = (const T*)pointers[0];
  const T* const b_all = (const T*)pointers[1];
  T* const out_all = (T*)pointers[2];
  const T* const self_all = ADDS ? (const T*)pointers[3] : nullptr;
  alignas(64) float own[PACKED ? K * NR : 1];
  alignas(64) float dense[COPIES ? M * K : 1];
  int64_t copied = -1;
  for (int64_t item = begin; item < end; item++) {
    const int64_t batch = item / PANELS, p = item % PANELS;
    const T* a = a_all + batch * AB;
    const T* b = b_all + batch * BB;
    if (COPIES && copied != batch) copy_rows(a, dense, M);
    copied = batch;
    if (PACKED) pack_panel(b, own, p);
    for (int64_t first = 0; first < TILES; first += BLOCK_TILES) {
      const int64_t last = TILES < first + BLOCK_TILES ? TILES : first + BLOCK_TILES;
      const int64_t row = first * MR;
      const TA* rows = COPIES ? (const TA*)dense + row * A_ROW : (const TA*)a + row * A_ROW;
      panel_at(p, rows, PACKED ? (const TB*)own : (const TB*)(b + p * NR), first, last, out_all + batch * OB + row * OR,
               self_all + batch * SB + row * SR);
    }
  }
"""

# Both operands contiguous along K and few rows: vectors run along K, and every element is a sum of L chains.
DOT = (
    EPILOGUE
    + """
constexpr int64_t GROUPS = (N + C - 1) / C, VECTORS = K / L * L;
constexpr int KTAIL = (int)(K - VECTORS);
AK_INLINE float added(vf sum) { return ak_reduce(sum, ak_op_sum{}); }
template <int R>
AK_INLINE void dots(const T* a, const T* b, int64_t column, T* out, const T* self) {
  const T* rows[C];
  // Columns beyond the last one repeat it and are not stored.
  AK_UNROLL for (int c = 0; c < C; c++) rows[c] = b + (column + c < N ? column + c : N - 1) * BC;
  vf sum[R][C];
  AK_UNROLL for (int r = 0; r < R; r++)
    AK_UNROLL for (int c = 0; c < C; c++) sum[r][c] = vf{};
  for (int64_t k = 0; k < VECTORS; k += L) {
    vf x[R];
    AK_UNROLL for (int r = 0; r < R; r++) x[r] = numbers(a + r * AR + k);
    AK_UNROLL for (int c = 0; c < C; c++) {
      const vf y = numbers(rows[c] + k);
      AK_UNROLL for (int r = 0; r < R; r++) sum[r][c] += x[r] * y;
    }
  }
  if constexpr (KTAIL > 0)
    AK_UNROLL for (int c = 0; c < C; c++) {
      const vf y = numbers_part<KTAIL>(rows[c] + VECTORS);
      AK_UNROLL for (int r = 0; r < R; r++) sum[r][c] += numbers_part<KTAIL>(a + r * AR + VECTORS) * y;
    }
  const int64_t count = N - column < C ? N - column : C;
  for (int r = 0; r < R; r++)
    for (int64_t c = 0; c < count; c++) {
      const vf y = finished<1>(ak_splat(added(sum[r][c])), self + r * SR, column + c);
      put_part<1>(out + r * OR + column + c, y);
    }
}
"""
)

# Range: rows of all batches, each finished where it lies.
ADD_ENTRY = """  T* const out_all = (T*)pointers[0];
  const T* const self_all = (const T*)pointers[1];
  for (int64_t item = begin; item < end; item++) {
    T* out = out_all + item / M * OB + item % M * OR;
    const T* self = self_all + item / M * SB + item % M * SR;
    int64_t c = 0;
    for (; c + L <= N; c += L) put(out + c, finished<L>(numbers(out + c), self, c));
    if constexpr (N % L != 0) put_part<N % L>(out + c, finished<N % L>(numbers_part<N % L>(out + c), self, c));
  }
"""

# Range: batches times groups of C columns.
DOT_ENTRY = """  const T* const a_all = (const T*)pointers[0];
  const T* const b_all = (const T*)pointers[1];
  T* const out_all = (T*)pointers[2];
  const T* const self_all = ADDS ? (const T*)pointers[3] : nullptr;
  for (int64_t item = begin; item < end; item++) {
    const int64_t batch = item / GROUPS, column = item % GROUPS * C;
    const T* a = a_all + batch * AB;
    const T* b = b_all + batch * BB;
    T* out = out_all + batch * OB;
    const T* self = self_all + batch * SB;
    int64_t row = 0;
    for (; row + MR <= M; row += MR) dots<MR>(a + row * AR, b, column, out + row * OR, self + row * SR);
    if constexpr (M % MR != 0) dots<M % MR>(a + row * AR, b, column, out + row * OR, self + row * SR);
  }
"""
