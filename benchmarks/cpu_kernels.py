"""The built-in CPU templates alone, without search or store: ``python -m benchmarks.cpu_kernels --json FILE``.

For each case every proposed candidate is built and checked against float64, and the quickest of a short interleaved screen is
timed against stock: random ABBA blocks, median of paired ratios with its interval. Output pages are resident on both sides: the
process starts itself again with glibc's thresholds raised, so that neither side pays for fresh pages.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.shapes import SETS
from torch_autokern.build.compile_cpp import compile_cpp
from torch_autokern.report.cases import Case, case_name
from torch_autokern.report.device import describe_device, utc_date, versions
from torch_autokern.report.keyrow import BoundCall
from torch_autokern.report.measurement import Measurement, Row
from torch_autokern.report.paired import Side, paired_times
from torch_autokern.runtime.kernel import LoadedKernel, load_cpu_kernel
from torch_autokern.runtime.target import local_target
from torch_autokern.search.templates import propose
from torch_autokern.store.key import KernelKey

RESIDENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 40),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
ERROR_FACTOR = 2.0  # worst element, of stock's; the judge's full rule is not this benchmark's question
UNIT_ROUNDOFF = 2.0**-24


def with_resident_pages() -> None:
    """Replace this process by one whose allocator keeps its pages, unless it is that one."""
    if os.environ.get("MALLOC_MMAP_THRESHOLD_") != RESIDENT["MALLOC_MMAP_THRESHOLD_"]:
        environment = {**os.environ, **RESIDENT}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.cpu_kernels", *sys.argv[1:]], environment)


class Own:
    """One loaded candidate bound to the inputs of a call."""

    def __init__(self, name: str, kernel: LoadedKernel, call: BoundCall) -> None:
        self.name = name
        self._kernel = kernel
        self._tensors = call.inputs.tensors

    def __call__(self) -> tuple[torch.Tensor, ...]:
        """Allocate results as stock does, and run."""
        return tuple(t for t in self._kernel.run(self._tensors) if t is not None)


def candidates_of(key: KernelKey, call: BoundCall) -> list[Own]:
    """Every proposal for this machine, built by the real builder and loaded by the real loader."""
    target = local_target()
    loaded = []
    for candidate in propose(key, target):
        artifact = compile_cpp(candidate, target)
        kernel = load_cpu_kernel(artifact.binary, artifact.identity, candidate.plan, key)
        values = ", ".join(f"{name}={value}" for name, value in candidate.parameters.items())
        loaded.append(Own(f"{candidate.template}({values})", kernel, call))
    return loaded


def quickest(works: list[Own], seconds: float) -> Own:
    """The candidate with the smallest lower quartile over interleaved calls."""
    samples: list[list[float]] = [[] for _ in works]
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(samples[0]) < 5:
        for work, times in zip(works, samples, strict=True):
            times.append(_seconds(work))
    quartiles = [sorted(times)[len(times) // 4] for times in samples]
    return works[quartiles.index(min(quartiles))]


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure_case(case: Case, seconds: float) -> Row:
    """Check every candidate, screen, then time the quickest against stock."""
    key = case.key()
    call = BoundCall(key)
    works = candidates_of(key, call)
    stock_error, *errors = call.errors(call.results(), *(work() for work in works))
    last_place = torch.finfo(getattr(torch, next(t for t in key.outputs if t is not None).dtype)).eps
    limit = max(ERROR_FACTOR * stock_error, 4 * UNIT_ROUNDOFF, last_place)
    right = [(work, error) for work, error in zip(works, errors, strict=True) if error <= limit]
    if not right:
        none = float("nan")
        return Row(case_name(key), "stock", none, none, none, none, none, stock_error, "no right candidate")
    best = quickest([work for work, _ in right], seconds / 3)
    error = next(error for work, error in right if work is best)
    times = paired_times(Side(call), Side(best), seconds)
    return Row(
        case=case_name(key),
        accuracy_class="stock",
        stock_ms=times.stock_ms,
        autokern_ms=times.own_ms,
        ratio=times.interval.ratio,
        ratio_low=times.interval.low,
        ratio_high=times.interval.high,
        error=error,
        stock_error=stock_error,
        served=True,
        pages="resident",
        note=best.name
        if len(right) == len(works)
        else f"{best.name}; {len(works) - len(right)} candidates beyond the error limit",
    )


def print_row(row: Row) -> None:
    """One line of the table."""
    if math.isnan(row.ratio):
        print(f"{row.case:<44} {row.served}")
        return
    print(
        f"{row.case:<44} stock {row.stock_ms:8.3f} ms  own {row.autokern_ms:8.3f} ms  ratio {row.ratio:5.2f} "
        f"[{row.ratio_low:.2f}, {row.ratio_high:.2f}]  error {row.error:.1e} (stock {row.stock_error:.1e})  {row.note}",
        flush=True,
    )


def main() -> None:
    """Measure a set of shapes, print it and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--set", choices=sorted(SETS), default="cpu_table", help="which shapes")
    parser.add_argument("--only", default="", help="measure only cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each case")
    options = parser.parse_args()
    with_resident_pages()
    print(f"{describe_device()}; {versions()}; pages resident on both sides")
    rows = []
    for case in SETS[options.set]:
        if options.only in case_name(case.key()):
            rows.append(measure_case(case, options.seconds))
            print_row(rows[-1])
    if options.json:
        Measurement(describe_device(), versions(), utc_date(), tuple(rows), settings={"pages": "resident"}).save(options.json)


if __name__ == "__main__":
    main()
