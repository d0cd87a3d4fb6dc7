"""The runner: a process that loads a candidate and runs it, and may die of it. Our code, the candidate's artifact.

Started by `process.py`. It imports torch, starts the device, enters the box, then takes jobs from its pipe until that closes.
It decides nothing: seeds come from the parent, and numbers go back to it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch

from torch_autokern.build.box import SYSTEM_PATHS, Limits, enter_box
from torch_autokern.errors import BoxError, BuildError, PlanError
from torch_autokern.judge import measure, protocol
from torch_autokern.judge.accuracy import Task
from torch_autokern.judge.device import cache_bytes, canary, device_of, finish, warm_up
from torch_autokern.judge.families import Family
from torch_autokern.judge.memory import Placement
from torch_autokern.judge.outcome import Reason, Refusal, RefusedError
from torch_autokern.judge.properties import PropertyChecks
from torch_autokern.judge.state import StateChecks
from torch_autokern.judge.stock_code import StockCode
from torch_autokern.judge.verify import CandidateCode, FamilyReport, check_family
from torch_autokern.judge.workspaces import load_candidate
from torch_autokern.ops import SPECS
from torch_autokern.store.key import DeviceType, KernelKey

_LARGE_BYTES = 64 << 20
# What the plan runner throws, and what the router says in strict mode of a kernel that the runner threw for.
_REFUSED_LAUNCH = ("cuLaunchKernelEx", "cuTensorMapEncodeTiled", "cuMemsetD8Async", "(launch_failed)", "(quarantined)")


def main(arguments: list[str]) -> int:
    """Serve jobs from descriptor `arguments[0]`, answer on `arguments[1]`; `arguments[2]` is the box ("strong", "weak", "none")
    and `arguments[3]` the type of device. 0 at the end, or when a candidate took the device with it."""
    jobs, answers, box = int(arguments[0]), int(arguments[1]), arguments[2]
    device_type: DeviceType = "cuda" if arguments[3] == "cuda" else "cpu"
    # ATen looks the processor up in /proc when it is first asked: behind the box it would find nothing and run stock without
    # vectors, 12 times slower, and every candidate would seem to win.
    instructions = torch.backends.cpu.get_cpu_capability()
    warm_up(device_type)
    cache = cache_bytes(device_type)
    try:
        level = _enter(box, device_type)
    except BoxError as error:
        protocol.send(answers, protocol.Refused(Refusal(Reason.BOX_REFUSED, str(error))))
        return 0
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    began = time.perf_counter()
    if not canary(device_type):
        raise RuntimeError("the device computed a wrong sum")
    protocol.send(answers, protocol.Ready(level, instructions, time.perf_counter() - began))
    while (received := protocol.receive_job(jobs)) is not None:
        phases = ["loading"]
        try:
            serve(*received, jobs, answers, cache, phases)
            protocol.send(answers, protocol.Finished())
        except RefusedError as error:
            protocol.send(answers, protocol.Refused(error.refusal))
        except RuntimeError as error:
            refusal = _device_refusal(error, received[0].key, phases[-1])
            protocol.send(answers, protocol.Refused(refusal))
            if refusal.reason is Reason.CRASHED:
                return 0  # nothing can be done in this process any more
    return 0


def serve(job: protocol.Job, binary: bytes, jobs: int, answers: int, cache_size: int, phases: list[str] | None = None) -> None:
    """Run one job and send its reports; end early when the parent has seen enough. Each phase is added to `phases`.

    Raises:
        RefusedError: the candidate broke a rule.
        RuntimeError: the device, or our own code, failed.
    """
    task = Task(SPECS[job.key.op], job.key, job.accuracy)
    _apply_flags(job.key, job.threads)

    def notify(phase: str, allowed_s: float) -> None:
        if phases is not None:
            phases.append(phase)
        protocol.send(answers, protocol.Entering(phase, allowed_s))

    notify("loading", 30.0)
    code = _load(job, binary)
    deterministic = True
    for trial in job.trials:
        place = _placement(trial.number, task)
        report = check_family(task, code, Family(trial.family), trial.seed, place, notify, with_probes=job.with_probes,
                              sampled=job.sampled or trial.number > 0)  # fmt: skip
        deterministic = deterministic and report.deterministic
        if not _report(jobs, answers, report):
            return
    if job.state_seed is not None:
        state = StateChecks(task, code, job.state_seed, notify, deterministic=deterministic)
        checks, deterministic = state.run(), state.expected.deterministic
        del state  # its input sets, up to 8 GB of a GPU
        checks.update(PropertyChecks(task, code, job.state_seed, notify).run())
        if not _report(jobs, answers, protocol.StateReport(checks, deterministic)):
            return
    for request in job.timings:
        sides = measure.stock_side(task), measure.candidate_side(task, code)
        timed = measure.measure(task, *sides, request, notify, cache_size, deterministic=deterministic)
        if not _report(jobs, answers, timed):
            return


def _load(job: protocol.Job, binary: bytes) -> CandidateCode:
    if job.plan is None:
        return StockCode(Task(SPECS[job.key.op], job.key, job.accuracy))
    try:
        return load_candidate(binary, job.identity, job.plan, job.key)
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


def _device_refusal(error: RuntimeError, key: KernelKey, phase: str) -> Refusal:
    """What an exception out of a candidate's calls on a GPU says about it: a launch that the driver refused, or an error that
    stays until the process ends.

    Raises:
        RuntimeError: `error` itself, where it is no candidate's fault (a CPU key, or memory that ran out).
    """
    words = str(error).splitlines()[0]
    if key.device_type == "cpu" or isinstance(error, torch.OutOfMemoryError):
        raise error
    try:
        finish(device_of(key))
    except RuntimeError as sticky:
        text = f"{str(sticky).splitlines()[0]} during {phase!r}: the kernel broke the device's rules, most often by an address"
        return Refusal(Reason.CRASHED, f"{text} outside of its tensors.", *protocol.family_and_seed(phase))
    if any(word in words for word in _REFUSED_LAUNCH):
        return Refusal(Reason.BAD_PLAN, f"the driver refuses a launch: {words}", *protocol.family_and_seed(phase))
    raise error


def _placement(number: int, task: Task) -> Placement:
    """Trapping pages at the end of every third trial's buffers and at the start of another third; once each for large keys."""
    turn = number if task.spec.bytes_moved(task.key) > _LARGE_BYTES else number % 3
    if turn == 0:
        return "page_end"
    return "page_start" if turn == 1 else "heap"


def _apply_flags(key: KernelKey, threads: int) -> None:
    torch.set_num_threads(max(1, threads))
    torch.set_flush_denormal(key.flush_denormal)
    torch.backends.mkldnn.set_flags(key.mkldnn)
    if key.device_type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = key.matmul_precision == "tf32"


def _enter(box: str, device_type: DeviceType) -> str:
    """Enter the box and say which layers hold. A GPU's driver has threads of its own by now, and goes on opening devices."""
    if box == protocol.NO_BOX:
        return box
    weak = box == "weak"
    if device_type == "cpu":
        return enter_box(readable=_readable(), allow_weak_box=weak)
    nodes = sorted(Path("/dev").glob("nvidia*"))
    system = [*SYSTEM_PATHS, Path("/proc"), Path("/sys")]
    # No limit on files: nothing can be written anyway, and the driver sizes shared memory like one.
    limits = Limits(cpu_seconds=None, memory_bytes=None, open_files=None, file_bytes=None)
    return enter_box(readable=[*_readable(), *system], limits=limits, allow_weak_box=weak, devices=nodes or [Path("/dev/null")])


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
