"""GPU templates for gradients: without a GPU that they compile without spills; with one that they are no less accurate than
stock on the boundary sizes of each regime, for every output mask, and deterministic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_cuda_templates import H200, HAS_GPU, build_together, check_resources, no_worse, run, tensor

from torch_autokern.build.candidate import Candidate
from torch_autokern.ops import SPECS
from torch_autokern.runtime.target import local_target
from torch_autokern.search.templates import layer_norm_backward_cuda, softmax_backward_cuda
from torch_autokern.store.key import KernelKey, Target

on_a_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
ALL = (True, True, True)


def softmax_key(sizes: tuple[int, ...], dtype: str, op: str = "_softmax_backward_data", alignment: int = 16) -> KernelKey:
    scalars = {"dim": len(sizes) - 1, "input_dtype": dtype}
    inputs = (tensor(sizes, dtype, alignment), tensor(sizes, dtype, alignment))
    return KernelKey(op, "cuda", inputs, scalars, (tensor(sizes, dtype),))


def norm_key(sizes: tuple[int, ...], dims: int, dtype: str, parameters: str, mask: tuple[bool, ...] = ALL) -> KernelKey:
    shape, statistics = sizes[-dims:], tensor((*sizes[:-dims], *[1] * dims), "float32")
    weight = tensor(shape, parameters) if parameters else None
    x, flat = tensor(sizes, dtype), tensor(shape, parameters or dtype)
    outputs = (x if mask[0] else None, flat if mask[1] else None, flat if mask[2] else None)
    scalars = {"normalized_shape": shape, "output_mask": mask}
    return KernelKey("native_layer_norm_backward", "cuda", (x, x, statistics, statistics, weight, weight), scalars, outputs)


# Part of a warp, warp, block, cluster, chunks; every dtype; any address.
KEYS = (
    softmax_key((32768, 256), "bfloat16"),
    softmax_key((8, 12, 1024, 1024), "bfloat16"),
    softmax_key((4096, 4096), "float32"),
    softmax_key((128, 50257), "float16"),
    softmax_key((4096, 50257), "bfloat16", "_log_softmax_backward_data"),
    softmax_key((2, 400000), "float32"),
    softmax_key((4, 1001), "float32", alignment=4),
    norm_key((65536, 128), 1, "float32", "float32"),
    norm_key((8192, 768), 1, "bfloat16", "bfloat16"),
    norm_key((8192, 4096), 1, "float32", "float32"),
    norm_key((4096, 1024), 1, "float16", "float32"),
    norm_key((64, 32, 768), 1, "float32", "", (True, False, False)),
    norm_key((512, 16, 48), 2, "float32", "float32", (False, True, True)),
)


def proposals(key: KernelKey, target: Target = H200) -> list[Candidate]:
    return (layer_norm_backward_cuda if "layer_norm" in key.op else softmax_backward_cuda).propose(key, target)


def name_of(key: KernelKey) -> str:
    assert key.tensors[0] is not None
    return f"{key.op}-{'x'.join(map(str, key.tensors[0].sizes))}-{key.tensors[0].dtype}"


@pytest.mark.parametrize("key", [KEYS[2], KEYS[4], KEYS[8]], ids=name_of)
def test_first_gradient_compiles_without_spills(key: KernelKey) -> None:
    check_resources(proposals(key)[0])


@pytest.mark.long
@pytest.mark.parametrize("key", KEYS, ids=name_of)
def test_gradients_compile_without_spills(key: KernelKey) -> None:
    found = proposals(key)
    assert len(found) >= 3
    for candidate in found[:3]:
        check_resources(candidate)


def test_no_gradient_template_where_a_thread_would_change_columns() -> None:
    assert layer_norm_backward_cuda.propose(norm_key((64, 1001), 1, "float32", "float32"), H200) == []


LENGTHS = (1, 8, 9, 128, 1000, 1025, 4096, 50257, 131072)
SOFTMAX_CASES = [
    (op, length, dtype)
    for op in ("_softmax_backward_data", "_log_softmax_backward_data")
    for index, length in enumerate(LENGTHS)
    for dtype in (("float32", "float16", "bfloat16") if index % 2 else ("float32", "bfloat16"))
]
NORM_CASES = [
    (sizes, dims, dtype, parameters, mask)
    for sizes, dims in (((37, 8), 1), ((1000, 128), 1), ((5000, 768), 1), ((33, 4096), 1), ((64, 16, 48), 2), ((3, 16384), 1))
    for dtype, parameters in (("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", ""))
    for mask in ((ALL, (True, False, False), (False, True, True)) if parameters else ((True, False, False),))
]


def check(op: str, tensors: list[torch.Tensor | None], scalars: dict[str, Any]) -> None:
    spec = SPECS[op]
    key, stocks, truths = spec.key(tensors, scalars), spec.stock(tensors, scalars), spec.reference(tensors, scalars)
    scales = spec.scale(truths, tensors, scalars)
    found = proposals(key, local_target("cuda"))
    last = {candidate.template: candidate for candidate in found}
    used = list({candidate.candidate_id: candidate for candidate in (*found[:2], *last.values())}.values())
    assert used
    build_together(used)
    for candidate in used:
        mine, again = run(candidate, key, tensors), run(candidate, key, tensors)
        for out, same, stock, truth, scale in zip(mine, again, stocks, truths, scales, strict=True):
            if out is None:
                continue
            assert same is not None and torch.equal(out, same)
            size = scale.view_as(out).clamp_min(torch.finfo(out.dtype).tiny)
            no_worse(out, stock, truth.view_as(out), size, (candidate.parameters, key.scalars))


@pytest.mark.cuda
@on_a_gpu
@pytest.mark.parametrize("case", SOFTMAX_CASES, ids=lambda case: "-".join(map(str, case)))
def test_softmax_gradient_is_no_less_accurate_than_stock_on_a_gpu(case: tuple[str, int, str]) -> None:
    op, length, dtype = case
    generator = torch.Generator("cuda").manual_seed(length)
    x, grad = (torch.randn(37, length, device="cuda", generator=generator).to(getattr(torch, dtype)) for _ in range(2))
    output = torch.log_softmax(x, 1) if "log" in op else torch.softmax(x, 1)
    check(op, [grad, output], {"dim": 1, "input_dtype": dtype})


@pytest.mark.cuda
@on_a_gpu
@pytest.mark.parametrize("case", NORM_CASES, ids=lambda case: "-".join(map(str, case)))
def test_norm_gradient_is_no_less_accurate_than_stock_on_a_gpu(case: tuple[Any, ...]) -> None:
    sizes, dims, dtype, parameters, mask = case
    generator = torch.Generator("cuda").manual_seed(math.prod(sizes))
    shape = sizes[-dims:]
    x, grad = (torch.randn(sizes, device="cuda", generator=generator).to(getattr(torch, dtype)) for _ in range(2))
    kind = getattr(torch, parameters) if parameters else None
    weight = None if kind is None else torch.rand(shape, device="cuda", generator=generator).to(kind) + 0.5
    _, mean, rstd = torch.native_layer_norm(x, shape, weight, weight, 1e-5)
    check(
        "native_layer_norm_backward",
        [grad, x, mean, rstd, weight, weight],
        {"normalized_shape": shape, "output_mask": mask},
    )
