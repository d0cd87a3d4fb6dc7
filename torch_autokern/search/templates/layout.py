"""Which loops a call needs: dimensions collapsed to the fewest (size, strides) pairs, and index arithmetic as C++ text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch_autokern.store.key import KernelKey, TensorKey


@dataclass(frozen=True)
class Loop:
    """One dimension of the iteration space: its size and, per tensor, the step in elements."""

    size: int
    strides: tuple[int, ...]


def collapse(loops: Iterable[Loop]) -> tuple[Loop, ...]:
    """Drop loops of one step, order by the last tensor's stride (outermost first), join neighbours that are one run.

    The last tensor is the output, so consecutive indices write consecutive addresses whatever the logical order was.
    """
    ordered = sorted((loop for loop in loops if loop.size != 1), key=lambda loop: -loop.strides[-1])
    merged: list[Loop] = []
    for loop in ordered:
        if merged and all(o == i * loop.size for o, i in zip(merged[-1].strides, loop.strides, strict=True)):
            merged[-1] = Loop(merged[-1].size * loop.size, loop.strides)
        else:
            merged.append(loop)
    return tuple(merged)


def loops_over(dims: Iterable[int], tensors: Sequence[TensorKey]) -> tuple[Loop, ...]:
    """Collapsed loops over `dims` of tensors that share their sizes."""
    return collapse(Loop(tensors[0].sizes[dim], tuple(t.strides[dim] for t in tensors)) for dim in dims)


def steps_in(loops: Sequence[Loop]) -> int:
    """Number of index combinations."""
    count = 1
    for loop in loops:
        count *= loop.size
    return count


def offset(loops: Sequence[Loop], tensor: int, index: str) -> str:
    """C++ expression (int64_t) of the element offset of step `index` in tensor number `tensor`."""
    terms = []
    inner = 1
    for position in range(len(loops) - 1, -1, -1):
        loop = loops[position]
        step = index if inner == 1 else f"{index} / {inner}"
        if position > 0:
            step = f"{step} % {loop.size}"
        if loop.strides[tensor]:
            terms.append(f"({step}) * INT64_C({loop.strides[tensor]})")
        inner *= loop.size
    return " + ".join(terms) or "INT64_C(0)"


def dense_tensors(key: KernelKey, dtypes: Sequence[str]) -> bool:
    """Whether every tensor has one of `dtypes`, aligned elements, at least one of them, and no negative stride."""
    bytes_of = {"float32": 4, "bfloat16": 2, "float16": 2}
    for tensor in (*key.tensors, *key.outputs):
        if tensor is None:
            continue
        if tensor.dtype not in dtypes or tensor.alignment_bytes < bytes_of[tensor.dtype]:
            return False
        if tensor.numel == 0 or min(tensor.strides, default=0) < 0:
            return False
    return True


def distinct_elements(tensor: TensorKey) -> bool:
    """Whether no two indices share an address (an output that expands or folds over itself cannot be written)."""
    reach = 0
    pairs = sorted((stride, size) for size, stride in zip(tensor.sizes, tensor.strides, strict=True) if size != 1)
    for stride, size in pairs:
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True
