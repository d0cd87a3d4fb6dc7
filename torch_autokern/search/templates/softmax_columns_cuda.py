"""Softmax and log-softmax on a GPU over a dimension whose elements are not neighbours, while those of another are.

A block owns some neighbouring columns: `across` threads side by side with 16 bytes each, so that a warp reads whole sectors,
and the other threads share the reduced dimension. Where a thread's elements fit its registers they are read once (`held`); else
a first pass finds maximum and sum together (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax") and a
second one reads again and writes.
"""

from __future__ import annotations

from torch_autokern.build.candidate import Candidate
from torch_autokern.runtime.plan import PLAN_VERSION, InputArg, KernelStep, LaunchPlan, OutputArg
from torch_autokern.search.templates.cuda_rows import AUTHOR, CUDA_TYPES, ITEM_BYTES, MAX_GRID, RowShape, Team, prelude
from torch_autokern.search.templates.cuda_teams import PROCESSORS
from torch_autokern.search.templates.layout import Loop, dense_tensors, distinct_elements, loops_over, offset, steps_in
from torch_autokern.search.templates.softmax_cuda import LOG_OPS, MATH
from torch_autokern.store.key import KernelKey, Target

NAME = "softmax_columns_cuda"
_MAX_CANDIDATES = 16

_COLUMNS = """constexpr int64_t INNER = @INNER@, TILES = @TILES@, X_STEP = @X_STEP@, Y_STEP = @Y_STEP@;
constexpr int TX = @TX@, TY = THREADS / TX, W = @W@;
constexpr bool HELD = @HELD@;
INLINE int64_t x_offset(int64_t row) { return @X@; }
INLINE int64_t y_offset(int64_t row) { return @Y@; }
template <class U> struct alignas(sizeof(U) * W > 16 ? 16 : sizeof(U) * W) some { U e[W]; };
struct take_max { INLINE static float join(float a, float b) { return fmaxf(a, b); } };
struct take_sum { INLINE static float join(float a, float b) { return a + b; } };
// Over the threads of one column, in one order whatever the timing.
template <class Op> INLINE void over_column(float (&v)[W], float (*room)[TX * W]) {
#pragma unroll
  for (int k = 0; k < W; ++k)
#pragma unroll
    for (int o = 16; o >= TX; o /= 2) v[k] = Op::join(v[k], __shfl_xor_sync(~0u, v[k], o));
  const int tx = threadIdx.x % TX;
  if (threadIdx.x % 32 < TX)
#pragma unroll
    for (int k = 0; k < W; ++k) room[threadIdx.x / 32][tx * W + k] = v[k];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < W; ++k) v[k] = room[0][tx * W + k];
#pragma unroll
  for (int w = 1; w < WARPS; ++w)
#pragma unroll
    for (int k = 0; k < W; ++k) v[k] = Op::join(v[k], room[w][tx * W + k]);
}
extern "C" __global__ void __launch_bounds__(THREADS) softmax(const T* __restrict__ x, O* __restrict__ y) {
  __shared__ __align__(16) float room[2][WARPS][TX * W];
  const int64_t outer = blockIdx.x / TILES, column = (blockIdx.x % TILES * TX + threadIdx.x % TX) * W;
  const bool live = column < INNER;
  const int64_t mine = live ? column : 0;  // shuffles need every thread: those beside the last column repeat the first
  x += x_offset(outer) + mine;
  y += y_offset(outer) + mine;
  const int ty = threadIdx.x / TX;
  auto read = [&](int64_t i) { return *reinterpret_cast<const some<T>*>(x + i * X_STEP); };
  some<T> v[HELD ? V : 1];
  float m[W], s[W];
#pragma unroll
  for (int k = 0; k < W; ++k) m[k] = -INF, s[k] = 0.0f;
  if (HELD) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const int64_t i = ty + int64_t(j) * TY;
      if (i < D) v[j] = read(i);
      else
        for (int k = 0; k < W; ++k) from_float(-INF, v[j].e[k]);
    }
#pragma unroll
    for (int j = 0; j < V; ++j)
#pragma unroll
      for (int k = 0; k < W; ++k) m[k] = fmaxf(m[k], to_float(v[j].e[k]));
    over_column<take_max>(m, room[0]);
#pragma unroll
    for (int j = 0; j < V; ++j)
#pragma unroll
      for (int k = 0; k < W; ++k) {
        // Past the end: exp(-inf - max) = 0, but a row of -inf must not see it.
        const float d = to_float(v[j].e[k]) - m[k], e = ty + int64_t(j) * TY < D ? power(d) : 0.0f;
        if (EXACT) from_float(LOG ? d : e, v[j].e[k]);
        s[k] += e;
      }
  } else {
    float own[W];
    for (int64_t first = ty; first < D; first += 4 * TY) {
      some<T> u[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (first + j * TY < D) u[j] = read(first + j * TY);
#pragma unroll
      for (int k = 0; k < W; ++k) {
        float top = m[k];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (first + j * TY < D) top = fmaxf(top, to_float(u[j].e[k]));
        const float from = top == -INF ? 0.0f : top;  // nothing above -inf yet: measured from 0 it weighs nothing
        s[k] = s[k] * power(m[k] - from);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (first + j * TY < D) s[k] += power(to_float(u[j].e[k]) - from);
        m[k] = top;
      }
    }
#pragma unroll
    for (int k = 0; k < W; ++k) own[k] = m[k];
    over_column<take_max>(m, room[0]);
    // Where the whole column is -inf this is exp(-inf - -inf): NaN, as it must.
#pragma unroll
    for (int k = 0; k < W; ++k) s[k] = ty < D ? s[k] * power(own[k] - m[k]) : 0.0f;
  }
  over_column<take_sum>(s, room[1]);
  auto finish = [&](int k, float value, bool ready, float r, float l) {
    const float d = ready ? value : value - m[k];
    return LOG ? d - l : quotient(ready ? value : power(d), s[k], r);
  };
  float r[W], l[W];
#pragma unroll
  for (int k = 0; k < W; ++k) r[k] = 1.0f / s[k], l[k] = LOG ? logf(s[k]) : 0.0f;
  auto write = [&](int64_t i, const some<T>& from, bool ready) {
    some<O> out;
#pragma unroll
    for (int k = 0; k < W; ++k) from_float(finish(k, to_float(from.e[k]), ready, r[k], l[k]), out.e[k]);
    if (live) *reinterpret_cast<some<O>*>(y + i * Y_STEP) = out;
  };
  if (HELD) {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (ty + int64_t(j) * TY < D) write(ty + int64_t(j) * TY, v[j], EXACT);
  } else {
#pragma unroll 4
    for (int64_t i = ty; i < D; i += TY) write(i, read(i), false);
  }
}
"""


def _columns(key: KernelKey) -> tuple[int, Loop, tuple[Loop, ...], int, tuple[int, int]] | None:
    """Length, the loop of neighbouring columns, the loops outside, elements a thread takes at once, strides of the reduced
    dimension; None for any other call."""
    if key.device_type != "cuda" or key.op not in LOG_OPS or not dense_tensors(key, tuple(CUDA_TYPES)):
        return None
    x, y, dim = key.tensors[0], key.outputs[0], key.scalars["dim"]
    if x is None or y is None or x.sizes != y.sizes or not distinct_elements(y) or not isinstance(dim, int) or not x.sizes:
        return None
    if (x.dtype != y.dtype and y.dtype != "float32") or x.sizes[dim] < 2:
        return None
    loops = loops_over([d for d in range(len(x.sizes)) if d != dim], (x, y))
    if not loops or loops[-1].strides != (1, 1):
        return None
    inner, outer, steps = loops[-1], loops[:-1], (x.strides[dim], y.strides[dim])
    wide = 16 // ITEM_BYTES[x.dtype]
    multiples = (inner.size, *steps, *(stride for loop in outer for stride in loop.strides))
    aligned = min(x.alignment_bytes, y.alignment_bytes) >= 16 and all(n % wide == 0 for n in multiples)
    return x.sizes[dim], inner, outer, wide if aligned else 1, steps


def columns(key: KernelKey, across: int, threads: int, vectors: int) -> Candidate | None:
    """Blocks of `threads`, `across` of them side by side; `vectors` reduced elements a thread in registers, 0: two passes."""
    found = _columns(key)
    assert found is not None and key.tensors[0] is not None and key.outputs[0] is not None
    length, inner, outer, wide, steps = found
    tiles = -(-inner.size // (across * wide))
    blocks = tiles * steps_in(outer)
    if blocks > MAX_GRID:
        return None
    dtypes = (key.tensors[0].dtype, key.outputs[0].dtype)
    values: dict[str, object] = {
        "INNER": f"INT64_C({inner.size})", "TILES": f"INT64_C({tiles})", "X_STEP": f"INT64_C({steps[0]})",
        "Y_STEP": f"INT64_C({steps[1]})", "TX": across, "W": wide, "HELD": "true" if vectors else "false",
        "X": offset(outer, 0, "row"), "Y": offset(outer, 1, "row"), "LOG": "true" if LOG_OPS[key.op] else "false",
    }  # fmt: skip
    body = MATH + _COLUMNS
    for name, value in values.items():
        body = body.replace(f"@{name}@", str(value))
    shape = RowShape(length, ITEM_BYTES[dtypes[0]], True)
    source = prelude(shape, steps_in(outer), Team(threads, threads, max(vectors, 1)), dtypes) + body
    step = KernelStep("softmax", (blocks, 1, 1), (threads, 1, 1), (InputArg(0), OutputArg(0)))
    passes = "read once into registers" if vectors else "read twice"
    idea = f"{across} threads side by side, {threads // across} along the reduced dimension, {passes}."
    parameters = {"across": across, "threads": threads, "vectors": vectors}
    return Candidate("cuda", source, LaunchPlan(PLAN_VERSION, (step,)), idea, AUTHOR, NAME, dict(parameters))


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for a reduced dimension that is not the innermost, best guess first; else []."""
    found = _columns(key) if target.device_type == "cuda" else None
    if found is None:
        return []
    length, inner, outer, wide, _ = found
    item_bytes = 16 // wide if wide > 1 else 4
    options = []
    for threads in (128, 256, 512, 1024):
        for across in (2, 4, 8, 16, 32):
            vectors = -(-length // (threads // across))
            # Elements in registers: 32 of them, 64 where a thread may have 128; half types count for one register in two.
            held = vectors * max(1, wide * item_bytes // 4) <= (64 if threads <= 512 else 32)
            blocks = -(-inner.size // (across * wide)) * steps_in(outer)
            # Segments under 64 bytes waste part of each access; below two waves processors idle; a second pass costs half.
            guess = max(1.0, 64 / (across * 16)) * max(1.0, 2 * PROCESSORS / blocks) * (1.0 if held else 1.5)
            guess *= max(1.0, threads / across / length) * (1 + 0.05 * abs(vectors - 8) / 8)
            options.append((guess, across, threads, vectors if held else 0))
    made = [columns(key, across, threads, vectors) for _, across, threads, vectors in sorted(options)[:_MAX_CANDIDATES]]
    return [candidate for candidate in made if candidate is not None]
