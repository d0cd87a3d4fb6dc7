"""`autokern pack`: build packs of kernels, look into them, check, install and remove them, pin them for a deployment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec
import typer

from torch_autokern.cli import pack_trust, shell
from torch_autokern.cli.pack_tables import kernel_line, kernel_table, list_row, say_verified
from torch_autokern.cli.pack_trust import one_line_errors
from torch_autokern.errors import InvalidInputError
from torch_autokern.store.folders import require_folder
from torch_autokern.store.pack import Pack, check_pack, parse_pack
from torch_autokern.store.pack_build import (
    Choice,
    PackOptions,
    build_pack,
    build_wheel,
    check_whole,
    choose_records,
    file_name,
    pack_bytes,
    sign_pack,
)
from torch_autokern.store.pack_file import SUFFIX, Envelope, read_pack, write_folder
from torch_autokern.store.pack_install import PackSet, install_pack, open_packs, remove_pack, require_state
from torch_autokern.store.pack_lock import encode_lock, lock_differences, lock_of, read_lock
from torch_autokern.store.pack_manifest import BinaryReader
from torch_autokern.store.pack_refusal import PackRefusal
from torch_autokern.store.store import KernelStore, open_store
from torch_autokern.store.trust import Pin, add_pin, admit, change_policy, read_policy
from torch_autokern.store.trust_keys import load_secret
from torch_autokern.store.workload import load_workload

if TYPE_CHECKING:
    from torch_autokern.judge.receipt import Proof

EXIT_REFUSED = 1
app = typer.Typer(
    no_args_is_help=True, help="Build, check, sign, install and pin packs of verified kernels. All of it offline."
)
app.add_typer(pack_trust.keys, name="keys")
app.add_typer(pack_trust.trust, name="trust")
app.command("revoke")(pack_trust.revoke)

_Source = Annotated[str, typer.Argument(help=f"A {SUFFIX} file, a pack's folder, or the name of an installed pack.")]
_Keys = Annotated[list[Path] | None, typer.Option("--key", help="Sign with this secret key; once for kernels, once for index.")]
_WeakBox = Annotated[bool, typer.Option("--allow-weak-box", help="Run kernels although this system cannot box them well.")]


@app.command("build")
def build(
    name: Annotated[str, typer.Option(help="Lower-case letters, digits, dots and dashes.")],
    version: Annotated[int, typer.Option(min=1, help="A whole number that only rises.")],
    licence: Annotated[str, typer.Option(help="An SPDX expression, such as Apache-2.0.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File or, with --folder, folder to make.")] = None,
    op: Annotated[list[str] | None, typer.Option(help="Only these ops; shell patterns.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="Only these devices or architectures; shell patterns.")] = None,
    workload: Annotated[Path | None, typer.Option(help="Only keys of this recorded workload.")] = None,
    min_share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Least part of the workload's time.")] = 0.0,
    publisher: Annotated[str, typer.Option(help="Who stands behind it.")] = "",
    notes: Annotated[str, typer.Option(help="What a person should know.")] = "",
    key: _Keys = None,
    folder: Annotated[bool, typer.Option("--folder", help="Write a folder instead of one file.")] = False,
    wheel: Annotated[bool, typer.Option("--wheel", help="Write a wheel that carries the pack; -o names its folder.")] = False,
    as_json: shell.AsJson = False,
) -> None:
    """Put stored kernels into a pack. The same records and options give the same bytes."""
    with one_line_errors():
        if min_share > 0.0 and workload is None:
            raise InvalidInputError("--min-share needs --workload FILE, which says how much time a key takes")
        choice = Choice(tuple(op or ()), tuple(target or ()), load_workload(workload) if workload else None, min_share)
        options = PackOptions(name, version, licence, publisher, notes)
        store = open_store(choice=require_folder(to_write=False))
        known = list(store.records())
        fit = [stored for stored in known if store.notes(stored.record.key.digest, stored.record_id).may_be_shipped]
        if len(fit) < len(known):
            shell.say(f"left out: {len(known) - len(fit)} records that failed, were turned down or are not approved")
        envelope = build_pack(choose_records(fit, choice), options, _reader())
        if isinstance(envelope, PackRefusal):
            _refuse(envelope, as_json)
        envelope = sign_pack(envelope, [load_secret(path) for path in key or ()])
        pack = _parsed(envelope, as_json)
        if wheel and folder:
            raise InvalidInputError("--wheel and --folder exclude each other")
        path = _write(pack, output, folder=folder, wheel=wheel)
        document = {
            "path": str(path), "pack_id": pack.pack_id, "kernels": len(pack), "bytes": _size_bytes(path),
            "signatures": [{"role": s.role, "key_id": s.key_id} for s in envelope.signatures],
        }  # fmt: skip
        if as_json:
            shell.print_json(document)
            return
        typer.echo(f"{path}: {len(pack)} kernels, {_size_bytes(path) / 1e6:.2f} MB, id {pack.pack_id[:16]}")
        missing = {"kernels", "index"} - {signature.role for signature in envelope.signatures}
        if missing:
            shell.say(f"not signed for the {' and the '.join(sorted(missing))}; run: autokern pack sign {path} --key FILE.key")


@app.command("inspect")
def inspect(source: _Source, as_json: shell.AsJson = False) -> None:
    """Show what a pack speeds up, on which device, by how much, proved how, and whether it would be used here."""
    with one_line_errors():
        envelope, state = _envelope(source, as_json), require_state()
        pack = _parsed(envelope, as_json)
        policy = read_policy(state)
        admission = policy if isinstance(policy, PackRefusal) else admit(envelope, policy)
        if as_json:
            shell.print_json({
                "index": msgspec.to_builtins(pack.index), "pack_id": pack.pack_id,
                "signatures": [{"role": s.role, "key_id": s.key_id} for s in envelope.signatures],
                "trust": msgspec.to_builtins(admission), "kernels": [msgspec.to_builtins(k) for k in pack.manifests()],
            })  # fmt: skip
            return
        index = pack.index
        typer.echo(f"{index.name} {index.version}  {shell.plain(index.licence)}  {shell.plain(index.publisher)}")
        typer.echo(f"id {pack.pack_id}, {len(pack)} kernels, {len(envelope.records) / 1e6:.2f} MB of records")
        if index.notes:
            typer.echo(shell.plain(index.notes))
        for signature in envelope.signatures:
            typer.echo(f"signed for the {signature.role} by {signature.key_id[:16]}")
        shell.results().print(kernel_table(pack))
        refused = isinstance(admission, PackRefusal)
        typer.echo(f"here: {admission}" if refused else f"here: used as {admission.tier}")  # type: ignore[union-attr]


@app.command("verify")
def verify(
    source: _Source,
    replay: Annotated[
        bool, typer.Option("--replay", help="Prove every kernel for this machine again, and keep receipts.")
    ] = False,
    pin: Annotated[
        bool, typer.Option("--pin", help="With --replay: let what is proved here be used without a signature.")
    ] = False,
    budget: Annotated[float | None, typer.Option(min=0.0, help="Minutes for --replay; None: all.")] = None,
    processes: Annotated[int, typer.Option(min=1, max=20, help="Fresh processes that time a kernel.")] = 3,
    allow_weak_box: _WeakBox = False,
    as_json: shell.AsJson = False,
) -> None:
    """Check a pack: integrity, signatures, every claim against record and ELF. Exit code 1: something does not hold.

    With --replay the judge proves each kernel again on this machine, right and faster, and a receipt arms it here.
    """
    with one_line_errors():
        if pin and not replay:
            raise InvalidInputError("--pin needs --replay: only what was proved on this machine can be pinned")
        envelope = _envelope(source, as_json)
        pack = _parsed(envelope, as_json)
        broken = check_whole(pack)
        policy = read_policy(require_state())
        admission = policy if isinstance(policy, PackRefusal) else admit(envelope, policy)
        untrusted = admission if isinstance(admission, PackRefusal) else None
        proofs = [] if not replay else _replay(pack, {b.kernel for b in broken}, budget, processes, allow_weak_box, as_json)
        if pin:
            proved = tuple(sorted(proof.record_id for proof in proofs if proof.status == "proved"))
            if proved:
                change_policy(require_state(), lambda old: add_pin(old, Pin(pack.pack_id, proved)))
        if as_json:
            shell.print_json({
                "pack_id": pack.pack_id, "kernels": len(pack), "refusals": msgspec.to_builtins(broken),
                "trust": msgspec.to_builtins(admission), "proofs": msgspec.to_builtins(proofs),
            })  # fmt: skip
        else:
            say_verified(pack, broken, untrusted, proofs)
        if broken or any(p.status == "broken" for p in proofs) or (untrusted is not None and not pin):
            raise typer.Exit(EXIT_REFUSED)


@app.command("sign")
def sign(
    source: Annotated[Path, typer.Argument(help=f"A {SUFFIX} file.")],
    key: Annotated[list[Path], typer.Option("--key", help="A secret key, for kernels or for index.")],
    as_json: shell.AsJson = False,
) -> None:
    """Add signatures to a pack's file; its id stays the same. Every claim is checked before a key vouches for it."""
    with one_line_errors():
        if source.is_dir():
            raise InvalidInputError(f"{source} is a folder; sign the file that pack build wrote, or give pack build --key")
        pack = _parsed(_envelope(str(source), as_json), as_json)
        broken = check_pack(pack)
        if broken:
            _refuse(broken[0], as_json)
        signed = sign_pack(pack.envelope, [load_secret(path) for path in key])
        _write_file(source, pack_bytes(signed))
        document = {"path": str(source), "signatures": [{"role": s.role, "key_id": s.key_id} for s in signed.signatures]}
        if as_json:
            shell.print_json(document)
        else:
            for signature in signed.signatures:
                typer.echo(f"{source}: signed for the {signature.role} by {signature.key_id[:16]}")


@app.command("install")
def install(
    source: Annotated[Path, typer.Argument(help=f"A {SUFFIX} file or a pack's folder.")],
    pin: Annotated[str, typer.Option("--pin", help="First digits of its id: allow a step back to this older version.")] = "",
    as_json: shell.AsJson = False,
) -> None:
    """Install a pack for this user after every check that needs no device. Exit code 1: refused, with the way out."""
    from torch_autokern.runtime.arming import arming_of

    with one_line_errors():
        envelope, state = _envelope(str(source), as_json, installed=False), require_state()
        if pin and (len(pin) < 8 or not envelope.pack_id.startswith(pin.lower())):
            raise InvalidInputError(
                f"--pin {pin!r} is not the start (8 digits or more) of this pack's id {envelope.pack_id[:16]}"
            )
        pack = install_pack(envelope, state, _reader(), pin_rollback=bool(pin))
        if isinstance(pack, PackRefusal):
            _refuse(pack, as_json)
        arming = arming_of(pack, _store())
        if as_json:
            shell.print_json({
                "name": pack.index.name, "version": pack.index.version, "pack_id": pack.pack_id,
                "tier": pack.admission.tier, "arming": msgspec.to_builtins(arming),
            })  # fmt: skip
            return
        typer.echo(
            f"{pack.index.name} {pack.index.version} installed ({pack.admission.tier}): {len(arming.armed)} kernels armed, "
            f"{len(arming.waiting)} wait, {len(arming.elsewhere)} for other machines, {len(arming.refused)} held back"
        )
        if arming.waiting:
            why = shell.plain(next(iter(arming.waiting.values())))
            shell.say(f"waiting: {why}; to prove them here run: autokern pack verify {pack.index.name} --replay")


@app.command("remove")
def remove(name: Annotated[str, typer.Argument(help="Name of an installed pack.")], as_json: shell.AsJson = False) -> None:
    """Remove every installed version of a pack. Running programs keep what they have loaded until they refresh."""
    with one_line_errors():
        count = remove_pack(require_state(), name)
        if count == 0:
            raise InvalidInputError(f"no installed pack is called {name!r}; see: autokern pack list")
        if as_json:
            shell.print_json({"name": name, "removed": count})
        else:
            typer.echo(f"{name}: {count} removed")


@app.command("list")
def list_packs(as_json: shell.AsJson = False) -> None:
    """List the packs of this machine, also those that are not used, with the reason and the way out."""
    with one_line_errors():
        rows = [list_row(found.path, found.origin, found.outcome, found.superseded) for found in _packs().found]
        if as_json:
            shell.print_json({"packs": rows})
            return
        for row in rows:
            typer.echo("  ".join(shell.plain(str(value)) for value in row.values() if value != ""))
        typer.echo(f"{len(rows)} packs")


@app.command("diff")
def diff(first: _Source, second: _Source, as_json: shell.AsJson = False) -> None:
    """What differs between two packs: kernels, and what they say of themselves. Exit code 1: they differ."""
    with one_line_errors():
        packs = [_parsed(_envelope(source, as_json), as_json) for source in (first, second)]
        before, after = ({k.record_id: k for k in pack.manifests()} for pack in packs)
        fields = {
            name: [getattr(pack.index, name) for pack in packs]
            for name in ("name", "version", "publisher", "licence", "notes", "created")
            if getattr(packs[0].index, name) != getattr(packs[1].index, name)
        }
        removed = [kernel_line(before[name]) for name in sorted(set(before) - set(after))]
        added = [kernel_line(after[name]) for name in sorted(set(after) - set(before))]
        if as_json:
            shell.print_json({"index": fields, "removed": removed, "added": added})
        else:
            for name, (old, new) in fields.items():
                typer.echo(f"{name}: {shell.plain(str(old))} -> {shell.plain(str(new))}")
            for sign_, lines in (("-", removed), ("+", added)):
                for line in lines:
                    typer.echo(f"{sign_} {shell.plain(line)}")
            typer.echo(f"{len(removed)} kernels removed, {len(added)} added, {len(set(before) & set(after))} the same")
        if fields or removed or added:
            raise typer.Exit(EXIT_REFUSED)


@app.command("lock")
def lock(
    path: Annotated[Path, typer.Argument(help="The lock file.")] = Path("autokern.lock"),
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit code 1 where this machine differs.")] = False,
    as_json: shell.AsJson = False,
) -> None:
    """Pin the packs and kernels that serve here, by hash, for a deployment; or check a machine against such a file."""
    with one_line_errors():
        there = lock_of(_packs().packs)
        if not check:
            _write_file(path, encode_lock(there))
            if as_json:
                shell.print_json({"path": str(path), "packs": len(there.packs)})
            else:
                typer.echo(f"{path}: {len(there.packs)} packs, {sum(len(pack.kernels) for pack in there.packs)} kernels")
            return
        differences = lock_differences(read_lock(path), there)
        if as_json:
            shell.print_json({"path": str(path), "differences": differences})
        else:
            for words in differences:
                typer.echo(words)
            typer.echo("this machine differs from the lock file" if differences else "this machine fits the lock file")
        if differences:
            raise typer.Exit(EXIT_REFUSED)


def _reader() -> BinaryReader:
    from torch_autokern.runtime.pack_facts import read_binaries  # imports torch

    return read_binaries


def _packs() -> PackSet:
    return open_packs(_reader())


def _store() -> KernelStore:
    return open_store(choice=require_folder(to_write=False))


def _envelope(source: str, as_json: bool, *, installed: bool = True) -> Envelope:
    path = Path(source)
    if installed and not path.exists() and SUFFIX not in source:
        return _packs().named(source).envelope
    envelope = read_pack(path)
    if isinstance(envelope, PackRefusal):
        _refuse(envelope, as_json)
    return envelope


def _parsed(envelope: Envelope, as_json: bool) -> Pack:
    pack = parse_pack(envelope, _reader())
    if isinstance(pack, PackRefusal):
        _refuse(pack, as_json)
    return pack


def _refuse(refusal: PackRefusal, as_json: bool) -> NoReturn:
    if as_json:
        shell.print_json({"refusal": msgspec.to_builtins(refusal)})
    else:
        typer.echo(f"refused: {shell.plain(str(refusal))}")
    raise typer.Exit(EXIT_REFUSED)


def _write(pack: Pack, output: Path | None, *, folder: bool, wheel: bool) -> Path:
    if wheel:
        name, body = build_wheel(pack)
        path = (output or Path()) / name
    else:
        path, body = output or Path(file_name(pack.index)), b""
    try:
        if folder:
            write_folder(pack.envelope, pack.sizes, path)
            return path
        if wheel:
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror}; name a new path in a writable folder") from error
    _write_file(path, body or pack_bytes(pack.envelope))
    return path


def _write_file(path: Path, body: bytes) -> None:
    path = shell.writable_file(path)
    try:
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(body)
        partial.replace(path)
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror}; name a file in a writable folder") from error


def _size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else path.stat().st_size


def _replay(
    pack: Pack, broken: set[str], budget: float | None, processes: int, allow_weak_box: bool, as_json: bool
) -> list[Proof]:
    """Prove kernels of this machine's kind, the fastest first; what is left when the budget is over stays as it is."""
    import time

    from torch_autokern.judge.receipt import prove_here
    from torch_autokern.runtime.arming import target_for

    store = _store()
    rows = [row for row in pack.rows() if row.record_id not in broken and target_for(row.target) is not None]
    rows.sort(key=lambda row: (-max(row.ratio_low.values(), default=0.0), row.record_id))
    started, proofs = time.monotonic(), []
    for number, row in enumerate(rows):
        if budget is not None and number and time.monotonic() - started > 60 * budget:
            shell.say(f"the budget is over: {len(rows) - number} kernels are left as they are")
            break
        stored = pack.read(row.record_id)
        if isinstance(stored, PackRefusal):
            continue
        proof = prove_here(stored, store, processes=processes, allow_weak_box=allow_weak_box)
        proofs.append(proof)
        if not as_json:
            typer.echo(f"{row.record_id[:12]}  {proof.status}: {shell.plain(proof.message)}")
    return proofs
