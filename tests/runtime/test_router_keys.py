"""Each field of a key, changed alone, is a miss; put back, a hit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_key_words import misaligned
from tiny_kernels import Served, marker_plan

import torch_autokern as ak
from torch_autokern.ops import SPECS

Call = tuple[list[torch.Tensor | None], dict[str, Any]]
X, NORM = (4, 8), {"normalized_shape": (8,), "eps": 1e-5}


def _softmax(shape: tuple[int, ...] = X, dim: int = 1) -> Call:
    return [torch.randn(shape)], {"dim": dim, "half_to_float": False}


def _softmax_back(shape: tuple[int, ...] = X, dim: int = 1) -> Call:
    return [torch.randn(shape), torch.rand(shape)], {"dim": dim, "input_dtype": "float32"}


def _norm(shape: tuple[int, ...] = X, weight: bool = True, bias: bool = True, **scalars: Any) -> Call:
    fixed = {**NORM, **scalars}
    affine = [torch.randn(fixed["normalized_shape"]) if given else None for given in (weight, bias)]
    return [torch.randn(shape), *affine], fixed


def _norm_back(shape: tuple[int, ...] = X, weight: bool = True, mask: tuple[bool, ...] = (True, True, True)) -> Call:
    x, w = torch.randn(shape), torch.randn(shape[-1:]) if weight else None
    _, mean, rstd = torch.native_layer_norm(x, shape[-1:], None, None, 1e-5)
    scalars = {"normalized_shape": tuple(shape[-1:]), "output_mask": mask}
    return [torch.randn(shape), x, mean, rstd, w, torch.randn(shape[-1:]) if weight else None], scalars


def _mm(m: int = 3, k: int = 4, n: int = 5, batch: tuple[int, ...] = ()) -> Call:
    return [torch.randn(*batch, m, k), torch.randn(*batch, k, n)], {}


def _addmm(m: int = 3, k: int = 4, n: int = 5, batch: tuple[int, ...] = (), addend: Any = None, **scalars: Any) -> Call:
    tensors, _ = _mm(m, k, n, batch)
    return [torch.randn(addend or (*batch, m, n)), *tensors], {"beta": 1.0, "alpha": 1.0, **scalars}


# op -> (the call that is served, calls that differ in one size, scalar or None-ness)
CASES: dict[str, tuple[Callable[[], Call], dict[str, Callable[[], Call]]]] = {
    "_softmax": (_softmax, {"rows": lambda: _softmax((5, 8)), "columns": lambda: _softmax((4, 9)),
                            "dim": lambda: _softmax(dim=0), "rank": lambda: _softmax((1, 4, 8), 2)}),
    "_log_softmax": (_softmax, {"rows": lambda: _softmax((5, 8)), "dim": lambda: _softmax(dim=0)}),
    "_softmax_backward_data": (_softmax_back, {"rows": lambda: _softmax_back((5, 8)), "dim": lambda: _softmax_back(dim=0)}),
    "_log_softmax_backward_data": (_softmax_back, {"rows": lambda: _softmax_back((5, 8)), "dim": lambda: _softmax_back(dim=0)}),
    "native_layer_norm": (_norm, {"rows": lambda: _norm((5, 8)), "eps": lambda: _norm(eps=1e-6),
                                  "no weight": lambda: _norm(weight=False), "no bias": lambda: _norm(bias=False),
                                  "shape": lambda: _norm(normalized_shape=(4, 8))}),
    "native_layer_norm_backward": (_norm_back, {"rows": lambda: _norm_back((5, 8)), "columns": lambda: _norm_back((4, 9)),
                                                "rank": lambda: _norm_back((1, 4, 8)),
                                                "mask": lambda: _norm_back(mask=(True, True, False))}),
    "mm": (_mm, {"M": lambda: _mm(m=6), "K": lambda: _mm(k=6), "N": lambda: _mm(n=6)}),
    "addmm": (_addmm, {"M": lambda: _addmm(m=6), "N": lambda: _addmm(n=6), "alpha": lambda: _addmm(alpha=2.0),
                       "beta": lambda: _addmm(beta=0.5), "addend": lambda: _addmm(addend=(5,))}),
    "bmm": (lambda: _mm(batch=(2,)), {"B": lambda: _mm(batch=(3,)), "M": lambda: _mm(m=6, batch=(2,)),
                                      "K": lambda: _mm(k=6, batch=(2,))}),
    "baddbmm": (lambda: _addmm(batch=(2,)), {"B": lambda: _addmm(batch=(3,)), "alpha": lambda: _addmm(batch=(2,), alpha=2.0),
                                             "beta": lambda: _addmm(batch=(2,), beta=2.0)}),
}  # fmt: skip


class Watch:
    """One served key: says for a call whether it hit."""

    def __init__(self, served: Served, op: str) -> None:
        self.op = op
        self.tensors, self.scalars = CASES[op][0]()
        key = SPECS[op].key(self.tensors, self.scalars)
        self.kernel = served.put(key, plan=marker_plan(key))

    def hits(self, tensors: list[torch.Tensor | None] | None = None, scalars: dict[str, Any] | None = None) -> bool:
        tensors, scalars = self.tensors if tensors is None else tensors, self.scalars if scalars is None else scalars
        before = self.kernel.hits
        with ak.enabled():
            mine = SPECS[self.op].stock(tensors, scalars)
        if self.kernel.hits > before:
            return True
        for a, b in zip(mine, SPECS[self.op].stock(tensors, scalars), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.stride() == b.stride() and torch.equal(a, b)
        return False


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, (_, changes) in CASES.items() for name in changes])
def test_another_size_or_scalar_is_a_miss(served: Served, op: str, name: str) -> None:
    watch = Watch(served, op)
    assert watch.hits()
    assert not watch.hits(*CASES[op][1][name]())
    assert watch.hits()


def _restrided(t: torch.Tensor, dim: int) -> torch.Tensor:
    """Equal sizes and values' kind, with the stride of one dimension larger."""
    strides = list(t.stride())
    strides[dim] += 2 * t.numel()
    span = sum((size - 1) * stride for size, stride in zip(t.shape, strides, strict=True)) + 1
    return torch.rand(span).as_strided(t.shape, strides)


@pytest.mark.parametrize("op", CASES)
def test_another_stride_of_any_input_is_a_miss(served: Served, op: str) -> None:
    """A strided input is never treated as contiguous."""
    watch = Watch(served, op)
    for index, t in enumerate(watch.tensors):
        assert t is not None
        for dim in range(t.dim()):
            changed = list(watch.tensors)
            changed[index] = _restrided(t, dim)
            assert not watch.hits(changed), f"tensor {index}, dimension {dim}"
    assert watch.hits()


@pytest.mark.parametrize("op", CASES)
def test_less_alignment_than_the_key_promises_is_a_miss(served: Served, op: str) -> None:
    watch = Watch(served, op)
    for index, t in enumerate(watch.tensors):
        assert t is not None
        changed = list(watch.tensors)
        changed[index] = misaligned(*t.shape).copy_(t)
        assert not watch.hits(changed), f"tensor {index}"
    assert watch.hits()


@pytest.mark.parametrize("op", CASES)
def test_another_dtype_is_a_miss(served: Served, op: str) -> None:
    watch = Watch(served, op)
    wide = [None if t is None else t.double() for t in watch.tensors]
    scalars = {**watch.scalars, "input_dtype": "float64"} if "input_dtype" in watch.scalars else watch.scalars
    assert not watch.hits(wide, scalars)
    assert watch.hits()


def test_mixed_dtypes_are_the_records_own_or_stocks(served: Served) -> None:
    """LayerNorm of a bfloat16 input with float32 weights is a call of its own, with its own result dtype."""
    watch = Watch(served, "native_layer_norm")
    mixed = [watch.tensors[0].bfloat16(), *watch.tensors[1:]]  # type: ignore[union-attr]
    assert not watch.hits(mixed)


@contextmanager
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def _fp32_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _no_mkldnn() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


FLAGS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "thread count": (_threads, tuple(CASES)),
    "flush denormal": (_flushing, tuple(CASES)),
    "mkldnn": (_no_mkldnn, tuple(CASES)),
    "fp32_precision": (_fp32_precision, ("mm", "addmm", "bmm", "baddbmm")),
}


@pytest.mark.parametrize(("flag", "op"), [(flag, op) for flag, (_, ops) in FLAGS.items() for op in ops])
def test_flags_flipped_between_two_calls(served: Served, flag: str, op: str) -> None:
    watch = Watch(served, op)
    assert watch.hits()
    with FLAGS[flag][0]():
        assert not watch.hits()
    assert watch.hits()


def test_precision_of_products_is_not_in_the_key_of_softmax(served: Served) -> None:
    watch = Watch(served, "_softmax")
    with _fp32_precision():
        assert watch.hits()


def test_a_negative_dim_is_the_same_key(served: Served) -> None:
    watch = Watch(served, "_softmax")
    assert watch.hits(watch.tensors, {**watch.scalars, "dim": -1})
    assert not watch.hits(watch.tensors, {**watch.scalars, "dim": -2})


def test_the_address_itself_is_not_in_the_key(served: Served) -> None:
    watch = Watch(served, "_softmax")
    shifted = torch.randn(4 * 8 + 1)[1:].view(4, 8)  # 4 bytes further: still aligned to the element
    assert watch.hits([shifted])
