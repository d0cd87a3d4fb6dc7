"""LayerNorm over long rows: all threads share each row, and each piece of weight and bias is read once for all rows.

Rows are cut into chunks. The first step finds each chunk's mean and M2 (both passes over a chunk find it in cache), the second
merges them in index order in double, the third applies: chunk by chunk, and within a chunk a few rows at a time, because weight
and bias are as long as a row (16.8 MB each for the published shape (16, 64, 256, 256)) and would otherwise be read again for
every row. Rows side by side also give the memory several streams at once: 34 ms against 27 on one thread for that shape.
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
constexpr int TOGETHER = @TOGETHER@;
constexpr int64_t GROUPS = (ROWS + TOGETHER - 1) / TOGETHER;
// One chunk of TOGETHER rows side by side: weight and bias are loaded once for all, and memory sees several streams.
template <int64_t N>
AK_INLINE void apply_together(const elem* x, const param* w, const param* b, elem* y, const statistics* s, int64_t first,
                              const elem* next) {
  bool plain = STREAM && N >= L;
  const elem* in[TOGETHER];
  elem* out[TOGETHER];
  line f[TOGETHER];
  AK_UNROLL for (int r = 0; r < TOGETHER; r++) {
    const int64_t row = first + r < ROWS ? first + r : ROWS - 1;
    in[r] = x + x_offset(row);
    out[r] = y + y_offset(row);
    f[r] = line_of(s[row]);
    plain = plain && s[row].fits_float() && first + r < ROWS && ((uintptr_t)out[r] - (uintptr_t)out[0]) % WIDTH == 0;
  }
  if (!plain) {
    for (int64_t row = first; row < first + TOGETHER && row < ROWS; row++)
      apply<N>(x + x_offset(row), w, b, y + y_offset(row), s[row], next + x_offset(row));
    return;
  }
  auto at = [&](int r, int64_t i, vf wv, vf bv) __attribute__((always_inline)) {
    return affine(f[r].at(ak_load(in[r] + i)), wv, bv);
  };
  auto weight = [&](int64_t i) __attribute__((always_inline)) { return HAS_WEIGHT ? ak_load(w + i) : vf{}; };
  auto bias = [&](int64_t i) __attribute__((always_inline)) { return HAS_BIAS ? ak_load(b + i) : vf{}; };
  AK_UNROLL for (int r = 0; r < TOGETHER; r++) ak_store(out[r], at(r, 0, weight(0), bias(0)));
  for (int64_t i = (int64_t)((0 - (uintptr_t)out[0] / 4) % L); i + L <= N; i += L) {
    const vf wv = weight(i), bv = bias(i);
    AK_UNROLL for (int r = 0; r < TOGETHER; r++) {
      if (PREFETCH) __builtin_prefetch(next + (in[r] - x) + i, 0, 2);
      ak_stream(out[r] + i, at(r, i, wv, bv));
    }
  }
  AK_UNROLL for (int r = 0; r < TOGETHER; r++) ak_store(out[r] + N - L, at(r, N - L, weight(N - L), bias(N - L)));
}
"""

_STATISTICS = """  moments* parts = (moments*)pointers[6];
  for (int64_t i = begin; i < end; i++) {
    const elem* x = (const elem*)pointers[0] + x_offset(i / CHUNKS) + i % CHUNKS * CHUNK;
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
    ((stat*)pointers[4])[mean_offset(row)] = (float)s.mean;
    ((stat*)pointers[5])[rstd_offset(row)] = (float)s.rstd;
  }
"""
_APPLY = """  const statistics* rows = (const statistics*)pointers[7];
  for (int64_t i = begin; i < end; i++) {
    const int64_t first = i % GROUPS * TOGETHER, at = i / GROUPS * CHUNK, after = i + 1 < end ? i + 1 : i;
    const elem* x = (const elem*)pointers[0] + at;
    const param* w = HAS_WEIGHT ? (const param*)pointers[1] + at : nullptr;
    const param* b = HAS_BIAS ? (const param*)pointers[2] + at : nullptr;
    elem* y = (elem*)pointers[3] + at;
    // The group after this one, seen from where this one's offsets lead.
    const int64_t step = x_offset(after % GROUPS * TOGETHER) - x_offset(first);
    const elem* next = (const elem*)pointers[0] + after / GROUPS * CHUNK + step;
    if (at == (CHUNKS - 1) * CHUNK) apply_together<LAST>(x, w, b, y, rows, first, next);
    else apply_together<CHUNK>(x, w, b, y, rows, first, next);
  }
  if (STREAM) ak_stream_fence();
"""


def split(layout: NormLayout, width: int, unroll: int, chunk: int, together: int, stream: bool, prefetch: bool) -> Candidate:
    """Chunks of `chunk` elements, `unroll` independent sums.

    `together`: rows written side by side. `stream`: results bypass the cache. `prefetch`: fetch the next chunk while this one
    is written.
    """
    rows, chunks = layout.rows, -(-layout.length // chunk)
    body = _BODY.replace("@CHUNK@", str(chunk)).replace("@ROWS@", str(rows)).replace("@TOGETHER@", str(together))
    source = prelude(width, layout.dtypes) + norm_code(layout, unroll, stream, prefetch) + body + END
    source += entry("measure_chunks", _STATISTICS) + entry("merge_rows", _MERGE) + entry("apply_chunks", _APPLY)
    args = (*layout.args, WorkspaceArg("parts"), WorkspaceArg("rows"))
    grain = grain_of(min(chunk, layout.length))
    steps = (
        CpuStep("measure_chunks", rows * chunks, grain, args),
        CpuStep("merge_rows", rows, grain_of(8 * chunks), args),
        CpuStep("apply_chunks", -(-rows // together) * chunks, grain_of(together * min(chunk, layout.length)), args),
    )
    plan = LaunchPlan(PLAN_VERSION, steps, (Workspace("parts", rows * chunks * 16), Workspace("rows", rows * 16)))
    idea = f"All threads share each row in chunks of {chunk}; weight and bias are read once for all rows."
    used = {"width": width, "unroll": unroll, "chunk": chunk, "together": together, "stream": stream, "prefetch": prefetch}
    return Candidate("cpp", source, plan, idea, AUTHOR, NAME, dict(used))


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for rows that are long, and few or beyond the cache, best guess first; else []."""
    layout = norm_layout(key)
    if layout is None or layout.stride != 1 or layout.length < MIN_LENGTH:
        return []
    if layout.rows >= 8 * target.threads and 4 * layout.length < L2_BYTES:
        return []
    width = vector_widths(target)[0]
    if layout.dtype != "float32" or 4 * layout.length * layout.rows <= STREAM_BYTES:
        return [split(layout, width, 4, chunk, 1, False, False) for chunk in (8192, 32768)]
    together = [count for count in (4, 2, 1) if layout.rows % count == 0]
    found = [split(layout, width, 4, chunk, count, True, True) for count in together for chunk in (32768, 8192)]
    return [*found, split(layout, width, 4, 16384, 1, False, True)]
