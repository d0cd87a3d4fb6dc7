"""The router watches only op families that something could be won on: `Session` decides, the extension installs."""

from __future__ import annotations

import pytest
import torch
from tiny_kernels import B, D, Served, counted

import torch_autokern as ak
from torch_autokern.errors import StrictModeError
from torch_autokern.runtime.extension import extension
from torch_autokern.runtime.session import session

pytestmark = pytest.mark.usefixtures("quiet_router")
X = torch.randn(B, D)


def watched() -> set[str]:
    """Names of the CPU overloads that the router sits on."""
    return {row.name for row in extension().installed_overloads() if row.installed and row.device == "CPU"}


def softmax() -> None:
    torch.softmax(X, -1)


@pytest.fixture
def softmax_in_the_store(served: Served) -> Served:
    assert [key.op for key in served.store_all(softmax)] == ["_softmax"]
    return served


def test_an_empty_store_intercepts_nothing(served: Served) -> None:
    session().refresh()
    model = ak.optimize(torch.nn.Linear(D, D))
    with ak.enabled():
        assert watched() == set()
        assert counted("addmm", lambda: model(X)) == {}
    assert "addmm" in ak.stats().unwatched
    ak.restore(model)


def test_only_families_with_a_kernel_are_intercepted(softmax_in_the_store: Served) -> None:
    with ak.enabled():
        assert watched() == {"aten::_softmax", "aten::_softmax.out"}
        assert counted("_softmax", softmax) == {"hit": 1}
        assert counted("_softmax", lambda: torch.softmax(X[:2], -1)) == {"no_record": 1}
        assert counted("mm", lambda: torch.mm(X, X.t())) == {}
    assert "_softmax" not in ak.stats().unwatched and "mm" in ak.stats().unwatched


def test_a_recording_watches_every_call_and_gives_back_what_it_took(softmax_in_the_store: Served) -> None:
    with ak.enabled():
        with ak.record() as recording:
            torch.mm(X, X.t())
        assert [entry.key.op for entry in recording.workload().entries] == ["mm"]
        assert watched() == {"aten::_softmax", "aten::_softmax.out"}


def test_strict_mode_watches_every_call(softmax_in_the_store: Served) -> None:
    with pytest.raises(StrictModeError, match=r"aten::mm was not served \(no_record\)"), ak.enabled(strict=True):
        torch.mm(X, X.t())
    model = ak.optimize(torch.nn.Linear(D, D), strict=True)
    with pytest.raises(StrictModeError, match="aten::addmm was not served"):
        model(X)
    ak.optimize(model, strict=False)
    model(X)
    ak.restore(model)
    ak.enable(strict=True)
    with pytest.raises(RuntimeError, match="strict mode: aten::mm"):
        torch.mm(X, X.t())
    ak.enable(strict=False)
    torch.mm(X, X.t())


def test_a_family_is_watched_from_the_refresh_that_brings_its_first_kernel(softmax_in_the_store: Served) -> None:
    weight = torch.ones(D)
    with ak.enabled():
        assert "aten::native_layer_norm" not in watched()
        softmax_in_the_store.store_all(lambda: torch.layer_norm(X, (D,), weight, weight))
        assert "aten::native_layer_norm" in watched()
