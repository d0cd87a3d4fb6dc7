"""Compiled and exported programs: what Inductor leaves as calls is served at run time, by the compiled regime's winners."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import values
from test_eager import COMPILED, EAGER, FORWARD_HITS, inside
from tiny_kernels import B, Block, D, Served, assert_all_close, keys_of, plan_for, seen, train_step

import torch_autokern as ak

way = pytest.mark.way
X = values(B, D)
Watch = Callable[[Callable[[], object]], dict[str, dict[str, int]]]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def compiled(model: Any, **options: Any) -> Any:
    """By Inductor, in one graph."""
    return torch.compile(model, fullgraph=True, **options)


@pytest.mark.long
@pytest.mark.parametrize("order", ["compile, then optimise", "optimise, then compile"])
@way("`torch.compile`, `enable()` before or after", "served", "its matrix products; Inductor fuses softmax and LayerNorm")
def test_inductor_is_served_in_both_orders(served: Served, watch: Watch, order: str) -> None:
    """The compiled function calls `addmm.out`, and only the compiled regime has a kernel here."""
    block = Block()
    with torch.no_grad():
        stock = block(X)
        for key in keys_of(lambda: block(X)):
            served.put(key, slots=COMPILED)
        if order.startswith("compile"):
            run = compiled(block)
            run(X)
            ak.enable()
        else:
            ak.enable()
            run = compiled(block)
            run(X)
        mine: list[torch.Tensor] = []
        calls = watch(lambda: mine.append(run(X)))
        ak.disable()
        assert calls == {"addmm": {"hit": 1}}
        assert_all_close(mine, [stock])
        outside: list[torch.Tensor] = []
        assert seen(lambda: outside.append(run(X))) == {}
    assert_all_close(outside, [stock])


@pytest.mark.long
@way("`optimize(torch.compile(model))`", "served", "forward and backward products")
def test_optimise_the_compiled_wrapper(block: Block, watch: Watch) -> None:
    stock = train_step(block, X)
    run = ak.optimize(compiled(block))
    train_step(run, X)
    mine: list[torch.Tensor] = []
    calls = watch(lambda: mine.extend(train_step(run, X)))
    assert calls["addmm"] == {"hit": 1} and calls["mm"]["hit"] >= 1
    assert_all_close(mine, stock)


@pytest.mark.long
@way(
    "a compiled function that calls an optimised model", "unseen", "its graph has no scope: optimise the wrapper, or `enable()`"
)
def test_a_compiled_function_around_an_optimised_model_is_a_documented_limit(block: Block, watch: Watch) -> None:
    stock = train_step(block, X)
    ak.optimize(block)
    run = compiled(lambda x: block(x) * 2)
    with torch.no_grad():
        assert_all_close([run(X)], [stock[0] * 2])
        watch(lambda: run(X))


@pytest.mark.long
@way("`torch.compile`, kernels timed in eager calls only", "stock", "`regime`: faster in eager is not faster there")
def test_inductor_does_not_take_the_eager_winner(served: Served, watch: Watch) -> None:
    block = Block()
    with torch.no_grad():
        stock = block(X)
        for key in keys_of(lambda: block(X)):
            served.put(key, plan=plan_for(key), slots=EAGER)
        run = compiled(block)
        run(X)
        mine: list[torch.Tensor] = []
        assert watch(inside(lambda: run(X), mine)) == {"addmm": {"regime": 1}}
    assert_all_close(mine, [stock])


@pytest.mark.long
@way("`torch.compile(backend='aot_eager')`", "served", "every ATen call is left")
def test_aot_eager(block: Block, watch: Watch) -> None:
    stock = train_step(block, X)
    run = ak.optimize(compiled(block, backend="aot_eager"))
    train_step(run, X)
    mine: list[torch.Tensor] = []
    assert "native_layer_norm" in watch(lambda: mine.extend(train_step(run, X)))
    assert_all_close(mine, stock)


@way("`torch.compile(dynamic=True)`", "served", "sizes are looked up at each call, whatever was traced")
def test_dynamic_shapes(block: Block, watch: Watch) -> None:
    run = ak.optimize(compiled(block, backend="eager", dynamic=True))
    for rows in (7, 9):
        x = values(rows, D)
        assert_all_close([run(x)], [block(x)])
    assert watch(lambda: run(X)) == FORWARD_HITS


@pytest.mark.long
@way("Inductor with `cpp_wrapper` or `freezing`", "unseen", "products go past the dispatcher, or are packed into another op")
def test_what_inductor_calls_past_the_dispatcher(block: Block, watch: Watch) -> None:
    from torch._inductor import config

    stock = block(X).detach()
    for options in ({"cpp_wrapper": True}, {"freezing": True}):
        torch._dynamo.reset()
        with torch.no_grad(), config.patch(options):
            run = compiled(copy.deepcopy(block).eval())
            run(X)
            mine: list[torch.Tensor] = []
            watch(inside(lambda run=run: run(X), mine))  # type: ignore[misc]
        assert_all_close(mine, [stock])


@way("`torch.export`", "served", "an exported program calls ATen at run time; nothing of ours is in it")
def test_export(block: Block, watch: Watch) -> None:
    stock = block(X).detach()
    ak.optimize(block)
    program = torch.export.export(block, (X,), strict=False)
    assert "autokern" not in str(program)
    module = ak.optimize(program.module())
    mine: list[torch.Tensor] = []
    with torch.no_grad():
        assert watch(lambda: mine.append(module(X))) == FORWARD_HITS
    assert_all_close(mine, [stock])


@pytest.mark.long
@way("AOTInductor packages", "unseen", "their products call PyTorch's CPU kernels past the dispatcher")
def test_aot_inductor(block: Block, watch: Watch, tmp_path: Path) -> None:
    stock = block(X).detach()
    ak.optimize(block)
    with torch.no_grad(), ak.enabled():
        program = torch.export.export(block, (X,))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    run = torch._inductor.aoti_load_package(package)
    mine: list[torch.Tensor] = []
    with torch.no_grad():
        watch(inside(lambda: run(X), mine))
    assert_all_close(mine, [stock])
