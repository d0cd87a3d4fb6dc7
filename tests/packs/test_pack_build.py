"""Building packs: chosen, reproducible, canonical, without private words; as one file, a folder, and a wheel."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pack_samples import (
    OPTIONS,
    good,
    needs_cryptography,
    parts,
    records,
    softmax_key,
    split,
    unsigned,
    verdict_on,
    verdict_on_envelope,
)
from tiny_kernels import record_data, record_for

from torch_autokern.errors import InvalidInputError
from torch_autokern.runtime.pack_facts import read_binaries
from torch_autokern.store.key import Target, canonical_json
from torch_autokern.store.pack import Pack, parse_pack
from torch_autokern.store.pack_build import (
    Choice,
    PackOptions,
    build_pack,
    build_wheel,
    choose_records,
    pack_bytes,
    private_words,
)
from torch_autokern.store.pack_file import Envelope, read_pack, write_folder
from torch_autokern.store.pack_manifest import PackIndex
from torch_autokern.store.pack_refusal import PackReason, PackRefusal
from torch_autokern.store.workload import SCHEMA, Workload, WorkloadEntry


def rfc8785(value: Any) -> bytes:
    """RFC 8785 written down again, for the values that manifests have: integers, strings, booleans, null, lists, objects."""
    if value is None or isinstance(value, bool):
        return {None: b"null", True: b"true", False: b"false"}[value]
    if isinstance(value, int):
        assert abs(value) < 2**53
        return str(value).encode()
    if isinstance(value, str):
        short = {8: r"\b", 9: r"\t", 10: r"\n", 12: r"\f", 13: r"\r", 34: r"\"", 92: r"\\"}
        letters = (short.get(ord(c), f"\\u{ord(c):04x}" if ord(c) < 32 else c) for c in value)
        return f'"{"".join(letters)}"'.encode()
    if isinstance(value, list):
        return b"[" + b",".join(map(rfc8785, value)) + b"]"
    ordered = sorted(value.items(), key=lambda item: item[0].encode("utf-16-be"))
    return b"{" + b",".join(rfc8785(name) + b":" + rfc8785(inner) for name, inner in ordered) + b"}"


_NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789._-", min_size=1, max_size=8)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(_VALUES)
def test_our_canonical_json_is_rfc_8785_for_what_a_manifest_may_hold(value: Any) -> None:
    assert canonical_json(value) == rfc8785(value)


def test_every_document_of_a_pack_is_rfc_8785_and_has_no_fraction() -> None:
    envelope = unsigned()
    for raw in (envelope.index, *envelope.kernels.splitlines()):
        assert rfc8785(json.loads(raw, parse_float=pytest.fail)) == raw


def test_two_builds_of_the_same_records_are_byte_identical_whatever_their_order() -> None:
    again = build_pack(records()[::-1], OPTIONS, read_binaries)
    assert isinstance(again, Envelope)
    assert pack_bytes(again) == pack_bytes(unsigned())


def test_two_signed_builds_are_byte_identical() -> None:
    needs_cryptography()
    assert parts().sealed() == good()


def test_records_are_chosen_by_op_target_and_share_of_time() -> None:
    soft, norm = records()[:3], records()[3]
    workload = Workload(SCHEMA, "2.13", "cpu", 2, 100.0, (
        WorkloadEntry(soft[0].record.key, 5, 60.0), WorkloadEntry(soft[1].record.key, 5, 4.0), WorkloadEntry(norm.record.key, 1, 30.0)  # noqa: E501
    ))  # fmt: skip
    everything = {stored.record_id for stored in records()}

    def chosen(choice: Choice) -> set[str]:
        return {stored.record_id for stored in choose_records(records(), choice)}

    assert chosen(Choice()) == everything
    assert chosen(Choice(ops=("*softmax",))) == {stored.record_id for stored in soft}
    assert chosen(Choice(targets=("sm_90a",))) == set()
    assert chosen(Choice(targets=(soft[0].record.target.arch,))) == everything
    assert chosen(Choice(workload=workload)) == {soft[0].record_id, soft[1].record_id, norm.record_id}
    assert chosen(Choice(workload=workload, min_share=0.1)) == {soft[0].record_id, norm.record_id}
    assert chosen(Choice(workload=workload, min_share=0.1, ops=("_softmax",))) == {soft[0].record_id}


def test_nothing_to_pack_and_bad_options_are_said_in_one_line() -> None:
    with pytest.raises(InvalidInputError, match="autokern cache list"):
        build_pack([], OPTIONS, read_binaries)
    for wrong in ({"name": "../x"}, {"version": 0}, {"licence": "a\nb"}, {"notes": "n" * 20_000}):
        with pytest.raises(InvalidInputError, match="do not fit"):
            build_pack(records(), msgspec.structs.replace(OPTIONS, **wrong), read_binaries)  # type: ignore[arg-type]


@pytest.mark.parametrize("words", [b"/home/alice/k.cpp", b"/root/x", b"/Users/bob/src", b"/tmp/abc/k.o", rb"C:\Users\eve\k"])
def test_a_record_that_names_a_private_folder_is_not_packed(words: bytes) -> None:
    refusal = private_words(b"\0code\0" + words + b"\0")
    assert refusal is not None and refusal.reason is PackReason.PRIVATE_WORDS


def test_what_the_compiler_says_of_itself_is_not_private() -> None:
    assert private_words(b"GCC: (Debian) /usr/lib/gcc/x86_64 -march=native /homework/ \0/root\0") is None


def test_several_targets_share_a_pack() -> None:
    here = records()[0].record.target
    elsewhere = Target("cpu", "GenuineIntel-6-207", "x86-64-v4", 8)
    other = record_for(softmax_key(9), target=elsewhere)
    from torch_autokern.store.record import decode_record, encode_record

    both = (records()[0], decode_record(encode_record(other, record_data(softmax_key(9)))))
    pack = parse_pack(build_pack(both, OPTIONS, read_binaries), read_binaries)  # type: ignore[arg-type]
    assert isinstance(pack, Pack)
    assert {row.target for row in pack.rows()} == {here, elsewhere}
    assert [row.target for row in pack.rows(lambda target, _: target == here)] == [here]


def test_a_folder_and_a_file_are_the_same_pack(tmp_path: Path) -> None:
    needs_cryptography()
    pack = parse_pack(split(good()), read_binaries)
    assert isinstance(pack, Pack)
    write_folder(pack.envelope, pack.sizes, tmp_path / "pack")
    again = read_pack(tmp_path / "pack")
    assert isinstance(again, Envelope)
    assert pack_bytes(again) == good() and verdict_on_envelope(again) is None
    (tmp_path / "one.akpack").write_bytes(good())
    assert read_pack(tmp_path / "one.akpack") == split(good())


@pytest.mark.parametrize(("change", "reason"), [
    ("stray", PackReason.UNLISTED_FILE), ("stray record", PackReason.UNLISTED_FILE), ("python", PackReason.UNLISTED_FILE),
    ("no index", PackReason.MISSING_FILE), ("no record", PackReason.MISSING_FILE), ("swapped", PackReason.RECORD_DAMAGED),
    ("link", PackReason.UNREADABLE), ("pipe", PackReason.UNREADABLE), ("big index", PackReason.TOO_LARGE),
    ("short signatures", PackReason.BAD_SIGNATURE_SLOT),
])  # fmt: skip
def test_a_hostile_folder_is_refused(tmp_path: Path, change: str, reason: PackReason) -> None:
    needs_cryptography()
    pack = parse_pack(split(good()), read_binaries)
    assert isinstance(pack, Pack)
    folder = tmp_path / "pack"
    write_folder(pack.envelope, pack.sizes, folder)
    first, second = sorted((folder / "records").iterdir())[:2]
    match change:
        case "stray":
            (folder / "setup.py").write_text("import os")
        case "stray record":
            (folder / "records" / f"{'e' * 64}.akr").write_bytes(first.read_bytes())
        case "python":
            (folder / "records" / "__init__.py").write_text("")
        case "no index":
            (folder / "index.json").unlink()
        case "no record":
            first.unlink()
        case "swapped":
            one, two = first.read_bytes(), second.read_bytes()
            first.write_bytes(two)
            second.write_bytes(one)
        case "link":
            first.rename(tmp_path / "aside")
            first.symlink_to(tmp_path / "aside")
        case "pipe":
            first.unlink()
            os.mkfifo(first)
        case "big index":
            (folder / "index.json").write_bytes(b" " * (1 << 17))
        case "short signatures":
            (folder / "signatures.bin").write_bytes(b"\1" * 50)
    outcome = read_pack(folder)
    refusal = outcome if isinstance(outcome, PackRefusal) else verdict_on_envelope(outcome)
    assert refusal is not None and refusal.reason is reason, refusal


@pytest.mark.parametrize("name", ["missing", "a\0b", "."])
def test_a_name_that_is_no_pack_is_unreadable_or_lacks_its_parts(tmp_path: Path, name: str) -> None:
    outcome = read_pack(tmp_path / name)
    assert isinstance(outcome, PackRefusal)
    assert outcome.reason in (PackReason.UNREADABLE, PackReason.MISSING_FILE)


def test_a_wheel_carries_the_pack_as_data_and_nothing_that_runs() -> None:
    needs_cryptography()
    pack = parse_pack(split(good()), read_binaries)
    assert isinstance(pack, Pack)
    name, raw = build_wheel(pack)
    assert build_wheel(pack) == (name, raw)
    assert name == "autokern_pack_tiny-3-py3-none-any.whl"
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        names = archive.namelist()
        assert archive.read("autokern_packs/tiny.akpack") == good()
        metadata = archive.read("autokern_pack_tiny-3.dist-info/METADATA").decode()
        listed = {line.split(b",")[0].decode() for line in archive.read("autokern_pack_tiny-3.dist-info/RECORD").splitlines()}
    assert "License-Expression: Apache-2.0" in metadata
    assert listed == set(names)
    assert not [n for n in names if n.endswith((".py", ".so", ".pth", "entry_points.txt")) or ".data/" in n]


def test_unknown_optional_extensions_are_kept_and_ignored() -> None:
    needs_cryptography()
    whole = parts()
    whole.index["extensions"] = {"delta": "later"}
    whole.kernels[0]["extensions"] = {"note": "of tomorrow"}
    raw = whole.sealed()
    assert verdict_on(raw) is None
    pack = parse_pack(split(raw), read_binaries)
    assert isinstance(pack, Pack) and isinstance(pack.index, PackIndex)
    assert pack.index.extensions == {"delta": "later"}
    assert next(pack.manifests()).extensions == {"note": "of tomorrow"}


def test_a_pack_option_has_no_room_for_a_time_stamp() -> None:
    assert not {"created", "date", "time"} & set(PackOptions.__struct_fields__)
    assert msgspec.json.decode(unsigned().index)["created"] == "2025-01-01T00:00:00Z"
