"""The one JSON form of measuring commands, and the paired timing under it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_autokern.errors import InvalidInputError
from torch_autokern.report.cases import PUBLISHED, Case, case_name
from torch_autokern.report.measurement import Measurement, ModelResult, Row, geometric_mean, load_measurement
from torch_autokern.report.paired import Side, paired_times
from torch_autokern.report.tables import measurement_table, model_lines

ROW = Row("softmax (4, 8)", "stock", 2.0, 1.0, 2.0, 1.9, 1e-7, 2e-7, True, 2.1)
MISSED = Row("mm (8, 8) x (8, 8)", "stock", 1.0, 1.0, 1.0, 0.99, 1e-7, 1e-7, "no_record")
MODEL = ModelResult("MiniLM-L6", 200.0, 190.0, 1.05, 0.9999999, 1.04, 1.06, 195.0, 1.02)
MEASUREMENT = Measurement("cpu", {"torch": "2.13"}, "2026-01-01T00:00:00+00:00", (ROW, MISSED), MODEL)


def test_json_has_the_agreed_names(tmp_path: Path) -> None:
    MEASUREMENT.save(tmp_path / "m.json")
    value = json.loads((tmp_path / "m.json").read_text())
    assert {"device", "versions", "date", "rows", "model"} <= set(value)
    fields = {"case", "accuracy_class", "stock_ms", "autokern_ms", "ratio", "ratio_low", "error", "stock_error", "served"}
    assert all(fields <= set(row) for row in value["rows"])
    assert {"name", "stock_ms", "autokern_ms", "ratio", "min_cosine"} <= set(value["model"])
    assert value["rows"][0]["served"] is True and value["rows"][1]["served"] == "no_record"
    assert "limit_ms" not in value["rows"][0]


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    MEASUREMENT.save(tmp_path / "m.json")
    assert load_measurement(tmp_path / "m.json") == MEASUREMENT


def test_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text('{"device": 3}')
    with pytest.raises(InvalidInputError, match="not a measurement"):
        load_measurement(tmp_path / "m.json")
    with pytest.raises(InvalidInputError, match="cannot read"):
        load_measurement(tmp_path / "none.json")


def test_the_table_has_a_row_a_case_and_says_why_one_is_not_served() -> None:
    table = measurement_table(MEASUREMENT)
    assert table.row_count == 2
    assert "no_record" in str(list(table.columns[-1].cells)[1])


def test_the_pool_has_a_line_of_its_own() -> None:
    lines = model_lines(MODEL)
    assert "1.05x" in lines[0] and "[1.04, 1.06]" in lines[0]
    assert "pool" in lines[1] and "1.02x" in lines[1] and "1.029x" in lines[1]
    assert "0.999999900" in lines[2]


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    with pytest.raises(ValueError, match="positive"):
        geometric_mean([1.0, 0.0])


def test_the_slower_side_is_seen_and_scopes_stay_outside_the_clock() -> None:
    entered = []

    @contextlib.contextmanager
    def slow_to_enter() -> Iterator[None]:
        time.sleep(0.01)
        entered.append(True)
        yield

    # Loops, not sleeps: a busy machine stretches both alike.
    times = paired_times(Side(lambda: sum(range(60_000))), Side(lambda: sum(range(20_000)), slow_to_enter), 0.1)
    assert times.interval.low > 1.5
    assert times.own_ms < 9
    assert entered


def test_names_of_cases_are_what_a_person_writes() -> None:
    assert [case_name(case.key()) for case in PUBLISHED] == [
        "LayerNorm (16, 64, 256, 256) over 3 dims",
        "softmax (32, 12, 38, 38)",
        "softmax (64, 1024, 512) dim 1",
    ]
    assert case_name(Case("log_softmax", (4, 10), dtype="bfloat16").key()) == "log_softmax (4, 10) bfloat16"


@pytest.mark.parametrize(
    "case",
    [
        Case("softmax", (3, 5, 7), 1),
        Case("layer_norm", (2, 3, 4, 5), -2),
        Case("log_softmax", (6, 9)),
        Case("bmm", (2, 3, 4, 5)),
        Case("addmm", (3, 4, 5)),
    ],
)
def test_a_case_has_the_key_of_the_real_call(case: Case) -> None:
    import torch

    from torch_autokern.ops import SPECS
    from torch_autokern.report.keyrow import BoundCall

    key = case.key()
    call = BoundCall(key)
    assert SPECS[key.op].key(call.inputs.tensors, key.scalars) == key
    own, stock = call.results(), call.results()
    assert all(torch.equal(a, b) for a, b in zip(own, stock, strict=True))
    assert max(call.errors(own, stock)) < 1e-6
