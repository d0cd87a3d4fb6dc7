"""CUDA templates that own the whole chip or an outer dimension: split-precision matmul, LayerNorm over the grid, softmax over
columns. Without a GPU that they compile as meant; with one that they are no less accurate than stock on every kind of input."""

from __future__ import annotations

import math
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from gpu_sources import needs_nvrtc, needs_triton
from test_cuda_templates import H200, HAS_GPU, build_together, kinds_of, no_worse, norm_key, run, softmax_key, tensor

from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.build.compile_cuda import compile_cuda
from torch_autokern.build.cuda_toolkit import find_triton
from torch_autokern.ops import SPECS
from torch_autokern.runtime.plan import KernelStep
from torch_autokern.runtime.target import local_target
from torch_autokern.search.templates import layer_norm_ring, matmul_split, softmax_columns_cuda
from torch_autokern.store.key import KernelKey, TensorKey

on_a_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")


def mm_key(m: int, n: int, k: int, *, transposed: str = "", batch: int = 0) -> KernelKey:
    def operand(rows: int, columns: int, turned: bool) -> TensorKey:
        lead, per = ((batch,), (rows * columns,)) if batch else ((), ())
        return TensorKey("float32", (*lead, rows, columns), (*per, 1, rows) if turned else (*per, columns, 1), 16)

    tensors = (operand(m, k, "a" in transposed), operand(k, n, "b" in transposed))
    return KernelKey("bmm" if batch else "mm", "cuda", tensors, {}, (tensor((batch, m, n) if batch else (m, n), "float32"),))


def column_key(sizes: tuple[int, ...], dim: int, dtype: str = "float32") -> KernelKey:
    return msgspec.structs.replace(softmax_key(sizes, dtype), scalars={"dim": dim, "half_to_float": False})


def built(candidate: Candidate) -> Artifact:
    needs_nvrtc()
    return compile_cuda(candidate, "sm_90a", allow_weak_box=True)


MATMULS = (
    mm_key(4096, 4096, 4096),
    mm_key(512, 777, 1001, transposed="ab"),
    mm_key(256, 256, 131072),
    mm_key(128, 1024, 512, batch=8),
)


@pytest.mark.parametrize("key", MATMULS, ids=lambda key: "x".join(map(str, key.tensors[0].sizes)))
def test_split_matmul_keeps_its_accumulators_in_registers(key: KernelKey) -> None:
    artifact = built(matmul_split.propose(key, H200)[0])
    # The assembler of CUDA 13.0 spills one pair of the epilogue's addresses, once a tile.
    assert all(resources.spilled_bytes <= 16 for resources in artifact.resources.values()), artifact.resources


@pytest.mark.long
def test_split_matmul_runs_on_tensor_cores_in_one_go_per_stage(tmp_path: Path) -> None:
    needs_triton()
    shapes = {
        tuple(candidate.parameters[name] for name in ("columns", "halves", "pair")): candidate
        for candidate in reversed(matmul_split.propose(MATMULS[0], H200))
    }
    with ThreadPoolExecutor(2) as pool:  # each waits for a compiler's process
        artifacts = list(pool.map(built, shapes.values()))
    for artifact in artifacts:
        (tmp_path / "k.cubin").write_bytes(artifact.binary)
        tool = find_triton().packages["triton"] / "backends" / "nvidia" / "bin" / "cuobjdump"
        code = subprocess.run([tool, "-sass", tmp_path / "k.cubin"], check=True, capture_output=True, text=True).stdout
        assert code.count("USETMAXREG") == 2, "without it the accumulators spill"
        products, waits = len(re.findall(r"HGMMA\.", code)), code.count("WARPGROUP.DEPBAR")
        assert products == 6 * waits > 0, "a wait after each product: the assembler serialised them"


@pytest.mark.parametrize("key", MATMULS, ids=lambda key: "x".join(map(str, key.tensors[0].sizes)))
def test_split_matmul_needs_no_more_room_than_one_and_a_half_times_its_operands(key: KernelKey) -> None:
    operands = sum(4 * t.numel for t in key.tensors if t is not None)
    for candidate in matmul_split.propose(key, H200):
        pairs = sum(w.size_bytes for w in candidate.plan.workspaces if w.name.endswith("pairs"))
        assert pairs <= 1.5 * operands


def test_split_matmul_always_launches_both_ways_behind_one_flag() -> None:
    for candidate in matmul_split.propose(MATMULS[0], H200):
        entries = [step.entry for step in candidate.plan.steps if isinstance(step, KernelStep)]
        assert entries.index("plain") == entries.index("gemm") + 1
        assert not candidate.plan.steps[0].programmatic  # type: ignore[union-attr]


def test_no_split_matmul_where_it_cannot_win_or_would_not_be_strict() -> None:
    assert matmul_split.propose(mm_key(64, 64, 64), H200) == []
    assert matmul_split.propose(mm_key(32768, 32768, 32), H200) == []
    tf32 = msgspec.structs.replace(MATMULS[0], matmul_precision="tf32")
    assert matmul_split.propose(tf32, H200) == []
    assert matmul_split.propose(MATMULS[0], msgspec.structs.replace(H200, arch="sm_80")) == []


@pytest.mark.long
def test_grid_norm_and_column_softmax_compile_without_spills() -> None:
    keys = (norm_key((16, 64, 256, 256), 3, parameters="float32"), norm_key((4, 64, 256, 256), 3, "bfloat16", "bfloat16"))
    columns = (column_key((64, 1024, 512), 1), column_key((8, 5000, 37), 1, "bfloat16"), column_key((7, 33, 5), 0, "float16"))
    found = [layer_norm_ring.propose(key, H200)[0] for key in keys]
    for candidate in [*found, *(softmax_columns_cuda.propose(key, H200)[0] for key in columns)]:
        for resources in built(candidate).resources.values():
            assert (resources.stack_bytes, resources.spilled_bytes) == (0, 0), candidate.parameters


def some(candidates: list[Candidate]) -> list[Candidate]:
    """One of each shape that the template makes."""
    shapes = {tuple(c.parameters.get(n) for n in ("columns", "halves", "pair", "splits", "sampled")): c for c in candidates}
    return list(shapes.values())


def matrices(family: str, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(m + n + k)
    a, b = (torch.randn(shape, device="cuda", generator=generator) for shape in ((m, k), (k, n)))
    if family == "uniform":
        a, b = a.abs() % 1, b.abs() % 1
    if family == "scales":
        rows, columns = (torch.exp2(torch.arange(size, device="cuda") % 41 - 20.0) for size in (m, n))
        a, b = a * rows[:, None], b * columns
    if family == "columns":
        exponents = torch.randint(-40, 41, (k,), device="cuda", generator=generator).float()
        a, b = a * torch.exp2(exponents), b * torch.exp2(-exponents)[:, None]
    if family == "offset":
        a, b = (a * 11).round() + 2.0**17, (b * 11).round() + 2.0**17
    if family == "spikes":
        a, b = a * (a.abs() > 2.5), b * (b.abs() > 2.5)
    if family == "denormal":
        a = a.clamp(-0.9, 0.9) * torch.finfo(torch.float32).tiny
    if family == "integers":
        a, b = (a * 2).round(), (b * 2).round()
    if family == "nonfinite":
        a[m // 2, k // 3], a[m - 1, 0], b[k - 1, n // 2], b[0, 0] = math.nan, math.inf, -math.inf, math.inf
    return a, b


FAMILIES = ("normal", "uniform", "scales", "columns", "offset", "spikes", "denormal", "integers", "nonfinite")


@pytest.mark.cuda
@on_a_gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("m", "n", "k", "turned"),
    [(1024, 1024, 1024, ""), (777, 513, 1001, "b"), (640, 500, 5000, "a"), (256, 256, 65536, ""), (300, 4096, 9000, "ab")],
)
def test_split_matmul_is_no_less_accurate_than_stock_on_a_gpu(family: str, m: int, n: int, k: int, turned: str) -> None:
    needs_nvrtc()
    a, b = matrices(family, m, n, k)
    a = a.t().contiguous().t() if "a" in turned else a
    b = b.t().contiguous().t() if "b" in turned else b
    tensors: list[torch.Tensor | None] = [a, b]
    spec = SPECS["mm"]
    key, stock, truth = spec.key(tensors, {}), spec.stock(tensors, {})[0], spec.reference(tensors, {})[0]
    scale = (a.double().abs() @ b.double().abs()).clamp_min(torch.finfo(torch.float32).tiny)
    candidates = some(matmul_split.propose(key, local_target("cuda")))
    assert candidates
    build_together(candidates)
    for candidate in candidates:
        mine = run(candidate, key, tensors)[0]
        assert mine is not None
        where = (candidate.parameters, family)
        agreed = kinds_of(stock) == kinds_of(truth)
        assert torch.equal(kinds_of(mine)[agreed], kinds_of(stock)[agreed]), where
        finite = truth.isfinite() & scale.isfinite()
        if family == "integers":
            assert torch.equal(mine, truth.float()), where
        no_worse(mine[finite], stock[finite], truth[finite], scale[finite], where)


@pytest.mark.cuda
@on_a_gpu
def test_split_matmul_takes_batches_and_addends_on_a_gpu() -> None:
    needs_nvrtc()
    left, right = torch.randn(6, 333, 700, device="cuda"), torch.randn(6, 700, 450, device="cuda")
    addend, scalars = torch.randn(450, device="cuda"), {"beta": 0.5, "alpha": 2.0}
    cases: list[tuple[str, list[torch.Tensor | None], dict[str, Any]]] = [
        ("bmm", [left, right], {}),
        ("bmm", [left, right.transpose(1, 2).contiguous().transpose(1, 2)], {}),
        ("addmm", [addend, left[0], right[0]], scalars),
        ("addmm", [torch.randn(333, 450, device="cuda"), left[0], right[0]], scalars),
        ("baddbmm", [torch.randn(6, 1, 450, device="cuda"), left, right], scalars),
    ]
    for op, tensors, given in cases:
        spec = SPECS[op]
        key, stock, truth = spec.key(tensors, given), spec.stock(tensors, given)[0], spec.reference(tensors, given)[0]
        scale = spec.scale((truth,), tensors, given)[0]
        candidates = some(matmul_split.propose(key, local_target("cuda")))
        build_together(candidates)
        for candidate in candidates:
            mine = run(candidate, key, tensors)[0]
            assert mine is not None
            no_worse(mine, stock, truth, scale, (op, candidate.parameters))


@pytest.mark.cuda
@on_a_gpu
@pytest.mark.parametrize("parameters", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grid_norm_is_right_on_a_gpu(dtype: str, parameters: bool) -> None:
    needs_nvrtc()
    shape = (5, 64, 256, 256)
    x = (torch.randn(shape, device="cuda") + 3).to(getattr(torch, dtype))
    x[2, 0, 0, :9] = 400  # the first chunk lies away from the rest
    x[3, 63, 255, 255], x[4, 5, 0, 0], x[4, 6, 0, 0] = math.inf, math.inf, -math.inf
    weight = torch.rand(shape[1:], device="cuda").to(x.dtype) if parameters else None
    tensors: list[torch.Tensor | None] = [x, weight, weight]
    scalars: dict[str, Any] = {"normalized_shape": shape[1:], "eps": 1e-5}
    spec = SPECS["native_layer_norm"]
    key, stocks, truths = spec.key(tensors, scalars), spec.stock(tensors, scalars), spec.reference(tensors, scalars)
    found = [c for c in layer_norm_ring.propose(key, local_target("cuda")) if c.template == layer_norm_ring.GRID_NAME]
    assert found
    build_together(found)
    for candidate in found:
        for _ in range(3):
            results = run(candidate, key, tensors)
            for mine, stock, truth in zip(results, stocks, truths, strict=True):
                assert mine is not None
                wide = truth.view_as(stock)[:3]
                no_worse(mine[:3], stock[:3], wide, torch.ones_like(wide), candidate.parameters)
            y, mean, rstd = (kinds_of(t).flatten(1)[:, 0].tolist() for t in results if t is not None)
            assert (y[3:], mean[3:], rstd[3:]) == ([1, 1], [2, 1], [1, 1]), candidate.parameters


@pytest.mark.cuda
@on_a_gpu
@pytest.mark.parametrize("op", ["_softmax", "_log_softmax"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("sizes", "dim"), [((4, 1024, 512), 1), ((3, 5000, 37), 1), ((300, 7, 64), 0), ((2, 33, 8, 16), 1)])
def test_column_softmax_is_right_on_a_gpu(op: str, dtype: str, sizes: tuple[int, ...], dim: int) -> None:
    needs_nvrtc()
    x = (torch.randn(sizes, device="cuda") * 4).to(getattr(torch, dtype))
    special = x.movedim(dim, 0)
    special[:, ..., 1] = -math.inf
    special[1, ..., 2] = math.inf
    special[2, ..., 3] = math.nan
    tensors: list[torch.Tensor | None] = [x]
    scalars: dict[str, Any] = {"dim": dim, "half_to_float": False}
    spec = SPECS[op]
    key, (stock,), (truth,) = spec.key(tensors, scalars), spec.stock(tensors, scalars), spec.reference(tensors, scalars)
    agreed = kinds_of(stock) == kinds_of(truth)
    finite = truth.isfinite() & stock.isfinite()
    scale = spec.scale((truth,), tensors, scalars)[0].clamp_min(torch.finfo(x.dtype).tiny)
    found = softmax_columns_cuda.propose(key, local_target("cuda"))
    assert found
    found = [found[0], *(c for c in found if not c.parameters["vectors"])][:3]
    build_together(found)
    for candidate in found:
        (mine,) = run(candidate, key, tensors)
        assert mine is not None
        assert torch.equal(kinds_of(mine)[agreed], kinds_of(stock)[agreed]), candidate.parameters
        no_worse(mine[finite], stock[finite], truth[finite], scale[finite], candidate.parameters)
