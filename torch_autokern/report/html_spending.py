"""Where a run's time and tokens went, and what people's words brought."""

from __future__ import annotations

import re

import msgspec

from torch_autokern.search.nodes import (
    Complete,
    Example,
    Idea,
    Intervention,
    Measured,
    Node,
    Offered,
    Outcome,
    Reply,
    RoundEnd,
)
from torch_autokern.search.run import Run

_ROUND = re.compile(r"k\d{1,9}\.r\d{1,9}\.")


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


class KeyEffect(msgspec.Struct, frozen=True):
    """How a key stood around a person's word: the best proved ratio when it came, after the first round that heard it, and at
    the end (0: nothing proved, and None where no round heard it)."""

    key: int
    round: int
    before: float
    after: float | None
    end: float


class PersonTold(msgspec.Struct, frozen=True):
    """A person's word, and what followed. `tried` and `proved` count the kernels made from an idea of theirs, `dropped` what
    their ban kept from being built."""

    node: str
    at: float
    action: str
    text: str
    author: str
    time: str
    effects: tuple[KeyEffect, ...]
    tried: int = 0
    proved: int = 0
    dropped: int = 0


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


def people(run: Run) -> tuple[PersonTold, ...]:
    """Every intervention, in order."""
    return tuple(_person(run, place, node) for place, node in enumerate(run.nodes) if isinstance(node, Intervention))


def _person(run: Run, place: int, node: Intervention) -> PersonTold:
    where = _ROUND.match(node.id)
    ideas = {
        idea.id for idea in run.every(Idea)
        if node.action == "idea" and idea.text == node.text and idea.id.startswith(where[0] if where else "")
    }  # fmt: skip
    theirs = {one.id for one in run.every(Offered) if one.idea in ideas and one.dropped is None}
    proved = sum(one.id in theirs and one.proved is not None for one in run.every(Outcome))
    dropped = sum(
        one.dropped == "banned" and one.dropped_for == node.text for one in run.nodes[place:] if isinstance(one, Offered)
    )
    return PersonTold(
        node.id, node.at, node.action, node.text, node.author, node.time, _effects(run, place), len(theirs), proved,
        dropped if node.action == "ban" else 0,
    )  # fmt: skip


def _effects(run: Run, place: int) -> tuple[KeyEffect, ...]:
    """For each key, the rounds around a place in the journal."""
    found = []
    for key in sorted({node.key for node in run.every(RoundEnd)}):
        ends = [(number, node) for number, node in enumerate(run.nodes) if isinstance(node, RoundEnd) and node.key == key]
        before = [node for number, node in ends if number < place]
        after = [node for number, node in ends if number > place]
        found.append(KeyEffect(
            key, after[0].round if after else 0, before[-1].best_ratio if before else 0.0,
            after[0].best_ratio if after else None, ends[-1][1].best_ratio,
        ))  # fmt: skip
    return tuple(found)
