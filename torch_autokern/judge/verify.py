"""Is a candidate right: one trial of one family, and the checks of memory and state. Runs inside the runner.

Order matters: the candidate runs on poisoned outputs *before* any reference for its inputs exists, and once more after it, at
new addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

import msgspec
import torch

from torch_autokern.judge import vacuity
from torch_autokern.judge.accuracy import OutputReport, Place, Tally, Task, evaluate, evaluate_with_envelope, limits_for
from torch_autokern.judge.families import Family
from torch_autokern.judge.inputs import InputSet, empty_inputs, make_inputs
from torch_autokern.judge.memory import (
    OUTPUT_GUARD,
    POISONS,
    Placement,
    Region,
    allocate,
    bits,
    is_dense,
    perturb_heap,
    same_bits,
)
from torch_autokern.judge.outcome import Reason, Refusal, RefusedError
from torch_autokern.judge.rows import row_axis

Tensors = Sequence[torch.Tensor | None]
Results = tuple[torch.Tensor | None, ...]
Notify = Callable[[str, float], None]
_OUR_OWN_WORK_S = 120.0
_SMALL_ELEMENTS = 1 << 20


class CandidateCode(Protocol):
    """A loaded candidate: `torch_autokern.runtime.kernel.LoadedKernel`, or a stand-in in tests."""

    def run(self, tensors: Tensors) -> Results:
        """Allocate the results and run."""

    def run_into(self, tensors: Tensors, outputs: Tensors) -> None:
        """Write the results into given tensors."""


class FamilyReport(msgspec.Struct, forbid_unknown_fields=True, tag="family"):
    """What one trial showed; the parent pools trials and applies the limits. `probes` maps a vacuity probe to its tallies."""

    family: str
    seed: int
    outputs: tuple[OutputReport | None, ...]
    deterministic: bool
    probes: dict[str, tuple[Tally, ...]] = {}


def call_limit_s(task: Task) -> float:
    """How long one call may take before it counts as hung: 5 s, plus 50 MB/s, plus 0.1 GFLOP/s."""
    return 5.0 + task.spec.bytes_moved(task.key) / 50e6 + task.spec.flops(task.key) / 1e8


def check_family(
    task: Task, code: CandidateCode, family: Family, seed: int, placement: Placement, notify: Notify, *,
    with_probes: bool = False,
) -> FamilyReport:  # fmt: skip
    """Judge one trial.

    Raises:
        RefusedError: a rule without a measure was broken (layout, memory, determinism for class `exact`).
    """
    threads = torch.get_num_threads()
    with _threads(1 if _elements(task) < _SMALL_ELEMENTS else threads):
        return _check_family(task, code, family, seed, placement, notify, with_probes, threads)


def _check_family(
    task: Task, code: CandidateCode, family: Family, seed: int, placement: Placement, notify: Notify, with_probes: bool,
    threads: int,
) -> FamilyReport:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    inputs = make_inputs(task.spec, task.key, family, generator, placement)
    runner = PoisonedRuns(task, code, family, seed, generator, notify, threads)
    moved = empty_inputs(task.key, "heap", generator)
    moved.copy_from(inputs)
    first, second = runner.twice(inputs, moved, placement)
    notify("reference", _OUR_OWN_WORK_S)
    with _threads(threads):
        stock = task.spec.stock(inputs.tensors, task.key.scalars)
    third = runner.once(moved, "heap", POISONS[0])
    notify("reference", _OUR_OWN_WORK_S)
    results: list[Results] = [first] + [r for r in (second, third) if not _all_same(r, first)]
    deterministic = len(results) == 1
    if task.accuracy.kind == "exact":
        _require_stock_bits(runner, results, stock, deterministic)
    scores, pools = evaluate_with_envelope(task, family, inputs.tensors, results, stock, generator)
    reports: list[OutputReport | None] = []
    for index, score in enumerate(scores):
        if stock[index] is None:
            reports.append(None)
            continue
        ours = score.tallies
        elements = stock[index].numel()
        limit = limits_for(task, index, family, elements, pools[index], score.ulp).largest
        if third is results[-1] and not deterministic and ours[0].pool.largest <= limit < ours[-1].pool.largest:
            raise runner.refused(Reason.STALE_RESULT, _STALE, index, ours[-1].worst)
        worst = max(ours, key=lambda t: (t.nonfinite is not None or t.nonzero is not None, t.pool.largest))
        reports.append(OutputReport(elements, worst, tuple(pools[index]), score.ulp))
    probes = _probe(task, family, inputs, stock) if with_probes else {}
    return FamilyReport(family.value, seed, tuple(reports), deterministic, probes)


_STALE = (
    "the first calls were right and a later one, on the same values at other addresses, is wrong: a result depends on earlier "
    "calls, on addresses or on memory left behind. Compute everything from the arguments of the call."
)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Our own work on small tensors is quicker with one thread, above all while something else uses a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _elements(task: Task) -> int:
    return max(t.numel for t in (*task.key.tensors, *task.key.outputs) if t is not None)


class PoisonedRuns:
    """Runs a candidate into poisoned, guarded outputs and refuses what it does to memory."""

    def __init__(
        self,
        task: Task,
        code: CandidateCode,
        family: Family,
        seed: int,
        generator: torch.Generator,
        notify: Notify,
        threads: int,
    ) -> None:
        self._task = task
        self._code = code
        self._family = family
        self._seed = seed
        self._generator = generator
        self._notify = notify
        self._threads = threads

    def refused(self, reason: Reason, message: str, output: int = 0, place: Place | None = None) -> RefusedError:
        """The refusal with this trial's family and seed."""
        index = None if place is None else place.index
        where = "" if index is None else f" Output {output}, position {index}: got {place.got}, expected {place.expected}."  # type: ignore[union-attr]
        return RefusedError(
            Refusal(reason, f"family {self._family.value}, seed {self._seed}: {message}{where}", self._family.value, self._seed,
                    output, index)
        )  # fmt: skip

    def twice(self, inputs: InputSet, saved: InputSet, placement: Placement) -> tuple[Results, Results]:
        """Two runs over two poisons; refuses elements that hold the poison both times, and inputs that are not `saved` any
        more."""
        first = self.once(inputs, placement, POISONS[0])
        second = self.once(inputs, "heap", POISONS[1])
        for index, (one, two) in enumerate(zip(first, second, strict=True)):
            if one is None or two is None or same_bits(one, two):
                continue
            unwritten = (bits(one) == _pattern(one, POISONS[0])) & (bits(two) == _pattern(two, POISONS[1]))
            if bool(unwritten.any()):
                position = tuple(int(i) for i in unwritten.nonzero()[0])
                count = int(unwritten.sum())
                message = f"{count} of {one.numel()} elements of output {index} were never written, the first at {position}."
                raise self.refused(Reason.NOT_WRITTEN, message, index)
        if not inputs.same_as(saved):
            raise self.refused(Reason.WROTE_INPUT, "an input, or the memory around it, was changed by the call.")
        return first, second

    def once(self, inputs: InputSet, placement: Placement, poison: int) -> Results:
        """One run into memory of its own."""
        layouts = self._task.key.outputs
        regions = [None if t is None else allocate(t, placement, OUTPUT_GUARD, self._generator) for t in layouts]
        for region in regions:
            if region is not None:
                region.poison(poison)
        self._notify(f"family {self._family.value}, seed {self._seed}", call_limit_s(self._task))
        with _threads(self._threads):
            perturb_heap(poison)
            self._code.run_into(inputs.tensors, tuple(None if r is None else r.tensor for r in regions))
            perturb_heap(0)
        self._notify("checking memory", _OUR_OWN_WORK_S)
        return tuple(self._checked(index, region, poison) for index, region in enumerate(regions))

    def _checked(self, index: int, region: Region | None, poison: int) -> torch.Tensor | None:
        if region is None:
            return None
        if not region.guards_intact():
            raise self.refused(Reason.WROTE_OUTSIDE, f"memory next to output {index} was written.", index)
        if is_dense(region.tensor):
            return region.tensor
        result = region.tensor.clone()
        if not region.gaps_hold(poison):
            raise self.refused(Reason.WROTE_OUTSIDE, f"memory between the rows of output {index} was written.", index)
        return result


def _pattern(tensor: torch.Tensor, byte: int) -> int:
    return int.from_bytes(bytes([byte]) * tensor.element_size(), "little", signed=True)


def _all_same(left: Results, right: Results) -> bool:
    return all(a is None or b is None or same_bits(a, b) for a, b in zip(left, right, strict=True))


def _require_stock_bits(runner: PoisonedRuns, results: list[Results], stock: Tensors, deterministic: bool) -> None:
    if not deterministic:
        raise runner.refused(Reason.NOT_DETERMINISTIC, "class exact needs bitwise equal results from run to run.")
    for index, (ours, theirs) in enumerate(zip(results[0], stock, strict=True)):
        if ours is None or theirs is None:
            continue
        different = (bits(ours) != bits(theirs)) & ~(ours.isnan() & theirs.isnan())
        if bool(different.any()):
            position = tuple(int(i) for i in different.nonzero()[0])
            place = Place(position, repr(float(ours[position])), repr(float(theirs[position])))
            message = f"{int(different.sum())} of {ours.numel()} elements differ from stock, class exact needs every bit."
            raise runner.refused(Reason.WRONG_VALUE, message, index, place)


def _probe(task: Task, family: Family, inputs: InputSet, stock: Results) -> dict[str, tuple[Tally, ...]]:
    axis = row_axis(task.spec, task.key)
    largest = max(t.numel() for t in (*inputs.tensors, *stock) if t is not None)
    length = max(1, min(axis.size, vacuity.PROBE_ELEMENTS * axis.size // largest))
    tensors, part = axis.cut(inputs.tensors, 0, length), axis.cut_outputs(stock, 0, length)
    made = vacuity.probes(task, tensors, part)
    scores = evaluate(task, family, tensors, list(made.values()), part)
    return {name: tuple(score.tallies[i] for score in scores) for i, name in enumerate(made)}


def check_state(task: Task, code: CandidateCode, seed: int, notify: Notify, *, deterministic: bool = True) -> dict[str, str]:
    """Repeats, other thread counts and concurrent callers; and the layout of results that the candidate's loader allocates.

    Returns check name to what passed.

    Raises:
        RefusedError: a result changed, or has another layout than stock's.
    """
    generator = torch.Generator().manual_seed(seed)
    sets = [make_inputs(task.spec, task.key, Family.NORMAL, generator) for _ in range(2)]
    runner = PoisonedRuns(task, code, Family.NORMAL, seed, generator, notify, torch.get_num_threads())
    limit = call_limit_s(task)
    notify("state", 4 * limit)
    wanted = [code.run(inputs.tensors) for inputs in sets]
    check_layout(task, wanted[0], sets[0], runner)
    if not deterministic:
        return {
            "layout": "passed: sizes, strides and dtypes equal",
            "repeats": "not guaranteed: results differ from run to run",
        }
    wanted = [tuple(None if t is None else t.clone() for t in results) for results in wanted]
    for inputs, results in zip(sets, wanted, strict=True):
        if not _all_same(runner.once(inputs, "heap", POISONS[1]), results):
            raise runner.refused(Reason.NOT_DETERMINISTIC, "two calls on the same inputs differ.")
    repeats = 24 if task.spec.bytes_moved(task.key) < 64 << 20 else 3
    notify("state", repeats * limit)
    for turn in range(repeats):
        if not _all_same(code.run(sets[turn % 2].tensors), wanted[turn % 2]):
            raise runner.refused(Reason.STALE_RESULT, f"call {turn + 1} of a row of calls differs from the first ones.")
    checks = {
        "repeats": f"passed: {repeats} alternating calls bitwise equal",
        "layout": "passed: sizes, strides and dtypes equal",
    }
    checks["threads"] = _other_thread_counts(task, code, sets[0], wanted[0], runner, notify)
    checks["concurrent callers"] = _concurrently(task, code, sets, wanted, runner, notify)
    return checks


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


def _other_thread_counts(
    task: Task, code: CandidateCode, inputs: InputSet, wanted: Results, runner: PoisonedRuns, notify: Notify
) -> str:
    """A record is right at any thread count, and fast at one: other cuts of the range must give right results."""
    threads = torch.get_num_threads()
    stock = task.spec.stock(inputs.tensors, task.key.scalars)
    equal = True
    for other in (1, threads + 1):
        torch.set_num_threads(other)
        notify(f"{other} threads", 4 * call_limit_s(task))
        results = code.run(inputs.tensors)
        torch.set_num_threads(threads)
        notify("reference", _OUR_OWN_WORK_S)
        if _all_same(results, wanted):
            continue
        equal = False
        for index, score in enumerate(evaluate(task, Family.NORMAL, inputs.tensors, [results, wanted], stock)):
            ours, before = score.tallies
            if ours.pool.largest > 4 * max(before.pool.largest, 2.0**-22, score.ulp.largest) or ours.nonfinite is not None:
                raise runner.refused(Reason.NOT_DETERMINISTIC, f"wrong with {other} threads.", index, ours.worst)
    return f"passed: 1 and {threads + 1} threads {'bitwise equal' if equal else 'right, other bits'}"


def _concurrently(
    task: Task, code: CandidateCode, sets: list[InputSet], wanted: list[Results], runner: PoisonedRuns, notify: Notify
) -> str:
    if task.spec.bytes_moved(task.key) > 64 << 20:
        return "not run: 64 MiB and more a call"

    def caller(which: int) -> bool:
        return all(_all_same(code.run(sets[which].tensors), wanted[which]) for _ in range(8))

    notify("concurrent callers", 16 * call_limit_s(task))
    with ThreadPoolExecutor(2) as pool:
        if not all(pool.map(caller, range(2))):
            raise runner.refused(Reason.STALE_RESULT, "two threads calling at once get other results than one alone.")
    return "passed: 2 callers, 8 calls each, bitwise equal"
