"""Is it faster: paired, interleaved times of two callables on the same contents. Runs inside the runner.

Both sides see the same values at changing addresses. Arguments live in a ring of slots; a slot is refilled with other values
after its use, outside the bracket, and comes up again only after the whole ring has passed. On a CPU a short ring leaves
arguments in the caches, as in a program whose last op made them, and one of twice the last-level cache does not (cold). Every
output of every timed call is compared with the verified one. `clock.py` has the brackets.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import msgspec
import torch

from torch_autokern.judge.accuracy import Task, plainly_wrong
from torch_autokern.judge.clock import Call, Figure, clock_for
from torch_autokern.judge.device import DEVICE_MEMORY_BYTES, device_of, draw, finish, generator_on
from torch_autokern.judge.families import Family
from torch_autokern.judge.inputs import InputSet, empty_inputs, layout_bytes, make_inputs
from torch_autokern.judge.outcome import Reason, Refusal, RefusedError
from torch_autokern.judge.remembered import Remembered
from torch_autokern.judge.served import ServedKernel
from torch_autokern.judge.stock_code import StockCode
from torch_autokern.judge.verify import CandidateCode, Notify, call_limit_s
from torch_autokern.judge.workspaces import LoadedCandidate

Tensors = Sequence[torch.Tensor | None]
Results = tuple[torch.Tensor | None, ...]
_COPIED_AT_ONCE = 256 << 20
_WARM_GROUPS = 2


@dataclass(frozen=True)
class _Bounds:
    """A bracket is `sample_us` long or longer, of at most `repeat` calls; a ring has at most `slots`; sets above `huge_bytes`
    come in two contents instead of four; ring, contents and results fit `memory_bytes`."""

    sample_us: float
    repeat: int
    slots: int
    huge_bytes: int
    memory_bytes: float


# A GPU's bracket waits for the device twice, about 20 us: 3 ms of queued calls make that nothing.
_BOUNDS = {
    "cpu": _Bounds(100.0, 48, 512, 64 << 20, float("inf")),
    "cuda": _Bounds(3000.0, 64, 2048, 256 << 20, 20 << 30),
}


class TimingRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to time and how long: stop after `budget_s` once `min_blocks` are done, or at `max_blocks`."""

    seed: int
    budget_s: float
    min_blocks: int
    max_blocks: int
    figure: Figure = "eager"


class TimingReport(msgspec.Struct, forbid_unknown_fields=True, tag="timing"):
    """Times of single calls in us, pair by pair, two pairs a block. `copy_us`: copying the call's bytes once, the floor that
    no kernel can be under; 0 where the call is too small to say. `checked` outputs were equal to verified ones. `disagreed`
    brackets had clocks that contradict each other. Without samples, `skipped` says why."""

    stock_us: tuple[float, ...]
    candidate_us: tuple[float, ...]
    repeat: int
    slots: int
    copy_us: float
    checked: int
    figure: Figure = "eager"
    disagreed: int = 0
    skipped: str = ""


@dataclass(frozen=True)
class Side:
    """One of the two callables. `prepare` binds arguments outside the bracket; what it returns is timed, inside `scope`."""

    name: str
    prepare: Callable[[Tensors], Call]
    scope: Callable[[], AbstractContextManager[None]] = nullcontext


def stock_side(task: Task) -> Side:
    """The ATen op with its arguments laid out beforehand."""
    overload = getattr(torch.ops.aten, task.spec.name).default

    def prepare(tensors: Tensors) -> Call:
        positional, keyword = task.spec.call_args(tensors, task.key.scalars)
        if keyword:
            return lambda: overload(*positional, **keyword)
        return lambda: overload(*positional)

    return Side("stock", prepare)


def candidate_side(task: Task, code: CandidateCode) -> Side:
    """The loaded candidate. On a GPU the op itself, served by the router: a binding's microseconds would count there. Stock in
    a candidate's place is timed exactly as stock is."""
    if isinstance(code, StockCode):
        return Side("candidate", stock_side(task).prepare)
    if task.key.device_type == "cuda" and isinstance(code, LoadedCandidate):
        return Side("candidate", stock_side(task).prepare, ServedKernel(task, code.kernel).scope)

    def prepare(tensors: Tensors) -> Call:
        arguments, run = tuple(tensors), code.run
        return lambda: run(arguments)

    return Side("candidate", prepare)


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
    device, bounds = device_of(task.key), _BOUNDS[task.key.device_type]
    generator = generator_on(device, request.seed)
    set_bytes = sum(layout_bytes(t) for t in task.key.tensors if t is not None)
    result_bytes = sum(layout_bytes(t) for t in task.key.outputs if t is not None)
    count = 2 if set_bytes > bounds.huge_bytes else 4
    contents = [make_inputs(task.spec, task.key, Family.NORMAL, generator, "aligned") for _ in range(count)]
    limit = call_limit_s(task)
    notify("verified results", 8 * limit + 60)
    verified = [_verified(task, stock, candidate, inputs, request.seed) for inputs in contents]
    room = (bounds.memory_bytes - count * set_bytes) / (2 * set_bytes + result_bytes)
    if request.figure == "graph":  # both sides' captured results stay
        room = min(room, (DEVICE_MEMORY_BYTES - count * set_bytes) / (_WARM_GROUPS * (set_bytes + 2 * result_bytes)))
    repeat = _repeat(stock, candidate, contents[0], bounds, room)
    groups = _groups(set_bytes * repeat, repeat, cache_bytes, bounds)
    if device.type == "cpu" and request.figure == "cold" and set_bytes >= 2 * cache_bytes:
        return TimingReport((), (), repeat, 0, 0.0, 0, "cold", 0, "arguments do not fit the caches: cold when eager")
    if device.type == "cpu" and request.figure == "eager":
        groups = _WARM_GROUPS
    captured = 2 * groups * repeat * result_bytes + (count + groups * repeat) * set_bytes
    if request.figure == "graph" and captured > DEVICE_MEMORY_BYTES:
        why = f"needs {captured >> 30} GiB at once: as eager, device-bound"
        return TimingReport((), (), repeat, 0, 0.0, 0, "graph", 0, why)
    ring = Ring(task, contents, repeat, groups, generator)
    watch = _Watch(task, stock, candidate, ring, verified, deterministic, request)
    notify(f"timing, seed {request.seed}", 60 + 40 * repeat * limit)
    samples: tuple[list[float], list[float]] = ([], [])
    turn = watch.block(0, True, ([], []))  # warm both sides up
    started = time.perf_counter()
    for block in range(request.max_blocks):
        if block >= request.min_blocks and time.perf_counter() - started > request.budget_s:
            break
        notify(f"timing, seed {request.seed}", 60 + 8 * repeat * limit)
        turn = watch.block(turn, bool(draw(0, 2, generator)), samples)
    floor = copy_us((set_bytes + result_bytes) // 2, device)
    slots, times = len(ring.slots), (tuple(samples[0]), tuple(samples[1]))
    return TimingReport(*times, repeat, slots, floor, watch.checked, request.figure, watch.clock.disagreed)


class _Watch:
    """Times brackets and compares their outputs."""

    def __init__(
        self, task: Task, stock: Side, candidate: Side, ring: Ring, verified: list[tuple[Remembered, Remembered]],
        deterministic: bool, request: TimingRequest,
    ) -> None:  # fmt: skip
        self.clock = clock_for(request.figure, device_of(task.key))
        self._task = task
        self._sides = (stock, candidate)
        self._ring = ring
        self._verified = verified
        self._deterministic = deterministic
        self._seed = request.seed
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
        slots = self._ring.indices(turn)
        # A call of another group goes ahead of the bracket, so that none of its own contents are warm.
        before = self._ready[which][self._ring.indices(turn + 1)[-1]]
        with self._sides[which].scope():
            spent_us, outputs = self.clock.time([self._ready[which][slot] for slot in slots], (which, slots.start), before)
        results = [_as_results(output) for output in outputs]
        wanted = [self._verified[self._ring.content_of(turn, position)][which] for position in range(len(slots))]
        same = Remembered.same_all(list(zip(wanted, results, strict=True)))
        if which:  # stock's are compared all the same, so that both sides leave the caches alike
            for position, output in enumerate(results):
                self._judge(same[position], turn, position, output)
        del outputs, results
        self._ring.retire(turn)
        return spent_us

    def _judge(self, same: bool, turn: int, position: int, output: Results) -> None:
        if not same and self._deterministic:
            message = (
                f"timed call {self.checked + 1} returned something else than the verified result for the same values: it "
                "depends on earlier calls or on addresses. Compute everything from the arguments of the call."
            )
            raise RefusedError(Refusal(Reason.STALE_RESULT, message, Family.NORMAL.value, self._seed))
        if not same:
            slot = self._ring.slots[self._ring.indices(turn)[position]]
            _require_right(self._task, slot.tensors, output, self._seed)
        self.checked += 1


def _verified(task: Task, stock: Side, candidate: Side, inputs: InputSet, seed: int) -> tuple[Remembered, Remembered]:
    """Results of both sides on one content, the candidate's checked against the truth."""
    with candidate.scope():
        ours = _as_results(candidate.prepare(inputs.tensors)())
    theirs = _as_results(stock.prepare(inputs.tensors)())
    _require_right(task, inputs.tensors, ours, seed)
    return Remembered(theirs), Remembered(ours)


def _require_right(task: Task, tensors: Tensors, ours: Results, seed: int) -> None:
    found = plainly_wrong(task, Family.NORMAL, tensors, ours)
    if found is None:
        return
    index, mine, limit = found
    place = mine.nonfinite or mine.nonzero or mine.worst
    message = f"output {index} of a timed call is wrong: got {place.got}, expected {place.expected}." if place else "wrong"
    raise RefusedError(
        Refusal(Reason.WRONG_VALUE, message, Family.NORMAL.value, seed, index, place.index if place else None,
                error=mine.pool.largest, limit=limit.largest)
    )  # fmt: skip


def _repeat(stock: Side, candidate: Side, inputs: InputSet, bounds: _Bounds, room: float) -> int:
    """Calls per bracket, so that a bracket of the faster side is long enough to be timed; no more than `room`."""
    quickest = min(_once_us(side, inputs) for side in (stock, candidate))
    return max(1, min(bounds.repeat, int(bounds.sample_us / max(quickest, 0.5)) + 1, int(min(room, 1e9))))


def _once_us(side: Side, inputs: InputSet) -> float:
    ready = side.prepare(inputs.tensors)
    device = next(t.device for t in inputs.tensors if t is not None)
    times = []
    with side.scope():
        for _ in range(3):
            finish(device)
            begin = time.perf_counter_ns()
            ready()
            finish(device)
            times.append((time.perf_counter_ns() - begin) / 1000)
    return min(times)


def _groups(group_bytes: int, repeat: int, cache_bytes: int, bounds: _Bounds) -> int:
    """Groups of slots for a ring that exceeds twice the last-level cache, as far as the slots go."""
    return max(_WARM_GROUPS, min(-(-2 * cache_bytes // max(group_bytes, 1)), bounds.slots // repeat))


def _as_results(output: object) -> Results:
    return tuple(output) if isinstance(output, (tuple, list)) else (output,)  # type: ignore[return-value]


def copy_us(size_bytes: int, device: torch.device) -> float:
    """Least time to copy `size_bytes` at the memory level that they fit in; 0 below 64 KiB, where calls cost more than bytes.

    On a CPU between resident pages, with all threads and with one. Where all are slower than one, something else has a core,
    and the best that they could do is one thread's time divided by their number. Sizes that no cache holds go by the rate of
    a smaller copy that none holds either. A GPU is asked once a process for each size.
    """
    if size_bytes < 64 << 10:
        return 0.0
    if device.type == "cuda":
        size = min(size_bytes, _COPIED_AT_ONCE)
        return _device_copy_us(size) * size_bytes / size
    source, target = (torch.zeros(size_bytes, dtype=torch.uint8) for _ in range(2))
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


@functools.cache
def _device_copy_us(size_bytes: int) -> float:
    """Ten copies in a queue, so that their launches hide behind each other; the best of five such rows."""
    source, target = (torch.zeros(size_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    clock = clock_for("eager", source.device)
    copies: list[Call] = [functools.partial(target.copy_, source)] * 10
    return min(clock.time(copies, (0, 0), copies[0])[0] for _ in range(5))
