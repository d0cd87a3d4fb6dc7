"""Input sets: every tensor of a key, filled by a family, in memory with the key's exact layout (`memory.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torch_autokern.errors import InvalidInputError
from torch_autokern.judge.device import draw, generator_on
from torch_autokern.judge.families import FILL, Draw, Family, fill_parameter
from torch_autokern.judge.memory import INPUT_GUARD, Placement, Region, allocate, same_bits
from torch_autokern.judge.remembered import fingerprints
from torch_autokern.judge.saved import SAVED, fill_saved
from torch_autokern.ops.spec import OpSpec
from torch_autokern.store.key import KernelKey, TensorKey

_SUPPORTED = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class InputSet:
    """The tensor arguments of one call, None for absent ones, and the memory they live in."""

    regions: tuple[Region | None, ...]

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Arguments in schema order."""
        return tuple(None if region is None else region.tensor for region in self.regions)

    def same_as(self, saved: InputSet) -> bool:
        """Whether every bit of the tensors is what `saved` holds, and the guard zones and gaps around them are whole."""
        pairs = zip(self.regions, saved.regions, strict=True)
        return all(
            mine is None or theirs is None or (same_bits(mine.tensor, theirs.tensor) and mine.guards_intact()
                                               and mine.same_gaps(theirs))
            for mine, theirs in pairs
        )  # fmt: skip

    def fingerprints(self) -> tuple[int, ...]:
        """A number for everything that the set holds, guard zones and gaps included; see `remembered.fingerprints`."""
        return fingerprints([tuple(None if region is None else region.whole for region in self.regions)])[0]

    def copy_from(self, other: InputSet) -> None:
        """Take over the values of another set of the same key."""
        for mine, theirs in zip(self.regions, other.regions, strict=True):
            if mine is not None and theirs is not None:
                _writable(mine.tensor).copy_(_writable(theirs.tensor))


def families_for(spec: OpSpec, key: KernelKey) -> tuple[Family, ...]:
    """Families that mean something for this op; integers only where the op is a sum of products."""
    return tuple(family for family in Family if family is not Family.INTEGERS or spec.uses_matmul_precision)


def check_supported(key: KernelKey) -> str | None:
    """Why the judge cannot judge this key, or None. float64 has no wider truth here."""
    dtypes = {t.dtype for t in (*key.tensors, *key.outputs) if t is not None}
    strange = sorted(dtypes - set(_SUPPORTED))
    if strange:
        return f"dtype {', '.join(strange)} cannot be judged against float64; supported: {', '.join(_SUPPORTED)}"
    if any(0 in t.sizes for t in (*key.tensors, *key.outputs) if t is not None):
        return "a tensor without elements is served by stock, no kernel is needed"
    if key.device_type == "cuda" and not torch.cuda.is_available():
        return "a cuda key needs an NVIDIA GPU, and torch sees none here"
    return None


def make_inputs(
    spec: OpSpec, key: KernelKey, family: Family, generator: torch.Generator, placement: Placement = "heap"
) -> InputSet:
    """Draw one trial, on the generator's device.

    The result has the key's strides, alignment (no better in about half of the draws) and dtypes, with NaN in every gap and
    guard zone. Parameters are random; what a forward saves for its backward (a softmax's output, mean and rstd) is real
    (`saved.py`).
    """
    inputs = empty_inputs(key, placement, generator)
    shared_seed = draw(0, 2**62, generator)
    for index, region in enumerate(inputs.regions):
        if region is None or index in SAVED.get(spec.name, ()):
            continue
        target = _writable(region.tensor)
        direct = target.dtype == torch.float32 and target.is_contiguous()
        work = target if direct else torch.empty(target.shape, dtype=torch.float32, device=target.device)
        if index in spec.parameters:
            fill_parameter(work, generator)
        else:
            _fill(spec, key, family, index, work, generator, shared_seed)
        if not direct:
            target.copy_(work)
    fill_saved(spec, key, family, inputs.tensors, generator)
    return inputs


def empty_inputs(key: KernelKey, placement: Placement, generator: torch.Generator) -> InputSet:
    """Memory for one call, to be filled by `copy_from`; gaps and guard zones are NaN."""
    return InputSet(tuple(None if t is None else allocate(t, placement, INPUT_GUARD, generator) for t in key.tensors))


def reduced_of(spec: OpSpec, key: KernelKey, index: int) -> tuple[int, ...]:
    """Reduced dimensions of data tensor `index`: those of the op, and the last but one of a product's right operand."""
    layout = key.tensors[index]
    if layout is None:
        raise InvalidInputError(f"{spec.name}: tensor {index} is absent in this key")
    if spec.uses_matmul_precision and index == len(key.tensors) - 1:
        return (len(layout.sizes) - 2,)
    return spec.reduced_dims(key)


def _fill(
    spec: OpSpec, key: KernelKey, family: Family, index: int, work: torch.Tensor, generator: torch.Generator, shared_seed: int
) -> None:
    layout = key.tensors[index]
    assert layout is not None
    parameters = Draw(
        out=work,
        reduced=reduced_of(spec, key, index),
        dtype=getattr(torch, layout.dtype),
        generator=generator,
        shared=generator_on(generator.device, shared_seed),
        second=spec.uses_matmul_precision and index == len(key.tensors) - 1,
        product=spec.uses_matmul_precision,
    )
    FILL[family](parameters)


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with stride-0 dimensions cut to size 1: every element once."""
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())


def layout_bytes(layout: TensorKey) -> int:
    """Bytes of a tensor's distinct elements."""
    count = getattr(torch, layout.dtype).itemsize
    for size, stride in zip(layout.sizes, layout.strides, strict=True):
        count *= size if stride else 1
    return int(count)
