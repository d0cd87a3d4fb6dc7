"""LayerNorm with one row at a time in cache: mean, corrected variance and result in few passes. Where the normalised elements
are not neighbours (channels of an image that was permuted), a few rows at a time are turned first, through the cache."""

from __future__ import annotations

from torch_autokern.build.candidate import Candidate, Parameter
from torch_autokern.runtime.plan import PLAN_VERSION, CpuStep, LaunchPlan
from torch_autokern.search.templates.cpp_common import (
    AUTHOR,
    END,
    SCRATCH_BYTES,
    STREAM_BYTES,
    entry,
    grain_of,
    prelude,
    vector_widths,
)
from torch_autokern.search.templates.layer_norm_common import NormLayout, norm_code, norm_layout
from torch_autokern.store.key import KernelKey, Target

NAME = "layer_norm_rows"
TURNED = "layer_norm_turned"

_ENTRY = """  const elem* x = (const elem*)pointers[0];
  const param *w = (const param*)pointers[1], *b = (const param*)pointers[2];
  elem* y = (elem*)pointers[3];
  stat *mean = (stat*)pointers[4], *rstd = (stat*)pointers[5];
  for (int64_t row = begin; row < end; row++) {
    const elem* px = x + x_offset(row);
    const statistics s = statistics_of(moments_of_long<D>(px));
    apply<D>(px, w, b, y + y_offset(row), s, x + x_offset(row + 1 < end ? row + 1 : row));
    mean[mean_offset(row)] = (float)s.mean;
    rstd[rstd_offset(row)] = (float)s.rstd;
  }
  if (STREAM) ak_stream_fence();
"""


_TURNED = """  const elem* x = (const elem*)pointers[0];
  const param *w = (const param*)pointers[1], *b = (const param*)pointers[2];
  elem* y = (elem*)pointers[3];
  stat *mean = (stat*)pointers[4], *rstd = (stat*)pointers[5];
  constexpr int T = @T@;
  alignas(64) elem turned[T * D];
  for (int64_t first = begin; first < end; first += T) {
    const int64_t stop = first + T < end ? first + T : end;
    const elem* px[T];
    for (int r = 0; r < T; r++) px[r] = x + x_offset(first + r < end ? first + r : end - 1);
    for (int64_t d = 0; d < D; d++)
      AK_UNROLL for (int r = 0; r < T; r++) turned[r * D + d] = px[r][d * INT64_C(@STRIDE@)];
    for (int64_t row = first; row < stop; row++) {
      const elem* in = turned + (row - first) * D;
      const statistics s = statistics_of(moments_of_long<D>(in));
      apply<D>(in, w, b, y + y_offset(row), s, in);
      mean[mean_offset(row)] = (float)s.mean;
      rstd[rstd_offset(row)] = (float)s.rstd;
    }
  }
"""


def turned(layout: NormLayout, width: int, together: int) -> Candidate:
    """`together` rows of elements that are not neighbours are turned at a time."""
    run = _TURNED.replace("@T@", str(together)).replace("@STRIDE@", str(layout.stride))
    source = prelude(width, layout.dtypes) + norm_code(layout, 4, False, False) + END + entry("run", run)
    plan = LaunchPlan(PLAN_VERSION, (CpuStep("run", layout.rows, grain_of(layout.length), layout.args),))
    idea = f"{together} rows at a time are turned into rows of neighbours through the cache."
    return Candidate("cpp", source, plan, idea, AUTHOR, TURNED, {"width": width, "together": together})


def rows(layout: NormLayout, width: int, unroll: int, stream: bool, prefetch: bool) -> Candidate:
    """One row at a time, `unroll` (a power of two) independent sums.

    `stream`: results bypass the cache. `prefetch`: fetch the next row while this one is written.
    """
    source = prelude(width, layout.dtypes) + norm_code(layout, unroll, stream, prefetch) + END + entry("run", _ENTRY)
    plan = LaunchPlan(PLAN_VERSION, (CpuStep("run", layout.rows, grain_of(layout.length), layout.args),))
    early = "; the next row is fetched early" if prefetch else ""
    idea = f"Passes over a cached row, {unroll} independent sums; {'streaming' if stream else 'plain'} stores{early}."
    used: dict[str, Parameter] = {"width": width, "unroll": unroll, "stream": stream, "prefetch": prefetch}
    return Candidate("cpp", source, plan, idea, AUTHOR, NAME, used)


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for rows of neighbouring elements, best guess first; else []."""
    layout = norm_layout(key)
    if layout is None:
        return []
    if layout.stride != 1:
        counts = [count for count in (16, 32, 8) if count * layout.length * 4 <= SCRATCH_BYTES]
        return [turned(layout, width, count) for count in counts for width in vector_widths(target)[:1]]
    big = layout.dtype == "float32" and 4 * layout.length * layout.rows > STREAM_BYTES
    wide, narrow = vector_widths(target)[0], vector_widths(target)[-1]
    shapes = dict.fromkeys([(narrow, 8, False), (wide, 4, False), (wide, 8, True), (narrow, 8, True), (wide, 4, True)])
    if not big:
        return [rows(layout, wide, 4, False, False)] + [
            rows(layout, *s[:2], False, s[2]) for s in shapes if s != (wide, 4, False)
        ]
    return [rows(layout, width, unroll, stream, early) for stream in (True, False) for width, unroll, early in shapes]
