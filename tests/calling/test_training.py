"""Fifty training steps of a small transformer, every call of ours served, beside stock and beside float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from general_kernels import compute_keys
from tiny_kernels import Served, keys_of, seen
from torch import nn

import torch_autokern as ak
from torch_autokern.ops import SPECS

pytestmark = pytest.mark.long
STEPS, BATCH, LENGTH, WIDTH, HEADS = 50, 2, 12, 32, 4


class Layer(nn.Module):
    """Attention of separate ops and a feed-forward part, normalised first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        q, k, v = self.project(self.first(x)).view(BATCH, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
        y: torch.Tensor = x + self.down(torch.relu(self.up(self.second(x))))
        return y


def loss_of(model: nn.Module, tokens: torch.Tensor, *, autocast: bool) -> torch.Tensor:
    """Next-token cross entropy."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.reshape(-1, WIDTH).to(next(model.parameters()).dtype), tokens[:, 1:].reshape(-1))


def trained(model: nn.Module, *, autocast: bool) -> list[torch.Tensor]:
    """All gradients of each step, as one float64 vector a step, while SGD moves the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    gradients = []
    for _ in range(STEPS):
        tokens = torch.randint(0, WIDTH, (BATCH, LENGTH + 1), generator=generator)
        optimizer.zero_grad()
        loss_of(model, tokens, autocast=autocast).backward()
        gradients.append(torch.cat([p.grad.reshape(-1).double() for p in model.parameters() if p.grad is not None]))
        optimizer.step()
    return gradients


def errors(gradients: list[torch.Tensor], truth: list[torch.Tensor]) -> torch.Tensor:
    """Relative distance from float64's gradients at each step."""
    return torch.stack([(g - t).norm() / t.norm() for g, t in zip(gradients, truth, strict=True)])


def serve_a_step(served: Served, run: Callable[[], object]) -> None:
    """A general kernel for every key that one step asks for."""
    keys = keys_of(run)
    for key, native in zip(keys, compute_keys(keys), strict=True):
        served.put_native(key, native)
    served.publish_table()


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16 autocast"])
def test_gradients_of_fifty_optimised_steps_are_as_close_to_float64_as_stocks(served: Served, autocast: bool) -> None:
    """Each step's gradients and, through the optimiser, all that they lead to. Errors grow along the way in stock too, so the
    yardstick at a step is the largest that stock has shown up to it; 1.5 leaves room for trajectories that part by chance."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WIDTH, WIDTH), Layer(), Layer(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    truth = trained(copy.deepcopy(model).double(), autocast=False)
    stock = trained(copy.deepcopy(model), autocast=autocast)
    tokens = torch.zeros(BATCH, LENGTH + 1, dtype=torch.int64)
    serve_a_step(served, lambda: loss_of(copy.deepcopy(model), tokens, autocast=autocast).backward())
    mine: list[torch.Tensor] = []

    def run() -> None:
        with ak.enabled():  # the loss too
            mine.extend(trained(copy.deepcopy(model), autocast=autocast))

    calls: dict[str, Any] = seen(run)
    assert set(calls) == {"mm", "addmm", "bmm", *SPECS} - {"baddbmm"}
    assert all(set(reasons) == {"hit"} and reasons["hit"] >= STEPS for reasons in calls.values()), calls
    ours, theirs = errors(mine, truth), errors(stock, truth)
    assert float(theirs.max()) > 0
    assert bool((ours <= 1.5 * theirs.cummax(0).values + 1e-7).all()), (ours / theirs).max()
