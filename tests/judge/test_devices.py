"""Everything that the judge computes stays on the device of the call. Tensors without data stand for a GPU's: mixing them with
the CPU's is the same error."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from torch_autokern.judge import vacuity
from torch_autokern.judge.accuracy import Task
from torch_autokern.judge.families import FILL, Draw, Family, fill_parameter
from torch_autokern.judge.outcome import Accuracy
from torch_autokern.judge.rows import Permutation, permuted_stock
from torch_autokern.ops import SPECS

X = (8, 64)
# Tensor shapes (None: absent) and scalars of every op, absent parameters in each combination that changes the arithmetic.
CALLS: dict[str, tuple[str, tuple[tuple[int, ...] | None, ...], dict[str, object]]] = {
    "softmax": ("_softmax", (X,), {"dim": 1, "half_to_float": False}),
    "log_softmax": ("_log_softmax", (X,), {"dim": 0, "half_to_float": False}),
    "softmax_backward": ("_softmax_backward_data", (X, X), {"dim": 1, "input_dtype": "float32"}),
    "log_softmax_backward": ("_log_softmax_backward_data", (X, X), {"dim": 1, "input_dtype": "float32"}),
    "layer_norm": ("native_layer_norm", (X, (64,), (64,)), {"normalized_shape": (64,), "eps": 1e-5}),
    "layer_norm_plain": ("native_layer_norm", (X, None, None), {"normalized_shape": (64,), "eps": 1e-5}),
    "layer_norm_bias": ("native_layer_norm", (X, None, (64,)), {"normalized_shape": (64,), "eps": 1e-5}),
    "layer_norm_backward": (
        "native_layer_norm_backward", (X, X, (8, 1), (8, 1), (64,), (64,)),
        {"normalized_shape": (64,), "output_mask": (True, True, True)},
    ),
    "mm": ("mm", ((8, 16), (16, 8)), {}),
    "bmm": ("bmm", ((2, 8, 16), (2, 16, 8)), {}),
    "addmm": ("addmm", ((8,), (8, 16), (16, 8)), {"beta": 0.5, "alpha": 2.0}),
    "baddbmm": ("baddbmm", ((2, 8, 8), (2, 8, 16), (2, 16, 8)), {"beta": 0.5, "alpha": 2.0}),
}  # fmt: skip


def _call(name: str, device: str) -> tuple[Task, tuple[torch.Tensor | None, ...]]:
    op, shapes, scalars = CALLS[name]
    here = tuple(None if shape is None else torch.rand(shape) for shape in shapes)
    key = SPECS[op].key(here, scalars)  # type: ignore[arg-type]
    return Task(SPECS[op], key, Accuracy()), tuple(None if t is None else t.to(device) for t in here)


@pytest.mark.parametrize("name", CALLS)
def test_truth_and_scale_are_where_the_call_is(name: str) -> None:
    task, tensors = _call(name, "meta")
    truth = task.spec.reference(tensors, task.key.scalars)
    scale = task.spec.scale(truth, tensors, task.key.scalars)
    assert {t.device.type for t in (*truth, *scale)} == {"meta"}


@pytest.mark.parametrize("family", [f for f in Family if f is not Family.NONFINITE])  # that one asks for positions
def test_a_family_fills_where_its_tensor_is(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Draw, "number", lambda self, low, high: (low + high) / 2)
    for dtype in (torch.float32, torch.float16):
        for second in (False, True):
            out = torch.empty(8, 64, device="meta")
            draw = Draw(out, (1,), dtype, None, None, second, second)  # type: ignore[arg-type]
            FILL[family](dataclasses.replace(draw))
    fill_parameter(torch.empty(64, device="meta"), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in CALLS if "backward" not in name])
def test_probes_compute_where_the_call_is(name: str) -> None:
    task, tensors = _call(name, "meta")
    stock = task.spec.stock(tensors, task.key.scalars)
    for probe in vacuity._PROBES.values():
        result = probe(task, tensors, stock[0], 0)
        assert result is None or result.device.type == "meta"


@pytest.mark.parametrize("name", CALLS)
def test_permuted_stock_is_where_the_call_is(name: str) -> None:
    task, tensors = _call(name, "meta")
    length = 16 if task.spec.uses_matmul_precision else (8 if task.key.scalars.get("dim") == 0 else 64)
    order = Permutation(torch.arange(length, device="meta"), 1)
    results = permuted_stock(task.spec, task.key, tensors, order)
    assert {t.device.type for t in results if t is not None} == {"meta"}
