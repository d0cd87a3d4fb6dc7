"""CUDA C++ that keeps a row in registers: how a team of threads loads it, reduces over it and stores it.

A *team* is part of a warp, a warp, a block, or a cluster of blocks that exchange partial results through distributed shared
memory. Each thread holds `vectors` pieces of 16 bytes, loaded before the first is used, so a row is read once and written once.
Rows may start at any address: pieces are laid on 16-byte boundaries below the row's first element, and only the first and last
piece of a row can reach outside of it; those go element by element.

Sources: register-resident rows and the two-reduction softmax are the common ways of llm.c (`dev/cuda/softmax_forward.cu`) and
ATen's persistent softmax; rows split over a cluster follow the idea of QuACK (`quack/reduction_base.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_autokern.store.key import TensorKey

AUTHOR = "templates"
VECTOR_BYTES = 16
CUDA_TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
MAX_GRID = 2**31 - 1
# Pieces a thread: above this the compiler spills at 1024 threads a block, which have 64 registers each; rows at any address
# need more registers for their edges.
MAX_VECTORS = 8
_MAX_UNALIGNED_VECTORS = {1024: 4}
# A team whose guess lies so far above the best was never within 1.2 times the quickest (H200, 18 shapes), mostly ten times off.
_LEAST_TEAMS, _HOPELESS = 4, 2.5


@dataclass(frozen=True)
class Team:
    """Who works on one row: `size` threads of each of `cluster` blocks of `threads`; `vectors` pieces of 16 bytes a thread. A
    size below `threads` means several rows a block."""

    size: int
    threads: int
    vectors: int
    cluster: int = 1

    @property
    def rows_per_block(self) -> int:
        """Rows that one block works on at a time."""
        return self.threads // self.size

    def grid(self, rows: int) -> int:
        """Blocks for `rows` rows."""
        return self.cluster * rows if self.size == self.threads else -(-rows // self.rows_per_block)


@dataclass(frozen=True)
class RowShape:
    """`length` neighbouring elements of `item_bytes` a row; `aligned`: every row of every tensor starts on 16 bytes."""

    length: int
    item_bytes: int
    aligned: bool

    @property
    def elements(self) -> int:
        """Elements of one piece."""
        return VECTOR_BYTES // self.item_bytes

    @property
    def pieces(self) -> int:
        """Pieces of a row, wherever it starts."""
        return -(-(self.length + (0 if self.aligned else self.elements - 1)) // self.elements)


def starts_on_vectors(tensors: tuple[TensorKey, ...], strides: tuple[tuple[int, ...], ...]) -> bool:
    """Whether every row of every tensor starts on 16 bytes, by the key's promise; `strides` are those between rows."""
    return all(
        tensor.alignment_bytes >= VECTOR_BYTES and all(s * ITEM_BYTES[tensor.dtype] % VECTOR_BYTES == 0 for s in steps)
        for tensor, steps in zip(tensors, strides, strict=True)
    )


def teams_for(shape: RowShape, rows: int, processors: int = 132) -> list[Team]:
    """Teams that hold a whole row, best guess first. The guess: enough bytes in flight (4 pieces a thread), few idle threads,
    and where rows are fewer than processors, blocks enough for all of them."""
    found = []
    for size in (1, 2, 4, 8, 16, 32):
        found.append(Team(size, 128, -(-shape.pieces // size)))
    for threads in (64, 128, 256, 512, 1024):
        found.append(Team(threads, threads, -(-shape.pieces // threads)))
    for cluster in (2, 4, 8, 16):
        for threads in (256, 512, 1024):
            found.append(Team(threads, threads, -(-shape.pieces // (cluster * threads)), cluster))
    most = {} if shape.aligned else _MAX_UNALIGNED_VECTORS
    held = [team for team in found if team.vectors <= most.get(team.threads, MAX_VECTORS)]
    fitting = [team for team in held if team.grid(rows) <= MAX_GRID]
    guesses = {team: _guess(team, shape, rows, processors) for team in fitting}
    best = sorted(fitting, key=guesses.__getitem__)
    return [team for place, team in enumerate(best) if place < _LEAST_TEAMS or guesses[team] <= _HOPELESS * guesses[best[0]]]


def _guess(team: Team, shape: RowShape, rows: int, processors: int) -> float:
    held = team.size * team.cluster * team.vectors
    waste = held / shape.pieces
    blocks = team.grid(rows)
    # Below one wave every processor that idles costs its share. A cluster's barrier costs, and pays when it fills the chip.
    idle = max(1.0, processors / blocks)
    exchange = 1.0 + 0.04 * math.log2(team.size) + (0.25 + 0.05 * math.log2(team.cluster) if team.cluster > 1 else 0.0)
    in_flight = 1.0 + 0.08 * abs(math.log2(team.vectors / 4))
    return waste * idle * exchange * in_flight


_PRELUDE = """#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cstdint>
#define INT64_C(value) value##ll
#define INLINE __device__ __forceinline__
typedef @T@ T;
typedef @O@ O;
constexpr int64_t D = @D@, ROWS = @ROWS@;
constexpr int TEAM = @TEAM@, THREADS = @THREADS@, V = @V@, C = @C@, CHUNKS = @CHUNKS@;
constexpr bool ALIGNED = @ALIGNED@;
constexpr int E = 16 / sizeof(T), WARPS = THREADS / 32;
constexpr bool RAGGED = !ALIGNED || D % E != 0;  // a piece may lie partly in the row
#define INF __int_as_float(0x7f800000)
INLINE float to_float(float v) { return v; }
INLINE float to_float(__half v) { return __half2float(v); }
INLINE float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
INLINE void from_float(float v, float& r) { r = v; }
INLINE void from_float(float v, __half& r) { r = __float2half_rn(v); }
INLINE void from_float(float v, __nv_bfloat16& r) { r = __float2bfloat16_rn(v); }
template <class U> struct alignas(16) pieces { U e[E]; };
template <class U> INLINE pieces<U> load_piece(const U* p) {
  pieces<U> r;
  uint4* raw = reinterpret_cast<uint4*>(&r);
#pragma unroll
  for (int i = 0; i < int(sizeof(r) / 16); ++i) raw[i] = __ldg(reinterpret_cast<const uint4*>(p) + i);
  return r;
}
// What is read once: nobody else wants it in the cache.
INLINE pieces<T> load_piece_once(const T* p) {
  pieces<T> r;
  *reinterpret_cast<uint4*>(&r) = @LOAD@(reinterpret_cast<const uint4*>(p));
  return r;
}
template <class U> INLINE void store_piece(U* p, const pieces<U>& v) {
  const uint4* raw = reinterpret_cast<const uint4*>(&v);
#pragma unroll
  for (int i = 0; i < int(sizeof(v) / 16); ++i) @STORE@(reinterpret_cast<uint4*>(p) + i, raw[i]);
}
// Where this thread's pieces lie. Piece `j` covers elements [at(j), at(j) + E) of the row; `shift` elements of the row's first
// piece lie before the row.
struct place {
  int64_t row;
  int member, rank, shift;
  int64_t first;  // number of the first piece that this team holds
  bool live;
  INLINE int64_t at(int j) const { return (first + int64_t(j) * TEAM * C + member) * E - shift; }
  INLINE bool whole(int j) const {
    if (CHUNKS == 1 && (ALIGNED || j > 0) && int64_t(j + 1) * TEAM * C * E <= D) return true;
    const int64_t begin = at(j);
    return (ALIGNED || begin >= 0) && begin + E <= D;
  }
  INLINE bool inside(int64_t i) const { return RAGGED && (ALIGNED || i >= 0) && i < D; }
  INLINE bool has(int j, int k) const { return whole(j) || inside(at(j) + k); }
};
INLINE int misalignment(const T* p) { return ALIGNED ? 0 : int(reinterpret_cast<uintptr_t>(p) & 15) / int(sizeof(T)); }
INLINE place my_place() {
  place p;
  p.first = 0;
  p.rank = 0;
  p.shift = 0;
  p.live = true;
  if (TEAM < THREADS) {
    p.member = threadIdx.x % TEAM;
    p.row = int64_t(blockIdx.x) * (THREADS / TEAM) + threadIdx.x / TEAM;
    // Shuffles need every lane: teams past the last row repeat it and store nothing.
    p.live = p.row < ROWS;
    if (!p.live) p.row = ROWS - 1;
  } else {
    p.rank = blockIdx.x % C;
    p.member = p.rank * THREADS + threadIdx.x;
    p.row = blockIdx.x / (C * CHUNKS);
    if (CHUNKS > 1) p.first = int64_t(blockIdx.x % CHUNKS) * TEAM * V;
  }
  return p;
}
INLINE void load_row(const place& p, const T* x, T fill, pieces<T>* v) {
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const int64_t begin = p.at(j);
    if (p.whole(j)) {
      v[j] = load_piece_once(x + begin);
    } else {
#pragma unroll
      for (int k = 0; k < E; ++k) v[j].e[k] = p.inside(begin + k) ? x[begin + k] : fill;
    }
  }
}
// `wide`: this row's pieces start on 16 bytes in the output too.
INLINE void store_row_piece(const place& p, O* y, bool wide, int j, const pieces<O>& v) {
  const int64_t begin = p.at(j);
  if (!p.live) return;
  if (wide && p.whole(j)) {
    store_piece(y + begin, v);
  } else {
#pragma unroll
    for (int k = 0; k < E; ++k)
      if (p.inside(begin + k)) y[begin + k] = v.e[k];
  }
}
INLINE bool stores_wide(const place& p, const O* y) {
  return ALIGNED || ((reinterpret_cast<uintptr_t>(y) - p.shift * sizeof(O)) & 15) == 0;
}
INLINE void cluster_arrive() { if (C > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
INLINE void cluster_wait() { if (C > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
struct maximum {
  INLINE static float none() { return -INF; }
  INLINE static float join(float a, float b) { return fmaxf(a, b); }
};
struct total {
  INLINE static float none() { return 0.0f; }
  INLINE static float join(float a, float b) { return a + b; }
};
// Reduce N values over the team, in one order whatever the timing. `slots` are N * C * WARPS floats that no other reduction of
// this launch uses. The first exchange between blocks waits until all of them have started.
template <class Op, int N, bool FIRST> INLINE void reduce(const place& p, float (&v)[N], float* slots) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int o = (TEAM < 32 ? TEAM : 32) / 2; o > 0; o /= 2) v[n] = Op::join(v[n], __shfl_xor_sync(~0u, v[n], o));
  if (TEAM <= 32 && TEAM < THREADS) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (C > 1) {
    if (FIRST) cluster_wait();
    if (lane < C) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint32_t there;
        const uint32_t here = uint32_t(__cvta_generic_to_shared(slots + (n * C + p.rank) * WARPS + warp));
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(lane));
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(v[n]) : "memory");
      }
    }
    cluster_arrive();
    cluster_wait();
  } else {
    if (lane == 0) {
#pragma unroll
      for (int n = 0; n < N; ++n) slots[n * WARPS + warp] = v[n];
    }
    __syncthreads();
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    float r = Op::none();
#pragma unroll
    for (int i = 0; i < (C * WARPS + 31) / 32; ++i) {
      const int at = i * 32 + lane;
      if (at < C * WARPS) r = Op::join(r, slots[n * C * WARPS + at]);
    }
#pragma unroll
    for (int o = 16; o > 0; o /= 2) r = Op::join(r, __shfl_xor_sync(~0u, r, o));
    v[n] = r;
  }
}
"""


def prelude(
    shape: RowShape, rows: int, team: Team, dtypes: tuple[str, str], *, chunks: int = 1, streaming: bool = False
) -> str:
    """The code above for one shape and team; `dtypes` are torch's names of input and output. `chunks` blocks share a row
    without exchanging anything; `streaming` marks rows as not worth keeping in the cache."""
    values = {
        "T": CUDA_TYPES[dtypes[0]],
        "O": CUDA_TYPES[dtypes[1]],
        "D": f"INT64_C({shape.length})",
        "ROWS": f"INT64_C({rows})",
        "TEAM": team.size,
        "THREADS": team.threads,
        "V": team.vectors,
        "C": team.cluster,
        "CHUNKS": chunks,
        "ALIGNED": "true" if shape.aligned else "false",
        "LOAD": "__ldcs" if streaming else "__ldg",
        "STORE": "__stcs" if streaming else "store_now",
    }
    text = _PRELUDE.replace(
        "template <class U> INLINE void store_piece", "INLINE void store_now(uint4* p, uint4 v) { *p = v; }\n" + _STORE_HEAD
    )
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    return text


_STORE_HEAD = "template <class U> INLINE void store_piece"
