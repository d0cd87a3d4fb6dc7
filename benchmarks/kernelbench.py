"""A folder of KernelBench problems: ``python -m benchmarks.kernelbench DIR [--solutions DIR] [--part 1/4] [--json]``.

Every problem runs in a process of its own. Without `--solutions` ours is the model, decorated and optimised, served from the
store, into which kernels for the problem's ops are searched first within `--budget` seconds; with it, `ModelNew` of the file of
the same name. The baseline is the best of eager and `torch.compile` (default and max-autotune). Correct is said three times: by
the suite's rule at 1e-2, at 1e-4, and by our judge, whose inputs are not the suite's uniform ones. `fast_p` is the share of
problems that are correct and more than p times faster; geometric means are over the correct ones. `--limit` bounds the call and
`--out` is written after every problem. Problem files and solutions are executed, outside of a box: run what you would run
anyway.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.kernelbench_worker import Row
from benchmarks.parts import part_of
from torch_autokern.report.device import describe_device, utc_date, versions
from torch_autokern.report.measurement import write_json

RULES = ("suite 1e-2", "suite 1e-4", "judge")
SPEEDS = (0.0, 1.0, 1.5, 2.0)
_LEAST_S = 30.0  # beside its search, for a problem to begin


class Summary(msgspec.Struct, frozen=True):
    """One rule over all problems: how many are correct, `fast_p` by p, and the geometric mean of the correct ones' ratios."""

    rule: str
    correct: int
    problems: int
    fast: dict[str, float]
    geometric_mean: float


class Report(msgspec.Struct, frozen=True):
    """What the command measured, and where."""

    date: str
    device: str
    versions: dict[str, str]
    rows: tuple[Row, ...]
    summaries: tuple[Summary, ...]


def is_correct(row: Row, rule: str) -> bool:
    """Whether a row passes a rule."""
    if row.error:
        return False
    return row.judge == "passes" if rule == "judge" else row.suite[rule.removeprefix("suite ")]


def summarise(rows: Sequence[Row], rule: str) -> Summary:
    """`fast_p` and the geometric mean under one rule."""
    correct = [row.ratio for row in rows if is_correct(row, rule)]
    fast = {f"{p:g}": sum(ratio > p for ratio in correct) / max(len(rows), 1) for p in SPEEDS}
    mean = math.exp(sum(math.log(ratio) for ratio in correct) / len(correct)) if correct else 0.0
    return Summary(rule, len(correct), len(rows), fast, mean)


def chosen(folder: Path, part: str) -> list[Path]:
    """The problem files of part "i/n", in the order of their numbers.

    Raises:
        ValueError: `part` is none, or there are no problems.
    """
    files = sorted(
        folder.glob("*.py"), key=lambda path: (int(path.stem.split("_")[0]) if path.stem[:1].isdigit() else 0, path.stem)
    )
    if not files:
        raise ValueError(
            f"{folder} has no problem files (*.py); write some: python -m benchmarks.kernelbench_problems {folder}"
        )
    return part_of(files, part)


def run_problem(path: Path, solution: Path | None, options: argparse.Namespace, limit_s: float) -> Row:
    """One problem's row; a process that dies or hangs is a row with its error."""
    command = [sys.executable, "-m", "benchmarks.kernelbench_worker", str(path), "--device", options.device]
    command += ["--modes", options.modes, "--budget", str(options.budget)]
    command += ["--allow-weak-box"] if options.allow_weak_box else []
    command += [] if solution is None else ["--solution", str(solution)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, stdin=subprocess.DEVNULL)
        return msgspec.json.decode(done.stdout.strip().rpartition("\n")[2], type=Row)
    except subprocess.TimeoutExpired:
        error = f"no answer after {limit_s:.0f} s"
    except msgspec.DecodeError:
        error = f"ended with {done.returncode}: {done.stderr.strip()[-300:]}"
    return Row(path.stem, {}, 0.0, {}, "not judged", 0, error)


def table(report: Report) -> str:
    """The report as text."""
    lines = [
        "| problem | best baseline (us) | ours (us) | ratio | served | 1e-2 | 1e-4 | judge |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report.rows:
        if row.error:
            lines.append(f"| {row.problem} | | | | | | | {row.error} |")
            continue
        best = min((value, name) for name, value in row.times_us.items() if name != "ours")
        words = ["yes" if row.suite[name] else "no" for name in ("1e-2", "1e-4")]
        lines.append(
            f"| {row.problem} | {best[0]:.1f} {best[1]} | {row.times_us['ours']:.1f} | {row.ratio:.2f} | {row.hits} | "
            f"{words[0]} | {words[1]} | {row.judge} |"
        )
    for summary in report.summaries:
        fast = ", ".join(f"fast_{p} {share:.2f}" for p, share in summary.fast.items())
        mean = f"{summary.geometric_mean:.3f}" if summary.correct else "none"
        lines.append(f"\n{summary.rule}: {summary.correct} of {summary.problems} correct, {fast}, geometric mean {mean}")
    return "\n".join(lines)


def main() -> int:
    """Command line; 2 where it cannot be understood."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--solutions", type=Path, help="a folder of files with ModelNew, named as the problems")
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--modes", default="default,max-autotune", help="modes of torch.compile to time, comma-separated")
    parser.add_argument("--limit-s", type=float, default=600.0, help="longest time of one problem")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for the whole call; later problems are left out")
    parser.add_argument("--budget", type=float, default=0.0, help="seconds of search a problem; 0: what the store holds")
    parser.add_argument("--store", type=Path, default=None, help="keep kernels here (default: your own store)")
    parser.add_argument("--allow-weak-box", action="store_true", help="judge kernels although the box is weak here")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="write the report to this file after every problem")
    options = parser.parse_args()
    ends = time.monotonic() + options.limit
    try:
        files = chosen(options.folder, options.part)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.store is not None:
        options.store.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ["AUTOKERN_STORE"] = str(options.store.absolute())
    rows: list[Row] = []
    for path in files:
        left = ends - time.monotonic()
        if left < options.budget + _LEAST_S:
            print(f"{path.stem} and later ones are left out: the call's time is up", file=sys.stderr, flush=True)
            break
        solution = options.solutions / path.name if options.solutions is not None else None
        rows.append(run_problem(path, solution, options, min(options.limit_s, left)))
        if options.out is not None:
            write_json(options.out, reported(rows, options.device))
        if not options.json:
            print(path.stem, rows[-1].error or f"{rows[-1].ratio:.2f} {rows[-1].judge}", file=sys.stderr, flush=True)
    report = reported(rows, options.device)
    print(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() if options.json else table(report))
    return 0


def reported(rows: Sequence[Row], device: str) -> Report:
    """What is known so far."""
    summaries = tuple(summarise(rows, rule) for rule in RULES)
    return Report(utc_date(), describe_device(device), versions(), tuple(rows), summaries)


if __name__ == "__main__":
    sys.exit(main())
