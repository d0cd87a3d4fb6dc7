"""Records of whole functions: kept, found again, served, counted and explained like any other."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import rms_norm
import torch
from rms_norm import RMSNorm, artifact, body
from tiny_kernels import record_for

import torch_autokern as ak
from torch_autokern.ops.graph import capture
from torch_autokern.runtime.plan import encode_plan
from torch_autokern.runtime.session import session
from torch_autokern.store.record import KernelRecord


def record() -> tuple[KernelRecord, dict[str, bytes]]:
    """A record whose verdict nobody reached: what is tested is the way from the store to the call."""
    built = artifact("right")
    made = record_for(rms_norm.key())
    provenance = msgspec.structs.replace(made.provenance, candidate_id=built.identity)
    data = {"kernel.so": built.binary, "plan.json": encode_plan(built.candidate.plan)}
    return msgspec.structs.replace(made, provenance=provenance), data


@pytest.fixture
def stored() -> Iterator[str]:
    made, data = record()
    outcome = session().store.publish(made, data)
    ak.refresh()
    yield outcome.record_id
    ak.disable()
    session().store.clear(made.key.digest)
    session().loaded.clear()
    session().refresh()


def test_a_stored_record_is_served_counted_and_explained(stored: str) -> None:
    assert stored in session().loaded, session().load_failures
    x = torch.randn(rms_norm.SHAPE)
    model = ak.optimize(torch.nn.Sequential(ak.kernel(RMSNorm()), torch.nn.Flatten()))
    hits = session().loaded[stored].native.hits
    with torch.no_grad():
        torch.testing.assert_close(model(x), body(x).flatten(1))
    assert session().loaded[stored].native.hits == hits + 1
    assert [row.record_id for row in ak.stats().kernels] == [stored]
    rows = [row for row in ak.explain(model, x).keys if row.call.startswith("function:")]
    assert [row.record_id for row in rows] == [stored]
    leaf, stock = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(leaf).square().sum().backward()
    body(stock).square().sum().backward()
    assert leaf.grad is not None and stock.grad is not None and torch.equal(leaf.grad, stock.grad)


def test_a_record_whose_graph_is_not_what_its_name_says_is_set_aside(stored: str) -> None:
    made, data = record()
    other = capture(lambda x: x + 1, [torch.empty(rms_norm.SHAPE)]).text
    key = msgspec.structs.replace(made.key, scalars={"graph": other})
    outcome = session().store.publish(msgspec.structs.replace(made, key=key), data)
    try:
        ak.refresh()
        assert outcome.record_id not in session().loaded
        assert "not the name of the graph" in session().load_failures[outcome.record_id]
        assert stored in session().loaded, "the others are served"
    finally:
        session().store.clear(key.digest)
