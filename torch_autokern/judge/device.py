"""What the judge must know of the device that a key lives on. On a CPU every function here is nothing, or a constant."""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path

import torch

from torch_autokern.store.key import DeviceType, KernelKey

# Truth is computed in chunks: on a CPU its temporaries stay in cache, on a GPU they stay small beside the tensors.
_CHUNK_ELEMENTS: dict[str, int] = {"cpu": 1 << 20, "cuda": 1 << 24}
_DEFAULT_CACHE_BYTES = 32 << 20
DEVICE_MEMORY_BYTES = 23 * 10**9  # what judging a key may hold on a GPU: a card of 24 GB, less what is made piece by piece
_CANARY_ELEMENTS = 1 << 20


def device_of(key: KernelKey) -> torch.device:
    """Where the tensors of a key are made: the CPU, or the current GPU."""
    return torch.device(key.device_type)


def generator_on(device: torch.device, seed: int) -> torch.Generator:
    """A seeded source of random numbers: equal seeds give equal bits on devices of one kind."""
    return torch.Generator(device).manual_seed(seed)


def draw(low: int, high: int, generator: torch.Generator) -> int:
    """One whole number from [low, high)."""
    return int(torch.randint(low, high, (), generator=generator, device=generator.device))


def finish(device: torch.device) -> None:
    """Wait until the device has done everything; an error of an earlier launch shows here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def chunk_elements(device: torch.device) -> int:
    """Elements of the widest tensor that truth is computed for at a time."""
    return _CHUNK_ELEMENTS[device.type]


def cache_bytes(device_type: DeviceType) -> int:
    """Size of the largest cache: a GPU's L2, or a CPU's last level (32 MiB where the system does not say)."""
    if device_type == "cuda":
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text[:-1].isdigit() and text[-1] in "KM":
            sizes.append(int(text[:-1]) << (10 if text[-1] == "K" else 20))
    return max(sizes, default=_DEFAULT_CACHE_BYTES)


def warm_up(device_type: DeviceType) -> None:
    """On a GPU: start everything that opens a file or a device on first use (context, allocator, cuBLAS in both precisions, a
    captured graph), so that a box may close afterwards.

    Raises:
        RuntimeError: CUDA does not work here.
    """
    if device_type != "cuda":
        return
    torch.cuda.init()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.ones(64, 64, dtype=dtype, device="cuda")
        (x @ x).softmax(-1).sum()
    flat = torch.ones(64, dtype=torch.float64, device="cuda")
    torch.dot(flat, flat)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flat.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    _driver()


def canary(device_type: DeviceType) -> bool:
    """Whether the device computes: a sum whose result is known. True on a CPU, where this process itself is the proof."""
    if device_type != "cuda":
        return True
    count = torch.arange(_CANARY_ELEMENTS, device="cuda", dtype=torch.float64)
    host = torch.empty(1, dtype=torch.float64).copy_(count.sum())
    return float(host) == math.comb(_CANARY_ELEMENTS, 2)


def forget_persisting_lines(device: torch.device) -> None:
    """Give back what a kernel asked the L2 to keep."""
    if device.type == "cuda":
        _driver().cuCtxResetPersistingL2Cache()


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
