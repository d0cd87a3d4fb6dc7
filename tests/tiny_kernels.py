"""Small correct kernels for tests: rows of 8 float32, a batch of 4, one library built once by the package's own compiler.

`Served` fills the router's table with them directly, or through records in the session's store; `hits` says which kernel ran.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import torch_autokern as ak
from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.build.compile_cpp import compile_cpp
from torch_autokern.ops import SPECS
from torch_autokern.runtime.extension import extension
from torch_autokern.runtime.kernel import LoadedKernel, load_cpu_kernel
from torch_autokern.runtime.plan import CpuStep, InputArg, LaunchPlan, OutputArg, encode_plan
from torch_autokern.runtime.session import EVERY_FAMILY, session
from torch_autokern.runtime.table import Row
from torch_autokern.runtime.target import local_target, stock_build
from torch_autokern.store.key import KernelKey
from torch_autokern.store.record import AccuracyClass, Determinism, KernelRecord, Provenance, Timing, Verdict

D, B = 8, 4  # every row has 8 elements; sums over the batch are built for 4 rows

_SOURCE = """
#include <cstdint>
#include <cmath>
#include <cstring>
using Pointers = void* const*;
static const float* in(Pointers p, int i) { return static_cast<const float*>(p[i]); }
static float* out(Pointers p, int i) { return static_cast<float*>(p[i]); }
static const int D = 8, B = 4;

extern "C" void marker(int64_t b, int64_t e, Pointers p) {
  for (int64_t i = b; i < e; ++i) out(p, 0)[i] = 42.0f;
}
extern "C" void softmax(int64_t b, int64_t e, Pointers p) {
  for (int64_t r = b; r < e; ++r) {
    const float* x = in(p, 0) + r * D; float* y = out(p, 1) + r * D;
    float m = x[0], s = 0; for (int i = 1; i < D; ++i) m = fmaxf(m, x[i]);
    for (int i = 0; i < D; ++i) { y[i] = expf(x[i] - m); s += y[i]; }
    for (int i = 0; i < D; ++i) y[i] /= s;
  }
}
extern "C" void log_softmax(int64_t b, int64_t e, Pointers p) {
  for (int64_t r = b; r < e; ++r) {
    const float* x = in(p, 0) + r * D; float* y = out(p, 1) + r * D;
    float m = x[0], s = 0; for (int i = 1; i < D; ++i) m = fmaxf(m, x[i]);
    for (int i = 0; i < D; ++i) s += expf(x[i] - m);
    for (int i = 0; i < D; ++i) y[i] = x[i] - m - logf(s);
  }
}
extern "C" void softmax_back(int64_t b, int64_t e, Pointers p) {
  for (int64_t r = b; r < e; ++r) {
    const float *g = in(p, 0) + r * D, *y = in(p, 1) + r * D; float* z = out(p, 2) + r * D;
    float s = 0; for (int i = 0; i < D; ++i) s += g[i] * y[i];
    for (int i = 0; i < D; ++i) z[i] = y[i] * (g[i] - s);
  }
}
extern "C" void log_softmax_back(int64_t b, int64_t e, Pointers p) {
  for (int64_t r = b; r < e; ++r) {
    const float *g = in(p, 0) + r * D, *y = in(p, 1) + r * D; float* z = out(p, 2) + r * D;
    float s = 0; for (int i = 0; i < D; ++i) s += g[i];
    for (int i = 0; i < D; ++i) z[i] = g[i] - expf(y[i]) * s;
  }
}
extern "C" void layer_norm(int64_t b, int64_t e, Pointers p) {
  for (int64_t r = b; r < e; ++r) {
    const float *x = in(p, 0) + r * D, *w = in(p, 1), *c = in(p, 2); float* y = out(p, 3) + r * D;
    float m = 0, v = 0; for (int i = 0; i < D; ++i) m += x[i];
    m /= D; for (int i = 0; i < D; ++i) v += (x[i] - m) * (x[i] - m);
    const float s = 1.0f / sqrtf(v / D + 1e-5f);
    for (int i = 0; i < D; ++i) y[i] = (x[i] - m) * s * (w ? w[i] : 1.0f) + (c ? c[i] : 0.0f);
    out(p, 4)[r] = m; out(p, 5)[r] = s;
  }
}
extern "C" void layer_norm_back(int64_t b, int64_t e, Pointers p) {
  for (int64_t r = b; r < e; ++r) {
    const float *g = in(p, 0) + r * D, *x = in(p, 1) + r * D, *w = in(p, 4); float* z = out(p, 5) + r * D;
    const float m = in(p, 2)[r], s = in(p, 3)[r]; float a = 0, c = 0;
    for (int i = 0; i < D; ++i) { const float h = g[i] * w[i]; a += h; c += h * (x[i] - m) * s; }
    for (int i = 0; i < D; ++i) z[i] = s * (g[i] * w[i] - a / D - (x[i] - m) * s * c / D);
  }
}
extern "C" void layer_norm_back_weights(int64_t b, int64_t e, Pointers p) {
  for (int64_t i = b; i < e; ++i) {
    float a = 0, c = 0;
    for (int r = 0; r < B; ++r) {
      const float g = in(p, 0)[r * D + i];
      a += g * (in(p, 1)[r * D + i] - in(p, 2)[r]) * in(p, 3)[r]; c += g;
    }
    out(p, 4)[i] = a; out(p, 5)[i] = c;
  }
}
extern "C" void mm_rows(int64_t b, int64_t e, Pointers p) {
  for (int64_t r = b; r < e; ++r) for (int j = 0; j < D; ++j) {
    float s = 0; for (int k = 0; k < D; ++k) s += in(p, 0)[r * D + k] * in(p, 1)[k * D + j];
    out(p, 2)[r * D + j] = s;
  }
}
extern "C" void mm_left_transposed(int64_t b, int64_t e, Pointers p) {
  for (int64_t r = b; r < e; ++r) for (int j = 0; j < D; ++j) {
    float s = 0; for (int k = 0; k < B; ++k) s += in(p, 0)[k * D + r] * in(p, 1)[k * D + j];
    out(p, 2)[r * D + j] = s;
  }
}
extern "C" void addmm_right_transposed(int64_t b, int64_t e, Pointers p) {
  for (int64_t r = b; r < e; ++r) for (int j = 0; j < D; ++j) {
    float s = in(p, 0)[j]; for (int k = 0; k < D; ++k) s += in(p, 1)[r * D + k] * in(p, 2)[j * D + k];
    out(p, 3)[r * D + j] = s;
  }
}
"""
_ENTRIES = (
    "marker", "softmax", "log_softmax", "softmax_back", "log_softmax_back", "layer_norm", "layer_norm_back",
    "layer_norm_back_weights", "mm_rows", "mm_left_transposed", "addmm_right_transposed",
)  # fmt: skip
Slot = tuple[int, int, int]
EVERY_SLOT: tuple[Slot, ...] = tuple((regime, accuracy, det) for regime in (0, 1) for accuracy in (0, 1, 2) for det in (0, 1))


@functools.cache
def artifact() -> Artifact:
    """The library, built once a process."""
    plan = LaunchPlan(1, tuple(CpuStep(entry, 1, 1, ()) for entry in _ENTRIES))
    return compile_cpp(Candidate("cpp", _SOURCE, plan, "tests", "tests"), local_target(), allow_weak_box=True)


def _step(entry: str, range_: int, inputs: Iterable[int], outputs: Iterable[int]) -> CpuStep:
    return CpuStep(entry, range_, 2, (*map(InputArg, inputs), *map(OutputArg, outputs)))


def plan_for(key: KernelKey) -> LaunchPlan:
    """The plan of a correct kernel for a key of ours; LookupError for any other key."""
    t = key.tensors
    assert t[0] is not None
    rows = t[0].numel // t[0].sizes[-1]
    transposed = (1, D)
    match key.op:
        case "_softmax" | "_log_softmax" if t[0].sizes[-1] == D and key.scalars["dim"] == len(t[0].sizes) - 1:
            steps = [_step(key.op[1:], rows, [0], [0])]
        case "_softmax_backward_data" | "_log_softmax_backward_data" if t[0].sizes[-1] == D:
            steps = [_step(key.op[1:].removesuffix("ward_data"), rows, [0, 1], [0])]
        case "native_layer_norm" if key.scalars["normalized_shape"] == (D,):
            steps = [_step("layer_norm", rows, [0, 1, 2], [0, 1, 2])]
        case "native_layer_norm_backward" if rows == B and key.scalars["output_mask"] == (1, 1, 1):
            steps = [
                _step("layer_norm_back", rows, [0, 1, 2, 3, 4], [0]),
                _step("layer_norm_back_weights", D, [0, 1, 2, 3], [1, 2]),
            ]
        case "mm" if t[0].sizes[1] == D and t[1] is not None and t[1].strides == (D, 1):
            steps = [_step("mm_rows", rows, [0, 1], [0])]
        case "mm" if t[0].strides == transposed and t[0].sizes[1] == B:
            steps = [_step("mm_left_transposed", D, [0, 1], [0])]
        case "addmm" if t[2] is not None and t[2].strides == transposed and t[1] is not None:
            steps = [_step("addmm_right_transposed", t[1].sizes[0], [0, 1, 2], [0])]
        case _:
            raise LookupError(key)
    return LaunchPlan(1, tuple(steps))


def marker_plan(key: KernelKey) -> LaunchPlan:
    """A plan that writes 42 everywhere into a float32 result: a wrong kernel whose every hit can be seen."""
    assert key.outputs[0] is not None
    return LaunchPlan(1, (_step("marker", key.outputs[0].numel, [], [0]),))


@functools.cache
def _loaded(key_digest: str, plan_bytes: bytes) -> LoadedKernel:
    key, plan = _wanted[key_digest, plan_bytes]
    record_id = hashlib.sha256(key_digest.encode() + plan_bytes).hexdigest()
    return load_cpu_kernel(artifact().binary, artifact().identity, plan, key, record_id)


_wanted: dict[tuple[str, bytes], tuple[KernelKey, LaunchPlan]] = {}


def loaded(key: KernelKey, plan: LaunchPlan) -> LoadedKernel:
    """A kernel of the library; kept, since a loaded library is never unloaded."""
    raw = encode_plan(plan)
    _wanted[key.digest, raw] = (key, plan)
    return _loaded(key.digest, raw)


def record_for(
    key: KernelKey,
    *,
    accuracy: AccuracyClass = "stock",
    determinism: Determinism = "run_to_run",
    regimes: Sequence[str] = ("eager", "compiled"),
    ratio_low: float = 1.5,
    **replaced: Any,
) -> KernelRecord:
    """A record for this machine; `replaced` overrides its fields."""
    timings = tuple(Timing(r, "resident", 10.0, 5.0, 2.0, ratio_low, 2.5, 40, 3) for r in regimes)  # type: ignore[arg-type]
    verdict = Verdict(accuracy, 0.0, 0.0, determinism, (), {}, {}, timings, judge_version=1)
    made = artifact()
    provenance = Provenance(
        made.identity, "tests", "a plain loop", "cpp", "", {}, (), hashlib.sha256(_SOURCE.encode()).hexdigest(), made.tools,
        made.box_level, "2025-01-01T00:00:00Z",
    )  # fmt: skip
    fields = {"key": key, "target": local_target(), "stock_build": stock_build(), "verdict": verdict}
    return KernelRecord(**{**fields, **replaced}, provenance=provenance, blobs=())


def record_data(key: KernelKey) -> dict[str, bytes]:
    """The blobs of `record_for(key)`."""
    return {"kernel.so": artifact().binary, "plan.json": encode_plan(plan_for(key))}


def keys_of(run: Callable[[], object]) -> list[KernelKey]:
    """Keys that `run` asks for."""
    with ak.record() as recording:
        run()
    return [entry.key for entry in recording.workload().entries]


class Served:
    """The router's table for one test. It is filled past the session, which cannot know its op families: all are watched."""

    def __init__(self) -> None:
        session()._families = EVERY_FAMILY
        self._rows: dict[tuple[int, ...], list[tuple[int, int, int, Any]]] = {}
        self._kernels: dict[str, list[tuple[Any, int]]] = {}
        self._published: list[str] = []

    def put(self, key: KernelKey, *, plan: LaunchPlan | None = None, slots: Iterable[Slot] = EVERY_SLOT) -> Any:
        """Serve a key, by `plan_for` when no plan is given, in the slots given; returns the extension's kernel."""
        native = loaded(key, plan or plan_for(key)).native
        native.quarantined = False
        self.put_native(key, native, slots)
        self.publish_table()
        return native

    def put_native(self, key: KernelKey, native: Any, slots: Iterable[Slot] = EVERY_SLOT) -> None:
        """Add a row for the extension's own kernel; `publish_table` makes it seen."""
        words = SPECS[key.op].encode(key, torch.get_num_threads())
        self._rows.setdefault(words, []).extend((*slot, native) for slot in slots)
        self._kernels.setdefault(key.op, []).append((native, native.hits))

    def put_call(self, op: str, tensors: Sequence[torch.Tensor | None], scalars: dict[str, Any], **options: Any) -> Any:
        """`put` for the key of a call."""
        return self.put(SPECS[op].key(tensors, scalars), **options)

    def put_all(self, run: Callable[[], object]) -> list[KernelKey]:
        """Serve every key that `run` asks for and that a kernel of ours fits; returns those keys."""
        fitting = []
        for key in keys_of(run):
            try:
                plan_for(key)
            except LookupError:
                continue
            self.put(key)
            fitting.append(key)
        return fitting

    def publish_table(self) -> None:
        """Swap the table for one with the same rows."""
        rows: list[Row] = list(self._rows.items())
        extension().set_table(rows)

    def store_all(self, run: Callable[[], object]) -> list[KernelKey]:
        """As `put_all`, through records in the session's store."""
        fitting = []
        for key in keys_of(run):
            try:
                data = record_data(key)
            except LookupError:
                continue
            session().store.publish(record_for(key), data)
            self._published.append(key.digest)
            fitting.append(key)
        ak.refresh()
        for servable in session().loaded.values():
            if servable.record.key.digest in self._published:
                self._kernels.setdefault(servable.record.key.op, []).append((servable.native, servable.native.hits))
        return fitting

    def hits(self, op: str | None = None) -> int:
        """Calls served since the kernels were put, of one op family or of all."""
        groups = self._kernels.values() if op is None else [self._kernels.get(op, [])]
        unique = {id(native): native.hits - before for group in groups for native, before in reversed(group)}
        return sum(unique.values())

    def close(self) -> None:
        """Empty the table and take this test's records away."""
        extension().set_table([])
        session()._families = 0
        for digest in self._published:
            session().store.clear(digest)
        if self._published:
            session().loaded.clear()


def counts(op: str) -> dict[str, int]:
    """The router's counters of one op family, by reason ("hit" among them)."""
    native = extension()
    return dict(zip(native.reason_names, native.counts()[SPECS[op].index], strict=True))


def counted(op: str, run: Callable[[], object]) -> dict[str, int]:
    """What `run` adds to the counters of one op family; zeros left out."""
    before = counts(op)
    run()
    return {name: count - before[name] for name, count in counts(op).items() if count != before[name]}


def seen(run: Callable[[], object]) -> dict[str, dict[str, int]]:
    """What `run` adds to the counters, by op family; families without a call left out."""
    before = {op: counts(op) for op in SPECS}
    run()
    added = {op: {r: n - before[op][r] for r, n in counts(op).items() if n != before[op][r]} for op in SPECS}
    return {op: reasons for op, reasons in added.items() if reasons}


class Block(nn.Module):
    """Linear, LayerNorm and softmax of width 8: every op of it, forward and backward, has a kernel here for a batch of 4."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.norm = nn.LayerNorm(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 8) to (B, 8)."""
        return torch.softmax(self.norm(self.linear(x)), -1)


FORWARD_OPS = ("addmm", "native_layer_norm", "_softmax")
BACKWARD_OPS = ("_softmax_backward_data", "native_layer_norm_backward", "mm")


def train_step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Forward, a loss that weighs elements differently, backward; returns the output and the gradients."""
    model.zero_grad()
    y = model(x)
    (y * torch.arange(1.0, y.numel() + 1).view_as(y)).sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_all_close(mine: Sequence[torch.Tensor], stock: Sequence[torch.Tensor]) -> None:
    """As float32 rounding allows for these sizes."""
    assert len(mine) == len(stock)
    for a, b in zip(mine, stock, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-4)


def in_a_fork(check: Callable[[], None], seconds: int = 60) -> None:
    """Run `check` in a forked child; it must return in time and not raise."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(seconds)  # a child that hangs is ended by SIGALRM
        status = 1
        try:
            check()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"child ended with {status}"


@pytest.fixture
def served() -> Iterator[Served]:
    """An empty table of the test's own, and the router taken back afterwards."""
    session().refresh()  # the first scope would read the store and replace the table
    table = Served()
    extension().set_table([])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ak.AutokernWarning)  # the store is empty on purpose: tables are filled past it
        yield table
    table.close()
    ak.disable()


@pytest.fixture
def every_family() -> Iterator[None]:
    """Scopes watch the calls of all op families, as if the store held kernels of each."""
    session().refresh()  # the first scope would read the store and replace what follows
    session()._families = EVERY_FAMILY
    yield
    session()._families = 0


@pytest.fixture
def quiet_router() -> Iterator[None]:
    """No router before and after: earlier tests' models may still be waiting for the garbage collector."""
    take_router_back()
    yield
    take_router_back()


def take_router_back() -> None:
    """Uninstall, whoever holds it."""
    ak.disable()
    for user in list(session()._users):
        session().remove_user(user)
    extension().uninstall()
