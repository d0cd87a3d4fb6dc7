"""One key measured as a user meets it: stock against the same call inside `enabled()`, and both against float64."""

from __future__ import annotations

from typing import Any

import torch

from torch_autokern.judge.accuracy import Task, evaluate
from torch_autokern.judge.device import device_of, finish, generator_on
from torch_autokern.judge.families import Family
from torch_autokern.judge.inputs import make_inputs
from torch_autokern.judge.outcome import Accuracy
from torch_autokern.ops import SPECS
from torch_autokern.report.cases import case_name
from torch_autokern.report.measurement import Row
from torch_autokern.report.paired import Scope, Side, paired_times
from torch_autokern.runtime.extension import extension
from torch_autokern.runtime.session import session
from torch_autokern.store.key import KernelKey

# A GPU's bracket waits for the device at both ends, some 20 us in all.
_BRACKET_US = {"cpu": 1000.0, "cuda": 3000.0}


class BoundCall:
    """A key with inputs (standard normal, random parameters) and its ATen call, arguments laid out beforehand."""

    def __init__(self, key: KernelKey, seed: int = 0) -> None:
        self.key = key
        self.spec = SPECS[key.op]
        self.inputs = make_inputs(self.spec, key, Family.NORMAL, generator_on(device_of(key), seed), "aligned")
        self._overload: Any = getattr(torch.ops.aten, key.op).default
        self._positional, self._keyword = self.spec.call_args(self.inputs.tensors, key.scalars)

    def __call__(self) -> Any:
        """The ATen call; served where a scope is active."""
        return self._overload(*self._positional, **self._keyword)

    def results(self) -> tuple[torch.Tensor, ...]:
        """The call's results, always as a tuple."""
        result = self()
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    def errors(self, *results: tuple[torch.Tensor, ...]) -> list[float]:
        """Largest error of each call's results against float64, in units of the op's natural scale; of a LayerNorm's forward
        that of its first result."""
        task = Task(self.spec, self.key, Accuracy())
        scores = evaluate(task, Family.NORMAL, self.inputs.tensors, results, results[0])
        counted = scores[:1] if self.key.op == "native_layer_norm" else scores
        return [max(score.tallies[number].pool.largest for score in counted) for number in range(len(results))]


def measure_key(key: KernelKey, scope: Scope, budget_s: float, pages: str | None = None, note: str | None = None) -> Row:
    """Check, then time, interleaved. `scope` is entered for the own side only.

    The router stays in place meanwhile: putting it in and taking it back at every turn would leave the own side with other
    caches and another heap. Out of scope it adds about 0.1 us to stock's calls (`benchmarks/overhead.py`).
    """
    with session().block():
        return _measure_key(BoundCall(key), scope, budget_s, pages, note)


def _measure_key(call: BoundCall, scope: Scope, budget_s: float, pages: str | None, note: str | None) -> Row:
    stock = call.results()
    with scope():
        before = _counts(call.spec.index)
        own = call.results()
        served = _what_happened(before, _counts(call.spec.index))
    stock_error, error = call.errors(stock, own)
    del stock, own
    device = device_of(call.key)
    times = paired_times(
        Side(call), Side(call, scope), budget_s, wait=lambda: finish(device), bracket_us=_BRACKET_US[device.type]
    )
    return Row(
        case=case_name(call.key),
        accuracy_class="stock",
        stock_ms=times.stock_ms,
        autokern_ms=times.own_ms,
        ratio=times.interval.ratio,
        ratio_low=times.interval.low,
        ratio_high=times.interval.high,
        error=error,
        stock_error=stock_error,
        served=served,
        pages=pages,
        note=note,
    )


def _counts(family: int) -> list[int]:
    return list(extension().counts()[family])


def _what_happened(before: list[int], after: list[int]) -> bool | str:
    """True after a hit, else the name of the miss."""
    names = extension().reason_names
    changed = [name for name, old, new in zip(names, before, after, strict=True) if new > old]
    if not changed:
        return "unwatched"  # the store holds no kernel of this op family
    return True if changed == ["hit"] else next(name for name in changed if name != "hit")
