"""Whole models through `autokern.optimize`, end to end: ``python -m benchmarks.models --device cpu --json FILE``.

For each model: stock's step is recorded, the store warmed with what it asked for (`--budget` minutes; `--store` keeps the
kernels between calls), the module optimised, and both timed interleaved in one process, with `torch.compile` beside them
(`--peers`). `error` is the largest elementwise error of outputs (training: of every gradient too) against the same model in
float64, over the root mean square of that tensor. `--part i/n` takes every n-th model, `--json` adds to a file that is there
already, and `--limit` bounds the call: a model whose turn comes too late is left out, and said.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.model_cases import CASES, Inputs, ModelCase, Step
from benchmarks.parts import merged, part_of, with_best_peer
from torch_autokern import api
from torch_autokern.cli.progress import progress_bar
from torch_autokern.errors import AutokernError
from torch_autokern.judge.device import finish
from torch_autokern.report.device import describe_device, utc_date, versions
from torch_autokern.report.measurement import Measurement, Row
from torch_autokern.report.paired import Side, paired_times
from torch_autokern.report.tables import measurement_table

_BRACKET_US = 20_000.0
_COMPILE_S = 60.0  # for a model, by torch.compile


def to_device(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Token ids stay whole numbers."""
    return {name: t.to(device, dtype if t.is_floating_point() else t.dtype) for name, t in inputs.items()}


def largest_error(mine: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """Largest elementwise error over the root mean square of its tensor."""
    worst = 0.0
    for own, right in zip(mine, truth, strict=True):
        size = right.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
        worst = max(worst, float((own.double() - right).abs().max() / size))
    return worst


def compiled_ms(case: ModelCase, model: nn.Module, inputs: Inputs, seconds: float, device: torch.device) -> float:
    """Median time of a step of the compiled model, compiled for these very shapes."""
    torch._dynamo.reset()
    step = Step(case, torch.compile(model, dynamic=False), inputs)  # type: ignore[arg-type]
    for _ in range(4):
        step()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 5:
        finish(device)
        began = time.perf_counter()
        step()
        finish(device)
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def hits() -> int:
    """Calls served so far, of every op."""
    return sum(op.hits for op in api.stats().ops)


def measure(case: ModelCase, options: argparse.Namespace, left_s: float) -> Row:
    """Record, warm, optimise, compare with float64, time. The search gets what `left_s` leaves it."""
    began = time.monotonic()
    device = torch.device(options.device)
    torch.manual_seed(0)
    model = case.make().to(device, case.dtype).train(case.training)
    inputs = to_device(case.inputs(), device, case.dtype)
    exact = Step(case, copy.deepcopy(model).double(), to_device(inputs, device, torch.float64)).outcome()
    stock, own = Step(case, copy.deepcopy(model), inputs), Step(case, model, inputs)
    stock_error = largest_error(stock.outcome(), exact)  # before a step of the optimizer moves the weights
    with api.record() as recording:
        stock()
        finish(device)
    workload = recording.workload()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the judge's processes share the card
    left = left_s - (time.monotonic() - began) - timing_s(options)
    with progress_bar() as show:
        report = api.warm(
            workload, budget=min(options.budget, max(left, 1.0) / 60), on_event=show, allow_weak_box=options.allow_weak_box
        )
    print(report, flush=True)
    api.optimize(own.model)
    before = hits()
    error = largest_error(own.outcome(), exact)
    served = hits() - before
    del exact
    times = paired_times(
        Side(stock), Side(own), options.seconds, min_blocks=4, bracket_us=_BRACKET_US, wait=lambda: finish(device)
    )
    api.restore(own.model)
    peers, note = {}, f"{served} calls of a step served"
    if options.peers:
        try:
            peers["torch.compile"] = compiled_ms(case, copy.deepcopy(stock.model), inputs, options.seconds / 4, device)
        except Exception as failure:  # noqa: BLE001 - a compiler that fails is a result, and ours is known
            note += f"; torch.compile: {type(failure).__name__}: {(str(failure).splitlines() or [''])[0][:160]}"
    row = Row(
        case.name, "stock", times.stock_ms, times.own_ms, times.interval.ratio, times.interval.low, error, stock_error,
        True if served else "nothing was won",
        ratio_high=times.interval.high, peers_ms=peers, note=note,
    )  # fmt: skip
    return with_best_peer(row)


def timing_s(options: argparse.Namespace) -> float:
    """What a model takes beside its search: timing, the peer's compiler, float64."""
    return float(options.seconds * 1.5 + (_COMPILE_S if options.peers else 0.0) + 15.0)


def main() -> None:
    """Measure the chosen models, one after the other; every result is on disk before the next one starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", default=[""], help="models whose name has one of these in it")
    parser.add_argument("--part", default="1/1", help="i/n: every n-th model, from the i-th")
    parser.add_argument("--budget", type=float, default=5.0, help="minutes of search a model")
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing a model")
    parser.add_argument("--store", type=Path, default=None, help="keep kernels here (default: your own store)")
    parser.add_argument("--peers", action="store_true", help="time torch.compile too")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for the whole call")
    parser.add_argument("--allow-weak-box", action="store_true", help="judge kernels although the box is weak here")
    parser.add_argument("--json", type=Path, default=None, help="add the rows to this file")
    options = parser.parse_args()
    ends = time.monotonic() + options.limit
    if options.store is not None:
        options.store.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.environ["AUTOKERN_STORE"] = str(options.store.absolute())
    there = [case for case in CASES if options.device in case.devices and any(word in case.name for word in options.only)]
    rows: list[Row] = []
    left_out: list[str] = []
    settings = {"threads": str(torch.get_num_threads()), "allocator": "default", "budget_minutes": f"{options.budget:g}"}

    def measured() -> Measurement:
        return Measurement(describe_device(options.device), versions(), utc_date(), tuple(rows), settings=settings)

    merged(measured(), options.json)  # a file of another device is refused before the work is done
    for case in part_of(there, options.part):
        print(f"{case.name}", flush=True)
        left_s = ends - time.monotonic()
        if left_s < timing_s(options) + 15.0:
            left_out.append(f"{case.name}: not measured, the call's time is up")
            continue
        try:
            rows.append(measure(case, options, left_s))
        except (AutokernError, RuntimeError, ImportError) as error:
            left_out.append(f"{case.name}: {type(error).__name__}: {str(error)[:300]}")
            print(left_out[-1], flush=True)
            continue
        finally:
            gc.collect()  # steps and their optimizers are cycles
            if options.device == "cuda":
                torch.cuda.empty_cache()
        if options.json is not None:
            merged(measured(), options.json).save(options.json)
    if rows:
        from rich.console import Console

        Console(width=140).print(measurement_table(measured()))
    print("\n".join(left_out), flush=True)
    raise SystemExit(1 if left_out else 0)


if __name__ == "__main__":
    main()
