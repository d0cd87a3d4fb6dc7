"""LayerNorm's backward templates against float64 and stock: shapes with their reasons, masks, families, any cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from template_driver import families, lower_targets, random_cut, run, same_bits, whole, wrong

from torch_autokern.build.candidate import Candidate
from torch_autokern.ops import SPECS
from torch_autokern.runtime.target import local_target
from torch_autokern.search.templates import layer_norm_backward, propose
from torch_autokern.store.key import KernelKey, Target

SPEC = SPECS["native_layer_norm_backward"]
ALL = (1, 1, 1)
ROWS, SPLIT = "layer_norm_backward_rows", "layer_norm_backward_split"

# (sizes, normalised dimensions, template that must answer, why this shape)
GRID = [
    ((37, 384), 1, ROWS, "MiniLM's width: whole vectors; rows not a multiple of the group, the last block shorter"),
    ((9, 38), 1, ROWS, "a part of a vector is left"),
    ((5, 3), 1, ROWS, "less than one vector"),
    ((3, 1), 1, ROWS, "one element: nothing is left of the gradient"),
    ((1, 100), 1, ROWS, "one row: one block"),
    ((2, 3, 4, 33), 2, ROWS, "rank 4, two normalised dimensions: rows and columns come from normalized_shape"),
    ((2, 5, 7, 40), 1, ROWS, "rank 4: three outer dimensions are rows"),
    ((3, 4099), 1, ROWS, "several partial sums of 64 vectors, a prime length"),
    ((6, 17001), 1, SPLIT, "several chunks, the last one shorter; rows not a multiple of the group"),
    ((2, 5, 64, 64), 3, SPLIT, "three normalised dimensions"),
]

# ATen lets 16-bit inputs have parameters of their own dtype or of float32.
MIXED = [
    (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16), (torch.float16, torch.float32),
]  # fmt: skip


def make(
    sizes: tuple[int, ...], dims: int, mask: Sequence[int] = ALL, dtype: torch.dtype = torch.float32,
    parameters: torch.dtype | None = None, weight: bool = True, bias: bool = True,
) -> tuple[KernelKey, list[torch.Tensor | None]]:  # fmt: skip
    """A key, and weight and bias."""
    generator = torch.Generator().manual_seed(3)
    shape = sizes[len(sizes) - dims :]
    drawn = [torch.randn(shape, generator=generator).to(parameters or dtype) for _ in range(2)]
    affine: list[torch.Tensor | None] = [t if there else None for t, there in zip(drawn, (weight, bias), strict=True)]
    x = torch.zeros(sizes, dtype=dtype)
    _, mean, rstd = SPECS["native_layer_norm"].stock([x, *affine], {"normalized_shape": shape, "eps": 1e-5})
    return SPEC.key([x, x, mean, rstd, *affine], {"normalized_shape": shape, "output_mask": tuple(mask)}), affine


def saved(key: KernelKey, x: torch.Tensor) -> list[torch.Tensor]:
    """True mean and rstd of `x`, rounded once."""
    scalars = {"normalized_shape": key.scalars["normalized_shape"], "eps": 1e-5}
    _, mean, rstd = SPECS["native_layer_norm"].reference([x, None, None], scalars)
    assert key.tensors[2] is not None
    return [t.to(getattr(torch, key.tensors[2].dtype)) for t in (mean, rstd)]


def check(candidate: Candidate, key: KernelKey, affine: Sequence[torch.Tensor | None], target: Target | None = None) -> None:
    layout = key.tensors[0]
    assert layout is not None
    dtype = getattr(torch, layout.dtype)
    normal = torch.randn(layout.sizes, generator=torch.Generator().manual_seed(8)).to(dtype)
    for seed, (family, wild) in enumerate(families(layout.sizes, 5, dtype)):
        for gradient, x in ((normal, wild), (wild, normal)):
            tensors = [gradient, x, *saved(key, x), *affine]
            results = run(candidate, key, tensors, whole, target)
            where = f"{candidate.template} {candidate.parameters} on {family} ({'x' if x is wild else 'gradient'})"
            assert wrong(key, tensors, key.scalars, results) == [], where
            again = run(candidate, key, tensors, random_cut(seed), target)
            assert same_bits(results, again), f"other bits for another cut: {where}"


FAST = [GRID[1], GRID[5]]  # a build takes seconds: the fast tests have a tail, and rank 4


@pytest.mark.parametrize(("sizes", "dims", "template", "reason"), FAST, ids=[g[3] for g in FAST])
def test_first_guess_is_right_on_every_family(sizes: tuple[int, ...], dims: int, template: str, reason: str) -> None:
    key, affine = make(sizes, dims)
    candidates = [c for c in propose(key, local_target()) if c.template == template]
    assert candidates, f"{template} is silent: {reason}"
    check(candidates[0], key, affine)


MASKS = [
    pytest.param(mask, sizes, template, marks=[] if mask == (0, 1, 0) and template == ROWS else pytest.mark.long)
    for mask in itertools.product((0, 1), repeat=3)
    for sizes, template in (((11, 38), ROWS), ((3, 16390), SPLIT))
    if any(mask)
]


@pytest.mark.parametrize(("mask", "sizes", "template"), MASKS)
def test_every_output_mask_gives_what_it_wants(mask: tuple[int, ...], sizes: tuple[int, ...], template: str) -> None:
    key, affine = make(sizes, 1, mask)
    candidate = next(c for c in propose(key, local_target()) if c.template == template)
    assert sum(t is not None for t in key.outputs) == sum(mask)
    gradient, x = torch.randn(sizes), torch.randn(sizes) + 3
    tensors = [gradient, x, *saved(key, x), *affine]
    results = run(candidate, key, tensors, random_cut(2))
    assert len(results) == sum(mask)
    assert wrong(key, tensors, key.scalars, results) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("weight", "bias", "mask"), [(False, False, (1, 0, 0)), (True, False, (1, 1, 0)), (False, True, (1, 0, 1))]
)
def test_absent_parameters_are_neither_read_nor_given_gradients(weight: bool, bias: bool, mask: tuple[int, ...]) -> None:
    key, affine = make((13, 40), 1, mask, weight=weight, bias=bias)
    check(propose(key, local_target())[0], key, affine)


@pytest.mark.parametrize(
    ("dtype", "parameters"), [pytest.param(*m, marks=[] if m == MIXED[1] else pytest.mark.long) for m in MIXED], ids=str
)
def test_sixteen_bit_elements_and_mixed_parameters(dtype: torch.dtype, parameters: torch.dtype) -> None:
    key, affine = make((19, 38), 1, dtype=dtype, parameters=parameters)
    assert key.tensors[2] is not None and key.tensors[2].dtype == str(parameters).removeprefix("torch.")
    check(propose(key, local_target())[0], key, affine)


@pytest.mark.long
@pytest.mark.parametrize(("sizes", "dims", "template", "reason"), GRID, ids=[g[3] for g in GRID])
def test_every_candidate_is_right_on_every_family(sizes: tuple[int, ...], dims: int, template: str, reason: str) -> None:
    key, affine = make(sizes, dims)
    candidates = propose(key, local_target())
    assert template in {candidate.template for candidate in candidates}, reason
    for candidate in candidates:
        check(candidate, key, affine)


@pytest.mark.long
def test_streaming_stores_are_right_where_rows_are_aligned_and_where_not() -> None:
    # Proposed only for results beyond the cache; here on shapes small enough to test.
    for length in (64, 67):
        key, affine = make((10, length), 1)
        layout = layer_norm_backward.backward_layout(key)
        assert layout is not None
        check(layer_norm_backward.rows(layout, 32, 4, 2, True), key, affine)
        check(layer_norm_backward.split(layout, 32, 2, 32, True), key, affine)


@pytest.mark.long
def test_expanded_gradients_and_rows_out_of_a_larger_tensor_are_read_as_they_lie() -> None:
    # A mean over the tokens hands every token of a sentence the same gradient.
    x = torch.randn(4, 6, 96)[:, 1:, 8:72]
    gradient = torch.randn(4, 1, 64).expand(4, 5, 64)
    weight = torch.randn(64)
    _, mean, rstd = SPECS["native_layer_norm"].stock([x, weight, weight], {"normalized_shape": (64,), "eps": 1e-5})
    tensors = [gradient, x, mean, rstd, weight, weight]
    key = SPEC.key(tensors, {"normalized_shape": (64,), "output_mask": ALL})
    results = run(propose(key, local_target())[0], key, tensors, random_cut(4))
    assert wrong(key, tensors, key.scalars, results) == []


def test_sums_over_rows_that_float_cannot_hold_are_held() -> None:
    # Gradients of a quarter of the largest number: the bias' sum passes infinity on its way to a finite end.
    key, affine = make((16, 38), 1)
    largest = torch.finfo(torch.float32).max
    gradient = torch.full((16, 38), largest / 4)
    gradient[8:] *= -1
    x = torch.randn(16, 38)
    tensors = [gradient, x, *saved(key, x), *affine]
    _, _, bias = run(propose(key, local_target())[0], key, tensors)
    assert torch.equal(bias, torch.zeros(38))


@pytest.mark.long
@pytest.mark.skipif(not lower_targets(), reason="this machine has no lower ISA level that the templates know")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_isa_levels_are_right_too(dtype: torch.dtype) -> None:
    for target in lower_targets():
        key, affine = make((9, 43), 1, dtype=dtype)
        check(propose(key, target)[0], key, affine, target)
