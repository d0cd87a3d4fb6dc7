"""What a machine can do at most for a key: copy its bytes, multiply its numbers. Measured, never taken from a data sheet."""

from __future__ import annotations

import time

import torch

from torch_autokern.judge.device import device_of, finish
from torch_autokern.judge.families import Family
from torch_autokern.judge.inputs import layout_bytes, make_inputs
from torch_autokern.judge.measure import copy_us
from torch_autokern.ops import spec_of
from torch_autokern.search.manifest import Ceiling
from torch_autokern.store.key import KernelKey, Target

_SQUARE = {"cpu": 768, "cuda": 4096}  # large enough that a product is bound by its multiplications


def measure_ceiling(key: KernelKey, target: Target) -> Ceiling:
    """Copying the key's bytes with the target's threads, a square product in the key's dtype where the op has one, and stock.

    The limit is the larger of the two times; no kernel that reads every argument and writes every result in this accuracy is
    known to beat it, but a product with fewer multiplications could.
    """
    spec, device = spec_of(key), device_of(key)
    threads = torch.get_num_threads()
    torch.set_num_threads(target.threads or threads)
    try:
        total = sum(layout_bytes(tensor) for tensor in (*key.tensors, *key.outputs) if tensor is not None)
        copied = copy_us(total // 2, device)
        inputs = make_inputs(spec, key, Family.NORMAL, torch.Generator(device).manual_seed(1), "aligned")
        stock = _least_us(lambda: spec.stock(inputs.tensors, key.scalars), device)
        flops = 0.0
        if spec.has_products and key.tensors[0] is not None:
            side = _SQUARE[key.device_type]
            square = torch.randn(side, side, device=device).to(getattr(torch, key.tensors[0].dtype))
            flops = 2.0 * side**3 / (_least_us(lambda: torch.mm(square, square), device) * 1e-6)
    finally:
        torch.set_num_threads(threads)
    return Ceiling(copied, flops, stock, max(copied, spec.flops(key) / flops * 1e6 if flops else 0.0))


def _least_us(call: object, device: torch.device) -> float:
    times = []
    for _ in range(10):
        finish(device)
        began = time.perf_counter_ns()
        call()  # type: ignore[operator]
        finish(device)
        times.append((time.perf_counter_ns() - began) / 1000)
    return min(times)
