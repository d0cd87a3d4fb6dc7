"""Sanitized programs around candidates: what they see, what a refusal says, and that absence is said too."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.judge.samples import ROOT, Sample, layer_norm_key, softmax_key, target
from tests.judge.stand_ins import task_of
from torch_autokern.errors import BuildError
from torch_autokern.judge import sanitizers
from torch_autokern.judge.outcome import Reason, Refusal
from torch_autokern.judge.sanitizers import sanitized
from torch_autokern.search.templates import propose

# One of each kind of template: short rows, long odd rows in bf16, columns, two LayerNorms.
KEYS = [
    softmax_key(32, 12, 38, 38),
    softmax_key(8, 4099, dtype=torch.bfloat16),
    softmax_key(6, 50, 40, dim=1),
    layer_norm_key(64, 384),
    layer_norm_key(4, 8, 16, 16, normalized=3),
]


def _seen(name: str) -> dict[str, str] | Refusal:
    sample = Sample(next(f for kind in ("cheats", "honest") if (f := ROOT / kind / f"{name}.cpp").exists()))
    return sanitized(sample.candidate, task_of(sample.key), target(), 5)


def _present(name: str) -> None:
    """A sanitizer that this machine lacks is recorded as absent; nothing can be tested with it."""
    found = _seen("softmax_rows")
    assert isinstance(found, dict), found
    if found[f"sanitizer {name}"].startswith("absent"):
        pytest.skip(found[f"sanitizer {name}"])


@pytest.mark.parametrize(
    ("cheat", "sanitizer", "words", "line"),
    [
        ("writes_past_workspace", "address", "heap-buffer-overflow", "[row + 1] ="),
        ("overflows_an_integer", "undefined", "signed integer overflow", "hash +="),
        ("hides_from_sanitizers", "address", "heap-buffer-overflow", "= *after;"),
        ("races", "thread", "data race", "volatile int64_t*"),
    ],
)
def test_each_sanitizer_names_the_mistake_and_its_line(cheat: str, sanitizer: str, words: str, line: str) -> None:
    _present(sanitizer)
    found = _seen(cheat)
    assert isinstance(found, Refusal) and found.reason is Reason.SANITIZER
    source = (ROOT / "cheats" / f"{cheat}.cpp").read_text().splitlines()
    number = next(i for i, text in enumerate(source, 1) if line in text)
    assert words in found.message and f"candidate.cpp:{number}" in found.message, found.message
    assert "/" not in found.message.replace("0x", ""), "a path of this machine"
    assert found.cases == ("sanitizers:5:0",)


def test_a_kernel_with_workspaces_and_several_steps_passes() -> None:
    found = _seen("layer_norm_split")
    assert isinstance(found, dict)
    assert set(found) == {"sanitizer address", "sanitizer undefined", "sanitizer thread"}
    assert all(text.startswith(("passed", "absent")) for text in found.values())


@pytest.mark.long
@pytest.mark.parametrize("key", KEYS, ids=lambda key: f"{key.op}{key.tensors[0].sizes}")
def test_built_in_templates_pass(key) -> None:  # type: ignore[no-untyped-def]
    for candidate in propose(key, target())[::4]:
        found = sanitized(candidate, task_of(key), target(), 7)
        assert isinstance(found, dict), (candidate.template, candidate.parameters, found)


def test_a_program_that_cannot_be_built_is_absent_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(*args: object, **keyword: object) -> bytes:
        raise BuildError("does not compile: cannot find -lasan\nmore words")

    monkeypatch.setattr(sanitizers, "compile_sanitized_program", no_library)
    assert _seen("softmax_rows") == {
        f"sanitizer {name}": "absent: does not compile: cannot find -lasan" for name in ("address", "undefined", "thread")
    }


def test_a_sanitizer_whose_canary_lives_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built without its sanitizer, the program passes everything: the canary tells."""
    build = sanitizers.compile_sanitized_program

    def plain(candidate, target, text, kinds, **keyword):  # type: ignore[no-untyped-def]
        return build(candidate, target, text, (), **keyword)

    monkeypatch.setattr(sanitizers, "compile_sanitized_program", plain)
    found = _seen("writes_past_workspace")
    assert isinstance(found, dict)
    assert all(text.startswith("absent: its canary was not seen") for text in found.values()), found


def test_large_keys_and_kernels_without_source_are_not_run() -> None:
    sample = Sample(ROOT / "honest" / "softmax_rows.cpp")
    bare = msgspec.structs.replace(sample.candidate, source="")
    assert "no source" in sanitized(bare, task_of(sample.key), target(), 5)["sanitizers"]  # type: ignore[index]
    layout = sample.key.tensors[0]
    assert layout is not None
    tensors = (msgspec.structs.replace(layout, sizes=(1 << 20, 1000)),)
    large = task_of(msgspec.structs.replace(sample.key, tensors=tensors))
    assert "not run: " in sanitized(sample.candidate, large, target(), 5)["sanitizers"]  # type: ignore[index]
