"""Builds a candidate as the search does, and runs its steps over any cut of their ranges, between guard zones."""

from __future__ import annotations

import ctypes
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import torch

from torch_autokern.build.candidate import Candidate
from torch_autokern.build.compile_cpp import compile_cpp
from torch_autokern.ops import SPECS
from torch_autokern.ops.spec import Scalars
from torch_autokern.runtime.plan import InputArg, OutputArg
from torch_autokern.runtime.target import local_target
from torch_autokern.store.key import KernelKey, Target, TensorKey

Tensors = Sequence[torch.Tensor | None]
Cut = Callable[[int], list[tuple[int, int]]]
GUARD = 67  # elements on each side; odd, so that no buffer is aligned to more than its elements
POISON = -7.25e19
_FOLDER = tempfile.TemporaryDirectory(prefix="autokern-template-tests-")
_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


def whole(steps: int) -> list[tuple[int, int]]:
    """One piece."""
    return [(0, steps)]


def random_cut(seed: int) -> Cut:
    """Up to six pieces of random length, in random order."""

    def cut(steps: int) -> list[tuple[int, int]]:
        source = random.Random(seed)
        points = sorted({0, steps, *(source.randrange(steps + 1) for _ in range(5))})
        pieces = list(itertools.pairwise(points))
        source.shuffle(pieces)
        return pieces

    return cut


@lru_cache(maxsize=512)
def _library(path: str) -> ctypes.CDLL:
    return ctypes.CDLL(path)


def build(candidate: Candidate, target: Target | None = None) -> ctypes.CDLL:
    """Compile once a process, for this machine's ISA or a lower level of it."""
    target = target or local_target()
    path = Path(_FOLDER.name) / f"{candidate.candidate_id}-{target.arch}.so"
    if not path.exists():
        path.write_bytes(compile_cpp(candidate, target).binary)
    return _library(str(path))


def lower_targets() -> list[Target]:
    """This machine with the ISA levels below its own, which it runs too."""
    here = local_target()
    levels = ["x86-64-v2", "x86-64-v3", "x86-64-v4"]
    below = levels[: levels.index(here.arch)] if here.arch in levels else []
    return [Target(here.device_type, here.name, arch, here.threads) for arch in below]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


class Guarded:
    """A tensor of a key's layout inside a larger buffer: NaN around an input, so that a value read beyond it shows; POISON
    around and inside an output."""

    def __init__(self, layout: TensorKey, content: torch.Tensor | None) -> None:
        reach = 1 + sum((size - 1) * stride for size, stride in zip(layout.sizes, layout.strides, strict=True))
        self.fill = POISON if content is None else float("nan")
        dtype = getattr(torch, layout.dtype)
        self.fill = max(self.fill, torch.finfo(dtype).min) if content is None else self.fill
        self.buffer = torch.full((reach + 2 * GUARD,), self.fill, dtype=dtype)
        self.tensor = self.buffer.as_strided(layout.sizes, layout.strides, GUARD)
        if content is not None:
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in layout.strides)
            self.tensor[once].copy_(content[once])

    def guards_intact(self) -> bool:
        """Whether everything outside the tensor still holds its fill."""
        rest = self.buffer.clone()
        rest.as_strided(self.tensor.shape, self.tensor.stride(), GUARD).fill_(self.fill)
        expected = torch.full_like(rest, self.fill)
        return torch.equal(_bits(rest), _bits(expected))


def run(
    candidate: Candidate, key: KernelKey, tensors: Tensors, cut: Cut = whole, target: Target | None = None
) -> list[torch.Tensor]:
    """Run the plan's steps, each over the pieces of `cut`; check guards, unchanged inputs and that all was written."""
    library = build(candidate, target)
    inputs = [None if k is None else Guarded(k, t) for k, t in zip(key.tensors, tensors, strict=True)]
    before = [None if i is None else i.buffer.clone() for i in inputs]
    outputs = [None if layout is None else Guarded(layout, None) for layout in key.outputs]
    workspaces = {w.name: torch.full((w.size_bytes + 64,), 0xA5, dtype=torch.uint8) for w in candidate.plan.workspaces}
    for step in candidate.plan.steps:
        pointers = (ctypes.c_void_p * max(1, len(step.args)))()
        for place, arg in enumerate(step.args):
            if isinstance(arg, InputArg):
                source = inputs[arg.index]
                pointers[place] = None if source is None else source.tensor.data_ptr() + arg.offset_bytes
            elif isinstance(arg, OutputArg):
                target_of = outputs[arg.index]
                assert target_of is not None, "a step points to an output that nobody wants"
                pointers[place] = target_of.tensor.data_ptr() + arg.offset_bytes
            else:
                pointers[place] = -(-workspaces[arg.name].data_ptr() // 64) * 64 + arg.offset_bytes
        entry = _ENTRY((step.entry, library))
        for begin, end in cut(step.range):
            entry(begin, end, ctypes.cast(pointers, ctypes.c_void_p))
    for guarded, old in zip(inputs, before, strict=True):
        if guarded is not None and old is not None:
            assert torch.equal(_bits(guarded.buffer), _bits(old)), "an input was written"
    written = [result for result in outputs if result is not None]
    for result in written:
        assert result.guards_intact(), "written outside an output"
        assert not (result.tensor == result.fill).any(), "not fully written"
    return [result.tensor for result in written]


def same_bits(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Bitwise equality, NaN payloads included."""
    return all(torch.equal(_bits(a.contiguous()), _bits(b.contiguous())) for a, b in zip(left, right, strict=True))


def families(sizes: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor]]:
    """Inputs on which careless kernels fail, each with what it catches."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(sizes, generator=generator)
    uniform = torch.rand(sizes, generator=generator)
    info = torch.finfo(dtype)
    yield "normal", normal.to(dtype)
    yield "large offset: E[x^2] - mean^2", (1000.0 + normal * 64 * 512 * info.eps).to(dtype)
    yield "heavy tails: long float sums", torch.tan((uniform - 0.5) * 3.1415).clamp(info.min / 4, info.max / 4).to(dtype)
    yield "wide: results down to the denormals", (normal * 40).to(dtype)
    yield "near the largest: overflow of sums", (normal * (info.max / 34)).to(dtype)
    yield "denormal", (normal * (info.tiny / 100)).to(dtype)
    yield "constant rows: exact mean, variance 0", torch.full(list(sizes), 33333.7).to(dtype)
    for name, value, every in (("NaN", "nan", 5), ("+inf", "inf", 3), ("half -inf", "-inf", 0)):
        holed = normal.to(dtype)
        holed.view(-1)[:: 2 if every == 0 else max(2, holed.numel() // every)] = float(value)
        yield name, holed
    yield "all -inf", torch.full(list(sizes), float("-inf"), dtype=dtype)


def wrong(key: KernelKey, tensors: Tensors, scalars: Scalars, results: Sequence[torch.Tensor]) -> list[str]:
    """Where results break the rule of accuracy class `stock`, in words; empty when they hold it.

    Limits: 1.25 times stock's error in the mean and 2 times in the worst element, in units of the natural scale; NaN and
    infinities where stock and float64 agree on them.
    """
    spec = SPECS[key.op]
    stock, truth = spec.stock(tensors, scalars), spec.reference(tensors, scalars)
    scales = spec.scale(truth, tensors, scalars)
    problems = []
    wanted = [(base, exact, scale) for base, exact, scale in zip(stock, truth, scales, strict=True) if base is not None]
    for place, (own, (base, exact, scale)) in enumerate(zip(results, wanted, strict=True)):
        exact = exact.reshape(own.shape)
        rounded = exact.to(own.dtype)
        agreed = (base.isnan() == rounded.isnan()) & (base.isinf() == rounded.isinf())
        if ((own.isnan() != base.isnan()) | (own.isinf() != base.isinf()))[agreed].any():
            problems.append(f"output {place}: other NaN or infinity than stock and float64")
        info = torch.finfo(own.dtype)
        smallest = info.tiny
        unit = scale.expand(exact.shape) if scale.dim() == exact.dim() else scale.reshape(exact.shape)
        finite = own.isfinite() & base.isfinite() & rounded.isfinite()
        own_error, base_error = (((t.double() - exact).abs() / unit.clamp_min(smallest))[finite] for t in (own, base))
        if own_error.numel() == 0:
            continue
        # One unit in the last place of the result, and 4 units roundoff of the scale, are always allowed.
        last_place = (exact.abs() * info.eps / unit.clamp_min(smallest))[finite]
        floor = max(4 * 2.0**-24, last_place.max().item())
        rms_floor = max(4 * 2.0**-24, last_place.square().mean().sqrt().item())
        if own_error.max() > max(2 * base_error.max().item(), floor):
            problems.append(f"output {place}: worst element {own_error.max():.2e}, stock {base_error.max():.2e}")
        if own_error.square().mean().sqrt() > max(1.25 * base_error.square().mean().sqrt().item(), rms_floor):
            problems.append(f"output {place}: mean error above 1.25 times stock's")
    return problems
