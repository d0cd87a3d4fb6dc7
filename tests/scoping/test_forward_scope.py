"""What a scope covers while code runs: the optimised model's forward, on its thread, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch
from tiny_kernels import BACKWARD_OPS, FORWARD_OPS, B, Block, D, Served, assert_all_close, seen, train_step
from torch import nn

import torch_autokern as ak
from torch_autokern.runtime.extension import extension

X = torch.randn(B, D)


ALL_FORWARD_HITS = {op: {"hit": 1} for op in FORWARD_OPS}


def test_forward_of_an_optimised_model_is_served(block: Block) -> None:
    stock = block(X)
    assert ak.optimize(block) is block
    results = []
    assert seen(lambda: results.append(block(X))) == ALL_FORWARD_HITS
    assert_all_close(results, [stock])


def test_the_rest_of_the_process_is_untouched(block: Block) -> None:
    other = Block()
    ak.optimize(block)
    assert seen(lambda: other(X)) == {}
    assert seen(lambda: torch.softmax(X, -1)) == {}
    assert seen(lambda: block.norm(X)) == {}  # a part of it, called from outside


def test_optimised_inside_stock(block: Block) -> None:
    outer = nn.Sequential(Block(), block, Block())
    ak.optimize(block)
    assert seen(lambda: outer(X)) == ALL_FORWARD_HITS
    ak.restore(block)
    assert seen(lambda: outer(X)) == {}


def test_stock_inside_optimised_belongs_to_the_optimised_forward(block: Block) -> None:
    outer = ak.optimize(nn.Sequential(block, Block()))
    assert seen(lambda: outer(X)) == {op: {"hit": 2} for op in FORWARD_OPS}
    assert seen(lambda: block(X)) == {}


def test_optimised_inside_optimised_has_its_own_policy(served: Served, block: Block) -> None:
    inner_only = [(0, 2, 0), (0, 2, 1)]
    extension().set_table([])
    fresh = Served()
    for key in _keys(block):
        fresh.put(key, slots=inner_only)
    inner, outer_part = block, Block()
    outer = ak.optimize(nn.Sequential(outer_part, inner, outer_part), accuracy="stock")
    ak.optimize(inner, accuracy="tolerance")
    assert seen(lambda: outer(X)) == {op: {"hit": 1, "accuracy": 2} for op in FORWARD_OPS}
    ak.restore(inner)
    assert seen(lambda: outer(X)) == {op: {"accuracy": 3} for op in FORWARD_OPS}
    fresh.close()


def _keys(model: nn.Module) -> list:  # type: ignore[type-arg]
    with ak.record() as recording:
        model(X)
    return [entry.key for entry in recording.workload().entries]


def test_a_module_shared_by_an_optimised_and_a_stock_model(block: Block) -> None:
    mine, theirs = ak.optimize(nn.Sequential(block)), nn.Sequential(block)
    assert seen(lambda: mine(X)) == ALL_FORWARD_HITS
    assert seen(lambda: theirs(X)) == {}


def test_a_module_called_by_itself_through_another(block: Block) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.depth = block, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.depth += 1
            return self(self.block(x)) if self.depth < 3 else x

    model = ak.optimize(Twice())
    assert seen(lambda: model(X)) == {op: {"hit": 2} for op in FORWARD_OPS}
    assert seen(lambda: torch.softmax(X, -1)) == {}


def test_a_function_wrapped_by_optimize_is_a_scope(block: Block) -> None:
    @ak.optimize
    def run(x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        """Says what it does."""
        return block(block(x)) if twice else block(x)

    assert run.__doc__ == "Says what it does." and run.__name__ == "run"
    assert seen(lambda: run(X)) == ALL_FORWARD_HITS
    assert seen(lambda: run(X, twice=True)) == {op: {"hit": 2} for op in FORWARD_OPS}
    assert seen(lambda: block(X)) == {}


def test_enabled_blocks_nest_and_end(block: Block) -> None:
    def run() -> None:
        with ak.enabled(), ak.enabled():
            block(X)

    assert seen(run) == ALL_FORWARD_HITS
    assert seen(lambda: block(X)) == {}


def test_enable_serves_every_thread_until_disable(block: Block) -> None:
    ak.enable()
    ak.enable()  # repeating is harmless

    def threaded() -> None:
        thread = threading.Thread(target=block, args=(X,))
        thread.start()
        thread.join()

    assert seen(lambda: block(X)) == ALL_FORWARD_HITS
    assert seen(threaded) == ALL_FORWARD_HITS
    ak.disable()
    ak.disable()
    assert seen(lambda: block(X)) == {}


def test_an_enabled_block_serves_its_own_thread_only(block: Block) -> None:
    def run() -> None:
        with ak.enabled():
            thread = threading.Thread(target=block, args=(X,))
            thread.start()
            thread.join()

    assert seen(run) == {}


def test_optimised_models_in_several_threads(block: Block) -> None:
    ak.optimize(block)
    stock = Block()

    def run() -> None:
        threads = [threading.Thread(target=model, args=(X,)) for model in (block, stock) * 8]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert seen(run) == {op: {"hit": 8} for op in FORWARD_OPS}


def test_an_exception_in_forward_ends_the_scope(block: Block) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            block(x)
            raise KeyError("the user's own")

    model = ak.optimize(Fails())
    with pytest.raises(KeyError, match="the user's own"):
        model(X)
    assert seen(lambda: block(X)) == {}
    with pytest.raises(RuntimeError, match="mine"), ak.enabled():
        raise RuntimeError("mine")
    assert seen(lambda: block(X)) == {}


def test_a_generator_left_late_does_not_bring_an_ended_scope_back(block: Block) -> None:
    """Its block was entered inside a forward that has ended when the generator closes."""

    def steps() -> Iterator[torch.Tensor]:
        with ak.enabled():
            yield block(X)
            yield block(X)

    class Starts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps = steps()
            return next(self.steps)

    model = ak.optimize(Starts())
    model(X)
    model.steps.close()
    assert seen(lambda: block(X)) == {}


def test_generators_that_interleave_leave_no_scope_behind(block: Block) -> None:
    def steps() -> Iterator[None]:
        with ak.enabled():
            yield
            block(X)

    first, second = steps(), steps()
    next(first), next(second)
    assert next(first, None) is None and next(second, None) is None
    assert seen(lambda: block(X)) == {}


def test_a_block_left_on_another_thread_serves_nothing_any_more(block: Block) -> None:
    def steps() -> Iterator[None]:
        with ak.enabled():
            yield

    generator = steps()
    next(generator)
    thread = threading.Thread(target=generator.close)
    thread.start()
    thread.join()
    assert seen(lambda: block(X)) == {}


def test_coroutines_awaited_in_turn(block: Block) -> None:
    ak.optimize(block)

    async def run() -> None:
        await asyncio.gather(*(asyncio.to_thread(block, X) for _ in range(3)))

    assert seen(lambda: asyncio.run(run())) == {op: {"hit": 3} for op in FORWARD_OPS}
    assert seen(lambda: torch.softmax(X, -1)) == {}


def test_calling_forward_directly_is_a_documented_limit(block: Block) -> None:
    ak.optimize(block)
    assert seen(lambda: block.forward(X)) == {}

    def run() -> None:
        with ak.enabled():
            block.forward(X)

    assert seen(run) == ALL_FORWARD_HITS


def test_hooks_see_every_call_and_run_in_the_forward(block: Block) -> None:
    calls: list[str] = []
    block.register_forward_pre_hook(lambda m, a: calls.append("before"))
    block.register_forward_hook(lambda m, a, y: calls.append("after"))
    block.norm.register_forward_hook(lambda m, a, y: calls.append("inside"))
    ak.optimize(block)
    block(X)
    ak.restore(block)
    block(X)
    assert calls == ["before", "inside", "after"] * 2


def test_global_module_hooks_still_run(block: Block) -> None:
    calls: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, a, y: calls.append(type(m).__name__))
    try:
        ak.optimize(block)
        block(X)
    finally:
        handle.remove()
    assert calls == ["Linear", "LayerNorm", "Block"]


def test_notebook_cells_run_again(block: Block) -> None:
    """optimize again replaces the earlier choice and never wraps twice; restore takes it all back."""
    inner = []
    for accuracy in ("stock", "exact", "stock"):
        ak.optimize(block, accuracy=accuracy)
        inner.append(block._compiled_call_impl.inner)  # type: ignore[union-attr]
    assert inner == [block._call_impl] * 3
    assert seen(lambda: block(X)) == ALL_FORWARD_HITS
    ak.restore(block)
    ak.restore(block)
    assert "_compiled_call_impl" not in vars(block)
    assert seen(lambda: block(X)) == {}


def test_exact_policy_refuses_a_stock_class_record(served: Served, block: Block) -> None:
    fresh = Served()
    for key in _keys(block):
        fresh.put(key, slots=[(0, 1, 0), (0, 2, 0)])
    ak.optimize(block, accuracy="exact")
    stock = Block.forward(block, X)
    results = []
    assert seen(lambda: results.append(block(X))) == {op: {"accuracy": 1} for op in FORWARD_OPS}
    assert torch.equal(results[0], stock)
    fresh.close()


def test_a_training_step_is_served_whole(block: Block) -> None:
    stock = train_step(block, X)
    ak.optimize(block)
    results: list[torch.Tensor] = []
    assert seen(lambda: results.extend(train_step(block, X))) == {op: {"hit": 1} for op in (*FORWARD_OPS, *BACKWARD_OPS)}
    assert_all_close(results, stock)
