"""The campaign of the judge's statistics: it resumes, keeps what other parts wrote, and says what it found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from benchmarks import judge_campaign
from benchmarks.judge_campaign import read_campaign, run_part, table
from benchmarks.judge_parts import Judged, Pair, Repeats, repeat_stock, stock_keys
from torch_autokern.errors import InvalidInputError
from torch_autokern.judge.outcome import Reason, Refusal
from torch_autokern.ops import SPECS


def _level(state: list[Judged], runs: int) -> Iterator[None]:
    while len(state) < runs:
        state.append(Judged("softmax", "not_faster", 1.0))
        yield


def test_a_part_goes_on_where_it_stopped_and_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_campaign, "stock_against_stock", _level)
    file = tmp_path / "campaign.json"
    assert len(run_part("aa", 10, 0.0, file).aa) == 1  # one unit at least
    whole = read_campaign(file)
    whole.overlap = [Pair(Judged("k", "accepted", 1.1, 1.0, 1.2))]
    file.write_bytes(msgspec.json.encode(whole))
    done = run_part("aa", 10, 60.0, file)
    assert len(done.aa) == 10 and len(done.overlap) == 1
    assert run_part("aa", 10, 60.0, file).aa == done.aa


def test_results_of_another_machine_are_not_added_to(tmp_path: Path) -> None:
    file = tmp_path / "campaign.json"
    file.write_bytes(msgspec.json.encode(msgspec.structs.replace(read_campaign(None), device="another one")))
    with pytest.raises(InvalidInputError, match="another one"):
        read_campaign(file)
    file.write_text("{}")
    with pytest.raises(InvalidInputError, match="no campaign"):
        read_campaign(file)


def test_intervals_agree_where_they_overlap_and_say_nothing_where_one_is_missing() -> None:
    one, far, none = (
        Judged("k", "accepted", 1.1, 1.0, 1.2),
        Judged("k", "accepted", 1.5, 1.4, 1.6),
        Judged("k", "timing_unstable"),
    )
    assert Pair(one, one).overlaps is True and Pair(one, far).overlaps is False
    assert Pair(one, none).overlaps is None and Pair(one).overlaps is None


def test_the_table_counts_refusals_and_shows_the_first_words() -> None:
    campaign = read_campaign(None)
    campaign.honest = {"kernel": Repeats()}
    for refusal in (None, Refusal(Reason.WRONG_VALUE, "off by one", cases=("normal:1:0",)), None):
        campaign.honest["kernel"].add(refusal)
    campaign.aa = [Judged("k", "accepted", 1.1, 1.05, 1.2), Judged("k", "not_faster")]
    text = "\n".join(table(campaign))
    assert "3 in all: 1 refused {'wrong_value': 1}" in text and "off by one normal:1:0" in text
    assert "2 of stock against stock: 1 accepted" in text


def test_stock_is_tried_on_every_op() -> None:
    assert {key.op for key in stock_keys().values()} == set(SPECS)


@pytest.mark.long
def test_stock_in_a_candidates_place_is_not_refused_for_its_numbers() -> None:
    state: dict[str, Repeats] = {}
    for _ in repeat_stock(state, 2):
        pass
    assert all(one.runs == 2 and not one.refused for one in state.values()), state
