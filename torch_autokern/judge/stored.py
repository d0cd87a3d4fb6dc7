"""Stored records before the judge again: the evidence replayed seed by seed, and the times taken anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import msgspec
import torch

from torch_autokern.build.candidate import BINARY_BLOBS, Artifact, Candidate, Language, source_blob
from torch_autokern.errors import InvalidInputError, PlanError
from torch_autokern.judge.accuracy import Task
from torch_autokern.judge.collect import collect, make_job, new_seed
from torch_autokern.judge.device import cache_bytes
from torch_autokern.judge.evidence import Evidence
from torch_autokern.judge.inputs import check_supported, families_for
from torch_autokern.judge.measure import Side, Tensors, TimingRequest, candidate_side, measure
from torch_autokern.judge.outcome import Accuracy, Refusal, RefusedError
from torch_autokern.judge.process import fresh_runners
from torch_autokern.judge.protocol import Trial
from torch_autokern.judge.speed import Speed, speed_of, timing
from torch_autokern.judge.verdict import STATE_SEEDS
from torch_autokern.judge.workspaces import load_candidate
from torch_autokern.ops import SPECS
from torch_autokern.runtime.plan import decode_plan
from torch_autokern.store.key import Target
from torch_autokern.store.record import FamilyError, KernelRecord, StoredRecord, Timing

Status = Literal["holds", "broken", "not_here"]
Baseline = Literal["stock", "compile", "max-autotune"]
_BENCH = {"budget_s": 1.2, "min_blocks": 10, "max_blocks": 300}


class Verification(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What replaying one record's evidence showed. `not_here`: this machine cannot run it, or the record has no seeds; that
    says nothing against it. `same_numbers`: every family gave exactly the recorded errors, as the same machine and torch
    should."""

    record_id: str
    status: Status
    message: str
    trials: int = 0
    same_numbers: bool | None = None
    refusal: Refusal | None = None


@dataclass(frozen=True)
class Benchmark:
    """New times of a record against one baseline; `disturbed` says why there are none."""

    baseline: Baseline
    timing: Timing | None
    disturbed: str = ""


def artifact_of(stored: StoredRecord) -> Artifact:
    """A record's kernel as the judge takes it.

    Raises:
        InvalidInputError: a part is missing, or the language is unknown here.
    """
    record, data = stored.record, stored.data
    kind = record.key.device_type
    missing = [name for name in ("plan.json", BINARY_BLOBS[kind]) if name not in data]
    language = next((known for known in get_args(Language) if known == record.provenance.language), None)
    if missing or language is None:
        raise InvalidInputError(f"not a kernel with its parts ({', '.join(missing) or record.provenance.language})")
    try:
        plan = decode_plan(data["plan.json"])
    except PlanError as error:
        raise InvalidInputError(f"its plan cannot be read: {error}") from error
    origin = record.provenance
    source = data.get(source_blob(language), b"").decode(errors="replace")
    candidate = Candidate(language, source, plan, origin.idea, origin.author)
    arch = record.target.arch if kind == "cuda" else ""
    binary = data[BINARY_BLOBS[kind]]
    return Artifact(candidate, binary, origin.candidate_id, origin.tools, origin.box_level, 0.0, kind=kind, arch=arch)


def cannot_run_here(record: KernelRecord, target: Target) -> str | None:
    """Why this machine cannot replay a record, or None."""
    made_for = record.target
    if (made_for.device_type, made_for.arch) != (target.device_type, target.arch):
        return f"made for {made_for.device_type} {made_for.arch}, this is {target.device_type} {target.arch}"
    if record.key.op not in SPECS:
        return f"op {record.key.op!r} is unknown here"
    return check_supported(record.key)


def verify_record(stored: StoredRecord, target: Target, *, allow_weak_box: bool = False) -> Verification:
    """Replay the evidence: each process's trials with their seeds and places, pooled as they were, then the checks of state.

    Raises:
        JudgeError: the judge itself failed.
    """
    record, name = stored.record, stored.record_id
    reason = cannot_run_here(record, target)
    if reason is not None:
        return Verification(name, "not_here", reason)
    if not record.verdict.families:
        return Verification(name, "not_here", "it lists no seeds: nothing can be replayed")
    try:
        artifact = artifact_of(stored)
        task = _task(record)
        processes = _processes(task, record.verdict.families)
    except InvalidInputError as error:
        return Verification(name, "not_here", str(error))
    evidence = Evidence(task)
    states = [int(seed) for seed in record.verdict.checks.get(STATE_SEEDS, "").split(", ") if seed.isdigit()]
    for number, trials in enumerate(processes):
        state = states[number] if number < len(states) else new_seed()
        with fresh_runners(record.key.device_type, allow_weak_box=allow_weak_box) as runners:
            job = make_job(artifact, task, record.target, trials, (), state_seed=state)
            found = collect(next(runners), job, artifact.binary, evidence)
        if isinstance(found, Refusal):
            return _broken(name, found, evidence)
    refusal = evidence.check()
    if refusal is not None:
        return _broken(name, refusal, evidence)
    same = evidence.families() == record.verdict.families
    count = sum(len(seeds) for seeds in evidence.seeds.values())
    numbers = "the recorded errors to the last digit" if same else "other errors than recorded, within the limits"
    return Verification(name, "holds", f"{count} trials of {len(evidence.seeds)} families: {numbers}", count, same)


def bench_record(
    stored: StoredRecord, against: Baseline, *, processes: int = 3, allow_weak_box: bool = False
) -> Benchmark | Refusal:
    """Time a record anew against stock in boxed processes, or against a compiled call in this one.

    Raises:
        JudgeError: the judge itself failed.
        InvalidInputError: the record has no CPU kernel.
    """
    task, artifact = _task(stored.record), artifact_of(stored)
    target = stored.record.target
    if against == "stock":
        return time_against_stock(task, artifact, target, processes, allow_weak_box=allow_weak_box)
    speeds: list[Speed] = []
    for _ in range(processes):
        speed = _against_compiled(task, artifact, target, against)
        if isinstance(speed, Refusal):
            return _disturbed(against, speed)
        speeds.append(speed)
    return Benchmark(against, timing(speeds, "fresh" if task.key.device_type == "cpu" else "device"))


def time_against_stock(
    task: Task, artifact: Artifact, target: Target, processes: int, *, allow_weak_box: bool = False
) -> Benchmark | Refusal:
    """A kernel's times beside stock's in boxed processes with resident pages, as the deciding figure of a verdict takes them,
    whatever they say: the interval is the union of all `processes`.

    Raises:
        JudgeError: the judge itself failed.
    """
    speeds: list[Speed] = []
    with fresh_runners(task.key.device_type, processes, allow_weak_box=allow_weak_box) as runners:
        for runner in runners:
            job = make_job(artifact, task, target, (), (TimingRequest(new_seed(), **_BENCH),))  # type: ignore[arg-type]
            found = collect(runner, job, artifact.binary, Evidence(task))
            if isinstance(found, Refusal):
                return found
            speed = speed_of(found.timings["eager"])
            if isinstance(speed, Refusal):
                return _disturbed("stock", speed)
            speeds.append(speed)
    return Benchmark("stock", timing(speeds, "resident" if task.key.device_type == "cpu" else "device"))


def _against_compiled(task: Task, artifact: Artifact, target: Target, against: Baseline) -> Speed | Refusal:
    """Compiled for this shape alone: after a reset, or the compiler turns dynamic and is slower than it need be."""
    torch._dynamo.reset()
    mode = "max-autotune" if against == "max-autotune" else None
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, target.threads))
    try:
        code = load_candidate(artifact.binary, artifact.identity, artifact.candidate.plan, task.key)
        side = Side(against, compiled_call(task, mode))
        request = TimingRequest(new_seed(), **_BENCH)  # type: ignore[arg-type]
        cache = cache_bytes(task.key.device_type)
        report = measure(task, side, candidate_side(task, code), request, lambda phase, allowed_s: None, cache)
        return speed_of(report)
    except RefusedError as error:
        return error.refusal
    finally:
        torch.set_num_threads(threads)


def compiled_call(task: Task, mode: str | None) -> Callable[[Tensors], Callable[[], object]]:
    """`Side.prepare` for `torch.compile` of the op alone, static shapes."""
    overload = getattr(torch.ops.aten, task.spec.name).default

    def call(*positional: object, **keyword: object) -> object:
        return overload(*positional, **keyword)

    compiled = torch.compile(call, dynamic=False, fullgraph=True, mode=mode)

    def prepare(tensors: Tensors) -> Callable[[], object]:
        positional, keyword = task.spec.call_args(tensors, task.key.scalars)
        return lambda: compiled(*positional, **keyword)

    return prepare


def _disturbed(against: Baseline, refusal: Refusal) -> Benchmark | Refusal:
    return Benchmark(against, None, refusal.message) if refusal.reason.value == "timing_unstable" else refusal


def _task(record: KernelRecord) -> Task:
    verdict = record.verdict
    return Task(SPECS[record.key.op], record.key, Accuracy(verdict.accuracy_class, verdict.atol, verdict.rtol))


def _processes(task: Task, families: tuple[FamilyError, ...]) -> list[tuple[Trial, ...]]:
    """The trials of each process: seed number i of every family, at the family's place in the judge's list."""
    places = {family.value: number for number, family in enumerate(families_for(task.spec, task.key))}
    strange = [entry.family for entry in families if entry.family not in places]
    if strange:
        raise InvalidInputError(f"families {strange} are unknown to this judge")
    count = max(len(entry.seeds) for entry in families)
    return [
        tuple(Trial(e.family, e.seeds[process], places[e.family]) for e in families if process < len(e.seeds))
        for process in range(count)
    ]


def _broken(name: str, refusal: Refusal, evidence: Evidence) -> Verification:
    count = sum(len(seeds) for seeds in evidence.seeds.values())
    return Verification(name, "broken", f"{refusal.reason.value}: {refusal.message}", count, False, refusal)
