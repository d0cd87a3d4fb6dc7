"""What the driver would refuse at every launch is refused when the plan is made."""

from __future__ import annotations

import msgspec
import pytest

from torch_autokern.errors import PlanError
from torch_autokern.runtime.plan import (
    KernelStep,
    LaunchPlan,
    MemsetStep,
    OutputArg,
    TensorMapArg,
    Workspace,
    WorkspaceArg,
    validate,
)

STEP = KernelStep("f", (132, 2, 1), (128, 1, 1), (OutputArg(0),), cluster=(4, 1, 1))
TILE = TensorMapArg(OutputArg(0), 7, (64, 32), (256,), (8, 8), (1, 1))


def plan(step: KernelStep | MemsetStep) -> LaunchPlan:
    return LaunchPlan(1, (step,), (Workspace("room", 256),))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grid": (130, 2, 1)}, "must divide the grid"),
        ({"grid": (2, 2, 1)}, "must divide the grid"),
        ({"cluster": (1, 4, 1)}, "must divide the grid"),
        ({"grid": (132, 2, 12), "cluster": (4, 2, 3)}, "at most 16"),
        ({"grid": (132, 0, 1)}, "outside"),
        ({"grid": (132, 65536, 1)}, "outside"),
        ({"block": (512, 4, 1)}, "threads a block"),
        ({"block": (1, 1, 65)}, "outside"),
        ({"shared_bytes": 232449}, "shared memory"),
        ({"shared_bytes": -16}, "shared memory"),
    ],
)
def test_launches_that_the_driver_refuses(changes: dict[str, object], words: str) -> None:
    validate(plan(STEP))
    with pytest.raises(PlanError, match=words):
        validate(plan(msgspec.structs.replace(STEP, **changes)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strides_bytes": (264,)}, "multiples of 16"),
        ({"strides_bytes": (1 << 40,)}, "below"),
        ({"sizes": ((1 << 32) + 1, 32)}, "at most"),
        ({"element_strides": (1, 9)}, "at most 8"),
        ({"base": OutputArg(0, 8)}, "starts on 16"),
        ({"box": (8, 257)}, "at most 256"),
    ],
)
def test_tensor_maps_that_the_driver_refuses(changes: dict[str, object], words: str) -> None:
    def with_tile(tile: TensorMapArg) -> LaunchPlan:
        return plan(msgspec.structs.replace(STEP, args=(OutputArg(0), tile)))

    validate(with_tile(TILE))
    with pytest.raises(PlanError, match=words):
        validate(with_tile(msgspec.structs.replace(TILE, **changes)))


def test_a_memset_stays_in_its_workspace() -> None:
    validate(plan(MemsetStep(WorkspaceArg("room", 64), 192)))
    with pytest.raises(PlanError, match="193 bytes from 64"):
        validate(plan(MemsetStep(WorkspaceArg("room", 64), 193)))
