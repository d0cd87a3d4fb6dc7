"""A GPU that is not there: keys say cuda, tensors live on the CPU, and streams, events and graphs are objects that do nothing
but keep the time. For the control flow of the judge; what a device does is tested where there is one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from torch_autokern.judge import clock, measure, properties, runner, state, streams, verify
from torch_autokern.store.key import KernelKey

CPU = torch.device("cpu")


class Event:
    """Marks a moment of the host's clock; `factor` lets it lie."""

    factor = 1.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1000 * self.factor


class Stream:
    def __init__(self, device: object = None) -> None:
        self.waited = 0

    def wait_stream(self, other: Stream) -> None:
        self.waited += 1


class Graph:
    """Replays by doing the work again, into the tensors of the capture."""

    def __init__(self, work: Callable[[], list[object]]) -> None:
        self._work = work
        self.kept = work()
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for old, new in zip(self.kept, self._work(), strict=True):
            for mine, fresh in zip(_tensors(old), _tensors(new), strict=True):
                mine.copy_(fresh)


def _tensors(output: object) -> list[torch.Tensor]:
    parts = output if isinstance(output, (tuple, list)) else (output,)
    return [part for part in parts if isinstance(part, torch.Tensor)]


@contextlib.contextmanager
def _in_stream(stream: Stream) -> Iterator[None]:
    yield


def capture(work: Callable[[], list[object]], device: object, pool: object = None) -> tuple[Graph, list[object]]:
    graph = Graph(work)
    return graph, graph.kept


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-ins in place."""
    for module in (measure, properties, runner, state, verify):
        monkeypatch.setattr(module, "device_of", lambda key: CPU)
    for name, value in {"Event": Event, "Stream": Stream, "stream": _in_stream, "_sleep": lambda cycles: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(clock, "cache_bytes", lambda device_type: 1 << 16)
    clocks: dict[str, Any] = {"eager": clock.QueueClock, "graph": clock.GraphClock, "cold": clock.ColdClock}
    monkeypatch.setattr(measure, "clock_for", lambda figure, device: clocks[figure](device))
    for module in (clock, streams):
        monkeypatch.setattr(module, "capture", capture)


def on_gpu(key: KernelKey) -> KernelKey:
    """The key as a GPU's router would write it."""

    def aligned(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(None if t is None else msgspec.structs.replace(t, alignment_bytes=16) for t in tensors)

    return msgspec.structs.replace(key, device_type="cuda", tensors=aligned(key.tensors), outputs=aligned(key.outputs))
