"""`autokern pack keys`, `trust` and `revoke`: whose kernels this user runs, and whose no longer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import platformdirs
import typer

from torch_autokern.cli import shell
from torch_autokern.errors import AutokernError, InvalidInputError
from torch_autokern.store.pack_file import ROLES
from torch_autokern.store.pack_install import require_state
from torch_autokern.store.pack_refusal import PackRefusal
from torch_autokern.store.trust import (
    Policy,
    Revocation,
    RevokedKind,
    add_key,
    add_revocations,
    change_policy,
    read_policy,
    remove_key,
)
from torch_autokern.store.trust_keys import load_public, load_secret, new_keys
from torch_autokern.store.trust_statement import (
    SUFFIX,
    Statement,
    Withdrawn,
    apply_statement,
    make_statement,
    open_statement,
    read_statement,
)

EXIT_REFUSED = 1
_HEX_DIGITS = 64
keys = typer.Typer(no_args_is_help=True, help="Make signing keys, look at them, replace them.")
trust = typer.Typer(no_args_is_help=True, help="Say whose packs may be used here, for which ops.")
_Folder = Annotated[Path | None, typer.Option(help="Where key files lie; the user's configuration by default.")]


@keys.command("new")
def new(
    name: Annotated[str, typer.Argument(help="What to call the pair.")] = "default",
    folder: _Folder = None,
    as_json: shell.AsJson = False,
) -> None:
    """Make two secret keys, one for kernels and one for the index, readable by you only, and their public halves."""
    with one_line_errors():
        if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
            raise InvalidInputError(f"{name!r} is no name for a key; use letters, digits, dashes")
        place = folder or _key_folder()
        made = new_keys(place, name, ROLES)
        if as_json:
            shell.print_json({"folder": str(place), "keys": [_key_row(k.role, k.name, k.key_id) for k in made]})
            return
        for public in made:
            typer.echo(f"{public.key_id[:16]}  {public.role}  {place / f'{name}.{public.role}.key'}")
        shell.say("keep the two secret keys apart; give away the files *.pub only")


@keys.command("list")
def list_keys(folder: _Folder = None, as_json: shell.AsJson = False) -> None:
    """List the public halves in a folder."""
    with one_line_errors():
        place = folder or _key_folder()
        found = [(path, load_public(path)) for path in sorted(place.glob("*.pub"))] if place.is_dir() else []
        if as_json:
            shell.print_json({"keys": [{**_key_row(k.role, k.name, k.key_id), "path": str(path)} for path, k in found]})
            return
        for path, public in found:
            typer.echo(f"{public.key_id[:16]}  {public.role}  {shell.plain(public.name)}  {path}")
        typer.echo(f"{len(found)} keys in {place}")


@keys.command("rotate")
def rotate(
    old: Annotated[Path, typer.Argument(help="The secret key that is trusted now.")],
    new_key: Annotated[Path, typer.Argument(metavar="NEW", help="The public half of its successor.")],
    output: Annotated[Path, typer.Option("--output", "-o", help=f"The statement to write, *{SUFFIX}.")],
    publisher: Annotated[str, typer.Option(help="Who says so.")] = "",
    revoke_old: Annotated[bool, typer.Option("--revoke-old", help="Also withdraw the old key, once this is applied.")] = False,
    as_json: shell.AsJson = False,
) -> None:
    """Write a statement in which the old key introduces its successor; people apply it with: autokern pack trust apply."""
    with one_line_errors():
        secret, successor = load_secret(old), load_public(new_key)
        if secret.role != successor.role:
            raise InvalidInputError(f"{old} is for {secret.role}, {new_key} for {successor.role}; both must have one role")
        withdrawn = (Withdrawn("key", secret.public().key_id, "replaced"),) if revoke_old else ()
        statement = Statement("autokern.statement/1", publisher, (successor,), withdrawn)
        _write(output, make_statement(statement, secret))
        if as_json:
            shell.print_json({"path": str(output), "old": secret.public().key_id, "new": successor.key_id})
        else:
            typer.echo(f"{output}: {secret.public().key_id[:16]} introduces {successor.key_id[:16]}")


@trust.command("add")
def add(
    public: Annotated[Path, typer.Argument(help="A public key file, *.pub.")],
    op: Annotated[list[str] | None, typer.Option(help="Only for these ops; shell patterns.")] = None,
    as_json: shell.AsJson = False,
) -> None:
    """Trust a key. A pack needs one trusted key for its kernels and one for its index."""
    with one_line_errors():
        key = load_public(public)
        change_policy(require_state(), lambda policy: add_key(policy, key, tuple(op or ("*",))))
        if as_json:
            shell.print_json({**_key_row(key.role, key.name, key.key_id), "ops": op or ["*"]})
        else:
            typer.echo(
                f"{key.key_id[:16]} ({shell.plain(key.name)}) is trusted for the {key.role} of {', '.join(op or ['all ops'])}"
            )


@trust.command("list")
def list_trust(as_json: shell.AsJson = False) -> None:
    """Show the policy: trusted keys, revocations, pins, versions seen."""
    with one_line_errors():
        policy = _policy()
        if as_json:
            shell.print_json(msgspec.to_builtins(policy))
            return
        for key in policy.keys:
            origin = f", introduced by {key.introduced_by[:16]}" if key.introduced_by else ""
            typer.echo(f"{key.key_id[:16]}  {key.role}  {shell.plain(key.name)}  ops {', '.join(key.ops)}{origin}")
        for entry in policy.revocations:
            typer.echo(f"revoked {entry.kind} {entry.id[:16]} by {entry.by[:16] or 'you'}: {shell.plain(entry.reason)}")
        for pin in policy.pins:
            words = ", older version allowed" if pin.rollback else ""
            typer.echo(f"pinned {pin.pack_id[:16]}: {len(pin.kernels)} kernels proved here{words}")
        for name, version in sorted(policy.floors.items()):
            typer.echo(f"seen {shell.plain(name)}: version {version}")
        typer.echo(f"{len(policy.keys)} trusted keys, {len(policy.revocations)} revocations")


@trust.command("remove")
def remove(
    key_id: Annotated[str, typer.Argument(help="The key's id, or its first digits.")], as_json: shell.AsJson = False
) -> None:
    """No longer trust a key; packs that need it are not used any more."""
    with one_line_errors():
        changed = change_policy(require_state(), lambda policy: remove_key(policy, key_id.lower()))
        if as_json:
            shell.print_json({"keys": len(changed.keys)})
        else:
            typer.echo(f"{key_id} is not trusted any more; {len(changed.keys)} keys are")


@trust.command("apply")
def apply(
    path: Annotated[Path, typer.Argument(metavar="STATEMENT", help=f"A signed statement, *{SUFFIX}.")],
    as_json: shell.AsJson = False,
) -> None:
    """Put a publisher's signed statement in force: withdrawals, and successors of keys that are trusted."""
    with one_line_errors():
        raw = read_statement(path)
        signed = open_statement(raw, _policy())
        if isinstance(signed, PackRefusal):
            if as_json:
                shell.print_json({"refusal": msgspec.to_builtins(signed)})
            else:
                typer.echo(f"refused: {shell.plain(str(signed))}")
            raise typer.Exit(EXIT_REFUSED)
        change_policy(require_state(), lambda policy: apply_statement(policy, signed))
        statement = signed.statement
        if as_json:
            shell.print_json({"by": signed.key.key_id, "statement": msgspec.to_builtins(statement)})
            return
        typer.echo(
            f"{shell.plain(statement.publisher) or signed.key.key_id[:16]}: {len(statement.withdrawn)} withdrawn, "
            f"{len(statement.successors)} keys introduced"
        )


def revoke(
    kind: Annotated[str, typer.Argument(help="What to revoke: key, pack or kernel.")],
    name: Annotated[str, typer.Argument(metavar="ID", help="Its id, 64 hex digits; for a pack also its installed name.")],
    reason: Annotated[str, typer.Option(help="Why; people will read it.")],
    key: Annotated[
        Path | None, typer.Option("--key", help="Sign with this secret key and write a statement for others.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help=f"The statement to write, *{SUFFIX}.")] = None,
    as_json: shell.AsJson = False,
) -> None:
    """Revoke a key, a pack or a kernel: for yourself, or, with --key, as a signed statement for everybody who trusts the key.

    Running programs obey at their next autokern.refresh(); new ones at once.
    """
    with one_line_errors():
        if kind not in ("key", "pack", "kernel"):
            raise InvalidInputError(f"{kind!r} cannot be revoked; expected key, pack or kernel")
        what: RevokedKind = kind  # type: ignore[assignment]
        ident = _full_id(what, name)
        if (key is None) != (output is None):
            raise InvalidInputError("--key and --output belong together: a signed statement is written to a file")
        if key is not None and output is not None:
            statement = Statement("autokern.statement/1", "", (), (Withdrawn(what, ident, reason),))
            _write(output, make_statement(statement, load_secret(key)))
        else:
            change_policy(require_state(), lambda policy: add_revocations(policy, (Revocation(what, ident, "", reason),)))
        if as_json:
            shell.print_json({"kind": kind, "id": ident, "statement": None if output is None else str(output)})
        else:
            typer.echo(f"{kind} {ident[:16]} is revoked" + ("" if output is None else f" by {output}"))


def _full_id(kind: RevokedKind, name: str) -> str:
    """64 hex digits: as given, the start of a trusted key's id, or of an installed pack's or kernel's."""
    given = name.lower()
    if len(given) == _HEX_DIGITS and not set(given) - set("0123456789abcdef"):
        return given
    if kind == "key":
        known = [key.key_id for key in _policy().keys]
    else:
        from torch_autokern.runtime.pack_facts import read_binaries
        from torch_autokern.store.pack_install import open_packs

        packs = open_packs(read_binaries).packs
        if kind == "pack":
            known = [pack.pack_id for pack in packs]
            given = next((pack.pack_id for pack in packs if pack.index.name == name), given)
        else:
            known = [record_id for pack in packs for record_id in pack.record_ids]
    found = [ident for ident in dict.fromkeys(known) if len(given) >= 8 and ident.startswith(given)]
    if len(found) != 1:
        raise InvalidInputError(f"{len(found)} {kind}s here start with {name!r}, expected one; give all 64 digits")
    return found[0]


def _policy() -> Policy:
    policy = read_policy(require_state())
    if isinstance(policy, PackRefusal):
        raise InvalidInputError(str(policy))
    return policy


def _key_folder() -> Path:
    try:
        return Path(platformdirs.user_config_dir("autokern", appauthor=False)) / "keys"
    except (OSError, RuntimeError, KeyError) as error:
        raise InvalidInputError("this user has no home for keys; name a folder with --folder") from error


def _key_row(role: str, name: str, key_id: str) -> dict[str, str]:
    return {"role": role, "name": name, "key_id": key_id}


def _write(path: Path, body: bytes) -> None:
    path = shell.writable_file(path)
    try:
        path.write_bytes(body)
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror}; name a file in a writable folder") from error


@contextmanager
def one_line_errors() -> Iterator[None]:
    """A mistake is one line on stderr and exit code 2, also where this sub-command runs without the main command."""
    try:
        yield
    except AutokernError as error:
        shell.say(f"autokern: {shell.one_line(error)}")
        raise typer.Exit(shell.EXIT_MISTAKE) from error
