"""The parent's side of "faster": what a process's samples say, and when that is too slow, too fast or too noisy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch_autokern.judge.interval import Interval, quiet_blocks, ratio_interval
from torch_autokern.judge.measure import TimingReport
from torch_autokern.judge.outcome import ACCEPT_RATIO, Reason, Refusal
from torch_autokern.store.record import Timing

PHYSICS_SLACK = 0.5  # a candidate under half the time of copying its bytes did not touch them all
_UNSTABLE_RATIO = 1.1


@dataclass(frozen=True)
class Speed:
    """One process's timing, disturbed blocks left out."""

    stock_us: float
    candidate_us: float
    interval: Interval
    blocks: int
    report: TimingReport


def speed_of(report: TimingReport) -> Speed | Refusal:
    """What the samples say, or that more than half of the blocks were disturbed by something else on the machine."""
    quiet = quiet_blocks(report.stock_us, report.candidate_us)
    if quiet is None:
        low, high = min(report.stock_us, default=0.0), max(report.stock_us, default=0.0)
        message = (
            f"more than half of {len(report.stock_us) // 2} blocks were disturbed (stock took {low:.0f} to {high:.0f} us): "
            "something else uses the processor; try again on a quiet machine."
        )
        return Refusal(Reason.TIMING_UNSTABLE, message)
    stock, candidate = quiet
    return Speed(
        statistics.median(stock), statistics.median(candidate), ratio_interval(stock, candidate), len(stock) // 2, report
    )


def noisy_speed(report: TimingReport) -> Speed:
    """For ranking on a busy machine, never for a verdict: each side's tenth percentile, with the interval of all samples
    widened to hold their ratio."""
    stock, candidate = (_tenth(side) for side in (report.stock_us, report.candidate_us))
    every = ratio_interval(report.stock_us, report.candidate_us)
    ratio = stock / candidate
    interval = Interval(ratio, min(every.low, ratio), max(every.high, ratio))
    return Speed(stock, candidate, interval, len(report.stock_us) // 2, report)


def _tenth(samples: Sequence[float]) -> float:
    return sorted(samples)[len(samples) // 10]


def too_fast(speed: Speed) -> Refusal | None:
    """Faster than physics: under the measured time of copying the call's bytes, minus the slack."""
    if speed.candidate_us >= PHYSICS_SLACK * speed.report.copy_us:
        return None
    message = (
        f"{speed.candidate_us:.1f} us a call, but copying the same bytes takes {speed.report.copy_us:.1f} us: some of them "
        "were not touched."
    )
    return Refusal(Reason.FASTER_THAN_PHYSICS, message, best_ratio=speed.interval.ratio)


def too_slow(speeds: Sequence[Speed], processes: int) -> Refusal | None:
    """The union's lower end only falls with more processes, so the first process below the line decides."""
    if min(speed.interval.low for speed in speeds) > ACCEPT_RATIO:
        return None
    last = speeds[-1]
    text = (
        f"stock {last.stock_us:.1f} us, candidate {last.candidate_us:.1f} us: ratio {last.interval.ratio:.3f}, 99 % interval "
        f"{last.interval.low:.3f} to {last.interval.high:.3f} in process {len(speeds)} of {processes}; accepted when its "
        f"lower end is above {ACCEPT_RATIO}."
    )
    best = max(speed.interval.ratio for speed in speeds)
    if last.interval.ratio > _UNSTABLE_RATIO:
        return Refusal(Reason.TIMING_UNSTABLE, f"{text} The times spread too far to tell.", best_ratio=best)
    return Refusal(Reason.NOT_FASTER, text, best_ratio=best)


def timing(speeds: Sequence[Speed], pages: Literal["fresh", "resident"]) -> Timing:
    """The record's entry: medians over the processes, and the union of their intervals."""
    return Timing(
        regime="eager",
        pages=pages,
        stock_us=statistics.median(speed.stock_us for speed in speeds),
        candidate_us=statistics.median(speed.candidate_us for speed in speeds),
        ratio=math.exp(statistics.fmean(math.log(speed.interval.ratio) for speed in speeds)),
        ratio_low=min(speed.interval.low for speed in speeds),
        ratio_high=max(speed.interval.high for speed in speeds),
        blocks=sum(speed.blocks for speed in speeds),
        processes=len(speeds),
    )
