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
COLD_RATIO = 0.98
_UNSTABLE_RATIO = 1.1
_DISAGREED_PART = 10  # one bracket in so many may have clocks that contradict each other


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
    if report.disagreed * _DISAGREED_PART > 2 * len(report.stock_us):
        message = (
            f"in {report.disagreed} of {2 * len(report.stock_us)} brackets the host's clock contradicts the device's events: "
            "something ran that one of them did not see, or the host was stopped; try again on a quiet machine."
        )
        return Refusal(Reason.TIMING_UNSTABLE, message)
    jumped = clock_jumped(report)
    if jumped is not None:
        return jumped
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


def clock_jumped(report: TimingReport) -> Refusal | None:
    """Times that no clock gives: a bracket that took nothing or less, or a side with more samples than the other."""
    samples = (*report.stock_us, *report.candidate_us)
    if len(report.stock_us) == len(report.candidate_us) and all(0 < sample < math.inf for sample in samples):
        return None
    return Refusal(Reason.TIMING_UNSTABLE, "a timed call took no time or less: the clock jumped. Try again.")


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


def slower_when_replayed(speeds: Sequence[Speed]) -> Refusal | None:
    """A program that captures its calls would get slower: no process saw the candidate at least level in a replayed graph."""
    if not speeds or max(speed.interval.high for speed in speeds) >= 1.0:
        return None
    last = speeds[-1]
    text = f"stock {last.stock_us:.1f} us, candidate {last.candidate_us:.1f} us in a replayed graph: ratio"
    return Refusal(Reason.NOT_FASTER, f"{text} {last.interval.ratio:.3f}.", best_ratio=last.interval.ratio)


def slower_when_cold(speeds: Sequence[Speed]) -> Refusal | None:
    """A CPU kernel that wins on arguments in the caches may lose where memory is the limit: there it must at least be level."""
    if not speeds or _mean_ratio(speeds) >= COLD_RATIO:
        return None
    last = speeds[-1]
    text = f"stock {last.stock_us:.1f} us, candidate {last.candidate_us:.1f} us on arguments that have left the caches: ratio"
    message = f"{text} {_mean_ratio(speeds):.3f} over {len(speeds)} processes; at least {COLD_RATIO} is asked there."
    return Refusal(Reason.NOT_FASTER, message, best_ratio=last.interval.ratio)


def _mean_ratio(speeds: Sequence[Speed]) -> float:
    return math.exp(statistics.fmean(math.log(speed.interval.ratio) for speed in speeds))


def timing(
    speeds: Sequence[Speed], pages: Literal["fresh", "resident", "device"], regime: Literal["eager", "graph"] = "eager",
    inputs: Literal["warm", "cold"] = "warm",
) -> Timing:  # fmt: skip
    """The record's entry: medians over the processes, and the union of their intervals."""
    return Timing(
        regime=regime,
        pages=pages,
        stock_us=statistics.median(speed.stock_us for speed in speeds),
        candidate_us=statistics.median(speed.candidate_us for speed in speeds),
        ratio=_mean_ratio(speeds),
        ratio_low=min(speed.interval.low for speed in speeds),
        ratio_high=max(speed.interval.high for speed in speeds),
        blocks=sum(speed.blocks for speed in speeds),
        processes=len(speeds),
        inputs=inputs,
    )
