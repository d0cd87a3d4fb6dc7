"""Long runs: memory stays bounded, threads come and go, and the cost of a scope stays small."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
import torch
from tiny_kernels import BACKWARD_OPS, B, Block, D, seen
from torch import nn

import torch_autokern as ak

X = torch.randn(B, D)
INTERVALS = 4096  # what one thread's ring remembers


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_thousands_of_forward_passes_keep_memory_bounded(block: Block) -> None:
    ak.optimize(block)
    stock = nn.Linear(D, D)

    def run(count: int) -> None:
        for _ in range(count):
            block(X)
            stock(X)  # nodes of its own between, so that intervals cannot grow together

    run(INTERVALS + 100)
    gc.collect()
    before = _resident_bytes()
    run(INTERVALS)
    gc.collect()
    assert _resident_bytes() - before < 4 << 20
    loss = block(X).sum()
    assert set(seen(loss.backward)) == set(BACKWARD_OPS)


def test_a_backward_that_the_ring_has_forgotten_is_stock(block: Block) -> None:
    ak.optimize(block)
    stock = nn.Linear(D, D)
    oldest = block(X).sum()
    for _ in range(INTERVALS + 1):
        block(X)
        stock(X)
    assert seen(oldest.backward) == {}
    recent = block(X).sum()
    assert set(seen(recent.backward)) == set(BACKWARD_OPS)


def test_forward_passes_in_a_row_share_an_interval(block: Block) -> None:
    """Without other nodes between them, any number of them stays known."""
    ak.optimize(block)
    oldest = block(X).sum()
    del oldest
    first = block(X)
    for _ in range(INTERVALS + 1):
        block(X)
    assert set(seen(lambda: first.backward(torch.ones_like(first)))) == set(BACKWARD_OPS)


def test_a_thread_that_takes_over_an_ended_threads_state_does_not_inherit_its_scopes(block: Block) -> None:
    """Autograd counts nodes per thread: a new thread's stock nodes have the numbers of an ended thread's optimised ones."""
    ak.optimize(block)
    other = Block()

    def in_turn(model: nn.Module, count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=lambda: model(X).sum().backward())
            thread.start()
            thread.join()

    in_turn(block, 80)  # 64 ended threads are remembered
    assert seen(lambda: in_turn(other, 80)) == {}


def test_a_backward_whose_forward_thread_is_forgotten_is_stock(block: Block) -> None:
    ak.optimize(block)
    losses: list[torch.Tensor] = []

    def in_a_thread() -> None:
        thread = threading.Thread(target=lambda: losses.append(block(X).sum()))
        thread.start()
        thread.join()

    for _ in range(70):
        in_a_thread()
    for _ in range(70):
        thread = threading.Thread(target=lambda: block(X))
        thread.start()
        thread.join()
    assert seen(losses[0].backward) == {}


def test_threads_without_end_keep_memory_bounded(block: Block) -> None:
    ak.optimize(block)

    def run(count: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=lambda: block(X).sum().backward())
            thread.start()
            thread.join()

    run(150)
    before = _resident_bytes()
    run(150)
    assert _resident_bytes() - before < 8 << 20


def test_optimising_again_and_again_keeps_memory_bounded(block: Block) -> None:
    def run() -> None:
        for _ in range(300):
            ak.optimize(block)
            block(X)
        ak.restore(block)

    run()
    gc.collect()
    before = _resident_bytes()
    run()
    gc.collect()
    assert _resident_bytes() - before < 4 << 20


def _best_seconds(run: object, rounds: int = 7, calls: int = 15) -> float:
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            run()  # type: ignore[operator]
        best = min(best, (time.perf_counter() - start) / calls)
    return best


@pytest.mark.long
def test_a_model_of_200_submodules_pays_for_one_scope_only(block: Block) -> None:
    class Add(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    model = nn.Sequential(*(Add() for _ in range(200)))
    with torch.no_grad():
        ratios = []
        for _ in range(5):
            stock = _best_seconds(lambda: model(X))
            ak.optimize(model)
            mine = _best_seconds(lambda: model(X))
            ak.restore(model)
            ratios.append(mine / stock)
    assert min(ratios) < 1.05, ratios
