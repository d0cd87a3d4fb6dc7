"""Which candidates are the same thing in other words, and how far two kernels are from each other."""

from __future__ import annotations

import functools
import hashlib
import re

from torch_autokern.build.candidate import Candidate
from torch_autokern.runtime.plan import encode_plan

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PYTHON_COMMENT = re.compile(r"#[^\n]*")
_TOKEN = re.compile(r"[A-Za-z_]\w*|(?:0[xX])?[\d.]+(?:[eEpP][+-]?\d+)?\w*|\S")
_TYPEDEF = re.compile(r"\btypedef\b[^;]*?\b([A-Za-z_]\w*)\s*(?:__attribute__[^;]*)?;")
_TYPES = {"int", "float", "double", "auto", "bool", "char", "long", "short", "unsigned", "size_t"}
_SHINGLE = 5


@functools.lru_cache(maxsize=4096)
def _tokens(language: str, source: str) -> tuple[str, ...]:
    comment = _PYTHON_COMMENT if language == "triton" else _COMMENT
    return tuple(_TOKEN.findall(comment.sub(" ", source)))


def fingerprint(candidate: Candidate) -> str:
    """Equal for candidates that differ in comments, white space and the names of local variables only, with one plan.

    Every number, intrinsic and operator counts: another constant may be another kernel.
    """
    words = _tokens(candidate.language, candidate.source)
    if candidate.language != "triton":
        words = _renamed(words, candidate.source)
    words = words or (candidate.source,)
    body = "\x00".join(words).encode() + b"\x01" + encode_plan(candidate.plan)
    return hashlib.sha256(candidate.language.encode() + body).hexdigest()


def _renamed(words: tuple[str, ...], source: str) -> tuple[str, ...]:
    types = _TYPES | set(_TYPEDEF.findall(source))
    declared: dict[str, str] = {}
    for place in range(1, len(words) - 1):
        word = words[place]
        before = words[place - 1]
        if before in ("*", "&") and place > 1:
            before = words[place - 2]
        is_name = (word[0].isalpha() or word[0] == "_") and word not in types
        is_declared = before in types or before.endswith("_t")
        if is_name and is_declared and words[place + 1] in ("=", ";", ",", ")", "[", ":"):
            declared.setdefault(word, f"@{len(declared)}")
    return tuple(declared.get(word, word) for word in words)


@functools.lru_cache(maxsize=4096)
def _shingles(language: str, source: str) -> frozenset[tuple[str, ...]]:
    words = _tokens(language, source)
    return frozenset(words[i : i + _SHINGLE] for i in range(max(1, len(words) - _SHINGLE + 1)))


def distance(first: Candidate, second: Candidate) -> float:
    """1 minus the shared part of the runs of five tokens: 0 for equal sources, 1 where nothing is shared."""
    if first.language != second.language:
        return 1.0
    a, b = (_shingles(one.language, one.source) for one in (first, second))
    return 1.0 - len(a & b) / max(1, len(a | b))
