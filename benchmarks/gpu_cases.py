"""The cases of `gpu_templates`: keys, the fewest bytes and operations they need, and what was predicted before measuring."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_autokern.store.key import KernelKey, Scalar, TensorKey

COPY_BYTES_PER_S = 4282e9  # measured on an H200: bytes read and written by a large copy
SPLIT_FLOPS_PER_S = 650e12  # fp16 products on random data, measured there
HALF_FLOPS_PER_S = 720e12  # bf16, dense, measured there


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
        """Bytes at the copy rate, or the products at the sustained rate (three fp16 products a pair of float32), whichever is
        longer."""
        seconds = self.bytes_moved / COPY_BYTES_PER_S
        if self.key.op in ("mm", "bmm", "addmm"):
            left, right = self.key.tensors[-2:]
            assert left is not None and right is not None
            products = left.numel * right.sizes[-1]
            strict = left.dtype == "float32"
            seconds = max(seconds, 6.0 * products / SPLIT_FLOPS_PER_S if strict else 2.0 * products / HALF_FLOPS_PER_S)
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


def _softmax_backward(sizes: tuple[int, ...], dtype: str, predicted_ms: float) -> GpuCase:
    x = _tensor(sizes, dtype)
    scalars: dict[str, Scalar] = {"dim": len(sizes) - 1, "input_dtype": dtype}
    key = KernelKey("_softmax_backward_data", "cuda", (x, x), scalars, (x,))
    return GpuCase(f"softmax backward {'x'.join(map(str, sizes))} {dtype}", key, predicted_ms)


def _norm_backward(rows: int, length: int, dtype: str, predicted_ms: float) -> GpuCase:
    x, flat, statistics = _tensor((rows, length), dtype), _tensor((length,), dtype), _tensor((rows, 1), "float32")
    scalars: dict[str, Scalar] = {"normalized_shape": (length,), "output_mask": (True, True, True)}
    key = KernelKey("native_layer_norm_backward", "cuda", (x, x, statistics, statistics, flat, flat), scalars, (x, flat, flat))
    return GpuCase(f"layer_norm backward {rows}x{length} {dtype}", key, predicted_ms)


def _mm(
    m: int,
    k: int,
    n: int,
    predicted_ms: float,
    *,
    batch: int = 0,
    linear: bool = False,
    bias: bool = False,
    dtype: str = "float32",
) -> GpuCase:
    """`linear`: the right operand is a transposed weight, as `nn.Linear` gives it; `bias`: `addmm` with one."""
    lead = (batch,) if batch else ()
    left = _tensor((*lead, m, k), dtype)
    right = TensorKey(dtype, (k, n), (1, k), 16) if linear else _tensor((*lead, k, n), dtype)
    out = _tensor((*lead, m, n), dtype)
    name = f"{batch} x {m}x{k}x{n}" if batch else f"{m}x{k}x{n}"
    words = f"{name} {'f32' if dtype == 'float32' else dtype}{', B transposed' if linear else ''}"
    if bias:
        key = KernelKey("addmm", "cuda", (_tensor((n,), dtype), left, right), {"beta": 1, "alpha": 1}, (out,))
        return GpuCase(f"addmm {words}", key, predicted_ms)
    op = "bmm" if batch else "mm"
    return GpuCase(f"{op} {words}", KernelKey(op, "cuda", (left, right), {}, (out,)), predicted_ms)


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
    _mm(32768, 32, 32768, 1.35),
    _mm(128, 512, 1024, 0.296, batch=128),
    _mm(4096, 768, 768, 0.050, linear=True, bias=True),
    _mm(4096, 768, 3072, 0.120, linear=True, bias=True),
    _mm(4096, 3072, 768, 0.130, linear=True, bias=True),
    _mm(12608, 768, 3072, 0.33, linear=True, bias=True),
    # Thin products: the weight at 90 % of the copy rate, and 2 us for the way there and back.
    _mm(1, 4096, 4096, 0.0105, linear=True, dtype="bfloat16"),
    _mm(8, 4096, 14336, 0.032, linear=True, dtype="bfloat16"),
    _mm(16, 14336, 4096, 0.032, linear=True, dtype="bfloat16"),
    _mm(64, 4096, 4096, 0.0145, linear=True, dtype="bfloat16"),
    _mm(2048, 1048576, 1, 2.1),
    # Short K: stores at 90 % of the copy rate beside six (one, for bf16) products at 400 TFLOP/s, half of them hidden.
    _mm(32768, 64, 32768, 0.58, dtype="bfloat16"),
    _mm(32768, 64, 32768, 1.9),
    _softmax_backward((8, 12, 1024, 1024), "bfloat16", 0.155),
    _softmax_backward((4096, 4096), "float32", 0.050),
    _norm_backward(8192, 768, "bfloat16", 0.014),
    _norm_backward(8192, 4096, "float32", 0.110),
)
