"""The backward of what an optimised forward computed is served, wherever and whenever it runs; no other backward is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_kernels import BACKWARD_OPS, FORWARD_OPS, B, Block, D, Served, assert_all_close, seen, train_step
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_autokern as ak

X = torch.randn(B, D)
WEIGHTS = torch.arange(1.0, B * D + 1).view(B, D)
FORWARD_HITS = {op: {"hit": 1} for op in FORWARD_OPS}
BACKWARD_HITS = {op: {"hit": 1} for op in BACKWARD_OPS}


def loss_of(model: nn.Module, x: torch.Tensor = X) -> torch.Tensor:
    model.zero_grad()
    return (model(x) * WEIGHTS).sum()


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def on_a_thread(run: Callable[[], object]) -> None:
    """Run to the end on a fresh thread; what it raises is raised here."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()


@pytest.fixture
def stock(block: Block) -> list[torch.Tensor]:
    """Stock's gradients of `loss_of(block)`."""
    loss_of(block).backward()
    return grads(block)


def test_backward_after_the_forward_is_served(block: Block, stock: list[torch.Tensor]) -> None:
    ak.optimize(block)
    loss = loss_of(block)
    assert seen(loss.backward) == BACKWARD_HITS
    assert_all_close(grads(block), stock)


def test_backward_in_another_thread_is_served(block: Block, stock: list[torch.Tensor]) -> None:
    ak.optimize(block)
    loss = loss_of(block)
    assert seen(lambda: on_a_thread(loss.backward)) == BACKWARD_HITS
    assert_all_close(grads(block), stock)


def test_forward_in_a_thread_that_has_ended_and_backward_here(block: Block, stock: list[torch.Tensor]) -> None:
    ak.optimize(block)
    losses: list[torch.Tensor] = []
    on_a_thread(lambda: losses.append(loss_of(block)))
    assert seen(losses[0].backward) == BACKWARD_HITS
    assert_all_close(grads(block), stock)


def test_backward_after_restore_is_stock(block: Block, stock: list[torch.Tensor]) -> None:
    ak.optimize(block)
    loss = loss_of(block)
    ak.restore(block)
    assert seen(loss.backward) == {}
    assert_all_close(grads(block), stock)


def test_backward_after_restore_is_stock_while_another_model_is_optimised(block: Block) -> None:
    other = ak.optimize(Block())
    ak.optimize(block)
    loss = loss_of(block)
    ak.restore(block)
    assert seen(loss.backward) == {}
    assert seen(lambda: other(X)) == FORWARD_HITS


def test_backward_of_a_stock_model_next_to_it_is_untouched(block: Block) -> None:
    ak.optimize(block)
    other = Block()
    mine, theirs = loss_of(block), loss_of(other)
    assert seen(theirs.backward) == {}
    assert seen(mine.backward) == BACKWARD_HITS


def test_one_backward_through_both_serves_the_optimised_part(block: Block) -> None:
    other = Block()
    ak.optimize(block)
    loss = loss_of(nn.Sequential(other, block, other))
    hits = seen(loss.backward)
    assert hits["_softmax_backward_data"] == {"hit": 1}
    assert hits["native_layer_norm_backward"] == {"hit": 1}
    assert hits["mm"] == {"hit": 2}  # to its input and to its weight


@pytest.mark.usefixtures("quiet_router")
def test_backward_after_an_enabled_block_is_served(block: Block, stock: list[torch.Tensor]) -> None:
    with ak.enabled():
        loss = loss_of(block)
    assert seen(loss.backward) == BACKWARD_HITS
    assert_all_close(grads(block), stock)
    assert seen(lambda: torch.softmax(X, -1)) == {}
    with ak.enabled():
        loss = loss_of(block)
    ak.disable()
    assert seen(loss.backward) == {}


def test_an_enabled_block_without_gradients_takes_the_router_back(block: Block, quiet_router: None) -> None:
    before = torch._C._dispatch_dump("aten::_softmax")
    with torch.no_grad(), ak.enabled():
        block(X)
    assert torch._C._dispatch_dump("aten::_softmax") == before


def test_backward_of_an_optimised_function_is_served(block: Block) -> None:
    run = ak.optimize(lambda: loss_of(block))
    loss = run()
    assert seen(loss.backward) == BACKWARD_HITS


def test_losses_computed_outside_are_outside(block: Block, served: Served) -> None:
    served.put_all(lambda: torch.log_softmax(X.clone().requires_grad_(), -1).sum().backward())
    ak.optimize(block)
    loss = torch.log_softmax(block(X), -1)[:, 0].sum()
    assert seen(loss.backward) == BACKWARD_HITS  # and no log_softmax


def test_backward_twice_with_retain_graph(block: Block, stock: list[torch.Tensor]) -> None:
    ak.optimize(block)
    loss = loss_of(block)
    assert seen(lambda: (loss.backward(retain_graph=True), loss.backward())) == {op: {"hit": 2} for op in BACKWARD_OPS}
    assert_all_close(grads(block), [2 * g for g in stock])


def test_gradients_of_some_inputs_only(block: Block) -> None:
    x = X.clone().requires_grad_()
    expected = torch.autograd.grad(loss_of(block, x), x)
    ak.optimize(block)
    loss = loss_of(block, x)
    results: list[torch.Tensor] = []
    # LayerNorm's backward without weight gradients is another key: a miss, and right.
    hits = seen(lambda: results.extend(torch.autograd.grad(loss, x)))
    assert hits["_softmax_backward_data"] == {"hit": 1} and hits["mm"] == {"hit": 1}
    assert_all_close(results, expected)


def test_hooks_on_tensors_and_modules_run_in_the_backward(block: Block, stock: list[torch.Tensor]) -> None:
    calls: list[str] = []
    block.norm.register_full_backward_hook(lambda m, gi, go: calls.append("module"))
    block.linear.weight.register_hook(lambda g: calls.append("tensor"))
    ak.optimize(block)
    loss = loss_of(block)
    assert seen(loss.backward) == BACKWARD_HITS
    assert sorted(calls) == ["module", "tensor"]
    assert_all_close(grads(block), stock)


def test_ops_called_by_a_hook_in_an_optimised_backward_belong_to_it(block: Block) -> None:
    block.norm.weight.register_hook(lambda g: torch.softmax(g.expand(B, D).contiguous(), -1).sum(0))
    ak.optimize(block)
    loss = loss_of(block)
    hits = seen(loss.backward)
    assert set(hits) - {"_softmax"} == set(BACKWARD_OPS)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_serves_recomputation_and_backward(block: Block, stock: list[torch.Tensor], use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(self.block, x, use_reentrant=use_reentrant)
            return y

    model = ak.optimize(Checkpointed())
    x = X.clone().requires_grad_()
    loss = loss_of(model, x)
    hits = seen(loss.backward)
    assert {op: hits[op] for op in FORWARD_OPS} == FORWARD_HITS
    assert hits["_softmax_backward_data"] == hits["native_layer_norm_backward"] == {"hit": 1}
    assert hits["mm"] == {"hit": 2}
    assert_all_close(grads(block), stock)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_around_an_optimised_model(block: Block, stock: list[torch.Tensor], use_reentrant: bool) -> None:
    ak.optimize(block)
    x = X.clone().requires_grad_()
    block.zero_grad()
    loss = (checkpoint(block, x, use_reentrant=use_reentrant) * WEIGHTS).sum()
    hits = seen(loss.backward)
    assert {op: hits[op] for op in FORWARD_OPS} == FORWARD_HITS
    assert hits["_softmax_backward_data"] == {"hit": 1}
    assert_all_close(grads(block), stock)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_of_a_stock_model_is_untouched(block: Block, use_reentrant: bool) -> None:
    ak.optimize(block)
    other = Block()
    loss = (checkpoint(other, X.clone().requires_grad_(), use_reentrant=use_reentrant) * WEIGHTS).sum()
    mine = loss_of(block)
    assert seen(loss.backward) == {}
    assert seen(mine.backward) == BACKWARD_HITS


def _penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
    return gradient.square().sum()


def test_double_backward_is_served_and_right(block: Block) -> None:
    x = X.clone().requires_grad_()
    _penalty(block, x).backward()
    stock = grads(block)
    ak.optimize(block)
    penalties: list[torch.Tensor] = []
    first = seen(lambda: penalties.append(_penalty(block, x)))
    assert first["_softmax_backward_data"] == {"hit": 1}
    second = seen(penalties[0].backward)
    # Which nodes ran under the scope: products of the second backward are looked up, not passed by.
    assert sum(sum(reasons.values()) for reasons in second.values()) > 3
    assert_all_close(grads(block), stock)


def test_double_backward_of_a_stock_model_is_untouched(block: Block) -> None:
    ak.optimize(block)
    other = Block()
    penalty = _penalty(other, X.clone().requires_grad_())
    assert seen(penalty.backward) == {}


def test_gradgradcheck_passes_through_the_router() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with ak.enabled():
            return torch.softmax(nn.functional.layer_norm(x @ w, (3,)), -1)

    x, w = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(run, (x, w)) and torch.autograd.gradgradcheck(run, (x, w))


def test_torch_func_grad_vmap_and_functional_call(block: Block) -> None:
    params = dict(block.named_parameters())

    def loss(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        y = torch.func.functional_call(block, values, (x,))
        return (y * WEIGHTS).sum()

    batch = torch.stack([X, 2 * X])
    stock_grad, stock_vmap = torch.func.grad(loss)(params, X), torch.func.vmap(loss, (None, 0))(params, batch)
    stock_hessian = torch.func.hessian(lambda x: loss(params, x))(X)
    ak.optimize(block)
    results: list[dict[str, torch.Tensor]] = []
    hits = seen(lambda: results.append(torch.func.grad(loss)(params, X)))
    assert {op: hits[op] for op in FORWARD_OPS} == FORWARD_HITS and hits["_softmax_backward_data"] == {"hit": 1}
    assert_all_close(list(results[0].values()), list(stock_grad.values()))
    assert_all_close([torch.func.vmap(loss, (None, 0))(params, batch)], [stock_vmap])
    assert_all_close([torch.func.hessian(lambda x: loss(params, x))(X)], [stock_hessian])


def test_forward_mode_derivatives(block: Block) -> None:
    tangent = torch.randn(B, D)
    stock = torch.func.jvp(block, (X,), (tangent,))
    ak.optimize(block)
    assert_all_close(torch.func.jvp(block, (X,), (tangent,)), stock)


ORDERS = [
    ("no_grad", "grad"), ("inference", "grad"), ("grad", "no_grad"), ("grad", "inference"), ("inference", "no_grad", "grad"),
]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_inference_mode_no_grad_then_backward(block: Block, stock: list[torch.Tensor], order: tuple[str, ...]) -> None:
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}
    expected = block(X).detach()
    ak.optimize(block)
    for mode in (*order, *order):
        with modes[mode]():
            results: list[torch.Tensor] = []
            assert seen(lambda: results.append(block(X))) == FORWARD_HITS  # noqa: B023
            assert results[0].is_inference() == (mode == "inference")
            assert_all_close([results[0].detach()], [expected])
        if mode == "grad":
            loss = loss_of(block)
            with torch.no_grad():
                assert seen(loss.backward) == BACKWARD_HITS
            assert_all_close(grads(block), stock)


def test_frozen_parts_and_detached_inputs(block: Block) -> None:
    block.linear.requires_grad_(False)
    stock = train_step(block, X)
    ak.optimize(block)
    assert_all_close(train_step(block, X), stock)


def test_custom_autograd_functions_inside_the_forward(block: Block, stock: list[torch.Tensor]) -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return block.norm(x) * 0 + x

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            return torch.softmax(g, -1) * 0 + g

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.block(Scale.apply(x))
            return y

    model = ak.optimize(Model())
    loss = loss_of(model, X.clone().requires_grad_())
    hits = seen(loss.backward)
    assert hits["_softmax"] == {"hit": 1}  # called by the function's own backward
    assert_all_close(grads(block), stock)
