"""Keys and records to store: small, valid, and different for every seed."""

from __future__ import annotations

import hashlib

from torch_autokern.store.key import KernelKey, Target, TensorKey
from torch_autokern.store.record import FamilyError, KernelRecord, Provenance, Timing, Verdict

ROWS = TensorKey("float32", (64, 38), (38, 1), 4)


def make_key(seed: int = 0) -> KernelKey:
    """A softmax key; `seed` changes the number of rows."""
    layout = TensorKey("float32", (64 + seed, 38), (38, 1), 4)
    return KernelKey("_softmax", "cpu", (layout,), {"dim": 1, "half_to_float": False}, (layout,))


def make_record(seed: int = 0, key: KernelKey | None = None, ratio_low: float = 1.5) -> KernelRecord:
    """A record for `key`; `seed` changes its idea, and with it its id."""
    family = FamilyError("normal", (1, 2), 0.1, 0.11, 0.13, 0.5, 0.6, 0.9)
    timing = Timing("eager", "resident", 12.0, 6.0, 2.0, ratio_low, 2.1, 40, 3)
    return KernelRecord(
        key=key or make_key(),
        target=Target("cpu", "AuthenticAMD-25-17", "x86-64-v4", 2),
        stock_build="2.13",
        verdict=Verdict(
            "stock",
            0.0,
            0.0,
            "run_to_run",
            (family,),
            {"zeros": "refused"},
            {"guard_zones": "whole"},
            (timing,),
            judge_version=1,
        ),
        provenance=Provenance(
            candidate_id="ab" * 32,
            author="templates",
            idea=f"one row a vector, number {seed}",
            language="c++",
            template="rows",
            parameters={"unroll": 4},
            parents=(),
            source_sha256=hashlib.sha256(b"source").hexdigest(),
            tools={"c++": "g++ 13"},
            box_level="3",
            created="2025-01-01T00:00:00Z",
        ),
        blobs=(),
    )


def make_data(seed: int = 0) -> dict[str, bytes]:
    """Two blobs that differ for every seed."""
    return {"binary": hashlib.sha256(str(seed).encode()).digest() * 40, "plan": b'{"version":1}'}
