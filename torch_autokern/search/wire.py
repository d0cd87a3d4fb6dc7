"""What travels between a search and its workers on other machines: typed values in MessagePack.

Both ends check every value against its type, and a plan against its limits. Nothing is evaluated, and no object of one end is
rebuilt in the other.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.errors import AutokernError, BoxError, DeviceError, JudgeError, ToolchainError
from torch_autokern.judge.outcome import Accuracy, Refusal, ScreenResult
from torch_autokern.runtime.plan import encode_plan
from torch_autokern.search.manifest import Ceiling
from torch_autokern.store.key import KernelKey, Target
from torch_autokern.store.record import Verdict

T = TypeVar("T")
Step = Literal["build", "screen", "judge", "ceiling"]
# What a worker may fail with; anything else comes back as the judge's own failure.
_ERRORS: dict[str, type[AutokernError]] = {
    kind.__name__: kind for kind in (ToolchainError, BoxError, DeviceError, JudgeError)
}  # fmt: skip


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker is: its node's id in the cluster, the target that it can judge for, torch "major.minor", this package's
    version and the compiler. `problem` says why it cannot work ("" where it can)."""

    node: str
    target: Target
    stock_build: str
    version: str
    toolchain: str
    problem: str = ""


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step. A build has a candidate, a screen and a verdict have an artifact, a ceiling neither."""

    step: Step
    key: KernelKey
    target: Target
    accuracy: Accuracy
    candidate: Candidate | None = None
    artifact: Artifact | None = None


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What came of a step: exactly one of the five, or `error` (a class of `errors.py`) with its message."""

    built: Artifact | None = None
    refused: Refusal | None = None
    screened: ScreenResult | None = None
    verdict: Verdict | None = None
    ceiling: Ceiling | None = None
    error: str = ""
    message: str = ""

    @classmethod
    def of(cls, found: Artifact | Refusal | ScreenResult | Verdict | Ceiling | Exception) -> Answer:
        """An answer from what the engine on a worker gave or raised."""
        if isinstance(found, Exception):
            kind = next((name for name, error in _ERRORS.items() if type(found) is error), JudgeError.__name__)
            return cls(error=kind, message=str(found) if isinstance(found, AutokernError) else repr(found)[:2000])
        fields = {Artifact: "built", Refusal: "refused", ScreenResult: "screened", Verdict: "verdict", Ceiling: "ceiling"}
        return cls(**{fields[type(found)]: found})  # type: ignore[arg-type]

    def raise_error(self) -> None:
        """Raise what the worker raised.

        Raises:
            ToolchainError, BoxError, DeviceError, JudgeError: as there.
        """
        if self.error:
            raise _ERRORS.get(self.error, JudgeError)(self.message)


def encode(value: Facts | Task | Answer) -> bytes:
    """The bytes that travel."""
    return msgspec.msgpack.encode(value)


def read_facts(raw: bytes) -> Facts:
    """What a worker says of itself.

    Raises:
        JudgeError: it is not of the form.
    """
    return _decode(raw, Facts)


def read_task(raw: bytes) -> Task:
    """A step for this worker.

    Raises:
        JudgeError, PlanError: it is not of the form.
    """
    task = _decode(raw, Task)
    for candidate in (task.candidate, None if task.artifact is None else task.artifact.candidate):
        if candidate is not None:
            encode_plan(candidate.plan)  # checks it
    return task


def read_answer(raw: bytes) -> Answer:
    """A worker's answer.

    Raises:
        JudgeError, PlanError: it is not of the form.
    """
    answer = _decode(raw, Answer)
    if answer.built is not None:
        encode_plan(answer.built.candidate.plan)
    return answer


def _decode(raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise JudgeError(f"what came over the wire is no {kind.__name__}: {error}") from error
