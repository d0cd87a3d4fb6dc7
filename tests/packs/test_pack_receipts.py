"""`pack verify --replay`: what holds and is faster here gets a receipt, and with --pin needs no signature; what is wrong is
quarantined."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pack_samples import stored
from typer.testing import CliRunner

from tests.judge.samples import ROOT, Sample, target
from torch_autokern.cli.main import app
from torch_autokern.judge import receipt
from torch_autokern.judge.stored import Benchmark
from torch_autokern.judge.verdict import check
from torch_autokern.runtime.arming import arming_of
from torch_autokern.runtime.pack_facts import read_binaries
from torch_autokern.runtime.plan import encode_plan
from torch_autokern.runtime.target import stock_build
from torch_autokern.store.pack import Pack
from torch_autokern.store.pack_build import PackOptions, build_pack, pack_bytes
from torch_autokern.store.pack_file import Envelope
from torch_autokern.store.pack_install import open_packs
from torch_autokern.store.record import FamilyError, KernelRecord, Provenance, StoredRecord, Timing, Verdict
from torch_autokern.store.store import KernelStore, Layer

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def families() -> tuple[FamilyError, ...]:
    """What an honest softmax showed, one trial of every family."""
    sample = Sample(ROOT / "honest" / "softmax_rows.cpp")
    found = check(sample.build(), sample.key, target(), trials=1)
    assert isinstance(found, tuple), found
    return found


def made_elsewhere(folder: str, name: str, families: tuple[FamilyError, ...]) -> StoredRecord:
    """A record that claims to be proved against an older torch, for the kernel in a file of the corpora."""
    sample = Sample(ROOT / folder / f"{name}.cpp")
    made = sample.build()
    times = (Timing("eager", "resident", 12.0, 6.0, 2.0, 1.75, 2.1, 40, 3),)
    verdict = Verdict("stock", 0.0, 0.0, "run_to_run", families, {}, {"state seeds": "17"}, times, 2)
    created = "2025-01-01T00:00:00Z"
    origin = Provenance(made.identity, "tests", name, "cpp", "", {}, (), "0" * 64, made.tools, made.box_level, created)
    data = {"plan.json": encode_plan(sample.candidate.plan), "kernel.so": made.binary, "source.cpp": b""}
    return stored(KernelRecord(sample.key, target(), "2.8", verdict, origin, ()), data)


def replay(path: Path, ratio_low: float, monkeypatch: pytest.MonkeyPatch, code: int) -> dict[str, str]:
    """Statuses by record id. The trials are real; times are given, because a test machine is too busy to be timed."""
    timing = Timing("eager", "resident", 12.0, 6.0, ratio_low, ratio_low, ratio_low, 40, 3)
    monkeypatch.setattr(receipt, "bench_record", lambda *args, **options: Benchmark("stock", timing))
    result = CliRunner().invoke(app, ["pack", "verify", str(path), "--replay", "--pin", "--allow-weak-box", "--json"])
    assert result.exit_code == code, result.output
    return {proof["record_id"]: proof["status"] for proof in json.loads(result.stdout)["proofs"]}


def test_proved_here_is_pinned_and_armed_and_the_wrong_kernel_is_set_aside(
    state: Path, families: tuple[FamilyError, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = (made_elsewhere(*which, families) for which in (("honest", "softmax_rows"), ("cheats", "drops_tail")))
    envelope = build_pack([right, wrong], PackOptions("strangers", 1, "MIT"), read_binaries)
    assert isinstance(envelope, Envelope), envelope
    path = state / "given.akpack"
    path.write_bytes(pack_bytes(envelope))
    assert replay(path, 1.0, monkeypatch, 1) == {right.record_id: "not_faster", wrong.record_id: "broken"}
    assert CliRunner().invoke(app, ["pack", "install", str(path)]).exit_code == 1, "nothing is pinned yet"
    assert replay(path, 1.5, monkeypatch, 1)[right.record_id] == "proved"
    assert CliRunner().invoke(app, ["pack", "install", str(path)]).exit_code == 0
    (pack,) = open_packs(read_binaries).packs
    assert isinstance(pack, Pack) and pack.admission.tier == "pinned"
    store = KernelStore([Layer("cache", state, writable=True)])
    arming = arming_of(pack, store)
    assert arming.armed == (right.record_id,) and set(arming.refused) == {wrong.record_id}
    notes = store.notes(right.record.key.digest, right.record_id)
    assert [(note.stock_build, note.ratio_low) for note in notes.receipts] == [(stock_build(), 1.5)]
    assert store.notes(wrong.record.key.digest, wrong.record_id).quarantine is not None
