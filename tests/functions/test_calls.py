"""Calls of decorated functions: hits, misses with their reasons, and everything that must not notice the decoration."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import types
from collections.abc import Iterator

import msgspec
import pytest
import rms_norm
import torch
from rms_norm import RMSNorm, artifact, body
from torch import nn

import torch_autokern as ak
from torch_autokern.errors import InvalidInputError, StrictModeError
from torch_autokern.ops import spec_of
from torch_autokern.ops.function import is_same_op
from torch_autokern.runtime.decorated import function_of
from torch_autokern.runtime.extension import extension
from torch_autokern.runtime.kernel import load_cpu_kernel
from torch_autokern.runtime.plan import CpuStep, InputArg, LaunchPlan, OutputArg
from torch_autokern.runtime.session import EVERY_FAMILY, session
from torch_autokern.store.key import KernelKey


class Table:
    """The router's table with a marker (every element 42) for keys of functions."""

    def __init__(self) -> None:
        self._rows: list[object] = []

    def serve(self, key: KernelKey, entry: str = "marker") -> None:
        step = CpuStep(entry, rms_norm.N * rms_norm.PIXELS // 64, 1, (InputArg(0), OutputArg(0)))
        built = artifact(entry)
        native = load_cpu_kernel(built.binary, built.identity, LaunchPlan(1, (step,)), key).native
        words = spec_of(key).encode(key, torch.get_num_threads())
        self._rows.append((words, [(r, c, d, native) for r in (0, 1) for c in (0, 1, 2) for d in (0, 1)]))
        extension().set_table(self._rows)


@pytest.fixture
def table() -> Iterator[Table]:
    session().refresh()
    session()._families = EVERY_FAMILY
    yield Table()
    extension().set_table([])
    session()._families = 0
    ak.disable()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(rms_norm.SHAPE)


def misses() -> dict[str, int]:
    return next((dict(op.misses) for op in ak.stats().ops if op.op == "function"), {})


def new_misses(run: object) -> set[str]:
    before = misses()
    run()  # type: ignore[operator]
    return {name for name, count in misses().items() if count > before.get(name, 0)}


def test_a_hit_returns_the_kernels_result_and_is_counted(table: Table, x: torch.Tensor) -> None:
    function = ak.kernel(body)
    table.serve(function_of(function).key(x))
    before = next((op.hits for op in ak.stats().ops if op.op == "function"), 0)
    with ak.enabled():
        assert bool((function(x) == 42).all())
        assert bool((function(x, rms_norm.EPS) == 42).all()), "a default that is given is the same function"
    assert bool((function(x) != 42).all()), "outside of a scope the body runs"
    assert next(op.hits for op in ak.stats().ops if op.op == "function") == before + 2


def test_another_constant_another_layout_and_another_body_are_misses(table: Table, x: torch.Tensor) -> None:
    function = ak.kernel(body)
    table.serve(function_of(function).key(x))
    others = [
        lambda: function(x, 1e-3),
        lambda: function(x[:2]),
        lambda: function(x.transpose(2, 3)),
        lambda: ak.kernel(lambda t: body(t) * 1.0)(x),
    ]
    with ak.enabled():
        for other in others:
            assert new_misses(other) == {"no_record"}
            assert not bool((other() == 42).any())


def test_strict_mode_names_the_function(table: Table, x: torch.Tensor) -> None:
    function = ak.kernel(body)
    with pytest.raises(StrictModeError, match=r"rms_norm\.body was not served \(no_record\)"), ak.enabled(strict=True):
        function(x)


def test_a_body_that_cannot_be_one_op_runs_and_says_why(table: Table, x: torch.Tensor) -> None:
    function = ak.kernel(lambda t: t.transpose(0, 1))
    with ak.enabled():
        assert torch.equal(function(x), x.transpose(0, 1))
    assert "view" in function_of(function).refusals[0]


def test_what_the_body_reads_is_watched(table: Table, x: torch.Tensor) -> None:
    module = ak.kernel(RMSNorm())
    table.serve(function_of(module).key(x))
    with ak.enabled():
        assert bool((module(x) == 42).all())
        module.eps = 1e-2
        assert torch.equal(module(x), body(x, 1e-2)), "an attribute that changed makes it another function"
        module.eps = rms_norm.EPS
        assert bool((module(x) == 42).all())


SCALE = 2.0
SETTINGS = {"scale": 2.0}


def test_globals_closures_and_plain_containers_are_watched(
    table: Table, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shift = 1.0

    def inner(t: torch.Tensor) -> torch.Tensor:
        return t * SCALE + shift + SETTINGS["scale"]

    function = ak.kernel(lambda t: inner(t))
    with ak.enabled():
        assert torch.equal(function(x), x * 2.0 + 1.0 + 2.0)
        table.serve(function_of(function).key(x))
        assert bool((function(x) == 42).all())
        monkeypatch.setitem(SETTINGS, "scale", 3.0)
        assert torch.equal(function(x), x * 2.0 + 1.0 + 3.0)
        monkeypatch.setitem(SETTINGS, "scale", 2.0)
        assert bool((function(x) == 42).all())
        shift = 5.0
        assert torch.equal(function(x), x * 2.0 + 5.0 + 2.0)
        shift = 1.0
        monkeypatch.setattr(__import__(__name__), "SCALE", 4.0)
        assert torch.equal(function(x), x * 4.0 + 1.0 + 2.0)


def test_an_object_whose_contents_cannot_be_watched_keeps_the_body(table: Table, x: torch.Tensor) -> None:
    settings = types.SimpleNamespace(scale=2.0)
    function = ak.kernel(lambda t: t * settings.scale)
    with ak.enabled():
        assert torch.equal(function(x), x * 2.0)
        settings.scale = 3.0
        assert torch.equal(function(x), x * 3.0)
    assert "SimpleNamespace" in function_of(function).refusals[0]


def test_a_call_that_needs_a_gradient_runs_the_body(table: Table, x: torch.Tensor) -> None:
    function = ak.kernel(body)
    table.serve(function_of(function).key(x))
    x.requires_grad_()
    with ak.enabled():
        assert new_misses(lambda: function(x)) == {"gradient"}
        function(x).square().sum().backward()
        with torch.no_grad():
            assert bool((function(x) == 42).all())
    stock = x.detach().clone().requires_grad_()
    body(stock).square().sum().backward()
    assert x.grad is not None and stock.grad is not None and torch.equal(x.grad, stock.grad)


def test_recompute_serves_the_forward_and_the_gradient_is_the_bodys(table: Table) -> None:
    function = ak.kernel(body, recompute=True)
    x = torch.randn(rms_norm.SHAPE, requires_grad=True)
    table.serve(function_of(function).key(x), "right")
    weight = torch.randn(rms_norm.SHAPE)
    with ak.enabled():
        before = misses()
        y = function(x)
        (grad,) = torch.autograd.grad((y * weight).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x)
    assert misses() == before
    assert "_Recompute" in type(y.grad_fn).__name__
    stock = x.detach().clone().requires_grad_()
    (theirs,) = torch.autograd.grad((body(stock) * weight).sum(), stock, create_graph=True)
    (their_second,) = torch.autograd.grad(theirs.square().sum(), stock)
    torch.testing.assert_close(grad, theirs)
    torch.testing.assert_close(second, their_second, rtol=1e-4, atol=1e-4)


def test_backward_of_a_recomputed_function_is_an_op_of_its_own(table: Table, x: torch.Tensor) -> None:
    function = ak.kernel(body, recompute=True)
    x.requires_grad_()
    with ak.record() as recording:
        function(x).square().sum().backward()
    (key,) = [entry.key for entry in recording.workload().entries if ".backward:" in entry.key.op]
    stock = x.detach().clone().requires_grad_()
    body(stock).square().sum().backward()
    assert x.grad is not None and stock.grad is not None and torch.equal(x.grad, stock.grad), (
        "a miss computes what the body's does"
    )
    assert [t.sizes for t in key.tensors if t is not None] == [rms_norm.SHAPE] * 2
    table.serve(key)
    with ak.enabled():
        (served,) = torch.autograd.grad(function(x).square().sum(), x)
        assert bool((served == 42).all())
        (again,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    torch.testing.assert_close(again, stock.grad)  # what is differentiated again is computed from the body
    assert function_of(function).refusals == []


def test_truth_of_a_backward_is_autograds_in_float64() -> None:
    def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(torch.softmax(x * w, -1))

    function = ak.kernel(scaled, recompute=True)
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    gradient = torch.randn(8, 16)
    with ak.record() as recording:
        function(x, w).backward(gradient)
    (key,) = [entry.key for entry in recording.workload().entries if ".backward:" in entry.key.op]
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    scaled(*wide).backward(gradient.double())
    for mine, theirs in zip(spec_of(key).reference([x.detach(), w.detach(), gradient], key.scalars), wide, strict=True):
        torch.testing.assert_close(mine, theirs.grad, rtol=1e-12, atol=1e-12)


def test_vmap_and_forward_mode_fall_back_to_the_body(table: Table, x: torch.Tensor) -> None:
    function = ak.kernel(body)
    table.serve(function_of(function).key(x))
    stack = torch.stack([x, x])
    with ak.enabled():
        assert torch.equal(torch.vmap(function)(stack), torch.vmap(body)(stack))
        _, tangent = torch.func.jvp(function, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, torch.func.jvp(body, (x,), (torch.ones_like(x),))[1])


def test_inference_mode_is_served_and_autocast_is_another_function(table: Table, x: torch.Tensor) -> None:
    function = ak.kernel(body)
    table.serve(function_of(function).key(x))
    with ak.enabled():
        with torch.inference_mode():
            assert bool((function(x) == 42).all())
        product = ak.kernel(lambda a: a @ a.mT)
        table.serve(function_of(product).key(torch.randn(rms_norm.SHAPE)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert product(x).dtype == torch.bfloat16


def test_copies_and_saved_modules_carry_the_decoration_to_themselves(table: Table, x: torch.Tensor) -> None:
    module = ak.kernel(RMSNorm())
    table.serve(function_of(module).key(x))
    twin = copy.deepcopy(module)
    loaded = pickle.loads(pickle.dumps(module))  # noqa: S301 the bytes are this test's own
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for other in (twin, loaded, torch.load(buffer, weights_only=False)):
        with ak.enabled():
            assert bool((other(x) == 42).all())
            other.eps = 1e-2
            assert torch.equal(other(x), body(x, 1e-2))
            assert bool((module(x) == 42).all())


def test_a_module_whose_attributes_were_copied_whole_runs_itself(table: Table, x: torch.Tensor) -> None:
    module = ak.kernel(RMSNorm())
    table.serve(function_of(module).key(x))
    replica = module._replicate_for_data_parallel()
    replica.eps = 1e-2
    with ak.enabled():
        assert torch.equal(replica(x), body(x, 1e-2))
        assert bool((module(x) == 42).all())


def test_parameters_are_arguments_of_a_modules_op(table: Table) -> None:
    module = ak.kernel(nn.Linear(6, 5))
    key = function_of(module).key(torch.randn(3, 6))
    assert [t.sizes for t in key.tensors if t is not None] == [(3, 6), (5, 6), (5,)]
    spec = spec_of(key)
    assert spec.parameters == (1, 2)
    x = torch.randn(3, 6)
    assert torch.equal(spec.stock([x, module.weight, module.bias], key.scalars)[0], module(x))


def test_a_decorated_class_serves_every_instance(table: Table, x: torch.Tensor) -> None:
    @ak.kernel
    class Norm(RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + self.eps)

    one, other = Norm(), Norm(1e-2)
    table.serve(rms_norm.key())  # the same computation under another name is the same kernel
    with ak.enabled():
        assert bool((one(x) == 42).all())
        assert torch.equal(other(x), body(x, 1e-2))


def test_many_threads_meet_a_new_layout_at_once(table: Table, x: torch.Tensor) -> None:
    function = ak.kernel(body)
    table.serve(function_of(function).key(x))
    wrong: list[object] = []

    def call() -> None:
        with ak.enabled():
            for _ in range(5):
                if not bool((function(x) == 42).all()):
                    wrong.append(x)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_recording_names_the_function_and_its_ops(x: torch.Tensor) -> None:
    function = ak.kernel(body)
    with ak.record() as recording:
        function(x)
        function(x)
    (entry,) = [e for e in recording.workload().entries if e.key.op.startswith("function:")]
    assert entry.calls == 2
    # Equal graphs are one op, under the name that this process met first.
    assert is_same_op(entry.key.op, rms_norm.key().op)
    assert msgspec.structs.replace(entry.key, op="") == msgspec.structs.replace(rms_norm.key(), op="")


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="function, a module"):
        ak.kernel(3)
    with pytest.raises(InvalidInputError, match="not decorated"):
        function_of(body)


@pytest.mark.long
def test_a_compiled_program_calls_one_opaque_operator(table: Table, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    function = ak.kernel(body)
    key = function_of(function).key(x)
    table.serve(key)
    record = types.SimpleNamespace(record=types.SimpleNamespace(key=key))
    monkeypatch.setitem(session().loaded, "tests", record)  # what a refresh of the store would leave there
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    with ak.enabled(), torch.no_grad():
        assert bool((torch.compile(lambda t: function(t) + 1, backend=backend, fullgraph=True)(x) == 43).all())
        assert any("autokern" in name for name in seen)
        torch._dynamo.reset()
        assert bool((torch.compile(lambda t: function(t) + 1, fullgraph=True)(x) == 43).all())
    torch._dynamo.reset()
    seen.clear()
    plain = torch.compile(lambda t: function(t) + 1, backend=backend, fullgraph=True)(x)
    assert not any("autokern" in name for name in seen), "nobody is served: the compiler sees the body"
    assert torch.equal(plain, body(x) + 1)
    operator = next(iter(function_of(function)._variants.values())).operator  # type: ignore[union-attr]
    torch.library.opcheck(operator, (torch.randn(rms_norm.SHAPE, requires_grad=True),), test_utils="test_autograd_registration")
    torch.library.opcheck(operator, (torch.randn(rms_norm.SHAPE),), test_utils="test_faketensor")
