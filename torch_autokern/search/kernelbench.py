"""KernelBench problems as they are: a Python file with `Model(nn.Module)`, `get_inputs()` and `get_init_inputs()`.

A problem file is somebody's program. Naming one means executing it: that happens in a process of its own, in the same box as a
compiler (no network, nothing writable but a scratch folder, limits on time and memory), and all that comes back is JSON: the
key, whose graph says what the model computes. Neither inputs nor parameters are ever made there, so a problem of 30 GB is read
as quickly as a small one. (Format: KernelBench, github.com/ScalingIntelligence/KernelBench.)
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec
import torch

from torch_autokern.build.box import SYSTEM_PATHS, BoxResult, Limits, run_boxed
from torch_autokern.errors import InvalidInputError
from torch_autokern.ops import spec_of
from torch_autokern.runtime.target import local_target
from torch_autokern.search.kernelbench_child import Found
from torch_autokern.store.key import DeviceType, KernelKey
from torch_autokern.store.workload import SCHEMA, Workload, WorkloadEntry

MAX_PROBLEM_BYTES = 1 << 20
_BOOT = (
    "import sys; sys.path[:] = sys.argv[3:]; from torch_autokern.search.kernelbench_child import main; "
    "sys.exit(main(sys.argv[1:3]))"
)


class Problem(msgspec.Struct, frozen=True):
    """A problem: its name (the file's, without suffix) and the key of its model's call."""

    name: str
    key: KernelKey

    def workload(self) -> Workload:
        """The problem as a recording of one call, for `warm` and the search."""
        target = local_target()
        entry = WorkloadEntry(self.key, 1, 0.0)
        return Workload(SCHEMA, str(torch.__version__), target.name, target.threads, 0.0, (entry,))


def load_problem(path: Path, device_type: DeviceType = "cpu", *, allow_weak_box: bool = False) -> Problem:
    """Execute a problem file in the box and take its key.

    Args:
        path: the file; ``kernelbench:FILE`` on a command line names the same.
        device_type: where the model is to run ("cpu" or "cuda"; the device itself is not needed).

    Raises:
        InvalidInputError: no such file, no problem, or a model that cannot be one op; the message says why.
        BoxError: the box could not be set up.
    """
    if not path.is_file():
        raise InvalidInputError(f"no problem: {path} is no file; expected one with Model, get_inputs and get_init_inputs")
    if path.stat().st_size > MAX_PROBLEM_BYTES:
        raise InvalidInputError(f"{path} is larger than {MAX_PROBLEM_BYTES} bytes: that is no problem file")
    with tempfile.TemporaryDirectory() as scratch:
        result = _run(path.resolve(), device_type, Path(scratch), allow_weak_box)
    found = _answer(path, result)
    if found.key is None:
        raise InvalidInputError(f"{path} is no problem that can be one op: {found.reason}")
    spec_of(found.key)  # refuses a key whose graph is not what it says
    return Problem(path.stem, found.key)


def _run(path: Path, device_type: DeviceType, scratch: Path, allow_weak_box: bool) -> BoxResult:
    package = Path(__file__).parents[2]
    search = [str(package), *(entry for entry in sys.path if entry and Path(entry).exists())]
    prefixes = {Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parents[1]}
    readable = [*SYSTEM_PATHS, Path("/proc/self"), Path("/proc/cpuinfo"), path, Path(__file__).parents[1], *prefixes]
    readable += [Path(entry) for entry in search[1:]]
    return run_boxed(
        [sys.executable, "-B", "-c", _BOOT, str(path), device_type, *search],
        scratch=scratch,
        readable=[place for place in dict.fromkeys(readable) if place.exists()],
        limits=Limits(memory_bytes=None if device_type == "cuda" else 16 << 30),  # torch's CUDA libraries alone map more
        environment={"OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1"},
        allow_weak_box=allow_weak_box,
    )


def _answer(path: Path, result: BoxResult) -> Found:
    if result.timed_out:
        raise InvalidInputError(f"{path} ran past {Limits().wall_seconds:.0f} s and was ended")
    lines = result.stdout.decode(errors="replace").strip().splitlines()
    try:
        return msgspec.json.decode(lines[-1] if lines else "", type=Found)
    except msgspec.DecodeError as error:
        words = result.stderr.decode(errors="replace").strip().splitlines()
        raise InvalidInputError(
            f"{path} gave no answer: {words[-1] if words else f'it ended with {result.returncode}'}"
        ) from error
