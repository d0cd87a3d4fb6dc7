"""What the router costs a call on the host: ``python -m benchmarks.overhead --json FILE``.

One thread on one core; tiny tensors, so that host time is all there is. Four ways of one call, in random order within each
round: stock (router not installed), out of scope (installed, no scope active), a decided miss (in scope, no record for the
key) and a hit (in scope, a kernel for the key). Then whole models against stock: optimised with an empty store, where nothing
is intercepted, and with every op family watched although no key of the model has a kernel, where every call is a miss.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.overhead_kernels import HAND_WRITTEN, as_programs_write_it, loaded_kernel
from torch_autokern import api
from torch_autokern.judge.interval import ratio_interval
from torch_autokern.ops import spec_of
from torch_autokern.report.cases import case_name
from torch_autokern.report.device import describe_device, utc_date, versions
from torch_autokern.report.keyrow import BoundCall
from torch_autokern.report.measurement import Measurement, Row
from torch_autokern.report.paired import Side, paired_times
from torch_autokern.runtime.extension import extension
from torch_autokern.store.key import KernelKey

CALLS = 100
_LEAST_ROUNDS = 20
WAYS = ("stock", "out_of_scope", "miss", "hit")
MISS_LIMIT_US = 0.3
HIT_LIMIT_US = 0.0
MODEL_LIMIT = 0.99


class Switchboard:
    """Puts the process into one of the four ways."""

    def __init__(self, key: KernelKey, allow_weak_box: bool) -> None:
        self._native = extension()
        self._scope = self._native.Scope()
        self._scope.set(1, False)
        self._token: Any = None
        kernel = loaded_kernel(key, allow_weak_box=allow_weak_box).native
        words = spec_of(key).encode(key, torch.get_num_threads())
        slots = [(regime, accuracy, exact, kernel) for regime in range(2) for accuracy in range(3) for exact in range(2)]
        self._row = (words, slots)

    def enter(self, way: str) -> None:
        """Leave the way before and enter this one."""
        if way == "stock":
            self._native.uninstall()
            return
        self._native.install()
        self._native.set_table([self._row] if way == "hit" else [])
        if way in ("miss", "hit"):
            self._token = self._scope.enter()

    def leave(self) -> None:
        """Back to no scope."""
        if self._token is not None:
            self._scope.leave(self._token)
            self._token = None

    def close(self) -> None:
        """Take everything back."""
        self.leave()
        self._native.uninstall()
        self._native.set_table([])


def measure_op(key: KernelKey, rounds: int, until: float, allow_weak_box: bool) -> list[Row]:
    """Rows of one op: each way against stock; fewer rounds where the clock says `until` (`time.monotonic`)."""
    bound = BoundCall(key)
    board = Switchboard(key, allow_weak_box)
    stock = bound.results()
    errors = bound.errors(stock, _results_of_hit(bound, board))
    call = as_programs_write_it(key, bound.inputs.tensors)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    order = list(WAYS)
    shuffle = random.Random(0).shuffle
    for done in range(rounds):
        if done >= _LEAST_ROUNDS and time.monotonic() > until:
            break
        shuffle(order)
        for way in order:
            board.enter(way)
            times[way].append(_time_us(call))
            board.leave()
    board.close()
    return [_row(key, way, times["stock"], times[way], errors) for way in WAYS[1:]]


def _results_of_hit(call: BoundCall, board: Switchboard) -> tuple[torch.Tensor, ...]:
    before = extension().counts()[call.spec.index][0]
    board.enter("hit")
    results = call.results()
    board.leave()
    if extension().counts()[call.spec.index][0] != before + 1:
        raise SystemExit(f"{case_name(call.key)}: the kernel was not served, so there is no hit to time")
    return results


def _time_us(call: Callable[[], object]) -> float:
    for _ in range(20):
        call()
    gc.disable()
    # The thread's own clock: with one thread all cost is here, and other programs on the machine are not.
    begin = time.thread_time_ns()
    for _ in range(CALLS):
        call()
    end = time.thread_time_ns()
    gc.enable()
    return (end - begin) / 1000 / CALLS


def _row(key: KernelKey, way: str, stock: list[float], own: list[float], errors: list[float]) -> Row:
    interval = ratio_interval(stock, own, pairs_per_block=1)
    added = sorted(mine - theirs for mine, theirs in zip(own, stock, strict=True))
    hit = way == "hit"
    return Row(
        case=f"{case_name(key)}: {way.replace('_', ' ')}",
        accuracy_class="stock",
        stock_ms=statistics.median(stock) / 1000,
        autokern_ms=statistics.median(own) / 1000,
        ratio=interval.ratio,
        ratio_low=interval.low,
        ratio_high=interval.high,
        error=errors[1] if hit else errors[0],
        stock_error=errors[0],
        served=True if hit else {"miss": "no_record", "out_of_scope": "out_of_scope"}[way],
        added_us=statistics.median(added),
        added_us_low=added[len(added) // 10],
        added_us_high=added[-1 - len(added) // 10],
    )


class Block(torch.nn.Module):
    """A transformer block whose softmax, LayerNorms and products are ops of their own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm = torch.nn.LayerNorm(width)
        self.second_norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, width) to the same."""
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.first_norm(x)).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, tokens, width))
        wide: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.second_norm(x))))
        return x + wide


def measure_model(name: str, blocks: int, width: int, batch: int, tokens: int, seconds: float) -> Iterator[Row]:
    """A model optimised in vain against the same weights without."""
    torch.manual_seed(0)
    stock = torch.nn.Sequential(*(Block(width, width // 32) for _ in range(blocks))).eval()
    own = torch.nn.Sequential(*(Block(width, width // 32) for _ in range(blocks))).eval()
    own.load_state_dict(stock.state_dict(), assign=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", api.AutokernWarning)  # that the store is empty is the point
        api.optimize(own)
    x = torch.randn(batch, tokens, width)
    for case, served, scope in (("empty store", "unwatched", nullcontext), ("only misses", "no_record", _every_family)):
        with torch.inference_mode(), scope():
            if not torch.equal(stock(x), own(x)):
                raise SystemExit(f"{name}: an optimised model that nothing serves differs from stock")
        with torch.inference_mode():
            # Long brackets: putting the router in and taking it back leaves caches cold, which a running program does not meet.
            times = paired_times(Side(lambda: stock(x)), Side(lambda: own(x), scope), seconds, bracket_us=10_000.0)
        yield Row(
            case=f"{name}: optimised, {case}",
            accuracy_class="exact",
            stock_ms=times.stock_ms,
            autokern_ms=times.own_ms,
            ratio=times.interval.ratio,
            ratio_low=times.interval.low,
            ratio_high=times.interval.high,
            error=0.0,
            stock_error=0.0,
            served=served,
            added_us=(times.own_ms - times.stock_ms) * 1000,
            note="error is against stock: bitwise equal",
        )
    api.restore(own)


@contextmanager
def _every_family() -> Iterator[None]:
    native = extension()
    native.install()
    try:
        yield
    finally:
        native.uninstall()


def measure(rounds: int, seconds: float, limit_s: float, allow_weak_box: bool) -> Measurement:
    """All rows, pinned to one core and one thread; half of `limit_s` for the ops, the rest for two models in two scopes."""
    ends = time.monotonic() + limit_s
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    torch.set_num_threads(1)
    shares = [ends - limit_s * (1 - (number + 1) / (2 * len(HAND_WRITTEN))) for number in range(len(HAND_WRITTEN))]
    pairs = zip(HAND_WRITTEN, shares, strict=True)
    rows = [row for key, until in pairs for row in measure_op(key, rounds, until, allow_weak_box)]
    seconds = min(seconds, max(1.0, (ends - time.monotonic()) / 5))
    rows.extend(measure_model("6 blocks, 32 x 38 x 384", 6, 384, 32, 38, seconds))
    rows.extend(measure_model("6 blocks, 1 x 8 x 64 (host-bound)", 6, 64, 1, 8, seconds))
    settings = {"threads": "1", "core": str(cores[0]), "calls_per_sample": str(CALLS), "samples": f"at most {rounds}"}
    return Measurement(describe_device(), versions(), utc_date(), tuple(rows), settings=settings)


def _print(result: Measurement) -> None:
    print(f"{result.device}, torch {result.versions['torch']}, {result.date}; one thread on core {result.settings['core']}")
    for row in result.rows:
        spread = "" if row.added_us_low is None else f" [{row.added_us_low:+.3f}, {row.added_us_high:+.3f}]"
        print(
            f"{row.case:<52} stock {row.stock_ms * 1000:9.3f} us  own {row.autokern_ms * 1000:9.3f} us  "
            f"added {row.added_us:+.3f}{spread} us  ratio {row.ratio:.3f} [{row.ratio_low:.3f}, {row.ratio_high:.3f}]"
        )


def broken_limits(result: Measurement) -> list[str]:
    """Rows over the project's limits: a miss 0.3 us, a hit nothing over stock, a model with an empty store 1 %."""
    broken = []
    for row in result.rows:
        added = row.added_us or 0.0
        if (row.case.endswith(": miss") and added > MISS_LIMIT_US) or (row.case.endswith(": hit") and added > HIT_LIMIT_US):
            broken.append(f"{row.case} adds {added:.3f} us")
        if row.case.endswith("empty store") and row.ratio < MODEL_LIMIT:
            broken.append(f"{row.case} is at {row.ratio:.4f} of stock's speed")
    return broken


def main() -> None:
    """Print the rows, write them, and exit with 1 if one is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each model")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for the whole call: fewer rounds where it is short")
    parser.add_argument("--allow-weak-box", action="store_true", help="compile the kernels although the box is weak here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="autokern-overhead-") as folder:
        os.environ["AUTOKERN_STORE"] = folder
        result = measure(options.rounds, options.seconds, options.limit, options.allow_weak_box)
    _print(result)
    if options.json:
        result.save(options.json)
    broken = broken_limits(result)
    for line in broken:
        print(f"over the limit: {line}")
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
