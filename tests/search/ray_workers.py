"""Engines for workers of a test cluster: by the source's words they die or hang, once or every time. They travel by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from search_samples import PretendEngine

from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.judge.outcome import Accuracy, Refusal, ScreenResult
from torch_autokern.store.key import KernelKey, Target


class PretendMaker:
    """Makes engines that share a folder, where they note what befell them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> TroubledEngine:
        return TroubledEngine(self.folder)


class TroubledEngine(PretendEngine):
    """``dies_in_build`` and the like befall the first worker that meets the kernel, ``always_in_build`` all of them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def build(
        self, candidates: Sequence[Candidate], target: Target, key: KernelKey
    ) -> Iterator[tuple[Candidate, Artifact | Refusal]]:
        for one in candidates:
            self._meet(one, "build")
        yield from super().build(candidates, target, key)

    def screen(self, artifact: Artifact, key: KernelKey, target: Target, accuracy: Accuracy) -> ScreenResult | Refusal:
        self._meet(artifact.candidate, "screen")
        return super().screen(artifact, key, target, accuracy)

    def _meet(self, one: Candidate, step: str) -> None:
        with (self.folder / f"{step}-{one.candidate_id[:12]}").open("a") as file:
            file.write(f"{os.getpid()}\n")
        met = len((self.folder / f"{step}-{one.candidate_id[:12]}").read_text().splitlines())
        if (f"dies_in_{step}" in one.source and met == 1) or f"always_in_{step}" in one.source:
            os.kill(os.getpid(), signal.SIGKILL)
        if f"hangs_in_{step}" in one.source and met == 1:
            time.sleep(600)
