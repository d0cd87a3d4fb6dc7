"""A training step of a small transformer whose forward and backward the templates' kernels serve, against stock and float64."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny_kernels import Served, keys_of, seen
from torch import nn

import torch_autokern as ak
from torch_autokern.build.compile_cpp import compile_cpp
from torch_autokern.runtime.kernel import load_cpu_kernel
from torch_autokern.runtime.target import local_target
from torch_autokern.search.templates import propose
from torch_autokern.store.key import KernelKey

BATCH, TOKENS, WIDTH, HEADS, CLASSES = 3, 11, 24, 2, 19
FORWARD = {"_softmax": 1, "_log_softmax": 1, "native_layer_norm": 2}
BACKWARD = {"_softmax_backward_data": 1, "_log_softmax_backward_data": 1, "native_layer_norm_backward": 2}


class Layer(nn.Module):
    """Pre-norm attention that calls softmax itself, and a classifier of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out, self.classes = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(BATCH, TOKENS, WIDTH) to logits (BATCH, TOKENS, CLASSES)."""
        q, k, v = self.qkv(self.norm(x)).reshape(BATCH, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        attention = torch.softmax(q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5, -1)
        x = x + self.out((attention @ v).transpose(1, 2).reshape(BATCH, TOKENS, WIDTH))
        return torch.log_softmax(self.classes(self.last(x)), -1)


def step(model: nn.Module, x: torch.Tensor, wanted: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of all parameters."""
    model.zero_grad()
    nn.functional.nll_loss(model(x).flatten(0, 1), wanted).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def first_guess(key: KernelKey) -> object:
    """The first proposal for a key, built and loaded, without a judge."""
    candidate = propose(key, local_target())[0]
    artifact = compile_cpp(candidate, local_target(), allow_weak_box=True)
    return load_cpu_kernel(artifact.binary, artifact.identity, candidate.plan, key).native


def off_by(gradients: list[torch.Tensor], truth: list[torch.Tensor]) -> list[float]:
    """Of each parameter, the norm of the error over the norm of the truth."""
    return [float((g.double() - t).norm() / t.norm()) for g, t in zip(gradients, truth, strict=True)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)], ids=["float32", "bfloat16"]
)
def test_forward_and_backward_of_a_step_are_served_and_gradients_stay_as_good(
    dtype: torch.dtype,
    served: Served,
    quiet_router: None,
) -> None:
    torch.manual_seed(0)
    model = Layer().to(dtype)
    x, wanted = torch.randn(BATCH, TOKENS, WIDTH).to(dtype), torch.randint(0, CLASSES, (BATCH * TOKENS,))
    truth = step(copy.deepcopy(model).double(), x.double(), wanted)
    stock = step(model, x, wanted)
    ours = [key for key in keys_of(lambda: step(model, x, wanted)) if key.op in {**FORWARD, **BACKWARD}]
    with ThreadPoolExecutor(2) as pool:  # each waits for a compiler's process
        for key, native in zip(ours, pool.map(first_guess, ours), strict=True):
            served.put_native(key, native)
    served.publish_table()
    ak.optimize(model)
    gradients: list[torch.Tensor] = []
    counts = seen(lambda: gradients.extend(step(model, x, wanted)))
    assert {op: reasons for op, reasons in counts.items() if op in {**FORWARD, **BACKWARD}} == {
        op: {"hit": calls} for op, calls in {**FORWARD, **BACKWARD}.items()
    }
    # Products dominate the error, and both sides share them: a wrong gradient of ours would be off by much more.
    for mine, theirs in zip(off_by(gradients, truth), off_by(stock, truth), strict=True):
        assert mine <= 1.5 * theirs + torch.finfo(dtype).eps
