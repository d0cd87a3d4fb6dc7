"""A pack's kernels, tried in a child before this machine runs them for the first time.

Their proof was made elsewhere. A child loads each kernel here and compares one call with float64; a crash costs the child,
names the kernel and quarantines it. What passed is remembered per device, driver and torch, so that it is asked once. This is a
smoke test, not a proof: `autokern pack verify --replay` is one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from torch_autokern.store.files import Unread, make_folders, publish_file, read_file
from torch_autokern.store.key import Target, canonical_json
from torch_autokern.store.lock import work_lock
from torch_autokern.store.record import StoredRecord, encode_record

_LOG = logging.getLogger("torch_autokern")
_MAX_BYTES = 16 << 20
_START_S, _EACH_S = 90.0, 5.0
WAITS = "waits:"  # begins a child's words on a kernel that is as good as ever, but not for this process
_MAX_CRASHES = 8  # a pack that kills so many children is not worth another
PACKAGE_PARENT = str(Path(__file__).parents[2])


class SmokeResults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one machine knows: record ids that passed, and why others did not."""

    passed: tuple[str, ...] = ()
    failed: dict[str, str] = {}


class SmokeLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the child: a kernel's number, and how it went ("start", "ok", or the words of a failure)."""

    number: int
    words: str


def smoke_test(records: Sequence[tuple[StoredRecord, int]], target: Target, state: Path | None) -> dict[str, str]:
    """Try kernels that were not tried on this machine yet; `records` are (record, index of the GPU or 0).

    Returns:
        Why a kernel must not run here, by record id; those that passed are left out.
    """
    machine = _machine(target)
    known = _read(state, machine)
    done = {*known.passed, *known.failed}
    pending = [entry for entry in records if entry[0].record_id not in done]
    if pending:
        with work_lock(state, f"smoke-{machine}", timeout_s=120.0):
            known = _merge(_read(state, machine), known)  # another process may have tried them meanwhile
            done = {*known.passed, *known.failed}
            pending = [entry for entry in pending if entry[0].record_id not in done]
            if pending:
                known = _merge(known, _try_all(pending))
                _write(state, machine, known)
    passed = set(known.passed)
    words = "its smoke test did not run"
    return {s.record_id: known.failed.get(s.record_id, words) for s, _ in records if s.record_id not in passed}


def passed_before(target: Target, state: Path | None) -> frozenset[str]:
    """Ids of the records that passed on this machine before."""
    known = _read(state, _machine(target))
    return frozenset(known.passed) - known.failed.keys()


def _machine(target: Target) -> str:
    """What has to be the same for a kernel that was tried to count as tried: device, driver and torch."""
    facts = target.name, target.arch, str(torch.__version__), _driver(target)
    return hashlib.sha256(canonical_json(facts)).hexdigest()[:32]


def _try_all(records: Sequence[tuple[StoredRecord, int]]) -> SmokeResults:
    """Children, one after another, until every kernel has an answer; a crash takes out the kernel that it happened in."""
    passed: list[str] = []
    failed: dict[str, str] = {}
    rest = list(records)
    for _ in range(_MAX_CRASHES):
        if not rest:
            break
        lines, ending = _run_child(rest)
        started = -1
        for line in lines:
            name = rest[line.number][0].record_id
            started = line.number
            if line.words == "ok":
                passed.append(name)
            elif line.words != "start":
                failed[name] = line.words if line.words.startswith(WAITS) else f"smoke test: {line.words}"
        answered = {*passed, *failed}
        if started < 0:  # it did not come to the first kernel: nobody's fault, asked again by the next process
            _LOG.warning("kernels of packs are not used: the smoke test's child did not start: %s", ending)
            break
        culprit = rest[started][0].record_id
        if culprit not in answered:
            failed[culprit] = f"smoke test: the child {ending}"
        rest = [entry for entry in rest if entry[0].record_id not in {*passed, *failed}]
    return SmokeResults(tuple(sorted(passed)), failed)


def _run_child(records: Sequence[tuple[StoredRecord, int]]) -> tuple[list[SmokeLine], str]:
    """(lines in order, how the child ended)."""
    search_path = os.pathsep.join(filter(None, (PACKAGE_PARENT, os.environ.get("PYTHONPATH", ""))))
    command = [sys.executable or "python3", "-m", "torch_autokern.runtime.smoke_child"]
    try:
        with tempfile.TemporaryFile() as jobs, tempfile.TemporaryFile() as answers:
            for stored, place in records:
                body = encode_record(stored.record, stored.data)
                jobs.write(len(body).to_bytes(8, "little") + place.to_bytes(4, "little") + body)
            jobs.seek(0)
            environment = {**os.environ, "PYTHONPATH": search_path, "AUTOKERN_DISABLE": "1"}
            try:
                ended = subprocess.run(
                    command, stdin=jobs, stdout=answers, stderr=subprocess.DEVNULL, env=environment, check=False,
                    timeout=_START_S + _EACH_S * len(records), start_new_session=True,
                )  # fmt: skip
                code = ended.returncode
                words = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            except subprocess.TimeoutExpired:
                words = "did not finish in time"
            answers.seek(0)
            return _lines(answers.read(_MAX_BYTES), len(records)), words
    except OSError as error:
        return [], str(error)


def _lines(raw: bytes, count: int) -> list[SmokeLine]:
    found = []
    for line in raw.splitlines():
        try:
            answer = msgspec.json.decode(line, type=SmokeLine)
        except msgspec.MsgspecError:
            continue
        if 0 <= answer.number < count:
            found.append(answer)
    return found


def _driver(target: Target) -> str:
    if target.device_type == "cpu":
        return ""
    try:
        return str(getattr(torch._C, "_cuda_getDriverVersion")())  # noqa: B009 - a CPU-only torch has none
    except (AttributeError, RuntimeError):
        return "unknown"


def _read(state: Path | None, machine: str) -> SmokeResults:
    if state is None:
        return _in_memory.get(machine, SmokeResults())
    content = read_file(state / "smoke" / f"{machine}.json", _MAX_BYTES)
    if isinstance(content, Unread):
        return _in_memory.get(machine, SmokeResults())
    try:
        return msgspec.json.decode(content.data, type=SmokeResults)
    except (msgspec.MsgspecError, RecursionError):
        return SmokeResults()


def _write(state: Path | None, machine: str, results: SmokeResults) -> None:
    _in_memory[machine] = results
    if state is None:
        return
    try:
        make_folders(state, state / "smoke")
        publish_file(state / "smoke" / f"{machine}.json", canonical_json(results), state, replace=True)
    except OSError as error:
        _LOG.info("smoke tests are not remembered: %s", error)


def _merge(first: SmokeResults, second: SmokeResults) -> SmokeResults:
    failed = {**first.failed, **second.failed}
    return SmokeResults(tuple(sorted({*first.passed, *second.passed} - failed.keys())), failed)


_in_memory: dict[str, SmokeResults] = {}
