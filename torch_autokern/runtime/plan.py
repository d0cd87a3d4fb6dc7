"""The launch plan: a candidate's host side, as data. A closed vocabulary with limits, and nothing that can be executed.

Everything is fixed when the record is made: grids, ranges and sizes are numbers, so the runner (`csrc/plan.cpp`) has no
expression to evaluate.
"""

from __future__ import annotations

import math
import re
from typing import Literal

import msgspec

from torch_autokern.errors import PlanError
from torch_autokern.store.key import canonical_json

PLAN_VERSION = 1
MAX_STEPS = 16
MAX_ARGS = 24
MAX_WORKSPACES = 8
MAX_TENSOR_MAPS = 4
MAX_TENSOR_MAP_RANK = 5
MAX_BLOCK_THREADS = 1024
MAX_CLUSTER_BLOCKS = 16
MAX_SHARED_BYTES = 232448  # 227 KiB, the most that a block of sm_90 may ask for
MAX_SPLIT_K = 1024
MAX_WORKSPACE_BYTES = 4 << 30
MAX_PLAN_BYTES = 1 << 20
WORKSPACE_ALIGNMENT = 256  # what cublasLtMatmul asks of its workspace
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")


class InputArg(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="input", tag_field="kind"):
    """Address of tensor argument `index` (schema order, absent ones counted; null when absent) plus `offset_bytes`."""

    index: int
    offset_bytes: int = 0


class OutputArg(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="output", tag_field="kind"):
    """Address of result `index` plus `offset_bytes`."""

    index: int
    offset_bytes: int = 0


class WorkspaceArg(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="workspace", tag_field="kind"):
    """Address of the workspace `name` plus `offset_bytes`."""

    name: str
    offset_bytes: int = 0


PointerArg = InputArg | OutputArg | WorkspaceArg


class Workspace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scratch memory for one call, 64-byte aligned. `zeroed`: the runner clears it before the first step."""

    name: str
    size_bytes: int
    zeroed: bool = False


class CpuStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="cpu", tag_field="kind"):
    """``entry(begin, end, pointers)`` over ``[0, range)``, cut by `at::parallel_for` into pieces of at least `grain`.

    The exported function is ``extern "C" void entry(int64_t begin, int64_t end, void* const* pointers)``; `args` gives the
    pointers in order. A step starts when the one before has finished.
    """

    entry: str
    range: int
    grain: int
    args: tuple[PointerArg, ...]


class LibraryStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="library", tag_field="kind"):
    """Stock's own product on a CPU, in its `out` form: `function` of the inputs with the indices `operands` (schema order of
    `function`) into result `output`, with the key's layouts. `alpha` and `beta` are read by addmm and baddbmm only."""

    function: Literal["mm", "addmm", "bmm", "baddbmm"]
    operands: tuple[int, ...]
    output: int = 0
    alpha: float = 1.0
    beta: float = 1.0


class IntArg(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="int", tag_field="kind"):
    """An integer parameter of 32 or 64 bits; negative values as two's complement."""

    value: int
    bits: Literal[32, 64]


class FloatArg(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="float", tag_field="kind"):
    """A floating-point parameter of 16 (IEEE half), 32 or 64 bits, rounded to nearest."""

    value: float
    bits: Literal[16, 32, 64]


class TensorMapArg(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="tensor_map", tag_field="kind"):
    """A TMA descriptor, encoded at every launch. Fields as in CUDA's cuTensorMapEncodeTiled: `sizes`, `box` and
    `element_strides` innermost first, `strides_bytes` of all but the innermost dimension; the small integers are its enums."""

    base: PointerArg
    data_type: int
    sizes: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int = 0
    swizzle: int = 0
    l2_promotion: int = 0
    fill: int = 0


KernelArg = PointerArg | IntArg | FloatArg | TensorMapArg
Triple = tuple[int, int, int]


class KernelStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="kernel", tag_field="kind"):
    """One GPU launch of `entry`. `shared_bytes` is dynamic shared memory; `programmatic` lets it start before the step ahead of
    it has finished (it must wait itself). Triton's two trailing scratch pointers are ordinary arguments."""

    entry: str
    grid: Triple
    block: Triple
    args: tuple[KernelArg, ...]
    cluster: Triple = (1, 1, 1)
    shared_bytes: int = 0
    cooperative: bool = False
    programmatic: bool = False


class MemsetStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="memset", tag_field="kind"):
    """Fill `size_bytes` at `target` (an output or a workspace) with the byte `value`, on the GPU."""

    target: OutputArg | WorkspaceArg
    size_bytes: int
    value: int = 0


class CublasLtMatrix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A matrix as cuBLASLt is told of it, in elements: (row, column) of batch i lies ``i * batch_stride + column * leading +
    row`` behind `base`. `transposed`: its transpose enters the product."""

    base: PointerArg
    rows: int
    columns: int
    leading: int
    batch_stride: int = 0
    transposed: bool = False


class CublasLtAlgorithm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An algorithm by the numbers that make it again under the same cuBLASLt, in the order of its AlgoConfigAttributes. A
    `reduction` of 0 splits no K, of 2 adds up partial sums in fp32; those that round partial sums are not in the vocabulary.
    """

    id: int
    tile: int
    split_k: int
    reduction: Literal[0, 2]
    swizzling: int
    custom: int
    stages: int
    inner_shape: int
    cluster_shape: int


class CublasLtStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="cublaslt", tag_field="kind"):
    """``d = alpha * a @ b + beta * addend + bias`` on a GPU by one call of cuBLASLt with a chosen algorithm, all of one dtype.

    `bias` has one element for each row of d (in column order: for each column of a row-major result). `version` is
    cublasLtGetVersion() where the algorithm was chosen; under another the plan does not load. `workspace_bytes` are what the
    algorithm is given, from the next multiple of `WORKSPACE_ALIGNMENT` on. `compute` "tf32" rounds float32 operands.
    """

    version: int
    dtype: Literal["float32", "float16", "bfloat16"]
    a: CublasLtMatrix
    b: CublasLtMatrix
    d: CublasLtMatrix
    algorithm: CublasLtAlgorithm
    batches: int = 1
    addend: CublasLtMatrix | None = None
    bias: PointerArg | None = None
    alpha: float = 1.0
    beta: float = 0.0
    compute: Literal["float32", "tf32"] = "float32"
    workspace: OutputArg | WorkspaceArg | None = None
    workspace_bytes: int = 0


Step = CpuStep | LibraryStep | KernelStep | MemsetStep | CublasLtStep
CPU_STEPS = (CpuStep, LibraryStep)


class LaunchPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Workspaces and ordered steps. Build with `validate`d values only."""

    version: int
    steps: tuple[Step, ...]
    workspaces: tuple[Workspace, ...] = ()


def entries(plan: LaunchPlan) -> tuple[str, ...]:
    """Names of the functions that a plan calls, each once, in order."""
    return tuple(dict.fromkeys(step.entry for step in plan.steps if isinstance(step, CpuStep | KernelStep)))


def encode_plan(plan: LaunchPlan) -> bytes:
    """Canonical JSON of a valid plan."""
    validate(plan)
    return canonical_json(plan)


def decode_plan(raw: bytes) -> LaunchPlan:
    """Parse and validate.

    Raises:
        PlanError: not JSON, an unknown field or step, or a limit broken.
    """
    if len(raw) > MAX_PLAN_BYTES:
        raise PlanError(f"plan has {len(raw)} bytes; at most {MAX_PLAN_BYTES} are allowed")
    try:
        plan = msgspec.json.decode(raw, type=LaunchPlan)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PlanError(f"not a launch plan: {error}") from error
    validate(plan)
    return plan


def validate(plan: LaunchPlan) -> None:
    """Check names, counts and limits.

    Raises:
        PlanError: the first rule that is broken.
    """
    if plan.version != PLAN_VERSION:
        raise PlanError(f"plan version {plan.version}; this version runs {PLAN_VERSION}")
    if not 1 <= len(plan.steps) <= MAX_STEPS:
        raise PlanError(f"a plan has 1 to {MAX_STEPS} steps, this one has {len(plan.steps)}")
    if len(plan.workspaces) > MAX_WORKSPACES:
        raise PlanError(f"a plan has at most {MAX_WORKSPACES} workspaces, this one has {len(plan.workspaces)}")
    sizes: dict[str, int] = {}
    for workspace in plan.workspaces:
        _check_name(workspace.name)
        if not 1 <= workspace.size_bytes <= MAX_WORKSPACE_BYTES:
            raise PlanError(f"workspace {workspace.name!r} has {workspace.size_bytes} bytes; 1 to {MAX_WORKSPACE_BYTES}")
        if workspace.name in sizes:
            raise PlanError(f"workspace {workspace.name!r} is declared twice")
        sizes[workspace.name] = workspace.size_bytes
    if len({isinstance(step, CPU_STEPS) for step in plan.steps}) > 1:
        raise PlanError("a plan runs on one device: cpu steps and GPU steps cannot be mixed")
    for step in plan.steps:
        _check_step(step, sizes)


def _check_step(step: Step, workspace_sizes: dict[str, int]) -> None:
    if isinstance(step, MemsetStep):
        _check_pointer("memset", step.target, workspace_sizes)
        if step.size_bytes < 1 or not 0 <= step.value <= 255:
            raise PlanError(f"memset: {step.size_bytes} bytes of value {step.value}; expected 1 or more bytes of 0 to 255")
        room = workspace_sizes[step.target.name] if isinstance(step.target, WorkspaceArg) else math.inf
        if step.target.offset_bytes + step.size_bytes > room:
            raise PlanError(f"memset: {step.size_bytes} bytes from {step.target.offset_bytes} in a workspace of {room}")
        return
    if isinstance(step, LibraryStep):
        _check_library(step)
        return
    if isinstance(step, CublasLtStep):
        _check_cublaslt(step, workspace_sizes)
        return
    _check_name(step.entry)
    if len(step.args) > MAX_ARGS:
        raise PlanError(f"step {step.entry!r} has {len(step.args)} arguments; at most {MAX_ARGS}")
    for arg in step.args:
        if isinstance(arg, TensorMapArg):
            _check_tensor_map(step.entry, arg, workspace_sizes)
        elif isinstance(arg, IntArg):
            if not -(1 << arg.bits - 1) <= arg.value < 1 << arg.bits:
                raise PlanError(f"step {step.entry!r}: {arg.value} does not fit {arg.bits} bits")
        elif not isinstance(arg, FloatArg):
            _check_pointer(step.entry, arg, workspace_sizes)
    if isinstance(step, CpuStep):
        if not 1 <= step.range < 1 << 62 or not 1 <= step.grain < 1 << 62:
            raise PlanError(f"step {step.entry!r}: range {step.range} and grain {step.grain} must be positive")
    else:
        _check_launch(step)


def _check_library(step: LibraryStep) -> None:
    wanted = 3 if step.function in ("addmm", "baddbmm") else 2
    if len(step.operands) != wanted:
        raise PlanError(f"library step {step.function!r} has {len(step.operands)} operands; expected {wanted}")
    for index in (*step.operands, step.output):
        _check_pointer(step.function, InputArg(index), {})
    if not (math.isfinite(step.alpha) and math.isfinite(step.beta)):
        raise PlanError(f"library step {step.function!r}: alpha {step.alpha} and beta {step.beta} must be finite")


def cublaslt_spans(step: CublasLtStep) -> list[tuple[str, PointerArg, int]]:
    """(name, pointer, bytes from there on) of all memory that a step reads or writes."""
    item = 4 if step.dtype == "float32" else 2
    named = {"a": step.a, "b": step.b, "d": step.d, "addend": step.addend}
    spans = []
    for name, matrix in named.items():
        if matrix is not None:
            last = (step.batches - 1) * matrix.batch_stride + (matrix.columns - 1) * matrix.leading + matrix.rows
            spans.append((name, matrix.base, last * item))
    if step.bias is not None:
        spans.append(("bias", step.bias, step.d.rows * item))
    if step.workspace is not None:
        spans.append(("workspace", step.workspace, step.workspace_bytes + WORKSPACE_ALIGNMENT - 1))
    return spans


def _check_cublaslt(step: CublasLtStep, workspace_sizes: dict[str, int]) -> None:
    def bad(words: str) -> PlanError:
        return PlanError(f"cublaslt step: {words}")

    numbers = msgspec.structs.astuple(step.algorithm)
    widths = (31, *(32,) * 6, 16, 16)  # an int32_t, six uint32_t and two uint16_t
    if any(not 0 <= number < 1 << bits for number, bits in zip(numbers, widths, strict=True)) or step.version < 0:
        raise bad(f"algorithm {numbers} of version {step.version} does not fit cuBLASLt's attributes")
    matrices = [matrix for matrix in (step.a, step.b, step.d, step.addend) if matrix is not None]
    for m in matrices:
        if not (1 <= m.rows <= m.leading < 1 << 40 and m.rows < 1 << 31 and 1 <= m.columns < 1 << 31):
            raise bad(f"a matrix of {m.rows} rows and {m.columns} columns, {m.leading} elements apart")
        if not 0 <= m.batch_stride < 1 << 48 or not 1 <= step.batches < 1 << 31:
            raise bad(f"{step.batches} batches, {m.batch_stride} elements apart")
    (rows, depth), (other, columns) = ((m.columns, m.rows) if m.transposed else (m.rows, m.columns) for m in (step.a, step.b))
    results = [step.d] if step.addend is None else [step.d, step.addend]
    if step.algorithm.split_k > MAX_SPLIT_K:  # cuBLASLt's own check lets a billion pass
        raise bad(f"a sum in {step.algorithm.split_k} parts; at most {MAX_SPLIT_K} are allowed")
    if depth != other or any((m.rows, m.columns, m.transposed) != (rows, columns, False) for m in results):
        raise bad(f"a product of {rows} x {depth} and {other} x {columns} is not {step.d.rows} x {step.d.columns}")
    if isinstance(step.d.base, InputArg):
        raise bad("it would write to an input")
    if any(not abs(factor) < 2.0**127 for factor in (step.alpha, step.beta)) or (step.addend is None and step.beta):
        raise bad(f"alpha {step.alpha} and beta {step.beta} must be finite in fp32, and beta 0 without an addend")
    if step.compute == "tf32" and step.dtype != "float32":
        raise bad(f"tf32 is a way of multiplying float32, not {step.dtype}")
    if not 0 <= step.workspace_bytes <= MAX_WORKSPACE_BYTES or (step.workspace is None) != (step.workspace_bytes == 0):
        raise bad(f"{step.workspace_bytes} bytes of workspace {step.workspace}")
    for name, pointer, size in cublaslt_spans(step):
        _check_pointer("cublaslt", pointer, workspace_sizes)
        if isinstance(pointer, WorkspaceArg) and pointer.offset_bytes + size > workspace_sizes[pointer.name]:
            room = workspace_sizes[pointer.name]
            raise bad(f"{name} needs {size} bytes from {pointer.offset_bytes} in a workspace of {room}")


def _check_launch(step: KernelStep) -> None:
    limits = (("grid", step.grid, (2**31 - 1, 65535, 65535)), ("block", step.block, (1024, 1024, 64)))
    for name, triple, most in limits:
        if any(not 1 <= value <= limit for value, limit in zip(triple, most, strict=True)):
            raise PlanError(f"step {step.entry!r}: {name} {triple} is outside 1..{most}")
    if math.prod(step.block) > MAX_BLOCK_THREADS:
        raise PlanError(f"step {step.entry!r}: {math.prod(step.block)} threads a block; at most {MAX_BLOCK_THREADS}")
    fits = all(c >= 1 and g % c == 0 for c, g in zip(step.cluster, step.grid, strict=True))
    if not fits or math.prod(step.cluster) > MAX_CLUSTER_BLOCKS:
        raise PlanError(f"step {step.entry!r}: cluster {step.cluster} must divide the grid {step.grid}, of at most "
                        f"{MAX_CLUSTER_BLOCKS} blocks")  # fmt: skip
    if not 0 <= step.shared_bytes <= MAX_SHARED_BYTES:
        raise PlanError(f"step {step.entry!r}: {step.shared_bytes} bytes of shared memory; at most {MAX_SHARED_BYTES}")
    if sum(isinstance(arg, TensorMapArg) for arg in step.args) > MAX_TENSOR_MAPS:
        raise PlanError(f"step {step.entry!r}: more than {MAX_TENSOR_MAPS} tensor maps")


def _check_tensor_map(entry: str, arg: TensorMapArg, workspace_sizes: dict[str, int]) -> None:
    _check_pointer(entry, arg.base, workspace_sizes)
    rank = len(arg.sizes)
    lengths = (len(arg.strides_bytes) + 1, len(arg.box), len(arg.element_strides))
    if not 1 <= rank <= MAX_TENSOR_MAP_RANK or any(length != rank for length in lengths):
        raise PlanError(f"step {entry!r}: tensor map of rank {rank} with {lengths[0] - 1} strides and {lengths[1]} box sizes")
    if any(size < 1 for size in (*arg.sizes, *arg.box, *arg.element_strides)) or any(b > 256 for b in arg.box):
        raise PlanError(f"step {entry!r}: tensor map sizes {arg.sizes} and box {arg.box} must be positive, a box at most 256")
    # What cuTensorMapEncodeTiled refuses at every launch (CUDA Driver API, "Tensor Map Object Management").
    if any(stride % 16 or not 16 <= stride < 1 << 40 for stride in arg.strides_bytes) or max(arg.sizes) > 1 << 32:
        raise PlanError(f"step {entry!r}: tensor map strides {arg.strides_bytes} must be multiples of 16 bytes below 2^40, and "
                        f"sizes {arg.sizes} at most 2^32")  # fmt: skip
    if max(arg.element_strides) > 8 or arg.base.offset_bytes % 16:
        raise PlanError(f"step {entry!r}: tensor map steps {arg.element_strides} are at most 8, and it starts on 16 bytes, not "
                        f"on {arg.base.offset_bytes}")  # fmt: skip


def _check_pointer(entry: str, arg: PointerArg, workspace_sizes: dict[str, int]) -> None:
    if arg.offset_bytes < 0:
        raise PlanError(f"step {entry!r}: negative offset {arg.offset_bytes}")
    if isinstance(arg, WorkspaceArg):
        if arg.offset_bytes >= workspace_sizes.get(arg.name, 0):
            raise PlanError(f"step {entry!r}: workspace {arg.name!r} is not declared or shorter than the offset")
    elif not 0 <= arg.index < MAX_ARGS:
        raise PlanError(f"step {entry!r}: tensor index {arg.index} is out of range")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise PlanError(f"{name!r} is not a plain C name")
