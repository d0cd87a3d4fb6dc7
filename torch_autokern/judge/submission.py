"""What a person hands to the judge: a folder with the source, its launch plan and, beside them or elsewhere, the key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import torch

from torch_autokern.build.candidate import Candidate, Language
from torch_autokern.errors import InvalidInputError, PlanError
from torch_autokern.ops import SPECS
from torch_autokern.ops.spec import DTYPE_CODES, OpSpec, itemsize
from torch_autokern.runtime.plan import CPU_STEPS, MAX_PLAN_BYTES, LaunchPlan, decode_plan
from torch_autokern.store.key import DeviceType, KernelKey, Scalar, TensorKey

SOURCES: dict[str, Language] = {"kernel.cpp": "cpp", "kernel.cu": "cuda", "kernel.py": "triton"}
PLAN, KEY, IDEA = "plan.json", "key.json", "idea.txt"
_MAX_SOURCE_BYTES = 1 << 20
_MAX_KEY_BYTES = 1 << 16
_MAX_TRIED_BYTES = 64 << 20


class TensorWords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor as a person writes it; without strides it is contiguous."""

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...] | None = None


class KeyWords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key as a person writes it: stock says what the results look like. `op` may come from the command line instead."""

    tensors: tuple[TensorWords | None, ...]
    scalars: dict[str, Scalar] = {}
    op: str = ""


class Submission(msgspec.Struct, frozen=True):
    """A candidate and the key that it is judged on."""

    candidate: Candidate
    key: KernelKey


def read_submission(folder: Path, op: str | None = None, key_file: Path | None = None) -> Submission:
    """Read and check a candidate's folder. `op` and `key_file` stand in for what `key.json` in the folder says.

    Raises:
        InvalidInputError: a file is missing, too large or not what it should be; the message names it.
    """
    if not folder.is_dir():
        raise InvalidInputError(f"{folder} is no folder; expected one with a kernel and {PLAN}")
    there = [name for name in SOURCES if (folder / name).exists()]
    if len(there) != 1:
        seen = f"{folder} has {' and '.join(there)}" if there else f"{folder / 'kernel.cpp'} is missing"
        raise InvalidInputError(f"{seen}; a candidate is one of {', '.join(SOURCES)}")
    language = SOURCES[there[0]]
    device_type: DeviceType = "cpu" if language == "cpp" else "cuda"
    source = _read(folder / there[0], _MAX_SOURCE_BYTES)
    plan = _plan(folder / PLAN, there[0], device_type)
    idea = _read(folder / IDEA, _MAX_KEY_BYTES).strip() if (folder / IDEA).exists() else ""
    key = read_key(key_file or folder / KEY, op, device_type)
    return Submission(Candidate(language, source, plan, idea, "judge"), key)


def read_key(path: Path, op: str | None = None, device_type: DeviceType = "cpu") -> KernelKey:
    """A key of a type of device from a file: whole, as records hold it, or short (`KeyWords`).

    Raises:
        InvalidInputError: no such file, not a key, an unknown op, or arguments that the op refuses.
    """
    if not path.exists():
        raise InvalidInputError(f"no key: {path} does not exist; write one, or name it with --key FILE")
    raw = _read(path, _MAX_KEY_BYTES).encode()
    try:
        fields = msgspec.json.decode(raw, type=dict[str, Any])
        kind: type[KernelKey] | type[KeyWords] = KernelKey if "outputs" in fields else KeyWords
        words = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInputError(f"{path} is no key: {error}") from error
    name = words.op or op or ""
    if op is not None and name != op:
        raise InvalidInputError(f"{path} is a key of {name}, --op says {op}")
    if name not in SPECS:
        raise InvalidInputError(f"{path}: op {name!r} is unknown; known: {', '.join(SPECS)}")
    try:
        return whole_key(SPECS[name], words, device_type)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, OverflowError, InvalidInputError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidInputError(f"{path}: {name} does not take these arguments: {first}") from error


def whole_key(spec: OpSpec, words: KernelKey | KeyWords, device_type: DeviceType = "cpu") -> KernelKey:
    """The key of a person's words, results as stock gives them: of zeros, or where they are large, of tensors without data.

    Raises:
        InvalidInputError: another number of tensors than the op has, another device, or other results than stock's.
    """
    if isinstance(words, KernelKey) and words.device_type != device_type:
        raise InvalidInputError(f"the key is one of device {words.device_type}, the kernel runs on {device_type}")
    wanted = sum("tensor" in arg.kind for arg in spec.args)
    if len(words.tensors) != wanted:
        raise InvalidInputError(f"{len(words.tensors)} tensors are given, expected {wanted}")
    size = sum(math.prod(t.sizes) * itemsize(t.dtype) for t in words.tensors if t is not None and t.dtype in DTYPE_CODES)
    device = "cpu" if size <= _MAX_TRIED_BYTES else "meta"
    tensors = [None if t is None else _tensor(t, device) for t in words.tensors]
    scalars = {name: tuple(v) if isinstance(v, list) else v for name, v in words.scalars.items()}
    made = spec.key(tensors, scalars, flush_denormal=getattr(words, "flush_denormal", False))
    made = made if device_type == "cpu" else _on_gpu(made)
    if isinstance(words, KeyWords):
        return made
    shown = [None if t is None else (t.dtype, t.sizes) for t in words.outputs]
    stock = [None if t is None else (t.dtype, t.sizes) for t in made.outputs]
    if shown != stock:
        raise InvalidInputError(f"outputs are {shown}, stock returns {stock}")
    return words


def _on_gpu(made: KernelKey) -> KernelKey:
    """A CPU call's key as the same call has it on a GPU, which need not be here: its allocator aligns, and LayerNorm returns
    mean and rstd in the dtype that it accumulates in."""

    def aligned(layout: TensorKey | None, dtype: str = "") -> TensorKey | None:
        return None if layout is None else msgspec.structs.replace(layout, alignment_bytes=16, dtype=dtype or layout.dtype)

    statistics = "float32" if made.op == "native_layer_norm" else ""
    outputs = tuple(aligned(layout, statistics if index else "") for index, layout in enumerate(made.outputs))
    return msgspec.structs.replace(
        made, device_type="cuda", tensors=tuple(aligned(t) for t in made.tensors), outputs=outputs, matmul_precision="ieee"
    )


def _tensor(layout: TensorKey | TensorWords, device: str) -> torch.Tensor:
    if layout.dtype not in DTYPE_CODES:
        raise InvalidInputError(f"dtype {layout.dtype!r} is unknown; known: {', '.join(DTYPE_CODES)}")
    if any(size < 0 for size in layout.sizes):
        raise InvalidInputError(f"sizes {layout.sizes} are negative")
    dtype = getattr(torch, layout.dtype)
    if layout.strides is None:
        return torch.zeros(layout.sizes, dtype=dtype, device=device)
    if len(layout.strides) != len(layout.sizes) or any(stride < 0 for stride in layout.strides):
        raise InvalidInputError(f"strides {layout.strides} do not fit sizes {layout.sizes}")
    return torch.empty_strided(layout.sizes, layout.strides, dtype=dtype, device=device)


def _plan(path: Path, source: str, device_type: DeviceType) -> LaunchPlan:
    try:
        plan = decode_plan(_read(path, MAX_PLAN_BYTES).encode())
    except PlanError as error:
        raise InvalidInputError(f"{path}: {error}") from error
    if isinstance(plan.steps[0], CPU_STEPS) != (device_type == "cpu"):  # a plan never mixes them
        seen, wanted = ("GPU", "CPU") if device_type == "cpu" else ("CPU", "GPU")
        raise InvalidInputError(f"{path}: the plan has {seen} steps, and {source} runs on a {wanted}")
    return plan


def _read(path: Path, most: int) -> str:
    try:
        raw = path.read_bytes() if path.stat().st_size <= most else None
        text = None if raw is None else raw.decode()
    except FileNotFoundError as error:
        raise InvalidInputError(f"{path} is missing") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"cannot read {path} as text: {error}") from error
    if text is None:
        raise InvalidInputError(f"{path} is larger than {most} bytes")
    return text
