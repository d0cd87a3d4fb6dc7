"""The C++ of `layer_norm_backward`; names between @ are filled there."""

CODE = """
typedef @ELEM@ elem;
typedef @PARAM@ param;
typedef @STAT@ stat;
constexpr int64_t D = @D@, ROWS = @ROWS@;
constexpr bool HAS_WEIGHT = @WEIGHT@, WANT_X = @WANT_X@, WANT_W = @WANT_W@, WANT_B = @WANT_B@, STREAM = @STREAM@;
constexpr int R = @R@;
AK_INLINE int64_t g_offset(int64_t row) { return @G@; }
AK_INLINE int64_t x_offset(int64_t row) { return @X@; }
AK_INLINE int64_t mean_offset(int64_t row) { return @MEAN@; }
AK_INLINE int64_t rstd_offset(int64_t row) { return @RSTD@; }
AK_INLINE int64_t z_offset(int64_t row) { return @Z@; }
struct call {
  const elem *g, *x;
  const stat *mean, *rstd;
  const param* w;
  elem* z;
  param *dw, *db;
};
AK_INLINE call call_of(void* const* p) {
  return {(const elem*)p[0], (const elem*)p[1], (const stat*)p[2], (const stat*)p[3],
          (const param*)p[4], (elem*)p[5], (param*)p[6], (param*)p[7]};
}
// One row, or a piece of it: what is read, where the gradient goes, and what all its elements share.
struct line {
  const elem *g, *x;
  elem* z;
  vf mean, rstd, drop, slope;  // z = v rstd - drop - h slope
  AK_INLINE_MEMBER vf hat(vf value) const { return (value - mean) * rstd; }
};
AK_INLINE line line_of(const call& c, int64_t row) {
  return {c.g + g_offset(row), c.x + x_offset(row), c.z + z_offset(row),
          ak_splat((float)c.mean[mean_offset(row)]), ak_splat((float)c.rstd[rstd_offset(row)]), vf{}, vf{}};
}
struct sums {
  double v, vh;  // of v = g weight, and of v h
  AK_INLINE_MEMBER bool carried() const { return v - v == 0 && vh - vh == 0; }
};
AK_INLINE void set_sums(line& l, sums s) {
  const double rstd = (double)l.rstd[0];
  l.drop = ak_splat((float)(s.v * (1.0 / (double)D) * rstd));
  l.slope = ak_splat((float)(s.vh * (1.0 / (double)D) * rstd));
}
AK_INLINE double v_of(const line& l, const param* w, int64_t i) {
  return HAS_WEIGHT ? (double)(float)l.g[i] * (double)(float)w[i] : (double)(float)l.g[i];
}
AK_INLINE double hat_of(const line& l, int64_t i) {
  return ((double)(float)l.x[i] - (double)l.mean[0]) * (double)l.rstd[0];
}
__attribute__((noinline, cold)) sums sums_in_double(const line& l, const param* w) {
  sums s = {0, 0};
  for (int64_t i = 0; i < D; i++) {
    const double v = v_of(l, w, i);
    s.v += v;
    s.vh += v * hat_of(l, i);
  }
  return s;
}
__attribute__((noinline, cold)) void write_in_double(const line& l, const param* w, int64_t n, sums s) {
  for (int64_t i = 0; i < n; i++) {
    const double rest = v_of(l, w, i) - s.v / (double)D - hat_of(l, i) * (s.vh / (double)D);
    l.z[i] = (elem)(float)((double)l.rstd[0] * rest);
  }
}
// A column's sums over all rows, where float has not carried them.
__attribute__((noinline, cold)) void column_in_double(const call& c, int64_t column) {
  double dw = 0, db = 0;
  for (int64_t row = 0; row < ROWS; row++) {
    const line l = line_of(c, row);
    dw += (double)(float)l.g[column] * hat_of(l, column);
    db += (double)(float)l.g[column];
  }
  if (WANT_W) c.dw[column] = (param)(float)dw;
  if (WANT_B) c.db[column] = (param)(float)db;
}
AK_INLINE const param* weight_at(const call& c, int64_t at) { return HAS_WEIGHT ? c.w + at : nullptr; }
// Sums over N elements of K rows side by side; partial sums of 64 steps keep the rounding error of long rows small.
template <int64_t N, int K>
AK_INLINE void add_sums(const line* l, const param* w, vf* v, vf* vh) {
  constexpr int64_t VECTORS = N / L * L;
  constexpr int TAIL = N % L, PART = TAIL ? TAIL : 1;
  for (int64_t outer = 0; outer < VECTORS; outer += 64 * L) {
    const int64_t stop = outer + 64 * L < VECTORS ? outer + 64 * L : VECTORS;
    vf pv[K] = {}, ph[K] = {};
    for (int64_t i = outer; i < stop; i += L) {
      const vf weight = HAS_WEIGHT ? ak_load(w + i) : vf{};
      AK_UNROLL for (int r = 0; r < K; r++) {
        const vf g = ak_load(l[r].g + i), value = HAS_WEIGHT ? g * weight : g;
        pv[r] += value;
        ph[r] += value * l[r].hat(ak_load(l[r].x + i));
      }
    }
    AK_UNROLL for (int r = 0; r < K; r++) {
      v[r] += pv[r];
      vh[r] += ph[r];
    }
  }
  if (TAIL) {
    const vf weight = HAS_WEIGHT ? ak_load_part<PART>(w + VECTORS, vf{}) : vf{};
    AK_UNROLL for (int r = 0; r < K; r++) {
      const vf g = ak_load_part<PART>(l[r].g + VECTORS, vf{}), value = HAS_WEIGHT ? g * weight : g;
      v[r] += value;
      vh[r] += value * l[r].hat(ak_load_part<PART>(l[r].x + VECTORS, l[r].mean));
    }
  }
}
template <int K>
AK_INLINE void sums_of_rows(const line* l, const param* w, sums* s) {
  vf v[K] = {}, vh[K] = {};
  add_sums<D, K>(l, w, v, vh);
  AK_UNROLL for (int r = 0; r < K; r++) {
    s[r] = {(double)ak_reduce(v[r], ak_op_sum{}), (double)ak_reduce(vh[r], ak_op_sum{})};
    if (__builtin_expect(!s[r].carried(), 0)) s[r] = sums_in_double(l[r], w);
  }
}
AK_INLINE bool fits_float(sums s) { return s.v < 1e37 && s.v > -1e37 && s.vh < 1e37 && s.vh > -1e37; }
// The second pass over N elements of K rows: their gradients, and what they add to the sums of columns dw and db.
template <int64_t N, int K, bool PAST>
AK_INLINE void write_rows(const line* l, const param* w, float* dw, float* db) {
  constexpr int64_t VECTORS = N / L * L;
  constexpr int TAIL = N % L, PART = TAIL ? TAIL : 1;
  for (int64_t i = 0; i < VECTORS; i += L) {
    const vf weight = HAS_WEIGHT && WANT_X ? ak_load(w + i) : vf{};
    vf sw = WANT_W ? ak_load(dw + i) : vf{}, sb = WANT_B ? ak_load(db + i) : vf{};
    AK_UNROLL for (int r = 0; r < K; r++) {
      const vf g = ak_load(l[r].g + i), h = WANT_X || WANT_W ? l[r].hat(ak_load(l[r].x + i)) : vf{};
      if (WANT_X) {
        const vf z = ((HAS_WEIGHT ? g * weight : g) * l[r].rstd - l[r].drop) - h * l[r].slope;
        if (PAST) ak_stream(l[r].z + i, z);
        else ak_store(l[r].z + i, z);
      }
      sw += g * h;
      sb += g;
    }
    if (WANT_W) ak_store(dw + i, sw);
    if (WANT_B) ak_store(db + i, sb);
  }
  if (TAIL) {
    const vf weight = HAS_WEIGHT && WANT_X ? ak_load_part<PART>(w + VECTORS, vf{}) : vf{};
    vf sw = WANT_W ? ak_load(dw + VECTORS) : vf{}, sb = WANT_B ? ak_load(db + VECTORS) : vf{};
    AK_UNROLL for (int r = 0; r < K; r++) {
      const vf g = ak_load_part<PART>(l[r].g + VECTORS, vf{});
      const vf h = l[r].hat(ak_load_part<PART>(l[r].x + VECTORS, l[r].mean));
      if (WANT_X)
        ak_store_part<PART>(l[r].z + VECTORS, ((HAS_WEIGHT ? g * weight : g) * l[r].rstd - l[r].drop) - h * l[r].slope);
      sw += g * h;
      sb += g;
    }
    if (WANT_W) ak_store(dw + VECTORS, sw);
    if (WANT_B) ak_store(db + VECTORS, sb);
  }
}
template <int64_t N, int K>
AK_INLINE void write(const line* l, const param* w, float* dw, float* db, const sums* s) {
  bool past = STREAM && WANT_X && N % L == 0;
  AK_UNROLL for (int r = 0; r < K; r++) past = past && (uintptr_t)l[r].z % WIDTH == 0;
  if (past) write_rows<N, K, true>(l, w, dw, db);
  else write_rows<N, K, false>(l, w, dw, db);
  if (WANT_X)
    AK_UNROLL for (int r = 0; r < K; r++)
      if (__builtin_expect(!fits_float(s[r]), 0)) write_in_double(l[r], w, N, s[r]);
}
AK_INLINE bool all_carried(vf a, vf b) { return ak_reduce((a - a) + (b - b), ak_op_sum{}) == 0; }
// Sums of L columns from `column` on to their places.
AK_INLINE void write_columns(const call& c, int64_t column, vf dw, vf db) {
  constexpr int TAIL = D % L, PART = TAIL ? TAIL : 1;
  const bool part = TAIL && column + L > D;
  if (__builtin_expect(!all_carried(WANT_W ? dw : vf{}, WANT_B ? db : vf{}), 0)) {
    for (int64_t i = column; i < column + L && i < D; i++) column_in_double(c, i);
    return;
  }
  if (WANT_W) part ? ak_store_part<PART>(c.dw + column, dw) : ak_store(c.dw + column, dw);
  if (WANT_B) part ? ak_store_part<PART>(c.db + column, db) : ak_store(c.db + column, db);
}
template <int K>
AK_INLINE void whole_rows(const call& c, const int64_t* row, float* dw, float* db) {
  line l[K];
  sums s[K];
  AK_UNROLL for (int r = 0; r < K; r++) l[r] = line_of(c, row[r]);
  if (WANT_X) {
    sums_of_rows<K>(l, c.w, s);
    AK_UNROLL for (int r = 0; r < K; r++) set_sums(l[r], s[r]);
  }
  write<D, K>(l, c.w, dw, db, s);
}
"""

# Without sums over rows: any cut of the rows, the last group repeats the last row (same values to the same place).
ROWS = """  const call c = call_of(pointers);
  for (int64_t first = begin; first < end; first += R) {
    int64_t row[R];
    for (int r = 0; r < R; r++) row[r] = first + r < end ? first + r : end - 1;
    whole_rows<R>(c, row, nullptr, nullptr);
  }
  if (STREAM) ak_stream_fence();
"""

BLOCKS = """
constexpr int64_t BLOCK_ROWS = @BLOCK_ROWS@, PADDED = @PADDED@;
void run_blocks(int64_t begin, int64_t end, void* const* pointers) {
  const call c = call_of(pointers);
  for (int64_t block = begin; block < end; block++) {
    float *dw = (float*)pointers[8] + block * 2 * PADDED, *db = dw + PADDED;
    for (int64_t i = 0; i < 2 * PADDED; i += L) ak_store(dw + i, vf{});
    const int64_t first = block * BLOCK_ROWS, stop = first + BLOCK_ROWS < ROWS ? first + BLOCK_ROWS : ROWS;
    int64_t row = first;
    for (; row + R <= stop; row += R) {
      int64_t group[R];
      AK_UNROLL for (int r = 0; r < R; r++) group[r] = row + r;
      whole_rows<R>(c, group, dw, db);
    }
    for (; row < stop; row++) whole_rows<1>(c, &row, dw, db);
  }
  if (STREAM) ak_stream_fence();
}
"""

COLUMNS = """  const call c = call_of(pointers);
  for (int64_t v = begin; v < end; v++) {
    const float* at = (const float*)pointers[8] + v * L;
    vf dw = {}, db = {};
    for (int64_t block = 0; block < @BLOCKS@; block++, at += 2 * PADDED) {
      if (WANT_W) dw += ak_load(at);
      if (WANT_B) db += ak_load(at + PADDED);
    }
    write_columns(c, v * L, dw, db);
  }
"""

APPLY = """
constexpr int64_t CHUNK = @CHUNK@, CHUNKS = (D + CHUNK - 1) / CHUNK, LAST = D - (CHUNKS - 1) * CHUNK;
AK_INLINE line piece_of(const call& c, int64_t row, int64_t at) {
  line l = line_of(c, row);
  l.g += at;
  l.x += at;
  l.z += at;
  return l;
}
template <int64_t N>
AK_INLINE sums sums_of_piece(const line& l, const param* w) {
  vf v = {}, vh = {};
  add_sums<N, 1>(&l, w, &v, &vh);
  return {(double)ak_reduce(v, ak_op_sum{}), (double)ak_reduce(vh, ak_op_sum{})};
}
template <int64_t N, int K>
AK_INLINE void rows_of_chunk(const call& c, const sums* totals, int64_t row, int64_t at, float* dw, float* db) {
  line l[K];
  sums s[K];
  AK_UNROLL for (int r = 0; r < K; r++) {
    l[r] = piece_of(c, row + r, at);
    if (WANT_X) set_sums(l[r], s[r] = totals[row + r]);
  }
  write<N, K>(l, weight_at(c, at), dw, db, s);
}
template <int64_t N>
AK_INLINE void chunk_of(const call& c, const sums* totals, int64_t at) {
  constexpr int64_t PADDED = (N + L - 1) / L * L;
  alignas(WIDTH) float dw[PADDED], db[PADDED];
  for (int64_t i = 0; i < PADDED; i += L) {
    ak_store(dw + i, vf{});
    ak_store(db + i, vf{});
  }
  int64_t row = 0;
  for (; row + R <= ROWS; row += R) rows_of_chunk<N, R>(c, totals, row, at, dw, db);
  for (; row < ROWS; row++) rows_of_chunk<N, 1>(c, totals, row, at, dw, db);
  if (WANT_W || WANT_B)
    for (int64_t i = 0; i < PADDED; i += L) write_columns(c, at + i, ak_load(dw + i), ak_load(db + i));
}
void apply_chunks(int64_t begin, int64_t end, void* const* pointers) {
  const call c = call_of(pointers);
  const sums* totals = (const sums*)pointers[9];
  for (int64_t chunk = begin; chunk < end; chunk++) {
    if (chunk == CHUNKS - 1) chunk_of<LAST>(c, totals, chunk * CHUNK);
    else chunk_of<CHUNK>(c, totals, chunk * CHUNK);
  }
  if (STREAM) ak_stream_fence();
}
"""

SUMS = """  const call c = call_of(pointers);
  for (int64_t i = begin; i < end; i++) {
    const int64_t at = i % CHUNKS * CHUNK;
    const line l = piece_of(c, i / CHUNKS, at);
    const param* w = weight_at(c, at);
    ((sums*)pointers[8])[i] = at == (CHUNKS - 1) * CHUNK ? sums_of_piece<LAST>(l, w) : sums_of_piece<CHUNK>(l, w);
  }
"""

MERGE = """  const call c = call_of(pointers);
  for (int64_t row = begin; row < end; row++) {
    sums all = {0, 0};
    for (int64_t i = 0; i < CHUNKS; i++) {
      all.v += ((const sums*)pointers[8])[row * CHUNKS + i].v;
      all.vh += ((const sums*)pointers[8])[row * CHUNKS + i].vh;
    }
    ((sums*)pointers[9])[row] = all.carried() ? all : sums_in_double(line_of(c, row), c.w);
  }
"""
