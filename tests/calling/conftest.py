"""Each way of calling: a model whose ops all have kernels, and what the router saw of it held against what the test declares.

A test marked ``way(how, outcome, note)`` is a row of docs/compatibility.md. Its outcome is one of

- ``served``: hits, and no call that the router saw was missed
- ``partly served``: hits and misses
- ``stock``: the router saw calls and served none
- ``unseen``: no call reached the router

and the fixture `watch` proves it: the test fails when the calls inside its `watch` blocks say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from general_kernels import compute_keys
from models import GENERAL
from tiny_kernels import B, Block, D, Served, every_family, keys_of, quiet_router, seen, served, train_step

from torch_autokern.store.key import KernelKey

__all__ = ["every_family", "quiet_router", "served"]

Calls = dict[str, dict[str, int]]


class Watch:
    """`watch(run)` runs a block and returns what the router saw in it; `take` adds what other processes' routers saw."""

    def __init__(self) -> None:
        self.blocks: list[Calls] = []

    def __call__(self, block: Callable[[], object]) -> Calls:
        """Calls by op family and outcome."""
        self.take(seen(block))
        return self.blocks[-1]

    def take(self, *blocks: Calls) -> None:
        """Add counts that were made elsewhere."""
        self.blocks += blocks


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Keys carry the thread count; one thread is what workers and compiled code use here too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def block(served: Served) -> Block:
    """A model whose every op, forward and backward (also to its input), has a kernel in the table."""
    torch.manual_seed(0)
    model = Block()
    served.put_all(lambda: train_step(model, torch.randn(B, D, requires_grad=True)))
    return model


def outcome_of(calls: Calls) -> str:
    """The word for what the router saw."""
    hits = sum(reasons.get("hit", 0) for reasons in calls.values())
    if not calls:
        return "unseen"
    misses = sum(sum(reasons.values()) for reasons in calls.values()) - hits
    return "served" if hits and not misses else "stock" if not hits else "partly served"


@pytest.fixture
def watch(request: pytest.FixtureRequest) -> Iterator[Watch]:
    """Runs blocks; the declared outcome is checked at the end of the test."""
    watched = Watch()
    yield watched
    marker = request.node.get_closest_marker("way")
    assert watched.blocks, "the test watched nothing"
    if marker is not None:
        assert {outcome_of(calls) for calls in watched.blocks} == {marker.args[1]}, watched.blocks


@pytest.fixture(scope="session")
def general_kernels() -> list[tuple[KernelKey, Any]]:
    """A kernel for every key that `models.GENERAL` asks for, from one library."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        keys = {key.digest: key for run in GENERAL for key in keys_of(run)}
    finally:
        torch.set_num_threads(before)
    return list(zip(keys.values(), compute_keys(list(keys.values())), strict=True))


@pytest.fixture
def everything(served: Served, general_kernels: list[tuple[KernelKey, Any]]) -> Served:
    """The table of `served`, with kernels for all calls of `models.GENERAL`."""
    for key, native in general_kernels:
        served.put_native(key, native)
    served.publish_table()
    return served
