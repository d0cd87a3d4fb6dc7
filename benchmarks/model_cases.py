"""Whole models that `models` measures: how each is made, on what it works, and what one step of it is.

Architectures come from `transformers` by their configuration, with random weights, as the project's targets had them; only the
small transformer is written out here. Batches are random token ids or pixels, drawn once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ModelCase:
    """`make` builds the module, `inputs` a batch of it; `dtype` of weights and float inputs; `training`: a step is forward,
    loss, backward and optimizer, else forward alone."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    devices: tuple[str, ...]
    dtype: torch.dtype = torch.float32
    training: bool = False


class Step:
    """One step of a model, as a program would do it; returns the forward's first tensor."""

    def __init__(self, case: ModelCase, model: nn.Module, inputs: Inputs) -> None:
        self.model = model
        self.inputs = inputs
        self._training = case.training
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5) if case.training else None

    def __call__(self) -> torch.Tensor:
        """Forward, and for training backward and optimizer too."""
        if self._optimizer is None:
            with torch.inference_mode():
                return self.forward()
        self._optimizer.zero_grad(set_to_none=True)
        result = self.forward()
        result.float().square().mean().backward()
        self._optimizer.step()
        return result.detach()

    def forward(self) -> torch.Tensor:
        """The first output of the model."""
        result: Any = self.model(**self.inputs)
        return result if isinstance(result, torch.Tensor) else result[0]

    def outcome(self) -> list[torch.Tensor]:
        """What is compared with float64: the output, and for training the gradient of every parameter. Changes no weight."""
        if not self._training:
            with torch.inference_mode():
                return [self.forward()]
        self.model.zero_grad(set_to_none=True)
        result = self.forward()
        result.float().square().mean().backward()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return [result.detach(), *gradients]


class SmallTransformer(nn.Module):
    """`layers` encoder layers of width 384 with 12 heads, attention written out, so that its softmax is an op of its own."""

    def __init__(self, layers: int = 4, width: int = 384, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "before": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "between": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) -> the same."""
        batch, length, width = x.shape
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            qkv = layer["qkv"](layer["before"](x)).view(batch, length, 3, self.heads, width // self.heads)
            query, key, value = qkv.permute(2, 0, 3, 1, 4)
            scores = (query * (width // self.heads) ** -0.5) @ key.transpose(-1, -2)
            mixed = torch.softmax(scores, -1) @ value
            x = x + layer["out"](mixed.transpose(1, 2).reshape(batch, length, width))
            x = x + layer["down"](nn.functional.gelu(layer["up"](layer["between"](x))))
        return x


def _transformers() -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    return transformers


def _bert(attention: str) -> Callable[[], nn.Module]:
    return lambda: _transformers().BertModel(_transformers().BertConfig(attn_implementation=attention))


def _vit() -> nn.Module:
    return _transformers().ViTModel(_transformers().ViTConfig())  # type: ignore[no-any-return]


def _gpt2(attention: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = _transformers().GPT2Config(
            attn_implementation=attention, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False
        )
        return _transformers().GPT2LMHeadModel(config)  # type: ignore[no-any-return]

    return make


def _tokens(batch: int, length: int, vocabulary: int) -> Callable[[], Inputs]:
    return lambda: {"input_ids": torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))}


def _normal(name: str, *sizes: int) -> Callable[[], Inputs]:
    return lambda: {name: torch.randn(sizes, generator=torch.Generator().manual_seed(0))}


_BOTH, _GPU = ("cpu", "cuda"), ("cuda",)
CASES: tuple[ModelCase, ...] = (
    ModelCase("transformer 4x384 fp32 inference 16x128", SmallTransformer, _normal("x", 16, 128, 384), _BOTH),
    ModelCase("transformer 4x384 fp32 training 16x128", SmallTransformer, _normal("x", 16, 128, 384), _BOTH, training=True),
    ModelCase("BERT-base fp32 inference 32x128, sdpa", _bert("sdpa"), _tokens(32, 128, 30522), _GPU),
    ModelCase("BERT-base fp32 inference 32x128, eager attention", _bert("eager"), _tokens(32, 128, 30522), _GPU),
    ModelCase("ViT-B/16 fp32 inference 64", _vit, _normal("pixel_values", 64, 3, 224, 224), _GPU),
    ModelCase(
        "GPT-2 124M bf16 training 8x1024, eager attention", _gpt2("eager"), _tokens(8, 1024, 50257), _GPU, torch.bfloat16, True
    ),
    ModelCase("GPT-2 124M bf16 training 8x1024, sdpa", _gpt2("sdpa"), _tokens(8, 1024, 50257), _GPU, torch.bfloat16, True),
    ModelCase("BERT-base bf16 inference 32x128, sdpa", _bert("sdpa"), _tokens(32, 128, 30522), _GPU, torch.bfloat16),
)
