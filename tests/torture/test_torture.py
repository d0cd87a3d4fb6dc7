"""The store under fire: a little of every part at each run, the short form in the long tier; and proof that it can fail."""

from __future__ import annotations

import functools
import itertools
import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.torture import cuts, strikes
from tests.torture.__main__ import PARTS
from tests.torture.campaign import Figure, Part, run_part, scratch_folder
from tests.torture.gate import refusal
from torch_autokern.store.record import decode_record

ROOT = Path(__file__).parents[2]
needs_gate = pytest.mark.skipif(refusal() is not None, reason=str(refusal()))
_A_LITTLE = {
    "kill points": 70, "errors": 60, "power cuts, ext4": 1, "power cuts, replayed": 20, "mutations": 2000, "full disks": 4,
    "full ext4": 1, "limits": 8, "hostile places": 12, "users and umasks": 12, "lying locks": 2, "clocks": 6,
    "fork storms": 1, "two versions": 1,
}  # fmt: skip


@pytest.fixture
def folder() -> Iterator[Path]:
    """A scratch folder, in memory where there is such a disk."""
    made = scratch_folder()
    yield made
    shutil.rmtree(made, ignore_errors=True)


# The two slowest: `tests/store` kills and fails a publish at every system call in the fast tier.
_LONG = {"kill points", "errors"}
_BY_TIER = [pytest.param(part, marks=[pytest.mark.long] if part.name in _LONG else [], id=part.name) for part in PARTS]


@pytest.mark.parametrize("part", _BY_TIER)
def test_a_little_of_every_part(part: Part) -> None:
    figure = run_part(part, _A_LITTLE[part.name], Figure(), time.monotonic() + 60)
    if figure.skipped:
        pytest.skip(figure.skipped)
    assert figure.bad == 0, "\n".join(figure.faults)
    assert figure.trials == _A_LITTLE[part.name]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_short_form_finds_nothing_in_four_minutes(tmp_path: Path) -> None:
    file = tmp_path / "torture.json"
    command = [sys.executable, "-m", "tests.torture", "--short", "--json", str(file)]
    before = _processor_s()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880)
    used_s = _processor_s() - before
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    figures = json.loads(file.read_text())["figures"]
    assert sum(figure["bad"] for figure in figures.values()) == 0
    assert all(figure["done"] for figure in figures.values())
    if refusal() is None:
        assert figures["kill points"]["trials"] >= 2_000
        assert figures["power cuts, replayed"]["trials"] + figures["power cuts, ext4"]["trials"] >= 10
    assert figures["mutations"]["trials"] >= 50_000
    assert used_s < 240, "of the processor: how long that takes is up to who else is here"


def _processor_s() -> float:
    """What this process's children, those of other tests too, have used of the processor so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_part_goes_on_where_it_left_off(folder: Path) -> None:
    made: list[int] = []

    def trials(_: Path) -> Iterator[strikes.Trial]:
        for number in itertools.count():
            yield functools.partial(lambda number, _folder: made.append(number) or [], number)

    part = Part("counted", trials, 3, 5)
    figure = run_part(part, part.short, Figure(), time.monotonic() + 60)
    assert (figure.trials, figure.done) == (3, True)
    run_part(part, part.long, figure, time.monotonic() - 1)
    assert figure.trials == 3, "time was up"
    figure.done = False
    run_part(part, part.long, figure, time.monotonic() + 60)
    assert (made, figure.trials, figure.done) == ([0, 1, 2, 3, 4], 5, True)


# -- the campaign can fail -----------------------------------------------------------------------------------------------


def _bad(trials: Iterator[strikes.Trial], folder: Path, count: int) -> int:
    bad = 0
    for trial in itertools.islice(trials, count):
        bad += bool(trial(folder))
        shutil.rmtree(folder / "store", ignore_errors=True)
    return bad


@needs_gate
@pytest.mark.parametrize("sabotage", cuts.SABOTAGES)
def test_replayed_cuts_find_a_store_that_does_not_sync(folder: Path, sabotage: str) -> None:
    assert _bad(cuts.replayed_cuts(folder, sabotage), folder, 16) > 3


@pytest.mark.long
@pytest.mark.parametrize("sabotage", cuts.SABOTAGES)
def test_real_cuts_find_a_store_that_does_not_sync(folder: Path, sabotage: str) -> None:
    part = next(part for part in PARTS if part.name == "power cuts, ext4")
    if why := part.refusal(folder):
        pytest.skip(why)
    assert _bad(cuts.ext4_cuts(folder, sabotage), folder, 4) > 0


@pytest.mark.long
@needs_gate
def test_kill_points_find_a_store_that_writes_in_place(folder: Path) -> None:
    def in_place(path: Path, data: bytes, root: Path, replace: bool) -> bool:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(data)
        path.chmod(0o600)
        return True

    with mock.patch("torch_autokern.store.files._publish_once", in_place):
        assert _bad(strikes.kill_points(folder), folder, 80) > 0


def test_mutations_find_a_reader_that_does_not_hash(folder: Path) -> None:
    part = next(part for part in PARTS if part.name == "mutations")
    real_hash = __import__("hashlib").sha256

    class Agreeing:
        """A hash that is whatever one wants it to be."""

        def __init__(self, body: bytes) -> None:
            self._body = body

        def __getattr__(self, name: str) -> object:
            return getattr(real_hash(self._body), name)

        def digest(self) -> object:
            return mock.ANY

        def hexdigest(self) -> object:
            return mock.ANY

    with (
        mock.patch("torch_autokern.store.record.hashlib.sha256", Agreeing),
        mock.patch("tests.torture.mutations.decode_record", decode_record),
    ):
        assert run_part(part, 200, Figure(), time.monotonic() + 60).bad > 0
