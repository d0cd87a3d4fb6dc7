"""How much of a GPU's memory the judge holds at a time, with a device that is pretended: what is alive is counted."""

from __future__ import annotations

import weakref

import pytest
import torch

from tests.judge.pretend_gpu import on_gpu, pretend
from tests.judge.samples import softmax_key
from tests.judge.stand_ins import StandIn, quiet, stock_of, task_of
from torch_autokern.judge import protocol, runner
from torch_autokern.judge.families import Family
from torch_autokern.judge.outcome import Accuracy, Reason, RefusedError
from torch_autokern.judge.properties import PropertyChecks
from torch_autokern.judge.state import StateChecks
from torch_autokern.judge.verify import check_family
from torch_autokern.runtime.plan import KernelStep, LaunchPlan, OutputArg

KEY = on_gpu(softmax_key(64, 100))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)


def test_no_result_is_kept_while_later_calls_are_made(gpu: None) -> None:
    # Of a key of 4 GB tensors every result kept is 4 GB beside two sets of inputs; two streams have two results at a time.
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def watched(x: torch.Tensor) -> tuple[torch.Tensor]:
        alive.append(sum(earlier() is not None for earlier in made))
        result = torch.softmax(x, 1)
        made.append(weakref.ref(result))
        return (result,)

    StateChecks(task_of(KEY), StandIn(watched), 11, quiet).run()
    assert max(alive) == 1


def test_the_state_checks_inputs_are_gone_before_properties_and_timing(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[weakref.ref[StateChecks]] = []

    class Watched(StateChecks):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]
            states.append(weakref.ref(self))

    def properties(*args: object) -> PropertyChecks:
        assert states and states[-1]() is None
        return PropertyChecks(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(runner, "StateChecks", Watched)
    monkeypatch.setattr(runner, "PropertyChecks", properties)
    monkeypatch.setattr(runner, "_load", lambda job, binary: stock_of(KEY))
    monkeypatch.setattr(runner, "_apply_flags", lambda key, threads: None)
    monkeypatch.setattr(protocol, "send", lambda descriptor, message: None)
    monkeypatch.setattr(protocol, "receive_answer", lambda descriptor: True)
    plan = LaunchPlan(1, (KernelStep("f", (1, 1, 1), (32, 1, 1), (OutputArg(0),)),))
    job = protocol.Job(
        identity="x", plan=plan, key=KEY, threads=0, accuracy=Accuracy(), trials=(), state_seed=7, with_probes=False, timings=()
    )
    runner.serve(job, b"", 0, 0, 1 << 16)
    assert states


def test_an_input_changed_by_a_later_call_is_refused(gpu: None) -> None:
    calls = [0]

    def writes(x: torch.Tensor) -> tuple[torch.Tensor]:
        calls[0] += 1
        result = torch.softmax(x, 1)
        if calls[0] == 3:
            x[5, 7] += 1
        return (result,)

    with pytest.raises(RefusedError) as caught:
        check_family(task_of(KEY), StandIn(writes), Family.NORMAL, 5, "heap", quiet)
    assert caught.value.refusal.reason is Reason.WROTE_INPUT
