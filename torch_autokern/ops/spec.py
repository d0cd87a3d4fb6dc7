"""`OpSpec`: all that is known of one op family, and the only place where a key is read from tensors or from words.

The router in `csrc/` writes a key as a short run of 64-bit words (`csrc/key.h` has the same layout). `encode` and `decode`
are the Python side; a test holds the two together.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from torch_autokern.errors import InvalidInputError
from torch_autokern.store.key import DeviceType, KernelKey, Scalar, TensorKey

ArgKind = Literal["tensor", "optional_tensor", "int", "dim", "int_list", "bool", "float", "scalar", "dtype", "bool_list"]
Tensors = Sequence[torch.Tensor | None]
Scalars = dict[str, Scalar]
Layouts = tuple[TensorKey | None, ...]

# c10::ScalarType numbers, which are part of torch's serialisation and do not change.
DTYPE_CODES: dict[str, int] = {
    "uint8": 0, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "float16": 5, "float32": 6, "float64": 7, "bool": 11,
    "bfloat16": 15,
}  # fmt: skip
_DTYPE_NAMES = {code: name for name, code in DTYPE_CODES.items()}
_DEVICE_CODES: dict[DeviceType, int] = {"cpu": 0, "cuda": 1}
_PRECISION_CODES = {"ieee": 0, "tf32": 1, "bf16": 2, "none": 3}
_FLAG_FLUSH_DENORMAL = 1
_FLAG_NO_MKLDNN = 2
_PRECISION_SHIFT = 2
_TENSOR_TAG = 1 << 63


@dataclass(frozen=True)
class Arg:
    """One schema argument. `dim` is an int that counts from the end when negative, wrapped by the first tensor's rank."""

    name: str
    kind: ArgKind


@dataclass(frozen=True)
class OpSpec:
    """One op family.

    `index` is its number in the router. `args` follows the functional schema. `reference` maps (tensors, scalars) to the
    float64 results; `scale` maps (float64 results, tensors, scalars) to the natural scale of each result's elements, float64
    and broadcastable to it (sources: `judge.md`'s rule, docs/judge.md). `flops` and `bytes_moved` count the least work.
    `parameters` are the indices of tensor arguments that are weights (drawn at random, never 0 or 1).
    """

    name: str
    index: int
    args: tuple[Arg, ...]
    reference: Callable[[Tensors, Scalars], tuple[torch.Tensor, ...]]
    scale: Callable[[Sequence[torch.Tensor], Tensors, Scalars], tuple[torch.Tensor, ...]]
    flops: Callable[[KernelKey], float]
    reduced_dims: Callable[[KernelKey], tuple[int, ...]]
    parameters: tuple[int, ...] = ()
    uses_matmul_precision: bool = False

    @property
    def has_products(self) -> bool:
        """Whether it multiplies matrices, so that a device's rate of multiplications bounds it."""
        return self.uses_matmul_precision

    def overload(self) -> Callable[..., object]:
        """What stock calls: the functional overload of the ATen op."""
        return getattr(torch.ops.aten, self.name).default  # type: ignore[no-any-return]

    def stock(self, tensors: Tensors, scalars: Scalars) -> tuple[torch.Tensor, ...]:
        """Call the ATen op (through the dispatcher, so stock unless an optimised scope is active)."""
        positional, keyword = self.call_args(tensors, scalars)
        result = self.overload()(*positional, **keyword)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)  # type: ignore[return-value]

    def call_args(self, tensors: Tensors, scalars: Scalars) -> tuple[list[object], dict[str, object]]:
        """Positional and keyword arguments of the functional overload."""
        queue = list(tensors)
        positional: list[object] = []
        keyword: dict[str, object] = {}
        for arg in self.args:
            if arg.kind in ("tensor", "optional_tensor"):
                positional.append(queue.pop(0))
                continue
            value = scalars[arg.name]
            if arg.kind == "dtype":
                value = getattr(torch, str(value))
            elif isinstance(value, tuple):
                value = [bool(v) for v in value] if arg.kind == "bool_list" else list(value)  # type: ignore[assignment]
            if arg.kind == "scalar":
                keyword[arg.name] = value
            else:
                positional.append(value)
        return positional, keyword

    def key(
        self,
        tensors: Tensors,
        scalars: Scalars,
        outputs: Sequence[torch.Tensor | None] | None = None,
        *,
        flush_denormal: bool = False,
    ) -> KernelKey:
        """Key of a call. Without `outputs`, stock runs once to learn the results' layout.

        Raises:
            InvalidInputError: a scalar is missing, or a dtype that the key cannot express.
        """
        missing = [arg.name for arg in self.args if "tensor" not in arg.kind and arg.name not in scalars]
        if missing:
            raise InvalidInputError(f"{self.name} needs the arguments {missing}; got {sorted(scalars)}")
        results = self.stock(tensors, scalars) if outputs is None else outputs
        first = next(t for t in tensors if t is not None)
        fixed: Scalars = dict(scalars)
        for arg in self.args:
            if arg.kind == "dim":
                fixed[arg.name] = int(fixed[arg.name]) % max(first.dim(), 1)  # type: ignore[arg-type]
            elif arg.kind == "scalar":
                fixed[arg.name] = float(fixed[arg.name])  # type: ignore[arg-type]
        return KernelKey(
            op=self.name,
            device_type="cuda" if first.is_cuda else "cpu",
            tensors=tuple(None if t is None else tensor_key(t) for t in tensors),
            scalars=fixed,
            outputs=tuple(None if t is None else tensor_key(t) for t in results),
            flush_denormal=flush_denormal,
            mkldnn=torch._C._get_mkldnn_enabled(),
            matmul_precision=_precision_of(first) if self.uses_matmul_precision else "ieee",
        )

    def stock_outputs(self, key: KernelKey) -> tuple[TensorKey | None, ...]:
        """Layouts that stock's functional form gives a key's results, asked of ATen's shape functions: nothing is computed.
        LayerNorm's, which have no `out` form, are the key's own."""
        if len(key.outputs) > 1:
            return key.outputs
        alignment = 16 if key.device_type == "cuda" else None
        form = _form_of(key)
        if form is not None:
            tensors, meant = form
            small = _row_major_results(self.name, tensors, tuple(sorted(key.scalars.items())))
            if small is not None and all(size in meant for _, sizes in small for size in sizes):
                layouts = [(dtype, tuple(meant[size] for size in sizes)) for dtype, sizes in small]
                return tuple(TensorKey(d, sizes, _row_major(sizes), alignment or itemsize(d)) for d, sizes in layouts)
        results = self._shapes(key.tensors, key.scalars)
        return tuple(TensorKey(d, sizes, strides, alignment or itemsize(d)) for d, sizes, strides in results)

    def _shapes(self, tensors: Layouts, scalars: Scalars) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """(dtype, sizes, strides) of each result, by ATen's shape functions."""
        given = [
            None if t is None else torch.empty_strided(t.sizes, t.strides, dtype=getattr(torch, t.dtype), device="meta")
            for t in tensors
        ]
        results = self.stock(given, scalars)
        return [(str(r.dtype).removeprefix("torch."), tuple(r.shape), tuple(r.stride())) for r in results]

    def bytes_moved(self, key: KernelKey) -> int:
        """Every distinct input element read once and every output element written once, in bytes."""
        return sum(_storage_elements(t) * itemsize(t.dtype) for t in (*key.tensors, *key.outputs) if t is not None)

    def encode(self, key: KernelKey, place: int) -> tuple[int, ...]:
        """Words of a key. `place` is the thread count on a CPU and the device index on a GPU.

        Layout: header `op | device << 8 | flags << 16 | place << 32`, then each argument in schema order.
        """
        words = [key_header(self.index, key, place, has_precision=self.uses_matmul_precision)]
        queue = list(key.tensors)
        for arg in self.args:
            if arg.kind in ("tensor", "optional_tensor"):
                words += tensor_words(queue.pop(0))
            else:
                words += _scalar_words(arg, key.scalars[arg.name])
        return tuple(word & (1 << 64) - 1 for word in words)

    def decode(self, words: Sequence[int], output_words: Sequence[int]) -> KernelKey:
        """Inverse of `encode`, with the results' layouts as the router saw them."""
        reader = _Reader(words[1:])
        tensors: list[TensorKey | None] = []
        scalars: Scalars = {}
        for arg in self.args:
            if arg.kind in ("tensor", "optional_tensor"):
                tensors.append(reader.take_tensor())
            else:
                scalars[arg.name] = reader.take_scalar(arg)
        return _key(self.name, words[0], tensors, scalars, output_words, has_precision=self.uses_matmul_precision)


# Sizes of a call's form. A shape function treats 0 and 1 apart and knows other sizes by their being equal or not.
_STAND_INS = (2, 3, 5, 7, 11, 13, 17, 19)


def _form_of(key: KernelKey) -> tuple[Layouts, dict[int, int]] | None:
    """A key's tensors with every size above 1 replaced by a stand-in, equal ones alike, and what each stands for; None where a
    tensor is not row-major or has no elements, or there are too many sizes."""
    names: dict[int, int] = {1: 1}
    for tensor in key.tensors:
        if tensor is None:
            continue
        if 0 in tensor.sizes or tensor.strides != _row_major(tensor.sizes):
            return None
        for size in tensor.sizes:
            if size not in names:
                if len(names) > len(_STAND_INS):
                    return None
                names[size] = _STAND_INS[len(names) - 1]
    tensors: list[TensorKey | None] = []
    for tensor in key.tensors:
        if tensor is None:
            tensors.append(None)
            continue
        sizes = tuple(names[size] for size in tensor.sizes)
        tensors.append(TensorKey(tensor.dtype, sizes, _row_major(sizes), 1))
    return tuple(tensors), {stand_in: size for size, stand_in in names.items()}


@functools.lru_cache(maxsize=4096)
def _row_major_results(
    op: str, tensors: Layouts, scalars: tuple[tuple[str, Scalar], ...]
) -> tuple[tuple[str, tuple[int, ...]], ...] | None:
    """(dtype, sizes) of each result of a form, None where one is not row-major. ATen is asked once for each form: an answer
    takes a tenth of a millisecond, and a pack has a thousand keys of a few forms."""
    from torch_autokern.ops import SPECS

    results = SPECS[op]._shapes(tensors, dict(scalars))
    if any(strides != _row_major(sizes) for _, sizes, strides in results):
        return None
    return tuple((dtype, sizes) for dtype, sizes, _ in results)


def _row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def key_header(index: int, key: KernelKey, place: int, *, has_precision: bool) -> int:
    """The first word of a key."""
    flags = (_FLAG_FLUSH_DENORMAL if key.flush_denormal else 0) | (0 if key.mkldnn else _FLAG_NO_MKLDNN)
    if has_precision:
        flags |= _PRECISION_CODES[key.matmul_precision] << _PRECISION_SHIFT
    return index | _DEVICE_CODES[key.device_type] << 8 | flags << 16 | place << 32


def key_from_words(
    op: str, words: Sequence[int], output_words: Sequence[int], tensors: int, scalars: Scalars, *, has_precision: bool
) -> KernelKey:
    """A key whose words are a header and `tensors` tensors, with scalars that are known otherwise."""
    reader = _Reader(words[1:])
    layouts = [reader.take_tensor() for _ in range(tensors)]
    return _key(op, words[0], layouts, scalars, output_words, has_precision=has_precision)


def _key(
    op: str, header: int, tensors: Sequence[TensorKey | None], scalars: Scalars, output_words: Sequence[int], *,
    has_precision: bool,
) -> KernelKey:  # fmt: skip
    header &= (1 << 64) - 1
    flags = header >> 16 & 0xFFFF
    outputs = _Reader(output_words)
    layouts = []
    while not outputs.done:
        layouts.append(outputs.take_tensor())
    precision = next(n for n, c in _PRECISION_CODES.items() if c == flags >> _PRECISION_SHIFT & 3)
    return KernelKey(
        op=op,
        device_type="cuda" if header >> 8 & 0xFF else "cpu",
        tensors=tuple(tensors),
        scalars=scalars,
        outputs=tuple(layouts),
        flush_denormal=bool(flags & _FLAG_FLUSH_DENORMAL),
        mkldnn=not flags & _FLAG_NO_MKLDNN,
        matmul_precision=precision if has_precision else "ieee",
    )


def matmul_precision(device_type: DeviceType) -> str:
    """What the router reads of float32 products' precision; unset means IEEE."""
    precision = str(torch._C._get_fp32_precision_getter("cuda" if device_type == "cuda" else "mkldnn", "matmul"))
    return precision if precision in ("tf32", "bf16") else "ieee"


def _precision_of(first: torch.Tensor) -> str:
    """It matters to float32 products only."""
    return matmul_precision("cuda" if first.is_cuda else "cpu") if first.dtype == torch.float32 else "ieee"


def op_index(words: Sequence[int]) -> int:
    """Which op family a run of words belongs to."""
    return words[0] & 0xFF


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return int(getattr(torch, dtype).itemsize)


def tensor_key(tensor: torch.Tensor) -> TensorKey:
    """Layout of a real tensor.

    Raises:
        InvalidInputError: a dtype that keys do not express.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPE_CODES:
        raise InvalidInputError(f"dtype {dtype} has no key; supported: {', '.join(DTYPE_CODES)}")
    cap = 16 if tensor.is_cuda else tensor.element_size()
    address = tensor.data_ptr()
    alignment = cap if address % cap == 0 else min(cap, address & -address)
    return TensorKey(dtype, tuple(tensor.shape), tuple(tensor.stride()), alignment)


def tensor_words(tensor: TensorKey | None) -> list[int]:
    """`tag | dtype | rank << 8 | log2(alignment) << 16`, sizes, strides; a single 0 for an absent tensor."""
    if tensor is None:
        return [0]
    head = _TENSOR_TAG | DTYPE_CODES[tensor.dtype] | len(tensor.sizes) << 8 | (tensor.alignment_bytes.bit_length() - 1) << 16
    return [head, *tensor.sizes, *tensor.strides]


def _storage_elements(tensor: TensorKey) -> int:
    count = 1
    for size, stride in zip(tensor.sizes, tensor.strides, strict=True):
        count *= size if stride else 1
    return count


def _float_bits(value: float) -> int:
    return int.from_bytes(struct.pack("<d", value), "little")


def _scalar_words(arg: Arg, value: Scalar) -> list[int]:
    if arg.kind in ("float", "scalar"):
        return [_float_bits(float(value))]  # type: ignore[arg-type]
    if arg.kind == "dtype":
        return [DTYPE_CODES[str(value)]]
    if isinstance(value, tuple):
        return [len(value), *(int(v) for v in value)]
    return [int(value)]  # type: ignore[arg-type]


class _Reader:
    def __init__(self, words: Sequence[int]) -> None:
        self._words = words
        self._at = 0

    @property
    def done(self) -> bool:
        return self._at >= len(self._words)

    def take(self) -> int:
        word = self._words[self._at] & (1 << 64) - 1
        self._at += 1
        return word

    def take_signed(self) -> int:
        word = self.take()
        return word - (1 << 64) if word >> 63 else word

    def take_tensor(self) -> TensorKey | None:
        head = self.take()
        if not head:
            return None
        rank = head >> 8 & 0xFF
        sizes = tuple(self.take_signed() for _ in range(rank))
        strides = tuple(self.take_signed() for _ in range(rank))
        return TensorKey(_DTYPE_NAMES[head & 0xFF], sizes, strides, 1 << (head >> 16 & 0xFF))

    def take_scalar(self, arg: Arg) -> Scalar:
        if arg.kind in ("float", "scalar"):
            return float(struct.unpack("<d", self.take().to_bytes(8, "little"))[0])
        if arg.kind == "dtype":
            return _DTYPE_NAMES[self.take()]
        if arg.kind in ("int_list", "bool_list"):
            return tuple(self.take_signed() for _ in range(self.take()))
        return bool(self.take()) if arg.kind == "bool" else self.take_signed()
