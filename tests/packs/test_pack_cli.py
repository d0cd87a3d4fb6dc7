"""`autokern pack`: from a store to a signed pack, to another machine, and back out; one JSON value on request."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pack_samples import needs_cryptography, records
from tiny_kernels import record_data, record_for
from typer.testing import CliRunner, Result

from torch_autokern.cli.main import app
from torch_autokern.store.notes import Approval
from torch_autokern.store.policy import Policy, write_policy
from torch_autokern.store.store import KernelStore, Layer


@pytest.fixture(autouse=True)
def _signatures() -> None:
    needs_cryptography()


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["pack", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def run_json(*arguments: object, code: int = 0) -> dict:  # type: ignore[type-arg]
    return json.loads(run(*arguments, "--json", code=code).stdout)  # type: ignore[no-any-return]


@pytest.fixture
def made(state: Path, tmp_path: Path) -> Path:
    """A store with records, a publisher's keys, and a signed pack in a folder of files."""
    store = KernelStore([Layer("cache", state, writable=True)])
    for stored in records():
        store.publish(record_for(stored.record.key), record_data(stored.record.key))
    run("keys", "new", "me", "--folder", tmp_path / "keys")
    keys = [part for role in ("kernels", "index") for part in ("--key", tmp_path / "keys" / f"me.{role}.key")]
    run("build", "--name", "tiny", "--version", 1, "--licence", "Apache-2.0", "-o", tmp_path / "tiny.akpack", *keys)
    store.clear()
    return tmp_path


def trust(made: Path) -> None:
    for role in ("kernels", "index"):
        run("trust", "add", made / "keys" / f"me.{role}.pub")


def test_from_a_store_to_another_machine_and_out_again(made: Path) -> None:
    pack = made / "tiny.akpack"
    refused = run_json("install", pack, code=1)["refusal"]
    assert (refused["reason"], refused["command"]) == ("untrusted_key", "autokern pack trust add FILE.pub")
    trust(made)
    installed = run_json("install", pack)
    assert (installed["tier"], len(installed["arming"]["armed"])) == ("signed", len(records()))
    (row,) = run_json("list")["packs"]
    assert (row["name"], row["state"], row["kernels"]) == ("tiny", "serves", len(records()))
    assert "4 of 4 kernels pass" in run("verify", "tiny").stdout
    run("lock", made / "x.lock")
    assert "fits" in run("lock", made / "x.lock", "--check").stdout
    run("revoke", "kernel", records()[0].record_id[:12], "--reason", "odd sizes")
    assert "1 locked kernels do not serve" in run("lock", made / "x.lock", "--check", code=1).stdout
    run("revoke", "pack", "tiny", "--reason", "bad day")
    assert run_json("list")["packs"][0]["reason"] == "pack_revoked"
    assert "tiny 1 is locked and does not serve here" in run("lock", made / "x.lock", "--check", code=1).stdout
    run("remove", "tiny")
    assert run_json("list")["packs"] == []


def test_inspect_shows_what_where_and_how_much(made: Path) -> None:
    words = " ".join(run("inspect", made / "tiny.akpack").stdout.split())
    for expected in ("tiny 1 Apache-2.0", "4 kernels", "signed for the index", "1.50x", "stock", "untrusted_key"):
        assert expected in words
    document = run_json("inspect", made / "tiny.akpack")
    assert len(document["kernels"]) == 4 and document["index"]["version"] == 1


def test_a_pack_is_signed_later_and_keeps_its_id(made: Path, state: Path) -> None:
    pack = made / "tiny.akpack"
    before = run_json("inspect", pack)["pack_id"]
    run("keys", "new", "other", "--folder", made / "keys")
    run("sign", pack, "--key", made / "keys" / "other.index.key")
    after = run_json("inspect", pack)
    assert after["pack_id"] == before and len(after["signatures"]) == 3


def test_keys_rotate_by_a_statement(made: Path) -> None:
    trust(made)
    run("keys", "new", "next", "--folder", made / "keys")
    statement = made / "r.akstatement"
    run("keys", "rotate", made / "keys/me.index.key", made / "keys/next.index.pub", "-o", statement, "--revoke-old")
    run("trust", "apply", statement)
    policy = run_json("trust", "list")
    assert len(policy["keys"]) == 3 and [r["kind"] for r in policy["revocations"]] == ["key"]
    assert run_json("install", made / "tiny.akpack", code=1)["refusal"]["reason"] == "key_revoked"
    assert "introduced by" in run("trust", "list").stdout
    assert "cannot introduce" not in run("keys", "list", "--folder", made / "keys").stdout
    run("keys", "rotate", made / "keys/me.index.key", made / "keys/next.kernels.pub", "-o", statement, code=2)


def test_a_signed_revocation_travels_as_a_file(made: Path) -> None:
    trust(made)
    run("install", made / "tiny.akpack")
    ident = run_json("inspect", made / "tiny.akpack")["pack_id"]
    statement = made / "r.akstatement"
    run("revoke", "pack", ident, "--reason", "wrong", "--key", made / "keys/me.index.key", "-o", statement)
    assert run_json("list")["packs"][0]["state"] == "serves"
    run("trust", "apply", statement)
    assert run_json("list")["packs"][0]["reason"] == "pack_revoked"
    statement.write_bytes(statement.read_bytes()[:-1])
    assert run_json("trust", "apply", statement, code=1)["refusal"]["reason"] == "size_mismatch"


def test_diff_names_what_changed(made: Path, state: Path) -> None:
    store = KernelStore([Layer("cache", state, writable=True)])
    for stored in records()[:2]:
        store.publish(stored.record, stored.data)
    run("build", "--name", "tiny", "--version", 2, "--licence", "MIT", "-o", made / "two.akpack")
    document = run_json("diff", made / "tiny.akpack", made / "two.akpack", code=1)
    assert document["index"]["version"] == [1, 2] and document["index"]["licence"] == ["Apache-2.0", "MIT"]
    assert (len(document["removed"]), len(document["added"])) == (2, 0)
    run("diff", made / "two.akpack", made / "two.akpack")


def test_what_failed_or_was_turned_down_is_not_shipped(state: Path, tmp_path: Path) -> None:
    store = KernelStore([Layer("cache", state, writable=True)])
    ids = []
    for stored in records():
        digest = stored.record.key.digest
        ids.append((digest, store.publish(record_for(stored.record.key), record_data(stored.record.key)).record_id))
    store.quarantine(*ids[0], "crashed")
    store.add_note(ids[1][0], Approval(ids[1][1], False, "ada", "drifts", "2026-01-01T00:00:00Z"))
    options = "build", "--name", "tiny", "--version", 1, "--licence", "Apache-2.0", "-o"
    assert run_json(*options, tmp_path / "tiny.akpack")["kernels"] == len(ids) - 2
    write_policy(state, Policy(approval=True))
    store.add_note(ids[2][0], Approval(ids[2][1], True, "ada", "read it", "2026-01-01T00:00:00Z"))
    assert run_json(*options, tmp_path / "approved.akpack")["kernels"] == 1


def test_folder_and_wheel(made: Path, state: Path) -> None:
    store = KernelStore([Layer("cache", state, writable=True)])
    store.publish(records()[0].record, records()[0].data)
    options = ("--name", "one", "--version", 1, "--licence", "MIT")
    run("build", *options, "--folder", "-o", made / "folder")
    assert run_json("verify", made / "folder", code=1)["refusals"] == []
    assert run_json("build", *options, "--wheel", "-o", made)["path"].endswith("autokern_pack_one-1-py3-none-any.whl")
    run("build", *options, "--folder", "-o", made / "folder", code=2)
    run("build", *options, "--folder", "--wheel", code=2)


@pytest.mark.parametrize("command", ["install", "inspect", "verify", "sign"])
def test_a_missing_file_is_refused_in_one_line(state: Path, command: str) -> None:
    more = ("--key", "x") if command == "sign" else ()
    assert run(command, "missing.akpack", *more, code=1).stdout.startswith("refused: unreadable: missing.akpack: No such file")


@pytest.mark.parametrize("arguments", [
    ("remove", "absent"), ("verify", "absent"), ("verify", "absent", "--pin"), ("lock", "absent.lock", "--check"),
    ("trust", "add", "absent.pub"), ("trust", "remove", "ff"), ("trust", "apply", "absent"), ("keys", "new", "a/b"),
    ("revoke", "moon", "ff", "--reason", "x"), ("revoke", "pack", "ff", "--reason", "x"),
    ("build", "--name", "x", "--version", "1", "--licence", "MIT"),
    ("build", "--name", "x", "--version", "1", "--licence", "MIT", "--min-share", "0.5"),
])  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(state: Path, arguments: tuple[str, ...]) -> None:
    result = run(*arguments, code=2)
    assert result.stderr.startswith("autokern: ") and result.stderr.count("\n") == 1
