"""Graphs: what is read from a body, what cannot be, and what a file may not say."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.fx import _symbolic_trace as symbolic_trace

from torch_autokern.errors import BodyError
from torch_autokern.ops import spec_of
from torch_autokern.ops.function import function_spec, op_name
from torch_autokern.ops.graph import MAX_GRAPH_BYTES, Graph, Program, capture, read_graph
from torch_autokern.ops.spec import tensor_words
from torch_autokern.store.key import KernelKey

Body = Callable[..., object]
OUTSIDE = torch.ones(3)


def rms(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-5)


BODIES: dict[str, tuple[Body, tuple[tuple[int, ...], ...]]] = {
    "rms": (rms, ((4, 8, 6, 5),)),
    "softmax of a product": (lambda a, b: torch.softmax(a @ b, -1), ((3, 4), (4, 5))),
    "two results": (lambda a: (a.exp(), a.sum(1)), ((3, 4),)),
    "one of several results of an op": (lambda a: torch.var_mean(a, 1)[0], ((3, 4),)),
    "in place on its own tensors": (lambda a: (a * 2).add_(1).relu_(), ((5,),)),
    "a word": (lambda a: F.gelu(a, approximate="tanh"), ((7,),)),
    "einsum": (lambda a, b: torch.einsum("bijl,lk->bijk", a, b), ((2, 3, 4, 5), (5, 6))),
    "infinity": (lambda a: a.masked_fill(a > 0, -math.inf).amax(1), ((3, 4),)),
    "made inside": (lambda a: a + torch.ones(4) * torch.arange(4, dtype=torch.float32), ((3, 4),)),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_graph_computes_the_body_bit_by_bit_and_survives_its_text(name: str) -> None:
    body, shapes = BODIES[name]
    tensors = [torch.randn(shape) for shape in shapes]
    graph = read_graph(capture(body, tensors).text)
    stock = body(*tensors)
    stock = stock if isinstance(stock, tuple) else (stock,)
    for mine, theirs in zip(Program(graph)(*tensors), stock, strict=True):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride()
    wide = Program(graph, wide=True)(*[t.double() for t in tensors])
    assert all(w.dtype == torch.float64 for w in wide)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda a: a.add_(1), "writes one of its arguments"),
        (lambda a: F.dropout(a), "random numbers"),
        (lambda a: (torch.rand(3), a + 1)[1], "random numbers"),  # nobody needs them, and the generator moves on
        (lambda a: a * torch.rand_like(a), "random numbers"),
        (lambda a: a.t(), "view"),
        (lambda a: a, "returns an argument"),
        (lambda a: (lambda b: (b, b))(a + 1), "one tensor twice"),
        (lambda a: a * a.sum().item(), "values of tensors"),
        (lambda a: a[a > 0], "values of tensors"),
        (lambda a: a * OUTSIDE, "no argument of it"),
        (lambda a: {"a": a + 1}, "returns dict"),
        (lambda a: 1.0, "returns float"),
        (lambda a: a / 0 if a.shape == () else 1 // 0, "ZeroDivisionError"),
    ],
)
def test_a_body_that_cannot_be_one_op_says_why(body: Body, words: str) -> None:
    with pytest.raises(BodyError, match=words):
        capture(body, [torch.randn(3, 3)])


def test_other_threads_compile_and_call_models_while_a_body_is_read() -> None:
    compiled = torch.compile(lambda a: a * 3, backend="eager")
    inside, on = threading.Event(), threading.Event()
    found: list[Graph] = []

    def body(a: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert on.wait(60)
        return a * 2

    call = torch.nn.Module.__call__
    reader = threading.Thread(target=lambda: found.append(capture(body, [torch.ones(3)])))
    reader.start()
    assert inside.wait(60)
    before = counters["stats"]["unique_graphs"]
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0)) and counters["stats"]["unique_graphs"] == before + 1
    assert torch.nn.Module.__call__ is call and not symbolic_trace._is_fx_tracing_flag
    on.set()
    reader.join()
    assert [node.op for node in found[0].nodes] == ["aten.mul.Tensor"]


def test_a_compiled_function_inside_a_body_stays_compiled_elsewhere() -> None:
    inner = torch.compile(lambda a: a.exp() + 2, backend="eager")
    assert [node.op for node in capture(lambda a: inner(a) * 2, [torch.ones(3)]).nodes] == [
        "aten.exp.default", "aten.add.Tensor", "aten.mul.Tensor",
    ]  # fmt: skip
    before = counters["stats"]["unique_graphs"]
    inner(torch.ones(3))
    assert counters["stats"]["unique_graphs"] == before + 1


def test_another_body_another_shape_and_another_constant_are_other_graphs() -> None:
    x = torch.randn(4, 8)
    graphs = [capture(body, [x]) for body in (rms, lambda a: a + 1, lambda a: a + 2, lambda a: a + 1.0)]
    graphs.append(capture(lambda a: a.reshape(a.numel()) + 1, [x]))
    graphs.append(capture(lambda a: a.reshape(a.numel()) + 1, [x[:2]]))
    assert len({graph.digest for graph in graphs}) == len(graphs)
    assert capture(lambda a: a + 1, [x]).digest == graphs[1].digest, "names and places do not matter"


def _text(**changes: object) -> str:
    graph = json.loads(capture(lambda a: a + 1, [torch.randn(3)]).text)
    return json.dumps({**graph, **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{" * 5000,
        "x" * (MAX_GRAPH_BYTES + 1),
        _text(inputs=0),
        _text(inputs=10**9),
        _text(outputs=[]),
        _text(outputs=[{"n": 99}]),
        _text(outputs=[{"n": -1}]),
        _text(parameters=[7]),
        _text(more=1),
        *(
            _text(nodes=[{"op": op, "args": args}])
            for op, args in (
                ("aten.from_file.default", ["/etc/passwd"]),
                ("aten.add_.Tensor", [{"n": 0}, 1]),
                ("aten.rand.default", [[3]]),
                ("aten.empty.memory_format", [[3]]),
                ("aten._local_scalar_dense.default", [{"n": 0}]),
                ("prims.add.default", [{"n": 0}, 1]),
                ("aten.__class__.mro", []),
                ("os.system", ["true"]),
                ("aten.add.Tensor", [{"n": 5}, 1]),
                ("aten.add.Tensor", [{"n": 1}, 1]),
                ("aten.add.Tensor", [{"n": 0}, {"f": "nonsense"}]),
                ("aten.add.Tensor", [{"n": 0}, {"t": "load"}]),
                ("aten.add.Tensor", [{"n": 0}, {"t": "float32", "m": "x"}]),
                ("aten.add.Tensor", [{"n": 0}, "a word"]),
                ("aten.add.Tensor", [{"n": True}, 1]),
            )
        ),
    ],
    ids=lambda text: text[:60],
)
def test_a_text_that_is_no_graph_is_refused(text: str) -> None:
    with pytest.raises(BodyError):
        read_graph(text)


def _key(body: Body = rms) -> KernelKey:
    x = torch.randn(2, 4, 3)
    graph = capture(body, [x])
    return function_spec(op_name("a.rms", graph), graph.text).key([x], {})


def test_a_key_says_by_itself_what_it_computes() -> None:
    key = _key()
    spec = spec_of(key)
    x = torch.randn(2, 4, 3)
    assert key.op.startswith("function:a.rms:")
    assert torch.equal(spec.stock([x], key.scalars)[0], rms(x))
    assert spec.reference([x], key.scalars)[0].sub(rms(x.double())).abs().max() == 0
    assert spec.stock_outputs(key) == key.outputs
    words = spec.encode(key, 2)
    assert spec.decode(words, tensor_words(key.outputs[0])) == key


def test_a_key_whose_name_and_graph_disagree_is_refused() -> None:
    one, other = _key(), _key(lambda a: a + 1)
    with pytest.raises(BodyError, match="not the name"):
        function_spec(one.op, str(other.scalars["graph"]))


def test_the_natural_scale_is_what_rounding_moves_and_no_more_than_the_row() -> None:
    a, b = torch.randn(64, 256), torch.randn(256, 64)
    graph = capture(torch.matmul, [a, b])
    spec = function_spec(op_name("mm", graph), graph.text)
    scalars = {"graph": graph.text}
    truth = spec.reference([a, b], scalars)
    scale = spec.scale(truth, [a, b], scalars)[0]
    terms = (a.double().square() @ b.double().square()).sqrt()
    row = truth[0].square().mean(-1, keepdim=True).sqrt()
    assert bool((scale >= truth[0].abs()).all())
    assert bool((scale <= torch.maximum(truth[0].abs(), row) * (1 + 1e-12)).all())
    assert 0.5 < float((scale / torch.minimum(terms, row).maximum(truth[0].abs())).median()) < 2.0
    zeros = torch.zeros(64, 256)
    assert float(spec.scale(spec.reference([zeros, b], scalars), [zeros, b], scalars)[0].max()) == 0.0
