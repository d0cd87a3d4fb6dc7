"""`autokern steer`: tell a run something, also while it runs; or see what was said, and what it brought."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from torch_autokern.cli import shell
from torch_autokern.errors import InvalidInputError

if TYPE_CHECKING:
    from torch_autokern.search.run import Run
    from torch_autokern.search.steer import Action


class Word(str, enum.Enum):
    """What can be said."""

    HINT = "hint"
    IDEA = "idea"
    KERNEL = "kernel"
    BAN = "ban"
    ANSWER = "answer"
    GOAL = "goal"
    BUDGET = "budget"
    PAUSE = "pause"
    RESUME = "resume"
    STOP = "stop"


def steer(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    word: Annotated[Word | None, typer.Argument(help="What to say. Without: show what was said and what it brought.")] = None,
    text: Annotated[
        str | None,
        typer.Argument(help="The hint, idea or answer; a kernel's file or folder; a ban's regular expression; ratio=2."),
    ] = None,
    key: Annotated[int | None, typer.Option(help="The number of the key that it is about (default: all; a kernel: 0).")] = None,
    rounds: Annotated[int | None, typer.Option(help="budget: rounds for each key.")] = None,
    minutes: Annotated[float | None, typer.Option(help="budget: time for the whole run, all its lives.")] = None,
    tokens: Annotated[int | None, typer.Option(help="budget: most tokens.")] = None,
    money: Annotated[float | None, typer.Option(help="budget: most money.")] = None,
    candidates: Annotated[int | None, typer.Option(help="budget: most candidates.")] = None,
    stuck: Annotated[str | None, typer.Option(help="budget: what a stuck key does: ask, continue or stop.")] = None,
    author: Annotated[str | None, typer.Option(help="Who says it (default: your user name).")] = None,
    as_json: shell.AsJson = False,
) -> None:
    """Steer a run: add an idea, a kernel, a hint or a ban, answer its question, change goal or budget, pause, resume, stop.

    It is heard at the start of the next round (a pause before the next step). Each word becomes a node of the run's journal.
    """
    from torch_autokern.search import steer as steering
    from torch_autokern.search.run import open_run

    opened = open_run(run, replaying=True)
    new = {"rounds": rounds, "seconds": None if minutes is None else minutes * 60, "tokens": tokens, "money": money,
           "candidates": candidates, "stuck": stuck}  # fmt: skip
    given = sorted(name for name, value in new.items() if value is not None)
    if given and word is not Word.BUDGET:
        raise InvalidInputError(f"--{', --'.join(given)}: only with the word budget")
    if word is None:
        if text is not None or key is not None:
            raise InvalidInputError("say what kind of word it is: hint, idea, kernel, ban, answer, goal, budget or pause")
        _show(opened, as_json)
        return
    words = steering.SteerFile(_action(word), _text(word, text, new), shell.user_name() if author is None else author, key)
    steering.check_words(opened, words)
    path = steering.write_steering(run, words)
    if as_json:
        shell.print_json({"file": str(path), **msgspec.to_builtins(words)})
        return
    when = "between two steps" if word in (Word.PAUSE, Word.RESUME) else "when the next round starts"
    typer.echo(f"{word.value}: left for {run}; heard {when}")


def _action(word: Word) -> Action:
    return "limits" if word in (Word.GOAL, Word.BUDGET) else word.value


def _text(word: Word, text: str | None, new: Mapping[str, object]) -> str:
    if word is Word.BUDGET:
        if text is not None or all(value is None for value in new.values()):
            raise InvalidInputError("budget takes options: --rounds, --minutes, --tokens, --money, --candidates, --stuck")
        return _limits(new)
    if word in (Word.PAUSE, Word.RESUME, Word.STOP):
        return text or ""
    if text is None:
        raise InvalidInputError(f"{word.value} needs its words as the last argument")
    if word is Word.GOAL:
        from torch_autokern.cli.search import read_goal
        from torch_autokern.search.limits import Changes

        return msgspec.json.encode(Changes(goal=read_goal(text))).decode()
    return _kernel(Path(text)) if word is Word.KERNEL else text


def _limits(new: Mapping[str, object]) -> str:
    from torch_autokern.search.limits import Changes
    from torch_autokern.search.manifest import Limits

    names = {name: new[name] for name in Limits.__struct_fields__}
    limits = None if all(value is None for value in names.values()) else names
    body = {"rounds": new["rounds"], "limits": limits, "stuck": new["stuck"]}
    try:
        changes = msgspec.convert({name: value for name, value in body.items() if value is not None}, Changes)
    except msgspec.ValidationError as error:
        raise InvalidInputError(f"budget: {error}") from error
    return msgspec.json.encode(changes).decode()


def _kernel(path: Path) -> str:
    from torch_autokern.search.inbox import as_reply

    try:
        return (as_reply(path) if path.is_dir() else path.read_bytes()).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path} cannot be read: {error}; give a reply's JSON, or a folder as in the inbox") from error


def _show(run: Run, as_json: bool) -> None:
    from torch_autokern.search.effect import effects
    from torch_autokern.search.gate import paused_by
    from torch_autokern.search.nodes import Stuck
    from torch_autokern.search.steer import waiting_words

    found, stuck, pause = effects(run), run.every(Stuck), paused_by(run)
    waiting = waiting_words(run)
    if as_json:
        shell.print_json({
            "said": [msgspec.to_builtins(one) for one in found], "stuck": [msgspec.to_builtins(one) for one in stuck],
            "paused": pause is not None, "waiting": waiting,
        })  # fmt: skip
        return
    for one in found:
        typer.echo(shell.plain(str(one)))
    for node in stuck:
        typer.echo(shell.plain(f"stuck: key {node.key} after round {node.round} ({node.why}): {node.question}"))
    if stuck:
        typer.echo(f"whole reports: {run.folder}/stuck/")
    if pause is not None:
        typer.echo(shell.plain(f"paused by {pause.author or 'somebody'} at {pause.time}"))
    if waiting:
        typer.echo(shell.plain(f"not heard yet: {', '.join(waiting)}"))
    if not (found or stuck or waiting):
        typer.echo("nothing was said to this run")
