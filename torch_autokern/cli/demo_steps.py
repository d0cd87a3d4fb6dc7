"""The demo's two parts: a real model end to end, and the published shapes."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence

import torch

from torch_autokern import api
from torch_autokern.build.compile_cpp import find_compiler
from torch_autokern.cli import minilm, resident, shell
from torch_autokern.cli.progress import progress_bar
from torch_autokern.report.cases import PUBLISHED, case_name
from torch_autokern.report.keyrow import BoundCall, measure_key
from torch_autokern.report.measurement import ModelResult, Row
from torch_autokern.report.paired import PairedTimes, Side, paired_times
from torch_autokern.runtime.extension import extension
from torch_autokern.runtime.session import pool_limit_bytes
from torch_autokern.store.key import KernelKey
from torch_autokern.store.workload import Workload

# glibc serves blocks beyond 32 MiB from fresh pages whatever it has learned (DEFAULT_MMAP_THRESHOLD_MAX, malloc(3)).
FRESH_PAGES_BYTES = 32 << 20
_MIN_SHARE = 0.001


def check_ready() -> None:
    """Fail before any work where the demo cannot run.

    Raises:
        ExtensionError: no usable extension.
        ToolchainError: no compiler.
        InvalidInputError: a package of the extra `demo` is missing.
    """
    extension()
    find_compiler()
    minilm.model_folder()


def settings(quick: bool) -> dict[str, str]:
    """What changes times on this machine."""
    return {
        "threads": str(torch.get_num_threads()),
        "pool_mib": str(pool_limit_bytes() >> 20),
        "allocator": "default, except rows that say resident",
        "quick": str(quick).lower(),
    }


def model_part(budget_minutes: float, quick: bool) -> tuple[ModelResult, list[Row]]:
    """Stock, record, warm, optimise: the model's result, and a row for each key that takes time in it."""
    _step(1, "MiniLM-L6 with its real weights, stock")
    loaded = minilm.load(2 if quick else 8)
    stock_model = minilm.twin(loaded)
    count = sum(len(batch["input_ids"]) for batch in loaded.batches)
    stock_embeddings = minilm.embed(stock_model, loaded.batches)
    shell.say(f"      {count} sentences embedded, {minilm.BATCH} a batch, {minilm.TOKENS} tokens each")

    _step(2, "record: which kernels does it ask for")
    with api.record() as recording:
        minilm.embed(loaded.model, loaded.batches)
    workload = recording.workload()
    _say_workload(workload)

    _step(3, f"warm: search, prove and time kernels for them, at most {budget_minutes:g} minutes")
    _warm(workload, budget_minutes)

    _step(4, "optimise the model; time it against stock, interleaved")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", api.AutokernWarning)  # where nothing was won, the table says so
        model = api.optimize(loaded.model)
    own_embeddings = minilm.embed(model, loaded.batches)
    cosine = torch.nn.functional.cosine_similarity(stock_embeddings.double(), own_embeddings.double(), dim=1)
    result = _time_model(stock_model, model, loaded.batches, float(cosine.min()), quick)
    api.restore(model)
    keys = [entry.key for entry in workload.entries if workload.share(entry) >= _MIN_SHARE]
    return result, _rows(keys, quick)


def published_part(budget_minutes: float, quick: bool, measured: Sequence[Row]) -> list[Row]:
    """The published shapes: warm, then time with the default allocator (unless `measured` has that row), without the output
    pool, and with resident pages."""
    keys = [case.key() for case in PUBLISHED]
    if quick:
        keys = [key for key in keys if _output_bytes(key) <= FRESH_PAGES_BYTES]
    _step(5, "published shapes: " + ", ".join(case_name(key) for key in keys))
    with api.record() as recording:
        for key in keys:
            BoundCall(key)()
    _warm(recording.workload(), 2 * budget_minutes)

    _step(6, "time them: as a user meets them, without the output pool, and with resident pages on both sides")
    done = {row.case for row in measured}
    rows = []
    for key in keys:
        rows += _rows([key], quick) if case_name(key) not in done else []
        if _output_bytes(key) > FRESH_PAGES_BYTES:
            rows.append(_row_without_pool(key, quick))
        rows += resident.measure_in_child([key], _seconds(quick))
    return rows


def _rows(keys: Sequence[KernelKey], quick: bool) -> list[Row]:
    rows = []
    for key in keys:
        shell.say(f"      timing {case_name(key)}")
        rows.append(measure_key(key, api.enabled, _seconds(quick), pages="default"))
    return rows


def _row_without_pool(key: KernelKey, quick: bool) -> Row:
    native = extension()
    native.pool_empty()
    native.pool_set_limit(0)
    try:
        return measure_key(key, api.enabled, _seconds(quick), pages="default", note="output pool off")
    finally:
        native.pool_set_limit(pool_limit_bytes())


def _time_model(
    stock_model: torch.nn.Module, model: torch.nn.Module, batches: Sequence[minilm.Batch], min_cosine: float, quick: bool
) -> ModelResult:
    seconds = 4.0 if quick else 40.0
    times = _paired_model(stock_model, model, batches, seconds)
    native = extension()
    native.pool_empty()
    native.pool_set_limit(0)
    try:
        pool_off = _paired_model(stock_model, model, batches, seconds / 2)
    finally:
        native.pool_set_limit(pool_limit_bytes())
    return ModelResult(
        name="MiniLM-L6 (real weights, eager attention, batch 32 x 38 tokens)",
        stock_ms=times.stock_ms,
        autokern_ms=times.own_ms,
        ratio=times.interval.ratio,
        min_cosine=min_cosine,
        ratio_low=times.interval.low,
        ratio_high=times.interval.high,
        pool_off_ms=pool_off.own_ms,
        pool_off_ratio=pool_off.interval.ratio,
        pool_off_ratio_low=pool_off.interval.low,
        pool_off_ratio_high=pool_off.interval.high,
        note="attention is eager, so that its softmax is an op of its own; with sdpa only LayerNorm is served",
    )


def _paired_model(
    stock_model: torch.nn.Module, model: torch.nn.Module, batches: Sequence[minilm.Batch], seconds: float
) -> PairedTimes:
    return paired_times(Side(_Turns(stock_model, batches)), Side(_Turns(model, batches)), seconds, min_blocks=4)


class _Turns:
    """One forward of the next batch. A block calls each side twice, so both sides get the same batches in the same order."""

    def __init__(self, model: torch.nn.Module, batches: Sequence[minilm.Batch]) -> None:
        self._model = model
        self._turns = itertools.cycle([batch for batch in batches for _ in range(2)])

    def __call__(self) -> torch.Tensor:
        return minilm.embed(self._model, [next(self._turns)])


def _warm(workload: Workload, budget_minutes: float) -> None:
    with progress_bar() as show:
        report = api.warm(workload, budget=budget_minutes, on_event=show)
    shell.say(f"      {report}")


def _say_workload(workload: Workload) -> None:
    for entry in workload.entries:
        if workload.share(entry) >= _MIN_SHARE:
            shell.say(f"      {workload.share(entry):6.1%}  {entry.calls:5d} calls  {case_name(entry.key)}")


def _output_bytes(key: KernelKey) -> int:
    first = key.outputs[0]
    assert first is not None
    return first.numel * int(getattr(torch, first.dtype).itemsize)


def _seconds(quick: bool) -> float:
    return 0.5 if quick else 2.0


def _step(number: int, text: str) -> None:
    shell.say(f"[{number}/6] {text}")
