"""Every scoping test gets a table of its own through `served`, and a model whose every op has a kernel in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tiny_kernels import B, Block, D, Served, every_family, quiet_router, served, train_step

__all__ = ["every_family", "quiet_router", "served"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Scopes are about Python threads; OpenMP's would only make thousands of small calls slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def block(served: Served) -> Block:
    """A model whose every op, forward and backward (also to its input), has a kernel in the table."""
    model = Block()
    served.put_all(lambda: train_step(model, torch.randn(B, D, requires_grad=True)))
    return model
