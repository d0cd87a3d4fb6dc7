"""Where a run stands still: paused by a person, or stuck and asking one. Its clock stands still meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from torch_autokern.search.budget import BudgetOver, Clock
from torch_autokern.search.nodes import Intervention
from torch_autokern.search.outcome import Activity
from torch_autokern.search.run import Run
from torch_autokern.search.steer import ANSWERS, pending, take_in

_POLL_S = 0.5
Say = Callable[[Activity, str], None]


class Gate:
    """The places of a run where people may hold it up."""

    def __init__(self, run: Run, clock: Clock, say: Say, sleep: Callable[[float], None] = time.sleep) -> None:
        self._run = run
        self._clock = clock
        self._say = say
        self._sleep = sleep

    def wait_while_paused(self) -> None:
        """Go through at once, or when a person says so.

        Raises:
            BudgetOver: a person ended the run meanwhile.
        """
        if self._run.replaying or self._run.folder is None:
            return
        self._take(("pause", "resume"))
        said = False
        while (pause := paused_by(self._run)) is not None:
            if not said:
                who = pause.author or "a person"
                command = f"autokern steer {self._run.folder} resume"
                self._say("paused", f"paused by {who} at {pause.time}; to go on: {command}")
                said = True
            self._stand()
            self._stop_if_asked()
            self._take(("pause", "resume"))

    def take_limits(self) -> int:
        """Hear what people want changed of goal, budgets and policy, between two rounds; how many words that were."""
        return self._take(("limits",))

    def wait_for_answer(self, questions: dict[int, str], most_seconds: float) -> None:
        """Return when there are words for one of the keys that ask. `most_seconds` 0: wait without end.

        Raises:
            BudgetOver: nobody answered, or a person ended the run.
        """
        began = time.monotonic()
        text = "; ".join(f"key {place}: {question}" for place, question in questions.items())
        self._say("asking", f"stuck; {text} Answer with: autokern steer {self._run.folder} answer TEXT")
        while not any(self.is_answered_now(place) for place in questions):
            if most_seconds and time.monotonic() - began >= most_seconds:
                raise BudgetOver("stuck", f"nobody answered in {most_seconds / 60:g} minutes: {text}")
            self._stand()
            self._stop_if_asked()
            self._take(("pause", "resume"))

    def is_answered_now(self, place: int) -> bool:
        """Whether words for a key lie in the folder."""
        return any(words.action in ANSWERS and words.key in (None, place) for _, words in pending(self._run))

    def _stand(self) -> None:
        began = time.monotonic()
        self._sleep(_POLL_S)
        passed = time.monotonic() - began
        self._run.stand_still(passed)
        self._clock.stand_still(passed)

    def _stop_if_asked(self) -> None:
        if self._take(("stop",)):
            raise BudgetOver("asked", "a person asked the run to stop")

    def _take(self, actions: Collection[str]) -> int:
        taken = [(file, words) for file, words in pending(self._run) if words.action in actions]
        for file, words in taken:
            take_in(self._run, f"run.{words.action}.{len(self._run.interventions())}", file, words)
        return len(taken)


def paused_by(run: Run) -> Intervention | None:
    """The pause that holds a run up now, or None."""
    words = [node for node in run.interventions() if node.action in ("pause", "resume")]
    return words[-1] if words and words[-1].action == "pause" else None
