"""How many built-in candidates a minute are built and screened: this machine alone, and a Ray cluster with two builders.

    python -m benchmarks.search_engines --json benchmarks/results/search_engines.json

Both engines get the same candidates in the same order, by turns; what starts once in a run (workers, the process that screens)
starts before the clock does. Without `--address` a cluster of two CPUs starts on this machine and ends with the command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from torch_autokern.judge.outcome import Accuracy, Refusal
from torch_autokern.ops import SPECS
from torch_autokern.report.device import describe_device, utc_date, versions
from torch_autokern.runtime.target import local_target
from torch_autokern.search import templates
from torch_autokern.search.engine import Engine, LocalEngine
from torch_autokern.search.ray_engine import RayEngine

_START_S = 90.0


@contextlib.contextmanager
def own_cluster(*, python_path: tuple[str, ...] = ()) -> Iterator[str]:
    """The address of a cluster of this machine with two CPUs and 100 MB of object store, in a home folder of its own.

    `python_path`: further folders that workers import from.

    Raises:
        RuntimeError: it does not start; says the end of its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = (str(Path(__file__).parents[1]), *python_path, os.environ.get("PYTHONPATH", ""))
    # Sockets live in the folder, and their paths may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="akray", dir="/tmp") as home, open(f"{home}/log", "wb") as log:
        environment = {
            **os.environ, "HOME": home, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        }  # fmt: skip
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}", "--num-cpus=2",
            "--num-gpus=0", f"--object-store-memory={100 << 20}", "--include-dashboard=false", f"--temp-dir={home}/r",
            "--node-ip-address=127.0.0.1",
        ]  # fmt: skip
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_until_it_answers(head, Path(home) / "log")
            yield f"127.0.0.1:{port}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(head.pid, signal.SIGTERM)
            try:
                head.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(head.pid, signal.SIGKILL)
                head.wait(10)


def _wait_until_it_answers(head: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _START_S
    while "Ray runtime started" not in (words := log.read_text(errors="replace")):
        if head.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the cluster did not start; its log ends with:\n{words[-2000:]}")
        time.sleep(0.2)


def screened_a_minute(engine: Engine, rows: int, width: int) -> dict[str, float]:
    """Build all candidates of a float32 softmax over the last dimension of (rows, width), then screen those that built."""
    key = SPECS["_softmax"].key([torch.randn(rows, width)], {"dim": 1, "half_to_float": False})
    target = local_target(threads=torch.get_num_threads())
    candidates = list(templates.propose(key, target))
    engine.toolchain("cpu")
    engine.ceiling(key, target)
    (_, first) = next(iter(engine.build(candidates[:1], target, key)))
    if not isinstance(first, Refusal):
        engine.screen(first, key, target, Accuracy())  # starts the process that screens
    began = time.perf_counter()
    built = {one.candidate_id: found for one, found in engine.build(candidates, target, key)}
    build_seconds = time.perf_counter() - began
    for candidate in candidates:
        artifact = built[candidate.candidate_id]
        if not isinstance(artifact, Refusal):
            engine.screen(artifact, key, target, Accuracy())
    seconds = time.perf_counter() - began
    engine.close()
    return {
        "candidates": len(candidates), "build_seconds": round(build_seconds, 2), "seconds": round(seconds, 2),
        "candidates_a_minute": round(60 * len(candidates) / seconds, 1),
    }  # fmt: skip


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="a running cluster's head (default: start one here)")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write there, too")
    words = parser.parse_args()
    turns: dict[str, list[dict[str, float]]] = {"local": [], "ray": []}
    with contextlib.nullcontext(words.address) if words.address else own_cluster() as address:
        for _ in range(words.turns):
            turns["local"].append(screened_a_minute(LocalEngine(), words.rows, words.width))
            turns["ray"].append(screened_a_minute(RayEngine(address, builders=2), words.rows, words.width))
    rates = {name: statistics.median(turn["candidates_a_minute"] for turn in found) for name, found in turns.items()}
    found = {
        "device": describe_device(), "versions": versions() | {"ray": metadata.version("ray")}, "date": utc_date(),
        "task": f"softmax ({words.rows}, {words.width}) float32 over the last dimension", "builders": 2,
        "candidates_a_minute": rates, "ray_over_local": round(rates["ray"] / rates["local"], 3), "turns": turns,
    }  # fmt: skip
    text = json.dumps(found, indent=1)
    print(text)
    if words.json:
        words.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
