"""CPU candidates under the address, undefined-behaviour and thread sanitizers, in the box. What is absent here is said."""

from __future__ import annotations

import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from torch_autokern.build.box import BoxResult, Limits, run_boxed
from torch_autokern.build.candidate import Candidate
from torch_autokern.build.compile_cpp import Sanitizer, compile_sanitized_program
from torch_autokern.errors import BoxError, BuildError, ToolchainError
from torch_autokern.judge.accuracy import Task
from torch_autokern.judge.collect import SANITIZERS
from torch_autokern.judge.families import Family
from torch_autokern.judge.harness import DONE, harness, size_bytes
from torch_autokern.judge.inputs import InputSet, make_inputs
from torch_autokern.judge.outcome import Reason, Refusal
from torch_autokern.store.key import Target

_FAMILIES = (Family.NORMAL, Family.NONFINITE)
_MAX_BYTES = 64 << 20
# Name to the sanitizers of its program, and its threads.
_RUNS: dict[str, tuple[tuple[Sanitizer, ...], int]] = {
    "address": (("address", "undefined"), 1),
    "undefined": (("undefined",), 1),
    "thread": (("thread",), 2),
}
_CANARIES = {"address": 0, "undefined": 1, "thread": 0}
_REPORT = re.compile(rb"ERROR: AddressSanitizer|WARNING: ThreadSanitizer: data race|runtime error:")
_DEADLY = re.compile(rb"AddressSanitizer:DEADLYSIGNAL")
# Shadow memory takes terabytes of addresses; leaks are none of a kernel's, which allocates nothing.
_LIMITS = Limits(memory_bytes=None, wall_seconds=60.0)
_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=1",
    "UBSAN_OPTIONS": "print_stacktrace=0",
    "TSAN_OPTIONS": "exitcode=1:report_bugs=1",
}


def sanitized(
    candidate: Candidate, task: Task, target: Target, seed: int, *, allow_weak_box: bool = False
) -> dict[str, str] | Refusal:
    """Run a candidate's source under each sanitizer on inputs drawn from `seed`: what each saw, or the first refusal.

    A sanitizer counts as present where it sees the mistake that its own canary makes.
    """
    if candidate.language != "cpp":
        return {"sanitizers": "not run: compute-sanitizer is not driven by the judge"}
    if not candidate.source:
        return {"sanitizers": "absent: the candidate has no source"}
    layouts = (*task.key.tensors, *task.key.outputs)
    total = sum(size_bytes(t) for t in layouts if t is not None)
    if total > _MAX_BYTES:
        return {"sanitizers": f"not run: {total >> 20} MiB a call, at most {_MAX_BYTES >> 20}"}
    stdin = _inputs(task, seed)

    def saw(name: str) -> str | bytes:
        sanitizers, threads = _RUNS[name]
        text = harness(candidate.plan, task.key, threads=threads, canary=_CANARIES[name])
        try:
            program = compile_sanitized_program(candidate, target, text, sanitizers, allow_weak_box=allow_weak_box)
            return _run(program, stdin, allow_weak_box)
        except (BuildError, ToolchainError, BoxError) as error:
            return f"absent: {str(error).splitlines()[0][:200]}"

    # Side by side: each is mostly one compiler on one core.
    with ThreadPoolExecutor(2) as pool:
        address, thread = pool.map(saw, ("address", "thread"))
    together = isinstance(address, str) and address.startswith("passed")
    seen = {"address": address, "undefined": "passed: together with address", "thread": thread}
    if isinstance(address, str) and not together:
        seen["undefined"] = saw("undefined")
    found: dict[str, str] = {}
    for name, words in seen.items():
        if isinstance(words, bytes):
            message = _message(" and ".join(_RUNS[name][0]), words)
            return Refusal(Reason.SANITIZER, message, SANITIZERS, seed, cases=(f"{SANITIZERS}:{seed}:0",))
        found[f"sanitizer {name}"] = words
    return found


def _inputs(task: Task, seed: int) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    sets = [make_inputs(task.spec, task.key, family, generator) for family in _FAMILIES]
    return b"".join(_bytes(inputs) for inputs in sets)


def _bytes(inputs: InputSet) -> bytes:
    regions = (region for region in inputs.regions if region is not None)
    return b"".join(bytes(region.whole[region.start : region.stop].numpy()) for region in regions)


def _run(program: bytes, stdin: bytes, allow_weak_box: bool) -> str | bytes:
    """ "passed", why the sanitizer is absent, or its report as bytes."""
    with tempfile.TemporaryDirectory(prefix="autokern-sanitizer-") as folder:
        path = Path(folder) / "program"
        path.write_bytes(program)
        path.chmod(0o700)

        def call(*arguments: str) -> BoxResult:
            return run_boxed(
                [str(path), *arguments], scratch=Path(folder), limits=_LIMITS, stdin=stdin, environment=_OPTIONS,
                allow_weak_box=allow_weak_box,
            )  # fmt: skip

        canary = call("canary")
        if not _REPORT.search(canary.stderr):
            return f"absent: its canary was not seen ({_words(canary)})"
        result = call()
    if _REPORT.search(result.stderr) or _DEADLY.search(result.stderr):
        return result.stderr
    if result.returncode or DONE not in result.stdout:
        return f"absent: it did not finish ({_words(result)})"
    return f"passed: {len(_FAMILIES)} input families, {result.level}"


def _words(result: BoxResult) -> str:
    lines = result.stderr.decode(errors="replace").strip().splitlines()
    return "timed out" if result.timed_out else (lines[0][:150] if lines else f"exit code {result.returncode}")


def _message(name: str, report: bytes) -> str:
    """The first lines of a report that name the mistake and a place in the candidate."""
    lines = [line.strip() for line in report.decode(errors="replace").splitlines()]
    kind = next((line for line in lines if _REPORT.search(line.encode()) or "DEADLYSIGNAL" in line), lines[0] if lines else "")
    kind = re.sub(r"^=+\d+=+\s*|\(pid=\d+\)|on address 0x[0-9a-f]+ at pc .*$|\S*/(?=candidate\.cpp)", "", kind).strip()
    place = next((line for line in lines if "candidate.cpp:" in line), "")
    place = re.sub(r"^#\d+ (0x[0-9a-f]+ )?|\S*/(?=candidate\.cpp)", "", place)
    return f"{name} sanitizer: {kind}" + (f"; {place}" if place and place not in kind else "")
