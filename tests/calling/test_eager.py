"""Ways of calling in eager mode. Each test says which kernel ran; `way` makes a row of docs/compatibility.md of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from models import values
from tiny_kernels import BACKWARD_OPS, FORWARD_OPS, B, Block, D, Served, assert_all_close, in_a_fork, seen, train_step
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, Dataset

import torch_autokern as ak
from torch_autokern.runtime.extension import extension

way = pytest.mark.way
X = values(B, D)
W = values(D, D)
EAGER, COMPILED = [(0, a, d) for a in range(3) for d in (0, 1)], [(1, a, d) for a in range(3) for d in (0, 1)]
FORWARD_HITS = {op: {"hit": 1} for op in FORWARD_OPS}
Watch = Callable[[Callable[[], object]], dict[str, dict[str, int]]]


def inside(run: Callable[[], Any], results: list[Any] | None = None) -> Callable[[], None]:
    """`run` in an enabled block, its results collected."""

    def enabled() -> None:
        with ak.enabled():
            result = run()
        if results is not None:
            results.extend(result if isinstance(result, (list, tuple)) else [result])

    return enabled


def check(watch: Watch, run: Callable[[], Any]) -> dict[str, dict[str, int]]:
    """Inside a scope `run` gives what it gives in stock, as float32 rounding allows; returns what the router saw."""
    stock = run()
    mine: list[torch.Tensor] = []
    calls = watch(inside(run, mine))
    expected = list(stock) if isinstance(stock, (list, tuple)) else [stock]
    assert_all_close(mine, expected)
    for a, b in zip(mine, expected, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    return calls


@way("forward, loss, backward", "served", "the backward of what a scope computed belongs to it, on any thread")
def test_training_step(block: Block, watch: Watch) -> None:
    stock = train_step(block, X)
    ak.optimize(block)
    mine: list[torch.Tensor] = []
    assert set(watch(lambda: mine.extend(train_step(block, X)))) == {*FORWARD_OPS, *BACKWARD_OPS}
    assert_all_close(mine, stock)


@way("`out=` forms", "served", "by the winners of the compiled regime, whose results are checked against that layout")
def test_out_forms(served: Served, watch: Watch) -> None:
    """The eager winners are not asked: a wrong kernel there would show."""
    served.put_call("mm", [X, W], {}, slots=COMPILED)
    served.put_call("addmm", [values(D), X, W.t()], {"beta": 1, "alpha": 1}, slots=COMPILED)
    served.put_call("_softmax", [X], {"dim": 1, "half_to_float": False}, slots=COMPILED)
    made = [torch.empty(B, D) for _ in range(3)]

    def run() -> list[torch.Tensor]:
        return [
            torch.mm(X, W, out=made[0]), torch.addmm(values(D), X, W.t(), out=made[1]), torch.softmax(X, -1, out=made[2])
        ]  # fmt: skip

    stock = [torch.mm(X, W), torch.addmm(values(D), X, W.t()), torch.softmax(X, -1)]
    mine: list[torch.Tensor] = []
    assert watch(inside(run, mine)) == {op: {"hit": 1} for op in ("mm", "addmm", "_softmax")}
    assert_all_close(mine, stock)
    assert all(a is b for a, b in zip(mine, made, strict=True))
    assert seen(inside(lambda: torch.mm(X, W))) == {"mm": {"regime": 1}}


@way("an `out` that overlaps an input, has other strides, or needs a resize", "stock", "`out_overlap`, `out_layout`")
def test_unusual_out(served: Served, watch: Watch) -> None:
    served.put_call("_softmax", [X], {"dim": 1, "half_to_float": False})
    for make in (lambda: X.clone(), lambda: torch.empty(D, B).t(), lambda: torch.empty(0)):
        stock, mine = make(), make()
        source = stock if stock.is_contiguous() and stock.numel() else X
        expected = torch.ops.aten._softmax.out(source, 1, False, out=stock)
        source = mine if source is stock else X
        watch(inside(lambda source=source, mine=mine: torch.ops.aten._softmax.out(source, 1, False, out=mine)))  # type: ignore[misc]
        assert torch.equal(mine, expected) and mine.stride() == expected.stride()
    assert served.hits() == 0


@way("in-place forms (`addmm_`, `baddbmm_`)", "unseen", "the result overwrites an input, which no record proves")
def test_in_place_forms(every_family: None, watch: Watch) -> None:
    stock = torch.zeros(B, D).addmm_(X, W)
    mine: list[torch.Tensor] = []
    watch(inside(lambda: torch.zeros(B, D).addmm_(X, W), mine))
    assert torch.equal(mine[0], stock)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@way("`no_grad`, `inference_mode`", "served", "results of inference mode are inference tensors, as stock's")
def test_without_gradients(block: Block, watch: Watch, mode: Callable[[], Any]) -> None:
    with mode():
        stock = block(X)
        ak.optimize(block)
        mine: list[torch.Tensor] = []
        assert watch(lambda: mine.append(block(X))) == FORWARD_HITS
    assert mine[0].is_inference() == stock.is_inference() and not mine[0].requires_grad
    assert_all_close(mine, [stock])


@way("autocast", "served", "casts happen above the router: it sees the bfloat16 calls, which have keys of their own")
def test_autocast(everything: Served, watch: Watch) -> None:
    stock = models.autocast_step()
    mine: list[torch.Tensor] = []
    calls = watch(inside(models.autocast_step, mine))
    assert calls["addmm"] == {"hit": 1} and calls["native_layer_norm_backward"] == {"hit": 1}
    for a, b in zip(mine, stock, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


@way("`torch.vmap`", "served", "the batched call has a key of its own, with the mapped dimension in it")
def test_vmap(everything: Served, watch: Watch) -> None:
    assert check(watch, models.mapped_block)["_softmax"] == {"hit": 1}


@way("`torch.func` (`grad`, `jvp`, `jacrev`, `functional_call`), per-sample gradients", "served", "below functorch's wrappers")
def test_functional_transforms(everything: Served, watch: Watch) -> None:
    assert "native_layer_norm_backward" in check(watch, models.per_sample_gradients)
    assert "_softmax_backward_data" in check(watch, models.jacobian_products)


@way("fake and meta tensors", "unseen", "their own kernels answer; no data is ever touched")
def test_fake_and_meta_tensors(block: Block, watch: Watch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    ak.optimize(block)

    def fake() -> None:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            y = block(mode.from_tensor(X))
            assert y.shape == X.shape and type(y).__name__ == "FakeTensor"

    watch(fake)
    meta = ak.optimize(Block().to("meta"))
    watch(lambda: meta(X.to("meta")))


@way("subclasses that unwrap in `__torch_dispatch__`", "served", "they hand plain tensors to ATen, which are served")
def test_a_wrapper_subclass_is_served_on_what_it_wraps(block: Block, watch: Watch) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    stock = Block.forward(block, X), Block.forward(block, X + 1)
    ak.optimize(block)
    with torch.no_grad():
        mine: list[torch.Tensor] = []
        calls = watch(lambda: mine.append(block(TwoTensor(X, X + 1))))
    assert calls == {op: {"hit": 2} for op in FORWARD_OPS}
    assert type(mine[0]) is TwoTensor
    assert_all_close([mine[0].a, mine[0].b], [t.detach() for t in stock])


@way("subclasses that reach the backend key themselves", "stock", "`subclass`: their memory may be anything")
def test_a_subclass_at_the_backend_key_is_stock(served: Served, watch: Watch) -> None:
    class Tagged(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            with torch._C._DisableTorchDispatch():
                return func(*args, **(kwargs or {}))

    served.put_call("_softmax", [X], {"dim": 1, "half_to_float": False})
    tagged = torch.Tensor._make_subclass(Tagged, X)
    stock = torch.softmax(tagged, -1).as_subclass(torch.Tensor)
    mine: list[torch.Tensor] = []
    assert watch(inside(lambda: torch.softmax(tagged, -1), mine)) == {"_softmax": {"subclass": 1}}
    assert torch.equal(mine[0].as_subclass(torch.Tensor), stock)


@way(
    "nested tensors, strided",
    "served",
    "PyTorch calls ATen with plain views of their buffer, one a component; those are served",
)
def test_nested_tensors(everything: Served, watch: Watch) -> None:
    assert check(watch, models.nested)["_softmax"] == {"hit": 2}


@way("nested tensors, jagged", "served", "on their plain buffer, whose key has the total length in it")
def test_jagged_tensors(block: Block, watch: Watch) -> None:
    x = torch.nested.nested_tensor([X[:1], X[1:]], layout=torch.jagged)
    with torch.no_grad():
        calls = check(watch, lambda: block(x).values())
    assert calls == FORWARD_HITS


@way("sparse and mkldnn tensors", "unseen", "their own kernels answer")
def test_other_layouts(every_family: None, watch: Watch) -> None:
    sparse, opaque = X.to_sparse(), X.to_mkldnn()
    for run in (lambda: torch.sparse.mm(sparse, W), lambda: torch.softmax(opaque, -1).to_dense()):
        stock, mine = run(), []  # type: ignore[var-annotated]
        watch(inside(run, mine))
        assert torch.equal(mine[0], stock)


@way("complex numbers", "stock", "`dtype`: keys do not express them")
def test_complex_numbers(every_family: None, watch: Watch) -> None:
    a, b = torch.complex(X, X), torch.complex(W, -W)
    mine: list[torch.Tensor] = []
    assert watch(inside(lambda: a @ b, mine)) == {"mm": {"dtype": 1}}
    assert torch.equal(mine[0], a @ b)


@way("`nn.MultiheadAttention` in training", "served", "its products and its softmax are separate calls")
def test_multihead_attention_in_training(everything: Served, watch: Watch) -> None:
    calls = check(watch, lambda: models.attention(training=True))
    assert {"addmm", "mm", "bmm", "_softmax", "_softmax_backward_data"} <= set(calls) | {"addmm"}


@way(
    "`nn.MultiheadAttention`, fast path", "partly served", "its products; its softmax is written over its input (`out_overlap`)"
)
def test_multihead_attention_fast_path(everything: Served, watch: Watch) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        calls = check(watch, lambda: models.attention(training=False))
    assert any(event.key == "aten::_native_multi_head_attention" for event in profile.key_averages())
    assert calls["_softmax"] == {"out_overlap": 1} and calls["bmm"] == {"hit": 2}


@way(
    "`nn.TransformerEncoderLayer`, fast path",
    "partly served",
    "all but its softmax (as above) and the product that is fused with its activation",
)
def test_transformer_encoder_fast_path(everything: Served, watch: Watch) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        calls = check(watch, models.encoder_layer)
    ran = {event.key for event in profile.key_averages()}
    assert {"aten::_transformer_encoder_layer_fwd", "aten::_addmm_activation"} <= ran
    assert calls["native_layer_norm"] == {"hit": 2}


@way("`scaled_dot_product_attention`, fused", "unseen", "its products and its softmax are inside one kernel of PyTorch's")
def test_fused_attention(every_family: None, watch: Watch) -> None:
    q = values(2, 2, 64, D)
    mine: list[torch.Tensor] = []
    watch(inside(lambda: nn.functional.scaled_dot_product_attention(q, q, q), mine))
    assert torch.equal(mine[0], nn.functional.scaled_dot_product_attention(q, q, q))


@way("`scaled_dot_product_attention`, math backend", "served", "separate calls")
def test_attention_of_separate_ops(everything: Served, watch: Watch) -> None:
    assert set(check(watch, models.attention_of_separate_ops)) == {"bmm", "_softmax"}


@way("weight norm and other parametrizations", "served", "the weight is computed first, the product sees a plain tensor")
def test_parametrizations(block: Block, watch: Watch) -> None:
    parametrizations.weight_norm(block.linear)
    stock = block(X)
    ak.optimize(block)
    mine: list[torch.Tensor] = []
    assert watch(lambda: mine.append(block(X))) == FORWARD_HITS
    assert_all_close([mine[0].detach()], [stock.detach()])
    parametrizations.spectral_norm(block.linear.eval())  # its power iteration is matrix-vector products, not ours
    assert watch(lambda: block(X)) == FORWARD_HITS


@way("adapters around frozen layers (as PEFT does), merged and not", "served", "at op level, so wrappers do not matter")
def test_adapters(everything: Served, watch: Watch) -> None:
    calls = check(watch, models.adapted)
    assert calls["addmm"] == {"hit": 1} and calls["mm"]["hit"] >= 4
    model = models.seeded(lambda: models.LowRankAdapter(nn.Linear(D, D)))
    assert isinstance(model, models.LowRankAdapter)
    unmerged = model(X).detach()
    model.merge()
    ak.optimize(model)
    mine: list[torch.Tensor] = []
    assert watch(lambda: mine.append(model(X).detach())) == {"addmm": {"hit": 1}}
    assert_all_close(mine, [unmerged])


@way("`einsum`, `nn.Bilinear`", "served", "they end in batched products")
def test_composites(everything: Served, watch: Watch) -> None:
    assert check(watch, models.einsum_and_bilinear)["bmm"]["hit"] >= 4


@way("recurrent layers", "served", "their products")
def test_recurrent_layers(everything: Served, watch: Watch) -> None:
    assert check(watch, models.recurrent)["addmm"] == {"hit": B + 1}


@way("`torch.jit.trace`, `torch.jit.script`", "served", "a compiled graph calls ATen at run time")
def test_jit(block: Block, watch: Watch) -> None:
    scripted, traced = torch.jit.script(block), torch.jit.trace(block, X)
    for compiled in (scripted, traced):
        for _ in range(3):  # profiled, optimised, run
            check(watch, lambda compiled=compiled: compiled(X))  # type: ignore[misc]


class Embedded(Dataset[Any]):
    """Items that the optimised model computes in the worker, with what the worker's router saw."""

    def __init__(self, model: Block) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[torch.Tensor, dict[str, dict[str, int]]]:
        result: list[torch.Tensor] = []
        with torch.no_grad():
            calls = seen(lambda: result.append(self.model(X + index)))
        return result[0], calls


@way("`DataLoader` workers forked after `optimize`", "served", "the table is inherited")
def test_data_loader_workers_forked_after_optimise(block: Block, watch: Watch) -> None:
    with torch.no_grad():
        stock = [block(X + index) for index in range(4)]
    ak.optimize(block)
    in_workers = list(DataLoader(Embedded(block), batch_size=None, num_workers=2, multiprocessing_context="fork"))
    assert_all_close([result for result, _ in in_workers], stock)
    assert [calls for _, calls in in_workers] == [FORWARD_HITS] * 4

    def child() -> None:
        assert seen(lambda: block(X)) == FORWARD_HITS

    in_a_fork(child)
    watch(lambda: block(X))
    assert extension().table_generation() > 0
