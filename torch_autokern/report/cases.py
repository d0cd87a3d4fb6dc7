"""Single calls to measure, as a user writes them, and how wrong each side is against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from torch_autokern.judge.accuracy import Task, evaluate
from torch_autokern.judge.families import Family
from torch_autokern.judge.outcome import Accuracy
from torch_autokern.ops import SPECS
from torch_autokern.ops.spec import Scalars
from torch_autokern.store.key import KernelKey

EPS = 1e-5  # nn.LayerNorm's default


@dataclass(frozen=True)
class Case:
    """One op on one shape. `dim` is the reduced dimension; for LayerNorm the first of the normalised ones, counted from the
    end (-3: the last three). `source` says where the shape comes from."""

    op: Literal["softmax", "log_softmax", "layer_norm"]
    sizes: tuple[int, ...]
    dim: int = -1
    dtype: str = "float32"
    source: str = ""

    @property
    def name(self) -> str:
        """As a person writes it: "softmax (64, 1024, 512) dim 1"."""
        if self.op == "layer_norm":
            where = "" if self.dim == -1 else f" over {-self.dim} dims"
            return f"LayerNorm {self.sizes}{where}"
        return f"{self.op} {self.sizes}" + ("" if self.dim == -1 else f" dim {self.dim}")

    @property
    def size_bytes(self) -> int:
        """Bytes of the input."""
        count = getattr(torch, self.dtype).itemsize
        for size in self.sizes:
            count *= size
        return int(count)


# The published LayerNorm shape, the attention softmax of MiniLM-L6, and softmax over a dimension that is not the last.
PUBLISHED = (
    Case("layer_norm", (16, 64, 256, 256), -3, source="KernelBench level 1, problem 40"),
    Case("softmax", (32, 12, 38, 38), source="attention of MiniLM-L6, 32 sentences of 38 tokens"),
    Case("softmax", (64, 1024, 512), 1, source="softmax over a dimension that is not the last"),
)


class PreparedCase:
    """A case with its inputs: random normal values, random parameters, fixed by `seed`."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, case.dtype)
        self.case = case
        self.x = torch.randn(case.sizes, generator=generator).to(dtype)
        self.shape = case.sizes[case.dim :] if case.op == "layer_norm" else ()
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        if case.op == "layer_norm":
            self.weight = (torch.rand(self.shape, generator=generator) + 0.5).to(dtype)
            self.bias = torch.randn(self.shape, generator=generator).to(dtype)

    def call(self) -> torch.Tensor:
        """The call as a user writes it."""
        if self.case.op == "softmax":
            return torch.softmax(self.x, self.case.dim)
        if self.case.op == "log_softmax":
            return torch.log_softmax(self.x, self.case.dim)
        return torch.nn.functional.layer_norm(self.x, self.shape, self.weight, self.bias, EPS)

    @property
    def aten_op(self) -> str:
        """The op that the call ends in."""
        return {"softmax": "_softmax", "log_softmax": "_log_softmax", "layer_norm": "native_layer_norm"}[self.case.op]

    def arguments(self) -> tuple[tuple[torch.Tensor | None, ...], Scalars]:
        """Tensors in schema order, and every other argument by name."""
        if self.case.op == "layer_norm":
            return (self.x, self.weight, self.bias), {"normalized_shape": tuple(self.shape), "eps": EPS}
        return (self.x,), {"dim": self.case.dim, "half_to_float": False}

    def key(self) -> KernelKey:
        """The key that the call has; stock runs once to learn the results' layout."""
        tensors, scalars = self.arguments()
        return SPECS[self.aten_op].key(tensors, scalars)

    def errors(self, results: list[torch.Tensor]) -> list[float]:
        """Largest error of each result against float64, in units of the op's natural scale."""
        spec = SPECS[self.aten_op]
        tensors, scalars = self.arguments()
        stock = spec.stock(tensors, scalars)
        key = spec.key(tensors, scalars, stock)
        padded = [(result, *stock[1:]) for result in results]
        scores = evaluate(Task(spec, key, Accuracy()), Family.NORMAL, tensors, padded, stock)
        return [tally.pool.largest for tally in scores[0].tallies]
