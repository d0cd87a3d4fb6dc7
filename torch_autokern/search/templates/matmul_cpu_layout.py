"""A matrix product as plain numbers: sizes, strides in elements, and which operand plays which part.

Vectors run along the output's columns. Where the output's rows are the ones with stride 1 (or there is one column), the product
is read as its transpose, ``C' = B' A'``, so no operand is ever copied for its orientation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch_autokern.search.templates.layout import dense_tensors, distinct_elements
from torch_autokern.store.key import KernelKey, TensorKey

_ADDENDS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Matrix:
    """A tensor argument: its place in the plan, and its strides in elements between batches, rows and columns."""

    index: int
    batch: int
    row: int
    column: int

    def transposed(self) -> Matrix:
        """Rows and columns exchanged."""
        return Matrix(self.index, self.batch, self.column, self.row)


@dataclass(frozen=True)
class Product:
    """``out[i] = alpha * a[i] @ b[i] + beta * addend[i]`` for `batches` i; a is (m, k), b is (k, n), out has column stride 1.

    `addend` is None where there is none, or `beta` is 0 (ATen then ignores it, NaN included); a broadcast dimension of it has
    stride 0.
    """

    dtype: str
    batches: int
    m: int
    n: int
    k: int
    a: Matrix
    b: Matrix
    out: Matrix
    addend: Matrix | None
    alpha: float
    beta: float

    def transposed(self) -> Product:
        """The same numbers as ``out' = b' a'``."""
        addend = None if self.addend is None else self.addend.transposed()
        a, b = self.b.transposed(), self.a.transposed()
        return Product(
            self.dtype, self.batches, self.n, self.m, self.k, a, b, self.out.transposed(), addend, self.alpha, self.beta
        )


def _matrix(index: int, tensor: TensorKey) -> Matrix:
    # A dimension of one element may carry any stride; 0 and 1 are what the code can use best.
    sizes = (1,) * (3 - len(tensor.sizes)) + tensor.sizes
    strides = (0,) * (3 - len(tensor.strides)) + tensor.strides
    batch, row = (stride if size > 1 else 0 for size, stride in zip(sizes[:2], strides[:2], strict=True))
    return Matrix(index, batch, row, strides[2] if sizes[2] > 1 else 1)


def _addend(tensor: TensorKey) -> Matrix:
    """A tensor that broadcasts to the result: missing and single dimensions step by 0."""
    missing = 3 - len(tensor.sizes)
    steps = [0] * missing + [s if n > 1 else 0 for n, s in zip(tensor.sizes, tensor.strides, strict=True)]
    return Matrix(0, *steps)


def product_of(key: KernelKey) -> Product | None:
    """The product that a CPU's key asks for in one of `DTYPES`, or None (`product_in`)."""
    return product_in(key, DTYPES) if key.device_type == "cpu" else None


def product_in(key: KernelKey, dtypes: Sequence[str]) -> Product | None:
    """The product that a key asks for, or None: another op or dtype, an output that folds over itself or has no dimension of
    stride 1, scalars that are not finite in float32."""
    addends = _ADDENDS.get(key.op)
    if addends is None or not dense_tensors(key, dtypes):
        return None
    left, right, result = key.tensors[-2], key.tensors[-1], key.outputs[0]
    if left is None or right is None or result is None or not distinct_elements(result):
        return None
    if len({tensor.dtype for tensor in (*key.tensors, result) if tensor is not None}) > 1:
        return None
    alpha, beta = (float(key.scalars[name]) if addends else 1.0 for name in ("alpha", "beta"))  # type: ignore[arg-type]
    if not all(math.isfinite(x) and abs(x) < 2.0**127 for x in (alpha, beta)):
        return None
    addend = key.tensors[0] if addends and beta != 0 else None
    batches = result.sizes[0] if len(result.sizes) == 3 else 1
    m, n, k = result.sizes[-2], result.sizes[-1], left.sizes[-1]
    matrices = (_matrix(addends, left), _matrix(addends + 1, right), _matrix(0, result))
    product = Product(left.dtype, batches, m, n, k, *matrices, None if addend is None else _addend(addend), alpha, beta)
    if n == 1 and m > 1 and product.out.row == 1:
        return product.transposed()
    if product.out.column == 1:
        return product
    return product.transposed() if product.out.row == 1 else None
