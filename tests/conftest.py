"""What every test shares: a store of its own, and switches that the person's shell may have set are taken away."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest

# Set before any test module is imported, and inherited by every child process that a test starts.
_STORE = tempfile.TemporaryDirectory(prefix="autokern-tests-")
for _name in ("AUTOKERN_DISABLE", "AUTOKERN_STRICT", "AUTOKERN_POOL_MB", "AUTOKERN_CXX"):
    os.environ.pop(_name, None)
os.environ["AUTOKERN_STORE"] = _STORE.name
# What the package brings for this very machine would serve calls that a test expects to miss.
os.environ["AUTOKERN_PREBUILT"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def _environment_is_put_back() -> Iterator[None]:
    """A test that sets an ``AUTOKERN_*`` variable without monkeypatch would change every test after it: fail it there."""
    before = {name: value for name, value in os.environ.items() if name.startswith("AUTOKERN_")}
    yield
    after = {name: value for name, value in os.environ.items() if name.startswith("AUTOKERN_")}
    assert after == before, "the test left AUTOKERN_* variables changed; use monkeypatch.setenv"


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the session's store."""
    _STORE.cleanup()
