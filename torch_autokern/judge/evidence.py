"""The parent's side of "right": pools what runners report over all trials and applies the limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from torch_autokern.judge.accuracy import Limits, OutputReport, Pool, Tally, Task, limits_for
from torch_autokern.judge.families import Family
from torch_autokern.judge.outcome import Place, Reason, Refusal
from torch_autokern.judge.verify import FamilyReport
from torch_autokern.store.record import FamilyError


@dataclass
class _Output:
    """One output of one family, pooled."""

    elements: int
    candidate: Pool = field(default_factory=Pool)
    stock: list[Pool] = field(default_factory=list)
    ulp: Pool = field(default_factory=Pool)
    worst: OutputReport | None = None
    worst_seed: int = 0

    @property
    def place(self) -> Place | None:
        """The worst element of all trials."""
        return None if self.worst is None else self.worst.candidate.worst

    def add(self, report: OutputReport, seed: int) -> None:
        """Take in one trial."""
        if self.worst is None or report.candidate.pool.largest > self.candidate.largest:
            self.worst, self.worst_seed = report, seed
        self.candidate.add(report.candidate.pool)
        self.ulp.add(report.ulp)
        if not self.stock:
            self.stock = [Pool() for _ in report.stock]
        for mine, new in zip(self.stock, report.stock, strict=True):
            mine.add(new)


@dataclass
class Evidence:
    """Everything that runners reported on one candidate and key."""

    task: Task
    deterministic: bool = True
    seeds: dict[Family, list[int]] = field(default_factory=dict)
    cases: dict[Family, dict[int, str]] = field(default_factory=dict)
    state_seeds: list[int] = field(default_factory=list)
    timing_seeds: list[int] = field(default_factory=list)
    _outputs: dict[tuple[Family, int], _Output] = field(default_factory=dict)
    _probes: dict[str, dict[tuple[Family, int], list[Tally]]] = field(default_factory=dict)

    def add(self, report: FamilyReport) -> Refusal | None:
        """Take in one trial; a refusal where it broke a rule without a measure."""
        family = Family(report.family)
        self.seeds.setdefault(family, []).append(report.seed)
        self.deterministic = self.deterministic and report.deterministic
        for index, output in enumerate(report.outputs):
            if output is None:
                continue
            broken = _unmeasured(family, report.seed, index, output)
            if broken is not None:
                return msgspec.structs.replace(broken, cases=self._cases(family, [report.seed]))
            self._outputs.setdefault((family, index), _Output(output.elements)).add(output, report.seed)
        for name, tallies in report.probes.items():
            for index, tally in enumerate(tallies):
                if report.outputs[index] is None:
                    continue
                self._probes.setdefault(name, {}).setdefault((family, index), []).append(tally)
        return None

    def check(self, slack: float = 1.0) -> Refusal | None:
        """The limits on what is pooled so far. With `slack` above 1 only what is far outside is refused: for early ends."""
        for (family, index), output in self._outputs.items():
            limit = self._limits(family, index)
            rms, largest = output.candidate.rms, output.candidate.largest
            if rms <= slack * limit.rms and largest <= slack * limit.largest:
                continue
            by_rms = rms > slack * limit.rms
            shown, allowed, stock = (
                (rms, limit.rms, limit.stock_rms) if by_rms else (largest, limit.largest, limit.stock_largest)
            )
            place, worst = output.place, output.worst
            return Refusal(
                Reason.WRONG_VALUE, self._message(family, index, by_rms, shown, allowed, stock), family.value,
                output.worst_seed, index, place.index if place else None, _number(place, "got"),
                _number(place, "expected"), shown, stock, allowed,
                beyond=worst.beyond if worst else 0, first=worst.first if worst else (),
                cases=self._cases(family, self.seeds[family]),
            )  # fmt: skip
        return None

    def families(self) -> tuple[FamilyError, ...]:
        """What each family showed, at the output that came closest to its limit."""
        return tuple(self._family_error(family) for family in self.seeds)

    def probes(self) -> tuple[dict[str, str], str | None]:
        """Probe name to what refused it; and the first probe that nothing refused, None where all were."""
        refused: dict[str, str] = {}
        for name, tallies in self._probes.items():
            seen = ((place, tally) for place, trials in tallies.items() for tally in trials)
            found = next((text for place, tally in seen if (text := self._refuses(place, tally))), None)
            if found is None:
                return refused, name
            refused[name] = found
        return refused, None

    def _cases(self, family: Family, seeds: Sequence[int]) -> tuple[str, ...]:
        known = self.cases.get(family, {})
        return tuple(known[seed] for seed in seeds if seed in known)

    def _refuses(self, place: tuple[Family, int], tally: Tally) -> str | None:
        family, index = place
        limit = self._limits(family, index)
        where = f"{family.value}, output {index}"
        if tally.nonfinite is not None:
            return f"{where}: NaN or infinity at the wrong place"
        if tally.nonzero is not None:
            return f"{where}: a value where 0 is exact"
        if tally.pool.largest > limit.largest:
            return f"{where}: largest error {tally.pool.largest:.3g} above {limit.largest:.3g}"
        if tally.pool.rms > limit.rms:
            return f"{where}: rms error {tally.pool.rms:.3g} above {limit.rms:.3g}"
        return None

    def _limits(self, family: Family, index: int) -> Limits:
        output = self._outputs[family, index]
        return limits_for(self.task, index, family, output.elements, output.stock, output.ulp)

    def _family_error(self, family: Family) -> FamilyError:
        entries = [(index, output) for (name, index), output in self._outputs.items() if name is family]

        def closeness(entry: tuple[int, _Output]) -> float:
            limit = self._limits(family, entry[0])
            return max(entry[1].candidate.rms / limit.rms, entry[1].candidate.largest / limit.largest)

        index, output = max(entries, key=closeness)
        limit = self._limits(family, index)
        return FamilyError(
            family.value, tuple(self.seeds[family]), output.candidate.rms, limit.stock_rms, limit.rms,
            output.candidate.largest, limit.stock_largest, limit.largest,
        )  # fmt: skip

    def _message(self, family: Family, index: int, by_rms: bool, shown: float, allowed: float, stock: float) -> str:
        output = self._outputs[family, index]
        unit = "of the tolerance" if self.task.accuracy.kind == "tolerance" else "of the natural scale"
        text = (
            f"family {family.value}, output {index}: {'rms' if by_rms else 'largest'} error {shown:.3g} {unit}, "
            f"allowed {allowed:.3g} (stock's own: {stock:.3g}), pooled over {len(self.seeds[family])} trials."
        )
        if output.place is not None:
            text += f" Worst at {output.place.index}: got {output.place.got}, expected {output.place.expected}."
        return f"{text} {_advice(self.task, family)}".rstrip()


_ADVICE = {
    Family.CANCELLATION: "Sums cancel here: accumulate in float32 or wider, in more than one partial sum.",
    Family.WIDE_COLUMNS: "Columns differ by powers of two here: splits into half precision lose the small ones.",
    Family.CONSTANT: "Constant rows: the mean must be as good as the input's last place.",
    Family.NEAR_LARGEST: "Sums and squares overflow here: scale each term before adding.",
    Family.SPIKES: "Mostly zeros, with spikes at the first and last positions: is a tail dropped?",
    Family.DENORMAL: "Denormal inputs: absolute errors below the smallest normal number are free.",
}


_OFFSET_ADVICE = {
    "native_layer_norm": "Subtract the mean (or another member of the row) before squaring: E[x^2] - mean^2 cancels here.",
    "_softmax": "Rows have a large mean here: subtract the row's maximum before the exponential, in float32 or wider.",
    "_log_softmax": "Rows have a large mean here: subtract the row's maximum before the exponential, and the sum's logarithm "
    "from that difference, not from the input.",
}


def _advice(task: Task, family: Family) -> str:
    """What usually breaks a family, in words for its author; a large mean breaks each op in another way."""
    if family is not Family.LARGE_OFFSET:
        return _ADVICE.get(family, "")
    other = "Terms have a large mean here: accumulate in float32 or wider, in more than one partial sum."
    return _OFFSET_ADVICE.get(task.spec.name, other)


def _unmeasured(family: Family, seed: int, index: int, output: OutputReport) -> Refusal | None:
    tally = output.candidate
    if tally.nonfinite is not None:
        place, reason = tally.nonfinite, Reason.WRONG_NONFINITE
        rule = "NaN and infinities must be where stock and the truth have them, and nowhere else"
    elif tally.nonzero is not None:
        place, reason, rule = tally.nonzero, Reason.WRONG_VALUE, "every term is 0 here, so the result is exactly 0"
    else:
        return None
    message = f"family {family.value}, seed {seed}, output {index} at {place.index}: got {place.got}, expected {place.expected}"
    return Refusal(
        reason, f"{message}: {rule}.", family.value, seed, index, place.index, _number(place, "got"), _number(place, "expected")
    )


def _number(place: Place | None, which: str) -> float | None:
    """The value as a number where JSON can hold it."""
    if place is None:
        return None
    value = float(getattr(place, which))
    return value if abs(value) < float("inf") else None


def pooled(reports: Sequence[FamilyReport], task: Task) -> tuple[Evidence, Refusal | None]:
    """Evidence of several trials, with the refusal that they lead to."""
    evidence = Evidence(task)
    for report in reports:
        broken = evidence.add(report)
        if broken is not None:
            return evidence, broken
    return evidence, evidence.check()
