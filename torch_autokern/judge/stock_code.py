"""Stock itself where a candidate stands: what the judge says of it is what the judge is worth (`benchmarks.judge_campaign`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_autokern.judge.accuracy import Task
from torch_autokern.judge.remembered import Results
from torch_autokern.runtime.plan import Workspace

Tensors = Sequence[torch.Tensor | None]


class StockCode:
    """The ATen op of a task as a `CandidateCode`. It has no plan and no bytes, so no submission can be one."""

    workspaces: tuple[Workspace, ...] = ()

    def __init__(self, task: Task) -> None:
        self._task = task

    def run(self, tensors: Tensors) -> Results:
        """What the op returns."""
        return self._task.spec.stock(tensors, self._task.key.scalars)

    def run_into(self, tensors: Tensors, outputs: Tensors) -> None:
        """The same, copied into given outputs."""
        for result, output in zip(self.run(tensors), outputs, strict=True):
            if output is not None:
                assert result is not None
                output.copy_(result)
