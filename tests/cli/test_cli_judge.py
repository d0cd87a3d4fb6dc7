"""`autokern judge`: exit codes, refusals that an author can act on, and replays that show the same numbers again."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from gpu_sources import needs_nvrtc, needs_triton

from tests.judge.samples import ROOT, Sample
from torch_autokern.cli.judge import _show_accepted, _show_refusal
from torch_autokern.errors import InvalidInputError
from torch_autokern.judge.outcome import Place, Reason, Refusal
from torch_autokern.judge.replay import Replayed, parse_case
from torch_autokern.judge.submission import KeyWords, TensorWords, read_submission, whole_key
from torch_autokern.ops import SPECS
from torch_autokern.store.record import FamilyError

SHORT_KEY = (
    '{"op": "_softmax", "tensors": [{"dtype": "float32", "sizes": [96, 1000]}], "scalars": {"dim": 1, "half_to_float": false}}'
)


def autokern(*arguments: str, code: int) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "torch_autokern.cli.main", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT.parent,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def folder_of(name: str, path: Path) -> Path:
    name, _, suffix = name.partition(".")
    file = next(f for kind in ("cheats", "honest") if (f := ROOT / kind / f"{name}.{suffix or 'cpp'}").exists())
    return Sample(file).write(path / name)


@pytest.fixture
def honest(tmp_path: Path) -> Path:
    return folder_of("softmax_rows", tmp_path)


def test_a_wrong_kernel_is_refused_and_its_replay_shows_the_same_numbers(tmp_path: Path) -> None:
    folder = folder_of("drops_tail", tmp_path)
    first = autokern("judge", str(folder), "--no-timing", code=1).stdout
    lines = first.splitlines()
    assert lines[0] == "refused: wrong_value"
    assert re.search(r"\(0, 0\): got [-.e0-9]+, expected [-.e0-9]+", first)
    assert re.search(r"error against float64: [-.e0-9]+, stock's [-.e0-9]+, limit [-.e0-9]+", first)
    assert re.search(r"^family normal, seed \d+$", first, re.MULTILINE)
    command = shlex.split(lines[-1].removeprefix("replay: "))
    assert command[:2] == ["autokern", "judge"]
    assert autokern(*command[1:], code=1).stdout == first


@pytest.mark.long
def test_a_crash_names_the_case_that_crashes_again(tmp_path: Path) -> None:
    folder = folder_of("reads_past_end", tmp_path)
    document = json.loads(autokern("judge", str(folder), "--no-timing", "--json", code=1).stdout)
    assert (document["accepted"], document["judged"], document["refusal"]["reason"]) == (False, True, "crashed")
    again = autokern(*shlex.split(document["replay"])[1:], "--json", code=1).stdout
    assert json.loads(again)["refusal"] == document["refusal"]


@pytest.mark.long
def test_a_sanitizers_refusal_replays_without_the_trials(tmp_path: Path) -> None:
    folder = folder_of("overflows_an_integer", tmp_path)
    said = autokern("judge", str(folder), "--replay", "sanitizers:5:0", code=1).stdout
    assert said.startswith("refused: sanitizer\n") and "candidate.cpp:14" in said
    assert said.endswith(f"replay: autokern judge {folder} --replay sanitizers:5:0\n")


def test_a_broken_static_rule_is_refused_without_a_case(tmp_path: Path) -> None:
    said = autokern("judge", str(folder_of("global_counter", tmp_path)), code=1).stdout
    assert said.startswith("refused: static_rule\n") and "replay:" not in said


def test_a_right_kernel_is_accepted_and_a_single_case_of_it_holds(honest: Path) -> None:
    document = json.loads(autokern("judge", str(honest), "--no-timing", "--json", code=0).stdout)
    assert document["accepted"] and not document["timed"]
    case = f"normal:{document['found'][0]['seeds'][0]}:0"
    assert "the case holds" in autokern("judge", str(honest), "--replay", case, "--replay", "state:5:0", code=0).stdout


def test_a_key_that_cannot_be_judged_is_exit_code_2(honest: Path) -> None:
    (honest / "key.json").write_text(SHORT_KEY.replace("float32", "float64"))
    done = autokern("judge", str(honest), "--no-timing", code=2)
    assert not done.stdout and done.stderr.count("\n") == 1 and "unsupported_key" in done.stderr


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = autokern("judge", str(tmp_path / "nothing"), code=2)
    assert not done.stdout and done.stderr.startswith("autokern: ") and done.stderr.count("\n") == 1


def test_a_short_key_is_the_whole_key(honest: Path) -> None:
    whole = read_submission(honest).key
    (honest / "key.json").write_text(SHORT_KEY)
    assert read_submission(honest).key == whole
    (honest / "key.json").write_text(SHORT_KEY.replace('"op": "_softmax", ', ""))
    assert read_submission(honest, "_softmax").key == whole


def test_a_key_elsewhere_stands_in_for_the_folders(honest: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(SHORT_KEY.replace("96", "32"))
    assert read_submission(honest, None, other).key.tensors[0].sizes == (32, 1000)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("kernel.cu", "", "has kernel.cpp and kernel.cu; a candidate is one of kernel.cpp, kernel.cu, kernel.py"),
        ("kernel.py", "", "has kernel.cpp and kernel.py"),
        ("plan.json", "{}", "plan.json: not a launch plan"),
        ("plan.json", None, "plan.json is missing"),
        ("kernel.cpp", None, "kernel.cpp is missing"),
        ("key.json", None, "name it with --key"),
        ("key.json", "[", "is no key"),
        ("key.json", "[]", "is no key"),
        ("key.json", '{"tensors": []}', "op '' is unknown"),
        ("key.json", SHORT_KEY.replace("_softmax", "relu"), "op 'relu' is unknown"),
        ("key.json", SHORT_KEY.replace('"dim": 1', '"dim": 2'), "does not take these arguments"),
        ("key.json", SHORT_KEY.replace('"dim": 1, ', ""), "needs the arguments"),
        ("key.json", SHORT_KEY.replace("float32", "float33"), "dtype 'float33' is unknown"),
        ("key.json", SHORT_KEY.replace("96", "-96"), "negative"),
        ("key.json", SHORT_KEY.replace("[96, 1000]", '[96, 1000], "strides": [1]'), "do not fit"),
        ("key.json", '{"op": "mm", "tensors": [{"dtype": "float32", "sizes": [2, 3]}]}', "expected 2"),
    ],
)
def test_a_folder_that_is_not_whole_names_the_file(honest: Path, name: str, text: str | None, words: str) -> None:
    if text is None:
        (honest / name).unlink()
    else:
        (honest / name).write_text(text)
    with pytest.raises(InvalidInputError, match=re.escape(words)):
        read_submission(honest)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: it would be judged")
@pytest.mark.parametrize(
    ("name", "words"), [("softmax_warp_a_row.cu", "softmax"), ("softmax_a_row_a_program.py", "soft")], ids=["cuda", "triton"]
)
def test_a_gpu_kernel_is_built_and_then_not_judged_without_a_gpu(name: str, words: str, tmp_path: Path) -> None:
    needs_nvrtc() if name.endswith(".cu") else needs_triton()
    folder = folder_of(name, tmp_path)
    done = autokern("judge", str(folder), code=2)
    assert not done.stdout and done.stderr.startswith("autokern: could not be judged (no_device): no CUDA device")
    assert f"source, plan and cubin keep the rules; {words}: " in done.stderr and "registers a thread" in done.stderr
    document = json.loads(autokern("judge", str(folder), "--json", code=2).stdout)
    assert (document["accepted"], document["judged"], document["refusal"]["reason"]) == (False, False, "no_device")


def test_a_gpu_kernel_that_breaks_a_rule_is_refused_without_a_gpu(tmp_path: Path) -> None:
    needs_nvrtc()
    said = autokern("judge", str(folder_of("counts_calls.cu", tmp_path)), code=1).stdout
    assert said.startswith("refused: static_rule\n") and "global variables" in said


def test_a_short_key_of_a_gpu_kernel_is_a_gpus_key(tmp_path: Path) -> None:
    folder = folder_of("softmax_warp_a_row.cu", tmp_path)
    whole = read_submission(folder).key
    assert whole.device_type == "cuda" and whole.tensors[0].alignment_bytes == 16  # type: ignore[union-attr]
    (folder / "key.json").write_text(SHORT_KEY.replace("96", "256"))
    assert read_submission(folder).key == whole
    (folder / "key.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(whole, device_type="cpu")))
    with pytest.raises(InvalidInputError, match="one of device cpu, the kernel runs on cuda"):
        read_submission(folder)


def test_a_layer_norm_of_halves_keeps_its_statistics_in_float32_on_a_gpu() -> None:
    words = KeyWords((TensorWords("float16", (4, 8)), None, None), {"normalized_shape": (8,), "eps": 1e-5})
    key = whole_key(SPECS["native_layer_norm"], words, "cuda")
    assert [t.dtype for t in key.outputs if t is not None] == ["float16", "float32", "float32"]


def test_a_plan_for_the_other_device_is_refused(honest: Path, tmp_path: Path) -> None:
    gpu = folder_of("softmax_warp_a_row.cu", tmp_path)
    (honest / "plan.json").write_bytes((gpu / "plan.json").read_bytes())
    with pytest.raises(InvalidInputError, match="the plan has GPU steps"):
        read_submission(honest)


def test_words_from_a_runner_cannot_paint_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07"
    place = Place((0,), evil, evil)
    refusal = Refusal(Reason.WRONG_VALUE, evil, evil, 7, first=(place,), beyond=1, error=1.0, stock_error=1.0, cases=(evil,))
    _show_refusal(refusal, None, as_json=False)
    _show_refusal(refusal, None, as_json=True)
    _show_accepted(Replayed((FamilyError(evil, (7,), 1, 1, 1, 1, 1, 1),), {evil: evil}))
    shown = capsys.readouterr()
    assert "owned" in shown.out and not {"\x1b", "\x07"} & set(shown.out + shown.err)


def test_an_op_that_contradicts_the_key_is_refused(honest: Path) -> None:
    with pytest.raises(InvalidInputError, match="--op says mm"):
        read_submission(honest, "mm")


@pytest.mark.parametrize(
    "text", ["", "normal", "normal:1", "normal:x:0", "normal:1:0:0", "normal:-1:0", f"normal:{2**63}:0", ":1:0"]
)
def test_words_that_are_no_case_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError, match="no case"):
        parse_case(text)
