"""The CPU products on every regime's boundaries: right against float64, between guard zones, with equal bits for any cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from tests.search.templates.template_driver import lower_targets, random_cut, run, same_bits, whole, wrong
from torch_autokern.build.candidate import Candidate
from torch_autokern.ops import SPECS
from torch_autokern.ops.spec import Scalars
from torch_autokern.runtime.target import local_target
from torch_autokern.search.templates import matmul_cpu
from torch_autokern.search.templates.matmul_cpu_layout import product_of
from torch_autokern.store.key import KernelKey, Target


@dataclass(frozen=True)
class Call:
    """One product. `a`, `b`: "plain", "transposed" or "strided" (every second element); `addend`: its sizes."""

    reason: str
    m: int
    k: int
    n: int
    batches: int = 0
    a: str = "plain"
    b: str = "plain"
    addend: tuple[int, ...] | None = None
    beta: float = 1.0
    alpha: float = 1.0
    dtype: torch.dtype = torch.float32

    @property
    def op(self) -> str:
        """ATen's name."""
        if self.batches:
            return "bmm" if self.addend is None else "baddbmm"
        return "mm" if self.addend is None else "addmm"

    @property
    def scalars(self) -> Scalars:
        """`beta` and `alpha` where the op has them."""
        return {} if self.addend is None else {"beta": self.beta, "alpha": self.alpha}


BF16 = torch.bfloat16
# In the fast tier: one of each way through the code.
GRID = [
    Call("whole tiles and panels, stock's favourite", 64, 64, 64),
    Call("MiniLM's scores: the last vector of a row overlaps", 38, 32, 38, batches=5),
    Call("nn.Linear: B transposed, bias in the epilogue, K in blocks", 50, 400, 70, b="transposed", addend=(70,)),
    Call("one row: sums along K", 1, 77, 45, b="transposed", addend=(1, 45)),
    Call("few rows: the last group of columns repeats one", 5, 40, 9, b="transposed"),
    Call("one column: the product is read as its transpose", 23, 40, 1),
    Call("fewer columns than a vector, a scalar addend", 7, 9, 3, addend=(), beta=0.5, alpha=-2.0),
    Call("K = 1", 9, 1, 20, addend=(9, 1)),
    Call("both operands strided", 21, 34, 19, a="strided", b="strided"),
    Call("A transposed, a full addend that is scaled", 19, 48, 33, batches=3, a="transposed", addend=(3, 19, 33), beta=-1.5),
    Call("A transposed and B wide: blocks of A are turned in registers", 21, 45, 70, a="transposed"),
    Call("bfloat16 is widened and rounded once", 30, 70, 41, b="transposed", addend=(41,), dtype=BF16),
    Call("bfloat16 rows", 2, 130, 24, b="transposed", dtype=BF16),
]
# In the long tier, with every candidate: the sizes on both sides of each boundary.
EDGES = [
    *(Call(f"columns beside a vector: {n}", 13, 24, n) for n in (1, 7, 8, 9, 15, 17, 33)),
    *(Call(f"rows beside a tile: {m}", m, 24, 24) for m in (1, 2, 5, 6, 7, 13)),
    *(Call(f"K beside a block: {k}", 14, k, 24, b="transposed") for k in (1, 7, 9, 191, 193)),
    Call("bfloat16, strided, batches", 9, 17, 11, batches=3, a="strided", b="strided", addend=(1, 9, 11), dtype=BF16),
    Call("an addend that broadcasts over batches and rows", 9, 17, 26, batches=3, b="transposed", addend=(26,)),
]


def operand(rows: int, columns: int, batches: int, layout: str, dtype: torch.dtype) -> torch.Tensor:
    front = (batches,) if batches else ()
    if layout == "transposed":
        return torch.zeros(*front, columns, rows, dtype=dtype).transpose(-1, -2)
    if layout == "strided":
        return torch.zeros(*front, 2 * rows, 3 * columns, dtype=dtype)[..., ::2, ::3]
    return torch.zeros(*front, rows, columns, dtype=dtype)


def tensors_of(call: Call) -> list[torch.Tensor]:
    found = [
        operand(call.m, call.k, call.batches, call.a, call.dtype),
        operand(call.k, call.n, call.batches, call.b, call.dtype),
    ]
    return found if call.addend is None else [torch.zeros(call.addend, dtype=call.dtype), *found]


def key_of(call: Call) -> KernelKey:
    return SPECS[call.op].key(tensors_of(call), call.scalars)


def filled(call: Call) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Values on which careless products fail."""
    generator = torch.Generator().manual_seed(11)

    def draw(kind: str, like: torch.Tensor, second: bool) -> torch.Tensor:
        x = torch.randn(like.shape, generator=generator)
        if kind == "uniform: one long chain loses digits":
            x = torch.rand(like.shape, generator=generator)
        elif kind == "small integers: exact":
            x = torch.randint(-4, 5, like.shape, generator=generator).float()
        elif kind == "denormal":
            x = x * (1.0 if second else 1e-39)
        elif kind == "NaN and infinities":
            x[torch.rand(like.shape, generator=generator) < 0.02] = float("inf")
            x[torch.rand(like.shape, generator=generator) < 0.02] = float("nan")
        return x.to(like.dtype)

    tensors = tensors_of(call)
    for kind in ("normal", "uniform: one long chain loses digits", "small integers: exact", "denormal", "NaN and infinities"):
        yield kind, [draw(kind, t, i == len(tensors) - 1) for i, t in enumerate(tensors)]


def check(candidate: Candidate, call: Call, key: KernelKey, target: Target | None = None) -> None:
    for seed, (kind, tensors) in enumerate(filled(call)):
        results = run(candidate, key, tensors, whole, target)
        words = f"{call.op} {call.reason}: {candidate.template} {candidate.parameters} on {kind}"
        if kind == "denormal":  # the judge's rule: an absolute error below the smallest normal number is free
            truth = SPECS[key.op].reference(tensors, key.scalars)[0]
            assert (results[0].double() - truth).abs().max() <= torch.finfo(torch.float32).tiny, words
        else:
            assert wrong(key, tensors, key.scalars, results) == [], words
        if kind.startswith("small integers") and float(call.alpha).is_integer() and float(call.beta).is_integer():
            truth = SPECS[key.op].reference(tensors, key.scalars)[0]
            assert torch.equal(results[0].double(), truth.to(call.dtype).double()), words
        assert same_bits(results, run(candidate, key, tensors, random_cut(seed), target)), (
            f"other bits for another cut: {words}"
        )


@pytest.mark.parametrize("call", GRID, ids=[call.reason for call in GRID])
def test_first_guess_is_right_on_every_kind_of_values(call: Call) -> None:
    key = key_of(call)
    candidates = matmul_cpu.propose(key, local_target())
    assert candidates, f"silent: {call.reason}"
    check(candidates[0], call, key)


@pytest.mark.long
@pytest.mark.parametrize("call", [*GRID, *EDGES], ids=[call.reason for call in [*GRID, *EDGES]])
def test_every_form_is_right_on_every_kind_of_values(call: Call) -> None:
    key = key_of(call)
    forms = {(c.template, c.parameters.get("packing")): c for c in reversed(matmul_cpu.propose(key, local_target()))}
    for candidate in forms.values():
        check(candidate, call, key)


def test_beta_zero_ignores_nan_in_the_addend() -> None:
    call = Call("beta = 0", 6, 16, 16, addend=(16,), beta=0.0)
    key = key_of(call)
    tensors = [torch.full((16,), float("nan")), torch.randn(6, 16), torch.randn(16, 16)]
    results = run(matmul_cpu.propose(key, local_target())[0], key, tensors)
    assert results[0].isfinite().all()
    assert wrong(key, tensors, key.scalars, results) == []


@pytest.mark.long
def test_an_output_whose_columns_are_not_neighbours_is_computed_transposed() -> None:
    out = torch.empty(30, 20).t()
    call = Call("column-major output", 20, 16, 30)
    tensors = tensors_of(call)
    key = SPECS["mm"].key(tensors, {}, [out])
    product = product_of(key)
    assert product is not None and (product.m, product.n) == (30, 20)
    check(matmul_cpu.propose(key, local_target())[0], call, key)


@pytest.mark.long
@pytest.mark.parametrize("call", [GRID[1], GRID[2], GRID[10], GRID[4]], ids=["bmm", "linear", "bfloat16", "dot"])
def test_lower_isa_levels_are_right_too(call: Call) -> None:
    targets = lower_targets()
    if not targets:
        pytest.skip("this machine has no lower ISA level that the templates know")
    key = key_of(call)
    for target in targets:
        check(matmul_cpu.propose(key, target)[0], call, key, target)


@pytest.mark.parametrize("arch", ["x86-64-v4", "x86-64-v3", "x86-64-v2", "aarch64"])
def test_tiles_leave_registers_for_the_operands(arch: str) -> None:
    target = Target("cpu", "any", arch, 2)
    spare = 16 if arch.startswith("x86-64-v") and arch != "x86-64-v4" else 32
    for call in [*GRID, Call("large", 1216, 384, 1536, b="transposed", addend=(1536,))]:
        for candidate in matmul_cpu.propose(key_of(call), target):
            count, vectors = int(candidate.parameters["rows"]), int(candidate.parameters["vectors"])
            if candidate.template != "matmul_dot":
                assert count * vectors + vectors + 1 <= spare


@pytest.mark.parametrize("n", range(1, 70, 3))
def test_no_column_belongs_to_two_pieces_of_the_range(n: int) -> None:
    # Vectors that overlap write equal values twice: fine in one thread, a race between two.
    for candidate in matmul_cpu.propose(key_of(Call("columns", 40, 16, n, b="transposed")), local_target()):
        if candidate.template == "matmul_panels":
            lanes = int(candidate.parameters["width"]) // 4
            rest = n % (int(candidate.parameters["vectors"]) * lanes)
            assert rest == 0 or rest >= lanes or n < lanes


def test_what_is_no_product_of_these_gets_no_candidate() -> None:
    zeros = torch.zeros
    folded = torch.zeros(8).as_strided((4, 4), (1, 1))
    keys = [
        SPECS["mm"].key([zeros(4, 4, dtype=torch.float64), zeros(4, 4, dtype=torch.float64)], {}),
        SPECS["mm"].key([zeros(4, 0), zeros(0, 4)], {}),
        SPECS["mm"].key([zeros(4, 4), zeros(4, 4)], {}, [zeros(8, 8)[::2, ::2]]),
        SPECS["mm"].key([zeros(4, 4), zeros(4, 4)], {}, [folded]),
        SPECS["addmm"].key([zeros(4), zeros(4, 4), zeros(4, 4)], {"beta": float("nan"), "alpha": 1.0}),
    ]
    for key in keys:
        assert matmul_cpu.propose(key, local_target()) == []
