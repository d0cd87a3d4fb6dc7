"""Opening a pack of 1,000 kernels and building the table, verification included: ``python -m benchmarks.pack_open --json
FILE``.

Every kernel has a key and a library of its own. Two packs: kernels for four kinds of machine, a quarter of them for this one,
as a pack for a fleet is; and all of them for this one, the worst case. Fresh processes, torch and the package imported before;
what is timed is what `optimize` does at its first use: read the file, check both signatures, parse every line, read the records
that fit, check each against its line and its ELF, load the libraries, choose, and swap the table. What each part costs and what
stands between the worst case and the limit: `benchmarks/notes/pack_open.md`.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch

from benchmarks.overhead_kernels import _SOURCES
from torch_autokern.build.candidate import Candidate
from torch_autokern.build.compile_cpp import compile_cpp
from torch_autokern.report.device import describe_device, utc_date, versions
from torch_autokern.report.measurement import write_json
from torch_autokern.runtime.extension import extension
from torch_autokern.runtime.pack_facts import read_binaries
from torch_autokern.runtime.plan import PLAN_VERSION, CpuStep, InputArg, LaunchPlan, OutputArg, encode_plan
from torch_autokern.runtime.session import session
from torch_autokern.runtime.table import build_rows
from torch_autokern.runtime.target import local_target, stock_build
from torch_autokern.store.key import KernelKey, Target, TensorKey
from torch_autokern.store.pack_build import PackOptions, build_pack, sign_pack
from torch_autokern.store.pack_file import ROLES, Envelope
from torch_autokern.store.pack_install import install_pack
from torch_autokern.store.pack_refusal import PackRefusal
from torch_autokern.store.record import KernelRecord, Provenance, StoredRecord, Timing, Verdict, decode_record, encode_record
from torch_autokern.store.trust import add_key, change_policy
from torch_autokern.store.trust_keys import SECRET_SCHEMA, SecretKey

KERNELS = 1000
LIMIT_MS = 300.0
CASES = {"four kinds of machine": 4, "all for this machine": 1}


class PackOpenTimes(msgspec.Struct, frozen=True):
    """One process, in milliseconds. `torch_ms`: modules that torch imports at a process's first call on meta tensors, by which
    every first table asks for stock's layouts; it comes with or without packs and is not in the sum. `open_ms`: file,
    signatures, lines. `read_ms`: records that fit, each against line and ELF, and notes about them; a thread opens a library as
    soon as its record is checked. `load_ms`: waiting for the last of them, and binding. `table_ms`: choose and swap."""

    torch_ms: float
    open_ms: float
    read_ms: float
    load_ms: float
    table_ms: float
    served: int

    @property
    def total_ms(self) -> float:
        """All of it."""
        return self.open_ms + self.read_ms + self.load_ms + self.table_ms


class PackOpenCase(msgspec.Struct, frozen=True):
    """Medians over the processes, and the spread of the sum."""

    case: str
    kernels: int
    served: int
    pack_bytes: int
    torch_ms: float
    open_ms: float
    read_ms: float
    load_ms: float
    table_ms: float
    total_ms: float
    total_ms_min: float
    total_ms_max: float


class PackOpen(msgspec.Struct, frozen=True):
    """What was measured, where."""

    device: str
    versions: dict[str, str]
    date: str
    processes: int
    cases: tuple[PackOpenCase, ...]
    limit_ms: float = LIMIT_MS


def measure(case: str, kernels: int, processes: int) -> PackOpenCase:
    """Build a pack, install it once (a child tries its kernels then), and open it in fresh processes."""
    with tempfile.TemporaryDirectory(prefix="autokern-bench-") as folder:
        environment = {**os.environ, "AUTOKERN_STORE": folder, "AUTOKERN_PREBUILT": "0"}
        told = [sys.executable, "-m", "benchmarks.pack_open", "--prepare", folder, "--case", case, "--kernels", str(kernels)]
        subprocess.run(told, env=environment, check=True)
        found = [_child(environment) for _ in range(processes + 1)][1:]  # the first fills the disk cache and tries the kernels
        (file,) = (Path(folder) / "packs").glob("*.akpack")
        size = file.stat().st_size
    names = ("torch_ms", "open_ms", "read_ms", "load_ms", "table_ms", "total_ms")
    middle = {name: statistics.median(getattr(times, name) for times in found) for name in names}
    totals = [times.total_ms for times in found]
    return PackOpenCase(case, kernels, found[0].served, size, **middle, total_ms_min=min(totals), total_ms_max=max(totals))


def prepare(folder: Path, kinds: int, kernels: int) -> None:
    """A signed pack of distinct kernels, `kinds` machines in turn, installed in a state folder."""
    here = local_target()
    levels = [here.arch, *(level for level in ("x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4") if level != here.arch)]
    targets = [Target("cpu", here.name, level, here.threads) for level in levels[:kinds]]
    entry, source = _SOURCES["_softmax"]
    plan = LaunchPlan(PLAN_VERSION, (CpuStep(entry, 1, 1, (InputArg(0), OutputArg(0))),))
    made = compile_cpp(Candidate("cpp", source, plan, "a plain loop", "benchmarks"), here)
    records = [
        _record(number, targets[number % kinds], source, made.binary, made.identity, made.tools) for number in range(kernels)
    ]
    envelope = build_pack(records, PackOptions("bench", 1, "Apache-2.0"), read_binaries)
    assert isinstance(envelope, Envelope), envelope
    keys = [SecretKey(SECRET_SCHEMA, role, "bench", secrets.token_hex(32)) for role in ROLES]
    for key in keys:
        change_policy(folder, lambda policy, key=key: add_key(policy, key.public()))  # type: ignore[misc]
    outcome = install_pack(sign_pack(envelope, keys), folder, read_binaries)
    assert not isinstance(outcome, PackRefusal), outcome


def _record(number: int, target: Target, source: str, binary: bytes, identity: str, tools: dict[str, str]) -> StoredRecord:
    """A right kernel for (number + 1, 8) float32; its library is its own by the identity in it."""
    mine = f"{number:064x}"
    layout = TensorKey("float32", (number + 1, 8), (8, 1), 4)
    key = KernelKey("_softmax", "cpu", (layout,), {"dim": 1, "half_to_float": False}, (layout,))
    plan = LaunchPlan(PLAN_VERSION, (CpuStep("softmax", number + 1, 64, (InputArg(0), OutputArg(0))),))
    timings = (Timing("eager", "resident", 10.0, 5.0, 2.0, 1.5, 2.5, 40, 3),)
    verdict = Verdict("stock", 0.0, 0.0, "run_to_run", (), {}, {}, timings, 1)
    origin = Provenance(mine, "benchmarks", "a plain loop", "cpp", "", {}, (), "0" * 64, tools, "", "2026-01-01T00:00:00Z")
    data = {
        "kernel.so": binary.replace(identity.encode(), mine.encode()),
        "plan.json": encode_plan(plan),
        "source.cpp": source.encode(),
    }
    return decode_record(encode_record(KernelRecord(key, target, stock_build(), verdict, origin, ()), data))


def open_once() -> PackOpenTimes:
    """What a session does at its first use, step by step."""
    current, native = session(), extension()
    marks = [time.perf_counter()]
    torch.softmax(torch.empty(1, device="meta"), 0)
    marks.append(time.perf_counter())
    current._open_packs()
    marks.append(time.perf_counter())
    begun = current.begin_loading()
    marks.append(time.perf_counter())
    servables = [servable for finish in begun if (servable := finish()) is not None]
    marks.append(time.perf_counter())
    rows = build_rows(servables)
    native.set_table(rows)
    marks.append(time.perf_counter())
    times = [1e3 * (marks[number + 1] - marks[number]) for number in range(len(marks) - 1)]
    first, opened, read, loaded, chosen = times
    return PackOpenTimes(first, opened, read, loaded, chosen, len(rows))


def _child(environment: dict[str, str]) -> PackOpenTimes:
    told = [sys.executable, "-m", "benchmarks.pack_open", "--child"]
    output = subprocess.run(told, env=environment, check=True, capture_output=True).stdout
    return msgspec.json.decode(output, type=PackOpenTimes)


def main() -> None:
    """Print the result and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--kernels", type=int, default=KERNELS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--prepare", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        sys.stdout.write(msgspec.json.encode(open_once()).decode())
        return
    if options.prepare:
        prepare(options.prepare, CASES[options.case], options.kernels)
        return
    cases = tuple(measure(case, options.kernels, options.processes) for case in CASES)
    for case in cases:
        print(
            f"{case.kernels} kernels, {case.case}, {case.pack_bytes / 1e6:.1f} MB: {case.served} served after "
            f"{case.total_ms:.0f} ms ({case.total_ms_min:.0f} to {case.total_ms_max:.0f}): open {case.open_ms:.0f}, read "
            f"{case.read_ms:.0f}, load {case.load_ms:.0f}, table {case.table_ms:.0f}; limit {LIMIT_MS:.0f}. "
            f"Torch's own first call: {case.torch_ms:.0f}"
        )
    if options.json:
        write_json(options.json, PackOpen(describe_device(), versions(), utc_date(), options.processes, cases))


if __name__ == "__main__":
    main()
