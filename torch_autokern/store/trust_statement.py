"""Signed statements: a publisher withdraws keys, packs or kernels, or introduces the successor of a key.

File: ``magic (8) | version u32 | body length u32 | key id (32) | signature (64) | body (canonical JSON)``. Applied offline, by
a person (`autokern pack trust apply`) or from beside an installed pack; withdrawals found there count at once, new keys never
do.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from torch_autokern.errors import InvalidInputError
from torch_autokern.store.key import canonical_json
from torch_autokern.store.pack_manifest import Line, Sha, Text, decode_document
from torch_autokern.store.pack_refusal import PackReason, PackRefusal
from torch_autokern.store.trust import Policy, Revocation, RevokedKind, TrustedKey, add_key, add_revocations
from torch_autokern.store.trust_keys import INSTALL_COMMAND, PublicKey, SecretKey, can_verify, is_signed

MAGIC = b"AKSTATE\n"
VERSION = 1
SUFFIX = ".akstatement"
MAX_STATEMENT_BYTES = 1 << 20
_HEADER = struct.Struct("<8sII32s64s")


class Withdrawn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing withdrawn, and why."""

    kind: RevokedKind
    id: Sha
    reason: Text


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a publisher says. `successors` take the ops and may only have the role of the key that signs."""

    schema: Literal["autokern.statement/1"]
    publisher: Line
    successors: Annotated[tuple[PublicKey, ...], Meta(max_length=16)] = ()
    withdrawn: Annotated[tuple[Withdrawn, ...], Meta(max_length=4096)] = ()


class Signed(msgspec.Struct, frozen=True):
    """A statement whose signature holds, with the trusted key that made it."""

    statement: Statement
    key: TrustedKey


def make_statement(statement: Statement, secret: SecretKey) -> bytes:
    """The file's bytes."""
    body = canonical_json(statement)
    signature = secret.sign("statement", body)
    return _HEADER.pack(MAGIC, VERSION, len(body), bytes.fromhex(signature.key_id), signature.value) + body


def open_statement(raw: bytes, policy: Policy) -> Signed | PackRefusal:
    """Check the signature by a key that the policy trusts, then parse."""
    if len(raw) > MAX_STATEMENT_BYTES:
        return PackRefusal(PackReason.TOO_LARGE, f"{len(raw)} bytes, at most {MAX_STATEMENT_BYTES} are allowed")
    if len(raw) < _HEADER.size or not raw.startswith(MAGIC):
        return PackRefusal(PackReason.NOT_A_PACK, "not a statement")
    _, version, length, key_raw, value = _HEADER.unpack_from(raw)
    body = raw[_HEADER.size :]
    if version != VERSION:
        return PackRefusal(PackReason.FORMAT_VERSION, f"statement format {version}, this version reads {VERSION}")
    if length != len(body):
        return PackRefusal(PackReason.SIZE_MISMATCH, f"the body has {len(body)} bytes, its header says {length}")
    key = policy.key(key_raw.hex())
    if key is None:
        words = f"the key {key_raw.hex()[:16]} is not trusted here"
        return PackRefusal(PackReason.UNTRUSTED_KEY, words, "autokern pack trust add FILE.pub")
    if not can_verify():
        return PackRefusal(PackReason.NO_CRYPTOGRAPHY, "signatures cannot be checked without cryptography", INSTALL_COMMAND)
    if not is_signed(key.public, "statement", body, value):
        return PackRefusal(PackReason.BAD_SIGNATURE, f"the signature by {key.key_id[:16]} does not hold")
    statement = decode_document(body, Statement)
    return statement if isinstance(statement, PackRefusal) else Signed(statement, key)


def apply_statement(policy: Policy, signed: Signed, *, introduce: bool = True) -> Policy:
    """The policy with a statement in force. Withdrawals first, then, with `introduce`, the successors.

    Raises:
        InvalidInputError: a successor of another role, or one that is revoked, or the signing key itself is revoked.
    """
    statement, key = signed.statement, signed.key
    revocations = tuple(
        Revocation(entry.kind, entry.id, key.key_id, entry.reason)
        for entry in statement.withdrawn
        if entry.kind != "key" or _same_line(policy, key, entry.id)
    )
    was_revoked = policy.revoked("key", key.key_id)
    policy = add_revocations(policy, revocations)
    if not introduce or not statement.successors:
        return policy
    if was_revoked is not None:
        raise InvalidInputError(f"key {key.key_id[:16]} is {was_revoked}, so it introduces nobody; get the new key by hand")
    for successor in statement.successors:
        if successor.role != key.role:
            raise InvalidInputError(f"a key for {key.role} cannot introduce one for {successor.role}; sign with a key for it")
        policy = add_key(policy, successor, key.ops, introduced_by=key.key_id)
    return policy


def read_statement(path: Path) -> bytes:
    """A statement's bytes.

    Raises:
        InvalidInputError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(MAX_STATEMENT_BYTES + 1)
    except OSError as error:
        raise InvalidInputError(f"cannot read statement {path}: {error.strerror}; name a file *{SUFFIX}") from error


def _same_line(policy: Policy, key: TrustedKey, other: str) -> bool:
    """Whether a key may withdraw another: itself, whom it introduced, and whom it follows."""
    entry = policy.key(other)
    return other in (key.key_id, key.introduced_by) or (entry is not None and entry.introduced_by == key.key_id)
