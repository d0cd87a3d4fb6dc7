"""Where one key of a run stands."""

from __future__ import annotations

from torch_autokern.search.nodes import Intervention
from torch_autokern.search.outcome import KeyResult
from torch_autokern.search.rounds import KeyRounds
from torch_autokern.search.run import Run
from torch_autokern.search.steer import ANSWERS
from torch_autokern.store.workload import WorkloadEntry


class KeyState:
    """A key's rounds, and its result once nothing more is to be done. `place` is its number in the run."""

    def __init__(self, place: int, entry: WorkloadEntry) -> None:
        self.place = place
        self.entry = entry
        self.rounds: KeyRounds | None = None
        self.closed: KeyResult | None = None

    @property
    def next_round(self) -> str:
        """The name of the round that comes next."""
        return f"k{self.place}.r{1 if self.rounds is None else self.rounds.rounds + 1}"

    @property
    def question(self) -> str:
        """What it asks a person, where it is stuck."""
        return self.rounds.stuck.question if self.rounds is not None and self.rounds.stuck is not None else ""

    def is_stuck(self, run: Run) -> bool:
        """Whether it got no further, and nobody has said anything since."""
        stuck = None if self.rounds is None else self.rounds.stuck
        if stuck is None or run.replaying:
            return False
        after = run.nodes[run.nodes.index(stuck) :]
        return not any(isinstance(n, Intervention) and n.action in ANSWERS and n.key in (None, self.place) for n in after)
