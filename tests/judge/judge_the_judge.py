"""Judge the judge: run both corpora through the full check and count, by reason, what was caught and what falsely refused.

    python -m tests.judge.judge_the_judge [--only cheats|honest] [--third 0|1|2] [--json FILE]

A cheat stops at its first failed check, so one cheat counts once. Exit code 1 where a cheat got through, was refused for a
reason that its file does not list, or an honest kernel was refused. Without a GPU, GPU candidates count only where the build
is to refuse them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from tests.judge.samples import GPU, Sample, checked, samples, third_of


def main(arguments: list[str]) -> int:
    """Run, print, and say whether the judge stood."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--third", type=int, choices=range(3), help="only this third of each corpus (default: all)")
    parser.add_argument("--only", choices=("cheats", "honest"), help="only this corpus")
    parser.add_argument("--json", type=Path, help="also write the counts here")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    cheats, honest = (
        [] if options.only not in (None, kind) else _part(_judged_here(kind), options.third) for kind in ("cheats", "honest")
    )
    caught, wrong = _caught(cheats)
    refused = _refused(honest)
    print(f"\ncaught {sum(caught.values())} of {len(cheats)} cheats")
    for reason, count in caught.most_common():
        print(f"  {reason:20} {count:3}")
    print(f"falsely refused {sum(refused.values())} of {len(honest)} honest kernels")
    for reason, count in refused.most_common():
        print(f"  {reason:20} {count:3}")
    seconds = time.perf_counter() - started
    print(f"{seconds:.0f} s")
    if options.json:
        document = {"cheats": len(cheats), "caught": caught, "not_caught": wrong, "honest": len(honest), "refused": refused}
        options.json.write_text(json.dumps({**document, "seconds": round(seconds)}, indent=2) + "\n")
    return 1 if wrong or refused else 0


def _judged_here(kind: str) -> list[Sample]:
    """C++ always; of the GPU candidates, without a GPU, those that the build refuses."""
    on_gpu = [s for s in samples(kind, GPU) if torch.cuda.is_available() or s.is_refused_before_it_runs]
    return [*samples(kind), *on_gpu]


def _part(corpus: list[Sample], third: int | None) -> list[Sample]:
    return corpus if third is None else third_of(corpus, third)


def _caught(cheats: list[Sample]) -> tuple[Counter[str], list[str]]:
    caught: Counter[str] = Counter()
    wrong = []
    for sample in cheats:
        refusal = checked(sample)
        if refusal is not None and refusal.reason.value in sample.reasons:
            caught[refusal.reason.value] += 1
            continue
        seen = "accepted" if refusal is None else f"{refusal.reason.value}: {refusal.message}"
        wrong.append(sample.name)
        print(f"NOT CAUGHT {sample.name}: expected {' or '.join(sample.reasons)}, {seen}", flush=True)
    return caught, wrong


def _refused(honest: list[Sample]) -> Counter[str]:
    refused: Counter[str] = Counter()
    for sample in honest:
        refusal = checked(sample)
        if refusal is not None:
            refused[refusal.reason.value] += 1
            print(f"FALSELY REFUSED {sample.name}: {refusal.reason.value}: {refusal.message}", flush=True)
    return refused


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
