"""Every branch of the store's files is taken by the store's own fast tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.coverage_of_store import FILES, ROOT, measure


@pytest.mark.long
def test_every_branch_of_the_store_is_taken(tmp_path: Path) -> None:
    percent, table = measure(tmp_path)
    assert percent == 100.0, table


def test_every_file_of_the_store_is_measured() -> None:
    """But for packs and trust, which bring their own tests."""
    names = {path.stem for path in (ROOT / "torch_autokern" / "store").glob("*.py")}
    assert {name for name in names if not name.startswith(("pack", "trust", "__"))} == set(FILES)
