"""What a search knows of a key: candidates with their outcomes, and which of them the next round grows from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch_autokern.build.candidate import Candidate
from torch_autokern.judge.outcome import Reason, Refusal, ScreenResult
from torch_autokern.search.manifest import Ask, Ceiling
from torch_autokern.search.near import distance
from torch_autokern.search.nodes import Example, Found, Idea, Offered, Proof
from torch_autokern.store.key import KernelKey, Target

# Refusals that an author may mend. The others are the machine's doing, or say that the kernel is right but slow.
MENDABLE = frozenset(Reason) - {
    Reason.NOT_FASTER, Reason.TIMING_UNSTABLE, Reason.BOX_REFUSED, Reason.UNSUPPORTED_KEY, Reason.VACUOUS_TASK,
    Reason.FASTER_THAN_PHYSICS,
}  # fmt: skip


@dataclass
class Tried:
    """A candidate that was built or is about to be, with what came of it."""

    node: Offered
    candidate: Candidate
    screened: Found | None = None
    judged: Found | None = None
    us: float = 0.0

    @property
    def refusal(self) -> Refusal | None:
        """Why it was refused, the verdict's word before the screen's."""
        for found in (self.judged, self.screened):
            if isinstance(found, Refusal):
                return found
        return None

    @property
    def ratio(self) -> float:
        """Stock's time over its own, as proved or else as screened; 0 where it was not timed or is wrong."""
        if isinstance(self.judged, Proof):
            return self.judged.verdict.timings[0].ratio
        if self.refusal is not None:
            return (self.refusal.best_ratio or 0.0) if self.refusal.reason is Reason.NOT_FASTER else 0.0
        return self.screened.ratio if isinstance(self.screened, ScreenResult) else 0.0

    @property
    def time_us(self) -> float:
        """Its time in us; 0 where it was not timed."""
        if isinstance(self.judged, Proof):
            return self.judged.verdict.timings[0].candidate_us
        return self.screened.candidate_us if isinstance(self.screened, ScreenResult) else 0.0

    @property
    def is_proved(self) -> bool:
        """Whether the judge accepted it."""
        return isinstance(self.judged, Proof)

    @property
    def is_mendable(self) -> bool:
        """Whether it failed in a way that its author may mend."""
        return self.refusal is not None and self.refusal.reason in MENDABLE


@dataclass
class Brief:
    """All that a proposer is told: the key, where it runs, what was tried, what people said."""

    key: KernelKey
    target: Target
    place: int
    round: int
    ask: Ask
    ceiling: Ceiling | None
    tried: Sequence[Tried]
    dropped: Sequence[Offered] = ()
    ideas: Sequence[Idea] = ()
    lessons: Sequence[str] = ()
    hints: Sequence[str] = ()
    bans: Sequence[str] = ()
    wishes: Sequence[tuple[str, str]] = ()  # ideas of people: (text, author)
    examples: Sequence[Example] = ()
    sources: dict[str, str] = field(default_factory=dict)  # of the examples, by the name of their blob
    stops: list[Exception] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The start of the ids of this key and round."""
        return f"k{self.place}.r{self.round}"


@dataclass(frozen=True)
class Offer:
    """What a proposer hands over. `place` is unique among its offers of a round."""

    place: str
    candidate: Candidate
    idea: str
    repairs: str = ""


def parents(tried: Sequence[Tried], best: int = 3, diverse: int = 2) -> tuple[list[Tried], list[Tried]]:
    """The fastest right kernels, and of the others the ones that are farthest from all that was chosen (at least a third as
    fast as the best, so that they are worth learning from)."""
    right = sorted((one for one in tried if one.ratio > 0), key=lambda one: (-one.ratio, one.node.id))
    chosen = right[:best]
    rest = [one for one in right[best:] if one.ratio * 3 >= right[0].ratio]
    others: list[Tried] = []
    while rest and len(others) < diverse:
        far = max(rest, key=lambda one: (min(distance(one.candidate, c.candidate) for c in (*chosen, *others)), one.ratio))
        rest.remove(far)
        if min(distance(far.candidate, c.candidate) for c in (*chosen, *others)) > 0:
            others.append(far)
    return chosen, others
