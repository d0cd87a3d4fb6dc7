"""Products with a thin operand or a short K: without a GPU that they compile, keep their sums in registers and use the units
they say; with one that they are no less accurate than stock on the boundary sizes of each regime, in every layout."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_sources import needs_triton
from test_cuda_templates import H200, HAS_GPU, build_together, check_resources, kinds_of, no_worse, run

from torch_autokern.build.candidate import Candidate
from torch_autokern.build.cuda_toolkit import find_triton
from torch_autokern.ops import SPECS
from torch_autokern.runtime.target import local_target
from torch_autokern.search.templates import matmul_shallow_cuda, matmul_thin_cuda
from torch_autokern.store.key import KernelKey, Scalar, Target, TensorKey

on_a_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")


def product_key(m: int, k: int, n: int, dtype: str, *, batch: int = 0, linear: bool = False, bias: bool = False) -> KernelKey:
    """mm, bmm or addmm with dense operands; `linear`: the right one is a transposed weight."""
    lead, batch_steps = ((batch,), (m * k, k * n, m * n)) if batch else ((), (0, 0, 0))

    def tensor(rows: int, columns: int, steps: tuple[int, int], batch_step: int) -> TensorKey:
        return TensorKey(dtype, (*lead, rows, columns), (*((batch_step,) if batch else ()), *steps), 16)

    left, out = tensor(m, k, (k, 1), batch_steps[0]), tensor(m, n, (n, 1), batch_steps[2])
    right = tensor(k, n, (1, k) if linear else (n, 1), batch_steps[1])
    if bias:
        scalars: dict[str, Scalar] = {"beta": 1.0, "alpha": 1.0}
        return KernelKey("addmm", "cuda", (TensorKey(dtype, (n,), (1,), 16), left, right), scalars, (out,))
    return KernelKey("bmm" if batch else "mm", "cuda", (left, right), {}, (out,))


# Decoding: one row, one tensor core tile and more; a bias; fp32; a matrix times a vector (its long side is left); a batch.
THIN = (
    product_key(1, 4096, 4096, "bfloat16", linear=True),
    product_key(8, 4096, 14336, "bfloat16", linear=True),
    product_key(16, 14336, 4096, "float16", linear=True, bias=True),
    product_key(64, 4096, 4096, "bfloat16", linear=True),
    product_key(4, 1024, 4096, "float32", linear=True, bias=True),
    product_key(2048, 1048576, 1, "float32"),
    product_key(3, 512, 1024, "bfloat16", batch=8, linear=True),
)
# One and more K tiles, both widths, both ways round, a batch.
SHALLOW = (
    product_key(32768, 64, 32768, "bfloat16"),
    product_key(32768, 32, 32768, "float32"),
    product_key(16384, 64, 16384, "float32"),
    product_key(4096, 20, 4096, "float32", linear=True),
    product_key(1024, 48, 1000, "float16", batch=16),
)


def proposals(key: KernelKey, target: Target = H200) -> list[Candidate]:
    return (matmul_thin_cuda if key in THIN else matmul_shallow_cuda).propose(key, target)


def name_of(key: KernelKey) -> str:
    assert key.tensors[-2] is not None and key.tensors[-1] is not None
    sizes = "x".join(map(str, (*key.tensors[-2].sizes, key.tensors[-1].sizes[-1])))
    return f"{key.op}-{sizes}-{key.tensors[-1].dtype}"


@pytest.mark.parametrize("key", [*THIN[:5:2], *SHALLOW[:2]], ids=name_of)
def test_first_product_compiles_without_spills(key: KernelKey) -> None:
    check_resources(proposals(key)[0])


@pytest.mark.long
@pytest.mark.parametrize("key", [*THIN, *SHALLOW], ids=name_of)
def test_products_compile_without_spills(key: KernelKey) -> None:
    found = proposals(key)
    assert len(found) >= 3
    for candidate in found[:3]:
        check_resources(candidate)


@pytest.mark.parametrize(("key", "unit"), [(THIN[0], "HMMA.16816.F32.BF16"), (SHALLOW[1], "HMMA.16816.F32.BF16")], ids=str)
def test_products_use_tensor_cores_and_move_16_bytes(key: KernelKey, unit: str, tmp_path: Path) -> None:
    needs_triton()
    (tmp_path / "k.cubin").write_bytes(check_resources(proposals(key)[0]))
    tool = find_triton().packages["triton"] / "backends" / "nvidia" / "bin" / "cuobjdump"
    code = subprocess.run([tool, "-sass", tmp_path / "k.cubin"], check=True, capture_output=True, text=True).stdout
    assert unit in code and re.search(r"LDG\.E(\.EF)?\.128", code)


def test_no_product_template_where_rows_do_not_start_on_vectors() -> None:
    odd = product_key(8, 4097, 4096, "bfloat16", linear=True)
    assert matmul_thin_cuda.propose(odd, H200) == []
    fat = product_key(512, 4096, 4096, "bfloat16", linear=True)
    assert matmul_thin_cuda.propose(fat, H200) == []
    deep = product_key(32768, 128, 32768, "float32")
    assert matmul_shallow_cuda.propose(deep, H200) == []
    narrow = product_key(32768, 32, 32767, "float32")
    assert matmul_shallow_cuda.propose(narrow, H200) == []


# (m, k, n, dtype, batch, linear, bias). Thin: rows of W below, at and above a tile; thin rows 1, 8, 9, 64; K of one piece, of
# odd pieces. Shallow: edges of both tiles, K below, at and above 16; K inner on both sides and on neither.
CASES: tuple[tuple[int, int, int, str, int, bool, bool], ...] = (
    (1, 4096, 4096, "bfloat16", 0, True, False), (8, 4096, 1000, "bfloat16", 0, True, True),
    (9, 1032, 4097, "float16", 0, True, True), (64, 4096, 4096, "bfloat16", 0, True, False),
    (33, 2056, 1023, "bfloat16", 0, True, False), (4, 1028, 4095, "float32", 0, True, True),
    (8, 4096, 4096, "float32", 0, True, False), (513, 65536, 1, "float32", 0, False, False),
    (3, 512, 1024, "bfloat16", 8, True, False), (2048, 4096, 5, "bfloat16", 0, True, False),
    (8192, 64, 8192, "bfloat16", 0, False, False), (8192, 32, 8192, "float32", 0, False, False),
    (4100, 4, 4100, "float32", 0, True, False), (2050, 20, 4004, "float32", 0, False, False),
    (1000, 48, 1000, "float16", 16, False, False), (4097, 64, 4096, "float32", 0, True, False),
)  # fmt: skip
PATTERNS = ("normal", "uniform", "wide", "spikes")


def operands(case: tuple[Any, ...], pattern: str) -> tuple[str, list[torch.Tensor | None], dict[str, Any]]:
    m, k, n, dtype, batch, linear, bias = case
    generator = torch.Generator("cuda").manual_seed(m * 31 + k)
    lead = (batch,) if batch else ()

    def drawn(*sizes: int) -> torch.Tensor:
        x = torch.randn(sizes, device="cuda", generator=generator)
        if pattern == "uniform":
            x = torch.rand(sizes, device="cuda", generator=generator)
        if pattern == "wide":
            x = x * torch.exp2(torch.randint(-8, 9, sizes, device="cuda", generator=generator).float())
        if pattern == "spikes":
            x = x * (torch.rand(sizes, device="cuda", generator=generator) < 0.02)
        return x.to(getattr(torch, dtype))

    left = drawn(*lead, m, k)
    right = drawn(*lead, n, k).transpose(-1, -2) if linear else drawn(*lead, k, n)
    if bias:
        return "addmm", [drawn(n), left, right], {"beta": 1.0, "alpha": 1.0}
    return "bmm" if batch else "mm", [left, right], {}


def chosen(key: KernelKey) -> list[Candidate]:
    """The two best guesses of each template and its last."""
    target = local_target("cuda")
    found = [matmul_thin_cuda.propose(key, target), matmul_shallow_cuda.propose(key, target)]
    return [candidate for kind in found for candidate in (*kind[:2], *kind[2:][-1:])]


@pytest.mark.cuda
@on_a_gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_product_is_no_less_accurate_than_stock_on_a_gpu(case: tuple[Any, ...]) -> None:
    op, tensors, scalars = operands(case, "normal")
    found = chosen(SPECS[op].key(tensors, scalars))
    assert found
    build_together(found)
    for pattern in PATTERNS:
        op, tensors, scalars = operands(case, pattern)
        spec = SPECS[op]
        key, stock, truth = spec.key(tensors, scalars), spec.stock(tensors, scalars)[0], spec.reference(tensors, scalars)[0]
        scale = spec.scale((truth,), tensors, scalars)[0].clamp_min(torch.finfo(stock.dtype).tiny)
        for candidate in found:
            mine = run(candidate, key, tensors)[0]
            assert mine is not None
            no_worse(mine, stock, truth, scale, (candidate.template, candidate.parameters, pattern))


@pytest.mark.cuda
@on_a_gpu
@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[10], CASES[11]], ids=lambda case: "-".join(map(str, case)))
def test_product_has_special_values_where_stock_has_them_on_a_gpu(case: tuple[Any, ...]) -> None:
    op, tensors, scalars = operands(case, "normal")
    left, right = tensors[-2:]
    assert left is not None and right is not None
    left[0, 0], right[1, 0], right[0, 1], right[3, 2] = math.inf, math.nan, -math.inf, torch.finfo(right.dtype).max
    spec = SPECS[op]
    key, stock, truth = spec.key(tensors, scalars), spec.stock(tensors, scalars)[0], spec.reference(tensors, scalars)[0]
    agreed = kinds_of(stock) == kinds_of(truth)
    for candidate in chosen(key):
        mine = run(candidate, key, tensors)[0]
        assert mine is not None
        assert torch.equal(kinds_of(mine)[agreed], kinds_of(stock)[agreed]), (candidate.template, candidate.parameters)
