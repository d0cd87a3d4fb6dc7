"""What a reviewer is pointed at: each sign is seen, with its line, and plain kernels raise nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from search_samples import KEY, PretendEngine
from warm_samples import TARGET, candidate

from torch_autokern.build.candidate import Artifact
from torch_autokern.judge.outcome import Accuracy
from torch_autokern.runtime.target import stock_build
from torch_autokern.search.key_search import proof_of, record_of
from torch_autokern.search.risks import risks
from torch_autokern.store.record import KernelRecord

HONEST = Path(__file__).parents[1] / "honest"


def record(ratio: float = 1.5) -> KernelRecord:
    one = msgspec.structs.replace(candidate("plain"), source=f"// ratio={ratio}")
    artifact = Artifact(one, b"x", one.candidate_id, {}, "box", 0.1)
    verdict = PretendEngine().judge(artifact, KEY, TARGET, Accuracy())
    return record_of(KEY, TARGET, one, proof_of(KEY, TARGET, artifact, verdict, "t"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("atomicAdd(&total, x);", "atomics"), ("tl.atomic_add(p, x)", "atomics"), ("std::atomic<int> n;", "atomics"),
        ("#pragma GCC optimize(\"fast-math\")", "rules for arithmetic"), ("asm volatile(\"\");", "inline assembly"),
        ("__threadfence();", "synchronises by hand"), ("goto again;", "jumps"), ("union { float f; int i; };", "another type"),
        ("__builtin_assume(n % 8 == 0);", "promises"), ("__half h;", "below fp32"), ("float y = __expf(x);", "approximate"),
        ("_MM_SET_ROUNDING_MODE(0);", "rounding"), ("long t = clock64();", "clock"),
        ("char t[] = \"" + "a1b2c3d4" * 6 + "\";", "nobody can read"), ("int x = 1;" + " " * 240 + "x++;", "240 characters"),
        ("int admin\u202e = 1;", "invisible character (U+202E)"),
    ],
)  # fmt: skip
def test_sign_is_seen_with_its_line(line: str, words: str) -> None:
    found = list(risks(record(), f"int a;\n{line}\nint b;\n"))
    assert any(one.startswith("line 2: ") and words in one for one in found), found


def test_plain_kernel_raises_nothing() -> None:
    assert list(risks(record(), (HONEST / "softmax_rows.cpp").read_text())) == []


def test_figures_of_the_record_are_looked_at() -> None:
    verdict = msgspec.structs.replace(
        record(3.0).verdict, determinism="not_guaranteed", accuracy_class="tolerance", atol=1e-3, judge_version=0
    )
    odd = msgspec.structs.replace(record(3.0), verdict=verdict)
    text = "\n".join(risks(odd, ""))
    for words in ("run to run", "atol 0.001", "version 0 of the judge", "3.0x: above 2x"):
        assert words in text
    assert odd.stock_build == stock_build()
