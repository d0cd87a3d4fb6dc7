"""Pages about runs, stores and measurements: what they say is what the journal says, and nothing on them is code."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from html_samples import EXAMPLE, proof, read_page, told_run
from search_samples import ask_for, start
from store_samples import make_data, make_key, make_record
from typer.testing import CliRunner

from torch_autokern.cli.main import app
from torch_autokern.errors import AutokernError, InvalidInputError
from torch_autokern.judge.outcome import Reason, Refusal
from torch_autokern.report.html import page, tell, visible
from torch_autokern.report.html_charts import MOST_DOTS, log_scale, rounds_chart, tree_chart
from torch_autokern.report.html_run import RunStory, tell_run
from torch_autokern.report.html_store import StoreStory, tell_store
from torch_autokern.report.measurement import Measurement, Row, load_measurement
from torch_autokern.search.journal import KeyJournal, Trial
from torch_autokern.search.nodes import Offered, Outcome, Reply, RoundEnd
from torch_autokern.search.run import open_run
from torch_autokern.store.folders import FolderChoice
from torch_autokern.store.layout import record_file
from torch_autokern.store.notes import Approval, Quarantine
from torch_autokern.store.store import open_store

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
HOSTILE = (
    "</title></style></pre></svg><script>document.title='owned'</script><img src=x onerror=alert(1)>"
    '" onmouseover="alert(2)" \' autofocus onfocus=\'alert(3) {{ 7*7 }} {% raw %} <!-- '
    "javascript:alert(4) \u202ednuor\u200b\x1b[31m\x00"
)


def told(run: Path) -> RunStory:
    story = tell(run)
    assert isinstance(story, RunStory)
    return story


def shell(*words: str) -> str:
    """A command's output; its error is raised."""
    result = CliRunner().invoke(app, list(words))
    if isinstance(result.exception, AutokernError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_recorded_example_is_told_as_its_journal_has_it() -> None:
    run = open_run(EXAMPLE, replaying=True)
    story = told(EXAMPLE)
    (key,) = story.keys
    offered = run.every(Offered)
    proved = {node.id: node for node in run.every(Outcome) if node.proved is not None}
    attempts = {one.node: one for told in key.rounds for idea in told.ideas for one in idea.attempts}
    assert attempts.keys() == {node.id for node in offered}
    assert {node for node, one in attempts.items() if one.fate == "proved"} == proved.keys()
    assert key.winners[0].node == run.every(RoundEnd)[-1].best
    assert key.best_ratio == run.every(RoundEnd)[-1].best_ratio
    assert key.limit_share == pytest.approx(run.every(RoundEnd)[-1].limit_share)
    assert [told.best_ratio for told in key.rounds] == [node.best_ratio for node in run.every(RoundEnd)]
    assert sum(story.counts.values()) == len(offered)
    assert story.spending.tokens_in == sum(node.tokens_in for node in run.every(Reply))
    assert story.spending.seconds == pytest.approx(max(node.at for node in run.nodes))
    assert {one.purpose for one in story.spending.models} == {"ideas", "kernels", "mending", "lessons"}
    assert all(winner.source and not winner.missing for winner in key.winners)


def test_a_page_is_whole_alone_and_the_same_twice() -> None:
    story = told(EXAMPLE)
    text = page(story)
    assert text == page(told(EXAMPLE))
    found = read_page(text)
    assert len(found.ids) == len(set(found.ids))
    assert all(link.startswith("#") and link[1:] in found.ids for link in found.links), (
        "a link leaves the page, or leads nowhere"
    )
    assert {tag for tag, _ in found.tags}.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "form", "base"})
    assert "url(" not in text and "@import" not in text and "default-src 'none'" in text
    assert {node.id for node in open_run(EXAMPLE, replaying=True).every(Offered)} <= set(found.ids)
    for winner in story.keys[0].winners:
        assert winner.source.strip()[:60] in found.text and winner.record_id in found.text


def test_words_of_others_are_never_code(tmp_path: Path) -> None:
    told_run(tmp_path / "plain")
    told_run(tmp_path / "hostile", HOSTILE, f"int f; // {HOSTILE} \ud800")
    plain, hostile = (page(told(tmp_path / name)).replace(f">{name}<", ">run<") for name in ("plain", "hostile"))
    assert read_page(hostile).tags == read_page(plain).tags, "words of others became elements or attributes"
    text = read_page(hostile).text
    assert "<script>document.title='owned'</script>" in text, "the words are shown, as words"
    assert "{{ 7*7 }}" in text
    for invisible, name in (("\u202e", "<U+202E>"), ("\u200b", "<U+200B>"), ("\x00", "<U+0000>"), ("\x1b", "<U+001B>")):
        assert invisible not in hostile and name in text
    assert "\\ud800" in text
    assert msgspec.json.encode(told(tmp_path / "hostile"))


def test_text_that_can_be_seen_stays_as_it_is() -> None:
    assert visible("a\n\tb é 中 -") == "a\n\tb é 中 -"
    assert visible("a\u2066b\r") == "a<U+2066>b<U+000D>"
    assert visible(3) == 3


def test_peoples_words_are_told_with_what_they_brought(tmp_path: Path) -> None:
    told_run(tmp_path / "run")
    text = " ".join(read_page(page(told(tmp_path / "run"))).text.split())
    assert "1 kernel tried from it, 1 proved, the best 3.00x" in text and "plain words: hold rows" in text
    assert "1 kernel not built for it" in text and "1.50x before, 3.00x after 1 round" in text
    assert "kernels does it need? plain words" in text and "no gain" in text, "what a stuck run asked"


def test_refusals_are_counted_by_reason_and_by_who_refused(tmp_path: Path) -> None:
    run = told_run(tmp_path / "run")
    run.add(Offered("k0.r2.llm.i0.c2", 42.0, "k0.r2.llm.i0", "f" * 64, "cpp", "", "", "", ""))
    run.add(Outcome("k0.r2.llm.i0.c2", 43.0, "judge", refused=Refusal(Reason.WRONG_VALUE, "late")))
    counts = {one.reason: (one.screens, one.verdicts) for one in told(tmp_path / "run").refusals}
    assert counts == {"wrong_value": (1, 1), "not_faster": (1, 0)}


def test_time_and_tokens_add_up(tmp_path: Path) -> None:
    run = told_run(tmp_path / "run")
    spent = tell_run(run).spending
    assert spent.seconds == pytest.approx(41.0), "candidates were written at about 0 s, after later nodes: counted once"
    parts = {part.name: part.seconds for part in spent.parts}
    assert parts["verdicts"] == pytest.approx(11.0 + 18.0) and parts["waiting for models"] == pytest.approx(3.0 + 2.0)
    assert (spent.tokens_in, spent.tokens_out, spent.money) == (300, 50, 1.0)
    assert [(one.purpose, one.errors, one.charged) for one in spent.models] == [("kernels", 0, 0), ("mending", 1, 1)]


def test_a_run_under_way_is_told_and_not_touched(tmp_path: Path) -> None:
    told_run(tmp_path / "run")
    journal = tmp_path / "run" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-3]) + lines[-3][:40])
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    story = told(tmp_path / "run")
    assert not story.stops and [one.ended for one in story.keys[0].rounds] == [True, False]
    assert "Not ended" in page(story)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_a_run_that_has_not_begun_gives_a_page(tmp_path: Path) -> None:
    start(tmp_path / "run", ask_for())
    text = read_page(page(told(tmp_path / "run"))).text
    assert "nothing proved: stock stays" in text and "No round was played" in text and "Nobody stepped in" in text


def test_a_missing_source_is_said_and_costs_nothing_else(tmp_path: Path) -> None:
    told_run(tmp_path / "run")
    for blob in (tmp_path / "run" / "blobs").iterdir():
        blob.unlink()
    story = told(tmp_path / "run")
    assert all("cannot be read" in winner.missing for winner in story.keys[0].winners)
    assert "cannot be read" in page(story)


def test_a_long_source_is_cut_and_said_to_be(tmp_path: Path) -> None:
    told_run(tmp_path / "run", source="int x;\n" * 40_000)
    text = page(told(tmp_path / "run"))
    assert "cut after 200000 of 280000 characters" in text


def test_ten_thousand_kernels_give_a_page(tmp_path: Path) -> None:
    run = told_run(tmp_path / "run")
    for number in range(10_000):
        name = f"k0.r3.llm.i{number}"
        run.nodes.append(
            Offered(f"{name}.c0", 50.0, name, f"{number:064x}", "cpp", "", "", "words", "llm", parents=("d" * 64,))
        )
        run.nodes.append(Outcome(f"{name}.c0", 50.0, "screen", refused=Refusal(Reason.HUNG, "it hung")))
    story = tell_run(run)
    assert story.counts["refused"] == 10_002
    chart = tree_chart(story.keys[0])
    assert chart.hidden == 10_000 - MOST_DOTS and chart.height < 2000
    assert "9,960 more are in the list only" in page(story)


def test_tree_joins_what_grew_from_what_and_marks_the_winners_path(tmp_path: Path) -> None:
    told_run(tmp_path / "run")
    (key,) = told(tmp_path / "run").keys
    chart = tree_chart(key)
    assert {dot.node: dot.label for dot in chart.dots}["k0.r1.llm.i0.c0.f0"] == "not faster"
    assert len(chart.dots) == 5 and len(chart.edges) == 2 and chart.hidden == 0
    assert {dot.node for dot in chart.dots if dot.on_path} == {"k0.r1.templates.i0.c0", "k0.r2.llm.i0.c0"}
    assert [edge.on_path for edge in chart.edges] == [False, True]
    speed = rounds_chart(key, goal=2.0)
    assert speed is not None and [line.kind for line in speed.marks] == ["stock", "limit", "goal"]
    heights = {dot.node: dot.y for dot in speed.dots}
    assert heights["k0.r2.llm.i0.c0"] < heights["k0.r1.templates.i0.c0"] < heights["k0.r1.llm.i0.c0.f0"], "faster is higher"


def test_scale_holds_everything_it_was_given() -> None:
    scale = log_scale([0.001, 3.0, 0.0, -1.0, 500.0])
    assert 0 < scale.place(0.001) < scale.place(1.0) < scale.place(500.0) < 100
    assert 2 <= len(scale.ticks) <= 7 and scale.place(0.0) == 0.0 and scale.place(1e9) == 100.0
    assert log_scale([]).place(1.0) == pytest.approx(50.0)


def test_store_is_told_with_notes_refusals_and_evidence(tmp_path: Path) -> None:
    store = open_store(choice=FolderChoice(tmp_path, "test"))
    key = make_key()
    ids = [store.publish(make_record(seed, key), make_data(seed)).record_id for seed in range(3)]
    store.add_note(key.digest, Approval(ids[0], True, "Ada", f"read it {HOSTILE}", "2026-01-01T00:00:00Z"))
    store.add_note(key.digest, Quarantine(ids[1], "launch failed", "CUDA_ERROR", "2026-01-01T00:00:00Z", "host"))
    journal = KeyJournal(tmp_path, "ab" * 32)
    journal.append(Trial("here", "1", "refused", "hung", "first"))
    journal.append(Trial("here", "1", "refused", "wrong_value", HOSTILE))
    journal.append(Trial("here", "2", "accepted"))
    damaged = record_file(tmp_path, key.digest, ids[2])
    damaged.write_bytes(damaged.read_bytes()[:-1])
    story = tell(tmp_path)
    assert isinstance(story, StoreStory)
    assert (story.records, story.damaged, story.trials) == (2, 1, 2) and damaged.exists(), "a report changes nothing"
    assert [(one.reason, one.count) for one in story.refusals] == [("wrong_value", 1)]
    found = read_page(page(story))
    assert "Approved by Ada" in found.text and "launch failed" in found.text and found.count("script") == 0
    assert all(record_id in found.text for record_id in ids[:2])
    assert all(link[1:] in found.ids for link in found.links)


def test_empty_store_says_so(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    assert "No kernel is stored here yet" in page(tell_store(tmp_path))


@pytest.mark.parametrize("name", ["headline", "demo", "cpu_kernels", "gpu_templates", "overhead"])
def test_committed_measurements_are_drawn(name: str) -> None:
    story = load_measurement(RESULTS / f"{name}.json")
    found = read_page(page(story, name))
    limited = sum(row.limit_ms is not None for row in story.rows)
    strips = sum(tag == "svg" and "role" in names for tag, names in found.tags)
    assert strips == 2 * len(story.rows) + limited, "a bar for each ratio, each error, and each share of a limit"
    assert story.device in found.text and all(row.case in found.text for row in story.rows)
    assert all(not isinstance(row.served, str) or f"stock: {row.served}" in found.text for row in story.rows)


def test_measurement_without_times_is_refused(tmp_path: Path) -> None:
    empty = Measurement("a device", {}, "2026-01-01T00:00:00Z", ())
    with pytest.raises(InvalidInputError, match="no row"):
        page(empty)
    row = Row("softmax", "stock", 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, True)
    with pytest.raises(InvalidInputError, match="not measured"):
        page(msgspec.structs.replace(empty, rows=(row,)))


def test_command_writes_a_page_and_prints_the_same_story_as_json(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    assert str(out) in shell("report", str(EXAMPLE), "-o", str(out))
    assert out.read_text() == page(told(EXAMPLE), EXAMPLE.stem)
    found = json.loads(shell("report", str(EXAMPLE), "--json"))
    assert found["counts"] == told(EXAMPLE).counts and found["keys"][0]["winners"][0]["source"]
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"], "--json writes no page"


def test_command_without_a_name_tells_the_users_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "mine"
    store.mkdir(mode=0o700)
    monkeypatch.setenv("AUTOKERN_STORE", str(store))
    open_store(choice=FolderChoice(store, "test")).publish(make_record(1), make_data(1))
    assert json.loads(shell("report", "--json"))["records"] == 1


@pytest.mark.parametrize("what", ["nothing", "folder", "text.json", "other.json", "run"])
def test_what_cannot_be_told_is_one_clear_error(what: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.json").write_text("no json")
    (tmp_path / "other.json").write_text('{"a": 1}')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{}")
    with pytest.raises(InvalidInputError):
        shell("report", str(tmp_path / what), "-o", str(tmp_path / "page.html"))
    assert not (tmp_path / "page.html").exists()


def test_page_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="cannot write"):
        shell("report", str(tmp_path / "nothing"), "-o", str(tmp_path / "no" / "page.html"))


def test_a_journal_that_no_search_wrote_still_gives_a_page(tmp_path: Path) -> None:
    run = told_run(tmp_path / "run")
    run.add(msgspec.structs.replace(run.every(Offered)[0], repairs="k0.r1.templates.i0.c0"))  # twice, and mending itself
    for number in range(500):  # a chain far deeper than any search makes
        mends = f"k0.r3.llm.i0.c{number - 1}" if number else "k0.r3.llm.i0.gone"
        run.add(Offered(f"k0.r3.llm.i0.c{number}", 50.0, "k0.r3.lost", "9" * 64, "cpp", "", "", "words", "llm", repairs=mends))
    run.add(RoundEnd("k0.r", 51.0, 0, 10**12, 3.0, "", 0.6))
    run.add(RoundEnd("k7.r1", 51.0, 7, 1, 3.0, "", 0.6))
    found = read_page(page(told(tmp_path / "run")))
    assert len(found.ids) == len(set(found.ids)) and "that the journal does not hold" in found.text
    assert "k0.r3.llm.i0.c499" in found.text


def test_proof_without_a_time_is_no_run_of_ours(tmp_path: Path) -> None:
    run = told_run(tmp_path / "run")
    empty = msgspec.structs.replace(proof(2.0).verdict, timings=())
    run.add(Outcome("k0.r2.llm.i0.c9", 50.0, "judge", proved=msgspec.structs.replace(proof(2.0), verdict=empty)))
    with pytest.raises(AutokernError, match="proved without a time"):
        tell(tmp_path / "run")
