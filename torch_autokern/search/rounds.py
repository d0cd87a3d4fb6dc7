"""One key's rounds: gather, drop what is not new, build and screen, mend, judge, learn.

Every step has an id that follows from where it stands, and asks the run's journal first. So the same code starts a run, goes on
with it after a kill, and replays it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from torch_autokern.build.candidate import Candidate
from torch_autokern.judge.outcome import Refusal, ScreenResult
from torch_autokern.runtime.plan import decode_plan, encode_plan
from torch_autokern.search.budget import BudgetOver, Meter
from torch_autokern.search.journal import KeyJournal
from torch_autokern.search.key_search import FINALISTS, KeySearch
from torch_autokern.search.key_search import Parent as SearchParent
from torch_autokern.search.limits import effective
from torch_autokern.search.manifest import Ask, Ceiling
from torch_autokern.search.near import fingerprint
from torch_autokern.search.nodes import (
    Complete,
    DropReason,
    Example,
    Failure,
    Found,
    Idea,
    Lesson,
    Measured,
    Offered,
    Outcome,
    Proof,
    RoundEnd,
    Stage,
    Stop,
    Stuck,
)
from torch_autokern.search.outcome import KeyResult
from torch_autokern.search.proposers import Librarian, Mender, Proposer, Receiver
from torch_autokern.search.review import banned_sources
from torch_autokern.search.run import EndOfJournal, Run
from torch_autokern.search.steer import new_words, read_steering
from torch_autokern.search.stuck import describe, why_stuck
from torch_autokern.search.tried import Brief, Offer, Tried
from torch_autokern.store.record import StoredRecord
from torch_autokern.store.workload import WorkloadEntry


class Parent(SearchParent, Protocol):
    """What a key's rounds need of the search that they belong to."""

    run: Run
    ask: Ask
    meter: Meter
    proposers: Sequence[Proposer]

    def retune(self) -> None:
        """A person may have changed goal, budgets or policy."""

    def hold(self, entry: WorkloadEntry, journal: KeyJournal) -> AbstractContextManager[StoredRecord | None]:
        """Keep other processes from the key meanwhile; gives a record that makes the work needless, where one appeared."""


def _is_own_idea(node: Idea, base: str) -> bool:
    """Whether a proposer had this idea in this round by itself: not in mending a kernel."""
    return node.id.startswith(f"{base}.") and not node.id.endswith(".idea")


class KeyRounds:
    """The rounds of one key; `place` is its number in the workload. It is also the ledger of the key's trials."""

    def __init__(self, parent: Parent, place: int, entry: WorkloadEntry, context: str, allotted: float) -> None:
        self.parent = parent
        self.run = parent.run
        self.place = place
        self.entry = entry
        self.journal = KeyJournal(None if self.run.replaying else parent.store.write_root, entry.key.digest)
        publishing = not self.run.replaying
        self.search = KeySearch(parent, entry, self.journal, context, self, allotted, publishing=publishing)
        self.tried: list[Tried] = []
        self.dropped: list[Offered] = []
        self.lessons: list[str] = []
        self.ideas: dict[str, Idea] = {}
        self.examples: list[Example] = []
        self.found_elsewhere: StoredRecord | None = None
        self.asked_to_stop = False
        self.stuck: Stuck | None = None
        self._stuck_after = 0
        self.rounds = 0
        self._by_name: dict[str, Tried] = {}
        self._prints: dict[str, str] = {}
        self._bans: list[str] = []
        self._banned_sources = frozenset() if self.run.replaying else banned_sources(parent.store, entry.key.digest)

    def play(self, ceiling: Ceiling | None) -> int:
        """Play one round; returns how many new candidates it had.

        Raises:
            BudgetOver: after what was proposed before has been tried.
        """
        self.rounds += 1
        brief = self._brief(ceiling)
        fresh: list[Tried] = []
        try:
            for proposer in self.parent.proposers:
                fresh += self._gather(proposer, brief)
                if brief.stops:
                    break
        except (BudgetOver, EndOfJournal) as over:
            fresh = self._admitted(brief.name)
            brief.stops.append(over)
        menders = [proposer for proposer in self.parent.proposers if isinstance(proposer, Mender)]
        self._evaluate(brief, fresh, menders)
        for mender in menders if fresh and not brief.stops else ():
            self._learn(mender, brief, fresh)
        if brief.stops:
            raise brief.stops[0]
        if self.search.out_of_time:
            raise BudgetOver("time", "the time is used up, or too short for another step")
        self._end_round(brief.name)
        self._look_whether_stuck(brief, fresh)
        return len(fresh)

    def result(self) -> KeyResult:
        """How the key stands."""
        return self.search.result()

    def best(self) -> Tried | None:
        """The fastest proved candidate."""
        return max((one for one in self.tried if one.is_proved), key=lambda one: (one.ratio, one.node.id), default=None)

    def limit_share(self, ceiling: Ceiling | None) -> float:
        """The limit's time over the best candidate's (or stock's); 0 where there is no limit."""
        if ceiling is None or not ceiling.limit_us:
            return 0.0
        best = self.best()
        return ceiling.limit_us / max(best.time_us if best else ceiling.stock_us, 1e-9)

    # -- the ledger ------------------------------------------------------------------------------------------------------

    def recall(self, name: str, stage: Stage) -> Found | None:
        """See `Ledger`."""
        one = self._by_name[name]
        # What is missing in a replay was not done for want of time: the round's end, missing too, ends the replay.
        node = self.run.known(Outcome, one.node.id, stage)
        if node is not None:
            self._keep(one, stage, node.found)
        return None if node is None else node.found

    def note(self, name: str, stage: Stage, found: Found, *, earlier: bool = False) -> None:
        """See `Ledger`."""
        one = self._by_name[name]
        kinds = {ScreenResult: "screened", Refusal: "refused", Proof: "proved", Failure: "failed"}
        fields = {kinds[type(found)]: found}
        self.run.add(Outcome(one.node.id, self.run.now(), stage, earlier=earlier, **fields))  # type: ignore[arg-type]
        self._keep(one, stage, found)

    def earlier_verdict(self, name: str) -> Found | None:
        """See `Ledger`."""
        one = self._by_name[name]
        node = self.run.known(Outcome, one.node.id, "judge")
        if node is None or not node.earlier:
            return None
        self._keep(one, "judge", node.found)
        return node.found

    def _keep(self, one: Tried, stage: Stage, found: Found) -> None:
        if stage == "screen":
            one.screened = found
        else:
            one.judged = found

    # -- a round's steps -------------------------------------------------------------------------------------------------

    def _brief(self, ceiling: Ceiling | None) -> Brief:
        name = f"k{self.place}.r{self.rounds}"
        # A stop that ended a life of the run already does not end the next one too.
        obeyed = max((place for place, node in enumerate(self.run.nodes) if isinstance(node, Stop)), default=-1)
        for node in read_steering(self.run, name):
            self.asked_to_stop |= node.action == "stop" and self.run.nodes.index(node) > obeyed
        self.parent.retune()
        heard = [node for node in self.run.interventions(name) if node.key in (None, self.place)]
        self._bans = [node.text for node in heard if node.action == "ban"]
        hints = [node.text for node in heard if node.action in ("hint", "answer")]
        ideas = new_words(self.run, self.place, self.rounds, "idea")
        wishes = [(node.text, node.author or "a person") for node in ideas]
        brief = Brief(
            self.entry.key, self.parent.target_for(self.entry.key), self.place, self.rounds, effective(self.run, name),
            ceiling, tuple(self.tried), tuple(self.dropped), tuple(self.ideas.values()), tuple(self.lessons), hints,
            tuple(self._bans), wishes,
        )  # fmt: skip
        brief.examples = self._examples(brief)
        return brief

    def _examples(self, brief: Brief) -> list[Example]:
        prefix = f"k{self.place}.r1.bank."
        known = [node for node in self.run.every(Example) if node.id.startswith(prefix)]
        if self.rounds == 1 and not known and not self.run.replaying and self.run.known(Measured, f"k{self.place}.ceiling"):
            for librarian in self.parent.proposers:
                for example, source in librarian.examples(brief) if isinstance(librarian, Librarian) else ():
                    node = msgspec.structs.replace(example, at=self.run.now(), source=self.run.put(source))
                    self.run.add(node)
                    known.append(node)
        brief.sources = {node.source: self.run.text(node.source) for node in known}
        return known

    def _gather(self, proposer: Proposer, brief: Brief) -> list[Tried]:
        base = f"{brief.name}.{proposer.name}"
        done = self.run.known(Complete, base)
        if done is not None and not proposer.derives:
            return [one for name in done.candidates if (one := self._known(name)) is not None]
        if done is None and self.run.replaying and not proposer.derives:
            raise EndOfJournal(base)
        offers = proposer.propose(brief)
        self.ideas.update((node.id, node) for node in self.run.every(Idea) if _is_own_idea(node, base))
        fresh = self._admit(base, proposer.name, offers)
        if done is None and not brief.stops and (offers or not proposer.derives):
            names = [node.id for node in self.run.every(Offered) if node.id.startswith(f"{base}.") and not node.repairs]
            if not self.run.replaying:
                self.run.add(Complete(base, self.run.now(), proposer.name, tuple(names)))
        if isinstance(proposer, Receiver) and not self.run.replaying:
            proposer.taken()
        return fresh

    def _known(self, name: str) -> Tried | None:
        """A candidate from the journal, or None where it was dropped."""
        node = self.run.recall(Offered, name)
        assert node is not None
        plan = decode_plan(self.run.text(node.plan).encode())
        text = self.run.text(node.source)
        candidate = Candidate(node.language, text, plan, node.words, node.author, node.template, node.parameters, node.parents)
        idea = self.run.known(Idea, node.idea)
        if idea is not None:
            self.ideas.setdefault(idea.id, idea)
        return self._enter(node, candidate)

    def _enter(self, node: Offered, candidate: Candidate) -> Tried | None:
        if node.dropped is not None:
            self.dropped.append(node)
            return None
        one = Tried(node, candidate)
        self.run.derived[node.id] = candidate
        self.tried.append(one)
        self._by_name[candidate.candidate_id] = one
        self._prints.setdefault(fingerprint(candidate), node.id)
        return one

    def _admit(self, base: str, proposer: str, offers: Sequence[Offer]) -> list[Tried]:
        fresh: list[Tried] = []
        for offer in offers:
            name = f"{base}.{offer.place}"
            node = self.run.known(Offered, name)
            if node is not None and node.candidate_id != offer.candidate.candidate_id:
                self.run.differences.append(f"{name}: its reply gives another candidate now")
                one = self._known(name)
            elif node is not None:
                self._idea(name, proposer, offer)
                one = self._enter(node, offer.candidate)
            else:
                one = self._enter(self._offered(name, proposer, offer), offer.candidate)
            fresh += [] if one is None else [one]
        return fresh

    def _offered(self, name: str, proposer: str, offer: Offer) -> Offered:
        """A new candidate's node, in the journal.

        Raises:
            BudgetOver: no more candidates may be built.
        """
        if self.run.replaying:
            raise EndOfJournal(name)
        candidate = offer.candidate
        why, whom = self._why_dropped(candidate)
        if why is None and self.parent.meter.candidates_left() == 0:
            raise BudgetOver("candidates", f"{self.parent.meter.limits.candidates} candidates were tried")
        node = Offered(
            name, self.run.now(), self._idea(name, proposer, offer).id, candidate.candidate_id, candidate.language,
            self.run.put(candidate.source), self.run.put(encode_plan(candidate.plan).decode()), candidate.idea,
            candidate.author, candidate.template, candidate.parameters, candidate.parents, offer.repairs, why, whom,
        )  # fmt: skip
        self.run.add(node)
        return node

    def _idea(self, name: str, proposer: str, offer: Offer) -> Idea:
        """The idea behind an offer: noted once, before its first candidate."""
        idea_id = name.rpartition(".c")[0] if not offer.repairs else f"{name}.idea"
        known = self.run.known(Idea, idea_id)
        if known is None:
            known = Idea(idea_id, self.run.now(), offer.idea, proposer, offer.candidate.author, offer.candidate.parents)
            self.run.add(known)
        return self.ideas.setdefault(known.id, known)

    def _why_dropped(self, candidate: Candidate) -> tuple[DropReason | None, str]:
        for ban in self._bans:
            if re.search(ban, candidate.source) or re.search(ban, candidate.idea):
                return "banned", ban
        if hashlib.sha256(candidate.source.encode()).hexdigest() in self._banned_sources:
            return "banned", "a person's ban in review"
        same = self._by_name.get(candidate.candidate_id)
        if same is not None:
            return "already_tried", same.node.id
        near = self._prints.get(fingerprint(candidate))
        return ("near_duplicate", near) if near is not None else (None, "")

    def _admitted(self, prefix: str) -> list[Tried]:
        """What this round had before a budget ended it."""
        return [one for one in self.tried if one.node.id.startswith(f"{prefix}.")]

    def _evaluate(self, brief: Brief, fresh: list[Tried], menders: Sequence[Mender]) -> None:
        """Build, screen, mend and judge; `fresh` grows by what was mended."""
        if not fresh:
            return
        if not menders:
            with self.parent.hold(self.entry, self.journal) as self.found_elsewhere:
                if self.found_elsewhere is None:
                    self.search.screen([one.candidate for one in fresh])
                    self.search.judge([one.candidate for one in fresh], FINALISTS)
            return
        batch = list(fresh)
        for attempt in range(1 + self.parent.ask.repairs):
            with self.parent.hold(self.entry, self.journal):
                self.search.screen([one.candidate for one in batch])
            failed = [one for one in batch if one.is_mendable]
            if attempt == self.parent.ask.repairs or not failed or brief.stops:
                break
            batch = []
            try:
                for mender in menders:
                    mine = [one for one in failed if f".{mender.name}." in one.node.id]
                    offers = mender.repair(brief, mine, attempt) if mine else []
                    batch += self._admit(f"{brief.name}.{mender.name}", mender.name, offers)
            except (BudgetOver, EndOfJournal) as over:
                brief.stops.append(over)
                batch = [one for one in self._admitted(brief.name) if all(one is not other for other in fresh)]
            fresh += batch
            if not batch:
                break
        with self.parent.hold(self.entry, self.journal):
            self.search.judge([one.candidate for one in fresh], FINALISTS)

    def _learn(self, mender: Mender, brief: Brief, fresh: Sequence[Tried]) -> None:
        for number, text in enumerate(mender.lessons(brief, fresh)):
            name = f"{brief.name}.{mender.name}.lesson.{number}"
            if self.run.known(Lesson, name) is None:
                self.run.add(Lesson(name, self.run.now(), text, mender.name))
            self.lessons.append(text)

    def _end_round(self, name: str) -> None:
        if self.run.recall(RoundEnd, name) is not None:
            return
        measured = self.run.known(Measured, f"k{self.place}.ceiling")
        best = self.best()
        share = self.limit_share(None if measured is None else measured.ceiling)
        ratio, node = (best.ratio, best.node.id) if best is not None else (0.0, "")
        self.run.add(RoundEnd(name, self.run.now(), self.place, self.rounds, ratio, node, share))

    def _look_whether_stuck(self, brief: Brief, fresh: Sequence[Tried]) -> None:
        """Note it in the journal, with a report for people beside it. What the journal went on from is not looked at again."""
        self.stuck = self.run.known(Stuck, f"{brief.name}.stuck")
        later = self.run.begun(f"k{self.place}.r{self.rounds + 1}") is not None
        if self.stuck is None and not later and not self.run.replaying and self.tried:
            ends = [node for node in self.run.every(RoundEnd) if node.key == self.place]
            patience = brief.ask.stuck_rounds
            why = why_stuck(ends, self.tried, patience, self._stuck_after)
            if not fresh and brief.ask.stuck == "ask":
                why = "nothing_new"
            if why is not None:
                ideas = tuple(self.ideas.values())
                self.stuck = describe(brief.name, self.run.now(), why, patience, self.tried, ideas, brief.ceiling, brief.key)
                self.run.add(self.stuck)
        if self.stuck is not None:
            self._stuck_after = self.rounds
            self.run.write_beside("stuck", f"k{self.place}-r{self.rounds}.md", self.stuck.report)
