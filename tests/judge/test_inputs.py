"""Input sets have the key's exact layout, stay in range, and come back from their seed."""

from __future__ import annotations

import pytest
import torch

from tests.judge.samples import layer_norm_key, softmax_key
from torch_autokern.judge.families import Family
from torch_autokern.judge.inputs import check_supported, families_for, make_inputs
from torch_autokern.judge.memory import Placement, allocate, first_place
from torch_autokern.ops import SPECS
from torch_autokern.ops.spec import tensor_key
from torch_autokern.store.key import KernelKey, TensorKey


def _inputs(key: KernelKey, family: Family, seed: int = 5, placement: Placement = "heap") -> tuple[torch.Tensor | None, ...]:
    return make_inputs(SPECS[key.op], key, family, torch.Generator().manual_seed(seed), placement).tensors


# A padded row, a transposed matrix, an expanded bias, an offset that breaks 64-byte alignment.
LAYOUTS = (
    TensorKey("float32", (6, 10), (16, 1), 4),
    TensorKey("float32", (6, 10), (1, 6), 4),
    TensorKey("float32", (6, 10), (0, 1), 4),
    TensorKey("bfloat16", (3, 5, 7), (70, 14, 2), 2),
    TensorKey("float32", (6, 10), (10, 1), 1),
)


@pytest.mark.parametrize("placement", ["heap", "aligned", "page_end", "page_start"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_region_has_the_layout_asked_for(layout: TensorKey, placement: Placement) -> None:
    region = allocate(layout, placement, 0xFF, torch.Generator().manual_seed(1))
    assert tuple(region.tensor.shape) == layout.sizes and region.tensor.stride() == layout.strides
    assert region.tensor.data_ptr() % layout.alignment_bytes == 0
    assert region.guards_intact()
    region.tensor.fill_(1.0)
    assert region.gaps_hold(0xFF), "gaps are NaN, and filling the tensor leaves them alone"
    assert region.guards_intact()
    if placement != "page_start" or layout.alignment_bytes > 1:
        assert tensor_key(region.tensor).alignment_bytes == layout.alignment_bytes


def test_addresses_are_no_better_aligned_than_promised_in_some_trials() -> None:
    layout = TensorKey("float32", (8, 8), (8, 1), 4)
    generator = torch.Generator().manual_seed(0)
    offsets = {allocate(layout, "heap", 0, generator).tensor.data_ptr() % 64 for _ in range(60)}
    assert 0 in offsets and len(offsets) > 6


def test_one_byte_outside_a_region_is_seen() -> None:
    layout = TensorKey("float32", (6, 10), (16, 1), 4)
    for offset, where in ((-1, "start"), (0, "stop")):
        region = allocate(layout, "heap", 0xA6, torch.Generator().manual_seed(2))
        assert region.guards_intact()
        region.whole[getattr(region, where) + offset] = 0
        assert not region.guards_intact()


def test_a_write_between_strided_rows_is_seen() -> None:
    layout = TensorKey("float32", (6, 10), (16, 1), 4)
    region = allocate(layout, "heap", 0xA6, torch.Generator().manual_seed(2))
    region.poison(0x7F)
    region.tensor.fill_(1.0)
    assert region.gaps_hold(0x7F)
    region.poison(0x7F)
    region.whole[region.start + 41] = 0
    assert not region.gaps_hold(0x7F)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", list(Family), ids=lambda f: f.value)
def test_families_stay_in_range_and_come_back_from_their_seed(family: Family, dtype: torch.dtype) -> None:
    key = softmax_key(40, 130, dtype=dtype)
    (one,), (again,), (other,) = _inputs(key, family), _inputs(key, family), _inputs(key, family, seed=6)
    assert one is not None and again is not None and other is not None
    assert torch.equal(one.nan_to_num(7.0), again.nan_to_num(7.0))
    assert not torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    if family is Family.NONFINITE:
        assert bool(one.isnan().any() and one.isposinf().any() and one.isneginf().any())
        assert bool(one[0].isfinite().all())
    else:
        assert bool(one.isfinite().all())


def test_families_mean_what_they_say() -> None:
    key = softmax_key(40, 130)
    tiny, largest = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    (denormal,) = _inputs(key, Family.DENORMAL)
    assert denormal is not None and 0 < float(denormal.abs().max()) < tiny
    (near,) = _inputs(key, Family.NEAR_LARGEST)
    assert near is not None and float(near.abs().max()) > largest / 8
    (offset,) = _inputs(key, Family.LARGE_OFFSET)
    assert offset is not None
    spread, mean = float(offset.max() - offset.min()), float(offset.mean())
    assert 16 * mean * 2.0**-24 < spread < 130 * mean * 2.0**-23
    (spikes,) = _inputs(key, Family.SPIKES)
    assert spikes is not None and float((spikes == 0).float().mean()) > 0.9
    assert 5 < int((spikes[:, -1] != 0).sum()) < 35
    (constant,) = _inputs(key, Family.CONSTANT)
    assert constant is not None and bool((constant == constant[:, :1]).all(dim=1).any())


def test_columns_of_a_product_are_wide_and_their_products_are_not() -> None:
    key = SPECS["mm"].key([torch.zeros(64, 200), torch.zeros(200, 64)], {})
    left, right = _inputs(key, Family.WIDE_COLUMNS)
    assert left is not None and right is not None
    sizes = left.abs().mean(0)
    assert float(sizes.max() / sizes.min()) > 2.0**60
    products = sizes * right.abs().mean(1)
    assert float(products.max() / products.min()) < 8


def test_parameters_are_never_the_defaults() -> None:
    for family in families_for(SPECS["native_layer_norm"], layer_norm_key(8, 64)):
        _, weight, bias = _inputs(layer_norm_key(8, 64), family)
        assert weight is not None and bias is not None
        for parameter in (weight, bias):
            assert float(parameter.abs().min()) >= 0.25 and not bool((parameter == 1).any())


def test_a_backward_gets_what_the_forward_saved() -> None:
    spec = SPECS["_softmax_backward_data"]
    key = spec.key([torch.zeros(32, 50), torch.zeros(32, 50)], {"dim": 1, "input_dtype": "float32"})
    _, output = _inputs(key, Family.NORMAL)
    assert output is not None and torch.allclose(output.sum(1), torch.ones(32))


def test_an_expanded_tensor_is_filled_once() -> None:
    base = torch.zeros(10).expand(6, 10)
    key = SPECS["_softmax"].key([base], {"dim": 1, "half_to_float": False})
    (x,) = _inputs(key, Family.NORMAL)
    assert x is not None and x.stride() == (0, 1) and torch.equal(x[0], x[5]) and bool(x.isfinite().all())


def test_keys_without_a_wider_truth_or_without_elements_are_not_judged() -> None:
    assert "float64" in str(check_supported(softmax_key(4, 4, dtype=torch.float64)))
    assert check_supported(softmax_key(0, 4)) is not None
    assert check_supported(softmax_key(4, 4)) is None


@pytest.mark.parametrize("place", [(0, 0), (1, 4), (1, 5), (6, 10)])
def test_the_first_true_element_is_found_in_whichever_piece_it_lies(
    place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_autokern.judge.memory._COMPARED_AT_ONCE", 16)
    mask = torch.zeros(7, 11, dtype=torch.bool)
    mask[place] = mask[6, 10] = True
    assert first_place(mask) == place
