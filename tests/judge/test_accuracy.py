"""The accuracy rule: stock passes, nonsense and small sloppiness do not."""

from __future__ import annotations

import pytest
import torch

from tests.judge.samples import layer_norm_key, softmax_key
from tests.judge.stand_ins import StandIn, quiet, stock_of, task_of, verify
from torch_autokern.judge.accuracy import Pool, limits_for
from torch_autokern.judge.evidence import Evidence, _advice
from torch_autokern.judge.families import Family
from torch_autokern.judge.outcome import Accuracy, Reason, Refusal
from torch_autokern.judge.verify import check_family
from torch_autokern.ops import SPECS
from torch_autokern.store.key import KernelKey


def refusal(result: object) -> Refusal:
    assert isinstance(result, Refusal), "accepted"
    return result


# Short and long rows, a dimension that is not the last, several normalised dimensions, fewer than 256 elements, half precision.
STOCK_KEYS = {
    "softmax": softmax_key(64, 100),
    "softmax, dim 1 of 3": softmax_key(6, 40, 24, dim=1),
    "softmax, long rows": softmax_key(3, 20000),
    "softmax, few elements": softmax_key(5, 9),
    "softmax, bfloat16": softmax_key(32, 64, dtype=torch.bfloat16),
    "log_softmax": softmax_key(64, 100, op="_log_softmax"),
    "layer_norm": layer_norm_key(48, 96),
    "layer_norm over 3 dims": layer_norm_key(3, 4, 16, 24, normalized=3),
    "layer_norm, float16": layer_norm_key(32, 64, dtype=torch.float16),
    "mm": SPECS["mm"].key([torch.zeros(24, 40), torch.zeros(40, 16)], {}),
    "addmm": SPECS["addmm"].key([torch.zeros(16), torch.zeros(24, 40), torch.zeros(40, 16)], {"beta": 1, "alpha": 1}),
    "bmm": SPECS["bmm"].key([torch.zeros(3, 24, 40), torch.zeros(3, 40, 16)], {}),
    "softmax backward": SPECS["_softmax_backward_data"].key(
        [torch.zeros(32, 50), torch.zeros(32, 50)], {"dim": 1, "input_dtype": "float32"}
    ),
}


@pytest.mark.parametrize("name", STOCK_KEYS)
def test_stock_itself_passes_every_family(name: str) -> None:
    key = STOCK_KEYS[name]
    result = verify(key, stock_of(key))
    assert isinstance(result, Evidence), result


@pytest.mark.long
def test_stock_itself_is_not_refused_in_thirty_repeats() -> None:
    for key in (softmax_key(64, 100), layer_norm_key(48, 96), softmax_key(64, 100, op="_log_softmax")):
        refused = [r for _ in range(30) if isinstance(r := verify(key, stock_of(key)), Refusal)]
        assert not refused, refused[0]


def _double(key: KernelKey) -> StandIn:
    """Float64 inside, rounded once: the best any kernel can be."""
    spec = SPECS[key.op]
    return StandIn(lambda *t: tuple(r.to(getattr(torch, key.outputs[0].dtype)) for r in spec.reference(t, key.scalars)))  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "softmax, bfloat16", "mm"])
def test_a_correctly_rounded_result_passes(name: str) -> None:
    result = verify(STOCK_KEYS[name], _double(STOCK_KEYS[name]))
    assert isinstance(result, Evidence), result


def test_all_zeros_are_refused_on_long_softmax_rows() -> None:
    # Every value is near 1/65536: zeros pass an absolute tolerance of 1e-2, 1e-3 and 1e-4 everywhere.
    key = softmax_key(4, 65536)
    seen = refusal(verify(key, StandIn(lambda x: (torch.zeros_like(x),)), [Family.UNIFORM]))
    assert seen.reason is Reason.WRONG_VALUE
    assert seen.error is not None and seen.error == pytest.approx(1.0)
    assert seen.family == "uniform" and seen.seed is not None and seen.first_wrong is not None


def test_a_copy_of_the_input_is_refused_for_layer_norm() -> None:
    key = layer_norm_key(2, 16, 32, 32, normalized=3)

    def copy(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, mean, rstd = SPECS["native_layer_norm"].stock((x, weight, bias), key.scalars)
        return x.clone(), mean, rstd

    assert refusal(verify(key, StandIn(copy), [Family.NORMAL])).reason is Reason.WRONG_VALUE


def _one_pass(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mean = x.mean(-1, keepdim=True)
    rstd = ((x * x).mean(-1, keepdim=True) - mean * mean).clamp(min=0).add(1e-5).rsqrt()
    return (x - mean) * rstd * weight + bias, mean, rstd


def test_one_pass_variance_dies_on_a_large_offset() -> None:
    seen = refusal(verify(layer_norm_key(48, 96), StandIn(_one_pass), [Family.LARGE_OFFSET]))
    assert seen.reason is Reason.WRONG_VALUE
    assert "E[x^2] - mean^2" in seen.message


def test_one_pass_variance_is_a_hair_on_calm_data() -> None:
    # Why the family exists: at the tolerances in use (1e-4 and more) standard normal data would let it pass.
    key = layer_norm_key(48, 96)
    loose = Accuracy("tolerance", 1e-4, 1e-4)
    assert isinstance(verify(key, StandIn(_one_pass), [Family.NORMAL], loose), Evidence)


@pytest.mark.parametrize("bits", ["bfloat16", "float16"])
def test_half_precision_inside_is_refused(bits: str) -> None:
    def softmax(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        e = (x - x.amax(1, keepdim=True)).exp().to(getattr(torch, bits)).float()
        return (e / e.sum(1, keepdim=True),)

    assert refusal(verify(softmax_key(64, 100), StandIn(softmax), [Family.NORMAL])).reason is Reason.WRONG_VALUE


def test_half_precision_operands_are_refused_for_matmul() -> None:
    key = STOCK_KEYS["mm"]
    rounded = StandIn(lambda a, b: ((a.bfloat16().float() @ b.bfloat16().float()),))
    assert refusal(verify(key, rounded, [Family.NORMAL])).reason is Reason.WRONG_VALUE


def test_a_split_into_float16_halves_dies_on_wide_columns() -> None:
    def halves(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        high = t.half().float()
        return high, (t - high).half().float()

    def split(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (ah, al), (bh, bl) = halves(a), halves(b)
        return ((ah.double() @ bh.double() + ah.double() @ bl.double() + al.double() @ bh.double()).float(),)

    key = STOCK_KEYS["mm"]
    assert isinstance(verify(key, StandIn(split), [Family.UNIFORM]), Evidence)
    refused = refusal(verify(key, StandIn(split), [Family.WIDE_COLUMNS]))
    assert refused.reason in (Reason.WRONG_VALUE, Reason.WRONG_NONFINITE)


def test_one_wrong_integer_is_refused() -> None:
    def off_by_one(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = a @ b
        result[3, 5] += 1
        return (result,)

    assert refusal(verify(STOCK_KEYS["mm"], StandIn(off_by_one), [Family.INTEGERS])).reason is Reason.WRONG_VALUE


def test_a_dropped_tail_of_the_sum_is_refused() -> None:
    def tail(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        e = (x - x.amax(1, keepdim=True)).exp()
        return (e / e[:, :-1].sum(1, keepdim=True),)

    assert refusal(verify(softmax_key(4, 65536), StandIn(tail), [Family.SPIKES])).reason is Reason.WRONG_VALUE


def test_nan_hidden_by_a_maximum_is_refused_with_its_position() -> None:
    def hiding(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.nan_to_num(torch.softmax(x, 1), 0.0),)

    seen = refusal(verify(softmax_key(64, 100), StandIn(hiding), [Family.NONFINITE]))
    assert seen.reason is Reason.WRONG_NONFINITE
    assert seen.first_wrong is not None and "expected nan" in seen.message


def test_nan_is_no_wildcard() -> None:
    seen = refusal(verify(softmax_key(64, 100), StandIn(lambda x: (torch.full_like(x, float("nan")),)), [Family.NONFINITE]))
    assert seen.reason is Reason.WRONG_NONFINITE


def test_a_tiny_probability_must_be_right_to_its_own_digits() -> None:
    def flushed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.softmax(x, 1)
        return (torch.where(y < 1e-12, torch.zeros_like(y), y),)

    assert refusal(verify(softmax_key(64, 100), StandIn(flushed), [Family.HEAVY_TAILS])).reason is Reason.WRONG_VALUE


def test_a_wrong_rstd_is_refused_though_y_is_right() -> None:
    def wrong(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, mean, rstd = SPECS["native_layer_norm"].stock((x, weight, bias), {"normalized_shape": (96,), "eps": 1e-5})
        return y, mean, rstd * (1 + 1e-5)

    seen = refusal(verify(layer_norm_key(48, 96), StandIn(wrong), [Family.NORMAL]))
    assert (seen.reason, seen.output) == (Reason.WRONG_VALUE, 2)


def test_exact_accepts_stock_and_refuses_one_bit() -> None:
    key = softmax_key(64, 100)
    assert isinstance(verify(key, stock_of(key), accuracy=Accuracy("exact")), Evidence)

    def one_bit(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.softmax(x, 1)
        y.view(torch.int32)[7, 3] ^= 1
        return (y,)

    seen = refusal(verify(key, StandIn(one_bit), [Family.NORMAL], Accuracy("exact")))
    assert (seen.reason, seen.first_wrong) == (Reason.WRONG_VALUE, (7, 3))


def test_tolerance_compares_with_the_stated_bounds() -> None:
    key = softmax_key(64, 100)
    shifted = StandIn(lambda x: (torch.softmax(x, 1) + 5e-3,))
    assert isinstance(verify(key, shifted, [Family.NORMAL], Accuracy("tolerance", 1e-2, 0.0)), Evidence)
    seen = refusal(verify(key, shifted, [Family.NORMAL], Accuracy("tolerance", 1e-3, 0.0)))
    assert seen.error == pytest.approx(5.0, rel=1e-3) and seen.limit == 1.0


def test_limits_never_fall_below_four_units_roundoff_or_one_ulp() -> None:
    task = task_of(softmax_key(64, 100))
    limit = limits_for(task, 0, Family.NORMAL, 6400, [Pool()], Pool())
    assert limit.rms == limit.largest == 4 * 2.0**-24
    half = task_of(softmax_key(64, 100, dtype=torch.bfloat16))
    ulp = Pool(6400 * 2.0**-14, 6400, 2.0**-7)
    assert limits_for(half, 0, Family.NORMAL, 6400, [Pool()], ulp).largest == 2.0**-7


def test_the_envelope_is_the_largest_pool_and_small_outputs_have_no_rms_limit() -> None:
    task = task_of(softmax_key(64, 100))
    stock = [Pool(1.0, 4, 0.5), Pool(4.0, 4, 2.0)]
    limit = limits_for(task, 0, Family.NORMAL, 6400, stock, Pool())
    assert (limit.rms, limit.largest) == (1.25 * 1.0, 2.0 * 2.0)
    small = limits_for(task, 0, Family.NORMAL, 255, stock, Pool())
    assert small.rms == small.largest == 4.0


def test_every_vacuity_probe_is_refused_on_a_real_task() -> None:
    for key in (softmax_key(16, 4096), layer_norm_key(48, 96), softmax_key(64, 100, op="_log_softmax"), STOCK_KEYS["mm"]):
        evidence = verify(key, stock_of(key), trials=1, with_probes=True)
        assert isinstance(evidence, Evidence), evidence
        refused, passing = evidence.probes()
        assert passing is None, f"{key.op}: {passing} passes"
        assert {"zeros", "constant", "dropped tail", "lower precision", "previous output"} <= set(refused)


def test_a_task_with_a_constant_answer_is_vacuous() -> None:
    # Softmax over one element is 1 whatever the input: nothing can be proved.
    key = softmax_key(64, 1)
    evidence = verify(key, stock_of(key), [Family.NORMAL, Family.UNIFORM], trials=1, with_probes=True)
    assert isinstance(evidence, Evidence), evidence
    assert evidence.probes()[1] == "constant"


def test_large_keys_are_judged_in_chunks_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    key = layer_norm_key(32, 256)
    task = task_of(key)
    from torch_autokern.judge import accuracy, device
    from torch_autokern.judge.inputs import make_inputs

    tensors = make_inputs(task.spec, key, Family.NORMAL, torch.Generator().manual_seed(3)).tensors
    stock = task.spec.stock(tensors, key.scalars)
    whole = accuracy.evaluate(task, Family.NORMAL, tensors, [stock], stock)
    monkeypatch.setitem(device._CHUNK_ELEMENTS, "cpu", 1024)
    parts = accuracy.evaluate(task, Family.NORMAL, tensors, [stock], stock)
    for one, other in zip(whole, parts, strict=True):
        assert one.tallies[0].pool.largest == other.tallies[0].pool.largest
        assert one.tallies[0].pool.rms == pytest.approx(other.tallies[0].pool.rms)
        assert one.tallies[0].worst == other.tallies[0].worst


def test_one_draw_of_a_family_that_refuses_a_probe_is_enough() -> None:
    """A single row's tail has a say in half of the draws only."""
    key = softmax_key(1, 4096)
    found = Evidence(task_of(key))
    alone = []
    for seed in range(12):
        report = check_family(task_of(key), stock_of(key), Family.SPIKES, seed, "heap", quiet, with_probes=True)
        one = Evidence(task_of(key))
        assert one.add(report) is None and found.add(report) is None
        alone.append("dropped tail" in one.probes()[0])
    assert not all(alone)
    assert "dropped tail" in found.probes()[0]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (softmax_key(4, 8), "subtract the row's maximum"),
        (softmax_key(4, 8, op="_log_softmax"), "subtract the row's maximum"),
        (layer_norm_key(4, 8), "E[x^2] - mean^2"),
        (STOCK_KEYS["mm"], "accumulate in float32"),
    ],
    ids=["softmax", "log_softmax", "layer_norm", "mm"],
)
def test_advice_on_large_offsets_speaks_of_the_op(key: KernelKey, words: str) -> None:
    assert words in _advice(task_of(key), Family.LARGE_OFFSET)
    assert ("E[x^2]" in _advice(task_of(key), Family.LARGE_OFFSET)) == (key.op == "native_layer_norm")
