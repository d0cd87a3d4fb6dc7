"""CUDA C++ of the split-precision matmul, first half: scaling each operand's rows by powers of two, splitting them into fp16
pairs, and raising the flag where pairs would lose bits. `matmul_split` fills in the constants between @ signs."""

from __future__ import annotations

PRELUDE = """#include <cuda_fp16.h>
#include <cstdint>
#define INT64_C(value) value##ll
#define INLINE __device__ __forceinline__
#define PIN(x) asm volatile("" : "+f"(x)::"memory")
// Enumerators, not variables: what NVRTC makes of a constant at namespace scope sends the code through a linker that ignores
// setmaxnreg (13.5), and then the accumulators of `gemm` spill.
enum : int64_t { BATCH = @BATCH@, M = @M@, N = @N@, K = @K@, KP = (K + 63) / 64 * 64 };
enum : int { SPLITS = @SPLITS@, STEPS = KP / 32, SPLIT_STEPS = (STEPS / 2 + SPLITS - 1) / SPLITS * 2 };
#define ALPHA float(@ALPHA@)
#define BETA float(@BETA@)
INLINE void wait_for_step_before() { @WAIT@ }
INLINE void let_next_step_start() { @LEAVE@ }
INLINE float power(int e) { return __int_as_float((e + 127) << 23); }
// x * 2^e for -252 <= e <= 252, in two factors that are normal numbers.
INLINE float scaled(float x, int e) {
  const int h = e / 2;
  return x * power(h) * power(e - h);
}
INLINE uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }
INLINE int exponent_of(uint32_t top) { return top < 0x00800000u ? -126 : int(top >> 23) - 127; }
struct verdict {
  bool broken = false;  // not finite, or beyond fp16 after scaling
  int lossy = 0;        // elements so small beside their row that both halves together miss bits of them
  int present = 0;      // elements that are not 0
  // Of `count` elements. A product alone errs by up to 2^-21 (two splits and lo lo), fp32 by 2^-24: with sixteen in a sum of
  // its own size nobody sees it, and two rows with a share of s elements each meet in K s^2 places.
  INLINE bool bad(int count) const {
    return broken || lossy * 16 > max(count, 64) || (present > 0 && float(present) < float(count) * float(@SHARE@));
  }
};
INLINE void judge(float x, float y, float rest, float lo, int up, verdict& seen) {
  seen.broken |= !(fabsf(y) < 65504.0f);
  if (x != 0.0f) ++seen.present;
  // Below 2^-3 lo reaches the end of fp16. Scaled down, y may vanish altogether.
  if (fabsf(y) < 0.125f & lo != rest) ++seen.lossy;
  if (up < 0 && y == 0.0f && x != 0.0f) ++seen.lossy;
}
// Two elements: y = x * 2^up = hi + lo, with 22 bits and more.
INLINE void split(float x0, float x1, int up, __half2& hi, __half2& lo, verdict& seen) {
  const float y0 = scaled(x0, up), y1 = scaled(x1, up);
  hi = __floats2half2_rn(y0, y1);
  const float rest0 = y0 - __low2float(hi), rest1 = y1 - __high2float(hi);
  lo = __floats2half2_rn(rest0, rest1);
  judge(x0, y0, rest0, __low2float(lo), up, seen);
  judge(x1, y1, rest1, __high2float(lo), up, seen);
}
INLINE float with_addend(const float* addend, int64_t batch, int64_t i, int64_t j, float v) {
  if (ALPHA != 1.0f) v *= ALPHA;
  if (BETA != 0.0f) v = fmaf(BETA, __ldg(addend + batch * @ADD_B@ + i * @ADD_I@ + j * @ADD_J@), v);
  return v;
}
INLINE void store(const float* addend, float* c, int64_t batch, int64_t i, int64_t j, int split, float v) {
  if (SPLITS > 1) c[((split * BATCH + batch) * M + i) * N + j] = v;
  else c[batch * @C_B@ + i * @C_I@ + j] = with_addend(addend, batch, i, j, v);
}
"""

# One operand whose K neighbours are neighbours in memory. @x@ is a or b; HELD: a row fits its team's registers and its largest
# element is exact; else `tops` has it, from all or from some of its segments.
CONTIGUOUS = """namespace of_@x@ {
enum : int64_t { ROWS = @ROWS@, ROW = @ROW@, BATCHES = @BATCHES@ };
enum : int { TEAM = @TEAM@, V = @V@, HEAD = @HEAD@, SEGMENT = TEAM * V * 8 };
enum : bool { HELD = @HELD@, WIDE = @WIDE@ };
INLINE void load(const float* x, int64_t at, float (&v)[8]) {
  if (WIDE && at + 8 <= K) {
    const float4 p = __ldg(reinterpret_cast<const float4*>(x + at)), q = __ldg(reinterpret_cast<const float4*>(x + at) + 1);
    v[0] = p.x; v[1] = p.y; v[2] = p.z; v[3] = p.w; v[4] = q.x; v[5] = q.y; v[6] = q.z; v[7] = q.w;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = at + i < K ? __ldg(x + at + i) : 0.0f;
  }
}
INLINE uint32_t top_of(const float (&v)[V][8], uint32_t* tops) {
  uint32_t top = 0;
#pragma unroll
  for (int j = 0; j < V; ++j)
#pragma unroll
    for (int i = 0; i < 8; ++i) top = max(top, magnitude(v[j][i]));
  top = __reduce_max_sync(~0u, top);
  if (TEAM == 32) return top;
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < TEAM / 32; ++i) top = max(top, tops[i]);
  return top;
}
}
extern "C" __global__ void __launch_bounds__(256) tops_@x@(const float* x, uint32_t* tops) {
  using namespace of_@x@;
  const int64_t row = blockIdx.x;
  x += row / ROWS * BATCHES + row % ROWS * ROW;
  float v[V][8];
#pragma unroll
  for (int j = 0; j < V; ++j) load(x, int64_t(blockIdx.y) * @STRIDE@ * SEGMENT + (j * TEAM + threadIdx.x) * 8, v[j]);
  __shared__ uint32_t warps[8];
  const uint32_t top = top_of(v, warps);
  if (threadIdx.x == 0) atomicMax(tops + row, top);
}
extern "C" __global__ void __launch_bounds__(256)
split_@x@(const float* x, __half* pairs, int* exponents, const uint32_t* tops, uint32_t* flag) {
  using namespace of_@x@;
  let_next_step_start();
  const int64_t mine = int64_t(blockIdx.x) * (256 / TEAM) + threadIdx.x / TEAM;
  const bool live = mine < BATCH * ROWS;
  const int64_t row = live ? mine : BATCH * ROWS - 1, first = int64_t(blockIdx.y) * SEGMENT + threadIdx.x % TEAM * 8;
  x += row / ROWS * BATCHES + row % ROWS * ROW;
  float v[V][8];
#pragma unroll
  for (int j = 0; j < V; ++j) load(x, first + j * TEAM * 8, v[j]);
  wait_for_step_before();
  __shared__ uint32_t warps[8];
  const int up = HEAD - exponent_of(HELD ? top_of(v, warps) : __ldcg(tops + row));
  if (live && first == 0) exponents[row] = -up;
  verdict seen;
  pairs += row * 2 * KP;
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int64_t at = first + j * TEAM * 8;
    __half2 hi[4], lo[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) split(v[j][2 * i], v[j][2 * i + 1], up, hi[i], lo[i], seen);
    if (live && at < KP) {
      uint4* to = reinterpret_cast<uint4*>(pairs + at / 32 * 64 + at % 32);
      to[0] = *reinterpret_cast<uint4*>(hi);
      to[4] = *reinterpret_cast<uint4*>(lo);
    }
  }
  // Of what this warp saw.
  int count = 0;
#pragma unroll
  for (int j = 0; j < V; ++j) count += int(max(int64_t(0), min(int64_t(8), K - (first + j * TEAM * 8))));
  seen.broken = __any_sync(~0u, seen.broken);
  seen.lossy = __reduce_add_sync(~0u, seen.lossy);
  seen.present = __reduce_add_sync(~0u, seen.present);
  if (seen.bad(__reduce_add_sync(~0u, count))) *flag = 1;
}
"""

# One operand whose rows (columns of B) are neighbours in memory: transposed on the way.
STRIDED = """namespace of_@x@ {
enum : int64_t { ROWS = @ROWS@, STEP = @STEP@, BATCHES = @BATCHES@ };
enum : int { HEAD = @HEAD@ };
enum : bool { WIDE = @WIDE@ };
INLINE float4 load(const float* x, int64_t i, int64_t k) {
  x += k * STEP + i;
  if (k >= K || i >= ROWS) return make_float4(0, 0, 0, 0);
  if (WIDE) return __ldg(reinterpret_cast<const float4*>(x));  // ROWS is then a multiple of 4
  float v[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = i + j < ROWS ? __ldg(x + j) : 0.0f;
  return make_float4(v[0], v[1], v[2], v[3]);
}
INLINE float element(const float4& v, int j) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; }
}
extern "C" __global__ void __launch_bounds__(256) tops_@x@(const float* x, uint32_t* tops) {
  using namespace of_@x@;
  const int64_t i = (int64_t(blockIdx.x) * 256 + threadIdx.x) * 4;
  if (i >= ROWS) return;
  float4 v[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) v[r] = load(x + blockIdx.z * BATCHES, i, (int64_t(blockIdx.y) * 16 + r) * @STRIDE@);
  uint32_t t[4] = {};
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    t[0] = max(t[0], magnitude(v[r].x)); t[1] = max(t[1], magnitude(v[r].y));
    t[2] = max(t[2], magnitude(v[r].z)); t[3] = max(t[3], magnitude(v[r].w));
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (i + j < ROWS) atomicMax(tops + blockIdx.z * ROWS + i + j, t[j]);
}
extern "C" __global__ void __launch_bounds__(256)
split_@x@(const float* x, __half* pairs, int* exponents, const uint32_t* tops, uint32_t* flag) {
  using namespace of_@x@;
  __shared__ uint32_t tile[64][65];
  __shared__ int ups[64], counts[64];
  const int64_t first = int64_t(blockIdx.x) * 64, k0 = int64_t(blockIdx.y) * 64;
  const int q = threadIdx.x % 16 * 4, r = threadIdx.x / 16;
  x += blockIdx.z * BATCHES;
  let_next_step_start();
  float4 v[4];
#pragma unroll
  for (int u = 0; u < 4; ++u) v[u] = load(x, first + q, k0 + r + u * 16);
  wait_for_step_before();
  if (threadIdx.x < 64) {
    const int64_t row = first + threadIdx.x;
    const int up = row < ROWS ? HEAD - exponent_of(__ldcg(tops + blockIdx.z * ROWS + row)) : 0;
    if (row < ROWS && k0 == 0) exponents[blockIdx.z * ROWS + row] = -up;
    ups[threadIdx.x] = up;
    counts[threadIdx.x] = 0;
  }
  __syncthreads();
  bool broken = false;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int up = ups[q + j];
    verdict seen;
#pragma unroll
    for (int u = 0; u < 4; u += 2) {
      __half2 hi, lo;
      split(element(v[u], j), element(v[u + 1], j), up, hi, lo, seen);
      const uint32_t h = *reinterpret_cast<uint32_t*>(&hi), l = *reinterpret_cast<uint32_t*>(&lo);
      tile[q + j][r + u * 16] = __byte_perm(h, l, 0x5410);
      tile[q + j][r + u * 16 + 16] = __byte_perm(h, l, 0x7632);
    }
    broken |= seen.broken;
    atomicAdd(counts + q + j, seen.lossy << 16 | seen.present);
  }
  broken = __syncthreads_or(broken);
  if (threadIdx.x < 64) {
    const verdict seen = {broken, counts[threadIdx.x] >> 16, counts[threadIdx.x] & 0xFFFF};
    if (seen.bad(int(min(int64_t(64), K - k0)))) *flag = 1;
  }
#pragma unroll
  for (int u = 0; u < 2; ++u) {
    const int at = threadIdx.x + u * 256, row = at / 8, c = at % 8 * 8;
    uint32_t hi[4], lo[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t s = tile[row][c + 2 * j], t = tile[row][c + 2 * j + 1];
      hi[j] = __byte_perm(s, t, 0x5410);
      lo[j] = __byte_perm(s, t, 0x7632);
    }
    if (first + row < ROWS) {
      uint4* to = reinterpret_cast<uint4*>(pairs + (blockIdx.z * ROWS + first + row) * 2 * KP + (k0 + c) / 32 * 64 + c % 32);
      to[0] = *reinterpret_cast<uint4*>(hi);
      to[4] = *reinterpret_cast<uint4*>(lo);
    }
  }
}
"""
