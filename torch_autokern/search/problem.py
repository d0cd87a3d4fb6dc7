"""What a search is about: a word on the command line to a workload, in one place.

A word is the path of a workload (what `autokern record` wrote), the path of a key (as `autokern judge` takes it), or
``SCHEME:REST`` for a scheme that is registered in `SCHEMES`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from torch_autokern.errors import InvalidInputError
from torch_autokern.judge.submission import read_key
from torch_autokern.store.key import KernelKey
from torch_autokern.store.workload import SCHEMA, Workload, WorkloadEntry, load_workload


def _kernelbench(rest: str, threads: int) -> Workload:
    from torch_autokern.search.kernelbench import load_problem

    workload = load_problem(Path(rest), "cuda" if torch.cuda.is_available() else "cpu").workload()
    return msgspec.structs.replace(workload, threads=threads)


# Other ways to name a problem: each maps what follows the colon, and the threads to tune for, to a workload.
SCHEMES: dict[str, Callable[[str, int], Workload]] = {"kernelbench": _kernelbench}


def resolve(word: str, threads: int | None = None) -> Workload:
    """The workload that a word stands for.

    Args:
        threads: intra-op threads to tune CPU keys for; None: as recorded, or as torch has them now.

    Raises:
        InvalidInputError: no such file, neither workload nor key, or an unknown scheme.
    """
    if threads is not None and not 1 <= threads <= len(os.sched_getaffinity(0)):
        raise InvalidInputError(f"--threads {threads}: this process may use {len(os.sched_getaffinity(0))} cores")
    scheme, colon, rest = word.partition(":")
    if colon and scheme in SCHEMES:
        return SCHEMES[scheme](rest, threads or torch.get_num_threads())
    path = Path(word)
    if not path.is_file():
        known = "".join(f", {name}:..." for name in SCHEMES)
        raise InvalidInputError(f"{word} is no file; name a workload (autokern record), a key.json (autokern judge){known}")
    workload = load_workload(path) if _is_workload(path) else of_key(read_key(path), threads or torch.get_num_threads())
    return workload if threads is None else msgspec.structs.replace(workload, threads=threads)


def of_key(key: KernelKey, threads: int) -> Workload:
    """A workload of one key, all of its time."""
    return Workload(SCHEMA, str(torch.__version__), "", threads, 1.0, (WorkloadEntry(key, 1, 1.0),))


def _is_workload(path: Path) -> bool:
    try:
        fields = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise InvalidInputError(f"{path} is neither a workload nor a key: {error}") from error
    return "entries" in fields
