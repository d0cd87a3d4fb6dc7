"""Everything that a GPU is needed for, in one bounded call: ``python -m benchmarks.gpu_session --out FOLDER``.

Stages, each a process of its own with a time limit: `build` the extension; `probe` (does the device work in the runner's box,
which compilers are there); the `tests` that are marked `cuda`; the search's `throughput`; `suite` (`benchmarks.suite` over
`--set`), `models`, `kernelbench` and `overhead` (the benchmarks of those names); `demo`. `--stages` chooses among them,
`--minutes suite=5,models=3` gives stages other limits, `--part i/n` goes to those that have parts. What is known so far is on
disk after every step, in `FOLDER/STAGE.json` (the set `headline` has a file of its own); all output is in
`FOLDER/session.log`, the end of each stage's is printed. Put files of an earlier call into FOLDER, and suite and models add to
them.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import kernelbench_problems

STAGES = ("build", "probe", "tests", "throughput", "suite", "models", "kernelbench", "overhead", "demo")
# Seconds that a stage may take at most; what is left of the whole call bounds it too.
LIMITS = {
    "build": 240.0, "probe": 90.0, "tests": 240.0, "throughput": 120.0, "suite": 480.0, "models": 480.0, "kernelbench": 480.0,
    "overhead": 120.0, "demo": 240.0,
}  # fmt: skip
_RESERVE_S = 10.0
_ENDS_ITSELF_S = 15.0  # how much earlier than it is killed a stage is asked to end
_SHOWN_LINES = {"build": 3, "probe": 20, "tests": 25, "throughput": 10, "suite": 60, "overhead": 25}


class Session:
    """The stages of one call. `limit_s` bounds all of them together; `out` gets their log."""

    def __init__(self, out: Path, limit_s: float, limits: dict[str, float]) -> None:
        self.out = out
        self._limits = limits
        self._ends = time.monotonic() + limit_s
        self.lines: list[str] = []

    def left(self) -> float:
        """Seconds until the last stage must have ended."""
        return self._ends - time.monotonic() - _RESERVE_S

    def limit_s(self, stage: str) -> float:
        """Seconds that a stage may take if it begins now."""
        return min(self._limits[stage], self.left())

    def run(self, stage: str, command: Sequence[str]) -> bool:
        """Run a stage, its output to the log, and show its end. Whether it ended well, and in time."""
        limit_s = self.limit_s(stage)
        if limit_s < 5:
            self.lines.append(f"{stage:<11} not run: the call's time is up")
            return False
        began = time.monotonic()
        with open(self.out / "session.log", "ab") as log:
            start = log.tell()
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = None
        words = "ran out of its time" if code is None else "ended well" if code == 0 else f"ended with code {code}"
        self.lines.append(f"{stage:<11} {words} after {time.monotonic() - began:.0f} s")
        said = (self.out / "session.log").read_bytes()[start:].decode(errors="replace")
        shown = said.splitlines()[-_SHOWN_LINES.get(stage, 30) :]
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
    options.store = options.store or Path(tempfile.mkdtemp(prefix="autokern-session-"))  # one for all stages
    session = Session(options.out, options.limit, options.minutes)
    for stage in [stage for stage in STAGES if stage in options.stages.split(",")]:
        ends_itself_s = max(1.0, session.limit_s(stage) - _ENDS_ITSELF_S)
        session.run(stage, command_of(stage, options, ends_itself_s))
    print("\n".join(["", *session.lines]), flush=True)


def command_of(stage: str, options: argparse.Namespace, limit_s: float) -> list[str]:
    """The process of a stage. Those that know how end by themselves after `limit_s`, with their files whole."""
    python, out, limit = [sys.executable, "-m"], options.out, ["--limit", f"{limit_s:.0f}"]
    weak = ["--allow-weak-box"] if options.allow_weak_box else []
    store = ["--store", str(options.store)]
    file = "headline" if stage == "suite" and options.set == "headline" else stage
    json, calls = ["--json", str(out / f"{file}.json")], ["--set", options.set, "--only", options.only]
    match stage:
        case "build":
            return [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        case "tests":
            selected = ["-k", options.k] if options.k else []
            return [*python, "pytest", "-q", "-m", "cuda", "-p", "no:cacheprovider", *selected, *options.tests.split()]
        case "suite":
            how = ["--part", options.part, "--budget", str(options.budget), "--peers", options.peers, *json]
            how += ["--trials", str(out / "trials.json"), *(["--no-search"] if options.no_search else [])]
            return [*python, "benchmarks.suite", *calls, *how, *limit, *store, *weak]
        case "models":
            how = ["--part", options.part, "--budget", str(options.model_budget / 60), "--seconds", "8", *json]
            return [*python, "benchmarks.models", *how, *(["--peers"] if options.peers else []), *limit, *store, *weak]
        case "kernelbench":
            problems = Path(tempfile.mkdtemp(prefix="autokern-problems-"))
            kernelbench_problems.write(problems, "current")
            how = ["--device", "cuda", "--modes", "default,max-autotune-no-cudagraphs", "--part", options.part]
            how += ["--budget", str(options.budget), "--limit-s", "180", "--out", str(out / "kernelbench.json")]
            return [*python, "benchmarks.kernelbench", str(problems), *how, *limit, *store, *weak]
        case "overhead":
            return [*python, "benchmarks.overhead", *json, *limit, *weak]
        case "demo":
            return [*python, "torch_autokern.cli.main", "demo", *json, *weak]
    return [*python, "benchmarks.gpu_session", "--child", stage, "--out", str(out), *calls, *limit, *weak]


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the log and results")
    parser.add_argument("--stages", default="build,probe,tests,throughput,suite", help=f"of {','.join(STAGES)}")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--minutes", type=limits_of, default=LIMITS, help="limits of stages, such as suite=5,models=3.5")
    parser.add_argument("--tests", default="tests", help="paths of tests, separated by spaces")
    parser.add_argument("-k", default="", help="only tests whose names match, as pytest's -k")
    parser.add_argument("--set", default="headline", help="which calls (benchmarks/shapes.py), commas between")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th key, model and problem, from the i-th")
    parser.add_argument("--peers", default="", help="other libraries to time (benchmarks/peers.py), commas between")
    parser.add_argument("--no-search", action="store_true", help="let the suite measure what the store holds")
    parser.add_argument("--only", default="", help="only cases whose name contains one of these, separated by ;")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the search of each key")
    parser.add_argument("--model-budget", type=float, default=90.0, help="seconds for the search of each model")
    parser.add_argument("--store", type=Path, default=None, help="keep kernels here (default: a fresh temporary folder)")
    parser.add_argument("--allow-weak-box", action="store_true", help="judge kernels although the box is weak here")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def limits_of(words: str) -> dict[str, float]:
    """The limits in seconds, those of "suite=5,models=3.5" (minutes) in the place of the usual ones.

    Raises:
        ValueError: not of this form, or no stage.
    """
    pairs = [word.partition("=") for word in words.split(",")]
    unknown = [name for name, _, _ in pairs if name not in LIMITS]
    if unknown:
        raise ValueError(f"no stage is called {', '.join(unknown)}")
    return LIMITS | {name: 60 * float(minutes) for name, _, minutes in pairs}


if __name__ == "__main__":
    main()
