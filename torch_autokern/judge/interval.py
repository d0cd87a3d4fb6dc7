"""The statistic: median of paired ratios, with a block bootstrap over ABBA blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch

CONFIDENCE = 0.99
_RESAMPLES = 2000


class Interval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stock's time over the candidate's: the median of paired ratios and its 99 % interval."""

    ratio: float
    low: float
    high: float

    def union(self, other: Interval) -> Interval:
        """The smallest interval that holds both; the ratio is their geometric mean."""
        return Interval(math.sqrt(self.ratio * other.ratio), min(self.low, other.low), max(self.high, other.high))

    def overlaps(self, other: Interval) -> bool:
        """Whether two judgements agree."""
        return self.low <= other.high and other.low <= self.high


def ratio_interval(stock: Sequence[float], candidate: Sequence[float], pairs_per_block: int = 2, seed: int = 0) -> Interval:
    """Median of ``stock[i] / candidate[i]`` and its bootstrap interval.

    Whole blocks are drawn again (Kuensch 1989), because the pairs of one block share what the machine was doing. `seed` fixes
    the resampling, so that a verdict can be computed again from its samples.

    Raises:
        ValueError: fewer than two whole blocks, or a time that is not positive.
    """
    blocks = min(len(stock), len(candidate)) // pairs_per_block
    if blocks < 2:
        raise ValueError(f"{len(stock)} and {len(candidate)} samples are fewer than two blocks of {pairs_per_block} pairs")
    count = blocks * pairs_per_block
    above, below = torch.tensor(stock[:count], dtype=torch.float64), torch.tensor(candidate[:count], dtype=torch.float64)
    if not bool((above > 0).all() and (below > 0).all()):
        raise ValueError("a time is not positive")
    ratios = (above / below).reshape(blocks, pairs_per_block)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, blocks, (_RESAMPLES, blocks), generator=generator)
    medians = _median(ratios[drawn].reshape(_RESAMPLES, count)).sort().values
    tail = int((1 - CONFIDENCE) / 2 * _RESAMPLES)
    return Interval(float(_median(ratios.reshape(1, count))), float(medians[tail]), float(medians[-1 - tail]))


def _median(rows: torch.Tensor) -> torch.Tensor:
    """Median of each row; the mean of the middle two of an even count (torch's own takes the lower one, a bias)."""
    ordered = rows.sort(dim=1).values
    middle = rows.shape[1] // 2
    return ordered[:, middle] if rows.shape[1] % 2 else (ordered[:, middle - 1] + ordered[:, middle]) / 2
