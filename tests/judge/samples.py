"""Candidates in `tests/cheats/` and `tests/honest/`: one file each (C++, CUDA C++ or Triton), its task in JSON at the top.

`sizes`, `dtype` ("float32") and `normalized` (how many trailing dimensions LayerNorm covers) make the key, or `tensors` and
`scalars` as `autokern judge` takes them. `args` name tensors (x, weight, bias, y, mean, rstd; input0, output0 and so on; four
bytes further on is "x+4") or workspaces; a GPU kernel's may also be integers of 32 bits. `reason` lists the reasons that may
refuse it, null for an honest kernel.
"""

from __future__ import annotations

import datetime
import functools
import json
from pathlib import Path
from typing import Any

import msgspec
import torch

from torch_autokern.build.candidate import Artifact, Candidate, Language
from torch_autokern.build.compile import compile_candidate
from torch_autokern.errors import BuildError, StaticRuleError
from torch_autokern.judge.outcome import Reason, Refusal
from torch_autokern.judge.submission import SOURCES, KeyWords, TensorWords, whole_key
from torch_autokern.judge.verdict import check
from torch_autokern.ops import SPECS
from torch_autokern.runtime.plan import (
    CpuStep,
    InputArg,
    IntArg,
    KernelArg,
    KernelStep,
    LaunchPlan,
    LibraryStep,
    OutputArg,
    PointerArg,
    Step,
    Workspace,
    WorkspaceArg,
    encode_plan,
)
from torch_autokern.runtime.target import local_target
from torch_autokern.store.key import KernelKey, Target

ROOT = Path(__file__).parent.parent
_INPUTS = {"x": 0, "weight": 1, "bias": 2}
_OUTPUTS = {"y": 0, "mean": 1, "rstd": 2}
GPU = (".cu", ".py")
_LANGUAGES: dict[str, Language] = {".cpp": "cpp", ".cu": "cuda", ".py": "triton"}
_ARCH = "sm_90a"  # what GPU candidates are built for where there is no GPU
_BEFORE_IT_RUNS = {"static_rule", "build_failed"}


class Sample:
    """One file: its key, its candidate and the reasons that may refuse it."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self.language = _LANGUAGES[path.suffix]
        self.source = path.read_text()
        start = self.source.index("{")
        end = self.source.index('"""' if self.language == "triton" else "*/", start)
        head: dict[str, Any] = json.loads(self.source[start:end])
        self.reasons: list[str] = [] if head["reason"] is None else head["reason"]
        self.key = _key(head) if self.language == "cpp" else _gpu_key(head)
        steps = tuple((_cpu_step if self.language == "cpp" else _gpu_step)(step) for step in head["steps"])
        workspaces = tuple(Workspace(**workspace) for workspace in head.get("workspaces", ()))
        self.candidate = Candidate(self.language, self.source, LaunchPlan(1, steps, workspaces), head["idea"], "tests")

    @property
    def is_refused_before_it_runs(self) -> bool:
        """Whether no device is needed to refuse it."""
        return bool(self.reasons) and set(self.reasons) <= _BEFORE_IT_RUNS

    @property
    def target(self) -> Target:
        """This machine, of the candidate's kind; a GPU that it can be built for where there is none."""
        if self.language == "cpp":
            return target()
        return local_target("cuda") if torch.cuda.is_available() else Target("cuda", "none", _ARCH, 0)

    def build(self) -> Artifact:
        """Compile in the box."""
        return compile_candidate(self.candidate, self.target, key=self.key)

    def write(self, folder: Path) -> Path:
        """The folder that `autokern judge` takes."""
        folder.mkdir()
        (folder / next(name for name, language in SOURCES.items() if language == self.language)).write_text(self.source)
        (folder / "plan.json").write_bytes(encode_plan(self.candidate.plan))
        (folder / "key.json").write_bytes(msgspec.json.encode(self.key))
        return folder


@functools.cache
def target() -> Target:
    """This machine, with two threads: enough to cut a range."""
    return local_target("cpu", 2)


def samples(folder: str, suffixes: tuple[str, ...] = (".cpp",)) -> list[Sample]:
    """Every file of `cheats` or `honest` in these languages."""
    return [Sample(path) for suffix in suffixes for path in sorted((ROOT / folder).glob(f"*{suffix}"))]


def third_of(found: list[Sample], number: int) -> list[Sample]:
    """Every third one, from `number` on."""
    return found[number % 3 :: 3]


def third_of_today() -> int:
    """Which third the fast tier runs: another one every day."""
    return datetime.date.today().toordinal() % 3


def built(sample: Sample) -> Artifact | Refusal:
    """A candidate's artifact, or what the build says against it."""
    try:
        return sample.build()
    except StaticRuleError as error:
        return Refusal(Reason.STATIC_RULE, str(error))
    except BuildError as error:
        return Refusal(Reason.BUILD_FAILED, str(error))


def checked(sample: Sample, trials: int = 2) -> Refusal | None:
    """What the build and the full check, without timing, say against a candidate. GPU candidates are our own: where a GPU's
    box is too weak for strangers, they run in it all the same."""
    artifact = built(sample)
    if isinstance(artifact, Refusal):
        return artifact
    found = check(artifact, sample.key, sample.target, trials=trials, allow_weak_box=sample.language != "cpp")
    return found if isinstance(found, Refusal) else None


def softmax_key(*sizes: int, dim: int = -1, op: str = "_softmax", dtype: torch.dtype = torch.float32) -> KernelKey:
    """A contiguous key."""
    return SPECS[op].key([torch.zeros(sizes, dtype=dtype)], {"dim": dim, "half_to_float": False})


def layer_norm_key(*sizes: int, normalized: int = 1, dtype: torch.dtype = torch.float32) -> KernelKey:
    """A contiguous key with weight and bias."""
    shape = tuple(sizes[len(sizes) - normalized :])
    tensors = [torch.zeros(sizes, dtype=dtype), torch.ones(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)]
    return SPECS["native_layer_norm"].key(tensors, {"normalized_shape": shape, "eps": 1e-5})


def _key(head: dict[str, Any]) -> KernelKey:
    if "tensors" in head:
        words = msgspec.convert({name: head[name] for name in ("op", "tensors", "scalars")}, KeyWords)
        return whole_key(SPECS[words.op], words)
    dtype = getattr(torch, head.get("dtype", "float32"))
    if head["op"] == "native_layer_norm":
        return layer_norm_key(*head["sizes"], normalized=head["normalized"], dtype=dtype)
    return softmax_key(*head["sizes"], dim=head["scalars"]["dim"], op=head["op"], dtype=dtype)


def _gpu_key(head: dict[str, Any]) -> KernelKey:
    words = KeyWords((TensorWords(head.get("dtype", "float32"), tuple(head["sizes"])),), head["scalars"], head["op"])
    return whole_key(SPECS[words.op], words, "cuda")


def _cpu_step(step: dict[str, Any]) -> Step:
    if "function" in step:
        return LibraryStep(step["function"], tuple(step["operands"]))
    return CpuStep(step["entry"], step["range"], step["grain"], tuple(_arg(name) for name in step["args"]))


def _gpu_step(step: dict[str, Any]) -> Step:
    args: tuple[KernelArg, ...] = tuple(IntArg(int(word), 32) if word.isdigit() else _arg(word) for word in step["args"])
    triples = (tuple(step["grid"]), tuple(step["block"]))
    return KernelStep(step["entry"], *triples, args, shared_bytes=step.get("shared_bytes", 0))


def _arg(text: str) -> PointerArg:
    name, _, offset = text.partition("+")
    offset_bytes = int(offset or 0)
    if name.startswith(("input", "output")) and name[-1].isdigit():
        return (InputArg if name.startswith("input") else OutputArg)(int(name[-1]), offset_bytes)
    if name in _INPUTS:
        return InputArg(_INPUTS[name], offset_bytes)
    if name in _OUTPUTS:
        return OutputArg(_OUTPUTS[name], offset_bytes)
    return WorkspaceArg(name, offset_bytes)
