"""How `autokern pack` shows packs: tables and lines; every word of a pack is data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.table import Table

from torch_autokern.cli import shell
from torch_autokern.store.pack import Pack
from torch_autokern.store.pack_manifest import KernelManifest
from torch_autokern.store.pack_refusal import PackRefusal

if TYPE_CHECKING:
    from torch_autokern.judge.receipt import Proof


def say_verified(pack: Pack, broken: list[PackRefusal], untrusted: PackRefusal | None, proofs: list[Proof]) -> None:
    """What `verify` found, in lines."""
    for refusal in broken:
        typer.echo(f"{refusal.kernel[:12]}  {shell.plain(str(refusal))}")
    typer.echo(f"{len(pack) - len(broken)} of {len(pack)} kernels pass every check of their bytes")
    if proofs:
        counts = {s: sum(p.status == s for p in proofs) for s in ("proved", "not_faster", "broken", "not_here", "disturbed")}
        typer.echo(", ".join(f"{count} {status.replace('_', ' ')}" for status, count in counts.items() if count))
    typer.echo("signatures: hold" if untrusted is None else f"signatures: {shell.plain(str(untrusted))}")


def kernel_table(pack: Pack) -> Table:
    """One line a kernel: what it speeds up, where, by how much, proved how."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, width in (("kernel", 12), ("speeds up", 22), ("on", 16), ("at least", 12), ("proved", 10)):
        table.add_column(heading, min_width=width, overflow="fold")
    for kernel in pack.manifests():
        proof = kernel.verification
        errors = f"error {proof.error_max_nano / 1e9:.2g}, stock's {proof.stock_error_max_nano / 1e9:.2g}"
        words = f"{proof.accuracy_class}: {proof.trials} trials, {proof.families} families, {errors}"
        cells = (_call(kernel), f"{_place(kernel)}, torch {kernel.place.stock_build}", _at_least(kernel), words)
        table.add_row(kernel.record_id[:12], *(shell.plain(cell).replace("[", r"\[") for cell in cells))
    return table


def _call(kernel: KernelManifest) -> str:
    tensors = [words.split(" ")[0] for words in kernel.contract.inputs]
    return f"{kernel.contract.op}({', '.join((*tensors, *kernel.contract.scalars))})"


def _place(kernel: KernelManifest) -> str:
    threads = f" x{kernel.place.threads}" if kernel.place.threads else ""
    return f"{kernel.place.name} {kernel.place.arch}{threads}"


def _at_least(kernel: KernelManifest) -> str:
    return ", ".join(f"{speed.ratio_low_milli / 1000:.2f}x {speed.regime} {speed.pages}" for speed in kernel.speed)


def kernel_line(kernel: KernelManifest) -> str:
    """One kernel in a line."""
    return f"{kernel.record_id[:12]} {_call(kernel)} on {_place(kernel)}, at least {_at_least(kernel)}"


def list_row(path: Path, origin: str, outcome: Pack | PackRefusal, superseded: bool) -> dict[str, object]:
    """A pack file as `list` shows it."""
    if isinstance(outcome, PackRefusal):
        reason, command = str(outcome.reason.value), outcome.command
        return {"path": str(path), "origin": origin, "state": "refused", "reason": reason, "message": outcome.message,
                "command": command}  # fmt: skip
    index = outcome.index
    return {
        "name": index.name, "version": index.version, "pack_id": outcome.pack_id[:16], "origin": origin,
        "state": "superseded" if superseded else "serves", "tier": outcome.admission.tier, "kernels": len(outcome),
        "held_back": len(outcome.refusals), "path": str(path),
    }  # fmt: skip
