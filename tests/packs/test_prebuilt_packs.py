"""Packs inside the package: named by id in the code, found by `optimize` with no search, in every wheel, and small."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from pack_samples import OPTIONS, good, needs_cryptography, publics, records, softmax_key, split, stored, unsigned
from tiny_kernels import Served, record_data, record_for

import torch_autokern as ak
from benchmarks import prebuilt_packs
from torch_autokern.runtime import smoke
from torch_autokern.runtime.arming import arming_of
from torch_autokern.runtime.pack_facts import read_binaries
from torch_autokern.runtime.session import session
from torch_autokern.runtime.smoke import SmokeLine
from torch_autokern.runtime.target import local_target
from torch_autokern.store import pack_install, shipped
from torch_autokern.store.pack import Pack, open_pack
from torch_autokern.store.pack_build import build_pack, check_whole, pack_bytes
from torch_autokern.store.pack_file import Envelope, read_pack
from torch_autokern.store.pack_install import SHIPPED_FOLDER, open_packs
from torch_autokern.store.pack_refusal import PackReason, PackRefusal
from torch_autokern.store.record import StoredRecord
from torch_autokern.store.store import KernelStore, Layer
from torch_autokern.store.trust import Policy, Revocation, add_key, add_revocations, change_policy

ROOT = Path(__file__).parents[2]
Ship = Callable[[Envelope], Path]


@pytest.fixture
def ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ship:
    """Puts a pack where those of the package lie, and its id into the code."""
    folder = tmp_path / "packs"
    folder.mkdir()
    monkeypatch.setenv("AUTOKERN_PREBUILT", "1")
    monkeypatch.setattr(pack_install, "SHIPPED_FOLDER", folder)
    monkeypatch.setattr(pack_install, "site_folders", list)
    for name in list(shipped.SHIPPED):
        monkeypatch.delitem(shipped.SHIPPED, name)

    def put(envelope: Envelope) -> Path:
        monkeypatch.setitem(shipped.SHIPPED, "tiny", envelope.pack_id)
        path = folder / "tiny.akpack"
        path.write_bytes(pack_bytes(envelope))
        return path

    return put


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The smoke test's child answers "ok"; the session forgets what it loaded before and after."""

    def run(given: list[tuple[StoredRecord, int]]) -> tuple[list[SmokeLine], str]:
        return [SmokeLine(number, words) for number in range(len(given)) for words in ("start", "ok")], "ended"

    monkeypatch.setattr(smoke, "_run_child", run)
    session().loaded.clear()
    smoke._in_memory.clear()
    yield
    session().loaded.clear()
    smoke._in_memory.clear()
    session().store.packs, session().found_packs = (), ()


def test_every_pack_in_the_package_is_named_by_its_id_and_holds() -> None:
    """Whole, refused by no check, and nothing in the folder but what the code names."""
    found = {path.stem: read_pack(path) for path in SHIPPED_FOLDER.glob("*.akpack")}
    assert {name: e.pack_id for name, e in found.items() if isinstance(e, Envelope)} == shipped.SHIPPED
    for envelope in found.values():
        assert isinstance(envelope, Envelope)
        pack = open_pack(envelope, Policy(), read_binaries)
        assert isinstance(pack, Pack), pack
        assert pack.admission.tier == "shipped" and pack.index.licence and not check_whole(pack)


def test_the_packs_of_the_package_are_small() -> None:
    assert sum(path.stat().st_size for path in SHIPPED_FOLDER.glob("*")) < 20_000_000


def test_the_page_and_the_ids_are_what_the_command_writes() -> None:
    packs = prebuilt_packs.read_packs(SHIPPED_FOLDER)
    assert prebuilt_packs.TABLE.read_text() == prebuilt_packs.table(packs)
    ids = prebuilt_packs.IDS.read_text()
    assert prebuilt_packs.ids_module(ids, packs) == ids


def test_optimize_serves_a_shipped_pack_with_no_search_and_no_key(
    state: Path, ship: Ship, served: Served, tried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship(unsigned())
    monkeypatch.setattr(session(), "_filled", False)
    model = ak.optimize(torch.nn.Softmax(-1))
    try:
        x = torch.randn(4, 8)
        torch.testing.assert_close(model(x), torch.softmax(x.double(), -1).float())
        assert sum(kernel.native.hits for kernel in session().loaded.values()) == 1
        assert len(session().loaded) == len(records())
    finally:
        ak.restore(model)
    (found,) = session().found_packs
    assert found.origin == "shipped" and isinstance(found.outcome, Pack)


def test_a_shipped_pack_for_another_card_waits_and_the_receipt_is_offered(
    state: Path, ship: Ship, served: Served, tried: None
) -> None:
    key = softmax_key(4)
    other = msgspec.structs.replace(local_target(), name="GenuineIntel-6-143")
    envelope = build_pack([stored(record_for(key, target=other), record_data(key))], OPTIONS, read_binaries)
    assert isinstance(envelope, Envelope)
    ship(envelope)
    ak.refresh()
    assert not session().loaded
    (pack,) = session().store.packs
    assert "autokern pack verify NAME --replay" in next(iter(arming_of(pack, session().store).waiting.values()))


def test_the_switch_leaves_shipped_packs_alone(state: Path, ship: Ship, monkeypatch: pytest.MonkeyPatch) -> None:
    ship(unsigned())
    assert len(open_packs(read_binaries).packs) == 1
    monkeypatch.setenv("AUTOKERN_PREBUILT", "0")
    assert open_packs(read_binaries).found == ()


def test_a_shipped_pack_is_named_by_its_bytes_so_a_wide_umask_does_no_harm(state: Path, ship: Ship) -> None:
    """pip under umask 002 leaves files that a group may write; every byte is checked against an id in the code."""
    path = ship(unsigned())
    path.chmod(0o666)
    (found,) = open_packs(read_binaries).found
    assert isinstance(found.outcome, Pack) and found.outcome.admission.tier == "shipped"
    raw = bytearray(path.read_bytes())
    raw[-40] ^= 1  # in the last record
    path.write_bytes(raw)
    (found,) = open_packs(read_binaries).found
    assert isinstance(found.outcome, Pack)
    assert [refusal.reason for refusal in check_whole(found.outcome)] == [PackReason.RECORD_DAMAGED]
    assert len(list(found.outcome.records())) == len(records()) - 1


def test_a_file_beside_the_shipped_packs_is_not_one_of_them(state: Path, ship: Ship) -> None:
    """Whoever may write the folder and not the code gets no more than anybody else: an owner's file and trusted keys."""
    needs_cryptography()
    path = ship(unsigned())
    path.write_bytes(good().replace(b"Rows of eight", b"Rows of seven", 1))
    path.chmod(0o644)
    (found,) = open_packs(read_binaries).found
    assert isinstance(found.outcome, PackRefusal) and found.outcome.reason is PackReason.UNTRUSTED_KEY
    path.chmod(0o666)
    (found,) = open_packs(read_binaries).found
    assert isinstance(found.outcome, PackRefusal) and found.outcome.reason is PackReason.UNREADABLE
    path.unlink()
    path.mkdir()
    (found,) = open_packs(read_binaries).found
    assert isinstance(found.outcome, PackRefusal) and found.outcome.reason is PackReason.UNREADABLE


def test_a_shipped_pack_can_be_revoked_and_a_damaged_policy_stops_it(state: Path, ship: Ship) -> None:
    ship(unsigned())
    change_policy(state, lambda policy: add_revocations(policy, (Revocation("pack", unsigned().pack_id, "", "bad"),)))
    (found,) = open_packs(read_binaries).found
    assert isinstance(found.outcome, PackRefusal) and found.outcome.reason is PackReason.PACK_REVOKED
    (state / "trust" / "policy.json").write_bytes(b"{")
    (found,) = open_packs(read_binaries).found
    assert isinstance(found.outcome, PackRefusal) and found.outcome.reason is PackReason.POLICY_DAMAGED


def test_a_newer_signed_version_takes_a_shipped_packs_place(state: Path, ship: Ship) -> None:
    needs_cryptography()
    older = build_pack(records()[:1], msgspec.structs.replace(OPTIONS, version=2), read_binaries)
    assert isinstance(older, Envelope)
    ship(older)
    for public in publics():
        change_policy(state, lambda policy, public=public: add_key(policy, public))  # type: ignore[misc]
    assert isinstance(pack_install.install_pack(split(good()), state, read_binaries), Pack)
    found = open_packs(read_binaries)
    assert [pack.index.version for pack in found.packs] == [OPTIONS.version]
    assert sorted((f.origin, f.superseded) for f in found.found) == [("installed", False), ("shipped", True)]


def test_the_command_packs_the_best_record_of_each_key_and_writes_ids_and_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    folder.mkdir(mode=0o700)
    store, key = KernelStore([Layer("cache", folder, writable=True)]), prebuilt_packs.keys_of(["minilm"], "cpu")[0]
    kept = {}
    for ratio in (1.25, 2.0, 1.5):
        record = record_for(key)
        timing = msgspec.structs.replace(record.verdict.timings[0], ratio=ratio, ratio_low=ratio, ratio_high=ratio)
        verdict = msgspec.structs.replace(record.verdict, timings=(timing,))
        outcome = store.publish(msgspec.structs.replace(record, verdict=verdict), record_data(softmax_key(4)))
        kept[ratio] = outcome.record_id
    shipping, ids, page = tmp_path / "packs", tmp_path / "shipped.py", tmp_path / "page.md"
    ids.write_text(prebuilt_packs.IDS.read_text())
    monkeypatch.setattr(prebuilt_packs, "SHIPPED_FOLDER", shipping)
    monkeypatch.setattr(prebuilt_packs, "IDS", ids)
    monkeypatch.setattr(prebuilt_packs, "TABLE", page)
    arguments = ["--name", "mini", "--sets", "minilm", "--budget", "0", "--store", str(folder)]
    prebuilt_packs.main(arguments)
    (pack,) = prebuilt_packs.read_packs(shipping)
    assert pack.record_ids == (kept[2.0],)
    assert f'    "mini": "{pack.pack_id}",\n' in ids.read_text()
    assert "softmax (32, 12, 38, 38)" in page.read_text() and "2.00x [2.00, 2.00]" in page.read_text()
    monkeypatch.setattr(prebuilt_packs, "LIMIT_BYTES", 100)
    with pytest.raises(SystemExit, match="at most 100 may be shipped"):
        prebuilt_packs.main(arguments)


@pytest.mark.long
def test_wheel_and_sdist_carry_the_packs_as_data(tmp_path: Path) -> None:
    """A copy of the sources with a pack put in, built without the extension: the lists of files are the same with it."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    leave = shutil.ignore_patterns("*.so", "__pycache__", "*.akpack")
    shutil.copytree(ROOT / "torch_autokern", tree / "torch_autokern", ignore=leave)
    (tree / "torch_autokern" / "packs").mkdir(exist_ok=True)
    (tree / "torch_autokern" / "packs" / "tiny.akpack").write_bytes(pack_bytes(unsigned()))
    for command in ("bdist_wheel", "sdist"):
        told = [sys.executable, "setup.py", "-q", command, "-d", str(tmp_path / "dist")]
        subprocess.run(told, cwd=tree, check=True, capture_output=True, timeout=120, env={**os.environ, "PYTHONPATH": ""})
    (wheel,), (sdist,) = (tmp_path / "dist").glob("*.whl"), (tmp_path / "dist").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert archive.read("torch_autokern/packs/tiny.akpack") == pack_bytes(unsigned())
    assert "torch_autokern/packs/__init__.py" not in names, "data, not a module"
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("/torch_autokern/packs/tiny.akpack") for name in archive.getnames())
