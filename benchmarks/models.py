"""Whole models through `autokern.optimize`, end to end: ``python -m benchmarks.models --device cpu --json FILE``.

For each model: stock's step is recorded, the store warmed with what it asked for (`--budget` minutes; `--store` keeps the
kernels between calls), the module optimised, and both timed interleaved in one process, with `torch.compile` beside them
(`--peers`). `error` is the largest elementwise error of outputs (training: of every gradient too) against the same model in
float64, over the root mean square of that tensor. `--part i/n` takes every n-th model and `--json` merges into a file that is
there already.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from pathlib import Path

import msgspec
import torch
from torch import nn

from benchmarks.model_cases import CASES, Inputs, ModelCase, Step
from torch_autokern import api
from torch_autokern.cli.progress import progress_bar
from torch_autokern.judge.device import finish
from torch_autokern.report.device import describe_device, utc_date, versions
from torch_autokern.report.measurement import Measurement, Row, load_measurement
from torch_autokern.report.paired import Side, paired_times
from torch_autokern.report.tables import measurement_table

_BRACKET_US = 20_000.0


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


def measure(case: ModelCase, options: argparse.Namespace) -> Row:
    """Record, warm, optimise, compare with float64, time."""
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
    with progress_bar() as show:
        report = api.warm(workload, budget=options.budget, on_event=show, allow_weak_box=options.allow_weak_box)
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
    peer = compiled_ms(case, copy.deepcopy(stock.model), inputs, options.seconds / 4, device) if options.peers else None
    return Row(
        case.name, "stock", times.stock_ms, times.own_ms, times.interval.ratio, times.interval.low, error, stock_error,
        True if served else "nothing was won",
        ratio_high=times.interval.high, best_peer="torch.compile" if peer is not None else None, best_peer_ms=peer,
        note=f"{served} calls of a step served",
    )  # fmt: skip


def merged(rows: list[Row], path: Path | None) -> tuple[Row, ...]:
    """What the file holds of other models, and the new rows."""
    if path is None or not path.exists():
        return tuple(rows)
    new = {row.case for row in rows}
    return (*(row for row in load_measurement(path).rows if row.case not in new), *rows)


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
    parser.add_argument("--allow-weak-box", action="store_true")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    if options.store is not None:
        os.environ["AUTOKERN_STORE"] = str(options.store.absolute())
    part, parts = map(int, options.part.split("/"))
    there = [case for case in CASES if options.device in case.devices and any(word in case.name for word in options.only)]
    rows: list[Row] = []
    settings = {"threads": str(torch.get_num_threads()), "allocator": "default", "budget_minutes": f"{options.budget:g}"}
    for case in there[part - 1 :: parts]:
        print(f"{case.name}", flush=True)
        rows.append(measure(case, options))
        measurement = Measurement(describe_device(options.device), versions(), utc_date(), tuple(rows), settings=settings)
        if options.json is not None:
            msgspec.structs.replace(measurement, rows=merged(rows, options.json)).save(options.json)
    if rows:
        from rich.console import Console

        Console(width=140).print(measurement_table(measurement))


if __name__ == "__main__":
    main()
