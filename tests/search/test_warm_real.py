"""The whole way on this machine: templates, the system's compiler in its box, the judge, the store, a served call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from torch_autokern.build.candidate import Candidate
from torch_autokern.cli.warm import warm as warm_command
from torch_autokern.errors import InvalidInputError
from torch_autokern.ops import SPECS
from torch_autokern.runtime.target import local_target
from torch_autokern.search import templates
from torch_autokern.search.engine import LocalEngine
from torch_autokern.search.loop import warm
from torch_autokern.store.folders import FolderChoice
from torch_autokern.store.key import KernelKey, Target
from torch_autokern.store.store import open_store
from torch_autokern.store.workload import SCHEMA, Workload, WorkloadEntry

# Short rows: stock handles each row apart, so a kernel that takes many rows a vector wins on any machine.
ROWS = SPECS["_softmax"].key([torch.randn(32, 12, 38, 38)], {"dim": 3, "half_to_float": False})
# No template knows float16 products.
MATMUL = SPECS["mm"].key([torch.randn(8, 8).half(), torch.randn(8, 8).half()], {})


def recorded(*keys: KernelKey) -> Workload:
    entries = tuple(WorkloadEntry(key, 10, 1000.0) for key in keys)
    # One thread: with more, a busy machine times its scheduler instead of the kernel (18 ms for a call of 0.4 ms).
    return Workload(SCHEMA, str(torch.__version__), "test", 1, 4000.0, entries)


def first_guess(key: KernelKey, target: Target) -> Sequence[Candidate]:
    return templates.propose(key, target)[:1]


def cli(*arguments: str, store: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch_autokern.cli.main", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "AUTOKERN_STORE": str(store), **environment}
    )


def test_template_is_built_judged_stored_and_found_again(tmp_path: Path) -> None:
    # A busy machine may hide a speed-up, never a wrong result: only a refusal about time is worth another try.
    for attempt in range(3):
        root = tmp_path / f"store-{attempt}"
        root.mkdir(mode=0o700)
        report = warm(recorded(ROWS, MATMUL), store=root, proposers=[first_guess])
        won = report.keys[0]
        if won.status == "won" or not any(words in won.reason for words in ("all slower", "timing_unstable")):
            break
    assert won.status == "won" and won.ratio_low > 1.02, won.reason
    assert report.keys[1].status == "not_won" and "no proposer" in report.keys[1].reason
    stored = open_store(choice=FolderChoice(root, "test")).get(ROWS.digest, won.record_id)
    assert stored is not None and set(stored.data) == {"kernel.so", "plan.json", "source.cpp"}
    assert "seccomp" in stored.record.provenance.box_level
    again = warm(recorded(ROWS), store=root, proposers=[first_guess])
    assert again.keys[0].status == "already_there" and again.seconds < 5


def test_broken_candidates_are_refused_by_the_builder_with_a_reason() -> None:
    good = first_guess(ROWS, _target())[0]
    broken = [_with(good, good.source + "\nint x = ;"), _with(good, good.source + '\nvoid g() { asm("nop"); }')]
    broken.append(_with(good, good.source + "\nstatic int n; __attribute__((used)) int h() { return ++n; }"))
    refusals = {candidate.candidate_id: found for candidate, found in LocalEngine().build(broken, _target(), ROWS)}
    reasons = [refusals[candidate.candidate_id].reason.value for candidate in broken]  # type: ignore[union-attr]
    assert reasons == ["build_failed", "build_failed", "static_rule"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": 0.0}, "--budget"),
        ({"budget": float("nan")}, "--budget"),
        ({"accuracy": "nearly"}, "nearly"),
        ({"atol": 1.0}, "--atol"),
        ({"accuracy": "tolerance"}, "tolerance"),
    ],
)
def test_bad_options_are_named(options: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOKERN_STORE", str(tmp_path / "store"))
    recorded(ROWS).save(tmp_path / "w.json")
    with pytest.raises(InvalidInputError, match=words):
        warm_command(tmp_path / "w.json", **options)  # type: ignore[arg-type]


def test_missing_compiler_is_one_line_and_code_two(tmp_path: Path) -> None:
    recorded(ROWS).save(tmp_path / "w.json")
    run = cli("warm", str(tmp_path / "w.json"), store=tmp_path / "store", PATH="/nowhere")
    assert run.returncode == 2 and "no C++ compiler found" in run.stderr and "calls stay stock" in run.stderr, run.stderr


def test_nothing_to_win_prints_why_as_table_and_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(MATMUL).save(tmp_path / "w.json")
    run = cli("warm", str(tmp_path / "w.json"), store=tmp_path / "store")
    assert run.returncode == 0 and "not won" in run.stdout and "no proposer" in run.stdout, run.stderr
    monkeypatch.setenv("AUTOKERN_STORE", str(tmp_path / "store"))
    capsys.readouterr()
    warm_command(tmp_path / "w.json", as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert answer["keys"][0]["status"] == "not_won" and answer["candidates"] == 0


def test_ctrl_c_says_how_to_continue_and_exits_130(tmp_path: Path) -> None:
    recorded(ROWS).save(tmp_path / "w.json")
    command = [sys.executable, "-m", "torch_autokern.cli.main", "warm", str(tmp_path / "w.json")]
    store = tmp_path / "store"
    child = subprocess.Popen(
        command, env={**os.environ, "AUTOKERN_STORE": str(store)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background shell leaves it ignored
    )  # fmt: skip
    deadline = time.monotonic() + 60
    # Its lock file says that the search has begun.
    while not list(store.glob("v1/locks/quiet-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    stdout, stderr = child.communicate(timeout=120)
    assert child.returncode == 130, stderr
    assert "continue with: autokern warm" in stderr and "not tried" in stdout


def _target() -> Target:
    return local_target()


def _with(candidate: Candidate, source: str) -> Candidate:
    return Candidate(candidate.language, source, candidate.plan, candidate.idea, candidate.author)
