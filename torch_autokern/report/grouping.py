"""Keys that differ in one length only (another batch, another sequence), seen as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from torch_autokern.store.key import KernelKey, TensorKey
from torch_autokern.store.workload import Workload, WorkloadEntry


class KeyGroup(msgspec.Struct, frozen=True):
    """Keys alike but for one length. `lengths` are the values of that length, ascending (one where the group has one key);
    `entries` by falling time, the first stands for all."""

    entries: tuple[WorkloadEntry, ...]
    lengths: tuple[int, ...]

    @property
    def calls(self) -> int:
        """Calls of all keys."""
        return sum(entry.calls for entry in self.entries)

    @property
    def time_us(self) -> float:
        """Stock's time in all keys, in microseconds."""
        return sum(entry.stock_time_us for entry in self.entries)


def group_keys(workload: Workload) -> tuple[KeyGroup, ...]:
    """Groups by falling time. A key joins the first group whose leading key it differs from in one length."""
    groups: list[list[WorkloadEntry]] = []
    lengths: list[set[int]] = []
    for entry in sorted(workload.entries, key=lambda e: (-e.stock_time_us, e.key.digest)):
        for members, seen in zip(groups, lengths, strict=True):
            differing = differing_length(members[0].key, entry.key)
            if differing is not None:
                members.append(entry)
                seen.update(differing)
                break
        else:
            groups.append([entry])
            lengths.append(set())
    made = [KeyGroup(tuple(m), tuple(sorted(seen))) for m, seen in zip(groups, lengths, strict=True)]
    return tuple(sorted(made, key=lambda group: -group.time_us))


def differing_length(one: KernelKey, other: KernelKey) -> tuple[int, int] | None:
    """(length in one, length in other) where the keys are alike but for a single length, wherever it stands; else None.

    Strides follow sizes, so only their order must be the same. Several lengths that change together, such as the tokens of a
    batch and of a sequence in one key, are several.
    """
    if _form(one) != _form(other):
        return None
    pairs = {(a, b) for a, b in zip(_lengths(one), _lengths(other), strict=True) if a != b}
    return pairs.pop() if len(pairs) == 1 else None


def _form(key: KernelKey) -> tuple[object, ...]:
    """All of a key but its lengths."""
    scalars = tuple(sorted((name, _without_length(name, value)) for name, value in key.scalars.items()))
    flags = (key.flush_denormal, key.mkldnn, key.matmul_precision)
    return key.op, key.device_type, scalars, flags, tuple(_tensor_form(tensor) for tensor in (*key.tensors, *key.outputs))


def _without_length(name: str, value: object) -> str:
    return str(len(value)) if name == "normalized_shape" and isinstance(value, tuple) else repr(value)


def _tensor_form(tensor: TensorKey | None) -> tuple[object, ...] | None:
    if tensor is None:
        return None
    order = tuple(sorted(range(len(tensor.sizes)), key=lambda dim: (tensor.strides[dim], -dim)))
    expanded = tuple(stride == 0 for stride in tensor.strides)
    return tensor.dtype, tensor.alignment_bytes, len(tensor.sizes), order, expanded


def _lengths(key: KernelKey) -> Iterator[int]:
    for tensor in (*key.tensors, *key.outputs):
        if tensor is not None:
            yield from tensor.sizes


def shown_lengths(lengths: Sequence[int]) -> str:
    """ "31 to 64 (12 lengths)", or "" for a group of one key."""
    return f"{lengths[0]} to {lengths[-1]} ({len(lengths)} lengths)" if lengths else ""
