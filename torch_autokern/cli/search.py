"""`autokern search`: rounds of ideas, kernels and verdicts for a key or a workload, by models, people, templates and the
bank."""

from __future__ import annotations

import contextlib
import enum
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from torch_autokern.cli import shell
from torch_autokern.cli.accuracy import chosen
from torch_autokern.cli.progress import progress_bar
from torch_autokern.errors import InvalidInputError

if TYPE_CHECKING:
    from torch_autokern.search import engine as engines
    from torch_autokern.search.limits import Changes
    from torch_autokern.search.manifest import Ask, Goal, ModelShare, Price
    from torch_autokern.search.run import Run


class Stuck(str, enum.Enum):
    """What a stuck key does (`manifest.StuckPolicy`)."""

    ASK = "ask"
    CONTINUE = "continue"
    STOP = "stop"


class Engine(str, enum.Enum):
    """Where candidates are built and judged."""

    LOCAL = "local"
    RAY = "ray"


PROPOSERS = ("llm", "templates", "inbox", "bank")


def search(
    problem: Annotated[
        str | None, typer.Argument(help="A key.json, a workload, or SCHEME:NAME. Without: go on with the run in --out.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The run's folder; one that holds a run is gone on with.")] = Path("autokern-run"),
    rounds: Annotated[int | None, typer.Option(help="Rounds for each key (default 5).")] = None,
    budget: Annotated[float | None, typer.Option(metavar="MINUTES", help="Time for the whole run, all its lives.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Most tokens, in and out together.")] = None,
    money: Annotated[float | None, typer.Option(help="Most money, by the prices of --prices.")] = None,
    candidates: Annotated[int | None, typer.Option(help="Most candidates that are built.")] = None,
    goal: Annotated[
        str | None, typer.Option(metavar="ratio=2|limit=0.9", help="A key is done at this speed-up, or share of the limit.")
    ] = None,
    proposers: Annotated[str, typer.Option(help="Who proposes: llm, templates, inbox, bank.")] = "templates,bank",
    model: Annotated[
        list[str] | None, typer.Option(metavar="NAME[:SHARE]", help="A model of the proposer llm. Repeat for more.")
    ] = None,
    base_url: Annotated[str, typer.Option(help="The models' server (default: OpenAI's).")] = "",
    key_env: Annotated[str, typer.Option(metavar="VARIABLE", help="Where the server's key is.")] = "OPENAI_API_KEY",
    prices: Annotated[
        Path | None, typer.Option(help='JSON: {"MODEL": {"input_per_million": 1.0, "output_per_million": 4.0}}.')
    ] = None,
    ideas: Annotated[int, typer.Option(help="Ideas a round.")] = 3,
    kernels: Annotated[int, typer.Option(help="Kernels for each idea.")] = 2,
    repairs: Annotated[int, typer.Option(help="How often a kernel that fails is mended.")] = 1,
    reply_tokens: Annotated[int, typer.Option(help="Most tokens of one reply.")] = 16000,
    wait_inbox: Annotated[
        float, typer.Option(metavar="MINUTES", help="How long a round waits for a reply in the inbox.")
    ] = 0.0,
    stuck: Annotated[Stuck | None, typer.Option(help="What a key does that gets no further (default: continue).")] = None,
    stuck_rounds: Annotated[int, typer.Option(help="Rounds without a gain that make a key stuck.")] = 3,
    wait_answer: Annotated[float, typer.Option(metavar="MINUTES", help="How long --stuck ask waits (0: without end).")] = 0.0,
    engine: Annotated[
        Engine, typer.Option(help="Where builds and verdicts run: this machine, or a Ray cluster.")
    ] = Engine.LOCAL,
    address: Annotated[str, typer.Option(help="The Ray cluster: auto, or HOST:PORT of its head.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads to tune for (default: as recorded, or as torch's).")] = None,
    accuracy: Annotated[str, typer.Option("--class", help="The class to prove: stock, exact or tolerance.")] = "stock",
    atol: Annotated[float, typer.Option(help="Absolute bound for --class tolerance.")] = 0.0,
    rtol: Annotated[float, typer.Option(help="Relative bound for --class tolerance.")] = 0.0,
    allow_weak_box: Annotated[
        bool, typer.Option("--allow-weak-box", help="Run untrusted kernels although this system cannot box them well.")
    ] = False,
    as_json: shell.AsJson = False,
) -> None:
    """Search kernels in rounds: ideas, several kernels from each, build, check, time, learn, again.

    Stop it at any time; the same command goes on where it was, and loses at most the candidate in flight.
    """
    from torch_autokern.search import run as runs
    from torch_autokern.search.manifest import Ask, Limits, check

    if budget is not None and not (math.isfinite(budget) and budget > 0):
        raise InvalidInputError(f"--budget {budget} is no time; give minutes above 0")
    limits = Limits(None if budget is None else budget * 60, tokens, money, candidates)
    changes = _changes(rounds, goal, limits, stuck)
    with runs.alone(out):
        if runs.is_run(out):
            run = _resumed(out, problem, changes, key_env)
        else:
            ask = Ask(
                5 if rounds is None else rounds, ideas, kernels, repairs, read_goal(goal), limits, _proposers(proposers),
                _models(model or []), _address(base_url), _prices(prices), reply_tokens=reply_tokens,
                inbox_seconds=wait_inbox * 60, stuck="continue" if stuck is None else stuck.value, stuck_rounds=stuck_rounds,
                answer_seconds=wait_answer * 60,
            )  # fmt: skip
            check(ask)
            run = _created(out, problem, ask, threads, (accuracy, atol, rtol), key_env)
        _play(run, out, base_url, key_env, _engine(engine, address, allow_weak_box), allow_weak_box, as_json)


def _engine(kind: Engine, address: str, allow_weak_box: bool) -> engines.Engine | None:
    if kind is Engine.LOCAL:
        return None
    from torch_autokern.search.ray_engine import RayEngine

    return RayEngine(address, allow_weak_box=allow_weak_box)


def _play(
    run: Run, out: Path, base_url: str, key_env: str, engine: engines.Engine | None, allow_weak_box: bool, as_json: bool
) -> None:
    from torch_autokern import config
    from torch_autokern.search import session
    from torch_autokern.search.outcome import WarmInterrupted
    from torch_autokern.store.folders import require_folder
    from torch_autokern.store.store import open_store

    store = open_store(choice=require_folder())
    with progress_bar(quiet=as_json) as show:
        try:
            report = session.go(
                run,
                store,
                key=config.api_key(key_env),
                base_url=base_url or None,
                allow_weak_box=allow_weak_box,
                engine=engine,
                on_event=show,
            )
        except WarmInterrupted as stopped:
            shell.say(f"autokern: interrupted ({stopped.report}); go on with: autokern search --out {out}")
            raise typer.Exit(shell.EXIT_INTERRUPTED) from None
    if as_json:
        shell.print_json(msgspec.to_builtins(report))
        return
    for result in report.search.keys:
        typer.echo(shell.plain(str(result)))
    for word in report.said:
        typer.echo(shell.plain(str(word)))
    typer.echo(shell.plain(str(report)))
    typer.echo(f"run: {out}; replay it with: autokern replay {out}")


def _created(
    out: Path, problem: str | None, ask: Ask, threads: int | None, accuracy: tuple[str, float, float], key_env: str
) -> Run:  # fmt: skip
    from torch_autokern import config
    from torch_autokern.search import loop
    from torch_autokern.search import problem as problems
    from torch_autokern.search import run as runs
    from torch_autokern.search.session import redactor

    if problem is None:
        raise InvalidInputError(f"{out} holds no run to go on with; name a key or a workload")
    proved = chosen(*accuracy, "--class")
    workload = problems.resolve(problem, threads)
    loop.check_known(workload)
    manifest = loop.make_manifest(ask, workload, proved, loop.targets_of(workload))
    return runs.create(out, manifest, redactor(config.api_key(key_env)))


def _resumed(out: Path, problem: str | None, changes: Changes, key_env: str) -> Run:
    from torch_autokern import config
    from torch_autokern.search import limits
    from torch_autokern.search import problem as problems
    from torch_autokern.search import run as runs
    from torch_autokern.search.manifest import check
    from torch_autokern.search.session import redactor

    run = runs.open_run(out, redactor=redactor(config.api_key(key_env)))
    if problem is not None:
        asked = {entry.key.digest for entry in problems.resolve(problem).entries}
        if asked != {entry.key.digest for entry in run.manifest.workload.entries}:
            raise InvalidInputError(f"{out} holds a run about other keys than {problem}; name another folder with --out")
    check(limits.changed(limits.effective(run), changes))
    limits.note(run, changes, shell.user_name())
    return run


def _changes(rounds: int | None, goal: str | None, limits: msgspec.Struct, stuck: Stuck | None) -> Changes:
    from torch_autokern.search.limits import Changes
    from torch_autokern.search.manifest import Limits

    new = limits if isinstance(limits, Limits) and limits != Limits() else None
    return Changes(rounds, None if goal is None else read_goal(goal), new, None if stuck is None else stuck.value)


def read_goal(text: str | None) -> Goal:
    """What ``--goal`` says: "ratio=2" or "limit=0.9"; nothing is no goal.

    Raises:
        InvalidInputError: neither of these.
    """
    from torch_autokern.search.manifest import Goal

    if text is None:
        return Goal()
    name, _, value = text.partition("=")
    with contextlib.suppress(ValueError):
        number = float(value)
        if name == "ratio" and number > 1 and math.isfinite(number):
            return Goal(ratio=number)
        if name == "limit" and 0 < number <= 1:
            return Goal(limit=number)
    raise InvalidInputError(f"--goal {text!r} is none; give ratio=NUMBER above 1, or limit=SHARE of at most 1")


def _proposers(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    strange = [name for name in names if name not in PROPOSERS]
    if strange or not names:
        raise InvalidInputError(f"--proposers {text!r}: {', '.join(strange) or 'nobody'}; known: {', '.join(PROPOSERS)}")
    return names


def _models(words: list[str]) -> tuple[ModelShare, ...]:
    from torch_autokern.search.manifest import ModelShare

    found: dict[str, ModelShare] = {}
    for word in words:
        # A name may hold colons itself ("qwen3:8b"): only a number after the last one is a share.
        name, colon, share = word.rpartition(":")
        try:
            made = ModelShare(name, float(share)) if colon and name else ModelShare(word)
        except ValueError:
            made = ModelShare(word)
        if not made.name or not 0 < made.share < math.inf:
            raise InvalidInputError(f"--model {word!r}: expected NAME or NAME:SHARE with a share above 0")
        found[made.name] = made
    return tuple(found.values())


def _address(url: str) -> str:
    from torch_autokern.search.redact import without_password

    if url and not url.startswith(("http://", "https://")):
        raise InvalidInputError(f"--base-url {url!r} is no address; expected http:// or https://")
    try:
        return without_password(url) if url else ""
    except ValueError as error:
        raise InvalidInputError(f"--base-url is no address: {error}") from error


def _prices(path: Path | None) -> dict[str, Price]:
    from torch_autokern.search.manifest import Price

    if path is None:
        return {}
    try:
        prices = msgspec.json.decode(path.read_bytes(), type=dict[str, Price])
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise InvalidInputError(f"--prices {path}: {error}") from error
    if any(not 0 <= value < math.inf for one in prices.values() for value in (one.input_per_million, one.output_per_million)):
        raise InvalidInputError(f"--prices {path}: a price is negative or not finite")
    return prices
