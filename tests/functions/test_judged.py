"""A whole function from candidate to served call: judged, stored, found again; and nonsense refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import rms_norm
import torch
from rms_norm import RMSNorm, artifact, body, candidate

import torch_autokern as ak
from torch_autokern.judge.accuracy import Task
from torch_autokern.judge.evidence import Evidence
from torch_autokern.judge.families import Family
from torch_autokern.judge.functions import changed_arguments, neighbours, row_dims, truth_changes
from torch_autokern.judge.inputs import families_for, make_inputs
from torch_autokern.judge.memory import bits
from torch_autokern.judge.outcome import Accuracy, Reason, Refusal
from torch_autokern.judge.stored import verify_record
from torch_autokern.judge.vacuity import probes
from torch_autokern.judge.verdict import check, close_screen, screen
from torch_autokern.judge.verify import check_family
from torch_autokern.ops import spec_of
from torch_autokern.ops.function import FunctionSpec, function_spec, op_name
from torch_autokern.ops.graph import capture
from torch_autokern.runtime.decorated import function_of
from torch_autokern.runtime.session import session
from torch_autokern.runtime.target import local_target
from torch_autokern.search.loop import warm
from torch_autokern.store.folders import FolderChoice
from torch_autokern.store.store import open_store
from torch_autokern.store.workload import SCHEMA, Workload, WorkloadEntry


def task_of(body: object, *tensors: torch.Tensor) -> tuple[Task, FunctionSpec]:
    graph = capture(body, tensors)  # type: ignore[arg-type]
    spec = function_spec(op_name("tests.function", graph), graph.text)
    return Task(spec, spec.key(tensors, {}), Accuracy()), spec


def judge_values(task: Task, run: object, seeds: int = 2) -> Refusal | None:
    """The judge's rule for values on every family, in this process: what `check` asks of a candidate, without a box."""

    class Code:
        def run(self, tensors: object) -> object:
            return tuple(run(*tensors))  # type: ignore[operator, misc]

        workspaces = ()

        def run_into(self, tensors: object, outputs: object) -> None:
            for out, made in zip(outputs, run(*tensors), strict=False):  # type: ignore[operator, call-overload]
                out.copy_(made)

    evidence = Evidence(task)
    for seed in range(seeds):
        for family in families_for(task.spec, task.key):
            evidence.add(check_family(task, Code(), family, seed, "heap", lambda phase, allowed_s: None, with_probes=seed == 0))  # type: ignore[arg-type]
    return evidence.check() or (Refusal(Reason.VACUOUS_TASK, str(evidence.probes()[1])) if evidence.probes()[1] else None)


BODIES = {
    "rms norm": (lambda x: x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-5), ((6, 40, 12),)),
    "softmax of a scaled product": (lambda a, b: torch.softmax(a @ b * 0.1, -1), ((24, 32), (32, 40))),
    "elementwise": (lambda a: torch.nn.functional.gelu(a) * 2 + 1, ((33, 65),)),
    "triangle of a product": (lambda a, b: torch.triu(a @ b), ((40, 40), (40, 40))),
    "rows and their sums": (lambda a: (a - a.mean(1, keepdim=True), a.sum(1)), ((40, 65),)),
}


@pytest.mark.parametrize(
    "name", [name if name == "rms norm" else pytest.param(name, marks=pytest.mark.long) for name in BODIES]
)
def test_the_body_itself_passes_its_own_judgement_and_no_probe_does(name: str) -> None:
    body, shapes = BODIES[name]
    task, _ = task_of(body, *[torch.randn(shape) for shape in shapes])
    assert judge_values(task, lambda *t: tuple(r.clone() for r in task.spec.stock(t, {})), seeds=1) is None


def _of(body: object) -> object:
    return lambda *t: (body(*t),)  # type: ignore[operator]


WRONG = [
    ("rms norm", lambda x: torch.zeros_like(x)),
    ("rms norm", lambda x: x.clone()),
    ("rms norm", lambda x: x / torch.sqrt(torch.mean(x[:, :-1] ** 2, dim=1, keepdim=True) + 1e-5)),
    ("rms norm", lambda x: (x.bfloat16() / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-5)).float()),
    ("rms norm", lambda x: x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-4)),
    ("softmax of a scaled product", lambda a, b: torch.softmax((a.bfloat16() @ b.bfloat16()).float() * 0.1, -1)),
    ("softmax of a scaled product", lambda a, b: torch.full((24, 40), 1 / 40)),
    ("elementwise", lambda a: torch.nn.functional.gelu(a, approximate="tanh") * 2 + 1),
    ("triangle of a product", lambda a, b: torch.triu(torch.triu(a) @ torch.triu(b))),
    ("triangle of a product", lambda a, b: a @ b),
]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [pytest.param(*case, marks=[] if number in (1, 3) else [pytest.mark.long]) for number, case in enumerate(WRONG)],
)
def test_wrong_results_are_refused(name: str, wrong: object) -> None:
    body, shapes = BODIES[name]
    task, _ = task_of(body, *[torch.randn(shape) for shape in shapes])
    assert judge_values(task, _of(wrong), seeds=1) is not None


def test_a_function_that_ignores_its_argument_is_a_vacuous_task() -> None:
    task, _ = task_of(lambda x: x * 0 + 1, torch.randn(8, 40))
    tensors = make_inputs(task.spec, task.key, Family.NORMAL, torch.Generator().manual_seed(0)).tensors
    refused = judge_values(task, lambda x: (torch.ones(8, 40) + x * 0,), seeds=1)
    assert refused is not None and refused.reason is Reason.VACUOUS_TASK
    assert "constant" in probes(task, tensors, task.spec.stock(tensors, {}))


def test_probes_apply_only_where_the_truth_changes() -> None:
    x = torch.randn(8, 64)
    task, spec = task_of(lambda a: a[:, :8].exp(), x)
    changed = changed_arguments(spec, [x])
    applies = {name: truth_changes(spec, task.key.scalars, [x], read) for name, read in changed.items()}
    assert not applies["dropped tail of argument 0, dimension 1"]
    assert applies["dropped tail of argument 0, dimension 0"] and applies["previous output"]


def test_neighbours_move_normal_elements_by_one_unit_at_most() -> None:
    x = torch.randn(40, 30).t()
    x[0, 0], x[0, 1], x[0, 2] = 0.0, float("nan"), float("inf")
    (moved,) = neighbours([x], torch.Generator().manual_seed(1))
    assert moved is not None and moved.stride() == x.stride()
    step = bits(moved).long() - bits(x).long()
    assert set(step.unique().tolist()) == {-1, 0, 1}
    assert step[0, :3].tolist() == [0, 0, 0]


def test_rows_run_along_every_long_dimension_in_turn() -> None:
    assert {row_dims((4, 1, 6, 5), drawn) for drawn in range(12)} == {(0,), (2,), (3,), (2, 3)}
    assert row_dims((1, 1), 3) == (1,)


@pytest.mark.parametrize(
    "entry", ["drops_a_channel", *(pytest.param(entry, marks=pytest.mark.long) for entry in ("copies", "marker"))]
)
def test_a_wrong_kernel_is_refused_by_the_screen(entry: str) -> None:
    found = screen(artifact(entry), rms_norm.key(), local_target(), allow_weak_box=True)
    assert isinstance(found, Refusal) and found.reason is Reason.WRONG_VALUE


@pytest.mark.long
def test_a_kernel_is_judged_stored_served_and_verified_again(tmp_path: Path) -> None:
    key = rms_norm.key()
    target = local_target()
    tmp_path.chmod(0o700)
    store = open_store(choice=FolderChoice(tmp_path, "a test's"))
    workload = Workload(SCHEMA, str(torch.__version__), target.name, target.threads, 0.0, (WorkloadEntry(key, 1, 1.0),))
    proposers = (lambda key, target: [candidate("drops_a_channel"), candidate("copies"), candidate("right")],)
    report = warm(workload, store=store, proposers=proposers, allow_weak_box=True)
    close_screen()
    stored = list(store.records())
    assert len(stored) == 1, report
    assert stored[0].record.key == key and spec_of(stored[0].record.key).name == key.op
    assert stored[0].record.verdict.accuracy_class == "stock"
    assert {"zeros", "constant", "copy of the input", "lower precision"} <= stored[0].record.verdict.vacuity_probes.keys()
    again = verify_record(stored[0], target, allow_weak_box=True)
    assert again.status == "holds", again
    session().store.publish(stored[0].record, stored[0].data)
    try:
        function, module, x = ak.kernel(body), ak.kernel(RMSNorm()), torch.randn(rms_norm.SHAPE)
        ak.refresh()
        model = ak.optimize(torch.nn.Sequential(module, torch.nn.Flatten()))
        before = next((op.hits for op in ak.stats().ops if op.op == "function"), 0)
        with torch.no_grad():
            torch.testing.assert_close(model(x), body(x).flatten(1))
            with ak.enabled():
                torch.testing.assert_close(function(x), body(x))
        assert next(op.hits for op in ak.stats().ops if op.op == "function") == before + 2
        assert any(row.record_id == stored[0].record_id for row in ak.stats().kernels)
        explained = [row for row in ak.explain(model, x.requires_grad_(False)).keys if row.call.startswith("function:")]
        assert explained[0].record_id == stored[0].record_id
        leaf, stock = x.clone().requires_grad_(), x.clone().requires_grad_()
        model(leaf).square().sum().backward()
        body(stock).square().sum().backward()
        assert leaf.grad is not None and stock.grad is not None and torch.equal(leaf.grad, stock.grad)
    finally:
        session().store.clear(key.digest)
        session().loaded.clear()
        session().refresh()


@pytest.mark.long
def test_the_whole_check_accepts_the_right_kernel() -> None:
    found = check(artifact("right"), rms_norm.key(), local_target(), allow_weak_box=True)
    assert not isinstance(found, Refusal), found
    assert function_of(ak.kernel(body)).key(torch.empty(rms_norm.SHAPE)) == rms_norm.key()
