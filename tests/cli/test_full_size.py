"""What published harnesses accepted at a tolerance of 1e-2, at its full size, by `autokern judge` and under every class.

An all-zero softmax on (4096, 65536) is within 1e-2 of nearly every element of normal inputs; a LayerNorm on
(16, 64, 256, 256) that copies its input is close wherever the input is standard normal already and weights are 1.
"""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.judge.samples import ROOT
from torch_autokern.cli.main import app

MEMORY_BYTES = 8 << 30
CLASSES = {
    "exact": ["--class", "exact"],
    "stock": [],
    "tolerance": ["--class", "tolerance", "--atol", "1e-2", "--rtol", "1e-2"],
}
DENSE = "float32"


def _folder(path: Path, cheat: str, columns: str, rows: int, tensors: tuple[int, int], key: dict[str, object]) -> Path:
    source = (ROOT / "cheats" / cheat).read_text()
    assert source.count("int64_t N = ") == 1
    source = re.sub(r"int64_t N = \d+;", f"int64_t N = {columns};", source)
    args = [{"kind": kind, "index": i} for kind, count in zip(("input", "output"), tensors, strict=True) for i in range(count)]
    plan = {"version": 1, "steps": [{"kind": "cpu", "entry": "candidate", "range": rows, "grain": 1, "args": args}]}
    (path / "kernel.cpp").write_text(source)
    (path / "plan.json").write_text(json.dumps(plan))
    (path / "key.json").write_text(json.dumps(key))
    return path


def _softmax(path: Path) -> Path:
    key = {
        "op": "_softmax",
        "tensors": [{"dtype": DENSE, "sizes": [4096, 65536]}],
        "scalars": {"dim": 1, "half_to_float": False},
    }
    return _folder(path, "zeros_wide.cpp", "65536", 4096, (1, 1), key)


def _layer_norm(path: Path) -> Path:
    shape = [64, 256, 256]
    tensors = [{"dtype": DENSE, "sizes": [16, *shape]}, {"dtype": DENSE, "sizes": shape}, {"dtype": DENSE, "sizes": shape}]
    key = {"op": "native_layer_norm", "tensors": tensors, "scalars": {"normalized_shape": shape, "eps": 1e-5}}
    return _folder(path, "layer_norm_copy.cpp", "64 * 256 * 256", 16, (3, 3), key)


@pytest.mark.long
@pytest.mark.timeout(900)  # a gigabyte a tensor, on a machine that may be busy
@pytest.mark.parametrize("accuracy", CLASSES)
@pytest.mark.parametrize("make", [_softmax, _layer_norm], ids=["all zeros", "copies its input"])
def test_what_published_harnesses_accepted_is_refused_at_its_full_size(make: object, accuracy: str, tmp_path: Path) -> None:
    folder = make(tmp_path)  # type: ignore[operator]
    done = CliRunner().invoke(app, ["judge", str(folder), "--no-timing", "--json", *CLASSES[accuracy]])
    assert done.exit_code == 1, done.output
    refusal = json.loads(done.stdout)["refusal"]
    # A number that no tolerance covers, shown with what it should have been, and a case that replays it.
    assert refusal["reason"] == "wrong_value", refusal
    assert refusal["first_wrong"] is not None and refusal["cases"] and "expected" in refusal["message"]
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < MEMORY_BYTES
