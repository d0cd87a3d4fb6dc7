"""LayerNorm over long rows: all threads share each row, and each piece of weight and bias is read once for all rows.

Rows are cut into chunks. The first step finds each chunk's mean and M2 (both passes over a chunk find it in cache), the second
merges them in index order in double, the third applies: chunk by chunk, and within a chunk row by row, because weight and bias
are as long as a row (16.8 MB each for the published shape (16, 64, 256, 256)) and would otherwise be read again for every row.
"""

from __future__ import annotations

from torch_autokern.build.candidate import Candidate
from torch_autokern.runtime.plan import PLAN_VERSION, CpuStep, LaunchPlan, Workspace, WorkspaceArg
from torch_autokern.search.templates.cpp_common import (
    AUTHOR,
    END,
    L2_BYTES,
    STREAM_BYTES,
    entry,
    grain_of,
    prelude,
    vector_widths,
)
from torch_autokern.search.templates.layer_norm_common import NormLayout, norm_code, norm_layout
from torch_autokern.store.key import KernelKey, Target

NAME = "layer_norm_split"
MIN_LENGTH = 16384

_BODY = """
constexpr int64_t ROWS = @ROWS@;
constexpr int64_t CHUNK = @CHUNK@;
constexpr int64_t CHUNKS = (D + CHUNK - 1) / CHUNK;
constexpr int64_t LAST = D - (CHUNKS - 1) * CHUNK;
"""

_STATISTICS = """  moments* parts = (moments*)pointers[6];
  for (int64_t i = begin; i < end; i++) {
    const float* x = (const float*)pointers[0] + x_offset(i / CHUNKS) + i % CHUNKS * CHUNK;
    parts[i] = i % CHUNKS == CHUNKS - 1 ? moments_of_long<LAST>(x) : moments_of_long<CHUNK>(x);
  }
"""
_MERGE = """  const moments* parts = (const moments*)pointers[6];
  for (int64_t row = begin; row < end; row++) {
    moments all = parts[row * CHUNKS];
    for (int64_t c = 1; c < CHUNKS; c++)
      all = merge(all, c * CHUNK, parts[row * CHUNKS + c], c == CHUNKS - 1 ? LAST : CHUNK);
    const statistics s = statistics_of(all);
    ((statistics*)pointers[7])[row] = s;
    ((float*)pointers[4])[mean_offset(row)] = (float)s.mean;
    ((float*)pointers[5])[rstd_offset(row)] = (float)s.rstd;
  }
"""
_APPLY = """  const statistics* rows = (const statistics*)pointers[7];
  for (int64_t i = begin; i < end; i++) {
    const int64_t row = i % ROWS, at = i / ROWS * CHUNK, after = i + 1 < end ? i + 1 : i;
    const float* next = (const float*)pointers[0] + x_offset(after % ROWS) + after / ROWS * CHUNK;
    const float* x = (const float*)pointers[0] + x_offset(row) + at;
    const float* w = HAS_WEIGHT ? (const float*)pointers[1] + at : nullptr;
    const float* b = HAS_BIAS ? (const float*)pointers[2] + at : nullptr;
    float* y = (float*)pointers[3] + y_offset(row) + at;
    if (at == (CHUNKS - 1) * CHUNK) apply<LAST>(x, w, b, y, rows[row], next);
    else apply<CHUNK>(x, w, b, y, rows[row], next);
  }
  if (STREAM) ak_stream_fence();
"""


def split(layout: NormLayout, width: int, unroll: int, chunk: int, stream: bool, prefetch: bool) -> Candidate:
    """Chunks of `chunk` elements, `unroll` independent sums.

    `stream`: results bypass the cache. `prefetch`: fetch the next chunk while this one is written.
    """
    rows, chunks = layout.rows, -(-layout.length // chunk)
    body = _BODY.replace("@CHUNK@", str(chunk)).replace("@ROWS@", str(rows))
    source = prelude(width) + norm_code(layout, unroll, stream, prefetch) + body + END
    source += entry("measure_chunks", _STATISTICS) + entry("merge_rows", _MERGE) + entry("apply_chunks", _APPLY)
    args = (*layout.args, WorkspaceArg("parts"), WorkspaceArg("rows"))
    grain = grain_of(min(chunk, layout.length))
    steps = (
        CpuStep("measure_chunks", rows * chunks, grain, args),
        CpuStep("merge_rows", rows, grain_of(8 * chunks), args),
        CpuStep("apply_chunks", rows * chunks, grain, args),
    )
    plan = LaunchPlan(PLAN_VERSION, steps, (Workspace("parts", rows * chunks * 16), Workspace("rows", rows * 16)))
    idea = f"All threads share each row in chunks of {chunk}; weight and bias are read once for all rows."
    used = {"width": width, "unroll": unroll, "chunk": chunk, "stream": stream, "prefetch": prefetch}
    return Candidate("cpp", source, plan, idea, AUTHOR, NAME, dict(used))


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for rows that are long, and few or beyond the cache, best guess first; else []."""
    layout = norm_layout(key)
    if layout is None or layout.length < MIN_LENGTH:
        return []
    if layout.rows >= 8 * target.threads and 4 * layout.length < L2_BYTES:
        return []
    width = vector_widths(target)[0]
    streams = (True, False) if 4 * layout.length * layout.rows > STREAM_BYTES else (False,)
    shapes = [(32768, True), (8192, True), (32768, False), (8192, False)]
    return [split(layout, width, 4, chunk, stream, early) for stream in streams for chunk, early in shapes]
