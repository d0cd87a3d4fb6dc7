"""Packs on this machine: shipped inside the package, carried by a wheel, or installed by a person. No code is imported to find
one.

State lives in one folder: ``packs/<name>-<version>-<id>.akpack`` and ``trust/policy.json``. A pack is one file that never
changes; a newer version is published beside the older one before that is removed, so a reader finds one or the other.
"""

from __future__ import annotations

import os
import re
import site
import sysconfig
from pathlib import Path
from typing import Literal

import msgspec
import platformdirs

from torch_autokern import config
from torch_autokern.errors import InvalidInputError, StoreError
from torch_autokern.store.files import Unread, list_folder, make_folders, publish_file, read_file, remove_file
from torch_autokern.store.folders import folder_refusal
from torch_autokern.store.pack import Pack, open_pack
from torch_autokern.store.pack_build import WHEEL_FOLDER, check_whole, pack_bytes
from torch_autokern.store.pack_file import MAX_PACK_BYTES, SUFFIX, Envelope, read_pack, split_pack
from torch_autokern.store.pack_manifest import BinaryReader
from torch_autokern.store.pack_refusal import PackReason, PackRefusal
from torch_autokern.store.trust import Pin, Policy, add_pin, change_policy, is_shipped, raise_floor, read_policy
from torch_autokern.store.trust_statement import MAX_STATEMENT_BYTES, apply_statement, open_statement
from torch_autokern.store.trust_statement import SUFFIX as STATEMENT_SUFFIX

Origin = Literal["shipped", "wheel", "installed"]
SHIPPED_FOLDER = Path(__file__).parents[1] / "packs"
_LISTING_TRIES = 5
_INSTALLED = re.compile(r"(?P<name>[a-z0-9][a-z0-9._-]{0,63})-(?P<version>[0-9]{1,16})-(?P<id>[0-9a-f]{12})\.akpack")


class FoundPack(msgspec.Struct, frozen=True):
    """One pack file and what came of opening it. `superseded`: a newer version of the same name serves instead."""

    path: Path
    origin: Origin
    outcome: Pack | PackRefusal
    superseded: bool = False


class PackSet(msgspec.Struct, frozen=True):
    """Every pack of this machine, and the policy that decided about them."""

    found: tuple[FoundPack, ...] = ()

    @property
    def packs(self) -> tuple[Pack, ...]:
        """Those that serve, in order of name and id."""
        serving = [f.outcome for f in self.found if isinstance(f.outcome, Pack) and not f.superseded]
        return tuple(sorted(serving, key=lambda pack: (pack.index.name, pack.pack_id)))

    def named(self, name: str) -> Pack:
        """The serving pack with a name, or whose id starts so.

        Raises:
            InvalidInputError: there is none.
        """
        for pack in self.packs:
            if pack.index.name == name or (len(name) >= 8 and pack.pack_id.startswith(name)):
                return pack
        raise InvalidInputError(f"no installed pack is called {name!r}; see: autokern pack list")


def state_folder() -> Path | None:
    """Where packs and trust of this user are kept: inside ``AUTOKERN_STORE`` if that is set, else the user's data folder. None
    where the machine cannot name one."""
    explicit = config.store_folder()
    try:
        if explicit is not None:
            return Path(os.path.abspath(Path(explicit).expanduser()))
        return Path(platformdirs.user_data_dir("autokern", appauthor=False))
    except (OSError, RuntimeError, KeyError, ValueError):
        return None


def require_state() -> Path:
    """`state_folder`, for a person who is present.

    Raises:
        StoreError: there is none, or it is not safe to keep.
    """
    state = state_folder()
    if state is None:
        raise StoreError("no folder for packs: this user has no home; set AUTOKERN_STORE to a private, writable folder")
    refusal = folder_refusal(state)
    if refusal is not None:
        raise StoreError(f"{state} cannot hold packs: {refusal}; make it a folder that only you can write")
    return state


def open_packs(reader: BinaryReader, state: Path | None = None) -> PackSet:
    """Open every pack of this machine. Never raises: a pack that is not used is listed with its reason."""
    state = state or state_folder()
    if state is not None and folder_refusal(state) is not None:
        state = None
    found: list[FoundPack] = []
    for _ in range(_LISTING_TRIES):
        # The policy first: it never asks for a newer version than the listing that follows can hold.
        policy = read_policy(state)
        found, vanished = [], False
        candidates = _candidates(state)
        if isinstance(policy, Policy):
            policy = _with_withdrawals(policy, candidates)
        for origin, path in candidates:
            if path.suffix != SUFFIX:
                continue
            outcome = _open(origin, path, policy, reader)
            if outcome is None:
                vanished = True
                continue
            found.append(FoundPack(path, origin, outcome))
        if not vanished:
            break
    return PackSet(_mark_superseded(found))


def install_pack(envelope: Envelope, state: Path, reader: BinaryReader, *, pin_rollback: bool = False) -> Pack | PackRefusal:
    """Check everything of a pack that needs no device, then install it. `pin_rollback` allows a step back to this very pack.

    Raises:
        StoreError: the state folder cannot be written.
    """
    if pin_rollback:
        change_policy(state, lambda policy: add_pin(policy, Pin(envelope.pack_id, rollback=True)))
    policy = read_policy(state)
    if isinstance(policy, PackRefusal):
        return policy
    pack = open_pack(envelope, policy, reader)
    if isinstance(pack, PackRefusal):
        return pack
    broken = check_whole(pack)
    if broken:
        return broken[0]
    name = pack.index.name
    others = [f.outcome for f in open_packs(reader, state).found if isinstance(f.outcome, Pack) and f.origin == "installed"]
    for other in others:
        if other.index.name == name and not _same_publisher(other, pack, policy):
            return PackRefusal(
                PackReason.NAME_TAKEN, f"{name} {other.index.version} of another publisher is installed",
                f"autokern pack remove {name}",
            )  # fmt: skip
    path = _packs_folder(state) / f"{name}-{pack.index.version}-{pack.pack_id[:12]}{SUFFIX}"
    try:
        make_folders(state, path.parent)
        publish_file(path, pack_bytes(envelope), state, replace=True)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}; make the folder writable for you") from error
    change_policy(state, lambda policy: raise_floor(policy, name, pack.index.version, pack.admission))
    _remove_others(state, name, keep=path)
    return pack


def remove_pack(state: Path, name: str) -> int:
    """Remove every installed version of a name; how many files that were. A running program keeps what it has loaded."""
    return _remove_others(state, name, keep=None)


def _candidates(state: Path | None) -> list[tuple[Origin, Path]]:
    """Files that may be packs or statements, best known first."""
    folders: list[tuple[Origin, Path]] = [("shipped", SHIPPED_FOLDER)] if config.prebuilt_packs() else []
    folders += [("wheel", folder / WHEEL_FOLDER) for folder in site_folders()]
    if state is not None:
        folders.append(("installed", _packs_folder(state)))
    return [
        (origin, folder / name)
        for origin, folder in folders
        for name in list_folder(folder)
        if name.endswith((SUFFIX, STATEMENT_SUFFIX)) and not name.startswith(".")
    ]


def site_folders() -> list[Path]:
    """Where pip puts wheels of this interpreter. Never the working folder, and never all of ``sys.path``."""
    paths = sysconfig.get_paths()
    names = [paths.get("purelib", ""), paths.get("platlib", "")]
    if site.ENABLE_USER_SITE:
        names.append(site.getusersitepackages())
    return [Path(name) for name in dict.fromkeys(names) if name and os.path.isabs(name)]


def _open(origin: Origin, path: Path, policy: Policy | PackRefusal, reader: BinaryReader) -> Pack | PackRefusal | None:
    """A pack, why it is not used, or None where the file is gone."""
    if origin == "shipped" and isinstance(policy, Policy):
        # Its bytes are checked against an id in our code: it does not matter who owns the file or what a umask made of it.
        shipped = read_pack(path)
        if isinstance(shipped, Envelope) and is_shipped(shipped):
            return open_pack(shipped, policy, reader)
    content = read_file(path, MAX_PACK_BYTES)
    if isinstance(content, Unread):
        if content.kind == "absent":
            return None
        return PackRefusal(PackReason.UNREADABLE, f"{path}: {content.reason}", f"chmod go-w {path}")
    if isinstance(policy, PackRefusal):
        return policy
    envelope = split_pack(content.data)
    return envelope if isinstance(envelope, PackRefusal) else open_pack(envelope, policy, reader)


def _with_withdrawals(policy: Policy, candidates: list[tuple[Origin, Path]]) -> Policy:
    """The policy with what statements beside packs withdraw; they introduce nobody."""
    for _, path in candidates:
        if path.suffix != STATEMENT_SUFFIX:
            continue
        content = read_file(path, MAX_STATEMENT_BYTES)
        if isinstance(content, Unread):
            continue
        signed = open_statement(content.data, policy)
        if not isinstance(signed, PackRefusal):
            policy = apply_statement(policy, signed, introduce=False)
    return policy


def _mark_superseded(found: list[FoundPack]) -> tuple[FoundPack, ...]:
    """Of several packs of one name the highest version serves; of equal versions the smaller id."""
    best: dict[str, tuple[tuple[int, str], FoundPack]] = {}
    for entry in found:
        if isinstance(entry.outcome, Pack):
            rank = (-entry.outcome.index.version, entry.outcome.pack_id)
            name = entry.outcome.index.name
            if name not in best or rank < best[name][0]:
                best[name] = (rank, entry)
    return tuple(
        msgspec.structs.replace(entry, superseded=True)
        if isinstance(entry.outcome, Pack) and best[entry.outcome.index.name][1] is not entry
        else entry
        for entry in found
    )


def _same_publisher(installed: Pack, new: Pack, policy: Policy) -> bool:
    """Whether a pack may take another's place: the same index key, or one of its line."""
    mine, theirs = new.admission.index_key, installed.admission.index_key
    if mine == theirs or installed.admission.tier != "signed":
        return True
    key, other = policy.key(mine), policy.key(theirs)
    return (key is not None and key.introduced_by == theirs) or (other is not None and other.introduced_by == mine)


def _packs_folder(state: Path) -> Path:
    return state / "packs"


def _remove_others(state: Path, name: str, keep: Path | None) -> int:
    count = 0
    for other in list_folder(_packs_folder(state)):
        match = _INSTALLED.fullmatch(other)
        path = _packs_folder(state) / other
        if match is not None and match["name"] == name and path != keep:
            count += remove_file(path)
    return count
