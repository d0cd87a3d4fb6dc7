"""The router (C++) and `ops/spec.py` (Python) write the same key for the same call."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

import torch_autokern as ak
from torch_autokern.ops import SPECS
from torch_autokern.ops import spec as spec_module
from torch_autokern.ops.spec import DTYPE_CODES, op_index, tensor_key, tensor_words
from torch_autokern.runtime.extension import extension
from torch_autokern.store.key import KernelKey, TensorKey

Tensors = list[torch.Tensor | None]
OUT_FORMS = [name for name in SPECS if not name.startswith("native_layer_norm")]


def misaligned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose address is one byte past a multiple of its element size."""
    count = math.prod(shape)
    return torch.frombuffer(bytearray(count * dtype.itemsize + 1), dtype=dtype, offset=1, count=count).view(shape)


def sliced(*shape: int) -> torch.Tensor:
    """Every second element of a larger tensor, starting at the third: strides of 2 and an offset."""
    return torch.randn(*shape[:-1], shape[-1] * 2 + 2)[..., 2::2]


def _mm(a: torch.Tensor, b: torch.Tensor) -> tuple[str, Tensors, dict[str, Any]]:
    return "mm", [a, b], {}


def _softmax(x: torch.Tensor, dim: int, op: str = "_softmax") -> tuple[str, Tensors, dict[str, Any]]:
    return op, [x], {"dim": dim, "half_to_float": False}


def _norm(x: torch.Tensor, shape: tuple[int, ...], weight: bool = True, bias: bool = True, eps: float = 1e-5) -> Any:
    affine = [torch.randn(shape, dtype=x.dtype) if given else None for given in (weight, bias)]
    return "native_layer_norm", [x, *affine], {"normalized_shape": shape, "eps": eps}


def _norm_back(mask: tuple[bool, bool, bool], weight: bool = True) -> tuple[str, Tensors, dict[str, Any]]:
    x, w = torch.randn(3, 5, 8), torch.randn(8) if weight else None
    _, mean, rstd = torch.native_layer_norm(x, (8,), w, None, 1e-5)
    return (
        "native_layer_norm_backward",
        [torch.randn(3, 5, 8), x, mean, rstd, w, None if not weight else torch.randn(8)],
        {"normalized_shape": (8,), "output_mask": mask},
    )


def _softmax_back(op: str, x: torch.Tensor, dim: int) -> tuple[str, Tensors, dict[str, Any]]:
    return op, [torch.randn_like(x), x], {"dim": dim, "input_dtype": str(x.dtype).removeprefix("torch.")}


# One line a reason: what of the key it varies.
CALLS: dict[str, Callable[[], tuple[str, Tensors, dict[str, Any]]]] = {
    "mm": lambda: _mm(torch.randn(3, 4), torch.randn(4, 5)),
    "mm transposed": lambda: _mm(torch.randn(4, 3).t(), torch.randn(5, 4).t()),
    "mm strided with offsets": lambda: _mm(sliced(3, 4), sliced(4, 5)),
    "mm expanded": lambda: _mm(torch.randn(1, 4).expand(3, 4), torch.randn(4, 1).expand(4, 5)),
    "mm misaligned": lambda: _mm(misaligned(3, 4), torch.randn(4, 5)),
    "mm int64": lambda: _mm(torch.ones(3, 4, dtype=torch.int64), torch.ones(4, 5, dtype=torch.int64)),
    "mm bfloat16": lambda: _mm(torch.randn(3, 4).bfloat16(), torch.randn(4, 5).bfloat16()),
    "mm float64": lambda: _mm(torch.randn(3, 4).double(), torch.randn(4, 5).double()),
    "addmm": lambda: ("addmm", [torch.randn(5), torch.randn(3, 4), torch.randn(4, 5)], {"beta": 1, "alpha": 1}),
    "addmm scalars": lambda: (
        "addmm",
        [torch.randn(3, 5), torch.randn(3, 4), torch.randn(4, 5)],
        {"beta": 0.5, "alpha": -2},
    ),
    "addmm beta 0": lambda: ("addmm", [torch.randn(3, 1), torch.randn(3, 4), torch.randn(4, 5)], {"beta": 0, "alpha": 1}),
    "addmm bool scalar": lambda: ("addmm", [torch.randn(5), torch.randn(3, 4), torch.randn(4, 5)], {"beta": True, "alpha": 1}),
    "bmm": lambda: ("bmm", [torch.randn(2, 3, 4), torch.randn(2, 4, 5)], {}),
    "bmm broadcast": lambda: ("bmm", [torch.randn(1, 3, 4).expand(2, 3, 4), torch.randn(2, 5, 4).transpose(1, 2)], {}),
    "baddbmm": lambda: (
        "baddbmm",
        [torch.randn(2, 3, 5), torch.randn(2, 3, 4), torch.randn(2, 4, 5)],
        {"beta": 1.5, "alpha": 0.25},
    ),
    "softmax last": lambda: _softmax(torch.randn(4, 8), 1),
    "softmax negative dim": lambda: _softmax(torch.randn(2, 4, 8), -2),
    "softmax 0-d": lambda: _softmax(torch.randn(()), -1),
    "softmax float16": lambda: _softmax(torch.randn(4, 8).half(), -1),
    "softmax strided": lambda: _softmax(sliced(4, 8), 0),
    "softmax rank 8": lambda: _softmax(torch.randn(1, 2, 1, 2, 1, 2, 1, 3), 7),
    "log_softmax": lambda: _softmax(torch.randn(4, 8), -1, "_log_softmax"),
    "log_softmax misaligned": lambda: _softmax(misaligned(4, 8, dtype=torch.float64), 0, "_log_softmax"),
    "layer_norm": lambda: _norm(torch.randn(4, 6, 8), (8,)),
    "layer_norm two dims": lambda: _norm(torch.randn(4, 6, 8), (6, 8)),
    "layer_norm no weight": lambda: _norm(torch.randn(4, 8), (8,), weight=False),
    "layer_norm no bias": lambda: _norm(torch.randn(4, 8), (8,), bias=False),
    "layer_norm neither": lambda: _norm(torch.randn(4, 8), (8,), weight=False, bias=False, eps=0.0),
    "layer_norm eps": lambda: _norm(torch.randn(4, 8), (8,), eps=1e-12),
    "layer_norm float64": lambda: _norm(torch.randn(4, 8).double(), (8,)),
    "softmax_backward": lambda: _softmax_back("_softmax_backward_data", torch.rand(4, 8), 1),
    "softmax_backward negative dim": lambda: _softmax_back("_softmax_backward_data", torch.rand(4, 8), -2),
    "log_softmax_backward float64": lambda: _softmax_back("_log_softmax_backward_data", torch.rand(4, 8).double(), -1),
    "layer_norm_backward all": lambda: _norm_back((True, True, True)),
    "layer_norm_backward input only": lambda: _norm_back((True, False, False)),
    "layer_norm_backward without weight": lambda: _norm_back((True, False, False), weight=False),
}  # fmt: skip


def recorded_words(run: Callable[[], object], op: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(key words, output words) of the one call of `op` that `run` makes."""
    with ak.record():
        run()
    rows = [(tuple(words), tuple(outputs)) for words, outputs, *_ in extension().recorded_keys()]
    found = [row for row in rows if op_index(row[0]) == SPECS[op].index]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("name", CALLS)
def test_the_router_and_the_spec_write_the_same_words(name: str) -> None:
    op, tensors, scalars = CALLS[name]()
    spec = SPECS[op]
    key = spec.key(tensors, scalars)
    words, output_words = recorded_words(lambda: spec.stock(tensors, scalars), op)
    assert words == spec.encode(key, torch.get_num_threads())
    decoded = spec.decode(words, output_words)
    assert decoded == key
    assert spec.encode(decoded, torch.get_num_threads()) == words


@pytest.mark.parametrize("name", [name for name, make in CALLS.items() if make()[0] in OUT_FORMS])
def test_the_out_form_has_the_words_of_the_functional_form(name: str) -> None:
    op, tensors, scalars = CALLS[name]()
    spec = SPECS[op]
    functional, _ = recorded_words(lambda: spec.stock(tensors, scalars), op)
    out = torch.empty_like(spec.stock(tensors, scalars)[0])
    overload = getattr(torch.ops.aten, op)
    positional, keyword = spec.call_args(tensors, scalars)
    # Backward's out form names its result `grad_input` or `out`.
    out_overload = overload.out
    out_name = next(a.name for a in out_overload._schema.arguments if a.is_out)
    words, _ = recorded_words(lambda: out_overload(*positional, **keyword, **{out_name: out}), op)
    assert words == functional


def test_every_op_family_has_the_routers_index() -> None:
    by_name = {overload.name: overload.family for overload in extension().installed_overloads()}
    for name, spec in SPECS.items():
        assert by_name[f"aten::{name}"] == spec.index
    assert sorted(spec.index for spec in SPECS.values()) == list(range(len(SPECS)))
    assert set(by_name.values()) == {spec.index for spec in SPECS.values()}


def test_out_forms_are_intercepted_wherever_the_backend_has_them() -> None:
    names = {overload.name for overload in extension().installed_overloads()}
    for name in OUT_FORMS:
        assert f"aten::{name}.out" in names
    for name in ("native_layer_norm", "native_layer_norm_backward"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}.out", "CPU")


def test_every_dtype_that_keys_express_is_read_alike() -> None:
    for name in DTYPE_CODES:
        dtype = getattr(torch, name)
        a = torch.ones(2, 2, dtype=dtype)
        if name == "bool":
            continue  # no op of ours has a kernel for it
        words, outputs = recorded_words(lambda a=a: torch.mm(a, a), "mm")
        assert SPECS["mm"].decode(words, outputs).tensors[0] == tensor_key(a)


def test_reasons_are_named_once_each() -> None:
    names = list(extension().reason_names)
    assert names[0] == "hit"
    assert len(names) == len(set(names))


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_matmul_precision_is_read_alike(precision: str) -> None:
    before = torch.get_float32_matmul_precision()
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    try:
        torch.set_float32_matmul_precision(precision)
        words, outputs = recorded_words(lambda: torch.mm(a, b), "mm")
        key = SPECS["mm"].key([a, b], {})
        assert words == SPECS["mm"].encode(key, torch.get_num_threads())
        assert SPECS["mm"].decode(words, outputs) == key
    finally:
        torch.set_float32_matmul_precision(before)


def test_threads_flush_denormal_and_mkldnn_are_in_the_header() -> None:
    x = torch.randn(4, 8)
    threads = torch.get_num_threads()
    seen = {recorded_words(lambda: torch.softmax(x, -1), "_softmax")[0]}
    try:
        torch.set_num_threads(threads + 1)
        seen.add(recorded_words(lambda: torch.softmax(x, -1), "_softmax")[0])
    finally:
        torch.set_num_threads(threads)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        words, outputs = recorded_words(lambda: torch.softmax(x, -1), "_softmax")
        seen.add(words)
        assert SPECS["_softmax"].decode(words, outputs).flush_denormal
    finally:
        torch.set_flush_denormal(False)
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        words, outputs = recorded_words(lambda: torch.softmax(x, -1), "_softmax")
        seen.add(words)
        assert not SPECS["_softmax"].decode(words, outputs).mkldnn
    finally:
        torch._C._set_mkldnn_enabled(enabled)
    assert len(seen) == 4


@pytest.mark.parametrize("name", [name for name, make in CALLS.items() if make()[0] in OUT_FORMS])
def test_shape_functions_give_the_layout_that_stock_gives(name: str) -> None:
    op, tensors, scalars = CALLS[name]()
    key = SPECS[op].key(tensors, scalars)
    assert SPECS[op].stock_outputs(key) == key.outputs


def test_a_form_asked_once_answers_for_every_size_of_it() -> None:
    """Row-major calls are told by their form; the answer is what ATen's shape functions give for the sizes themselves."""
    forms = 0
    for name in sorted(name for name, make in CALLS.items() if make()[0] in OUT_FORMS):
        op, tensors, scalars = CALLS[name]()
        key = SPECS[op].key(tensors, scalars)
        sizes = sorted({size for t in key.tensors if t is not None for size in t.sizes if size > 1})
        for other in itertools.permutations((6, 38, 129), len(sizes)) if len(sizes) < 4 else ():
            renamed = {1: 1, 0: 0, **dict(zip(sizes, other, strict=True))}
            layouts = tuple(t and _resized(t, renamed) for t in key.tensors)
            changed = msgspec.structs.replace(key, tensors=layouts)
            asked = [(d, s, strides) for d, s, strides in SPECS[op]._shapes(layouts, key.scalars)]
            told = [(t.dtype, t.sizes, t.strides) for t in SPECS[op].stock_outputs(changed) if t is not None]
            assert told == asked, name
            forms += spec_module._form_of(changed) is not None
    assert forms > 20


def _resized(tensor: TensorKey, renamed: dict[int, int]) -> TensorKey:
    """The tensor with other sizes, row-major if it was, else with its dimensions in the same order in memory."""
    sizes = tuple(renamed[size] for size in tensor.sizes)
    strides, step = [0] * len(sizes), 1
    for place in sorted(range(len(sizes)), key=lambda n: (tensor.strides[n], -n)):
        strides[place], step = step, step * sizes[place]
    return TensorKey(tensor.dtype, sizes, tuple(strides), tensor.alignment_bytes)


@pytest.mark.parametrize("order", ["out first", "out only"])
def test_strides_that_a_caller_chose_for_out_do_not_become_the_keys(order: str) -> None:
    """Served to the functional form they would give a result with other strides than stock's."""
    x = torch.randn(4, 8)
    with ak.record() as recording:
        torch.ops.aten._softmax.out(x, 1, False, out=torch.empty(8, 4).t())
        if order == "out first":
            torch.softmax(x, 1)
    (entry,) = recording.workload().entries
    assert entry.key == SPECS["_softmax"].key([x], {"dim": 1, "half_to_float": False})
    assert entry.out_calls == 1


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 7])
def test_sizes_and_strides_are_whole_words_across_the_32_bit_boundaries(size: int) -> None:
    """Cut to 32 bits, 2^32 + 7 rows would be found under the record of 7 rows."""

    def words(rows: int) -> tuple[int, ...]:
        layout = TensorKey("float32", (rows, 8), (8, 1), 4)
        key = KernelKey("_softmax", "cpu", (layout,), {"dim": 1, "half_to_float": False}, (layout,))
        assert SPECS["_softmax"].decode(SPECS["_softmax"].encode(key, 1), tensor_words(layout)) == key
        return SPECS["_softmax"].encode(key, 1)

    others = {size - 1, size + 1, size % 2**31, size % 2**32, size + 2**31, size + 2**32} - {size}
    assert all(words(size) != words(other) for other in others)
