"""Softmax and log-softmax where input and output have their neighbours in different dimensions.

ATen's results are contiguous whatever the input was: scores that were transposed, or a channels-last image whose channels are
normalised. A few rows at a time are brought into the order of the reduced dimension on the way in, or out of it on the way out,
through an array that stays in cache; in between they are rows of neighbours as in `softmax_rows`.
"""

from __future__ import annotations

from torch_autokern.build.candidate import Candidate, Parameter
from torch_autokern.runtime.plan import PLAN_VERSION, CpuStep, InputArg, LaunchPlan, OutputArg
from torch_autokern.search.templates.cpp_common import AUTHOR, END, SCRATCH_BYTES, entry, grain_of, prelude, vector_widths
from torch_autokern.search.templates.layout import offset, steps_in
from torch_autokern.search.templates.softmax_layout import SoftmaxLayout, softmax_layout
from torch_autokern.search.templates.softmax_rows import row_code
from torch_autokern.store.key import KernelKey, Target

NAME = "softmax_turned"

_BODY = """
constexpr int64_t D = @D@, SX = @SX@, SY = @SY@;
constexpr int T = @T@;
AK_INLINE int64_t x_offset(int64_t row) { return @X@; }
AK_INLINE int64_t y_offset(int64_t row) { return @Y@; }
AK_INLINE void one_row(const elem* x, elem* y) {
  float kept[KEEP == SCRATCH ? D : 1];
  const vf m = ak_splat(row<D>::maximum(x));
  const float sum = row<D>::sum(x, kept, m, x);
  const vf s = ak_splat(LOG ? (float)log((double)sum) : 1.0f / sum);
  if (KEEP == SCRATCH) row<D>::write((const float*)kept, y, m, s);
  else row<D>::write(x, y, m, s);
}
"""
_ENTRY = """  const elem* x = (const elem*)pointers[0];
  elem* y = (elem*)pointers[1];
  alignas(64) elem in[SX == 1 ? 1 : T * D], out[SY == 1 ? 1 : T * D];
  for (int64_t first = begin; first < end; first += T) {
    const elem* px[T];
    elem* py[T];
    // The last group repeats the last row: same values to the same place.
    for (int r = 0; r < T; r++) {
      const int64_t at = first + r < end ? first + r : end - 1;
      px[r] = x + x_offset(at);
      py[r] = y + y_offset(at);
    }
    if (SX != 1)
      for (int64_t d = 0; d < D; d++)
        AK_UNROLL for (int r = 0; r < T; r++) in[r * D + d] = px[r][d * SX];
    for (int r = 0; r < T; r++) one_row(SX == 1 ? px[r] : in + r * D, SY == 1 ? py[r] : out + r * D);
    if (SY != 1)
      for (int64_t d = 0; d < D; d++)
        AK_UNROLL for (int r = 0; r < T; r++) py[r][d * SY] = out[r * D + d];
  }
"""


def turned(layout: SoftmaxLayout, width: int, together: int) -> Candidate:
    """`together` rows are turned at a time."""
    kept = "nothing" if layout.log or 4 * layout.length > SCRATCH_BYTES // 4 else "scratch"
    values = {
        "D": layout.length, "SX": layout.strides[0], "SY": layout.strides[1], "T": together,
        "X": offset(layout.outer, 0, "row"), "Y": offset(layout.outer, 1, "row"),
    }  # fmt: skip
    body = _BODY
    for name, value in values.items():
        body = body.replace(f"@{name}@", str(value))
    source = prelude(width, [layout.dtype]) + layout.constants + row_code(4, False, kept, False)  # type: ignore[arg-type]
    source += body + END + entry("run", _ENTRY)
    step = CpuStep("run", steps_in(layout.outer), grain_of(layout.length), (InputArg(0), OutputArg(0)))
    idea = f"{together} rows at a time are turned into rows of neighbours, or out of them, through the cache."
    used: dict[str, Parameter] = {"width": width, "together": together}
    return Candidate("cpp", source, LaunchPlan(PLAN_VERSION, (step,)), idea, AUTHOR, NAME, used)


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates where the reduced dimension has stride 1 on one side, or on neither, best guess first; else []."""
    layout = softmax_layout(key)
    if layout is None or layout.contiguous or layout.strides == (1, 1):
        return []
    if layout.outer and layout.outer[-1].strides == (1, 1):
        return []  # `softmax_columns` reads and writes neighbours
    counts = [count for count in (16, 32, 8) if 2 * count * layout.length * layout.itemsize <= SCRATCH_BYTES]
    return [turned(layout, width, count) for count in counts for width in vector_widths(target)[:1]]
