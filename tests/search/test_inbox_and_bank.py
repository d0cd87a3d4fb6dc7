"""The inbox's folder protocol, the bank's neighbours, and what prompts hold."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from search_samples import KEY, KEY_SECRET, PLAN, PretendEngine, ask_for, kernel, search, start, store_at, story
from warm_samples import TARGET, softmax_key

from torch_autokern.build.candidate import Candidate
from torch_autokern.judge.outcome import Accuracy
from torch_autokern.runtime.plan import CpuStep, decode_plan
from torch_autokern.search import prompting
from torch_autokern.search.bank import Bank, transplanted
from torch_autokern.search.manifest import Ceiling
from torch_autokern.search.nodes import Example, Offered, Outcome
from torch_autokern.search.replay import replay
from torch_autokern.search.run import open_run
from torch_autokern.search.scripted_server import Script, ScriptedServer
from torch_autokern.search.tried import Brief

INBOX = {"proposers": ("inbox",), "rounds": 2}


def drop(folder: Path, name: str, value: Any, age: float = 10.0) -> None:
    """Put a reply into an inbox, last touched `age` seconds ago."""
    path = folder / "inbox" / name
    path.write_bytes(value if isinstance(value, bytes) else msgspec.json.encode(value))
    os.utime(path, (time.time() - age,) * 2)


def test_replies_are_taken_tried_and_credited_to_their_author(tmp_path: Path) -> None:
    start(tmp_path / "run", ask_for(**INBOX))
    drop(tmp_path / "run", "mine.json", {**kernel("ratio=1.7"), "author": "ada"})
    folder = tmp_path / "run" / "inbox" / "byhand"
    folder.mkdir()
    for name, text in {"kernel.cpp": "int ratio; // ratio=1.3", "plan.json": msgspec.json.encode(PLAN).decode(),
                       "idea.txt": "by hand",
                       "author.txt": "bob"}.items():  # fmt: skip
        (folder / name).write_text(text)
    report = search(tmp_path / "run", ask_for(**INBOX))
    run = open_run(tmp_path / "run")
    assert report.search.keys[0].ratio == 1.7
    assert {(node.author, node.words) for node in run.every(Offered)} == {("ada", "kernel: ratio=1.7"), ("bob", "by hand")}
    assert sorted(os.listdir(tmp_path / "run" / "inbox" / "taken")) == ["byhand", "mine.json"]
    assert replay(tmp_path / "run", records=False).holds


def test_brief_tells_the_task_and_how_to_answer(tmp_path: Path) -> None:
    start(tmp_path / "run", ask_for(**INBOX))
    search(tmp_path / "run", ask_for(**INBOX))
    brief = (tmp_path / "run" / "inbox" / "k0-r1.brief.md").read_text()
    for words in (
        "_softmax float32 8x38 dim=1",
        "20.0 us is about the least",
        "How to answer",
        "refused/",
        '"language": "cpp"',
    ):
        assert words in brief


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"{", "JSON"), (b"", "empty"), (b"\xff\xfe{}", "text"), ({"language": "cpp", "source": "x"}, "plan"),
        ({**kernel("x"), "plan": {"version": 1, "steps": []}}, "1 to 16 steps"),
        ({**kernel("x"), "language": "cuda"}, "cpu key"),
        ({**kernel("x"), "source": ""}, "source is empty"), (b'{"a": "' + b"x" * (2 << 20) + b'"}', "larger"),
    ],
)  # fmt: skip
def test_reply_that_cannot_be_used_is_answered_with_the_reason(tmp_path: Path, value: Any, words: str) -> None:
    start(tmp_path / "run", ask_for(**INBOX))
    drop(tmp_path / "run", "bad.json", value)
    search(tmp_path / "run", ask_for(**INBOX))
    assert words in (tmp_path / "run" / "inbox" / "refused" / "bad.json.error.txt").read_text()
    assert not (tmp_path / "run" / "inbox" / "bad.json").exists() and open_run(tmp_path / "run").every(Offered) == []


def test_file_that_is_still_written_is_left_alone(tmp_path: Path) -> None:
    start(tmp_path / "run", ask_for(**INBOX))
    drop(tmp_path / "run", "half.json", b'{"language": "cpp", "sour', age=0.0)
    (tmp_path / "run" / "inbox" / ".hidden.json").write_text("x")
    (tmp_path / "run" / "inbox" / "link.json").symlink_to("/etc/hostname")
    search(tmp_path / "run", ask_for(**INBOX))
    assert {"half.json", ".hidden.json", "link.json"} <= set(os.listdir(tmp_path / "run" / "inbox"))


def test_reply_is_picked_up_while_the_run_waits(tmp_path: Path) -> None:
    ask = ask_for(proposers=("inbox",), rounds=1, inbox_seconds=20.0)
    start(tmp_path / "run", ask)

    def answer() -> None:
        brief = tmp_path / "run" / "inbox" / "k0-r1.brief.md"
        while not brief.exists():
            time.sleep(0.01)
        drop(tmp_path / "run", "late.json", kernel("ratio=1.9"))

    thread = threading.Thread(target=answer)
    thread.start()
    report = search(tmp_path / "run", ask)
    thread.join()
    assert report.search.keys[0].ratio == 1.9 and report.spent["seconds"] < 15


def test_bank_brings_neighbours_and_shows_them_to_models(tmp_path: Path) -> None:
    server = ScriptedServer(Script(story(), KEY_SECRET))
    search(tmp_path / "small", ask_for(server.url))
    server.close()
    server = ScriptedServer(Script(story(), KEY_SECRET))
    engine = PretendEngine()
    report = search(
        tmp_path / "large", ask_for(server.url, rounds=1, proposers=("bank", "llm")), softmax_key(16), engine=engine
    )
    server.close()
    run = open_run(tmp_path / "large")
    banked = [node for node in run.every(Offered) if ".bank." in node.id]
    assert report.search.keys[0].ratio == 2.1 and banked and banked[0].parents
    plan = decode_plan(run.text(banked[0].plan).encode())
    assert isinstance(plan.steps[0], CpuStep) and plan.steps[0].range == 16
    assert len(run.every(Example)) == 3 and "2.10x, for _softmax float32 8x38" in server.prompts[0][1]
    assert all(run.text(node.source).strip() in server.prompts[0][1] for node in run.every(Example)), "with their sources"
    assert replay(tmp_path / "large", records=False).holds


def test_bank_gives_nothing_back_to_its_own_key_and_nothing_uneven(tmp_path: Path) -> None:
    server = ScriptedServer(Script(story(), KEY_SECRET))
    search(tmp_path / "run", ask_for(server.url))
    server.close()
    store = store_at(tmp_path / "store")
    brief = Brief(KEY, TARGET, 0, 1, ask_for(), None, ())
    assert Bank(store).propose(brief) == [] and Bank(store).examples(brief) == []
    stored = next(store.records(KEY.digest))
    assert transplanted(stored, softmax_key(8)) is not None
    assert transplanted(stored, softmax_key(9, 5)) is None, "8 rows of 38 to 9 rows of 5 gives no whole range"


def test_bank_shows_another_device_and_other_dtypes_before_more_of_the_same(tmp_path: Path) -> None:
    server = ScriptedServer(Script(story(), KEY_SECRET))
    search(tmp_path / "run", ask_for(server.url, rounds=1), softmax_key(16))
    server.close()
    store = store_at(tmp_path / "store")
    stored = next(store.records())
    many = msgspec.structs.replace(TARGET, threads=TARGET.threads + 6)
    half = tuple(msgspec.structs.replace(one, dtype="bfloat16") for one in softmax_key(64).tensors if one is not None)
    for key, target in (
        *((softmax_key(rows), TARGET) for rows in (32, 64, 128)), (softmax_key(4096), many),
        (msgspec.structs.replace(softmax_key(64), tensors=half), TARGET),
    ):  # fmt: skip
        store.publish(msgspec.structs.replace(stored.record, key=key, target=target), stored.data)
    shown = [example.key_words for example, _ in Bank(store).examples(Brief(KEY, TARGET, 0, 1, ask_for(), None, ()))]
    assert [words.split(" on ")[0] for words in shown] == [
        "_softmax float32 16x38 dim=1", "_softmax float32 4096x38 dim=1", "_softmax bfloat16 64x38 dim=1",
    ]  # fmt: skip


def brief_of(words: str = "int x;") -> Brief:
    from torch_autokern.judge.outcome import Place, Reason, Refusal, ScreenResult
    from torch_autokern.search.tried import Tried

    plan = decode_plan(msgspec.json.encode(PLAN))
    node = Offered("k0.r1.llm.i0.c0", 0.0, "k0.r1.llm.i0", "", "cpp", "", "", "", "")
    good = Tried(node, Candidate("cpp", words, plan, "short rows", "m"), ScreenResult(1.5, 1.4, 1.6, 90.0, 60.0, (), 0.1))
    refusal = Refusal(Reason.WRONG_VALUE, "error 3.0, limit 1.0", "spikes", 7, first=(Place((1, 2), "nan", "0.5"),))
    bad = Tried(msgspec.structs.replace(node, id="b"), Candidate("cpp", "int y;", plan, "no maximum", "m"), refusal)
    return Brief(
        KEY, TARGET, 0, 2, ask_for(), Ceiling(30.0, 0.0, 90.0, 30.0), (good, bad), lessons=["wide loads pay"],
        hints=["mind the tail"],
        bans=["rcpps"],
    )  # fmt: skip


@pytest.mark.parametrize("name", prompting.NAMES)
def test_every_prompt_is_a_file_whose_places_are_all_filled(name: str) -> None:
    task = prompting.task(brief_of(), Accuracy())
    text = prompting.fill(
        name, op="", reference="", key="", machine="", accuracy="", plan="", rules="", best="", diverse="",
        examples="", ideas="",
        lessons="", hints="", task=task, count=3, idea="an idea", number=1, language="cpp", source="int x;", failed_plan="{}",
        refusal="wrong", prompt="before", reason="no JSON", round="- one",
    )  # fmt: skip
    assert "@" not in text.replace("@task@", "") and len(text) > 40


def test_task_holds_all_that_an_author_needs() -> None:
    text = prompting.task(brief_of(), Accuracy("tolerance", 1e-3, 1e-4))
    for words in (
        "aten::_softmax", "torch.softmax(tensors[0].double()", "sizes [8, 38]", "strides [38, 1]", "x86-64-v2", "takes 90.0 us",
        "30.0 us is about the least", "50% of the limit", "2432 bytes at 0.03 GB/s", "Profile: 2432 bytes at 0.04 GB/s",
        "right on a first look, 1.50x", "int x;", "wide loads pay",
        "mind the tail",
        "whatever matches /rcpps/", "0.001 + 0.0001 * |truth|", "inline assembly", '"kind":"cpu"', "short rows",
    ):  # fmt: skip
        assert words in text, words
    assert "float64" in text and "NaN" in text
    words = prompting.refusal_words(brief_of().tried[1].refusal)  # type: ignore[arg-type]
    assert "spikes" in words and "seed 7" in words and "At [1, 2]: got nan, expected 0.5." in words


def test_kernel_text_in_a_prompt_fills_no_places() -> None:
    assert "@lessons@ @hints@" in prompting.task(brief_of("// @lessons@ @hints@"), Accuracy())


def test_outcomes_of_the_inbox_are_in_the_journal(tmp_path: Path) -> None:
    start(tmp_path / "run", ask_for(**INBOX))
    drop(tmp_path / "run", "wrong.json", kernel("refused=wrong_value"))
    search(tmp_path / "run", ask_for(**INBOX))
    (outcome,) = open_run(tmp_path / "run").every(Outcome)
    assert outcome.refused is not None and outcome.refused.seed == 77
