"""Products over a short K on a GPU (`mm`, `bmm`; K at most 64), where writing the result is nearly all there is.

Blocks stay and take tile after tile: both operands' tiles go to shared memory once, tensor cores multiply (`mma.sync`,
m16n8k16), and the result leaves in whole lines of 16 bytes a thread, marked as not worth keeping in the cache.

float32 at class `stock`: each number is three bf16 parts, x = x1 + x2 + x3 with 24 bits and fp32's range (Henry, Tang,
Heinecke 2019, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations"); six of the nine
products are kept, what is left out lies below 2^-25 of the largest. Every 16 of K the tensor core's sum is added in fp32. A
tile that holds a number which is not finite, or whose first part would overflow, is computed in fp32 instead, so that NaN and
infinities come out as stock's.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_autokern.build.candidate import Candidate
from torch_autokern.runtime.plan import PLAN_VERSION, InputArg, KernelStep, LaunchPlan, OutputArg
from torch_autokern.search.templates.cuda_rows import AUTHOR, CUDA_TYPES, ITEM_BYTES, VECTOR_BYTES
from torch_autokern.search.templates.cuda_teams import PROCESSORS
from torch_autokern.search.templates.layout import dense_tensors, distinct_elements
from torch_autokern.store.key import KernelKey, Target, TensorKey

NAME = "matmul_shallow_cuda"
MAX_K = 64
_LEAST_BYTES = 16 << 20  # of the result: below, it stays in the cache and stock's way costs nothing
_PLANES = {"float32": 3, "float16": 1, "bfloat16": 1}
_SHARED_A_PROCESSOR = 227 << 10

_CODE = """#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cstdint>
#define INT64_C(value) value##ll
#define INLINE __device__ __forceinline__
typedef @T@ T;
typedef @PART@ part;  // what the tensor cores multiply
constexpr int64_t M = @M@, N = @N@, BATCH = @BATCH@;
constexpr int64_t A_B = @A_B@, A_ROW = @A_ROW@, A_K = @A_K@, B_B = @B_B@, B_ROW = @B_ROW@, B_K = @B_K@;
constexpr int64_t C_B = @C_B@, C_ROW = @C_ROW@;
constexpr int K = @K@, KP = (K + 15) / 16 * 16, P = @P@, BM = 128, BN = @BN@, THREADS = 256, NT = BN / 16;
constexpr bool STRIPES = @STRIPES@;
constexpr int PITCH = KP + 8;               // elements of a row in shared memory: eight rows meet all banks once
constexpr int STAGE = BN / 2 + 4;           // floats of a row on its way out
constexpr int64_t TM = (M + BM - 1) / BM, TN = (N + BN - 1) / BN, TILES = BATCH * TM * TN;
INLINE float to_float(float v) { return v; }
INLINE float to_float(__half v) { return __half2float(v); }
INLINE float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
INLINE void from_float(float v, float& r) { r = v; }
INLINE void from_float(float v, __half& r) { r = __float2half_rn(v); }
INLINE void from_float(float v, __nv_bfloat16& r) { r = __float2bfloat16_rn(v); }
struct alignas(sizeof(T) * 4) four { T e[4]; };
struct alignas(8) parts4 { part e[4]; };
INLINE void split(float v, part (&r)[P]) {
#pragma unroll
  for (int p = 0; p < P; ++p) {
    from_float(v, r[p]);
    v -= to_float(r[p]);
  }
}
// Not finite, or too large for the first part.
INLINE bool is_wild(float v) { return P > 1 && !(fabsf(v) < 1.7e38f); }
// `ROWS` rows of K elements, from row `first` of `count`, into P planes; whether one of them is wild. K_INNER: the elements of
// a row are neighbours in memory, else those of a column are.
template <int ROWS, bool K_INNER>
INLINE bool load_tile(const T* from, int64_t row_step, int64_t k_step, int64_t first, int64_t count, part* planes) {
  bool wild = false;
  if (K_INNER) {
    for (int i = threadIdx.x; i < ROWS * (KP / 4); i += THREADS) {
      const int row = i / (KP / 4), k = i % (KP / 4) * 4;
      four v = {};
      if (first + row < count && k < K) v = *reinterpret_cast<const four*>(from + (first + row) * row_step + k);
      part r[4][P];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        wild |= is_wild(to_float(v.e[e]));
        split(to_float(v.e[e]), r[e]);
      }
#pragma unroll
      for (int p = 0; p < P; ++p) {
        parts4 out;
#pragma unroll
        for (int e = 0; e < 4; ++e) out.e[e] = r[e][p];
        *reinterpret_cast<parts4*>(planes + (p * ROWS + row) * PITCH + k) = out;
      }
    }
  } else {
    for (int i = threadIdx.x; i < ROWS / 4 * (KP / 2); i += THREADS) {
      const int row = i % (ROWS / 4) * 4, k = i / (ROWS / 4) * 2;
      four v[2] = {};
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (first + row < count && k + h < K) v[h] = *reinterpret_cast<const four*>(from + (k + h) * k_step + first + row);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        part r[2][P];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          wild |= is_wild(to_float(v[h].e[e]));
          split(to_float(v[h].e[e]), r[h]);
        }
#pragma unroll
        for (int p = 0; p < P; ++p) {
          part* to = planes + (p * ROWS + row + e) * PITCH + k;
          to[0] = r[0][p];
          to[1] = r[1][p];
        }
      }
    }
  }
  return wild;
}
INLINE void load_matrices(uint32_t (&r)[4], const part* at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(uint32_t(__cvta_generic_to_shared(at))) : "memory");
}
INLINE void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.@MMA@.@MMA@.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// A warp's 32 rows and BN / 2 columns.
INLINE void products(const part* a, const part* b, float (&sums)[2][NT][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < KP; k += 16) {
    uint32_t as[P][2][4];
#pragma unroll
    for (int p = 0; p < P; ++p)
#pragma unroll
      for (int m = 0; m < 2; ++m)
        load_matrices(as[p][m], a + (p * BM + m * 16 + lane % 16) * PITCH + k + lane / 16 * 8);
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      // Matrices in order: columns n and K 0 to 7, the same columns and K 8 to 15, then the next eight columns.
      uint32_t bs[P][4];
#pragma unroll
      for (int p = 0; p < P; ++p)
        load_matrices(bs[p], b + (p * BN + n * 8 + lane / 16 * 8 + lane % 8) * PITCH + k + lane / 8 % 2 * 8);
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          if (P == 1) {
            multiply(sums[m][n + half], as[0][m], bs[0][2 * half], bs[0][2 * half + 1]);
            continue;
          }
          float d[4] = {};
          // Smallest first; parts i and j meet where i + j < P.
#pragma unroll
          for (int rank = P - 1; rank >= 0; --rank)
#pragma unroll
            for (int i = 0; i <= rank; ++i) multiply(d, as[i][m], bs[rank - i][2 * half], bs[rank - i][2 * half + 1]);
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[m][n + half][e] += d[e];
        }
    }
  }
}
// The warp's result, 16 rows at a time through shared memory, so that lines leave whole.
INLINE void write(T* c, int64_t row, int64_t column, float* stage, const float (&sums)[2][NT][4]) {
  constexpr int E = 16 / sizeof(T), ACROSS = BN / 2 / E, DOWN = 32 / ACROSS;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        *reinterpret_cast<float2*>(stage + (lane / 4 + h * 8) * STAGE + n * 8 + lane % 4 * 2) =
            make_float2(sums[m][n][2 * h], sums[m][n][2 * h + 1]);
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 16; r += DOWN) {
      const int down = r + lane / ACROSS, across = lane % ACROSS * E;
      const int64_t i = row + m * 16 + down, j = column + across;
      alignas(16) T out[E];
#pragma unroll
      for (int e = 0; e < E; ++e) from_float(stage[down * STAGE + across + e], out[e]);
      if (i < M && j < N) __stcs(reinterpret_cast<uint4*>(c + i * C_ROW + j), *reinterpret_cast<uint4*>(out));
    }
  }
}
INLINE void plainly(const T* a, const T* b, T* c, int64_t row, int64_t column) {
  for (int at = threadIdx.x; at < BM * BN; at += THREADS) {
    const int64_t i = row + at / BN, j = column + at % BN;
    if (i >= M || j >= N) continue;
    float sum = 0.0f;
    for (int k = 0; k < K; ++k) sum = fmaf(to_float(a[i * A_ROW + k * A_K]), to_float(b[j * B_ROW + k * B_K]), sum);
    from_float(sum, c[i * C_ROW + j]);
  }
}
extern "C" __global__ void __launch_bounds__(THREADS, @RESIDENTS@)
shallow(const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ c) {
  extern __shared__ __align__(16) unsigned char room[];
  part* as = reinterpret_cast<part*>(room);
  part* bs = as + P * BM * PITCH;
  const int warp = threadIdx.x / 32;
  float* stage = reinterpret_cast<float*>(bs + P * BN * PITCH) + warp * 16 * STAGE;
  // Stripes: a block takes neighbouring tiles and keeps A; else neighbouring blocks write neighbouring columns.
  const int64_t share = (TILES + gridDim.x - 1) / gridDim.x;
  int64_t tile = STRIPES ? blockIdx.x * share : blockIdx.x;
  const int64_t end = STRIPES && tile + share < TILES ? tile + share : TILES;
  int64_t held = -1;
  bool wild_a = false;
  for (; tile < end; tile += STRIPES ? 1 : gridDim.x) {
    const int64_t batch = tile / (TM * TN), row = tile / TN % TM * BM, column = tile % TN * BN;
    const T *a_here = a + batch * A_B, *b_here = b + batch * B_B;
    T* c_here = c + batch * C_B;
    __syncthreads();  // everybody has used the last tile
    if (tile / TN != held) {
      held = tile / TN;
      wild_a = load_tile<BM, A_K == 1>(a_here, A_ROW, A_K, row, M, as);
    }
    const bool wild_b = load_tile<BN, B_K == 1>(b_here, B_ROW, B_K, column, N, bs);
    if (__syncthreads_or(wild_a || wild_b)) {
      plainly(a_here, b_here, c_here, row, column);
      continue;
    }
    float sums[2][NT][4] = {};
    products(as + warp / 2 * 32 * PITCH, bs + warp % 2 * (BN / 2) * PITCH, sums);
    write(c_here, row + warp / 2 * 32, column + warp % 2 * (BN / 2), stage, sums);
  }
}
"""


@dataclass(frozen=True)
class _Operand:
    """Strides in elements between rows (of the result's rows or columns), along K and between batches."""

    row: int
    step: int
    batch: int


@dataclass(frozen=True)
class _Layout:
    dtype: str
    batch: int
    m: int
    n: int
    k: int
    a: _Operand
    b: _Operand
    c: tuple[int, int]


def _operand(tensor: TensorKey, rows_dim: int, k_dim: int) -> _Operand | None:
    """None unless four neighbours, along K or along rows, always start on four elements."""
    sizes, strides, item = tensor.sizes, tensor.strides, ITEM_BYTES[tensor.dtype]
    batch = strides[0] if len(sizes) == 3 and sizes[0] > 1 else 0
    row, step = strides[rows_dim], strides[k_dim]
    inner, other = (sizes[k_dim], row) if step == 1 else (sizes[rows_dim], step)
    if 1 not in (row, step) or tensor.alignment_bytes < 4 * item or any(s % 4 for s in (inner, other, batch)):
        return None
    return _Operand(row, step, batch)


def _layout(key: KernelKey) -> _Layout | None:
    if key.device_type != "cuda" or key.op not in ("mm", "bmm") or key.matmul_precision != "ieee":
        return None
    if not dense_tensors(key, tuple(CUDA_TYPES)):
        return None
    (left, right), c = key.tensors, key.outputs[0]
    if left is None or right is None or c is None or not left.dtype == right.dtype == c.dtype or not distinct_elements(c):
        return None
    rank, item = len(left.sizes), ITEM_BYTES[c.dtype]
    (m, k), n, batch = left.sizes[-2:], right.sizes[-1], left.sizes[0] if rank == 3 else 1
    if k > MAX_K or min(m, n) < 64 or min(left.sizes[-1], right.sizes[-2]) < 2 or c.numel * item < _LEAST_BYTES:
        return None
    a, b = _operand(left, rank - 2, rank - 1), _operand(right, rank - 1, rank - 2)
    c_batch, c_row = c.strides[0] if rank == 3 and batch > 1 else 0, c.strides[-2]
    vector = VECTOR_BYTES // item
    if a is None or b is None or c.strides[-1] != 1 or c.alignment_bytes < VECTOR_BYTES:
        return None
    if n % vector or c_row % vector or c_batch % vector:
        return None
    return _Layout(c.dtype, batch, m, n, k, a, b, (c_batch, c_row))


def shallow_matmul(layout: _Layout, columns: int, residents: int, stripes: bool) -> Candidate | None:
    """Tiles of 128 rows by `columns`; `residents` blocks a processor, None where they do not fit. `stripes`: a block's tiles
    are neighbours and share their rows; else those of neighbouring blocks are."""
    planes, padded = _PLANES[layout.dtype], -(-layout.k // 16) * 16
    shared = 2 * planes * (128 + columns) * (padded + 8) + 8 * 16 * 4 * (columns // 2 + 4)
    if residents * (shared + 1024) > _SHARED_A_PROCESSOR:
        return None
    values: dict[str, object] = {
        "T": CUDA_TYPES[layout.dtype], "PART": CUDA_TYPES["bfloat16" if planes > 1 else layout.dtype],
        "MMA": "f16" if layout.dtype == "float16" else "bf16", "K": layout.k, "P": planes, "BN": columns,
        "RESIDENTS": residents, "STRIPES": str(stripes).lower(),
        **{name: f"INT64_C({value})" for name, value in (
            ("M", layout.m), ("N", layout.n), ("BATCH", layout.batch), ("A_B", layout.a.batch), ("A_ROW", layout.a.row),
            ("A_K", layout.a.step), ("B_B", layout.b.batch), ("B_ROW", layout.b.row), ("B_K", layout.b.step),
            ("C_B", layout.c[0]), ("C_ROW", layout.c[1]),
        )},
    }  # fmt: skip
    source = _CODE
    for name, value in values.items():
        source = source.replace(f"@{name}@", str(value))
    tiles = layout.batch * -(-layout.m // 128) * -(-layout.n // columns)
    args = (InputArg(0), InputArg(1), OutputArg(0))
    step = KernelStep("shallow", (min(tiles, residents * PROCESSORS), 1, 1), (256, 1, 1), args, shared_bytes=shared)
    parts = "three bf16 parts a number" if planes > 1 else "operands as they are"
    idea = f"Blocks stay; {parts}; tiles of 128 by {columns} leave in whole lines that are not kept in the cache."
    parameters = {"columns": columns, "residents": residents, "stripes": stripes}
    return Candidate("cuda", source, LaunchPlan(PLAN_VERSION, (step,)), idea, AUTHOR, NAME, dict(parameters))


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for a large product over a short K on sm_90 and sm_90a, best guess first; else []."""
    layout = _layout(key)
    if layout is None or target.device_type != "cuda" or not target.arch.startswith("sm_9"):
        return []
    whole, padded = _PLANES[layout.dtype] == 1, -(-layout.k // 16) * 16
    # Three parts spill at 128 columns and 128 registers a thread, or at 80; stripes cost four registers more.
    tried = [(128, 2, False), (64, 3, False)] if whole else []
    tried += [(64, 2, False), (128, 1, False), (64, 1, False)]
    if whole or padded <= 32:
        tried += [(64, 2, True), (128, 1, True)]
    made = [shallow_matmul(layout, *shape) for shape in tried]
    return [candidate for candidate in made if candidate is not None]
