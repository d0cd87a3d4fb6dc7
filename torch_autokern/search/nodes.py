"""The nodes of a run: what was thought, asked, answered, tried and decided, each a small typed value.

Ids say where a node stands and nothing else ("k0.r2.llm.i1.c0": key 0, round 2, the model proposer's idea 1, its kernel 0), so
that a run that was killed and went on has the same ids as one that was not. Long texts (prompts, replies, sources, plans) lie
beside the journal under their SHA-256.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from torch_autokern.build.candidate import Language, Parameter
from torch_autokern.judge.outcome import Refusal, ScreenResult
from torch_autokern.search.manifest import Ceiling
from torch_autokern.store.record import Verdict

Stage = Literal["screen", "judge"]
# Why a candidate was dropped before it was built.
DropReason = Literal["near_duplicate", "banned", "already_tried"]
StopReason = Literal["candidates", "tokens", "money", "time", "goal", "rounds", "no_model", "asked", "stuck", "nothing_new"]


class _Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """`at`: seconds of the run's own clock, which stands still while nothing runs."""

    id: str
    at: float


class Idea(_Node, frozen=True, tag="idea"):
    """An idea in words. `proposer` says by which door it came, `author` who had it; `parents` are candidate node ids."""

    text: str
    proposer: str
    author: str
    parents: tuple[str, ...] = ()


class Offered(_Node, frozen=True, tag="candidate"):
    """A candidate, with the names of its source and plan in `blobs/`. `repairs` is the node that it mends. `dropped` says
    why it was not built, with the node that it is too near to, or the ban that it meets, in `dropped_for`."""

    idea: str
    candidate_id: str
    language: Language
    source: str
    plan: str
    words: str
    author: str
    template: str = ""
    parameters: dict[str, Parameter] = {}
    parents: tuple[str, ...] = ()
    repairs: str = ""
    dropped: DropReason | None = None
    dropped_for: str = ""


class Complete(_Node, frozen=True, tag="complete"):
    """A proposer gave all it had for a round: the candidates' node ids, in order."""

    proposer: str
    candidates: tuple[str, ...]


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An accepted candidate: the verdict, and all that is needed to write its record again to the last bit."""

    verdict: Verdict
    record_id: str
    created: str
    stock_build: str
    identity: str
    tools: dict[str, str]
    box_level: str
    binary_sha256: str


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The judge itself failed; nothing is known of the candidate."""

    message: str


Found = ScreenResult | Refusal | Proof | Failure


class Outcome(_Node, frozen=True, tag="outcome"):
    """How a candidate's screen (`id` is its node's) or verdict ended: exactly one of the four is set. `earlier` says that
    another run had tried it and its word was taken."""

    stage: Stage
    screened: ScreenResult | None = None
    refused: Refusal | None = None
    proved: Proof | None = None
    failed: Failure | None = None
    earlier: bool = False

    @property
    def found(self) -> Found:
        """The one that is set."""
        found = self.screened or self.refused or self.proved or self.failed
        return found if found is not None else Failure("the journal says nothing")


class Reply(_Node, frozen=True, tag="reply"):
    """A model's answer. `prompt` and `text` name blobs. Without a usable answer `error` says why. `charged` tells that the
    tokens are our upper bound, because the server did not say what it used."""

    model: str
    prompt: str
    text: str
    tokens_in: int
    tokens_out: int
    money: float
    attempts: int
    error: str = ""
    refused: bool = False
    cut: bool = False
    charged: bool = False


class Lesson(_Node, frozen=True, tag="lesson"):
    """What a round taught, in words; carried on to later prompts."""

    text: str
    author: str


class Intervention(_Node, frozen=True, tag="intervention"):
    """What a person told the run, with author and time (UTC). `action` is one of `steer.ACTIONS`; `key` is the number of the
    key that it is about (None: all of them, and for a kernel key 0)."""

    action: str
    text: str
    author: str
    time: str
    file: str
    key: int | None = None


class Stuck(_Node, frozen=True, tag="stuck"):
    """A key's search got no further (`stuck.py`): why, the report in Markdown, and the question to a person."""

    key: int
    round: int
    why: Literal["no_gain", "same_failure", "nothing_new"]
    report: str
    question: str


class Example(_Node, frozen=True, tag="example"):
    """A good kernel of a neighbouring key, shown to models: its source (a blob), what it is for, and its proved ratio there."""

    source: str
    words: str
    key_words: str
    ratio: float
    record_id: str


class Measured(_Node, frozen=True, tag="measured"):
    """What the machine can do at most for a key."""

    ceiling: Ceiling


class RoundEnd(_Node, frozen=True, tag="round"):
    """A round is over: the best proved ratio so far, its node ("" for none), and the share of the measured limit reached."""

    key: int
    round: int
    best_ratio: float
    best: str
    limit_share: float


class Stop(_Node, frozen=True, tag="stop"):
    """The run ended, and why. It can be taken up again."""

    reason: StopReason
    message: str


Node = Idea | Offered | Complete | Outcome | Reply | Lesson | Intervention | Example | Measured | RoundEnd | Stuck | Stop
