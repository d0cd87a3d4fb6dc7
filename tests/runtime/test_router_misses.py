"""Every miss reason once: what it takes, that stock then runs bit for bit, and that the reason is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tiny_kernels import B, D, Served, artifact, counted, marker_plan

import torch_autokern as ak
from torch_autokern.ops import SPECS
from torch_autokern.runtime.extension import extension

pytestmark = pytest.mark.usefixtures("every_family")

aten = torch.ops.aten
SOFTMAX = {"dim": 1, "half_to_float": False}
CPU_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return aten._softmax.default(x, 1, False)


def served_call(run: Callable[[], object]) -> Callable[[], object]:
    """`run` inside enabled()."""

    def inside() -> None:
        with ak.enabled():
            run()

    return inside


def reasons(op: str, run: Callable[[], object]) -> dict[str, int]:
    """What `run` inside enabled() adds to the counters of `op`."""
    return counted(op, served_call(run))


def misses(op: str, reason: str, run: Callable[[], torch.Tensor]) -> None:
    """One call of `op` is a miss for this reason, and returns what stock returns."""
    stock = run()
    results: list[torch.Tensor] = []
    assert reasons(op, lambda: results.append(run())) == {reason: 1}
    assert results[0].dtype == stock.dtype and results[0].stride() == stock.stride()
    assert torch.equal(results[0].nan_to_num(), stock.nan_to_num())


class Wrapped(torch.Tensor):
    """A tensor subclass with real data, which hands ATen its own instances."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


def test_a_plain_call_is_served(served: Served) -> None:
    x = torch.randn(B, D)
    served.put_call("_softmax", [x], SOFTMAX)
    assert reasons("_softmax", lambda: softmax(x)) == {"hit": 1}


def test_subclass_a_wrapper_that_reaches_the_backend_key(served: Served) -> None:
    x = torch.randn(B, D)
    kernel = served.put_call("_softmax", [x], SOFTMAX, plan=marker_plan(SPECS["_softmax"].key([x], SOFTMAX)))
    wrapped = torch.Tensor._make_subclass(Wrapped, x)
    before = kernel.hits
    results = []
    assert reasons("_softmax", lambda: results.append(softmax(wrapped))) == {"subclass": 1}
    assert kernel.hits == before
    assert torch.equal(results[0].as_subclass(torch.Tensor), softmax(x))


def test_a_subclass_without_a_dispatch_of_its_own_is_a_plain_tensor(served: Served) -> None:
    class Named(torch.Tensor):
        pass

    x = torch.randn(B, D)
    served.put_call("_softmax", [x], SOFTMAX)
    assert reasons("_softmax", lambda: softmax(x.as_subclass(Named))) == {"hit": 1}
    assert reasons("_softmax", lambda: softmax(torch.nn.Parameter(x))) == {"hit": 1}


def test_fake_or_meta_tensors_reach_the_kernel(served: Served) -> None:
    """They never do: their own kernels answer, and the router does not even see the call."""
    x = torch.randn(B, D)
    kernel = served.put_call("_softmax", [x], SOFTMAX)
    from torch._subclasses.fake_tensor import FakeTensorMode

    def run() -> None:
        with FakeTensorMode() as mode:
            assert softmax(mode.from_tensor(x)).shape == x.shape
        assert softmax(x.to("meta")).is_meta

    before = kernel.hits
    assert reasons("_softmax", run) == {}
    assert kernel.hits == before


def test_meta_tensors_forced_to_the_backend_key_are_a_subclass(served: Served) -> None:
    meta = torch.empty(B, D, device="meta")
    seen = reasons("_softmax", lambda: _raises(lambda: aten._softmax.default.redispatch(CPU_KEY, meta, 1, False)))
    assert seen == {"subclass": 1}


def test_a_lazily_negated_view_is_materialised_above_the_router(served: Served) -> None:
    x = torch.randn(B, D)
    served.put_call("_softmax", [x], SOFTMAX)
    results = []
    assert reasons("_softmax", lambda: results.append(softmax(torch._neg_view(x)))) == {"hit": 1}
    torch.testing.assert_close(results[0], softmax(-x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_never_handed_to_a_kernel(served: Served) -> None:
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.randn(3, D), torch.randn(2, D)], layout=layout)
        stock = torch.softmax(nested, -1)
        with ak.enabled():
            mine = torch.softmax(nested, -1)
        for a, b in zip(mine.unbind(), stock.unbind(), strict=True):
            assert torch.equal(a, b)


def test_layout_a_tensor_that_is_not_strided() -> None:
    dense, sparse = torch.randn(4, 4), torch.eye(4).to_sparse()
    with pytest.raises(RuntimeError):
        aten.mm.default.redispatch(CPU_KEY, dense, sparse)
    seen = reasons("mm", lambda: _raises(lambda: aten.mm.default.redispatch(CPU_KEY, dense, sparse)))
    assert seen == {"layout": 1}


def _raises(run: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError):  # stock's own; NotImplementedError is one
        run()


def test_sparse_and_mkldnn_tensors_pass_untouched(served: Served) -> None:
    dense, sparse = torch.randn(4, 4), torch.eye(4).to_sparse()
    stock = torch.mm(sparse, dense)
    with ak.enabled():
        assert torch.equal(torch.mm(sparse, dense), stock)
        if torch.backends.mkldnn.is_available():
            assert torch.equal(torch.softmax(dense.to_mkldnn(), -1).to_dense(), torch.softmax(dense.to_mkldnn(), -1).to_dense())


def test_dtype_complex_numbers() -> None:
    a = torch.randn(3, 3, dtype=torch.complex64)
    misses("mm", "dtype", lambda: torch.mm(a, a))


def test_dtype_a_complex_scalar() -> None:
    a = torch.randn(3, 3)
    assert reasons("addmm", lambda: _raises(lambda: torch.addmm(a, a, a, beta=1j))) == {"dtype": 1}


def test_dtype_an_integer_scalar_that_a_double_cannot_hold(served: Served) -> None:
    """2**53 and 2**53 + 1 have the same double; as integers they are different factors."""
    a = torch.ones(2, 2, dtype=torch.int64)
    served.put_call("addmm", [a, a, a], {"beta": 2**53, "alpha": 1}, plan=marker_plan(SPECS["mm"].key([a, a], {})))
    misses("addmm", "dtype", lambda: torch.addmm(a, a, a, beta=2**53 + 1))


def test_rank_more_dimensions_than_a_key_holds() -> None:
    x = torch.randn(1, 1, 1, 1, 1, 1, 1, 2, 3)
    misses("_softmax", "rank", lambda: softmax(x))


@pytest.mark.parametrize("shape", [(0, D), (B, 0)])
def test_empty_is_left_to_aten(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    misses("_softmax", "empty", lambda: softmax(x))


def test_zero_size_products_do_not_kill_the_process() -> None:
    misses("mm", "empty", lambda: torch.mm(torch.randn(3, 0), torch.randn(0, 4)))
    misses("native_layer_norm", "empty", lambda: torch.native_layer_norm(torch.randn(0, 8), (8,), None, None, 1e-5)[0])


@pytest.mark.cuda
def test_device_tensors_on_two_devices() -> None:
    """Needs a second device; on a CPU-only machine the only other one is meta, whose own kernels answer first."""
    a, b = torch.randn(3, 4), torch.randn(4, 5, device="cuda")
    assert reasons("mm", lambda: _raises(lambda: torch.mm(a, b))) == {"device": 1}


def _out_call(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return aten._softmax.out(x, 1, False, out=out)


def test_out_layout_other_strides_than_the_record_proved(served: Served) -> None:
    x = torch.randn(B, D)
    served.put_call("_softmax", [x], SOFTMAX)
    misses("_softmax", "out_layout", lambda: _out_call(x, torch.empty(D, B).t()))
    assert reasons("_softmax", lambda: _out_call(x, torch.empty(B, D))) == {"hit": 1}


def test_out_layout_an_out_that_needs_a_resize(served: Served) -> None:
    x = torch.randn(B, D)
    served.put_call("_softmax", [x], SOFTMAX)
    misses("_softmax", "out_layout", lambda: _out_call(x, torch.empty(0)))


def test_out_layout_a_misaligned_out(served: Served) -> None:
    """A compiler may use aligned stores into an output whose key promises alignment."""
    x = torch.randn(B, D)
    served.put_call("_softmax", [x], SOFTMAX)
    raw = bytearray(B * D * 4 + 1)
    misses("_softmax", "out_layout", lambda: _out_call(x, torch.frombuffer(raw, dtype=torch.float32, offset=1).view(B, D)))


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_out_overlap_an_out_that_shares_memory_with_an_input(served: Served) -> None:
    x = torch.randn(B, D)
    served.put_call("_softmax", [x], SOFTMAX)

    def in_place() -> torch.Tensor:
        y = x.clone()
        return _out_call(y, y)

    misses("_softmax", "out_overlap", in_place)
    big = torch.randn(B + 1, D)

    def all_but_one_row_shared() -> torch.Tensor:
        # Each row is read before the one in front of it is written. Two threads would race, in stock too.
        memory = big.clone()
        return _out_call(memory[1:], memory[:B])

    misses("_softmax", "out_overlap", all_but_one_row_shared)


def test_an_out_behind_an_input_in_one_storage_is_served(served: Served) -> None:
    """As in attention, where the result is written over q while k and v, in the same buffer, are still read."""
    big = torch.randn(2 * B, D)
    served.put_call("_softmax", [big[:B]], SOFTMAX)
    stock = softmax(big[:B])
    assert reasons("_softmax", lambda: _out_call(big[:B], big[B:])) == {"hit": 1}
    assert reasons("_softmax", lambda: _out_call(big[B:], big[:B])) == {"hit": 1}
    twice = softmax(stock)
    torch.testing.assert_close(big[B:], stock)
    torch.testing.assert_close(big[:B], twice)


def test_flag_unreadable_the_old_getter_raises_and_ours_still_reads() -> None:
    """Setting precision the new way makes the old getter raise. The getter of the backend, which the router asks, does not
    raise on this torch, so that reason stays unused; the flag is in the key instead."""
    a, before = torch.randn(3, 3), torch.get_float32_matmul_precision()
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        assert reasons("mm", lambda: torch.mm(a, a)) == {"no_record": 1}
        with ak.record() as recording:
            torch.mm(a, a)
        assert recording.workload().entries[0].key.matmul_precision == "bf16" == SPECS["mm"].key([a, a], {}).matmul_precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.get_float32_matmul_precision() == before
    assert "flag_unreadable" in extension().reason_names


def test_no_record(served: Served) -> None:
    x = torch.randn(B, D)
    extension().forget_misses()
    misses("_softmax", "no_record", lambda: softmax(x))
    words = SPECS["_softmax"].encode(SPECS["_softmax"].key([x], SOFTMAX), torch.get_num_threads())
    assert [(tuple(missed), *rest) for missed, *rest in extension().missed_keys()] == [(words, "no_record", 1)]


def test_accuracy_a_weaker_class_than_the_policy_admits(served: Served) -> None:
    x = torch.randn(B, D)
    served.put_call("_softmax", [x], SOFTMAX, slots=[(0, 2, 0), (0, 2, 1)])
    misses("_softmax", "accuracy", lambda: softmax(x))

    def tolerant() -> None:
        with ak.enabled(accuracy="tolerance"):
            softmax(x)

    assert counted("_softmax", tolerant) == {"hit": 1}


def test_determinism_a_kernel_weaker_than_deterministic_algorithms_ask(served: Served) -> None:
    x = torch.randn(B, D)
    served.put_call("_softmax", [x], SOFTMAX, slots=[(0, 1, 0)])
    torch.use_deterministic_algorithms(True)
    try:
        misses("_softmax", "determinism", lambda: softmax(x))
    finally:
        torch.use_deterministic_algorithms(False)
    assert reasons("_softmax", lambda: softmax(x)) == {"hit": 1}


def test_regime_the_out_form_asks_for_the_compiled_winner(served: Served) -> None:
    x = torch.randn(B, D)
    served.put_call("_softmax", [x], SOFTMAX, slots=[(0, 1, 0)])
    misses("_softmax", "regime", lambda: _out_call(x, torch.empty(B, D)))
    assert reasons("_softmax", lambda: softmax(x)) == {"hit": 1}


def test_quarantined(served: Served) -> None:
    x = torch.randn(B, D)
    kernel = served.put_call("_softmax", [x], SOFTMAX)
    kernel.quarantined = True
    misses("_softmax", "quarantined", lambda: softmax(x))
    kernel.quarantined = False
    assert reasons("_softmax", lambda: softmax(x)) == {"hit": 1}


def _kernel_with(outputs: list[object], workspaces: list[tuple[int, bool]], inputs: int = 1) -> object:
    native = extension()
    library = native.Library.load(artifact().binary, artifact().identity)
    steps = [("cpu", "softmax", B, 1, [(0, 0, 0), (1, 0, 0)])]
    return native.Kernel("test", library, steps, workspaces, outputs, inputs)


def test_out_of_memory_in_a_workspace_or_an_output(served: Served) -> None:
    x = torch.randn(B, D)
    words = SPECS["_softmax"].encode(SPECS["_softmax"].key([x], SOFTMAX), torch.get_num_threads())
    beyond = 1 << 50  # more than any address space
    for kernel in (
        _kernel_with([(6, [B, D], [D, 1])], [(beyond, False)]),
        _kernel_with([(6, [beyond], [1])], []),
    ):
        extension().set_table([(words, [(0, 1, 0, kernel)])])
        misses("_softmax", "out_of_memory", lambda: softmax(x))


def test_a_kernel_of_another_op_is_refused_by_the_table() -> None:
    x = torch.randn(B, D)
    words = SPECS["_softmax"].encode(SPECS["_softmax"].key([x], SOFTMAX), torch.get_num_threads())
    layout = (6, [B, D], [D, 1])
    for kernel in (_kernel_with([layout] * 3, []), _kernel_with([layout], [], inputs=7)):
        with pytest.raises(ValueError, match="no call of op family 4"):
            extension().set_table([(words, [(0, 1, 0, kernel)])])


def test_reentrancy_an_overridden_op_used_inside_the_override(served: Served, quiet_router: None) -> None:
    x = torch.randn(B, D)
    inner = served.put_call("_log_softmax", [x], SOFTMAX)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_softmax", lambda x, dim, half: aten._log_softmax.default(x, dim, half).exp(), "CPU", allow_override=True)
    try:
        before = inner.hits
        seen = counted("_log_softmax", served_call(lambda: softmax(x)))
        assert seen == {"reentrant": 1}
        assert inner.hits == before
        assert reasons("_log_softmax", lambda: aten._log_softmax.default(x, 1, False)) == {"hit": 1}
    finally:
        library._destroy()


def test_nothing_is_counted_outside_a_scope(served: Served) -> None:
    x = torch.randn(B, D)
    served.put_call("_softmax", [x], SOFTMAX)
    with ak.record():
        assert counted("_softmax", lambda: softmax(x)) == {}
    with ak.enabled():
        pass
    assert counted("_softmax", lambda: softmax(x)) == {}


def test_stocks_own_errors_are_the_users() -> None:
    with ak.enabled():
        with pytest.raises(IndexError):
            aten._softmax.default(torch.randn(B, D), 7, False)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.mm(torch.randn(2, 3), torch.randn(2, 3))
        x = torch.randn(B, D)
        assert reasons("_softmax", lambda: softmax(x)) == {"no_record": 1}  # the depth guard is back at 0
