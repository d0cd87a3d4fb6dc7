"""State: what a candidate may carry from one call to the next, which is nothing. Runs inside the runner, after the trials.

What else may disturb a call depends on the device: thread counts, other threads and callers on a CPU; streams and captured
graphs on a GPU (`streams.py`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from torch_autokern.judge.accuracy import Task, plainly_wrong
from torch_autokern.judge.device import device_of, generator_on
from torch_autokern.judge.families import Family
from torch_autokern.judge.inputs import InputSet, empty_inputs, make_inputs
from torch_autokern.judge.memory import POISONS
from torch_autokern.judge.outcome import Reason
from torch_autokern.judge.remembered import Remembered, Results
from torch_autokern.judge.streams import StreamChecks
from torch_autokern.judge.verify import CandidateCode, Notify, PoisonedRuns, call_limit_s, own_work_s

_LARGE_BYTES = 64 << 20


class _Expected:
    """What a call on one of the input sets must give: the bits of the first call, or, for a kernel whose results differ from
    run to run, right ones. Class `exact` takes bits only."""

    def __init__(self, task: Task, sets: list[InputSet], first: list[Remembered], deterministic: bool) -> None:
        self._task = task
        self._sets = sets
        self._first = first
        self.deterministic = deterministic

    def holds(self, which: int, results: Results) -> bool:
        """Whether these are right results for set `which`; other bits than the first ones are noted."""
        if self._first[which].same(results):
            return True
        if self._task.accuracy.kind == "exact":
            return False
        if plainly_wrong(self._task, Family.NORMAL, self._sets[which].tensors, results) is not None:
            return False
        self.deterministic = False
        return True


class StateChecks:
    """The checks of one candidate, in order; `found` says what each of them saw."""

    def __init__(self, task: Task, code: CandidateCode, seed: int, notify: Notify, *, deterministic: bool = True) -> None:
        generator = generator_on(device_of(task.key), seed)
        self._task = task
        self._code = code
        self._seed = seed
        self._notify = notify
        self._on_gpu = task.key.device_type == "cuda"
        self._is_large = task.spec.bytes_moved(task.key) > _LARGE_BYTES and not self._on_gpu
        self._sets = [make_inputs(task.spec, task.key, Family.NORMAL, generator) for _ in range(2)]
        self._generator = generator
        self._runner = PoisonedRuns(task, code, Family.NORMAL, seed, generator, notify, torch.get_num_threads())
        self._enter("first calls", 2)
        first = [Remembered(code.run(inputs.tensors)) for inputs in self._sets]
        self._own_work()
        self.expected = _Expected(task, self._sets, first, deterministic)
        self.found: dict[str, str] = {}

    def run(self) -> dict[str, str]:
        """Every check.

        Raises:
            RefusedError: a result changed, or has another layout than stock's.
        """
        for name, check in self._checks().items():
            self.found[name] = check()
        return self.found

    def _checks(self) -> dict[str, Callable[[], str]]:
        anywhere: dict[str, Callable[[], str]] = {
            "layout": self._layout,
            "poisoned workspaces": self._poisoned,
            "repeats": self._repeats,
            "same addresses": self._same_addresses,
        }
        if self._on_gpu:
            make_spare = functools.partial(empty_inputs, self._task.key, "heap", self._generator)
            streams = StreamChecks(self._code, self._sets, make_spare, self.expected.holds, self._runner, self._enter)
            return {**anywhere, **streams.checks()}
        return {
            **anywhere,
            "threads": self._other_thread_counts,
            "other work": self._beside_other_work,
            "concurrent callers": self._concurrently,
        }

    def _layout(self) -> str:
        self._enter("layout", 1)
        check_layout(self._task, self._code.run(self._sets[0].tensors), self._sets[0], self._runner)
        self._own_work()
        return "passed: sizes, strides and dtypes equal"

    def _poisoned(self) -> str:
        for which, inputs in enumerate(self._sets):
            results = self._runner.once(inputs, "heap", POISONS[1])
            self._require(which, results, Reason.NOT_DETERMINISTIC, "two calls on the same inputs differ.")
            del results
        spaces = self._code.workspaces
        if not spaces:
            return "passed: no workspaces" if self._on_gpu else "passed: no workspaces; fresh heap blocks poisoned"
        zeroed = sum(space.zeroed for space in spaces)
        return f"passed: {len(spaces)} guarded, {len(spaces) - zeroed} poisoned before every call, {zeroed} zeroed as declared"

    def _repeats(self) -> str:
        count = 3 if self._is_large else 24
        self._enter("repeats", count)
        for turn in range(count):
            results = self._code.run(self._sets[turn % 2].tensors)
            message = f"call {turn + 1} of a row of calls differs from the first ones."
            self._require(turn % 2, results, Reason.STALE_RESULT, message)
            del results
        if not self.expected.deterministic:
            return "not guaranteed: results differ from run to run"
        return f"passed: {count} alternating calls bitwise equal"

    def _same_addresses(self) -> str:
        """New contents at the addresses of an earlier call, inputs and outputs."""
        count = 2 if self._is_large else 6
        spare, regions = empty_inputs(self._task.key, "heap", self._generator), self._runner.regions("heap")
        for turn in range(count):
            spare.copy_from(self._sets[turn % 2])
            results = self._runner.once(spare, "heap", POISONS[turn % 2], regions)
            message = f"call {turn + 1} at the same addresses, with other contents, is not right for them."
            self._require(turn % 2, results, Reason.STALE_RESULT, message)
        return f"passed: {count} calls with new contents at the same addresses"

    def _other_thread_counts(self) -> str:
        """A record is right at any thread count, and fast at one: other cuts of the range must give right results."""
        threads = torch.get_num_threads()
        before, self.expected.deterministic = self.expected.deterministic, True
        for other in (1, threads + 1):
            torch.set_num_threads(other)
            self._enter(f"{other} threads", 4)
            results = self._code.run(self._sets[0].tensors)
            torch.set_num_threads(threads)
            self._own_work()
            self._require(0, results, Reason.NOT_DETERMINISTIC, f"wrong with {other} threads.")
        equal, self.expected.deterministic = self.expected.deterministic, before  # run to run means: with one thread count
        return f"passed: 1 and {threads + 1} threads {'bitwise equal' if equal else 'right, other bits'}"

    def _beside_other_work(self) -> str:
        """Stock calls on a thread of their own, on memory of their own, all the while."""
        count = 2 if self._is_large else 8
        stop = threading.Event()

        def work() -> None:
            size = torch.ones(128, 128)
            while not stop.is_set():
                torch.softmax(size @ size, 1)

        self._enter("beside other work", 4 * count)
        thread = threading.Thread(target=work)
        thread.start()
        try:
            results = [self._code.run(self._sets[turn % 2].tensors) for turn in range(count)]
        finally:
            stop.set()
            thread.join()
        for turn, result in enumerate(results):
            self._require(turn % 2, result, Reason.STALE_RESULT, "a call beside other work differs from one alone.")
        return f"passed: {count} calls beside stock calls on another thread"

    def _concurrently(self) -> str:
        if self._is_large:
            return "not run: 64 MiB and more a call"
        self._enter("concurrent callers", 16)
        with ThreadPoolExecutor(2) as pool:
            got = list(pool.map(lambda which: [self._code.run(self._sets[which].tensors) for _ in range(8)], range(2)))
        for which, calls in enumerate(got):
            for results in calls:
                message = "two threads calling at once get other results than one alone."
                self._require(which, results, Reason.STALE_RESULT, message)
        return "passed: 2 callers, 8 calls each"

    def _require(self, which: int, results: Results, reason: Reason, message: str) -> None:
        self._own_work()
        if not self.expected.holds(which, results):
            raise self._runner.refused(reason, message)

    def _enter(self, phase: str, calls: int) -> None:
        self._notify(f"{phase}, seed {self._seed}", calls * call_limit_s(self._task))

    def _own_work(self) -> None:
        self._notify("reference", own_work_s(self._task))


def check_layout(task: Task, results: Results, inputs: InputSet, runner: PoisonedRuns) -> None:
    """Refuse results that stock would have returned otherwise, or that share memory with an argument."""
    addresses = {t.untyped_storage().data_ptr() for t in inputs.tensors if t is not None}
    for index, (result, layout) in enumerate(zip(results, task.key.outputs, strict=True)):
        if (result is None) != (layout is None):
            raise runner.refused(Reason.WRONG_LAYOUT, f"output {index} is {'absent' if result is None else 'present'}.", index)
        if result is None or layout is None:
            continue
        seen = (str(result.dtype).removeprefix("torch."), tuple(result.shape), result.stride())
        if seen != (layout.dtype, layout.sizes, layout.strides):
            message = f"output {index} is {seen}, stock returns {(layout.dtype, layout.sizes, layout.strides)}."
            raise runner.refused(Reason.WRONG_LAYOUT, message, index)
        if result.untyped_storage().data_ptr() in addresses:
            raise runner.refused(Reason.WRONG_LAYOUT, f"output {index} shares memory with an input.", index)
