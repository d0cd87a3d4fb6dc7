"""Functions too large for a whole truth: which dimension they are cut along, and that cutting changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_judged import judge_values, task_of

from torch_autokern.judge import functions
from torch_autokern.judge.accuracy import evaluate
from torch_autokern.judge.families import Family
from torch_autokern.judge.functions import cut_of, too_large
from torch_autokern.judge.inputs import make_inputs
from torch_autokern.judge.outcome import Reason
from torch_autokern.judge.rows import row_axis
from torch_autokern.ops.independent import Independent, independent, on_slices

Body = Callable[..., object]
ROWS = 6
# Body, shapes, and the dimension of each argument that is cut.
CUT: dict[str, tuple[Body, tuple[tuple[int, ...], ...], tuple[int | None, ...]]] = {
    "rms over channels": (lambda x: x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-5), ((6, 5, 4),), (0,)),
    "sum without its dimension": (lambda x: (x.sum(0), x.amax(0, keepdim=True)), ((5, 6, 4),), (1,)),
    "softmax of a product": (lambda a, b: torch.softmax(a @ b * 0.1, -1), ((6, 4), (4, 5)), (0, None)),
    "columns of a product": (lambda a, b: (a @ b).softmax(0), ((3, 4), (4, 6)), (None, 1)),
    "batched products": (lambda a, b: torch.bmm(a, b).relu(), ((6, 3, 4), (6, 4, 5)), (0, 0)),
    "attention": (lambda q, k, v: (q @ k.mT).softmax(-1) @ v, ((6, 2, 5, 4),) * 3, (0, 0, 0)),
    "a linear layer in 3-D": (lambda x, w, b: F.gelu(F.linear(x, w, b)), ((6, 3, 4), (5, 4), (5,)), (0, None, None)),
    "layer norm": (lambda x, w: F.layer_norm(x, (4,), w), ((6, 3, 4), (4,)), (0, None)),
    "normalize": (lambda x: F.normalize(x, dim=1), ((6, 5),), (0,)),
    "groups": (lambda x: x.reshape(6, 2, 2, 5).softmax(2).reshape(6, 4, 5), ((6, 4, 5),), (0,)),
    "permuted and set together": (
        lambda x, y: torch.cat([x.permute(2, 0, 1), y.transpose(0, 1).unsqueeze(-1)], 2), ((6, 3, 4), (6, 4)), (0, 0),
    ),
    "gated halves": (lambda x: (lambda a, b: a * b.sigmoid())(*x.chunk(2, 1)), ((6, 8),), (0,)),
    "statistics": (lambda x: torch.var_mean(x, (1, 2), keepdim=True), ((6, 4, 5),), (0,)),
    "one of many": (lambda x: torch.stack([x[:, 0], x[:, 1].cumsum(1)], 0), ((6, 2, 5),), (0,)),
    "joined with what is inside": (lambda a, b: torch.einsum("bijl,lk->bijk", a, b), ((6, 3, 2, 4), (4, 5)), (0, None)),
    "joined, permuted and parted": (
        lambda x: x.reshape(12, 5).t().cumsum(0).t().reshape(6, 10).softmax(1).reshape(6, 2, 5), ((6, 2, 5),), (0,),
    ),
    "a constant row": (lambda x: x + torch.arange(5, dtype=torch.float32), ((6, 5),), (0,)),
}  # fmt: skip
WHOLE: dict[str, tuple[Body, tuple[int, ...], str]] = {
    "a sum of all": (lambda x: x - x.mean(), (6, 1), "aten.mean.default mixes"),
    "both dimensions": (lambda x: x.softmax(0) + x.softmax(1), (6, 5), "dimension 1: aten._softmax.default mixes"),
    "a product with itself": (lambda x: x @ x.t(), (6, 5), "mixes"),
    "flattened": (lambda x: x.reshape(30).cumsum(0), (6, 5), "dimension 0: aten.cumsum.default mixes"),
    "no rule": (lambda x: x.triu(), (6, 5), "cannot follow"),
    "a table of its size": (lambda x: x * torch.arange(6, dtype=torch.float32)[:, None], (6, 1), "not cut with it"),
    "the first half": (lambda x: x[:3] * 2, (6, 1), "mixes"),
    "joined in the result": (lambda x: x.exp().reshape(12, 1), (6, 2, 1), "a result has it joined"),
    "parted": (lambda x: x.reshape(2, 3, 1) * 2, (6, 1), "or parts it"),
    "a result without it": (lambda x: (x.exp(), torch.ones(3)), (6, 1), "does not have it"),
}


def cut_key(name: str) -> tuple[object, object, Independent]:
    body, shapes, dims = CUT[name]
    task, spec = task_of(body, *[torch.randn(shape) for shape in shapes])
    most = max(t.numel() for t in map(torch.zeros, shapes)) // 2
    found = independent(task.key, most * 4)
    assert isinstance(found, Independent) and found.inputs == dims, found
    return task, spec, found  # type: ignore[return-value]


@pytest.mark.parametrize("name", CUT)
def test_some_slices_are_what_the_whole_has_there(name: str) -> None:
    task, spec, found = cut_key(name)
    assert found.size == ROWS
    tensors = [torch.randn(shape) for shape in CUT[name][1]]
    whole = spec.reference(tensors, task.key.scalars)  # type: ignore[attr-defined]
    for start, length in ((0, 1), (1, 2), (3, 3)):
        part, key = on_slices(spec, task.key, found, length)  # type: ignore[arg-type, attr-defined]
        given = [t if d is None else t.narrow(d, start, length) for t, d in zip(tensors, found.inputs, strict=True)]
        for mine, all_of_it, dim in zip(part.reference(given, key.scalars), whole, found.outputs, strict=True):
            torch.testing.assert_close(mine, all_of_it.narrow(dim, start, length), rtol=1e-12, atol=1e-12)
        assert [t.sizes for t in part.stock_outputs(key)] == [t.sizes for t in key.outputs]  # type: ignore[union-attr]
    again, key = on_slices(spec, task.key, found, ROWS)  # type: ignore[arg-type, attr-defined]
    assert again is spec and key == task.key, "all slices are the function itself"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", WHOLE)
def test_a_function_that_mixes_slices_says_where(name: str) -> None:
    body, shape, words = WHOLE[name]
    task, _ = task_of(body, torch.randn(shape))
    found = independent(task.key, 20)
    assert isinstance(found, str) and words in found, found


def test_an_argument_that_is_used_whole_must_fit() -> None:
    task, _ = task_of(lambda a, b: a @ b, torch.randn(64, 4), torch.randn(4, 50))
    assert isinstance(independent(task.key, 200), Independent)
    found = independent(task.key, 199)
    assert isinstance(found, str) and "argument 1 would be used whole" in found


def test_outer_dimensions_come_first_as_long_as_their_slices_fit() -> None:
    task, _ = task_of(lambda x: x.exp(), torch.randn(4, 8, 16))
    inputs = [getattr(independent(task.key, most), "inputs", None) for most in (128, 127, 63, 31)]
    assert inputs == [(0,), (1,), (2,), None]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(functions.MOST_ELEMENTS, "cpu", 1 << 12)
    monkeypatch.setattr("torch_autokern.judge.accuracy.ENVELOPE_ELEMENTS", 1 << 11)
    monkeypatch.setattr("torch_autokern.judge.accuracy.chunk_elements", lambda device: 1 << 10)
    monkeypatch.setattr("torch_autokern.judge.vacuity.PROBE_ELEMENTS", 1 << 10)


def test_errors_of_a_cut_function_are_those_of_the_whole(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    task, spec = task_of(lambda x, w: F.layer_norm(x, (64,), w).relu(), torch.randn(200, 64), torch.randn(64))
    tensors = make_inputs(spec, task.key, Family.NORMAL, torch.Generator().manual_seed(0)).tensors
    stock = spec.stock(tensors, task.key.scalars)
    wrong = stock[0].clone()
    wrong[150, 7] += 1e-3
    assert row_axis(spec, task.key).size == 200
    (cut,) = evaluate(task, Family.NORMAL, tensors, [(wrong,), stock], stock)
    monkeypatch.setitem(functions.MOST_ELEMENTS, "cpu", 1 << 20)
    assert row_axis(spec, task.key).size == 1
    (whole,) = evaluate(task, Family.NORMAL, tensors, [(wrong,), stock], stock)
    for mine, theirs in zip(cut.tallies, whole.tallies, strict=True):
        assert mine.pool.count == theirs.pool.count
        # The scale is measured by random moves, which are others in every chunk.
        assert mine.pool.rms == pytest.approx(theirs.pool.rms, rel=0.1) and 0.4 < mine.pool.largest / theirs.pool.largest < 2.5
    assert cut.tallies[0].worst is not None and cut.tallies[0].worst.index == (150, 7)


def test_a_large_function_is_judged_by_the_same_rule(small: None) -> None:
    task, spec = task_of(lambda x: x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-5), torch.randn(32, 5, 64))
    assert too_large(task.key) is None and cut_of(task.key) is not None
    assert judge_values(task, lambda x: tuple(r.clone() for r in spec.stock([x], {})), seeds=1) is None

    def drops_a_channel(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x / torch.sqrt((x[:, :-1] ** 2).sum(1, keepdim=True) / 5 + 1e-5),)

    refused = judge_values(task, drops_a_channel, seeds=1)
    assert refused is not None and refused.reason is Reason.WRONG_VALUE


def test_a_large_function_that_cannot_be_cut_is_refused_with_its_size_and_why(small: None) -> None:
    task, _ = task_of(lambda x: x - x.mean(), torch.randn(100, 100))
    reason = too_large(task.key)
    assert reason is not None and "10000" in reason and "4096" in reason and "aten.mean.default mixes" in reason
