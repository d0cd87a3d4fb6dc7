"""Corners of packs and trust that whole stories pass by: each a refusal, a missing thing, or a machine that lacks something."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from pack_samples import (
    OPTIONS,
    good,
    needs_cryptography,
    norm_key,
    pack_of,
    publics,
    records,
    secret,
    softmax_key,
    split,
    stored,
    trusting,
    unsigned,
    with_binary,
)
from tiny_kernels import record_data, record_for

from torch_autokern.errors import InvalidInputError, StoreError
from torch_autokern.runtime.pack_facts import read_binaries
from torch_autokern.store import pack_file, pack_install, pack_lock, trust, trust_keys
from torch_autokern.store.files import Unread
from torch_autokern.store.key import canonical_json
from torch_autokern.store.pack import Pack, open_pack, parse_pack
from torch_autokern.store.pack_build import build_pack, file_name
from torch_autokern.store.pack_file import Envelope, split_pack
from torch_autokern.store.pack_install import PackSet, install_pack, open_packs, require_state, site_folders, state_folder
from torch_autokern.store.pack_lock import lock_differences, lock_of, read_lock
from torch_autokern.store.pack_refusal import PackReason, PackRefusal
from torch_autokern.store.trust import Pin, Policy, Revocation, add_key, add_pin, add_revocations, change_policy, read_policy
from torch_autokern.store.trust_keys import PublicKey, SecretKey, load_public, load_secret
from torch_autokern.store.trust_statement import Statement, Withdrawn, make_statement, open_statement


def opened(policy: Policy | None = None) -> Pack:
    pack = open_pack(split(good()), policy or trusting(), read_binaries)
    assert isinstance(pack, Pack), pack
    return pack


def reason(outcome: object) -> PackReason | None:
    return outcome.reason if isinstance(outcome, PackRefusal) else None


# -- a pack --------------------------------------------------------------------------------------------------------------


def test_what_is_held_back_is_in_no_answer() -> None:
    needs_cryptography()
    held_back, other = records()[0], records()[1]
    pack = opened(add_revocations(trusting(), (Revocation("kernel", held_back.record_id, "", "wrong"),)))
    digest = held_back.record.key.digest
    assert pack.lookup(digest) == () and list(pack.records(digest)) == []
    assert [row.record_id for row in pack.lookup(other.record.key.digest)] == [other.record_id]
    assert [r.record_id for r in pack.records(other.record.key.digest)] == [other.record_id]
    assert {r.record_id for r in pack.records()} == {r.record_id for r in records()} - {held_back.record_id}
    assert pack.get(digest, other.record_id) is None, "a record under another key"


def test_a_record_that_cannot_be_shipped_is_named() -> None:
    broken = with_binary(b"#!/bin/sh")
    outcome = build_pack([records()[0], broken], OPTIONS, read_binaries)
    assert isinstance(outcome, PackRefusal) and (outcome.reason, outcome.kernel) == (PackReason.BAD_BINARY, broken.record_id)
    key = softmax_key(4)
    foreign = stored(record_for(key), {**record_data(key), "setup.py": b"import os"})
    outcome = build_pack([foreign], OPTIONS, read_binaries)
    assert isinstance(outcome, PackRefusal) and (outcome.reason, outcome.kernel) == (PackReason.FOREIGN_BLOB, foreign.record_id)


def test_an_absent_tensor_is_said_in_the_contract() -> None:
    key = msgspec.structs.replace(norm_key(4), tensors=(norm_key(4).tensors[0], None, None))
    envelope = build_pack([stored(record_for(key), record_data(norm_key(4)))], OPTIONS, read_binaries)
    assert isinstance(envelope, Envelope), envelope
    pack = parse_pack(envelope, read_binaries)
    assert isinstance(pack, Pack)
    assert next(pack.manifests()).contract.inputs == ("float32[4,8] strides 8,1 aligned 4", "none", "none")


def test_a_pack_is_called_by_name_and_version() -> None:
    assert file_name(opened_untrusted().index) == "tiny-3.akpack"


def opened_untrusted() -> Pack:
    pack = parse_pack(unsigned(), read_binaries)
    assert isinstance(pack, Pack)
    return pack


def test_a_file_beyond_the_limit_is_not_cut_into_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_cryptography()
    raw = good()
    monkeypatch.setattr(pack_file, "MAX_PACK_BYTES", len(raw) - 1)
    assert reason(split_pack(raw)) is PackReason.TOO_LARGE


# -- the lock file -------------------------------------------------------------------------------------------------------


def test_a_lock_names_another_version_and_another_choice_of_kernels() -> None:
    mine = lock_of((opened_untrusted(),))
    (entry,) = mine.packs
    newer = msgspec.structs.replace(mine, packs=(msgspec.structs.replace(entry, version=4, pack_id="0" * 64),))
    (words,) = lock_differences(newer, mine)
    assert words == f"tiny: 4 ({'0' * 16}) is locked, 3 ({entry.pack_id[:16]}) is here"
    fewer = msgspec.structs.replace(mine, packs=(msgspec.structs.replace(entry, kernels=entry.kernels[1:]),))
    assert lock_differences(fewer, mine) == ("tiny 3: 0 locked kernels do not serve here, 1 others do",)
    assert lock_differences(mine, mine) == ()


@pytest.mark.parametrize(
    ("body", "words"), [(b"{", "is not a lock file"), (b" " * 65, "more than 64 bytes"), (None, "cannot read")]
)
def test_what_is_no_lock_file_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: bytes | None, words: str
) -> None:
    monkeypatch.setattr(pack_lock, "MAX_LOCK_BYTES", 64)
    path = tmp_path / "autokern.lock"
    if body is not None:
        path.write_bytes(body)
    with pytest.raises(InvalidInputError, match=words):
        read_lock(path)


# -- trust ---------------------------------------------------------------------------------------------------------------


def test_what_this_version_knows_to_be_bad_runs_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_cryptography()
    envelope = split(good())
    bad = frozenset({("pack", envelope.pack_id), ("kernel", records()[1].record_id)})
    pinned = add_pin(trusting(), Pin(envelope.pack_id, (records()[0].record_id,)))
    monkeypatch.setattr(trust, "SHIPPED_REVOCATIONS", bad)
    outcome = open_pack(envelope, pinned, read_binaries)
    assert isinstance(outcome, PackRefusal) and outcome.reason is PackReason.PACK_REVOKED
    assert "this version of torch_autokern knows it to be bad" in outcome.message


def test_a_policy_is_only_changed_by_who_holds_the_lock(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def busy(*_: object, **__: object) -> Iterator[bool]:
        yield False

    monkeypatch.setattr(trust, "work_lock", busy)
    with pytest.raises(StoreError, match="holds the lock"):
        change_policy(state, lambda policy: policy)
    assert not (state / "trust").exists()


def test_a_policy_that_cannot_be_written_stays_as_it_was(trusted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (trusted / "trust" / "policy.json").read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trust, "publish_file", full)
    with pytest.raises(StoreError, match="No space left on device"):
        change_policy(trusted, lambda policy: Policy())
    assert (trusted / "trust" / "policy.json").read_bytes() == before


def test_without_a_folder_nobody_is_trusted() -> None:
    assert read_policy(None) == Policy()


def test_a_pin_is_widened_by_the_next_and_no_floor_comes_of_it(state: Path) -> None:
    """A pinned pack has no publisher whose versions could be counted."""
    ids = sorted(r.record_id for r in records())
    policy = add_pin(add_pin(Policy(), Pin("a" * 64, tuple(ids[1:2]))), Pin("a" * 64, tuple(ids[:1]), rollback=True))
    assert policy.pins == (Pin("a" * 64, tuple(ids[:2]), rollback=True),)
    change_policy(state, lambda old: add_pin(old, Pin(unsigned().pack_id, tuple(ids[:1]))))
    assert isinstance(install_pack(unsigned(), state, read_binaries), Pack)
    policy = read_policy(state)
    assert isinstance(policy, Policy) and policy.floors == {}


# -- key files -----------------------------------------------------------------------------------------------------------


def test_without_cryptography_nothing_is_verified_and_the_command_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith("cryptography"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert not trust_keys.can_verify()
    with pytest.raises(InvalidInputError, match="pip install"):
        secret("index").public()


def test_a_statement_needs_cryptography(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_cryptography()
    from torch_autokern.store import trust_statement

    raw = make_statement(Statement("autokern.statement/1", "the tests"), secret("index"))
    policy = trusting()
    monkeypatch.setattr(trust_statement, "can_verify", lambda: False)
    outcome = open_statement(raw, policy)
    assert isinstance(outcome, PackRefusal) and outcome.reason is PackReason.NO_CRYPTOGRAPHY
    assert outcome.command == "pip install 'torch-autokern[sign]'"


def test_a_folder_is_no_key_and_neither_is_somebody_elses_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "me.index.key").mkdir()
    with pytest.raises(InvalidInputError, match=r"not a regular file|Is a directory"):
        load_secret(tmp_path / "me.index.key")
    fifo = tmp_path / "pipe.pub"
    os.mkfifo(fifo)
    with pytest.raises(InvalidInputError, match="not a regular file"):
        load_public(fifo)
    path = tmp_path / "you.index.key"
    path.write_bytes(canonical_json(secret("index")))
    path.chmod(0o600)
    assert load_secret(path, "index") == secret("index")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(InvalidInputError, match=f"belongs to uid {owner}"):
        load_secret(path)


def test_a_key_of_another_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "new.index.key"
    path.write_bytes(canonical_json(SecretKey("autokern.secret-key/2", "index", "tests", "0" * 64)))
    path.chmod(0o600)
    with pytest.raises(InvalidInputError, match="another schema"):
        load_secret(path)
    path.write_bytes(canonical_json(PublicKey("autokern.public-key/2", "index", "tests", "0" * 64)))
    with pytest.raises(InvalidInputError, match="another schema"):
        load_public(path)


# -- packs of a machine --------------------------------------------------------------------------------------------------


def test_a_pack_is_found_by_name_and_by_the_start_of_its_id(trusted: Path) -> None:
    assert isinstance(install_pack(split(good()), trusted, read_binaries), Pack)
    packs = open_packs(read_binaries)
    pack_id = split(good()).pack_id
    assert packs.named("tiny").pack_id == packs.named(pack_id[:8]).pack_id == pack_id
    for name in ("other", pack_id[:7]):
        with pytest.raises(InvalidInputError, match="no installed pack"):
            packs.named(name)
    with pytest.raises(InvalidInputError, match="no installed pack"):
        PackSet().named("tiny")


def test_the_state_folder_is_the_users_data_folder_or_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AUTOKERN_STORE")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert state_folder() == require_state() == tmp_path / "autokern"

    def homeless(*_: object, **__: object) -> str:
        raise RuntimeError("could not determine home directory")

    monkeypatch.setattr(pack_install.platformdirs, "user_data_dir", homeless)
    assert state_folder() is None
    with pytest.raises(StoreError, match="no home"):
        require_state()
    monkeypatch.setattr(pack_install, "site_folders", list)
    assert open_packs(read_binaries).found == (), "without a folder there is nothing to list, and nothing fails"


def test_a_state_folder_that_others_may_write_holds_no_packs(trusted: Path) -> None:
    assert isinstance(install_pack(split(good()), trusted, read_binaries), Pack)
    trusted.chmod(0o777)
    with pytest.raises(StoreError, match="only you can write"):
        require_state()
    assert open_packs(read_binaries).found == ()


@pytest.mark.parametrize(("times", "found"), [(1, 1), (99, 0)])
def test_a_pack_that_vanishes_between_listing_and_reading_is_looked_for_again(
    trusted: Path, monkeypatch: pytest.MonkeyPatch, times: int, found: int
) -> None:
    assert isinstance(install_pack(split(good()), trusted, read_binaries), Pack)
    real, calls = pack_install.read_file, []

    def vanish(path: Path, limit_bytes: int) -> object:
        calls.append(path)
        return Unread("absent", "no such file") if len(calls) <= times else real(path, limit_bytes)

    monkeypatch.setattr(pack_install, "read_file", vanish)
    assert len(open_packs(read_binaries).found) == found
    assert len(calls) == (2 if found else 5), "not for ever"


def test_a_damaged_policy_installs_nothing(trusted: Path) -> None:
    (trusted / "trust" / "policy.json").write_bytes(b"{")
    assert reason(install_pack(split(good()), trusted, read_binaries)) is PackReason.POLICY_DAMAGED
    assert not (trusted / "packs").exists()


def test_a_pack_with_one_bad_record_is_not_installed(trusted: Path) -> None:
    from pack_samples import parts

    whole = parts()
    whole.kernels[0]["origin"]["idea"] = "another"
    outcome = install_pack(split(whole.sealed()), trusted, read_binaries)
    assert reason(outcome) is PackReason.RECORD_MISMATCH
    assert isinstance(outcome, PackRefusal) and outcome.kernel == whole.kernels[0]["record_id"]
    assert not (trusted / "packs").exists()


def test_a_full_disk_leaves_the_version_that_was_there(trusted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(install_pack(split(good()), trusted, read_binaries), Pack)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pack_install, "publish_file", full)
    with pytest.raises(StoreError, match="No space left on device"):
        install_pack(split(pack_of(*records(), version=9)), trusted, read_binaries)
    assert [pack.index.version for pack in open_packs(read_binaries).packs] == [3]


@pytest.mark.parametrize("user_site", [True, False])
def test_wheels_are_looked_for_where_pip_puts_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, user_site: bool) -> None:
    monkeypatch.setattr(pack_install.site, "ENABLE_USER_SITE", user_site)
    monkeypatch.setattr(pack_install.site, "getusersitepackages", lambda: str(tmp_path))
    monkeypatch.setattr(pack_install.sysconfig, "get_paths", lambda: {"purelib": "/site", "platlib": "lib/relative"})
    assert site_folders() == [Path("/site"), *([tmp_path] if user_site else [])]


def test_a_statement_that_cannot_be_read_or_is_from_a_stranger_withdraws_nothing(trusted: Path) -> None:
    assert isinstance(install_pack(split(good()), trusted, read_binaries), Pack)
    withdrawn = (Withdrawn("pack", split(good()).pack_id, "bad"),)
    raw = make_statement(Statement("autokern.statement/1", "strangers", withdrawn=withdrawn), secret("index", "strangers"))
    stranger, open_to_all = trusted / "packs" / "a.akstatement", trusted / "packs" / "b.akstatement"
    stranger.write_bytes(raw)
    stranger.chmod(0o600)
    open_to_all.write_bytes(
        make_statement(Statement("autokern.statement/1", "the tests", withdrawn=withdrawn), secret("index"))
    )
    open_to_all.chmod(0o666)
    assert len(open_packs(read_binaries).packs) == 1
    open_to_all.chmod(0o600)
    assert open_packs(read_binaries).packs == ()


def test_a_name_passes_within_a_line_of_keys_in_both_directions(trusted: Path) -> None:
    """The successor takes over from the key that introduced it, and a pack of the elder key may follow one of the younger."""
    from pack_samples import secrets

    from torch_autokern.store.pack_build import pack_bytes, sign_pack

    elder = {key.role: key.key_id for key in publics()}
    for public in publics("young"):
        change_policy(trusted, lambda policy, public=public: add_key(policy, public, introduced_by=elder[public.role]))  # type: ignore[misc]
    young = build_pack(records(), msgspec.structs.replace(OPTIONS, version=4), read_binaries)
    assert isinstance(young, Envelope)
    assert isinstance(install_pack(split(good()), trusted, read_binaries), Pack)
    signed = split(pack_bytes(sign_pack(young, secrets("young"))))
    assert isinstance(install_pack(signed, trusted, read_binaries), Pack)
    assert isinstance(install_pack(split(pack_of(*records(), version=5)), trusted, read_binaries), Pack)


def test_a_signed_pack_takes_the_name_of_one_that_nobody_signed(trusted: Path) -> None:
    pinned = build_pack(records()[:1], msgspec.structs.replace(OPTIONS, version=1), read_binaries)
    assert isinstance(pinned, Envelope)
    change_policy(trusted, lambda policy: add_pin(policy, Pin(pinned.pack_id, (records()[0].record_id,))))
    assert isinstance(install_pack(pinned, trusted, read_binaries), Pack)
    assert isinstance(install_pack(split(good()), trusted, read_binaries), Pack)
    (pack,) = open_packs(read_binaries).packs
    assert pack.admission.tier == "signed" and len(list((trusted / "packs").iterdir())) == 1
