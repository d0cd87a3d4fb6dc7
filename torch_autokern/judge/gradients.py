"""Algebra of backward ops that nonsense cannot satisfy: results are linear in the gradient, and

softmax: rows sum to 0, and a result points where its gradient does (``sum g z`` is the variance of g under the softmax).
log_softmax: rows sum to 0, and a gradient whose row sums to 0 comes back as it is. LayerNorm: ``sum g w z`` is positive, and
the bias' gradient of ones is the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from torch_autokern.judge.accuracy import Task
from torch_autokern.judge.families import Family
from torch_autokern.judge.inputs import InputSet, make_inputs
from torch_autokern.judge.remembered import Results

_GRID, _RANGE = 8.0, 3.0  # multiples of 1/8 up to 3: sums of two are exact in every dtype


class Runs(Protocol):
    """What `properties.PropertyChecks` offers."""

    task: Task
    generator: torch.Generator
    limit: float

    def results(self, inputs: InputSet) -> Results:
        """All results of one run."""

    def require(self, what: str, seen: torch.Tensor, limit: float) -> None:
        """Refuse where `seen` is above `limit`, or NaN."""


def check_backward(runs: Runs) -> str:
    """Check a backward op's properties.

    Raises:
        RefusedError: one does not hold.
    """
    _linear(runs)
    check: Callable[[Runs], str] = {
        "_softmax_backward_data": _softmax,
        "_log_softmax_backward_data": _log_softmax,
        "native_layer_norm_backward": _layer_norm,
    }[runs.task.spec.name]
    return f"passed: linear in the gradient, {check(runs)}"


def _inputs(runs: Runs) -> InputSet:
    """Gradients on a grid, everything else standard."""
    inputs = make_inputs(runs.task.spec, runs.task.key, Family.NORMAL, runs.generator)
    _set_gradient(inputs, _grid(_gradient(inputs), runs.generator))
    return inputs


def _gradient(inputs: InputSet) -> torch.Tensor:
    gradient = inputs.tensors[0]
    assert gradient is not None
    return gradient


def _set_gradient(inputs: InputSet, values: torch.Tensor) -> None:
    target = _gradient(inputs)
    index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in target.stride())
    sizes = [1 if stride == 0 else size for size, stride in zip(target.shape, target.stride(), strict=True)]
    target.as_strided(sizes, target.stride()).copy_(values[index])


def _grid(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.empty(like.shape, device=like.device).uniform_(-_RANGE, _RANGE, generator=generator)
    return drawn.mul_(_GRID).round_().div_(_GRID)


def _scales(runs: Runs, inputs: InputSet) -> tuple[torch.Tensor, ...]:
    spec, scalars = runs.task.spec, runs.task.key.scalars
    return spec.scale(spec.reference(inputs.tensors, scalars), inputs.tensors, scalars)


def _linear(runs: Runs) -> None:
    inputs = _inputs(runs)
    one = _gradient(inputs).float().clone()
    other = _grid(one, runs.generator)
    first, first_scale = runs.results(inputs), _scales(runs, inputs)
    _set_gradient(inputs, other)
    second, second_scale = runs.results(inputs), _scales(runs, inputs)
    _set_gradient(inputs, one + other)
    both = runs.results(inputs)
    for index, (a, b, sum_) in enumerate(zip(first, second, both, strict=True)):
        if a is None or b is None or sum_ is None:
            continue
        unit = (first_scale[index] + second_scale[index]).clamp(min=torch.finfo(sum_.dtype).tiny)
        wrong = ((sum_.double() - a.double() - b.double()).abs() / unit).amax()
        runs.require(f"results {index} of two gradients add up", wrong, runs.limit)


def _rows_sum_to_zero(runs: Runs, inputs: InputSet, result: torch.Tensor, weights: torch.Tensor, dim: int) -> None:
    """Up to how far the saved probabilities are from 1: a per cent in long rows of float16."""
    scale = _scales(runs, inputs)[0].sum(dim)
    off = (weights.double().sum(dim) - 1).abs().amax()
    wrong = (result.double().sum(dim).abs() / scale.clamp(min=torch.finfo(result.dtype).tiny)).amax()
    runs.require("rows sum to 0", wrong, runs.limit + float(off))


def _softmax(runs: Runs) -> str:
    dim = int(runs.task.key.scalars["dim"])  # type: ignore[arg-type]
    inputs = _inputs(runs)
    gradient, output = inputs.tensors
    assert gradient is not None and output is not None
    (result,) = runs.results(inputs)
    assert result is not None
    _rows_sum_to_zero(runs, inputs, result, output, dim)
    g, y = gradient.double(), output.double()
    variance = (y * g.square()).sum(dim) - (y * g).sum(dim).square()
    wrong = ((g * result.double()).sum(dim) - variance).abs() / (y * g.square()).sum(dim).clamp(min=1e-3)
    off = float((y.sum(dim) - 1).abs().amax())
    runs.require("results point where their gradients do", wrong.amax(), 4 * runs.limit + 4 * off)
    return "rows sum to 0 and point where their gradients do"


def _log_softmax(runs: Runs) -> str:
    dim = int(runs.task.key.scalars["dim"])  # type: ignore[arg-type]
    inputs = _inputs(runs)
    output = inputs.tensors[1]
    (result,) = runs.results(inputs)
    assert result is not None and output is not None
    _rows_sum_to_zero(runs, inputs, result, output.double().exp(), dim)
    half = result.shape[dim] // 2
    balanced = _gradient(inputs).float().clone()
    balanced.narrow(dim, half, half).copy_(-balanced.narrow(dim, 0, half))
    if result.shape[dim] % 2:
        balanced.select(dim, result.shape[dim] - 1).zero_()
    _set_gradient(inputs, balanced)
    (back,) = runs.results(inputs)
    assert back is not None
    if bool((_gradient(inputs).double().sum(dim) == 0).all()):  # not where a gradient is expanded along the rows
        wrong = (back.double() - _gradient(inputs).double()).abs().amax()
        runs.require("a gradient that sums to 0 comes back", wrong, runs.limit * _RANGE)
    return "rows sum to 0, and gradients that sum to 0 come back"


def _layer_norm(runs: Runs) -> str:
    inputs = _inputs(runs)
    dims = runs.task.spec.reduced_dims(runs.task.key)
    gradient, x, _, rstd, weight, _ = inputs.tensors
    assert gradient is not None and x is not None and rstd is not None
    result, _, bias = runs.results(inputs)
    if result is not None:
        v = gradient.double() if weight is None else gradient.double() * weight.double()
        along = (v * result.double()).sum(dims, keepdim=True)
        # sum v z = rstd (sum v^2 - what a mean and a slope explain of it): nothing is left of rows of one or two elements.
        whole = (rstd.double() * v.square().sum(dims, keepdim=True)).clamp(min=1e-30)
        runs.require("results point where their gradients do", (-along / whole).amax(), 8 * runs.limit)
        spread = rstd.double() * (v - v.mean(dims, keepdim=True)).square().sum(dims, keepdim=True)
        varied = spread > whole / 64  # not of gradients that are one number expanded
        if _length(x, dims) >= 16 and bool(varied.any()):
            runs.require("results say something of their gradients", 1 - (along / spread)[varied].amax(), 0.75)
    if bias is not None:
        _set_gradient(inputs, torch.ones(gradient.shape, device=gradient.device))
        ones = runs.results(inputs)[2]
        assert ones is not None
        count = x.numel() // _length(x, dims)
        runs.require("the bias' gradient of ones is the number of rows", (ones.double() / count - 1).abs().amax(), runs.limit)
    return "results point where their gradients do, and the bias' gradient counts rows"


def _length(x: torch.Tensor, dims: tuple[int, ...]) -> int:
    length = 1
    for dim in dims:
        length *= x.shape[dim]
    return length
