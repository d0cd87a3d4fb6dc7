"""Pages: one self-contained HTML file from a run, a store or a measurement, with no script and nothing to fetch.

What a page shows was mostly written by others (models, kernels, compilers, servers). So everything is escaped by the template
engine, characters that would reorder or hide text are made visible, and the page's own policy forbids scripts, fetches and
forms: if an escape were ever forgotten, a browser would still run nothing.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from torch_autokern.errors import InvalidInputError
from torch_autokern.report.html_charts import log_scale, mended, outcome_label, rounds_chart, tree_chart
from torch_autokern.report.html_run import RunStory, tell_run
from torch_autokern.report.html_store import StoreStory, is_store, tell_store
from torch_autokern.report.measurement import Measurement, geometric_mean, load_measurement
from torch_autokern.report.tables import milliseconds
from torch_autokern.search.run import is_run, open_run

Story = RunStory | StoreStory | Measurement
# Cc: controls. Cf: among others what turns the direction of text round, so that a source reads other than it compiles.
# Cs: halves of characters, which no file can hold.
_VISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn"}


def tell(what: Path) -> Story:
    """Read a run's folder, a store's folder, or a measurement's file.

    Raises:
        InvalidInputError: it is none of them.
        RunError: a run's folder is not whole.
    """
    if what.is_dir():
        if is_run(what):
            return tell_run(open_run(what, replaying=True))
        if is_store(what):
            return tell_store(what)
        raise InvalidInputError(
            f"{what} holds neither a run (manifest.json) nor a store (v1); name a folder of autokern search --out, or what "
            "autokern cache path prints"
        )
    return load_measurement(what)


def page(story: Story, name: str = "") -> str:
    """A story's page: the same text whenever it is made. `name` is a measurement's title.

    Raises:
        InvalidInputError: a measurement without a row, or with a time or ratio of 0 or less.
    """
    if isinstance(story, RunStory):
        return _environment().get_template("run.html.j2").render(story=story)
    if isinstance(story, StoreStory):
        return _environment().get_template("store.html.j2").render(story=story)
    if not story.rows:
        raise InvalidInputError("the measurement has no row: there is nothing to draw")
    for row in story.rows:
        if min(row.stock_ms, row.autokern_ms, row.ratio, row.ratio_low) <= 0:
            raise InvalidInputError(f"case {row.case!r} has a time or a ratio that is not above 0: it was not measured")
    return _environment().get_template("measurement.html.j2").render(story=story, name=name)


def visible(value: object) -> object:
    """Text whose invisible characters are written out; anything else as it is."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return "".join(_shown(letter) for letter in value)


def _shown(letter: str) -> str:
    if letter in "\n\t" or unicodedata.category(letter) not in _VISIBLE:
        return letter
    return f"<U+{ord(letter):04X}>"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("torch_autokern.report", "pages"),
        autoescape=True,
        finalize=visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        us=microseconds, ms=milliseconds, seconds=seconds, ratio=lambda value: f"{value:.2f}x", percent=percent,
        count=lambda value: f"{value:,}", error=lambda value: f"{value:.2e}", spaced=lambda text: str(text).replace("_", " "),
    )  # fmt: skip
    environment.globals.update(
        rounds_chart=rounds_chart, tree_chart=tree_chart, log_scale=log_scale, outcome_label=outcome_label,
        geometric_mean=geometric_mean, mended=mended,
    )  # fmt: skip
    return environment


def microseconds(value: float) -> str:
    """A time given in us, in the unit that reads best."""
    if value >= 1e6:
        return f"{value / 1e6:.3g} s"
    return f"{value / 1e3:.3g} ms" if value >= 1e3 else f"{value:.3g} us"


def seconds(value: float) -> str:
    """A time given in seconds, in the unit that reads best."""
    if value >= 5400:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 90 else f"{value:.3g} s"


def percent(value: float) -> str:
    """A share, with a decimal below ten percent."""
    return f"{value:.0%}" if value >= 0.0995 else f"{value:.1%}"
