"""Softmax and log-softmax over a dimension whose elements are neighbours in memory.

Two kernels. `short_rows`: the whole row stays in vector registers between its one load and its one store, four rows at a time
so that the two horizontal reductions and the division are shared. `long_rows`: three passes over a row that stays in cache.
"""

from __future__ import annotations

from typing import Literal

from torch_autokern.build.candidate import Candidate, Parameter
from torch_autokern.runtime.plan import PLAN_VERSION, CpuStep, InputArg, LaunchPlan, OutputArg
from torch_autokern.search.templates.cpp_common import (
    AUTHOR,
    END,
    SCRATCH_BYTES,
    STREAM_BYTES,
    entry,
    grain_of,
    prelude,
    registers,
    vector_widths,
)
from torch_autokern.search.templates.layout import offset, steps_in
from torch_autokern.search.templates.softmax_layout import SoftmaxLayout, softmax_layout
from torch_autokern.store.key import KernelKey, Target

SHORT = "softmax_short_rows"
LONG = "softmax_long_rows"
Kept = Literal["nothing", "output", "scratch"]

_SHORT_BODY = """
constexpr int64_t D = @D@;
constexpr int R = @R@;
constexpr int V = (D + L - 1) / L;
constexpr int TAIL = D % L;
AK_INLINE int64_t x_offset(int64_t row) { return @X@; }
AK_INLINE int64_t y_offset(int64_t row) { return @Y@; }
AK_INLINE vf load_part_or_all(const elem* p, int v) {
  if (TAIL && v == V - 1) return ak_load_part<TAIL ? TAIL : 1>(p + v * L, ak_splat(-INF));
  return ak_load(p + v * L);
}
AK_INLINE void store_part_or_all(elem* p, int v, vf value) {
  if (TAIL && v == V - 1) ak_store_part<TAIL ? TAIL : 1>(p + v * L, value);
  else ak_store(p + v * L, value);
}
AK_INLINE void spread(vf q, vf* out) {
  out[0] = ak_pick<0>(q);
  if (R > 1) out[1 % R] = ak_pick<1>(q);
  if (R > 2) out[2 % R] = ak_pick<2>(q);
  if (R > 3) out[3 % R] = ak_pick<3>(q);
}
AK_INLINE void rows_at(const elem* x, elem* y, const int64_t* row) {
  vf e[R][V], m[R], s[R];
  AK_UNROLL for (int r = 0; r < R; r++) {
    const elem* p = x + x_offset(row[r]);
    AK_UNROLL for (int v = 0; v < V; v++) e[r][v] = load_part_or_all(p, v);
    m[r] = e[r][0];
    AK_UNROLL for (int v = 1; v < V; v++) m[r] = ak_max(e[r][v], m[r]);
    m[r] = ak_max(m[r], ak_splat(-INF));
  }
  spread(ak_reduce4(m[0], m[1 % R], m[2 % R], m[3 % R], ak_op_max{}), m);
  AK_UNROLL for (int r = 0; r < R; r++) {
    s[r] = vf{};
    AK_UNROLL for (int v = 0; v < V; v++) {
      vf d = e[r][v] - m[r];
      vf w = TAIL && TAIL <= L / 2 && v == V - 1 ? ak_exp_low<LOG>(d) : ak_exp<LOG>(d);
      e[r][v] = LOG ? d : w;
      s[r] += w;
    }
  }
  vf q = ak_reduce4(s[0], s[1 % R], s[2 % R], s[3 % R], ak_op_sum{});
  spread(LOG ? ak_log(q) : 1.0f / q, s);
  AK_UNROLL for (int r = 0; r < R; r++) {
    elem* p = y + y_offset(row[r]);
    AK_UNROLL for (int v = 0; v < V; v++) store_part_or_all(p, v, LOG ? e[r][v] - s[r] : e[r][v] * s[r]);
  }
}
"""

_SHORT_ENTRY = """  const elem* x = (const elem*)pointers[0];
  elem* y = (elem*)pointers[1];
  for (int64_t first = begin; first < end; first += R) {
    int64_t row[R];
    // The last group repeats the last row: same values to the same place.
    for (int r = 0; r < R; r++) row[r] = first + r < end ? first + r : end - 1;
    rows_at(x, y, row);
  }
"""

_ROW_CODE = """
constexpr int U = @U@;
constexpr bool STREAM = @STREAM@, PREFETCH = @PREFETCH@;
enum Kept { NOTHING, OUTPUT, SCRATCH };
constexpr Kept KEEP = @KEEP@;  // where the exponentials wait for their sum; NOTHING: they are computed again
// A row, or a piece of one, of N neighbouring elements.
template <int64_t N>
struct row {
  static constexpr int64_t BLOCK = (int64_t)U * L, WHOLE = N / BLOCK * BLOCK, VECTORS = N / L * L;
  static constexpr int TAIL = N % L, PART = TAIL ? TAIL : 1;
  AK_INLINE_MEMBER static float maximum(const elem* x) {
    vf m[U];
    AK_UNROLL for (int u = 0; u < U; u++) m[u] = ak_splat(-INF);
    for (int64_t i = 0; i < WHOLE; i += BLOCK)
      AK_UNROLL for (int u = 0; u < U; u++) m[u] = ak_max(ak_load(x + i + u * L), m[u]);
    for (int64_t i = WHOLE; i < VECTORS; i += L) m[0] = ak_max(ak_load(x + i), m[0]);
    if (TAIL) m[0] = ak_max(ak_load_part<PART>(x + VECTORS, ak_splat(-INF)), m[0]);
    AK_UNROLL for (int u = 1; u < U; u++) m[0] = ak_max(m[u], m[0]);
    return ak_reduce(m[0], ak_op_max{});
  }
  // Sum of exp(x - m); the exponentials go to `kept` (output or scratch) unless they are computed again. Partial sums of 64
  // steps keep the rounding error of a long row near that of a short one. `next` is the row after this one: its lines are
  // fetched while this one's exponentials keep the core busy.
  AK_INLINE_MEMBER static float sum(const elem* x, float* kept, vf m, const elem* next) {
    vf total = {};
    for (int64_t outer = 0; outer < WHOLE; outer += 64 * BLOCK) {
      const int64_t stop = outer + 64 * BLOCK < WHOLE ? outer + 64 * BLOCK : WHOLE;
      vf s[U] = {};
      for (int64_t i = outer; i < stop; i += BLOCK) {
        if (PREFETCH)
          AK_UNROLL for (int c = 0; c < U * L * (int)sizeof(elem); c += 64)
            __builtin_prefetch((const char*)(next + i) + c, 0, 2);
        AK_UNROLL for (int u = 0; u < U; u++) {
          vf e = ak_exp<LOG>(ak_load(x + i + u * L) - m);
          if (KEEP != NOTHING) ak_store(kept + i + u * L, e);
          s[u] += e;
        }
      }
      AK_UNROLL for (int u = 1; u < U; u++) s[0] += s[u];
      total += s[0];
    }
    for (int64_t i = WHOLE; i < VECTORS; i += L) {
      vf e = ak_exp<LOG>(ak_load(x + i) - m);
      if (KEEP != NOTHING) ak_store(kept + i, e);
      total += e;
    }
    if (TAIL) {
      vf e = ak_exp<LOG>(ak_load_part<PART>(x + VECTORS, ak_splat(-INF)) - m);
      if (KEEP != NOTHING) ak_store_part<PART>(kept + VECTORS, e);
      total += e;
    }
    return ak_reduce(total, ak_op_sum{});
  }
  AK_INLINE_MEMBER static vf result(vf in, vf m, vf s) {
    if (LOG) return (in - m) - s;
    return (KEEP == NOTHING ? ak_exp(in - m) : in) * s;
  }
  // `in`: the row itself, or its exponentials where they were kept; s: the logarithm of the sum, or its reciprocal.
  template <class In>
  AK_INLINE_MEMBER static void write(const In* in, elem* y, vf m, vf s) {
    if (STREAM && VECTORS) {
      // The first and the last vector are stored unaligned; what lies between starts at a vector boundary.
      int64_t i = (int64_t)((0 - (uintptr_t)y / 4) % L);
      const vf first = result(ak_load(in), m, s);
      const vf last = result(ak_load(in + N - L), m, s);
      for (; i + L <= N; i += L) ak_stream(y + i, result(ak_load(in + i), m, s));
      ak_store(y, first);
      ak_store(y + N - L, last);
      return;
    }
    for (int64_t i = 0; i < WHOLE; i += BLOCK)
      AK_UNROLL for (int u = 0; u < U; u++) ak_store(y + i + u * L, result(ak_load(in + i + u * L), m, s));
    for (int64_t i = WHOLE; i < VECTORS; i += L) ak_store(y + i, result(ak_load(in + i), m, s));
    if (TAIL) ak_store_part<PART>(y + VECTORS, result(ak_load_part<PART>(in + VECTORS, vf{}), m, s));
  }
};
"""

_LONG_BODY = """
constexpr int64_t D = @D@;
AK_INLINE int64_t x_offset(int64_t row) { return @X@; }
AK_INLINE int64_t y_offset(int64_t row) { return @Y@; }
"""

_LONG_ENTRY = """  const elem* x = (const elem*)pointers[0];
  elem* y = (elem*)pointers[1];
  alignas(WIDTH) float scratch[KEEP == SCRATCH ? D : 1];
  for (int64_t r = begin; r < end; r++) {
    const elem* px = x + x_offset(r);
    elem* py = y + y_offset(r);
    float* kept = KEEP == SCRATCH ? scratch : (float*)py;  // the output where it is of floats
    const vf m = ak_splat(row<D>::maximum(px));
    const float sum = row<D>::sum(px, kept, m, x + x_offset(r + 1 < end ? r + 1 : r));
    const vf s = ak_splat(LOG ? (float)log((double)sum) : 1.0f / sum);
    if (KEEP == NOTHING) row<D>::write(px, py, m, s);
    else row<D>::write((const float*)kept, py, m, s);
  }
  if (STREAM) ak_stream_fence();
"""


def _plan(layout: SoftmaxLayout) -> LaunchPlan:
    step = CpuStep("run", steps_in(layout.outer), grain_of(layout.length), (InputArg(0), OutputArg(0)))
    return LaunchPlan(PLAN_VERSION, (step,))


def _fill(text: str, layout: SoftmaxLayout, values: dict[str, object]) -> str:
    values = {"D": layout.length, "X": offset(layout.outer, 0, "row"), "Y": offset(layout.outer, 1, "row"), **values}
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value).lower() if isinstance(value, bool) else str(value))
    return text


def row_code(unroll: int, stream: bool, keep: Kept, prefetch: bool) -> str:
    """C++ text of ``row<N>``: maximum, sum and write of N neighbouring elements."""
    flags = {"U": str(unroll), "STREAM": str(stream).lower(), "PREFETCH": str(prefetch).lower()}
    code = _ROW_CODE.replace("AK_INLINE_MEMBER", "inline __attribute__((always_inline))")
    for name, value in {**flags, "KEEP": keep.upper()}.items():
        code = code.replace(f"@{name}@", value)
    return code


def short_rows(layout: SoftmaxLayout, width: int, rows: int) -> Candidate:
    """`rows` (1 to 4) rows at a time in registers of `width` bytes."""
    source = (
        prelude(width, [layout.dtype])
        + layout.constants
        + _fill(_SHORT_BODY, layout, {"R": rows})
        + END
        + entry("run", _SHORT_ENTRY)
    )
    idea = f"Keep {rows} whole rows in {8 * width}-bit registers from load to store; reduce them together, divide once."
    return Candidate("cpp", source, _plan(layout), idea, AUTHOR, SHORT, {"width": width, "rows": rows})


def long_rows(layout: SoftmaxLayout, width: int, stream: bool, keep: Kept, prefetch: bool) -> Candidate:
    """Three passes over a row in cache.

    `stream`: results bypass the cache. `keep`: where exponentials wait for their sum ("nothing" for a logarithm).
    `prefetch`: fetch the next row early.
    """
    body = layout.constants + row_code(4, stream, keep, prefetch) + _fill(_LONG_BODY, layout, {})
    source = prelude(width, [layout.dtype]) + body + END + entry("run", _LONG_ENTRY)
    idea = f"Three passes over a cached row; exponentials kept: {keep}; {'streaming' if stream else 'plain'} stores."
    used: dict[str, Parameter] = {"width": width, "stream": stream, "keep": keep, "prefetch": prefetch}
    return Candidate("cpp", source, _plan(layout), idea, AUTHOR, LONG, used)


def _propose_short(layout: SoftmaxLayout, target: Target) -> list[Candidate]:
    found: list[tuple[int, Candidate]] = []
    for width in vector_widths(target):
        vectors = -(-layout.length * 4 // width)
        fits = [rows for rows in (4, 2, 1) if rows * vectors <= registers(target) - 8]
        # Bytes that pass the units: a last 512-bit vector of which the upper half is empty runs as 256 bits. More instructions
        # for narrower vectors, and shuffles for nothing where a row fills half a vector.
        half_empty = width == 64 and 0 < 4 * layout.length % 64 <= 32
        cost = vectors * width - (32 if half_empty else 0) + (4 * vectors if width < vector_widths(target)[0] else 0)
        cost += width // 2 if 8 * layout.length <= width else 0
        found += [(cost, short_rows(layout, width, rows)) for rows in fits[:2]]
    return [candidate for _, candidate in sorted(found, key=lambda pair: pair[0])]


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for a dimension with stride 1, best guess first; [] where that does not hold."""
    layout = softmax_layout(key)
    if layout is None or not layout.contiguous:
        return []
    candidates = _propose_short(layout, target)
    widths = vector_widths(target)
    if layout.length * 4 < 2 * widths[0]:
        return candidates
    row_bytes = 4 * layout.length
    big = layout.is_float and row_bytes * steps_in(layout.outer) > STREAM_BYTES
    streams = (True, False) if big else (False,)
    scratch: tuple[Kept, ...] = ("scratch",) if row_bytes <= SCRATCH_BYTES else ()
    for stream in streams:
        kept: tuple[Kept, ...] = ("nothing",) if layout.log else ("output", *scratch)
        if not layout.log and (stream or not layout.is_float):
            kept = (*scratch, "nothing")
        for keep in kept:
            for prefetch in (True, False):
                candidates.append(long_rows(layout, widths[0], stream, keep, prefetch))
    if len(widths) > 1:
        last: Kept = "nothing" if layout.log else "output" if layout.is_float else (*scratch, "nothing")[0]
        candidates.append(long_rows(layout, widths[1], False, last, False))
    return candidates[:9]
