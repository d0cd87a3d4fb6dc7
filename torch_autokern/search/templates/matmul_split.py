"""Strict fp32 matmul on Hopper's tensor cores, with smaller errors than stock's: `mm`, `addmm`, `bmm` and `baddbmm`.

Each row of A and each column of B is scaled by a power of two and split into two fp16 halves, x = hi + lo with 22 bits and
more; a b = hi hi + hi lo + lo hi, and lo lo lies below fp32 (Markidis et al. 2018, "NVIDIA Tensor Core Programmability,
Performance & Precision"; Ootomo and Yokota 2022, "Recovering single precision accuracy from Tensor Cores": the scaling, and
the sums outside of the tensor core, whose accumulator truncates). Every 32 of K the partial sums are added up in fp32
registers.

Steps: `tops` finds the largest element of a row or column where the next step cannot see all of it; `split` scales, splits,
and transposes where K is not the inner dimension; `gemm` multiplies: one producer warp (TMA) and two consumer warpgroups
(wgmma) in persistent blocks. `split` raises a flag for values that are not finite, do not fit or would lose bits: then `gemm`
returns at once and `plain`, which returns at once otherwise, computes in fp32, so that NaN and infinities come out as stock's.
`gather` adds up the parts where K was divided among blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_autokern.build.candidate import Candidate, Parameter
from torch_autokern.runtime.plan import (
    MAX_WORKSPACE_BYTES,
    PLAN_VERSION,
    InputArg,
    KernelArg,
    KernelStep,
    LaunchPlan,
    OutputArg,
    TensorMapArg,
    Workspace,
    WorkspaceArg,
)
from torch_autokern.search.templates import matmul_split_code as code
from torch_autokern.search.templates import matmul_split_prepare as prepare
from torch_autokern.search.templates.cuda_rows import AUTHOR
from torch_autokern.search.templates.layout import dense_tensors, distinct_elements
from torch_autokern.store.key import KernelKey, Target, TensorKey

NAME = "matmul_split"
PROCESSORS = 132
_OPS = {"mm": False, "bmm": False, "addmm": True, "baddbmm": True}
_LEAST_PRODUCTS = 1 << 27  # multiply-adds of a call that takes stock 5 us: four launches cost as much
_LEAST_K = 64  # at 32 storing the result is all there is, and stock was 1.4 times as fast (H200, 32768 x 32 x 32768)
_HELD = 8192  # elements of a row that a block of 256 threads keeps in registers
_EXACT, _SAMPLED = 13, 8  # exponent that the largest element gets: a sampled one leaves room for 2^7 times as much
_FLOAT16, _SWIZZLE_128, _PROMOTE_256 = 6, 3, 3  # CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion
_SHARED_BYTES = 232448 - 1024  # less what the barriers take


@dataclass(frozen=True)
class _Operand:
    """`rows` rows of K elements in each batch: strides in elements between rows, along K and between batches."""

    rows: int
    row: int
    step: int
    batches: int
    wide: bool

    @property
    def contiguous(self) -> bool:
        return self.step == 1


@dataclass(frozen=True)
class _Layout:
    batch: int
    m: int
    n: int
    k: int
    a: _Operand
    b: _Operand
    a_index: int
    c: TensorKey
    addend: tuple[int, int, int]
    alpha: float
    beta: float

    @property
    def padded_k(self) -> int:
        return -(-self.k // 64) * 64


@dataclass(frozen=True)
class Tiling:
    """What the search walks: columns of a tile, how they are cut for the accumulators (`halves`; `pair`: two of them take
    turns), tiles of rows that neighbouring blocks share, parts of K, and whether largest elements are sampled."""

    columns: int = 256
    halves: int = 2
    pair: bool = False
    group: int = 8
    splits: int = 1
    sampled: bool = False
    programmatic: bool = True

    @property
    def stages(self) -> int:
        return min(8, _SHARED_BYTES // self.stage_bytes)

    @property
    def stage_bytes(self) -> int:
        return (128 + self.columns) * 128

    def units(self, batch: int, m: int, n: int) -> int:
        """Tiles times parts of K."""
        return batch * -(-m // 128) * -(-n // self.columns) * self.splits


def _operand(tensor: TensorKey, rows_dim: int, k_dim: int) -> _Operand | None:
    sizes, strides = tensor.sizes, tensor.strides
    batches = strides[0] if len(sizes) == 3 and sizes[0] > 1 else 0
    row, step = strides[rows_dim] if sizes[rows_dim] > 1 else 0, strides[k_dim] if sizes[k_dim] > 1 else 1
    if step != 1 and (row if sizes[rows_dim] > 1 else 1) != 1:
        return None
    inner, other = (sizes[k_dim], row) if step == 1 else (sizes[rows_dim], step)
    wide = tensor.alignment_bytes >= 16 and all(s % 4 == 0 for s in (other, batches)) and (step == 1 or inner % 4 == 0)
    return _Operand(sizes[rows_dim], row, step, batches, wide)


def _layout(key: KernelKey) -> _Layout | None:
    if key.device_type != "cuda" or key.op not in _OPS or key.matmul_precision != "ieee":
        return None
    if not dense_tensors(key, ("float32",)):
        return None
    left, right = key.tensors[-2:]
    c, addend = key.outputs[0], key.tensors[0]
    if left is None or right is None or c is None or addend is None or not distinct_elements(c) or c.strides[-1] != 1:
        return None
    rank = len(left.sizes)
    batch, (m, k), n = left.sizes[0] if rank == 3 else 1, left.sizes[-2:], right.sizes[-1]
    a, b = _operand(left, rank - 2, rank - 1), _operand(right, rank - 1, rank - 2)
    if a is None or b is None or min(m, n) < 32 or k < _LEAST_K or batch * m * n * k < _LEAST_PRODUCTS:
        return None
    if max(batch * m, batch * n) >= 1 << 31 or batch > 65535:
        return None
    alpha = beta = 1.0
    strides = (0, 0, 0)
    if _OPS[key.op]:
        alpha, beta = float(key.scalars["alpha"]), float(key.scalars["beta"])  # type: ignore[arg-type]
        strides = _broadcast(addend, rank)
        if not math.isfinite(alpha) or not math.isfinite(beta):
            return None
    else:
        beta = 0.0
    return _Layout(batch, m, n, k, a, b, len(key.tensors) - 2, c, strides, alpha, beta)


def _broadcast(tensor: TensorKey, rank: int) -> tuple[int, int, int]:
    """Strides of an addend over batch, row and column; 0 where it is broadcast."""
    steps = [stride if size > 1 else 0 for size, stride in zip(tensor.sizes, tensor.strides, strict=True)]
    batch, row, column = (0, 0, 0, *steps)[-3:]
    return batch if rank == 3 else 0, row, column


def _fill(text: str, values: dict[str, object]) -> str:
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value).lower() if isinstance(value, bool) else str(value))
    return text


def _long(value: int) -> str:
    return f"INT64_C({value})"


def _split_code(letter: str, operand: _Operand, layout: _Layout, tiling: Tiling) -> tuple[str, list[KernelStep], KernelStep]:
    """Device code of one operand, its step for the largest elements (or none), and its split."""
    batch, k, kp = layout.batch, layout.k, layout.padded_k
    source, tensor = InputArg(layout.a_index + (letter == "b")), f"tops_{letter}"
    state = WorkspaceArg("state", 64 + (4 * batch * layout.m if letter == "b" else 0))
    args = (source, WorkspaceArg(f"{letter}_pairs"), WorkspaceArg(f"{letter}_exponents"), state, WorkspaceArg("state"))
    held = operand.contiguous and k <= _HELD
    values: dict[str, object] = {
        "x": letter, "ROWS": _long(operand.rows), "BATCHES": _long(operand.batches), "WIDE": operand.wide, "HELD": held,
        "HEAD": _SAMPLED if tiling.sampled and not held else _EXACT, "ROW": _long(operand.row), "STEP": _long(operand.step),
    }  # fmt: skip
    if not operand.contiguous:
        every = max(1, k // 64) if tiling.sampled else 1
        values |= {"STRIDE": _long(every)}
        looks = (-(-operand.rows // 1024), -(-k // (16 * every)), batch)
        grid = (-(-operand.rows // 64), kp // 64, batch)
        tops = [KernelStep(tensor, looks, (256, 1, 1), (source, state))]
        return _fill(prepare.STRIDED, values), tops, KernelStep(f"split_{letter}", grid, (256, 1, 1), args)
    team = 32 if k <= 1024 else 256
    vectors = min(4, -(-kp // (team * 8)))
    segments = -(-kp // (team * vectors * 8))
    every = max(1, segments // 8) if tiling.sampled else 1
    values |= {"TEAM": team, "V": vectors, "STRIDE": _long(every)}
    rows = batch * operand.rows
    tops = [] if held else [KernelStep(tensor, (rows, -(-segments // every), 1), (256, 1, 1), (source, state))]
    grid = (-(-rows * team // 256), segments, 1)
    return _fill(prepare.CONTIGUOUS, values), tops, KernelStep(f"split_{letter}", grid, (256, 1, 1), args)


def _pairs_map(letter: str, rows: int, kp: int, box_rows: int) -> TensorMapArg:
    return TensorMapArg(
        WorkspaceArg(f"{letter}_pairs"),
        _FLOAT16,
        (2 * kp, rows),
        (4 * kp,),
        (64, box_rows),
        (1, 1),
        0,
        _SWIZZLE_128,
        _PROMOTE_256,
    )


def _source(layout: _Layout, tiling: Tiling, splits: list[str]) -> str:
    a, b, c = layout.a, layout.b, layout.c
    c_batch = c.strides[0] if len(c.sizes) == 3 else 0
    aligned = c.alignment_bytes >= 8 and all(s % 2 == 0 for s in (layout.n, c.strides[-2], c_batch))
    values: dict[str, object] = {
        "BATCH": _long(layout.batch), "M": _long(layout.m), "N": _long(layout.n), "K": _long(layout.k),
        "SHARE": repr(min(0.25, math.sqrt(16 / layout.k))), "SPLITS": tiling.splits,
        "ALPHA": repr(layout.alpha), "BETA": repr(layout.beta),
        "WAIT": 'asm volatile("griddepcontrol.wait;" ::: "memory");' if tiling.programmatic else "",
        "LEAVE": 'asm volatile("griddepcontrol.launch_dependents;");' if tiling.programmatic else "",
        "BN": tiling.columns, "HALVES": tiling.halves, "STAGES": tiling.stages, "GROUP": tiling.group, "PAIR": tiling.pair,
        "A_CONTIGUOUS": a.contiguous, "B_CONTIGUOUS": b.contiguous, "PAIRS_ALIGNED": aligned,
        "A_B": _long(a.batches), "A_I": _long(a.row), "A_K": _long(a.step),
        "B_B": _long(b.batches), "B_J": _long(b.row), "B_K": _long(b.step),
        "C_B": _long(c_batch), "C_I": _long(c.strides[-2]),
        **{f"ADD_{name}": _long(step) for name, step in zip("BIJ", layout.addend, strict=True)},
        **code.wgmma_operands(tiling.columns // tiling.halves),
    }  # fmt: skip
    parts = [prepare.PRELUDE, *splits, code.GEMM, code.PLAIN, code.GATHER if tiling.splits > 1 else ""]
    return _fill("".join(parts), values)


def split_matmul(layout: _Layout, tiling: Tiling) -> Candidate | None:
    """The steps above for one tiling; None where a workspace would be too large."""
    batch, m, n, kp = layout.batch, layout.m, layout.n, layout.padded_k
    a_code, a_tops, a_split = _split_code("a", layout.a, layout, tiling)
    b_code, b_tops, b_split = _split_code("b", layout.b, layout, tiling)
    flag, addend = WorkspaceArg("state"), InputArg(0)
    exponents = (WorkspaceArg("a_exponents"), WorkspaceArg("b_exponents"))
    target = WorkspaceArg("parts") if tiling.splits > 1 else OutputArg(0)
    maps = (_pairs_map("a", batch * m, kp, 128), _pairs_map("b", batch * n, kp, tiling.columns))
    blocks = min(PROCESSORS, tiling.units(batch, m, n))
    gemm_args: tuple[KernelArg, ...] = (*maps, *exponents, addend, target, flag)
    plain_args = (InputArg(layout.a_index), InputArg(layout.a_index + 1), addend, target, flag)
    dependent = [a_split, b_split]
    steps = [
        *a_tops, *b_tops, *dependent,
        KernelStep("gemm", (blocks, 1, 1), (384, 1, 1), gemm_args, shared_bytes=tiling.stages * tiling.stage_bytes + 1024),
        KernelStep("plain", (PROCESSORS, 1, 1), (256, 1, 1), plain_args),
    ]  # fmt: skip
    if tiling.splits > 1:
        steps.append(KernelStep("gather", (4 * PROCESSORS, 1, 1), (256, 1, 1), (WorkspaceArg("parts"), addend, OutputArg(0))))
    if tiling.programmatic:
        # Largest elements wait for nobody and nobody may pass them: only what follows a split starts early.
        first = len(a_tops) + len(b_tops)
        steps = [_early(step) if max(first, 1) <= i <= first + 2 else step for i, step in enumerate(steps)]
    workspaces = [
        Workspace("a_pairs", 4 * batch * m * kp), Workspace("b_pairs", 4 * batch * n * kp),
        Workspace("a_exponents", 4 * batch * m), Workspace("b_exponents", 4 * batch * n),
        Workspace("state", 64 + 4 * batch * (m + n), zeroed=True),
    ]  # fmt: skip
    if tiling.splits > 1:
        workspaces.append(Workspace("parts", 4 * tiling.splits * batch * m * n))
    if max(workspace.size_bytes for workspace in workspaces) > MAX_WORKSPACE_BYTES:
        return None
    plan = LaunchPlan(PLAN_VERSION, tuple(steps), tuple(workspaces))
    parameters: dict[str, Parameter] = {
        "columns": tiling.columns, "halves": tiling.halves, "pair": tiling.pair, "group": tiling.group, "splits": tiling.splits,
        "sampled": tiling.sampled, "programmatic": tiling.programmatic,
    }  # fmt: skip
    idea = f"Three fp16 products a pair, promoted every 32 of K; tiles of 128 by {tiling.columns}, K in {tiling.splits} parts."
    return Candidate("cuda", _source(layout, tiling, [a_code, b_code]), plan, idea, AUTHOR, NAME, parameters)


def _early(step: KernelStep) -> KernelStep:
    return KernelStep(
        step.entry, step.grid, step.block, step.args, step.cluster, step.shared_bytes, step.cooperative, programmatic=True
    )


def tilings(layout: _Layout) -> list[Tiling]:
    """Tilings worth a try, best guess first: work of the busiest processor, then less traffic (wider tiles)."""
    shapes = ((256, 2, False, 1.0), (192, 1, False, 1.03), (192, 2, True, 1.04), (128, 1, False, 1.08), (128, 1, True, 1.09))
    pairs = layout.padded_k // 64
    found: dict[tuple[int, int, bool, int], float] = {}
    for columns, halves, pair, traffic in shapes:
        for wanted in (1, 2, 3, 4, 8, 16, 32, 66):
            splits = -(-pairs // -(-pairs // wanted))
            if splits > 1 and pairs < 8 * splits:
                continue
            tiles = Tiling(columns, halves, pair).units(layout.batch, layout.m, layout.n)
            if splits > 1 and tiles * splits > 8 * PROCESSORS:
                continue
            waves = -(-tiles * splits // PROCESSORS)
            busiest = waves * columns * -(-pairs // splits)
            added = 0.02 * splits * layout.m * layout.n * layout.batch / (PROCESSORS * 128)  # parts written and read again
            found[columns, halves, pair, splits] = busiest * traffic + added
    best = sorted(found, key=lambda shape: found[shape])[:8]
    needs_tops = not (layout.a.contiguous and layout.b.contiguous and layout.k <= _HELD)
    options = [
        Tiling(*shape[:3], 8, shape[3], sampled, True)
        for sampled in ([True, False] if needs_tops else [False])
        for shape in best
    ]
    groups = [Tiling(*best[0][:3], group, best[0][3], needs_tops, True) for group in (4, 12, 16)]
    return [*options[:4], *groups, *options[4:], Tiling(*best[0][:3], 8, best[0][3], needs_tops, False)]


def propose(key: KernelKey, target: Target) -> list[Candidate]:
    """Candidates for a large strict fp32 product on sm_90a, best guess first; else []."""
    layout = _layout(key)
    if layout is None or target.device_type != "cuda" or target.arch != "sm_90a":
        return []
    made = [split_matmul(layout, tiling) for tiling in tilings(layout)]
    return [candidate for candidate in made if candidate is not None]
