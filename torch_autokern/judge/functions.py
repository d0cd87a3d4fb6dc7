"""What the judge asks of a whole function, of which it knows the graph and nothing else.

No dimension is known to be reduced, so every trial draws which dimension of each argument its rows run along; nothing can be
permuted, so stock's envelope is taken over neighbours instead: arguments whose elements are moved by one unit in the last
place, up, down or not at all, each compared with its own truth. Probes that change an argument apply where they change the
truth: leaving out the tail of a dimension is no nonsense for a function that never looks there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_autokern.judge.memory import bits
from torch_autokern.ops.function import FunctionSpec
from torch_autokern.ops.graph import Graph
from torch_autokern.ops.independent import Independent, independent
from torch_autokern.store.key import KernelKey

Tensors = Sequence[torch.Tensor | None]
Results = tuple[torch.Tensor | None, ...]
# What truth and scale of a function are computed of at once, in some ten float64 tensors of that size: 5 GB, or 40 GB on a GPU.
# Larger functions are cut along an independent dimension, where their graph shows one.
MOST_ELEMENTS = {"cpu": 1 << 26, "cuda": 1 << 29}
_SLICE_ELEMENTS = 1 << 24  # enough for one trial; larger slices only where there are no smaller ones
_CHANGED = 1e-9  # of the scale, in float64: far above its rounding, far below any limit


def too_large(key: KernelKey) -> str | None:
    """Why a function's key cannot be judged for its size, or None."""
    found = _cut_of(key)
    if not isinstance(found, str):
        return None
    most = MOST_ELEMENTS[key.device_type]
    return (
        f"a function of {_largest(key)} elements cannot be judged: its float64 truth is computed of {most} at a time, and the "
        f"judge finds no independent dimension to cut it along ({found})"
    )


def cut_of(key: KernelKey) -> Independent | None:
    """Along which dimension truth is computed slice by slice, None where it is computed whole."""
    found = _cut_of(key)
    return None if isinstance(found, str) else found


def _cut_of(key: KernelKey) -> Independent | str | None:
    most = MOST_ELEMENTS[key.device_type]
    if _largest(key) <= most:
        return None
    found = independent(key, min(most, _SLICE_ELEMENTS))
    return independent(key, most) if isinstance(found, str) else found


def _largest(key: KernelKey) -> int:
    return max(t.numel for t in (*key.tensors, *key.outputs) if t is not None)


def neighbours(tensors: Tensors, generator: torch.Generator) -> Results:
    """The same arguments, laid out alike, with every normal element moved by -1, 0 or 1 unit in the last place."""
    return tuple(t if t is None or not t.is_floating_point() else _neighbour(t, generator) for t in tensors)


def _neighbour(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    target, info = _distinct(moved), torch.finfo(tensor.dtype)
    target.copy_(_distinct(tensor))
    size = target.abs()
    steps = torch.randint(-1, 2, target.shape, generator=generator, device=tensor.device, dtype=bits(target).dtype)
    steps.mul_((size > info.tiny) & (size < info.max / 2))  # not zeros, denormals, the largest, NaN
    bits(target).add_(steps)
    return moved


def _distinct(tensor: torch.Tensor) -> torch.Tensor:
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())


def row_dims(sizes: Sequence[int], drawn: int) -> tuple[int, ...]:
    """The dimensions that a trial's rows run along, by a number that the trial drew: one of those that are longer than 1, or
    all but the first of them together."""
    long = [dim for dim, size in enumerate(sizes) if size > 1] or [len(sizes) - 1]
    choices: list[tuple[int, ...]] = [(dim,) for dim in long]
    if len(long) > 2:
        choices.append(tuple(range(long[1], len(sizes))))
    return choices[drawn % len(choices)]


def changed_arguments(spec: FunctionSpec, tensors: Tensors) -> dict[str, Tensors]:
    """Arguments that a right kernel gives another result for, by the name of the probe that reads them so."""
    made: dict[str, Tensors] = {}
    data = [i for i, t in enumerate(tensors) if t is not None and i not in spec.parameters and t.is_floating_point()]
    for index in data:
        tensor = tensors[index]
        assert tensor is not None
        for dim, size in enumerate(tensor.shape):
            if size > 1:
                cut = 16 if size >= 64 else 1
                short = tensor.clone()
                short.narrow(dim, size - cut, cut).zero_()
                made[f"dropped tail of argument {index}, dimension {dim}"] = _replaced(tensors, index, short)
        if tensor.dim() >= 2:
            rows, columns = tensor.shape[-2:]
            turned = tensor.reshape(*tensor.shape[:-2], columns, rows).transpose(-1, -2).contiguous()
            made[f"transposed read of argument {index}"] = _replaced(tensors, index, turned)
    if data:
        first = tensors[data[0]]
        assert first is not None
        made["previous output"] = _replaced(tensors, data[0], first.neg())
    return made


def truth_changes(spec: FunctionSpec, scalars: dict[str, Any], tensors: Tensors, changed: Tensors) -> bool:
    """Whether the function's true results for `changed` are others than for `tensors`."""
    truth, other = spec.reference(tensors, scalars), spec.reference(changed, scalars)
    for scale, one, two in zip(spec.scale(truth, tensors, scalars), truth, other, strict=True):
        same_kind = torch.isfinite(one) == torch.isfinite(two)
        difference = torch.nan_to_num((one - two).abs(), 0.0, 0.0, 0.0)
        if bool((difference > _CHANGED * scale).any()) or not bool(same_kind.all()):
            return True
    return False


def _replaced(tensors: Tensors, index: int, value: torch.Tensor) -> Tensors:
    return [value if i == index else t for i, t in enumerate(tensors)]


def served_call(spec: FunctionSpec, key: KernelKey) -> Callable[..., Any]:
    """A decorated function of this graph as a program calls it, with all that the decoration costs: what timing calls."""
    from torch_autokern.runtime.decorated import fixed_function

    graph: Graph | None = spec.graph
    assert graph is not None
    return fixed_function(graph, spec.name.split(":")[1])
