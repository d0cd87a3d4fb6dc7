"""`autokern`: the commands put together. Nothing heavy is imported until a command runs."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

from torch_autokern import __version__

try:
    import typer

    from torch_autokern.cli import (
        cache,
        demo,
        doctor,
        explain,
        judge,
        pack,
        record,
        replay,
        report,
        review,
        search,
        shell,
        stats,
        steer,
        verify,
        warm,
    )
except (ImportError, OSError, RuntimeError) as error:  # a broken install: one line that says which part, and no traceback
    from torch_autokern.stock_only import INSTALL_COMMAND

    sys.exit(f"autokern: {' '.join(str(error).split())}; every call is stock; install it again: {INSTALL_COMMAND}")

app = typer.Typer(
    name="autokern",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


_HELP = "Verified kernels for PyTorch: record what a model asks for, warm the store, see what is served."


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


_Version = Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")]


@app.callback(help=_HELP)
def _root(version: _Version = False) -> None:
    """Options of the command itself; each sub-command has its own file."""


app.command("record", context_settings=record.CONTEXT)(record.record)
app.command("warm")(warm.warm)
app.command("search")(search.search)
app.command("steer")(steer.steer)
app.command("review")(review.review)
app.command("replay")(replay.replay)
app.command("report")(report.report)
app.command("judge")(judge.judge)
app.command("verify")(verify.verify)
app.command("bench")(verify.bench)
app.command("explain")(explain.explain)
app.command("stats")(stats.stats)
app.add_typer(cache.app, name="cache")
app.add_typer(pack.app, name="pack")
app.command("doctor")(doctor.doctor)
app.command("demo")(demo.demo)


def main() -> None:
    """Entry point of the command."""
    # `kill` lets every `with` block end: children are stopped and temporary folders removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    shell.run(app)


if __name__ == "__main__":
    main()
