"""A candidate as a program meets it: the op, or the function, is called, and the router serves it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torch_autokern.judge.accuracy import Task
from torch_autokern.runtime.extension import extension
from torch_autokern.runtime.kernel import LoadedKernel
from torch_autokern.runtime.table import CLASSES, REGIMES


class ServedKernel:
    """Fills the router's table with one kernel. The router is there inside `scope` only, so the other side is bare stock."""

    def __init__(self, task: Task, kernel: LoadedKernel) -> None:
        self._class = CLASSES.index("stock")
        self._native = extension()
        place = kernel.native_device if task.key.device_type == "cuda" else torch.get_num_threads()
        words = task.spec.encode(task.key, place)
        slots = [(regime, self._class, 0, kernel.native) for regime in range(len(REGIMES))]
        self._native.set_table([(words, slots)])

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Serve every call of the process; a miss raises."""
        self._native.install()
        self._native.set_process_policy(True, self._class, True)
        try:
            yield
        finally:
            self._native.set_process_policy(False, 0, False)
            self._native.uninstall()
