"""How many built-in candidates a minute are built and screened: this machine alone, and a Ray cluster with two builders.

    ray start --head --num-cpus=2
    python -m benchmarks.search_engines --address auto

Both engines get the same candidates in the same order; workers start before the clock does. Prints one JSON value.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from torch_autokern.judge.outcome import Accuracy, Refusal
from torch_autokern.ops import SPECS
from torch_autokern.runtime.target import local_target
from torch_autokern.search import templates
from torch_autokern.search.engine import Engine, LocalEngine
from torch_autokern.search.ray_engine import RayEngine


def screened_a_minute(engine: Engine, rows: int, width: int) -> dict[str, object]:
    """Build all candidates of a float32 softmax over the last dimension of (rows, width), then screen those that built."""
    key = SPECS["_softmax"].key([torch.randn(rows, width)], {"dim": 1, "half_to_float": False})
    target = local_target(threads=torch.get_num_threads())
    candidates = list(templates.propose(key, target))
    engine.toolchain("cpu")
    engine.ceiling(key, target)  # starts the worker that measures
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
    parser.add_argument("--address", default="auto", help="the cluster's head")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=512)
    words = parser.parse_args()
    found = {
        "local": screened_a_minute(LocalEngine(), words.rows, words.width),
        "ray": screened_a_minute(RayEngine(words.address, builders=2), words.rows, words.width),
    }
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), **found}, indent=1))


if __name__ == "__main__":
    main()
