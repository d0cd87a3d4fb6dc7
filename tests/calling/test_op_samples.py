"""PyTorch's own samples of every intercepted op and dtype: stock bits where nothing is served, class `stock` where all is.

`op_samples.py` does the work in a process of its own, because importing PyTorch's samples locks torch's flags.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torch_autokern.ops import SPECS

# Misses of the router that samples may bring about: complex numbers, lazily conjugated views, empty tensors, no record.
EXPECTED_MISSES = {"no_record", "dtype", "subclass", "empty"}


@functools.cache
def reports(limit: int) -> dict[str, Any]:
    """Both reports of one run: importing the samples takes longer than running a few of them."""
    command = [sys.executable, str(Path(__file__).with_name("op_samples.py")), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# Two samples an op and dtype here, all of them and the composites (linear, einsum, attention, ...) in the long tier.
LIMITS = [2, pytest.param(0, marks=pytest.mark.long, id="all")]


@pytest.mark.parametrize("limit", LIMITS)
def test_samples_with_the_router_on_and_an_empty_store_are_stocks_bits(limit: int) -> None:
    found = reports(limit)["stock"]
    assert not found["wrong"], "\n".join(found["wrong"][:20])
    assert set(found["outcomes"]) == set(SPECS)
    for op, reasons in found["outcomes"].items():
        assert reasons["no_record"] > 5 and set(reasons) <= EXPECTED_MISSES, op


@pytest.mark.parametrize("limit", LIMITS)
def test_samples_served_by_general_kernels_are_of_class_stock(limit: int) -> None:
    found = reports(limit)["general"]
    assert not found["wrong"], "\n".join(found["wrong"][:20])
    assert set(found["outcomes"]) == set(SPECS) and found["keys"] > 100
    for op, reasons in found["outcomes"].items():
        assert reasons["hit"] > 5 and set(reasons) <= {"hit"} | EXPECTED_MISSES - {"no_record"}, op
