"""A broken install: the public names give back what they were given and say once what is missing; import never fails."""

from __future__ import annotations

import importlib
import sys
import types
import warnings

import pytest

import torch_autokern
from torch_autokern import stock_only


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The package, freshly imported, where msgspec is missing."""
    for name in [name for name in sys.modules if name.split(".")[0] == "torch_autokern"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "msgspec", None)
    monkeypatch.setattr(stock_only, "_warned", set())
    monkeypatch.setitem(sys.modules, "torch_autokern.stock_only", stock_only)
    return importlib.import_module("torch_autokern")


def test_what_serves_gives_back_what_it_was_given_and_says_so_once(broken: types.ModuleType) -> None:
    def function() -> int:
        return 7

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert broken.optimize(function) is function
        assert broken.optimize(accuracy="exact")(function) is function
        assert broken.restore(function) is function
        with broken.enabled():
            assert function() == 7
        assert broken.enable() is broken.disable() is broken.empty_cache() is None
        assert broken.is_optimized(function) is False
        assert broken.refresh() == 0
    assert len(said) == 1
    assert said[0].category is broken.AutokernWarning
    assert "msgspec" in str(said[0].message) and "pip install" in str(said[0].message)


@pytest.mark.parametrize("name", ["explain", "record", "stats", "warm"])
def test_what_a_person_asks_for_an_answer_raises_with_the_reason(broken: types.ModuleType, name: str) -> None:
    with pytest.raises(ImportError, match=r"msgspec.*pip install"):
        getattr(broken, name)


def test_strict_mode_does_not_go_on_in_stock(broken: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOKERN_STRICT", "1")
    with pytest.raises(ImportError, match="msgspec"):
        _ = broken.optimize


def test_a_whole_install_has_no_stand_ins() -> None:
    assert torch_autokern.optimize.__module__ == "torch_autokern.api"
