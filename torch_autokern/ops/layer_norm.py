"""LayerNorm, forward and backward, over the trailing `normalized_shape` dimensions.

``y = (x - mean) * rstd * weight + bias`` with the biased variance and ``rstd = 1 / sqrt(var + eps)``; the op returns
``(y, mean, rstd)`` (Ba, Kiros, Hinton 2016; ATen's `native_layer_norm`). Natural scale of y: ``|weight| + |bias|`` (the
normalised row has standard deviation 1); of the mean: the row's standard deviation; of rstd: its own size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_autokern.ops.spec import Arg, OpSpec, Scalars, Tensors
from torch_autokern.store.key import KernelKey


def _dims(scalars: Scalars) -> tuple[int, ...]:
    shape = scalars["normalized_shape"]
    assert isinstance(shape, tuple)
    return tuple(range(-len(shape), 0))


def _forward(tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
    x, weight, bias = tensors
    assert x is not None
    dims = _dims(scalars)
    wide = x.double()
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    rstd = (centred.square().mean(dims, keepdim=True) + float(scalars["eps"])).rsqrt()  # type: ignore[arg-type]
    y = centred * rstd
    if weight is not None:
        y = y * weight.double()
    if bias is not None:
        y = y + bias.double()
    return y, mean, rstd


def _scale(truth: Sequence[torch.Tensor], tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
    x, weight, bias = tensors
    assert x is not None
    shape = scalars["normalized_shape"]
    size = torch.ones(shape, dtype=torch.float64, device=x.device) if weight is None else weight.double().abs()  # type: ignore[arg-type]
    if bias is not None:
        size = size + bias.double().abs()
    rstd = truth[2].double()
    # rstd = 1 / sqrt(var + eps), so 1 / rstd is the row's standard deviation, never 0.
    return size.expand_as(x), rstd.reciprocal(), rstd


def _backward(tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
    grad, x, mean, rstd, weight, _ = (None if t is None else t.double() for t in tensors)
    assert grad is not None and x is not None and mean is not None and rstd is not None
    dims = _dims(scalars)
    normalised = (x - mean) * rstd
    weighted = grad if weight is None else grad * weight
    grad_input = rstd * (
        weighted - weighted.mean(dims, keepdim=True) - normalised * (weighted * normalised).mean(dims, keepdim=True)
    )
    outer = tuple(range(x.dim() - len(dims)))
    grad_weight = (grad * normalised).sum(outer) if outer else grad * normalised
    return grad_input, grad_weight, grad.sum(outer) if outer else grad


def _backward_scale(truth: Sequence[torch.Tensor], tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
    """Sizes of the terms that cancel, each taken absolute."""
    grad, x, mean, rstd, weight, _ = (None if t is None else t.double() for t in tensors)
    assert grad is not None and x is not None and mean is not None and rstd is not None
    dims = _dims(scalars)
    normalised = ((x - mean) * rstd).abs()
    weighted = (grad if weight is None else grad * weight).abs()
    grad_input = rstd * (
        weighted + weighted.mean(dims, keepdim=True) + normalised * (weighted * normalised).mean(dims, keepdim=True)
    )
    outer = tuple(range(x.dim() - len(dims)))
    product = grad.abs() * normalised
    return grad_input, product.sum(outer) if outer else product, grad.abs().sum(outer) if outer else grad.abs()


def _flops(key: KernelKey) -> float:
    assert key.tensors[0] is not None
    return 8.0 * key.tensors[0].numel  # sum, centre, square, sum, centre, scale, weight, bias


def _reduced(key: KernelKey) -> tuple[int, ...]:
    shape = key.scalars["normalized_shape"]
    tensor = key.tensors[0]
    assert tensor is not None and isinstance(shape, tuple)
    return tuple(range(len(tensor.sizes) - len(shape), len(tensor.sizes)))


SPECS = (
    OpSpec(
        "native_layer_norm", 6,
        (Arg("input", "tensor"), Arg("normalized_shape", "int_list"), Arg("weight", "optional_tensor"),
         Arg("bias", "optional_tensor"), Arg("eps", "float")),
        _forward, _scale, _flops, _reduced, parameters=(1, 2),
    ),
    OpSpec(
        "native_layer_norm_backward", 9,
        (Arg("grad_out", "tensor"), Arg("input", "tensor"), Arg("normalized_shape", "int_list"), Arg("mean", "tensor"),
         Arg("rstd", "tensor"), Arg("weight", "optional_tensor"), Arg("bias", "optional_tensor"),
         Arg("output_mask", "bool_list")),
        _backward, _backward_scale, _flops, _reduced, parameters=(4, 5),
    ),
)  # fmt: skip
