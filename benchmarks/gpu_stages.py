"""The stages of `benchmarks.gpu_session` that need the package: probe and throughput. Each runs in its own process."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

import msgspec
import torch

from benchmarks.shapes import keys_of
from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.build.compile import toolchain
from torch_autokern.errors import AutokernError, JudgeError
from torch_autokern.judge.measure import copy_us
from torch_autokern.judge.outcome import Accuracy, Refusal
from torch_autokern.judge.process import start_runner
from torch_autokern.report.cases import case_name
from torch_autokern.report.device import describe_device, versions
from torch_autokern.runtime.target import local_target
from torch_autokern.search import templates
from torch_autokern.search.engine import LocalEngine

COUNT = 60  # what the project's target counts


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
    words = [word.strip() for word in options.only.split(";") if word.strip()]
    keys = keys_of([options.set.split(",")[0]], "cuda", words or [""])
    if not keys:
        raise SystemExit(f"no case of {options.set} contains {options.only!r}")
    key = keys[0]
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


def padded(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """At least one candidate, repeated under other names until there are `count`: equal code costs the same to build and to
    screen, and a comment makes it another candidate."""
    found = list(candidates[:count])
    while candidates and len(found) < count:
        one = candidates[len(found) % len(candidates)]
        mark = "#" if one.language == "triton" else "//"
        found.append(msgspec.structs.replace(one, source=f"{one.source}\n{mark} variant {len(found)}\n"))
    return found
