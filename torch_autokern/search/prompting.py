"""What a model is told. The words are the text files in `prompts/`; here their places are filled from a brief.

Everything measured comes from the journal, so the same run gives the same prompts, to the byte.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Sequence
from importlib import resources

from torch_autokern.judge.outcome import Accuracy, Refusal, ScreenResult
from torch_autokern.ops import spec_of
from torch_autokern.ops.function import GRAPH, FunctionSpec
from torch_autokern.ops.graph import listing
from torch_autokern.ops.spec import OpSpec
from torch_autokern.runtime.plan import (
    MAX_ARGS,
    MAX_STEPS,
    MAX_WORKSPACES,
    CpuStep,
    InputArg,
    KernelStep,
    LaunchPlan,
    OutputArg,
    encode_plan,
)
from torch_autokern.search.nodes import Example, Idea, Proof
from torch_autokern.search.outcome import describe_key, profile
from torch_autokern.search.tried import Brief, Tried, parents
from torch_autokern.store.key import KernelKey, canonical_json

NAMES = ("system", "task", "ideas", "kernel", "repair", "again", "lesson")
MAX_SOURCE_CHARS = 24_000  # of one kernel in a prompt
MAX_EXAMPLE_CHARS = 8_000  # of a neighbouring key's kernel
MAX_MESSAGE_CHARS = 4_000  # of a compiler's or the judge's words
MAX_LISTED = 60  # ideas, newest last
_PLACE = re.compile(r"@([a-z_]+)@")
_RULES = {
    "cpp": (
        "C++17 for GCC and Clang, compiled with -O3 for this machine's instructions (no -ffast-math). Headers: freestanding "
        "ones, <math.h>, <string.h>, <stdint.h>, <immintrin.h> and the like. Exported functions are extern "
        '"C" and named by the plan. Forbidden: inline assembly, global or thread-local variables that are written, '
        "constructors, allocation, system calls, clocks, threads, #line, other headers. Addresses promise the alignment that "
        "the call states, no more. Do not change rounding or denormal modes."
    ),
    "cuda": (
        'CUDA C++ for NVRTC, kernels extern "C" __global__ and named by the plan. Forbidden: written global variables, '
        "printf, device-side launches, clocks, inline PTX that leaves the kernel. Everything runs on the caller's stream."
    ),
}


@functools.cache
def template(name: str) -> str:
    """One text file of `prompts/`."""
    return (resources.files("torch_autokern.search") / "prompts" / f"{name}.txt").read_text(encoding="utf-8")


def fill(name: str, **values: object) -> str:
    """A text with every place filled. What is filled in is not looked at again, so no kernel can fill places of its own.

    Raises:
        KeyError: a place has no value.
    """
    return _PLACE.sub(lambda match: str(values[match[1]]), template(name)).strip() + "\n"


def language_of(brief: Brief) -> str:
    """What a kernel for this device is written in."""
    return "cpp" if brief.key.device_type == "cpu" else "cuda"


def task(brief: Brief, accuracy: Accuracy) -> str:
    """The part that every request shares."""
    spec = spec_of(brief.key)
    best, diverse = parents(brief.tried)
    return fill(
        "task",
        op=f"{_name(spec)}, arguments in order: {', '.join(f'{arg.name} ({arg.kind})' for arg in spec.args)}",
        reference=_reference(spec),
        key=_key_words(brief.key),
        machine=_machine(brief),
        accuracy=_accuracy_words(accuracy),
        plan=_plan_words(brief.key),
        rules=_RULES[language_of(brief)] + _bans(brief),
        best="\n".join(_kernel(one, brief) for one in best) or "None yet.",
        diverse="\n".join(_kernel(one, brief) for one in diverse) or "None yet.",
        examples=_examples(brief),
        ideas=_ideas(brief),
        lessons=_list(brief.lessons),
        hints=_list(brief.hints),
    )


def refusal_words(refusal: Refusal) -> str:
    """All that helps an author: the reason, the judge's or compiler's words, the first wrong elements, family and seed."""
    lines = [f"{refusal.reason.value}: {refusal.message[:MAX_MESSAGE_CHARS]}"]
    if refusal.family:
        lines.append(f"Input family {refusal.family}, seed {refusal.seed}, result {refusal.output}.")
    lines += [f"At {list(place.index)}: got {place.got}, expected {place.expected}." for place in refusal.first]
    if not refusal.first and refusal.first_wrong is not None:
        lines.append(f"At {list(refusal.first_wrong)}: got {refusal.got}, expected {refusal.expected}.")
    if refusal.error is not None and refusal.stock_error is not None:
        limit = "" if refusal.limit is None else f", the limit {refusal.limit:.3g}"
        lines.append(f"Its error is {refusal.error:.3g} of the natural scale, PyTorch's own {refusal.stock_error:.3g}{limit}.")
    return "\n".join(lines)


def outcome_words(one: Tried) -> str:
    """How a candidate ended, in a few words."""
    if isinstance(one.judged, Proof):
        timing = one.judged.verdict.timings[0]
        return f"proved, {timing.ratio:.2f}x ({timing.ratio_low:.2f} to {timing.ratio_high:.2f}), {timing.candidate_us:.1f} us"
    refusal = one.refusal
    if refusal is not None:
        timed = f", {refusal.best_ratio:.2f}x" if refusal.best_ratio else ""
        return f"refused: {refusal.reason.value}{timed}: {_first_line(refusal.message)}"
    if isinstance(one.screened, ScreenResult):
        return f"right on a first look, {one.screened.ratio:.2f}x, {one.screened.candidate_us:.1f} us"
    return "not tried"


def _name(spec: OpSpec) -> str:
    if isinstance(spec, FunctionSpec):
        return f"The function {spec.name.split(':')[1]}, as one kernel"
    return f"aten::{spec.name}"


def _reference(spec: OpSpec) -> str:
    if isinstance(spec, FunctionSpec):
        assert spec.graph is not None
        return f"# All tensors as float64.\n{listing(spec.graph, [arg.name for arg in spec.args])}"
    return _source_of(spec.reference)


def _source_of(function: object) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function)).rstrip()  # type: ignore[arg-type]
    except (OSError, TypeError):
        return f"# {getattr(function, '__name__', 'reference')}: no source at hand"


def _key_words(key: KernelKey) -> str:
    lines = [describe_key(key)]
    for kind, tensors in (("argument", key.tensors), ("result", key.outputs)):
        for number, tensor in enumerate(tensors):
            words = "absent" if tensor is None else (
                f"{tensor.dtype}, sizes {list(tensor.sizes)}, strides {list(tensor.strides)}, "
                f"addresses are multiples of {tensor.alignment_bytes} bytes"
            )  # fmt: skip
            lines.append(f"- {kind} {number}: {words}")
    lines += [f"- {name} = {value}" for name, value in sorted(key.scalars.items()) if name != GRAPH]
    return "\n".join(lines)


def _machine(brief: Brief) -> str:
    target, ceiling = brief.target, brief.ceiling
    threads = f", {target.threads} threads" if target.threads else ""
    lines = [f"{target.name}, {target.arch}{threads}."]
    if ceiling is not None:
        lines.append(
            f"PyTorch takes {ceiling.stock_us:.1f} us. Measured here: copying the call's bytes takes {ceiling.copy_us:.1f} us."
        )
        if ceiling.flops_per_s:
            lines.append(f"A large product runs at {ceiling.flops_per_s / 1e9:.1f} GFLOP/s.")
        if ceiling.limit_us:
            lines.append(
                f"So {ceiling.limit_us:.1f} us is about the least; PyTorch is at "
                f"{ceiling.limit_us / max(ceiling.stock_us, 1e-9):.0%} of that limit."
            )
        lines.append(f"PyTorch's profile: {profile(brief.key, ceiling.stock_us)}.")
    return "\n".join(lines)


def _accuracy_words(accuracy: Accuracy) -> str:
    if accuracy.kind == "tolerance":
        return f"Every element within {accuracy.atol} + {accuracy.rtol} * |truth| of the float64 truth."
    if accuracy.kind == "exact":
        return "Every bit as PyTorch's own result."
    return (
        "The error against the float64 truth may not exceed PyTorch's own (1.25 times its root mean square, twice its largest)."
    )


def _plan_words(key: KernelKey) -> str:
    pointers = (InputArg(0), OutputArg(0))
    limits = f"At most {MAX_STEPS} steps, {MAX_ARGS} arguments a step, {MAX_WORKSPACES} workspaces."
    if key.device_type == "cpu":
        example = encode_plan(LaunchPlan(1, (CpuStep("run", 1024, 64, pointers),))).decode()
        words = (
            'A step of kind "cpu" calls extern "C" void entry(int64_t begin, int64_t end, void* const* pointers) for pieces '
            "[begin, end) of [0, range), each at least grain long, on several threads at once; pointers are those of args, "
            "in order."
        )
        if spec_of(key).uses_matmul_precision:
            words += (
                ' A step of kind "library" with function mm, addmm, bmm or baddbmm, operands (indices of inputs) and output is '
                "PyTorch's own product, written into that output."
            )
    else:
        example = encode_plan(LaunchPlan(1, (KernelStep("run", (1024, 1, 1), (256, 1, 1), pointers),))).decode()
        words = (
            'A step of kind "kernel" launches entry with grid, block, cluster and shared_bytes of dynamic shared memory. '
            "Arguments: input, output, workspace (pointers with offset_bytes), int and float with value and bits, tensor_map. "
            'A step of kind "memset" fills.'
        )
    spaces = 'Workspaces: {"name": "...", "size_bytes": N, "zeroed": false}, used by {"kind": "workspace", "name": "..."}.'
    return f"{words}\nSteps run one after another. {spaces} {limits}\nExample: {example}"


def _bans(brief: Brief) -> str:
    return "".join(f"\nBanned by a person: whatever matches /{ban}/." for ban in brief.bans)


def _kernel(one: Tried, brief: Brief) -> str:
    share = ""
    if brief.ceiling is not None and brief.ceiling.limit_us and one.time_us:
        share = f", {brief.ceiling.limit_us / one.time_us:.0%} of the limit"
    source = one.candidate.source
    cut = "" if len(source) <= MAX_SOURCE_CHARS else f"\n... ({len(source) - MAX_SOURCE_CHARS} more characters)"
    plan = canonical_json(one.candidate.plan).decode()
    figures = f"\nProfile: {profile(brief.key, one.time_us)}." if one.time_us else ""
    head = f"### {one.node.id}: {outcome_words(one)}{share}\n{one.candidate.idea}{figures}"
    return f"{head}\n```{one.candidate.language}\n{source[:MAX_SOURCE_CHARS]}{cut}\n```\nPlan: {plan}"


def _examples(brief: Brief) -> str:
    return "\n".join(_example(one, brief.sources.get(one.source, "")) for one in brief.examples) or "None."


def _example(one: Example, source: str) -> str:
    head = f"### {one.words} ({one.ratio:.2f}x, for {one.key_words})"
    if not source:
        return head
    cut = "" if len(source) <= MAX_EXAMPLE_CHARS else f"\n... ({len(source) - MAX_EXAMPLE_CHARS} more characters)"
    return f"{head}\n```\n{source[:MAX_EXAMPLE_CHARS]}{cut}\n```"


def _ideas(brief: Brief) -> str:
    by_idea: dict[str, list[Tried]] = {}
    for one in brief.tried:
        by_idea.setdefault(one.node.idea, []).append(one)
    lines = []
    for idea in list(brief.ideas)[-MAX_LISTED:]:
        lines.append(f"- {idea.text} (by {idea.author})")
        lines += [f"  - {outcome_words(one)}" for one in by_idea.get(idea.id, ())]
    lines += [f"- {node.words}: dropped, {node.dropped} of {node.dropped_for}" for node in list(brief.dropped)[-10:]]
    return "\n".join(lines) or "None yet."


def idea_words(idea: Idea) -> str:
    """An idea and whose it is."""
    return f"{idea.text} (by {idea.author})"


def _list(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in list(lines)[-MAX_LISTED:]) or "None yet."


def _first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 300 else line[:300] + " ..."
