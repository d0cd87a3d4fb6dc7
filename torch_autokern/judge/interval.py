"""The statistic: median of paired ratios, with a block bootstrap over ABBA blocks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

CONFIDENCE = 0.99
NOISE_FACTOR = 2.0
MIN_QUIET_SHARE = 0.5
MIN_BLOCKS = 4
_RESAMPLES = 2000


class Interval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stock's time over the candidate's: the median of paired ratios and its 99 % interval."""

    ratio: float
    low: float
    high: float

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


def quiet_blocks(
    stock: Sequence[float], candidate: Sequence[float], pairs_per_block: int = 2
) -> tuple[list[float], list[float]] | None:
    """The samples of blocks that nothing disturbed, or None where fewer than half of the blocks were quiet.

    Another process on a core makes a parallel loop wait 8 to 20 ms for one thread, in stock and candidate alike. A block goes
    as a whole when any of its samples is above twice its side's tenth percentile; the rule is the same for both sides, and
    with more than half of the blocks gone there is no verdict.
    """
    blocks = min(len(stock), len(candidate)) // pairs_per_block
    if blocks < MIN_BLOCKS:
        return None
    shape, count = (blocks, pairs_per_block), blocks * pairs_per_block
    quiet = torch.ones(blocks, dtype=torch.bool)
    sides = [torch.tensor(side[:count], dtype=torch.float64) for side in (stock, candidate)]
    for side in sides:
        quiet &= (side <= NOISE_FACTOR * side.quantile(0.1)).reshape(shape).all(dim=1)
    if int(quiet.sum()) < max(MIN_BLOCKS, MIN_QUIET_SHARE * blocks):
        return None
    kept = [side.reshape(shape)[quiet].reshape(-1).tolist() for side in sides]
    return kept[0], kept[1]


def _median(rows: torch.Tensor) -> torch.Tensor:
    """Median of each row; the mean of the middle two of an even count (torch's own takes the lower one, a bias)."""
    ordered = rows.sort(dim=1).values
    middle = rows.shape[1] // 2
    return ordered[:, middle] if rows.shape[1] % 2 else (ordered[:, middle - 1] + ordered[:, middle]) / 2
