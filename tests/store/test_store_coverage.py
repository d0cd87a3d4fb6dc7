"""Every branch of store, packs and trust is taken by their own fast tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.coverage_of_store import measure


@pytest.mark.long
def test_every_branch_of_store_packs_and_trust_is_taken(tmp_path: Path) -> None:
    percent, table = measure(tmp_path)
    assert percent == 100.0, table
