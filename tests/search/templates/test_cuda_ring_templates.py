"""Rows that stream through a ring of shared memory, or go straight into the registers of a cluster: without a GPU that they
compile as meant; with one that they are no less accurate than stock, also where a part or the last turn is not full."""

from __future__ import annotations

import math
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gpu_sources import needs_nvrtc, needs_triton
from test_cuda_templates import (
    H200,
    HAS_GPU,
    build_together,
    check_resources,
    kinds_of,
    no_worse,
    norm_key,
    run,
    scales_of,
    softmax_key,
    with_special_rows,
)  # fmt: skip

from torch_autokern.build.candidate import Candidate
from torch_autokern.build.cuda_toolkit import find_triton
from torch_autokern.ops import SPECS
from torch_autokern.runtime.target import local_target
from torch_autokern.search.templates import layer_norm_ring, softmax_block, softmax_cluster, softmax_ring
from torch_autokern.search.templates.cuda_ring import Ring
from torch_autokern.search.templates.cuda_rows import RowShape
from torch_autokern.store.key import KernelKey, Target

on_a_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
# Rows for two blocks in both widths, for one, and with ends that fill neither a slot nor a part.
KEYS = (
    softmax_key((4096, 65536)),
    softmax_key((4096, 65536), op="_log_softmax"),
    softmax_key((4096, 131072), "bfloat16"),
    softmax_key((8192, 8192), "bfloat16"),
    softmax_key((1000, 50256), "float16"),
    norm_key((4096, 16384), 1, "bfloat16", "bfloat16"),
    norm_key((8192, 4096), 1, parameters="float32"),
    norm_key((1000, 20008), 1, "float16"),
)


def proposals(key: KernelKey, target: Target = H200) -> list[Candidate]:
    if key.op == "native_layer_norm":
        return layer_norm_ring.propose(key, target)
    templates = (softmax_ring, softmax_cluster, softmax_block)
    return [candidate for template in templates for candidate in template.propose(key, target)]


def name_of(key: KernelKey) -> str:
    assert key.tensors[0] is not None
    return f"{key.op}-{'x'.join(map(str, key.tensors[0].sizes))}-{key.tensors[0].dtype}"


@pytest.mark.parametrize("key", KEYS, ids=name_of)
def test_first_ring_compiles_without_spills(key: KernelKey) -> None:
    check_resources(proposals(key)[0])


@pytest.mark.parametrize("template", [softmax_cluster, softmax_block], ids=lambda template: template.NAME)
@pytest.mark.parametrize("key", [KEYS[0], KEYS[2]], ids=name_of)
def test_first_without_a_ring_compiles_without_spills(template: ModuleType, key: KernelKey) -> None:
    check_resources(template.propose(key, H200)[0])


@pytest.mark.long
@pytest.mark.parametrize("key", KEYS, ids=name_of)
def test_every_ring_compiles_without_spills(key: KernelKey) -> None:
    for candidate in proposals(key):
        check_resources(candidate)


def test_ring_reads_by_bulk_copies_only_and_stores_16_bytes(tmp_path: Path) -> None:
    needs_triton()
    (tmp_path / "k.cubin").write_bytes(check_resources(proposals(KEYS[0])[0]))
    tool = find_triton().packages["triton"] / "backends" / "nvidia" / "bin" / "cuobjdump"
    code = subprocess.run([tool, "-sass", tmp_path / "k.cubin"], check=True, capture_output=True, text=True).stdout
    assert "UBLKCP" in code and not re.search(r"LDG\.E", code)
    assert re.search(r"STG\.E\.EF\.128", code)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [2048, 20008, 65536, 131072])
def test_parts_of_a_ring_hold_the_whole_row(parts: int, length: int) -> None:
    ring, shape = Ring(parts, 256, 2, 2), RowShape(length, 2, aligned=True)
    assert ring.share(shape) * parts * shape.elements >= length
    assert ring.vectors(shape) * ring.threads >= ring.share(shape)
    assert 2 * (ring.shared_bytes + 1024) <= 228 << 10
    assert ring.grid(1000) % parts == 0 and ring.grid(1) == parts


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [1, 100, 132, 133, 4096, 8192])
def test_a_grid_of_rings_takes_no_more_turns_than_all_multiprocessors_would(parts: int, rows: int) -> None:
    ring = Ring(parts, 256, 2, 2)
    teams, resident = ring.grid(rows) // parts, {1: 264, 2: 132, 4: 60, 8: 28}[parts]
    assert teams <= min(rows, resident) and -(-rows // teams) == -(-rows // resident)
    assert Ring(parts, 256, 2, 2, waves=4).grid(rows) == parts * min(rows, 4 * resident)


def test_no_ring_for_short_few_or_unaligned_rows_or_another_chip() -> None:
    for key in (softmax_key((4096, 1024)), softmax_key((16, 65536)), softmax_key((4096, 65536), alignment=4)):
        assert proposals(key) == []
    assert proposals(softmax_key((4096, 65537))) == []
    assert proposals(KEYS[0], Target("cuda", "NVIDIA A100-SXM4-80GB", "sm_80", 0)) == []
    assert layer_norm_ring.propose(norm_key((4096, 16384), 1, "bfloat16", "float32"), H200) == []


# Rows: more than one turn for each team, and not the same number for all.
LENGTHS = {"float32": (4096, 20004, 32772, 65536), "float16": (8192, 20008, 50256, 131072), "bfloat16": (16384, 131072)}
CASES = [(dtype, length) for dtype, lengths in LENGTHS.items() for length in lengths]


@pytest.mark.cuda
@on_a_gpu
@pytest.mark.parametrize("op", ["_softmax", "_log_softmax", "native_layer_norm"])
@pytest.mark.parametrize(("dtype", "length"), CASES)
def test_ring_is_no_less_accurate_than_stock_on_a_gpu(op: str, dtype: str, length: int) -> None:
    needs_nvrtc()
    rows = 700
    generator = torch.Generator("cuda").manual_seed(length)
    scalars: dict[str, Any] = {"dim": 1, "half_to_float": False}
    spec = SPECS[op]
    for pattern in ("normal", "offset", "wide", "special"):
        x = torch.randn(rows, length, device="cuda", generator=generator)
        x = x + 100 if pattern == "offset" else x * 30 if pattern == "wide" else x
        x = x.to(getattr(torch, dtype))
        tensors: list[torch.Tensor | None] = [with_special_rows(x, length) if pattern == "special" else x]
        if op == "native_layer_norm":
            scalars = {"normalized_shape": (length,), "eps": 1e-5}
            weight = torch.rand(length, device="cuda", generator=generator).to(x.dtype) + 0.5
            tensors += [weight, weight - 0.25] if pattern != "wide" else [None, None]
        key, stocks, truths = spec.key(tensors, scalars), spec.stock(tensors, scalars), spec.reference(tensors, scalars)
        scales = scales_of(op, truths, tensors, scalars)
        found = proposals(key, local_target("cuda"))
        # Weight and bias of the longest rows fit neither registers nor shared memory.
        assert found or op == "native_layer_norm" or length not in (4096, 16384, 65536, 131072)
        build_together(found)
        for candidate in found:
            for mine, stock, truth, scale in zip(run(candidate, key, tensors), stocks, truths, scales, strict=True):
                assert mine is not None
                truth, scale, where = truth.view_as(mine), scale.view_as(mine), (candidate.parameters, pattern)
                agreed = kinds_of(stock) == kinds_of(truth)
                assert torch.equal(kinds_of(mine)[agreed], kinds_of(stock)[agreed]), where
                first = 7 if pattern == "special" else 0
                finite = truth[first:].isfinite()
                assert bool(finite.any())
                no_worse(mine[first:][finite], stock[first:][finite], truth[first:][finite], scale[first:][finite], where)


@pytest.mark.cuda
@on_a_gpu
@pytest.mark.parametrize("length", [4096, 8192])
def test_ring_of_exactly_48_kb_is_launched_on_a_gpu(length: int) -> None:
    needs_nvrtc()
    x = torch.randn(700, length, device="cuda").to(torch.float32 if length == 4096 else torch.bfloat16)
    key = SPECS["_softmax"].key([x], {"dim": 1, "half_to_float": False})
    found = [c for c in proposals(key, local_target("cuda")) if c.plan.steps[0].shared_bytes == 49152]  # type: ignore[union-attr]
    assert found
    build_together(found)
    for candidate in found:
        mine = run(candidate, key, [x])[0]
        assert mine is not None and torch.allclose(mine.float(), torch.softmax(x.float(), 1), rtol=1e-2, atol=0)


@pytest.mark.cuda
@on_a_gpu
def test_norm_ring_finds_infinite_means_as_in_theory_on_a_gpu() -> None:
    needs_nvrtc()
    x = with_special_rows(torch.randn(300, 16384, device="cuda").bfloat16(), 16384)
    tensors: list[torch.Tensor | None] = [x, None, None]
    key = SPECS["native_layer_norm"].key(tensors, {"normalized_shape": (16384,), "eps": 1e-5})
    found = proposals(key, local_target("cuda"))
    build_together(found)
    for candidate in found:
        y, mean, rstd = (kinds_of(t).flatten(1) for t in run(candidate, key, tensors) if t is not None)
        assert mean[:7, 0].tolist() == [0, 1, 2, 3, 3, 1, 0], candidate.parameters
        assert rstd[:7, 0].tolist() == [0, 1, 1, 1, 1, 1, 0], candidate.parameters
        assert bool((y[1:6] == 1).all()) and not y[0].any() and not y[6:].any(), candidate.parameters


@pytest.mark.cuda
@on_a_gpu
def test_ring_gives_the_same_bits_every_time_on_a_gpu() -> None:
    needs_nvrtc()
    x = torch.randn(1000, 65536, device="cuda")
    x[::7, math.isqrt(65536)] = 50
    key = SPECS["_softmax"].key([x], {"dim": 1, "half_to_float": False})
    found = proposals(key, local_target("cuda"))
    build_together(found)
    for candidate in found:
        once = run(candidate, key, [x])[0]
        for _ in range(5):
            again = run(candidate, key, [x])[0]
            assert once is not None and again is not None and torch.equal(once, again), candidate.parameters
