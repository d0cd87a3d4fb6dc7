"""The lock file of a deployment: which packs and kernels a machine must have, by hash, and what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from torch_autokern.errors import InvalidInputError
from torch_autokern.store.pack import Pack
from torch_autokern.store.pack_manifest import MAX_KERNELS, Count, Name, Sha

MAX_LOCK_BYTES = 16 << 20


class LockedPack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pack: its id, the keys that signed it, and its kernels' record ids."""

    name: Name
    version: Count
    pack_id: Sha
    signers: tuple[Sha, ...]
    kernels: Annotated[tuple[Sha, ...], Meta(max_length=MAX_KERNELS)]


class LockFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All packs that serve, in order of name."""

    schema: Literal["autokern.lock/1"]
    packs: tuple[LockedPack, ...]


def lock_of(packs: tuple[Pack, ...]) -> LockFile:
    """What these packs pin."""
    return LockFile(
        "autokern.lock/1",
        tuple(
            LockedPack(
                pack.index.name, pack.index.version, pack.pack_id,
                tuple(sorted({signature.key_id for signature in pack.envelope.signatures})),
                tuple(name for name in pack.record_ids if name not in pack.refusals),
            )
            for pack in packs
        ),
    )  # fmt: skip


def lock_differences(wanted: LockFile, there: LockFile) -> tuple[str, ...]:
    """What a machine lacks or has beside a lock file, in words; empty where it fits."""
    mine = {pack.name: pack for pack in there.packs}
    words = []
    for pack in wanted.packs:
        found = mine.pop(pack.name, None)
        if found is None:
            words.append(f"{pack.name} {pack.version} is locked and does not serve here")
        elif found.pack_id != pack.pack_id:
            words.append(
                f"{pack.name}: {pack.version} ({pack.pack_id[:16]}) is locked, {found.version} ({found.pack_id[:16]}) is here"
            )
        elif found.kernels != pack.kernels:
            gone, new = set(pack.kernels) - set(found.kernels), set(found.kernels) - set(pack.kernels)
            words.append(f"{pack.name} {pack.version}: {len(gone)} locked kernels do not serve here, {len(new)} others do")
    words.extend(f"{pack.name} {pack.version} serves here and is not locked" for pack in mine.values())
    return tuple(words)


def read_lock(path: Path) -> LockFile:
    """Read a lock file.

    Raises:
        InvalidInputError: missing, or not a lock file.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_LOCK_BYTES + 1)
        if len(raw) > MAX_LOCK_BYTES:
            raise InvalidInputError(f"lock file {path} has more than {MAX_LOCK_BYTES} bytes")
        return msgspec.json.decode(raw, type=LockFile)
    except OSError as error:
        raise InvalidInputError(f"cannot read lock file {path}: {error.strerror}; make one with: autokern pack lock") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidInputError(f"{path} is not a lock file ({error}); make one with: autokern pack lock") from error


def encode_lock(lock: LockFile) -> bytes:
    """The file's bytes: sorted and indented, so that two versions compare line by line."""
    return msgspec.json.format(msgspec.json.encode(lock, order="sorted"), indent=2) + b"\n"
