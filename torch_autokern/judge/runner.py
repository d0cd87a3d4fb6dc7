"""The runner: a process that loads a candidate and runs it, and may die of it. Our code, the candidate's artifact.

Started by `process.py`. It imports torch, enters the box, then takes jobs from its pipe until that closes. It decides nothing:
seeds come from the parent, and numbers go back to it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch

from torch_autokern.build.box import enter_box
from torch_autokern.errors import BoxError, BuildError, PlanError
from torch_autokern.judge import measure, protocol
from torch_autokern.judge.accuracy import Task
from torch_autokern.judge.families import Family
from torch_autokern.judge.memory import Placement
from torch_autokern.judge.outcome import Reason, Refusal, RefusedError
from torch_autokern.judge.verify import CandidateCode, FamilyReport, check_family, check_state
from torch_autokern.ops import SPECS
from torch_autokern.runtime.kernel import load_cpu_kernel
from torch_autokern.store.key import KernelKey

_LARGE_BYTES = 64 << 20


def main(arguments: list[str]) -> int:
    """Serve jobs from descriptor `arguments[0]`, answer on `arguments[1]`; "1" in `arguments[2]` accepts a weak box."""
    jobs, answers = int(arguments[0]), int(arguments[1])
    cache_bytes = measure.last_level_cache_bytes()
    # ATen looks the processor up in /proc when it is first asked: behind the box it would find nothing and run stock without
    # vectors, 12 times slower, and every candidate would seem to win.
    instructions = torch.backends.cpu.get_cpu_capability()
    try:
        level = enter_box(readable=_readable(), allow_weak_box=arguments[2] == "1")
    except BoxError as error:
        protocol.send(answers, protocol.Refused(Refusal(Reason.BOX_REFUSED, str(error))))
        return 0
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    protocol.send(answers, protocol.Ready(level, instructions))
    while (received := protocol.receive_job(jobs)) is not None:
        try:
            serve(*received, jobs, answers, cache_bytes)
            protocol.send(answers, protocol.Finished())
        except RefusedError as error:
            protocol.send(answers, protocol.Refused(error.refusal))
    return 0


def serve(job: protocol.Job, binary: bytes, jobs: int, answers: int, cache_bytes: int) -> None:
    """Run one job and send its reports; end early when the parent has seen enough.

    Raises:
        RefusedError: the candidate broke a rule.
    """
    task = Task(SPECS[job.key.op], job.key, job.accuracy)
    _apply_flags(job.key, job.threads)

    def notify(phase: str, allowed_s: float) -> None:
        protocol.send(answers, protocol.Entering(phase, allowed_s))

    notify("loading", 30.0)
    code = _load(job, binary)
    deterministic = True
    for number, trial in enumerate(job.trials):
        place = _placement(number, task)
        report = check_family(task, code, Family(trial.family), trial.seed, place, notify, with_probes=job.with_probes)
        deterministic = deterministic and report.deterministic
        if not _report(jobs, answers, report):
            return
    if job.state_seed is not None:
        checks = check_state(task, code, job.state_seed, notify, deterministic=deterministic)
        if not _report(jobs, answers, protocol.StateReport(checks)):
            return
    if job.timing is not None:
        sides = measure.stock_side(task), measure.candidate_side(code)
        _report(jobs, answers, measure.measure(task, *sides, job.timing, notify, cache_bytes, deterministic=deterministic))


def _load(job: protocol.Job, binary: bytes) -> CandidateCode:
    try:
        return load_cpu_kernel(binary, job.identity, job.plan, job.key)
    except PlanError as error:
        raise RefusedError(Refusal(Reason.BAD_PLAN, str(error))) from error
    except BuildError as error:
        raise RefusedError(Refusal(Reason.STATIC_RULE, str(error))) from error
    except RuntimeError as error:  # the loader's own: bytes that do not load, or an index outside the key's tensors
        raise RefusedError(Refusal(Reason.BAD_PLAN, str(error).splitlines()[0])) from error


def _report(jobs: int, answers: int, message: FamilyReport | protocol.StateReport | measure.TimingReport) -> bool:
    """Send a report; whether the parent wants more."""
    protocol.send(answers, message)
    return protocol.receive_answer(jobs)


def _placement(number: int, task: Task) -> Placement:
    """Trapping pages at the end of every third trial's buffers and at the start of another third; once each for large keys."""
    turn = number if task.spec.bytes_moved(task.key) > _LARGE_BYTES else number % 3
    if turn == 0:
        return "page_end"
    return "page_start" if turn == 1 else "heap"


def _apply_flags(key: KernelKey, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.set_flush_denormal(key.flush_denormal)
    torch.backends.mkldnn.set_flags(key.mkldnn)


def _end_with(parent: int) -> None:
    """End when the parent is gone: a candidate that loops for ever would outlive it. (The kernel's own signal for this follows
    the *thread* that started us, which may be a worker of a search.)"""
    while os.getppid() == parent:
        time.sleep(2.0)
    os._exit(1)


def _readable() -> list[Path]:
    """What may still be read lazily: the folders of torch, Python and this package, and the processor's description."""
    paths = [
        Path(torch.__file__).parent,
        Path(os.__file__).parent,
        Path("/proc/self"),
        Path("/proc/cpuinfo"),
        Path("/sys/devices/system/cpu"),
    ]
    paths.append(Path(__file__).parents[1])  # this package, which an editable install keeps outside sys.path
    paths += [Path(entry) for entry in sys.path if entry]
    return [path for path in dict.fromkeys(paths) if path.exists()]
