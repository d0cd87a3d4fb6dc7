"""KernelBench problems: read in the box, timed in a process of their own, and what each rule calls correct."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch
from rms_norm import candidate
from typer.testing import CliRunner

from benchmarks import kernelbench, kernelbench_problems
from benchmarks.kernelbench_worker import Row
from torch_autokern.cli.main import app
from torch_autokern.errors import InvalidInputError
from torch_autokern.judge.functions import cut_of, too_large
from torch_autokern.judge.outcome import Reason
from torch_autokern.judge.verdict import close_screen
from torch_autokern.ops import spec_of
from torch_autokern.search.kernelbench import load_problem
from torch_autokern.search.kernelbench_child import read_problem
from torch_autokern.search.nodes import Measured, Outcome
from torch_autokern.search.run import open_run

ROOT = Path(__file__).parents[2]
_OF_TIME = (Reason.NOT_FASTER, Reason.TIMING_UNSTABLE)
PROBLEM = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-5)
def get_inputs():
    return [torch.randn(4, 64, 32, 32)]
def get_init_inputs():
    return []
"""


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("problems")
    kernelbench_problems.write(folder, "small")
    return folder


def test_every_problem_of_our_families_is_one_op(problems: Path) -> None:
    refused = {}
    for problem in kernelbench_problems.PROBLEMS:
        found = read_problem(problems / kernelbench_problems.file_name(problem), "cpu")
        if found.key is None:
            refused[problem.number] = found.reason
            continue
        spec = spec_of(found.key)
        tensors = [torch.randn(t.sizes) for t in found.key.tensors if t is not None]
        (made,) = spec.stock(tensors, found.key.scalars)
        assert made.shape == found.key.outputs[0].sizes  # type: ignore[union-attr]
    assert not refused


def test_full_sizes_are_read_without_their_memory(tmp_path: Path) -> None:
    kernelbench_problems.write(tmp_path, "current")
    found = read_problem(tmp_path / "36_rms_norm.py", "cpu")
    assert found.key is not None and found.key.tensors[0] is not None
    assert found.key.tensors[0].sizes == (112, 64, 512, 512)


def test_full_sizes_can_be_judged_in_slices(tmp_path: Path) -> None:
    kernelbench_problems.write(tmp_path, "current")
    refused, cut, gpu = {}, {}, {}
    for problem in kernelbench_problems.PROBLEMS:
        key = read_problem(tmp_path / kernelbench_problems.file_name(problem), "cpu").key
        assert key is not None
        reason, found = too_large(key), cut_of(key)
        refused |= {} if reason is None else {problem.number: reason}
        cut |= {} if found is None else {problem.number: (found.size, found.inputs)}
        on_gpu = msgspec.structs.replace(key, device_type="cuda")
        assert too_large(on_gpu) is None
        found = cut_of(on_gpu)
        gpu |= {} if found is None else {problem.number: (found.size, found.inputs)}
    assert cut.keys() == {3, 4, 7, 9, 23, 24, 36} and gpu.keys() == {4, 7, 9, 11, 23, 24, 36}
    assert cut[36] == (112, (0,)) and cut[7] == (32768, (0, None)) and gpu[11] == (8, (0, None))
    # 6: both operands have 2^27 elements, and every result needs all of one. 11: an eighth of the batch has 10^8.
    assert refused.keys() == {6, 11} and "argument 1 would be used whole" in refused[6] and "joins it" in refused[11]


def test_a_problem_is_executed_in_the_box_and_gives_a_workload(problems: Path) -> None:
    problem = load_problem(problems / "36_rms_norm.py", allow_weak_box=True)
    assert problem.key == read_problem(problems / "36_rms_norm.py", "cpu").key
    assert problem.workload().entries[0].key == problem.key


@pytest.mark.long
def test_a_problem_can_neither_write_nor_read_what_is_not_its_own(tmp_path: Path) -> None:
    private = tmp_path / "private.txt"
    private.write_text("a word")
    path = tmp_path / "problem.py"
    path.write_text(f"open({str(private)!r}).read()\n")
    with pytest.raises(InvalidInputError, match=r"PermissionError|FileNotFoundError"):
        load_problem(path, allow_weak_box=True)
    path.write_text(f"open({str(tmp_path / 'new.txt')!r}, 'w').write('x')\n")
    with pytest.raises(InvalidInputError, match=r"PermissionError|FileNotFoundError|OSError"):
        load_problem(path, allow_weak_box=True)


def test_what_is_no_problem_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="is no file"):
        load_problem(tmp_path / "absent.py")
    path = tmp_path / "problem.py"
    path.write_text("x = 1\n")
    assert "does not define Model, get_inputs, get_init_inputs" in read_problem(path, "cpu").reason


def row(ratio: float, loose: bool, tight: bool, judge: str, error: str = "") -> Row:
    return Row("p", {"eager": ratio, "ours": 1.0}, ratio, {"1e-2": loose, "1e-4": tight}, judge, 1, error)


def test_fast_p_counts_correct_and_faster_of_all_and_means_are_over_the_correct() -> None:
    rows = [
        row(4.0, True, True, "passes"),
        row(1.0, True, True, "passes"),
        row(9.0, True, False, "refused: normal"),
        row(3.0, False, False, "refused: normal"),
        row(0.0, False, False, "not judged", "it died"),
    ]
    loose, tight, judged = (kernelbench.summarise(rows, rule) for rule in kernelbench.RULES)
    assert (loose.correct, tight.correct, judged.correct) == (3, 2, 2)
    assert loose.fast == {"0": 0.6, "1": 0.4, "1.5": 0.4, "2": 0.4}
    assert judged.fast["1"] == 0.2, "a ratio of exactly 1 is not faster"
    assert judged.geometric_mean == pytest.approx(2.0)
    assert loose.geometric_mean == pytest.approx(36 ** (1 / 3))
    assert kernelbench.summarise([rows[-1]], "judge").geometric_mean == 0.0


def test_parts_cover_every_problem_once_and_a_wrong_one_is_an_error(problems: Path) -> None:
    parts = [kernelbench.chosen(problems, f"{i}/4") for i in range(1, 5)]
    together = [path for part in parts for path in part]
    assert len(together) == len(set(together)) == len(kernelbench_problems.PROBLEMS)
    for part in ("5/4", "0/4", "x", "1/"):
        with pytest.raises(ValueError, match="expected i/n"):
            kernelbench.chosen(problems, part)


@pytest.mark.long
def test_the_suites_rule_passes_what_the_judge_refuses(problems: Path, tmp_path: Path) -> None:
    solutions, chosen = tmp_path / "solutions", tmp_path / "chosen"
    solutions.mkdir()
    chosen.mkdir()
    head = "import torch\nfrom torch import nn\n\n\nclass ModelNew(nn.Module):\n    def forward(self, A):\n        return "
    bodies = {
        "23_softmax.py": "torch.zeros_like(A)",  # 1/1024 is within 1e-2 of 0
        "36_rms_norm.py": "A / torch.sqrt(torch.mean(A**2, dim=1, keepdim=True) + 1e-5)",
    }
    for name, body in bodies.items():
        (solutions / name).write_text(head + body + "\n")
        (chosen / name).write_text((problems / name).read_text())
    command = [
        sys.executable,
        "-m",
        "benchmarks.kernelbench",
        str(chosen),
        "--solutions",
        str(solutions),
        "--json",
        "--modes",
        "",
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=250, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    report = json.loads(done.stdout)
    softmax, rms = report["rows"]
    assert softmax["suite"] == {"1e-2": True, "1e-4": False}
    assert softmax["judge"].startswith("refused")
    assert rms["suite"] == {"1e-2": True, "1e-4": True}
    assert rms["judge"] == "passes"
    assert [s["correct"] for s in report["summaries"]] == [2, 1, 1]


@pytest.mark.long
def test_a_problem_is_searched_in_rounds_to_a_stored_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`autokern search kernelbench:FILE`, with a kernel that somebody puts into the inbox; everything is real."""
    problem = tmp_path / "rms_norm.py"
    problem.write_text(PROBLEM)
    store = tmp_path / "store"
    store.mkdir(mode=0o700)
    monkeypatch.setenv("AUTOKERN_STORE", str(store))
    run = tmp_path / "run"
    right = candidate("right")
    reply = {
        "language": "cpp",
        "source": right.source,
        "plan": msgspec.to_builtins(right.plan),
        "idea": "channels in registers",
    }

    def answer() -> None:
        end = time.monotonic() + 60
        while not list(run.glob("inbox/*.brief.md")) and time.monotonic() < end:
            time.sleep(0.1)
        (run / "inbox" / ".mine").write_bytes(msgspec.json.encode(reply))
        (run / "inbox" / ".mine").rename(run / "inbox" / "mine.json")

    person = threading.Thread(target=answer)
    person.start()
    words = [f"kernelbench:{problem}", "--proposers", "inbox", "--rounds", "1", "--wait-inbox", "2", "--out", str(run)]
    done = CliRunner().invoke(app, ["search", *words, "--allow-weak-box", "--json"])
    person.join()
    close_screen()
    assert done.exit_code == 0, done.output
    (measured,) = open_run(run).every(Measured)
    assert measured.ceiling.limit_us > 0 and measured.ceiling.stock_us > 0
    outcomes = open_run(run).every(Outcome)
    # How fast it is, a busy machine may leave undecided; that it is right, not.
    assert outcomes and all(node.refused is None or node.refused.reason in _OF_TIME for node in outcomes), outcomes
    assert "v0 = aten.pow.Tensor_Scalar(argument0, 2)" in next((run / "inbox").rglob("*.brief.md")).read_text()
