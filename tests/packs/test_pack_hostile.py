"""Every hostile pack is refused with its reason; none crashes, none takes more memory than twice its size."""

from __future__ import annotations

import tracemalloc

import pytest
from hostile_records import CASES
from pack_samples import good, needs_cryptography, verdict_on

from torch_autokern.store.pack_refusal import PackReason

# What Python itself takes for one line or header of at most 64 KiB, whatever the pack's size.
FIXED_BYTES = 2 << 20


def test_there_are_more_than_a_hundred_and_every_kind_of_reason_is_tried() -> None:
    assert len(CASES) >= 100
    tried = {reason for _, reason in CASES.values()}
    # The rest need a folder, a policy or a device: their tests are elsewhere in this room.
    elsewhere = {
        PackReason.UNREADABLE, PackReason.UNLISTED_FILE, PackReason.MISSING_FILE, PackReason.NO_CRYPTOGRAPHY,
        PackReason.POLICY_DAMAGED, PackReason.KEY_REVOKED, PackReason.PACK_REVOKED, PackReason.KERNEL_REVOKED,
        PackReason.NOT_PINNED, PackReason.OP_NOT_ALLOWED, PackReason.ROLLBACK, PackReason.NAME_TAKEN,
    }  # fmt: skip
    assert tried | elsewhere == set(PackReason)


def test_the_pack_that_they_are_made_from_is_good() -> None:
    needs_cryptography()
    assert verdict_on(good()) is None


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_pack_is_refused_with_its_reason(name: str) -> None:
    needs_cryptography()
    make, reason = CASES[name]
    raw = make()
    tracemalloc.start()
    try:
        refusal = verdict_on(raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refusal is not None, "accepted"
    assert refusal.reason is reason, refusal
    assert refusal.message and "\n" not in refusal.message
    assert peak <= 2 * len(raw) + FIXED_BYTES, f"{peak} bytes for a pack of {len(raw)}"
