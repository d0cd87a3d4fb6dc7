"""The commands that measure: sets of calls, one file that parts add to, limits, peers that do not count, the JSON."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import msgspec
import pytest
import torch
from tiny_kernels import Served

from benchmarks import gpu_cases, gpu_session, kernelbench, models, peers, suite
from benchmarks.parts import merged, part_of
from benchmarks.peers import PeerTime, measure_peer
from benchmarks.shapes import SETS, keys_of
from torch_autokern.errors import InvalidInputError
from torch_autokern.ops import SPECS
from torch_autokern.report.cases import Case, case_name
from torch_autokern.report.keyrow import BoundCall
from torch_autokern.report.measurement import Measurement, Row, load_measurement
from torch_autokern.search.outcome import KeyResult

TINY = (Case("softmax", (4, 8)), Case("layer_norm", (4, 8)), Case("log_softmax", (3, 5)))
GPU_SETS = ("headline", "gpu_table", "awkward", "backward_gpu", "products")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETS, "tiny", TINY)


def run(*arguments: str) -> int:
    """The command on the CPU, without a search: its exit code."""
    with pytest.raises(SystemExit) as ended:
        suite.main(["--set", "tiny", "--device", "cpu", "--no-search", "--seconds", "0.01", *arguments])
    assert isinstance(ended.value.code, int), ended.value.code
    return ended.value.code


def row(case: str, **fields: object) -> Row:
    return msgspec.structs.replace(Row(case, "stock", 2.0, 1.0, 2.0, 1.9, 1e-7, 2e-7, True), **fields)


def measurement(*rows: Row, device: str = "this") -> Measurement:
    return Measurement(device, {"torch": "2.11"}, "2026-01-01T00:00:00+00:00", rows)


def test_parts_add_to_one_file_and_the_table_comes_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "suite.json"
    assert run("--part", "2/2", "--json", str(path)) == 0
    assert [r.case for r in load_measurement(path).rows] == ["LayerNorm (4, 8)"]
    assert run("--part", "1/2", "--json", str(path)) == 0
    found = load_measurement(path)
    assert [r.case for r in found.rows] == ["LayerNorm (4, 8)", "softmax (4, 8)", "log_softmax (3, 5)"]
    assert found.settings["sets"] == "tiny" and found.settings["threads"] == str(torch.get_num_threads())
    assert found.date and found.device and found.versions["torch"] == torch.__version__
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[-3:]] == [r.case for r in found.rows]


def test_a_served_row_says_on_what_evidence(tmp_path: Path) -> None:
    served = Served()
    try:
        served.store_all(lambda: torch.softmax(torch.randn(4, 8), -1))
        assert run("--only", "softmax (4", "--json", str(tmp_path / "a.json")) == 0
    finally:
        served.close()
    (softmax,) = load_measurement(tmp_path / "a.json").rows
    assert softmax.served is True and softmax.note is not None
    assert "box " in softmax.note and "no word of sanitizers" in softmax.note


def test_keys_whose_turn_comes_too_late_are_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    assert run("--limit", "1", "--json", str(path)) == 1
    assert capsys.readouterr().out.count("the call's time is up") == 2 * len(TINY)
    assert load_measurement(path).rows == ()


def test_a_key_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = suite.measure_key

    def measure(key, *arguments, **options):  # type: ignore[no-untyped-def]
        if key.op == "native_layer_norm":
            raise RuntimeError("out of memory")
        return measured(key, *arguments, **options)

    monkeypatch.setattr(suite, "measure_key", measure)
    assert run("--json", str(tmp_path / "a.json")) == 1
    assert [r.case for r in load_measurement(tmp_path / "a.json").rows] == ["softmax (4, 8)", "log_softmax (3, 5)"]


def test_the_best_peer_is_named_and_one_that_does_not_count_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"compile": PeerTime(0.5, 1.0, 0.9, 1.1), "max-autotune": PeerTime(0.25, 1.0, 0.9, 1.1), "liger": "not installed"}
    monkeypatch.setattr(suite, "measure_peer", lambda name, call, seconds: found[name])
    path = tmp_path / "a.json"
    assert run("--only", "log_softmax", "--peers", "compile,max-autotune,liger", "--json", str(path)) == 0
    (only,) = load_measurement(path).rows
    assert (only.best_peer, only.best_peer_ms) == ("max-autotune", 0.25)
    assert only.peers_ms == {"compile": 0.5, "max-autotune": 0.25}
    assert only.note is not None and "liger: not installed" in only.note
    found["compile"] = PeerTime(0.125, 1.0, 0.9, 1.1)
    assert run("--only", "log_softmax", "--peers", "compile", "--json", str(path)) == 0
    (only,) = load_measurement(path).rows
    assert only.peers_ms == {"compile": 0.125, "max-autotune": 0.25} and only.best_peer == "compile"


def test_a_peer_without_time_is_not_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert run("--only", "log_softmax", "--peers", "max-autotune", "--limit", "60", "--json", str(path)) == 0
    (only,) = load_measurement(path).rows
    assert only.best_peer is None and only.note == "max-autotune: no time left for it"


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        (lambda x: torch.softmax(x, -1), ""),
        (lambda x: torch.softmax(x, -1) * 1.001, "wrong: largest error"),
        (lambda x: torch.full_like(x, torch.nan), "wrong: NaN or infinity"),
        (lambda x: torch.softmax(x.bfloat16(), -1), "wrong: its result has another dtype"),
        (lambda x: x[0, :3], "RuntimeError: shape"),
    ],
)
def test_a_peer_counts_where_it_is_about_as_near_to_float64_as_stock(peer, words, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    call = BoundCall(TINY[0].key())
    monkeypatch.setattr(peers, "_compiled", lambda name, call: lambda: peer(call.inputs.tensors[0]))
    found = measure_peer("compile", call, 0.01)
    assert found.startswith(words) if isinstance(found, str) else not words and found.ms > 0


def test_a_peer_that_gives_no_statistics_is_judged_by_what_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    call = BoundCall(TINY[1].key())
    monkeypatch.setattr(peers, "_compiled", lambda name, call: lambda: call()[0])
    assert isinstance(measure_peer("compile", call, 0.01), PeerTime)
    assert measure_peer("liger", call, 0.01) == "not installed"


@pytest.mark.parametrize("wrong", [["--set", "no_such"], ["--peers", "compile,no_such"]])
def test_an_unknown_name_is_a_mistake_of_the_command_line(wrong: list[str]) -> None:
    assert run(*wrong) == 2


def test_rows_of_another_device_are_not_added_to(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    measurement(row("a"), row("b", peers_ms={"x": 3.0})).save(path)
    new = merged(measurement(row("b", stock_ms=4.0, peers_ms={"y": 5.0}), row("c")), path)
    assert [(r.case, r.stock_ms, r.best_peer) for r in new.rows] == [("a", 2.0, None), ("b", 4.0, "x"), ("c", 2.0, None)]
    with pytest.raises(InvalidInputError, match="name another file"):
        merged(measurement(row("c"), device="that"), path)
    with pytest.raises(SystemExit, match="name another file"):
        suite.main(["--set", "tiny", "--device", "cpu", "--no-search", "--json", str(path)])


def test_parts_cover_everything_once() -> None:
    assert sorted(item for i in (1, 2, 3) for item in part_of(range(7), f"{i}/3")) == list(range(7))
    for part in ("4/3", "0/3", "x", "1/"):
        with pytest.raises(ValueError, match="expected i/n"):
            part_of([1], part)


def test_every_key_of_the_gpus_sets_has_a_name_of_its_own() -> None:
    keys = keys_of(GPU_SETS, "cuda")
    assert len({case_name(key) for key in keys}) == len(keys)
    known = {case.key.digest for case in gpu_cases.CASES}
    thin = [key for key in keys if "transposed" in case_name(key)]
    assert len(thin) == 4 and all(key.digest in known for key in thin)
    odd = {key.tensors[0].alignment_bytes for key in keys if key.tensors[0] is not None}
    assert odd == {2, 4, 8, 16}
    assert all(key.outputs[0] is not None and key.outputs[0].alignment_bytes == 16 for key in keys)


@pytest.mark.parametrize(
    "case",
    [
        Case("mm", (3, 4, 5), transposed=True),
        Case("bmm", (2, 3, 4, 5), transposed=True),
        Case("softmax", (3, 5), alignment_bytes=2),
    ],
)
def test_a_transposed_case_has_the_key_of_the_real_call(case: Case) -> None:
    key = case.key()
    assert SPECS[key.op].key(BoundCall(key).inputs.tensors, key.scalars) == key
    assert ("transposed" in case_name(key)) == case.transposed


def test_a_search_that_won_is_told_in_the_note() -> None:
    key = TINY[0].key()
    won = KeyResult(key, 1.0, "won", 2.0, 1.9, 2.1, "id", "", 12)
    assert suite._outcome(won, 3.0) == "won in 3 s, 12 tried, judged 2.00"
    lost = msgspec.structs.replace(won, status="not_won", reason="nothing is faster")
    assert suite._outcome(lost, 3.0).endswith(": nothing is faster")


@pytest.mark.long
def test_a_key_is_searched_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOKERN_STORE", str(tmp_path))
    trials, path = tmp_path / "trials.json", tmp_path / "a.json"
    words = [
        "--set",
        "minilm",
        "--only",
        "softmax",
        "--device",
        "cpu",
        "--budget",
        "20",
        "--seconds",
        "0.1",
        "--json",
        str(path),
    ]
    with pytest.raises(SystemExit):
        suite.main([*words, "--store", str(tmp_path / "store"), "--trials", str(trials), "--allow-weak-box"])
    (only,) = load_measurement(path).rows
    assert only.note is not None and " tried, judged " in only.note
    (log,) = msgspec.json.decode(trials.read_bytes(), type=list[suite.KeyLog])
    assert log.case == only.case and log.trials


@pytest.mark.cuda
def test_on_a_gpu_a_row_has_a_limit_clocks_and_a_peer(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    words = ["--set", "gpu_table", "--only", "softmax (16, 16384)", "--device", "cuda", "--peers", "compile"]
    assert run(*words, "--json", str(path)) == 0
    found = load_measurement(path)
    (only,) = found.rows
    assert only.limit_ms and only.pages == "device" and only.best_peer == "compile", only.note
    assert "sm_clock_mhz" in found.settings or shutil.which("nvidia-smi") is None


def test_a_session_runs_its_stages_in_their_time_and_keeps_one_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = gpu_session.Session(tmp_path, 100.0, gpu_session.LIMITS)
    assert session.run("probe", [sys.executable, "-c", "print('first')"])
    assert not session.run("suite", [sys.executable, "-c", "print('second'); raise SystemExit(3)"])
    assert (tmp_path / "session.log").read_text() == "first\nsecond\n"
    assert "first" in capsys.readouterr().out
    late = gpu_session.Session(tmp_path, 1.0, gpu_session.LIMITS)
    assert not late.run("suite", ["false"]) and "not run" in late.lines[0]


def test_every_stage_that_judges_accepts_a_weak_box_and_ends_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["gpu_session", "--out", str(tmp_path), "--store", str(tmp_path), "--allow-weak-box", "--minutes", "suite=0.5"]
    monkeypatch.setattr(sys, "argv", words)
    options = gpu_session.parse()
    assert options.minutes["suite"] == 30.0 and options.minutes["models"] == gpu_session.LIMITS["models"]
    monkeypatch.setattr(gpu_session.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "problems"))
    commands = {stage: gpu_session.command_of(stage, options, 90.0) for stage in gpu_session.STAGES}
    for stage in ("probe", "throughput", "suite", "models", "kernelbench", "overhead"):
        command = commands[stage]
        assert "--allow-weak-box" in command and command[command.index("--limit") + 1] == "90"
    assert suite.parse(commands["suite"][3:]).json == tmp_path / "headline.json"
    with pytest.raises(ValueError, match="no stage is called"):
        gpu_session.limits_of("no_such=3")


def test_models_and_problems_whose_turn_comes_too_late_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["models", "--device", "cpu", "--limit", "1", "--json", str(tmp_path / "m.json")])
    with pytest.raises(SystemExit) as ended:
        models.main()
    assert ended.value.code == 1 and "the call's time is up" in capsys.readouterr().out
    (tmp_path / "1_a.py").write_text("")
    monkeypatch.setattr(sys, "argv", ["kernelbench", str(tmp_path), "--limit", "1"])
    began = time.monotonic()
    assert kernelbench.main() == 0 and time.monotonic() - began < 5
    assert "left out" in capsys.readouterr().err
