"""What a pack is worth on this machine: how many of its kernels run here, wait for a local proof, or are for other machines."""

from __future__ import annotations

import msgspec
import torch

from torch_autokern.runtime.table import refusal
from torch_autokern.runtime.target import local_target, stock_build
from torch_autokern.store.key import Target
from torch_autokern.store.pack import Pack
from torch_autokern.store.record import StoredRecord
from torch_autokern.store.store import KernelStore


class Arming(msgspec.Struct, frozen=True):
    """Record ids by what becomes of them: `armed` run here; `waiting` are right here and wait for a local proof that they are
    faster, or are quarantined or banned, each with the reason; `elsewhere` are for another kind of machine; `refused` failed a
    check or were withdrawn."""

    armed: tuple[str, ...]
    waiting: dict[str, str]
    elsewhere: tuple[str, ...]
    refused: dict[str, str]


def arming_of(pack: Pack, store: KernelStore) -> Arming:
    """Sort a pack's kernels; reads every record that fits this machine."""
    armed: list[str] = []
    waiting: dict[str, str] = {}
    elsewhere: list[str] = []
    rows = {row.record_id: row for row in pack.rows()}
    for record_id, row in rows.items():
        here = target_for(row.target)
        if here is None:
            elsewhere.append(record_id)
            continue
        stored = pack.get(row.key_digest, record_id)
        if stored is None:
            continue
        why = refusal(stored.record, store.notes(row.key_digest, record_id), here, stock_build())
        if why is None:
            armed.append(record_id)
        else:
            waiting[record_id] = why
    refused = {record_id: str(why) for record_id, why in pack.refusals.items()}
    return Arming(tuple(armed), waiting, tuple(elsewhere), refused)


def fits_here(stored: StoredRecord) -> bool:
    """Whether this machine is of the kind that a record is for."""
    return target_for(stored.record.target) is not None


def target_for(made_for: Target) -> Target | None:
    """This machine's target of the kind and architecture that a record names, or None."""
    if made_for.device_type == "cuda":
        if not torch.cuda.is_available():
            return None
        targets = [local_target("cuda", device_index=index) for index in range(torch.cuda.device_count())]
    else:
        targets = [local_target()]
    return next((target for target in targets if target.arch == made_for.arch), None)
