"""What people's words brought a run, read from its journal alone.

An idea and a kernel have candidates of their own, a ban what it kept out. Of the other words one can only say what happened
after them: the best ratio when the word was heard, and the best before the next one was. That is a sequence, not a proof.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from torch_autokern.search.nodes import Idea, Intervention, Offered, Outcome, Proof, RoundEnd
from torch_autokern.search.run import Run

# Words that may make later rounds better or worse; the others only start and stop things.
_STEERS = frozenset({"hint", "idea", "kernel", "ban", "answer", "limits"})


class KeyEffect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key around a word: the best proved ratio (0: none) at the end of the last round before it and of the last round
    before the next word, and how many rounds lie between."""

    key: int
    before: float
    after: float
    rounds: int


class Effect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One word with what came of it. `candidates` are its own (of an idea or a kernel), `proved` those that the judge
    accepted, `best` the best proved ratio among them; `dropped` is what a ban kept out."""

    node: str
    time: str
    author: str
    action: str
    text: str
    keys: tuple[KeyEffect, ...]
    candidates: int = 0
    proved: int = 0
    best: float = 0.0
    dropped: int = 0

    def __str__(self) -> str:
        words = []
        if self.action in ("idea", "kernel"):
            best = f", best {self.best:.2f}x" if self.best else ""
            words.append(f"{self.candidates} kernels, {self.proved} proved{best}")
        if self.action == "ban":
            words.append(f"{self.dropped} candidates kept out")
        for one in self.keys:
            if one.rounds:
                words.append(f"key {one.key}: {_ratio(one.before)} before, {_ratio(one.after)} after {one.rounds} rounds")
        said = " ".join(self.text.split())
        said = f" {said[:80]!r}" if said and self.action != "kernel" else ""
        return f"{self.time} {self.author or 'somebody'}: {self.action}{said}: {'; '.join(words) or 'nothing followed yet'}"


def effects(run: Run) -> list[Effect]:
    """Every word that people gave a run, in order."""
    heard = [(place, node) for place, node in enumerate(run.nodes) if isinstance(node, Intervention)]
    steers = [place for place, node in heard if node.action in _STEERS]
    found = []
    for place, node in heard:
        end = next((other for other in steers if other > place), len(run.nodes)) if node.action in _STEERS else place
        own = _own(run, node, place)
        best = max((proof.verdict.timings[0].ratio for one in own if (proof := _proof(run, one)) is not None), default=0.0)
        dropped = [one for one in run.every(Offered) if one.dropped == "banned" and one.dropped_for == node.text]
        found.append(
            Effect(
                node.id, node.time, node.author, node.action, node.text, _around(run, node, place, end),
                sum(one.dropped is None for one in own), sum(_proof(run, one) is not None for one in own), best,
                len(dropped) if node.action == "ban" else 0,
            )
        )  # fmt: skip
    return found


def _own(run: Run, word: Intervention, place: int) -> list[Offered]:
    """The candidates that an idea or a kernel became, those that mend them included."""
    offered = [node for node in run.nodes[place:] if isinstance(node, Offered)]
    if word.action == "kernel":
        return [one for one in offered if ".people." in one.id and _is_from(run, one, word)]
    if word.action != "idea":
        return []
    author = word.author or "a person"
    ideas = {node.id for node in run.every(Idea) if node.text == word.text and node.author == author}
    own: dict[str, Offered] = {}
    for one in offered:
        if one.idea in ideas or one.repairs in own:
            own[one.id] = one
    return list(own.values())


def _is_from(run: Run, one: Offered, word: Intervention) -> bool:
    """Whether a candidate is the kernel that a word brought: its source stands in it."""
    return msgspec.json.encode(run.text(one.source)).decode()[1:-1] in word.text or run.text(one.source) in word.text


def _proof(run: Run, one: Offered) -> Proof | None:
    outcome = run.known(Outcome, one.id, "judge")
    return None if outcome is None else outcome.proved


def _around(run: Run, word: Intervention, place: int, end: int) -> tuple[KeyEffect, ...]:
    if word.action not in _STEERS:
        return ()
    before = _last_ends(run.nodes[:place])
    after = _last_ends(run.nodes[:end])
    keys = sorted(key for key in after if word.key in (None, key))
    return tuple(
        KeyEffect(
            key, before[key].best_ratio if key in before else 0.0, after[key].best_ratio,
            after[key].round - (before[key].round if key in before else 0),
        )
        for key in keys
    )  # fmt: skip


def _last_ends(nodes: Sequence[object]) -> dict[int, RoundEnd]:
    return {node.key: node for node in nodes if isinstance(node, RoundEnd)}


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}x" if ratio else "nothing proved"
