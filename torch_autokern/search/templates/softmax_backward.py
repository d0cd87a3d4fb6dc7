"""Backward of softmax and log-softmax, over neighbouring elements (`rows`) and over another dimension (`columns`).

Softmax with output y: ``y * (g - sum g y)``; log-softmax: ``g - exp(y) * sum g``. `short`: rows stay in vector registers
between their one load and their one store, four at a time so that the horizontal sums are shared. `long`: the second pass
finds the row in cache. `columns`: sums live in the lanes of vectors, one lane a row. A sum of gradients that float cannot
carry is redone in double, and with it its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_autokern.build.candidate import Candidate, Parameter
from torch_autokern.runtime.plan import PLAN_VERSION, CpuStep, InputArg, LaunchPlan, OutputArg
from torch_autokern.search.templates.cpp_common import (
    AUTHOR,
    END,
    L2_BYTES,
    STREAM_BYTES,
    entry,
    grain_of,
    prelude,
    registers,
    vector_widths,
)
from torch_autokern.search.templates.cpp_half import CPP_TYPES, DTYPES
from torch_autokern.search.templates.layout import Loop, dense_tensors, distinct_elements, loops_over, offset, steps_in
from torch_autokern.store.key import KernelKey, Target

SHORT = "softmax_backward_short"
LONG = "softmax_backward_long"
COLUMNS = "softmax_backward_columns"
_LOG_OPS = {"_softmax_backward_data": False, "_log_softmax_backward_data": True}


@dataclass(frozen=True)
class BackwardLayout:
    """`length` elements with `strides` (gradient, output, result) are reduced, once for each step of the `outer` loops."""

    dtype: str
    log: bool
    length: int
    strides: tuple[int, ...]
    outer: tuple[Loop, ...]

    @property
    def contiguous(self) -> bool:
        """Whether the reduced elements are neighbours in all three tensors."""
        return self.length == 1 or set(self.strides) == {1}

    @property
    def rows(self) -> int:
        """Number of independent rows."""
        return steps_in(self.outer)


def backward_layout(key: KernelKey) -> BackwardLayout | None:
    """Layout of a softmax or log-softmax backward on a CPU, all tensors of one dtype; None for any other call."""
    if key.device_type != "cpu" or key.op not in _LOG_OPS or not dense_tensors(key, DTYPES):
        return None
    tensors = [tensor for tensor in (*key.tensors, *key.outputs) if tensor is not None]
    dim = key.scalars["dim"]
    if len(tensors) != 3 or len({(t.dtype, t.sizes) for t in tensors}) > 1 or not distinct_elements(tensors[-1]):
        return None
    if key.scalars["input_dtype"] != tensors[0].dtype or not isinstance(dim, int):
        return None
    first, log = tensors[0], _LOG_OPS[key.op]
    if not first.sizes:
        return BackwardLayout(first.dtype, log, 1, (1, 1, 1), ())
    others = [d for d in range(len(first.sizes)) if d != dim]
    strides = tuple(tensor.strides[dim] for tensor in tensors)
    return BackwardLayout(first.dtype, log, first.sizes[dim], strides, loops_over(others, tensors))


_COMMON = """
typedef @ELEM@ elem;
constexpr bool LOG = @LOG@, STREAM = @STREAM@;
constexpr int64_t D = @D@;
AK_INLINE int64_t g_offset(int64_t row) { return @G@; }
AK_INLINE int64_t y_offset(int64_t row) { return @Y@; }
AK_INLINE int64_t z_offset(int64_t row) { return @Z@; }
// exp(x); of what a forward saved x <= 0, but whatever it is the result is right. NaN stays NaN.
AK_INLINE vf exp_any(vf x) {
  const vf low = ak_max(ak_splat(-104.0f), x);  // keeps a NaN
  return (vf)ak_exp_of<WIDTH, false>(low > 89.0f ? ak_splat(89.0f) : low);
}
AK_INLINE vf weight_of(vf y) { return LOG ? exp_any(y) : y; }
AK_INLINE vf term(vf g, vf y) { return LOG ? g : g * y; }
AK_INLINE vf result(vf g, vf w, vf s) { return LOG ? g - w * s : w * (g - s); }
AK_INLINE bool carried(float s) { return !LOG || s - s == 0; }
__attribute__((noinline, cold)) void row_in_double(const elem* g, const elem* y, elem* z, int64_t sg, int64_t sy, int64_t sz) {
  double sum = 0;
  for (int64_t i = 0; i < D; i++) sum += (double)(float)g[i * sg];
  for (int64_t i = 0; i < D; i++)
    z[i * sz] = (elem)(float)((double)(float)g[i * sg] - exp((double)(float)y[i * sy]) * sum);
}
"""

_SHORT_BODY = """
constexpr int R = @R@;
constexpr int V = (D + L - 1) / L;
constexpr int TAIL = D % L, PART = TAIL ? TAIL : 1;
AK_INLINE vf load(const elem* p, int v, float fill) {
  return TAIL && v == V - 1 ? ak_load_part<PART>(p + v * L, ak_splat(fill)) : ak_load(p + v * L);
}
AK_INLINE void spread(vf q, vf* out) {
  out[0] = ak_pick<0>(q);
  if (R > 1) out[1 % R] = ak_pick<1>(q);
  if (R > 2) out[2 % R] = ak_pick<2>(q);
  if (R > 3) out[3 % R] = ak_pick<3>(q);
}
AK_INLINE void rows_at(const elem* g, const elem* y, elem* z, const int64_t* row) {
  vf a[R][V], w[R][V], s[R];
  AK_UNROLL for (int r = 0; r < R; r++) {
    const elem *pg = g + g_offset(row[r]), *py = y + y_offset(row[r]);
    vf t = {};
    AK_UNROLL for (int v = 0; v < V; v++) {
      a[r][v] = load(pg, v, 0.0f);
      w[r][v] = load(py, v, 0.0f);
      t += term(a[r][v], w[r][v]);
    }
    s[r] = t;
  }
  if (R == 1) s[0] = ak_reduce_all(s[0], ak_op_sum{});
  else spread(ak_reduce4(s[0], s[1 % R], s[2 % R], s[3 % R], ak_op_sum{}), s);
  AK_UNROLL for (int r = 0; r < R; r++) {
    elem* p = z + z_offset(row[r]);
    if (__builtin_expect(!carried(s[r][0]), 0)) {
      row_in_double(g + g_offset(row[r]), y + y_offset(row[r]), p, 1, 1, 1);
      continue;
    }
    AK_UNROLL for (int v = 0; v < V; v++) {
      const vf found = result(a[r][v], weight_of(w[r][v]), s[r]);
      if (TAIL && v == V - 1) ak_store_part<PART>(p + v * L, found);
      else ak_store(p + v * L, found);
    }
  }
}
"""
_SHORT_ENTRY = """  const elem *g = (const elem*)pointers[0], *y = (const elem*)pointers[1];
  elem* z = (elem*)pointers[2];
  for (int64_t first = begin; first < end; first += R) {
    int64_t row[R];
    // The last group repeats the last row: same values to the same place.
    for (int r = 0; r < R; r++) row[r] = first + r < end ? first + r : end - 1;
    rows_at(g, y, z, row);
  }
"""

_LONG_BODY = """
constexpr int U = 4;
constexpr int64_t BLOCK = (int64_t)U * L, WHOLE = D / BLOCK * BLOCK, VECTORS = D / L * L;
constexpr int TAIL = D % L, PART = TAIL ? TAIL : 1;
// Partial sums of 64 steps keep the rounding error of a long row near that of a short one.
AK_INLINE float sum_of(const elem* g, const elem* y) {
  vf total = {};
  for (int64_t outer = 0; outer < WHOLE; outer += 64 * BLOCK) {
    const int64_t stop = outer + 64 * BLOCK < WHOLE ? outer + 64 * BLOCK : WHOLE;
    vf s[U] = {};
    for (int64_t i = outer; i < stop; i += BLOCK)
      AK_UNROLL for (int u = 0; u < U; u++) s[u] += term(ak_load(g + i + u * L), LOG ? vf{} : ak_load(y + i + u * L));
    AK_UNROLL for (int u = 1; u < U; u++) s[0] += s[u];
    total += s[0];
  }
  for (int64_t i = WHOLE; i < VECTORS; i += L) total += term(ak_load(g + i), ak_load(y + i));
  if (TAIL) total += term(ak_load_part<PART>(g + VECTORS, vf{}), ak_load_part<PART>(y + VECTORS, vf{}));
  return ak_reduce(total, ak_op_sum{});
}
AK_INLINE void write(const elem* g, const elem* y, elem* z, vf s) {
  auto at = [&](int64_t i) __attribute__((always_inline)) { return result(ak_load(g + i), weight_of(ak_load(y + i)), s); };
  if (STREAM && VECTORS) {
    // The first and the last vector are stored unaligned; what lies between starts at a vector boundary.
    int64_t i = (int64_t)((0 - (uintptr_t)z / 4) % L);
    ak_store(z, at(0));
    for (; i + L <= D; i += L) ak_stream(z + i, at(i));
    ak_store(z + D - L, at(D - L));
    return;
  }
  for (int64_t i = 0; i < WHOLE; i += BLOCK)
    AK_UNROLL for (int u = 0; u < U; u++) ak_store(z + i + u * L, at(i + u * L));
  for (int64_t i = WHOLE; i < VECTORS; i += L) ak_store(z + i, at(i));
  if (TAIL) {
    const vf gv = ak_load_part<PART>(g + VECTORS, vf{}), yv = ak_load_part<PART>(y + VECTORS, vf{});
    ak_store_part<PART>(z + VECTORS, result(gv, weight_of(yv), s));
  }
}
"""
_LONG_ENTRY = """  const elem *g = (const elem*)pointers[0], *y = (const elem*)pointers[1];
  elem* z = (elem*)pointers[2];
  for (int64_t r = begin; r < end; r++) {
    const elem *pg = g + g_offset(r), *py = y + y_offset(r);
    elem* pz = z + z_offset(r);
    const float s = sum_of(pg, py);
    if (__builtin_expect(!carried(s), 0)) row_in_double(pg, py, pz, 1, 1, 1);
    else write(pg, py, pz, ak_splat(s));
  }
  if (STREAM) ak_stream_fence();
"""

_COLUMNS_BODY = """
constexpr int64_t SG = @SG@, SY = @SY@, SZ = @SZ@;
constexpr int64_t INNER = @INNER@, COLUMNS = @COLUMNS@;
constexpr int64_t BLOCKS = (INNER + COLUMNS - 1) / COLUMNS, LAST = INNER - (BLOCKS - 1) * COLUMNS;
// One block of N columns; V vectors, the last one perhaps in part.
template <int64_t N>
struct block {
  static constexpr int V = (int)((N + L - 1) / L);
  static constexpr int TAIL = (int)(N % L), PART = TAIL ? TAIL : 1;
  AK_INLINE_MEMBER static vf load(const elem* p, int v) {
    return TAIL && v == V - 1 ? ak_load_part<PART>(p + v * L, vf{}) : ak_load(p + v * L);
  }
  AK_INLINE_MEMBER static void run(const elem* g, const elem* y, elem* z) {
    vf s[V];
    AK_UNROLL for (int v = 0; v < V; v++) s[v] = vf{};
    // Partial sums of 64 rows keep the rounding error of a long column near that of a short one.
    for (int64_t first = 0; first < D; first += 64) {
      const int64_t stop = first + 64 < D ? first + 64 : D;
      vf part[V];
      AK_UNROLL for (int v = 0; v < V; v++) part[v] = vf{};
      for (int64_t d = first; d < stop; d++)
        AK_UNROLL for (int v = 0; v < V; v++) part[v] += term(load(g + d * SG, v), LOG ? vf{} : load(y + d * SY, v));
      AK_UNROLL for (int v = 0; v < V; v++) s[v] += part[v];
    }
    for (int64_t d = 0; d < D; d++)
      AK_UNROLL for (int v = 0; v < V; v++) {
        const vf found = result(load(g + d * SG, v), weight_of(load(y + d * SY, v)), s[v]);
        elem* p = z + d * SZ + v * L;
        if (TAIL && v == V - 1) ak_store_part<PART>(p, found);
        else if (STREAM && (uintptr_t)z % WIDTH == 0) ak_stream(p, found);
        else ak_store(p, found);
      }
    if (LOG)
      for (int64_t c = 0; c < N; c++)
        if (__builtin_expect(!carried(s[c / L][c % L]), 0)) row_in_double(g + c, y + c, z + c, SG, SY, SZ);
  }
};
"""
_COLUMNS_ENTRY = """  const elem *g = (const elem*)pointers[0], *y = (const elem*)pointers[1];
  elem* z = (elem*)pointers[2];
  for (int64_t item = begin; item < end; item++) {
    const int64_t row = item / BLOCKS, at = item % BLOCKS * COLUMNS;
    const elem *pg = g + g_offset(row) + at, *py = y + y_offset(row) + at;
    elem* pz = z + z_offset(row) + at;
    if (item % BLOCKS == BLOCKS - 1) block<LAST>::run(pg, py, pz);
    else block<COLUMNS>::run(pg, py, pz);
  }
  if (STREAM) ak_stream_fence();
"""


def _candidate(
    layout: BackwardLayout, outer: Sequence[Loop], body: str, run: str, step: CpuStep, idea: str, template: str,
    used: dict[str, Parameter], values: dict[str, object],
) -> Candidate:  # fmt: skip
    values = {
        "ELEM": CPP_TYPES[layout.dtype], "LOG": layout.log, "STREAM": bool(used.get("stream", False)), "D": layout.length,
        "G": offset(outer, 0, "row"), "Y": offset(outer, 1, "row"), "Z": offset(outer, 2, "row"), **values,
    }  # fmt: skip
    text = (_COMMON + body).replace("AK_INLINE_MEMBER", "inline __attribute__((always_inline))")
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value).lower() if isinstance(value, bool) else str(value))
    width = used["width"]
    assert isinstance(width, int)
    source = prelude(width, [layout.dtype]) + text + END + entry("run", run)
    return Candidate("cpp", source, LaunchPlan(PLAN_VERSION, (step,)), idea, AUTHOR, template, used)


_ARGS = (InputArg(0), InputArg(1), OutputArg(0))


def short(layout: BackwardLayout, width: int, rows: int) -> Candidate:
    """`rows` (1 to 4) rows at a time in registers of `width` bytes."""
    step = CpuStep("run", layout.rows, grain_of(layout.length), _ARGS)
    idea = f"Keep {rows} rows of gradient and output in {8 * width}-bit registers from load to store; sum them together."
    used: dict[str, Parameter] = {"width": width, "rows": rows}
    return _candidate(layout, layout.outer, _SHORT_BODY, _SHORT_ENTRY, step, idea, SHORT, used, {"R": rows})


def long(layout: BackwardLayout, width: int, stream: bool) -> Candidate:
    """Two passes over rows in cache. `stream`: results bypass the cache."""
    step = CpuStep("run", layout.rows, grain_of(layout.length), _ARGS)
    idea = f"A sum and a result over cached rows; {'streaming' if stream else 'plain'} stores."
    used: dict[str, Parameter] = {"width": width, "stream": stream}
    return _candidate(layout, layout.outer, _LONG_BODY, _LONG_ENTRY, step, idea, LONG, used, {})


def columns(layout: BackwardLayout, width: int, block: int, stream: bool) -> Candidate:
    """Blocks of `block` neighbouring columns (a multiple of the lanes). `stream`: results bypass the cache."""
    outer, inner = layout.outer[:-1], layout.outer[-1].size
    values: dict[str, object] = {
        "SG": layout.strides[0], "SY": layout.strides[1], "SZ": layout.strides[2], "INNER": inner, "COLUMNS": block,
    }  # fmt: skip
    step = CpuStep("run", steps_in(outer) * -(-inner // block), grain_of(layout.length * block), _ARGS)
    idea = f"{block} neighbouring columns at a time, sums in vector lanes."
    used: dict[str, Parameter] = {"width": width, "block": block, "stream": stream}
    return _candidate(layout, outer, _COLUMNS_BODY, _COLUMNS_ENTRY, step, idea, COLUMNS, used, values)


def _propose_rows(layout: BackwardLayout, target: Target, streams: Sequence[bool]) -> list[Candidate]:
    widths = vector_widths(target)
    found = []
    for width in widths:
        vectors = -(-layout.length * 4 // width)
        # Twice what the registers hold: a spilled vector waits in the first-level cache, as the long way's rows do.
        fits = [rows for rows in (4, 2, 1) if 2 * rows * vectors <= 2 * registers(target) - 6]
        found += [short(layout, width, rows) for rows in fits[:2]]
    if layout.length * 4 >= 2 * widths[0]:
        found += [long(layout, width, stream) for stream in streams for width in widths]
    return found


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for a backward whose reduced dimension, or another one, has stride 1 in all tensors; else []."""
    layout = backward_layout(key)
    if layout is None:
        return []
    big = layout.dtype == "float32" and 4 * layout.length * layout.rows > STREAM_BYTES
    streams = (True, False) if big else (False,)
    if layout.contiguous:
        return _propose_rows(layout, target, streams)
    if not layout.outer or layout.outer[-1].strides != (1, 1, 1):
        return []
    found: list[Candidate] = []
    for width in vector_widths(target):
        lanes = width // 4
        most = -(-layout.outer[-1].size // lanes) * lanes
        sizes = dict.fromkeys(min(count * lanes, most) for count in (8, 4, 2, 1))
        cached = [size for size in sizes if 12 * size * layout.length <= L2_BYTES] or [min(sizes)]
        found += [columns(layout, width, size, stream) for stream in streams for size in cached[:3]]
    return found[:9]
