"""No bytes make a reader of packs raise, or accept what was changed."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pack_samples import good, library, needs_cryptography, parts, split, trusting, unsigned, verdict_on, with_binary

from torch_autokern.runtime.pack_facts import read_binaries
from torch_autokern.store.pack import Pack, parse_pack
from torch_autokern.store.pack_build import check_whole
from torch_autokern.store.pack_file import Envelope, split_pack
from torch_autokern.store.pack_manifest import BinaryFacts, KernelManifest, PackIndex, decode_document, decode_index
from torch_autokern.store.pack_refusal import PackRefusal
from torch_autokern.store.trust import Policy, read_policy
from torch_autokern.store.trust_statement import open_statement

CALM = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
HARD = settings(max_examples=4000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5), max_leaves=20,
)  # fmt: skip


def check_bytes(raw: bytes) -> None:
    envelope = split_pack(raw)
    if isinstance(envelope, Envelope):
        pack = parse_pack(envelope, read_binaries)
        if isinstance(pack, Pack):
            check_whole(pack)


@CALM
@given(st.binary(max_size=400))
def test_any_bytes_are_answered(raw: bytes) -> None:
    check_bytes(raw)
    check_bytes(b"AKPACK\r\n" + raw)
    for kind in (PackIndex, KernelManifest):
        decode_document(raw, kind)
    assert isinstance(open_statement(raw, Policy()), PackRefusal)
    assert isinstance(open_statement(b"AKSTATE\n" + raw, Policy()), PackRefusal)


@CALM
@given(_JSON)
def test_any_json_is_answered(value: object) -> None:
    raw = msgspec.json.encode(value)
    assert isinstance(decode_index(raw), PackRefusal)
    assert isinstance(decode_document(raw, KernelManifest), PackRefusal)


def mutated(seed: int, raw: bytes) -> bytes:
    """One to four small changes: a flip, a run overwritten, cut out, doubled, or a length made extreme."""
    chance = random.Random(seed)
    body = bytearray(raw)
    for _ in range(chance.randint(1, 4)):
        at, length = chance.randrange(len(body)), chance.randint(1, 40)
        kind = chance.randrange(5)
        if kind == 0:
            body[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            body[at : at + length] = chance.randbytes(length)
        elif kind == 2 and len(body) > 100:
            del body[at : at + length]
        elif kind == 3:
            body[at:at] = body[at : at + length]
        else:
            body[at : at + 4] = chance.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\0\x80", b"\xff\xff\xff\x7f"))
    return bytes(body)


@CALM
@given(st.integers(0, 2**32))
def test_a_changed_pack_is_never_accepted(seed: int) -> None:
    needs_cryptography()
    raw = mutated(seed, good())
    assert raw == good() or verdict_on(raw) is not None


@CALM
@given(st.integers(0, 2**32), st.sampled_from(["index", "kernels"]))
def test_changed_documents_with_right_signatures_never_raise(seed: int, part: str) -> None:
    needs_cryptography()
    whole, envelope = parts(), split(good())
    if part == "index":
        verdict_on(whole.sealed(index_raw=mutated(seed, envelope.index)))
    else:
        verdict_on(whole.sealed(kernels_raw=mutated(seed, envelope.kernels)))


@CALM
@given(st.integers(0, 2**32))
def test_a_changed_library_never_raises(seed: int) -> None:
    outcome = read_binaries(with_binary(mutated(seed, library())))
    assert isinstance(outcome, (tuple, PackRefusal))
    assert isinstance(outcome, PackRefusal) or all(isinstance(facts, BinaryFacts) for facts in outcome)


@pytest.mark.long
@HARD
@given(st.integers(0, 2**32))
def test_many_changed_packs_are_never_accepted(seed: int) -> None:
    needs_cryptography()
    raw = mutated(seed, good())
    assert raw == good() or verdict_on(raw) is not None
    check_bytes(raw)


@pytest.mark.long
@HARD
@given(st.integers(0, 2**32), st.sampled_from(["index", "kernels"]))
def test_many_changed_documents_never_raise(seed: int, part: str) -> None:
    envelope = unsigned()
    raw = mutated(seed, getattr(envelope, part))
    index = raw if part == "index" else envelope.index
    kernels = raw if part == "kernels" else envelope.kernels
    outcome = parse_pack(Envelope((), index, kernels, envelope.records), read_binaries)
    assert isinstance(outcome, PackRefusal) or (index, kernels) == (envelope.index, envelope.kernels) or part == "index"


def test_a_policy_is_read_or_refused(trusted, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = trusted / "trust" / "policy.json"
    whole = path.read_bytes()
    for seed in range(200):
        path.write_bytes(mutated(seed, whole))
        assert isinstance(read_policy(trusted), (Policy, PackRefusal))
    path.write_bytes(whole)
    assert read_policy(trusted) == trusting()
