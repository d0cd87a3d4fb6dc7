"""Is it faster: paired, interleaved times of two callables on the same contents. Runs inside the runner.

Both sides see the same values at changing addresses. Arguments live in a ring of slots; a slot is refilled with other values
after its use, outside the bracket, and comes up again only after the whole ring has passed. Every output of every timed call
is compared with the verified one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from torch_autokern.judge.accuracy import Task, evaluate, limits_for
from torch_autokern.judge.families import Family
from torch_autokern.judge.inputs import InputSet, empty_inputs, layout_bytes, make_inputs
from torch_autokern.judge.memory import same_bits
from torch_autokern.judge.outcome import Reason, Refusal, RefusedError
from torch_autokern.judge.verify import CandidateCode, Notify, call_limit_s

Tensors = Sequence[torch.Tensor | None]
Results = tuple[torch.Tensor | None, ...]
Call = Callable[[], object]
SAMPLE_US = 100.0
_MAX_REPEAT = 48
_MAX_SLOTS = 512
_HUGE_SET_BYTES = 64 << 20
_DEFAULT_CACHE_BYTES = 32 << 20


class TimingRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long to time: stop after `budget_s` once `min_blocks` are done, or at `max_blocks`."""

    seed: int
    budget_s: float
    min_blocks: int
    max_blocks: int


class TimingReport(msgspec.Struct, forbid_unknown_fields=True, tag="timing"):
    """Times of single calls in us, pair by pair, two pairs a block. `copy_us`: copying the call's bytes once, the floor that
    no kernel can be under; 0 where the call is too small to say. `checked` outputs were equal to verified ones."""

    stock_us: tuple[float, ...]
    candidate_us: tuple[float, ...]
    repeat: int
    slots: int
    copy_us: float
    checked: int


@dataclass(frozen=True)
class Side:
    """One of the two callables. `prepare` binds arguments outside the bracket; what it returns is timed."""

    name: str
    prepare: Callable[[Tensors], Call]


def stock_side(task: Task) -> Side:
    """The ATen op with its arguments laid out beforehand."""
    overload = getattr(torch.ops.aten, task.spec.name).default

    def prepare(tensors: Tensors) -> Call:
        positional, keyword = task.spec.call_args(tensors, task.key.scalars)
        if keyword:
            return lambda: overload(*positional, **keyword)
        return lambda: overload(*positional)

    return Side("stock", prepare)


def candidate_side(code: CandidateCode) -> Side:
    """The loaded candidate, its results allocated as a hit would."""

    def prepare(tensors: Tensors) -> Call:
        arguments, run = tuple(tensors), code.run
        return lambda: run(arguments)

    return Side("candidate", prepare)


def last_level_cache_bytes() -> int:
    """Size of the largest cache, 32 MiB where the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text[:-1].isdigit() and text[-1] in "KM":
            sizes.append(int(text[:-1]) << (10 if text[-1] == "K" else 20))
    return max(sizes, default=_DEFAULT_CACHE_BYTES)


class Ring:
    """Slots in groups. Group `turn` is used by one bracket; what it holds depends on `turn` alone, so both sides of a pair
    (turns 2i and 2i + 1) get the same values in the same order, at different addresses."""

    def __init__(self, task: Task, contents: list[InputSet], group: int, groups: int, generator: torch.Generator) -> None:
        self._contents = contents
        self._group = group
        self._groups = groups
        count = group * groups
        self.slots = [empty_inputs(task.key, "aligned", generator) for _ in range(count)]
        for turn in range(groups):
            self._fill(turn)

    def content_of(self, turn: int, position: int) -> int:
        """Which content slot `position` of group `turn` holds."""
        return (position + turn // 2) % len(self._contents)

    def indices(self, turn: int) -> range:
        """Slots of group `turn`."""
        start = turn % self._groups * self._group
        return range(start, start + self._group)

    def retire(self, turn: int) -> None:
        """Refill a used group for its next use."""
        self._fill(turn + self._groups)

    def _fill(self, turn: int) -> None:
        for position, slot in enumerate(self.indices(turn)):
            self.slots[slot].copy_from(self._contents[self.content_of(turn, position)])


def measure(
    task: Task, stock: Side, candidate: Side, request: TimingRequest, notify: Notify, cache_bytes: int, *,
    deterministic: bool = True,
) -> TimingReport:  # fmt: skip
    """Time both sides in random ABBA blocks.

    Raises:
        RefusedError: a timed output of the candidate is not the verified one.
    """
    generator = torch.Generator().manual_seed(request.seed)
    set_bytes = sum(layout_bytes(t) for t in task.key.tensors if t is not None)
    huge = set_bytes > _HUGE_SET_BYTES
    contents = [make_inputs(task.spec, task.key, Family.NORMAL, generator, "aligned") for _ in range(2 if huge else 4)]
    limit = call_limit_s(task)
    notify("verified results", 8 * limit + 60)
    verified = [_verified(task, stock, candidate, inputs) for inputs in contents]
    repeat = _repeat(stock, candidate, contents[0])
    groups = _groups(set_bytes * repeat, repeat, cache_bytes)
    ring = Ring(task, contents, repeat, groups, generator)
    watch = _Watch(task, stock, candidate, ring, verified, deterministic)
    notify("timing", 60 + 40 * repeat * limit)
    samples: tuple[list[float], list[float]] = ([], [])
    turn = watch.block(0, True, ([], []))  # warm both sides up
    started = time.perf_counter()
    for block in range(request.max_blocks):
        if block >= request.min_blocks and time.perf_counter() - started > request.budget_s:
            break
        notify("timing", 60 + 8 * repeat * limit)
        turn = watch.block(turn, bool(torch.randint(0, 2, (), generator=generator)), samples)
    copied = (set_bytes + sum(layout_bytes(t) for t in task.key.outputs if t is not None)) // 2
    return TimingReport(tuple(samples[0]), tuple(samples[1]), repeat, len(ring.slots), copy_us(copied), watch.checked)


class _Watch:
    """Times brackets and compares their outputs."""

    def __init__(
        self, task: Task, stock: Side, candidate: Side, ring: Ring, verified: list[tuple[Results, Results]], deterministic: bool
    ) -> None:
        self._task = task
        self._sides = (stock, candidate)
        self._ring = ring
        self._verified = verified
        self._deterministic = deterministic
        self._ready = tuple([side.prepare(slot.tensors) for slot in ring.slots] for side in self._sides)
        self.checked = 0

    def block(self, turn: int, stock_first: bool, samples: tuple[list[float], list[float]]) -> int:
        """One ABBA block, two pairs; returns the next turn."""
        order = (0, 1, 1, 0) if stock_first else (1, 0, 0, 1)
        for which in order:
            samples[which].append(self._bracket(which, turn))
            turn += 1
        return turn

    def _bracket(self, which: int, turn: int) -> float:
        ready = [self._ready[which][slot] for slot in self._ring.indices(turn)]
        clock = time.perf_counter_ns
        gc.disable()
        begin = clock()
        outputs = [call() for call in ready]
        end = clock()
        gc.enable()
        for position, output in enumerate(outputs):
            self._compare(which, turn, position, _as_results(output))
        del outputs
        self._ring.retire(turn)
        return (end - begin) / 1000 / len(ready)

    def _compare(self, which: int, turn: int, position: int, output: Results) -> None:
        wanted = self._verified[self._ring.content_of(turn, position)][which]
        same = all(a is None or b is None or same_bits(a, b) for a, b in zip(output, wanted, strict=True))
        if which == 0:  # compared all the same, so that both sides leave the caches alike
            return
        if not same and self._deterministic:
            message = (
                f"timed call {self.checked + 1} returned something else than the verified result for the same values: it "
                "depends on earlier calls or on addresses. Compute everything from the arguments of the call."
            )
            raise RefusedError(Refusal(Reason.STALE_RESULT, message, Family.NORMAL.value))
        if not same:
            slot = self._ring.slots[self._ring.indices(turn)[position]]
            _require_right(self._task, slot.tensors, output, self._task.spec.stock(slot.tensors, self._task.key.scalars))
        self.checked += 1


def _verified(task: Task, stock: Side, candidate: Side, inputs: InputSet) -> tuple[Results, Results]:
    """Results of both sides on one content, the candidate's checked against the truth."""
    ours = _as_results(candidate.prepare(inputs.tensors)())
    theirs = _as_results(stock.prepare(inputs.tensors)())
    _require_right(task, inputs.tensors, ours, theirs)
    return theirs, tuple(None if t is None else t.clone() for t in ours)


def _require_right(task: Task, tensors: Tensors, ours: Results, stock: Results) -> None:
    """Twice the limits of a single trial: the families have judged finely, this catches a result that is simply wrong."""
    for index, score in enumerate(evaluate(task, Family.NORMAL, tensors, [ours, stock], stock)):
        result = stock[index]
        if result is None:
            continue
        mine, theirs = score.tallies
        limit = limits_for(task, index, Family.NORMAL, result.numel(), [theirs.pool], score.ulp)
        if mine.nonfinite is None and mine.nonzero is None and mine.pool.largest <= 2 * limit.largest:
            continue
        place = mine.nonfinite or mine.nonzero or mine.worst
        message = f"output {index} of a timed call is wrong: got {place.got}, expected {place.expected}." if place else "wrong"
        raise RefusedError(
            Refusal(Reason.WRONG_VALUE, message, Family.NORMAL.value, None, index, place.index if place else None,
                    error=mine.pool.largest, limit=limit.largest)
        )  # fmt: skip


def _repeat(stock: Side, candidate: Side, inputs: InputSet) -> int:
    """Calls per bracket, so that a bracket of the faster side takes `SAMPLE_US` or more."""
    quickest = min(_once_us(side, inputs) for side in (stock, candidate))
    return max(1, min(_MAX_REPEAT, int(SAMPLE_US / max(quickest, 0.5)) + 1))


def _once_us(side: Side, inputs: InputSet) -> float:
    ready = side.prepare(inputs.tensors)
    times = []
    for _ in range(3):
        begin = time.perf_counter_ns()
        ready()
        times.append((time.perf_counter_ns() - begin) / 1000)
    return min(times)


def _groups(group_bytes: int, repeat: int, cache_bytes: int) -> int:
    """Groups of slots: the ring exceeds twice the last-level cache where a call's arguments are a fair part of it."""
    wanted = -(-2 * cache_bytes // max(group_bytes, 1)) if group_bytes * 16 > cache_bytes else 4
    return max(2, min(wanted, _MAX_SLOTS // repeat))


def _as_results(output: object) -> Results:
    return tuple(output) if isinstance(output, (tuple, list)) else (output,)  # type: ignore[return-value]


def copy_us(size_bytes: int) -> float:
    """Least time to copy `size_bytes` between resident pages; 0 below 64 KiB, where calls cost more than bytes.

    Measured with all threads and with one. Where all are slower than one, something else has a core, and the best that they
    could do is one thread's time divided by their number.
    """
    if size_bytes < 64 << 10:
        return 0.0
    source = torch.zeros(size_bytes, dtype=torch.uint8)
    target = torch.zeros(size_bytes, dtype=torch.uint8)
    threads = torch.get_num_threads()
    together = _least_copy_us(source, target)
    torch.set_num_threads(1)
    alone = _least_copy_us(source, target)
    torch.set_num_threads(threads)
    return together if together <= alone else alone / threads


def _least_copy_us(source: torch.Tensor, target: torch.Tensor) -> float:
    times = []
    for _ in range(5 if source.numel() > 64 << 20 else 20):
        begin = time.perf_counter_ns()
        target.copy_(source)
        times.append((time.perf_counter_ns() - begin) / 1000)
    return min(times)
