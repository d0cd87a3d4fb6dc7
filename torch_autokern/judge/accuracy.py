"""How wrong a result is: float64 truth, natural scale, pooled errors, stock's envelope, limits. `docs/judge.md` is the rule.

Everything here is in units of the natural scale: ``e = |got - truth| / scale``. Errors are pooled over all trials of a family
(root of the mean square, and the largest). The yardstick is stock's *envelope*: the largest pooled error over the input as it
is and over `PERMUTATIONS` orders of the reduced dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from torch_autokern.judge.device import chunk_elements, draw
from torch_autokern.judge.families import Family
from torch_autokern.judge.functions import neighbours
from torch_autokern.judge.outcome import Accuracy, Place
from torch_autokern.judge.rows import Permutation, on_rows, permutable, permuted_stock, row_axis
from torch_autokern.ops.function import FunctionSpec
from torch_autokern.ops.spec import OpSpec
from torch_autokern.store.key import KernelKey

PERMUTATIONS = 8
RMS_FACTOR = 1.25
MAX_FACTOR = 2.0
MIN_ELEMENTS_FOR_RMS = 256
MAX_PLACES = 5  # wrong elements that a refusal lists
SAMPLE_ELEMENTS = 16 << 20  # of larger keys most trials compare a random run of rows of about this size with the truth
ENVELOPE_ELEMENTS = 512 << 10  # orders of larger keys are tried on a random run of rows of about this size, eight times
_PIECE_ELEMENTS = 1 << 17
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


class Tally(msgspec.Struct, forbid_unknown_fields=True):
    """One result against the truth. `nonfinite` and `nonzero` are the first position that breaks a rule without a measure:
    NaN or infinity where there should be none (or the reverse), and a value where the scale is exactly 0. `beyond` counts
    elements above `evaluate`'s `mark`, `first` are the first of them."""

    pool: Pool = msgspec.field(default_factory=Pool)
    worst: Place | None = None
    nonfinite: Place | None = None
    nonzero: Place | None = None
    beyond: int = 0
    first: tuple[Place, ...] = ()


class OutputReport(msgspec.Struct, forbid_unknown_fields=True):
    """One output in one trial: the candidate, stock as called and on permuted inputs, and one ulp of the output dtype.
    `beyond` counts elements over the trial's limit for a single one, `first` are the first of them."""

    elements: int
    candidate: Tally
    stock: tuple[Pool, ...]
    ulp: Pool
    beyond: int = 0
    first: tuple[Place, ...] = ()


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

    def on_rows(self, length: int) -> Task:
        """The same on `length` slices of the row axis."""
        return Task(*on_rows(self.spec, self.key, length), self.accuracy)


@dataclass
class Score:
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
        return Limits(1.0, 1.0, stock_rms, stock_largest)
    floor = 4 * unit_roundoff(layout.dtype)
    largest = max(MAX_FACTOR * stock_largest, floor, ulp.largest)
    if elements < MIN_ELEMENTS_FOR_RMS:
        return Limits(largest, largest, stock_rms, stock_largest)  # the mean square says no more than the largest
    return Limits(max(RMS_FACTOR * stock_rms, floor, ulp.rms), largest, stock_rms, stock_largest)


def evaluate(
    task: Task, family: Family, tensors: Outputs, results: Sequence[Outputs], stock: Outputs, located: int | None = None,
    mark: float = math.inf, rows: range | None = None,
) -> list[Score]:  # fmt: skip
    """Score several results of one call at once; one entry per output, empty scores for absent outputs.

    Truth is computed in chunks of independent rows, on the device of the results, so that its temporaries stay small.
    Positions are looked up for the first `located` results only (all by default), and among them those with an error above
    `mark`. `rows`: only these slices of the row axis.
    """
    axis = row_axis(task.spec, task.key)
    scores = [Score([Tally() for _ in results]) for _ in task.key.outputs]
    cut = next(((t, dim) for t, dim in zip(stock, axis.outputs, strict=True) if t is not None and dim is not None), None)
    count = 1 if cut is None else cut[0].shape[cut[1]]
    widest = max((t for t in (*tensors, *stock) if t is not None), key=torch.Tensor.numel)
    elements = max(chunk_elements(widest.device), _used_whole(task, axis.inputs, tensors))
    step = max(1, min(count, elements * count // max(widest.numel(), 1)))
    judged = range(count) if rows is None else rows
    for start in judged[::step]:
        length = min(step, judged.stop - start)
        part, cut_task = axis.cut(tensors, start, length), task.on_rows(length)
        truth = cut_task.spec.reference(part, cut_task.key.scalars)
        scale = _scales(cut_task, family, truth, part)
        stock_part = axis.cut_outputs(stock, start, length)
        parts = [axis.cut_outputs(result, start, length) for result in results]
        for index, score in enumerate(scores):
            reference = stock_part[index]
            if reference is None:
                continue
            dim = axis.outputs[index]
            chunk = _Chunk(task, family, truth[index], scale[index], reference, () if dim is None else ((dim, start),), mark)
            for piece, got in chunk.pieces([p[index] for p in parts]):
                piece.score(score, got, len(results) if located is None else located)
    return scores


def _used_whole(task: Task, dims: Sequence[int | None], tensors: Outputs) -> int:
    """Elements of the largest argument of a function that every chunk reads whole: smaller chunks would mostly read that."""
    if not isinstance(task.spec, FunctionSpec):
        return 0
    return max((t.numel() for t, dim in zip(tensors, dims, strict=True) if t is not None and dim is None), default=0)


def evaluate_with_envelope(
    task: Task, family: Family, tensors: Outputs, candidates: Sequence[Outputs], stock: Outputs, generator: torch.Generator, *,
    sampled: bool = False,
) -> tuple[list[Score], list[list[Pool]]]:  # fmt: skip
    """Scores of the candidate's results, and per output stock's pools: as called, then over `PERMUTATIONS` orders.

    Orders of a large key are tried on a random run of rows of about `ENVELOPE_ELEMENTS`; where `sampled`, all is judged on one
    of about `SAMPLE_ELEMENTS`.
    """
    axis = row_axis(task.spec, task.key)
    largest = max(t.numel() for t in (*tensors, *stock) if t is not None)

    def run_of(elements: int) -> tuple[int, int]:
        length = max(1, min(axis.size, elements * axis.size // largest))
        return draw(0, axis.size - length + 1, generator), length

    start, length = run_of(ENVELOPE_ELEMENTS)
    first, count_judged = run_of(SAMPLE_ELEMENTS)
    judged = range(first, first + count_judged) if sampled else None
    if isinstance(task.spec, FunctionSpec):
        scores = evaluate(task, family, tensors, [*candidates, stock], stock, len(candidates), rows=judged)
        return _with_neighbours(task.on_rows(length), family, axis.cut(tensors, start, length), scores, generator)
    part, stock_part = axis.cut(tensors, start, length), axis.cut_outputs(stock, start, length)
    count = permutable(task.spec, task.key).length
    orders = [Permutation.draw(count, generator) for _ in range(PERMUTATIONS)]
    permuted = [permuted_stock(task.spec, task.key, part, order) for order in orders]
    ours = len(candidates)
    if length == axis.size:
        scores = evaluate(task, family, tensors, [*candidates, stock, *permuted], stock, ours)
        pools = [[tally.pool for tally in score.tallies[ours:]] for score in scores]
    else:
        scores = evaluate(task, family, tensors, [*candidates, stock], stock, ours, rows=judged)
        further = evaluate(task, family, part, permuted, stock_part, 0)
        pools = [[a.tallies[ours].pool] + [t.pool for t in b.tallies] for a, b in zip(scores, further, strict=True)]
    return [Score(score.tallies[:ours], score.ulp) for score in scores], pools


def _with_neighbours(
    task: Task, family: Family, tensors: Outputs, scores: list[Score], generator: torch.Generator
) -> tuple[list[Score], list[list[Pool]]]:
    """A whole function's envelope: as called (the last tally of `scores`), then over neighbours of the arguments, each against
    its own truth. `task` and `tensors` may be some of the rows that were scored."""
    pools = [[score.tallies[-1].pool] for score in scores]
    for _ in range(PERMUTATIONS):
        moved = neighbours(tensors, generator)
        result = task.spec.stock(moved, task.key.scalars)
        for pool, score in zip(pools, evaluate(task, family, moved, [result], result, 0), strict=True):
            pool.append(score.tallies[0].pool)
    return [Score(score.tallies[:-1], score.ulp) for score in scores], pools


def plainly_wrong(task: Task, family: Family, tensors: Outputs, ours: Outputs) -> tuple[int, Tally, Limits] | None:
    """The first output beyond twice the limits of a single trial, which the families have judged finely. Of large results
    the first rows are looked at, and stock is called for those alone: a whole result of stock's may not fit beside ours."""
    axis = row_axis(task.spec, task.key)
    largest = max(t.numel() for t in (*tensors, *ours) if t is not None)
    length = max(1, min(axis.size, SAMPLE_ELEMENTS * axis.size // largest))
    tensors, ours, task = axis.cut(tensors, 0, length), axis.cut_outputs(ours, 0, length), task.on_rows(length)
    stock = task.spec.stock(tensors, task.key.scalars)
    for index, score in enumerate(evaluate(task, family, tensors, [ours, stock], stock)):
        result = stock[index]
        if result is None:
            continue
        mine, theirs = score.tallies
        limit = limits_for(task, index, family, result.numel(), [theirs.pool], score.ulp)
        if mine.nonfinite is not None or mine.nonzero is not None or mine.pool.largest > 2 * limit.largest:
            return index, mine, limit
    return None


def _scales(task: Task, family: Family, truth: Sequence[torch.Tensor], tensors: Outputs) -> tuple[torch.Tensor, ...]:
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


@dataclass(frozen=True)
class _Chunk:
    """A part of one output, which starts at `starts` (dimension, index): what is true there, in which unit, and what stock
    says."""

    task: Task
    family: Family
    truth: torch.Tensor
    scale: torch.Tensor
    stock: torch.Tensor
    starts: tuple[tuple[int, int], ...]
    mark: float

    def pieces(self, results: Outputs) -> Iterator[tuple[_Chunk, list[torch.Tensor | None]]]:
        """The same with every result; on a CPU in pieces whose temporaries stay in a core's cache."""
        sizes = self.truth.shape
        dim = next((place for place, size in enumerate(sizes) if size > 1), 0)
        if self.truth.numel() < 2 * _PIECE_ELEMENTS or self.truth.is_cuda:
            yield self, list(results)
            return
        step = max(1, _PIECE_ELEMENTS * sizes[dim] // self.truth.numel())
        for start in range(0, sizes[dim], step):
            truth, scale, stock, *got = (
                None if t is None else t.narrow(dim, start, min(step, sizes[dim] - start))
                for t in (self.truth, self.scale, self.stock, *results)
            )
            assert truth is not None and scale is not None and stock is not None
            yield _Chunk(self.task, self.family, truth, scale, stock, (*self.starts, (dim, start)), self.mark), got

    def score(self, score: Score, results: Outputs, located: int) -> None:
        """Add every result's errors to its tally."""
        info = torch.finfo(self.stock.dtype)
        natural = _without_repeats(self.scale)
        has_zero = self.family is not Family.DENORMAL and bool((natural == 0).any())
        zero = self.scale == 0 if has_zero else None
        unit = natural.clamp(min=info.tiny).expand(self.scale.shape)
        ulp = self.truth.abs()
        # NaN <= max is False; a sum that overflows only takes the slower way.
        clean = float(ulp.amax()) <= info.max and math.isfinite(float(self.stock.sum()))
        if clean:
            score.ulp.add(_pool(ulp.div_(unit), info.eps))
        for number, (got, tally) in enumerate(zip(results, score.tallies, strict=True)):
            assert got is not None
            wanted = number < located
            error = self._errors(got, unit)
            pool = _pool(error)
            if not (clean and math.isfinite(pool.sum_squares)):
                error = self._only_comparable(error, got, tally if wanted else None)
                pool = _pool(error)
            if wanted and pool.largest > tally.pool.largest:
                tally.worst = self._place(error, got)
            if wanted and pool.largest > self.mark:
                self._note_beyond(error, got, tally)
            tally.pool.add(pool)
            if wanted and zero is not None and tally.nonzero is None:
                wrong = zero & (got != 0) & torch.isfinite(got)
                tally.nonzero = self._place(wrong.to(torch.uint8), got) if bool(wrong.any()) else None

    def _errors(self, got: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
        """Elementwise errors in units of the scale."""
        if self.family is Family.INTEGERS and self.task.spec.name in ("mm", "bmm") and self.task.accuracy.kind != "tolerance":
            return (got.double() != self.truth.to(self.stock.dtype).double()).double().mul_(_WRONG_INTEGER)
        error = got.double().sub_(self.truth).abs_()
        if self.family is Family.DENORMAL:
            error.sub_(torch.finfo(self.stock.dtype).tiny).clamp_(min=0)
        return error.div_(unit)

    def _only_comparable(self, error: torch.Tensor, got: torch.Tensor, tally: Tally | None) -> torch.Tensor:
        """Check the kinds of NaN and infinity position by position; keep only the errors of finite elements.

        Where stock and the rounded truth are of one kind the result must be too. Where they differ (stock overflowed on the
        way, or a product's sum |a||b| exceeds a quarter of the largest number) either is right and nothing is measured.
        """
        expected, theirs, ours = _kind(self.truth.to(self.stock.dtype)), _kind(self.stock), _kind(got)
        bound = expected == theirs
        if self.task.spec.uses_matmul_precision:
            bound &= ~(self.scale > torch.finfo(self.stock.dtype).max / 4)
        wrong = bound & (ours != expected)
        if tally is not None and tally.nonfinite is None and bool(wrong.any()):
            tally.nonfinite = self._place(wrong.to(torch.uint8), got)
        return torch.where(bound & (expected == 0) & (ours == 0), error, torch.zeros_like(error))

    def _note_beyond(self, error: torch.Tensor, got: torch.Tensor, tally: Tally) -> None:
        beyond = (error > self.mark).reshape(-1).nonzero().reshape(-1)
        tally.beyond += beyond.numel()
        wanted = beyond[: MAX_PLACES - len(tally.first)].tolist()
        tally.first += tuple(self._place_at(flat, error.shape, got) for flat in wanted)

    def _place(self, score: torch.Tensor, got: torch.Tensor) -> Place:
        return self._place_at(int(score.reshape(-1).argmax()), score.shape, got)

    def _place_at(self, flat: int, shape: torch.Size, got: torch.Tensor) -> Place:
        index: list[int] = []
        for size in reversed(shape):  # torch.unravel_index imports sympy: 1.6 s
            flat, position = divmod(flat, size)
            index.insert(0, position)
        seen, wanted = float(got[tuple(index)]), float(self.truth[tuple(index)])
        for dim, start in self.starts:
            index[dim] += start
        return Place(tuple(index), repr(seen), repr(wanted))


def _kind(values: torch.Tensor) -> torch.Tensor:
    """0 finite, 1 plus infinity, 2 minus infinity, 3 NaN (payload and sign free)."""
    kind = torch.isposinf(values).to(torch.uint8)
    return kind.add_(torch.isneginf(values), alpha=2).add_(torch.isnan(values), alpha=3)


def _pool(error: torch.Tensor, factor: float = 1.0) -> Pool:
    """Pool of ``factor * error``; sums of NaN and infinities stay what they are."""
    flat = error.reshape(-1)
    largest = factor * float(flat.amax()) if flat.numel() else 0.0
    return Pool(factor * factor * float(torch.dot(flat, flat)), flat.numel(), _finite(largest))


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())


def _finite(value: float) -> float:
    return value if value <= _HUGE else _HUGE  # also NaN
