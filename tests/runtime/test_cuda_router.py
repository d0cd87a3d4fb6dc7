"""The router at the CUDA keys, families watched and no kernel there: counted misses, and stock in every way of calling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import torch_autokern as autokern
from torch_autokern.runtime.extension import extension
from torch_autokern.runtime.session import session

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@contextmanager
def _every_family_watched() -> Iterator[None]:
    session().open_block(every_family=True)
    try:
        yield
    finally:
        session().close_block(every_family=True)


def _calls(op: str) -> int:
    return sum(row.calls for row in autokern.stats().ops if row.op == op)


class Block(nn.Module):
    """Softmax, LayerNorm and both kinds of products, so that every forward family is met."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.norm(x))
        return torch.bmm(torch.softmax(torch.bmm(y, y.mT), -1), y)


def test_all_cuda_keys_are_covered_and_given_back() -> None:
    with _every_family_watched():
        rows = [row for row in extension().installed_overloads() if row.device == "CUDA"]
        assert len(rows) == 18
        assert all(row.installed and row.on_top for row in rows)
    autokern.disable()
    assert not any(row.installed for row in extension().installed_overloads())


def test_misses_on_cuda_are_bitwise_stock_in_forward_and_backward() -> None:
    torch.manual_seed(0)
    model = Block().cuda()
    x = torch.randn(4, 32, 64, device="cuda", requires_grad=True)
    want = model(x)
    want_grad = torch.autograd.grad(want.square().sum(), [x, *model.parameters()])
    before = _calls("native_layer_norm_backward")
    with _every_family_watched():
        autokern.optimize(model)
        got = model(x)
        got_grad = torch.autograd.grad(got.square().sum(), [x, *model.parameters()])
        autokern.restore(model)
    assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(got_grad, want_grad, strict=True))
    assert _calls("native_layer_norm_backward") == before + 1, "the backward runs in the device's own thread, and is in scope"


def test_misses_inside_a_captured_graph_replay_with_new_contents() -> None:
    model = autokern.optimize(Block().cuda().eval())
    x = torch.randn(4, 32, 64, device="cuda")
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        autokern.restore(model)
        assert torch.equal(out, model(x))


def test_misses_on_a_side_stream_stay_on_it() -> None:
    x = torch.randn(2048, 2048, device="cuda")
    stream = torch.cuda.Stream()
    with autokern.enabled(), torch.cuda.stream(stream):
        y = torch.softmax(x, -1)
    stream.synchronize()
    assert torch.equal(y, torch.softmax(x, -1))


def test_tf32_flags_are_part_of_the_key() -> None:
    x = torch.randn(64, 64, device="cuda")
    with autokern.record() as recording:
        torch.mm(x, x)
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            torch.mm(x, x)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
    precisions = {entry.key.matmul_precision for entry in recording.workload().entries}
    assert precisions == {"ieee", "tf32"}


def test_full_graph_compile_reaches_the_out_forms() -> None:
    x = torch.randn(64, 64, device="cuda")
    compiled = torch.compile(lambda a: torch.mm(a, a).relu(), fullgraph=True)
    with autokern.record() as recording:
        compiled(x)
        compiled(x)
    entries = [entry for entry in recording.workload().entries if entry.key.op == "mm"]
    assert sum(entry.out_calls for entry in entries) >= 1
