"""The recorded example: a search of five rounds that ends beyond every built-in template."""

from __future__ import annotations

from pathlib import Path

import pytest

from torch_autokern.search.nodes import Offered, Outcome
from torch_autokern.search.replay import replay
from torch_autokern.search.run import open_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "four_classes"


def test_recorded_example_tells_a_kernel_that_beats_every_template() -> None:
    report = replay(EXAMPLE / "run", records=False)
    assert report.holds and report.rounds == 5, report
    run = open_run(EXAMPLE / "run", replaying=True)
    templates = {node.id for node in run.every(Offered) if node.template}
    proved: dict[bool, list[float]] = {True: [], False: []}
    screened: dict[bool, list[float]] = {True: [], False: []}
    for node in run.every(Outcome):
        if node.proved is not None:
            proved[node.id in templates].append(node.proved.verdict.timings[0].ratio_low)
        elif node.screened is not None:
            screened[node.id in templates].append(node.screened.ratio_high)
    best = max(proved[False])
    assert best > max([*screened[True], *(value for value in proved[True])]), "beyond every template, however lucky its screen"


@pytest.mark.long
def test_recorded_example_gives_its_records_again_within_a_minute() -> None:
    report = replay(EXAMPLE / "run")
    assert report.holds and report.records
    assert all(record.status in ("holds", "not_here") for record in report.records), report.records
