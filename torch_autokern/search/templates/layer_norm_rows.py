"""LayerNorm with one row at a time in cache: mean, corrected variance and result in few passes."""

from __future__ import annotations

from torch_autokern.build.candidate import Candidate, Parameter
from torch_autokern.runtime.plan import PLAN_VERSION, CpuStep, LaunchPlan
from torch_autokern.search.templates.cpp_common import AUTHOR, END, STREAM_BYTES, entry, grain_of, prelude, vector_widths
from torch_autokern.search.templates.layer_norm_common import NormLayout, norm_code, norm_layout
from torch_autokern.store.key import KernelKey, Target

NAME = "layer_norm_rows"

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
    big = layout.dtype == "float32" and 4 * layout.length * layout.rows > STREAM_BYTES
    wide, narrow = vector_widths(target)[0], vector_widths(target)[-1]
    shapes = dict.fromkeys([(narrow, 8, False), (wide, 4, False), (wide, 8, True), (narrow, 8, True), (wide, 4, True)])
    if not big:
        return [rows(layout, wide, 4, False, False)] + [
            rows(layout, *s[:2], False, s[2]) for s in shapes if s != (wide, 4, False)
        ]
    return [rows(layout, width, unroll, stream, early) for stream in (True, False) for width, unroll, early in shapes]
