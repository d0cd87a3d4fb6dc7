"""Per op family: served, missed and the cheapest cure, or never reached us; keys that differ in one length are one group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from tiny_kernels import B, Block, D, Served, record_data, record_for
from torch import nn

import torch_autokern as ak
from torch_autokern.ops import SPECS
from torch_autokern.report.cures import WARM, cheapest_cure
from torch_autokern.report.grouping import differing_length, group_keys, shown_lengths
from torch_autokern.report.hidden import hidden_work
from torch_autokern.runtime.session import session
from torch_autokern.runtime.target import local_target
from torch_autokern.store.key import KernelKey
from torch_autokern.store.workload import SCHEMA, Workload, WorkloadEntry

X = torch.randn(B, D)
SOFTMAX = {"dim": 1, "half_to_float": False}


def key_of(x: torch.Tensor, **changed: Any) -> KernelKey:
    return msgspec.structs.replace(SPECS["_softmax"].key([x], SOFTMAX), **changed)


KEY = key_of(X)


@pytest.fixture
def publish(served: Served) -> Iterator[Callable[..., None]]:
    """Puts a record of `KEY` into the store, with fields of it replaced, and loads it; all are taken away again."""

    def put(**options: Any) -> None:
        session().store.publish(record_for(KEY, **options), record_data(KEY))
        ak.refresh()

    yield put
    session().store.clear(KEY.digest)
    session().loaded.clear()
    session().load_failures.clear()
    ak.refresh()


def cure(key: KernelKey = KEY, **options: Any) -> str:
    return cheapest_cure(key, session(), list(session().store.records()), **options)


def test_without_a_record_the_cure_is_to_warm(served: Served) -> None:
    assert cure() == WARM


def test_a_flag_is_the_cheapest_cure(publish: Callable[..., None]) -> None:
    publish()
    assert "torch.backends.mkldnn.enabled = True" in cure(key_of(X, mkldnn=False))
    assert "torch.set_flush_denormal(False)" in cure(key_of(X, flush_denormal=True))


def test_a_class_that_the_policy_does_not_admit_is_admitted_by_an_argument(publish: Callable[..., None]) -> None:
    publish()
    assert 'optimize(model, accuracy="stock")' in cure(policy="exact")


def test_another_thread_count_is_set_back(publish: Callable[..., None]) -> None:
    publish()
    threads = torch.get_num_threads()
    assert f"torch.set_num_threads({threads})" in cure(threads=threads + 1)


def test_a_shorter_length_is_padded_and_a_longer_one_is_warmed(publish: Callable[..., None]) -> None:
    publish()
    assert "pad from 3 to 4" in cure(key_of(X[:3]))
    assert cure(key_of(torch.randn(B + 1, D))) == WARM


def test_other_strides_cost_a_copy(publish: Callable[..., None]) -> None:
    publish()
    assert ".contiguous() makes a copy" in cure(key_of(torch.randn(B, 2 * D)[:, ::2]))


def test_what_needs_two_changes_is_warmed(publish: Callable[..., None]) -> None:
    publish()
    assert cure(key_of(X[:3], mkldnn=False)) == WARM


def test_a_record_of_another_machine_is_proved_here(publish: Callable[..., None]) -> None:
    publish(target=msgspec.structs.replace(local_target(), name="AnotherCPU"))
    assert WARM in cure()


def test_a_regime_that_was_not_timed_is_warmed(publish: Callable[..., None]) -> None:
    publish(regimes=("eager",))
    assert "compiled regime" in cure(regime="compiled")


def test_the_cheapest_of_several_records_is_named(publish: Callable[..., None]) -> None:
    publish(target=msgspec.structs.replace(local_target(), name="AnotherCPU"))
    publish(ratio_low=1.7)
    assert 'accuracy="stock"' in cure(policy="exact")


def test_explain_sums_up_families(served: Served) -> None:
    model = Block()
    served.store_all(lambda: torch.softmax(X, -1))
    ak.optimize(model)
    explanation = ak.explain(model, X)
    rows = {row.op: row for row in explanation.families}
    assert set(rows) == {"addmm", "native_layer_norm", "_softmax"}
    served_row, missed_row = rows["_softmax"], rows["addmm"]
    assert (served_row.served, served_row.missed, served_row.why, served_row.cure) == (1, 0, "", "")
    assert (missed_row.served, missed_row.missed, missed_row.cure) == (0, 1, WARM) and missed_row.why
    assert 0 < served_row.served_share < 1 and served_row.missed_share == 0 < missed_row.missed_share
    words = str(explanation)
    assert "_softmax: 1 calls served" in words and "addmm: 0 calls served" in words and f"cheapest cure: {WARM}" in words


def test_work_that_never_reached_us_is_named_with_its_families_and_share() -> None:
    q = torch.randn(2, 2, 64, 32)
    target = torch.zeros(D, D)
    explanation = ak.explain(lambda: (nn.functional.scaled_dot_product_attention(q, q, q), target.addmm_(X.t(), X)))
    places = {place.kind: place for place in explanation.hidden}
    assert places["sdpa"].families == ("bmm", "_softmax") and places["sdpa"].calls == 1 and 0 < places["sdpa"].share < 1
    assert places["in place"].families == ("addmm", "baddbmm") and "functional form" in places["in place"].cure
    assert "never reached us" in str(explanation)


def test_the_fast_paths_softmax_is_no_key_but_hidden_work() -> None:
    """It is written over its input, so no record could ever serve it, and warming it would be in vain."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    with torch.no_grad():
        explanation = ak.explain(layer, torch.randn(2, 4, 16))
    assert "_softmax" not in {row.op for row in explanation.families}
    assert {"activation", "fast path"} <= {place.kind for place in explanation.hidden}


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ("Torch-Compiled Region: 0/0", "compiled"),
        ("mkldnn::_linear_pointwise", "frozen"),
        ("mkl::_mkl_linear", "frozen"),
        ("aten::mkldnn_linear", "mkldnn"),
        ("aten::_addmm_activation", "activation"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "sdpa"),
    ],
)
def test_hidden_work_is_known_by_the_ops_name(event: str, kind: str) -> None:
    (place,) = hidden_work([(event, 3, 20.0), ("aten::add", 1, 80.0)], 100.0)
    assert (place.kind, place.calls, place.time_us, place.share, place.ops) == (kind, 3, 20.0, 0.2, (event,))


def test_stats_say_why_calls_were_missed_and_what_to_do(publish: Callable[..., None]) -> None:
    publish()
    with ak.record(), ak.enabled():
        for _ in range(50):
            torch.softmax(X[:3], -1)
    row = next(op for op in ak.stats().ops if op.op == "_softmax")
    assert row.why and row.cure and row.recorded_share is not None and 0 < row.recorded_share < 1
    assert "_softmax: " in str(ak.stats()) and "cheapest cure" in str(ak.stats())


def entry(x: torch.Tensor, time_us: float) -> WorkloadEntry:
    return WorkloadEntry(key_of(x), 2, time_us)


def test_keys_that_differ_in_one_length_are_one_group() -> None:
    tensors = {5: 10.0, 7: 30.0, 6: 20.0}
    entries = [entry(torch.randn(2, rows, rows), time) for rows, time in tensors.items()]
    entries.append(entry(torch.randn(3, 9, 9), 5.0))  # batch and length both differ
    entries.append(WorkloadEntry(SPECS["_log_softmax"].key([torch.randn(2, 5, 5)], SOFTMAX), 1, 1.0))
    workload = Workload(SCHEMA, "2.13.0", "cpu", 1, 100.0, tuple(entries))
    groups = group_keys(workload)
    assert [(len(group.entries), group.lengths, group.calls, group.time_us) for group in groups] == [
        (3, (5, 6, 7), 6, 60.0), (1, (), 2, 5.0), (1, (), 1, 1.0)
    ]  # fmt: skip
    assert groups[0].entries[0].stock_time_us == 30.0
    assert shown_lengths(groups[0].lengths) == "5 to 7 (3 lengths)" and shown_lengths(()) == ""


def test_what_is_not_a_length_keeps_keys_apart() -> None:
    x = torch.randn(4, 6)
    assert differing_length(key_of(x), key_of(torch.randn(5, 6))) == (4, 5)
    assert differing_length(key_of(x), key_of(x)) is None
    assert differing_length(key_of(x), key_of(torch.randn(6, 5).t())) is None  # other stride order
    assert differing_length(key_of(x), key_of(torch.randn(5, 6).double())) is None
    assert differing_length(key_of(x), key_of(torch.randn(5, 7))) is None
    assert differing_length(key_of(x), key_of(torch.randn(5, 6), mkldnn=False)) is None
