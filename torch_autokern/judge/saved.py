"""What a forward saves for its backward: a softmax's output, a LayerNorm's mean and rstd. A backward is judged on real ones.

Outputs of softmax belong to logits of their own, independent of the gradient: from nearly uniform rows to rows with one winner,
and masked ones (exact zeros). Mean and rstd belong to the very input of the call; they are the true ones, rounded once, because
stock's are NaN for inputs near the largest number, and a backward of NaN asks nothing.
"""

from __future__ import annotations

import math

import torch

from torch_autokern.judge.families import Family
from torch_autokern.ops import SPECS
from torch_autokern.ops.spec import OpSpec
from torch_autokern.store.key import KernelKey

Tensors = tuple[torch.Tensor | None, ...]
SAVED: dict[str, tuple[int, ...]] = {
    "_softmax_backward_data": (1,),
    "_log_softmax_backward_data": (1,),
    "native_layer_norm_backward": (2, 3),
}
_FORWARD = {"_softmax_backward_data": torch.softmax, "_log_softmax_backward_data": torch.log_softmax}
_EPS = 1e-5  # nn.LayerNorm's default; a backward does not know the value
_MASKED = 0.1  # share of logits that are -inf, in half of the trials and wherever NaN and infinities are drawn


def fill_saved(spec: OpSpec, key: KernelKey, family: Family, tensors: Tensors, generator: torch.Generator) -> None:
    """Overwrite what the forward of this backward would have saved, in place."""
    if spec.name in _FORWARD:
        output = tensors[1]
        assert output is not None
        dim = int(key.scalars["dim"])  # type: ignore[arg-type]
        real = _FORWARD[spec.name](_logits(output, dim, family, generator), dim)
        _distinct(output).copy_(_distinct_like(real, output))
    elif spec.name == "native_layer_norm_backward":
        shape = key.scalars["normalized_shape"]
        forward = SPECS["native_layer_norm"]
        _, mean, rstd = forward.reference((tensors[1], None, None), {"normalized_shape": shape, "eps": _EPS})
        for index, value in ((2, mean), (3, rstd)):
            saved = tensors[index]
            assert saved is not None
            _distinct(saved).copy_(_distinct_like(value, saved))


def _logits(output: torch.Tensor, dim: int, family: Family, generator: torch.Generator) -> torch.Tensor:
    """float32 logits; every row has a temperature of its own, and one logit that no mask takes away."""
    device = output.device
    logits = torch.randn(output.shape, generator=generator, device=device)
    if not output.dim():
        return logits
    rows = [1 if d == dim else size for d, size in enumerate(output.shape)]
    logits.mul_(torch.exp2(torch.rand(rows, generator=generator, device=device) * 7 - 3))  # from 1/8 to 16
    if family is Family.CONSTANT:
        logits.round_()  # ties
    kept = torch.rand(output.shape, generator=generator, device=device) >= _MASKED
    masked = bool(torch.rand((), generator=generator, device=device) < 0.5)
    if masked or family is Family.NONFINITE:  # 0 times NaN is NaN: a kernel that skips zeros must always meet both
        kept.select(dim, 0).fill_(True)
        logits.masked_fill_(~kept, -math.inf)
    return logits


def _distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Every element once: dimensions of stride 0 cut to size 1."""
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())


def _distinct_like(value: torch.Tensor, layout: torch.Tensor) -> torch.Tensor:
    index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in layout.stride())
    return value[index]
