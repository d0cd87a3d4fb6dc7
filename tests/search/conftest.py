"""Tests of the search: no test here cuts the power, so nothing waits for the disk."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _nothing_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
