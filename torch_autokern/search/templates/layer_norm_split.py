"""LayerNorm over few long rows: all threads share each row, so that it is read from memory once and stays in the shared cache.

Rows are cut into chunks. One step finds each chunk's mean and M2 (two passes over a chunk in the first-level cache) and a later
step merges them (Chan, Golub, LeVeque 1983, in double, in index order) and applies the result. A step handles a group of rows;
the statistics of the next group run in the same step as the application of this one.
"""

from __future__ import annotations

from torch_autokern.build.candidate import Candidate
from torch_autokern.runtime.plan import MAX_STEPS, PLAN_VERSION, CpuStep, LaunchPlan, Workspace, WorkspaceArg
from torch_autokern.search.templates.cpp_common import AUTHOR, END, STREAM_BYTES, entry, grain_of, prelude, vector_widths
from torch_autokern.search.templates.layer_norm_common import NormLayout, norm_code, norm_layout
from torch_autokern.store.key import KernelKey, Target

NAME = "layer_norm_split"

_BODY = """
constexpr int64_t CHUNK = @CHUNK@;
constexpr int64_t CHUNKS = (D + CHUNK - 1) / CHUNK;
constexpr int64_t LAST = D - (CHUNKS - 1) * CHUNK;
AK_INLINE void chunk_moments(int64_t row, int64_t c, void* const* pointers) {
  const float* x = (const float*)pointers[0] + x_offset(row) + c * CHUNK;
  ((moments*)pointers[6])[row * CHUNKS + c] = c == CHUNKS - 1 ? moments_of_long<LAST>(x) : moments_of_long<CHUNK>(x);
}
statistics merged(const moments* part) {
  moments all = part[0];
  for (int64_t c = 1; c < CHUNKS; c++) all = merge(all, c * CHUNK, part[c], c == CHUNKS - 1 ? LAST : CHUNK);
  return statistics_of(all);
}
AK_INLINE void chunk_apply(int64_t row, int64_t c, statistics s, void* const* pointers) {
  const float *x = (const float*)pointers[0], *w = (const float*)pointers[1], *b = (const float*)pointers[2];
  float *y = (float*)pointers[3], *mean = (float*)pointers[4], *rstd = (float*)pointers[5];
  const int64_t at = c * CHUNK;
  const float *px = x + x_offset(row) + at, *pw = HAS_WEIGHT ? w + at : w, *pb = HAS_BIAS ? b + at : b;
  float* py = y + y_offset(row) + at;
  if (c == CHUNKS - 1) apply<LAST>(px, pw, pb, py, s);
  else apply<CHUNK>(px, pw, pb, py, s);
  if (c != 0) return;
  mean[mean_offset(row)] = (float)s.mean;
  rstd[rstd_offset(row)] = (float)s.rstd;
}
"""

# One function per kind of step and group: item i is chunk i % CHUNKS of row first + i / CHUNKS.
_STATISTICS = """  for (int64_t i = begin; i < end; i++) chunk_moments({first} + i / CHUNKS, i % CHUNKS, pointers);
"""
_APPLY = """  int64_t known = -1;
  statistics s = {{0, 0}};
  for (int64_t i = begin; i < end; i++) {{
    const int64_t row = {first} + i / CHUNKS;
    if (row != known) s = merged((const moments*)pointers[6] + row * CHUNKS);
    known = row;
    chunk_apply(row, i % CHUNKS, s, pointers);
  }}
  if (STREAM) ak_stream_fence();
"""


def split(layout: NormLayout, width: int, unroll: int, chunk: int, group: int, stream: bool) -> Candidate:
    """Chunks of `chunk` elements, `group` rows a step."""
    chunks = -(-layout.length // chunk)
    source = prelude(width) + norm_code(layout, unroll, stream) + _BODY.replace("@CHUNK@", str(chunk)) + END
    args = (*layout.args, WorkspaceArg("parts"))
    grain = grain_of(min(chunk, layout.length))
    steps = []
    for first in range(0, layout.rows, group):
        count = min(group, layout.rows - first) * chunks
        for kind, body in (("statistics", _STATISTICS), ("apply", _APPLY)):
            name = f"{kind}_{first}"
            source += entry(name, body.format(first=first))
            steps.append(CpuStep(name, count, grain, args))
    plan = LaunchPlan(PLAN_VERSION, tuple(steps), (Workspace("parts", layout.rows * chunks * 16),))
    idea = f"All threads share each row in chunks of {chunk}; statistics and application alternate over {group} rows."
    used = {"width": width, "unroll": unroll, "chunk": chunk, "group": group, "stream": stream}
    return Candidate("cpp", source, plan, idea, AUTHOR, NAME, dict(used))


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for rows long enough to share between threads, best guess first; else []."""
    layout = norm_layout(key)
    if layout is None or layout.length < 16384 or layout.rows > 256:
        return []
    width = vector_widths(target)[0]
    fewest = -(-2 * layout.rows // MAX_STEPS)
    streams = (True, False) if 4 * layout.length * layout.rows > STREAM_BYTES else (False,)
    groups = dict.fromkeys((max(1, fewest), layout.rows))
    return [split(layout, width, 4, chunk, group, s) for s in streams for group in groups for chunk in (8192, 32768)]
