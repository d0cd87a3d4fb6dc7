"""No check is dead: each one, switched off alone, lets a cheat through that it refuses when it is on.

What needs no process of its own runs in this one, on stand-ins and loaded candidates; cheats that would end the process run
here with their check off only, and with it on in a runner.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import pytest
import torch

from tests.judge.samples import ROOT, Sample, checked, softmax_key
from tests.judge.stand_ins import PLACEMENTS, StandIn, quiet, stock_of, task_of
from torch_autokern.build import compile_cpp as building
from torch_autokern.build import source_rules
from torch_autokern.judge import accuracy, evidence, interval, measure, speed, state, verdict, verify
from torch_autokern.judge.evidence import Evidence
from torch_autokern.judge.families import Family
from torch_autokern.judge.inputs import InputSet
from torch_autokern.judge.measure import TimingReport, TimingRequest, candidate_side, stock_side
from torch_autokern.judge.memory import Region
from torch_autokern.judge.outcome import Accuracy, Reason, Refusal, RefusedError
from torch_autokern.judge.properties import PropertyChecks
from torch_autokern.judge.state import StateChecks
from torch_autokern.judge.verify import CandidateCode
from torch_autokern.judge.workspaces import load_candidate
from torch_autokern.ops import SPECS
from torch_autokern.runtime import elf
from torch_autokern.runtime.plan import LaunchPlan
from torch_autokern.store.key import KernelKey

KEY = softmax_key(64, 100)
WIDE = softmax_key(4, 20000)
MM = SPECS["mm"].key([torch.zeros(24, 70), torch.zeros(70, 33)], {})
PITCHED = SPECS["_softmax"].key(
    [torch.zeros(64, 100)], {"dim": 1, "half_to_float": False}, [torch.empty_strided((64, 100), (104, 1))]
)
STOCK, EXACT, LOOSE = Accuracy(), Accuracy("exact"), Accuracy("tolerance", 1e-2, 1e-2)
Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Case:
    """A check, how to switch it off, and a cheat that only it refuses. `cheat` is made anew for each run; a text is a file in
    `tests/cheats/`."""

    name: str
    off: Patch
    cheat: Callable[[], object] | str
    reason: Reason
    key: KernelKey = KEY
    families: tuple[Family, ...] = (Family.NORMAL,)
    proof: Accuracy = STOCK


def judged(case: Case, placements: Sequence[str] = PLACEMENTS) -> Refusal | None:
    """Trials, state and properties, in this process."""
    if isinstance(case.cheat, str):
        sample = Sample(ROOT / "cheats" / f"{case.cheat}.cpp")
        artifact = sample.build()
        key, code = sample.key, load_candidate(artifact.binary, artifact.identity, sample.candidate.plan, sample.key)
    else:
        key, code = case.key, case.cheat()  # type: ignore[assignment]
    task = task_of(key, case.proof)
    found = Evidence(task)
    try:
        for family in case.families:
            for seed, placement in enumerate(placements):
                broken = found.add(verify.check_family(task, code, family, seed, placement, quiet))  # type: ignore[arg-type]
                if broken is not None:
                    return broken
        StateChecks(task, code, 3, quiet, deterministic=found.deterministic).run()
        PropertyChecks(task, code, 3, quiet).run()
    except RefusedError as error:
        return error.refusal
    return found.check()


def _all_a_little_wrong() -> StandIn:
    return StandIn(lambda x: ((torch.softmax(x.double(), 1) * (1 + 3.4e-7)).float(),))


def _one_wrong() -> StandIn:
    def one(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.softmax(x.double(), 1)
        if not torch.equal(8 * x, (8 * x).round()):  # the grid that properties are checked on
            y[3, 5] *= 1 + 1e-5
        return (y.float(),)

    return StandIn(one)


def _tiny_for_zero() -> StandIn:
    def product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = a @ b
        return (torch.where(y == 0, 1e-45, y),)

    return StandIn(product)


class Writing(StandIn):
    """Stock, and a write where none belongs."""

    def __init__(self, write: Callable[[torch.Tensor], None]) -> None:
        super().__init__(lambda x: (torch.softmax(x, 1),))
        self._write = write

    def run(self, tensors):  # type: ignore[no-untyped-def]
        result = torch.empty_strided((64, 100), (104, 1)) if self._write is _in_gap else torch.empty(64, 100)
        super().run_into(tensors, (result,))
        return (result,)

    def run_into(self, tensors, outputs) -> None:  # type: ignore[no-untyped-def]
        super().run_into(tensors, outputs)
        self._write(outputs[0])


def _in_gap(y: torch.Tensor) -> None:
    if y.stride(0) == 104:
        y.as_strided((63,), (104,), y.storage_offset() + 100).fill_(1)


def _before_start(y: torch.Tensor) -> None:
    if y.data_ptr() % 4096:  # where no page traps
        import ctypes

        ctypes.c_float.from_address(y.data_ptr() - 4).value = 1.0


def _after_the_reference() -> StandIn:
    """Wrong at the third call on the same contents, where they are wild."""
    seen: dict[float, int] = {}

    def third(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        name = float(x.double().sum())
        seen[name] = seen.get(name, 0) + 1
        return (torch.softmax(x * (1.01 if seen[name] == 3 and x.abs().max() > 30 else 1), 1),)

    return StandIn(third)


def _last_bits_vary_on_wild_data() -> StandIn:
    calls = [0]

    def vary(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls[0] += 1
        y = torch.softmax(x, 1)
        if x.abs().max() > 30 and calls[0] % 3 != 1:
            y.view(torch.int32)[0, 0] ^= 1
        return (y,)

    return StandIn(vary)


def _last_bit() -> StandIn:
    def other(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.softmax(x, 1)
        y.view(torch.int32)[0, 0] ^= 1
        return (y,)

    return StandIn(other)


class _Turned(StandIn):
    def run(self, tensors):  # type: ignore[no-untyped-def]
        return (super().run(tensors)[0].t().contiguous().t(),)


def _tires() -> StandIn:
    """Wrong from its tenth call on, while it is alone."""
    calls, alone = [0], threading.active_count()

    class Tires(StandIn):
        def run(self, tensors):  # type: ignore[no-untyped-def]
            calls[0] += threading.active_count() == alone
            wrong = calls[0] >= 10 and threading.active_count() == alone
            return (torch.softmax(tensors[0] * (1.01 if wrong else 1), 1),)

    return Tires(lambda x: (torch.softmax(x, 1),))


def _remembers_addresses() -> StandIn:
    memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    class Remembers(StandIn):
        def run_into(self, tensors, outputs) -> None:  # type: ignore[no-untyped-def]
            x = tensors[0]  # kept, so that nobody else gets its address
            outputs[0].copy_(memory.setdefault(x.data_ptr(), (torch.softmax(x, 1), x))[0])

    return Remembers(lambda x: (torch.softmax(x, 1),))


def _only_one_thread() -> StandIn:
    return StandIn(lambda x: (torch.softmax(x * (1.01 if torch.get_num_threads() > 1 else 1), 1),))


def _disturbed() -> StandIn:
    alone, main = threading.active_count(), threading.main_thread()

    def disturbed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wrong = threading.active_count() > alone and threading.current_thread() is main
        return (torch.softmax(x * (1.01 if wrong else 1), 1),)

    return StandIn(disturbed)


def _shares_scratch() -> StandIn:
    scratch, main = torch.empty(64, 100), threading.get_ident()

    def shared(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scratch.copy_(x)
        if threading.get_ident() != main:
            time.sleep(0.02)  # both have written, now both read
        return (torch.softmax(scratch, 1),)

    return StandIn(shared)


def _set(module: object, name: str, value: object) -> Patch:
    return lambda patch: patch.setattr(module, name, value)


def _deaf_to(reason: Reason) -> Patch:
    """`evidence` no longer hears of one of its two rules without a measure."""
    heard = evidence._unmeasured

    def without(*args: object) -> Refusal | None:
        found = heard(*args)  # type: ignore[arg-type]
        return None if found is not None and found.reason is reason else found

    return _set(evidence, "_unmeasured", without)


def _no_third_run(patch: pytest.MonkeyPatch) -> None:
    once = verify.PoisonedRuns.once

    def first_two(self, inputs, placement, poison, regions=None):  # type: ignore[no-untyped-def]
        runs = self.__dict__.setdefault("runs", [])
        if len(runs) == 2 and self.seed < 3 and regions is None:
            return runs[0]
        runs.append(once(self, inputs, placement, poison, regions))
        return runs[-1]

    patch.setattr(verify.PoisonedRuns, "once", first_two)


def _is_workspace(region: Region) -> bool:
    return region.tensor.dtype == torch.uint8


def _workspaces_start_with_zeros(patch: pytest.MonkeyPatch) -> None:
    """As if all were declared zeroed: plain calls take theirs from the heap, where an earlier test's pattern may lie."""
    plain = load_candidate

    def zeroed(binary: bytes, identity: str, plan: LaunchPlan, key: KernelKey) -> CandidateCode:
        spaces = tuple(msgspec.structs.replace(space, zeroed=True) for space in plan.workspaces)
        return plain(binary, identity, msgspec.structs.replace(plan, workspaces=spaces), key)

    patch.setattr(sys.modules[__name__], "load_candidate", zeroed)


def _workspaces_unguarded(patch: pytest.MonkeyPatch) -> None:
    intact = Region.guards_intact
    patch.setattr(Region, "guards_intact", lambda self: _is_workspace(self) or intact(self))


def _bits_as_if_repeated(patch: pytest.MonkeyPatch) -> None:
    require = verify._require_stock_bits
    patch.setattr(
        verify, "_require_stock_bits", lambda runner, results, stock, deterministic: require(runner, results, stock, True)
    )


def _skip(name: str) -> Patch:
    return _set(StateChecks, name, lambda self: "skipped")


CASES = [
    Case("rms limit", _set(accuracy, "RMS_FACTOR", 1e9), _all_a_little_wrong, Reason.WRONG_VALUE),
    Case("largest error limit", _set(accuracy, "MAX_FACTOR", 1e9), _one_wrong, Reason.WRONG_VALUE),
    Case("NaN and infinity", _deaf_to(Reason.WRONG_NONFINITE), "hides_nan_with_max", Reason.WRONG_NONFINITE,
         families=(Family.NONFINITE,)),
    Case("exact zero", _deaf_to(Reason.WRONG_VALUE), _tiny_for_zero, Reason.WRONG_VALUE, MM, (Family.SPIKES,)),
    Case("poisoned outputs", _set(Region, "poison", lambda self, byte: self.whole[self.start : self.stop].fill_(0)),
         "skips_zero_results", Reason.NOT_WRITTEN, families=(Family.NORMAL, Family.HEAVY_TAILS, Family.ROW_SCALE)),
    Case("guard zones", _set(Region, "guards_intact", lambda self: True), lambda: Writing(_before_start), Reason.WROTE_OUTSIDE),
    Case("gaps in outputs", _set(Region, "gaps_hold", lambda self, byte: True), lambda: Writing(_in_gap), Reason.WROTE_OUTSIDE,
         PITCHED),
    Case("inputs unchanged", _set(InputSet, "same_as", lambda self, saved: True), "writes_between_rows", Reason.WROTE_INPUT),
    Case("float state", _set(verify, "float_state", lambda: ()), "leaves_flush_to_zero_on", Reason.CHANGED_THREAD),
    Case("call after the reference", _no_third_run, _after_the_reference, Reason.STALE_RESULT, families=(Family.ROW_SCALE,)),
    Case("class exact: every bit", _set(verify, "_require_stock_bits", lambda *args: None), _last_bit, Reason.WRONG_VALUE,
         proof=EXACT),
    Case("class exact: run to run", _bits_as_if_repeated, _last_bits_vary_on_wild_data, Reason.NOT_DETERMINISTIC,
         families=(Family.ROW_SCALE,), proof=EXACT),
    Case("layout", _set(state, "check_layout", lambda *args: None), lambda: _Turned(lambda x: (torch.softmax(x, 1),)),
         Reason.WRONG_LAYOUT),
    Case("repeats", _skip("_repeats"), _tires, Reason.STALE_RESULT),
    Case("same addresses", _skip("_same_addresses"), _remembers_addresses, Reason.STALE_RESULT),
    Case("threads", _skip("_other_thread_counts"), _only_one_thread, Reason.NOT_DETERMINISTIC),
    Case("other work", _skip("_beside_other_work"), _disturbed, Reason.STALE_RESULT),
    Case("concurrent callers", _skip("_concurrently"), _shares_scratch, Reason.STALE_RESULT),
    Case("poisoned workspaces", _workspaces_start_with_zeros, "trusts_its_workspace", Reason.WRONG_NONFINITE),
    Case("guarded workspaces", _workspaces_unguarded, "writes_past_odd_workspace", Reason.WROTE_OUTSIDE,
         families=(Family.LARGE_OFFSET,)),
    Case("properties", _set(PropertyChecks, "run", lambda self: {}), lambda: StandIn(lambda x: (torch.zeros_like(x),)),
         Reason.PROPERTY_BROKEN, WIDE, proof=LOOSE),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _float_state_is_put_back() -> Iterator[None]:
    yield
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_check_that_is_off_lets_its_cheat_through(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # first, so that the heap holds no pattern of the run with the check on
        case.off(patch)
        assert judged(case) is None
    torch.set_flush_denormal(False)
    refusal = judged(case)
    assert refusal is not None and refusal.reason is case.reason, refusal


def test_trapping_pages_alone_see_a_read_past_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    name, families = "reads_past_end_on_wild_data", (Family.LARGE_OFFSET,)  # the sanitized programs see calmer rows
    case = Case("trapping pages", lambda patch: None, name, Reason.CRASHED, families=families)
    refusal = checked(Sample(ROOT / "cheats" / f"{name}.cpp"))
    assert refusal is not None and refusal.reason is Reason.CRASHED
    assert judged(case, ("heap", "heap", "heap")) is None


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("overflows_an_integer", _set(verdict, "sanitized", lambda *args, **keyword: {})),
        ("includes_the_system", _set(building, "source_problems", lambda source: ())),
        ("reads_the_clock", _set(building, "assembly_problems", lambda assembly: ())),
        ("reads_the_callers_frame", _set(source_rules, "_POISON", "nothing_at_all")),
    ],
)
def test_sanitizers_and_rules_of_the_source(name: str, off: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample(ROOT / "cheats" / f"{name}.cpp")
    refusal = checked(sample)
    assert refusal is not None and refusal.reason.value in sample.reasons
    off(monkeypatch)
    assert checked(sample, trials=1) is None


def test_rules_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = checked(Sample(ROOT / "cheats" / "reads_the_environment.cpp"))
    assert refusal is not None and refusal.reason is Reason.STATIC_RULE
    monkeypatch.setattr(building, "check_cpu_library", lambda *args, **keyword: ())  # when it is built
    monkeypatch.setattr(elf, "read_cpu_library", lambda *args, **keyword: elf.LibraryInfo(()))  # when it is loaded
    assert judged(Case("library", lambda patch: None, "reads_the_environment", Reason.STATIC_RULE)) is None


def test_vacuity_probes() -> None:
    """A softmax over one element: ones are right, and so is nonsense."""
    task = task_of(softmax_key(64, 1))
    ones = StandIn(lambda x: (torch.ones_like(x),))
    found = Evidence(task)
    for family in (Family.NORMAL, Family.ROW_SCALE):
        assert found.add(verify.check_family(task, ones, family, 1, "heap", quiet, with_probes=True)) is None
    assert found.probes()[1] == "constant"
    assert found.check() is None, "without the probes it is accepted"


def test_outputs_of_timed_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed() -> TimingReport:
        kept: dict[int, torch.Tensor] = {}
        cached = StandIn(lambda x: (kept.setdefault(x.data_ptr(), torch.softmax(x, 1)).clone(),))
        task = task_of(KEY)
        return measure.measure(
            task, stock_side(task), candidate_side(task, cached), TimingRequest(3, 0.0, 4, 4), quiet, 1 << 20
        )

    with pytest.raises(RefusedError) as caught:
        timed()
    assert caught.value.refusal.reason is Reason.STALE_RESULT
    monkeypatch.setattr(measure._Watch, "_judge", lambda *args: None)
    assert timed().stock_us


def _report(stock_us: Sequence[float], candidate_us: float, copy_us: float = 0.0) -> TimingReport:
    return TimingReport(tuple(stock_us), (candidate_us,) * len(stock_us), 1, 8, copy_us, 40)


@pytest.mark.parametrize(
    ("report", "off", "reason"),
    [
        (_report([20.0] * 40, 1.0, copy_us=10.0), _set(speed, "PHYSICS_SLACK", 0.0), Reason.FASTER_THAN_PHYSICS),
        (_report([20.0] * 40, 20.0), _set(speed, "ACCEPT_RATIO", 0.0), Reason.NOT_FASTER),
        (
            _report([20.0, 900.0, 20.0, 900.0, 20.0, 900.0, 20.0, 20.0] * 5, 10.0),
            _set(interval, "NOISE_FACTOR", math.inf),
            Reason.TIMING_UNSTABLE,
        ),
    ],
    ids=["faster than physics", "not faster", "a busy machine"],
)
def test_limits_of_time(report: TimingReport, off: Patch, reason: Reason, monkeypatch: pytest.MonkeyPatch) -> None:
    def verdict_of() -> Refusal | None:
        found = speed.speed_of(report)
        return found if isinstance(found, Refusal) else speed.too_fast(found) or speed.too_slow([found], 1)

    refusal = verdict_of()
    assert refusal is not None and refusal.reason is reason
    off(monkeypatch)
    assert verdict_of() is None


def test_stock_passes_what_the_cheats_do_not() -> None:
    families = (Family.NORMAL, Family.ROW_SCALE, Family.SPIKES)
    for key, proof in ((KEY, STOCK), (KEY, EXACT), (WIDE, LOOSE), (MM, STOCK)):
        stock = functools.partial(stock_of, key)
        assert judged(Case("stock", lambda patch: None, stock, Reason.CRASHED, key, families, proof)) is None
