"""With the router on and nothing to serve, every call is stock bit for bit: values, strides, dtype, and errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torch_autokern as ak
from torch_autokern.runtime.extension import extension

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True, scope="module")
def _empty_table() -> None:
    ak.refresh()
    extension().set_table([])


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape with drawn strides: permuted, expanded (stride 0), stepped, overlapping, at an offset."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    order = draw(st.permutations(range(len(shape))))
    strides = [0] * len(shape)
    step = draw(st.sampled_from([1, 1, 2]))
    for dim in order:
        strides[dim] = draw(st.sampled_from([step, step, step + 1, 0, 1]))
        step = max(step * max(shape[dim], 1), 1)
    offset = draw(st.integers(0, 3))
    span = offset + sum(max(size - 1, 0) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    return torch.randn(span, generator=generator, dtype=torch.float32).to(dtype).as_strided(shape, strides, offset)


def outcome(run: Callable[[], Any]) -> Any:
    """Result, or the error's type and first line."""
    try:
        result = run()
    except (RuntimeError, IndexError, ValueError) as error:
        return type(error), str(error).splitlines()[0]
    return result if isinstance(result, tuple) else (result,)


def assert_same(run: Callable[[], Any]) -> None:
    stock = outcome(run)
    with ak.enabled():
        mine = outcome(run)
    if isinstance(stock[0], type):
        assert mine == stock
        return
    for a, b in zip(mine, stock, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        bits = torch.int64 if a.dtype == torch.float64 else torch.int32 if a.dtype == torch.float32 else torch.int16
        assert torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


SETTINGS = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
SIZE = st.integers(0, 5)


@SETTINGS
@given(st.data())
def test_softmax_of_any_view_is_stocks(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(SIZE, min_size=0, max_size=4)))
    x = data.draw(views(shape, data.draw(st.sampled_from(DTYPES))))
    dim = data.draw(st.integers(-max(len(shape), 1), max(len(shape) - 1, 0)))
    op = data.draw(st.sampled_from([torch.ops.aten._softmax, torch.ops.aten._log_softmax]))
    assert_same(lambda: op.default(x, dim, False))
    out = data.draw(views(shape, x.dtype))
    if all(stride for stride, size in zip(out.stride(), out.shape, strict=True) if size > 1):
        assert_same(lambda: op.out(x, dim, False, out=out.clone(memory_format=torch.preserve_format)))


@SETTINGS
@given(st.data())
def test_layer_norm_of_any_view_is_stocks(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(SIZE, min_size=1, max_size=4)))
    dims = data.draw(st.integers(1, len(shape)))
    normalized = shape[len(shape) - dims :]
    dtype = data.draw(st.sampled_from(DTYPES))
    x = data.draw(views(shape, dtype))
    weight = data.draw(st.one_of(st.none(), views(normalized, dtype)))
    bias = data.draw(st.one_of(st.none(), views(normalized, dtype)))
    if weight is not None and math.prod(normalized) == 0:
        weight = bias = None
    assert_same(lambda: torch.native_layer_norm(x, list(normalized), weight, bias, 1e-5))


@SETTINGS
@given(st.data())
def test_products_of_any_views_are_stocks(data: st.DataObject) -> None:
    m, k, n, batch = (data.draw(SIZE) for _ in range(4))
    dtype = data.draw(st.sampled_from((torch.float32, torch.float64, torch.bfloat16)))
    a, b = data.draw(views((m, k), dtype)), data.draw(views((k, n), dtype))
    addend = data.draw(views(data.draw(st.sampled_from([(m, n), (n,), (1,), (m, 1)])), dtype))
    beta, alpha = data.draw(st.sampled_from([(1, 1), (0, 1), (0.5, -2), (2, 0)]))
    assert_same(lambda: torch.mm(a, b))
    assert_same(lambda: torch.addmm(addend, a, b, beta=beta, alpha=alpha))
    left, right = data.draw(views((batch, m, k), dtype)), data.draw(views((batch, k, n), dtype))
    assert_same(lambda: torch.bmm(left, right))
    base = data.draw(views((batch, m, n), dtype))
    assert_same(lambda: torch.baddbmm(base, left, right, beta=beta, alpha=alpha))


@SETTINGS
@given(st.data())
def test_backward_through_any_view_is_stocks(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=3)))
    x = data.draw(views(shape, torch.float32))
    w = torch.randn(shape[-1])

    def run() -> tuple[torch.Tensor, ...]:
        leaf, weight = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(), w.clone().requires_grad_()
        y = torch.nn.functional.layer_norm(leaf, shape[-1:], weight)
        loss = (torch.softmax(y, -1) * torch.log_softmax(leaf @ torch.ones(shape[-1], 3), -1).sum(-1, keepdim=True)).sum()
        return torch.autograd.grad(loss, (leaf, weight))

    assert_same(run)


@pytest.mark.parametrize("make", [
    lambda: torch.mm(torch.randn(2, 3), torch.randn(4, 5)),
    lambda: torch.mm(torch.randn(2, 3), torch.randn(3, 5).double()),
    lambda: torch.softmax(torch.ones(3, dtype=torch.int64), 0),
    lambda: torch.native_layer_norm(torch.randn(3, 4), [5], None, None, 1e-5),
    lambda: torch.ops.aten._softmax(torch.randn(3, 4), 1, True),
    lambda: torch.mm(torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 2, dtype=torch.bool)),
    lambda: torch.bmm(torch.randn(2, 3, 4), torch.randn(3, 4, 5)),
])  # fmt: skip
def test_a_wrong_call_raises_what_stock_raises(make: Callable[[], torch.Tensor]) -> None:
    stock = outcome(make)
    assert isinstance(stock[0], type)
    assert_same(make)
