"""Whom this user trusts, and the decision about a pack before anything in it is parsed. All of it offline.

Four tiers: *shipped* with this package (its id stands in our code); *signed* by two keys that the user's policy names;
*pinned*, proved again on this machine and listed by id; anything else is *untrusted* and never loaded. Nothing switches this
off.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from torch_autokern.errors import InvalidInputError, StoreError
from torch_autokern.store.files import Unread, make_folders, publish_file, read_file
from torch_autokern.store.folders import folder_refusal
from torch_autokern.store.key import canonical_json
from torch_autokern.store.lock import work_lock
from torch_autokern.store.pack_file import ROLES, Envelope, Role, Signature
from torch_autokern.store.pack_manifest import KernelManifest, Line, Sha, Text
from torch_autokern.store.pack_refusal import PackReason, PackRefusal
from torch_autokern.store.shipped import SHIPPED
from torch_autokern.store.trust_keys import INSTALL_COMMAND, PublicKey, can_verify, is_signed

POLICY_SCHEMA = "autokern.trust/1"
MAX_POLICY_BYTES = 4 << 20
Tier = Literal["shipped", "signed", "pinned", "untrusted"]
RevokedKind = Literal["key", "pack", "kernel"]

# What this version knows to be bad, whoever signed it: (kind, id).
SHIPPED_REVOCATIONS: frozenset[tuple[RevokedKind, str]] = frozenset()


class TrustedKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key that the user trusts, for the ops that match one of `ops` (shell patterns on the op's name). `introduced_by` is the
    key that signed it in, "" where the user did."""

    key_id: Sha
    public: Sha
    role: Role
    name: Line
    ops: Annotated[tuple[Line, ...], Meta(min_length=1, max_length=64)] = ("*",)
    introduced_by: str = ""

    def allows(self, op: str) -> bool:
        """Whether the key may speak for an op."""
        return any(fnmatch.fnmatchcase(op, pattern) for pattern in self.ops)


class Revocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that must not be used. `by` is the key that said so, "" where the user did; a key's word holds for what it
    signed and for keys of its own line only."""

    kind: RevokedKind
    id: Sha
    by: str
    reason: Text


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pack of these bytes may be used: `kernels` of it where nobody trusted signed it (proved on this machine), and as a step
    back to an older version where `rollback` is set."""

    pack_id: Sha
    kernels: tuple[Sha, ...] = ()
    rollback: bool = False


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One user's decisions. `floors` is the highest version seen by ``name/index key``; older ones need a pin."""

    schema: Literal["autokern.trust/1"] = "autokern.trust/1"
    keys: tuple[TrustedKey, ...] = ()
    revocations: tuple[Revocation, ...] = ()
    pins: tuple[Pin, ...] = ()
    floors: dict[str, int] = {}

    def key(self, key_id: str) -> TrustedKey | None:
        """A trusted key by its id."""
        return next((key for key in self.keys if key.key_id == key_id), None)

    def pin(self, pack_id: str) -> Pin | None:
        """What was pinned of a pack."""
        return next((pin for pin in self.pins if pin.pack_id == pack_id), None)

    def revoked(self, kind: RevokedKind, name: str, signers: tuple[str, ...] = ()) -> str | None:
        """Why something is revoked, or None. Another key's word on a pack or kernel counts if that key signed the pack."""
        if (kind, name) in SHIPPED_REVOCATIONS:
            return "this version of torch_autokern knows it to be bad"
        for entry in self.revocations:
            if (entry.kind, entry.id) == (kind, name) and (kind == "key" or not entry.by or entry.by in signers):
                return f"revoked by {entry.by[:16] or 'you'}: {entry.reason}"
        return None


class Admission(msgspec.Struct, frozen=True):
    """How a pack got in: its tier, and the keys whose signatures hold (``""`` where none was needed)."""

    tier: Tier
    index_key: str = ""
    kernels_key: str = ""


def admit(envelope: Envelope, policy: Policy) -> Admission | PackRefusal:
    """Decide about a pack by its signatures and its id alone; nothing of it has been parsed."""
    pack_id = envelope.pack_id
    signers = tuple(signature.key_id for signature in envelope.signatures)
    why = policy.revoked("pack", pack_id, signers)
    if why is not None:
        return PackRefusal(PackReason.PACK_REVOKED, f"pack {pack_id[:16]} is {why}", "autokern pack list")
    if is_shipped(envelope):
        return Admission("shipped")
    pin = policy.pin(pack_id)
    found: dict[Role, str] = {}
    for role in ROLES:
        key_id = _signer(envelope, role, policy)
        if isinstance(key_id, PackRefusal):
            # A pin stands for a proof on this machine, so it needs nobody's word; a revoked key is another matter.
            if pin is not None and pin.kernels and key_id.reason is not PackReason.KEY_REVOKED:
                return Admission("pinned")
            return key_id
        found[role] = key_id
    return Admission("signed", found["index"], found["kernels"])


def is_shipped(envelope: Envelope) -> bool:
    """Whether these bytes are a pack of this package: checked against the id in our code, so it needs no signature."""
    return envelope.pack_id in SHIPPED.values()


def check_ops(kernels: tuple[KernelManifest, ...], admission: Admission, policy: Policy) -> PackRefusal | None:
    """Whether both keys of a signed pack may speak for every op in it."""
    if admission.tier != "signed":
        return None
    keys = [key for key_id in (admission.index_key, admission.kernels_key) if (key := policy.key(key_id)) is not None]
    for op in sorted({kernel.contract.op for kernel in kernels}):
        for key in keys:
            if not key.allows(op):
                return PackRefusal(
                    PackReason.OP_NOT_ALLOWED, f"key {key.key_id[:16]} ({key.name}) is trusted for {', '.join(key.ops)}, "
                    f"the pack has {op}", f"autokern pack trust add FILE.pub --op '{op}'",
                )  # fmt: skip
    return None


def check_version(name: str, version: int, pack_id: str, admission: Admission, policy: Policy) -> PackRefusal | None:
    """Whether a version steps back behind one that was seen before."""
    floor = policy.floors.get(floor_name(name, admission), 0)
    pin = policy.pin(pack_id)
    if version >= floor or (pin is not None and pin.rollback):
        return None
    return PackRefusal(
        PackReason.ROLLBACK, f"{name} {version} is older than {floor}, which this machine had",
        f"autokern pack install FILE --pin {pack_id[:16]}",
    )  # fmt: skip


def floor_name(name: str, admission: Admission) -> str:
    """The name under which versions are counted: a pack's, per publisher."""
    return f"{name}/{admission.index_key[:32]}"


def trust_folder(state: Path) -> Path:
    """Where a state folder keeps the policy."""
    return state / "trust"


def read_policy(state: Path | None) -> Policy | PackRefusal:
    """The user's policy; an empty one where there is none. A damaged one refuses every pack: it may have held a revocation."""
    if state is None:
        return Policy()
    content = read_file(trust_folder(state) / "policy.json", MAX_POLICY_BYTES)
    if isinstance(content, Unread):
        if content.kind == "absent":
            return Policy()
        return _damaged(state, content.reason)
    try:
        policy = msgspec.json.decode(content.data, type=Policy)
    except (msgspec.MsgspecError, RecursionError) as error:
        return _damaged(state, str(error)[:200])
    return policy


def change_policy(state: Path, change: Callable[[Policy], Policy]) -> Policy:
    """Read, change and write the policy under a lock, durably.

    Raises:
        InvalidInputError: the policy that is there is damaged, or `change` refuses.
        StoreError: it cannot be written.
    """
    folder = trust_folder(state)
    refusal = folder_refusal(state) or folder_refusal(folder)
    if refusal is not None:
        raise StoreError(f"{folder} cannot hold whom to trust: {refusal}; make it a folder that only you can write")
    with work_lock(state, "trust", timeout_s=10.0) as held:
        if not held:
            raise StoreError(f"another process holds the lock in {state}, or it cannot be locked; try again")
        policy = read_policy(state)
        if isinstance(policy, PackRefusal):
            raise InvalidInputError(str(policy))
        changed = change(policy)
        try:
            make_folders(state, folder)
            publish_file(folder / "policy.json", canonical_json(changed), state, replace=True)
        except OSError as error:
            raise StoreError(f"cannot write {folder}: {error.strerror or error}; make it writable for you") from error
    return changed


def add_key(policy: Policy, public: PublicKey, ops: tuple[str, ...] = ("*",), introduced_by: str = "") -> Policy:
    """Trust a key; its ops are replaced where it is trusted already.

    Raises:
        InvalidInputError: the key was revoked.
    """
    why = policy.revoked("key", public.key_id)
    if why is not None:
        raise InvalidInputError(f"key {public.key_id[:16]} is {why}; make a new one with: autokern pack keys new")
    entry = TrustedKey(public.key_id, public.public, public.role, public.name, ops, introduced_by)
    others = tuple(key for key in policy.keys if key.key_id != entry.key_id)
    return msgspec.structs.replace(policy, keys=(*others, entry))


def remove_key(policy: Policy, prefix: str) -> Policy:
    """No longer trust the key whose id starts with `prefix`.

    Raises:
        InvalidInputError: no key, or more than one.
    """
    found = [key for key in policy.keys if prefix and key.key_id.startswith(prefix)]
    if len(found) != 1:
        raise InvalidInputError(f"{len(found)} trusted keys start with {prefix!r}, expected one; see: autokern pack trust list")
    return msgspec.structs.replace(policy, keys=tuple(key for key in policy.keys if key is not found[0]))


def add_revocations(policy: Policy, entries: tuple[Revocation, ...]) -> Policy:
    """Take in revocations; what is revoked stays revoked."""
    known = set(policy.revocations)
    return msgspec.structs.replace(policy, revocations=(*policy.revocations, *(e for e in entries if e not in known)))


def add_pin(policy: Policy, pin: Pin) -> Policy:
    """Pin a pack; an earlier pin of it is widened."""
    earlier = policy.pin(pin.pack_id)
    if earlier is not None:
        pin = Pin(pin.pack_id, tuple(sorted({*earlier.kernels, *pin.kernels})), earlier.rollback or pin.rollback)
    return msgspec.structs.replace(policy, pins=(*(p for p in policy.pins if p.pack_id != pin.pack_id), pin))


def raise_floor(policy: Policy, name: str, version: int, admission: Admission) -> Policy:
    """Remember the highest version of a signed pack."""
    if admission.tier != "signed":
        return policy
    at = floor_name(name, admission)
    return msgspec.structs.replace(policy, floors={**policy.floors, at: max(version, policy.floors.get(at, 0))})


def _signer(envelope: Envelope, role: Role, policy: Policy) -> str | PackRefusal:
    """The trusted key whose signature of a role's part holds, or the refusal that is nearest to being resolved."""
    signatures = [signature for signature in envelope.signatures if signature.role == role]
    if not signatures:
        return PackRefusal(PackReason.UNSIGNED, f"no signature for the {role}", "autokern pack verify FILE --replay --pin")
    worst: PackRefusal | None = None
    for signature in signatures:
        outcome = _check(signature, envelope.signed_part(role), role, policy)
        if outcome is None:
            return signature.key_id
        worst = outcome if worst is None or outcome.reason is PackReason.KEY_REVOKED else worst
    assert worst is not None
    return worst


def _check(signature: Signature, body: bytes, role: Role, policy: Policy) -> PackRefusal | None:
    key_id = signature.key_id
    why = policy.revoked("key", key_id)
    if why is not None:
        return PackRefusal(PackReason.KEY_REVOKED, f"the key {key_id[:16]} for the {role} is {why}", "autokern pack trust list")
    key = policy.key(key_id)
    if key is None or key.role != role:
        words = "is not trusted here" if key is None else f"is trusted for the {key.role}, not for the {role}"
        return PackRefusal(
            PackReason.UNTRUSTED_KEY, f"the key {key_id[:16]} for the {role} {words}", "autokern pack trust add FILE.pub"
        )
    if not can_verify():
        return PackRefusal(PackReason.NO_CRYPTOGRAPHY, "signatures cannot be checked without cryptography", INSTALL_COMMAND)
    if not is_signed(key.public, role, body, signature.value):
        return PackRefusal(PackReason.BAD_SIGNATURE, f"the signature of the {role} by {key_id[:16]} does not hold")
    return None


def _damaged(state: Path, reason: str) -> PackRefusal:
    path = os.path.join(trust_folder(state), "policy.json")
    return PackRefusal(PackReason.POLICY_DAMAGED, f"{path} cannot be used: {reason}", f"chmod 600 {path}, or restore it")
