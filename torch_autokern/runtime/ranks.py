"""Do all ranks of a job serve the same kernels? One hash of what decides the choice, compared across a process group."""

from __future__ import annotations

import hashlib

import msgspec
import torch

from torch_autokern import config
from torch_autokern.runtime.session import Session
from torch_autokern.runtime.target import local_target, stock_build
from torch_autokern.store.key import canonical_json

_MAX_BYTES = 64 << 20


class RanksReport(msgspec.Struct, frozen=True):
    """What `check_ranks` found. `same`: every rank has this rank's `digest`. `differences` names, rank by rank, the first thing
    in which it differs from rank 0. True where all is the same."""

    same: bool
    digest: str
    ranks: int
    differences: tuple[str, ...]

    def __bool__(self) -> bool:
        return self.same


class _Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides which kernel serves a key, from coarse to fine; `kernels` is a record id for each served slot."""

    switched_off: str
    torch_version: str
    device: str
    packs: dict[str, str]
    kernels: dict[str, str]


def compare_ranks(current: Session, group: object | None = None) -> RanksReport:
    """Compare this process's choice with every other rank's; one rank where no process group is up.

    Only typed JSON travels between ranks, 32 bytes where all agree. With NCCL it travels through the current GPU.
    """
    choice = _choice_of(current)
    mine = canonical_json(choice)
    digest = hashlib.sha256(mine).hexdigest()
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return RanksReport(True, digest, 1, ())
    digests = _gather(bytes.fromhex(digest), group)
    if len(set(digests)) == 1:
        return RanksReport(True, digest, len(digests), ())
    lengths = [int.from_bytes(raw, "little") for raw in _gather(len(mine).to_bytes(8, "little"), group)]
    size = min(max(lengths), _MAX_BYTES)
    padded = _gather(mine[:size].ljust(size, b"\0"), group)
    choices = [msgspec.json.decode(raw[:length], type=_Choice) for raw, length in zip(padded, lengths, strict=True)]
    words = [_difference(choices[0], other) for other in choices]
    named = tuple(f"rank {rank}: {word}" for rank, word in enumerate(words) if word)
    return RanksReport(False, digest, len(digests), named)


def _choice_of(current: Session) -> _Choice:
    target = local_target("cuda", device_index=torch.cuda.current_device()) if torch.cuda.is_available() else local_target()
    cpu = local_target()
    device = f"{target.name} {target.arch}, CPU {cpu.name} {cpu.arch}, {cpu.threads} threads"
    current.fill()
    return _Choice(
        switched_off="AUTOKERN_DISABLE" if config.disabled() else current.unavailable or "",
        torch_version=f"{torch.__version__} (stock build {stock_build()})",
        device=device,
        packs={pack.index.name: f"{pack.index.version} {pack.pack_id}" for pack in current.store.packs},
        kernels=current.served_slots(),
    )


def _difference(first: _Choice, other: _Choice) -> str:
    """The coarsest thing in which two ranks differ, in words; "" where there is none."""
    for name in ("switched_off", "torch_version", "device"):
        mine, theirs = getattr(other, name), getattr(first, name)
        if mine != theirs:
            return f"{name.replace('_', ' ')} is {mine or 'no'!r}, on rank 0 {theirs or 'no'!r}"
    for name, kind in (("packs", "pack"), ("kernels", "kernel of")):
        mine, theirs = getattr(other, name), getattr(first, name)
        for key in sorted({*mine, *theirs}):
            if mine.get(key) != theirs.get(key):
                return f"{kind} {key} is {mine.get(key, 'absent')}, on rank 0 {theirs.get(key, 'absent')}"
    return ""


def _gather(body: bytes, group: object | None) -> list[bytes]:
    """Everybody's bytes, all of one length, in order of rank."""
    dist = torch.distributed
    device = f"cuda:{torch.cuda.current_device()}" if "nccl" in str(dist.get_backend(group)) else "cpu"  # type: ignore[arg-type]
    mine = torch.tensor(list(body), dtype=torch.uint8, device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]  # type: ignore[arg-type]
    dist.all_gather(found, mine, group=group)
    return [bytes(t.cpu().tolist()) for t in found]
