"""`autokern report`: a run, a store or a measurement as one page that a browser opens without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from torch_autokern.cli import shell
from torch_autokern.errors import InvalidInputError


def report(
    what: Annotated[
        Path | None, typer.Argument(metavar="RUN|STORE|FILE", help="A run, a store or a measurement; by default your store.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page.")] = Path("report.html"),
    as_json: Annotated[bool, typer.Option("--json", help="Print what the page shows as one JSON value instead.")] = False,
) -> None:
    """Write a page about a run: ideas with outcomes, speed over rounds, share of the limit, accuracy beside stock, where time
    and tokens went, what people said and what came of it, what was refused, and each winner's source and evidence.

    Only the folder is read: a run that is under way, or on another machine's disk, will do.
    """
    from torch_autokern.report.html import page, tell
    from torch_autokern.store.folders import require_folder

    if what is None:
        what = require_folder(to_write=False).path
        if what is None:
            raise InvalidInputError("no store can be read here; name a run, a store or a measurement")
    if not as_json:
        out = shell.writable_file(out)
    story = tell(what)
    if as_json:
        shell.print_json(msgspec.to_builtins(story, str_keys=True))
        return
    text = page(story, what.stem)
    temporary = out.with_name(out.name + ".partial")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InvalidInputError(f"cannot write {out}: {error.strerror}; name a file in a writable folder") from error
    typer.echo(f"{out} ({len(text) / 1024:.0f} KiB): open it in a browser; it needs no network")
