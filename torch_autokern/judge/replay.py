"""Run named cases again: the trials that a refusal, or a record, lists. Same seed, same place in memory, same numbers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from torch_autokern.build.candidate import Artifact
from torch_autokern.errors import InvalidInputError
from torch_autokern.judge.accuracy import Task
from torch_autokern.judge.collect import SANITIZERS, STATE, TIMING, collect, make_job
from torch_autokern.judge.evidence import Evidence
from torch_autokern.judge.inputs import check_supported, families_for
from torch_autokern.judge.measure import TimingRequest
from torch_autokern.judge.outcome import Accuracy, Reason, Refusal
from torch_autokern.judge.process import fresh_runners
from torch_autokern.judge.protocol import Trial
from torch_autokern.judge.sanitizers import sanitized
from torch_autokern.ops import spec_of
from torch_autokern.store.key import KernelKey, Target
from torch_autokern.store.record import FamilyError

_MAX_NUMBER = 1 << 32


class Replayed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Cases that hold: what their families showed, and what their checks of state said."""

    families: tuple[FamilyError, ...]
    checks: dict[str, str]


def parse_case(text: str) -> Trial:
    """ "normal:17:3" is trial 3 of its process, family normal, seed 17; "state:17:0" and "timing:17:0" are the checks of state
    and the timed calls.

    Raises:
        InvalidInputError: another form.
    """
    parts = text.split(":")
    if len(parts) == 3 and parts[0] and all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts[1:]):
        trial = Trial(parts[0], int(parts[1]), int(parts[2]))
        if trial.seed < 1 << 63 and trial.number < _MAX_NUMBER:
            return trial
    raise InvalidInputError(f"{text!r} is no case; expected FAMILY:SEED:TRIAL as a refusal prints it, such as normal:17:3")


def replay(
    artifact: Artifact, key: KernelKey, target: Target, accuracy: Accuracy, cases: Sequence[Trial], *,
    allow_weak_box: bool = False,
) -> Replayed | Refusal:  # fmt: skip
    """Run `cases` in one fresh process, and nothing else.

    Raises:
        JudgeError: the judge itself failed.
        InvalidInputError: a family that this op does not have.
    """
    task = Task(spec_of(key), key, accuracy)
    unsupported = check_supported(key)
    if unsupported is not None:
        return Refusal(Reason.UNSUPPORTED_KEY, unsupported)
    known = [family.value for family in families_for(task.spec, key)]
    trials = [case for case in cases if case.family not in (STATE, TIMING, SANITIZERS)]
    strange = next((case.family for case in trials if case.family not in known), None)
    if strange is not None:
        raise InvalidInputError(
            f"{key.op} has no family {strange!r}; it has {', '.join(known)}, {STATE}, {TIMING} and {SANITIZERS}"
        )
    state = next((case.seed for case in cases if case.family == STATE), None)
    timed = next((case.seed for case in cases if case.family == TIMING), None)
    cleaned = next((case.seed for case in cases if case.family == SANITIZERS), None)
    timings = () if timed is None else (TimingRequest(timed, budget_s=0.5, min_blocks=10, max_blocks=300),)
    with fresh_runners(key.device_type, allow_weak_box=allow_weak_box) as runners:
        job = make_job(artifact, task, target, trials, timings, state_seed=state)
        found = collect(next(runners), job, artifact.binary, Evidence(task))
    if isinstance(found, Refusal):
        return found
    checks = dict(found.checks)
    for report in found.timings.values():
        checks["timed outputs"] = f"passed: {report.checked} outputs equal to verified ones"
    if cleaned is not None:
        clean = sanitized(artifact.candidate, task, target, cleaned, allow_weak_box=allow_weak_box)
        if isinstance(clean, Refusal):
            return clean
        checks.update(clean)
    return found.evidence.check() or Replayed(found.evidence.families(), checks)
