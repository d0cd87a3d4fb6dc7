"""LayerNorm's backward: gradients of input, weight and bias, each where `output_mask` wants it.

With ``h = (x - mean) * rstd`` and ``v = g * weight``: input ``rstd * (v - mean(v) - h * mean(v h))``, weight ``sum g h`` and
bias ``sum g`` over the rows. `rows`: blocks of whole rows; a block adds up its part of the weight's and bias' gradients
beside the rows that it has in cache, and a second step adds up the blocks in order, so results depend on neither threads nor
cuts. `split`: all threads share long rows in chunks of columns, and each chunk sees all rows. The factors of rstd are
applied term by term: ``rstd * (...)`` would overflow inside where inputs are near the largest number. Sums that float cannot
carry are redone in double.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch_autokern.build.candidate import Candidate, Parameter
from torch_autokern.runtime.plan import (
    PLAN_VERSION,
    CpuStep,
    InputArg,
    LaunchPlan,
    OutputArg,
    PointerArg,
    Workspace,
    WorkspaceArg,
)
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
from torch_autokern.search.templates.cpp_half import CPP_TYPES, DTYPES
from torch_autokern.search.templates.layer_norm_backward_code import APPLY, BLOCKS, CODE, COLUMNS, MERGE, ROWS, SUMS
from torch_autokern.search.templates.layer_norm_common import one_run
from torch_autokern.search.templates.layout import Loop, dense_tensors, distinct_elements, loops_over, offset, steps_in
from torch_autokern.store.key import KernelKey, Target, TensorKey

ROWS_NAME = "layer_norm_backward_rows"
SPLIT_NAME = "layer_norm_backward_split"
LONG_ROW = 16384  # from here on chunks of a row are worth a thread each
LONGEST_KEPT = 65536  # up to here a block's sums of columns stay in the second-level cache


@dataclass(frozen=True)
class BackwardLayout:
    """`length` neighbouring elements were normalised, once per step of `outer` (strides of gradient, input, mean, rstd, and of
    the input's gradient, which are the input's where that is not wanted). `wants`: gradients of input, weight, bias."""

    length: int
    outer: tuple[Loop, ...]
    has_weight: bool
    wants: tuple[bool, bool, bool]
    dtype: str
    parameter_dtype: str
    statistic_dtype: str

    @property
    def rows(self) -> int:
        """Number of rows."""
        return steps_in(self.outer)

    @property
    def wants_parameters(self) -> bool:
        """Whether there is a sum over the rows."""
        return self.wants[1] or self.wants[2]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of inputs, parameters and statistics."""
        return self.dtype, self.parameter_dtype, self.statistic_dtype


def backward_layout(key: KernelKey) -> BackwardLayout | None:
    """Layout of a LayerNorm backward on a CPU whose normalised elements are neighbours; None for any other call."""
    if key.op != "native_layer_norm_backward" or key.device_type != "cpu" or not dense_tensors(key, DTYPES):
        return None
    shape = key.scalars["normalized_shape"]
    g, x, mean, rstd, weight, bias = key.tensors
    if g is None or x is None or mean is None or rstd is None or not isinstance(shape, tuple) or not shape:
        return None
    outputs = [t for t in key.outputs if t is not None]
    grads = [t for t in key.outputs[1:] if t is not None]
    parameters = {t.dtype for t in (weight, bias, *grads) if t is not None} or {x.dtype}
    same = {g.dtype, x.dtype, *(t.dtype for t in key.outputs[:1] if t is not None)}
    if not outputs or len(parameters) > 1 or len(same) > 1 or mean.dtype != rstd.dtype or g.sizes != x.sizes:
        return None
    if len(mean.sizes) != len(x.sizes) or len(rstd.sizes) != len(x.sizes) or not all(distinct_elements(t) for t in outputs):
        return None
    z = key.outputs[0] or x
    runs: list[TensorKey] = [t for t in (g, x, weight, *key.outputs) if t is not None]
    if not one_run(runs, len(shape)):
        return None
    length = 1
    for size in shape:
        length *= int(size)
    outer = loops_over(range(len(x.sizes) - len(shape)), (g, x, mean, rstd, z))
    wants = tuple(t is not None for t in key.outputs)
    assert len(wants) == 3
    return BackwardLayout(length, outer, weight is not None, wants, x.dtype, parameters.pop(), mean.dtype)


def _pointers(layout: BackwardLayout, *workspaces: str) -> tuple[PointerArg, ...]:
    """As the C++ expects them: g, x, mean, rstd, weight, gradients, workspaces; x takes an absent gradient's place."""
    places = [OutputArg(i) if wanted else InputArg(1) for i, wanted in enumerate(layout.wants)]
    return (*(InputArg(i) for i in range(5)), *places, *(WorkspaceArg(name) for name in workspaces))


def _source(layout: BackwardLayout, width: int, values: dict[str, object], parts: tuple[str, ...]) -> str:
    values = {
        "ELEM": CPP_TYPES[layout.dtype], "PARAM": CPP_TYPES[layout.parameter_dtype], "STAT": CPP_TYPES[layout.statistic_dtype],
        "D": layout.length, "ROWS": layout.rows, "WEIGHT": layout.has_weight,
        "WANT_X": layout.wants[0], "WANT_W": layout.wants[1], "WANT_B": layout.wants[2],
        **{name: offset(layout.outer, place, "row") for place, name in enumerate(("G", "X", "MEAN", "RSTD", "Z"))},
        **values,
    }  # fmt: skip
    text = "".join((CODE, *parts)).replace("AK_INLINE_MEMBER", "inline __attribute__((always_inline))")
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value).lower() if isinstance(value, bool) else str(value))
    return prelude(width, layout.dtypes) + text + END


def rows(layout: BackwardLayout, width: int, together: int, blocks: int, stream: bool) -> Candidate:
    """Whole rows, `together` of them side by side, in `blocks` blocks. `stream`: the input's gradient bypasses the cache."""
    used: dict[str, Parameter] = {"width": width, "together": together, "blocks": blocks, "stream": stream}
    lanes = width // 4
    padded = -(-layout.length // lanes) * lanes
    block_rows = -(-layout.rows // blocks)
    blocks = -(-layout.rows // block_rows)
    values: dict[str, object] = {"R": together, "STREAM": stream, "BLOCK_ROWS": block_rows, "PADDED": padded}
    idea = f"{together} whole rows side by side; {blocks} blocks of rows add up the parameters' gradients, then one another."
    if not layout.wants_parameters:
        source = _source(layout, width, values, ()) + entry("rows", ROWS)
        step = CpuStep("rows", layout.rows, grain_of(layout.length), _pointers(layout))
        idea = f"{together} whole rows side by side, two passes over each."
        return Candidate("cpp", source, LaunchPlan(PLAN_VERSION, (step,)), idea, AUTHOR, ROWS_NAME, used)
    source = _source(layout, width, values, (BLOCKS,)) + entry("blocks", "  run_blocks(begin, end, pointers);\n")
    source += entry("columns", COLUMNS.replace("@BLOCKS@", str(blocks)))
    arguments = _pointers(layout, "sums")
    steps = (
        CpuStep("blocks", blocks, grain_of(block_rows * layout.length), arguments),
        CpuStep("columns", padded // lanes, grain_of(blocks * lanes), arguments),
    )
    plan = LaunchPlan(PLAN_VERSION, steps, (Workspace("sums", blocks * 2 * padded * 4),))
    return Candidate("cpp", source, plan, idea, AUTHOR, ROWS_NAME, used)


def split(layout: BackwardLayout, width: int, together: int, chunk: int, stream: bool) -> Candidate:
    """Chunks of `chunk` columns (a multiple of the lanes), `together` rows side by side."""
    used: dict[str, Parameter] = {"width": width, "together": together, "chunk": chunk, "stream": stream}
    chunks = -(-layout.length // chunk)
    values: dict[str, object] = {"R": together, "STREAM": stream, "CHUNK": chunk}
    source = _source(layout, width, values, (APPLY,)) + entry("measure_chunks", SUMS) + entry("merge_rows", MERGE)
    source += entry("write_chunks", "  apply_chunks(begin, end, pointers);\n")
    arguments = _pointers(layout, "parts", "totals")
    grain = grain_of(min(chunk, layout.length))
    apply = CpuStep("write_chunks", chunks, grain_of(min(chunk, layout.length) * layout.rows), arguments)
    summing = (
        CpuStep("measure_chunks", layout.rows * chunks, grain, arguments),
        CpuStep("merge_rows", layout.rows, grain_of(8 * chunks), arguments),
    )
    spaces = (Workspace("parts", layout.rows * chunks * 16), Workspace("totals", layout.rows * 16))
    idea = f"All threads share rows in chunks of {chunk} columns; a chunk adds up all rows' parts of the parameters' gradients."
    plan = LaunchPlan(PLAN_VERSION, (*(summing if layout.wants[0] else ()), apply), spaces)
    return Candidate("cpp", source, plan, idea, AUTHOR, SPLIT_NAME, used)


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for rows of neighbouring elements, best guess first; else []."""
    layout = backward_layout(key)
    if layout is None:
        return []
    wide, *narrower = vector_widths(target)
    stream = layout.dtype == "float32" and layout.wants[0] and 4 * layout.length * layout.rows > STREAM_BYTES
    found = []
    if layout.length >= LONG_ROW and (layout.rows < 8 * target.threads or 4 * layout.length > L2_BYTES):
        found += [split(layout, wide, 4, chunk, flag) for flag in {stream: 0, False: 0} for chunk in (2048, 8192)]
    if layout.length > LONGEST_KEPT:
        return found
    few, more = (max(1, min(layout.rows // 4, count * target.threads)) for count in (1, 4))
    for flag in {stream: 0, False: 0}:
        found += [rows(layout, wide, 4, few, flag), rows(layout, wide, 2, few, flag)]
        found += [rows(layout, width, 4, few, flag) for width in narrower]
    if layout.wants_parameters and more != few:
        found += [rows(layout, wide, 4, more, stream)]
    return found
