"""Vacuity probes: nonsense that a meaningful task must refuse, tried on the very inputs that candidates are judged on.

On (4096, 65536) normal inputs an all-zero softmax passes a tolerance of 1e-2 everywhere, and a copy of the input passes for
LayerNorm on (16, 64, 256, 256). Where a probe passes every family, the task proves nothing and accepts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torch_autokern.judge.accuracy import Task
from torch_autokern.judge.memory import bits, same_bits
from torch_autokern.judge.rows import permutable

Tensors = Sequence[torch.Tensor | None]
Results = tuple[torch.Tensor | None, ...]
PROBE_ELEMENTS = 1 << 20
_KEPT_BITS = {torch.float32: ~0x1FFF, torch.bfloat16: ~0x7, torch.float16: ~0x7}


def probes(task: Task, tensors: Tensors, stock: Tensors) -> dict[str, Results]:
    """Results of every probe that applies: one output replaced by nonsense, the others as stock gave them; and each further
    output as zeros. Of the outputs that a backward's mask leaves, the first is the one. A probe that happens to equal stock bit
    by bit (a transposed read of a single column) does not apply."""
    place = next(index for index, output in enumerate(stock) if output is not None)
    first = stock[place]
    assert first is not None
    made: dict[str, torch.Tensor | None] = {
        "zeros": torch.zeros_like(first),
        "constant": torch.full_like(first, float(torch.nan_to_num(first.double(), 0.0, 0.0, 0.0).mean())),
    }
    for name, probe in _PROBES.items():
        result = probe(task, tensors, first, place)
        if result is not None and not same_bits(result.contiguous(), first.contiguous()):
            made[name] = result
    found: dict[str, Results] = {name: (*stock[:place], value, *stock[place + 1 :]) for name, value in made.items()}
    for index, other in enumerate(stock):
        if other is not None and index > place:
            found[f"zeros in output {index}"] = (*stock[:index], torch.zeros_like(other), *stock[index + 1 :])
    return found


def _copy_of_input(task: Task, tensors: Tensors, first: torch.Tensor, place: int) -> torch.Tensor | None:
    same = [t for t in tensors if t is not None and t.shape == first.shape]
    return same[0].to(first.dtype) if same else None


def _fixed_statistics(task: Task, tensors: Tensors, first: torch.Tensor, place: int) -> torch.Tensor | None:
    x = tensors[0]
    assert x is not None
    count = permutable(task.spec, task.key).length
    expected_sum = count * 1.6487212707001282  # E[exp(normal)] = exp(1/2)
    if task.spec.name == "_softmax":
        return (x.double().exp() / expected_sum).to(first.dtype)
    if task.spec.name == "_log_softmax":
        return (x.double() - torch.tensor(expected_sum).log()).to(first.dtype)
    if task.spec.name == "native_layer_norm":
        return _affine(x.double(), tensors[1], tensors[2]).to(first.dtype)
    if task.spec.name in ("_softmax_backward_data", "native_layer_norm_backward") and place == 0:
        return (x.double() * _direct(task, tensors)).to(first.dtype)  # sums taken for what they are on average
    return None


def _dropped_tail(task: Task, tensors: Tensors, first: torch.Tensor, place: int) -> torch.Tensor | None:
    """The last 16 elements (or one, of short rows) of the reduced dimension take no part in the reduction."""
    where = permutable(task.spec, task.key)
    kept = where.length - (16 if where.length >= 64 else 1)
    if kept < 1:
        return None
    if task.spec.uses_matmul_precision:
        parts = [t if t is None or a is None else t.narrow(a[0], 0, kept) for t, a in zip(tensors, where.inputs, strict=True)]
        return task.spec.stock(parts, task.key.scalars)[place]
    if task.spec.name.endswith(("backward", "backward_data")):
        return _dropped_from_backward(task, tensors, first, kept, place)
    x = tensors[0]
    assert x is not None
    axes = task.spec.reduced_dims(task.key)
    wide = x.double()
    head = wide.flatten(axes[0], axes[-1]).narrow(axes[0], 0, kept)
    shape = [1 if dim in axes else size for dim, size in enumerate(x.shape)]
    if task.spec.name in ("_softmax", "_log_softmax"):
        log_result = wide - head.logsumexp(axes[0]).reshape(shape)
        return (log_result.exp() if task.spec.name == "_softmax" else log_result).to(first.dtype)
    if task.spec.name == "native_layer_norm":
        variance, mean = torch.var_mean(head, axes[0], correction=0)
        rstd = (variance + float(task.key.scalars["eps"])).rsqrt().reshape(shape)  # type: ignore[arg-type]
        return _affine((wide - mean.reshape(shape)) * rstd, tensors[1], tensors[2]).to(first.dtype)
    return None


def _direct(task: Task, tensors: Tensors) -> torch.Tensor | float:
    """What a backward's gradient is multiplied with, sums apart."""
    if task.spec.name != "native_layer_norm_backward":
        return 1.0 if tensors[1] is None or task.spec.name == "_log_softmax_backward_data" else tensors[1].double()
    rstd, weight = tensors[3], tensors[4]
    assert rstd is not None
    return rstd.double() if weight is None else rstd.double() * weight.double()


def _dropped_from_backward(task: Task, tensors: Tensors, first: torch.Tensor, kept: int, place: int) -> torch.Tensor | None:
    """Gradients from `kept` on take no part in the sums of their row; in sums over rows the last row takes none."""
    gradient = tensors[0]
    assert gradient is not None
    axes = task.spec.reduced_dims(task.key)
    if place > 0:
        outer = [dim for dim in range(gradient.dim()) if dim not in axes and gradient.shape[dim] > 1]
        if not outer:
            return None
        seen = gradient.clone()
        seen.select(outer[0], gradient.shape[outer[0]] - 1).zero_()
        return task.spec.stock((seen, *tensors[1:]), task.key.scalars)[place]
    tail = torch.arange(permutable(task.spec, task.key).length, device=gradient.device) >= kept
    seen = gradient.masked_fill(tail.reshape([size if dim in axes else 1 for dim, size in enumerate(gradient.shape)]), 0.0)
    sums = task.spec.reference((seen, *tensors[1:]), task.key.scalars)[0]
    return (sums + (gradient.double() - seen.double()) * _direct(task, tensors)).to(first.dtype)


def _lower_precision(task: Task, tensors: Tensors, first: torch.Tensor, place: int) -> torch.Tensor | None:
    """Operands cut to the next lower precision: tf32's 10 mantissa bits for float32, three bits fewer below."""
    cut = [t if t is None or i in task.spec.parameters else _cut(t) for i, t in enumerate(tensors)]
    return task.spec.stock(cut, task.key.scalars)[place]


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    kept = tensor.clone()
    bits(kept).bitwise_and_(_KEPT_BITS[tensor.dtype])
    return kept


def _previous_output(task: Task, tensors: Tensors, first: torch.Tensor, place: int) -> torch.Tensor | None:
    """What a call on other inputs returned: the first data tensor negated (all of them would leave a product as it is)."""
    data = next(i for i, t in enumerate(tensors) if t is not None and i not in task.spec.parameters)
    other = [t.neg() if i == data and t is not None else t for i, t in enumerate(tensors)]
    return task.spec.stock(other, task.key.scalars)[place]


def _transposed_read(task: Task, tensors: Tensors, first: torch.Tensor, place: int) -> torch.Tensor | None:
    def turned(tensor: torch.Tensor) -> torch.Tensor:
        rows, columns = tensor.shape[-2:]
        return tensor.reshape(*tensor.shape[:-2], columns, rows).transpose(-1, -2).contiguous()

    read = [t if t is None or i in task.spec.parameters or t.dim() < 2 else turned(t) for i, t in enumerate(tensors)]
    return task.spec.stock(read, task.key.scalars)[place]


def _affine(normalised: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    scaled = normalised if weight is None else normalised * weight.double()
    return scaled if bias is None else scaled + bias.double()


_PROBES: dict[str, Callable[[Task, Tensors, torch.Tensor, int], torch.Tensor | None]] = {
    "copy of the input": _copy_of_input,
    "fixed statistics": _fixed_statistics,
    "dropped tail": _dropped_tail,
    "lower precision": _lower_precision,
    "previous output": _previous_output,
    "transposed read": _transposed_read,
}
