"""Every test of packs: a state folder of its own, which is also the store's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from pack_samples import needs_cryptography, new_state, publics
from tiny_kernels import served

from torch_autokern.store.trust import add_key, change_policy

__all__ = ["served"]


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty state folder that the process uses."""
    folder = new_state()
    monkeypatch.setenv("AUTOKERN_STORE", str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def trusted(state: Path) -> Path:
    """A state folder in which the tests' publisher is trusted."""
    needs_cryptography()
    for public in publics():
        change_policy(state, lambda policy, public=public: add_key(policy, public))  # type: ignore[misc]
    return state
