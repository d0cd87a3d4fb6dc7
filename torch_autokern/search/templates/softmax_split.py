"""Softmax and log-softmax over few long rows: all threads share each row in chunks.

The first step finds each chunk's maximum m_c and s_c = sum exp(x - m_c); the second merges them, ``m = max m_c`` and
``s = sum s_c exp(m_c - m)`` (Milakov and Gimelshein 2018) in double and in index order, and writes its chunk.
"""

from __future__ import annotations

from torch_autokern.build.candidate import Candidate
from torch_autokern.runtime.plan import PLAN_VERSION, CpuStep, InputArg, LaunchPlan, OutputArg, Workspace, WorkspaceArg
from torch_autokern.search.templates.cpp_common import AUTHOR, END, STREAM_BYTES, entry, grain_of, prelude, vector_widths
from torch_autokern.search.templates.layout import offset, steps_in
from torch_autokern.search.templates.softmax_layout import SoftmaxLayout, softmax_layout
from torch_autokern.search.templates.softmax_rows import row_code
from torch_autokern.store.key import KernelKey, Target

NAME = "softmax_split"
MIN_LENGTH = 16384

_BODY = """
AK_INLINE int64_t x_offset(int64_t row) { return @X@; }
AK_INLINE int64_t y_offset(int64_t row) { return @Y@; }
constexpr int64_t CHUNKS = (D + CHUNK - 1) / CHUNK;
constexpr int64_t LAST = D - (CHUNKS - 1) * CHUNK;
struct part {
  float maximum, sum;
};
template <int64_t N>
AK_INLINE part part_of(const elem* x) {
  const float m = row<N>::maximum(x);
  // Nothing above -inf here: measured from 0 the sum is 0, or NaN where a NaN hides.
  return {m, row<N>::sum(x, nullptr, ak_splat(m == -INF ? 0.0f : m), x)};
}
part merged(const part* parts) {
  float m = -INF;
  for (int64_t c = 0; c < CHUNKS; c++) m = parts[c].maximum > m ? parts[c].maximum : m;
  double sum = 0;
  // A chunk of -inf only weighs nothing, unless the whole row is so: then exp(-inf - -inf) makes the row NaN, as it must.
  for (int64_t c = 0; c < CHUNKS; c++) sum += (double)parts[c].sum * exp((double)parts[c].maximum - (double)m);
  return {m, (float)(LOG ? log(sum) : 1.0 / sum)};
}
"""

_STATISTICS = """  const elem* x = (const elem*)pointers[0];
  part* parts = (part*)pointers[2];
  for (int64_t i = begin; i < end; i++) {
    const int64_t c = i % CHUNKS;
    const elem* p = x + x_offset(i / CHUNKS) + c * CHUNK;
    parts[i] = c == CHUNKS - 1 ? part_of<LAST>(p) : part_of<CHUNK>(p);
  }
"""
_APPLY = """  int64_t known = -1;
  part all = {0, 0};
  for (int64_t i = begin; i < end; i++) {
    const int64_t r = i / CHUNKS, c = i % CHUNKS;
    if (r != known) all = merged((const part*)pointers[2] + r * CHUNKS);
    known = r;
    const elem* x = (const elem*)pointers[0] + x_offset(r) + c * CHUNK;
    elem* y = (elem*)pointers[1] + y_offset(r) + c * CHUNK;
    if (c == CHUNKS - 1) row<LAST>::write(x, y, ak_splat(all.maximum), ak_splat(all.sum));
    else row<CHUNK>::write(x, y, ak_splat(all.maximum), ak_splat(all.sum));
  }
  if (STREAM) ak_stream_fence();
"""


def split(layout: SoftmaxLayout, width: int, chunk: int, stream: bool) -> Candidate:
    """Chunks of `chunk` elements."""
    rows, chunks = steps_in(layout.outer), -(-layout.length // chunk)
    body = _BODY.replace("@X@", offset(layout.outer, 0, "row")).replace("@Y@", offset(layout.outer, 1, "row"))
    sizes = f"constexpr int64_t D = {layout.length}, CHUNK = {chunk};\n"
    source = prelude(width, [layout.dtype]) + layout.constants + sizes
    source += row_code(4, stream, "nothing", prefetch=False) + body + END
    source += entry("measure_chunks", _STATISTICS) + entry("apply_chunks", _APPLY)
    args = (InputArg(0), OutputArg(0), WorkspaceArg("parts"))
    grain = grain_of(min(chunk, layout.length))
    steps = tuple(CpuStep(name, rows * chunks, grain, args) for name in ("measure_chunks", "apply_chunks"))
    plan = LaunchPlan(PLAN_VERSION, steps, (Workspace("parts", rows * chunks * 8),))
    idea = f"All threads share each row in chunks of {chunk}; maxima and sums of chunks are merged, then applied."
    return Candidate("cpp", source, plan, idea, AUTHOR, NAME, {"width": width, "chunk": chunk, "stream": stream})


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for few long rows of neighbouring elements, best guess first; else []."""
    layout = softmax_layout(key)
    if layout is None or not layout.contiguous or layout.length < MIN_LENGTH or steps_in(layout.outer) >= 8 * target.threads:
        return []
    width = vector_widths(target)[0]
    big = layout.is_float and 4 * layout.length * steps_in(layout.outer) > STREAM_BYTES
    streams = (True, False) if big else (False,)
    return [split(layout, width, chunk, stream) for stream in streams for chunk in (8192, 32768)]
