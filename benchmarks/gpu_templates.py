"""The built-in GPU templates beside eager stock: ``python -m benchmarks.gpu_templates --seconds 500 --json FILE``.

FILE is a measurement, as `benchmarks/results` holds them; `--candidates FILE` gets the time of everything that was tried.

Every candidate of every case is compiled (NVRTC, one process a core), checked against float64 by the judge's limits, screened,
and the quickest are timed against stock in the same process and the same minutes (`gpu_template_worker`). Results are printed
and written as they come. `--only WORD` picks cases, `--part i/n` every n-th of them.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu_cases import CASES
from torch_autokern.build.candidate import Candidate
from torch_autokern.build.compile_cuda import compile_cuda
from torch_autokern.errors import BuildError
from torch_autokern.report.device import describe_device, utc_date, versions
from torch_autokern.report.measurement import Measurement, Row
from torch_autokern.runtime.plan import encode_plan
from torch_autokern.search.templates import propose
from torch_autokern.store.key import Target

# A worker that says nothing for so long hangs: the candidates of that template are left out, and the rest goes on. A reference
# in double takes ten seconds at most.
SILENCE_S = 30
H200 = Target("cuda", "NVIDIA H200", "sm_90a", 0)


def build(folder: Path, wanted: list[int]) -> dict[int, str]:
    """Compile all candidates of the wanted cases into folders by number; what the compiler refused, in words."""
    jobs: list[tuple[int, int, Candidate]] = []
    for case in wanted:
        (folder / str(case)).mkdir()
        candidates = propose(CASES[case].key, H200)
        jobs += [(case, number, candidate) for number, candidate in enumerate(candidates)]

    def one(job: tuple[int, int, Candidate]) -> dict[str, object] | str:
        case, number, candidate = job
        try:
            artifact = compile_cuda(candidate, H200.arch, allow_weak_box=True)
        except BuildError as error:
            return f"{CASES[case].name}: {candidate.parameters}: {error}"[:400]
        (folder / str(case) / f"{number}.cubin").write_bytes(artifact.binary)
        (folder / str(case) / f"{number}.json").write_bytes(encode_plan(candidate.plan))
        spilled = sum(max(0, resources.spilled_bytes) for resources in artifact.resources.values())
        words = {**candidate.parameters, "spilled_bytes": spilled} if spilled else dict(candidate.parameters)
        return {"number": number, "parameters": words, "template": candidate.template}

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(one, jobs))
    for case in wanted:
        index = [entry for (owner, _, _), entry in zip(jobs, made, strict=True) if owner == case and isinstance(entry, dict)]
        (folder / str(case) / "index.json").write_text(json.dumps(index))
    return {i: entry for i, entry in enumerate(made) if isinstance(entry, str)}


def forward(stream: IO[str], lines: queue.Queue[str]) -> None:
    """Every line of a worker, then an empty one."""
    for line in stream:
        lines.put(line)
    lines.put("")


def row(result: dict[str, object]) -> str:
    """One line of the table."""
    best = result.get("best") or {}
    name = str(result["case"])
    if not isinstance(best, dict) or not best:
        return f"{name:<46} no candidate is right: {result.get('failed', 'see JSON')}"
    ours, limit = float(best["ms"]), float(str(result["limit_ms"]))
    parameters = " ".join(f"{key}={value}" for key, value in best["parameters"].items())
    return (
        f"{name:<46} {float(best['stock_ms']):9.4f} {ours:9.4f} {float(best['ratio']):7.2f} {limit / ours:6.0%}"
        f" {float(str(result['predicted_ms'])):9.4f}  {best['template']} {parameters}"
    )


def measured(result: dict[str, Any]) -> Row:
    """One case in the form that every measuring command writes; stock on both sides where no candidate is right and faster."""
    case, best, limit, stock_error = result["case"], result["best"], result["limit_ms"], result["stock_worst"]

    def stock(stock_ms: float, why: str, note: str | None = None) -> Row:
        return Row(case, "stock", stock_ms, stock_ms, 1.0, 1.0, stock_error, stock_error, why, limit_ms=limit, note=note)

    if not best:
        return stock(result["stock_ms"], "no candidate is right" if result["tried"] else "no candidate")
    parameters = ", ".join(f"{key}={value}" for key, value in best["parameters"].items())
    note = f"{best['template']}({parameters}); predicted {result['predicted_ms']} ms"
    ours, theirs = best["ms"], best["stock_ms"]
    if best["ratio"] <= 1.0:
        return stock(theirs, "stock is faster", f"{note}, took {ours:.4g} ms")
    low, high = best["ratio_low"], best["ratio_high"]
    return Row(
        case, "stock", theirs, ours, best["ratio"], low, best["worst"], stock_error, True,
        ratio_high=high, limit_ms=limit, note=note,
    )  # fmt: skip


@dataclass(frozen=True)
class Files:
    """Where results go, if anywhere; `header` is for the file of candidates."""

    measurement: Path | None
    candidates: Path | None
    header: dict[str, object]

    def save(self, results: list[dict[str, Any]]) -> None:
        """Write all that is known so far."""
        if self.candidates:
            self.candidates.write_text(json.dumps({**self.header, "results": results}, indent=1) + "\n")
        if self.measurement:
            rows = tuple(measured(result) for result in results if "stock_ms" in result)
            how = {"timing": "a captured graph of many calls over inputs of twice the L2, both sides in turn"}
            Measurement(describe_device("cuda"), versions(), utc_date(), rows, settings=how).save(self.measurement)


def of_same_template(folder: Path, left: list[int], case: int, candidate: int) -> list[str]:
    """CASE:CANDIDATE of everything that the template of a hanging candidate made."""
    entries = {number: json.loads((folder / str(number) / "index.json").read_text()) for number in left}
    template = next(entry["template"] for entry in entries[case] if entry["number"] == candidate)
    return [f"{n}:{entry['number']}" for n in left for entry in entries[n] if entry["template"] == template]


def measure(folder: Path, wanted: list[int], stop: float, files: Files) -> None:
    """Run workers until all cases are measured or time is up; a worker that ends early is replaced."""
    left = list(wanted)
    skip: list[str] = []
    results: list[dict[str, Any]] = []
    while left and time.monotonic() < stop:
        command = [
            sys.executable,
            "-m",
            "benchmarks.gpu_template_worker",
            str(folder),
            "--cases",
            *map(str, left),
            "--skip",
            *skip,
        ]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        trying: list[object] = []
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=forward, args=(worker.stdout, lines), daemon=True).start()
        while time.monotonic() < stop:
            try:
                line = lines.get(timeout=max(0.1, min(SILENCE_S, stop - time.monotonic())))
            except queue.Empty:
                break
            if not line:
                break
            said = json.loads(line)
            trying = said.get("trying", [])
            if "result" in said:
                left.remove(said["number"])
                results.append(said["result"])
                print(row(said["result"]), flush=True)
                files.save(results)
        worker.kill()
        worker.wait()
        if not left or time.monotonic() >= stop:
            break
        if trying:
            skip += of_same_template(folder, left, left[0], int(str(trying[1])))
            print(
                f"  candidate {trying[1]} of {trying[0]} ended the process or hung; going on without its template", flush=True
            )
        else:
            print(f"  {CASES[left.pop(0)].name}: the process ended before the first candidate", flush=True)
    if left:
        print(f"not measured, time is up: {', '.join(CASES[number].name for number in left)}")


def main() -> None:
    """Build, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name has one of these in it")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th case, from the i-th")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--candidates", type=Path, default=None, help="a file for the time of everything that was tried")
    parser.add_argument("--build-only", action="store_true", help="compile and stop: needs no GPU")
    options = parser.parse_args()
    started = time.monotonic()
    part, parts = map(int, options.part.split("/"))
    wanted = [number for number, case in enumerate(CASES) if any(word in case.name for word in options.only)][part - 1 :: parts]
    with tempfile.TemporaryDirectory(prefix="autokern-bench-") as place:
        folder = Path(place)
        refused = build(folder, wanted)
        built = sum(len(list((folder / str(number)).glob("*.cubin"))) for number in wanted)
        print(f"{built} candidates of {len(wanted)} cases built in {time.monotonic() - started:.0f} s; {len(refused)} refused")
        for words in refused.values():
            print(f"  {words}")
        if options.build_only:
            return
        header: dict[str, object] = {"date": utc_date(), "versions": versions(), "refused": list(refused.values())}
        print(f"{'case':<46} {'stock ms':>9} {'best ms':>9} {'ratio':>7} {'limit':>6} {'predicted':>9}  best")
        measure(folder, wanted, started + options.seconds, Files(options.json, options.candidates, header))


if __name__ == "__main__":
    main()
