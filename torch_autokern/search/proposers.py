"""The one door for whoever brings kernels: built-in templates, the bank, language models, people through the inbox.

The judge never learns who wrote a kernel; a proposer never learns more than its brief says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from torch_autokern.build.candidate import Candidate
from torch_autokern.search import templates
from torch_autokern.search.nodes import Example
from torch_autokern.search.tried import Brief, Offer, Tried
from torch_autokern.store.key import KernelKey, Target

Function = Callable[[KernelKey, Target], Sequence[Candidate]]


class Proposer(Protocol):
    """Brings candidates. `derives`: its offers follow from replies in the journal, so a replay derives them again; the others'
    offers are taken from the journal as they are."""

    name: str
    derives: bool

    def propose(self, brief: Brief) -> Sequence[Offer]:
        """Candidates for this round, best guess first. A budget that is over goes to `brief.stops`."""


@runtime_checkable
class Mender(Protocol):
    """A proposer that learns: it mends what failed, and says what a round taught."""

    name: str

    def repair(self, brief: Brief, failed: Sequence[Tried], attempt: int) -> Sequence[Offer]:
        """Better versions of kernels that did not build, or are wrong."""

    def lessons(self, brief: Brief, fresh: Sequence[Tried]) -> Sequence[str]:
        """What the round taught, in a few sentences."""


@runtime_checkable
class Librarian(Protocol):
    """A proposer that knows kernels which models should see."""

    def examples(self, brief: Brief) -> Sequence[tuple[Example, str]]:
        """Good kernels of neighbouring keys, each with its source."""


@runtime_checkable
class Receiver(Protocol):
    """A proposer that keeps what it was given until the journal has it."""

    def taken(self) -> None:
        """The journal has all that was proposed."""


class FunctionProposer:
    """A function of key and target, asked in the first round only: the same question has the same answer."""

    derives = False

    def __init__(self, name: str, function: Function) -> None:
        self.name = name
        self._function = function

    def propose(self, brief: Brief) -> Sequence[Offer]:
        """See `Proposer`."""
        if brief.round > 1:
            return []
        found: dict[str, Candidate] = {}
        for candidate in self._function(brief.key, brief.target):
            found.setdefault(candidate.candidate_id, candidate)
        return [Offer(f"i{n}.c0", candidate, candidate.idea) for n, candidate in enumerate(found.values())]


def built_in() -> FunctionProposer:
    """The templates."""
    return FunctionProposer("templates", templates.propose)
