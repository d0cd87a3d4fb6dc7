"""Softmax and log-softmax over a dimension that is not the last: a block of neighbouring columns at a time.

Maxima and sums of a block live in the lanes of a few vectors, so there is no horizontal reduction at all; the block is as wide
as lets its part of the input stay in cache between the passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch_autokern.build.candidate import Candidate, Parameter
from torch_autokern.runtime.plan import PLAN_VERSION, CpuStep, InputArg, LaunchPlan, OutputArg
from torch_autokern.search.templates.cpp_common import (
    AUTHOR,
    END,
    L2_BYTES,
    SCRATCH_BYTES,
    STREAM_BYTES,
    entry,
    grain_of,
    prelude,
    vector_widths,
)
from torch_autokern.search.templates.layout import Loop, offset, steps_in
from torch_autokern.search.templates.softmax_layout import SoftmaxLayout, softmax_layout
from torch_autokern.store.key import KernelKey, Target

NAME = "softmax_columns"
Kept = Literal["nothing", "output", "scratch"]

_BODY = """
constexpr int64_t D = @D@;
constexpr int64_t SX = @SX@, SY = @SY@;
constexpr int64_t INNER = @INNER@;
constexpr int64_t COLUMNS = @COLUMNS@;
constexpr int64_t BLOCKS = (INNER + COLUMNS - 1) / COLUMNS;
constexpr int64_t LAST = INNER - (BLOCKS - 1) * COLUMNS;
constexpr bool STREAM = @STREAM@;
constexpr bool PREFETCH = @PREFETCH@;
enum Kept { NOTHING, OUTPUT, SCRATCH };
constexpr Kept KEEP = @KEEP@;  // where the exponentials wait for their sum; NOTHING: they are computed again
AK_INLINE int64_t x_offset(int64_t outer) { return @X@; }
AK_INLINE int64_t y_offset(int64_t outer) { return @Y@; }
// One block of N columns; V vectors, the last one perhaps in part.
template <int64_t N>
struct block {
  static constexpr int V = (int)((N + L - 1) / L);
  static constexpr int TAIL = (int)(N % L);
  static constexpr int PART = TAIL ? TAIL : 1;
  template <class In>
  AK_INLINE_MEMBER static vf load(const In* p, int v) {
    return TAIL && v == V - 1 ? ak_load_part<PART>(p + v * L, vf{}) : ak_load(p + v * L);
  }
  AK_INLINE_MEMBER static void store(elem* p, int v, vf value) {
    if (TAIL && v == V - 1) ak_store_part<PART>(p + v * L, value);
    else if (STREAM && (uintptr_t)p % WIDTH == 0) ak_stream(p + v * L, value);
    else ak_store(p + v * L, value);
  }
  AK_INLINE_MEMBER static void keep(elem* y, float* scratch, int64_t d, int v, vf value) {
    if (KEEP == OUTPUT) {
      if (TAIL && v == V - 1) ak_store_part<PART>(y + d * SY + v * L, value);
      else ak_store(y + d * SY + v * L, value);
    }
    if (KEEP == SCRATCH) *(vf*)(scratch + (d * V + v) * L) = value;
  }
  AK_INLINE_MEMBER static vf result(const elem* x, const elem* y, const float* scratch, int64_t d, int v, vf m, vf s) {
    if (LOG) return (load(x + d * SX, v) - m) - s;
    if (KEEP == OUTPUT) return load(y + d * SY, v) * s;
    if (KEEP == SCRATCH) return *(const vf*)(scratch + (d * V + v) * L) * s;
    return ak_exp(load(x + d * SX, v) - m) * s;
  }
  // `next` is the block after this one: its lines are fetched while this one's exponentials keep the core busy.
  AK_INLINE_MEMBER static void run(const elem* x, elem* y, const elem* next) {
    alignas(WIDTH) float scratch[KEEP == SCRATCH ? D * V * L : L];
    vf m[V], s[V];
    AK_UNROLL for (int v = 0; v < V; v++) m[v] = ak_splat(-INF);
    AK_UNROLL for (int v = 0; v < V; v++) s[v] = vf{};
    for (int64_t d = 0; d < D; d++)
      AK_UNROLL for (int v = 0; v < V; v++) m[v] = ak_max(load(x + d * SX, v), m[v]);
    // Partial sums of 64 rows keep the rounding error of a long column near that of a short one.
    for (int64_t first = 0; first < D; first += 64) {
      const int64_t stop = first + 64 < D ? first + 64 : D;
      vf part[V];
      AK_UNROLL for (int v = 0; v < V; v++) part[v] = vf{};
      for (int64_t d = first; d < stop; d++) {
        if (PREFETCH)
          AK_UNROLL for (int c = 0; c < V * L * (int)sizeof(elem); c += 64)
            __builtin_prefetch((const char*)(next + d * SX) + c, 0, 2);
        AK_UNROLL for (int v = 0; v < V; v++) {
          vf e = ak_exp<LOG>(load(x + d * SX, v) - m[v]);
          keep(y, scratch, d, v, e);
          part[v] += e;
        }
      }
      AK_UNROLL for (int v = 0; v < V; v++) s[v] += part[v];
    }
    AK_UNROLL for (int v = 0; v < V; v++) s[v] = LOG ? ak_log(s[v]) : 1.0f / s[v];
    for (int64_t d = 0; d < D; d++)
      AK_UNROLL for (int v = 0; v < V; v++) store(y + d * SY, v, result(x, y, scratch, d, v, m[v], s[v]));
  }
};
"""

_ENTRY = """  const elem* x = (const elem*)pointers[0];
  elem* y = (elem*)pointers[1];
  for (int64_t item = begin; item < end; item++) {
    const int64_t at = item % BLOCKS, after = item + 1 < end ? item + 1 : item;
    const elem* px = x + x_offset(item / BLOCKS) + at * COLUMNS;
    const elem* next = x + x_offset(after / BLOCKS) + after % BLOCKS * COLUMNS;
    elem* py = y + y_offset(item / BLOCKS) + at * COLUMNS;
    if (at == BLOCKS - 1) block<LAST>::run(px, py, next);
    else block<COLUMNS>::run(px, py, next);
  }
  if (STREAM) ak_stream_fence();
"""


@dataclass(frozen=True)
class _Columns:
    layout: SoftmaxLayout
    outer: tuple[Loop, ...]
    inner: int


def column_shape(layout: SoftmaxLayout) -> _Columns | None:
    """The layout as rows of neighbouring columns; None where the innermost loop does not run over neighbours on both sides."""
    if layout.outer and layout.outer[-1].strides == (1, 1):
        return _Columns(layout, layout.outer[:-1], layout.outer[-1].size)
    return None


def columns(shape: _Columns, width: int, block: int, stream: bool, keep: Kept, prefetch: bool) -> Candidate:
    """Blocks of `block` columns (a multiple of the lanes).

    `stream`: results bypass the cache. `keep`: where exponentials wait for their sum. `prefetch`: fetch the next block early.
    """
    layout = shape.layout
    blocks = -(-shape.inner // block)
    values = {
        "D": layout.length, "SX": layout.strides[0], "SY": layout.strides[1], "INNER": shape.inner, "COLUMNS": block,
        "STREAM": str(stream).lower(), "PREFETCH": str(prefetch).lower(), "KEEP": keep.upper(),
        "X": offset(shape.outer, 0, "outer"), "Y": offset(shape.outer, 1, "outer"),
    }  # fmt: skip
    body = _BODY.replace("AK_INLINE_MEMBER", "inline __attribute__((always_inline))")
    for name, value in values.items():
        body = body.replace(f"@{name}@", str(value))
    source = prelude(width, [layout.dtype]) + layout.constants + body + END + entry("run", _ENTRY)
    step = CpuStep("run", steps_in(shape.outer) * blocks, grain_of(layout.length * block), (InputArg(0), OutputArg(0)))
    idea = f"{block} neighbouring columns at a time, statistics in vector lanes; exponentials kept: {keep}."
    used: dict[str, Parameter] = {"width": width, "block": block, "stream": stream, "keep": keep, "prefetch": prefetch}
    return Candidate("cpp", source, LaunchPlan(PLAN_VERSION, (step,)), idea, AUTHOR, NAME, used)


def _block_sizes(shape: _Columns, lanes: int) -> list[int]:
    """Widest blocks whose input and output stay in the second-level cache first, then narrower ones."""
    most = -(-shape.inner // lanes) * lanes
    sizes = [min(size, most) for size in (8 * lanes, 4 * lanes, 2 * lanes, lanes)]
    unique = list(dict.fromkeys(sizes))
    cached = [size for size in unique if 8 * size * shape.layout.length <= L2_BYTES]
    return (cached + [size for size in reversed(unique) if size not in cached])[:3]


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates where another dimension has stride 1 on both sides, best guess first; else []."""
    layout = softmax_layout(key)
    shape = None if layout is None else column_shape(layout)
    if layout is None or shape is None:
        return []
    width = vector_widths(target)[0]
    big = layout.is_float and 4 * layout.length * shape.inner * steps_in(shape.outer) > STREAM_BYTES
    streams = (True, False) if big else (False,)
    candidates: list[Candidate] = []
    for prefetch in (True, False):
        for block in _block_sizes(shape, width // 4):
            scratch: tuple[Kept, ...] = ("scratch",) if 4 * block * layout.length <= SCRATCH_BYTES else ()
            for stream in streams:
                last: Kept = "nothing" if stream or not layout.is_float else "output"
                kept: tuple[Kept, ...] = ("nothing",) if layout.log else (*scratch, last)
                candidates += [columns(shape, width, block, stream, keep, prefetch) for keep in kept]
    return candidates[:9]
