"""From records to the table: who may run here, who wins, and swapping while threads call."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import msgspec
import pytest
import torch
from tiny_kernels import B, D, Served, counts, marker_plan, record_data, record_for

import torch_autokern as ak
from torch_autokern.errors import OtherLibraryError
from torch_autokern.ops import SPECS
from torch_autokern.runtime import session as session_module
from torch_autokern.runtime.extension import extension
from torch_autokern.runtime.session import session
from torch_autokern.runtime.table import (
    CLASSES,
    Servable,
    build_rows,
    key_difference,
    refusal,
    slower_in_fresh_pages,
    winner,
)
from torch_autokern.runtime.target import local_target, stock_build
from torch_autokern.store.key import KernelKey, Target
from torch_autokern.store.notes import Approval, Notes, Quarantine, Receipt
from torch_autokern.store.record import Timing

SOFTMAX = {"dim": 1, "half_to_float": False}
NO_NOTES = Notes(None, None, ())


@pytest.fixture(scope="module")
def key() -> KernelKey:
    return SPECS["_softmax"].key([torch.randn(B, D)], SOFTMAX)


def servable(key: KernelKey, name: str, **options: Any) -> Servable:
    return Servable(name, record_for(key, **options), native=name)


def test_the_highest_lower_bound_wins(key: KernelKey) -> None:
    group = [servable(key, "a", ratio_low=1.2), servable(key, "b", ratio_low=1.9), servable(key, "c", ratio_low=1.5)]
    for order in itertools.permutations(group):
        best = winner(order, "eager", "stock", deterministic=False)
        assert best is not None and best.record_id == "b"


def test_equal_bounds_go_to_the_smaller_record_id(key: KernelKey) -> None:
    """Ranks choose alike: the rule depends on nothing but the records."""
    group = [servable(key, name, ratio_low=1.5) for name in ("b", "a", "c")]
    for order in itertools.permutations(group):
        best = winner(order, "eager", "stock", deterministic=False)
        assert best is not None and best.record_id == "a"


@pytest.mark.parametrize(("policy", "expected"), [("exact", "exact"), ("stock", "stock"), ("tolerance", "tolerance")])
def test_a_policy_admits_its_class_and_the_stricter_ones(key: KernelKey, policy: Any, expected: str) -> None:
    bounds = {"exact": 1.2, "stock": 1.5, "tolerance": 3.0}
    group = [servable(key, name, accuracy=name, ratio_low=bound) for name, bound in bounds.items()]
    best = winner(group, "eager", policy, deterministic=False)
    assert best is not None and best.record_id == expected
    strictest = winner(group[:1], "eager", policy, deterministic=False)
    assert strictest is not None and strictest.record_id == "exact"


def test_deterministic_algorithms_admit_run_to_run_and_better(key: KernelKey) -> None:
    loose = servable(key, "loose", determinism="not_guaranteed", ratio_low=3.0)
    good = servable(key, "good", determinism="run_to_run")
    best = servable(key, "best", determinism="gpu_to_gpu", ratio_low=1.1)
    assert winner([loose], "eager", "stock", deterministic=True) is None
    assert winner([loose, good, best], "eager", "stock", deterministic=True) is good
    assert winner([loose, best], "eager", "stock", deterministic=True) is best
    assert winner([loose, good, best], "eager", "stock", deterministic=False) is loose


def test_a_regime_takes_only_what_was_measured_in_it(key: KernelKey) -> None:
    """Faster in eager, slower in a compiled graph: each regime has its own winner."""
    eager, compiled = servable(key, "e", regimes=("eager",)), servable(key, "c", regimes=("compiled",))
    assert winner([eager, compiled], "eager", "stock", deterministic=False) is eager
    assert winner([eager, compiled], "compiled", "stock", deterministic=False) is compiled
    assert winner([eager], "compiled", "stock", deterministic=False) is None


def test_rows_hold_a_winner_for_each_slot(key: KernelKey) -> None:
    rows = build_rows([servable(key, "exact", accuracy="exact"), servable(key, "loose", accuracy="tolerance", ratio_low=9.0)])
    assert len(rows) == 1
    words, slots = rows[0]
    assert words == SPECS["_softmax"].encode(key, local_target().threads)
    chosen = {(regime, CLASSES[policy]): native for regime, policy, _, native in slots}
    assert chosen == {
        (0, "exact"): "exact", (0, "stock"): "exact", (0, "tolerance"): "loose",
        (1, "exact"): "exact", (1, "stock"): "exact", (1, "tolerance"): "loose",
    }  # fmt: skip


def test_rows_are_a_function_of_the_records_alone(key: KernelKey) -> None:
    other = SPECS["_softmax"].key([torch.randn(B + 1, D)], SOFTMAX)
    group = [servable(key, "a"), servable(other, "b"), servable(key, "c", ratio_low=2.0)]
    tables = [build_rows(order) for order in itertools.permutations(group)]
    assert all(table == tables[0] for table in tables)


def test_a_record_runs_where_it_was_made(key: KernelKey) -> None:
    assert refusal(record_for(key), NO_NOTES, local_target(), stock_build()) is None


TARGET = Target("cpu", "GenuineIntel-6-143", "x86-64-v4", 8)


@pytest.mark.parametrize(
    ("target", "build", "notes", "words"),
    [
        (TARGET, "2.13", Notes(Quarantine("r", "crashed", "", "t", "here"), None, ()), "quarantined: crashed"),
        (TARGET, "2.13", Notes(None, Approval("r", False, "ann", "looks odd", "t"), ()), "refused by ann: looks odd"),
        (TARGET, "2.13", Notes(None, Approval("r", False, "ann", "drifts", "t", banned=True)), "banned by ann: drifts"),
        (TARGET, "2.13", Notes(approval_wanted=True), "approval wanted"),
        (msgspec.structs.replace(TARGET, arch="x86-64-v3"), "2.13", NO_NOTES, "made for cpu x86-64-v4, this is cpu x86-64-v3"),
        (msgspec.structs.replace(TARGET, name="Other"), "2.13", NO_NOTES, "not yet on Other"),
        (TARGET, "2.14", NO_NOTES, "proved faster than torch 2.13, this is 2.14"),
    ],
)
def test_the_first_failed_condition_is_said(key: KernelKey, target: Target, build: str, notes: Notes, words: str) -> None:
    record = record_for(key, target=TARGET, stock_build="2.13")
    assert refusal(record, NO_NOTES, TARGET, "2.13") is None
    why = refusal(record, notes, target, build)
    assert why is not None and words in why


def test_an_approved_record_runs_where_approval_is_demanded(key: KernelKey) -> None:
    notes = Notes(approval=Approval("r", True, "ann", "read it", "t"), approval_wanted=True)
    assert refusal(record_for(key, target=TARGET, stock_build="2.13"), notes, TARGET, "2.13") is None


def test_a_kernel_that_loses_in_fresh_pages_needs_the_pool(key: KernelKey) -> None:
    record = record_for(key)
    size_bytes = sum(4 * t.numel for t in key.outputs if t is not None)
    assert slower_in_fresh_pages(record, 0) is None, "never timed in fresh pages: nothing speaks against it"
    for bound, runs in ((0.9, False), (1.1, True)):
        fresh = Timing("eager", "fresh", 10.0, 9.0, 1.1, bound, 1.2, 40, 1)
        timings = (*record.verdict.timings, fresh)
        timed = msgspec.structs.replace(record, verdict=msgspec.structs.replace(record.verdict, timings=timings))
        assert slower_in_fresh_pages(timed, size_bytes) is None, "its outputs come from the pool"
        assert (slower_in_fresh_pages(timed, 0) is None) is runs


def test_a_receipt_arms_a_record_on_another_machine(key: KernelKey) -> None:
    record = record_for(key, target=TARGET, stock_build="2.13")
    here = msgspec.structs.replace(TARGET, name="Other")
    receipt = Receipt("r", here, "2.14", 1.2, "t")
    assert refusal(record, Notes(None, None, (receipt,)), here, "2.14") is None
    assert refusal(record, Notes(None, None, (receipt,)), here, "2.15") is not None


def _changed(key: KernelKey, **fields: Any) -> KernelKey:
    return msgspec.structs.replace(key, **fields)


def _input(key: KernelKey, **fields: Any) -> KernelKey:
    assert key.tensors[0] is not None
    return _changed(key, tensors=(msgspec.structs.replace(key.tensors[0], **fields),))


def test_key_difference_names_the_field_that_differs(key: KernelKey) -> None:
    record, threads = record_for(key), local_target().threads
    assert key_difference(key, record, threads) is None
    changes = {
        "op": _changed(key, op="_log_softmax"), "device_type": _changed(key, device_type="cuda"),
        "scalars": _changed(key, scalars={"dim": 0, "half_to_float": False}),
        "flush_denormal": _changed(key, flush_denormal=True), "mkldnn": _changed(key, mkldnn=False),
        "matmul_precision": _changed(key, matmul_precision="tf32"),
        "dtype": _input(key, dtype="float64"), "sizes": _input(key, sizes=(B, D + 1)), "strides": _input(key, strides=(1, B)),
        "alignment_bytes": _input(key, alignment_bytes=1), "absent": _changed(key, tensors=(None,)),
        "output 0": _changed(key, outputs=(None,)),
    }  # fmt: skip
    for name, other in changes.items():
        why = key_difference(other, record, threads)
        assert why is not None and name in why, name
    why = key_difference(key, record, threads + 1)
    assert why is not None and f"{threads + 1} threads" in why


def test_generations_count_up(served: Served) -> None:
    before = extension().table_generation()
    assert extension().set_table([]) == before + 1
    assert extension().table_generation() == before + 1
    assert ak.stats().table_generation == before + 1


def test_sixteen_threads_calling_while_the_table_is_swapped(served: Served) -> None:
    """Results are always right, nothing is lost from the counters, and replaced tables are freed."""
    x = torch.randn(B, D)
    spec_key = SPECS["_softmax"].key([x], SOFTMAX)
    kernel = served.put(spec_key)
    marker = served.put(SPECS["_softmax"].key([torch.randn(B + 1, D)], SOFTMAX))
    stock, calls, wrong = torch.softmax(x, 1), 500, []
    before, hits = counts("_softmax"), kernel.hits
    go, done = threading.Barrier(17), threading.Event()

    def call() -> None:
        go.wait()
        for _ in range(calls):
            y = torch.softmax(x, 1)
            if not torch.allclose(y, stock, atol=1e-6):
                wrong.append(y)

    ak.enable()
    threads = [threading.Thread(target=call) for _ in range(16)]
    for thread in threads:
        thread.start()
    go.wait()
    words = SPECS["_softmax"].encode(spec_key, torch.get_num_threads())
    swaps = 0
    while any(thread.is_alive() for thread in threads):
        rows = [(words, [(0, 1, 0, kernel)])] if swaps % 2 else [(words[:1] + (swaps,) * 5, [(0, 1, 0, marker)])]
        extension().set_table(rows)
        swaps += 1
    done.set()
    for thread in threads:
        thread.join()
    ak.disable()
    after = counts("_softmax")
    added = {name: after[name] - before[name] for name in after if after[name] != before[name]}
    assert not wrong
    assert swaps > 20
    assert set(added) <= {"hit", "no_record"} and sum(added.values()) == 16 * calls
    assert kernel.hits - hits == added.get("hit", 0)
    extension().set_table([])
    assert extension().tables_alive() == 1


def test_calls_go_on_during_a_refresh(served: Served) -> None:
    x = torch.randn(B, D)
    stock, wrong, stop = torch.softmax(x, 1), [], threading.Event()
    served.store_all(lambda: torch.softmax(x, 1))
    ak.enable()

    def call() -> None:
        while not stop.is_set():
            y = torch.softmax(x, 1)
            if not torch.allclose(y, stock, atol=1e-6):
                wrong.append(y)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        assert ak.refresh() == 1
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong and served.hits("_softmax") > 0


def test_a_refresh_takes_a_quarantined_record_out(served: Served) -> None:
    """Cache wiped or changed under a running job: nothing breaks, the next table is right."""
    x = torch.randn(B, D)
    (key,) = served.store_all(lambda: torch.softmax(x, 1))
    (stored,) = list(session().store.records(key.digest))
    with ak.enabled():
        torch.softmax(x, 1)
        assert served.hits("_softmax") == 1
        session().store.quarantine(key.digest, stored.record_id, "test")
        assert ak.refresh() == 0
        torch.softmax(x, 1)
        assert served.hits("_softmax") == 1
    session().store.lift_quarantine(key.digest, stored.record_id)


def test_a_library_that_does_not_load_is_set_aside_and_stock_runs(served: Served) -> None:
    x = torch.randn(B, D)
    key = SPECS["_softmax"].key([x], SOFTMAX)
    store = session().store
    store.publish(record_for(key), {"kernel.so": b"not a library", "plan.json": b"{}"})
    try:
        assert ak.refresh() == 0
        (stored,) = list(store.records(key.digest))
        assert store.notes(key.digest, stored.record_id).quarantine is not None
        assert stored.record_id in session().load_failures
        with ak.enabled():
            assert torch.equal(torch.softmax(x, 1), torch.softmax(x, 1))
    finally:
        store.clear(key.digest)
        session().load_failures.clear()


def test_a_record_of_another_library_waits_and_is_not_set_aside(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: object) -> None:
        raise OtherLibraryError("chosen under another version")

    x = torch.randn(B, D)
    key = SPECS["_softmax"].key([x], SOFTMAX)
    store = session().store
    store.publish(record_for(key), record_data(key))
    monkeypatch.setattr(session_module, "begin_record", begin)
    try:
        assert ak.refresh() == 0
        (stored,) = list(store.records(key.digest))
        assert store.notes(key.digest, stored.record_id).quarantine is None
        assert session().load_failures[stored.record_id] == "chosen under another version"
    finally:
        store.clear(key.digest)
        session().load_failures.clear()


def test_a_record_with_other_output_strides_than_stocks_is_never_served(served: Served) -> None:
    x = torch.randn(B, D)
    transposed = SPECS["_softmax"].key([x], SOFTMAX, outputs=[torch.empty(D, B).t()])
    store = session().store
    store.publish(record_for(transposed), record_data(SPECS["_softmax"].key([x], SOFTMAX)))
    try:
        assert ak.refresh() == 0
        assert any("strides" in why for why in session().load_failures.values())
    finally:
        store.clear(transposed.digest)
        session().load_failures.clear()


def test_two_libraries_in_a_row_are_told_apart(served: Served) -> None:
    """A reused descriptor name once returned the previous library: the identity is read back, so it would be refused."""
    from tiny_kernels import artifact

    native = extension().Library
    native.load(artifact().binary, artifact().identity)
    with pytest.raises(RuntimeError, match="not the one that was verified"):
        native.load(artifact().binary, "0" * 64)
    native.load(artifact().binary, artifact().identity)


def test_the_marker_kernel_can_be_seen(served: Served) -> None:
    """What the other tests rely on: a served call really runs the plan of the table."""
    x = torch.randn(B, D)
    key = SPECS["_softmax"].key([x], SOFTMAX)
    served.put(key, plan=marker_plan(key))
    with ak.enabled():
        assert torch.equal(torch.softmax(x, 1), torch.full_like(x, 42.0))
    assert not torch.equal(torch.softmax(x, 1), torch.full_like(x, 42.0))
