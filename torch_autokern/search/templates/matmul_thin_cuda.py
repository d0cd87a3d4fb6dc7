"""Thin products on a GPU, where one operand has at most 64 rows and reading the other is all there is: decoding, mostly.

The long operand W has rows that are runs of neighbours over K (`nn.Linear`'s weight, transposed by `addmm`), and so has the
thin one, x. Half types multiply on tensor cores (`mma.sync`, m16n8k16): 16 rows of W are the tall side, 8 rows of x the short
one. A thread reads 16 neighbouring bytes of a row and they become its fragments of two products, because a dot product may
take K in any order as long as both operands take the same; so nothing passes through shared memory. float32 multiplies and
adds in fp32. Warps of a block share rows, or parts of K, and add up in one order; where blocks share K too, a second launch
adds up what they left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_autokern.build.candidate import Candidate
from torch_autokern.runtime.plan import PLAN_VERSION, InputArg, KernelStep, LaunchPlan, OutputArg, Workspace, WorkspaceArg
from torch_autokern.search.templates.cuda_rows import AUTHOR, CUDA_TYPES, ITEM_BYTES, MAX_GRID, VECTOR_BYTES
from torch_autokern.search.templates.cuda_teams import PROCESSORS
from torch_autokern.search.templates.layout import dense_tensors, distinct_elements
from torch_autokern.store.key import KernelKey, Target, TensorKey

NAME = "matmul_thin_cuda"
MAX_THIN = {"float32": 8, "float16": 64, "bfloat16": 64}
_OPS = {"mm": False, "bmm": False, "addmm": True, "baddbmm": True}
_LEAST_BYTES = 1 << 20  # below, launching is all there is and stock launches once too
_MAX_CANDIDATES = 16

_PRELUDE = """#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cstdint>
#define INT64_C(value) value##ll
#define INLINE __device__ __forceinline__
typedef @T@ T;
constexpr int64_t ROWS = @ROWS@, K = @K@, W_ROW = @W_ROW@, X_ROW = @X_ROW@;
constexpr int THIN = @THIN@, RW = @RW@, RT = @RT@, KW = @KW@, U = @U@, SPLITS = @SPLITS@;
constexpr int THREADS = 32 * RW * KW, E = 16 / sizeof(T);
constexpr bool HAS_ADDEND = @HAS_ADDEND@;
constexpr float ALPHA = @ALPHA@, BETA = @BETA@;
INLINE float to_float(float v) { return v; }
INLINE float to_float(__half v) { return __half2float(v); }
INLINE float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
INLINE void from_float(float v, float& r) { r = v; }
INLINE void from_float(float v, __half& r) { r = __float2half_rn(v); }
INLINE void from_float(float v, __nv_bfloat16& r) { r = __float2bfloat16_rn(v); }
// Of W nothing is read twice; x is read by every block.
INLINE uint4 read_once(const T* p) { return __ldcs(reinterpret_cast<const uint4*>(p)); }
INLINE uint4 read_shared(const T* p) { return __ldg(reinterpret_cast<const uint4*>(p)); }
INLINE void store(T* out, const T* addend, int64_t batch, int64_t row, int thin, float sum) {
  float v = ALPHA * sum;
  if (HAS_ADDEND) v = fmaf(BETA, to_float(addend[batch * @ADD_B@ + row * @ADD_ROW@ + thin * @ADD_THIN@]), v);
  from_float(v, out[batch * @OUT_B@ + row * @OUT_ROW@ + thin * @OUT_THIN@]);
}
"""
_TENSOR_CORES = """constexpr int MT = (THIN + 7) / 8, TALL = 16, STEP = 32;
INLINE void multiply(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.@MMA@.@MMA@.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// `sums[r][m]` is the fragment of 16 rows and 8 thin ones: element i is row `quad + i / 2 * 8`, thin one `2 * lane + i % 2`.
typedef float fragment[RT][MT][4];
INLINE void products(const T* w, const T* x, int64_t first_row, int64_t begin, int64_t end, fragment& sums) {
  const int quad = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
  for (int64_t step = begin; step < end; step += U * STEP) {
    uint4 ws[U][RT][2];
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int r = 0; r < RT; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int64_t k = step + u * STEP + lane * E, row = first_row + r * TALL + h * 8 + quad;
          ws[u][r][h] = k < end && row < ROWS ? read_once(w + row * W_ROW + k) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const int64_t k = step + u * STEP + lane * E;
        const int thin = m * 8 + quad;
        const uint4 xs = k < end && thin < THIN ? read_shared(x + thin * X_ROW + k) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int r = 0; r < RT; ++r) {
          multiply(sums[r][m], ws[u][r][0].x, ws[u][r][1].x, ws[u][r][0].y, ws[u][r][1].y, xs.x, xs.y);
          multiply(sums[r][m], ws[u][r][0].z, ws[u][r][1].z, ws[u][r][0].w, ws[u][r][1].w, xs.z, xs.w);
        }
      }
  }
}
INLINE void leave(const fragment& sums, float* room) {
  const int quad = threadIdx.x % 32 / 4, lane = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) room[(r * TALL + quad + i / 2 * 8) * (MT * 8) + m * 8 + lane * 2 + i % 2] = sums[r][m][i];
}
constexpr int WIDE = MT * 8;
"""
_FMA = """constexpr int TALL = 1, STEP = 32 * E, WIDE = THIN;
typedef float fragment[RT][THIN];
INLINE float dot(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}
INLINE float4 floats(uint4 v) { return *reinterpret_cast<float4*>(&v); }
INLINE void products(const T* w, const T* x, int64_t first_row, int64_t begin, int64_t end, fragment& sums) {
  const int lane = threadIdx.x % 32;
  for (int64_t step = begin; step < end; step += U * STEP) {
    uint4 ws[U][RT];
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int r = 0; r < RT; ++r) {
        const int64_t k = step + u * STEP + lane * E, row = first_row + r;
        ws[u][r] = k < end && row < ROWS ? read_once(w + row * W_ROW + k) : make_uint4(0, 0, 0, 0);
      }
#pragma unroll
    for (int u = 0; u < U; ++u)
#pragma unroll
      for (int m = 0; m < THIN; ++m) {
        const int64_t k = step + u * STEP + lane * E;
        if (k >= end) continue;
        const uint4 xs = read_shared(x + m * X_ROW + k);
#pragma unroll
        for (int r = 0; r < RT; ++r) sums[r][m] = dot(floats(ws[u][r]), floats(xs), sums[r][m]);
      }
  }
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int m = 0; m < THIN; ++m)
#pragma unroll
      for (int o = 16; o > 0; o /= 2) sums[r][m] += __shfl_xor_sync(~0u, sums[r][m], o);
}
INLINE void leave(const fragment& sums, float* room) {
  if (threadIdx.x % 32) return;
#pragma unroll
  for (int r = 0; r < RT; ++r)
#pragma unroll
    for (int m = 0; m < THIN; ++m) room[r * WIDE + m] = sums[r][m];
}
"""
_KERNEL = """constexpr int BLOCK_ROWS = RW * RT * TALL;
// K in pieces of `STEP`, shared by the warps of a block and by `SPLITS` blocks.
constexpr int64_t STEPS = (K + STEP - 1) / STEP, SHARE = (STEPS + SPLITS * KW - 1) / (SPLITS * KW) * STEP;
extern "C" __global__ void __launch_bounds__(THREADS)
thin(const T* __restrict__ w, const T* __restrict__ x, const T* __restrict__ addend, T* __restrict__ out,
     float* __restrict__ parts) {
  extern __shared__ float room[];
  const int warp = threadIdx.x / 32, rw = warp % RW, kw = warp / RW;
  const int64_t batch = blockIdx.z, block_row = int64_t(blockIdx.x) * BLOCK_ROWS;
  const int64_t begin = (int64_t(blockIdx.y) * KW + kw) * SHARE, end = begin + SHARE < K ? begin + SHARE : K;
  fragment sums = {};
  products(w + batch * @W_B@, x + batch * @X_B@, block_row + rw * RT * TALL, begin, end, sums);
  leave(sums, room + (kw * RW + rw) * RT * TALL * WIDE);
  __syncthreads();
  for (int i = threadIdx.x; i < BLOCK_ROWS * THIN; i += THREADS) {
    // Neighbouring threads write neighbouring results.
    const int row = @ROWS_INNER@ ? i % BLOCK_ROWS : i / THIN, thin_row = @ROWS_INNER@ ? i / BLOCK_ROWS : i % THIN;
    if (block_row + row >= ROWS) continue;
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < KW; ++part) sum += room[(part * BLOCK_ROWS + row) * WIDE + thin_row];
    if (SPLITS > 1) parts[((blockIdx.y * gridDim.z + batch) * THIN + thin_row) * ROWS + block_row + row] = sum;
    else store(out, addend, batch, block_row + row, thin_row, sum);
  }
  @LEAVE@
}
"""
_GATHER = """extern "C" __global__ void __launch_bounds__(256)
gather(const float* parts, const T* __restrict__ addend, T* __restrict__ out) {
  @WAIT@
  constexpr int64_t ONE = @BATCH@ * THIN * ROWS;
  for (int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x; i < ONE; i += int64_t(gridDim.x) * 256) {
    float sum = 0.0f;
    for (int part = 0; part < SPLITS; ++part) sum += __ldcg(parts + part * ONE + i);
    store(out, addend, i / (THIN * ROWS), i % ROWS, int(i / ROWS % THIN), sum);
  }
}
"""


@dataclass(frozen=True)
class _Layout:
    """The call with its long operand first: `w` and `x` are (argument, stride between rows, stride between batches); `out` and
    `addend` strides over (batch, long rows, thin rows)."""

    dtype: str
    batch: int
    rows: int
    thin: int
    k: int
    w: tuple[int, int, int]
    x: tuple[int, int, int]
    out: tuple[int, int, int]
    addend: tuple[int, int, int] | None
    alpha: float
    beta: float


@dataclass(frozen=True)
class Shares:
    """What the search walks: `row_warps` by `k_warps` warps a block, tiles of rows a warp, pieces of 16 bytes a row that a
    thread has in flight, and blocks that share K."""

    row_warps: int
    k_warps: int
    row_tiles: int
    unroll: int
    splits: int


def _steps(tensor: TensorKey, rank: int) -> tuple[int, int, int]:
    """Strides over batch, row and column; 0 where there is one of it, or it is broadcast."""
    steps = [stride if size > 1 else 0 for size, stride in zip(tensor.sizes, tensor.strides, strict=True)]
    batch, row, column = (0, 0, 0, *steps)[-3:]
    return batch if rank == 3 else 0, row, column


def _runs(tensor: TensorKey, k_dim: int, rows_dim: int) -> tuple[int, int] | None:
    """Strides between rows and batches where each row is K neighbours that start on 16 bytes; else None."""
    sizes, strides = tensor.sizes, tensor.strides
    row = strides[rows_dim] if sizes[rows_dim] > 1 else 0
    batch = strides[0] if len(sizes) == 3 and sizes[0] > 1 else 0
    bytes_of = ITEM_BYTES[tensor.dtype]
    if (sizes[k_dim] > 1 and strides[k_dim] != 1) or tensor.alignment_bytes < VECTOR_BYTES:
        return None
    return None if row * bytes_of % VECTOR_BYTES or batch * bytes_of % VECTOR_BYTES else (row, batch)


def _layout(key: KernelKey) -> _Layout | None:
    if key.device_type != "cuda" or key.op not in _OPS or key.matmul_precision != "ieee":
        return None
    left, right = key.tensors[-2:]
    out = key.outputs[0]
    if not dense_tensors(key, tuple(CUDA_TYPES)) or left is None or right is None or out is None or not distinct_elements(out):
        return None
    if not left.dtype == right.dtype == out.dtype:
        return None
    rank, first = len(left.sizes), len(key.tensors) - 2
    (m, k), n, batch = left.sizes[-2:], right.sizes[-1], left.sizes[0] if rank == 3 else 1
    a, b = _runs(left, rank - 1, rank - 2), _runs(right, rank - 2, rank - 1)
    if a is None or b is None or min(m, n) > MAX_THIN[left.dtype] or k * ITEM_BYTES[left.dtype] % VECTOR_BYTES or batch > 65535:
        return None
    if batch * max(m, n) * k * ITEM_BYTES[left.dtype] < _LEAST_BYTES:
        return None
    c, addend, alpha, beta = _steps(out, rank), None, 1.0, 0.0
    if _OPS[key.op]:
        extra = key.tensors[0]
        alpha, beta = float(key.scalars["alpha"]), float(key.scalars["beta"])  # type: ignore[arg-type]
        if extra is None or extra.dtype != left.dtype or not math.isfinite(alpha) or not math.isfinite(beta):
            return None
        addend = _steps(extra, rank) if beta else None  # ATen ignores what `self` holds when beta is 0
    operands = ((first, *a), (first + 1, *b))
    if m >= n:
        return _Layout(left.dtype, batch, m, n, k, operands[0], operands[1], c, addend, alpha, beta)
    turn = addend and (addend[0], addend[2], addend[1])
    return _Layout(left.dtype, batch, n, m, k, operands[1], operands[0], (c[0], c[2], c[1]), turn, alpha, beta)


def thin_matmul(layout: _Layout, shares: Shares) -> Candidate:
    """The kernel, and the sum over blocks where they share K."""
    half = layout.dtype != "float32"
    wide = -(-layout.thin // 8) * 8 if half else layout.thin
    block_rows = shares.row_warps * shares.row_tiles * (16 if half else 1)
    split, out, addend = shares.splits > 1, layout.out, layout.addend or (0, 0, 0)
    values: dict[str, object] = {
        "T": CUDA_TYPES[layout.dtype], "MMA": "f16" if layout.dtype == "float16" else "bf16", "ROWS": _long(layout.rows),
        "K": _long(layout.k), "W_ROW": _long(layout.w[1]), "X_ROW": _long(layout.x[1]), "W_B": _long(layout.w[2]),
        "X_B": _long(layout.x[2]), "THIN": layout.thin, "RW": shares.row_warps, "RT": shares.row_tiles, "KW": shares.k_warps,
        "U": shares.unroll, "SPLITS": shares.splits, "BATCH": _long(layout.batch),
        "HAS_ADDEND": str(layout.addend is not None).lower(), "ALPHA": f"float({layout.alpha!r})",
        "BETA": f"float({layout.beta!r})", "ROWS_INNER": str(out[1] <= out[2] or layout.thin == 1).lower(),
        **{f"OUT_{name}": _long(step) for name, step in zip(("B", "ROW", "THIN"), out, strict=True)},
        **{f"ADD_{name}": _long(step) for name, step in zip(("B", "ROW", "THIN"), addend, strict=True)},
        "LEAVE": 'asm volatile("griddepcontrol.launch_dependents;");' if split else "",
        "WAIT": 'asm volatile("griddepcontrol.wait;" ::: "memory");' if split else "",
    }  # fmt: skip
    source = _PRELUDE + (_TENSOR_CORES if half else _FMA) + _KERNEL + (_GATHER if split else "")
    for name, value in values.items():
        source = source.replace(f"@{name}@", str(value))
    parts, self_arg = WorkspaceArg("parts"), InputArg(0)
    grid = (-(-layout.rows // block_rows), shares.splits, layout.batch)
    args = (InputArg(layout.w[0]), InputArg(layout.x[0]), self_arg, OutputArg(0), parts)
    threads, shared = 32 * shares.row_warps * shares.k_warps, 4 * shares.k_warps * block_rows * wide
    steps = [KernelStep("thin", grid, (threads, 1, 1), args, shared_bytes=shared)]
    results = layout.batch * layout.rows * layout.thin
    if split:
        blocks = (min(-(-results // 256), 4 * PROCESSORS), 1, 1)
        steps.append(KernelStep("gather", blocks, (256, 1, 1), (parts, self_arg, OutputArg(0)), programmatic=True))
    plan = LaunchPlan(PLAN_VERSION, tuple(steps), (Workspace("parts", 4 * shares.splits * results if split else 16),))
    parameters = {
        "row_warps": shares.row_warps, "k_warps": shares.k_warps, "row_tiles": shares.row_tiles, "unroll": shares.unroll,
        "splits": shares.splits,
    }  # fmt: skip
    idea = f"Every row of the long operand read once, {shares.unroll} pieces ahead; K shared by {shares.k_warps} warps."
    return Candidate("cuda", source, plan, idea, AUTHOR, NAME, dict(parameters))


def _long(value: int) -> str:
    return f"INT64_C({value})"


def shares_for(layout: _Layout) -> list[Shares]:
    """Best guess first: 24 KB and more in flight on each processor, all of them busy, and x read seldom."""
    half = layout.dtype != "float32"
    tall, step = (16, 32) if half else (1, 128)
    found: dict[Shares, float] = {}
    for row_warps in (1, 2, 4):
        for k_warps in (2, 4, 8, 16):
            for row_tiles in (1, 2) if half else (2, 4, 8):
                for unroll in (1, 2, 4):
                    for splits in (1, 2, 4, 8):
                        shares = Shares(row_warps, k_warps, row_tiles, unroll, splits)
                        cost = _cost(layout, shares, tall, step)
                        if cost is not None:
                            found[shares] = cost
    return sorted(found, key=found.__getitem__)[:_MAX_CANDIDATES]


def _cost(layout: _Layout, shares: Shares, tall: int, step: int) -> float | None:
    """A guess of relative time, or None where the shares do not fit."""
    half = layout.dtype != "float32"
    thin_tiles = -(-layout.thin // 8) if half else layout.thin
    block_rows = shares.row_warps * shares.row_tiles * tall
    warps = shares.row_warps * shares.k_warps
    registers = shares.row_tiles * thin_tiles * (4 if half else 1) + shares.unroll * shares.row_tiles * (8 if half else 4)
    shared = 4 * shares.k_warps * block_rows * (thin_tiles * (8 if half else 1))
    a_share = layout.k // (shares.splits * shares.k_warps)
    if warps > 16 or registers > 112 or shared > 96 << 10 or a_share < step * shares.unroll:
        return None
    blocks = layout.batch * -(-layout.rows // block_rows) * shares.splits
    resident = min(2048 // (32 * warps), 65536 // (32 * warps * (registers + 40)), (200 << 10) // max(shared, 1))
    if resident < 1 or blocks > MAX_GRID:
        return None
    waves = blocks / (PROCESSORS * resident)
    busy = max(1.0, math.ceil(waves) / waves) if waves > 1 else max(1.0, PROCESSORS / blocks)
    ahead = min(blocks / PROCESSORS, resident) * warps * shares.unroll * shares.row_tiles * (1024 if half else 512)
    in_flight = max(1.0, 32768 / ahead)
    again = 1.0 + 0.5 * layout.thin / block_rows  # x comes from the cache once a block
    return busy * in_flight * again * (1.0 + 0.03 * (shares.splits > 1) + 0.01 * shares.splits)


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for a product with a thin operand, best guess first; else []."""
    layout = _layout(key)
    if layout is None or target.device_type != "cuda" or not target.arch.startswith("sm_9"):
        return []  # launches that start early, and the price of bytes, are a Hopper's
    return [thin_matmul(layout, shares) for shares in shares_for(layout)]
