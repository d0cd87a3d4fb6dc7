"""Many machines: a Ray cluster's CPUs build, its GPUs (or one worker a node, for CPU keys) screen and judge.

Workers are processes of this package on the cluster's nodes; each boxes candidates as the local engine does, so a candidate
never meets Ray. A worker that dies or hangs is replaced and its candidate is tried once more, by another. Only workers that
are what the run is tuned for are asked for times: same device, architecture, torch and version of this package. The search
alone writes to the store.

Nodes should be the search's alone: on them nobody keeps other programs from disturbing a measurement.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.errors import AutokernError, InvalidInputError, JudgeError, ToolchainError
from torch_autokern.judge.outcome import Accuracy, Reason, Refusal, ScreenResult
from torch_autokern.runtime.target import local_target, stock_build
from torch_autokern.search.engine import Engine, LocalEngine
from torch_autokern.search.manifest import Ceiling
from torch_autokern.search.nodes import Stage
from torch_autokern.search.wire import Answer, Facts, Step, Task, encode, read_answer, read_facts, read_task
from torch_autokern.store.key import DeviceType, KernelKey, Target
from torch_autokern.store.record import Verdict

_LOG = logging.getLogger("torch_autokern.search")
# A step that takes longer hangs: the box ends a compiler after 90 s, and the judge has deadlines of its own for every phase,
# the longest verdict on a full-size key some ten minutes.
LIMITS_S: dict[Step, float] = {"build": 240.0, "screen": 600.0, "judge": 3600.0, "ceiling": 300.0}
_START_S = 180.0  # a process that imports torch on a busy machine
_REACH_S = 10.0
_TRIES = 2


class Worker:
    """What runs on a node."""

    def __init__(self, make: Callable[[], Engine]) -> None:
        # Ray sets it to the CPUs that it reserves; threads are the target's to say, and boxed children inherit it.
        os.environ.pop("OMP_NUM_THREADS", None)
        self._engine = make()

    def facts(self, device_type: DeviceType, threads: int) -> bytes:
        """What this worker can judge for."""
        import ray

        from torch_autokern import __version__

        node = ray.get_runtime_context().get_node_id()
        target, compiler, problem = local_target(), "", ""
        try:
            compiler = self._engine.toolchain(device_type)
            target = local_target(threads=threads) if device_type == "cpu" else local_target("cuda", device_index=0)
        except (AutokernError, RuntimeError, OSError) as error:  # a node without what it takes: the search goes on with others
            problem = f"{type(error).__name__}: {error}"[:500]
        return encode(Facts(node, target, stock_build(), __version__, compiler, problem))

    def ready(self) -> bool:
        """Answers once the process has started."""
        return True

    def work(self, raw: bytes) -> bytes:
        """One step; what goes wrong here in a way that we know is part of the answer, anything else costs the worker."""
        try:
            return encode(Answer.of(self._step(read_task(raw))))
        except (AutokernError, RuntimeError, OSError) as error:
            return encode(Answer.of(error))

    def _step(self, task: Task) -> Artifact | Refusal | ScreenResult | Verdict | Ceiling:
        if task.step == "ceiling":
            return self._engine.ceiling(task.key, task.target)
        if task.candidate is not None:
            return next(found for _, found in self._engine.build([task.candidate], task.target, task.key))
        if task.artifact is None:
            raise JudgeError(f"a step {task.step!r} came without an artifact")
        step = self._engine.screen if task.step == "screen" else self._engine.judge
        return step(task.artifact, task.key, task.target, task.accuracy)


class WorkerLost(Exception):
    """Two workers died or hung over one step."""


class Crew:
    """Workers of one kind, each at one step at a time."""

    def __init__(self, start: Callable[[str], Any], workers: Sequence[tuple[str, Any]]) -> None:
        """`workers` are there already, each with its place; `start` makes another one at a place."""
        self._start = start
        self._all: dict[int, Any] = {number: worker for number, (_, worker) in enumerate(workers)}
        self._places = tuple(place for place, _ in workers)
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in self._all:
            self._idle.put(number)
        self.size = len(workers)
        self.replaced = 0

    def do(self, task: Task) -> Answer:
        """Have a step done, by another worker where the first dies or hangs. Safe from several threads.

        Raises:
            WorkerLost: the second one did not answer either.
            ToolchainError, BoxError, DeviceError, JudgeError: as on the worker.
        """
        import ray

        last = ""
        for _ in range(_TRIES):
            number = self._idle.get()
            worker = self._all[number]
            try:
                ray.get(worker.ready.remote(), timeout=_START_S)
                raw = ray.get(worker.work.remote(encode(task)), timeout=LIMITS_S[task.step])
            except (ray.exceptions.RayError, TimeoutError) as error:
                last = " ".join(str(error).split())[:300] or type(error).__name__
                _LOG.info("a worker is replaced at the step %s: %s", task.step, last)
                ray.kill(worker)
                self._all[number] = self._start(self._places[number])
                self.replaced += 1
                continue
            finally:
                self._idle.put(number)
            answer = read_answer(raw)
            answer.raise_error()
            return answer
        raise WorkerLost(f"{_TRIES} workers died or hung at the step {task.step}; the last: {last}")

    def workers(self) -> list[Any]:
        """All of them, as they are now."""
        return list(self._all.values())


class RayEngine:
    """See `Engine` and `Spreading`. `address` is "auto" or the cluster's head; `make` gives each worker its engine."""

    def __init__(
        self, address: str = "auto", *, allow_weak_box: bool = False, make: Callable[[], Engine] | None = None,
        builders: int | None = None,
    ) -> None:  # fmt: skip
        """Join a running cluster.

        Raises:
            InvalidInputError: Ray is not installed, or no cluster answers.
        """
        # Read when Ray is imported: it would print what befalls workers to stdout, between our results.
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
        try:
            import ray
        except ImportError as error:
            raise InvalidInputError(
                "the engine ray needs the package ray; install it with: pip install 'torch-autokern[ray]'"
            ) from error
        self._is_mine = not ray.is_initialized()
        try:
            if self._is_mine:
                _reach(address)
                ray.init(address=address, namespace="torch_autokern", log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # ConnectionError, ValueError and others, as the reason is
            words = " ".join(str(error).split())[:300]
            raise InvalidInputError(f"no Ray cluster at {address}: {words}; start one with: ray start --head") from error
        self._make = make or _LocalMaker(allow_weak_box)
        self._wanted = builders
        self._builders: Crew | None = None
        self._judges: dict[Target, Crew] = {}
        self._toolchains: dict[DeviceType, str] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: dict[tuple[Stage, str, str], Future[Answer]] = {}
        self._crews: list[Crew] = []

    @property
    def replaced(self) -> int:
        """How many workers were replaced so far."""
        return sum(crew.replaced for crew in self._crews)

    def toolchain(self, device_type: DeviceType) -> str:
        """See `Engine`. The builders must agree on it.

        Raises:
            ToolchainError: there is none, or the nodes have different ones.
        """
        if device_type not in self._toolchains:
            import ray

            crew = self._building()
            asked = [worker.facts.remote(device_type, 0) for worker in crew.workers()]
            told = [read_facts(raw) for raw in ray.get(asked, timeout=_START_S)]
            names = sorted({facts.toolchain or facts.problem for facts in told})
            if len(names) != 1 or not told[0].toolchain:
                raise ToolchainError(
                    f"the cluster's nodes need one compiler, the same everywhere; they have: {'; '.join(names)}"
                )
            self._toolchains[device_type] = names[0]
        return self._toolchains[device_type]

    def build(
        self, candidates: Sequence[Candidate], target: Target, key: KernelKey
    ) -> Iterator[tuple[Candidate, Artifact | Refusal]]:
        """See `Engine`."""
        crew = self._building()
        with ThreadPoolExecutor(crew.size, thread_name_prefix="autokern-ray") as pool:
            tasks = {
                pool.submit(crew.do, Task("build", key, target, Accuracy(), candidate)): candidate for candidate in candidates
            }
            for future in as_completed(tasks):
                yield tasks[future], _built(future)

    def screen(self, artifact: Artifact, key: KernelKey, target: Target, accuracy: Accuracy) -> ScreenResult | Refusal:
        """See `Engine`."""
        answer = self._asked("screen", artifact, key, target, accuracy)
        found = answer.screened or answer.refused
        if found is None:
            raise JudgeError("a worker gave neither a screen nor a refusal")
        return found

    def judge(self, artifact: Artifact, key: KernelKey, target: Target, accuracy: Accuracy) -> Verdict | Refusal:
        """See `Engine`."""
        answer = self._asked("judge", artifact, key, target, accuracy)
        found = answer.verdict or answer.refused
        if found is None:
            raise JudgeError("a worker gave neither a verdict nor a refusal")
        return found

    def ceiling(self, key: KernelKey, target: Target) -> Ceiling:
        """See `Engine`."""
        answer = _kept(lambda: self._judging(target).do(Task("ceiling", key, target, Accuracy())))
        if answer.ceiling is None:
            raise JudgeError("a worker gave no ceiling")
        return answer.ceiling

    def ahead(self, step: Stage, artifacts: Sequence[Artifact], key: KernelKey, target: Target, accuracy: Accuracy) -> None:
        """See `Spreading`. Only where several workers measure: one alone is asked in order."""
        crew = self._judging(target)
        self._forget()
        if crew.size < 2:
            return
        self._pool = self._pool or ThreadPoolExecutor(crew.size, thread_name_prefix="autokern-ray-judge")
        for artifact in artifacts:
            task = Task(step, key, target, accuracy, artifact=artifact)
            self._ahead[step, key.digest, artifact.identity] = self._pool.submit(crew.do, task)

    def close(self) -> None:
        """See `Engine`. The cluster itself goes on."""
        import ray

        self._forget()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        for crew in (self._builders, *self._judges.values()):
            for worker in () if crew is None else crew.workers():
                ray.kill(worker)
        self._builders, self._judges = None, {}
        if self._is_mine:
            ray.shutdown()

    def _asked(self, step: Stage, artifact: Artifact, key: KernelKey, target: Target, accuracy: Accuracy) -> Answer:
        begun = self._ahead.pop((step, key.digest, artifact.identity), None)
        if begun is not None:
            return _kept(begun.result)
        task = Task(step, key, target, accuracy, artifact=artifact)
        return _kept(lambda: self._judging(target).do(task))

    def _forget(self) -> None:
        """Steps that nobody asked for in the end are not begun any more."""
        for future in self._ahead.values():
            future.cancel()
        self._ahead = {}

    def _building(self) -> Crew:
        if self._builders is None:
            import ray

            count = self._wanted or max(1, int(ray.cluster_resources().get("CPU", 1)))
            actor = ray.remote(num_cpus=1)(Worker)

            def start(place: str) -> Any:
                return actor.remote(self._make)

            self._builders = Crew(start, [(str(number), start("")) for number in range(count)])
            self._crews.append(self._builders)
        return self._builders

    def _judging(self, target: Target) -> Crew:
        """The workers that can time for a target.

        Raises:
            InvalidInputError: the cluster has none; says what it has.
        """
        if target not in self._judges:
            start, places = _gpu_places(self._make) if target.device_type == "cuda" else _cpu_places(self._make)
            self._judges[target] = Crew(start, _fitting(start, places, target))
            self._crews.append(self._judges[target])
        return self._judges[target]


def _reach(address: str) -> None:
    """Ray itself tries for minutes to reach a head that is not there.

    Raises:
        OSError: nobody listens there.
    """
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()


class _LocalMaker:
    """Makes a worker's engine; a class, so that it travels by name."""

    def __init__(self, allow_weak_box: bool) -> None:
        self._allow_weak_box = allow_weak_box

    def __call__(self) -> Engine:
        return LocalEngine(allow_weak_box=self._allow_weak_box)


def _gpu_places(make: Callable[[], Engine]) -> tuple[Callable[[str], Any], list[str]]:
    import ray

    actor = ray.remote(num_gpus=1, num_cpus=0)(Worker)
    count = int(ray.cluster_resources().get("GPU", 0))
    return (lambda place: actor.remote(make)), [str(number) for number in range(count)]


def _cpu_places(make: Callable[[], Engine]) -> tuple[Callable[[str], Any], list[str]]:
    """One worker a node: two would disturb each other's times. It reserves no CPU, because builders rest while it works."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor = ray.remote(num_cpus=0)(Worker)

    def start(place: str) -> Any:
        return actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(place, soft=False)).remote(make)

    return start, sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])


def _fitting(start: Callable[[str], Any], places: Sequence[str], target: Target) -> list[tuple[str, Any]]:
    """The workers that are what the run is tuned for, each with its place.

    Raises:
        InvalidInputError: there is none.
    """
    import ray

    from torch_autokern import __version__

    fitting, others = [], []
    workers = {place: start(place) for place in places}
    asked = {place: worker.facts.remote(target.device_type, target.threads) for place, worker in workers.items()}
    for place, worker in workers.items():
        try:
            facts = read_facts(ray.get(asked[place], timeout=_START_S))
        except (ray.exceptions.RayError, TimeoutError) as error:
            words = " ".join(str(error).split())[:200]
        else:
            if (facts.problem, facts.target, facts.stock_build, facts.version) == ("", target, stock_build(), __version__):
                fitting.append((place, worker))
                continue
            words = facts.problem or f"{facts.target}, torch {facts.stock_build}, version {facts.version}"
        others.append(words)
        ray.kill(worker)
    if not fitting:
        raise InvalidInputError(
            f"no worker of the cluster is what this run is tuned for ({target}, torch {stock_build()}, version {__version__}); "
            f"it has: {'; '.join(sorted(set(others))) or 'none of that kind'}"
        )
    return fitting


def _built(future: Future[Answer]) -> Artifact | Refusal:
    try:
        answer = future.result()
    except WorkerLost as lost:
        return Refusal(Reason.BUILD_FAILED, str(lost))
    found = answer.built or answer.refused
    if found is None:
        raise JudgeError("a worker gave neither an artifact nor a refusal")
    return found


def _kept(step: Callable[[], Answer]) -> Answer:
    """A step whose loss is the judge's failure: nothing is known of the candidate."""
    try:
        return step()
    except WorkerLost as lost:
        raise JudgeError(str(lost)) from lost
