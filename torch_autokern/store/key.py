"""What a kernel is proved for (`KernelKey`) and where it runs (`Target`): plain typed values, equal by content.

Values of this room cannot be part of a cycle, so the garbage collector is spared them (``gc=False``): a table of a thousand
records would be walked again and again while it is read.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

Scalar = bool | int | float | str | tuple[int, ...] | None
DeviceType = Literal["cpu", "cuda"]


class TensorKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Layout of one tensor.

    `dtype` is torch's name without the prefix ("float32"); `sizes` and `strides` count elements. `alignment_bytes` is what
    the address promises: on a CPU the element size (or 1 when even that does not hold), on a GPU the largest power of two
    up to 16 that divides it. A kernel may rely on no more than this.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    alignment_bytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.sizes:
            count *= size
        return count


class KernelKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Exactly one call, as far as a kernel can tell.

    `op` is the ATen base name ("_softmax"); the functional and the `out` form share it. `tensors` follows the schema order of
    tensor arguments, None for an absent optional one. `scalars` holds every other argument by schema name (`dim` wrapped to
    be non-negative, dtypes by name). `outputs` is the layout of the results: what stock returns, and what a given `out` must
    have. The last three are process flags that change results.
    """

    op: str
    device_type: DeviceType
    tensors: tuple[TensorKey | None, ...]
    scalars: dict[str, Scalar]
    outputs: tuple[TensorKey | None, ...]
    flush_denormal: bool = False
    mkldnn: bool = True
    matmul_precision: str = "ieee"

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, lower-case hex: the name of this key's folder."""
        return hashlib.sha256(canonical_json(self)).hexdigest()


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Where a kernel runs.

    `name`: the device's name as its driver gives it, or the CPU's model family ("AuthenticAMD-25-17"). `arch`: capability
    with suffix ("sm_90a"), or the CPU's ISA level ("x86-64-v4", "x86-64-v3", "aarch64"). `threads`: intra-op threads on a
    CPU, 0 on a GPU. A record is *right* where `device_type` and `arch` fit and *armed* only where all four do.
    """

    device_type: DeviceType
    name: str
    arch: str
    threads: int


def canonical_json(value: object) -> bytes:
    """JSON with sorted keys and no white space: equal values give equal bytes."""
    return msgspec.json.encode(value, order="sorted")
