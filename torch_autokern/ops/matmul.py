"""Matrix products: ``mm``, ``addmm`` (``beta * self + alpha * mat1 @ mat2``), ``bmm`` and ``baddbmm``.

Natural scale: ``sum |a| |b|`` over the reduced dimension (plus ``|beta * self|``), the bound that Higham's analysis of dot
products is stated in (Accuracy and Stability of Numerical Algorithms, 2002, section 3.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_autokern.ops.spec import Arg, OpSpec, Scalars, Tensors
from torch_autokern.store.key import KernelKey


def _wide(tensors: Tensors) -> list[torch.Tensor]:
    return [t.double() for t in tensors if t is not None]


def _product(tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
    left, right = _wide(tensors)
    return (left @ right,)


def _product_scale(truth: Sequence[torch.Tensor], tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
    left, right = _wide(tensors)
    return (left.abs() @ right.abs(),)


def _added(tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
    addend, left, right = _wide(tensors)
    beta, alpha = float(scalars["beta"]), float(scalars["alpha"])  # type: ignore[arg-type]
    product = alpha * (left @ right)
    return (product if beta == 0 else beta * addend + product,)  # ATen ignores NaN in `self` when beta is 0


def _added_scale(truth: Sequence[torch.Tensor], tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
    addend, left, right = (t.abs() for t in _wide(tensors))
    beta, alpha = abs(float(scalars["beta"])), abs(float(scalars["alpha"]))  # type: ignore[arg-type]
    product = alpha * (left @ right)
    return (product if beta == 0 else beta * addend + product,)


def _flops(key: KernelKey) -> float:
    left, right = [t for t in key.tensors if t is not None][-2:]
    return 2.0 * left.numel * right.sizes[-1]


def _reduced(key: KernelKey) -> tuple[int, ...]:
    left = [t for t in key.tensors if t is not None][-2]
    return (len(left.sizes) - 1,)


def _plain(name: str, index: int) -> OpSpec:
    args = (Arg("self", "tensor"), Arg("mat2", "tensor"))
    return OpSpec(name, index, args, _product, _product_scale, _flops, _reduced, uses_matmul_precision=True)


def _with_addend(name: str, index: int, left: str, right: str) -> OpSpec:
    args = (Arg("self", "tensor"), Arg(left, "tensor"), Arg(right, "tensor"), Arg("beta", "scalar"), Arg("alpha", "scalar"))
    return OpSpec(name, index, args, _added, _added_scale, _flops, _reduced, parameters=(0,), uses_matmul_precision=True)


SPECS = (
    _plain("mm", 0), _with_addend("addmm", 1, "mat1", "mat2"),
    _plain("bmm", 2), _with_addend("baddbmm", 3, "batch1", "batch2"),
)  # fmt: skip
