"""How every command talks: results on stdout, everything else on stderr, one line for a mistake, JSON on request."""

from __future__ import annotations

import contextlib
import getpass
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from torch_autokern.errors import AutokernError, InvalidInputError

EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of text.")]


def run(app: Callable[[], object]) -> None:
    """Run the command line. A mistake is one line on stderr and exit code 2, never a traceback; Ctrl-C is 130."""
    try:
        app()
    except AutokernError as error:
        say(f"autokern: {one_line(error)}")
        sys.exit(EXIT_MISTAKE)
    except KeyboardInterrupt:
        say("autokern: interrupted")
        sys.exit(EXIT_INTERRUPTED)


def one_line(error: Exception) -> str:
    """An error's words without line breaks."""
    return " ".join(str(error).split())


def plain(text: str) -> str:
    """A candidate's or compiler's words: data, without control characters that could paint the terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def results() -> Console:
    """Where results go."""
    return Console(highlight=False)


def messages() -> Console:
    """Where progress and remarks go, so that results can be piped."""
    return Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """One remark on stderr, plain text."""
    typer.echo(text, err=True)


def user_name() -> str:
    """Who sits here, or "" where the system does not know."""
    with contextlib.suppress(OSError, KeyError, ImportError):
        return getpass.getuser()
    return ""


def is_interactive() -> bool:
    """Whether a person can be asked: both ends are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def print_json(value: object) -> None:
    """One JSON value on stdout."""
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def writable_file(path: Path) -> Path:
    """The absolute path of a file that can be written, found out before the work that fills it.

    Raises:
        InvalidInputError: it is a folder, or its folder is missing or cannot be written.
    """
    path = path.expanduser().absolute()
    if path.is_dir():
        raise InvalidInputError(f"{path} is a folder; name a file")
    probe = path.with_name(path.name + ".partial")
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InvalidInputError(f"cannot write {path}: {error.strerror}; name a file in a writable folder") from error
    return path
