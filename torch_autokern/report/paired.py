"""Two ways of doing one thing, timed side by side: random ABBA blocks, median of paired ratios with its interval."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch_autokern.judge.interval import Interval, ratio_interval

_WARM_CALLS = 5
Work = Callable[[], object]
Wait = Callable[[], None]
Scope = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Side:
    """`work` is timed inside `scope`, which is entered and left outside the clock's bracket."""

    work: Work
    scope: Scope = nullcontext


@dataclass(frozen=True)
class PairedTimes:
    """Median time of one call of each side, ms, and stock over own with its 99 % interval."""

    stock_ms: float
    own_ms: float
    interval: Interval
    blocks: int
    calls_per_bracket: int


def paired_times(
    stock: Side, own: Side, budget_s: float, *, min_blocks: int = 8, max_blocks: int = 400, bracket_us: float = 1000.0,
    wait: Wait = lambda: None,
) -> PairedTimes:  # fmt: skip
    """Time both sides in one process, interleaved, for about `budget_s` seconds once `min_blocks` blocks are done.

    A bracket holds as many calls as make it `bracket_us` long, so that the clock's own cost does not count. `wait` returns
    when the device has done what was asked of it.
    """
    calls = max(1, min(1000, int(bracket_us / _quickest_us(stock, own, wait)) + 1))
    order_source = random.Random(0)
    samples: tuple[list[float], list[float]] = ([], [])
    sides = (stock, own)
    started = time.perf_counter()
    blocks = 0
    while blocks < max_blocks and (blocks < min_blocks or time.perf_counter() - started < budget_s):
        for which in order_source.choice(((0, 1, 1, 0), (1, 0, 0, 1))):
            samples[which].append(_bracket_ms(sides[which], calls, wait))
        blocks += 1
    interval = ratio_interval(samples[0], samples[1])
    return PairedTimes(statistics.median(samples[0]), statistics.median(samples[1]), interval, blocks, calls)


def _quickest_us(stock: Side, own: Side, wait: Wait) -> float:
    """Also warms both sides up."""
    times = [_bracket_ms(side, 1, wait) * 1000 for side in (stock, own, stock, own, stock, own)]
    return max(min(times), 0.5)


def _bracket_ms(side: Side, calls: int, wait: Wait) -> float:
    work = side.work
    with side.scope():
        for _ in range(min(calls - 1, _WARM_CALLS)):
            work()  # a scope that has just opened has cold caches; a call in the middle of a program has not
        wait()
        gc.disable()
        begin = time.perf_counter_ns()
        for _ in range(calls):
            work()
        wait()
        end = time.perf_counter_ns()
        gc.enable()
    return (end - begin) / 1e6 / calls
