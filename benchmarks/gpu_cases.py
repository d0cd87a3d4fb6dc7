"""The cases of `gpu_templates`: keys, the fewest bytes and operations they need, and what was predicted before measuring."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_autokern.store.key import KernelKey, Scalar, TensorKey

COPY_BYTES_PER_S = 4282e9  # measured on an H200: bytes read and written by a large copy
SPLIT_FLOPS_PER_S = 650e12  # fp16 products on random data, measured there


@dataclass(frozen=True)
class GpuCase:
    """A key and its name; `predicted_ms` was written down before the kernels that are there now had run."""

    name: str
    key: KernelKey
    predicted_ms: float

    @property
    def bytes_moved(self) -> int:
        """Each input read once, each output written once."""
        item = {"float32": 4, "float16": 2, "bfloat16": 2}
        return sum(t.numel * item[t.dtype] for t in (*self.key.tensors, *self.key.outputs) if t is not None)

    @property
    def limit_ms(self) -> float:
        """Bytes at the copy rate, or three fp16 products a pair at the sustained rate, whichever is longer."""
        seconds = self.bytes_moved / COPY_BYTES_PER_S
        if self.key.op in ("mm", "bmm", "addmm"):
            left, right = self.key.tensors[-2:]
            assert left is not None and right is not None
            seconds = max(seconds, 6.0 * left.numel * right.sizes[-1] / SPLIT_FLOPS_PER_S)
        return seconds * 1e3


def _tensor(sizes: tuple[int, ...], dtype: str, alignment: int = 16) -> TensorKey:
    strides = tuple(math.prod(sizes[place + 1 :]) for place in range(len(sizes)))
    return TensorKey(dtype, sizes, strides, alignment)


def _softmax(sizes: tuple[int, ...], dtype: str, predicted_ms: float, dim: int = -1, op: str = "_softmax") -> GpuCase:
    scalars: dict[str, Scalar] = {"dim": dim % len(sizes), "half_to_float": False}
    key = KernelKey(op, "cuda", (_tensor(sizes, dtype),), scalars, (_tensor(sizes, dtype),))
    return GpuCase(f"{op.strip('_')} {'x'.join(map(str, sizes))} {dtype} dim {dim}", key, predicted_ms)


def _norm(sizes: tuple[int, ...], dims: int, dtype: str, predicted_ms: float) -> GpuCase:
    shape, statistics = sizes[-dims:], _tensor((*sizes[:-dims], *[1] * dims), "float32")
    inputs = (_tensor(sizes, dtype), _tensor(shape, dtype), _tensor(shape, dtype))
    outputs = (_tensor(sizes, dtype), statistics, statistics)
    key = KernelKey("native_layer_norm", "cuda", inputs, {"normalized_shape": shape, "eps": 1e-5}, outputs)
    return GpuCase(f"layer_norm {'x'.join(map(str, sizes))} over {dims} {dtype}", key, predicted_ms)


def _mm(m: int, k: int, n: int, predicted_ms: float, *, batch: int = 0, linear: bool = False) -> GpuCase:
    lead = (batch,) if batch else ()
    left = _tensor((*lead, m, k), "float32")
    right = TensorKey("float32", (k, n), (1, k), 16) if linear else _tensor((*lead, k, n), "float32")
    out = _tensor((*lead, m, n), "float32")
    name = f"{batch} x {m}x{k}x{n}" if batch else f"{m}x{k}x{n}"
    if linear:
        key = KernelKey("addmm", "cuda", (_tensor((n,), "float32"), left, right), {"beta": 1, "alpha": 1}, (out,))
        return GpuCase(f"addmm {name} f32, B transposed", key, predicted_ms)
    return GpuCase(
        f"{'bmm' if batch else 'mm'} {name} f32",
        KernelKey("bmm" if batch else "mm", "cuda", (left, right), {}, (out,)),
        predicted_ms,
    )


CASES = (
    _mm(4096, 4096, 4096, 0.67),
    _softmax((4096, 65536), "float32", 0.545),
    _norm((16, 64, 256, 256), 3, "float32", 0.183),
    _softmax((16, 16384), "float32", 0.006),
    _softmax((8192, 8192), "bfloat16", 0.067),
    _softmax((8192, 4096), "float32", 0.0655),
    _softmax((32768, 256), "bfloat16", 0.012),
    _softmax((4096, 131072), "bfloat16", 0.550),
    _softmax((16, 32, 1024, 1024), "bfloat16", 0.515),
    _softmax((64, 1024, 512), "float32", 0.072, dim=1),
    _softmax((128, 50257), "bfloat16", 0.010),
    _softmax((4096, 65536), "float32", 0.555, op="_log_softmax"),
    _norm((8192, 4096), 1, "bfloat16", 0.035),
    _norm((8192, 4096), 1, "float32", 0.066),
    _norm((65536, 768), 1, "bfloat16", 0.055),
    _norm((4096, 16384), 1, "bfloat16", 0.075),
    _norm((65536, 128), 1, "float32", 0.020),
    _norm((32, 4096), 1, "bfloat16", 0.004),
    _mm(2048, 131072, 2048, 6.6),
    _mm(256, 262144, 256, 0.495),
    _mm(32768, 32, 32768, 2.2),
    _mm(128, 512, 1024, 0.296, batch=128),
    _mm(4096, 768, 768, 0.050, linear=True),
    _mm(4096, 768, 3072, 0.120, linear=True),
    _mm(4096, 3072, 768, 0.130, linear=True),
    _mm(12608, 768, 3072, 0.33, linear=True),
)
