"""How one bracket of calls is timed. A clock gets the calls ready to run, and gives back microseconds a call and the results.

On a CPU: the host's clock around a loop. On a GPU three figures. *Eager*: a queue-bound loop, dispatch included, device events
inside and the host's clock outside; they must agree. *Graph*: the same calls captured once and replayed. *Cold*: events around
each call alone, the L2 overwritten before it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch

from torch_autokern.judge.device import cache_bytes, finish, forget_persisting_lines

Call = Callable[[], object]
Tag = tuple[int, int]
Figure = Literal["eager", "graph", "cold"]
# The host sees what the device does, and beside it the first launch and the last wake-up.
_HOST_SLACK_US = 200.0
_HOST_FACTOR = 1.25


class Clock(Protocol):
    """`disagreed` counts brackets whose two clocks contradict each other."""

    disagreed: int

    def time(self, ready: Sequence[Call], tag: Tag, before: Call) -> tuple[float, list[object]]:
        """Run every call once. `tag` names side and group: equal tags are the same calls on the same memory. `before` is a call
        outside the bracket: what has just been switched on has cold caches, a call in the middle of a program has not."""


class HostClock:
    """A CPU's: nothing of the machine runs between begin and end but the calls."""

    disagreed = 0

    def time(self, ready: Sequence[Call], tag: Tag, before: Call) -> tuple[float, list[object]]:
        """See `Clock`. Without the call before it: the CPU side has nothing to switch on."""
        clock = time.perf_counter_ns
        gc.disable()
        begin = clock()
        outputs = [call() for call in ready]
        end = clock()
        gc.enable()
        return (end - begin) / 1000 / len(ready), outputs


class QueueClock:
    """Eager calls on a GPU, as a program makes them: enqueued one after another."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.disagreed = 0

    def time(self, ready: Sequence[Call], tag: Tag, before: Call) -> tuple[float, list[object]]:
        """See `Clock`."""
        before()
        return self._between(lambda: [call() for call in ready], len(ready))

    def _between(self, work: Callable[[], list[object]], count: int) -> tuple[float, list[object]]:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        forget_persisting_lines(self.device)
        finish(self.device)
        gc.disable()
        begin = time.perf_counter_ns()
        first.record()
        outputs = work()
        last.record()
        finish(self.device)
        end = time.perf_counter_ns()
        gc.enable()
        device_us, host_us = first.elapsed_time(last) * 1000, (end - begin) / 1000
        self.disagreed += not clocks_agree(device_us, host_us)
        return device_us / count, outputs


class GraphClock(QueueClock):
    """A captured graph of the calls, replayed. Graphs and the memory of their results live as long as the clock."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._graphs: dict[Tag, tuple[torch.cuda.CUDAGraph, list[object]]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def time(self, ready: Sequence[Call], tag: Tag, before: Call) -> tuple[float, list[object]]:
        """See `Clock`. Results are poisoned before the replay: what an earlier one left behind would pass for its own."""
        if tag not in self._graphs:
            before()
            graph, kept = capture(lambda: [call() for call in ready], self.device, self._pool)
            graph.replay()
            self._graphs[tag] = graph, kept
        graph, outputs = self._graphs[tag]
        for output in outputs:
            for result in output if isinstance(output, (tuple, list)) else (output,):
                if isinstance(result, torch.Tensor):
                    result.fill_(torch.nan)

        def replay() -> list[object]:
            graph.replay()
            return outputs

        return self._between(replay, len(ready))


class ColdClock(QueueClock):
    """Each call alone, after the whole L2 was overwritten. The device is still at that when the call is enqueued, so no launch
    is waited for inside the events."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._flush = torch.empty(2 * cache_bytes("cuda"), dtype=torch.uint8, device=device)

    def time(self, ready: Sequence[Call], tag: Tag, before: Call) -> tuple[float, list[object]]:
        """See `Clock`."""
        before()
        forget_persisting_lines(self.device)
        finish(self.device)
        pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        outputs: list[object] = []
        gc.disable()
        for call in ready:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._flush.zero_()
            first.record()
            outputs.append(call())
            last.record()
            pairs.append((first, last))
        gc.enable()
        finish(self.device)
        return sum(first.elapsed_time(last) for first, last in pairs) * 1000 / len(ready), outputs


def clocks_agree(device_us: float, host_us: float) -> bool:
    """Whether the host's clock around a bracket says what the device's events inside it say. Less than the events is a clock
    that jumped or work that was timed elsewhere, much more is work that the events did not see."""
    return device_us <= host_us * 1.02 + 5 and host_us <= device_us * _HOST_FACTOR + _HOST_SLACK_US


def capture(
    work: Callable[[], list[object]], device: torch.device, pool: object = None
) -> tuple[torch.cuda.CUDAGraph, list[object]]:
    """Record what `work` launches, on a stream of its own. `torch.cuda.graph` would also collect garbage and empty the
    allocator's cache, 50 ms and more each time.

    Raises:
        RuntimeError: something in it cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    finish(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        graph.capture_begin() if pool is None else graph.capture_begin(pool=pool)  # type: ignore[arg-type]
        try:
            outputs = work()
        finally:
            graph.capture_end()
    current.wait_stream(stream)
    return graph, outputs


def clock_for(figure: Figure, device: torch.device) -> Clock:
    """The clock of a figure; on a CPU there is one."""
    if device.type == "cpu":
        return HostClock()
    return {"eager": QueueClock, "graph": GraphClock, "cold": ColdClock}[figure](device)
