"""A plan's `library` step: stock's own product into a result of ours, bit for bit, and refusals of what does not fit."""

from __future__ import annotations

import msgspec
import pytest
import torch
from tiny_kernels import artifact

from torch_autokern.errors import PlanError
from torch_autokern.ops import SPECS
from torch_autokern.runtime.kernel import LoadedKernel, load_cpu_kernel
from torch_autokern.runtime.plan import LaunchPlan, LibraryStep, decode_plan, encode_plan, validate
from torch_autokern.store.key import KernelKey

OPERANDS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (0, 1, 2), "baddbmm": (0, 1, 2)}


def inputs(op: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(3)
    front = (5,) if op in ("bmm", "baddbmm") else ()
    a, b = torch.randn(*front, 9, 21), torch.randn(*front, 17, 21).transpose(-1, -2)
    found = [a, b] if op in ("mm", "bmm") else [torch.randn(17), a, b]
    return [t.to(dtype) for t in found]


def key_of(op: str, tensors: list[torch.Tensor]) -> KernelKey:
    scalars = {"beta": 0.5, "alpha": -2.0} if op in ("addmm", "baddbmm") else {}
    return SPECS[op].key(tensors, scalars)


def kernel(key: KernelKey, step: LibraryStep) -> LoadedKernel:
    plan = decode_plan(encode_plan(LaunchPlan(1, (step,))))
    return load_cpu_kernel(artifact().binary, artifact().identity, plan, key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", OPERANDS)
def test_it_gives_the_bits_of_stock(op: str, dtype: torch.dtype) -> None:
    tensors = inputs(op, dtype)
    key = key_of(op, tensors)
    (mine,) = kernel(key, LibraryStep(op, OPERANDS[op], alpha=-2.0, beta=0.5)).run(tensors, pooled=True)  # type: ignore[arg-type]
    expected = getattr(torch, op)(*tensors, **({"beta": 0.5, "alpha": -2.0} if len(tensors) == 3 else {}))
    assert mine is not None and mine.stride() == expected.stride() and torch.equal(mine, expected)


def test_neither_autograd_nor_an_override_sees_it() -> None:
    """Inputs that ask for gradients are read as plain memory."""
    tensors = [t.requires_grad_() for t in inputs("mm")]
    (mine,) = kernel(key_of("mm", tensors), LibraryStep("mm", (0, 1))).run(tensors)
    assert mine is not None and not mine.requires_grad and torch.equal(mine, torch.mm(*tensors))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"operands": (0,)}, "1 operands; expected 2"),
        ({"operands": (0, 24)}, "out of range"),
        ({"operands": (0, -1)}, "out of range"),
        ({"output": 99}, "out of range"),
        ({"alpha": float("inf")}, "must be finite"),
    ],
)
def test_a_step_that_cannot_be(changes: dict[str, object], words: str) -> None:
    validate(LaunchPlan(1, (LibraryStep("mm", (0, 1)),)))
    with pytest.raises(PlanError, match=words):
        validate(LaunchPlan(1, (msgspec.structs.replace(LibraryStep("mm", (0, 1)), **changes),)))


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (LibraryStep("mm", (0, 2)), "has 2 for this key"),
        (LibraryStep("mm", (1, 0)), "is not a float32"),
        (LibraryStep("bmm", (0, 1)), "is not a float32"),
        (LibraryStep("mm", (0, 1), output=1), "has 1 for this key"),
    ],
)
def test_a_step_that_does_not_fit_the_key(step: LibraryStep, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        kernel(key_of("mm", inputs("mm")), step)


def test_another_function_is_no_plan() -> None:
    raw = encode_plan(LaunchPlan(1, (LibraryStep("mm", (0, 1)),))).replace(b'"mm"', b'"svd"')
    with pytest.raises(PlanError, match="not a launch plan"):
        decode_plan(raw)
