"""Everything that a GPU is needed for, in one bounded call: ``python -m benchmarks.gpu_session --out FOLDER``.

Stages, each a process of its own with a time limit: build the extension; probe (does the device work in the runner's box, which
compilers are there); the tests that are marked `cuda`; the search's throughput; `warm` over a set of keys with a budget for
each. What is known so far is on disk after every step (`session.json` in the project's measurement form, `warm.json` with every
trial, a log for each stage), and the table is printed last.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

STAGES = ("build", "probe", "tests", "throughput", "warm", "demo")
# Seconds that a stage may take at most; what is left of the whole call bounds it too.
LIMITS = {"build": 240.0, "probe": 90.0, "tests": 240.0, "throughput": 120.0, "warm": 480.0, "demo": 240.0}
_RESERVE_S = 10.0
_SHOWN_LINES = {"build": 3, "probe": 20, "tests": 25, "throughput": 10, "warm": 40, "demo": 30}


class Session:
    """The stages of one call. `limit_s` bounds all of them together; `out` gets their logs."""

    def __init__(self, out: Path, limit_s: float) -> None:
        self.out = out
        self._ends = time.monotonic() + limit_s
        self.lines: list[str] = []

    def left(self) -> float:
        """Seconds until the last stage must have ended."""
        return self._ends - time.monotonic() - _RESERVE_S

    def run(self, stage: str, command: Sequence[str]) -> bool:
        """Run a stage, its output to a log whose end is shown. Whether it ended well, and in time."""
        limit_s = min(LIMITS[stage], self.left())
        if limit_s < 5:
            self.lines.append(f"{stage:<11} not run: the call's time is up")
            return False
        began = time.monotonic()
        with open(self.out / f"{stage}.log", "wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = None
        words = "ran out of its time" if code is None else "ended well" if code == 0 else f"ended with code {code}"
        self.lines.append(f"{stage:<11} {words} after {time.monotonic() - began:.0f} s")
        shown = (self.out / f"{stage}.log").read_text(errors="replace").splitlines()[-_SHOWN_LINES[stage] :]
        print(f"--- {self.lines[-1]}", *shown, sep="\n", flush=True)
        return code == 0


def main() -> None:
    """Run the chosen stages and print what they found."""
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.child:
        from benchmarks import gpu_stages

        getattr(gpu_stages, options.child)(options)
        return
    session = Session(options.out, options.limit)
    chosen = [stage for stage in STAGES if stage in options.stages.split(",")]
    weak = ["--allow-weak-box"] if options.allow_weak_box else []
    python = [sys.executable, "-m"]
    told = ["--out", str(options.out), "--set", options.set, "--only", options.only, "--budget", str(options.budget), *weak]
    if options.store:
        told += ["--store", str(options.store)]
    for stage in chosen:
        if stage == "build":
            session.run(stage, [sys.executable, "setup.py", "-q", "build_ext", "--inplace"])
        elif stage == "tests":
            selected = ["-k", options.k] if options.k else []
            pytest = [*python, "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider"]
            session.run(stage, [*pytest, *selected, *options.tests.split()])
        elif stage == "demo":
            session.run(stage, [*python, "torch_autokern.cli.main", "demo", "--json", str(options.out / "demo.json")])
        else:
            left = ["--limit", str(min(LIMITS[stage], session.left()))]
            session.run(stage, [*python, "benchmarks.gpu_session", "--child", stage, *told, *left])
    print("\n".join(["", *session.lines, "", *table(options.out / "session.json")]), flush=True)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and results")
    parser.add_argument("--stages", default="build,probe,tests,throughput,warm", help=f"of {','.join(STAGES)}")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--tests", default="tests", help="paths of tests, separated by spaces")
    parser.add_argument("-k", default="", help="only tests whose names match, as pytest's -k")
    parser.add_argument("--set", default="headline", help="which shapes (benchmarks/shapes.py)")
    parser.add_argument("--only", default="", help="only cases whose name contains one of these, separated by ;")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the search of each key")
    parser.add_argument("--store", type=Path, default=None, help="keep kernels here (default: a fresh temporary folder)")
    parser.add_argument("--allow-weak-box", action="store_true", help="judge kernels although the box is weak here")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def table(path: Path) -> list[str]:
    """The rows of a measurement as text; why there are none, where there are none."""
    from torch_autokern.errors import InvalidInputError
    from torch_autokern.report.measurement import load_measurement

    try:
        measured = load_measurement(path)
    except InvalidInputError as error:
        return [str(error)]
    lines = [f"{measured.device}, torch {measured.versions.get('torch')}, {measured.date}, {measured.settings}"]
    lines.append(f"{'case':<46} {'stock us':>10} {'own us':>10} {'ratio':>6} {'interval':>15} {'of limit':>8}  served; note")
    for row in measured.rows:
        of_limit = f"{row.limit_ms / row.autokern_ms:8.0%}" if row.limit_ms else " " * 8
        interval = f"{row.ratio_low:6.2f} - {row.ratio_high or 0:6.2f}"
        times = f"{row.stock_ms * 1000:10.1f} {row.autokern_ms * 1000:10.1f} {row.ratio:6.2f} {interval:>15} {of_limit}"
        lines.append(f"{row.case:<46} {times}  {row.served}; {row.note or ''}")
    return lines


if __name__ == "__main__":
    main()
