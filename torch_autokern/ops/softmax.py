"""Softmax and log-softmax, forward and backward.

``softmax(x)_i = exp(x_i - max x) / sum_j exp(x_j - max x)`` over `dim`; ``log_softmax = x - max x - log sum exp(x - max x)``.
Backward of softmax with output y: ``y * (g - sum_j g_j y_j)``; of log-softmax: ``g - exp(y) * sum_j g_j``.
Natural scale of softmax: the output's own size (a small probability must be right to its own digits, so zeros never pass). Of
log-softmax: its own size, but at least 1: it is the log of a sum of 1 and more, and a relative error of that sum is an absolute
error of its log (where one element dominates, stock itself returns 0 for -4.5e-8).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_autokern.ops.spec import Arg, OpSpec, Scalars, Tensors
from torch_autokern.store.key import KernelKey


def _dim(scalars: Scalars) -> int:
    return int(scalars["dim"])  # type: ignore[arg-type]


def _softmax(tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
    assert tensors[0] is not None
    return (torch.softmax(tensors[0].double(), _dim(scalars)),)


def _log_softmax(tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
    assert tensors[0] is not None
    return (torch.log_softmax(tensors[0].double(), _dim(scalars)),)


def _softmax_backward(tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
    grad, output = (t.double() for t in tensors if t is not None)
    return (output * (grad - (grad * output).sum(_dim(scalars), keepdim=True)),)


def _log_softmax_backward(tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
    grad, output = (t.double() for t in tensors if t is not None)
    return (grad - output.exp() * grad.sum(_dim(scalars), keepdim=True),)


def _own_size(truth: Sequence[torch.Tensor], tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
    return (truth[0].abs(),)


def _log_size(truth: Sequence[torch.Tensor], tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
    return (truth[0].abs().clamp_(min=1.0),)


def _softmax_backward_scale(truth: Sequence[torch.Tensor], tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
    """Sizes of the terms that cancel: ``|y| (|g| + sum |g y|)``."""
    grad, output = (t.double().abs() for t in tensors if t is not None)
    return (output * (grad + (grad * output).sum(_dim(scalars), keepdim=True)),)


def _log_softmax_backward_scale(truth: Sequence[torch.Tensor], tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
    """Sizes of the terms that cancel: ``|g| + exp(y) sum |g|``."""
    grad, output = (t.double() for t in tensors if t is not None)
    return (grad.abs() + output.exp() * grad.abs().sum(_dim(scalars), keepdim=True),)


def _flops(key: KernelKey) -> float:
    assert key.tensors[0] is not None
    return 5.0 * key.tensors[0].numel  # max, subtract, exp, add, scale


def _reduced(key: KernelKey) -> tuple[int, ...]:
    return (_dim(key.scalars),)


_FORWARD_ARGS = (Arg("self", "tensor"), Arg("dim", "dim"), Arg("half_to_float", "bool"))
_BACKWARD_ARGS = (Arg("grad_output", "tensor"), Arg("output", "tensor"), Arg("dim", "dim"), Arg("input_dtype", "dtype"))

SPECS = (
    OpSpec("_softmax", 4, _FORWARD_ARGS, _softmax, _own_size, _flops, _reduced),
    OpSpec("_log_softmax", 5, _FORWARD_ARGS, _log_softmax, _log_size, _flops, _reduced),
    OpSpec("_softmax_backward_data", 7, _BACKWARD_ARGS, _softmax_backward, _softmax_backward_scale, _flops, _reduced),
    OpSpec(
        "_log_softmax_backward_data", 8, _BACKWARD_ARGS, _log_softmax_backward, _log_softmax_backward_scale, _flops, _reduced
    ),
)
