"""A run again, without any model: every record derived from the replies that are kept.

The loop is played with the journal in place of the world (`run.py`): prompts are written again and compared, replies are read
again, candidates must come out the same. Then each proved candidate is built, its evidence replayed seed by seed (the errors
must agree to the last digit on the same machine), and its record must have the same id, bit for bit, where the compiler is the
same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.errors import BuildError, StaticRuleError, ToolchainError
from torch_autokern.judge.outcome import Accuracy, Refusal, ScreenResult
from torch_autokern.judge.stored import cannot_run_here, verify_record
from torch_autokern.runtime.target import local_target
from torch_autokern.search.author import Author
from torch_autokern.search.budget import Clock, Meter
from torch_autokern.search.engine import Engine, LocalEngine
from torch_autokern.search.key_search import record_of
from torch_autokern.search.limits import effective
from torch_autokern.search.llm import Models
from torch_autokern.search.loop import play
from torch_autokern.search.manifest import Ceiling
from torch_autokern.search.nodes import Intervention, Offered, Outcome, Reply, RoundEnd
from torch_autokern.search.proposers import Proposer
from torch_autokern.search.run import EndOfJournal, Run, open_run, place_of
from torch_autokern.search.tried import Brief, Offer
from torch_autokern.store.key import DeviceType, KernelKey, Target
from torch_autokern.store.record import StoredRecord, Verdict, encode_record, record_id_of
from torch_autokern.store.store import KernelStore

Status = Literal["holds", "broken", "not_here"]


class ReplayedRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One record derived again. `same_record`: it has the recorded id; `same_binary`: the compiler gave the same bytes;
    `same_errors`: the evidence gave the recorded numbers. None where that could not be asked here."""

    node: str
    record_id: str
    ratio: float
    status: Status
    message: str
    same_record: bool | None = None
    same_binary: bool | None = None
    same_errors: bool | None = None


class ReplayReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a replay found. `differences`: candidates that come out otherwise than in the run. `other_prompts`: requests that
    this version would word otherwise (their replies are used all the same; another version may). `unread`: nodes that the
    replay had no use for."""

    run: str
    nodes: int
    rounds: int
    replies: int
    candidates: int
    differences: tuple[str, ...]
    other_prompts: tuple[str, ...]
    unread: tuple[str, ...]
    records: tuple[ReplayedRecord, ...]

    @property
    def holds(self) -> bool:
        """Whether everything that could be derived here came out as recorded."""
        return not self.differences and not self.unread and all(record.status != "broken" for record in self.records)


class NoEngine:
    """In a replay nothing is built or run by the loop."""

    def toolchain(self, device_type: DeviceType) -> str:
        """See `Engine`."""
        return "none"

    def build(
        self, candidates: Sequence[Candidate], target: Target, key: KernelKey
    ) -> Iterator[tuple[Candidate, Artifact | Refusal]]:
        """See `Engine`."""
        raise EndOfJournal("build")

    def screen(self, artifact: Artifact, key: KernelKey, target: Target, accuracy: Accuracy) -> ScreenResult | Refusal:
        """See `Engine`."""
        raise EndOfJournal("screen")

    def judge(self, artifact: Artifact, key: KernelKey, target: Target, accuracy: Accuracy) -> Verdict | Refusal:
        """See `Engine`."""
        raise EndOfJournal("judge")

    def ceiling(self, key: KernelKey, target: Target) -> Ceiling:
        """See `Engine`."""
        raise EndOfJournal("ceiling")

    def close(self) -> None:
        """See `Engine`."""


class FromJournal:
    """A proposer whose offers are in the journal as they are."""

    derives = False

    def __init__(self, name: str) -> None:
        self.name = name

    def propose(self, brief: Brief) -> Sequence[Offer]:
        """See `Proposer`."""
        raise EndOfJournal(brief.name)


def replay(
    folder: Path, *, engine: Engine | None = None, records: bool = True, allow_weak_box: bool = False,
    on_record: Callable[[ReplayedRecord], None] | None = None,
) -> ReplayReport:  # fmt: skip
    """Play a run again from its folder, and derive its records. Nothing is written.

    Args:
        engine: what builds; this machine by default.
        records: without, only the story is derived: no compiler and no judge is needed.

    Raises:
        InvalidInputError: no run, or one of another version.
        RunError: the folder is not whole.
        JudgeError: the judge itself failed.
    """
    run = open_run(folder, replaying=True)
    told = derive(run)
    found: list[ReplayedRecord] = []
    builder = engine or LocalEngine(allow_weak_box=allow_weak_box)
    try:
        for node, candidate in told if records else ():
            found.append(_derived(run, node, candidate, builder, allow_weak_box))
            if on_record is not None:
                on_record(found[-1])
    finally:
        builder.close()
    return ReplayReport(
        str(folder), len(run.nodes), len(run.every(RoundEnd)), len(run.every(Reply)),
        sum(one.dropped is None for one in run.every(Offered)), tuple(run.differences), tuple(run.other_prompts),
        tuple(_unread(run)), tuple(found),
    )  # fmt: skip


def derive(run: Run) -> list[tuple[Outcome, Candidate]]:
    """Play the story again; gives the proved candidates, as derived, with their outcomes."""
    ask = effective(run)
    meter = Meter(run, msgspec.structs.replace(ask.limits, seconds=None, tokens=None, money=None, candidates=None), {})
    clock = Clock(None)
    models = Models(run, ask, meter, lambda: clock, None)
    proposers: list[Proposer] = [
        Author(run, models, run.manifest.accuracy) if name == "llm" else FromJournal(name) for name in ask.proposers
    ]
    for node in run.nodes:
        run.unread.add(place_of(node))
    play(run, ask, KernelStore([]), NoEngine(), proposers, meter)
    proved = [node for node in run.every(Outcome) if node.proved is not None and not node.earlier]
    return [(node, run.derived[node.id]) for node in proved if node.id in run.derived]


def _unread(run: Run) -> list[str]:
    """Nodes that the story was told without. Interventions and the end of each life are read as they are."""
    kinds = (Intervention.__name__, "Stop", "Example", "Measured", "Complete", "Idea", "Lesson")
    return sorted(name for name in run.unread if name.split(" ")[0] not in kinds)


def _derived(run: Run, node: Outcome, candidate: Candidate, engine: Engine, allow_weak_box: bool) -> ReplayedRecord:
    proof = node.proved
    assert proof is not None
    place = int(node.id.partition(".")[0][1:])
    entries = sorted(run.manifest.workload.entries, key=lambda entry: -entry.stock_time_us)
    key = entries[place].key
    target = run.manifest.targets[key.device_type]
    head = node.id, proof.record_id, proof.verdict.timings[0].ratio
    record = record_of(key, target, candidate, proof)
    here = local_target(key.device_type, threads=target.threads) if key.device_type == "cpu" else target
    reason = cannot_run_here(record, here)
    try:
        built = next((found for _, found in engine.build([candidate], target, key)), None)
    except (ToolchainError, StaticRuleError, BuildError) as error:
        return ReplayedRecord(*head, "not_here", f"cannot be built here: {error}")
    if not isinstance(built, Artifact):
        words = built.message if isinstance(built, Refusal) else "nothing came back"
        return ReplayedRecord(*head, "broken", f"does not build: {words[:500]}")
    again = record_of(key, target, built.candidate, proof)
    raw = encode_record(again, built.blobs())
    same_record = record_id_of(raw) == proof.record_id
    if reason is not None:
        return ReplayedRecord(*head, "not_here", reason, same_record)
    stored = StoredRecord(again, built.blobs(), record_id_of(raw))
    found = verify_record(stored, here, allow_weak_box=allow_weak_box)
    same_binary = hashlib.sha256(built.binary).hexdigest() == proof.binary_sha256
    return ReplayedRecord(*head, found.status, found.message, same_record, same_binary, found.same_numbers)
