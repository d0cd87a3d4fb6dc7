"""`stats()`: counters add up, and the time saved is net of our own cost."""

from __future__ import annotations

import threading

import msgspec
import pytest
import torch
from tiny_kernels import B, Block, D, Served, in_a_fork, record_data, record_for, train_step

import torch_autokern as ak
from torch_autokern.ops import SPECS
from torch_autokern.report.statistics import MAX_MISSED_KEYS, Stats
from torch_autokern.runtime.extension import extension
from torch_autokern.runtime.session import session

X = torch.randn(B, D)


def added(before: Stats, after: Stats) -> dict[str, tuple[int, int, int]]:
    """op -> (calls, hits, misses) that came in between."""
    old = {op.op: op for op in before.ops}
    result = {}
    for op in after.ops:
        was = old.get(op.op)
        row = (op.calls, op.hits, sum(op.misses.values()))
        base = (was.calls, was.hits, sum(was.misses.values())) if was else (0, 0, 0)
        if row != base:
            result[op.op] = tuple(a - b for a, b in zip(row, base, strict=True))
    return result  # type: ignore[return-value]


def test_calls_are_hits_and_misses_over_all_threads(served: Served) -> None:
    served.store_all(lambda: torch.softmax(X, -1))
    before = ak.stats()

    def work() -> None:
        for rows in (B, B, 2):
            torch.softmax(X[:rows], -1)

    ak.enable()
    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ak.disable()
    after = ak.stats()
    assert added(before, after) == {"_softmax": (15, 10, 5)}
    for op in after.ops:
        assert op.calls == op.hits + sum(op.misses.values())
    assert served.hits() == 10


def test_every_kernel_in_use_is_listed_with_what_it_saved(served: Served) -> None:
    model = Block()
    keys = served.store_all(lambda: train_step(model, X))
    ak.optimize(model)
    for _ in range(3):
        train_step(model, X)
    rows = {row.call.split()[0]: row for row in ak.stats().kernels}
    assert set(rows) == {key.op for key in keys}
    for row in rows.values():
        assert row.hits == 3 and row.ratio == 2.0
        assert row.saved_us == pytest.approx(3 * (10.0 - 5.0))  # as the record's timing says


def test_time_saved_is_net_of_every_miss(served: Served) -> None:
    served.store_all(lambda: torch.softmax(X, -1))
    with ak.enabled():
        torch.softmax(X, -1)
    before = ak.stats()
    with ak.enabled():
        for _ in range(10):
            torch.softmax(X[:2], -1)
    after = ak.stats()
    assert after.lookup_cost_us == before.lookup_cost_us > 0
    assert before.time_saved_us - after.time_saved_us == pytest.approx(10 * after.lookup_cost_us, rel=1e-6)
    misses = sum(sum(op.misses.values()) for op in after.ops)
    saved = sum(kernel.saved_us for kernel in after.kernels)
    assert after.time_saved_us == pytest.approx(saved - misses * after.lookup_cost_us)


def test_missed_keys_are_named_with_reason_and_calls(served: Served) -> None:
    x = torch.randn(B + 3, D)
    extension().forget_misses()  # an earlier test may have asked for the same with another number of threads
    with ak.enabled():
        for _ in range(7):
            torch.softmax(x, -1)
    extension_words = SPECS["_softmax"].key([x], {"dim": 1, "half_to_float": False})
    assert extension_words.tensors[0] is not None
    found = [row for row in ak.stats().missed if row.call == f"_softmax float32[{B + 3}, {D}] dim=1"]
    assert [(row.reason, row.calls) for row in found] == [("no_record", 7)]


def test_missed_keys_are_bounded_and_further_misses_still_counted(every_family: None) -> None:
    def child() -> None:  # the table of missed keys is the process's, and full afterwards
        torch.set_num_threads(1)
        extension().forget_misses()
        with ak.enabled():
            for rows in range(1, MAX_MISSED_KEYS + 30):
                torch.softmax(torch.zeros(rows, 3), -1)
        assert len(ak.stats().missed) == MAX_MISSED_KEYS
        extension().forget_misses()
        assert ak.stats().missed == ()
        before = ak.stats()
        with ak.enabled():
            for columns in range(6000):
                torch.softmax(torch.zeros(1, columns + 1), -1)
        assert 3000 < len(extension().missed_keys()) <= 4096
        assert added(before, ak.stats()) == {"_softmax": (6000, 0, 6000)}

    in_a_fork(child)


def test_a_kernel_measured_in_the_compiled_regime_alone_is_listed(served: Served) -> None:
    key = SPECS["_softmax"].key([X], {"dim": 1, "half_to_float": False})
    session().store.publish(record_for(key, regimes=("compiled",)), record_data(key))
    try:
        ak.refresh()
        with ak.enabled():
            torch.ops.aten._softmax.out(X, 1, False, out=torch.empty_like(X))
        rows = [row for row in ak.stats().kernels if row.call.startswith("_softmax")]
        assert [row.hits for row in rows] == [1]
    finally:
        session().store.clear(key.digest)
        session().loaded.clear()


def test_stats_encode_as_json() -> None:
    stats = ak.stats()
    assert msgspec.json.decode(msgspec.json.encode(stats), type=Stats) == stats
