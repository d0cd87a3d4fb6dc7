"""One correct kernel for every key of every op family: any sizes, strides, offsets and dtypes that keys express.

It reads a description of the key and computes in long double (int64 for integers): slow, and right. Tests force it into the
router's table, so that a call which no tiny kernel fits is served all the same, whatever its layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.build.compile_cpp import compile_cpp
from torch_autokern.ops import SPECS
from torch_autokern.ops.spec import DTYPE_CODES
from torch_autokern.runtime.extension import extension
from torch_autokern.runtime.kernel import _memory, _pointer
from torch_autokern.runtime.plan import CpuStep, InputArg, LaunchPlan, OutputArg
from torch_autokern.runtime.target import local_target
from torch_autokern.store.key import KernelKey, TensorKey

_SOURCE = """
#include <cmath>
#include <cstdint>
#include <cstring>
typedef int64_t I;
typedef long double F;
struct T { int pointer, dtype, rank; I size[8], stride[8]; };
struct K { int op; T in[6], out[3]; double alpha, beta, eps; int dim, normalized; };
static const K keys[] = {
KEYS
};
static F half(uint16_t v) { _Float16 h; std::memcpy(&h, &v, 2); return h; }
static F brain(uint16_t v) { uint32_t w = uint32_t(v) << 16; float f; std::memcpy(&f, &w, 4); return f; }
template <class V> static V raw(const void* p, I at) {
  V v; std::memcpy(&v, (const char*)p + at * sizeof v, sizeof v); return v;
}
template <class V> static void put(void* p, I at, V v) { std::memcpy((char*)p + at * sizeof v, &v, sizeof v); }
static I whole(const T& t, void* const* p, I at) {
  const void* b = p[t.pointer];
  switch (t.dtype) {
    case 0: return raw<uint8_t>(b, at);
    case 1: return raw<int8_t>(b, at);
    case 2: return raw<int16_t>(b, at);
    case 3: return raw<int32_t>(b, at);
    case 11: return raw<uint8_t>(b, at) != 0;
    default: return raw<int64_t>(b, at);
  }
}
static bool integral(const T& t) { return t.dtype < 5 || t.dtype == 11; }
static F get(const T& t, void* const* p, I at) {
  const void* b = p[t.pointer];
  switch (t.dtype) {
    case 5: return half(raw<uint16_t>(b, at));
    case 6: return raw<float>(b, at);
    case 7: return raw<double>(b, at);
    case 15: return brain(raw<uint16_t>(b, at));
    default: return (F)whole(t, p, at);
  }
}
static void set(const T& t, void* const* p, I at, F v, I n = 0) {
  void* b = p[t.pointer];
  switch (t.dtype) {
    case 0: case 1: put<int8_t>(b, at, (int8_t)n); break;
    case 2: put<int16_t>(b, at, (int16_t)n); break;
    case 3: put<int32_t>(b, at, (int32_t)n); break;
    case 4: put<int64_t>(b, at, n); break;
    case 11: put<uint8_t>(b, at, n != 0); break;
    case 5: put<_Float16>(b, at, (_Float16)(float)v); break;
    case 6: put<float>(b, at, (float)v); break;
    case 7: put<double>(b, at, (double)v); break;
    default: {
      const float f = (float)v; uint32_t w; std::memcpy(&w, &f, 4);
      put<uint16_t>(b, at, f != f ? 0x7FC0 : (uint16_t)((w + 0x7FFF + (w >> 16 & 1)) >> 16));
    }
  }
}
// Offset of the `index`-th element of dimensions [first, last), without dimension `skip`, counted as if contiguous.
static I offset(const T& t, I index, int first, int last, int skip = -1) {
  I at = 0;
  for (int d = last - 1; d >= first; --d) if (d != skip) { at += index % t.size[d] * t.stride[d]; index /= t.size[d]; }
  return at;
}
static I count(const T& t, int first, int last, int skip = -1) {
  I n = 1;
  for (int d = first; d < last; ++d) if (d != skip) n *= t.size[d];
  return n;
}
// An addend read as if expanded to the shape of the result, at the result's own indices.
static I expanded(const T& a, const T& y, I index) {
  I at = 0;
  for (int d = y.rank - 1; d >= 0; --d) {
    const I i = index % y.size[d]; index /= y.size[d];
    const int e = d - (y.rank - a.rank);
    if (e >= 0 && a.size[e] > 1) at += i * a.stride[e];
  }
  return at;
}
static void product(const K& k, void* const* p) {
  const bool adds = k.op == 1 || k.op == 3;
  const T &a = k.in[adds], &b = k.in[adds + 1], &y = k.out[0];
  const int r = y.rank;
  for (I e = 0, all = count(y, 0, r); e < all; ++e) {
    const I j = e % y.size[r - 1], i = e / y.size[r - 1] % y.size[r - 2], z = e / y.size[r - 1] / y.size[r - 2];
    const I left = (r == 3 ? z * a.stride[0] : 0) + i * a.stride[r - 2];
    const I right = (r == 3 ? z * b.stride[0] : 0) + j * b.stride[r - 1];
    F sum = 0; I n = 0;
    for (I m = 0; m < a.size[r - 1]; ++m) {
      const I x = left + m * a.stride[r - 1], w = right + m * b.stride[r - 2];
      if (integral(y)) n = (I)((uint64_t)n + (uint64_t)whole(a, p, x) * (uint64_t)whole(b, p, w));
      else sum += get(a, p, x) * get(b, p, w);
    }
    if (adds) {
      const I c = expanded(k.in[0], y, e);
      n *= (I)k.alpha; sum *= k.alpha;
      if (k.beta != 0) {
        if (integral(y)) n += (I)k.beta * whole(k.in[0], p, c); else sum += k.beta * get(k.in[0], p, c);
      }
    }
    set(y, p, offset(y, e, 0, r), sum, n);
  }
}
static void softmax(const K& k, void* const* p) {
  const T &x = k.in[0], &y = k.out[0];
  const int d = k.dim, r = x.rank;
  const I n = r ? x.size[d] : 1, sx = r ? x.stride[d] : 0, sy = r ? y.stride[d] : 0;
  for (I e = 0, all = count(x, 0, r, d); e < all; ++e) {
    const I from = offset(x, e, 0, r, d), to = offset(y, e, 0, r, d);
    F top = get(x, p, from), sum = 0;
    for (I i = 1; i < n; ++i) { const F v = get(x, p, from + i * sx); top = v > top || v != v ? v : top; }
    for (I i = 0; i < n; ++i) sum += std::exp((double)(get(x, p, from + i * sx) - top));
    for (I i = 0; i < n; ++i) {
      const F v = get(x, p, from + i * sx) - top;
      set(y, p, to + i * sy, k.op == 4 ? std::exp((double)v) / sum : v - std::log((double)sum));
    }
  }
}
static void softmax_back(const K& k, void* const* p) {
  const T &g = k.in[0], &y = k.in[1], &z = k.out[0];
  const int d = k.dim, r = g.rank;
  const I n = r ? g.size[d] : 1, sg = r ? g.stride[d] : 0, sy = r ? y.stride[d] : 0, sz = r ? z.stride[d] : 0;
  for (I e = 0, all = count(g, 0, r, d); e < all; ++e) {
    const I og = offset(g, e, 0, r, d), oy = offset(y, e, 0, r, d), oz = offset(z, e, 0, r, d);
    F sum = 0;
    for (I i = 0; i < n; ++i) sum += get(g, p, og + i * sg) * (k.op == 7 ? get(y, p, oy + i * sy) : 1);
    for (I i = 0; i < n; ++i) {
      const F u = get(g, p, og + i * sg), v = get(y, p, oy + i * sy);
      set(z, p, oz + i * sz, k.op == 7 ? v * (u - sum) : u - std::exp((double)v) * sum);
    }
  }
}
static void norm(const K& k, void* const* p) {
  const T &x = k.in[0], &w = k.in[1], &c = k.in[2], &y = k.out[0], &m = k.out[1], &s = k.out[2];
  const int r = x.rank, lead = r - k.normalized;
  const I n = count(x, lead, r);
  for (I e = 0, rows = count(x, 0, lead); e < rows; ++e) {
    const I from = offset(x, e, 0, lead), to = offset(y, e, 0, lead);
    F mean = 0, spread = 0;
    for (I i = 0; i < n; ++i) mean += get(x, p, from + offset(x, i, lead, r));
    mean /= n;
    for (I i = 0; i < n; ++i) { const F v = get(x, p, from + offset(x, i, lead, r)) - mean; spread += v * v; }
    const F rstd = 1 / std::sqrt(spread / n + k.eps);
    for (I i = 0; i < n; ++i) {
      F v = (get(x, p, from + offset(x, i, lead, r)) - mean) * rstd;
      if (w.dtype >= 0) v *= get(w, p, offset(w, i, 0, w.rank));
      if (c.dtype >= 0) v += get(c, p, offset(c, i, 0, c.rank));
      set(y, p, to + offset(y, i, lead, r), v);
    }
    set(m, p, offset(m, e, 0, lead), mean);
    set(s, p, offset(s, e, 0, lead), rstd);
  }
}
static void norm_back(const K& k, void* const* p) {
  const T &g = k.in[0], &x = k.in[1], &m = k.in[2], &s = k.in[3], &w = k.in[4];
  const int r = x.rank, lead = r - k.normalized;
  const I n = count(x, lead, r), rows = count(x, 0, lead);
  for (I e = 0; e < rows && k.out[0].dtype >= 0; ++e) {
    const F mean = get(m, p, offset(m, e, 0, lead)), rstd = get(s, p, offset(s, e, 0, lead));
    F a = 0, c = 0;
    for (int pass = 0; pass < 2; ++pass) for (I i = 0; i < n; ++i) {
      const F v = (get(x, p, offset(x, e * n + i, 0, r)) - mean) * rstd;
      const F h = get(g, p, offset(g, e * n + i, 0, r)) * (w.dtype >= 0 ? get(w, p, offset(w, i, 0, w.rank)) : 1);
      if (!pass) { a += h; c += h * v; }
      else set(k.out[0], p, offset(k.out[0], e * n + i, 0, r), rstd * (h - a / n - v * c / n));
    }
  }
  for (I i = 0; i < n; ++i) {
    F a = 0, c = 0;
    for (I e = 0; e < rows; ++e) {
      const F h = get(g, p, offset(g, e * n + i, 0, r));
      a += h * (get(x, p, offset(x, e * n + i, 0, r)) - get(m, p, offset(m, e, 0, lead))) * get(s, p, offset(s, e, 0, lead));
      c += h;
    }
    if (k.out[1].dtype >= 0) set(k.out[1], p, offset(k.out[1], i, 0, k.out[1].rank), a);
    if (k.out[2].dtype >= 0) set(k.out[2], p, offset(k.out[2], i, 0, k.out[2].rank), c);
  }
}
// Runs in one piece: the end of the range says which key it is.
extern "C" void general(int64_t begin, int64_t end, void* const* p) {
  const K& k = keys[end - 1];
  if (k.op <= 3) product(k, p);
  else if (k.op <= 5) softmax(k, p);
  else if (k.op == 6) norm(k, p);
  else if (k.op == 9) norm_back(k, p);
  else softmax_back(k, p);
}
"""
_ABSENT = "{0, -1, 0, {0}, {0}}"


def _described(tensor: TensorKey | None, pointer: int) -> str:
    if tensor is None:
        return _ABSENT
    sizes, strides = (", ".join(map(str, numbers)) or "0" for numbers in (tensor.sizes, tensor.strides))
    return f"{{{pointer}, {DTYPE_CODES[tensor.dtype]}, {len(tensor.sizes)}, {{{sizes}}}, {{{strides}}}}}"


def _described_key(key: KernelKey) -> str:
    inputs = [_described(tensor, index) for index, tensor in enumerate(key.tensors)]
    outputs, pointer = [], len(key.tensors)
    for tensor in key.outputs:
        outputs.append(_described(tensor, pointer))
        pointer += tensor is not None
    scalars = key.scalars
    numbers = [float(scalars.get(name, 0.0)) for name in ("alpha", "beta", "eps")]  # type: ignore[arg-type]
    normalized = len(scalars.get("normalized_shape", ()))  # type: ignore[arg-type]
    inputs += [_ABSENT] * (6 - len(inputs))
    outputs += [_ABSENT] * (3 - len(outputs))
    return (
        f"{{{SPECS[key.op].index}, {{{', '.join(inputs)}}}, {{{', '.join(outputs)}}}, {', '.join(map(repr, numbers))}, "
        f"{scalars.get('dim', 0)}, {normalized}}}"
    )


def compute_keys(keys: Sequence[KernelKey]) -> list[Any]:
    """The extension's kernel for each key, from one library built for all of them."""
    source = _SOURCE.replace("KEYS", ",\n".join(map(_described_key, keys)))
    artifact = _build(source)
    native = extension()
    library = native.Library.load(artifact.binary, artifact.identity)  # once for all keys: each load keeps a file open
    made = []
    for number, key in enumerate(keys):
        plan = _plan(key, number)
        (step,) = plan.steps
        assert isinstance(step, CpuStep)
        steps = [("cpu", step.entry, step.range, step.grain, [_pointer(arg, key, {}) for arg in step.args])]
        made.append(native.Kernel(f"general {number}", library, steps, *_memory(plan, key)))
    return made


def _build(source: str) -> Artifact:
    plan = LaunchPlan(1, (CpuStep("general", 1, 1, ()),))
    return compile_cpp(Candidate("cpp", source, plan, "tests", "tests"), local_target(), allow_weak_box=True)


def _plan(key: KernelKey, number: int) -> LaunchPlan:
    present = [index for index, tensor in enumerate(key.outputs) if tensor is not None]
    args = (*(InputArg(i) for i in range(len(key.tensors))), *map(OutputArg, present))
    return LaunchPlan(1, (CpuStep("general", number + 1, number + 1, args),))


Call = tuple[str, list[torch.Tensor | None], dict[str, Any]]


class CallsOfOurs(TorchDispatchMode):
    """Collects the ATen calls of our op families below autograd: (op, tensors, scalars), as the router is going to see them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        op = func._schema.name.removeprefix("aten::")
        if op in SPECS and func._overloadname == "default":
            self._note(op, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, op: str, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        values = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        given = {a.name: values.get(a.name, a.default_value) for a in func._schema.arguments}
        tensors = [given[arg.name] for arg in SPECS[op].args if "tensor" in arg.kind]
        scalars = {}
        for arg in SPECS[op].args:
            if "tensor" in arg.kind:
                continue
            value = given[arg.name]
            if arg.kind == "dtype":
                value = str(value if isinstance(value, torch.dtype) else tensors[0].dtype).removeprefix("torch.")
            scalars[arg.name] = tuple(value) if isinstance(value, (list, tuple)) else value
        plain = [None if t is None else t.detach() for t in tensors]
        expressible = all(t is None or (str(t.dtype).removeprefix("torch.") in DTYPE_CODES and t.numel()) for t in plain)
        if expressible and not any(isinstance(value, complex) for value in scalars.values()):
            self.calls.append((op, plain, scalars))
