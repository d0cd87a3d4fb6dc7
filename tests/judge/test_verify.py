"""Memory and state: what a candidate does besides computing. Stand-ins in Python; `test_samples.py` has real ones."""

from __future__ import annotations

import ctypes
import threading
import time

import pytest
import torch

from tests.judge.samples import softmax_key
from tests.judge.stand_ins import StandIn, quiet, stock_of, task_of, verify
from torch_autokern.judge.evidence import Evidence
from torch_autokern.judge.families import Family
from torch_autokern.judge.measure import TimingRequest, candidate_side, measure, stock_side
from torch_autokern.judge.outcome import Reason, Refusal, RefusedError
from torch_autokern.judge.state import StateChecks
from torch_autokern.judge.verify import CandidateCode, own_work_s
from torch_autokern.ops import SPECS

KEY = softmax_key(64, 100)


class Wrapped(StandIn):
    """Stock, with something done to what `run_into` leaves."""

    def __init__(self, after: object) -> None:
        super().__init__(lambda x: (torch.softmax(x, 1),))
        self._after = after

    def run_into(self, tensors, outputs) -> None:  # type: ignore[no-untyped-def]
        super().run_into(tensors, outputs)
        self._after(tensors, outputs)  # type: ignore[operator]


def _seen(code: CandidateCode) -> Refusal:
    result = verify(KEY, code, [Family.NORMAL])
    assert isinstance(result, Refusal), "accepted"
    return result


def test_an_unwritten_element_is_refused_with_its_position() -> None:
    class Gap(StandIn):
        def run_into(self, tensors, outputs) -> None:  # type: ignore[no-untyped-def]
            kept = outputs[0][5, 7].clone()
            super().run_into(tensors, outputs)
            outputs[0][5, 7] = kept

    seen = _seen(Gap(lambda x: (torch.softmax(x, 1),)))
    assert seen.reason is Reason.NOT_WRITTEN and "(5, 7)" in seen.message


def test_a_write_beside_the_output_is_refused() -> None:
    # Inside the process's own page, where no trap is: the guard zone tells.
    def before_start(tensors, outputs) -> None:  # type: ignore[no-untyped-def]
        if outputs[0].data_ptr() % 4096:
            ctypes.c_float.from_address(outputs[0].data_ptr() - 4).value = 1.0

    assert _seen(Wrapped(before_start)).reason is Reason.WROTE_OUTSIDE


def test_a_changed_input_is_refused() -> None:
    def change(tensors, outputs) -> None:  # type: ignore[no-untyped-def]
        tensors[0][3, 3] += 1

    assert _seen(Wrapped(change)).reason is Reason.WROTE_INPUT


def test_results_that_depend_on_earlier_calls_are_refused() -> None:
    calls = [0]

    def later(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls[0] += 1
        return (torch.softmax(x if calls[0] < 3 else x * 1.001, 1),)

    assert _seen(StandIn(later)).reason is Reason.STALE_RESULT


def test_results_that_differ_but_are_right_are_recorded_as_not_guaranteed() -> None:
    calls = [0]

    def last_bit(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls[0] += 1
        y = torch.softmax(x, 1)
        y.view(torch.int32)[0, 0] ^= calls[0] & 1
        return (y,)

    result = verify(KEY, StandIn(last_bit), [Family.NORMAL])
    assert isinstance(result, Evidence) and not result.deterministic


def _state(code: CandidateCode) -> dict[str, str]:
    return StateChecks(task_of(KEY), code, 11, quiet).run()


def test_stock_passes_the_checks_of_state() -> None:
    checks = _state(stock_of(KEY))
    assert set(checks) == {
        "layout", "poisoned workspaces", "repeats", "same addresses", "threads", "other work", "concurrent callers",
    }  # fmt: skip
    assert all(text.startswith("passed") for text in checks.values())


def test_another_layout_than_stocks_is_refused() -> None:
    with pytest.raises(RefusedError) as caught:
        _state(StandIn(lambda x: (torch.softmax(x, 1).t().contiguous().t(),)))
    assert caught.value.refusal.reason is Reason.WRONG_LAYOUT


def test_an_output_that_shares_memory_with_an_input_is_refused() -> None:
    with pytest.raises(RefusedError) as caught:
        _state(StandIn(lambda x: (x.copy_(torch.softmax(x, 1)),)))
    assert caught.value.refusal.reason is Reason.WRONG_LAYOUT and "shares memory" in caught.value.refusal.message


def test_a_kernel_that_is_wrong_at_another_thread_count_is_refused() -> None:
    def threads(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.softmax(x * (1.01 if torch.get_num_threads() > 1 else 1.0), 1),)

    with pytest.raises(RefusedError) as caught:
        _state(StandIn(threads))
    assert "threads" in caught.value.refusal.message


def test_two_callers_that_disturb_each_other_are_refused() -> None:
    scratch = torch.empty(64, 100)
    main = threading.get_ident()

    def shared(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scratch.copy_(x)
        if threading.get_ident() != main:
            time.sleep(0.02)  # both have written, now both read
        return (torch.softmax(scratch, 1),)

    with pytest.raises(RefusedError) as caught:
        _state(StandIn(shared))
    assert caught.value.refusal.reason is Reason.STALE_RESULT


def test_a_result_remembered_by_address_is_refused() -> None:
    """Right for every new address: only other contents at an address that was seen before tell."""
    memory: dict[int, torch.Tensor] = {}

    class Remembers(StandIn):
        def run_into(self, tensors, outputs) -> None:  # type: ignore[no-untyped-def]
            known = memory.setdefault(tensors[0].data_ptr(), torch.softmax(tensors[0], 1))
            outputs[0].copy_(known)

    with pytest.raises(RefusedError) as caught:
        _state(Remembers(lambda x: (torch.softmax(x, 1),)))
    assert caught.value.refusal.reason is Reason.STALE_RESULT and "same addresses" in caught.value.refusal.message


def test_a_kernel_that_other_work_disturbs_is_refused() -> None:
    def disturbed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.softmax(x * (1.01 if threading.active_count() > before else 1.0), 1),)

    before = threading.active_count()
    with pytest.raises(RefusedError) as caught:
        _state(StandIn(disturbed))
    assert caught.value.refusal.reason is Reason.STALE_RESULT and "other work" in caught.value.refusal.message


def test_state_of_a_kernel_whose_last_bits_vary_is_checked_all_the_same() -> None:
    calls = [0]

    def varies(x: torch.Tensor, factor: float = 1.0) -> tuple[torch.Tensor, ...]:
        calls[0] += 1
        y = torch.softmax(x * factor, 1)
        y.view(torch.int32)[0, 0] ^= calls[0] % 3 & 1
        return (y,)

    assert _state(StandIn(varies))["repeats"].startswith("not guaranteed")
    with pytest.raises(RefusedError):
        _state(StandIn(lambda x: varies(x, 1.01 if torch.get_num_threads() > 1 else 1.0)))


def _measure(code: CandidateCode) -> object:
    task = task_of(KEY)
    request = TimingRequest(3, 0.0, 4, 4)
    return measure(task, stock_side(task), candidate_side(task, code), request, quiet, 1 << 20)


def test_a_result_cached_by_address_is_caught_while_timing() -> None:
    cache: dict[int, torch.Tensor] = {}

    def cached(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if x.data_ptr() not in cache:
            cache[x.data_ptr()] = torch.softmax(x, 1)
        return (cache[x.data_ptr()].clone(),)

    with pytest.raises(RefusedError) as caught:
        _measure(StandIn(cached))
    assert caught.value.refusal.reason is Reason.STALE_RESULT


def test_a_kernel_that_is_right_for_the_first_ten_calls_is_caught_while_timing() -> None:
    calls = [0]

    def tired(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls[0] += 1
        return (torch.softmax(x, 1) if calls[0] <= 10 else torch.zeros_like(x),)

    with pytest.raises(RefusedError) as caught:
        _measure(StandIn(tired))
    assert caught.value.refusal.reason is Reason.STALE_RESULT


def test_both_sides_are_timed_on_the_same_values_at_changing_addresses() -> None:
    seen: list[tuple[int, float]] = []

    def spy(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen.append((x.data_ptr(), float(x[0, 0])))
        return tuple(SPECS["_softmax"].stock((x,), KEY.scalars))

    report = _measure(StandIn(spy))
    timed = seen[-10:]
    assert len({address for address, _ in timed}) == len(timed), "an address came twice within one bracket"
    assert len({value for _, value in seen}) == 4
    assert len(report.stock_us) == len(report.candidate_us) == 8  # type: ignore[attr-defined]


def test_the_judges_own_work_has_more_time_on_large_keys() -> None:
    small, large = (own_work_s(task_of(softmax_key(*sizes))) for sizes in ((4, 64), (64, 65536)))
    assert 120 <= small < 121 and large == pytest.approx(120 + 2 * 64 * 65536 * 4 / 4e6)
