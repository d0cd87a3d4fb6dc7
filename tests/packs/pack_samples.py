"""One real pack, made from real records of a compiled library, and the means to change it and sign it again."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tiny_kernels import artifact, plan_for, record_data, record_for

from torch_autokern.ops import SPECS
from torch_autokern.runtime.pack_facts import read_binaries
from torch_autokern.runtime.plan import encode_plan
from torch_autokern.store.key import KernelKey, canonical_json
from torch_autokern.store.pack import open_pack
from torch_autokern.store.pack_build import PackOptions, build_pack, check_whole, pack_bytes, sign_pack
from torch_autokern.store.pack_file import Envelope, Signature, split_pack
from torch_autokern.store.pack_manifest import derive_manifest
from torch_autokern.store.pack_refusal import PackRefusal
from torch_autokern.store.record import KernelRecord, StoredRecord, decode_record, encode_record
from torch_autokern.store.trust import Policy, add_key
from torch_autokern.store.trust_keys import SECRET_SCHEMA, PublicKey, SecretKey

OPTIONS = PackOptions("tiny", 3, "Apache-2.0", "the tests", "Rows of eight numbers.")


def needs_cryptography() -> None:
    """Skip where the extra `sign` is not installed."""
    pytest.importorskip("cryptography", reason="signatures need the extra: pip install 'torch-autokern[sign]'")


def secret(role: str, name: str = "tests") -> SecretKey:
    """A key that is the same in every run."""
    seed = hashlib.sha256(f"{name} {role}".encode()).hexdigest()
    return SecretKey(SECRET_SCHEMA, role, name, seed)  # type: ignore[arg-type]


def secrets(name: str = "tests") -> tuple[SecretKey, SecretKey]:
    """A publisher's two keys."""
    return secret("kernels", name), secret("index", name)


def publics(name: str = "tests") -> tuple[PublicKey, ...]:
    """Their public halves."""
    return tuple(key.public() for key in secrets(name))


def trusting(*names: str, ops: tuple[str, ...] = ("*",)) -> Policy:
    """A policy that trusts publishers."""
    policy = Policy()
    for name in names or ("tests",):
        for public in publics(name):
            policy = add_key(policy, public, ops)
    return policy


def softmax_key(rows: int) -> KernelKey:
    """Softmax over the last dimension of (rows, 8) float32."""
    return SPECS["_softmax"].key((torch.zeros(rows, 8),), {"dim": 1, "half_to_float": False})


def norm_key(rows: int) -> KernelKey:
    """LayerNorm of (rows, 8) float32 with weight and bias."""
    scalars: dict[str, Any] = {"normalized_shape": (8,), "eps": 1e-5}
    return SPECS["native_layer_norm"].key((torch.zeros(rows, 8), torch.ones(8), torch.zeros(8)), scalars)


def stored(record: KernelRecord, data: dict[str, bytes]) -> StoredRecord:
    """As read back from a store."""
    return decode_record(encode_record(record, data))


@functools.cache
def records() -> tuple[StoredRecord, ...]:
    """Three softmax keys and a LayerNorm, each with a right kernel."""
    keys = (softmax_key(3), softmax_key(4), softmax_key(5), norm_key(4))
    return tuple(stored(record_for(key), record_data(key)) for key in keys)


@functools.cache
def unsigned() -> Envelope:
    """The pack of `records`."""
    envelope = build_pack(records(), OPTIONS, read_binaries)
    assert isinstance(envelope, Envelope), envelope
    return envelope


@functools.cache
def good() -> bytes:
    """The file of the signed pack."""
    return pack_bytes(sign_pack(unsigned(), secrets()))


def split(raw: bytes) -> Envelope:
    """A file that can be cut into its parts."""
    envelope = split_pack(raw)
    assert isinstance(envelope, Envelope), envelope
    return envelope


def pack_of(*given: StoredRecord, **options: Any) -> bytes:
    """A signed pack of other records."""
    envelope = build_pack(given, msgspec.structs.replace(OPTIONS, **options), read_binaries)
    assert isinstance(envelope, Envelope), envelope
    return pack_bytes(sign_pack(envelope, secrets()))


@dataclass(frozen=True)
class Parts:
    """A pack taken apart into plain values, for a publisher who signs whatever he is given."""

    index: dict[str, Any]
    kernels: list[dict[str, Any]]
    records: list[bytes]

    def sealed(self, *, index_raw: bytes | None = None, kernels_raw: bytes | None = None, fix: bool = True) -> bytes:
        """The file: hashes, counts and sizes made right with `fix`, and signed."""
        lines = b"".join(canonical_json(kernel) + b"\n" for kernel in self.kernels) if kernels_raw is None else kernels_raw
        body = b"".join(self.records)
        index = dict(self.index)
        if fix:
            index["kernels_sha256"] = hashlib.sha256(lines).hexdigest()
            index["kernel_count"] = max(1, lines.count(b"\n"))
            index["records_bytes"] = len(body)
        raw = canonical_json(index) if index_raw is None else index_raw
        return pack_bytes(sign_pack(Envelope((), raw, lines, memoryview(body)), secrets()))


def parts(raw: bytes | None = None) -> Parts:
    """Take a pack apart."""
    envelope = split(raw or good())
    kernels = [msgspec.json.decode(line) for line in envelope.kernels.splitlines()]
    bodies, at = [], 0
    for kernel in kernels:
        bodies.append(bytes(envelope.records[at : at + kernel["record_bytes"]]))
        at += kernel["record_bytes"]
    return Parts(msgspec.json.decode(envelope.index), kernels, bodies)


def claiming(given: StoredRecord) -> Parts:
    """A pack of one record that no builder would ship: its line says what the record says, its ELF is taken at its word."""
    body = encode_record(given.record, given.data)
    facts = read_binaries(records()[0])
    assert not isinstance(facts, PackRefusal)
    sources = {name: source for name, source in given.data.items() if name.startswith("source.")}
    line = derive_manifest(msgspec.structs.replace(given, data=sources), len(body), facts)
    assert not isinstance(line, PackRefusal)
    whole = parts()
    return Parts(whole.index, [msgspec.to_builtins(line)], [body])


def verdict_on(raw: bytes, policy: Policy | None = None) -> PackRefusal | None:
    """What installing a file's bytes comes to; None: nothing against it."""
    envelope = split_pack(raw)
    if isinstance(envelope, PackRefusal):
        return envelope
    return verdict_on_envelope(envelope, policy)


def verdict_on_envelope(envelope: Envelope, policy: Policy | None = None) -> PackRefusal | None:
    """As `verdict_on`, of a pack in parts."""
    pack = open_pack(envelope, policy or trusting(), read_binaries)
    if isinstance(pack, PackRefusal):
        return pack
    return next(iter(check_whole(pack)), None)


def resigned(raw: bytes, signatures: tuple[Signature, ...]) -> bytes:
    """A file with other signatures."""
    envelope = split(raw)
    return pack_bytes(Envelope(signatures, envelope.index, envelope.kernels, envelope.records))


def with_binary(binary: bytes, **replaced: Any) -> StoredRecord:
    """A softmax record whose library is `binary`."""
    key = softmax_key(3)
    data = {"kernel.so": binary, "plan.json": encode_plan(plan_for(key))}
    return stored(record_for(key, **replaced), data)


def library() -> bytes:
    """The real library."""
    return artifact().binary


def new_state() -> Path:
    """A private state folder."""
    return Path(tempfile.mkdtemp(prefix="autokern-packs-"))
