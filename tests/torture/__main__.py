"""The store under fire: every part of the campaign, with its figures.

    python -m tests.torture --short                     the form of the long test tier: minutes
    python -m tests.torture --json FILE [--minutes N]   the long form; goes on where FILE left off, for at most N minutes
    python -m tests.torture --only "kill points"        one part
    python -m tests.torture --sabotage "no file sync"   a store without one of its promises: the cuts must find faults

Exit code 0: nothing wrong. 1: something was wrong, and is printed. 2: a bad argument. A part that this machine cannot run says
why, and counts as not run, never as passed. tests/torture/README.md says what each part shows and what it cannot show.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

import msgspec

from tests.torture import crowds, cuts, exhaustion, folders, gate, mutations, places, strikes
from tests.torture.campaign import Figure, Part, run_part

PARTS = (
    Part("kill points", strikes.kill_points, 2_000, 20_000, lambda _folder: gate.refusal()),
    Part("errors", strikes.errors, 2_400, 30_000, lambda _folder: gate.refusal()),
    Part("power cuts, ext4", cuts.ext4_cuts, 10, 50, places.ext4_refusal),
    Part("power cuts, replayed", cuts.replayed_cuts, 400, 10_000, lambda _folder: gate.refusal()),
    Part("mutations", mutations.mutations, 50_000, 200_000, units=mutations.BATCH),
    Part("full disks", exhaustion.full_disks, 40, None, lambda _folder: places.mounts_refusal()),
    Part("full ext4", exhaustion.full_ext4, None, None, places.ext4_refusal),
    Part("limits", exhaustion.limits, 60, None),
    Part("hostile places", folders.hostile_places, 130, None),
    Part("users and umasks", folders.users, 160, None),
    Part("lying locks", crowds.lying_locks, 20, None, lambda _folder: gate.refusal()),
    Part("clocks", crowds.clocks, None, None),
    Part("fork storms", crowds.storms, 3, 60),
    Part("two versions", crowds.versions, 6, 100),
)


class Report(msgspec.Struct):
    """The file of a campaign: where it ran, and each part's figure."""

    schema: str
    machine: str
    form: str
    figures: dict[str, Figure]


def main(arguments: list[str]) -> int:
    """Run what is asked for, print a line a part, keep the file up to date."""
    options = _options(arguments)
    parts = [part for part in PARTS if options.only in (None, part.name)]
    if options.sabotage:
        folder_trials = {"power cuts, ext4": cuts.ext4_cuts, "power cuts, replayed": cuts.replayed_cuts}
        parts = [
            msgspec.structs.replace(
                part, trials=lambda folder, trials=folder_trials[part.name]: trials(folder, options.sabotage)
            )
            for part in parts
            if part.name in folder_trials
        ]
    report = _load(options.json, "short" if options.short else "long")
    until = time.monotonic() + 60 * options.minutes
    for part in parts:
        figure = report.figures.setdefault(part.name, Figure())
        if not figure.done and time.monotonic() < until:
            run_part(part, part.short if options.short else part.long, figure, until)
            _save(options.json, report)
        _print(part.name, figure)
    chosen = [report.figures[part.name] for part in parts]
    if not all(figure.done for figure in chosen):
        print("time is up; run the same command again to go on")
    return int(any(figure.bad for figure in chosen))


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="the short form")
    parser.add_argument("--only", choices=[part.name for part in PARTS], help="one part")
    parser.add_argument("--json", type=Path, help="keep figures here, and go on from what is there")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after so many minutes (default: 600)")
    parser.add_argument("--sabotage", choices=cuts.SABOTAGES, help="take one promise from the store")
    return parser.parse_args(arguments)


def _load(path: Path | None, form: str) -> Report:
    if path is not None and path.exists():
        report = msgspec.json.decode(path.read_bytes(), type=Report)
        if report.form == form:
            return report
    kernel = f"{platform.system()} {platform.release().split('-')[0]}"
    machine = f"{kernel}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, uid {os.geteuid()}"
    return Report("autokern.torture/1", machine, form, {})


def _save(path: Path | None, report: Report) -> None:
    if path is not None:
        path.write_text(json.dumps(msgspec.to_builtins(report), indent=2) + "\n")


def _print(name: str, figure: Figure) -> None:
    if figure.skipped:
        print(f"{name:<22} not run: {figure.skipped}", flush=True)
        return
    also = "".join(f", {count} {what}" for what, count in figure.also.items())
    state = "" if figure.done else " so far"
    print(f"{name:<22} {figure.trials:>7}{state}, {figure.bad} bad, {figure.seconds:.0f} s{also}", flush=True)
    for fault in figure.faults:
        print(f"    {fault}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
