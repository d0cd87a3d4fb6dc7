"""What the judge does for a GPU key, with a device that is pretended: clocks, streams, graphs, jobs, failures."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from tests.judge.pretend_gpu import Event, on_gpu, pretend
from tests.judge.samples import layer_norm_key, softmax_key
from tests.judge.stand_ins import StandIn, quiet, stock_of, task_of, verify
from torch_autokern.errors import DeviceError, JudgeError
from torch_autokern.judge import process, protocol, runner, verdict
from torch_autokern.judge.clock import Figure, GraphClock, QueueClock, clocks_agree
from torch_autokern.judge.evidence import Evidence
from torch_autokern.judge.measure import TimingReport, TimingRequest, candidate_side, measure, stock_side
from torch_autokern.judge.outcome import Accuracy, Reason, Refusal, RefusedError
from torch_autokern.judge.process import start_runner
from torch_autokern.judge.properties import PropertyChecks
from torch_autokern.judge.remembered import fingerprints
from torch_autokern.judge.speed import Speed, slower_when_replayed, speed_of
from torch_autokern.judge.state import StateChecks
from torch_autokern.judge.verify import CandidateCode
from torch_autokern.runtime.plan import KernelStep, LaunchPlan, OutputArg

KEY = on_gpu(softmax_key(64, 100))
CPU = torch.device("cpu")
FIGURES: tuple[Figure, ...] = ("eager", "graph", "cold")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)


# -- fingerprints ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "dtype"), [(1, torch.bfloat16), (3, torch.float16), (7, torch.float32), (5000, torch.float32)]
)
def test_every_flipped_bit_changes_the_fingerprint(count: int, dtype: torch.dtype) -> None:
    # Lengths below, at and beside whole 8-byte words.
    tensor = torch.randn(count).to(dtype)
    (before,) = fingerprints([(tensor,)])
    for place in {0, count // 2, count - 1}:
        for bit in (0, 7, 8 * tensor.element_size() - 1):
            changed = tensor.clone()
            changed.view(torch.uint8)[place * tensor.element_size() + bit // 8] ^= 1 << bit % 8
            assert fingerprints([(changed,)])[0] != before
    assert fingerprints([(tensor.clone(),)])[0] == before


def test_a_fingerprint_sees_order_and_reads_strided_and_shifted_memory() -> None:
    tensor = torch.arange(4096, dtype=torch.float32).reshape(64, 64)
    (plain,), (turned,), (shifted,) = fingerprints(
        [(tensor,), (tensor.t(),), (torch.cat([torch.zeros(1), tensor.view(-1)])[1:],)]
    )
    assert plain != turned and plain == shifted
    assert fingerprints([(tensor, None)]) == [(plain, 0)]


def test_flipped_signs_do_not_hide_each_other() -> None:
    tensor = torch.randn(4096)
    (before,) = fingerprints([(tensor,)])
    for flipped in (tensor.neg(), torch.cat([-tensor[:2], tensor[2:]]), torch.cat([tensor[:1], -tensor[1:4], tensor[4:]])):
        assert fingerprints([(flipped,)])[0] != before


def test_fingerprints_of_pieces_are_not_interchangeable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_autokern.judge.remembered._WORDS", 16)
    tensor = torch.randn(128)
    swapped = torch.cat([tensor[64:], tensor[:64]])
    assert fingerprints([(tensor,)]) != fingerprints([(swapped,)])


# -- clocks ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device_us", "host_us", "agree"),
    [(1000, 1020, True), (10, 150, True), (1000, 900, False), (1000, 2000, False), (10, 400, False)],
)
def test_two_clocks_agree_within_what_waiting_costs(device_us: float, host_us: float, agree: bool) -> None:
    assert clocks_agree(device_us, host_us) is agree


def test_brackets_whose_clocks_contradict_each_other_are_counted(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = QueueClock(CPU)
    call = lambda: torch.zeros(1 << 20).sum()  # noqa: E731
    watch.time([call] * 8, (0, 0), call)
    assert watch.disagreed == 0
    monkeypatch.setattr(Event, "factor", 3.0)
    watch.time([call] * 8, (0, 0), call)
    assert watch.disagreed == 1


def test_a_verdict_is_not_reached_with_clocks_that_contradict_each_other() -> None:
    times = tuple(100.0 + i % 3 for i in range(40))
    steady = TimingReport(times, times, 1, 4, 0.0, 40)
    assert isinstance(speed_of(steady), Speed)
    torn = speed_of(TimingReport(times, times, 1, 4, 0.0, 40, disagreed=20))
    assert isinstance(torn, Refusal) and torn.reason is Reason.TIMING_UNSTABLE


def test_a_graph_is_captured_once_and_its_results_are_poisoned_before_each_replay(gpu: None) -> None:
    seen: list[bool] = []
    results = torch.zeros(4)

    def call() -> torch.Tensor:
        seen.append(bool(results.isnan().all()))
        return results

    watch = GraphClock(CPU)
    for _ in range(2):
        watch.time([call], (1, 0), call)
    assert len(watch._graphs) == 1
    assert seen[-1], "what an earlier replay left behind would pass for this one's result"


def test_slower_in_a_replayed_graph_is_not_accepted() -> None:
    slow = speed_of(TimingReport((100.0,) * 20, (120.0,) * 20, 1, 4, 0.0, 20, "graph"))
    fast = speed_of(TimingReport((100.0,) * 20, (80.0,) * 20, 1, 4, 0.0, 20, "graph"))
    assert isinstance(slow, Speed) and isinstance(fast, Speed)
    refused = slower_when_replayed([slow])
    assert refused is not None and refused.reason is Reason.NOT_FASTER
    assert slower_when_replayed([fast]) is None and slower_when_replayed([]) is None


# -- right, and fast ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [KEY, on_gpu(layer_norm_key(16, 64))], ids=["softmax", "layer_norm"])
def test_stock_passes_every_family_as_a_candidate_for_a_gpu_key(gpu: None, key: object) -> None:
    assert isinstance(verify(key, stock_of(key), trials=1), Evidence)  # type: ignore[arg-type]


def test_state_on_a_gpu_is_streams_and_graphs(gpu: None) -> None:
    checks = StateChecks(task_of(KEY), stock_of(KEY), 11, quiet).run()
    anywhere = {"layout", "poisoned workspaces", "repeats", "same addresses"}
    assert set(checks) == anywhere | {"side stream", "two streams", "captured graph"}
    checks.update(PropertyChecks(task_of(KEY), stock_of(KEY), 11, quiet).run())
    assert all(text.startswith("passed") for text in checks.values())


def _refused_state(code: CandidateCode) -> str:
    with pytest.raises(RefusedError) as caught:
        StateChecks(task_of(KEY), code, 11, quiet).run()
    return caught.value.refusal.message


def test_a_replay_that_keeps_its_first_contents_is_refused(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []

    def frozen(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (kept[0].clone(),) if kept else (torch.softmax(x, 1),)

    import tests.judge.pretend_gpu as gpu_module

    real = gpu_module.Graph

    class Freezing(real):  # type: ignore[misc,valid-type]
        def replay(self) -> None:
            kept[:] = [torch.full((64, 100), 0.01)]
            super().replay()

    monkeypatch.setattr(gpu_module, "Graph", Freezing)
    assert "captured graph" in _refused_state(StandIn(frozen))


@pytest.mark.parametrize("figure", FIGURES)
def test_every_figure_is_timed_and_its_outputs_checked(gpu: None, figure: Figure) -> None:
    task = task_of(KEY)
    request = TimingRequest(3, 0.0, 4, 4, figure)
    report = measure(task, stock_side(task), candidate_side(task, stock_of(KEY)), request, quiet, 1 << 16)
    assert report.figure == figure and len(report.stock_us) == len(report.candidate_us) == 8
    assert report.checked >= 8 and min(report.candidate_us) > 0


@pytest.mark.parametrize("figure", FIGURES)
def test_a_kernel_that_gets_tired_is_caught_while_timing(gpu: None, figure: Figure) -> None:
    calls = [0]

    def tired(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls[0] += 1
        return (torch.softmax(x, 1) if calls[0] <= 30 else torch.zeros_like(x),)

    task = task_of(KEY)
    with pytest.raises(RefusedError) as caught:
        measure(
            task, stock_side(task), candidate_side(task, StandIn(tired)), TimingRequest(3, 0.0, 4, 4, figure), quiet, 1 << 16
        )
    assert caught.value.refusal.reason is Reason.STALE_RESULT


def test_a_graph_of_calls_that_do_not_fit_is_left_out_and_says_so(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_autokern.judge.measure.DEVICE_MEMORY_BYTES", 1 << 10)
    task = task_of(KEY)
    report = measure(task, stock_side(task), stock_side(task), TimingRequest(3, 0.0, 4, 4, "graph"), quiet, 1 << 16)
    assert report.skipped and not report.stock_us


def _job(**changes: object) -> protocol.Job:
    plan = LaunchPlan(1, (KernelStep("f", (1, 1, 1), (32, 1, 1), (OutputArg(0),)),))
    fields: dict[str, object] = {
        "identity": "x", "plan": plan, "key": KEY, "threads": 0, "accuracy": Accuracy(),
        "trials": (protocol.Trial("normal", 5, 0),), "state_seed": 7, "with_probes": True,
        "timings": tuple(TimingRequest(3, 0.0, 4, 4, figure) for figure in FIGURES),
    }  # fmt: skip
    return protocol.Job(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_job_of_a_gpu_key_reports_families_state_and_every_figure(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_load", lambda job, binary: stock_of(KEY))
    monkeypatch.setattr(runner, "_apply_flags", lambda key, threads: None)
    sent: list[object] = []
    monkeypatch.setattr(protocol, "send", lambda descriptor, message: sent.append(message))
    monkeypatch.setattr(protocol, "receive_answer", lambda descriptor: True)
    runner.serve(_job(), b"", 0, 0, 1 << 16)
    names = [type(message).__name__ for message in sent if not isinstance(message, protocol.Entering)]
    assert names == ["FamilyReport", "StateReport", "TimingReport", "TimingReport", "TimingReport"]


# -- failures -----------------------------------------------------------------------------------------------------------------


def test_a_sticky_error_is_a_crash_with_the_family_that_met_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")

    monkeypatch.setattr(runner, "finish", lost)
    refusal = runner._device_refusal(RuntimeError("CUDA error"), KEY, "family spikes, seed 12")
    assert refusal.reason is Reason.CRASHED and "illegal memory access" in refusal.message
    assert (refusal.family, refusal.seed) == ("spikes", 12)


def test_a_refused_launch_is_a_bad_plan_and_anything_else_is_our_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "finish", lambda device: None)
    refusal = runner._device_refusal(RuntimeError("cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE (1)"), KEY, "loading")
    assert refusal.reason is Reason.BAD_PLAN and "INVALID_VALUE" in refusal.message
    for error in (RuntimeError("shape mismatch"), torch.OutOfMemoryError("no memory")):
        with pytest.raises(RuntimeError):
            runner._device_refusal(error, KEY, "loading")
    with pytest.raises(RuntimeError):
        runner._device_refusal(RuntimeError("cuLaunchKernelEx"), softmax_key(4, 4), "loading")


class Scripted:
    """A runner process whose starts end as `script` says: a level, or words of a failure."""

    script: ClassVar[list[str]] = []
    boxes: ClassVar[list[str]] = []

    def __init__(self, device_type: str = "cpu", *, resident: bool = True, allow_weak_box: bool = False, box: str = "") -> None:
        self.boxes.append(box)
        self.box_level = ""
        self.closed = False
        self.alive = True

    def wait_ready(self) -> Refusal | None:
        words = self.script.pop(0)
        if words.startswith("fail"):
            raise JudgeError(words)
        self.box_level = words
        return None

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    monkeypatch.setattr(process, "RunnerProcess", Scripted)
    monkeypatch.setattr(process, "_CANARY_PAUSE_S", 0.0)
    monkeypatch.setattr(process, "_without_box", set())
    Scripted.script, Scripted.boxes = [], []
    return Scripted


def test_one_failed_canary_gets_a_second_process(scripted: type[Scripted]) -> None:
    scripted.script = ["fail: no context", "landlock7+seccomp"]
    started = start_runner("cuda")
    assert not isinstance(started, Refusal) and started.box_level == "landlock7+seccomp"


def test_two_failed_canaries_stop_and_say_so(scripted: type[Scripted]) -> None:
    scripted.script = ["fail: one", "fail: two"]
    with pytest.raises(DeviceError, match=r"never reset.*fail: two"):
        start_runner("cuda")
    assert scripted.boxes == ["", ""]


def test_outside_of_the_box_only_where_a_person_named_the_risk_and_said_so_in_the_level(scripted: type[Scripted]) -> None:
    scripted.script = ["fail: one", "fail: two", "none", "none"]
    started = start_runner("cuda", allow_weak_box=True)
    assert not isinstance(started, Refusal) and started.box_level == "none"
    start_runner("cuda", allow_weak_box=True)
    assert scripted.boxes == ["", "", "none", "none"], "what was learned once is not tried again"


@pytest.mark.parametrize(("reason", "starts"), [(Reason.CRASHED, 2), (Reason.HUNG, 2), (Reason.WRONG_VALUE, 1)])
def test_after_a_crash_or_a_hang_the_next_screen_starts_with_a_canary(
    monkeypatch: pytest.MonkeyPatch, reason: Reason, starts: int
) -> None:
    started: list[Scripted] = []

    def start(device_type: str, *, allow_weak_box: bool, resident: bool = True) -> Scripted:
        started.append(Scripted(device_type))
        return started[-1]

    verdict.close_screen()
    monkeypatch.setattr(verdict, "start_runner", start)
    monkeypatch.setattr(verdict, "check_supported", lambda key: None)
    monkeypatch.setattr(verdict, "collect", lambda runner, job, binary, evidence: Refusal(reason, "seen"))
    artifact = _artifact()
    try:
        for _ in range(2):
            found = verdict.screen(artifact, KEY, _target())
            assert isinstance(found, Refusal) and found.reason is reason
        assert len(started) == starts
    finally:
        verdict.close_screen()


def test_all_processes_of_a_gpu_verdict_start_before_the_first_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Runner(Scripted):
        def __enter__(self) -> Runner:
            return self

        def __exit__(self, *exc: object) -> None:
            events.append("close")

    def start(device_type: str, *, allow_weak_box: bool, resident: bool) -> Runner:
        events.append("start")
        return Runner(device_type)

    monkeypatch.setattr(process, "start_runner", start)
    with process.fresh_runners("cuda", 3) as runners:
        for number, _ in enumerate(runners):
            events.append(f"work {number}")
    assert events[:4] == ["start", "start", "start", "work 0"] and events[4:6] == ["close", "work 1"]


def _artifact() -> object:
    from torch_autokern.build.candidate import Artifact, Candidate

    plan = LaunchPlan(1, (KernelStep("f", (1, 1, 1), (32, 1, 1), (OutputArg(0),)),))
    candidate = Candidate("cuda", "", plan, "", "test")
    return Artifact(candidate, b"", candidate.candidate_id, {}, "box", 0.1, kind="cuda", arch="sm_90a")


def _target() -> object:
    from torch_autokern.store.key import Target

    return Target("cuda", "NVIDIA H200", "sm_90a", 0)


class InProcess(Scripted):
    """Runs jobs here: what the parent makes of a GPU runner's reports, without the process."""

    code: ClassVar[CandidateCode]

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.alive = False

    def run(self, job: protocol.Job, binary: bytes) -> list[object]:
        sent: list[object] = []
        patch = pytest.MonkeyPatch()
        try:
            patch.setattr(protocol, "send", lambda descriptor, message: sent.append(message))
            patch.setattr(protocol, "receive_answer", lambda descriptor: True)
            patch.setattr(runner, "_load", lambda job, binary: self.code)
            runner.serve(job, b"", 0, 0, 1 << 16)
            sent.append(protocol.Finished())
        except RefusedError as error:
            sent.append(protocol.Refused(error.refusal))
        finally:
            patch.undo()
        return [message for message in sent if not isinstance(message, protocol.Entering)]


@pytest.fixture
def in_process(gpu: None, monkeypatch: pytest.MonkeyPatch) -> type[InProcess]:
    monkeypatch.setattr(process, "start_runner", lambda device_type, **options: InProcess(device_type))
    monkeypatch.setattr(verdict, "RunnerProcess", InProcess)
    monkeypatch.setattr(process, "RunnerProcess", InProcess)
    monkeypatch.setattr(verdict, "check_supported", lambda key: None)
    monkeypatch.setattr(runner, "_apply_flags", lambda key, threads: None)
    budgets: dict[Figure, float] = {"eager": 0.05, "graph": 0.05, "cold": 0.05}
    monkeypatch.setattr(verdict, "_FIGURES", {"cpu": {"eager": 0.05}, "cuda": budgets})
    return InProcess


def test_a_verdict_on_a_gpu_key_times_three_figures_in_three_processes(
    in_process: type[InProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both sides are stock here: with the bar lowered the verdict is an acceptance.
    in_process.code = stock_of(KEY)
    monkeypatch.setattr("torch_autokern.judge.speed.ACCEPT_RATIO", 0.1)
    monkeypatch.setattr("torch_autokern.judge.interval.NOISE_FACTOR", 50.0)
    monkeypatch.setattr(verdict, "slower_when_replayed", lambda speeds: None)
    found = verdict.judge(_artifact(), KEY, _target())  # type: ignore[arg-type]
    assert not isinstance(found, Refusal), found.message
    assert [(t.regime, t.pages, t.inputs, t.processes) for t in found.timings] == [
        ("eager", "device", "warm", 3), ("graph", "device", "warm", 3), ("eager", "device", "cold", 3),
    ]  # fmt: skip
    assert found.checks["captured graph"].startswith("passed") and "trapping" not in found.checks["guard zones"]
    assert found.checks["sanitizers"].startswith("not run")
    assert found.vacuity_probes and found.determinism == "run_to_run"


def test_a_wrong_gpu_candidate_is_refused_in_the_first_process(in_process: type[InProcess]) -> None:
    in_process.code = StandIn(lambda x: (torch.softmax(x, 1) * 1.001,))
    found = verdict.judge(_artifact(), KEY, _target())  # type: ignore[arg-type]
    assert isinstance(found, Refusal) and found.reason is Reason.WRONG_VALUE
