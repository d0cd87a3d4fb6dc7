"""cuBLASLt by named algorithms: what a plan's step must promise of a key, and what this machine's cuBLASLt offers for it.

A step is checked against the key before the library sees it, because a plan comes from anywhere: every matrix must lie inside
the tensor that it points into. The library is the one that PyTorch has loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

from torch_autokern.errors import OtherLibraryError, PlanError
from torch_autokern.ops.spec import itemsize
from torch_autokern.runtime.extension import extension
from torch_autokern.runtime.plan import (
    CublasLtAlgorithm,
    CublasLtMatrix,
    CublasLtStep,
    InputArg,
    PointerArg,
    WorkspaceArg,
    cublaslt_spans,
)
from torch_autokern.store.key import KernelKey, TensorKey

WORKSPACE_LIMIT_BYTES = 32 << 20  # what cuBLAS recommends for a Hopper (cublasSetWorkspace), and PyTorch gives it
_DTYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType: CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
_COMPUTES = {"float32": 68, "tf32": 77}  # cublasComputeType_t: CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32
_WORKSPACE_ALIGNMENT = 64  # what `Workspace` promises


@dataclass(frozen=True)
class Offer:
    """An algorithm that cuBLASLt's heuristic names, the workspace it takes, the share of the GPU that it fills (1.0: all of it
    once), and whether its numbers make it bit for bit."""

    algorithm: CublasLtAlgorithm
    workspace_bytes: int
    waves: float
    same: bool


def check_step(step: CublasLtStep, key: KernelKey) -> None:
    """Hold a valid step against a key.

    Raises:
        PlanError: it points at a tensor that the key does not have, past one's end or at another dtype, or computes float32
            products in TF32 where the key asks for IEEE.
    """
    if step.compute == "tf32" and key.matmul_precision != "tf32":
        raise PlanError(f"a cublaslt step rounds to tf32; {key.op} is asked for {key.matmul_precision} products")
    for name, pointer, size in cublaslt_spans(step):
        tensor = _tensor(pointer, key)
        if tensor is None:
            continue
        bytes_of = _extent(tensor) * itemsize(tensor.dtype)
        if pointer.offset_bytes + size > bytes_of:
            raise PlanError(
                f"a cublaslt step's {name} reaches byte {pointer.offset_bytes + size} of a tensor of {bytes_of} ({key.op})"
            )
        if tensor.dtype not in (step.dtype, "uint8"):  # uint8: a workspace, while the judge holds it
            raise PlanError(f"a cublaslt step's {name} is {step.dtype}; {key.op} has {tensor.dtype} there")


def native_product(step: CublasLtStep, key: KernelKey, device: int) -> Any:
    """The extension's object for a checked step, on the current device, whose index is `device`.

    Raises:
        OtherLibraryError: this process has another cuBLASLt than the algorithm was chosen under.
        RuntimeError: there is none, or it does not run the algorithm; in its words.
    """
    native = extension()
    here = native.cublaslt_version()
    if here != step.version:
        raise OtherLibraryError(
            f"the algorithm was chosen under cuBLASLt {step.version}, this PyTorch has {here}: search again, or run the "
            "PyTorch that the record was made with"
        )
    algorithm = msgspec.structs.astuple(step.algorithm)
    return native.CublasLtProduct(device, _problem(step, key), algorithm, step.workspace_bytes)


def operands(step: CublasLtStep) -> list[PointerArg | None]:
    """The step's pointers in the extension's order."""
    addend = None if step.addend is None else step.addend.base
    return [step.a.base, step.b.base, step.d.base, addend, step.bias, step.workspace]


def version() -> int:
    """cublasLtGetVersion() of the cuBLASLt that PyTorch has loaded: 130101 is 13.1.1.

    Raises:
        RuntimeError: it has loaded none.
    """
    return int(extension().cublaslt_version())


def offers(step: CublasLtStep, key: KernelKey, device: int, most: int) -> list[Offer]:
    """At most `most` algorithms for a step's problem on the current device, best guess first, each once. The step's own
    algorithm and workspace are not read; partial sums are kept in fp32.

    Raises:
        RuntimeError: cuBLASLt is missing, or refuses the question; in its words.
    """
    rows = extension().cublaslt_algorithms(device, _problem(step, key), WORKSPACE_LIMIT_BYTES, most)
    found: dict[CublasLtAlgorithm, Offer] = {}
    for numbers, workspace_bytes, waves, same in rows:
        algorithm = CublasLtAlgorithm(*numbers)
        if algorithm.reduction not in (0, 2):  # the question asks for no other; a plan could not name it
            continue
        found.setdefault(algorithm, Offer(algorithm, workspace_bytes, waves, same))
    return list(found.values())


def _problem(step: CublasLtStep, key: KernelKey) -> tuple[object, ...]:
    def matrix(m: CublasLtMatrix) -> tuple[int, int, int, int, bool, int]:
        return m.rows, m.columns, m.leading, m.batch_stride, m.transposed, _alignment(m.base, key)

    addend = None if step.addend is None else matrix(step.addend)
    bias = 0 if step.bias is None else _alignment(step.bias, key)
    shapes = step.batches, matrix(step.a), matrix(step.b), matrix(step.d), addend, bias
    return _DTYPES[step.dtype], _COMPUTES[step.compute], *shapes, step.alpha, step.beta


def _alignment(pointer: PointerArg, key: KernelKey) -> int:
    """Bytes that the address is a multiple of in every call of the key."""
    tensor = _tensor(pointer, key)
    return math.gcd(_WORKSPACE_ALIGNMENT if tensor is None else tensor.alignment_bytes, pointer.offset_bytes)


def _tensor(pointer: PointerArg, key: KernelKey) -> TensorKey | None:
    """The tensor of the key that is pointed into, None for a workspace (whose bounds `plan.validate` holds)."""
    if isinstance(pointer, WorkspaceArg):
        return None
    kind, tensors = ("input", key.tensors) if isinstance(pointer, InputArg) else ("output", key.outputs)
    tensor = tensors[pointer.index] if pointer.index < len(tensors) else None
    if tensor is None:
        raise PlanError(f"a cublaslt step works on {kind} {pointer.index}, which {key.op} does not have for this key")
    return tensor


def _extent(tensor: TensorKey) -> int:
    """Elements from a tensor's first to its last."""
    if tensor.numel == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.sizes, tensor.strides, strict=True))
