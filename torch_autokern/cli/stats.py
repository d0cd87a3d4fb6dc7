"""`autokern stats`: what the store holds for this machine. Counts of calls belong to a process: `autokern.stats()` there."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import typer

from torch_autokern.cli import shell

if TYPE_CHECKING:
    from torch_autokern.store.store import KernelStore


class OpStats(msgspec.Struct, forbid_unknown_fields=True):
    """Records of one op: `armed` run on this machine, the others wait, by reason. `best_ratio_low` is the highest lower
    bound of a speed-up among the armed ones."""

    records: int = 0
    keys: int = 0
    armed: int = 0
    waiting: dict[str, int] = {}
    best_ratio_low: float | None = None


class StoreStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The store as this machine sees it."""

    folder: str | None
    why: str
    target: str
    stock_build: str
    ops: dict[str, OpStats]


def stats(as_json: shell.AsJson = False) -> None:
    """Say which kernels the store holds for this machine. (Calls, hits and misses: `autokern.stats()` inside your program.)"""
    from torch_autokern.store.store import open_store

    found = store_stats(open_store())
    if as_json:
        shell.print_json(found)
        return
    typer.echo(f"store   {found.folder or 'memory only'} ({found.why})")
    typer.echo(f"machine {found.target}, torch {found.stock_build}")
    for op, counts in sorted(found.ops.items()):
        best = f", at best {counts.best_ratio_low:.2f}x or more" if counts.best_ratio_low else ""
        typer.echo(f"{op}: {counts.records} records for {counts.keys} keys, {counts.armed} armed here{best}")
        for reason, count in sorted(counts.waiting.items()):
            typer.echo(f"  {count} waiting: {reason}")
    if not found.ops:
        typer.echo("no records yet; find some with: autokern record -- python script.py, then: autokern warm workload.json")
    typer.echo("calls, hits and misses are counted per process: print(autokern.stats()) at the end of your program")


def store_stats(store: KernelStore) -> StoreStats:
    """Count records by op, and by whether and why not they run here."""
    from torch_autokern.runtime.table import ratio_low, refusal
    from torch_autokern.runtime.target import local_target, stock_build

    target, build = local_target(), stock_build()
    ops: dict[str, OpStats] = {}
    keys: dict[str, set[str]] = {}
    for stored in store.records():
        record = stored.record
        counts = ops.setdefault(record.key.op, OpStats(waiting=Counter()))
        keys.setdefault(record.key.op, set()).add(record.key.digest)
        counts.records += 1
        reason = refusal(record, store.notes(record.key.digest, stored.record_id), target, build)
        if reason is None and record.target.device_type == "cpu" and record.target.threads != target.threads:
            reason = f"proved faster with {record.target.threads} threads, this is {target.threads}"
        if reason is None:
            counts.armed += 1
            counts.best_ratio_low = max(counts.best_ratio_low or 0.0, ratio_low(record, "eager") or 0.0)
        else:
            counts.waiting[reason] += 1
    for op, digests in keys.items():
        ops[op].keys = len(digests)
    choice = store.choice
    return StoreStats(
        folder=None if store.write_root is None else str(store.write_root),
        why=choice.why if choice else "",
        target=f"{target.device_type} {target.name} {target.arch}, {target.threads} threads",
        stock_build=build,
        ops=ops,
    )
