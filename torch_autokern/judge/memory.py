"""Memory that tells on a candidate: tensors with a key's exact layout inside guard zones, or against a page that traps.

A `Region` holds one tensor. Guard zones and the gaps between strides hold a pattern; afterwards they must still hold it.
In `page_end` and `page_start` placements the tensor ends (starts) at a page the process may not touch, so that one byte read
or written beyond it ends the process; masked-off vector lanes do not. GPU memory has guard zones only, wider ones.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Literal

import torch

from torch_autokern.errors import JudgeError
from torch_autokern.judge.device import draw
from torch_autokern.store.key import TensorKey

Placement = Literal["heap", "aligned", "page_end", "page_start"]
GUARD_BYTES = 4096
DEVICE_GUARD_BYTES = 64 << 10
INPUT_GUARD = 0xFF  # NaN in every floating dtype: a value that leaks in is seen
OUTPUT_GUARD = 0xA6
POISONS = (0x7F, 0xC1)  # 3.4e38 and -24.2 in float32
WORKSPACE_POISON = 0x03  # makes another pattern of each, 5.2e36 and -48.7, so that one kind of memory does not pass for another
_M_PERTURB = -6
_PROT_NONE = 0
_COMPARED_AT_ONCE = 64 << 20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Region:
    """One tensor and the bytes around it. `whole` covers everything the process may touch."""

    tensor: torch.Tensor
    whole: torch.Tensor
    start: int
    stop: int
    guard: int
    _owner: object

    def guards_intact(self) -> bool:
        """Whether the zones before and after the tensor hold their pattern."""
        zones = (self.whole[: self.start], self.whole[self.stop :])
        return all(bool((zone == self.guard).all()) for zone in zones if zone.numel())

    def poison(self, byte: int) -> None:
        """Fill the tensor's span, gaps included."""
        self.whole[self.start : self.stop].fill_(byte)

    def same_gaps(self, other: Region) -> bool:
        """Whether the whole span, gaps included, is bit by bit that of another region with the same layout."""
        if is_dense(self.tensor):
            return True
        return torch.equal(self.whole[self.start : self.stop], other.whole[other.start : other.stop])

    def gaps_hold(self, byte: int) -> bool:
        """Whether bytes between strided elements still hold `byte`; destroys the tensor's values."""
        if is_dense(self.tensor):
            return True
        bits(self.tensor).fill_(int.from_bytes(bytes([byte]) * self.tensor.element_size(), "little", signed=True))
        return bool((self.whole[self.start : self.stop] == byte).all())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width, so that comparison is bitwise and NaN equals itself."""
    kind = _BITS[tensor.element_size()]
    if kind == torch.uint8 and tensor.dtype != torch.bool:
        return tensor.view(torch.uint8)
    return tensor.view(kind)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bitwise equality of two tensors of one dtype and shape; large ones piece by piece, so that the mask stays small."""
    one, two = bits(left), bits(right)
    if one.numel() <= _COMPARED_AT_ONCE or not (one.is_contiguous() and two.is_contiguous()):
        return torch.equal(one, two)
    pieces = zip(one.view(-1).split(_COMPARED_AT_ONCE), two.view(-1).split(_COMPARED_AT_ONCE), strict=True)
    return all(torch.equal(a, b) for a, b in pieces)


def first_place(mask: torch.Tensor) -> tuple[int, ...]:
    """Where the first true element of a mask is that has one. Looked up piece by piece: a list of all would be larger than the
    tensor."""
    parts = enumerate(mask.reshape(-1).split(_COMPARED_AT_ONCE))
    flat = next(number * _COMPARED_AT_ONCE + int(part.nonzero()[0]) for number, part in parts if bool(part.any()))
    position: list[int] = []
    for size in reversed(mask.shape):
        flat, place = divmod(flat, size)
        position.insert(0, place)
    return tuple(position)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their span without gaps or overlaps."""
    return span_elements(tuple(tensor.shape), tensor.stride()) == tensor.numel() and 0 not in tensor.stride()


def span_elements(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last one touched."""
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def allocate(layout: TensorKey, placement: Placement, guard: int, generator: torch.Generator) -> Region:
    """A region with the sizes, strides and alignment of `layout`, on the `heap` no better aligned in about half of the draws.

    It is on the generator's device. `aligned` is for timing: on a CPU it starts at 64 bytes, as torch's allocator does; on a
    GPU, where the alignment up to 16 bytes is part of the key, it is aligned exactly so and no better.
    Guards and gaps hold `guard`; the tensor's own values are whatever was there.
    """
    dtype: torch.dtype = getattr(torch, layout.dtype)
    size = span_elements(layout.sizes, layout.strides) * dtype.itemsize
    step = layout.alignment_bytes
    device = generator.device
    if placement in ("heap", "aligned") or device.type == "cuda":
        zone = GUARD_BYTES if device.type == "cpu" else DEVICE_GUARD_BYTES
        whole: torch.Tensor = torch.empty(size + 2 * zone + 128, dtype=torch.uint8, device=device)
        start = zone + -(whole.data_ptr() + zone) % 64
        lanes = max(1, 64 // step)
        lane = draw(0, 2 * lanes, generator)
        if placement == "aligned":
            start += step if device.type == "cuda" and step < 16 else 0
        elif lane >= lanes:
            start += lane % lanes * step
        owner: object = whole
    else:
        whole, owner = _trapped(size + GUARD_BYTES, placement)
        start = whole.numel() - size if placement == "page_end" else 0
        start -= start % step
    if step < dtype.itemsize and (whole.data_ptr() + start) % dtype.itemsize == 0:
        start += step if placement != "page_end" else -step
    tensor = _typed(whole, start, size, dtype).as_strided(layout.sizes, layout.strides)
    whole[:start].fill_(guard)
    whole[start + size :].fill_(guard)
    if not is_dense(tensor):
        whole[start : start + size].fill_(guard)
    return Region(tensor, whole, start, start + size, guard, owner)


def _typed(whole: torch.Tensor, start: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    if not size:
        return torch.empty(0, dtype=dtype, device=whole.device)
    if whole.is_cuda:
        return whole[start : start + size].view(dtype)
    view = (ctypes.c_ubyte * whole.numel()).from_address(whole.data_ptr())
    view.owner = whole  # type: ignore[attr-defined]  # the tensor holds the view, and so the memory, alive
    return torch.frombuffer(view, dtype=dtype, offset=start, count=size // dtype.itemsize)


def _trapped(size: int, placement: Placement) -> tuple[torch.Tensor, object]:
    page = mmap.PAGESIZE
    room = -(-size // page) * page
    mapping = mmap.mmap(-1, room + page)
    everything = torch.frombuffer(mapping, dtype=torch.uint8)
    offset = room if placement == "page_end" else 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(everything.data_ptr() + offset), ctypes.c_size_t(page), _PROT_NONE):
        raise JudgeError(f"mprotect failed with errno {ctypes.get_errno()}: cannot place a trapping page")
    return (everything[:room] if placement == "page_end" else everything[page:]), mapping


def perturb_heap(byte: int) -> bool:
    """Make glibc fill fresh heap blocks with the complement of `byte` (0: off), so that workspaces start poisoned.

    Returns whether the C library can do it.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(mallopt(_M_PERTURB, byte))
