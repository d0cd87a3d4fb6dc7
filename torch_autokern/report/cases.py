"""Named shapes, as keys: what the demo and the benchmarks measure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch

from torch_autokern.store.key import DeviceType, KernelKey, Scalar, TensorKey

EPS = 1e-5  # nn.LayerNorm's default
_GPU_ALIGNMENT = 16  # bytes: keys tell apart no more, and torch's allocator gives 512
_ATEN = {
    "softmax": "_softmax", "log_softmax": "_log_softmax", "layer_norm": "native_layer_norm",
    "softmax_backward": "_softmax_backward_data", "log_softmax_backward": "_log_softmax_backward_data",
    "layer_norm_backward": "native_layer_norm_backward",
}  # fmt: skip


CaseOp = Literal[
    "softmax", "log_softmax", "layer_norm", "softmax_backward", "log_softmax_backward", "layer_norm_backward", "mm", "bmm",
    "addmm",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One op on one dense shape. `dim` is the reduced dimension; for LayerNorm the first of the normalised ones, counted from
    the end (-3: the last three). A product's sizes are (M, K, N), of "bmm" (B, M, K, N); "addmm" is nn.Linear's call: a bias of
    N, and weights whose rows are B's columns; `transposed` gives "mm" and "bmm" such a B. `source` says where the shape comes
    from, `parameter_dtype` is that of LayerNorm's weight and bias where it is another one (float32 beside 16-bit inputs).
    `alignment_bytes` is what the first tensor's address promises on a GPU (0: what the allocator promises)."""

    op: CaseOp
    sizes: tuple[int, ...]
    dim: int = -1
    dtype: str = "float32"
    source: str = ""
    parameter_dtype: str = ""
    transposed: bool = False
    alignment_bytes: int = 0

    def key(self, device_type: DeviceType = "cpu") -> KernelKey:
        """The key of the call: contiguous tensors as their allocator aligns them, an affine LayerNorm, no `out`; a backward
        with all gradients."""
        key = self._aligned_key(device_type)
        if not self.alignment_bytes or device_type == "cpu":
            return key
        first, *others = key.tensors
        assert first is not None
        first = msgspec.structs.replace(first, alignment_bytes=self.alignment_bytes)
        return msgspec.structs.replace(key, tensors=(first, *others))

    def _aligned_key(self, device_type: DeviceType) -> KernelKey:
        def dense(sizes: tuple[int, ...], dtype: str = self.dtype) -> TensorKey:
            return _dense(dtype, sizes, device_type)

        mkldnn = torch._C._get_mkldnn_enabled()
        if self.op in ("mm", "bmm", "addmm"):
            return self._product(device_type, mkldnn)
        op, x = _ATEN[self.op], dense(self.sizes)
        if "softmax" in self.op:
            scalars: dict[str, Scalar] = {"dim": self.dim % len(self.sizes)}
            if self.op.endswith("backward"):
                return KernelKey(op, device_type, (x, x), {**scalars, "input_dtype": self.dtype}, (x,), mkldnn=mkldnn)
            return KernelKey(op, device_type, (x,), {**scalars, "half_to_float": False}, (x,), mkldnn=mkldnn)
        shape = self.sizes[self.dim :]
        parameter = dense(shape, self.parameter_dtype or self.dtype)
        # mean and rstd keep the normalised dimensions with size 1; a GPU's are in the dtype that it accumulates in, a CPU's in
        # that of the parameters.
        accumulated = "float32" if device_type == "cuda" else parameter.dtype
        statistic = dense(self.sizes[: self.dim] + (1,) * len(shape), accumulated)
        if self.op == "layer_norm":
            scalars = {"normalized_shape": shape, "eps": EPS}
            outputs = (x, statistic, statistic)
            return KernelKey(op, device_type, (x, parameter, parameter), scalars, outputs, mkldnn=mkldnn)
        tensors = (x, x, statistic, statistic, parameter, parameter)
        scalars = {"normalized_shape": shape, "output_mask": (1, 1, 1)}
        return KernelKey(op, device_type, tensors, scalars, (x, parameter, parameter), mkldnn=mkldnn)

    def _product(self, device_type: DeviceType, mkldnn: bool) -> KernelKey:
        *front, m, k, n = self.sizes
        left, right, result = (_dense(self.dtype, (*front, *sizes), device_type) for sizes in ((m, k), (k, n), (m, n)))
        weight = msgspec.structs.replace(right, strides=(*(k * n for _ in front), 1, k))
        if self.op != "addmm":
            return KernelKey(self.op, device_type, (left, weight if self.transposed else right), {}, (result,), mkldnn=mkldnn)
        bias = _dense(self.dtype, (n,), device_type)
        scalars: dict[str, Scalar] = {"beta": 1.0, "alpha": 1.0}
        return KernelKey("addmm", device_type, (bias, left, weight), scalars, (result,), mkldnn=mkldnn)


# The published LayerNorm shape, the attention softmax of MiniLM-L6, and softmax over a dimension that is not the last.
PUBLISHED = (
    Case("layer_norm", (16, 64, 256, 256), -3, source="KernelBench level 1, problem 40"),
    Case("softmax", (32, 12, 38, 38), source="attention of MiniLM-L6, 32 sentences of 38 tokens"),
    Case("softmax", (64, 1024, 512), 1, source="softmax over a dimension that is not the last"),
)


# What people publish on a GPU: a square product, softmax over long rows, LayerNorm over few rows of four million elements.
HEADLINE = (
    Case("mm", (4096, 4096, 4096), source="the published matmul headline; float32 without tf32"),
    Case("softmax", (4096, 65536), source="the published softmax headline"),
    Case("layer_norm", (16, 64, 256, 256), -3, source="KernelBench level 1, problem 40"),
)


def case_name(key: KernelKey) -> str:
    """A key as a person writes it: "softmax (64, 1024, 512) dim 1", "addmm (1216, 384) x (384, 1536)"."""
    present = [tensor for tensor in key.tensors if tensor is not None]
    first = present[0]
    dtype = "" if first.dtype == "float32" else f" {first.dtype}"
    if key.device_type == "cuda" and first.alignment_bytes < _GPU_ALIGNMENT:
        dtype += f" at {first.alignment_bytes} bytes"
    if "softmax" in key.op:
        dim = "" if key.scalars["dim"] == len(first.sizes) - 1 else f" dim {key.scalars['dim']}"
        return f"{key.op[1:].removesuffix('_data').replace('_backward', ' backward')} {first.sizes}{dim}{dtype}"
    if key.op.startswith("native_layer_norm"):
        shape = key.scalars["normalized_shape"]
        over = f" over {len(shape)} dims" if isinstance(shape, tuple) and len(shape) > 1 else ""
        mixed = (
            f" with {present[-1].dtype} parameters" if present[-1].dtype != first.dtype and present[-1].sizes == shape else ""
        )
        backward = " backward" if key.op.endswith("backward") else ""
        return f"LayerNorm{backward} {first.sizes}{over}{dtype}{mixed}"
    if key.op in ("mm", "bmm", "addmm", "baddbmm"):
        # A weight's B is transposed as a rule; a plain product's is worth a word.
        transposed = " transposed" if key.op in ("mm", "bmm") and _transposed(present[-1]) else ""
        return f"{key.op} {present[-2].sizes} x {present[-1].sizes}{transposed}{dtype}"
    return f"{key.op} {first.sizes}{dtype}"


def _transposed(right: TensorKey) -> bool:
    """Whether the last two dimensions lie the other way round; those of size 1 lie either way."""
    *_, k, n = right.sizes
    return k > 1 and n > 1 and right.strides[-2:] == (1, k)


def _dense(dtype: str, sizes: tuple[int, ...], device_type: DeviceType) -> TensorKey:
    strides = tuple(math.prod(sizes[place + 1 :]) for place in range(len(sizes)))
    alignment = _GPU_ALIGNMENT if device_type == "cuda" else getattr(torch, dtype).itemsize
    return TensorKey(dtype, sizes, strides, alignment)
