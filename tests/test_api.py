"""The public verbs: what they take, refuse, and give back."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from tiny_kernels import BACKWARD_OPS, FORWARD_OPS, B, Block, D, Served, quiet_router, seen, served, train_step
from torch import nn

import torch_autokern as ak
from torch_autokern.errors import InvalidInputError
from torch_autokern.ops import SPECS
from torch_autokern.runtime.extension import extension
from torch_autokern.store.workload import load_workload

__all__ = ["quiet_router", "served"]
X = torch.randn(B, D)


def test_the_public_names_are_all_there() -> None:
    for name in ak.__all__:
        assert getattr(ak, name) is not None
        assert name in dir(ak)
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        ak.optimise  # noqa: B018


@pytest.mark.parametrize("accuracy", ["", "Stock", "fast", None])
def test_an_unknown_accuracy_is_refused_before_anything_changes(accuracy: str) -> None:
    model = nn.Linear(2, 2)
    for call in (
        lambda: ak.optimize(model, accuracy=accuracy),
        lambda: ak.optimize(lambda: None, accuracy=accuracy),
        lambda: ak.enable(accuracy=accuracy),
        lambda: ak.enabled(accuracy=accuracy).__enter__(),
    ):
        with pytest.raises(InvalidInputError, match="expected one of exact, stock, tolerance"):
            call()
    assert not ak.is_optimized(model) and not extension().process_policy_active()


@pytest.mark.parametrize("target", [None, 3, "model", [nn.Linear(2, 2)]])
def test_a_target_that_is_neither_module_nor_function_is_refused(target: object) -> None:
    with pytest.raises(InvalidInputError, match="takes a module or a function, got"):
        ak.optimize(target)  # type: ignore[call-overload]


def test_restore_of_a_model_that_was_never_optimised_is_harmless() -> None:
    model = nn.Linear(2, 2)
    before = dict(vars(model))
    assert ak.restore(model) is model and vars(model) == before


def test_optimize_as_a_decorator_keeps_the_signature() -> None:
    @ak.optimize
    def double(x: torch.Tensor, *, by: float = 2.0) -> torch.Tensor:
        return x * by

    assert torch.equal(double(X, by=3.0), X * 3)
    assert double.__wrapped__(X) is not None and double.__annotations__["x"] == "torch.Tensor"


def test_enabled_is_a_decorator_too(served: Served) -> None:
    served.put_all(lambda: torch.softmax(X, -1))

    @ak.enabled()
    def run() -> torch.Tensor:
        return torch.softmax(X, -1)

    assert seen(run) == {"_softmax": {"hit": 1}} == seen(run)


def test_scripted_modules_stay_stock_or_are_served_but_never_break(served: Served) -> None:
    model = torch.jit.trace(nn.Linear(D, D), X)
    stock = model(X)
    assert torch.equal(ak.optimize(model)(X), stock)
    assert torch.equal(ak.restore(model)(X), stock)


def test_record_sees_every_thread_and_the_backward() -> None:
    model = Block()
    with ak.record() as recording:
        threads = [threading.Thread(target=train_step, args=(Block(), X)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        train_step(model, X)
    workload = recording.workload()
    calls = {entry.key.op: entry.calls for entry in workload.entries}
    assert calls == dict.fromkeys((*FORWARD_OPS, *BACKWARD_OPS), 4)
    assert all(entry.out_calls == 0 and entry.stock_time_us > 0 for entry in workload.entries)
    times = [entry.stock_time_us for entry in workload.entries]
    assert times == sorted(times, reverse=True)
    assert workload.threads == torch.get_num_threads() and workload.torch_version == torch.__version__
    assert workload.wall_time_us > 0 and all(workload.share(entry) > 0 for entry in workload.entries)


def test_record_serves_nothing_and_changes_nothing(served: Served) -> None:
    served.put_all(lambda: torch.softmax(X, -1))
    with ak.record():
        assert seen(lambda: torch.softmax(X, -1)) == {}
    assert served.hits() == 0


def test_record_inside_a_scope_counts_hits_as_calls(served: Served) -> None:
    served.put_all(lambda: torch.softmax(X, -1))
    with ak.enabled(), ak.record() as recording:
        assert seen(lambda: torch.softmax(X, -1)) == {"_softmax": {"hit": 1}}
    (entry,) = recording.workload().entries
    assert entry.calls == 1 and entry.key == SPECS["_softmax"].key([X], {"dim": 1, "half_to_float": False})


def test_a_second_recording_at_the_same_time_is_refused() -> None:
    with ak.record() as recording:
        with pytest.raises(InvalidInputError, match="a recording is on already"), ak.record():
            pass
        torch.softmax(X, -1)
    assert len(recording.workload().entries) == 1
    with ak.record() as again:
        pass
    assert again.workload().entries == ()
    assert len(recording.workload().entries) == 1  # kept, although the recorder was cleared


def test_a_recording_ends_with_an_error_in_its_block(quiet_router: None) -> None:
    dump = torch._C._dispatch_dump("aten::_softmax")
    with pytest.raises(KeyError), ak.record() as recording:
        torch.softmax(X, -1)
        raise KeyError("mine")
    assert len(recording.workload().entries) == 1
    assert torch._C._dispatch_dump("aten::_softmax") == dump
    torch.softmax(X[:2], -1)
    assert len(recording.workload().entries) == 1


def test_workload_may_be_asked_inside_the_block() -> None:
    with ak.record() as recording:
        assert recording.workload().entries == ()
        torch.softmax(X, -1)
        first = recording.workload()
        torch.log_softmax(X, -1)
    assert [entry.key.op for entry in first.entries] == ["_softmax"]
    assert len(recording.workload().entries) == 2


def test_out_forms_are_counted_as_such() -> None:
    a, b, out = torch.randn(3, 4), torch.randn(4, 5), torch.empty(3, 5)
    with ak.record() as recording:
        torch.mm(a, b, out=out)
        torch.mm(a, b)
        torch.mm(a, b, out=out)
    (entry,) = recording.workload().entries
    assert (entry.calls, entry.out_calls) == (3, 2)


def test_calls_that_no_key_can_express_are_not_recorded() -> None:
    with ak.record() as recording:
        torch.mm(torch.randn(2, 2, dtype=torch.complex64), torch.randn(2, 2, dtype=torch.complex64))
        torch.softmax(torch.randn(0, 4), -1)
    assert recording.workload().entries == ()


def test_a_workload_survives_its_file(tmp_path: Path) -> None:
    with ak.record() as recording:
        train_step(Block(), X)
        torch.addmm(X[0], X, torch.randn(D, D), beta=0.5, alpha=float("inf"))
    workload = recording.workload()
    finite = [entry for entry in workload.entries if entry.key.scalars.get("alpha") != float("inf")]
    assert len(finite) == len(workload.entries) - 1
    import msgspec

    saved = msgspec.structs.replace(workload, entries=tuple(finite))
    saved.save(tmp_path / "workload.json")
    assert load_workload(tmp_path / "workload.json") == saved


def test_empty_cache_and_refresh_may_be_called_at_any_time() -> None:
    ak.empty_cache()
    assert ak.refresh() >= 0
    with ak.enabled():
        ak.empty_cache()
        assert ak.refresh() >= 0
