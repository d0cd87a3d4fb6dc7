"""Backward ops before the judge: inputs that a forward really saved, probes that must fail, and algebra of gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.judge.stand_ins import StandIn, quiet, stock_of, task_of, verify
from torch_autokern.judge.evidence import Evidence
from torch_autokern.judge.families import Family
from torch_autokern.judge.inputs import make_inputs
from torch_autokern.judge.outcome import Accuracy, Reason, Refusal, RefusedError
from torch_autokern.judge.properties import PropertyChecks
from torch_autokern.judge.rows import Permutation, permuted_stock, summed_rows
from torch_autokern.ops import SPECS
from torch_autokern.store.key import KernelKey

LOOSE = Accuracy("tolerance", 1e-2, 1e-2)


def softmax_backward_key(*sizes: int, log: bool = False, dtype: torch.dtype = torch.float32, dim: int = 1) -> KernelKey:
    op = "_log_softmax_backward_data" if log else "_softmax_backward_data"
    scalars = {"dim": dim, "input_dtype": str(dtype).removeprefix("torch.")}
    return SPECS[op].key([torch.zeros(sizes, dtype=dtype)] * 2, scalars)


def layer_norm_backward_key(
    *sizes: int, dims: int = 1, mask: tuple[int, ...] = (1, 1, 1), dtype: torch.dtype = torch.float32, affine: bool = True
) -> KernelKey:
    shape, x = sizes[len(sizes) - dims :], torch.zeros(sizes, dtype=dtype)
    weight = torch.zeros(shape, dtype=dtype) if affine else None
    _, mean, rstd = SPECS["native_layer_norm"].stock([x, weight, weight], {"normalized_shape": shape, "eps": 1e-5})
    scalars = {"normalized_shape": shape, "output_mask": mask}
    return SPECS["native_layer_norm_backward"].key([x, x, mean, rstd, weight, weight], scalars)


def _inputs(key: KernelKey, family: Family, seed: int = 5) -> tuple[torch.Tensor | None, ...]:
    return make_inputs(SPECS[key.op], key, family, torch.Generator().manual_seed(seed)).tensors


@pytest.mark.parametrize("family", [f for f in Family if f is not Family.INTEGERS], ids=lambda f: f.value)
def test_a_softmax_backward_gets_probabilities_that_sum_to_1_whatever_the_gradient(family: Family) -> None:
    for log in (False, True):
        gradient, output = _inputs(softmax_backward_key(40, 130, log=log), family)
        assert gradient is not None and output is not None
        probabilities = output.double().exp() if log else output.double()
        assert torch.allclose(probabilities.sum(1), torch.ones(40, dtype=torch.float64), atol=1e-5)
        assert float(probabilities.amax()) > 2 * float(probabilities.amax(1).amin()), "rows are of one kind"


def test_some_trials_of_softmax_have_masked_elements() -> None:
    shares = [
        float((t[1] == 0).float().mean()) for t in (_inputs(softmax_backward_key(40, 130), Family.NORMAL, s) for s in range(12))
    ]
    assert min(shares) == 0 and max(shares) > 0.05


@pytest.mark.parametrize(
    "family", [Family.NORMAL, Family.LARGE_OFFSET, Family.NEAR_LARGEST, Family.CONSTANT], ids=lambda f: f.value
)
def test_mean_and_rstd_of_a_backward_belong_to_its_input(family: Family) -> None:
    _, x, mean, rstd, *_ = _inputs(layer_norm_backward_key(6, 4, 33, dims=2), family)
    assert x is not None and mean is not None and rstd is not None
    wide = x.double()
    assert torch.allclose(mean.double(), wide.mean((1, 2), keepdim=True), rtol=1e-6, atol=1e-30)
    spread = (wide.var((1, 2), keepdim=True, correction=0) + 1e-5).rsqrt()
    assert torch.allclose(rstd.double(), spread, rtol=1e-6, atol=0), "stock's own overflows near the largest number"


KEYS = [
    softmax_backward_key(64, 100), softmax_backward_key(6, 50, 40), softmax_backward_key(8, 2000, log=True),
    softmax_backward_key(64, 100, dtype=torch.bfloat16), softmax_backward_key(64, 100, log=True, dtype=torch.float16),
    layer_norm_backward_key(96, 128), layer_norm_backward_key(6, 8, 16, 33, dims=2, mask=(0, 1, 1)),
    layer_norm_backward_key(64, 38, mask=(1, 0, 0), affine=False), layer_norm_backward_key(96, 64, dtype=torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=lambda k: f"{k.op} {k.tensors[0].sizes} {k.tensors[0].dtype}")
def test_stock_passes_and_no_probe_does(key: KernelKey) -> None:
    found = verify(key, stock_of(key), trials=1, with_probes=True)
    assert isinstance(found, Evidence), found
    refused, passing = found.probes()
    assert passing is None and len(refused) >= 5
    assert PropertyChecks(task_of(key), stock_of(key), 3, quiet).run()["properties"].startswith("passed: linear")


def test_the_envelope_of_sums_over_rows_sees_other_orders_of_rows() -> None:
    key = layer_norm_backward_key(5000, 8)
    tensors = _inputs(key, Family.HEAVY_TAILS)
    spec = SPECS[key.op]
    rows = summed_rows(spec, key)
    assert rows is not None and rows.length == 5000
    stock = spec.stock(tensors, key.scalars)
    other = permuted_stock(spec, key, tensors, Permutation.draw(8, torch.Generator().manual_seed(1)))
    for mine, theirs in zip(stock, other, strict=True):
        assert mine is not None and theirs is not None
        torch.testing.assert_close(theirs, mine, rtol=1e-3, atol=1e-2 * float(mine.abs().max()))
    assert not torch.equal(other[2], stock[2]), "the bias' gradient was added up in the same order"


Wrong = Callable[..., tuple[torch.Tensor | None, ...]]


def _refused(key: KernelKey, wrong: Wrong, accuracy: Accuracy | None = None) -> Refusal:
    found = verify(key, StandIn(wrong), [Family.NORMAL], accuracy, 1)
    if isinstance(found, Refusal):
        return found
    with pytest.raises(RefusedError) as caught:
        PropertyChecks(task_of(key, accuracy), StandIn(wrong), 5, quiet).run()
    return caught.value.refusal


def _layer_norm(
    change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]], key: KernelKey
) -> Wrong:
    def wrong(
        g: torch.Tensor, x: torch.Tensor, m: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return change(*SPECS[key.op].stock((g, x, m, r, w, b), key.scalars))  # type: ignore[arg-type]

    return wrong


def test_wrong_gradients_are_refused() -> None:
    key = softmax_backward_key(64, 100)
    assert _refused(key, lambda g, y: (y * g,)).reason is Reason.WRONG_VALUE
    assert (
        _refused(softmax_backward_key(64, 100, log=True), lambda g, y: (g - g.sum(1, keepdim=True) / 100,)).reason
        is Reason.WRONG_VALUE
    )
    key = layer_norm_backward_key(64, 96)
    for change in (
        lambda a, b, c: (a + 1e-4 * a.abs().max(), b, c), lambda a, b, c: (a, b * (1 + 1e-4), c), lambda a, b, c: (a, b, -c),
        lambda a, b, c: (a, torch.zeros_like(b), c),
    ):  # fmt: skip
        assert _refused(key, _layer_norm(change, key)).reason is Reason.WRONG_VALUE


def test_nonsense_under_a_loose_tolerance_breaks_the_algebra() -> None:
    # A gradient of long rows is below 1e-2 everywhere: zeros pass that tolerance, and no property.
    key = softmax_backward_key(4, 20000)
    loose = Accuracy("tolerance", 10.0, 1e-2)
    assert _refused(key, lambda g, y: (torch.zeros_like(g),), loose).reason is Reason.PROPERTY_BROKEN
    key = layer_norm_backward_key(64, 96)
    loose = Accuracy("tolerance", 1e38, 1e-2)

    def zeros(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.zeros(64, 96), torch.zeros(96), torch.zeros(96)

    assert _refused(key, zeros, loose).reason is Reason.PROPERTY_BROKEN
