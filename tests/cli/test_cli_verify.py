"""`autokern verify` and `autokern bench`: records that hold, records that do not, and records that say nothing here."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from tests.judge.samples import ROOT, Sample, target
from torch_autokern.cli.main import app
from torch_autokern.errors import InvalidInputError
from torch_autokern.judge.verdict import check
from torch_autokern.runtime.plan import encode_plan
from torch_autokern.runtime.target import stock_build
from torch_autokern.store.key import Target
from torch_autokern.store.record import FamilyError, KernelRecord, Provenance, Timing, Verdict
from torch_autokern.store.store import KernelStore, Layer


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelStore:
    monkeypatch.setenv("AUTOKERN_STORE", str(tmp_path / "store"))
    return KernelStore([Layer("cache", tmp_path / "store", writable=True)])


@pytest.fixture(scope="module")
def families() -> tuple[FamilyError, ...]:
    """What the honest kernel showed: one trial of every family, as one process of a verdict runs them."""
    sample = Sample(ROOT / "honest" / "softmax_rows.cpp")
    found = check(sample.build(), sample.key, target(), trials=1)
    assert isinstance(found, tuple), found
    return found


def publish(store: KernelStore, name: str, families: tuple[FamilyError, ...], made_for: Target | None = None) -> str:
    """A record that claims `families` for the kernel in a file of the corpora."""
    sample = Sample(next(f for kind in ("cheats", "honest") if (f := ROOT / kind / f"{name}.cpp").exists()))
    artifact = sample.build()
    times = (Timing("eager", "resident", 12.0, 6.0, 2.0, 1.75, 2.1, 40, 3),)
    verdict = Verdict("stock", 0.0, 0.0, "run_to_run", families, {}, {"state seeds": "17"}, times, 2)
    origin = Provenance(
        artifact.identity,
        "tests",
        name,
        "cpp",
        "",
        {},
        (),
        "0" * 64,
        artifact.tools,
        artifact.box_level,
        "2025-01-01T00:00:00Z",
    )
    record = KernelRecord(sample.key, made_for or target(), stock_build(), verdict, origin, ())
    data = {"plan.json": encode_plan(sample.candidate.plan), "kernel.so": artifact.binary, "source.cpp": b""}
    return store.publish(record, data).record_id


def run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result


def test_a_record_that_holds_gives_its_own_numbers_again(store: KernelStore, families: tuple[FamilyError, ...]) -> None:
    record = publish(store, "softmax_rows", families)
    document = json.loads(run("verify", record[:10], "--json").stdout)
    assert (document["holds"], document["broken"]) == (1, 0)
    assert document["records"][0]["same_numbers"] is True and document["records"][0]["trials"] == 13


def test_a_record_that_does_not_hold_is_named(store: KernelStore, families: tuple[FamilyError, ...]) -> None:
    publish(store, "drops_tail", families)
    said = run("verify", "all", code=1).stdout
    assert "DOES NOT HOLD: wrong_value: family normal" in said
    assert said.endswith("0 hold, 1 do not, 0 cannot be replayed here\n")


def test_other_numbers_within_the_limits_still_hold(store: KernelStore, families: tuple[FamilyError, ...]) -> None:
    other = tuple(msgspec.structs.replace(f, error_rms=f.error_rms / 2) for f in families)
    publish(store, "softmax_rows", other[:1])
    assert "1 trials of 1 families: other errors than recorded, within the limits" in run("verify", "all").stdout


def test_a_record_of_another_machine_or_without_seeds_says_nothing(
    store: KernelStore, families: tuple[FamilyError, ...]
) -> None:
    publish(store, "softmax_rows", families, Target("cpu", "ARM", "aarch64", 2))
    publish(store, "softmax_rows", ())
    said = run("verify", "all").stdout
    assert "made for cpu aarch64" in said and "no seeds" in said
    assert said.endswith("0 hold, 0 do not, 2 cannot be replayed here\n")


def test_one_record_that_cannot_be_replayed_is_exit_code_2(store: KernelStore) -> None:
    run("verify", publish(store, "softmax_rows", ()), code=2)


def test_an_empty_store_holds(store: KernelStore) -> None:
    assert run("verify", "all").stdout == "0 hold, 0 do not, 0 cannot be replayed here\n"


def test_bench_says_times_device_and_baseline(store: KernelStore) -> None:
    record = publish(store, "softmax_rows", ())
    result = CliRunner().invoke(app, ["bench", record, "--processes", "1", "--json"])
    if isinstance(result.exception, InvalidInputError) and "disturbed" in str(result.exception):
        pytest.skip("the machine is not quiet")
    document = json.loads(result.stdout)
    (row,) = document["baselines"]
    assert row["against"] == "stock" and row["timing"]["pages"] == "resident"
    assert document["target"]["threads"] == 2 and row["timing"]["stock_us"] > 0


@pytest.mark.long
@pytest.mark.parametrize("against", ["compile", "compile,max-autotune"])
def test_bench_against_a_compiled_call(against: str, store: KernelStore) -> None:
    record = publish(store, "softmax_rows", ())
    result = CliRunner().invoke(app, ["bench", record, "--against", against, "--processes", "1", "--json"])
    if isinstance(result.exception, InvalidInputError) and "disturbed" in str(result.exception):
        pytest.skip("the machine is not quiet")
    document = json.loads(result.stdout)
    rows = document["baselines"]
    assert [row["against"] for row in rows] == against.split(",")
    for row in rows:
        assert row["timing"]["pages"] == "fresh" and row["timing"]["stock_us"] > 0 and row["timing"]["candidate_us"] > 0


def test_an_unknown_baseline_is_a_mistake(store: KernelStore) -> None:
    result = CliRunner().invoke(app, ["bench", "ab", "--against", "stock,cudnn"])
    assert isinstance(result.exception, InvalidInputError) and "--against" in str(result.exception)
