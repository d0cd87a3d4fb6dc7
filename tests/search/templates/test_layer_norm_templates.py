"""Every LayerNorm template against float64 and stock: shapes with their reasons, input families, any cut of the range."""

from __future__ import annotations

import pytest
import torch
from template_driver import families, lower_targets, random_cut, run, same_bits, whole, wrong

from torch_autokern.build.candidate import Candidate
from torch_autokern.ops import SPECS
from torch_autokern.ops.spec import Scalars
from torch_autokern.runtime.target import local_target
from torch_autokern.search.templates import propose
from torch_autokern.search.templates.layer_norm_common import norm_layout
from torch_autokern.search.templates.layer_norm_rows import rows
from torch_autokern.search.templates.layer_norm_split import split
from torch_autokern.store.key import KernelKey, Target

# (sizes, normalised dimensions, weight, bias, eps, template, why this shape)
GRID = [
    ((5, 384), 1, True, True, 1e-5, "layer_norm_rows", "MiniLM's width: whole vectors only"),
    ((7, 38), 1, True, False, 1e-5, "layer_norm_rows", "a part of a vector is left; no bias"),
    ((4, 3), 1, False, True, 1e-5, "layer_norm_rows", "less than one vector; no weight"),
    ((2, 3, 4, 33), 2, False, False, 0.0, "layer_norm_rows", "two normalised dimensions, no parameters, eps 0"),
    ((3, 1), 1, True, True, 1e-5, "layer_norm_rows", "one element: variance 0"),
    ((2, 4099), 1, True, True, 1e-5, "layer_norm_rows", "several short sums, a prime length"),
    ((3, 9001), 1, True, True, 1e-5, "layer_norm_rows", "several pieces merged within a row"),
    ((2, 17001), 1, True, True, 1e-5, "layer_norm_split", "several chunks, the last one shorter"),
    ((2, 5, 64, 64), 3, False, True, 0.0, "layer_norm_split", "three normalised dimensions, eps 0"),
]

# ATen lets 16-bit inputs have parameters of their own dtype or of float32.
MIXED = [
    (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16), (torch.float16, torch.float32),
]  # fmt: skip


def make_key(
    sizes: tuple[int, ...], dims: int, weight: bool, bias: bool, eps: float, dtype: torch.dtype = torch.float32,
    parameter_dtype: torch.dtype | None = None,
) -> tuple[KernelKey, list[torch.Tensor | None]]:  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    shape = sizes[-dims:]
    drawn = [torch.randn(shape, generator=generator).to(parameter_dtype or dtype) for _ in range(2)]
    parameters = [t if there else None for t, there in zip(drawn, (weight, bias), strict=True)]
    scalars: Scalars = {"normalized_shape": shape, "eps": eps}
    return SPECS["native_layer_norm"].key([torch.zeros(sizes, dtype=dtype), *parameters], scalars), parameters


def check(candidate: Candidate, key: KernelKey, parameters: list[torch.Tensor | None], target: Target | None = None) -> None:
    x_key = key.tensors[0]
    assert x_key is not None
    for seed, (family, x) in enumerate(families(x_key.sizes, 5, getattr(torch, x_key.dtype))):
        tensors = [x, *parameters]
        results = run(candidate, key, tensors, whole, target)
        assert wrong(key, tensors, key.scalars, results) == [], f"{candidate.template} {candidate.parameters} on {family}"
        assert same_bits(results, run(candidate, key, tensors, random_cut(seed), target)), (
            f"other bits for another cut on {family}"
        )


@pytest.mark.parametrize(("sizes", "dims", "weight", "bias", "eps", "template", "reason"), GRID, ids=[g[6] for g in GRID])
def test_first_guess_is_right_on_every_family(
    sizes: tuple[int, ...], dims: int, weight: bool, bias: bool, eps: float, template: str, reason: str
) -> None:
    key, parameters = make_key(sizes, dims, weight, bias, eps)
    candidates = [c for c in propose(key, local_target()) if c.template == template]
    assert candidates, f"{template} is silent: {reason}"
    check(candidates[0], key, parameters)


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "parameters"), MIXED, ids=str)
def test_sixteen_bit_elements_give_mean_and_rstd_in_the_dtype_of_the_parameters(
    dtype: torch.dtype, parameters: torch.dtype
) -> None:
    key, affine = make_key((5, 43), 1, True, True, 1e-5, dtype, parameters)
    name = str(parameters).removeprefix("torch.")
    assert [t.dtype for t in key.outputs if t is not None][1:] == [name, name]
    check(propose(key, local_target())[0], key, affine)


@pytest.mark.long
@pytest.mark.parametrize(("sizes", "dims", "weight", "bias", "eps", "template", "reason"), GRID, ids=[g[6] for g in GRID])
def test_every_candidate_is_right_on_every_family(
    sizes: tuple[int, ...], dims: int, weight: bool, bias: bool, eps: float, template: str, reason: str
) -> None:
    key, parameters = make_key(sizes, dims, weight, bias, eps)
    for candidate in propose(key, local_target()):
        check(candidate, key, parameters)


def test_streaming_stores_are_right_without_alignment() -> None:
    # Proposed only for outputs beyond the cache; here on shapes small enough to test.
    key, parameters = make_key((3, 1008), 1, True, True, 1e-5)
    layout = norm_layout(key)
    assert layout is not None
    check(rows(layout, 32, 8, True, True), key, parameters)
    check(split(layout, 32, 4, 256, 1, True, True), key, parameters)
    check(split(layout, 32, 4, 256, 2, True, True), key, parameters)  # of three rows, one is left


def test_a_constant_row_gives_exactly_the_bias_and_its_value_as_mean() -> None:
    # The mean of equal numbers is that number; a plain float sum misses it, and eps is too small to hide that.
    key, parameters = make_key((4, 4099), 1, False, True, 1e-5)
    x = torch.full((4, 4099), 1e10 / 3)
    y, mean, rstd = run(propose(key, local_target())[0], key, [x, *parameters])
    assert parameters[1] is not None
    assert torch.equal(y, parameters[1].expand(4, -1))
    assert torch.equal(mean, x[:, :1])
    assert torch.allclose(rstd, torch.tensor(1e-5).rsqrt(), rtol=1e-6)


def test_a_row_whose_start_says_nothing_of_its_rest_keeps_its_variance() -> None:
    # The mean of the first 1024 elements stands in for the row's: here it is a thousand standard deviations off.
    key, parameters = make_key((4, 5000), 1, True, True, 1e-5)
    x = torch.randn(4, 5000)
    x[:, :1024] += 1000
    x[2:, :1024] *= 1e6
    results = run(propose(key, local_target())[0], key, [x, *parameters])
    assert wrong(key, [x, *parameters], key.scalars, results) == []


def test_rows_of_other_strides_share_mean_and_rstd_layout() -> None:
    # Every second row of a wider tensor: rows are dense, the step between them is not.
    x = torch.randn(8, 2, 96)[::2, :, 8:72]
    scalars: Scalars = {"normalized_shape": (64,), "eps": 1e-5}
    weight, bias = torch.randn(64), torch.randn(64)
    key = SPECS["native_layer_norm"].key([x, weight, bias], scalars)
    results = run(propose(key, local_target())[0], key, [x, weight, bias], random_cut(2))
    assert wrong(key, [x, weight, bias], scalars, results) == []


@pytest.mark.skipif(not lower_targets(), reason="this machine has no lower ISA level that the templates know")
def test_lower_isa_levels_are_right_too() -> None:
    key, parameters = make_key((3, 1003), 1, True, True, 1e-5)
    for target in lower_targets():
        check(propose(key, target)[0], key, parameters, target)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_channels_that_are_not_neighbours_are_turned(dtype: torch.dtype, affine: bool) -> None:
    # A convolution's output with its channels moved last, as in ConvNeXt, and flattened patches, as in ViT.
    parameters = [torch.randn(38).to(dtype) if affine else None for _ in range(2)]
    scalars: Scalars = {"normalized_shape": (38,), "eps": 1e-5}
    for seed, (family, values) in enumerate(families((2, 38, 5, 7), 5, dtype)):
        for x in (values.permute(0, 2, 3, 1), values.flatten(2).transpose(1, 2)):
            tensors = [x, *parameters]
            key = SPECS["native_layer_norm"].key(tensors, scalars)
            candidate = propose(key, local_target())[0]
            assert candidate.template == "layer_norm_turned"
            results = run(candidate, key, tensors, random_cut(seed))
            assert wrong(key, tensors, scalars, results) == [], family


@pytest.mark.long
def test_channels_last_images_are_rows_of_neighbours() -> None:
    x = torch.randn(2, 38, 5, 7).to(memory_format=torch.channels_last).permute(0, 2, 3, 1)
    key = SPECS["native_layer_norm"].key([x, None, None], {"normalized_shape": (38,), "eps": 1e-5})
    candidate = propose(key, local_target())[0]
    assert candidate.template == "layer_norm_rows"
    assert wrong(key, [x, None, None], key.scalars, run(candidate, key, [x, None, None])) == []
