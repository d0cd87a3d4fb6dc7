"""Faults that other projects met in an op call, each by its name; those not here have the name in the file of their subject."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch
from tiny_kernels import B, Block, D, Served, assert_all_close, marker_plan, seen, train_step

import torch_autokern as ak
from torch_autokern.ops import SPECS
from torch_autokern.runtime.extension import extension
from torch_autokern.store.key import TensorKey

X = torch.randn(B, D)


def test_transposed_or_strided_input_treated_as_contiguous(served: Served) -> None:
    served.put_call("_softmax", [X], {"dim": 1, "half_to_float": False})
    wide = torch.randn(B, 2 * D)
    for view in (torch.randn(D, B).t(), wide[:, ::2], wide[:, :D], torch.randn(1, D).expand(B, D)):
        stock = torch.softmax(view, 1)
        with ak.enabled():
            mine = torch.softmax(view, 1)
        assert torch.equal(mine, stock) and mine.stride() == stock.stride()
    assert served.hits() == 0


def test_rank_above_2_in_layer_norm_backward(served: Served) -> None:
    """A kernel proved for (4, 8) is not used for (2, 2, 8), which has as many rows: it is another key."""
    flat, deep = Block(), Block()
    deep.load_state_dict(flat.state_dict())
    served.put_all(lambda: train_step(flat, X))
    stock = train_step(deep, X.view(2, 2, D))
    ak.optimize(deep)
    results: list[torch.Tensor] = []
    hits = seen(lambda: results.extend(train_step(deep, X.view(2, 2, D))))
    assert hits["native_layer_norm_backward"] == {"no_record": 1}
    assert_all_close(results, stock)
    assert_all_close(results[1:], train_step(flat, X)[1:])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_integer_dtypes_keep_stocks_result_dtype(served: Served, dtype: torch.dtype) -> None:
    a, b = torch.ones(3, 4, dtype=dtype), torch.ones(4, 5, dtype=dtype)
    key = SPECS["mm"].key([a.float(), b.float()], {})
    served.put(key, plan=marker_plan(key))
    with ak.enabled():
        y = torch.mm(a, b)
    assert y.dtype == dtype and torch.equal(y, torch.full((3, 5), 4, dtype=dtype))
    assert served.hits() == 0


def test_mean_and_rstd_saved_in_the_inputs_dtype(served: Served) -> None:
    """Auxiliary results of a hit have stock's dtype, shape and strides."""
    weight, bias = torch.randn(D), torch.randn(D)
    stock = torch.native_layer_norm(X, [D], weight, bias, 1e-5)
    served.put_call("native_layer_norm", [X, weight, bias], {"normalized_shape": (D,), "eps": 1e-5})
    with ak.enabled():
        mine = torch.native_layer_norm(X, [D], weight, bias, 1e-5)
        half = torch.native_layer_norm(X.bfloat16(), [D], weight, bias, 1e-5)
    assert served.hits() == 1
    for a, b in zip(mine, stock, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    assert_all_close(mine, stock)
    for a, b in zip(half, torch.native_layer_norm(X.bfloat16(), [D], weight, bias, 1e-5), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_optional_arguments_change_meaning(served: Served) -> None:
    """eps and the None-ness of weight and bias are in the key."""
    weight, bias = torch.randn(D), torch.randn(D)
    served.put_call("native_layer_norm", [X, weight, bias], {"normalized_shape": (D,), "eps": 1e-5})
    cases = [(weight, bias, 1e-6), (None, bias, 1e-5), (weight, None, 1e-5), (None, None, 1e-5), (weight, bias, 0.0)]
    for w, c, eps in cases:
        stock = torch.nn.functional.layer_norm(X, (D,), w, c, eps)
        with ak.enabled():
            assert torch.equal(torch.nn.functional.layer_norm(X, (D,), w, c, eps), stock)
    assert served.hits() == 0


def test_backward_written_in_place_over_a_gradient_still_needed(served: Served) -> None:
    model = Block()
    served.put_all(lambda: train_step(model, X))
    ak.optimize(model)
    x = X.clone().requires_grad_()
    y = model(x)
    gradient = torch.randn(B, D)
    watched = [gradient, y, x, *model.parameters()]
    before = [t.detach().clone() for t in watched]
    y.backward(gradient)
    assert served.hits("native_layer_norm_backward") == 1
    for t, copy in zip(watched, before, strict=True):
        assert torch.equal(t.detach(), copy)


def test_more_than_2_to_31_elements_or_offsets() -> None:
    """Sizes and strides are 64 bits wide in a key: 2**33 is not 0, and does not meet the key of a small tensor."""
    key = SPECS["_softmax"].key([X], {"dim": 1, "half_to_float": False})
    large = TensorKey("float32", (1 << 33, 3), (3 << 31, 1), 4)
    big = msgspec.structs.replace(key, tensors=(large,), outputs=(large,))
    words = SPECS["_softmax"].encode(big, 2)
    assert (1 << 33) in words and (3 << 31) in words
    decoded = SPECS["_softmax"].decode(words, words[1:6])
    assert decoded.tensors == (large,) and decoded.digest == msgspec.structs.replace(big, outputs=decoded.outputs).digest
    assert big.digest != key.digest


def test_the_router_reads_sizes_beyond_2_to_31_whole(every_family: None) -> None:
    """Over 2**40 rows in one float of memory; stock refuses the product, after the router has read the layouts."""
    rows = (1 << 40) + 7
    a = torch.ones(1, 1).expand(rows, 1)
    with ak.enabled(), pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.mm(a, torch.ones(2, 3))
    missed = [words for words, reason, _ in extension().missed_keys() if reason == "no_record" and rows in words]
    assert [SPECS["mm"].decode(words, ()).tensors[0] for words in missed] == [TensorKey("float32", (rows, 1), (0, 1), 4)]


@contextmanager
def audited() -> Iterator[list[str]]:
    """The interpreter's audit events of a block: opened files, started processes, sockets."""
    events: list[str] = []
    listening = True

    def listen(event: str, arguments: object) -> None:
        if listening:
            events.append(event)

    sys.addaudithook(listen)  # cannot be removed again, so it is told to stop
    try:
        yield events
    finally:
        listening = False


def test_stall_of_seconds_on_a_miss_in_a_server(served: Served) -> None:
    """Hits and misses open nothing, start nothing and ask nobody; what costs time happened when the scope was made."""
    served.put_call("_softmax", [X], {"dim": 1, "half_to_float": False})
    model = ak.optimize(torch.nn.Softmax(1))
    inputs = [X, *(torch.randn(rows, D) for rows in range(20, 30))]
    with audited() as events:
        for x in inputs:
            model(x)
    slow = ("open", "os.", "subprocess", "socket", "shutil", "tempfile", "import", "ctypes")
    assert not [event for event in events if event.startswith(slow)]
    with audited() as events, socket.socket():
        pass
    assert events  # the hook itself works


@pytest.mark.parametrize("length", [D - 1, D + 1, 2 * D])
def test_sizes_not_a_multiple_of_the_block(served: Served, length: int) -> None:
    """Keys are exact: a kernel proved for rows of 8 never sees rows of 7, 9 or 16, nor a batch that is one row larger."""
    served.put_call("_softmax", [X], {"dim": 1, "half_to_float": False})
    for x in (torch.randn(B, length), torch.randn(B + 1, D)):
        stock = torch.softmax(x, 1)
        with ak.enabled():
            assert torch.equal(torch.softmax(x, 1), stock)
    assert served.hits() == 0


def test_rounding_order_changes_logits(served: Served) -> None:
    """A kernel of class `stock` may round otherwise; who cannot have that asks for `exact` and gets stock's bits."""
    x = 10 * torch.randn(B, D)
    key = SPECS["_softmax"].key([x], {"dim": 1, "half_to_float": False})
    served.put(key, plan=marker_plan(key), slots=[(0, 1, 0), (0, 2, 0)])
    stock = torch.softmax(x, 1)
    with ak.enabled(accuracy="exact"):
        assert torch.equal(torch.softmax(x, 1), stock)
    with ak.enabled():
        assert torch.equal(torch.softmax(x, 1), torch.full_like(x, 42.0))


def test_dynamo_traces_into_the_router_graph_break(served: Served) -> None:
    """The graph has one call of ATen's softmax and no break, whether the router is in place or not."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, 1) + 1

    torch._dynamo.reset()
    stock = torch._dynamo.explain(run)(X)
    served.put_call("_softmax", [X], {"dim": 1, "half_to_float": False})
    with ak.enabled():
        torch._dynamo.reset()
        mine = torch._dynamo.explain(run)(X)
    torch._dynamo.reset()
    assert (mine.graph_count, mine.graph_break_count) == (stock.graph_count, stock.graph_break_count) == (1, 0)
    targets = [[str(node.target) for node in graph.graph.nodes] for report in (stock, mine) for graph in report.graphs]
    assert targets[0] == targets[1]


def test_compiled_graph_reuses_an_old_choice(served: Served) -> None:
    """The router decides at each call: what the table holds then, not what it held when the graph was made."""
    key = SPECS["_softmax"].key([X], {"dim": 1, "half_to_float": False})
    stock = torch.softmax(X, 1)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.softmax(x, 1), backend="eager", fullgraph=True)
    with ak.enabled():
        assert torch.equal(compiled(X), stock)
        served.put(key, plan=marker_plan(key))
        assert torch.equal(compiled(X), torch.full_like(X, 42.0))
        extension().set_table([])
        assert torch.equal(compiled(X), stock)
    torch._dynamo.reset()


def test_faster_in_eager_slower_in_a_compiled_graph(served: Served) -> None:
    """What was timed in one regime only answers there: Inductor's `out` forms do not take an eager winner, nor the reverse."""
    key = SPECS["_softmax"].key([X], {"dim": 1, "half_to_float": False})
    served.put(key, plan=marker_plan(key), slots=[(0, a, d) for a in range(3) for d in range(2)])
    stock, out = torch.softmax(X, 1), torch.empty_like(X)
    with ak.enabled():
        assert torch.equal(torch.ops.aten._softmax.out(X, 1, False, out=out), stock)
        assert torch.equal(torch.softmax(X, 1), torch.full_like(X, 42.0))


def test_dtensor_or_functorch_wrappers_handed_to_a_kernel(served: Served) -> None:
    """Below functorch the router sees plain memory with the mapped dimension in it (DTensor: tests/calling/test_sharded.py)."""
    served.put_call("_softmax", [X], {"dim": 1, "half_to_float": False})
    stock = torch.softmax(X, 1)
    with ak.enabled():
        mapped = torch.vmap(lambda row: torch.softmax(row, 0))(X)
        tangent = torch.func.jvp(lambda x: torch.softmax(x, 1), (X,), (torch.ones_like(X),))[0]
    assert served.hits() == 2
    assert_all_close([mapped, tangent], [stock, stock])


def test_right_in_eager_wrong_under_compile(served: Served) -> None:
    model = Block()
    served.put_all(lambda: model(X))
    stock = model(X)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with ak.enabled():
        assert_all_close([model(X), compiled(X)], [stock, stock])
    assert served.hits("_softmax") == 2
