"""One KernelBench problem in a process of its own: the file, and a solution's, are executed here, outside of a box.

Started by `benchmarks.kernelbench`; the answer is the last line of standard output. Compilers need folders to write to, so this
process has no box: run it on files that you would run anyway.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch

import torch_autokern as autokern
from torch_autokern.errors import AutokernError
from torch_autokern.judge.accuracy import Task, evaluate_with_envelope, limits_for
from torch_autokern.judge.device import finish, generator_on
from torch_autokern.judge.inputs import check_supported, families_for, make_inputs
from torch_autokern.judge.outcome import Accuracy
from torch_autokern.judge.vacuity import probes
from torch_autokern.ops import spec_of
from torch_autokern.runtime.function import Function
from torch_autokern.store.key import KernelKey

TRIALS = 5  # of the suite's rule
JUDGED_SEEDS = 2  # of ours, for each input family
_ROUNDS, _BRACKET_S = 15, 0.02


class Row(msgspec.Struct, frozen=True):
    """One problem. Times are medians in us; `ratio` is the best baseline's over ours. `suite` says whether the suite's rule
    (allclose with atol = rtol) passes, by tolerance; `judge` is "passes" or why not. `hits`: calls that kernels served."""

    problem: str
    times_us: dict[str, float]
    ratio: float
    suite: dict[str, bool]
    judge: str
    hits: int
    error: str = ""


class Search(msgspec.Struct, frozen=True):
    """How long kernels are searched for the ops of a problem, in seconds, and whether a weak box will do."""

    budget_s: float = 0.0
    allow_weak_box: bool = False


def load(path: Path) -> ModuleType:
    """Execute a file."""
    spec = importlib.util.spec_from_file_location(f"problem_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(path: Path, solution: Path | None, device: str, modes: Sequence[str], search: Search) -> Row:
    """Check by the suite's rule and by ours, then time eager, compiled and own calls in random order, round by round. Where
    ours is the model itself, kernels for the ops that it calls are searched first, if there is a budget for that."""
    problem = load(path)
    model = _made(problem.Model, problem, device)
    if solution is None and search.budget_s > 0:
        _search(model, problem, device, search)
    ours: Callable[..., Any]
    if solution is None:
        # The whole model as one op, and its own ops where there is no kernel of the whole.
        ours = autokern.optimize(autokern.kernel(_made(problem.Model, problem, device)))
    else:
        ours = _made(load(solution).ModelNew, problem, device)
    with torch.no_grad():
        suite = _suite(problem, model, ours, device)
        verdict = _judge(problem, path, model, ours, device)
        inputs = _inputs(problem, 0, device)
        before = _hits()
        ours(*inputs)
        hits = _hits() - before
        sides = {"eager": model, "ours": ours}
        for mode in modes:
            torch._dynamo.reset()  # or a second shape turns sizes dynamic, and the baseline slow
            compiled = torch.compile(model, mode=None if mode == "default" else mode, dynamic=False)
            sides[f"compile {mode}"] = compiled
            compiled(*inputs)
        times = _times(sides, inputs, torch.device(device))
    best = min(value for name, value in times.items() if name != "ours")
    return Row(path.stem, times, best / times["ours"], suite, verdict, hits)


def _search(model: Any, problem: ModuleType, device: str, search: Search) -> None:
    with torch.no_grad(), autokern.record() as recording:
        model(*_inputs(problem, 0, device))
    workload = recording.workload()
    if not workload.entries:
        return
    if device == "cuda":
        torch.cuda.empty_cache()  # the judge's processes share the card
    autokern.warm(workload, budget=search.budget_s / 60, allow_weak_box=search.allow_weak_box)


def _made(kind: type[torch.nn.Module], problem: ModuleType, device: str) -> Any:
    torch.manual_seed(42)  # so that both have the same parameters
    with torch.device(device):
        return kind(*problem.get_init_inputs()).to(device)


def _inputs(problem: ModuleType, seed: int, device: str) -> list[Any]:
    torch.manual_seed(seed)
    with torch.device(device):  # a CPU draws six gigabytes in ten seconds, and every trial wants its own
        drawn = problem.get_inputs()
    return [t.to(device) if isinstance(t, torch.Tensor) else t for t in drawn]


def _hits() -> int:
    return sum(op.hits for op in autokern.stats().ops)


def _suite(problem: ModuleType, model: Any, ours: Any, device: str) -> dict[str, bool]:
    passed = {"1e-2": True, "1e-4": True}
    for trial in range(TRIALS):
        inputs = _inputs(problem, 1000 + trial, device)
        right, got = model(*inputs), ours(*inputs)
        for name in passed:
            same = right.shape == got.shape and torch.allclose(right, got, atol=float(name), rtol=float(name))
            passed[name] = passed[name] and bool(same)
    return passed


def _judge(problem: ModuleType, path: Path, model: Any, ours: Any, device: str) -> str:
    """The judge's rule for values, on its own input families: of a Python solution nothing else can be judged."""
    inputs = _inputs(problem, 0, device)
    try:
        key = Function(type(model).forward, f"kernelbench.{path.stem}", model).key(*inputs)
    except AutokernError as error:
        return f"not judged: {error}"
    unsupported = check_supported(key)
    if unsupported is not None:
        return f"not judged: {unsupported}"
    task = Task(spec_of(key), key, Accuracy())
    own = [*ours.parameters(), *ours.buffers()]
    if len(own) != len(key.tensors) - len(inputs):
        return "not judged: its parameters are not the model's"
    saved = [t.clone() for t in own]
    passing: set[str] | None = None
    try:
        for family in families_for(task.spec, key):
            for seed in range(JUDGED_SEEDS):
                found, alive = _trial(task, key, family, seed, ours, own, len(inputs))
                if found:
                    return f"refused: {family.value}: {found}"
                passing = alive if passing is None else passing & alive
    finally:
        for tensor, value in zip(own, saved, strict=True):
            tensor.copy_(value)
    return f"refused: the task is vacuous, {sorted(passing)[0]!r} passes" if passing else "passes"


def _trial(
    task: Task, key: KernelKey, family: Any, seed: int, ours: Any, own: Sequence[torch.Tensor], count: int
) -> tuple[str, set[str]]:
    """What is wrong with a result ("" when nothing is), and the probes that pass."""
    generator = generator_on(torch.device(key.device_type), seed)
    tensors = make_inputs(task.spec, key, family, generator, "aligned").tensors
    given = [t for t in tensors if t is not None]
    for tensor, value in zip(own, given[count:], strict=True):
        tensor.copy_(value)
    made = ours(*[t.clone() for t in given[:count]])
    results = (made,) if isinstance(made, torch.Tensor) else tuple(made)
    stock = task.spec.stock(tensors, key.scalars)
    if [(r.shape, r.dtype) for r in results] != [(s.shape, s.dtype) for s in stock]:
        return "results have other shapes or dtypes than the model's", set()
    nonsense = probes(task, tensors, stock)
    scores, pools = evaluate_with_envelope(task, family, tensors, [results, *nonsense.values()], stock, generator)
    words = [""] * (1 + len(nonsense))
    for index, score in enumerate(scores):
        limit = limits_for(task, index, family, stock[index].numel(), pools[index], score.ulp)
        for number, tally in enumerate(score.tallies):
            if tally.nonfinite is not None or tally.nonzero is not None:
                words[number] = words[number] or "NaN, infinity or a value where there is none"
            elif tally.pool.largest > limit.largest:
                words[number] = words[number] or f"largest error {tally.pool.largest:.3g}, allowed {limit.largest:.3g}"
            elif tally.pool.rms > limit.rms:
                words[number] = words[number] or f"rms error {tally.pool.rms:.3g}, allowed {limit.rms:.3g}"
    return words[0], {name for name, why in zip(nonsense, words[1:], strict=True) if not why}


def _times(sides: dict[str, Any], inputs: list[Any], device: torch.device) -> dict[str, float]:
    counts, samples = {}, {name: list[float]() for name in sides}
    for name, call in sides.items():
        counts[name] = max(1, int(_BRACKET_S / max(_bracket(call, inputs, 1, device), 1e-6)))
    names = list(sides)
    for _ in range(_ROUNDS):
        random.shuffle(names)
        for name in names:
            samples[name].append(_bracket(sides[name], inputs, counts[name], device) / counts[name] * 1e6)
    return {name: statistics.median(values) for name, values in samples.items()}


def _bracket(call: Any, inputs: list[Any], count: int, device: torch.device) -> float:
    call(*inputs)
    finish(device)
    begin = time.perf_counter()
    for _ in range(count):
        call(*inputs)
    finish(device)
    return time.perf_counter() - begin


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("problem", type=Path)
    parser.add_argument("--solution", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--modes", default="default,max-autotune")
    parser.add_argument("--budget", type=float, default=0.0)
    parser.add_argument("--allow-weak-box", action="store_true")
    options = parser.parse_args()
    modes = [mode for mode in options.modes.split(",") if mode]
    try:
        search = Search(options.budget, options.allow_weak_box)
        row = measure(options.problem, options.solution, options.device, modes, search)
    except Exception as error:  # noqa: BLE001 - somebody's code
        row = Row(options.problem.stem, {}, 0.0, {}, "not judged", 0, f"{type(error).__name__}: {error}"[:500])
    print("\n" + msgspec.json.encode(row).decode(), flush=True)


if __name__ == "__main__":
    main()
