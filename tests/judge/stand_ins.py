"""Candidates written in Python, for the rules that need no process: they run in the test itself."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import torch

from torch_autokern.judge.accuracy import Task
from torch_autokern.judge.evidence import Evidence
from torch_autokern.judge.families import Family
from torch_autokern.judge.inputs import families_for
from torch_autokern.judge.memory import Placement
from torch_autokern.judge.outcome import Accuracy, Refusal, RefusedError
from torch_autokern.judge.verify import check_family
from torch_autokern.ops import SPECS
from torch_autokern.store.key import KernelKey

Results = tuple[torch.Tensor | None, ...]
PLACEMENTS: tuple[Placement, ...] = ("page_end", "page_start", "heap")


class StandIn:
    """A function of the tensor arguments, as a candidate."""

    workspaces = ()

    def __init__(self, function: Callable[..., Sequence[torch.Tensor | None]]) -> None:
        self._function = function

    def run(self, tensors: Sequence[torch.Tensor | None]) -> Results:
        return tuple(self._function(*tensors))

    def run_into(self, tensors: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor | None]) -> None:
        for result, output in zip(self._function(*tensors), outputs, strict=True):
            if output is not None and result is not None:
                output.copy_(result)


def task_of(key: KernelKey, accuracy: Accuracy | None = None) -> Task:
    return Task(SPECS[key.op], key, accuracy or Accuracy())


def stock_of(key: KernelKey) -> StandIn:
    """Stock itself."""
    return StandIn(lambda *tensors: SPECS[key.op].stock(tensors, key.scalars))


def quiet(phase: str, allowed_s: float) -> None:
    """Nobody watches."""


def verify(
    key: KernelKey, code: object, families: Sequence[Family] = (), accuracy: Accuracy | None = None, trials: int = 3,
    with_probes: bool = False,
) -> Refusal | Evidence:  # fmt: skip
    """What a verdict's processes do, without processes."""
    task = task_of(key, accuracy)
    evidence = Evidence(task)
    for family in families or families_for(task.spec, key):
        for trial in range(trials):
            seed = secrets.randbits(62)
            try:
                report = check_family(
                    task, code, family, seed, PLACEMENTS[trial % 3], quiet, with_probes=with_probes and trial == 0
                )  # type: ignore[arg-type]
            except RefusedError as error:
                return error.refusal
            broken = evidence.add(report)
            if broken is not None:
                return broken
    return evidence.check() or evidence
