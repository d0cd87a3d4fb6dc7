"""`explain()`: which kernel serves each call, the first failed condition where none does, and what is not ours."""

from __future__ import annotations

import copy

import msgspec
import pytest
import torch
from tiny_kernels import FORWARD_OPS, B, Block, D, Served, record_data, record_for, train_step
from torch import nn

import torch_autokern as ak
from torch_autokern.errors import InvalidInputError
from torch_autokern.ops import SPECS
from torch_autokern.report.explanation import MAX_REFUSALS, MAX_UNTOUCHED, Explanation, KeyExplanation, summarise_key
from torch_autokern.runtime.session import session
from torch_autokern.runtime.target import local_target

X = torch.randn(B, D)
SOFTMAX = {"dim": 1, "half_to_float": False}
KEY = SPECS["_softmax"].key([X], SOFTMAX)


@pytest.fixture
def published(served: Served):  # type: ignore[no-untyped-def]
    """Publishes records of `KEY` (or of the key given) and takes them away again."""
    digests = []

    def publish(key=KEY, **options):  # type: ignore[no-untyped-def]
        digests.append(key.digest)
        session().store.publish(record_for(key, **options), record_data(KEY))

    yield publish
    for digest in digests:
        session().store.clear(digest)
    session().loaded.clear()
    session().load_failures.clear()


def explained(x: torch.Tensor = X) -> KeyExplanation:
    (row,) = ak.explain(lambda: torch.softmax(x, -1)).keys
    return row


def test_a_served_call_names_its_record(served: Served) -> None:
    model = Block()
    served.store_all(lambda: model(X))
    ak.optimize(model)
    explanation = ak.explain(model, X)
    assert {row.call.split()[0] for row in explanation.keys} == set(FORWARD_OPS)
    for row in explanation.keys:
        assert row.record_id in session().loaded and row.ratio == 2.0 and row.reason == "" and row.cure == ""
        assert row.calls == 1 and 0 < row.share < 1
    assert explanation.notes == ()


def test_a_miss_says_why_and_what_to_do(served: Served) -> None:
    row = explained()
    assert row.record_id == "" and row.reason == "no record of this op in the store" and "autokern warm" in row.cure


def test_the_first_failed_condition_of_each_record_is_said(published) -> None:  # type: ignore[no-untyped-def]
    published()
    row = explained(torch.randn(B, D, dtype=torch.float64))
    assert row.record_id == "" and "input 0: dtype float64, the record proves float32" in row.reason
    assert "sizes (2, 8)" in explained(X[:2]).reason
    assert "strides" in explained(torch.randn(D, B).t()).reason
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert f"{threads + 1} threads" in explained().reason
    finally:
        torch.set_num_threads(threads)


def test_a_record_of_another_machine_is_explained(published) -> None:  # type: ignore[no-untyped-def]
    published(target=msgspec.structs.replace(local_target(), name="AnotherCPU"))
    assert "proved faster on AnotherCPU" in explained().reason


def test_a_record_of_another_torch_is_explained(published) -> None:  # type: ignore[no-untyped-def]
    published(stock_build="2.1")
    assert "proved faster than torch 2.1" in explained().reason


def test_the_policy_of_an_optimised_model_is_the_one_explained(published) -> None:  # type: ignore[no-untyped-def]
    published(accuracy="tolerance")
    model = nn.Softmax(-1)
    for accuracy, is_served in (("exact", False), ("stock", False), ("tolerance", True)):
        ak.optimize(model, accuracy=accuracy)
        (row,) = ak.explain(model, X).keys
        assert bool(row.record_id) == is_served, accuracy
        if not is_served:
            assert "its class tolerance is not admitted" in row.reason
    function = ak.optimize(lambda: torch.softmax(X, -1), accuracy="tolerance")
    explanation = ak.explain(function)
    assert explanation.keys[0].record_id and explanation.notes == ()


def test_a_quarantined_and_a_broken_record_are_explained(published) -> None:  # type: ignore[no-untyped-def]
    published()
    (stored,) = list(session().store.records(KEY.digest))
    session().store.quarantine(KEY.digest, stored.record_id, "crashed at launch")
    assert "quarantined: crashed at launch" in explained().reason
    session().store.lift_quarantine(KEY.digest, stored.record_id)  # clearing keeps what was found out
    session().store.clear(KEY.digest)
    session().store.publish(record_for(KEY), {"kernel.so": b"junk", "plan.json": b"{}"})
    assert "does not load" in explained().reason


def test_the_regime_is_the_calls_own(published) -> None:  # type: ignore[no-untyped-def]
    published(regimes=("compiled",))
    assert "not measured in the eager regime" in explained().reason
    out = torch.empty_like(X)
    (row,) = ak.explain(lambda: torch.ops.aten._softmax.out(X, 1, False, out=out)).keys
    assert row.record_id and row.ratio == 2.0


def test_explain_says_what_the_router_does(published) -> None:  # type: ignore[no-untyped-def]
    """A record that explain names is the one that serves, and the other way round."""
    published(ratio_low=1.1)
    published(ratio_low=1.9)
    row = explained()
    (native,) = [s.native for s in session().loaded.values() if s.record_id == row.record_id]
    before = native.hits
    with ak.enabled():
        torch.softmax(X, -1)
    assert native.hits == before + 1


def test_refusals_are_bounded(published) -> None:  # type: ignore[no-untyped-def]
    for bound in range(MAX_REFUSALS + 3):
        published(ratio_low=1.0 + bound / 10)
    row = explained(X[:2])
    assert len(row.refusals) == MAX_REFUSALS


def test_what_ran_but_is_not_ours_is_listed_with_its_share() -> None:
    q = torch.randn(2, 2, 64, 32)
    model = nn.Conv2d(2, 2, 3)
    explanation = ak.explain(lambda: (nn.functional.scaled_dot_product_attention(q, q, q), model(q), q.relu()))
    rows = {row.op: row for row in explanation.untouched}
    attention = next(row for op, row in rows.items() if "scaled_dot_product" in op and "flash" in op)
    assert "fused by PyTorch (sdpa)" in attention.why
    assert any("convolution" in op for op in rows) and len(rows) <= MAX_UNTOUCHED
    assert all(0 < row.share <= 1 and row.time_us > 0 for row in rows.values())
    shares = sum(row.share for row in explanation.untouched)
    assert shares <= 1 + 1e-6
    assert not {f"aten::{op}" for op in SPECS} & set(rows)


def test_the_transformer_fast_path_is_explained() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    with torch.no_grad():
        explanation = ak.explain(layer, torch.randn(2, 4, 16))
    why = {row.op: row.why for row in explanation.untouched}
    fast = [reason for op, reason in why.items() if "fast path" in reason and op]
    assert fast


def test_notes_name_the_documented_limits() -> None:
    model = Block()
    assert any("not optimised" in note for note in ak.explain(model, X).notes)
    assert any("a function is served inside enabled()" in note for note in ak.explain(lambda: None).notes)
    ak.optimize(model)
    assert ak.explain(model, X).notes == ()
    assert any("copy of an optimised model is stock" in note for note in ak.explain(copy.deepcopy(model), X).notes)
    compiled = torch.compile(model, backend="eager")
    assert any("compiled wrapper" in note for note in ak.explain(compiled, X).notes)
    assert any("DataParallel" in note for note in ak.explain(nn.DataParallel(model), X).notes)
    ak.enable()
    assert ak.explain(copy.deepcopy(model), X).notes == ()
    ak.disable()


def test_the_kill_switch_is_the_reason_for_every_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOKERN_DISABLE", "1")
    explanation = ak.explain(lambda: torch.softmax(X, -1))
    assert any("AUTOKERN_DISABLE=1" in note for note in explanation.notes)
    assert "AUTOKERN_DISABLE=1" in explanation.keys[0].reason


def test_explaining_a_training_step_covers_the_backward(served: Served) -> None:
    model = Block()
    keys = served.store_all(lambda: train_step(model, X))
    ak.optimize(model)
    explanation = ak.explain(lambda: train_step(model, X))
    assert {row.call for row in explanation.keys} == {summarise_key(key) for key in keys}
    assert all(row.record_id for row in explanation.keys)


def test_an_error_in_the_target_is_the_targets() -> None:
    def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ak.explain(fails)
    with ak.record(), pytest.raises(InvalidInputError, match="recording is on already"):
        ak.explain(lambda: None)
    assert ak.explain(lambda: torch.softmax(X, -1)).keys


def test_a_key_is_one_readable_line() -> None:
    assert summarise_key(KEY) == "_softmax float32[4, 8] dim=1"
    transposed = SPECS["mm"].key([torch.randn(4, 3).t(), torch.randn(4, 5)], {})
    assert summarise_key(transposed) == "mm float32[3, 4] strides [1, 3], float32[4, 5]"


def test_explanations_encode_as_json() -> None:
    explanation = ak.explain(lambda: torch.softmax(X, -1))
    assert msgspec.json.decode(msgspec.json.encode(explanation), type=Explanation) == explanation
