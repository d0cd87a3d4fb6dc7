"""A run as a page tells it: its journal read once into plain typed values, which `autokern report --json` prints as they are.

Only the folder is read; nothing is built, judged or asked for, so a run that is under way can be looked at as well.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from torch_autokern.errors import RunError
from torch_autokern.judge.outcome import Reason, Refusal
from torch_autokern.report.html_spending import Spending, spending
from torch_autokern.search.effect import Effect, effects
from torch_autokern.search.limits import effective
from torch_autokern.search.manifest import Ask, Ceiling
from torch_autokern.search.nodes import Failure, Idea, Lesson, Measured, Offered, Outcome, Proof, RoundEnd, Stage, Stop, Stuck
from torch_autokern.search.outcome import describe_key
from torch_autokern.search.run import Run
from torch_autokern.store.key import KernelKey, Target
from torch_autokern.store.record import Verdict
from torch_autokern.store.workload import Workload, WorkloadEntry

# proved: a record. screened: right and timed, no verdict yet. refused: the judge's word. failed: the judge itself failed.
# dropped: not built. waiting: the run ended or stands before it.
Fate = Literal["proved", "screened", "refused", "failed", "dropped", "waiting"]
MOST_SOURCE_CHARS = 200_000
Outcomes = dict[tuple[str, Stage], Outcome]
_ROUND = re.compile(r"k(\d{1,9})\.r(\d{1,9})\.")


class Attempt(msgspec.Struct, frozen=True):
    """A candidate and what came of it. `ratio` is stock's time over its own with its 99 % interval, 0 where it was not timed
    (the interval also where only the ratio is known). `reason` and `message` are the judge's, or why it was dropped; `parents`
    and `repairs` are node ids."""

    node: str
    fate: Fate
    words: str
    author: str
    language: str
    template: str = ""
    ratio: float = 0.0
    ratio_low: float = 0.0
    ratio_high: float = 0.0
    time_us: float = 0.0
    reason: str = ""
    message: str = ""
    replay: str = ""
    late: bool = False
    repairs: str = ""
    parents: tuple[str, ...] = ()


class IdeaTold(msgspec.Struct, frozen=True):
    """An idea in words with its kernels; `mends` says that it only mends one."""

    node: str
    text: str
    proposer: str
    author: str
    parents: tuple[str, ...]
    attempts: tuple[Attempt, ...]
    mends: bool = False


class RoundTold(msgspec.Struct, frozen=True):
    """A round of a key. `best_ratio` is the best proved so far (0: none); `ended` is False for the round that is under way."""

    round: int
    ideas: tuple[IdeaTold, ...]
    lessons: tuple[str, ...]
    best_ratio: float
    limit_share: float
    ended: bool


class Winner(msgspec.Struct, frozen=True):
    """A proved kernel with all that proves it. `node` is its place in the run ("" in a store); `missing` says why the source
    cannot be shown, or that it was cut."""

    node: str
    record_id: str
    idea: str
    author: str
    language: str
    parameters: dict[str, bool | int | float | str]
    verdict: Verdict
    created: str
    stock_build: str
    tools: dict[str, str]
    box_level: str
    source: str
    plan: str
    missing: str = ""


class KeyTold(msgspec.Struct, frozen=True):
    """One key: what it is, what the machine can do at most, its rounds, and its proved kernels, best first."""

    place: int
    name: str
    key: KernelKey
    digest: str
    calls: int
    share: float
    target: Target | None
    ceiling: Ceiling | None
    stock_us: float
    rounds: tuple[RoundTold, ...]
    winners: tuple[Winner, ...]
    limit_share: float
    stock_share: float

    @property
    def best_ratio(self) -> float:
        """Of the best proved kernel; 0 where nothing was proved."""
        return self.winners[0].verdict.timings[0].ratio if self.winners else 0.0


class ReasonTold(msgspec.Struct, frozen=True):
    """A reason of refusal, how often the screen and the verdict gave it, and the candidates that met it."""

    reason: str
    screens: int
    verdicts: int
    attempts: tuple[Attempt, ...]


class RunStory(msgspec.Struct, frozen=True):
    """All that a page shows of a run. `counts` are candidates by fate; `questions` are what it asked
    when it was stuck, `stops` the ends of its lives."""

    run: str
    created: str
    version: str
    stock_build: str
    accuracy: str
    ask: Ask
    keys: tuple[KeyTold, ...]
    counts: dict[str, int]
    refusals: tuple[ReasonTold, ...]
    spending: Spending
    people: tuple[Effect, ...]
    questions: tuple[Stuck, ...]
    stops: tuple[Stop, ...]


def tell_run(run: Run) -> RunStory:
    """Read a run's journal, and the sources of its proved kernels.

    Raises:
        RunError: a change of its limits cannot be read, or a proof has no time.
    """
    for node in run.every(Outcome):
        if node.proved is not None and not node.proved.verdict.timings:
            raise RunError(f"{node.id} is proved without a time: the journal is not whole, or no search wrote it")
    keys = tuple(_key(run, place, entry) for place, entry in enumerate(_entries(run.manifest.workload)))
    attempts = [one for key in keys for told in key.rounds for idea in told.ideas for one in idea.attempts]
    accuracy = run.manifest.accuracy
    bounds = f" (atol {accuracy.atol:g}, rtol {accuracy.rtol:g})" if accuracy.kind == "tolerance" else ""
    return RunStory(
        run=run.folder.resolve().name if run.folder is not None else "",
        created=run.manifest.created,
        version=run.manifest.version,
        stock_build=run.manifest.stock_build,
        accuracy=accuracy.kind + bounds,
        ask=effective(run),
        keys=keys,
        counts=dict(Counter(one.fate for one in attempts)),
        refusals=_reasons(attempts),
        spending=spending(run),
        people=tuple(effects(run)),
        questions=tuple(run.every(Stuck)),
        stops=tuple(run.every(Stop)),
    )


def _entries(workload: Workload) -> list[WorkloadEntry]:
    # The order that gives the keys their numbers in the journal (`loop._Search`).
    return sorted(workload.entries, key=lambda entry: -entry.stock_time_us)


def _key(run: Run, place: int, entry: WorkloadEntry) -> KeyTold:
    prefix = f"k{place}."
    # By id: a journal from elsewhere may name one twice, and an id stands once on a page.
    offered = list({node.id: node for node in run.every(Offered) if node.id.startswith(prefix)}.values())
    named = {node.candidate_id: node.id for node in reversed(offered)}
    outcomes = {(node.id, node.stage): node for node in run.every(Outcome) if node.id.startswith(prefix)}
    measured = run.known(Measured, f"k{place}.ceiling")
    ceiling = None if measured is None else measured.ceiling
    winners = _winners(run, offered, outcomes)
    stock_us = ceiling.stock_us if ceiling is not None else 0.0
    best_us = winners[0].verdict.timings[0].candidate_us if winners else stock_us
    if winners:  # timed beside the kernel itself, so its ratio and this time belong together
        stock_us = winners[0].verdict.timings[0].stock_us
    limit_us = ceiling.limit_us if ceiling is not None else 0.0
    return KeyTold(
        place=place,
        name=describe_key(entry.key),
        key=entry.key,
        digest=entry.key.digest,
        calls=entry.calls,
        share=run.manifest.workload.share(entry),
        target=run.manifest.targets.get(entry.key.device_type),
        ceiling=ceiling,
        stock_us=stock_us,
        rounds=_rounds(run, place, offered, outcomes, named),
        winners=winners,
        limit_share=limit_us / best_us if best_us else 0.0,
        stock_share=limit_us / stock_us if stock_us else 0.0,
    )


def _rounds(
    run: Run, place: int, offered: Sequence[Offered], outcomes: Outcomes, named: dict[str, str]
) -> tuple[RoundTold, ...]:
    ideas: dict[int, list[Idea]] = {}
    for idea in {node.id: node for node in run.every(Idea)}.values():
        if number := _round_of(idea.id, place):
            ideas.setdefault(number, []).append(idea)
    known = {idea.id for mine in ideas.values() for idea in mine}
    kernels: dict[str, list[Attempt]] = {}
    for node in offered:
        # An idea whose own line is damaged hides no kernel.
        if node.idea not in known and (number := _round_of(node.id, place)):
            known.add(node.idea)
            ideas.setdefault(number, []).append(Idea(node.idea, node.at, node.words, "", node.author))
        kernels.setdefault(node.idea, []).append(_attempt(node, outcomes, named))
    ends = {node.round: node for node in run.every(RoundEnd) if node.key == place}
    lessons: dict[int, list[str]] = {}
    for lesson in run.every(Lesson):
        if number := _round_of(lesson.id, place):
            lessons.setdefault(number, []).append(lesson.text)
    told, best = [], 0.0
    for number in sorted({*ideas, *ends, *lessons}):
        end = ends.get(number)
        best = end.best_ratio if end is not None else best
        told.append(RoundTold(
            number, tuple(_idea(idea, kernels.get(idea.id, ()), named) for idea in ideas.get(number, ())),
            tuple(lessons.get(number, ())), best, end.limit_share if end is not None else 0.0, end is not None,
        ))  # fmt: skip
    return tuple(told)


def _idea(idea: Idea, attempts: Sequence[Attempt], named: dict[str, str]) -> IdeaTold:
    parents = tuple(named[name] for name in idea.parents if name in named)
    return IdeaTold(
        idea.id, idea.text, idea.proposer, idea.author, parents, tuple(attempts), any(one.repairs for one in attempts)
    )


def _attempt(node: Offered, outcomes: Outcomes, named: dict[str, str]) -> Attempt:
    judged, screen = outcomes.get((node.id, "judge")), outcomes.get((node.id, "screen"))
    told = Attempt(
        node.id, "waiting", node.words, node.author, node.language, node.template, repairs=node.repairs,
        parents=tuple(named[name] for name in node.parents if name in named),
    )  # fmt: skip
    if node.dropped is not None:
        return msgspec.structs.replace(told, fate="dropped", reason=node.dropped, message=node.dropped_for)
    screened = screen.screened if screen is not None else None
    if screened is not None:
        told = msgspec.structs.replace(
            told, fate="screened", ratio=screened.ratio, ratio_low=screened.ratio_low, ratio_high=screened.ratio_high,
            time_us=screened.candidate_us,
        )  # fmt: skip
    found = judged.found if judged is not None else screen.found if screen is not None else None
    if isinstance(found, Proof):
        timing = found.verdict.timings[0]
        return msgspec.structs.replace(
            told, fate="proved", ratio=timing.ratio, ratio_low=timing.ratio_low, ratio_high=timing.ratio_high,
            time_us=timing.candidate_us, late=True,
        )  # fmt: skip
    if isinstance(found, Failure):
        return msgspec.structs.replace(told, fate="failed", reason="judge failed", message=found.message)
    if isinstance(found, Refusal):
        told = msgspec.structs.replace(
            told, fate="refused", reason=found.reason.value, message=found.message, late=judged is not None,
            replay=found.cases[0] if found.cases else "",
        )  # fmt: skip
        if found.reason is Reason.NOT_FASTER and found.best_ratio:  # the last word on its speed goes before the first look
            told = msgspec.structs.replace(told, ratio=found.best_ratio, ratio_low=0.0, ratio_high=0.0, time_us=0.0)
    return told


def _winners(run: Run, offered: Sequence[Offered], outcomes: Outcomes) -> tuple[Winner, ...]:
    found = []
    for node in offered:
        outcome = outcomes.get((node.id, "judge"))
        if outcome is None or outcome.proved is None:
            continue
        try:
            source, plan, missing = run.text(node.source), run.text(node.plan), ""
        except RunError as error:  # a page about the rest is better than none
            source, plan, missing = "", "", str(error)
        source, missing = shortened(source, missing)
        proof = outcome.proved
        found.append(Winner(
            node.id, proof.record_id, node.words, node.author, node.language, node.parameters, proof.verdict, proof.created,
            proof.stock_build, proof.tools, proof.box_level, source, plan, missing,
        ))  # fmt: skip
    return tuple(sorted(found, key=lambda one: (-one.verdict.timings[0].ratio, one.node)))


def shortened(source: str, missing: str = "") -> tuple[str, str]:
    """A source that a page can hold, and what is missing of it in words."""
    source = source.encode("utf-8", "backslashreplace").decode()  # halves of characters, which neither JSON nor a page can hold
    if len(source) <= MOST_SOURCE_CHARS:
        return source, missing
    return source[:MOST_SOURCE_CHARS], f"cut after {MOST_SOURCE_CHARS} of {len(source)} characters"


def _reasons(attempts: Sequence[Attempt]) -> tuple[ReasonTold, ...]:
    by_reason: dict[str, list[Attempt]] = {}
    for one in attempts:
        if one.fate in ("refused", "failed"):
            by_reason.setdefault(one.reason, []).append(one)
    told = [
        ReasonTold(reason, sum(not one.late for one in mine), sum(one.late for one in mine), tuple(mine))
        for reason, mine in by_reason.items()
    ]
    return tuple(sorted(told, key=lambda one: (-len(one.attempts), one.reason)))


def _round_of(node_id: str, place: int) -> int:
    """The round of a key's node, 2 of "k0.r2.llm.i1"; 0 where it is another's."""
    found = _ROUND.match(node_id)
    return int(found[2]) if found is not None and int(found[1]) == place else 0
