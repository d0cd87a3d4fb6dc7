"""Where builds and judgements run. `LocalEngine` is this machine: builds on every core, judgements one after another."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Protocol, runtime_checkable

from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.build.compile import compile_candidate, toolchain
from torch_autokern.errors import BuildError, StaticRuleError
from torch_autokern.judge import verdict
from torch_autokern.judge.outcome import Accuracy, Reason, Refusal, ScreenResult
from torch_autokern.search.ceiling import measure_ceiling
from torch_autokern.search.manifest import Ceiling
from torch_autokern.search.nodes import Stage
from torch_autokern.store.key import DeviceType, KernelKey, Target
from torch_autokern.store.record import Verdict


class Engine(Protocol):
    """What the search needs of a machine, or of many. A refusal is a value; an exception means the engine itself failed."""

    def toolchain(self, device_type: DeviceType) -> str:
        """Compiler and version: a candidate refused by one compiler may build with another.

        Raises:
            ToolchainError: there is none.
        """

    def build(
        self, candidates: Sequence[Candidate], target: Target, key: KernelKey
    ) -> Iterator[tuple[Candidate, Artifact | Refusal]]:
        """Build a batch for a key, in any order, as fast as the machine allows."""

    def screen(self, artifact: Artifact, key: KernelKey, target: Target, accuracy: Accuracy) -> ScreenResult | Refusal:
        """A short look at one candidate."""

    def judge(self, artifact: Artifact, key: KernelKey, target: Target, accuracy: Accuracy) -> Verdict | Refusal:
        """The full verdict on one finalist."""

    def ceiling(self, key: KernelKey, target: Target) -> Ceiling:
        """What the machine can do at most for a key, measured there."""

    def close(self) -> None:
        """End the processes that wait for more work."""


@runtime_checkable
class Spreading(Protocol):
    """An engine of several machines."""

    def ahead(self, step: Stage, artifacts: Sequence[Artifact], key: KernelKey, target: Target, accuracy: Accuracy) -> None:
        """Begin with steps that will be asked for one after another."""


class LocalEngine:
    """This machine. Nothing else runs while a candidate is timed."""

    def __init__(self, *, allow_weak_box: bool = False, workers: int | None = None) -> None:
        self._allow_weak_box = allow_weak_box
        self._workers = workers or len(os.sched_getaffinity(0))

    def toolchain(self, device_type: DeviceType) -> str:
        """See `Engine`."""
        return toolchain(device_type)

    def build(
        self, candidates: Sequence[Candidate], target: Target, key: KernelKey
    ) -> Iterator[tuple[Candidate, Artifact | Refusal]]:
        """See `Engine`. Threads suffice: each waits for a boxed compiler process. A GPU's runner starts up beside them.

        Raises:
            ToolchainError: no compiler, or none for this target.
            BoxError: the box does not hold here.
        """
        toolchain(target.device_type)  # once, before the threads ask
        pool = ThreadPoolExecutor(self._workers, thread_name_prefix="autokern-build")
        try:
            if target.device_type == "cuda":
                pool.submit(verdict.open_screen, target.device_type, allow_weak_box=self._allow_weak_box)
            waiting = {pool.submit(self._build_one, candidate, target, key): candidate for candidate in candidates}
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def screen(self, artifact: Artifact, key: KernelKey, target: Target, accuracy: Accuracy) -> ScreenResult | Refusal:
        """See `Engine`."""
        return verdict.screen(artifact, key, target, accuracy, allow_weak_box=self._allow_weak_box)

    def judge(self, artifact: Artifact, key: KernelKey, target: Target, accuracy: Accuracy) -> Verdict | Refusal:
        """See `Engine`."""
        return verdict.judge(artifact, key, target, accuracy, allow_weak_box=self._allow_weak_box)

    def ceiling(self, key: KernelKey, target: Target) -> Ceiling:
        """See `Engine`."""
        return measure_ceiling(key, target)

    def close(self) -> None:
        """See `Engine`."""
        verdict.close_screen()

    def _build_one(self, candidate: Candidate, target: Target, key: KernelKey) -> Artifact | Refusal:
        try:
            return compile_candidate(candidate, target, key=key, allow_weak_box=self._allow_weak_box)
        except StaticRuleError as error:
            return Refusal(Reason.STATIC_RULE, str(error))
        except BuildError as error:
            return Refusal(Reason.BUILD_FAILED, str(error))
