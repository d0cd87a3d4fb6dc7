"""The parts of `benchmarks.judge_campaign`: each yields its result after every unit of work, so that nothing done is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import msgspec
import torch

from tests.judge.samples import Sample, layer_norm_key, samples, softmax_key
from torch_autokern.build.candidate import Artifact
from torch_autokern.judge.accuracy import Task
from torch_autokern.judge.collect import binary_of, collect, draw_trials, make_job, new_seed
from torch_autokern.judge.evidence import Evidence
from torch_autokern.judge.inputs import families_for
from torch_autokern.judge.outcome import Accuracy, Refusal
from torch_autokern.judge.process import RunnerProcess, start_runner
from torch_autokern.judge.sanitizers import sanitized
from torch_autokern.judge.stored import time_against_stock
from torch_autokern.judge.verdict import close_screen, judge, judge_times, open_screen, screen
from torch_autokern.ops import SPECS
from torch_autokern.runtime.target import local_target
from torch_autokern.search.templates import propose
from torch_autokern.store.key import KernelKey, Scalar, Target

TRIALS = 3  # of every family: what one verdict pools
SANITIZED_EVERY = 20
_BURST = 5  # runs in a row: a kernel is built once a slice
MAX_EXAMPLES = 5
# A small key whose verdict is short; one thread, so that a busy core is one reason less for no verdict.
OVERLAP_KEY = (4, 12, 38, 38)


class Repeats(msgspec.Struct, forbid_unknown_fields=True):
    """How often one candidate was judged for correctness alone, and how often it was refused, by reason. `sanitized` of the
    repeats ran its sanitized programs too (deterministic ones, so a few are enough)."""

    runs: int = 0
    sanitized: int = 0
    refused: dict[str, int] = {}
    examples: list[str] = []

    def add(self, refusal: Refusal | None) -> None:
        """Count one run."""
        self.runs += 1
        if refusal is None:
            return
        self.refused[refusal.reason.value] = self.refused.get(refusal.reason.value, 0) + 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"{refusal.message} {' '.join(refusal.cases)}".strip())


class Judged(msgspec.Struct, forbid_unknown_fields=True):
    """One judgement of times: "accepted", "timed" or the reason for neither; the interval where there is one."""

    key: str
    outcome: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


class Pair(msgspec.Struct, forbid_unknown_fields=True):
    """Two judgements of one candidate, one after the other; None for the second until it is there."""

    first: Judged
    second: Judged | None = None

    @property
    def overlaps(self) -> bool | None:
        """Whether they agree; None where one of them gave no interval."""
        one, two = self.first, self.second
        if two is None or one.low is None or one.high is None or two.low is None or two.high is None:
            return None
        return one.low <= two.high and two.low <= one.high


class Latency(msgspec.Struct, forbid_unknown_fields=True):
    """How long a screen, and a verdict, of one candidate took, in seconds; the pooled runner was there already."""

    key: str
    megabytes: float
    screen_seconds: float
    verdict_seconds: float
    outcome: str


def stock_keys() -> dict[str, KernelKey]:
    """A key for each op, dtype and layout that changes what stock does: short and long rows, odd sizes, strides, a dimension
    that is not the last; 1 to 20,000 elements a row."""
    half, brain = torch.float16, torch.bfloat16
    found = {
        "softmax": softmax_key(17, 1000), "softmax, short rows": softmax_key(64, 37),
        "softmax, dim 0": softmax_key(300, 33, dim=0),
        "softmax, a long row": softmax_key(2, 20000), "softmax, bfloat16": softmax_key(16, 500, dtype=brain),
        "softmax, float16": softmax_key(16, 500, dtype=half), "log_softmax": softmax_key(16, 777, op="_log_softmax"),
        "log_softmax, bfloat16": softmax_key(16, 333, op="_log_softmax", dtype=brain),
        "log_softmax, float16": softmax_key(16, 333, op="_log_softmax", dtype=half),
        "layer_norm": layer_norm_key(32, 768), "layer_norm, short rows": layer_norm_key(300, 8),
        "layer_norm, three dims": layer_norm_key(4, 16, 8, 8, normalized=3),
        "layer_norm, bfloat16": layer_norm_key(32, 384, dtype=brain),
        "layer_norm, float16": layer_norm_key(32, 384, dtype=half),
    }  # fmt: skip
    for op in ("_softmax_backward_data", "_log_softmax_backward_data"):
        x = torch.randn(16, 300).softmax(1)
        found[op.strip("_").removesuffix("_data").replace("_backward", " backward")] = SPECS[op].key(
            [x, x], {"dim": 1, "input_dtype": "float32"}
        )
    for dtype in (torch.float32, brain, half):
        name = str(dtype).removeprefix("torch.")
        left, right, row = torch.ones(48, 200, dtype=dtype), torch.ones(200, 40, dtype=dtype), torch.ones(40, dtype=dtype)
        found[f"mm, {name}"] = SPECS["mm"].key([left, right], {})
        found[f"mm, {name}, transposed"] = SPECS["mm"].key([left, torch.ones(40, 200, dtype=dtype).t()], {})
        found[f"addmm, {name}"] = SPECS["addmm"].key([row, left, right], {"beta": 1.0, "alpha": 1.0})
        batch = [torch.ones(6, 24, 64, dtype=dtype), torch.ones(6, 64, 24, dtype=dtype)]
        found[f"bmm, {name}"] = SPECS["bmm"].key(batch, {})
    addend = [torch.ones(6, 24, 24), torch.ones(6, 24, 64), torch.ones(6, 64, 24)]
    found["baddbmm"] = SPECS["baddbmm"].key(addend, {"beta": 1.0, "alpha": 1.0})
    x, row = torch.ones(32, 96), torch.ones(96)
    saved = [x, x, torch.ones(32, 1), torch.ones(32, 1), row, row]
    shape: dict[str, Scalar] = {"normalized_shape": (96,), "output_mask": (1, 1, 1)}
    found["layer_norm backward"] = SPECS["native_layer_norm_backward"].key(saved, shape)
    found["addmm, scaled"] = SPECS["addmm"].key(
        [torch.ones(48, 40), torch.ones(48, 200), torch.ones(200, 40)], {"beta": 0.5, "alpha": -2.0}
    )
    return found


def repeat_honest(state: dict[str, Repeats], runs: int) -> Iterator[None]:
    """Every honest kernel of the corpus `runs` times: all families, three trials each, and the checks of state and properties,
    with new seeds. One boxed runner, as a screen's, which loads each candidate anew."""
    corpus = {sample.name: sample for sample in samples("honest")}
    built: dict[str, Artifact] = {}

    def run(name: str, judged: Callable[[Artifact | None, KernelKey, Target], Refusal | None]) -> Refusal | None:
        sample: Sample = corpus[name]
        target = _target(state[name].runs)
        if name not in built:
            built[name] = sample.build()
        refusal = judged(built[name], sample.key, target)
        if refusal is None and state[name].sanitized < (1 + state[name].runs) // SANITIZED_EVERY:
            state[name].sanitized += 1
            clean = sanitized(sample.candidate, Task(SPECS[sample.key.op], sample.key, Accuracy()), target, new_seed())
            refusal = clean if isinstance(clean, Refusal) else None
        return refusal

    yield from _repeat(state, list(corpus), runs, run)


def repeat_stock(state: dict[str, Repeats], runs: int) -> Iterator[None]:
    """Stock in a candidate's place, on every op, dtype and layout, `runs` times: whatever refuses it is wrong."""
    keys = stock_keys()

    def run(name: str, judged: Callable[[Artifact | None, KernelKey, Target], Refusal | None]) -> Refusal | None:
        return judged(None, keys[name], _target(state[name].runs))

    yield from _repeat(state, list(keys), runs, run)


def _repeat(
    state: dict[str, Repeats], names: Sequence[str], runs: int,
    run: Callable[[str, Callable[[Artifact | None, KernelKey, Target], Refusal | None]], Refusal | None],
) -> Iterator[None]:  # fmt: skip
    """Rounds over all names, a few runs each and those with the fewest runs first, in one runner; another one where a candidate
    ended it."""
    for name in names:
        state.setdefault(name, Repeats())
    held: list[RunnerProcess] = []

    def judged(artifact: Artifact | None, key: KernelKey, target: Target) -> Refusal | None:
        if not held or not held[0].alive:
            held[:] = [_started()]
        task = Task(SPECS[key.op], key, Accuracy())
        trials = draw_trials(families_for(task.spec, key) * TRIALS)
        job = make_job(artifact, task, target, trials, (), state_seed=new_seed())
        found = collect(held[0], job, binary_of(artifact), Evidence(task))
        return found if isinstance(found, Refusal) else found.evidence.check()

    try:
        while state[name := min(names, key=lambda one: state[one].runs)].runs < runs:
            for _ in range(min(_BURST, runs - state[name].runs)):
                state[name].add(run(name, judged))
                yield
    finally:
        for runner in held:
            runner.close()


def _target(run: int) -> Target:
    """Two threads in every fifth run, else one; the checks of state try one more in each. Beside other work a parallel loop
    waits 10 ms for its second thread, and thousands of loops make a judgement."""
    return local_target("cpu", 2 if run % 5 == 0 else 1)


def _started() -> RunnerProcess:
    runner = start_runner("cpu")
    if isinstance(runner, Refusal):
        raise RuntimeError(f"no runner: {runner.message}")
    return runner


def stock_against_stock(state: list[Judged], runs: int) -> Iterator[None]:
    """The timing part of a verdict with stock on both sides. "accepted" would be a lie."""
    keys = {
        "softmax (4, 12, 38, 38), 1 thread": (softmax_key(*OVERLAP_KEY), 1),
        "layer_norm (64, 768), 1 thread": (layer_norm_key(64, 768), 1),
        "softmax (256, 1000), 2 threads": (softmax_key(256, 1000), 2),
        "mm (128, 256, 128), 1 thread": (SPECS["mm"].key([torch.ones(128, 256), torch.ones(256, 128)], {}), 1),
    }
    names = list(keys)
    while len(state) < runs:
        name = names[len(state) % len(names)]
        key, threads = keys[name]
        state.append(_accepted(name, key, local_target("cpu", threads)))
        yield


def pairs_of_judgements(state: list[Pair], runs: int) -> Iterator[None]:
    """One candidate's times judged twice, `runs` times."""
    target = local_target("cpu", 1)
    key = softmax_key(*OVERLAP_KEY)
    artifact = _template(key, target)
    while len(state) < runs or state[-1].second is None:
        judged = _interval("softmax (4, 12, 38, 38), 1 thread", artifact, key, target)
        if state and state[-1].second is None:
            state[-1].second = judged
        else:
            state.append(Pair(judged))
        yield


def latencies(state: list[Latency], runs: int) -> Iterator[None]:
    """A screen, with its runner ready, and a full verdict, of one built-in candidate of medium size each, two threads."""
    target = local_target("cpu", 2)
    keys = {
        "softmax (1024, 1024)": softmax_key(1024, 1024),
        "layer_norm (4096, 768)": layer_norm_key(4096, 768),
        "softmax (32, 12, 38, 38)": softmax_key(32, 12, 38, 38),
    }
    names = list(keys)
    while len(state) < runs * len(names):
        name = names[len(state) % len(names)]
        key = keys[name]
        artifact = _template(key, target)
        open_screen("cpu")
        screen(artifact, key, target)  # warms the runner up, as the candidates before this one did
        began = time.perf_counter()
        screened = screen(artifact, key, target)
        between = time.perf_counter()
        judged = judge(artifact, key, target)
        ended = time.perf_counter()
        words = [x.reason.value if isinstance(x, Refusal) else "accepted" for x in (screened, judged)]
        size = SPECS[key.op].bytes_moved(key) / 1e6
        state.append(Latency(name, round(size, 2), round(between - began, 3), round(ended - between, 3), "; ".join(words)))
        yield
    close_screen()


def _accepted(name: str, key: KernelKey, target: Target) -> Judged:
    found = judge_times(None, key, target)
    if isinstance(found, Refusal):
        return Judged(name, found.reason.value, found.best_ratio)
    eager = found[0]
    return Judged(name, "accepted", eager.ratio, eager.ratio_low, eager.ratio_high)


def _interval(name: str, artifact: Artifact, key: KernelKey, target: Target) -> Judged:
    """The union of three processes, whether it would be accepted or not."""
    found = time_against_stock(Task(SPECS[key.op], key, Accuracy()), artifact, target, 3)
    if isinstance(found, Refusal):
        return Judged(name, found.reason.value, found.best_ratio)
    times = found.timing
    if times is None:
        return Judged(name, "timing_unstable")
    return Judged(name, "timed", times.ratio, times.ratio_low, times.ratio_high)


def _template(key: KernelKey, target: Target) -> Artifact:
    from torch_autokern.build.compile_cpp import compile_cpp

    return compile_cpp(propose(key, target)[0], target)


def stopping(work: Iterator[None], seconds: float) -> Iterator[None]:
    """The units of `work` until `seconds` have passed; at least one."""
    ends = time.monotonic() + seconds
    with closing(work):  # type: ignore[type-var]
        for _ in work:
            yield
            if time.monotonic() > ends:
                return
