"""Properties that nonsense cannot satisfy, whatever the tolerance: no reference takes part, only the op's own algebra.

softmax: rows sum to 1, keep the order of their input, and do not change when a constant is added to the row. log_softmax: the
same of its exponentials. LayerNorm: rows have mean 0 and variance 1 before the affine. Products: twice the left operand, and
addend, is twice the result, and the results of two left operands add up to that of their sum. Backward ops: `gradients.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_autokern.judge.accuracy import Task, unit_roundoff
from torch_autokern.judge.device import device_of, generator_on
from torch_autokern.judge.families import Family
from torch_autokern.judge.gradients import check_backward
from torch_autokern.judge.inputs import InputSet, make_inputs
from torch_autokern.judge.memory import POISONS
from torch_autokern.judge.outcome import Reason
from torch_autokern.judge.remembered import Results
from torch_autokern.judge.rows import RowAxis, row_axis
from torch_autokern.judge.verify import CandidateCode, Notify, PoisonedRuns, own_work_s

# Every property is a sum or difference of a few elements, each good to the limit of a single one.
_FACTOR = 8.0
_LOOSE = 2.0**-5  # class tolerance: 3 % and the stated rtol, however wide the stated atol
_ELEMENTS = 1 << 20  # larger results are looked at on their first rows
_GRID, _RANGE, _SHIFT = 8.0, 4.0, 8.0  # multiples of 1/8 below 12: exact in every dtype, before the shift and after it
_APART = 1.0


class PropertyChecks:
    """The properties of one candidate's op."""

    def __init__(self, task: Task, code: CandidateCode, seed: int, notify: Notify) -> None:
        self.task = task
        self.generator = generator_on(device_of(task.key), seed)
        self._runner = PoisonedRuns(task, code, Family.NORMAL, seed, self.generator, notify, torch.get_num_threads())
        self._notify = notify
        output = next(t for t in task.key.outputs if t is not None)
        info = torch.finfo(getattr(torch, output.dtype))
        floor = max(info.eps, 4 * unit_roundoff(output.dtype))
        self._tiny = info.tiny
        self.limit = _LOOSE + task.accuracy.rtol if task.accuracy.kind == "tolerance" else _FACTOR * floor

    def run(self) -> dict[str, str]:
        """Check what the op has.

        Raises:
            RefusedError: a property does not hold.
        """
        checks: dict[str, Callable[[], str]] = {
            "_softmax": self._softmax,
            "_log_softmax": self._softmax,
            "native_layer_norm": self._layer_norm,
            "_softmax_backward_data": lambda: check_backward(self),
            "_log_softmax_backward_data": lambda: check_backward(self),
            "native_layer_norm_backward": lambda: check_backward(self),
        }
        check = self._product if self.task.spec.uses_matmul_precision else checks.get(self.task.spec.name)
        return {"properties": "none known of this op" if check is None else check()}

    def _softmax(self) -> str:
        dim = int(self.task.key.scalars["dim"])  # type: ignore[arg-type]
        inputs = make_inputs(self.task.spec, self.task.key, Family.NORMAL, self.generator)
        x = inputs.tensors[0]
        assert x is not None
        drawn = (
            torch.empty(x.shape, device=x.device)
            .uniform_(-_RANGE, _RANGE, generator=self.generator)
            .mul_(_GRID)
            .round_()
            .div_(_GRID)
        )
        _distinct(x).copy_(_distinct(drawn))
        before = self._probabilities(inputs)
        _distinct(x).add_(_SHIFT)
        after = self._probabilities(inputs)
        rows = self._cut(drawn)
        unit = before.clamp(min=self._tiny)  # float16 flushes probabilities of long rows
        allowed = max(self.limit, 2 * self._stock_off_by(inputs, dim))
        self.require("rows sum to 1", (before.sum(dim) - 1).abs().amax(), allowed)
        self.require("adding a constant to a row changes nothing", ((after - before).abs() / unit).amax(), 2 * self.limit)
        ordered, places = rows.sort(dim)
        result = before.gather(dim, places)
        step = result.diff(dim=dim)
        slack = 2 * self.limit * result.narrow(dim, 0, step.shape[dim]).clamp(min=self._tiny)
        falls = (step + slack).clamp(max=0).abs()
        self.require("results keep the order of their inputs", falls.amax() if falls.numel() else falls.sum(), 0.0)
        last = ordered.shape[dim] - 1
        apart = (ordered.select(dim, last) - ordered.select(dim, 0)) > _APART
        equal = (result.select(dim, last) <= result.select(dim, 0)) & apart
        self.require("inputs that differ by 1 and more have other results", equal.double().amax(), 0.0)
        return "passed: rows sum to 1, keep their order, and do not change with a constant added"

    def _probabilities(self, inputs: InputSet) -> torch.Tensor:
        return self._exp(self._first(inputs))

    def _stock_off_by(self, inputs: InputSet, dim: int) -> float:
        """How far stock's own rows are from 1: long rows of float16 are a per cent off."""
        stock = self._exp(self.task.spec.stock(inputs.tensors, self.task.key.scalars)[0])
        return float((stock.sum(dim) - 1).abs().amax())

    def _exp(self, result: torch.Tensor) -> torch.Tensor:
        rows = self._cut(result)
        return rows.exp() if self.task.spec.name == "_log_softmax" else rows

    def _layer_norm(self) -> str:
        inputs = make_inputs(self.task.spec, self.task.key, Family.NORMAL, self.generator)
        x, weight, bias = inputs.tensors
        assert x is not None
        _distinct(x).mul_(3).add_(5)  # rows that are not normal already
        y = self._cut(self._first(inputs))
        if bias is not None:
            y = y - bias.double()
        if weight is not None:
            y = y / weight.double()
        dims = self.task.spec.reduced_dims(self.task.key)
        spread = self._cut(x).var(dims, correction=0)
        wanted = spread / (spread + float(self.task.key.scalars["eps"]))  # type: ignore[arg-type]
        # An error of y counts (|w| + |b|) / |w| times here, at most 9: parameters are drawn from 0.25 to 2.
        self.require("rows have mean 0 before the affine", y.mean(dims).abs().amax(), 9 * self.limit)
        self.require(
            "rows have variance 1 before the affine", (y.var(dims, correction=0) - wanted).abs().amax(), 18 * self.limit
        )
        return "passed: rows have mean 0 and variance 1 before the affine"

    def _product(self) -> str:
        """Small integers, so that every sum is exact."""
        spec, key = self.task.spec, self.task.key
        one, other = (make_inputs(spec, key, Family.INTEGERS, self.generator) for _ in range(2))
        data = list(range(len(key.tensors) - 1))  # the addend, where there is one, and the left operand
        right, same = one.tensors[-1], other.tensors[-1]
        assert right is not None and same is not None
        same.copy_(right)
        scale = self._scale(one).add_(self._scale(other))
        first, second = self._cut(self._first(one)), self._cut(self._first(other))
        for index in data:
            _add(one.tensors[index], other.tensors[index])
        both = self._cut(self._first(one))
        tiny = torch.finfo(torch.float32).tiny
        wrong = ((both - first - second).abs() / scale.clamp(min=tiny)).amax()
        self.require("results of two left operands add up", wrong, self.limit)
        for index in data:
            _double(one.tensors[index])
        twice = self._cut(self._first(one))
        wrong = ((twice - 2 * both).abs() / scale.clamp(min=tiny)).amax()
        self.require("twice the left operand is twice the result", wrong, self.limit)
        return "passed: linear in its operands"

    def results(self, inputs: InputSet) -> Results:
        """All results of one run."""
        results: Results = self._runner.once(inputs, "heap", POISONS[1])
        self._notify("reference", own_work_s(self.task))
        return results

    def _first(self, inputs: InputSet) -> torch.Tensor:
        first = self.results(inputs)[0]
        assert first is not None
        return first

    def _scale(self, inputs: InputSet) -> torch.Tensor:
        """The natural scale of the first rows: that of all would be several times the result, as float64."""
        spec, scalars, axis = self.task.spec, self.task.key.scalars, row_axis(self.task.spec, self.task.key)
        output = self.task.key.outputs[0]
        assert output is not None
        part = axis.cut(inputs.tensors, 0, self._length(axis, output.numel))
        return spec.scale(spec.reference(part, scalars), part, scalars)[0]

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """The first rows, as float64."""
        axis = row_axis(self.task.spec, self.task.key)
        dim = axis.outputs[0]
        return tensor.double() if dim is None else tensor.narrow(dim, 0, self._length(axis, tensor.numel())).double()

    def _length(self, axis: RowAxis, elements: int) -> int:
        return max(1, min(axis.size, _ELEMENTS * axis.size // max(elements, 1)))

    def require(self, what: str, seen: torch.Tensor, limit: float) -> None:
        """Refuse where `seen` is above `limit`, or NaN.

        Raises:
            RefusedError: it is.
        """
        if float(seen) <= limit:  # NaN is not
            return
        raise self._runner.refused(Reason.PROPERTY_BROKEN, f"{what}: off by {float(seen):.3g}, allowed {limit:.3g}.")


def _add(left: torch.Tensor | None, right: torch.Tensor | None) -> None:
    if left is not None and right is not None:
        _distinct(left).add_(_distinct(right))


def _double(tensor: torch.Tensor | None) -> None:
    if tensor is not None:
        _distinct(tensor).mul_(2)


def _distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Every element once: dimensions of stride 0 cut to size 1."""
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())
