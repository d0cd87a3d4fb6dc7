"""The statistic: equal sides are never accepted, the interval covers, noise and physics are refused."""

from __future__ import annotations

import pytest
import torch

from torch_autokern.judge.interval import quiet_blocks, ratio_interval
from torch_autokern.judge.measure import TimingReport
from torch_autokern.judge.outcome import ACCEPT_RATIO, Reason, Refusal
from torch_autokern.judge.speed import Speed, noisy_speed, speed_of, timing, too_fast, too_slow


def _times(blocks: int, median_us: float, spread: float, drift: torch.Tensor, generator: torch.Generator) -> list[float]:
    """Log-normal noise on what a block shares, with one sample in twenty 30 % late."""
    noise = torch.randn(blocks, 2, generator=generator, dtype=torch.float64) * spread
    late = (torch.rand(blocks, 2, generator=generator) < 0.05) * 0.3
    return list((median_us * (1 + late) * torch.exp(noise) * drift[:, None]).reshape(-1).tolist())


def _both(blocks: int, ratio: float, spread: float, seed: int) -> tuple[list[float], list[float]]:
    generator = torch.Generator().manual_seed(seed)
    drift = torch.exp(0.1 * torch.randn(blocks, generator=generator, dtype=torch.float64))
    return _times(blocks, 100 * ratio, spread, drift, generator), _times(blocks, 100, spread, drift, generator)


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.2])
def test_equal_sides_are_never_faster(spread: float) -> None:
    # 80 simulated verdicts of three processes each: at 99 % one process in 200 may stray above 1, three together never 1.02.
    for seed in range(80):
        intervals = [ratio_interval(*_both(40, 1.0, spread, 3 * seed + process)) for process in range(3)]
        assert min(interval.low for interval in intervals) <= ACCEPT_RATIO


def test_the_interval_covers_the_true_ratio() -> None:
    runs = [ratio_interval(*_both(40, 1.1, 0.05, seed)) for seed in range(200)]
    covered = sum(run.low <= 1.1 <= run.high for run in runs)
    assert covered >= 194, f"{covered} of 200 at 99 %"


def test_a_clear_win_is_seen_through_drift() -> None:
    interval = ratio_interval(*_both(40, 1.3, 0.05, 1))
    assert ACCEPT_RATIO < interval.low < 1.3 < interval.high < 1.5


def test_pairs_of_one_block_are_drawn_together() -> None:
    # Two pairs that err in opposite directions in every block cancel within it: the interval must be as narrow as that.
    stock = [90.0, 110.0] * 30
    interval = ratio_interval(stock, [100.0] * 60)
    assert (interval.low, interval.ratio, interval.high) == (1.0, 1.0, 1.0)


def test_too_few_samples_or_a_zero_time_are_errors() -> None:
    with pytest.raises(ValueError, match="fewer than two blocks"):
        ratio_interval([1.0, 1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="not positive"):
        ratio_interval([1.0, 1.0, 0.0, 1.0], [1.0] * 4)


def _report(stock: list[float], candidate: list[float], copy_us: float = 0.0) -> TimingReport:
    return TimingReport(tuple(stock), tuple(candidate), 1, 4, copy_us, len(candidate))


def test_disturbed_blocks_are_left_out_on_both_sides() -> None:
    stock, candidate = [100.0] * 40, [50.0] * 40
    stock[6], candidate[20] = 9000.0, 8000.0
    quiet = quiet_blocks(stock, candidate)
    assert quiet is not None and len(quiet[0]) == len(quiet[1]) == 36
    assert max(quiet[0]) == 100.0 and max(quiet[1]) == 50.0


def test_a_busy_machine_gives_no_verdict() -> None:
    stock = [100.0 if i % 3 == 0 else 9000.0 for i in range(80)]
    seen = speed_of(_report(stock, [100.0] * 80))
    assert isinstance(seen, Refusal) and seen.reason is Reason.TIMING_UNSTABLE and "quiet" in seen.message


def test_a_busy_machine_still_ranks_candidates_by_their_quiet_samples() -> None:
    stock = [100.0 if i % 3 == 0 else 9000.0 for i in range(80)]
    speed = noisy_speed(_report(stock, [40.0 if i % 4 == 0 else 9500.0 for i in range(80)]))
    assert speed.interval.ratio == pytest.approx(2.5)
    assert speed.interval.low <= 2.5 <= speed.interval.high


def _speed(stock_us: float, candidate_us: float, copy_us: float = 0.0) -> Speed:
    speed = speed_of(_report([stock_us] * 40, [candidate_us] * 40, copy_us))
    assert isinstance(speed, Speed)
    return speed


def test_two_per_cent_are_needed() -> None:
    refusal = too_slow([_speed(101.9, 100.0)], 3)
    assert refusal is not None and refusal.reason is Reason.NOT_FASTER and "1.019" in refusal.message
    assert refusal.best_ratio == pytest.approx(1.019)
    assert too_slow([_speed(102.1, 100.0)], 3) is None


def test_one_slow_process_decides() -> None:
    refusal = too_slow([_speed(150.0, 100.0), _speed(101.0, 100.0)], 3)
    assert refusal is not None and refusal.reason is Reason.NOT_FASTER and refusal.best_ratio == pytest.approx(1.5)


def test_faster_than_copying_the_bytes_is_refused() -> None:
    refusal = too_fast(_speed(100.0, 4.9, copy_us=10.0))
    assert refusal is not None and refusal.reason is Reason.FASTER_THAN_PHYSICS
    assert too_fast(_speed(100.0, 5.1, copy_us=10.0)) is None


def test_the_record_holds_the_union_of_the_intervals() -> None:
    speeds = [_speed(130.0, 100.0), _speed(120.0, 100.0), _speed(125.0, 100.0)]
    entry = timing(speeds, "resident")
    assert (entry.ratio_low, entry.ratio_high, entry.processes, entry.blocks) == (1.2, 1.3, 3, 60)
    assert entry.ratio == pytest.approx((1.3 * 1.2 * 1.25) ** (1 / 3))
