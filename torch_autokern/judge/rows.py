"""Rows of an op: what may be cut into chunks without changing a result, and what may be permuted without changing the truth.

Cutting keeps float64 temporaries of a 268 MB key in cache. Permuting the reduced dimension changes only the order of a sum:
stock's errors over several orders are the yardstick (`accuracy.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torch_autokern.judge.functions import cut_of
from torch_autokern.ops.function import FunctionSpec
from torch_autokern.ops.independent import on_slices
from torch_autokern.ops.spec import OpSpec
from torch_autokern.store.key import KernelKey

Tensors = Sequence[torch.Tensor | None]
Axes = tuple[int, ...]
_BLOCKS_FROM = 1 << 18
_BLOCK = 64


@dataclass(frozen=True)
class RowAxis:
    """One dimension along which calls are independent: `size` slices, at dimension `inputs[i]` of tensor i (None: whole)."""

    size: int
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]

    def cut(self, tensors: Tensors, start: int, length: int) -> tuple[torch.Tensor | None, ...]:
        """Views of the tensor arguments."""
        return _narrow(tensors, self.inputs, start, length)

    def cut_outputs(self, outputs: Tensors, start: int, length: int) -> tuple[torch.Tensor | None, ...]:
        """Views of the results."""
        return _narrow(outputs, self.outputs, start, length)


def row_axis(spec: OpSpec, key: KernelKey) -> RowAxis:
    """The largest independent dimension of a key; size 1 where there is none."""
    nothing = RowAxis(1, (None,) * len(key.tensors), (None,) * len(key.outputs))
    if spec.uses_matmul_precision:
        return _product_axis(key)
    if isinstance(spec, FunctionSpec):
        found = cut_of(key)
        return nothing if found is None else RowAxis(found.size, found.inputs, found.outputs)
    first = key.tensors[0]
    reduced = spec.reduced_dims(key)
    free = [dim for dim in range(len(first.sizes)) if dim not in reduced] if first is not None else []
    if first is None or not free or spec.name == "native_layer_norm_backward":
        return nothing
    dim = max(free, key=lambda d: first.sizes[d])
    parameters = spec.parameters
    inputs = tuple(None if i in parameters or t is None else dim for i, t in enumerate(key.tensors))
    return RowAxis(first.sizes[dim], inputs, tuple(None if t is None else dim for t in key.outputs))


def on_rows(spec: OpSpec, key: KernelKey, length: int) -> tuple[OpSpec, KernelKey]:
    """What computes `length` slices of the row axis: of a function another graph, because it has sizes inside; of other ops the
    same."""
    found = cut_of(key) if isinstance(spec, FunctionSpec) else None
    if found is None or length == found.size:
        return spec, key
    assert isinstance(spec, FunctionSpec)
    return on_slices(spec, key, found, length)


def _product_axis(key: KernelKey) -> RowAxis:
    output = key.outputs[0]
    assert output is not None
    rank = len(output.sizes)
    batched = rank == 3
    dim = 0
    inputs: list[int | None] = []
    for index, layout in enumerate(key.tensors):
        is_addend = index < len(key.tensors) - 2
        is_right = index == len(key.tensors) - 1
        if layout is None or (is_right and not batched):
            inputs.append(None)
        elif is_addend:
            offset = rank - len(layout.sizes)
            inputs.append(0 if offset == 0 and layout.sizes[0] > 1 else None)
        else:
            inputs.append(dim)
    return RowAxis(output.sizes[0], tuple(inputs), (0,))


def _narrow(tensors: Tensors, dims: Sequence[int | None], start: int, length: int) -> tuple[torch.Tensor | None, ...]:
    pairs = zip(tensors, dims, strict=True)
    return tuple(t if t is None or dim is None else t.narrow(dim, start, length) for t, dim in pairs)


@dataclass(frozen=True)
class Permutable:
    """Which dimensions of each argument and result carry the reduced index (None: not at all)."""

    length: int
    inputs: tuple[Axes | None, ...]
    outputs: tuple[Axes | None, ...]


def summed_rows(spec: OpSpec, key: KernelKey) -> Permutable | None:
    """Where the index of rows lives that a backward sums over for the gradients of its parameters; None for other ops."""
    first = key.tensors[0]
    if spec.name != "native_layer_norm_backward" or first is None:
        return None
    axes = tuple(dim for dim in range(len(first.sizes)) if dim not in spec.reduced_dims(key))
    length = 1
    for axis in axes:
        length *= first.sizes[axis]
    return Permutable(length, (axes,) * 4 + (None, None), (axes, None, None)) if axes else None


def permutable(spec: OpSpec, key: KernelKey) -> Permutable:
    """Where the reduced index of a key lives."""
    if spec.uses_matmul_precision:
        left, right = key.tensors[-2:]
        assert left is not None and right is not None
        inputs: tuple[Axes | None, ...] = ((len(left.sizes) - 1,), (len(right.sizes) - 2,))
        return Permutable(left.sizes[-1], (None,) * (len(key.tensors) - 2) + inputs, (None,))
    first = key.tensors[0]
    assert first is not None
    axes = spec.reduced_dims(key)
    length = 1
    for axis in axes:
        length *= first.sizes[axis]
    own = tuple(range(len(axes)))
    if spec.name == "native_layer_norm":
        return Permutable(length, (axes, own, own), (axes, None, None))
    if spec.name == "native_layer_norm_backward":
        return Permutable(length, (axes, axes, None, None, own, own), (axes, own, own))
    return Permutable(length, (axes,) * len(key.tensors), (axes,))


@dataclass(frozen=True)
class Permutation:
    """An order of the reduced index. Long ones permute blocks of `block` elements: a random gather of millions of elements
    costs more than the op, and moving whole blocks changes the order of a sum just as well."""

    order: torch.Tensor
    block: int

    @staticmethod
    def draw(length: int, generator: torch.Generator) -> Permutation:
        """A random order of `length` elements, on the generator's device."""
        block = 1 if length < _BLOCKS_FROM or length % _BLOCK else _BLOCK
        return Permutation(torch.randperm(length // block, generator=generator, device=generator.device), block)

    def inverse(self) -> Permutation:
        """The order that takes this one back."""
        return Permutation(self.order.argsort(), self.block)

    def apply(self, tensor: torch.Tensor | None, axes: Axes | None) -> torch.Tensor | None:
        """Reorder adjacent dimensions `axes`, taken as one; the result has the strides that `tensor` has."""
        if tensor is None or axes is None:
            return tensor
        blocks = tensor.flatten(axes[0], axes[-1]).unflatten(axes[0], (len(self.order), self.block))
        moved: torch.Tensor = blocks.index_select(axes[0], self.order).reshape(tensor.shape)
        if moved.stride() == tensor.stride() or 0 in tensor.stride():
            return moved
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(moved)


def permuted_stock(spec: OpSpec, key: KernelKey, tensors: Tensors, order: Permutation) -> tuple[torch.Tensor | None, ...]:
    """Stock's results on permuted inputs, put back into the original order."""
    steps = [(permutable(spec, key), order)]
    rows = summed_rows(spec, key)
    if rows is not None:
        # The same draw, repeated to the rows' number: every permutation takes them in another order, and nothing is read back.
        repeated = order.order.repeat(-(-rows.length // len(order.order)))[: rows.length]
        steps.append((rows, Permutation(repeated.argsort(), 1)))
    moved: tuple[torch.Tensor | None, ...] = tuple(tensors)
    for where, by in steps:
        moved = tuple(by.apply(t, axes) for t, axes in zip(moved, where.inputs, strict=True))
    results: tuple[torch.Tensor | None, ...] = spec.stock(moved, key.scalars)
    for where, by in steps:
        back = by.inverse()
        results = tuple(back.apply(t, axes) for t, axes in zip(results, where.outputs, strict=True))
    return results
