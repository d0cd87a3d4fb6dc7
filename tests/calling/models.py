"""Small models and calls in the ways that programs use; `GENERAL` names those that need kernels beyond the tiny ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tiny_kernels import B, Block, D
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Outputs = list[torch.Tensor]


class LowRankAdapter(nn.Module):
    """A frozen linear with a trained low-rank update beside it, wrapped around the original as adapter libraries do
    (Hu et al., "LoRA", 2021: ``y = x W^T + b + scaling (x A^T) B^T``)."""

    def __init__(self, inner: nn.Linear, rank: int = 2, scaling: float = 0.5) -> None:
        super().__init__()
        self.inner, self.scaling, self.merged = inner, scaling, False
        inner.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inner.in_features))
        self.up = nn.Parameter(torch.randn(inner.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, in) to (rows, out)."""
        y: torch.Tensor = self.inner(x)
        return y if self.merged else y + self.scaling * (x @ self.down.t() @ self.up.t())

    @torch.no_grad()
    def merge(self) -> None:
        """Put the update into the frozen weight; later calls are one linear."""
        self.inner.weight += self.scaling * self.up @ self.down
        self.merged = True


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The same parameters at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def values(*shape: int) -> torch.Tensor:
    """The same numbers at every call, not symmetric in anything."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def adapted() -> Outputs:
    """Forward and gradients of a linear with an adapter."""
    model = seeded(lambda: LowRankAdapter(nn.Linear(D, D)))
    y = model(values(B, D))
    (y * values(B, D)).sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def attention(training: bool) -> Outputs:
    """`nn.MultiheadAttention` of width 8 with 2 heads over (2, 4, 8): the one-op fast path, or the separate ops of training."""
    model = seeded(lambda: nn.MultiheadAttention(D, 2, batch_first=True).train(training))
    x = values(2, B, D)
    if not training:
        with torch.no_grad():
            return [model(x, x, x)[0]]
    y, weights = model(x, x, x)
    (y * values(2, B, D)).sum().backward()
    return [y.detach(), weights.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def encoder_layer() -> Outputs:
    """`nn.TransformerEncoderLayer` in evaluation: PyTorch's fast path."""
    model = seeded(lambda: nn.TransformerEncoderLayer(D, 2, 2 * D, batch_first=True).eval())
    with torch.no_grad():
        return [model(values(2, B, D))]


def attention_of_separate_ops() -> Outputs:
    """`scaled_dot_product_attention` where the math backend was asked for."""
    with sdpa_kernel(SDPBackend.MATH):
        return [nn.functional.scaled_dot_product_attention(values(2, 2, B, D), values(2, 2, B, D), values(2, 2, B, D))]


def autocast_step() -> Outputs:
    """A training step of `Block` under bfloat16 autocast."""
    model = seeded(Block)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(values(B, D))
    (y * values(B, D)).sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def mapped_block() -> Outputs:
    """`torch.vmap` of a whole model."""
    return [torch.vmap(seeded(Block))(values(2, B, D))]


def per_sample_gradients() -> Outputs:
    """`vmap` of `grad` of `functional_call`: a gradient for each of 4 samples."""
    model = seeded(Block)
    weights, slope = dict(model.named_parameters()), values(1, D)

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.func.functional_call(model, parameters, (x[None],))
        return (y * slope).sum()

    return list(torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, values(B, D)).values())


def jacobian_products() -> Outputs:
    """Forward-mode derivative and a Jacobian by reverse mode."""
    model, x = seeded(Block), values(B, D)
    return [*torch.func.jvp(model, (x,), (values(B, D),)), torch.func.jacrev(model)(x)]


def nested() -> Outputs:
    """A nested tensor of two sequences of lengths 1 and 3."""
    x = torch.nested.nested_tensor([values(1, D), values(3, D)])
    with torch.no_grad():
        return list(seeded(Block)(x).unbind())


def recurrent() -> Outputs:
    """A GRU: one product an input sequence and one a step."""
    y, h = seeded(lambda: nn.GRU(D, D, batch_first=True))(values(1, B, D))
    return [y.detach(), h.detach()]


def einsum_and_bilinear() -> Outputs:
    """Composites that end in batched products."""
    y = seeded(lambda: nn.Bilinear(D, D, 3))(values(B, D), values(B, D))
    return [torch.einsum("bd,ed->be", values(B, D), values(3, D)), y.detach()]


GENERAL: tuple[Callable[[], Outputs], ...] = (
    adapted, lambda: attention(True), lambda: attention(False), encoder_layer, attention_of_separate_ops, autocast_step,
    mapped_block, per_sample_gradients, jacobian_products, nested, recurrent, einsum_and_bilinear,
)  # fmt: skip
