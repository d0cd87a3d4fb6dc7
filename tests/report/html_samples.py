"""Runs written node by node, and a reader of pages, for tests of the report."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
sys.path.insert(0, str(Path(__file__).parents[1] / "search"))
from search_samples import PLAN, ask_for, start

from torch_autokern.judge.outcome import JUDGE_VERSION, Reason, Refusal, ScreenResult
from torch_autokern.search.manifest import Ceiling
from torch_autokern.search.nodes import (
    Idea,
    Intervention,
    Lesson,
    Measured,
    Offered,
    Outcome,
    Proof,
    Reply,
    RoundEnd,
    Stop,
    Stuck,
)
from torch_autokern.search.run import Run
from torch_autokern.store.key import canonical_json
from torch_autokern.store.record import FamilyError, Timing, Verdict

EXAMPLE = Path(__file__).parents[2] / "examples" / "four_classes" / "run"


def proof(ratio: float, words: str = "") -> Proof:
    """A verdict of so many times stock's speed; `words` stand wherever a proof has free text."""
    timing = Timing("eager", "resident", 100.0, 100.0 / ratio, ratio, ratio - 0.1, ratio + 0.1, 40, 3)
    family = FamilyError("normal" + words, (1, 2), 1e-8, 2e-8, 4e-8, 1e-7, 3e-7, 6e-7)
    verdict = Verdict(
        "stock",
        0.0,
        0.0,
        "run_to_run",
        (family,),
        {"zeros" + words: words},
        {"layout" + words: words},
        (timing,),
        JUDGE_VERSION,
    )
    digest = f"{ratio:.2f}".encode().hex().ljust(64, "0")
    return Proof(
        verdict, digest, "2026-01-01T00:00:00Z", "2.13" + words, "id", {"compiler" + words: words}, "box" + words, digest
    )


def told_run(folder: Path, words: str = "plain words", source: str = "int f;") -> Run:
    """Two rounds: a template that is proved; a model's kernel that is wrong, mended and refused as slow; a person's idea that
    wins; a ban that drops one. `words` stand in every free text."""
    run = start(folder, ask_for("http://host/v1"))
    body, plan = run.put(source), run.put(canonical_json(PLAN).decode())

    def offer(name: str, idea: str, letter: str, **more: object) -> None:
        run.add(Offered(name, run.now(), idea, letter * 64, "cpp", body, plan, words, words, **more))  # type: ignore[arg-type]

    def screened(name: str, ratio: float) -> None:
        result = ScreenResult(ratio, ratio - 0.2, ratio + 0.2, 100.0, 100.0 / ratio, (), 0.1)
        run.add(Outcome(name, run.now(), "screen", screened=result))

    run.add(Measured("k0.ceiling", 0.5, Ceiling(20.0, 0.0, 100.0, 20.0)))
    run.add(Idea("k0.r1.templates.i0", 1.0, words, "templates", words))
    offer("k0.r1.templates.i0.c0", "k0.r1.templates.i0", "a", template=words)
    run.add(Idea("k0.r1.llm.i0", 2.0, words, "llm", words))
    run.add(Reply("k0.r1.llm.i0.c0", 5.0, words, body, body, 100, 20, 0.5, 1))
    offer("k0.r1.llm.i0.c0", "k0.r1.llm.i0", "b")
    screened("k0.r1.templates.i0.c0", 1.6)
    run.add(Outcome("k0.r1.llm.i0.c0", 6.0, "screen", refused=Refusal(Reason.WRONG_VALUE, words, words, 7, cases=(words,))))
    run.add(Reply("k0.r1.llm.i0.c0.f0", 8.0, words, body, body, 200, 30, 0.5, 1, error=words, charged=True))
    run.add(Idea("k0.r1.llm.i0.c0.f0.idea", 8.0, words, "llm", words, ("b" * 64,)))
    offer("k0.r1.llm.i0.c0.f0", "k0.r1.llm.i0.c0.f0.idea", "c", repairs="k0.r1.llm.i0.c0", parents=("b" * 64,))
    run.add(Outcome("k0.r1.llm.i0.c0.f0", 9.0, "screen", refused=Refusal(Reason.NOT_FASTER, words, best_ratio=0.8)))
    run.add(Outcome("k0.r1.templates.i0.c0", 20.0, "judge", proved=proof(1.5, words)))
    run.add(Lesson("k0.r1.llm.lesson.0", 21.0, words, words))
    run.add(RoundEnd("k0.r1", 21.0, 0, 1, 1.5, "k0.r1.templates.i0.c0", 0.3))
    run.add(Stuck("k0.r1.stuck", 21.0, 0, 1, "no_gain", words, f"Which kernels does it need? {words}"))
    run.add(Intervention("k0.r2.steer.0", 21.0, "idea", f"{words}: hold rows", words, "2026-01-01T00:00:00Z", words))
    run.add(Intervention("k0.r2.steer.1", 21.0, "ban", f"{words}: atomics", "", "2026-01-01T00:00:00Z", words))
    run.add(Idea("k0.r2.llm.i0", 22.0, f"{words}: hold rows", "llm", words, ("a" * 64,)))
    offer("k0.r2.llm.i0.c0", "k0.r2.llm.i0", "d", parents=("a" * 64,))
    offer("k0.r2.llm.i0.c1", "k0.r2.llm.i0", "e", dropped="banned", dropped_for=f"{words}: atomics")
    screened("k0.r2.llm.i0.c0", 3.1)
    run.add(Outcome("k0.r2.llm.i0.c0", 40.0, "judge", proved=proof(3.0, words)))
    run.add(RoundEnd("k0.r2", 41.0, 0, 2, 3.0, "k0.r2.llm.i0.c0", 0.6))
    run.add(Stop("stop", 41.0, "rounds", words))
    return run


@dataclass
class Read:
    """What a page is made of: tags with the names of their attributes, ids, links, text."""

    tags: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    text: str = ""

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found = Read()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.tags.append((tag, tuple(sorted(name for name, _ in attrs))))
        for name, value in attrs:
            if name == "id":
                self.found.ids.append(value or "")
            elif name in ("href", "src", "data", "action"):
                self.found.links.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_data(self, data: str) -> None:
        self.found.text += data


def read_page(text: str) -> Read:
    """A page as a parser sees it."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    return reader.found
