"""What a proposer hands over (`Candidate`) and what the builder makes of it (`Artifact`)."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from torch_autokern.runtime.plan import LaunchPlan, encode_plan

Language = Literal["cpp", "cuda", "triton"]
Parameter = bool | int | float | str
BINARY_BLOBS = {"cpu": "kernel.so", "cuda": "kernel.cubin"}
_SUFFIXES = {"cpp": "cpp", "cuda": "cu", "triton": "py"}


class Candidate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Device code, its launch plan, and where it came from. There is no host code in it.

    `template` names the built-in template, "" for hand-written code; `parents` are record or candidate ids; `idea` is the
    idea in words; `author` is recorded as it is and never used by the judge.
    """

    language: Language
    source: str
    plan: LaunchPlan
    idea: str
    author: str
    template: str = ""
    parameters: dict[str, Parameter] = {}
    parents: tuple[str, ...] = ()

    @property
    def candidate_id(self) -> str:
        """SHA-256 over language, source and plan: equal code is an equal candidate, whoever wrote it."""
        digest = hashlib.sha256(self.language.encode())
        for part in (self.source.encode(), encode_plan(self.plan)):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.hexdigest()


class KernelResources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one GPU kernel takes: registers a thread, static shared bytes a block, stack bytes a thread (local memory), bytes
    spilled a thread (stores and loads together; -1 where the assembler did not say, and then the stack bounds it), and, for
    Triton, the dynamic shared bytes and threads a block that its metadata asks for (0 where the plan decides)."""

    registers: int
    static_shared_bytes: int
    stack_bytes: int
    spilled_bytes: int = -1
    dynamic_shared_bytes: int = 0
    threads: int = 0


class Artifact(msgspec.Struct, frozen=True):
    """Compiled bytes and all that is known of their making. `identity` is exported by a CPU library as the string
    ``autokern_identity`` and read back after loading; `tools` names compiler, version and flags. A GPU artifact (`kind`
    "cuda") is a cubin for `arch`, with the resources of each entry of its plan."""

    candidate: Candidate
    binary: bytes
    identity: str
    tools: dict[str, str]
    box_level: str
    build_seconds: float
    kind: Literal["cpu", "cuda"] = "cpu"
    arch: str = ""
    resources: dict[str, KernelResources] = {}

    def blobs(self) -> dict[str, bytes]:
        """What a record keeps of it, by name: plan, binary and source."""
        return {
            "plan.json": encode_plan(self.candidate.plan),
            BINARY_BLOBS[self.kind]: self.binary,
            source_blob(self.candidate.language): self.candidate.source.encode(),
        }


def source_blob(language: Language) -> str:
    """Name of the source in a record."""
    return f"source.{_SUFFIXES[language]}"
