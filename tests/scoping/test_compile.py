"""Compiled and exported models: no graph break, right numbers, both ways round; and what is served there."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_kernels import FORWARD_OPS, B, Block, D, assert_all_close, seen, train_step

import torch_autokern as ak

X = torch.randn(B, D)
FORWARD_HITS = {op: {"hit": 1} for op in FORWARD_OPS}
BACKENDS = ["eager", pytest.param("aot_eager", marks=pytest.mark.long), pytest.param("inductor", marks=pytest.mark.long)]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def graphs_of(model: torch.nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """(graphs, graph breaks) of a call."""
    torch._dynamo.reset()
    report = torch._dynamo.explain(model)(x)
    torch._dynamo.reset()
    return report.graph_count, report.graph_break_count


def test_dynamo_traces_an_optimised_model_as_the_stock_one(block: Block) -> None:
    """One graph, no break, and the ATen ops stay in it."""
    stock = graphs_of(block, X)
    assert stock == (1, 0)
    ak.optimize(block)
    assert graphs_of(block, X) == stock


@pytest.mark.parametrize("backend", BACKENDS)
def test_optimise_then_compile(block: Block, backend: str) -> None:
    stock = train_step(block, X)
    ak.optimize(block)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    assert_all_close(train_step(compiled, X), stock)
    with torch.no_grad():
        assert_all_close([compiled(X)], [stock[0]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_compile_then_optimise(block: Block, backend: str) -> None:
    stock = train_step(block, X)
    compiled = ak.optimize(torch.compile(block, fullgraph=True, backend=backend))
    assert_all_close(train_step(compiled, X), stock)
    assert ak.is_optimized(compiled) and not ak.is_optimized(block)
    with torch.no_grad():
        compiled(X)
        results: list[torch.Tensor] = []
        hits = seen(lambda: results.append(compiled(X)))
    assert_all_close(results, [stock[0]])
    if backend == "eager":
        assert hits == FORWARD_HITS  # the compiled function runs inside the scope
    else:
        assert "addmm" in hits  # Inductor fuses the others; its products call ATen
    loss = compiled(X).square().sum()
    assert "mm" in seen(loss.backward)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_compiled_graph_calls_what_the_router_serves_at_run_time(block: Block, backend: str) -> None:
    """Nothing is baked in: the same compiled function is served inside a scope and stock outside it."""
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    with torch.no_grad():
        stock = compiled(X)
        assert seen(lambda: compiled(X)) == {}

        def inside() -> None:
            with ak.enabled():
                assert_all_close([compiled(X)], [stock])

        assert "addmm" in seen(inside)  # Inductor fuses the others; its products call ATen
        assert seen(lambda: compiled(X)) == {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_model_compile_before_optimise(block: Block, backend: str) -> None:
    stock = train_step(block, X)
    block.compile(backend=backend, fullgraph=True)
    slot = block._compiled_call_impl
    ak.optimize(block)
    assert ak.is_optimized(block)
    assert_all_close(train_step(block, X), stock)
    with torch.no_grad():
        assert "addmm" in seen(lambda: block(X))
    ak.restore(block)
    assert block._compiled_call_impl is slot
    assert_all_close(train_step(block, X), stock)


@pytest.mark.parametrize("backend", BACKENDS)
def test_model_compile_after_optimise_is_a_documented_limit(block: Block, backend: str) -> None:
    stock = train_step(block, X)
    ak.optimize(block)
    block.compile(backend=backend, fullgraph=True)
    assert not ak.is_optimized(block)
    assert_all_close(train_step(block, X), stock)
    assert seen(lambda: block(X)) == {}
    assert any("not optimised" in note for note in ak.explain(block, X).notes)

    def inside() -> None:
        with ak.record(), ak.enabled(), torch.no_grad():  # a recording watches every call
            block(X)

    assert "addmm" in seen(inside)
    ak.restore(block)
    assert_all_close(train_step(block, X), stock)


def test_optimised_parts_inside_a_compiled_whole(block: Block) -> None:
    ak.optimize(block)
    whole = torch.nn.Sequential(Block(), block)
    expected = whole(X)
    compiled = torch.compile(whole, fullgraph=True, backend="eager")
    assert_all_close([compiled(X)], [expected])


def test_a_compiled_part_inside_an_optimised_whole(block: Block) -> None:
    stock = block(X)
    whole = ak.optimize(torch.nn.Sequential(torch.compile(block, fullgraph=True, backend="eager")))
    whole(X)
    assert seen(lambda: assert_all_close([whole(X)], [stock])) == FORWARD_HITS


def test_an_optimised_function_inside_a_compiled_one(block: Block) -> None:
    @ak.optimize
    def part(x: torch.Tensor) -> torch.Tensor:
        return block(x) + 1

    compiled = torch.compile(lambda x: part(x) * 2, fullgraph=True, backend="eager")
    assert_all_close([compiled(X)], [(block(X) + 1) * 2])


def test_recompiling_for_another_shape(block: Block) -> None:
    compiled = ak.optimize(torch.compile(block, fullgraph=True, backend="eager"))
    for rows in (B, 7, 9, B):
        x = torch.randn(rows, D)
        assert_all_close([compiled(x)], [block(x)])


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.long)])
def test_export_of_an_optimised_model(block: Block, strict: bool) -> None:
    stock = block(X)
    plain = torch.export.export(copy.deepcopy(block), (X,), strict=strict)
    ak.optimize(block)
    exported = torch.export.export(block, (X,), strict=strict)
    assert_all_close([exported.module()(X)], [stock])
    assert [n.target for n in exported.graph.nodes] == [n.target for n in plain.graph.nodes]
    assert ak.is_optimized(block)


def test_fx_tracing_and_scripting_see_the_users_model(block: Block) -> None:
    stock = block(X)
    ak.optimize(block)
    traced = torch.fx.symbolic_trace(block)
    assert_all_close([traced(X)], [stock])
    with torch.no_grad():
        frozen = torch.jit.trace(block, X)
    assert_all_close([frozen(X)], [stock])
