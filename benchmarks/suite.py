"""Named sets of calls against stock and against other libraries, on one device.

    python -m benchmarks.suite --set headline --peers compile,max-autotune,liger --allow-weak-box \\
        --json benchmarks/results/headline.json
    python -m benchmarks.suite --set gpu_table,products --part 1/3 --store FOLDER --json benchmarks/results/suite.json

Each key is searched within `--budget` seconds, then timed: stock against the same call inside `enabled()`, and each peer
against that call, interleaved, one process, the same inputs, float64 checked first. `--json` adds to what the file holds, after
every row; a row that is measured anew keeps the times of peers that were not asked again, so `--no-search --peers max-autotune`
with the same `--store` times a slow peer in a call of its own. `--part i/n` takes every n-th key. `--limit` bounds the call: a
key or a peer whose turn comes too late is left out, and said.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from benchmarks.parts import merged, part_of, with_best_peer
from benchmarks.peers import PEERS, PeerTime, measure_peer
from benchmarks.shapes import SETS, keys_of
from torch_autokern import api
from torch_autokern.errors import AutokernError
from torch_autokern.judge.device import device_of
from torch_autokern.judge.measure import copy_us
from torch_autokern.ops import spec_of
from torch_autokern.report.cases import case_name
from torch_autokern.report.device import describe_device, utc_date, versions
from torch_autokern.report.keyrow import BoundCall, measure_key
from torch_autokern.report.measurement import Measurement, Row, write_json
from torch_autokern.runtime.session import session
from torch_autokern.runtime.target import local_target
from torch_autokern.search import templates
from torch_autokern.search.journal import KeyJournal
from torch_autokern.search.outcome import KeyResult, Progress
from torch_autokern.store.key import KernelKey

_ROW_S = 20.0  # what must be left for a key to begin: checks, timing, and a search that is worth its start
# Operations that an H200 multiplies while it moves one byte (sustained rates: benchmarks/gpu_cases.py). Beyond, a product is
# not limited by bytes, and has no `limit_ms` here.
_FLOPS_A_BYTE = {"float32": 50.0, "bfloat16": 168.0, "float16": 168.0}


class KeyLog(msgspec.Struct, frozen=True):
    """One searched key: how its search ended, how long it took, and every trial with the candidate's parameters."""

    case: str
    seconds: float
    outcome: str
    trials: tuple[dict[str, object], ...]


class Suite:
    """One call's work. Rows are on disk as soon as they are known."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ends = time.monotonic() + options.limit
        self.rows: dict[str, Row] = {}
        self.logs: list[KeyLog] = []
        self.left_out: list[str] = []
        self.clocks: list[tuple[int, int]] = []

    def left(self) -> float:
        """Seconds until the call must end."""
        return float(self.ends - time.monotonic())

    def run(self, keys: Sequence[KernelKey]) -> None:
        """Every key whose turn comes in time."""
        for key in keys:
            name = case_name(key)
            if self.left() < _ROW_S:
                self._leave_out(f"{name}: not measured, the call's time is up")
                continue
            try:
                self._key(key)
            except (AutokernError, RuntimeError) as error:
                self._leave_out(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            _forget(key)

    def measurement(self) -> Measurement:
        """What this call knows so far."""
        options = self.options
        settings = {
            "sets": options.set,
            "budget_s_per_key": "0" if options.no_search else f"{options.budget:g}",
            "seconds_per_row": f"{options.seconds:g}",
            "contents": "standard normal, in place",
            "peers": options.peers or "none",
        }
        if options.device == "cpu":
            settings["threads"] = str(torch.get_num_threads())
        for place, name in enumerate(("sm_clock_mhz", "memory_clock_mhz")):
            seen = [pair[place] for pair in self.clocks]
            if seen:
                settings[name] = f"{min(seen)} to {max(seen)}, read as each row ended"
        rows = tuple(self.rows.values())
        return Measurement(describe_device(options.device), versions(), utc_date(), rows, settings=settings)

    def save(self) -> Measurement:
        """This call's rows among those of the file."""
        measurement = merged(self.measurement(), self.options.json)
        if self.options.json is not None:
            measurement.save(self.options.json)
        return measurement

    def _leave_out(self, words: str) -> None:
        self.left_out.append(words)
        print(words, flush=True)

    def _key(self, key: KernelKey) -> None:
        options, name = self.options, case_name(key)
        notes = []
        if not options.no_search:
            began = time.monotonic()
            result = search_key(key, min(options.budget, self.left() - _ROW_S / 2), options.allow_weak_box)
            seconds = time.monotonic() - began
            print(f"{result}; {seconds:.0f} s", flush=True)
            notes.append(_outcome(result, seconds))
            self.logs.append(KeyLog(name, seconds, str(result), _trials(key)))
            if options.trials is not None:
                write_json(options.trials, self.logs)
        pages = "device" if options.device == "cuda" else "default"
        row = measure_key(key, api.enabled, options.seconds, pages=pages)
        self.clocks += clocks() if options.device == "cuda" else []
        if row.served is True:
            notes.append(evidence(key))
        _forget(key)
        row = msgspec.structs.replace(row, limit_ms=limit_ms(key), note="; ".join(notes) or None)
        self._keep(row)
        if options.peers:
            self._keep(self._with_peers(key, row, notes))

    def _keep(self, row: Row) -> None:
        self.rows[row.case] = row
        self.save()

    def _with_peers(self, key: KernelKey, row: Row, notes: list[str]) -> Row:
        call = BoundCall(key)
        times: dict[str, float] = {}
        words = list(notes)
        for name in self.options.peers.split(","):
            needed = PEERS[name]
            late = self.left() < needed
            found = "no time left for it" if late else measure_peer(name, call, self.options.seconds)
            if isinstance(found, PeerTime):
                times[name] = found.ms
            words.append(f"{name}: {found}")
            print(f"  {row.case}: {words[-1]}", flush=True)
            _forget(key)
        return with_best_peer(msgspec.structs.replace(row, peers_ms=times, note="; ".join(words)))


def search_key(key: KernelKey, budget_s: float, allow_weak_box: bool) -> KeyResult:
    """Record the key's call as a user's program makes it, and search kernels for it."""
    with api.record() as recording:
        BoundCall(key)()
    workload = recording.workload()
    _forget(key)
    seen = [entry.key for entry in workload.entries]
    if seen != [key]:
        print(f"the recorded key differs from the named one: {seen} against {key}", flush=True)
    said = [time.monotonic()]

    def show(event: Progress) -> None:
        if time.monotonic() - said[0] > 5:
            said[0] = time.monotonic()
            done = f"{event.built} built, {event.screened} screened, {event.judged} judged, {event.refused} refused"
            print(f"  {event.activity}: {done}, best {event.best_ratio:.2f}", flush=True)

    return api.warm(workload, budget=budget_s / 60, on_event=show, allow_weak_box=allow_weak_box).keys[0]


def limit_ms(key: KernelKey) -> float | None:
    """The least time for the key's bytes, from a copy's rate measured here; None where bytes are not what limits it."""
    spec, first = spec_of(key), next(t for t in key.tensors if t is not None)
    moved = spec.bytes_moved(key)
    if spec.uses_matmul_precision and spec.flops(key) > _FLOPS_A_BYTE[first.dtype] * moved:
        return None
    limit_us = copy_us(moved // 2, device_of(key))
    _forget(key)
    return limit_us / 1000 or None


def evidence(key: KernelKey) -> str:
    """Of the record that serves the key: its kernel, in which box it was judged, and what the sanitizers said."""
    target = local_target(key.device_type)
    fitting = [s.record for s in session().store.records(key.digest) if s.record.key == key and s.record.target == target]
    if not fitting:
        return "served from a pack"
    record = max(fitting, key=lambda record: record.verdict.timings[0].ratio_low)
    origin, checks = record.provenance, record.verdict.checks
    parameters = ", ".join(f"{name}={value}" for name, value in origin.parameters.items())
    sanitizers = ", ".join(f"{name} {words}" for name, words in checks.items() if name.startswith("sanitizer"))
    return f"{origin.template or origin.author}({parameters}); box {origin.box_level}; {sanitizers or 'no word of sanitizers'}"


def clocks() -> list[tuple[int, int]]:
    """SM and memory clock of the first GPU now, MHz; nothing where nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    words = [word.strip() for word in said.partition("\n")[0].split(",")]
    return [(int(words[0]), int(words[1]))] if len(words) == 2 and all(word.isdigit() for word in words) else []


def table(measured: Measurement) -> list[str]:
    """The rows as text, peers beside stock."""
    settings = ", ".join(f"{name} {value}" for name, value in measured.settings.items())
    head = f"{'stock us':>10} {'own us':>10} {'ratio':>6} {'interval':>15} {'of limit':>8}"
    lines = [f"{measured.device}, torch {measured.versions.get('torch')}, {measured.date}; {settings}", f"{'case':<50} {head}"]
    for row in measured.rows:
        of_limit = f"{row.limit_ms / row.autokern_ms:8.0%}" if row.limit_ms else " " * 8
        interval = f"{row.ratio_low:6.2f} - {row.ratio_high or 0:6.2f}"
        times = f"{row.stock_ms * 1000:10.1f} {row.autokern_ms * 1000:10.1f} {row.ratio:6.2f} {interval:>15} {of_limit}"
        peers = ", ".join(f"{name} {ms * 1000:.1f}" for name, ms in sorted(row.peers_ms.items(), key=lambda pair: pair[1]))
        served = "served" if row.served is True else f"not served ({row.served})"
        lines.append(f"{row.case:<50} {times}  {served}{'; ' if peers else ''}{peers}")
    return lines


def _outcome(result: KeyResult, seconds: float) -> str:
    words = f"{result.status} in {seconds:.0f} s, {result.tried} tried, judged {result.ratio:.2f}"
    return words if result.status in ("won", "already_there") else f"{words}: {result.reason[:200]}"


def _trials(key: KernelKey) -> tuple[dict[str, object], ...]:
    """Every trial of the key, with what the template was asked for."""
    parameters = {
        c.candidate_id: f"{c.template}({', '.join(f'{name}={value}' for name, value in c.parameters.items())})"
        for c in templates.propose(key, local_target(key.device_type))
    }
    trials = KeyJournal(session().store.write_root, key.digest).every()
    return tuple({"candidate": parameters.get(t.candidate_id, ""), **msgspec.to_builtins(t)} for t in trials)


def _forget(key: KernelKey) -> None:
    """Give memory back that torch keeps: the judge's processes, and the next key, share the card."""
    if key.device_type == "cuda":
        torch.cuda.empty_cache()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; what cannot be understood ends the process with 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="headline", help=f"which calls, commas between: {', '.join(SETS)}")
    parser.add_argument("--only", default="", help="only cases whose name contains one of these, separated by ;")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th key, from the i-th")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the search of each key")
    parser.add_argument("--no-search", action="store_true", help="measure what the store holds")
    parser.add_argument("--seconds", type=float, default=1.0, help="of timing a pair")
    parser.add_argument("--peers", default="", help=f"commas between: {', '.join(PEERS)}")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds for the whole call")
    kept = "keep kernels here (default: a temporary folder; your own store with --no-search)"
    parser.add_argument("--store", type=Path, default=None, help=kept)
    parser.add_argument("--json", type=Path, default=None, help="add the rows to this file")
    parser.add_argument("--trials", type=Path, default=None, help="a file for everything that was tried")
    parser.add_argument("--allow-weak-box", action="store_true", help="judge kernels although the box is weak here")
    options = parser.parse_args(arguments)
    for given, known in ((options.set, SETS), (options.peers, PEERS)):
        unknown = [name for name in given.split(",") if name and name not in known]
        if unknown:
            parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    return options


def main(arguments: Sequence[str]) -> None:
    """Search, measure, write and print; ends with 1 where a case was left out.

    Raises:
        SystemExit: nothing to do, or the file's rows are of another device.
    """
    options = parse(arguments)
    words = [word.strip() for word in options.only.split(";") if word.strip()]
    try:
        keys = part_of(keys_of(options.set.split(","), options.device, words or [""]), options.part)
        suite = Suite(options)
        merged(suite.measurement(), options.json)
    except (ValueError, AutokernError) as error:
        raise SystemExit(str(error)) from error
    if not keys:
        raise SystemExit(f"part {options.part} of {options.set} has no case that contains {options.only!r}")
    if options.store is not None or not options.no_search:
        folder = (options.store or Path(tempfile.mkdtemp(prefix="autokern-suite-"))).absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ["AUTOKERN_STORE"] = str(folder)
    # A compiler or a kernel that hangs cannot be interrupted from here: what is measured is on disk by then.
    faulthandler.dump_traceback_later(options.limit + _ROW_S, exit=True, file=2)
    try:
        suite.run(keys)
    finally:
        faulthandler.cancel_dump_traceback_later()
    print("\n".join(["", *table(suite.save()), *suite.left_out]), flush=True)
    raise SystemExit(1 if suite.left_out else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
