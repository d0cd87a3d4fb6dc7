"""Where a run's time and tokens went."""

from __future__ import annotations

import msgspec

from torch_autokern.search.nodes import (
    Complete,
    Example,
    Idea,
    Measured,
    Node,
    Offered,
    Outcome,
    Reply,
)
from torch_autokern.search.run import Run


class Part(msgspec.Struct, frozen=True):
    """A part of the run's time, in seconds."""

    name: str
    seconds: float


class ModelTold(msgspec.Struct, frozen=True):
    """What a model was asked for one purpose. `charged` counts answers whose tokens are our upper bound."""

    model: str
    purpose: str
    requests: int
    tokens_in: int
    tokens_out: int
    money: float
    errors: int
    charged: int


class Spending(msgspec.Struct, frozen=True):
    """Time is the run's own clock: each node's distance to the one before it, by what the later one is. So requests side by
    side count once, and the parts add up to the whole."""

    seconds: float
    parts: tuple[Part, ...]
    models: tuple[ModelTold, ...]

    @property
    def tokens_in(self) -> int:
        """Of all models."""
        return sum(one.tokens_in for one in self.models)

    @property
    def tokens_out(self) -> int:
        """Of all models."""
        return sum(one.tokens_out for one in self.models)

    @property
    def money(self) -> float:
        """In the currency of the run's price table."""
        return sum(one.money for one in self.models)


def spending(run: Run) -> Spending:
    """Add up the journal."""
    seconds: dict[str, float] = {}
    clock = 0.0
    for node in run.nodes:
        name = _activity(node)
        # Threads write side by side: a node may stand after one that is a moment later.
        seconds[name] = seconds.get(name, 0.0) + max(0.0, node.at - clock)
        clock = max(clock, node.at)
    parts = sorted((Part(name, total) for name, total in seconds.items() if total > 0), key=lambda part: -part.seconds)
    rows: dict[tuple[str, str], list[Reply]] = {}
    for reply in run.every(Reply):
        rows.setdefault((reply.model, _purpose(reply.id)), []).append(reply)
    models = [
        ModelTold(
            model, purpose, len(replies), sum(one.tokens_in for one in replies), sum(one.tokens_out for one in replies),
            sum(one.money for one in replies), sum(bool(one.error) for one in replies), sum(one.charged for one in replies),
        )
        for (model, purpose), replies in rows.items()
    ]  # fmt: skip
    return Spending(sum(part.seconds for part in parts), tuple(parts), tuple(models))


def _activity(node: Node) -> str:
    if isinstance(node, Outcome):
        return "verdicts" if node.stage == "judge" else "building and screening"
    if isinstance(node, Reply):
        return "waiting for models"
    if isinstance(node, Measured):
        return "measuring the limit"
    if isinstance(node, (Idea, Offered, Complete, Example)):
        return "reading proposals"
    return "bookkeeping and people"


def _purpose(reply_id: str) -> str:
    words = reply_id.removesuffix(".again")
    again = " (again)" if words != reply_id else ""
    last = words.rpartition(".")[2]
    kind = {"ideas": "ideas", "lessons": "lessons"}.get(last, "mending" if last.startswith("f") else "kernels")
    return kind + again
