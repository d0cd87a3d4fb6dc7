"""How a softmax call walks memory: the reduced dimension, and loops over everything else."""

from __future__ import annotations

from dataclasses import dataclass

from torch_autokern.search.templates.cpp_half import CPP_TYPES, DTYPES, ITEMSIZE
from torch_autokern.search.templates.layout import Loop, dense_tensors, distinct_elements, loops_over
from torch_autokern.store.key import KernelKey

LOG_OPS = {"_softmax": False, "_log_softmax": True}


@dataclass(frozen=True)
class SoftmaxLayout:
    """`length` elements with `strides` (input, output) are reduced, once for each step of the `outer` loops."""

    dtype: str

    log: bool
    length: int
    strides: tuple[int, int]
    outer: tuple[Loop, ...]

    @property
    def contiguous(self) -> bool:
        """Whether the reduced elements are neighbours on both sides."""
        return self.length == 1 or self.strides == (1, 1)

    @property
    def is_float(self) -> bool:
        """Whether results can hold what is computed: exponentials wait there for their sum, and are streamed past the cache."""
        return self.dtype == "float32"

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZE[self.dtype]

    @property
    def constants(self) -> str:
        """C++ text: the type of an element, and which of both ops it is."""
        return f"typedef {CPP_TYPES[self.dtype]} elem;\nconstexpr bool LOG = {str(self.log).lower()};\n"


def softmax_layout(key: KernelKey) -> SoftmaxLayout | None:
    """Layout of a softmax or log-softmax on a CPU; None for any other call."""
    if key.device_type != "cpu" or key.op not in LOG_OPS or not dense_tensors(key, DTYPES):
        return None
    x, y = key.tensors[0], key.outputs[0]
    if x is None or y is None or x.sizes != y.sizes or x.dtype != y.dtype or not distinct_elements(y):
        return None
    dim = key.scalars["dim"]
    if not isinstance(dim, int) or not 0 <= dim < max(len(x.sizes), 1):
        return None
    if not x.sizes:
        return SoftmaxLayout(x.dtype, LOG_OPS[key.op], 1, (1, 1), ())
    others = [d for d in range(len(x.sizes)) if d != dim]
    strides = (x.strides[dim], y.strides[dim])
    return SoftmaxLayout(x.dtype, LOG_OPS[key.op], x.sizes[dim], strides, loops_over(others, (x, y)))
