"""Kernels of packs in calls: served where armed and tried, waiting elsewhere, gone when revoked; nothing is downloaded."""

from __future__ import annotations

import io
import os
import platform
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from pack_samples import good, needs_cryptography, pack_of, records, softmax_key, split, stored
from tiny_kernels import Served, marker_plan, record_data, record_for

import torch_autokern as ak
from torch_autokern.runtime import smoke
from torch_autokern.runtime.arming import arming_of
from torch_autokern.runtime.pack_facts import read_binaries
from torch_autokern.runtime.plan import encode_plan
from torch_autokern.runtime.session import session
from torch_autokern.runtime.smoke import SmokeLine
from torch_autokern.runtime.target import local_target
from torch_autokern.store import pack_install
from torch_autokern.store.key import Target
from torch_autokern.store.notes import Receipt
from torch_autokern.store.pack import Pack, parse_pack
from torch_autokern.store.pack_build import WHEEL_FOLDER, build_wheel
from torch_autokern.store.pack_install import open_packs, remove_pack
from torch_autokern.store.pack_refusal import PackRefusal
from torch_autokern.store.record import StoredRecord
from torch_autokern.store.trust import Revocation, add_revocations, change_policy

TESTS = Path(__file__).parents[1]


@pytest.fixture
def passing_smoke(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The smoke test's child answers "ok" for everything: for tests that are about something else."""
    counts: list[int] = []

    def run(given: list[tuple[StoredRecord, int]]) -> tuple[list[SmokeLine], str]:
        counts.append(len(given))
        return [SmokeLine(number, words) for number in range(len(given)) for words in ("start", "ok")], "ended"

    monkeypatch.setattr(smoke, "_run_child", run)
    return counts


@pytest.fixture(autouse=True)
def _clean_session() -> Iterator[None]:
    def forget() -> None:
        session().loaded.clear()
        session().load_failures.clear()
        session().store._memory_notes.clear()
        session().store.clear()
        smoke._in_memory.clear()

    forget()
    yield
    forget()
    session().store.packs = ()
    session().found_packs = ()


def install(folder: Path, raw: bytes) -> Pack:
    path = folder / "given.akpack"
    path.write_bytes(raw)
    pack = ak.install_pack(path)
    assert isinstance(pack, Pack), pack
    return pack


def rows_of(x: torch.Tensor) -> int:
    """How many calls on `x` were served."""
    before = sum(native.native.hits for native in session().loaded.values())
    with ak.enabled():
        torch.softmax(x, -1)
    return sum(native.native.hits for native in session().loaded.values()) - before


def test_a_pack_serves_calls_with_no_search(trusted: Path, served: Served, passing_smoke: list[int]) -> None:
    pack = install(trusted, good())
    assert rows_of(torch.randn(4, 8)) == 1 and rows_of(torch.randn(6, 8)) == 0
    assert sorted(session().loaded) == sorted(pack.record_ids)
    arming = arming_of(pack, session().store)
    assert sorted(arming.armed) == sorted(pack.record_ids) and not arming.waiting


def test_the_api_gives_a_refusal_as_a_value(state: Path) -> None:
    needs_cryptography()
    (state / "x.akpack").write_bytes(good())
    outcome = ak.install_pack(state / "x.akpack")
    assert isinstance(outcome, PackRefusal) and outcome.command == "autokern pack trust add FILE.pub"
    missing = ak.install_pack(state / "missing.akpack")
    assert isinstance(missing, PackRefusal)


def test_a_revocation_stops_kernels_of_a_running_process_at_its_next_refresh(
    trusted: Path, served: Served, passing_smoke: list[int]
) -> None:
    pack = install(trusted, good())
    x = torch.randn(4, 8)
    stop, wrong = threading.Event(), []

    def call() -> None:
        expected = torch.softmax(x.double(), -1).float()
        while not stop.is_set():
            with ak.enabled():
                if not torch.allclose(torch.softmax(x, -1), expected, atol=1e-6):
                    wrong.append(1)

    caller = threading.Thread(target=call)
    caller.start()
    try:
        assert rows_of(x) >= 1
        change_policy(trusted, lambda policy: add_revocations(policy, (Revocation("pack", pack.pack_id, "", "bad"),)))
        ak.refresh()
    finally:
        stop.set()
        caller.join()
    assert not wrong and rows_of(x) == 0
    assert session().served_slots() == {}


def test_removing_a_pack_takes_its_kernels_away_at_the_next_refresh(
    trusted: Path, served: Served, passing_smoke: list[int]
) -> None:
    install(trusted, good())
    assert remove_pack(trusted, "tiny") == 1
    ak.refresh()
    assert rows_of(torch.randn(4, 8)) == 0


@pytest.mark.parametrize("other", ["card", "stock build"])
def test_elsewhere_a_pack_is_right_and_not_armed_until_a_local_receipt(
    trusted: Path, served: Served, passing_smoke: list[int], other: str
) -> None:
    here = local_target()
    made_for = {
        "card": {"target": msgspec.structs.replace(here, name="GenuineIntel-6-143")},
        "stock build": {"stock_build": "2.8"},
    }[other]
    key = softmax_key(4)
    record = stored(record_for(key, **made_for), record_data(key))
    x = torch.randn(4, 8)
    pack = install(trusted, pack_of(record))
    assert rows_of(x) == 0
    waiting = arming_of(pack, session().store).waiting
    assert "autokern pack verify NAME --replay" in waiting[record.record_id]
    receipt = Receipt(record.record_id, here, record_for(key).stock_build, 1.2, "2026-01-01T00:00:00Z")
    session().store.add_note(key.digest, receipt)
    ak.refresh()
    assert rows_of(x) == 1


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other level must have this machine's kind of ELF")
def test_another_instruction_set_is_elsewhere_and_no_receipt_changes_that(
    trusted: Path, served: Served, passing_smoke: list[int]
) -> None:
    key, here = softmax_key(4), local_target()
    other = "x86-64-v2" if here.arch != "x86-64-v2" else "x86-64-v3"
    record = stored(record_for(key, target=Target("cpu", here.name, other, here.threads)), record_data(key))
    pack = install(trusted, pack_of(record))
    session().store.add_note(key.digest, Receipt(record.record_id, here, record_for(key).stock_build, 1.2, "now"))
    ak.refresh()
    assert rows_of(torch.randn(4, 8)) == 0
    assert arming_of(pack, session().store).elsewhere == (record.record_id,)


def test_a_receipt_of_another_thread_count_arms_nothing(trusted: Path, served: Served, passing_smoke: list[int]) -> None:
    key, here = softmax_key(4), local_target()
    record = stored(record_for(key, stock_build="2.8"), record_data(key))
    install(trusted, pack_of(record))
    other = msgspec.structs.replace(here, threads=here.threads + 1)
    session().store.add_note(key.digest, Receipt(record.record_id, other, record_for(key).stock_build, 1.2, "now"))
    ak.refresh()
    assert rows_of(torch.randn(4, 8)) == 0


@pytest.mark.long
def test_a_child_tries_every_kernel_once_before_its_first_use(trusted: Path, served: Served) -> None:
    pack = install(trusted, good())
    (results,) = (trusted / "smoke").iterdir()
    known = msgspec.json.decode(results.read_bytes(), type=smoke.SmokeResults)
    assert set(known.passed) == set(pack.record_ids) and not known.failed
    assert rows_of(torch.randn(4, 8)) == 1


@pytest.mark.long
def test_a_kernel_that_is_wrong_here_is_set_aside_by_the_child(trusted: Path, served: Served) -> None:
    key = softmax_key(4)
    wrong = stored(record_for(key), {**record_data(key), "plan.json": encode_plan(marker_plan(key))})
    pack = install(trusted, pack_of(wrong, records()[0]))
    assert rows_of(torch.randn(4, 8)) == 0 and rows_of(torch.randn(3, 8)) == 1
    notes = session().store.notes(key.digest, wrong.record_id)
    assert notes.quarantine is not None and "far from stock's" in notes.quarantine.reason
    assert "quarantined" in arming_of(pack, session().store).waiting[wrong.record_id]


def test_a_kernel_that_kills_the_child_is_named_and_the_rest_serve(
    trusted: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = records()[1].record_id
    children = []

    def run(given: list[tuple[StoredRecord, int]]) -> tuple[list[SmokeLine], str]:
        children.append(len(given))
        lines = []
        for number, (record, _) in enumerate(given):
            lines.append(SmokeLine(number, "start"))
            if record.record_id == bad:
                return lines, "was ended by signal 11"
            lines.append(SmokeLine(number, "ok"))
        return lines, "ended with exit code 0"

    monkeypatch.setattr(smoke, "_run_child", run)
    install(trusted, good())
    assert session().held_back == {bad: "smoke test: the child was ended by signal 11"}
    assert len(session().loaded) == len(records()) - 1 and len(children) == 2
    ak.refresh()
    assert len(children) == 2, "what is known is not asked again"


def test_a_kernel_of_another_library_waits_and_is_not_set_aside(
    trusted: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(given: list[tuple[StoredRecord, int]]) -> tuple[list[SmokeLine], str]:
        return [SmokeLine(number, f"{smoke.WAITS} chosen elsewhere") for number in range(len(given))], "ended with exit code 0"

    monkeypatch.setattr(smoke, "_run_child", run)
    install(trusted, good())
    assert not session().loaded and set(session().held_back.values()) == {"waits: chosen elsewhere"}
    assert not list((trusted / "v1").rglob("*quarantine*")), "it is as good as ever"


def test_where_no_child_can_be_started_kernels_of_packs_are_not_used(
    trusted: Path, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke.subprocess, "run", lambda *args, **options: (_ for _ in ()).throw(OSError("no processes left")))
    install(trusted, good())
    assert not session().loaded and set(session().held_back.values()) == {"its smoke test did not run"}
    assert not list((trusted / "v1").rglob("*quarantine*")), "nobody's fault"


def test_own_records_need_no_smoke_test(trusted: Path, served: Served, passing_smoke: list[int]) -> None:
    key = softmax_key(4)
    session().store.publish(record_for(key), record_data(key))
    try:
        install(trusted, good())
        assert passing_smoke == [len(records()) - 1]
    finally:
        session().store.clear(key.digest)


def test_a_pack_in_a_wheel_is_found_without_importing_anything(
    trusted: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pack = parse_pack(split(good()), read_binaries)
    assert isinstance(pack, Pack)
    with zipfile.ZipFile(io.BytesIO(build_wheel(pack)[1])) as archive:
        archive.extractall(tmp_path)
    (tmp_path / WHEEL_FOLDER / "__init__.py").write_text("raise SystemExit('imported')")
    for path in (tmp_path / WHEEL_FOLDER).iterdir():
        path.chmod(0o644)
    monkeypatch.setattr(pack_install, "site_folders", lambda: [tmp_path])
    (found,) = open_packs(read_binaries).found
    assert found.origin == "wheel" and isinstance(found.outcome, Pack)
    assert WHEEL_FOLDER not in sys.modules


def test_the_working_folder_is_not_searched(trusted: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / WHEEL_FOLDER).mkdir()
    (tmp_path / WHEEL_FOLDER / "tiny.akpack").write_bytes(good())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    assert open_packs(read_binaries).found == ()


def test_the_newest_version_serves_and_the_rest_is_listed_as_superseded(
    trusted: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / WHEEL_FOLDER).mkdir()
    (tmp_path / WHEEL_FOLDER / "tiny.akpack").write_bytes(pack_of(*records(), version=7))
    (tmp_path / WHEEL_FOLDER / "tiny.akpack").chmod(0o644)
    monkeypatch.setattr(pack_install, "site_folders", lambda: [tmp_path])
    install(trusted, good())
    found = open_packs(read_binaries)
    assert [pack.index.version for pack in found.packs] == [7]
    assert sorted((f.origin, f.superseded) for f in found.found) == [("installed", True), ("wheel", False)]


_OFFLINE = """
import socket, sys
def refuse(*args, **options):
    raise AssertionError("a socket was opened")
class Refused(socket.socket):  # still a class: `ssl` derives from it
    __init__ = refuse
socket.socket = Refused
socket.create_connection = socket.getaddrinfo = refuse
sys.path.insert(0, {tests!r})
import torch, torch_autokern as ak
from torch_autokern.store.pack_refusal import PackRefusal
outcome = ak.install_pack({pack!r})
assert not isinstance(outcome, PackRefusal), outcome
model = ak.optimize(torch.nn.Softmax(-1))
model(torch.randn(4, 8))
assert sum(row.hits for row in ak.stats().kernels) == 1
assert ak.check_ranks()
print("served")
"""


@pytest.mark.long
def test_a_fresh_process_installs_and_serves_with_the_network_cut(trusted: Path) -> None:
    pack = trusted / "given.akpack"
    pack.write_bytes(good())
    threads = records()[0].record.target.threads
    code = _OFFLINE.format(tests=str(TESTS), pack=str(pack)).replace("model = ", f"torch.set_num_threads({threads}); model = ")
    search_path = os.pathsep.join((str(TESTS.parent), os.environ.get("PYTHONPATH", "")))
    # No compiler and no PATH either: a pack needs neither.
    environment = {**os.environ, "PYTHONPATH": search_path, "PATH": "/nonexistent", "AUTOKERN_CXX": "/nonexistent"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.stdout.strip() == "served", ended.stderr


def test_a_manifest_that_lies_is_caught_when_its_kernel_is_read(
    trusted: Path, served: Served, passing_smoke: list[int]
) -> None:
    """Installed by hand, past `pack install`: signed by a trusted key, its index right, one line wrong about its ELF."""
    from pack_samples import parts

    whole = parts()
    whole.kernels[0]["binaries"][0]["entries"][0]["registers"] = 9
    folder = trusted / "packs"
    folder.mkdir(mode=0o700)
    (folder / "tiny-3-000000000000.akpack").write_bytes(whole.sealed())
    (folder / "tiny-3-000000000000.akpack").chmod(0o600)
    ak.refresh()
    assert len(session().loaded) == len(records()) - 1
    (refusal,) = session().store.packs[0].refusals.values()
    assert refusal.reason.value == "binary_mismatch" and "registers" in refusal.message
