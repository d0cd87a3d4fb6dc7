"""A pretend machine and scripts for tests of the search: outcomes follow from what a kernel's source says."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from warm_samples import TARGET, softmax_key, workload

from torch_autokern.build.candidate import Artifact, Candidate
from torch_autokern.judge.outcome import JUDGE_VERSION, Accuracy, Place, Reason, Refusal, ScreenResult
from torch_autokern.search.loop import make_manifest
from torch_autokern.search.manifest import Ask, Ceiling, ModelShare
from torch_autokern.search.nodes import Node
from torch_autokern.search.outcome import SearchReport
from torch_autokern.search.run import Run, create, is_run, open_run
from torch_autokern.search.scripted_server import Rule
from torch_autokern.search.session import go, redactor
from torch_autokern.store.folders import FolderChoice
from torch_autokern.store.key import DeviceType, KernelKey, Target
from torch_autokern.store.record import FamilyError, Timing, Verdict
from torch_autokern.store.store import KernelStore, open_store

KEY = softmax_key(8)
KEY_SECRET = "sk-test-0123456789abcdef"
PLAN = {"version": 1, "steps": [{"kind": "cpu", "entry": "run", "range": 8, "grain": 1, "args": [
    {"kind": "input", "index": 0}, {"kind": "output", "index": 0}]}]}  # fmt: skip
_RATIO = re.compile(r"ratio=([\d.]+)")
_REFUSED = re.compile(r"refused=(\w+)")


@dataclass
class PretendEngine:
    """Judges by the source's own words: ``ratio=1.5`` is its speed, ``refused=wrong_value`` its fate, ``late=1.2`` the
    verdict's ratio where it differs. `calls` is what was asked."""

    seconds: float = 0.0
    calls: list[tuple[str, str]] = field(default_factory=list)
    closed: int = 0

    def toolchain(self, device_type: DeviceType) -> str:
        return "pretend 1"

    def build(
        self, candidates: Sequence[Candidate], target: Target, key: KernelKey
    ) -> Iterator[tuple[Candidate, Artifact | Refusal]]:
        for one in candidates:
            self._note("build", one)
            if "refused=build_failed" in one.source:
                yield one, Refusal(Reason.BUILD_FAILED, "candidate.cpp:3:1: error: expected ';' before '}' token")
            else:
                yield one, Artifact(one, one.source.encode(), one.candidate_id, {"cc": "pretend 1"}, "box", 0.1)

    def screen(self, artifact: Artifact, key: KernelKey, target: Target, accuracy: Accuracy) -> ScreenResult | Refusal:
        self._note("screen", artifact.candidate)
        refused = _REFUSED.search(artifact.candidate.source)
        if refused is not None:
            place = Place((3, 17), "0.5", "0.25")
            return Refusal(Reason(refused[1]), "too far from the truth", "spikes", 77, first_wrong=(3, 17), first=(place,))
        ratio = self._ratio(artifact.candidate)
        return ScreenResult(ratio, ratio - 0.05, ratio + 0.05, 100.0, 100.0 / ratio, (), 0.1)

    def judge(self, artifact: Artifact, key: KernelKey, target: Target, accuracy: Accuracy) -> Verdict | Refusal:
        self._note("judge", artifact.candidate)
        ratio = self._ratio(artifact.candidate)
        timing = Timing("eager", "resident", 100.0, 100.0 / ratio, ratio, ratio - 0.02, ratio + 0.02, 40, 3)
        family = FamilyError("normal", (1,), 0.1, 0.1, 0.2, 0.1, 0.1, 0.2)
        return Verdict("stock", 0.0, 0.0, "run_to_run", (family,), {}, {}, (timing,), JUDGE_VERSION)

    def ceiling(self, key: KernelKey, target: Target) -> Ceiling:
        return Ceiling(20.0, 0.0, 100.0, 20.0)

    def close(self) -> None:
        self.closed += 1

    def _note(self, what: str, one: Candidate) -> None:
        if self.seconds:
            time.sleep(self.seconds)
        self.calls.append((what, one.source))

    def _ratio(self, one: Candidate) -> float:
        found = _RATIO.search(one.source)
        return float(found[1]) if found else 0.5

    def asked(self, what: str) -> list[str]:
        return [source for kind, source in self.calls if kind == what]


def kernel(words: str, number: int = 0) -> dict[str, Any]:
    """A kernel reply whose source says how it ends."""
    source = f'const char* words_{number} = "{words}";\nextern "C" void run(long long b, long long e, void* const* p) {{}}\n'
    return {"language": "cpp", "source": source, "plan": PLAN, "idea": f"kernel: {words}"}


def ideas(*texts: str) -> dict[str, Any]:
    return {"ideas": [{"idea": text} for text in texts]}


def story() -> tuple[Rule, ...]:
    """Three rounds: better every time; one kernel that does not build and is mended, one that is wrong and stays so."""
    rules = [Rule("## This round", reply={"lessons": ["wide vectors help"]})]
    rules.append(Rule("## Why it was refused\nbuild_failed", reply=kernel("ratio=1.4 mended", 90)))
    rules.append(Rule("## Why it was refused", reply=kernel("refused=wrong_value again", 91)))
    for number, (good, other) in enumerate(
        (("1.2", "refused=build_failed"), ("1.6", "refused=wrong_value"), ("2.1", "ratio=0.7"))
    ):
        rules.append(Rule(f"## The idea\nidea {number}a", reply=kernel(f"ratio={good}", number)))
        rules.append(Rule(f"## The idea\nidea {number}b", reply=kernel(other, 10 + number)))
        rules.append(Rule("Give 2 new ideas", times=1, reply=ideas(f"idea {number}a", f"idea {number}b")))
    return tuple(rules)


def forgetful_story() -> tuple[Rule, ...]:
    """The same three rounds by a model that remembers nothing: what it says follows from the prompt alone."""
    rules = [rule for rule in story() if "Give 2" not in rule.match]
    for number, sign in ((2, "idea 1a(.|\n)*Give 2"), (1, "idea 0a(.|\n)*Give 2"), (0, "Give 2")):
        rules.append(Rule(sign, reply=ideas(f"idea {number}a", f"idea {number}b")))
    return tuple(rules)


def store_at(root: Path) -> KernelStore:
    root.mkdir(mode=0o700, exist_ok=True)
    return open_store(choice=FolderChoice(root, "test"))


def ask_for(url: str = "", **options: Any) -> Ask:
    """Three rounds of two ideas with one kernel each, by one model."""
    defaults: dict[str, Any] = {
        "rounds": 3, "ideas": 2, "kernels": 1, "repairs": 1, "proposers": ("llm",), "models": (ModelShare("scripted"),),
        "base_url": url, "request_seconds": 10.0, "patience_seconds": 5.0,
    }  # fmt: skip
    return Ask(**{**defaults, **options})


def start(folder: Path, ask: Ask, *keys: KernelKey) -> Run:
    """A new run, or the one that is there."""
    if is_run(folder):
        return open_run(folder, redactor=redactor(KEY_SECRET))
    from torch_autokern.judge.outcome import Accuracy

    manifest = make_manifest(ask, workload(*(keys or (KEY,))), Accuracy(), {"cpu": TARGET})
    return create(folder, manifest, redactor(KEY_SECRET))


def search(
    folder: Path, ask: Ask, *keys: KernelKey, engine: PretendEngine | None = None, store: Path | None = None
) -> SearchReport:
    """Start or go on with a run under the pretend engine."""
    run = start(folder, ask, *keys)
    return go(run, store_at(store or folder.parent / "store"), key=KEY_SECRET, engine=engine or PretendEngine())


def timeless(nodes: Sequence[Node]) -> dict[str, str]:
    """Nodes by kind and id, without what depends on the clock or on how often a request was tried."""
    found = {}
    for node in nodes:
        text = re.sub(r"at=[\d.]+|created='[^']*'|record_id='[^']*'|attempts=\d+|time='[^']*'", "", repr(node))
        stage = getattr(node, "stage", "")
        found[f"{type(node).__name__} {node.id} {stage}"] = text
    return found
