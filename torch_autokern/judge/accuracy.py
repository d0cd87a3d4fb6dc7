"""How wrong a result is: float64 truth, natural scale, pooled errors, stock's envelope, limits. `docs/judge.md` is the rule.

Everything here is in units of the natural scale: ``e = |got - truth| / scale``. Errors are pooled over all trials of a family
(root of the mean square, and the largest). The yardstick is stock's *envelope*: the largest pooled error over the input as it
is and over `PERMUTATIONS` orders of the reduced dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from torch_autokern.judge.families import Family
from torch_autokern.judge.outcome import Accuracy
from torch_autokern.judge.rows import Permutation, permutable, permuted_stock, row_axis
from torch_autokern.ops.spec import OpSpec
from torch_autokern.store.key import KernelKey

PERMUTATIONS = 8
RMS_FACTOR = 1.25
MAX_FACTOR = 2.0
MIN_ELEMENTS_FOR_RMS = 256
ENVELOPE_ELEMENTS = 4 << 20  # orders of larger keys are tried on a random run of rows of about this size
_CHUNK_ELEMENTS = 1 << 20
_HUGE = 1e300  # JSON has no infinity
_WRONG_INTEGER = 1e30

Outputs = Sequence[torch.Tensor | None]


class Pool(msgspec.Struct, forbid_unknown_fields=True):
    """Pooled errors of one result: adds up over chunks, trials and processes."""

    sum_squares: float = 0.0
    count: int = 0
    largest: float = 0.0

    def add(self, other: Pool) -> None:
        """Take in another pool."""
        self.sum_squares = _finite(self.sum_squares + other.sum_squares)
        self.count += other.count
        self.largest = max(self.largest, other.largest)

    @property
    def rms(self) -> float:
        """Root of the mean square, 0 without elements."""
        return math.sqrt(self.sum_squares / self.count) if self.count else 0.0


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One element of a result, what was got there and what was expected (as text: NaN and infinities survive)."""

    index: tuple[int, ...]
    got: str
    expected: str


class Tally(msgspec.Struct, forbid_unknown_fields=True):
    """One result against the truth. `nonfinite` and `nonzero` are the first position that breaks a rule without a measure:
    NaN or infinity where there should be none (or the reverse), and a value where the scale is exactly 0."""

    pool: Pool = msgspec.field(default_factory=Pool)
    worst: Place | None = None
    nonfinite: Place | None = None
    nonzero: Place | None = None


class OutputReport(msgspec.Struct, forbid_unknown_fields=True):
    """One output in one trial: the candidate, stock as called and on permuted inputs, and one ulp of the output dtype."""

    elements: int
    candidate: Tally
    stock: tuple[Pool, ...]
    ulp: Pool


class Limits(msgspec.Struct, frozen=True):
    """What a pooled error may not exceed, with stock's envelope that it came from."""

    rms: float
    largest: float
    stock_rms: float
    stock_largest: float


@dataclass(frozen=True)
class Task:
    """One op on one key at one accuracy."""

    spec: OpSpec
    key: KernelKey
    accuracy: Accuracy


@dataclass
class _Score:
    """Running totals of every result against one output's truth."""

    tallies: list[Tally]
    ulp: Pool = field(default_factory=Pool)


def unit_roundoff(dtype: str) -> float:
    """Unit roundoff of the dtype that stock accumulates in: float32 for everything up to 32 bits."""
    return 2.0**-24 if dtype in ("float32", "bfloat16", "float16") else 2.0**-53


def limits_for(task: Task, output: int, family: Family, elements: int, stock: Sequence[Pool], ulp: Pool) -> Limits:
    """The rule of the accuracy class for one pooled output."""
    layout = task.key.outputs[output]
    assert layout is not None
    stock_rms, stock_largest = max(p.rms for p in stock), max(p.largest for p in stock)
    if task.accuracy.kind == "tolerance":
        return Limits(_HUGE, 1.0, stock_rms, stock_largest)
    floor = 4 * unit_roundoff(layout.dtype)
    rms = max(RMS_FACTOR * stock_rms, floor, ulp.rms)
    if elements < MIN_ELEMENTS_FOR_RMS:
        rms = _HUGE
    return Limits(rms, max(MAX_FACTOR * stock_largest, floor, ulp.largest), stock_rms, stock_largest)


def evaluate(
    task: Task, family: Family, tensors: Outputs, results: Sequence[Outputs], stock: Outputs
) -> list[_Score]:
    """Score several results of one call at once; one entry per output, empty scores for absent outputs.

    Truth is computed in chunks of independent rows, so that its temporaries stay in cache.
    """
    axis = row_axis(task.spec, task.key)
    scores = [_Score([Tally() for _ in results]) for _ in task.key.outputs]
    rows = int(next(t.shape[d] for t, d in zip(stock, axis.outputs, strict=True) if t is not None and d is not None)
               if any(d is not None for d in axis.outputs) else 1)  # fmt: skip
    numel = max(t.numel() for t in (*tensors, *stock) if t is not None)
    step = max(1, min(rows, _CHUNK_ELEMENTS * rows // max(numel, 1)))
    for start in range(0, rows, step):
        length = min(step, rows - start)
        part = axis.cut(tensors, start, length)
        truth = task.spec.reference(part, task.key.scalars)
        scale = _scales(task, family, truth, part)
        stock_part = axis.cut_outputs(stock, start, length)
        parts = [axis.cut_outputs(result, start, length) for result in results]
        for index, score in enumerate(scores):
            reference = stock_part[index]
            if reference is None:
                continue
            origin = (axis.outputs[index], start)
            _score_chunk(task, family, score, truth[index], scale[index], [p[index] for p in parts], reference, origin)
    return scores


def envelope(
    task: Task, family: Family, tensors: Outputs, stock: Outputs, generator: torch.Generator
) -> list[list[Pool]]:
    """Stock's pooled errors over `PERMUTATIONS` orders, per output; on a random run of rows where the key is large."""
    axis = row_axis(task.spec, task.key)
    largest = max(t.numel() for t in (*tensors, *stock) if t is not None)
    length = max(1, min(axis.size, ENVELOPE_ELEMENTS * axis.size // largest))
    start = int(torch.randint(0, axis.size - length + 1, (), generator=generator))
    part = axis.cut(tensors, start, length)
    stock_part = axis.cut_outputs(stock, start, length)
    count = permutable(task.spec, task.key).length
    orders = [Permutation.draw(count, generator) for _ in range(PERMUTATIONS)]
    results = [permuted_stock(task.spec, task.key, part, order) for order in orders]
    scores = evaluate(task, family, part, results, stock_part)
    return [[tally.pool for tally in score.tallies] for score in scores]


def _scales(
    task: Task, family: Family, truth: Sequence[torch.Tensor], tensors: Outputs
) -> tuple[torch.Tensor, ...]:
    if task.accuracy.kind == "tolerance":
        return tuple(t.abs().mul_(task.accuracy.rtol).add_(task.accuracy.atol) for t in truth)
    scale = task.spec.scale(truth, tensors, task.key.scalars)
    return _absolute(task, scale, truth, tensors) if family is Family.CONSTANT else scale


def _absolute(
    task: Task, scale: Sequence[torch.Tensor], truth: Sequence[torch.Tensor], tensors: Outputs
) -> tuple[torch.Tensor, ...]:
    """Constant rows have no spread to measure by: the size of the inputs is the unit instead.

    LayerNorm: an error of the mean of one unit in the last place of the input, times rstd, is what any kernel may show.
    Elsewhere the largest natural scale of the whole result.
    """
    if task.spec.name != "native_layer_norm":
        return tuple(s.amax().expand_as(t) for s, t in zip(scale, truth, strict=True))
    x, weight, _ = tensors
    assert x is not None
    dims = task.spec.reduced_dims(task.key)
    size = x.abs().amax(dims, keepdim=True).double()
    slope = 1.0 if weight is None else weight.double().abs()
    return scale[0] + slope * (size * truth[2]), scale[1] + size, scale[2]


def _score_chunk(
    task: Task, family: Family, score: _Score, truth: torch.Tensor, scale: torch.Tensor, results: Outputs,
    stock: torch.Tensor, origin: tuple[int | None, int],
) -> None:  # fmt: skip
    info = torch.finfo(stock.dtype)
    natural = _without_repeats(scale)
    zero = scale == 0 if family is not Family.DENORMAL and bool((natural == 0).any()) else None
    unit = _like(natural.clamp(min=info.tiny), scale)
    exact = family is Family.INTEGERS and task.spec.name in ("mm", "bmm") and task.accuracy.kind != "tolerance"
    size = truth.abs().div_(unit).mul_(info.eps)
    clean = bool(torch.isfinite(size.sum())) and float(truth.abs().max()) <= info.max
    if clean:
        score.ulp.add(_pool(size))
    for got, tally in zip(results, score.tallies, strict=True):
        assert got is not None
        error = got.double().sub_(truth).abs_()
        if family is Family.DENORMAL:
            error.sub_(info.tiny).clamp_(min=0)
        error.div_(unit)
        pool = _pool(error)
        if not (clean and math.isfinite(pool.sum_squares)):
            error = _only_comparable(error, tally, got, truth, scale, stock, origin, task.spec.uses_matmul_precision)
            pool = _pool(error)
        if exact:
            error = (got.double() != truth.to(stock.dtype).double()).double()
            pool = _pool(error.mul_(_WRONG_INTEGER))
        if zero is not None and bool((wrong := zero & (got != 0) & torch.isfinite(got)).any()):
            tally.nonzero = tally.nonzero or _place(wrong.to(torch.uint8), got, truth, origin)
        if pool.largest > tally.pool.largest:
            tally.worst = _place(error, got, truth, origin)
        tally.pool.add(pool)


def _only_comparable(
    error: torch.Tensor, tally: Tally, got: torch.Tensor, truth: torch.Tensor, scale: torch.Tensor,
    stock: torch.Tensor, origin: tuple[int | None, int], is_product: bool,
) -> torch.Tensor:  # fmt: skip
    """Check the kinds of NaN and infinity position by position; keep only the errors of finite elements.

    Where stock and the rounded truth are of one kind the result must be too. Where they differ (stock overflowed on the way,
    or a product's sum |a||b| exceeds a quarter of the largest number) either is right and nothing is measured.
    """
    rounded = truth.to(stock.dtype)
    expected, theirs, ours = _kind(rounded), _kind(stock), _kind(got)
    bound = expected == theirs
    if is_product:
        bound &= ~(scale > torch.finfo(stock.dtype).max / 4)
    wrong = bound & (ours != expected)
    if tally.nonfinite is None and bool(wrong.any()):
        tally.nonfinite = _place(wrong.to(torch.uint8), got, truth, origin)
    return torch.where(bound & (expected == 0) & (ours == 0), error, torch.zeros_like(error))


def _kind(values: torch.Tensor) -> torch.Tensor:
    """0 finite, 1 plus infinity, 2 minus infinity, 3 NaN (payload and sign free)."""
    kind = torch.isposinf(values).to(torch.uint8)
    return kind.add_(torch.isneginf(values), alpha=2).add_(torch.isnan(values), alpha=3)


def _pool(error: torch.Tensor) -> Pool:
    flat = error.reshape(-1)
    largest = float(flat.amax()) if flat.numel() else 0.0
    return Pool(float(torch.dot(flat, flat)), flat.numel(), _finite(largest))


def _place(score: torch.Tensor, got: torch.Tensor, truth: torch.Tensor, origin: tuple[int | None, int]) -> Place:
    index = [int(i) for i in torch.unravel_index(torch.nan_to_num(score.reshape(-1), nan=_HUGE).argmax(), score.shape)]
    seen, wanted = float(got[tuple(index)]), float(truth[tuple(index)])
    dim, start = origin
    if dim is not None:
        index[dim] += start
    return Place(tuple(index), repr(seen), repr(wanted))


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())


def _like(dense: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return dense.expand(scale.shape)


def _finite(value: float) -> float:
    return value if value <= _HUGE else _HUGE  # also NaN

