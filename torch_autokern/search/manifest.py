"""What a run was asked to do: written once, before anything is tried."""

from __future__ import annotations

from typing import Literal

import msgspec

from torch_autokern.errors import InvalidInputError
from torch_autokern.judge.outcome import Accuracy
from torch_autokern.store.key import Target
from torch_autokern.store.workload import Workload

SCHEMA = "autokern.run/1"
# What a key does that got no further: wait for a person's word, go on all the same, or end.
StuckPolicy = Literal["ask", "continue", "stop"]


class Goal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a key is good enough: a proved ratio over stock, or a share of the measured limit. 0: not asked for."""

    ratio: float = 0.0
    limit: float = 0.0


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a run may spend, over all of its lives; None: no bound. Tokens count in and out together; money is in the
    currency of the price table."""

    seconds: float | None = None
    tokens: int | None = None
    money: float | None = None
    candidates: int | None = None


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a model costs, for a million tokens each way."""

    input_per_million: float
    output_per_million: float


class ModelShare(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model and its part of the requests."""

    name: str
    share: float = 1.0


class Ceiling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured on the target: copying a key's bytes (us), multiplying (FLOP/s, 0 where it does not matter), stock's time
    (us), and the least time (us) that these leave a kernel."""

    copy_us: float
    flops_per_s: float
    stock_us: float
    limit_us: float


class Ask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a run searches. `ideas` for each round and key, `kernels` for each idea, `repairs` for each kernel that fails.
    `stuck_rounds` without a gain make a key stuck; `answer_seconds` is how long a question waits (0: without end)."""

    rounds: int = 1
    ideas: int = 3
    kernels: int = 2
    repairs: int = 1
    goal: Goal = Goal()
    limits: Limits = Limits()
    proposers: tuple[str, ...] = ("templates", "bank")
    models: tuple[ModelShare, ...] = ()
    base_url: str = ""
    prices: dict[str, Price] = {}
    reply_tokens: int = 16000
    request_seconds: float = 300.0
    patience_seconds: float = 120.0
    inbox_seconds: float = 0.0
    stuck: StuckPolicy = "continue"
    stuck_rounds: int = 3
    answer_seconds: float = 0.0


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The head of a run folder. `contexts` hold what each key's trials are valid for (target, stock build, judge, accuracy,
    compiler)."""

    schema: str
    version: str
    created: str
    ask: Ask
    accuracy: Accuracy
    workload: Workload
    targets: dict[str, Target]
    stock_build: str


def check(ask: Ask) -> None:
    """Refuse what cannot be meant.

    Raises:
        InvalidInputError: says which value, and what it may be.
    """
    for name in ("rounds", "ideas", "kernels", "stuck_rounds"):
        if not 1 <= getattr(ask, name) <= 1000:
            raise InvalidInputError(f"--{name.replace('_', '-')} {getattr(ask, name)} is out of range; give 1 to 1000")
    if not 0 <= ask.repairs <= 10:
        raise InvalidInputError(f"--repairs {ask.repairs} is out of range; give 0 to 10")
    limits = ask.limits
    for name, value in (
        ("budget", limits.seconds),
        ("tokens", limits.tokens),
        ("money", limits.money),
        ("candidates", limits.candidates),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise InvalidInputError(f"--{name} {value} is no budget; give a number above 0")
    if not 0 <= ask.goal.limit <= 1 or not 0 <= ask.goal.ratio < float("inf"):
        raise InvalidInputError("a goal is ratio=NUMBER above 1, or limit=SHARE between 0 and 1, such as ratio=2 or limit=0.9")
    if "llm" in ask.proposers and not ask.models:
        raise InvalidInputError("the proposer llm needs a model; name one with --model NAME")
    missing = sorted({model.name for model in ask.models} - ask.prices.keys())
    if limits.money is not None and missing:
        raise InvalidInputError(f"--money needs the price of {', '.join(missing)}; give them with --prices FILE")
