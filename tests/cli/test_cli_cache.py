"""`autokern cache`: what a person sees of the store, and one clear error for every mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from torch_autokern.cli import cache
from torch_autokern.store.key import KernelKey, Target, TensorKey
from torch_autokern.store.layout import record_file
from torch_autokern.store.record import KernelRecord, Provenance, Timing, Verdict
from torch_autokern.store.store import KernelStore, Layer


def make_record(rows: int = 64, idea: str = "rows", author: str = "templates") -> KernelRecord:
    layout = TensorKey("float32", (rows, 38), (38, 1), 4)
    return KernelRecord(
        key=KernelKey("_softmax", "cpu", (layout,), {"dim": 1}, (layout,)),
        target=Target("cpu", "AuthenticAMD-25-17", "x86-64-v4", 2),
        stock_build="2.13",
        verdict=Verdict(
            "stock", 0.0, 0.0, "run_to_run", (), {}, {}, (Timing("eager", "resident", 12.0, 6.0, 2.0, 1.75, 2.1, 40, 3),), 1
        ),
        provenance=Provenance("ab" * 32, author, idea, "c++", "rows", {}, (), "0" * 64, {}, "3", "2025-01-01T00:00:00Z"),
        blobs=(),
    )


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOKERN_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> KernelStore:
    return KernelStore([Layer("cache", root, writable=True)])


def run(*arguments: str, code: int = 0, answer: str | None = None) -> Result:
    result = CliRunner().invoke(cache.app, list(arguments), input=answer)
    assert result.exit_code == code, result.output
    return result


def test_path_prints_the_bare_path(root: Path) -> None:
    assert run("path").stdout == f"{root}\n"
    assert json.loads(run("path", "--json").stdout) == {"path": str(root), "why": "AUTOKERN_STORE is usable", "tried": []}


def test_list_of_an_empty_store(root: Path) -> None:
    assert run("list").stdout == f"0 records in {root}\n"
    assert json.loads(run("list", "--json").stdout)["records"] == []


def test_list_shows_call_target_speed_and_state(store: KernelStore) -> None:
    record_id = store.publish(make_record(), {}).record_id
    store.quarantine(make_record().key.digest, record_id, "failed")
    shown = run("list").stdout
    for part in (record_id[:12], "_softmax(float32[64, 38], dim=1)", "AuthenticAMD-25-17", "1.75x eager", "quarantined"):
        assert part in shown
    (row,) = json.loads(run("list", "--json").stdout)["records"]
    assert (row["record_id"], row["ratio_low"], row["state"]) == (record_id, {"eager": 1.75}, "quarantined")


def test_list_of_one_op(store: KernelStore) -> None:
    store.publish(make_record(), {})
    assert len(json.loads(run("list", "--op", "_softmax", "--json").stdout)["records"]) == 1
    assert json.loads(run("list", "--op", "mm", "--json").stdout)["records"] == []


def test_text_from_a_record_cannot_paint_the_terminal(store: KernelStore) -> None:
    store.publish(make_record(author="\x1b[31mred[/bold][link=x]"), {})
    shown = run("list").stdout
    assert "\x1b[31m" not in shown
    assert "[/bold]" in shown


def test_show_by_the_first_digits(store: KernelStore) -> None:
    record_id = store.publish(make_record(), {"plan": b"{}"}).record_id
    assert "AuthenticAMD-25-17" in run("show", record_id[:8]).stdout
    document = json.loads(run("show", record_id[:8], "--json").stdout)
    assert document["record_id"] == record_id
    assert document["record"]["blobs"][0]["name"] == "plan"


@pytest.mark.parametrize("prefix", ["ffff", "zz", ""])
def test_show_of_an_unknown_record_is_one_clear_error(store: KernelStore, prefix: str) -> None:
    record_id = store.publish(make_record(), {}).record_id
    if record_id.startswith(prefix) and prefix:
        pytest.fail("the sample's id changed; choose another prefix")
    result = run("show", prefix, code=2)
    assert result.stderr.count("\n") == 1
    assert "autokern cache list" in result.stderr


def test_show_of_an_ambiguous_prefix_is_an_error(store: KernelStore) -> None:
    ids = [store.publish(make_record(idea=str(number)), {}).record_id for number in range(20)]
    first = next(record_id[0] for record_id in ids if sum(other[0] == record_id[0] for other in ids) > 1)
    assert "expected one" in run("show", first, code=2).stderr


def test_verify_then_repair(store: KernelStore, root: Path) -> None:
    kept = store.publish(make_record(idea="kept"), {}).record_id
    broken = store.publish(make_record(), {}).record_id
    assert "2 whole records" in run("verify").stdout
    record_file(root, make_record().key.digest, broken).write_bytes(b"half")
    assert "damaged" in run("verify", code=1).stdout
    (report,) = json.loads(run("verify", "--json", code=1).stdout)["folders"]
    assert (report["whole"], [fault["kind"] for fault in report["faults"]]) == (1, ["damaged"])
    assert "1 damaged records taken out" in run("repair").stdout
    assert json.loads(run("repair", "--json").stdout)["damaged"] == 0
    run("verify")
    assert [row["record_id"] for row in json.loads(run("list", "--json").stdout)["records"]] == [kept]


def test_clear_asks_first(store: KernelStore) -> None:
    store.publish(make_record(), {})
    run("clear", answer="n\n", code=1)
    assert len(list(store.records())) == 1
    assert "removed 1 records" in run("clear", answer="y\n").stdout
    assert list(store.records()) == []


def test_clear_of_one_key(store: KernelStore) -> None:
    first = store.publish(make_record(64), {}).record_id
    store.publish(make_record(65), {})
    assert json.loads(run("clear", "--record", first, "--yes", "--json").stdout)["records"] == 1
    assert [stored.record.key for stored in store.records()] == [make_record(65).key]


def test_clear_with_json_never_asks(store: KernelStore) -> None:
    store.publish(make_record(), {})
    assert "--yes" in run("clear", "--json", code=2).stderr
    assert len(list(store.records())) == 1


@pytest.mark.parametrize("command", [["path"], ["list"], ["show", "ab"], ["verify"], ["repair"], ["clear", "--yes"]])
def test_an_unusable_folder_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("AUTOKERN_STORE", str(tmp_path / "file"))
    result = run(*command, code=2)
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "AUTOKERN_STORE" in result.stderr
    assert "is not a folder" in result.stderr
