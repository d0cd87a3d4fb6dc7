"""Is a candidate right: one trial of one family, with the checks of memory. Runs inside the runner.

Order matters: the candidate runs on poisoned outputs *before* any reference for its inputs exists, and once more after it, at
new addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec
import torch

from torch_autokern.judge import vacuity
from torch_autokern.judge.accuracy import OutputReport, Tally, Task, evaluate, evaluate_with_envelope, limits_for
from torch_autokern.judge.device import device_of, finish, generator_on
from torch_autokern.judge.families import Family
from torch_autokern.judge.float_state import float_state
from torch_autokern.judge.inputs import InputSet, empty_inputs, make_inputs
from torch_autokern.judge.memory import (
    OUTPUT_GUARD,
    POISONS,
    WORKSPACE_POISON,
    Placement,
    Region,
    allocate,
    bits,
    first_place,
    is_dense,
    perturb_heap,
    same_bits,
)
from torch_autokern.judge.outcome import Place, Reason, Refusal, RefusedError
from torch_autokern.judge.remembered import Results, same_results
from torch_autokern.judge.rows import row_axis
from torch_autokern.judge.workspaces import layout_of
from torch_autokern.runtime.plan import Workspace

Tensors = Sequence[torch.Tensor | None]
Notify = Callable[[str, float], None]
_OWN_WORK = (120.0, 4e6)
_SMALL_ELEMENTS = 1 << 20
_SLOWEST = {"cpu": (50e6, 1e8), "cuda": (1e9, 1e10)}  # bytes and FLOPs a second below which a call counts as hung


class CandidateCode(Protocol):
    """A loaded candidate: `torch_autokern.judge.workspaces.LoadedCandidate`, or a stand-in in tests."""

    workspaces: tuple[Workspace, ...]

    def run(self, tensors: Tensors) -> Results:
        """Allocate the results and run."""

    def run_into(self, tensors: Tensors, outputs: Tensors) -> None:
        """Write the results into given tensors, the first of them; workspaces follow, as tensors of bytes."""


class FamilyReport(msgspec.Struct, forbid_unknown_fields=True, tag="family"):
    """What one trial showed; the parent pools trials and applies the limits. `probes` maps a vacuity probe to its tallies."""

    family: str
    seed: int
    outputs: tuple[OutputReport | None, ...]
    deterministic: bool
    probes: dict[str, tuple[Tally, ...]] = {}


def call_limit_s(task: Task) -> float:
    """How long one call may take before it counts as hung: 5 s, plus 50 MB/s and 0.1 GFLOP/s, or 1 GB/s and 10 GFLOP/s on a
    GPU."""
    bytes_a_second, flops_a_second = _SLOWEST[task.key.device_type]
    return 5.0 + task.spec.bytes_moved(task.key) / bytes_a_second + task.spec.flops(task.key) / flops_a_second


def own_work_s(task: Task) -> float:
    """How long the judge's own work between two calls may take: 120 s, and 4 MB/s. Gigabytes are compared with a truth in
    float64 then; a limit that does not grow with them calls an honest kernel hung on a busy machine."""
    seconds, bytes_a_second = _OWN_WORK
    return seconds + task.spec.bytes_moved(task.key) / bytes_a_second


def check_family(
    task: Task, code: CandidateCode, family: Family, seed: int, placement: Placement, notify: Notify, *,
    with_probes: bool = False, sampled: bool = False,
) -> FamilyReport:  # fmt: skip
    """Judge one trial. `sampled`: compare a random run of rows of about `SAMPLE_ELEMENTS` elements with the truth; what is
    checked without a truth is checked on every element all the same.

    Raises:
        RefusedError: a rule without a measure was broken (layout, memory, determinism for class `exact`).
    """
    threads = torch.get_num_threads()
    with _threads(1 if _elements(task) < _SMALL_ELEMENTS else threads):
        return _check_family(task, code, family, seed, placement, notify, with_probes, sampled, threads)


def _check_family(
    task: Task, code: CandidateCode, family: Family, seed: int, placement: Placement, notify: Notify, with_probes: bool,
    sampled: bool, threads: int,
) -> FamilyReport:  # fmt: skip
    generator = generator_on(device_of(task.key), seed)
    inputs = make_inputs(task.spec, task.key, family, generator, placement)
    runner = PoisonedRuns(task, code, family, seed, generator, notify, threads)
    moved = empty_inputs(task.key, "heap", generator)
    moved.copy_from(inputs)
    # Equal results are dropped at once: with 4 GB tensors there is room for five. On a GPU the first set of inputs goes before
    # the third call: where results differ, they are three beside stock's.
    results = runner.twice(inputs, moved, placement)
    first = results[0]
    notify("reference", own_work_s(task))
    with _threads(threads):
        stock = task.spec.stock(inputs.tensors, task.key.scalars)
    seen = moved.fingerprints() if task.key.device_type == "cuda" else None
    if seen is not None:
        inputs = moved  # the same bits: `twice` has compared them
    third = runner.once(moved, "heap", POISONS[0])
    if seen is not None and moved.fingerprints() != seen:
        raise runner.refused(Reason.WROTE_INPUT, "an input, or the memory around it, was changed by a later call.")
    del moved
    notify("reference", own_work_s(task))
    third_differs = not same_results(third, first)
    results += [third] if third_differs else []
    del third
    deterministic = len(results) == 1
    if task.accuracy.kind == "exact":
        _require_stock_bits(runner, results, stock, deterministic)
    scores, pools = evaluate_with_envelope(task, family, inputs.tensors, results, stock, generator, sampled=sampled)
    reports: list[OutputReport | None] = []
    for index, score in enumerate(scores):
        if stock[index] is None:
            reports.append(None)
            continue
        ours = score.tallies
        elements = stock[index].numel()
        limit = limits_for(task, index, family, elements, pools[index], score.ulp).largest
        if third_differs and ours[0].pool.largest <= limit < ours[-1].pool.largest:
            raise runner.refused(Reason.STALE_RESULT, _STALE, index, ours[-1].worst)
        worst = max(ours, key=lambda t: (t.nonfinite is not None or t.nonzero is not None, t.pool.largest))
        report = OutputReport(elements, worst, tuple(pools[index]), score.ulp)
        if worst.pool.largest > limit:
            where = evaluate(task, family, inputs.tensors, [results[ours.index(worst)]], stock, 1, limit)[index].tallies[0]
            report.beyond, report.first = where.beyond, where.first
        reports.append(report)
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
        self.seed = seed
        self._generator = generator
        self._notify = notify
        self._threads = threads
        self._float_state = float_state()

    def refused(self, reason: Reason, message: str, output: int = 0, place: Place | None = None) -> RefusedError:
        """The refusal with this trial's family and seed."""
        index = None if place is None else place.index
        where = "" if index is None else f" Output {output}, position {index}: got {place.got}, expected {place.expected}."  # type: ignore[union-attr]
        return RefusedError(
            Refusal(reason, f"family {self._family.value}, seed {self.seed}: {message}{where}", self._family.value, self.seed,
                    output, index)
        )  # fmt: skip

    def twice(self, inputs: InputSet, saved: InputSet, placement: Placement) -> list[Results]:
        """Two runs over two poisons, their results (one where both are equal); refuses elements that hold the poison both
        times, and inputs that are not `saved` any more."""
        first = self.once(inputs, placement, POISONS[0])
        second = self.once(inputs, "heap", POISONS[1])
        for index, (one, two) in enumerate(zip(first, second, strict=True)):
            if one is None or two is None or same_bits(one, two):
                continue
            unwritten = (bits(one) == _pattern(one, POISONS[0])) & (bits(two) == _pattern(two, POISONS[1]))
            if bool(unwritten.any()):
                position = first_place(unwritten)
                count = int(unwritten.sum())
                message = f"{count} of {one.numel()} elements of output {index} were never written, the first at {position}."
                raise self.refused(Reason.NOT_WRITTEN, message, index)
        if not inputs.same_as(saved):
            raise self.refused(Reason.WROTE_INPUT, "an input, or the memory around it, was changed by the call.")
        return [first] if same_results(first, second) else [first, second]

    def regions(self, placement: Placement) -> list[Region | None]:
        """Memory for the outputs, then for the workspaces."""
        layouts = (*self._task.key.outputs, *(layout_of(workspace) for workspace in self._code.workspaces))
        return [None if t is None else allocate(t, placement, OUTPUT_GUARD, self._generator) for t in layouts]

    def once(self, inputs: InputSet, placement: Placement, poison: int, regions: list[Region | None] | None = None) -> Results:
        """One run into poisoned memory of its own, or into `regions`; workspaces that are declared zeroed are zeroed."""
        regions = regions or self.regions(placement)
        count = len(self._task.key.outputs)
        for index, region in enumerate(regions):
            if region is None:
                continue
            if index < count:
                region.poison(poison)
            else:
                region.poison(0 if self._code.workspaces[index - count].zeroed else poison ^ WORKSPACE_POISON)
        self._notify(f"family {self._family.value}, seed {self.seed}", call_limit_s(self._task))
        with _threads(self._threads):
            perturb_heap(poison)
            self._code.run_into(inputs.tensors, tuple(None if r is None else r.tensor for r in regions))
            finish(self._generator.device)
            perturb_heap(0)
            after = float_state()  # before our own arithmetic depends on it
        if after != self._float_state:
            message = "rounding or denormals of the calling thread were changed, and with them what the caller computes next."
            raise self.refused(Reason.CHANGED_THREAD, message)
        self._notify("checking memory", own_work_s(self._task))
        for workspace, region in zip(self._code.workspaces, regions[count:], strict=True):
            if region is not None and not region.guards_intact():
                raise self.refused(Reason.WROTE_OUTSIDE, f"memory next to workspace {workspace.name!r} was written.")
        return tuple(self._checked(index, region, poison) for index, region in enumerate(regions[:count]))

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


def _require_stock_bits(runner: PoisonedRuns, results: list[Results], stock: Tensors, deterministic: bool) -> None:
    if not deterministic:
        raise runner.refused(Reason.NOT_DETERMINISTIC, "class exact needs bitwise equal results from run to run.")
    for index, (ours, theirs) in enumerate(zip(results[0], stock, strict=True)):
        if ours is None or theirs is None:
            continue
        different = (bits(ours) != bits(theirs)) & ~(ours.isnan() & theirs.isnan())
        if bool(different.any()):
            position = first_place(different)
            place = Place(position, repr(float(ours[position])), repr(float(theirs[position])))
            message = f"{int(different.sum())} of {ours.numel()} elements differ from stock, class exact needs every bit."
            raise runner.refused(Reason.WRONG_VALUE, message, index, place)


def _probe(task: Task, family: Family, inputs: InputSet, stock: Results) -> dict[str, tuple[Tally, ...]]:
    axis = row_axis(task.spec, task.key)
    largest = max(t.numel() for t in (*inputs.tensors, *stock) if t is not None)
    length = max(1, min(axis.size, vacuity.PROBE_ELEMENTS * axis.size // largest))
    tensors, part, task = axis.cut(inputs.tensors, 0, length), axis.cut_outputs(stock, 0, length), task.on_rows(length)
    made = vacuity.probes(task, tensors, part)
    scores = evaluate(task, family, tensors, list(made.values()), part)
    return {name: tuple(score.tallies[i] for score in scores) for i, name in enumerate(made)}
