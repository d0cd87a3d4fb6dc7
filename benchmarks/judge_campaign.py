"""The judge's statistics: ``python -m benchmarks.judge_campaign --part honest|stock|aa|overlap|latency --runs N --json FILE``.

honest: every kernel of `tests/honest` judged N times for correctness; how many were falsely refused. stock: the same with stock
itself in a candidate's place, on every op, dtype and layout. aa: N timings of stock against stock; none may be accepted as
faster. overlap: N pairs of timings of one candidate; their intervals must overlap. latency: seconds of a screen and a verdict.

N is a total: what the file holds already counts, so a part can be run in slices (`--seconds`) and after an interruption. The
file is written after every unit of work, and parts can run side by side.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import msgspec
from filelock import FileLock
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.judge_parts import (
    Judged,
    Latency,
    Pair,
    Repeats,
    latencies,
    pairs_of_judgements,
    repeat_honest,
    repeat_stock,
    stock_against_stock,
    stopping,
)
from torch_autokern.errors import InvalidInputError
from torch_autokern.judge.outcome import JUDGE_VERSION
from torch_autokern.report.device import describe_device, utc_date, versions
from torch_autokern.report.measurement import write_json

# What each part is asked for (`docs/judge.md`, "The judge is judged").
_RUNS = {"honest": 50, "stock": 50, "aa": 200, "overlap": 100, "latency": 3}


class Campaign(msgspec.Struct, forbid_unknown_fields=True):
    """All parts, on one machine with one judge."""

    device: str
    versions: dict[str, str]
    judge_version: int
    date: str
    honest: dict[str, Repeats] = {}
    stock: dict[str, Repeats] = {}
    aa: list[Judged] = []
    overlap: list[Pair] = []
    latency: list[Latency] = []


def read_campaign(path: Path | None) -> Campaign:
    """What a file holds, or an empty one.

    Raises:
        InvalidInputError: it is no campaign, or one of another machine or judge.
    """
    fresh = Campaign(describe_device(), versions(), JUDGE_VERSION, utc_date())
    if path is None or not path.exists():
        return fresh
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Campaign)
    except (OSError, msgspec.DecodeError) as error:
        raise InvalidInputError(f"{path} is no campaign: {error}; name another file") from error
    ours, theirs = (fresh.device, fresh.versions, JUDGE_VERSION), (found.device, found.versions, found.judge_version)
    if ours != theirs:
        raise InvalidInputError(f"{path} was made by {theirs}, this is {ours}; name another file")
    return found


def run_part(part: str, runs: int, seconds: float, path: Path | None) -> Campaign:
    """Run a part until it has `runs`, or for `seconds`."""
    campaign = read_campaign(path)
    state = getattr(campaign, part)
    work = {
        "honest": repeat_honest,
        "stock": repeat_stock,
        "aa": stock_against_stock,
        "overlap": pairs_of_judgements,
        "latency": latencies,
    }[part](state, runs)  # type: ignore[operator]
    columns = TextColumn(part), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(part, total=None)
        for _ in stopping(work, seconds):
            progress.advance(bar)
            _save(path, part, state)
    return read_campaign(path) if path else campaign


def _save(path: Path | None, part: str, state: object) -> None:
    """Write one part; the others may have grown in the file meanwhile."""
    if path is None:
        return
    with FileLock(path.with_name(path.name + ".lock")):
        whole = read_campaign(path)
        setattr(whole, part, state)
        whole.date = utc_date()
        write_json(path, whole)


def table(campaign: Campaign) -> list[str]:
    """One line a result, with what was asked for."""
    lines = _repeats("honest", "honest kernels", campaign.honest)
    lines += _repeats("stock", "ops, dtypes and layouts, stock in a candidate's place", campaign.stock)
    outcomes = Counter(one.outcome for one in campaign.aa)
    lines.append(f"aa       {len(campaign.aa)} of stock against stock: {outcomes['accepted']} accepted; {dict(outcomes)}")
    seen = [pair.overlaps for pair in campaign.overlap]
    judged = [one for one in seen if one is not None]
    unjudged = len(seen) - len(judged)
    lines.append(f"overlap  {sum(judged)} of {len(judged)} pairs overlap; {unjudged} pairs without two intervals")
    for row in campaign.latency:
        times = f"screen {row.screen_seconds} s, verdict {row.verdict_seconds} s"
        lines.append(f"latency  {row.key}, {row.megabytes} MB: {times} ({row.outcome})")
    return lines


def _repeats(part: str, what: str, found: dict[str, Repeats]) -> list[str]:
    runs = [one.runs for one in found.values()]
    refused: Counter[str] = Counter()
    for one in found.values():
        refused.update(one.refused)
    spread = f"{min(runs)} to {max(runs)} runs each, {sum(runs)} in all" if runs else "no runs"
    first = f"{part:8} {len(found)} {what}, {spread}: {sum(refused.values())} refused {dict(refused) or ''}"
    return [first, *(f"           {key}: {text}" for key, one in found.items() for text in one.examples)]


def main() -> None:
    """Run one part, or show what a file holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=sorted(_RUNS), help="what to run (default: nothing, only show the file)")
    parser.add_argument("--runs", type=int, help=f"total wanted (default: {', '.join(f'{k} {v}' for k, v in _RUNS.items())})")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; the next call goes on")
    parser.add_argument("--json", type=Path, help="the file that holds the results and is resumed from")
    options = parser.parse_args()
    try:
        campaign = read_campaign(options.json)
        if options.part:
            campaign = run_part(options.part, options.runs or _RUNS[options.part], options.seconds, options.json)
    except InvalidInputError as error:
        parser.error(str(error))
    print(f"{campaign.device}, torch {campaign.versions.get('torch')}, judge {campaign.judge_version}, {campaign.date}")
    print("\n".join(table(campaign)))


if __name__ == "__main__":
    main()
