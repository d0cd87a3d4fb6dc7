"""Backward templates of softmax and log-softmax against float64 and stock: shapes with their reasons, families, any cut."""

from __future__ import annotations

import msgspec
import pytest
import torch
from template_driver import families, lower_targets, random_cut, run, same_bits, whole, wrong

from torch_autokern.build.candidate import Candidate
from torch_autokern.ops import SPECS
from torch_autokern.ops.spec import Scalars
from torch_autokern.runtime.target import local_target
from torch_autokern.search.templates import propose, softmax_backward
from torch_autokern.store.key import KernelKey, Target

OPS = {"_softmax_backward_data": torch.softmax, "_log_softmax_backward_data": torch.log_softmax}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# (sizes, dim, template that must answer, why this shape)
GRID = [
    ((7, 38), 1, "softmax_backward_short", "the attention rows: a part of a vector is left; rows not a multiple of the group"),
    ((5, 16), 1, "softmax_backward_short", "whole vectors only"),
    ((6, 3), 1, "softmax_backward_short", "less than the narrowest vector"),
    ((3, 1000), 1, "softmax_backward_long", "blocks, single vectors and a part of one"),
    ((2, 4099), 1, "softmax_backward_long", "several partial sums of 64 blocks, a prime length"),
    ((2, 67, 37), 1, "softmax_backward_columns", "columns not a multiple of the lanes, more than 64 rows: two partial sums"),
    ((3, 5, 160), 1, "softmax_backward_columns", "more columns than one block"),
    ((300, 1), 1, "softmax_backward_short", "rows of one element: 0 whatever the gradient"),
]


def make(op: str, sizes: tuple[int, ...], dim: int, dtype: torch.dtype) -> tuple[KernelKey, Scalars]:
    scalars: Scalars = {"dim": dim, "input_dtype": str(dtype).removeprefix("torch.")}
    return SPECS[op].key([torch.zeros(sizes, dtype=dtype)] * 2, scalars), scalars


def check(candidate: Candidate, key: KernelKey, scalars: Scalars, target: Target | None = None) -> None:
    layout = key.tensors[0]
    assert layout is not None
    dtype, dim = getattr(torch, layout.dtype), int(scalars["dim"])  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(11)
    for seed, (family, gradient) in enumerate(families(layout.sizes, 7, dtype)):
        logits = torch.randn(layout.sizes, generator=generator) * (8 if seed % 2 else 1)
        if seed % 3 == 2 and layout.sizes[dim] > 2:
            logits.select(dim, 1).fill_(float("-inf"))  # masked: an output of exactly 0, or of -inf
        tensors = [gradient, OPS[key.op](logits, dim).to(dtype)]
        results = run(candidate, key, tensors, whole, target)
        where = f"{candidate.template} {candidate.parameters} on {family}"
        assert wrong(key, tensors, scalars, results) == [], where
        assert same_bits(results, run(candidate, key, tensors, random_cut(seed), target)), (
            f"other bits for another cut: {where}"
        )


FAST = [GRID[0], GRID[5]]  # a build takes seconds


@pytest.mark.parametrize(("sizes", "dim", "template", "reason"), FAST, ids=[g[3] for g in FAST])
@pytest.mark.parametrize("op", OPS)
def test_first_guess_is_right_on_every_family(op: str, sizes: tuple[int, ...], dim: int, template: str, reason: str) -> None:
    key, scalars = make(op, sizes, dim, torch.float32)
    candidates = [c for c in propose(key, local_target()) if c.template == template]
    assert candidates, f"{template} is silent: {reason}"
    check(candidates[0], key, scalars)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize(("sizes", "dim"), [((7, 38), 1), ((2, 67, 37), 1)], ids=["rows", "columns"])
def test_sixteen_bit_elements_are_rounded_once(dtype: torch.dtype, sizes: tuple[int, ...], dim: int) -> None:
    for op in OPS:
        key, scalars = make(op, sizes, dim, dtype)
        check(propose(key, local_target())[0], key, scalars)


@pytest.mark.long
@pytest.mark.parametrize(("sizes", "dim", "template", "reason"), GRID, ids=[g[3] for g in GRID])
def test_every_candidate_is_right_on_every_family(sizes: tuple[int, ...], dim: int, template: str, reason: str) -> None:
    key, scalars = make(list(OPS)[sizes[0] % 2], sizes, dim, torch.float32)
    candidates = propose(key, local_target())
    assert template in {candidate.template for candidate in candidates}, reason
    for candidate in candidates:
        check(candidate, key, scalars)


@pytest.mark.long
def test_streaming_stores_are_right_without_alignment() -> None:
    # Proposed only for results beyond the cache; here on shapes small enough to test.
    for sizes in ((3, 1003), (3, 70, 33)):
        key, scalars = make("_softmax_backward_data", sizes, 1, torch.float32)
        layout = softmax_backward.backward_layout(key)
        assert layout is not None
        made = softmax_backward.long(layout, 32, True) if len(sizes) == 2 else softmax_backward.columns(layout, 32, 16, True)
        check(made, key, scalars)


@pytest.mark.long
@pytest.mark.parametrize("op", OPS)
def test_an_expanded_gradient_and_rows_out_of_a_larger_tensor_are_read_as_they_lie(op: str) -> None:
    # A loss that averages over rows hands one number, or one row, to all.
    scalars: Scalars = {"dim": 2, "input_dtype": "float32"}
    gradient = torch.randn(40).expand(3, 5, 40)
    output = OPS[op](torch.randn(5, 3, 40), 2).transpose(0, 1)
    key = SPECS[op].key([gradient, output], scalars)
    candidate = propose(key, local_target())[0]
    results = run(candidate, key, [gradient, output], random_cut(1))
    assert wrong(key, [gradient, output], scalars, results) == []


def test_a_sum_of_gradients_that_float_cannot_hold_is_held() -> None:
    # 38 gradients of a quarter of the largest number add up to infinity in float, and to a finite result times exp(-60).
    key, scalars = make("_log_softmax_backward_data", (5, 38), 1, torch.float32)
    gradient = torch.full((5, 38), torch.finfo(torch.float32).max / 4)
    output = torch.full((5, 38), -60.0)
    (result,) = run(propose(key, local_target())[0], key, [gradient, output])
    assert bool(result.isfinite().all())
    assert torch.equal(result, SPECS[key.op].reference([gradient, output], scalars)[0].float())


def test_other_dtypes_than_the_inputs_own_are_left_alone() -> None:
    key, _ = make("_softmax_backward_data", (4, 38), 1, torch.float32)
    assert propose(key, local_target())
    wider = SPECS[key.op].key([torch.zeros(4, 38)] * 2, {"dim": 1, "input_dtype": "float32"})
    assert propose(msgspec.structs.replace(wider, scalars={"dim": 1, "input_dtype": "float16"}), local_target()) == []


@pytest.mark.long
@pytest.mark.skipif(not lower_targets(), reason="this machine has no lower ISA level that the templates know")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lower_isa_levels_are_right_too(dtype: torch.dtype) -> None:
    # Without F16C halves are widened and rounded bit by bit, without AVX-512 parts of vectors have no masks.
    for target in lower_targets():
        key, scalars = make("_log_softmax_backward_data", (7, 38), 1, dtype)
        check(propose(key, target)[0], key, scalars, target)
