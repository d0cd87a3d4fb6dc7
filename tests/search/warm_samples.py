"""Workloads, candidates and a scripted engine for tests of the search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.judge.outcome import JUDGE_VERSION, Accuracy, Reason, Refusal, ScreenResult
from torch_autokern.ops import SPECS
from torch_autokern.runtime.plan import CpuStep, InputArg, LaunchPlan, OutputArg
from torch_autokern.store.key import DeviceType, KernelKey, Target
from torch_autokern.store.record import FamilyError, Timing, Verdict
from torch_autokern.store.workload import SCHEMA, Workload, WorkloadEntry

TARGET = Target("cpu", "AuthenticAMD-25-17", "x86-64-v2", 1)
Outcome = float | Refusal | BaseException


def softmax_key(rows: int, width: int = 38) -> KernelKey:
    """A softmax over the last dimension of (rows, width)."""
    return SPECS["_softmax"].key([torch.randn(rows, width)], {"dim": 1, "half_to_float": False})


def workload(*keys: KernelKey) -> Workload:
    """The first key takes most of the time, each further one half as much."""
    entries = tuple(WorkloadEntry(key, 10, 1000.0 / 2**place) for place, key in enumerate(keys))
    # Shuffled, so that the order is the search's.
    return Workload(SCHEMA, "2.13", "test", 1, 4000.0, entries[::-1])


def candidate(name: str) -> Candidate:
    """A candidate that says its name."""
    plan = LaunchPlan(1, (CpuStep("entry", 64, 1, (InputArg(0), OutputArg(0))),))
    return Candidate("cpp", f"// {name}", plan, name, "test")


@dataclass
class ScriptedEngine:
    """Answers from a script: idea -> screened ratio, refusal, or what to raise; verdicts from `verdicts`, else as screened.

    `calls` is what was asked, in order.
    """

    screens: dict[str, Outcome]
    verdicts: dict[str, Outcome] = field(default_factory=dict)
    builds: dict[str, Outcome] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    closed: int = 0
    compiler: str = "scripted 1"

    def toolchain(self, device_type: DeviceType) -> str:
        return self.compiler

    def build(
        self, candidates: Sequence[Candidate], target: Target, key: KernelKey
    ) -> Iterator[tuple[Candidate, Artifact | Refusal]]:
        for one in candidates:
            outcome = self._answer("build", one.idea, self.builds.get(one.idea, 1.0))
            built = outcome if isinstance(outcome, Refusal) else Artifact(one, b"library", one.candidate_id, {}, "box", 0.1)
            yield one, built

    def screen(self, artifact: Artifact, key: KernelKey, target: Target, accuracy: Accuracy) -> ScreenResult | Refusal:
        idea = artifact.candidate.idea
        ratio = self._answer("screen", idea, self.screens[idea])
        if isinstance(ratio, Refusal):
            return ratio
        return ScreenResult(ratio, ratio - 0.1, ratio + 0.1, 10.0 * ratio, 10.0, (), 0.1)

    def judge(self, artifact: Artifact, key: KernelKey, target: Target, accuracy: Accuracy) -> Verdict | Refusal:
        idea = artifact.candidate.idea
        ratio = self._answer("judge", idea, self.verdicts.get(idea, self.screens[idea]))
        if isinstance(ratio, Refusal):
            return ratio
        timing = Timing("eager", "resident", 10.0 * ratio, 10.0, ratio, ratio - 0.02, ratio + 0.02, 40, 3)
        family = FamilyError("normal", (1,), 0.1, 0.1, 0.2, 0.1, 0.1, 0.2)
        return Verdict("stock", 0.0, 0.0, "run_to_run", (family,), {}, {}, (timing,), JUDGE_VERSION)

    def close(self) -> None:
        self.closed += 1

    def _answer(self, what: str, idea: str, outcome: Outcome) -> float | Refusal:
        self.calls.append((what, idea))
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def asked(self, what: str) -> list[str]:
        """The ideas for which `what` was asked."""
        return [idea for kind, idea in self.calls if kind == what]


def slower(ratio: float) -> Refusal:
    """A verdict that was not fast enough."""
    return Refusal(Reason.NOT_FASTER, f"ratio {ratio}", best_ratio=ratio)
