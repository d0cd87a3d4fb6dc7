"""Other ways to the same result, on the same inputs in the same process: torch.compile and Liger, where it is installed.

A peer counts where its result is about as near to float64 as stock's. Its time is paired, interleaved, with the call as a user
of ours meets it; what a peer's Python costs a call counts, as ours does. "max-autotune" is compiled without CUDA graphs: a
graph would copy every argument into memory of its own first, and give its result in memory that the next call overwrites,
which no other side does.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from torch_autokern import api
from torch_autokern.judge.accuracy import Task
from torch_autokern.judge.device import device_of, finish
from torch_autokern.judge.outcome import Accuracy
from torch_autokern.judge.stored import compiled_call
from torch_autokern.report.keyrow import BoundCall
from torch_autokern.report.paired import Side, paired_times
from torch_autokern.runtime.session import session

Work = Callable[[], Any]
# How much time must be left for a peer to be asked at all, in seconds: compilers cannot be interrupted.
PEERS = {"compile": 20.0, "max-autotune": 75.0, "liger": 10.0}
_MODES = {"compile": None, "max-autotune": "max-autotune-no-cudagraphs"}
_ERROR_FACTOR = 10.0  # of stock's error, or of the dtype's epsilon where stock is nearly exact: wrong is far beyond
_BRACKET_US = {"cpu": 1000.0, "cuda": 3000.0}  # as the key itself is timed (`keyrow`)


class PeerTime(msgspec.Struct, frozen=True):
    """One call of a peer, ms (median), and its time over ours with the 99 % interval: above 1 we are faster."""

    ms: float
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ms:.4g} ms, {self.ratio:.2f}x [{self.low:.2f}, {self.high:.2f}] of ours"


def measure_peer(name: str, call: BoundCall, seconds: float) -> PeerTime | str:
    """Check a peer, then time it for about `seconds`; in words, why it does not count."""
    try:
        work = _liger(call) if name == "liger" else _compiled(name, call)
        if isinstance(work, str):
            return work
        wrong = _wrong(call, work)
        return wrong or _timed(call, work, seconds)
    except Exception as error:  # noqa: BLE001 - somebody else's code: what it raises is its result
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
    finally:
        torch._dynamo.reset()


def _compiled(name: str, call: BoundCall) -> Work:
    torch._dynamo.reset()  # or a second shape turns sizes dynamic, and the peer slow
    return compiled_call(Task(call.spec, call.key, Accuracy()), _MODES[name])(call.inputs.tensors)


def _liger(call: BoundCall) -> Work | str:
    """Liger's forward of softmax and LayerNorm; arguments laid out beforehand."""
    if importlib.util.find_spec("liger_kernel") is None:
        return "not installed"
    key, tensors = call.key, call.inputs.tensors
    x = tensors[0]
    assert x is not None
    if key.op == "_softmax" and key.scalars["dim"] == x.dim() - 1:
        softmax = importlib.import_module("liger_kernel.ops.softmax").LigerSoftmaxFunction
        return lambda: softmax.apply(x)
    shape = key.scalars.get("normalized_shape")
    if key.op == "native_layer_norm" and isinstance(shape, tuple):
        layer_norm = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
        flat, *parameters = (t.flatten(-len(shape)) for t in tensors if t is not None)
        return lambda: layer_norm.apply(flat, *parameters, key.scalars["eps"])
    return "has no such op"


def _wrong(call: BoundCall, work: Work) -> str:
    """What is wrong with a peer's result, roughly; "" where nothing is. Results that it does not have are not looked at."""
    stock = call.results()
    made = work()
    given = tuple(made) if isinstance(made, (tuple, list)) else (made,)
    results = tuple(
        mine.reshape(right.shape) if mine is not None and right is not None else right
        for mine, right in zip((*given, *stock[len(given) :]), stock, strict=True)
    )
    if any(mine is not None and mine.dtype != right.dtype for mine, right in zip(results, stock, strict=True)):
        return "wrong: its result has another dtype"
    if not all(bool(torch.isfinite(result).all()) for result in results if result is not None):
        return "wrong: NaN or infinity"
    stock_error, error = call.errors(stock, results)
    limit = _ERROR_FACTOR * max(stock_error, torch.finfo(stock[0].dtype).eps)
    return f"wrong: largest error {error:.2g}, stock's {stock_error:.2g}" if error > limit else ""


def _timed(call: BoundCall, work: Work, seconds: float) -> PeerTime:
    device = device_of(call.key)
    with session().block():
        times = paired_times(
            Side(work), Side(call, api.enabled), seconds,
            wait=lambda: finish(device), bracket_us=_BRACKET_US[device.type],
        )  # fmt: skip
    return PeerTime(times.stock_ms, times.interval.ratio, times.interval.low, times.interval.high)
