"""Whom a user trusts: keys, roles, ops, versions, pins, withdrawals; every refusal names the way out."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from pack_samples import (
    good,
    needs_cryptography,
    parts,
    publics,
    records,
    secret,
    secrets,
    split,
    trusting,
    unsigned,
    verdict_on,
    verdict_on_envelope,
)

from torch_autokern.errors import InvalidInputError, StoreError
from torch_autokern.runtime.pack_facts import read_binaries
from torch_autokern.store import trust, trust_keys
from torch_autokern.store.pack import Pack, open_pack
from torch_autokern.store.pack_build import pack_bytes, sign_pack
from torch_autokern.store.pack_install import install_pack, open_packs
from torch_autokern.store.pack_refusal import PackReason, PackRefusal
from torch_autokern.store.trust import (
    Pin,
    Policy,
    Revocation,
    add_key,
    add_pin,
    add_revocations,
    change_policy,
    read_policy,
    remove_key,
)
from torch_autokern.store.trust_keys import load_public, load_secret, new_keys
from torch_autokern.store.trust_statement import (
    Signed,
    Statement,
    Withdrawn,
    apply_statement,
    make_statement,
    open_statement,
)


@pytest.fixture(autouse=True)
def _signatures() -> None:
    needs_cryptography()


def reason(refusal: PackRefusal | Pack | None) -> PackReason | None:
    return refusal.reason if isinstance(refusal, PackRefusal) else None


def version(number: int, name: str = "tests") -> bytes:
    """The pack with another version, signed by a publisher."""
    whole = parts()
    whole.index["version"] = number
    envelope = split(whole.sealed())
    return pack_bytes(sign_pack(type(envelope)((), envelope.index, envelope.kernels, envelope.records), secrets(name)))


def test_a_pack_needs_both_keys_and_each_only_does_its_own_work() -> None:
    assert verdict_on(good()) is None
    for missing in ("kernels", "index"):
        policy = Policy()
        for public in publics():
            if public.role != missing:
                policy = add_key(policy, public)
        refusal = verdict_on(good(), policy)
        assert reason(refusal) is PackReason.UNTRUSTED_KEY
        assert refusal is not None and refusal.command == "autokern pack trust add FILE.pub"
    swapped = Policy()
    for public in publics():
        other = "index" if public.role == "kernels" else "kernels"
        swapped = add_key(swapped, msgspec.structs.replace(public, role=other))
    assert reason(verdict_on(good(), swapped)) is PackReason.UNTRUSTED_KEY


def test_a_key_speaks_for_the_ops_that_it_is_trusted_for() -> None:
    assert verdict_on(good(), trusting(ops=("_softmax", "native_*"))) is None
    refusal = verdict_on(good(), trusting(ops=("_softmax",)))
    assert reason(refusal) is PackReason.OP_NOT_ALLOWED
    assert refusal is not None and "--op 'native_layer_norm'" in refusal.command


def test_without_cryptography_a_signed_pack_is_refused_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = trusting()
    monkeypatch.setattr(trust, "can_verify", lambda: False)
    refusal = verdict_on(good(), policy)
    assert reason(refusal) is PackReason.NO_CRYPTOGRAPHY
    assert refusal is not None and refusal.command == "pip install 'torch-autokern[sign]'"


def test_a_shipped_pack_needs_no_signature_and_no_cryptography(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "can_verify", lambda: False)
    monkeypatch.setitem(trust.SHIPPED, "tiny", unsigned().pack_id)
    pack = open_pack(unsigned(), Policy(), read_binaries)
    assert isinstance(pack, Pack) and pack.admission.tier == "shipped"
    changed = parts()
    changed.index["notes"] = "another"
    assert reason(open_pack(split(changed.sealed()), Policy(), read_binaries)) is PackReason.UNTRUSTED_KEY


def test_a_pinned_pack_serves_what_was_proved_here_and_no_more() -> None:
    proved = records()[1].record_id
    policy = add_pin(Policy(), Pin(unsigned().pack_id, (proved,)))
    pack = open_pack(unsigned(), policy, read_binaries)
    assert isinstance(pack, Pack) and pack.admission.tier == "pinned"
    assert [row.record_id for row in pack.rows()] == [proved]
    assert {refusal.reason for refusal in pack.refusals.values()} == {PackReason.NOT_PINNED}
    held_back = records()[0]
    assert pack.get(held_back.record.key.digest, held_back.record_id) is None


def test_an_older_version_needs_a_pin(trusted: Path) -> None:
    for number in (3, 5):
        assert isinstance(install_pack(split(version(number)), trusted, read_binaries), Pack)
    older = split(version(3))
    refusal = install_pack(older, trusted, read_binaries)
    assert reason(refusal) is PackReason.ROLLBACK
    assert isinstance(refusal, PackRefusal) and refusal.command == f"autokern pack install FILE --pin {older.pack_id[:16]}"
    assert [pack.index.version for pack in open_packs(read_binaries).packs] == [5]
    assert isinstance(install_pack(older, trusted, read_binaries, pin_rollback=True), Pack)
    assert [pack.index.version for pack in open_packs(read_binaries).packs] == [3]
    assert reason(install_pack(split(version(4)), trusted, read_binaries)) is PackReason.ROLLBACK


def test_an_old_file_put_back_by_hand_is_refused(trusted: Path) -> None:
    assert isinstance(install_pack(split(version(3)), trusted, read_binaries), Pack)
    (file,) = (trusted / "packs").glob("*.akpack")
    old = file.read_bytes()
    assert isinstance(install_pack(split(version(4)), trusted, read_binaries), Pack)
    file.write_bytes(old)
    file.chmod(0o600)
    found = open_packs(read_binaries).found
    assert {reason(f.outcome) if isinstance(f.outcome, PackRefusal) else None for f in found} == {None, PackReason.ROLLBACK}


def test_another_publisher_cannot_take_a_name(trusted: Path) -> None:
    for public in publics("others"):
        change_policy(trusted, lambda policy, public=public: add_key(policy, public))  # type: ignore[misc]
    assert isinstance(install_pack(split(good()), trusted, read_binaries), Pack)
    refusal = install_pack(split(version(9, "others")), trusted, read_binaries)
    assert reason(refusal) is PackReason.NAME_TAKEN
    assert isinstance(refusal, PackRefusal) and refusal.command == "autokern pack remove tiny"


@pytest.mark.parametrize("kind", ["key", "pack", "kernel"])
def test_what_the_user_revokes_is_not_used(kind: str) -> None:
    names = {"key": secret("index").public().key_id, "pack": split(good()).pack_id, "kernel": records()[0].record_id}
    policy = add_revocations(trusting(), (Revocation(kind, names[kind], "", "broken"),))  # type: ignore[arg-type]
    if kind == "kernel":
        pack = open_pack(split(good()), policy, read_binaries)
        assert isinstance(pack, Pack) and len(pack.rows()) == len(records()) - 1
        assert pack.refusals[names[kind]].reason is PackReason.KERNEL_REVOKED
        return
    refusal = verdict_on(good(), policy)
    assert reason(refusal) is {"key": PackReason.KEY_REVOKED, "pack": PackReason.PACK_REVOKED}[kind]
    assert refusal is not None and "broken" in refusal.message


def test_a_revoked_key_is_not_trusted_again_and_no_pin_saves_it() -> None:
    key = secret("index").public()
    policy = add_revocations(trusting(), (Revocation("key", key.key_id, "", "stolen"),))
    with pytest.raises(InvalidInputError, match="stolen"):
        add_key(policy, key)
    policy = add_pin(policy, Pin(split(good()).pack_id, (records()[0].record_id,)))
    assert reason(verdict_on(good(), policy)) is PackReason.KEY_REVOKED


def statement(role: str = "index", *, by: str = "tests", **fields: object) -> bytes:
    return make_statement(Statement("autokern.statement/1", "the tests", **fields), secret(role, by))  # type: ignore[arg-type]


def applied(policy: Policy, raw: bytes, **options: bool) -> Policy:
    signed = open_statement(raw, policy)
    assert isinstance(signed, Signed), signed
    return apply_statement(policy, signed, **options)


def test_a_publisher_withdraws_a_pack_and_a_kernel_that_he_signed() -> None:
    pack_id, kernel = split(good()).pack_id, records()[0].record_id
    raw = statement(withdrawn=(Withdrawn("pack", pack_id, "wrong numbers"), Withdrawn("kernel", kernel, "x")))
    refusal = verdict_on(good(), applied(trusting(), raw))
    assert reason(refusal) is PackReason.PACK_REVOKED
    assert refusal is not None and "wrong numbers" in refusal.message


def test_a_publisher_cannot_withdraw_another_publishers_pack() -> None:
    raw = statement(by="others", withdrawn=(Withdrawn("pack", split(good()).pack_id, "rival"),
                                            Withdrawn("key", secret("index").public().key_id, "rival")))  # fmt: skip
    assert verdict_on(good(), applied(trusting("tests", "others"), raw)) is None


def test_keys_rotate_and_the_old_one_is_withdrawn_by_its_successor() -> None:
    policy = trusting()
    for role in ("kernels", "index"):
        policy = applied(policy, statement(role, successors=(secret(role, "new").public(),)))
    newer = pack_bytes(sign_pack(unsigned(), secrets("new")))
    assert verdict_on(newer, policy) is None and verdict_on(good(), policy) is None
    old = secret("index").public().key_id
    policy = applied(policy, statement("index", by="new", withdrawn=(Withdrawn("key", old, "retired"),)))
    assert verdict_on(newer, policy) is None
    assert reason(verdict_on(good(), policy)) is PackReason.KEY_REVOKED
    with pytest.raises(InvalidInputError, match="introduces nobody"):
        applied(policy, statement("index", successors=(secret("index", "thief").public(),)))


def test_the_successor_may_take_over_the_name(trusted: Path) -> None:
    assert isinstance(install_pack(split(good()), trusted, read_binaries), Pack)
    for role in ("kernels", "index"):
        raw = statement(role, successors=(secret(role, "new").public(),))
        change_policy(trusted, lambda policy, raw=raw: applied(policy, raw))  # type: ignore[misc]
    assert isinstance(install_pack(split(version(4, "new")), trusted, read_binaries), Pack)


def test_a_successor_inherits_ops_and_cannot_change_roles() -> None:
    policy = applied(trusting(ops=("mm",)), statement("index", successors=(secret("index", "new").public(),)))
    key = policy.key(secret("index", "new").public().key_id)
    assert key is not None and key.ops == ("mm",)
    with pytest.raises(InvalidInputError, match="cannot introduce one for kernels"):
        applied(trusting(), statement("index", successors=(secret("kernels", "new").public(),)))


def test_a_statement_beside_a_pack_withdraws_and_introduces_nobody(trusted: Path) -> None:
    assert isinstance(install_pack(split(good()), trusted, read_binaries), Pack)
    raw = statement(successors=(secret("index", "new").public(),), withdrawn=(Withdrawn("pack", split(good()).pack_id, "bad"),))
    (trusted / "packs" / "news.akstatement").write_bytes(raw)
    (trusted / "packs" / "news.akstatement").chmod(0o600)
    (found,) = open_packs(read_binaries).found
    assert isinstance(found.outcome, PackRefusal) and found.outcome.reason is PackReason.PACK_REVOKED
    policy = read_policy(trusted)
    assert isinstance(policy, Policy) and len(policy.keys) == 2


@pytest.mark.parametrize(("change", "wanted"), [
    (lambda raw: raw[:50], PackReason.NOT_A_PACK), (lambda raw: b"X" + raw[1:], PackReason.NOT_A_PACK),
    (lambda raw: raw + b" ", PackReason.SIZE_MISMATCH), (lambda raw: raw[:8] + b"\2" + raw[9:], PackReason.FORMAT_VERSION),
    (lambda raw: raw[:-1] + b"]", PackReason.BAD_SIGNATURE), (lambda raw: raw[:20] + b"\0" + raw[21:], PackReason.UNTRUSTED_KEY),  # noqa: E501
    (lambda raw: raw[:60] + b"\0\0" + raw[62:], PackReason.BAD_SIGNATURE), (lambda raw: raw + bytes(2 << 20), PackReason.TOO_LARGE),  # noqa: E501
])  # fmt: skip
def test_a_hostile_statement_is_refused(change: object, wanted: PackReason) -> None:
    outcome = open_statement(change(statement()), trusting())  # type: ignore[operator]
    assert isinstance(outcome, PackRefusal) and outcome.reason is wanted, outcome


def test_a_damaged_policy_refuses_every_pack(trusted: Path) -> None:
    assert isinstance(install_pack(split(good()), trusted, read_binaries), Pack)
    path = trusted / "trust" / "policy.json"
    for body in (b"", b"{", b'{"schema":"autokern.trust/9"}', path.read_bytes()[:-20]):
        path.write_bytes(body)
        (found,) = open_packs(read_binaries).found
        assert isinstance(found.outcome, PackRefusal) and found.outcome.reason is PackReason.POLICY_DAMAGED
        with pytest.raises(InvalidInputError, match="policy_damaged"):
            change_policy(trusted, lambda policy: policy)


def test_a_policy_that_others_may_write_is_no_policy(trusted: Path) -> None:
    assert isinstance(install_pack(split(good()), trusted, read_binaries), Pack)
    (trusted / "trust" / "policy.json").chmod(0o666)
    (found,) = open_packs(read_binaries).found
    assert isinstance(found.outcome, PackRefusal) and found.outcome.reason is PackReason.POLICY_DAMAGED
    trusted.chmod(0o777)
    with pytest.raises(StoreError, match="lets others write"):
        change_policy(trusted, lambda policy: policy)
    assert open_packs(read_binaries).found == ()


def test_secret_keys_are_for_their_owner_only_and_never_replaced(tmp_path: Path) -> None:
    made = new_keys(tmp_path / "keys", "me", ("kernels", "index"))
    assert [key.role for key in made] == ["kernels", "index"] and made[0].key_id != made[1].key_id
    path = tmp_path / "keys" / "me.index.key"
    assert path.stat().st_mode & 0o777 == 0o600
    key = load_secret(path, "index")
    assert load_public(path.with_suffix(".pub")) == key.public() == made[1]
    assert key.seed not in repr(key)
    with pytest.raises(InvalidInputError, match="expected one for kernels"):
        load_secret(path, "kernels")
    with pytest.raises(InvalidInputError, match="choose another"):
        new_keys(tmp_path / "keys", "me", ("index",))
    path.chmod(0o640)
    with pytest.raises(InvalidInputError, match="chmod 600"):
        load_secret(path)


def test_a_secret_key_is_private_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        new_keys(tmp_path / "keys", "me", ("index",))
    finally:
        os.umask(before)
    assert (tmp_path / "keys" / "me.index.key").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("body", [b"", b"{}", b"-----BEGIN PRIVATE KEY-----", b'{"schema":"autokern.public-key/1"}'])
def test_a_file_that_is_no_key_is_said_in_one_line(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "x.key"
    path.write_bytes(body)
    path.chmod(0o600)
    for load in (load_secret, load_public):
        with pytest.raises(InvalidInputError, match="not a key file"):
            load(path)
    with pytest.raises(InvalidInputError, match="pack keys new"):
        load_public(tmp_path / "missing.pub")


def test_keys_are_removed_by_the_start_of_their_id() -> None:
    policy = trusting()
    kept = remove_key(policy, policy.keys[0].key_id[:12])
    assert kept.keys == policy.keys[1:]
    for prefix in ("", "zz"):
        with pytest.raises(InvalidInputError, match="pack trust list"):
            remove_key(policy, prefix)


def test_a_signature_holds_for_its_purpose_only() -> None:
    key = secret("index")
    value = key.sign("index", b"body").value
    public = key.public().public
    assert trust_keys.is_signed(public, "index", b"body", value)
    for purpose, body in (("kernels", b"body"), ("statement", b"body"), ("index", b"Body")):
        assert not trust_keys.is_signed(public, purpose, body, value)


def test_verdict_on_an_untouched_pack_is_clean() -> None:
    assert verdict_on_envelope(split(good())) is None
