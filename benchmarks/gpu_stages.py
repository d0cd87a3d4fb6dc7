"""The stages of `benchmarks.gpu_session` that need the package: probe, throughput and warm. Each runs in its own process."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from benchmarks.shapes import SETS
from torch_autokern import api
from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.build.compile import toolchain
from torch_autokern.errors import AutokernError, JudgeError
from torch_autokern.judge.device import device_of
from torch_autokern.judge.measure import copy_us
from torch_autokern.judge.outcome import Accuracy, Refusal
from torch_autokern.judge.process import start_runner
from torch_autokern.ops import spec_of
from torch_autokern.report.cases import case_name
from torch_autokern.report.device import describe_device, utc_date, versions
from torch_autokern.report.keyrow import BoundCall, measure_key
from torch_autokern.report.measurement import Measurement, Row, write_json
from torch_autokern.runtime.session import session
from torch_autokern.runtime.target import local_target
from torch_autokern.search import templates
from torch_autokern.search.engine import LocalEngine
from torch_autokern.search.journal import KeyJournal
from torch_autokern.search.outcome import KeyResult, Progress
from torch_autokern.store.key import KernelKey

COUNT = 60  # what the project's target counts
_ROW_SECONDS = 1.0


class KeyLog(msgspec.Struct, frozen=True):
    """One key of `warm.json`: how its search ended, how long it took, and every trial with the candidate's parameters."""

    case: str
    seconds: float
    outcome: str
    trials: tuple[dict[str, object], ...]


def probe(options: argparse.Namespace) -> None:
    """Say what this machine is, and whether a runner works inside its box; fails where it does not."""
    properties = torch.cuda.get_device_properties(0)
    l2_mib = properties.L2_cache_size >> 20
    print(f"{describe_device('cuda')}, {properties.multi_processor_count} processors, L2 {l2_mib} MiB")
    print(f"{len(os.sched_getaffinity(0))} cores; {versions()}")
    print(f"copy of 512 MiB: {2 * (512 << 20) / copy_us(512 << 20, torch.device('cuda')) / 1e3:.0f} GB/s read and written")
    try:
        print(f"compilers: {toolchain('cuda')}")
    except AutokernError as error:
        print(f"compilers: {error}")
    began = time.monotonic()
    try:
        runner = start_runner("cuda")
    except JudgeError as error:
        print(f"a runner does not work inside its box here: {error}", flush=True)
        if not options.allow_weak_box:
            raise SystemExit("nothing can be judged; --allow-weak-box accepts to judge outside of the box") from error
        runner = start_runner("cuda", allow_weak_box=True)
    if isinstance(runner, Refusal) and options.allow_weak_box:
        print(f"the box is weak here: {runner.message}")
        runner = start_runner("cuda", allow_weak_box=True)
    if isinstance(runner, Refusal):
        raise SystemExit(f"the runner's box does not hold here: {runner.message}; --allow-weak-box accepts that")
    print(f"runner ready after {time.monotonic() - began:.1f} s in the box {runner.box_level}")
    runner.close()


def throughput(options: argparse.Namespace) -> None:
    """Build and screen `COUNT` candidates of the first key, and say how long that took."""
    key = _keys(options)[0]
    target = local_target("cuda")
    engine = LocalEngine(allow_weak_box=options.allow_weak_box)
    candidates = padded(templates.propose(key, target), COUNT)
    began = time.monotonic()
    built = [found for _, found in engine.build(candidates, target, key)]
    artifacts = [found for found in built if isinstance(found, Artifact)]
    for refusal in [found for found in built if isinstance(found, Refusal)][:2]:
        print(f"not built: {refusal.message[:300]}")
    compiled = time.monotonic()
    print(f"{len(artifacts)} of {len(candidates)} candidates compiled in {compiled - began:.1f} s", flush=True)
    ratios: list[float] = []
    refused: dict[str, int] = {}
    for number, artifact in enumerate(artifacts):
        found = engine.screen(artifact, key, target, Accuracy())
        if isinstance(found, Refusal):
            refused[found.reason.value] = refused.get(found.reason.value, 0) + 1
            if refused[found.reason.value] == 1:
                print(f"{found.reason.value}: {found.message[:300]}")
        else:
            ratios.append(found.ratio)
        if number == 0:
            print(f"first screen, process start included: {time.monotonic() - compiled:.1f} s", flush=True)
        if time.monotonic() - began > options.limit - 10:
            break
    screened, seconds = len(ratios) + sum(refused.values()), time.monotonic() - began
    engine.close()
    print(f"{case_name(key)}: {screened} screened, {seconds:.1f} s in all; refused {refused}")
    whole = compiled - began + (seconds - compiled + began) * len(artifacts) / max(1, screened)
    print(f"best ratio {max(ratios, default=0.0):.2f}; {len(artifacts)} at this rate: {whole:.0f} s")


def warm(options: argparse.Namespace) -> None:
    """Search every key within its budget, then time it as a user meets it; both files grow key by key."""
    folder = options.store or Path(tempfile.mkdtemp(prefix="autokern-session-"))
    os.environ["AUTOKERN_STORE"] = str(folder.absolute())
    Path(os.environ["AUTOKERN_STORE"]).mkdir(mode=0o700, parents=True, exist_ok=True)
    ends = time.monotonic() + options.limit - 15
    rows: list[Row] = []
    logs: list[KeyLog] = []
    settings = {"budget_s_per_key": str(options.budget), "set": options.set, "pages": "device", "contents": "normal, in place"}
    for key in _keys(options):
        left = ends - time.monotonic()
        if left < 20:
            print(f"{case_name(key)}: not searched, the stage's time is up", flush=True)
            continue
        began = time.monotonic()
        result = _search(key, min(options.budget, left - 10), options.allow_weak_box)
        seconds = time.monotonic() - began
        print(f"{result}; {seconds:.0f} s", flush=True)
        logs.append(KeyLog(case_name(key), seconds, str(result), _trials(key)))
        write_json(options.out / "warm.json", logs)
        rows.append(_row(key, result, seconds))
        Measurement(describe_device("cuda"), versions(), utc_date(), tuple(rows), settings=settings).save(
            options.out / "session.json"
        )


def _keys(options: argparse.Namespace) -> list[KernelKey]:
    keys = [case.key("cuda") for case in SETS[options.set]]
    words = [word.strip() for word in options.only.split(";") if word.strip()]
    chosen = [key for key in keys if not words or any(word in case_name(key) for word in words)]
    if not chosen:
        raise SystemExit(f"no case of {options.set} contains {options.only!r}: {', '.join(map(case_name, keys))}")
    return chosen


def _search(key: KernelKey, budget_s: float, allow_weak_box: bool) -> KeyResult:
    with api.record() as recording:
        BoundCall(key)()
    workload = recording.workload()
    torch.cuda.empty_cache()  # the judge's processes share the card
    seen = [entry.key for entry in workload.entries]
    if seen != [key]:
        print(f"the recorded key differs from the named one: {seen} against {key}", flush=True)
    last = [0.0]

    def show(event: Progress) -> None:
        if time.monotonic() - last[0] > 5:
            last[0] = time.monotonic()
            done = f"{event.built} built, {event.screened} screened, {event.judged} judged, {event.refused} refused"
            print(f"  {event.activity}: {done}, best {event.best_ratio:.2f}", flush=True)

    report = api.warm(workload, budget=budget_s / 60, on_event=show, allow_weak_box=allow_weak_box)
    return report.keys[0]


def _row(key: KernelKey, result: KeyResult, seconds: float) -> Row:
    note = f"{result.status} in {seconds:.0f} s, {result.tried} tried, judged {result.ratio:.2f}"
    if result.status not in ("won", "already_there"):
        note += f"; {result.reason[:200]}"
    row = measure_key(key, api.enabled, _ROW_SECONDS, pages="device", note=note)
    torch.cuda.empty_cache()
    if spec_of(key).uses_matmul_precision:
        return row  # bytes are not what limits a product
    limit_us = copy_us(spec_of(key).bytes_moved(key) // 2, device_of(key))
    torch.cuda.empty_cache()
    return msgspec.structs.replace(row, limit_ms=limit_us / 1000)


def _trials(key: KernelKey) -> tuple[dict[str, object], ...]:
    """Every trial of the key, with what the template was asked for."""
    target = local_target("cuda")
    parameters = {
        c.candidate_id: f"{c.template}({', '.join(f'{name}={value}' for name, value in c.parameters.items())})"
        for c in templates.propose(key, target)
    }
    trials = KeyJournal(session().store.write_root, key.digest).every()
    return tuple({"candidate": parameters.get(t.candidate_id, ""), **msgspec.to_builtins(t)} for t in trials)


def padded(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """At least one candidate, repeated under other names until there are `count`: equal code costs the same to build and to
    screen, and a comment makes it another candidate."""
    found = list(candidates[:count])
    while candidates and len(found) < count:
        one = candidates[len(found) % len(candidates)]
        mark = "#" if one.language == "triton" else "//"
        found.append(msgspec.structs.replace(one, source=f"{one.source}\n{mark} variant {len(found)}\n"))
    return found
