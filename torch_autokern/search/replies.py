"""What a model or a person hands in: strict forms, read from text that may hold anything. A reply can only ever become an
idea, a lesson or a candidate; nothing in it is followed."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from torch_autokern.build.candidate import Candidate, Language
from torch_autokern.errors import InvalidInputError, PlanError
from torch_autokern.runtime.plan import CPU_STEPS, decode_plan
from torch_autokern.store.key import DeviceType

MAX_REPLY_BYTES = 1 << 20
MAX_SOURCE_CHARS = 256 << 10
MAX_IDEA_CHARS = 2000
_FENCE = re.compile(r"^\s*```[a-z]*\s*\n(.*?)\n?```\s*$", re.DOTALL)
_DEVICES: dict[Language, DeviceType] = {"cpp": "cpu", "cuda": "cuda", "triton": "cuda"}


class IdeaWords(msgspec.Struct, frozen=True):
    """One idea."""

    idea: str


class IdeasReply(msgspec.Struct, frozen=True):
    """Ideas in words."""

    ideas: tuple[IdeaWords, ...]


class KernelReply(msgspec.Struct, frozen=True):
    """A kernel: source, launch plan, and what it does in a sentence. `author` counts only in the inbox."""

    language: Language
    source: str
    plan: msgspec.Raw
    idea: str = ""
    author: str = ""


class LessonsReply(msgspec.Struct, frozen=True):
    """What a round taught."""

    lessons: tuple[str, ...]


Form = Literal["ideas", "kernel", "lessons"]
_TEXT: dict[str, Any] = {"type": "string"}
# JSON schemas for servers that can hold a model to one. Plans differ too much for strict mode.
SCHEMAS: dict[Form, dict[str, Any]] = {
    "ideas": {
        "type": "object",
        "properties": {"ideas": {"type": "array", "items": {
            "type": "object", "properties": {"idea": _TEXT}, "required": ["idea"]}}},
        "required": ["ideas"],
    },
    "kernel": {
        "type": "object",
        "properties": {
            "language": {"type": "string", "enum": ["cpp", "cuda", "triton"]}, "source": _TEXT, "idea": _TEXT,
            "plan": {"type": "object"},
        },
        "required": ["language", "source", "plan"],
    },
    "lessons": {"type": "object", "properties": {"lessons": {"type": "array", "items": _TEXT}}, "required": ["lessons"]},
}  # fmt: skip


def read_ideas(text: str, most: int) -> list[str]:
    """Ideas, at most so many, each cut to a sane length.

    Raises:
        InvalidInputError: not of the form.
    """
    reply = _decode(text, IdeasReply)
    found = [" ".join(one.idea.split())[:MAX_IDEA_CHARS] for one in reply.ideas if one.idea.strip()]
    if not found:
        raise InvalidInputError("it holds no idea")
    return list(dict.fromkeys(found))[:most]


def read_lessons(text: str, most: int) -> list[str]:
    """Lessons, as ideas."""
    found = [" ".join(one.split())[:MAX_IDEA_CHARS] for one in _decode(text, LessonsReply).lessons if one.strip()]
    return list(dict.fromkeys(found))[:most]


def read_kernel(text: str, device: DeviceType, idea: str, author: str, parents: tuple[str, ...] = ()) -> Candidate:
    """A candidate for a device.

    Raises:
        InvalidInputError: not of the form, not a plan, or for another device; the message says what to mend.
    """
    reply = _decode(text, KernelReply)
    if not reply.source.strip():
        raise InvalidInputError("the source is empty")
    if len(reply.source) > MAX_SOURCE_CHARS:
        raise InvalidInputError(f"the source has {len(reply.source)} characters; at most {MAX_SOURCE_CHARS} are read")
    try:
        reply.source.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"the source is no text: {error}") from error
    if _DEVICES[reply.language] != device:
        raise InvalidInputError(f"a {reply.language} kernel does not run on a {device} key")
    try:
        plan = decode_plan(bytes(reply.plan))
    except PlanError as error:
        raise InvalidInputError(f"the plan cannot be used: {error}") from error
    if any(isinstance(step, CPU_STEPS) != (device == "cpu") for step in plan.steps):
        raise InvalidInputError(f"the plan has steps for another device than {device}")
    words = " ".join(reply.idea.split())[:MAX_IDEA_CHARS] or idea
    return Candidate(reply.language, reply.source, plan, words, author, parents=parents)


def author_of(text: str) -> str:
    """The author that a hand-written reply names, or ""."""
    return " ".join(_decode(text, KernelReply).author.split())[:200]


def _decode(text: str, kind: type[Any]) -> Any:
    if len(text) > MAX_REPLY_BYTES:
        raise InvalidInputError(f"it has {len(text)} characters; at most {MAX_REPLY_BYTES} are read")
    fenced = _FENCE.match(text)
    body = fenced[1] if fenced else text
    start, end = body.find("{"), body.rfind("}")
    if start < 0 or end < start:
        raise InvalidInputError("it holds no JSON value")
    try:
        return msgspec.json.decode(body[start : end + 1].encode("utf-8", "replace"), type=kind, strict=True)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInputError(f"it is not the JSON that was asked for: {error}") from error
