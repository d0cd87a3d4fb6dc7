"""CUDA templates: without a GPU that they compile, keep everything in registers and move 16 bytes at a time; with one that they
are right on the boundary sizes of each of their regimes."""

from __future__ import annotations

import functools
import math
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from gpu_sources import needs_nvrtc, needs_triton

from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.build.compile_cuda import compile_cuda
from torch_autokern.build.cuda_toolkit import find_triton
from torch_autokern.ops import SPECS
from torch_autokern.runtime.kernel import load_cuda_kernel
from torch_autokern.runtime.target import local_target
from torch_autokern.search import templates
from torch_autokern.search.templates import layer_norm_cuda, softmax_cuda
from torch_autokern.search.templates.cuda_rows import RowShape, teams_for
from torch_autokern.store.key import KernelKey, Target, TensorKey

H200 = Target("cuda", "NVIDIA H200", "sm_90a", 0)
A100 = Target("cuda", "NVIDIA A100-SXM4-80GB", "sm_80", 0)
HAS_GPU = torch.cuda.is_available()


def tensor(sizes: tuple[int, ...], dtype: str, alignment: int = 16) -> TensorKey:
    strides = tuple(math.prod(sizes[place + 1 :]) for place in range(len(sizes)))
    return TensorKey(dtype, sizes, strides, alignment)


def softmax_key(
    sizes: tuple[int, ...], dtype: str = "float32", *, op: str = "_softmax", out: str = "", alignment: int = 16
) -> KernelKey:
    scalars = {"dim": len(sizes) - 1, "half_to_float": bool(out)}
    return KernelKey(op, "cuda", (tensor(sizes, dtype, alignment),), scalars, (tensor(sizes, out or dtype),))


def norm_key(sizes: tuple[int, ...], dims: int, dtype: str = "float32", parameters: str = "", alignment: int = 16) -> KernelKey:
    shape, statistics = sizes[-dims:], tensor((*sizes[:-dims], *[1] * dims), "float32")
    weight = tensor(shape, parameters, alignment) if parameters else None
    scalars = {"normalized_shape": shape, "eps": 1e-5}
    inputs = (tensor(sizes, dtype, alignment), weight, weight)
    return KernelKey("native_layer_norm", "cuda", inputs, scalars, (tensor(sizes, dtype), statistics, statistics))


# One for each regime: part of a warp, warp, block, cluster, chunks; every dtype; whole and ragged rows; any address.
KEYS = (
    softmax_key((1000, 7), "float16"),
    softmax_key((32768, 256), "bfloat16"),
    softmax_key((64, 1000), "float16", out="float32"),
    softmax_key((4096, 4096)),
    softmax_key((128, 50257), "bfloat16"),
    softmax_key((16, 16384)),
    softmax_key((4096, 65536), op="_log_softmax"),
    softmax_key((4096, 393216)),
    softmax_key((1, 400000)),
    softmax_key((4, 1001), alignment=4),
    norm_key((65536, 128), 1, parameters="float32"),
    norm_key((65536, 768), 1, "bfloat16", "bfloat16"),
    norm_key((33, 1001), 1, "float16", "float32"),
    norm_key((4096, 16384), 1, "bfloat16", "bfloat16"),
    norm_key((16, 64, 256, 256), 3, parameters="float32"),
    norm_key((5, 99999), 1, alignment=4),
)


def proposals(key: KernelKey, target: Target = H200) -> list[Candidate]:
    return (layer_norm_cuda if key.op == "native_layer_norm" else softmax_cuda).propose(key, target)


def name_of(key: KernelKey) -> str:
    assert key.tensors[0] is not None
    return f"{key.op}-{'x'.join(map(str, key.tensors[0].sizes))}-{key.tensors[0].dtype}"


def check_resources(candidate: Candidate, arch: str = "sm_90a") -> bytes:
    needs_nvrtc()
    artifact = compile_cuda(candidate, arch)
    for entry, resources in artifact.resources.items():
        assert (resources.stack_bytes, resources.spilled_bytes) == (0, 0), (entry, candidate.parameters, resources)
    return artifact.binary


@pytest.mark.parametrize("key", KEYS, ids=name_of)
def test_first_proposal_compiles_without_spills(key: KernelKey) -> None:
    check_resources(proposals(key)[0])


@pytest.mark.long
@pytest.mark.parametrize("key", KEYS, ids=name_of)
def test_every_proposal_compiles_without_spills(key: KernelKey) -> None:
    for candidate in proposals(key):
        check_resources(candidate)


@pytest.mark.long
@pytest.mark.parametrize("key", KEYS, ids=name_of)
def test_proposals_for_a_card_without_clusters_compile(key: KernelKey) -> None:
    for candidate in proposals(key, A100)[:3]:
        assert candidate.parameters.get("cluster", 1) == 1
        check_resources(candidate, "sm_80")


@pytest.mark.parametrize("key", [KEYS[3], KEYS[4], KEYS[13]], ids=name_of)
def test_rows_move_in_pieces_of_16_bytes(key: KernelKey, tmp_path_factory: pytest.TempPathFactory) -> None:
    needs_triton()
    path = tmp_path_factory.mktemp("sass") / "k.cubin"
    path.write_bytes(check_resources(proposals(key)[0]))
    tool = find_triton().packages["triton"] / "backends" / "nvidia" / "bin" / "cuobjdump"
    code = subprocess.run([tool, "-sass", path], check=True, capture_output=True, text=True).stdout
    # .EF: what is read or written once is evicted first.
    assert re.search(r"LDG\.E(\.EF)?\.128", code) and re.search(r"STG\.E(\.EF)?\.128", code)
    assert "LDL" not in code and "STL" not in code


def test_no_proposal_where_elements_are_no_neighbours_or_the_device_is_another() -> None:
    column = TensorKey("float32", (64, 1000), (1, 64), 16)
    scalars = {"dim": 1, "half_to_float": False}
    assert softmax_cuda.propose(KernelKey("_softmax", "cuda", (column,), scalars, (column,)), H200) == []
    row = tensor((64, 1000), "float32")
    assert softmax_cuda.propose(KernelKey("_softmax", "cpu", (row,), scalars, (row,)), H200) == []
    double = tensor((64, 1000), "float64")
    assert softmax_cuda.propose(KernelKey("_softmax", "cuda", (double,), scalars, (double,)), H200) == []


@pytest.mark.parametrize("key", KEYS, ids=name_of)
def test_templates_answer_a_gpu_key_with_gpu_candidates_only(key: KernelKey) -> None:
    found = templates.propose(key, H200)
    assert found and {candidate.language for candidate in found} == {"cuda"}


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 255, 1000, 4096, 50257, 131072, 262144, 400000])
@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("aligned", [True, False])
def test_every_team_holds_the_whole_row(length: int, item_bytes: int, aligned: bool) -> None:
    shape = RowShape(length, item_bytes, aligned)
    for team in teams_for(shape, rows=100):
        held = team.size * team.cluster * team.vectors * shape.elements
        assert held >= length + (0 if aligned else shape.elements - 1)
        assert team.threads % team.size == 0 and team.grid(100) % team.cluster == 0


# Boundaries: one element; one piece and its neighbours; the last of a warp's, a block's and a cluster's room; odd rows.
LENGTHS = (1, 3, 8, 9, 127, 128, 1000, 1025, 4096, 4099, 32771, 50257, 65536, 131072)
DTYPES = ("float32", "float16", "bfloat16")
PATTERNS = ("normal", "offset", "wide")
OPS = ("_softmax", "_log_softmax", "native_layer_norm")
# Elements by which the data misses 16 bytes, for every second length.
CASES = [
    (op, length, dtype, offset)
    for op in OPS
    for index, length in enumerate(LENGTHS)
    for dtype in DTYPES
    for offset in ((0, 1) if index % 2 and length < 40000 else (0,))
    if op != "_log_softmax" or index % 3 == 0
    if op != "native_layer_norm" or length > 1
]
Case = tuple[str, int, str, int]


@functools.cache
def call_of(case: Case, pattern: str) -> tuple[KernelKey, list[torch.Tensor | None], dict[str, Any]]:
    op, length, dtype, offset = case
    rows = 8 if length > 4096 else 37
    generator = torch.Generator("cuda").manual_seed(length * 7 + offset)
    flat = torch.randn(rows * length + offset, device="cuda", generator=generator)
    flat = flat + 100 if pattern == "offset" else flat * 30 if pattern == "wide" else flat
    x = flat.to(getattr(torch, dtype))[offset:].view(rows, length)
    tensors: list[torch.Tensor | None] = [x]
    scalars: dict[str, Any] = {"dim": 1, "half_to_float": False}
    if op == "native_layer_norm":
        scalars = {"normalized_shape": (length,), "eps": 1e-5}
        weight = torch.rand(length, device="cuda", generator=generator).to(x.dtype) + 0.5
        tensors += [None, None] if offset else [weight, weight - 0.25]
    return SPECS[op].key(tensors, scalars), tensors, scalars


def chosen(key: KernelKey) -> list[Candidate]:
    """The two best guesses and the last of each kind."""
    found = proposals(key, local_target("cuda"))
    last = {candidate.template: candidate for candidate in found}
    return list({candidate.candidate_id: candidate for candidate in (*found[:2], *last.values())}.values())


@functools.cache
def built(candidate_id: str) -> Artifact:
    # Our own templates: the machine with the GPU may not allow the whole box.
    return compile_cuda(_candidates[candidate_id], local_target("cuda").arch, allow_weak_box=True)


_candidates: dict[str, Candidate] = {}


def run(candidate: Candidate, key: KernelKey, tensors: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    _candidates[candidate.candidate_id] = candidate
    artifact = built(candidate.candidate_id)
    return load_cuda_kernel(artifact.binary, artifact.candidate.plan, key, 0, "record").run(tensors)


def build_together(candidates: list[Candidate]) -> None:
    """Compile on all processors what `run` is about to need."""
    for candidate in candidates:
        _candidates[candidate.candidate_id] = candidate
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(built, [candidate.candidate_id for candidate in candidates]))


@pytest.fixture(scope="module")
def _all_built() -> None:
    """Everything that the cases need, compiled on all processors before the first is run."""
    needs_nvrtc()
    build_together([candidate for case in CASES for candidate in chosen(call_of(case, "normal")[0])])


def no_worse(mine: torch.Tensor, stock: torch.Tensor, truth: torch.Tensor, scale: torch.Tensor, where: object) -> None:
    """The judge's limits for class `stock` (docs/way-of-a-kernel.md): 1.25 times stock's root mean square error and twice its
    largest, never below half a unit in the last place of the output and 4 unit roundoffs of fp32 times the scale."""
    ours, theirs = ((t.double() - truth).abs() / scale for t in (mine, stock))
    floor = 4 * 2.0**-24
    last_place = torch.finfo(mine.dtype).eps * float((truth.abs() / scale).max())
    assert ours.square().mean().sqrt() <= max(1.25 * theirs.square().mean().sqrt(), floor, last_place / 2), where
    assert ours.max() <= max(2 * theirs.max(), floor, last_place), where


def scales_of(
    op: str, truths: tuple[torch.Tensor, ...], tensors: list[torch.Tensor | None], scalars: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    if op != "native_layer_norm":
        # Below the smallest normal number of the type no result has all its digits, stock's neither.
        assert tensors[0] is not None
        return (SPECS[op].scale(truths, tensors, scalars)[0].clamp_min(torch.finfo(tensors[0].dtype).tiny),)
    weight, bias = tensors[1:]
    of_y = torch.ones_like(truths[0])
    if weight is not None and bias is not None:
        of_y = (weight.double().abs() + bias.double().abs()).expand_as(of_y)
    return of_y, truths[2].reciprocal(), truths[2]


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_no_less_accurate_than_stock_on_a_gpu(case: Case, _all_built: None) -> None:
    op = case[0]
    for pattern in PATTERNS:
        key, tensors, scalars = call_of(case, pattern)
        truths, stocks = SPECS[op].reference(tensors, scalars), SPECS[op].stock(tensors, scalars)
        scales = scales_of(op, truths, tensors, scalars)
        for candidate in chosen(key):
            for mine, stock, truth, scale in zip(run(candidate, key, tensors), stocks, truths, scales, strict=True):
                assert mine is not None and (mine.shape, mine.dtype) == (stock.shape, stock.dtype)
                no_worse(mine, stock, truth.view_as(mine), scale.view_as(mine), (candidate.parameters, pattern))


def kinds_of(values: torch.Tensor) -> torch.Tensor:
    """0 finite, 1 NaN, 2 +infinity, 3 -infinity."""
    return values.isnan().int() + 2 * values.isposinf().int() + 3 * values.isneginf().int()


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    "case", [case for case in CASES if not case[3] and case[1] > 1], ids=lambda case: "-".join(map(str, case))
)
def test_special_values_come_out_as_stock_has_them_on_a_gpu(case: Case, _all_built: None) -> None:
    """The judge's rule: position by position as stock, wherever stock and the truth agree. Welford's recurrence makes stock's
    mean NaN once another element follows an infinity in the same thread; infinite, as in theory, if none does."""
    op, length = case[:2]
    key, tensors, scalars = call_of(case, "normal")
    given = [with_special_rows(tensors[0], length), *tensors[1:]]
    stocks, truths = SPECS[op].stock(given, scalars), SPECS[op].reference(given, scalars)
    for candidate in chosen(key):
        for mine, stock, truth in zip(run(candidate, key, given), stocks, truths, strict=True):
            assert mine is not None
            agreed = kinds_of(stock) == kinds_of(truth.view_as(stock))
            assert torch.equal(kinds_of(mine)[agreed], kinds_of(stock)[agreed]), candidate.parameters


def with_special_rows(x: torch.Tensor | None, length: int) -> torch.Tensor:
    """Rows 1 to 6: NaN inside; one infinity, last and first; -infinity throughout; both infinities; zeros."""
    assert x is not None
    x = x.clone()
    x[1, length // 2] = math.nan
    x[2, length - 1] = math.inf
    x[3, 0] = -math.inf
    x[4] = -math.inf
    x[5, 0], x[5, length - 1] = math.inf, -math.inf
    x[6] = 0
    return x


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    "case", [c for c in CASES if c[0] == "native_layer_norm" and not c[3]], ids=lambda case: "-".join(map(str, case))
)
def test_norm_of_infinite_rows_is_as_in_theory_on_a_gpu(case: Case, _all_built: None) -> None:
    """Infinities of one sign: that mean; of both, or NaN: NaN. rstd and the row are NaN in all of them."""
    key, tensors, _ = call_of(case, "normal")
    given = [with_special_rows(tensors[0], case[1]), *tensors[1:]]
    for candidate in chosen(key):
        y, mean, rstd = (kinds_of(t).flatten(1) for t in run(candidate, key, given) if t is not None)
        assert mean[:7, 0].tolist() == [0, 1, 2, 3, 3, 1, 0], candidate.parameters
        assert rstd[:7, 0].tolist() == [0, 1, 1, 1, 1, 1, 0], candidate.parameters
        assert (y[1:6] == 1).all() and not y[0].any() and not y[6].any(), candidate.parameters


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("shape", [(16, 64, 256, 256), (2, 3, 1001, 333)])
def test_norm_of_few_long_rows_on_a_gpu(shape: tuple[int, ...]) -> None:
    needs_nvrtc()
    x = torch.randn(shape, device="cuda") + 3
    tensors: list[torch.Tensor | None] = [x, torch.rand(shape[1:], device="cuda"), torch.rand(shape[1:], device="cuda")]
    scalars: dict[str, Any] = {"normalized_shape": shape[1:], "eps": 1e-5}
    spec = SPECS["native_layer_norm"]
    key, stock, truth = spec.key(tensors, scalars), spec.stock(tensors, scalars)[0], spec.reference(tensors, scalars)[0]
    for candidate in proposals(key, local_target("cuda")):
        mine = run(candidate, key, tensors)[0]
        assert mine is not None
        no_worse(mine, stock, truth, torch.ones_like(truth), candidate.parameters)


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("dtype", "length"), [("float16", 1000), ("float16", 4096), ("float16", 77), ("float16", 131072)])
def test_half_rows_with_float_results_on_a_gpu(dtype: str, length: int) -> None:
    # ATen converts half only, not bfloat16.
    needs_nvrtc()
    x = torch.randn(37, length, device="cuda").to(getattr(torch, dtype))
    scalars: dict[str, Any] = {"dim": 1, "half_to_float": True}
    spec = SPECS["_softmax"]
    key, (stock,), (truth,) = spec.key([x], scalars), spec.stock([x], scalars), spec.reference([x], scalars)
    for candidate in chosen(key):
        (mine,) = run(candidate, key, [x])
        assert mine is not None and mine.dtype == stock.dtype == torch.float32
        assert ((mine - truth).abs() / truth).max() < 3e-6, candidate.parameters
