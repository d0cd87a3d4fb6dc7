"""What in an accepted kernel deserves a person's second look. None of it is a fault: the judge accepted the kernel with it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from torch_autokern.judge.outcome import JUDGE_VERSION
from torch_autokern.store.record import KernelRecord

# A published result above this is more often a slow baseline or a fault than a discovery.
PARANOID_RATIO = 2.0
_LONG_LINE = 240
_DENSE_CHARS = 40  # letters and digits in a row that no name needs

# What is seen, and the signs of it, in C++, CUDA and Triton sources.
_SIGNS: dict[str, tuple[str, ...]] = {
    "atomics: the order of sums may differ from run to run": (
        r"\batomic\w*\s*\(", r"__atomic_", r"__sync_", r"std::atomic", r"\btl\.atomic_", r"\bred\.(global|shared)",
    ),
    "changes the compiler's rules for arithmetic": (
        r"#\s*pragma\s+(GCC|clang)\s+optimize", r"-ffast-math", r"\bfp\s+contract", r"__attribute__\s*\(\(\s*optimize",
    ),
    "inline assembly": (r"\b(asm|__asm__|inline_asm\w*)\b",),
    "volatile: waits on memory, or hides a value from the compiler": (r"\bvolatile\b",),
    "synchronises by hand across threads or blocks": (
        r"__threadfence", r"cooperative_groups", r"\b(grid|cluster)\.sync\b", r"barrier\.cluster", r"\bmbarrier\b",
        r"cp\.async",
    ),
    "jumps": (r"\bgoto\b", r"\b(set|long)jmp\b"),
    "reads bits as another type": (r"\breinterpret_cast\b", r"\bunion\b", r"__builtin_bit_cast", r"__float_as_u?int"),
    "promises the compiler something that only the plan can hold": (
        r"__builtin_(assume|unreachable)", r"\b__assume\b", r"assume_aligned", r"\btl\.(multiple_of|max_contiguous)\b",
    ),
    "arithmetic below fp32, or tensor cores": (
        r"__half", r"\b(__nv_)?bf(loat)?16", r"\btf32\b", r"mma\.sync", r"wgmma", r"\btl\.dot\b", r"_Float16",
    ),
    "approximate functions": (
        r"\b__(exp|log|sin|cos|pow|fdivide|frcp|frsqrt)\w*\s*\(", r"\brsqrtf?\s*\(", r"_mm\d*_r(cp|sqrt)\d*",
    ),
    "changes rounding or denormals": (r"_MM_SET_(FLUSH|DENORMALS|ROUNDING)", r"_mm_setcsr", r"\bfesetround\b"),
    "reads a clock": (r"\b(clock64|globaltimer|__rdtsc)\b", r"\bclock\s*\("),
}  # fmt: skip
_COMPILED = {words: re.compile("|".join(signs)) for words, signs in _SIGNS.items()}
_DENSE = re.compile(rf"(?<!\w)(?=\w*\d)\w{{{_DENSE_CHARS},}}")


def risks(record: KernelRecord, source: str) -> Iterator[str]:
    """Each with the line where it was seen, or with the figure of the record."""
    for words, signs in _COMPILED.items():
        found = signs.search(source)
        if found is not None:
            yield f"line {_line(source, found.start())}: {words}"
    yield from _of_record(record)
    long = next((number for number, line in enumerate(source.splitlines(), 1) if len(line) > _LONG_LINE), None)
    if long is not None:
        yield f"line {long}: more than {_LONG_LINE} characters"
    dense = _DENSE.search(source)
    if dense is not None:
        yield f"line {_line(source, dense.start())}: data or names that nobody can read"
    strange = next((place for place, letter in enumerate(source) if _is_invisible(letter)), None)
    if strange is not None:
        code = f"U+{ord(source[strange]):04X}"
        yield f"line {_line(source, strange)}: an invisible character ({code}): what you read need not be what is compiled"


def _of_record(record: KernelRecord) -> Iterator[str]:
    verdict = record.verdict
    if verdict.determinism == "not_guaranteed":
        yield "results may differ from run to run"
    if verdict.accuracy_class == "tolerance":
        yield f"proved within bounds only (atol {verdict.atol:g}, rtol {verdict.rtol:g})"
    if verdict.judge_version != JUDGE_VERSION:
        yield f"judged by version {verdict.judge_version} of the judge, this is {JUDGE_VERSION}"
    best = max((timing.ratio for timing in verdict.timings), default=0.0)
    if best > PARANOID_RATIO:
        yield f"{best:.1f}x: above {PARANOID_RATIO:g}x look for work that is left out, or for a slow baseline"


def _line(source: str, place: int) -> int:
    return source.count("\n", 0, place) + 1


def _is_invisible(letter: str) -> bool:
    return unicodedata.category(letter).startswith("C") and letter not in "\n\t\r"
