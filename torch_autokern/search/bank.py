"""The bank: good kernels that the store holds for neighbouring keys, tried here as they are and shown to models.

Neighbours are records of the same op. Those with equal dtypes come first, then those with equal inner sizes, then those of the
nearest number of elements; another target (device, threads) counts less than another shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from torch_autokern.build.candidate import Candidate, source_blob
from torch_autokern.errors import InvalidInputError
from torch_autokern.judge.stored import artifact_of
from torch_autokern.runtime.plan import CpuStep, LaunchPlan
from torch_autokern.search.nodes import Example
from torch_autokern.search.outcome import describe_key
from torch_autokern.search.tried import Brief, Offer
from torch_autokern.store.key import KernelKey
from torch_autokern.store.record import StoredRecord
from torch_autokern.store.store import KernelStore

CANDIDATES, EXAMPLES = 4, 3
MOST_READ = 2000  # of a large store the records with the largest speed-ups, so that a key does not wait for all of them


class Bank:
    """Candidates and examples from a store. Records of templates are left out: the templates answer for themselves."""

    name = "bank"
    derives = False

    def __init__(self, store: KernelStore) -> None:
        self._store = store
        self._read: dict[str, StoredRecord | None] = {}

    def propose(self, brief: Brief) -> Sequence[Offer]:
        """See `Proposer`: neighbours whose code fits this key, with the range of their steps made to fit."""
        if brief.round > 1:
            return []
        offers: list[Offer] = []
        for stored in self._neighbours(brief):
            candidate = transplanted(stored, brief.key)
            if candidate is not None and len(offers) < CANDIDATES:
                offers.append(Offer(f"i{len(offers)}.c0", candidate, candidate.idea))
        return offers

    def examples(self, brief: Brief) -> Sequence[tuple[Example, str]]:
        """See `Librarian`."""
        found: list[tuple[Example, str]] = []
        for stored in _sampled(self._neighbours(brief), brief)[:EXAMPLES]:
            record = stored.record
            source = stored.data.get(source_blob(record.provenance.language), b"").decode(errors="replace")  # type: ignore[arg-type]
            ratio = record.verdict.timings[0].ratio if record.verdict.timings else 0.0
            words = f"{describe_key(record.key)} on {record.target.name} ({record.target.arch})"
            name = f"{brief.name}.bank.e{len(found)}"
            found.append((Example(name, 0.0, "", record.provenance.idea, words, ratio, stored.record_id), source))
        return found

    def _neighbours(self, brief: Brief) -> list[StoredRecord]:
        near: list[tuple[tuple[float, ...], str, StoredRecord]] = []
        rows = self._store.index().rows(lambda target, stock_build: target.device_type == brief.target.device_type)
        rows.sort(key=lambda row: (-max(row.ratio_low.values(), default=0.0), row.record_id))
        for row in rows[:MOST_READ]:
            if row.record_id not in self._read:
                self._read[row.record_id] = self._worth_keeping(row.key_digest, row.record_id)
            stored = self._read[row.record_id]
            if stored is None or stored.record.key.op != brief.key.op:
                continue
            if stored.record.key == brief.key and stored.record.target == brief.target:
                continue  # not a neighbour: this is the key itself
            near.append((_distance(stored, brief), stored.record_id, stored))
        return [stored for _, _, stored in sorted(near, key=lambda item: item[:2])]

    def _worth_keeping(self, key_digest: str, record_id: str) -> StoredRecord | None:
        stored = self._store.get(key_digest, record_id)
        if stored is None or stored.record.provenance.template:
            return None
        word = self._store.notes(key_digest, record_id).approval
        return stored if word is None or word.approved else None  # what a person turned down is no example


def _sampled(near: Sequence[StoredRecord], brief: Brief) -> list[StoredRecord]:
    """The nearest neighbour, the nearest on another device or thread count and the nearest in other dtypes, then the others:
    what only differs in size teaches less than what had to be written otherwise."""
    elsewhere = next((one for one in near if one.record.target != brief.target), None)
    otherwise = next((one for one in near if _dtypes(one.record.key) != _dtypes(brief.key)), None)
    chosen = [*near[:1], *(one for one in (elsewhere, otherwise) if one is not None), *near]
    return list({one.record_id: one for one in chosen}.values())


def _dtypes(key: KernelKey) -> list[str | None]:
    return [None if tensor is None else tensor.dtype for tensor in key.tensors]


def _distance(stored: StoredRecord, brief: Brief) -> tuple[float, ...]:
    key, wanted = stored.record.key, brief.key
    dtypes = _dtypes(key) != _dtypes(wanted)
    inner = [None if t is None else t.sizes[-1:] for t in key.tensors] != [
        None if t is None else t.sizes[-1:] for t in wanted.tensors
    ]
    elements = abs(math.log2(max(1, _elements(key)) / max(1, _elements(wanted))))
    return float(dtypes), float(inner), elements, float(stored.record.target != brief.target)


def _elements(key: KernelKey) -> int:
    return sum(tensor.numel for tensor in key.tensors if tensor is not None)


def transplanted(stored: StoredRecord, key: KernelKey) -> Candidate | None:
    """A record's kernel for another key of its op: the code as it is, the range of each step in proportion to the elements of
    the first argument. None where that gives no whole number, or for a GPU plan of other sizes. Whether it is right there, the
    judge says."""
    try:
        candidate = artifact_of(stored).candidate
    except InvalidInputError:
        return None
    old, new = stored.record.key.tensors[0], key.tensors[0]
    if old is None or new is None:
        return None
    plan = candidate.plan
    if old.numel != new.numel:
        steps = []
        for step in plan.steps:
            if not isinstance(step, CpuStep) or plan.workspaces or not old.numel or step.range * new.numel % old.numel:
                return None
            steps.append(msgspec.structs.replace(step, range=max(1, step.range * new.numel // old.numel)))
        plan = LaunchPlan(plan.version, tuple(steps))
    return Candidate(candidate.language, candidate.source, plan, candidate.idea, candidate.author, parents=(stored.record_id,))
