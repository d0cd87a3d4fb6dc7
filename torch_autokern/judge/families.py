"""The input families: what a candidate must get right, one function each. `docs/judge.md` says what dies where.

A family fills a dense working tensor (float32, or float64 for float64 keys) whose reduced dimensions are known; a *row* is
one index over all other dimensions. Every trial draws its own parameters (mean, scale, offsets, positions) from its
generator. Values stay inside the range of the key's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch


class Family(str, Enum):
    """Names used in records and messages."""

    NORMAL = "normal"
    UNIFORM = "uniform"
    ROW_SCALE = "row_scale"
    LARGE_OFFSET = "large_offset"
    HEAVY_TAILS = "heavy_tails"
    WIDE_COLUMNS = "wide_columns"
    CANCELLATION = "cancellation"
    SPIKES = "spikes"
    CONSTANT = "constant"
    DENORMAL = "denormal"
    NEAR_LARGEST = "near_largest"
    MIXED = "mixed"
    NONFINITE = "nonfinite"
    INTEGERS = "integers"


SCREEN_FAMILIES = (Family.NORMAL, Family.LARGE_OFFSET, Family.NONFINITE)


@dataclass(frozen=True)
class Draw:
    """What a family needs to know: the tensor to fill, its reduced dimensions, the key's dtype, and randomness.

    `second` marks the right operand of a product: some families give it the inverse of what the left one got, so both draw
    from `shared`, a generator in the same state.
    """

    out: torch.Tensor
    reduced: tuple[int, ...]
    dtype: torch.dtype
    generator: torch.Generator
    shared: torch.Generator
    second: bool
    product: bool

    @property
    def info(self) -> torch.finfo:
        """Range of the key's dtype."""
        return torch.finfo(self.dtype)

    @property
    def narrow_range(self) -> bool:
        """float16 has 5 exponent bits: wide families shrink."""
        return self.dtype == torch.float16

    def number(self, low: float, high: float) -> float:
        """One uniform draw for the whole trial."""
        return low + (high - low) * float(torch.rand((), generator=self.generator, dtype=torch.float64, device=self.out.device))

    def per_row(self) -> torch.Tensor:
        """Uniform [0, 1) of the rows' shape."""
        sizes = [1 if i in self.reduced else n for i, n in enumerate(self.out.shape)]
        return torch.rand(sizes, generator=self.generator, dtype=self.out.dtype, device=self.out.device)

    def normal(self) -> torch.Tensor:
        """Standard normal over the whole tensor."""
        return self.out.normal_(generator=self.generator)

    def along(self, start: int, stop: int, step: int = 1) -> torch.Tensor:
        """View of a slice of the last reduced dimension."""
        index = [slice(None)] * self.out.dim()
        index[self.reduced[-1]] = slice(start, stop, step)
        return self.out[tuple(index)]


def _normal(draw: Draw) -> None:
    draw.normal().mul_(draw.number(0.75, 1.5))


def _uniform(draw: Draw) -> None:
    draw.out.uniform_(generator=draw.generator)


def _row_scale(draw: Draw) -> None:
    limit = 4.0 if draw.narrow_range else 6.0
    scale = torch.exp2((draw.per_row() * 2 - 1) * limit)
    draw.normal().mul_(scale).add_((draw.per_row() * 16 - 8) * scale)


def _large_offset(draw: Draw) -> None:
    """64 spacings of the dtype of spread on a large mean: E[x^2] - mean^2 dies here."""
    exponent = int(draw.number(3, 8 if draw.narrow_range or draw.dtype == torch.bfloat16 else 14))
    mean = 2.0**exponent * draw.number(1.2, 1.8)
    spacing = 2.0**exponent * draw.info.eps
    draw.normal().mul_(11.0).clamp_(-32, 32).round_().mul_(spacing).add_(round(mean / spacing) * spacing)


def _heavy_tails(draw: Draw) -> None:
    """Fifth power of a normal: kurtosis about 700."""
    scale = draw.number(0.1, 0.5) if draw.narrow_range else draw.number(0.2, 2.0)
    draw.normal()
    square = draw.out.square()
    draw.out.mul_(square).mul_(square).mul_(scale)
    if draw.narrow_range:
        draw.out.clamp_(-2048, 2048)


def _wide_columns(draw: Draw) -> None:
    """Columns over 2^-40..2^40, and the inverse on the other operand: half-precision splits die here."""
    limit = 6 if draw.narrow_range else 40
    size = draw.out.shape[draw.reduced[-1]]
    exponents = torch.randint(-limit, limit + 1, (size,), generator=draw.shared, device=draw.out.device).to(draw.out.dtype)
    shape = [1] * draw.out.dim()
    shape[draw.reduced[-1]] = size
    draw.normal().mul_(torch.exp2(-exponents if draw.second else exponents).reshape(shape))


def _cancellation(draw: Draw) -> None:
    """Neighbours along the reduced dimension cancel but for a small rest."""
    draw.normal().mul_(draw.number(4, 32))
    half = draw.out.shape[draw.reduced[-1]] // 2
    if not half:
        return
    sign = 1.0 if draw.second else -1.0
    rest = 1 + draw.number(1, 8) * 2.0 ** (-8 if draw.dtype != torch.float32 else -12)
    draw.along(1, 2 * half, 2).copy_(draw.along(0, 2 * half, 2)).mul_(sign * rest)


def _spikes(draw: Draw) -> None:
    """Mostly zeros; the first and the last element of the reduced dimension are spikes in about half of the rows each."""
    height = draw.number(1, 8)
    draw.normal()
    draw.out.mul_(draw.out.abs() > 2.5).mul_(height)
    size = draw.out.shape[draw.reduced[-1]]
    for position in (0, size - 1):
        where = draw.per_row() < 0.5
        edge = draw.along(position, position + 1)
        edge.copy_(torch.where(where, (5 + 2 * draw.per_row()) * height, edge))  # above all others: a lost one is seen


def _constant(draw: Draw) -> None:
    """Half of the rows constant, the others full of ties."""
    level = (draw.per_row() * 2 - 1) * draw.number(1, 50)
    constant = draw.per_row() < 0.5
    draw.normal().mul_(1.5).round_().mul_(0.5).mul_(~constant).add_(level * constant)


def _denormal(draw: Draw) -> None:
    draw.normal()
    if not draw.second:
        draw.out.mul_(0.25).clamp_(-0.9, 0.9).mul_(draw.info.tiny)


def _near_largest(draw: Draw) -> None:
    """Magnitudes from 1/16 to 1/4 of the largest, both signs: differences stay finite, squares and sums do not."""
    if draw.second:
        draw.normal()
        return
    top = draw.number(0.15, 0.25)
    draw.out.uniform_(-1, 1, generator=draw.generator)
    sign = torch.sign(draw.out)
    draw.out.abs_().mul_(top - 1 / 16).add_(1 / 16).mul_(sign).mul_(draw.info.max)


def _mixed(draw: Draw) -> None:
    """Magnitudes mixed inside one call: rows differ by powers of two, and elements within a row too."""
    limit = 4.0 if draw.narrow_range else 20.0
    rows = torch.exp2(((draw.per_row() * 2 - 1) * limit).round())
    draw.normal()
    small = draw.out.abs() < 0.3
    draw.out.mul_(rows).add_(draw.out * small, alpha=2.0**-6)


def _nonfinite(draw: Draw) -> None:
    """NaN, +Inf and -Inf at random positions of about half of the rows; the first row stays finite."""
    draw.normal()
    rows = max(1, math.prod(n for i, n in enumerate(draw.out.shape) if i not in draw.reduced))
    count = max(3, min(rows, draw.out.numel()) // 2)
    values = torch.tensor([math.nan, math.inf, -math.inf], dtype=draw.out.dtype, device=draw.out.device)

    def whole(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=draw.generator, device=draw.out.device)

    kinds = whole(0, 3)
    kinds[:3] = torch.arange(3)
    index = [whole(0, n) for n in draw.out.shape]
    if rows > 1:
        outer = next(i for i, n in enumerate(draw.out.shape) if i not in draw.reduced and n > 1)
        index[outer] = whole(1, draw.out.shape[outer])
    for kind in range(3):  # one after the other: which of two writes to one place comes last is open on a GPU
        chosen = kinds == kind
        draw.out.index_put_(tuple(place[chosen] for place in index), values[kind])


def _integers(draw: Draw) -> None:
    """Small integers: every order of summation is exact while sum |a||b| stays below 2^24."""
    length = draw.out.shape[draw.reduced[-1]]
    top = max(1, min(8, int(math.sqrt(2**22 / max(length, 1)))))
    draw.out.uniform_(-top - 0.5, top + 0.5, generator=draw.generator).round_()


FILL: dict[Family, Callable[[Draw], None]] = {
    Family.NORMAL: _normal,
    Family.UNIFORM: _uniform,
    Family.ROW_SCALE: _row_scale,
    Family.LARGE_OFFSET: _large_offset,
    Family.HEAVY_TAILS: _heavy_tails,
    Family.WIDE_COLUMNS: _wide_columns,
    Family.CANCELLATION: _cancellation,
    Family.SPIKES: _spikes,
    Family.CONSTANT: _constant,
    Family.DENORMAL: _denormal,
    Family.NEAR_LARGEST: _near_largest,
    Family.MIXED: _mixed,
    Family.NONFINITE: _nonfinite,
    Family.INTEGERS: _integers,
}


def fill_parameter(out: torch.Tensor, generator: torch.Generator) -> None:
    """A weight or bias: random sign, magnitude in [0.25, 2), never 0 and, but for a chance of 2^-24, never 1."""
    out.uniform_(-1.75, 1.75, generator=generator)
    out.add_(torch.copysign(torch.full((), 0.25, dtype=out.dtype, device=out.device), out))
