"""LayerNorm on a GPU: a row is read once into registers, its moments are found by its team of threads (`cuda_rows`), and it is
written once. `split`: few long rows are shared by many blocks in two launches, the second reads its chunk from L2 again.

The variance is two-pass and corrected (Chan, Golub, LeVeque 1983, eq. 1.7): with m0 near the mean and d = x - m0,
``mean = m0 + sum d / n`` and ``var = sum d^2 / n - (sum d / n)^2``; chunks are merged as in their eq. 2.1, in double. Sums
carry 1 / n inside, so that a row of large numbers does not overflow where its mean does not. rstd is `rsqrtf` and one step of
Newton's iteration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_autokern.build.candidate import Candidate
from torch_autokern.runtime.cubin_rules import parse_arch
from torch_autokern.runtime.plan import (
    PLAN_VERSION,
    InputArg,
    KernelStep,
    LaunchPlan,
    OutputArg,
    PointerArg,
    Workspace,
    WorkspaceArg,
)
from torch_autokern.search.templates.cuda_rows import (
    AUTHOR,
    CUDA_TYPES,
    ITEM_BYTES,
    MAX_GRID,
    VECTOR_BYTES,
    RowShape,
    Team,
    prelude,
    starts_on_vectors,
    teams_for,
)
from torch_autokern.search.templates.layout import (
    Loop,
    collapse,
    dense_tensors,
    distinct_elements,
    loops_over,
    offset,
    steps_in,
)
from torch_autokern.store.key import KernelKey, Target, TensorKey

NAME = "layer_norm_cuda"
SPLIT = "layer_norm_cuda_split"
_LARGE_BYTES = 32 << 20

_CODE = """typedef @WT@ W;
constexpr bool HAS_WEIGHT = @WEIGHT@, HAS_BIAS = @BIAS@, PARAMETERS_ALIGNED = @PARAMETERS_ALIGNED@, KEEP = sizeof(T) == 4;
constexpr float EPS = @EPS@;
INLINE int64_t x_offset(int64_t row) { return @X@; }
INLINE int64_t mean_offset(int64_t row) { return @MEAN@; }
INLINE int64_t rstd_offset(int64_t row) { return @RSTD@; }
INLINE int64_t y_offset(int64_t row) { return @Y@; }
INLINE float rstd_of(float var) {
  const float v = (var < 0.0f ? 0.0f : var) + EPS, r = rsqrtf(v);
  // An infinite or a zero variance has no step to take.
  return v > 0.0f && v < INF ? fmaf(r * fmaf(-v * r, r, 1.0f), 0.5f, r) : r;
}
INLINE float part_of_mean(const pieces<T>* v, float scale) {
  float s[4] = {};
#pragma unroll
  for (int j = 0; j < V; ++j)
#pragma unroll
    for (int k = 0; k < E; ++k) s[k % 4] = fmaf(to_float(v[j].e[k]), scale, s[k % 4]);
  return (s[0] + s[1]) + (s[2] + s[3]);
}
// sums = {sum d, sum d^2} * scale with d = x - m0; float32 keeps d in place of x.
INLINE void parts_of_variance(const place& p, pieces<T>* v, float m0, float scale, float (&sums)[2]) {
  float a[4] = {}, b[4] = {};
#pragma unroll
  for (int j = 0; j < V; ++j)
#pragma unroll
    for (int k = 0; k < E; ++k) {
      const float d = p.has(j, k) ? to_float(v[j].e[k]) - m0 : 0.0f, scaled = d * scale;
      if (KEEP) from_float(d, v[j].e[k]);
      a[k % 4] += scaled;
      b[k % 4] = fmaf(scaled, d, b[k % 4]);
    }
  sums[0] = (a[0] + a[1]) + (a[2] + a[3]);
  sums[1] = (b[0] + b[1]) + (b[2] + b[3]);
}
INLINE void load_parameters(const place& p, const W* w, int j, float fill, float (&r)[E]) {
  const int64_t begin = p.at(j);
  if (PARAMETERS_ALIGNED && p.whole(j)) {
    const pieces<W> v = load_piece(w + begin);
#pragma unroll
    for (int k = 0; k < E; ++k) r[k] = to_float(v.e[k]);
  } else {
#pragma unroll
    for (int k = 0; k < E; ++k) r[k] = p.has(j, k) ? to_float(__ldg(w + begin + k)) : fill;
  }
}
// `kept`: v holds d = x - m0 already.
INLINE void write_row(
    const place& p, O* y, const W* w, const W* b, const pieces<T>* v, float m0, float rest, float rstd, bool kept) {
  const bool wide = stores_wide(p, y);
#pragma unroll
  for (int j = 0; j < V; ++j) {
    float ws[E], bs[E];
    if (HAS_WEIGHT) load_parameters(p, w, j, 1.0f, ws);
    if (HAS_BIAS) load_parameters(p, b, j, 0.0f, bs);
    pieces<O> out;
#pragma unroll
    for (int k = 0; k < E; ++k) {
      const float value = to_float(v[j].e[k]), d = KEEP && kept ? value : value - m0;
      float r = (d - rest) * rstd;
      if (HAS_WEIGHT && HAS_BIAS) r = fmaf(r, ws[k], bs[k]);
      else if (HAS_WEIGHT) r *= ws[k];
      else if (HAS_BIAS) r += bs[k];
      from_float(r, out.e[k]);
    }
    store_row_piece(p, y, wide, j, out);
  }
}
INLINE T nothing() {
  T r;
  from_float(0.0f, r);
  return r;
}
"""

_SIGNATURE = """const T* __restrict__ x, const W* __restrict__ w, const W* __restrict__ b, O* __restrict__ y, float* mean,
           float* rstd"""
_ROWS = (
    """extern "C" __global__ void __launch_bounds__(THREADS)
layer_norm("""
    + _SIGNATURE
    + """) {
  __shared__ float slots[3][C * WARPS];
  cluster_arrive();
  place p = my_place();
  x += x_offset(p.row);
  y += y_offset(p.row);
  p.shift = misalignment(x);
  pieces<T> v[V];
  load_row(p, x, nothing(), v);
  constexpr float SCALE = float(1.0 / double(D));
  float m0[1] = {part_of_mean(v, SCALE)};
  reduce<total, 1, true>(p, m0, slots[0]);
  float sums[2];
  parts_of_variance(p, v, m0[0], SCALE, sums);
  reduce<total, 2, false>(p, sums, slots[1]);
  const float r = rstd_of(sums[1] - sums[0] * sums[0]);
  if (p.member == 0 && p.live) {
    mean[mean_offset(p.row)] = m0[0] + sums[0];
    rstd[rstd_offset(p.row)] = r;
  }
  write_row(p, y, w, b, v, m0[0], sums[0], r, true);
}
"""
)

_SPLIT = (
    """INLINE int64_t count_of(int64_t chunk, int shift) {
  const int64_t begin = chunk * TEAM * V * E - shift, end = begin + int64_t(TEAM) * V * E;
  const int64_t count = (end < D ? end : D) - (begin > 0 ? begin : 0);
  return count > 0 ? count : 0;  // the last piece of a row that starts on 16 bytes after all
}
extern "C" __global__ void __launch_bounds__(THREADS) measure(const T* __restrict__ x, float4* __restrict__ parts) {
  __shared__ float slots[3][WARPS];
  place p = my_place();
  x += x_offset(p.row);
  p.shift = misalignment(x);
  pieces<T> v[V];
  load_row(p, x, nothing(), v);
  const float count = float(count_of(blockIdx.x % CHUNKS, p.shift)), scale = 1.0f / fmaxf(count, 1.0f);
  float m0[1] = {part_of_mean(v, scale)};
  reduce<total, 1, true>(p, m0, slots[0]);
  float sums[2];
  parts_of_variance(p, v, m0[0], scale, sums);
  reduce<total, 2, false>(p, sums, slots[1]);
  // Mean in two parts; variance about it.
  if (threadIdx.x == 0) parts[blockIdx.x] = make_float4(m0[0], sums[0], sums[1] - sums[0] * sums[0], 0.0f);
  @LEAVE@
}
INLINE double over_warp(double v) {
#pragma unroll
  for (int o = 16; o > 0; o /= 2) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
extern "C" __global__ void __launch_bounds__(THREADS)
apply("""
    + _SIGNATURE
    + """, const float4* parts) {
  place p = my_place();
  x += x_offset(p.row);
  y += y_offset(p.row);
  p.shift = misalignment(x);
  pieces<T> v[V];
  load_row(p, x, nothing(), v);
  @WAIT@
  parts += p.row * CHUNKS;
  const int lane = threadIdx.x % 32;
  double sum = 0, spread = 0;
  for (int c = lane; c < CHUNKS; c += 32) {
    const float4 part = __ldcg(&parts[c]);
    sum += double(count_of(c, p.shift)) * (double(part.x) + double(part.y));
  }
  const double centre = over_warp(sum) / double(D);
  for (int c = lane; c < CHUNKS; c += 32) {
    const float4 part = __ldcg(&parts[c]);
    const double away = (double(part.x) + double(part.y)) - centre;
    spread += double(count_of(c, p.shift)) * (double(part.z) + away * away);
  }
  const float r = rstd_of(float(over_warp(spread) / double(D)));
  const float m0 = float(centre);
  if (p.member == 0 && blockIdx.x % CHUNKS == 0) {
    mean[mean_offset(p.row)] = m0;
    rstd[rstd_offset(p.row)] = r;
  }
  write_row(p, y, w, b, v, m0, float(centre - double(m0)), r, false);
}
"""
)


@dataclass(frozen=True)
class _Layout:
    shape: RowShape
    outer: tuple[Loop, ...]
    eps: float
    dtypes: tuple[str, str]
    weight: TensorKey | None
    bias: TensorKey | None

    @property
    def rows(self) -> int:
        return steps_in(self.outer)

    @property
    def streaming(self) -> bool:
        return self.rows * self.shape.length * ITEM_BYTES[self.dtypes[1]] > _LARGE_BYTES

    @property
    def args(self) -> tuple[PointerArg, ...]:
        return (InputArg(0), InputArg(1), InputArg(2), OutputArg(0), OutputArg(1), OutputArg(2))


def _layout(key: KernelKey) -> _Layout | None:
    if key.device_type != "cuda" or key.op != "native_layer_norm" or not dense_tensors(key, tuple(CUDA_TYPES)):
        return None
    shape = key.scalars["normalized_shape"]
    x, weight, bias = key.tensors
    y, mean, rstd = key.outputs
    if x is None or y is None or mean is None or rstd is None or not isinstance(shape, tuple) or not shape:
        return None
    parameters = [t for t in (weight, bias) if t is not None]
    first = len(x.sizes) - len(shape)
    plain = x.dtype == y.dtype and mean.dtype == rstd.dtype == "float32" and len(mean.sizes) == len(x.sizes)
    kinds = {t.dtype for t in parameters}
    if not plain or len(kinds) > 1 or not kinds <= {x.dtype, "float32"}:
        return None
    if not all(distinct_elements(t) for t in (y, mean, rstd)) or not _one_run([x, y, *parameters], len(shape)):
        return None
    outer = loops_over(range(first), (x, mean, rstd, y))
    strides = tuple(tuple(loop.strides[i] for loop in outer) for i in (0, 3))
    rows_ = RowShape(math.prod(shape), ITEM_BYTES[x.dtype], starts_on_vectors((x, y), strides))
    return _Layout(rows_, outer, float(key.scalars["eps"]), (x.dtype, y.dtype), weight, bias)  # type: ignore[arg-type]


def _one_run(tensors: list[TensorKey], dims: int) -> bool:
    """Whether the last `dims` dimensions are the same run of neighbours in every tensor."""
    loops = [Loop(tensors[0].sizes[place - dims], tuple(t.strides[place - dims] for t in tensors)) for place in range(dims)]
    joined = collapse(loops)
    return not joined or (len(joined) == 1 and set(joined[0].strides) == {1})


def _code(layout: _Layout) -> str:
    parameters = [t for t in (layout.weight, layout.bias) if t is not None]
    aligned = layout.shape.aligned and all(t.alignment_bytes >= VECTOR_BYTES for t in parameters)
    values = {
        "WT": CUDA_TYPES[parameters[0].dtype if parameters else layout.dtypes[0]],
        "WEIGHT": "true" if layout.weight is not None else "false",
        "BIAS": "true" if layout.bias is not None else "false",
        "PARAMETERS_ALIGNED": "true" if aligned else "false",
        "EPS": f"float({layout.eps!r})",
        **{name: offset(layout.outer, i, "row") for i, name in enumerate(("X", "MEAN", "RSTD", "Y"))},
    }
    text = _CODE
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def rows(layout: _Layout, team: Team, streaming: bool) -> Candidate:
    """A team a row."""
    source = prelude(layout.shape, layout.rows, team, layout.dtypes, streaming=streaming) + _code(layout) + _ROWS
    step = KernelStep("layer_norm", (team.grid(layout.rows), 1, 1), (team.threads, 1, 1), layout.args, (team.cluster, 1, 1))
    idea = f"A row in the registers of {team.size} threads of {team.cluster} blocks, {team.vectors} pieces of 16 bytes each."
    parameters = {"team": team.size, "threads": team.threads, "cluster": team.cluster, "streaming": streaming}
    return Candidate("cuda", source, LaunchPlan(PLAN_VERSION, (step,)), idea, AUTHOR, NAME, dict(parameters))


def split(layout: _Layout, threads: int, vectors: int, programmatic: bool) -> Candidate | None:
    """Chunks of `threads * vectors` pieces; `programmatic`: the second launch loads its chunk while the first still runs."""
    chunks = -(-layout.shape.pieces // (threads * vectors))
    blocks = layout.rows * chunks
    if chunks < 2 or blocks > MAX_GRID:
        return None
    team = Team(threads, threads, vectors)
    body = _SPLIT.replace("@WAIT@", 'asm volatile("griddepcontrol.wait;" ::: "memory");' if programmatic else "")
    body = body.replace("@LEAVE@", 'asm volatile("griddepcontrol.launch_dependents;");' if programmatic else "")
    source = prelude(layout.shape, layout.rows, team, layout.dtypes, chunks=chunks) + _code(layout) + body
    grid, block, parts = (blocks, 1, 1), (threads, 1, 1), WorkspaceArg("parts")
    steps = (
        KernelStep("measure", grid, block, (InputArg(0), parts)),
        KernelStep("apply", grid, block, (*layout.args, parts), programmatic=programmatic),
    )
    plan = LaunchPlan(PLAN_VERSION, steps, (Workspace("parts", 16 * blocks),))
    idea = f"Each row in {chunks} chunks for as many blocks; their moments are merged in a second launch."
    parameters = {"threads": threads, "vectors": vectors, "programmatic": programmatic}
    return Candidate("cuda", source, plan, idea, AUTHOR, SPLIT, dict(parameters))


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for rows of neighbouring elements, best guess first; else []."""
    layout = _layout(key)
    if layout is None or target.device_type != "cuda":
        return []
    hopper = parse_arch(target.arch)[0] >= 9
    teams = [team for team in teams_for(layout.shape, layout.rows) if hopper or team.cluster == 1]
    found = [rows(layout, team, layout.streaming) for team in teams[:6]]
    if layout.shape.pieces >= 2048 and layout.rows < 512:
        options = ((256, 4, hopper), (512, 4, hopper), (512, 8, hopper), (256, 8, False))
        chunked = [split(layout, *option) for option in options]
        few = [candidate for candidate in chunked if candidate is not None]
        found = few + found if layout.rows * 16 < 132 or not found else found + few
    return found
