"""Gradients of LayerNorm on a GPU, over rows of neighbouring elements that start on 16 bytes.

With ``xh = (x - mean) * rstd`` and ``h = g * weight``, a row's gradient is ``rstd * (h - mean(h) - xh * mean(h * xh))``; the
weight's is ``sum g * xh`` and the bias's ``sum g``, both over rows (ATen's `native_layer_norm_backward`). Stock reads x and g
twice, once for either direction. Here a team of threads (`cuda_rows`) takes one row after the other, so that a thread meets the
same columns each time: it keeps their two sums in registers, leaves them in a workspace at the end, and a second launch adds up
what the blocks left, in one order.
"""

from __future__ import annotations

import math

from torch_autokern.build.candidate import Candidate
from torch_autokern.runtime.plan import PLAN_VERSION, InputArg, KernelStep, LaunchPlan, OutputArg, Workspace, WorkspaceArg
from torch_autokern.search.templates.cuda_rows import (
    AUTHOR,
    CUDA_TYPES,
    ITEM_BYTES,
    VECTOR_BYTES,
    RowShape,
    Team,
    prelude,
    starts_on_vectors,
    teams_for,
)
from torch_autokern.search.templates.cuda_teams import PROCESSORS
from torch_autokern.search.templates.layout import dense_tensors, distinct_elements, loops_over, offset, steps_in
from torch_autokern.store.key import KernelKey, Target

NAME = "layer_norm_backward_cuda"
_MAX_TEAMS = 8
_MAX_SUMS = 64  # fp32 registers a thread for the columns' sums; beside them it holds two rows' pieces

_CODE = """typedef @WT@ W;
constexpr bool HAS_WEIGHT = @WEIGHT@, WANTS_INPUT = @INPUT@, WANTS_SUMS = @SUMS@;
constexpr int TEAMS = THREADS / TEAM;
INLINE int64_t g_offset(int64_t row) { return @G@; }
INLINE int64_t x_offset(int64_t row) { return @X@; }
INLINE int64_t mean_offset(int64_t row) { return @MEAN@; }
INLINE int64_t rstd_offset(int64_t row) { return @RSTD@; }
INLINE int64_t r_offset(int64_t row) { return @R@; }
INLINE T nothing() {
  T r;
  from_float(0.0f, r);
  return r;
}
extern "C" __global__ void __launch_bounds__(THREADS)
layer_norm_backward(const T* __restrict__ g, const T* __restrict__ x, const float* __restrict__ mean,
                    const float* __restrict__ rstd, const W* __restrict__ w, O* __restrict__ r, float* __restrict__ parts) {
  __shared__ float slots[2][2 * WARPS];
  place p = my_place();
  float gw[WANTS_SUMS ? V * E : 1] = {}, gb[WANTS_SUMS ? V * E : 1] = {};
  int turn = 0;
  // Every thread of a block takes as many turns: teams past the last row repeat it and count for nothing.
  for (int64_t first = int64_t(blockIdx.x) * TEAMS; first < ROWS; first += int64_t(gridDim.x) * TEAMS, turn ^= 1) {
    p.row = first + (TEAM < THREADS ? threadIdx.x / TEAM : 0);
    p.live = p.row < ROWS;
    if (!p.live) p.row = ROWS - 1;
    pieces<T> gs[V], xs[V];
    load_row(p, g + g_offset(p.row), nothing(), gs);
    load_row(p, x + x_offset(p.row), nothing(), xs);
    const float m = __ldg(mean + mean_offset(p.row)), s = __ldg(rstd + rstd_offset(p.row)), counts = p.live ? 1.0f : 0.0f;
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < V; ++j) {
      pieces<W> ws;
      if (HAS_WEIGHT && WANTS_INPUT && p.whole(j)) ws = load_piece(w + p.at(j));
#pragma unroll
      for (int k = 0; k < E; ++k) {
        if (!p.has(j, k)) continue;
        const float grad = to_float(gs[j].e[k]), xh = (to_float(xs[j].e[k]) - m) * s;
        const float weight = HAS_WEIGHT && WANTS_INPUT ? to_float(p.whole(j) ? ws.e[k] : __ldg(w + p.at(j) + k)) : 1.0f;
        const float h = grad * weight;
        sums[0] += h;
        sums[1] = fmaf(h, xh, sums[1]);
        if (WANTS_SUMS && p.live) {
          gw[j * E + k] = fmaf(grad, xh, gw[j * E + k]);
          gb[j * E + k] += grad;
        }
      }
    }
    if (!WANTS_INPUT) continue;
    // Two rooms take turns: nobody overwrites what a slower warp still reads, because a whole exchange lies between.
    reduce<total, 2, false>(p, sums, slots[turn]);
    constexpr float SCALE = float(1.0 / double(D));
    const float a = sums[0] * SCALE, b = sums[1] * SCALE;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      pieces<W> ws;
      if (HAS_WEIGHT && p.whole(j)) ws = load_piece(w + p.at(j));
      pieces<O> out;
#pragma unroll
      for (int k = 0; k < E; ++k) {
        if (!p.has(j, k)) continue;
        const float weight = HAS_WEIGHT ? to_float(p.whole(j) ? ws.e[k] : __ldg(w + p.at(j) + k)) : 1.0f;
        const float h = to_float(gs[j].e[k]) * weight, xh = (to_float(xs[j].e[k]) - m) * s;
        from_float(s * (h - fmaf(xh, b, a)), out.e[k]);
      }
      store_row_piece(p, r + r_offset(p.row), true, j, out);
    }
  }
  if (!WANTS_SUMS) return;
  // Teams of a block meet in shared memory, one after the other, so that the order is always the same.
  extern __shared__ float columns[];
  for (int team = 0; team < TEAMS; ++team) {
    if (TEAM == THREADS || threadIdx.x / TEAM == team) {
#pragma unroll
      for (int j = 0; j < V; ++j)
#pragma unroll
        for (int k = 0; k < E; ++k) {
          if (!p.has(j, k)) continue;
          const int64_t at = p.at(j) + k;
          columns[at] = team ? columns[at] + gw[j * E + k] : gw[j * E + k];
          columns[D + at] = team ? columns[D + at] + gb[j * E + k] : gb[j * E + k];
        }
    }
    __syncthreads();
  }
  for (int64_t i = threadIdx.x; i < 2 * D; i += THREADS) parts[blockIdx.x * 2 * D + i] = columns[i];
}
"""
_GATHER = """// A warp's lanes are neighbouring columns, its 8 warps share the blocks' parts.
extern "C" __global__ void __launch_bounds__(256)
gather(const float* __restrict__ parts, W* __restrict__ grad_weight, W* __restrict__ grad_bias) {
  __shared__ float room[8][32];
  const int64_t column = int64_t(blockIdx.x) * 32 + threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  float sum = 0.0f;
  if (column < 2 * D)
    for (int block = warp; block < @BLOCKS@; block += 8) sum += parts[block * 2 * D + column];
  room[warp][threadIdx.x % 32] = sum;
  __syncthreads();
  if (warp || column >= 2 * D) return;
  for (int other = 1; other < 8; ++other) sum += room[other][threadIdx.x];
  W* to = column < D ? grad_weight : grad_bias;
  if (to) from_float(sum, to[column < D ? column : column - D]);
}
"""


class _Call:
    """A key that the template answers: its rows and the texts that fill the code."""

    def __init__(self, shape: RowShape, rows: int, dtype: str, mask: tuple[bool, ...], values: dict[str, str]) -> None:
        self.shape = shape
        self.rows = rows
        self.dtype = dtype
        self.wants_input = bool(mask[0])
        self.wants_sums = bool(mask[1] or mask[2])
        self.mask = mask
        self.values = values

    def of_team(self, team: Team, blocks_a_processor: int) -> Candidate | None:
        """Rows in turn for as many blocks as are there at once."""
        blocks = min(team.grid(self.rows), blocks_a_processor * PROCESSORS)
        shared = 8 * self.shape.length if self.wants_sums else 0
        if self.wants_sums and team.vectors * self.shape.elements * 2 > _MAX_SUMS:
            return None
        if shared * blocks_a_processor > 200_000 or team.threads * blocks_a_processor > 2048:
            return None
        code = _CODE + (_GATHER if self.wants_sums else "")
        for name, value in (*self.values.items(), ("BLOCKS", str(blocks))):
            code = code.replace(f"@{name}@", value)
        source = prelude(self.shape, self.rows, team, (self.dtype, self.dtype)) + code
        parts = WorkspaceArg("parts")
        args = (InputArg(0), InputArg(1), InputArg(2), InputArg(3), InputArg(4), OutputArg(0), parts)
        steps = [KernelStep("layer_norm_backward", (blocks, 1, 1), (team.threads, 1, 1), args, shared_bytes=shared)]
        size = 8 * self.shape.length * blocks if self.wants_sums else 16
        if self.wants_sums:
            grid = (-(-2 * self.shape.length // 32), 1, 1)
            steps.append(KernelStep("gather", grid, (256, 1, 1), (parts, OutputArg(1), OutputArg(2))))
        plan = LaunchPlan(PLAN_VERSION, tuple(steps), (Workspace("parts", size),))
        parameters = {"team": team.size, "threads": team.threads, "blocks": blocks_a_processor}
        idea = f"{team.size} threads a row, row after row; the columns' sums stay in registers until the last one."
        return Candidate("cuda", source, plan, idea, AUTHOR, NAME, dict(parameters))


def _call(key: KernelKey) -> _Call | None:
    if key.device_type != "cuda" or key.op != "native_layer_norm_backward" or not dense_tensors(key, tuple(CUDA_TYPES)):
        return None
    shape, mask = key.scalars["normalized_shape"], key.scalars["output_mask"]
    grad, x, mean, rstd, weight = key.tensors[:5]
    if grad is None or x is None or mean is None or rstd is None or not isinstance(shape, tuple) or not isinstance(mask, tuple):
        return None
    result = key.outputs[0] or x
    kinds = {t.dtype for t in (weight, *key.outputs[1:]) if t is not None}
    if not shape or len(kinds) > 1 or not kinds <= {x.dtype, "float32"}:
        return None
    if not (grad.dtype == x.dtype == result.dtype and mean.dtype == rstd.dtype == "float32"):
        return None
    dims = len(shape)
    first, length = len(x.sizes) - dims, math.prod(shape)
    neighbours = tuple(math.prod(shape[place + 1 :]) for place in range(dims))
    run = [t for t in (grad, x, result) if t.strides[first:] != neighbours]
    flat = [t for t in (weight, *key.outputs[1:]) if t is not None and t.strides != neighbours]
    if run or flat or not distinct_elements(result) or len(mean.sizes) != len(x.sizes) or len(rstd.sizes) != len(x.sizes):
        return None
    tensors = (grad, x, mean, rstd, result)
    outer = loops_over(range(first), tensors)
    strides = tuple(tuple(loop.strides[i] for loop in outer) for i in (0, 1, 4))
    if not starts_on_vectors((grad, x, result), strides) or (weight is not None and weight.alignment_bytes < VECTOR_BYTES):
        return None  # rows that start anywhere would change a thread's columns from row to row
    kind = kinds.pop() if kinds else x.dtype
    values = {
        "WT": CUDA_TYPES[kind],
        "WEIGHT": "true" if weight is not None else "false",
        "INPUT": "true" if mask[0] else "false",
        "SUMS": "true" if mask[1] or mask[2] else "false",
        **{name: offset(outer, i, "row") for i, name in enumerate(("G", "X", "MEAN", "RSTD", "R"))},
    }
    rows = RowShape(length, ITEM_BYTES[x.dtype], aligned=True)
    return _Call(rows, steps_in(outer), x.dtype, tuple(bool(m) for m in mask), values)


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for rows of neighbouring elements, best guess first; else []."""
    call = _call(key)
    if call is None or target.device_type != "cuda":
        return []
    # As on one processor: blocks that idle where rows are few are no reason for a cluster, which a row's gradient cannot use.
    teams = [team for team in teams_for(call.shape, call.rows, processors=1) if team.cluster == 1][:_MAX_TEAMS]
    found = [call.of_team(team, blocks) for team in teams for blocks in (2, 4, 1, 8)]
    return [candidate for candidate in found if candidate is not None]
