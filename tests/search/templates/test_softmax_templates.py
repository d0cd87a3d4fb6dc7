"""Every softmax template against float64 and stock: shapes with their reasons, input families, any cut of the range."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from template_driver import families, lower_targets, random_cut, run, same_bits, whole, wrong

from torch_autokern.build.candidate import Candidate
from torch_autokern.ops import SPECS
from torch_autokern.ops.spec import Scalars
from torch_autokern.runtime.target import local_target
from torch_autokern.search.templates import propose, softmax_columns, softmax_rows
from torch_autokern.search.templates.softmax_layout import softmax_layout
from torch_autokern.store.key import Target

# (sizes, dim, templates that must answer, why this shape)
GRID = [
    ((7, 38), 1, "softmax_short_rows", "the attention rows: a part of a vector is left; rows not a multiple of the group"),
    ((5, 16), 1, "softmax_short_rows", "exactly one 512-bit vector, two 256-bit ones: no part left"),
    ((6, 3), 1, "softmax_short_rows", "less than the narrowest vector"),
    ((3, 33), 1, "softmax_short_rows", "one element beyond whole vectors of 256 and of 512 bits"),
    ((3, 1000), 1, "softmax_long_rows", "blocks, single vectors and a part of one"),
    ((2, 4099), 1, "softmax_long_rows", "several partial sums of 64 blocks, a prime length"),
    ((2, 17001), 1, "softmax_split", "several chunks, the last one shorter"),
    ((2, 67, 37), 1, "softmax_columns", "inner columns not a multiple of the lanes, more than 64 rows: two partial sums"),
    ((3, 5, 160), 1, "softmax_columns", "more columns than one block"),
    ((300, 1), 1, "softmax_columns", "rows of one element: 1, and NaN for NaN and the infinities"),
]
LONG_GRID = [
    ((100, 1, 1), 0, "softmax_short_rows", "a reduced dimension that is dense although it is the first"),
    ((2, 70001), 1, "softmax_split", "many chunks"),
    ((4, 262147), 1, "softmax_long_rows", "rows beyond the scratch limit"),
    ((6, 1024, 520), 1, "softmax_columns", "columns near the published shape"),
    ((300, 20), 0, "softmax_columns", "the first dimension, few columns"),
]


def check(
    candidate: Candidate, op: str, sizes: tuple[int, ...], dim: int, target: Target | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    scalars: Scalars = {"dim": dim, "half_to_float": False}
    for seed, (family, x) in enumerate(families(sizes, len(sizes), dtype)):
        key = SPECS[op].key([x], scalars)
        results = run(candidate, key, [x], whole, target)
        assert wrong(key, [x], scalars, results) == [], f"{candidate.template} {candidate.parameters} on {family}"
        assert same_bits(results, run(candidate, key, [x], random_cut(seed), target)), f"other bits for another cut on {family}"


@pytest.mark.parametrize(("sizes", "dim", "template", "reason"), GRID, ids=[g[3] for g in GRID])
@pytest.mark.parametrize("op", ["_softmax", "_log_softmax"])
def test_first_guess_is_right_on_every_family(op: str, sizes: tuple[int, ...], dim: int, template: str, reason: str) -> None:
    key = SPECS[op].key([torch.zeros(sizes)], {"dim": dim, "half_to_float": False})
    candidates = [c for c in propose(key, local_target()) if c.template == template]
    assert candidates, f"{template} is silent: {reason}"
    check(candidates[0], op, sizes, dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("sizes", "dim"), [((7, 38), 1), ((3, 300), 1), ((2, 67, 37), 1)], ids=["short", "long", "columns"])
@pytest.mark.long
def test_sixteen_bit_elements_are_rounded_once(dtype: torch.dtype, sizes: tuple[int, ...], dim: int) -> None:
    op = "_softmax" if dtype == torch.bfloat16 else "_log_softmax"
    key = SPECS[op].key([torch.zeros(sizes, dtype=dtype)], {"dim": dim, "half_to_float": False})
    check(propose(key, local_target())[0], op, sizes, dim, dtype=dtype)


@pytest.mark.long
@pytest.mark.parametrize(("sizes", "dim", "template", "reason"), GRID, ids=[g[3] for g in GRID])
def test_the_first_sixteen_bit_candidate_of_every_shape_is_right(
    sizes: tuple[int, ...], dim: int, template: str, reason: str
) -> None:
    key = SPECS["_softmax"].key([torch.zeros(sizes, dtype=torch.float16)], {"dim": dim, "half_to_float": False})
    candidates = [c for c in propose(key, local_target()) if c.template == template]
    assert candidates, reason
    check(candidates[0], "_softmax", sizes, dim, dtype=torch.float16)


@pytest.mark.long
@pytest.mark.parametrize(("sizes", "dim", "template", "reason"), GRID + LONG_GRID, ids=[g[3] for g in GRID + LONG_GRID])
@pytest.mark.parametrize("op", ["_softmax", "_log_softmax"])
def test_every_candidate_is_right_on_every_family(
    op: str, sizes: tuple[int, ...], dim: int, template: str, reason: str
) -> None:
    key = SPECS[op].key([torch.zeros(sizes)], {"dim": dim, "half_to_float": False})
    for candidate in propose(key, local_target()):
        check(candidate, op, sizes, dim)


@pytest.mark.parametrize("parameters", [{"stream": True}, {"keep": "scratch"}, {"keep": "nothing"}], ids=str)
@pytest.mark.parametrize(("sizes", "dim"), [((3, 1003), 1), ((3, 70, 33), 1)], ids=["rows", "columns"])
def test_every_way_to_store_is_right_without_alignment(parameters: dict[str, object], sizes: tuple[int, ...], dim: int) -> None:
    # Proposed only for outputs beyond the cache; here on a shape small enough to test.
    x = torch.zeros(sizes)
    layout = softmax_layout(SPECS["_softmax"].key([x], {"dim": dim, "half_to_float": False}))
    assert layout is not None
    stream, keep = bool(parameters.get("stream", False)), str(parameters.get("keep", "output"))
    if layout.contiguous:
        candidate = softmax_rows.long_rows(layout, 32, stream, keep, True)  # type: ignore[arg-type]
    else:
        shape = softmax_columns.column_shape(layout)
        assert shape is not None
        candidate = softmax_columns.columns(shape, 32, 16, stream, keep, True)  # type: ignore[arg-type]
    check(candidate, "_softmax", sizes, dim)


def test_permuted_and_sliced_inputs_keep_stocks_layout() -> None:
    scalars: Scalars = {"dim": 3, "half_to_float": False}
    x = torch.randn(6, 5, 4, 50).permute(2, 0, 1, 3)[:, 1:, :, 3:40]  # rows dense, outer dimensions in another order
    key = SPECS["_softmax"].key([x], scalars)
    candidate = propose(key, local_target())[0]
    results = run(candidate, key, [x], random_cut(1))
    assert wrong(key, [x], scalars, results) == []
    assert results[0].stride() == SPECS["_softmax"].stock([x], scalars)[0].stride()


@pytest.mark.skipif(not lower_targets(), reason="this machine has no lower ISA level that the templates know")
@pytest.mark.parametrize("op", ["_softmax", "_log_softmax"])
@pytest.mark.parametrize(("sizes", "dim"), [((7, 38), 1), ((2, 67, 37), 1)], ids=["rows", "columns"])
def test_lower_isa_levels_are_right_too(op: str, sizes: tuple[int, ...], dim: int) -> None:
    # Without AVX-512 there is no masked store and no scaling instruction: other code, with denormals of its own.
    key = SPECS[op].key([torch.zeros(sizes)], {"dim": dim, "half_to_float": False})
    for target in lower_targets():
        check(propose(key, target)[0], op, sizes, dim, target)


# (a view whose result is contiguous all the same, reduced dimension, where models have it)
TURNED = [
    (lambda x: x.reshape(3, 2, 20, 37).transpose(-1, -2), 3, "scores that were transposed: the input's neighbours are rows"),
    (lambda x: x.reshape(3, 2, 20, 37).to(memory_format=torch.channels_last), 1, "channels last: only the input's are reduced"),
    (lambda x: x.reshape(3, 37, 40).permute(1, 2, 0), 1, "neighbours on neither side"),
]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("view", "dim", "reason"), TURNED, ids=[t[2] for t in TURNED])
def test_an_input_in_another_order_than_its_result_is_turned(
    view: Callable[[torch.Tensor], torch.Tensor], dim: int, reason: str, dtype: torch.dtype
) -> None:
    for op in ("_softmax", "_log_softmax"):
        for seed, (family, values) in enumerate(families((3 * 2 * 20 * 37,), 5, dtype)):
            x = view(values)
            scalars: Scalars = {"dim": dim, "half_to_float": False}
            key = SPECS[op].key([x], scalars)
            candidate = propose(key, local_target())[0]
            assert candidate.template == "softmax_turned"
            results = run(candidate, key, [x], random_cut(seed))
            assert wrong(key, [x], scalars, results) == [], family
            assert same_bits(results, run(candidate, key, [x], whole)), family
