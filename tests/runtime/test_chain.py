"""Living with other overrides: before ours, after ours, taken away beneath or above it; and leaving without a trace."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_key_words import CALLS
from tiny_kernels import B, D, Served, counted

import torch_autokern as ak
from torch_autokern.ops import SPECS
from torch_autokern.runtime.extension import extension

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("quiet_router", "every_family")
SOFTMAX = {"dim": 1, "half_to_float": False}


class Override:
    """Another library's `_softmax` at the CPU key: it fills with a value, or passes on to what it found there."""

    def __init__(self, fill: float | None = None) -> None:
        self.calls = 0
        self._fill = fill
        self._beneath = torch.library.get_kernel("aten::_softmax", "CPU")
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._library.impl("_softmax", self._run, "CPU", with_keyset=True, allow_override=True)

    def _run(self, keys: Any, x: torch.Tensor, dim: int, half: bool) -> torch.Tensor:
        self.calls += 1
        if self._fill is not None:
            return torch.full_like(x, self._fill)
        result: torch.Tensor = self._beneath.call_boxed(keys, x, dim, half)
        return result

    def remove(self) -> None:
        self._library._destroy()


@pytest.fixture
def overrides() -> Iterator[list[Override]]:
    """Those that a test makes are removed, newest first."""
    made: list[Override] = []
    yield made
    for override in reversed(made):
        override.remove()


def softmax(x: torch.Tensor) -> torch.Tensor:
    return aten._softmax.default(x, 1, False)


def registrations() -> dict[str, str]:
    """What the dispatcher holds for every overload of ours."""
    names = {overload.name for overload in extension().installed_overloads()}
    return {name: torch._C._dispatch_dump(name) + torch._C._dispatch_dump_table(name) for name in sorted(names)}


def state(name: str = "aten::_softmax") -> Any:
    return next(o for o in extension().installed_overloads() if o.name == name and o.device == "CPU")


X = torch.randn(B, D)
STOCK = softmax(X)


def test_another_override_owns_the_op(overrides: list[Override]) -> None:
    """One installed before ours is captured and called on every miss; what is said of it is right."""
    overrides.append(Override(fill=7.0))
    with ak.enabled():
        assert state().above_another and state().on_top and "test_chain" in state().captured
        assert not state("aten::_softmax.out").above_another
        assert torch.equal(softmax(X), torch.full_like(X, 7.0))
    assert torch.equal(softmax(X), torch.full_like(X, 7.0))


def test_a_hit_goes_before_an_override_that_was_there(served: Served, overrides: list[Override]) -> None:
    kernel = served.put_call("_softmax", [X], SOFTMAX)
    overrides.append(Override(fill=7.0))
    before = kernel.hits
    with ak.enabled():
        torch.testing.assert_close(softmax(X), STOCK)
    assert kernel.hits == before + 1


def test_an_override_installed_after_ours_shadows_it_and_may_pass_calls_on(served: Served, overrides: list[Override]) -> None:
    kernel = served.put_call("_softmax", [X], SOFTMAX)
    before = kernel.hits
    with ak.enabled():
        overrides.append(Override(fill=7.0))
        assert state().installed and not state().on_top
        assert torch.equal(softmax(X), torch.full_like(X, 7.0))
        assert kernel.hits == before
        overrides.pop().remove()
        overrides.append(Override())
        torch.testing.assert_close(softmax(X), STOCK)
        assert overrides[0].calls == 1 and kernel.hits == before + 1
        overrides.pop().remove()
        assert state().on_top


def test_a_captured_kernel_that_got_invalidated_is_captured_again(overrides: list[Override]) -> None:
    other = Override(fill=7.0)
    with ak.enabled():
        assert torch.equal(softmax(X), torch.full_like(X, 7.0))
        other.remove()
        assert torch.equal(softmax(X), STOCK)
        assert state().installed and state().on_top and not state().above_another
        assert counted("_softmax", lambda: softmax(X)) == {"no_record": 1}
    assert torch.equal(softmax(X), STOCK)


def test_a_captured_kernel_is_captured_again_once_while_many_threads_call() -> None:
    other = Override(fill=7.0)
    wrong: list[object] = []
    with ak.enabled():
        pass
    ak.enable()
    go = threading.Barrier(9)

    def call() -> None:
        go.wait()
        for _ in range(300):
            y = softmax(X)
            if not (torch.equal(y, STOCK) or torch.equal(y, torch.full_like(X, 7.0))):
                wrong.append(y)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    go.wait()
    other.remove()
    for thread in threads:
        thread.join()
    assert not wrong
    assert torch.equal(softmax(X), STOCK)


def _run_out_form(overload: Any, call: tuple[str, Any, Any]) -> tuple[torch.Tensor, ...]:
    op, tensors, scalars = call
    positional, keyword = SPECS[op].call_args(tensors, scalars)
    name = next(argument.name for argument in overload._schema.arguments if argument.is_out)
    result = overload(*positional, **keyword, **{name: torch.empty_like(SPECS[op].stock(tensors, scalars)[0])})
    return (result,)


SAMPLES = {op: next(make for make in CALLS.values() if make()[0] == op) for op in SPECS}


@pytest.mark.parametrize("form", ["functional", "out"])
@pytest.mark.parametrize("op", SPECS)
def test_removed_beneath_while_another_sits_above_runs_pytorchs_own_kernel(op: str, form: str) -> None:
    """What lies beneath cannot be seen then; on a CPU the kernel is known by name."""
    overload = getattr(getattr(torch.ops.aten, op), "default" if form == "functional" else "out", None)
    if overload is None or not torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CPU"):
        assert op.startswith("native_layer_norm")
        return
    call = SAMPLES[op]()

    def run() -> tuple[torch.Tensor, ...]:
        return SPECS[op].stock(*call[1:]) if form == "functional" else _run_out_form(overload, call)

    def override() -> torch.library.Library:
        library = torch.library.Library("aten", "IMPL")
        kernel = torch.library.get_kernel(overload, "CPU")
        name = overload.name().removeprefix("aten::")
        library.impl(name, lambda keys, *a, **k: kernel.call_boxed(keys, *a, **k), "CPU", with_keyset=True, allow_override=True)
        return library

    stock = run()
    beneath = override()
    extension().install()
    above = override()
    beneath._destroy()
    try:
        mine = run()
    finally:
        above._destroy()
    again = run()
    for a, b, c in zip(mine, stock, again, strict=True):
        assert a is None or (torch.equal(a, b) and torch.equal(c, b))


def test_uninstall_restores_exactly() -> None:
    before = registrations()
    with ak.enabled():
        assert registrations() != before
    assert registrations() == before
    assert not any(overload.installed for overload in extension().installed_overloads())


def test_uninstall_over_another_override_leaves_it_as_it_was(overrides: list[Override]) -> None:
    overrides.append(Override(fill=7.0))
    before = registrations()
    with ak.enabled():
        pass
    assert registrations() == before
    assert torch.equal(softmax(X), torch.full_like(X, 7.0))


def test_uninstall_beneath_another_override_leaves_a_pass_through(overrides: list[Override]) -> None:
    before = registrations()
    extension().install()
    overrides.append(Override())
    extension().uninstall()
    assert state().installed and not state().on_top  # the other one may have captured ours
    assert not state("aten::mm").installed
    assert torch.equal(softmax(X), STOCK)
    overrides.pop().remove()
    assert torch.equal(softmax(X), STOCK)
    extension().uninstall()
    assert registrations() == before


def test_a_pass_through_is_taken_up_again_by_the_next_install(served: Served, overrides: list[Override]) -> None:
    kernel = served.put_call("_softmax", [X], SOFTMAX)
    before = kernel.hits
    extension().install()
    overrides.append(Override())
    extension().uninstall()
    with ak.enabled():
        torch.testing.assert_close(softmax(X), STOCK)
    assert kernel.hits == before + 1


def test_installing_a_hundred_times_leaves_no_trace() -> None:
    before = registrations()
    for _ in range(100):
        with ak.enabled():
            pass
    assert registrations() == before
    for _ in range(3):
        extension().install()  # repeating is harmless
    once = registrations()
    extension().install()
    assert registrations() == once
    for _ in range(3):
        extension().uninstall()
    assert registrations() == before


def test_installing_while_threads_call_is_seamless() -> None:
    stop = threading.Event()
    wrong: list[torch.Tensor] = []

    def call() -> None:
        while not stop.is_set():
            y = softmax(X)
            if not torch.equal(y, STOCK):
                wrong.append(y)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        extension().install()
        extension().uninstall()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


_PROBE = """
import warnings
warnings.simplefilter("error")
import torch, torch_autokern as ak
from torch_autokern.runtime.extension import extension
with ak.record(), ak.enabled():
    for overload in extension().installed_overloads():
        if overload.device == "CPU":
            assert overload.installed and overload.on_top and not overload.above_another, overload.name
    torch.softmax(torch.randn(4, 8), -1)
print("quiet")
"""


def test_installing_prints_and_warns_nothing() -> None:
    """Whatever PyTorch itself overrides on a CPU (`torch._native`) is chained to without a word."""
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "quiet\n", "")


def test_pytorchs_own_overrides_register_at_the_keys_that_we_chain_to(overrides: list[Override]) -> None:
    """`torch._native` registers through a Library with allow_override; one done the same way at our key is chained."""
    native = pytest.importorskip("torch._native.registry")
    assert hasattr(native, "_register_all_overrides")
    library = torch.library.Library("aten", "IMPL", "CPU")
    beneath = torch.library.get_kernel("aten::bmm", "CPU")
    calls = []

    def run(keys: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return beneath.call_boxed(keys, a, b)

    library.impl("bmm", run, "CPU", with_keyset=True, allow_override=True)
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    try:
        with ak.enabled():
            mine = torch.bmm(a, b)
        assert len(calls) == 1
    finally:
        library._destroy()
    assert torch.equal(mine, torch.bmm(a, b))
