"""Algebra that nonsense cannot satisfy, also under a tolerance that it would pass."""

from __future__ import annotations

import pytest
import torch

from tests.judge.samples import layer_norm_key, softmax_key
from tests.judge.stand_ins import StandIn, quiet, stock_of, task_of, verify
from torch_autokern.judge.evidence import Evidence
from torch_autokern.judge.families import Family
from torch_autokern.judge.outcome import Accuracy, Reason, RefusedError
from torch_autokern.judge.properties import PropertyChecks
from torch_autokern.ops import SPECS
from torch_autokern.store.key import KernelKey

LOOSE = Accuracy("tolerance", 1e-2, 1e-2)
LONG = softmax_key(4, 20000)  # probabilities far below 1e-2: zeros pass that tolerance


def product_key(name: str, dtype: torch.dtype) -> KernelKey:
    left, right, addend = (torch.zeros(sizes, dtype=dtype) for sizes in ((24, 70), (70, 33), (33,)))
    if name == "mm":
        return SPECS["mm"].key([left, right], {})
    return SPECS["addmm"].key([addend, left, right], {"beta": 0.5, "alpha": 2})


def _properties(key: KernelKey, code: StandIn, accuracy: Accuracy | None = None) -> dict[str, str]:
    return PropertyChecks(task_of(key, accuracy), code, 5, quiet).run()


def _refusal(key: KernelKey, code: StandIn, accuracy: Accuracy | None = LOOSE) -> str:
    with pytest.raises(RefusedError) as caught:
        _properties(key, code, accuracy)
    assert caught.value.refusal.reason is Reason.PROPERTY_BROKEN
    return caught.value.refusal.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("accuracy", [None, LOOSE], ids=["stock", "tolerance"])
def test_stock_has_every_property(dtype: torch.dtype, accuracy: Accuracy | None) -> None:
    keys = [
        softmax_key(64, 100, dtype=dtype),
        softmax_key(2, 65536, dtype=dtype),  # float16 flushes some probabilities to 0
        softmax_key(6, 50, 40, dim=1, dtype=dtype),
        softmax_key(16, 4096, op="_log_softmax", dtype=dtype),
        layer_norm_key(64, 384, dtype=dtype),
        layer_norm_key(2, 8, 32, 32, normalized=3, dtype=dtype),
        product_key("mm", dtype),
        product_key("addmm", dtype),
    ]
    for key in keys:
        assert _properties(key, stock_of(key), accuracy)["properties"].startswith("passed"), key


def test_zeros_pass_a_loose_tolerance_and_not_the_sum_of_a_row() -> None:
    zeros = StandIn(lambda x: (torch.zeros_like(x),))
    assert isinstance(verify(LONG, zeros, accuracy=LOOSE, trials=1, families=[Family.NORMAL]), Evidence), (
        "the tolerance alone accepts"
    )
    assert "rows sum to 1" in _refusal(LONG, zeros)


def test_one_over_n_sums_to_1_and_tells_nothing_apart() -> None:
    assert "differ by 1 and more" in _refusal(LONG, StandIn(lambda x: (torch.full_like(x, 1 / x.shape[1]),)))


def test_rows_in_another_order_are_seen() -> None:
    assert "order" in _refusal(LONG, StandIn(lambda x: (torch.softmax(-x, 1),)))


def test_a_softmax_that_does_not_shift_is_seen() -> None:
    def unshifted(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.softmax(x * (1 + 0.02 * x.mean()), 1),)

    assert "constant" in _refusal(softmax_key(64, 100), StandIn(unshifted))


def test_fixed_statistics_leave_other_means() -> None:
    key = layer_norm_key(64, 96)
    stats = torch.zeros(64, 1), torch.ones(64, 1)
    assert "mean 0" in _refusal(key, StandIn(lambda x, w, b: (x * w + b, *stats)))


def test_a_wrong_variance_is_seen() -> None:
    def half(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, mean, rstd = torch.native_layer_norm(x, [96], None, None, 1e-5)
        return 0.5 * y * w + b, mean, rstd

    assert "variance 1" in _refusal(layer_norm_key(64, 96), StandIn(half))


@pytest.mark.parametrize("name", ["mm", "addmm"])
def test_a_product_with_a_constant_added_is_not_linear(name: str) -> None:
    key = product_key(name, torch.float32)
    stock = SPECS[name].stock
    assert "add up" in _refusal(key, StandIn(lambda *t: (stock(t, key.scalars)[0] + 500,)))


def test_a_product_that_saturates_is_not_linear() -> None:
    key = product_key("mm", torch.float32)
    assert _refusal(key, StandIn(lambda a, b: ((a @ b).clamp(-300, 300),)))


@pytest.mark.parametrize("atol", [1e-2, 1.0])
def test_what_published_harnesses_accepted_is_refused_under_any_tolerance(atol: float) -> None:
    """All zeros on long rows, and a LayerNorm that copies its input: both pass 1e-2 on calm data in harnesses of the field."""
    loose = Accuracy("tolerance", atol, 1e-2)
    assert "rows sum to 1" in _refusal(softmax_key(16, 65536), StandIn(lambda x: (torch.zeros_like(x),)), loose)

    def copies(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * w + b, torch.zeros(4, 1, 1, 1), torch.ones(4, 1, 1, 1)

    assert "mean 0" in _refusal(layer_norm_key(4, 64, 32, 32, normalized=3), StandIn(copies), loose)
