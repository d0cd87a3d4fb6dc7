"""Random views against a table that is not empty: a kernel answers for exactly the layout that it was put there for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_router_bitwise import views
from tiny_kernels import B, D, Served, marker_plan, seen

import torch_autokern as ak
from torch_autokern.ops import SPECS
from torch_autokern.ops.spec import tensor_key

SETTINGS = settings(
    max_examples=25, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
aten = torch.ops.aten


@pytest.fixture
def tables(served: Served) -> Iterator[Iterator[Served]]:
    """A fresh table for each example."""

    def fresh() -> Iterator[Served]:
        while True:
            table = Served()
            yield table
            table.close()

    yield fresh()


def inside(run: object) -> list[torch.Tensor]:
    """What `run` gives in an enabled block."""
    with ak.enabled():
        result = run()  # type: ignore[operator]
    return list(result) if isinstance(result, (list, tuple)) else [result]


@SETTINGS
@given(data=st.data())
def test_a_view_is_served_exactly_where_every_size_and_stride_is_the_records(
    tables: Iterator[Served], data: st.DataObject
) -> None:
    """The kernel in the table is wrong (it writes 42), so any answer for another layout would show."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    other = data.draw(st.sampled_from([shape, shape, shape[::-1]]))
    proved, called = data.draw(views(shape, torch.float32)), data.draw(views(other, torch.float32))
    dim = data.draw(st.integers(0, len(shape) - 1))
    scalars = {"dim": dim, "half_to_float": False}
    key = SPECS["_softmax"].key([proved], scalars)
    next(tables).put(key, plan=marker_plan(key))
    stock = aten._softmax.default(called, dim, False)
    mine: list[torch.Tensor] = []
    calls = seen(lambda: mine.extend(inside(lambda: aten._softmax.default(called, dim, False))))
    same = tensor_key(called) == tensor_key(proved)
    assert calls == {"_softmax": {"hit" if same else "no_record": 1}}
    assert torch.equal(mine[0], torch.full_like(stock, 42.0) if same else stock)
    assert (mine[0].dtype, mine[0].shape, mine[0].stride()) == (stock.dtype, stock.shape, stock.stride())


@SETTINGS
@given(data=st.data())
def test_products_of_views_are_served_exactly_where_both_layouts_are_the_records(
    tables: Iterator[Served], data: st.DataObject
) -> None:
    m, k, n = (data.draw(st.integers(1, 3)) for _ in range(3))
    proved = [data.draw(views((m, k), torch.float32)), data.draw(views((k, n), torch.float32))]
    called = [data.draw(views((m, k), torch.float32)), data.draw(views((k, n), torch.float32))]
    called[0] = data.draw(st.sampled_from([called[0], proved[0]]))
    key = SPECS["mm"].key(proved, {})
    next(tables).put(key, plan=marker_plan(key))
    stock = torch.mm(*called)
    (mine,) = inside(lambda: torch.mm(*called))
    same = [tensor_key(t) for t in called] == [tensor_key(t) for t in proved]
    assert torch.equal(mine, torch.full_like(stock, 42.0) if same else stock)


@pytest.mark.parametrize(("source", "target"), [*itertools.product((0, 5, 24, 32), (0, 27, 31, 32, 37, 56, 64))])
def test_an_out_anywhere_in_the_inputs_storage_is_right(served: Served, source: int, target: int) -> None:
    """Served where no byte is shared, stock elsewhere; what is around the result stays as it was."""
    served.put_call("_softmax", [torch.randn(B, D)], {"dim": 1, "half_to_float": False})
    buffer = torch.randn(96, generator=torch.Generator().manual_seed(0))

    def at(memory: torch.Tensor, offset: int) -> torch.Tensor:
        return memory.as_strided((B, D), (D, 1), offset)

    stock, mine = buffer.clone(), buffer.clone()
    aten._softmax.out(at(stock, source), 1, False, out=at(stock, target))
    shared = abs(source - target) < B * D
    calls = seen(lambda: inside(lambda: aten._softmax.out(at(mine, source), 1, False, out=at(mine, target))))
    assert calls == {"_softmax": {"out_overlap" if shared else "hit": 1}}
    if shared and source != target:  # what stock makes of a partial overlap depends on how it is vectorised
        mine[target : target + B * D] = stock[target : target + B * D]
    torch.testing.assert_close(mine, stock, rtol=0 if shared else 1e-5, atol=0 if shared else 1e-6)
