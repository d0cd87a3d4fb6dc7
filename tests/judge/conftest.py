"""One thread for what runs in the test process: two would wait for each other on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from torch_autokern.judge.verdict import close_screen


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _no_runner_left_behind() -> Iterator[None]:
    yield
    close_screen()
