"""Products of every shape that cuBLASLt has a word for, as keys and tensors, and a step's meaning in plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from torch_autokern.ops import SPECS
from torch_autokern.ops.spec import Scalars
from torch_autokern.runtime.plan import CublasLtMatrix, CublasLtStep, InputArg
from torch_autokern.store.key import KernelKey

# Layouts: both orders of each operand, one row, one column, K of 1, rows apart, a batch that is expanded, results of batches
# that interleave; addends: none, a row, a whole matrix, one of a batch, one that beta 0 takes away.
CASES = (
    "mm", "mm of transposed", "mm one row", "mm one column", "mm of one", "mm rows apart", "addmm row", "addmm row of a matrix",
    "addmm matrix", "addmm ignored", "bmm", "bmm of transposed", "bmm expanded", "baddbmm", "baddbmm matrix",
)  # fmt: skip


def case(name: str, dtype: torch.dtype, device: str = "cpu", scale: int = 1) -> tuple[str, list[torch.Tensor], Scalars]:
    """(op, tensors, scalars) of a case; sizes are small ones times `scale`."""
    generator = torch.Generator(device).manual_seed(len(name))

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device).to(dtype)

    op, _, kind = name.partition(" ")
    m, k, n = (8 * scale, 24 * scale, 16 * scale)
    m = 1 if kind in ("one row", "of one") else m
    n = 1 if kind in ("one column", "of one") else n
    k = 1 if kind == "of one" else k
    lead = (3,) if op in ("bmm", "baddbmm") else ()
    a, b = drawn(*lead, m, k), drawn(*lead, k, n)
    if kind == "of transposed":
        a, b = drawn(*lead, k, m).transpose(-1, -2), drawn(*lead, n, k).transpose(-1, -2)
    if kind == "rows apart":
        a, b = drawn(m, 2 * k)[:, :k], drawn(n, k + 8)[:, :k].t()
    if kind == "expanded":
        a = a[:1].expand(3, m, k)
    if op in ("mm", "bmm"):
        return op, [a, b], {}
    shapes = {"row": (n,), "row of a matrix": (1, n), "matrix": (m, n), "ignored": (m, n), "": (*lead, m, n)}
    factors = {"row": (1, 1), "row of a matrix": (1, 0.5), "ignored": (0, 2)}.get(kind, (0.5, -2))
    return op, [drawn(*shapes[kind]), a, b], {"beta": factors[0], "alpha": factors[1]}


def gpu_key(op: str, tensors: Sequence[torch.Tensor], scalars: Scalars, precision: str = "ieee") -> KernelKey:
    """The key of a call, as on a GPU."""
    key = SPECS[op].key(list(tensors), scalars)

    def aligned(layouts: tuple[object, ...]) -> tuple[object, ...]:
        return tuple(msgspec.structs.replace(layout, alignment_bytes=16) for layout in layouts)  # type: ignore[type-var]

    changes = {"tensors": aligned(key.tensors), "outputs": aligned(key.outputs), "matmul_precision": precision}
    return msgspec.structs.replace(key, device_type="cuda", **changes)


def by_hand(step: CublasLtStep, tensors: Sequence[torch.Tensor], result: torch.Tensor) -> None:
    """What cuBLASLt documents of a step, on the memory that its numbers name, in float64, into `result`."""

    def seen(matrix: CublasLtMatrix) -> torch.Tensor:
        base = tensors[matrix.base.index] if isinstance(matrix.base, InputArg) else result
        sizes = step.batches, matrix.rows, matrix.columns
        start = base.storage_offset() + matrix.base.offset_bytes // base.element_size()
        memory = torch.as_strided(base, sizes, (matrix.batch_stride, 1, matrix.leading), start)
        return memory.transpose(-1, -2) if matrix.transposed else memory

    total = step.alpha * (seen(step.a).double() @ seen(step.b).double())
    if step.addend is not None:
        total += step.beta * seen(step.addend).double()
    if step.bias is not None:
        assert isinstance(step.bias, InputArg)
        total += torch.as_strided(tensors[step.bias.index], (step.d.rows, 1), (1, 1)).double()
    seen(step.d).copy_(total)
