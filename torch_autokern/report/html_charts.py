"""Where things stand on a page's charts: plain numbers, so that the templates only write them down."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from torch_autokern.report.html_run import Attempt, Fate, KeyTold, RoundTold

# Of a column of the tree, so that a run of thousands of kernels still gives a page; what is left out is said.
MOST_DOTS = 40
_COLUMN, _ROW, _TOP, _LEFT = 190, 26, 44, 24
_PLOT_WIDTH, _PLOT_HEIGHT, _MARGIN, _RIGHT = 1000, 300, 56, 160


class Scale(msgspec.Struct, frozen=True):
    """A logarithmic scale over positive numbers; `ticks` are round numbers on it."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """From 0 to 100; values beyond the ends stand at the ends."""
        inside = min(max(value, self.low), self.high)
        return 100.0 * math.log(inside / self.low) / math.log(self.high / self.low)


def log_scale(values: Iterable[float], *, include: Sequence[float] = ()) -> Scale:
    """A scale that holds all values above 0, with a little room at both ends."""
    seen = [value for value in (*values, *include) if 0 < value < math.inf] or [1.0]
    low, high = min(seen) / 1.15, max(seen) * 1.15
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = tuple(step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high)
        if len(ticks) <= 7:
            break
    while len(ticks) > 7:
        ticks = ticks[::2]
    return Scale(low, high, ticks)


class Dot(msgspec.Struct, frozen=True):
    """A kernel on a chart."""

    x: float
    y: float
    fate: Fate
    node: str
    label: str
    title: str
    on_path: bool = False


class Edge(msgspec.Struct, frozen=True):
    """From a kernel to one that grew from it."""

    path: str
    on_path: bool


class Line(msgspec.Struct, frozen=True):
    """A labelled line across a chart."""

    at: float
    label: str
    kind: str


class TreeChart(msgspec.Struct, frozen=True):
    """Kernels by round, each joined to the one it grew from, or that it mends. `hidden` are not drawn."""

    width: int
    height: int
    columns: tuple[tuple[float, str], ...]
    edges: tuple[Edge, ...]
    dots: tuple[Dot, ...]
    hidden: int


class RoundsChart(msgspec.Struct, frozen=True):
    """Speed over rounds: every kernel that was timed, the best proved one as a line, and what it is measured by."""

    width: int
    height: int
    left: int
    right: int
    columns: tuple[tuple[float, str], ...]
    levels: tuple[Line, ...]
    marks: tuple[Line, ...]
    best: str
    dots: tuple[Dot, ...]


def tree_chart(key: KeyTold) -> TreeChart:
    """The tree of a key's kernels. The path to the best proved one is marked."""
    attempts = {told.round: _drawn([one for idea in told.ideas for one in idea.attempts]) for told in key.rounds}
    total = sum(len(idea.attempts) for told in key.rounds for idea in told.ideas)
    by_name = {one.node: one for mine in attempts.values() for one in mine}
    path = _ancestors(by_name, key.winners[0].node if key.winners else "")
    places = {
        one.node: (float(_LEFT + _COLUMN * column), float(_TOP + _ROW * row))
        for column, mine in enumerate(attempts.values())
        for row, one in enumerate(mine)
    }
    edges = []
    for one in by_name.values():
        source = one.repairs or next(iter(one.parents), "")
        if source in places:
            width = 16.0 + 7.4 * len(outcome_label(by_name[source]))
            edges.append(Edge(_curve(places[source], places[one.node], width), {source, one.node} <= path))
    dots = tuple(
        Dot(*places[one.node], one.fate, one.node, outcome_label(one), _title(one), one.node in path)
        for one in by_name.values()
    )
    columns = tuple((float(_LEFT + _COLUMN * place), f"round {number}") for place, number in enumerate(attempts))
    height = _TOP + _ROW * max((len(mine) for mine in attempts.values()), default=0)
    return TreeChart(_LEFT + _COLUMN * max(len(columns), 1), height, columns, tuple(edges), dots, total - len(by_name))


def _drawn(attempts: Sequence[Attempt]) -> Sequence[Attempt]:
    """All of a round, or the most telling ones: proved first, then by speed. A mended kernel stands below the one it mends."""
    kept = sorted(attempts, key=lambda one: (one.fate != "proved", -one.ratio, one.node))[:MOST_DOTS]
    first = {one.node: place for place, one in enumerate(attempts)}
    return sorted(kept, key=lambda one: (first.get(one.repairs, first[one.node]), first[one.node]))


def _ancestors(by_name: dict[str, Attempt], node: str) -> set[str]:
    path: set[str] = set()
    while node in by_name and node not in path:
        path.add(node)
        node = by_name[node].repairs or next(iter(by_name[node].parents), "")
    return path


def _curve(start: tuple[float, float], end: tuple[float, float], width: float) -> str:
    """From behind a label of that width in to the left of the next mark; within a column along its left side."""
    (x0, y0), (x1, y1) = start, end
    if x0 == x1:
        return f"M{x0 - 7:.0f} {y0:.0f} C{x0 - 20:.0f} {y0:.0f} {x1 - 20:.0f} {y1:.0f} {x1 - 7:.0f} {y1:.0f}"
    x0 = min(x0 + width, x1 - 40)
    middle = (x0 + x1) / 2
    return f"M{x0:.0f} {y0:.0f} C{middle:.0f} {y0:.0f} {middle:.0f} {y1:.0f} {x1 - 7:.0f} {y1:.0f}"


def outcome_label(one: Attempt) -> str:
    """An attempt's outcome in a word or two."""
    if one.fate == "proved":
        return f"{one.ratio:.2f}x"
    if one.fate == "screened":
        return f"{one.ratio:.2f}x, no verdict"
    if one.fate == "waiting":
        return "not tried"
    return one.reason.replace("_", " ")


def _title(one: Attempt) -> str:
    words = f"{one.node}: {outcome_label(one)}\n{one.words}"
    return words if len(words) <= 400 else f"{words[:400]}..."


def mended(told: RoundTold) -> dict[str, list[Attempt]]:
    """A round's mended kernels by the node that was mended first; "" for those whose first node is not in the journal."""
    attempts = {one.node: one for idea in told.ideas for one in idea.attempts}
    first = {node: "" if one.repairs else node for node, one in attempts.items()}
    found: dict[str, list[Attempt]] = {}
    for one in attempts.values():
        if one.repairs:
            first[one.node] = first.get(one.repairs, "")  # what is mended stands before what mends it
            found.setdefault(first[one.node], []).append(one)
    return found


def rounds_chart(key: KeyTold, goal: float = 0.0) -> RoundsChart | None:
    """Speed over a key's rounds, on a logarithmic scale; None where nothing was timed."""
    timed = [(told.round, one) for told in key.rounds for idea in told.ideas for one in idea.attempts if one.ratio > 0]
    if not timed:
        return None
    limit = 1.0 / key.stock_share if key.stock_share else 0.0
    scale = log_scale([one.ratio for _, one in timed], include=(1.0, limit, goal))
    inner_width, inner_height = _PLOT_WIDTH - _MARGIN - _RIGHT, _PLOT_HEIGHT - 60
    rounds = [told.round for told in key.rounds]

    def across(number: float) -> float:
        return _MARGIN + inner_width * (number - 0.5) / len(rounds)

    def up(ratio: float) -> float:
        return 20 + inner_height * (1.0 - scale.place(ratio) / 100.0)

    dots = []
    for number in rounds:
        mine = [one for place, one in timed if place == number]
        for place, one in enumerate(mine):
            aside = ((place + 1) / (len(mine) + 1) - 0.5) * 0.7
            dots.append(Dot(across(number + aside), up(one.ratio), one.fate, one.node, outcome_label(one), _title(one)))
    steps = [(across(told.round + 0.5), up(told.best_ratio)) for told in key.rounds if told.best_ratio > 0]
    width = inner_width / len(rounds)
    best = " ".join(f"{'L' if place else 'M'}{x - width:.1f} {y:.1f} L{x:.1f} {y:.1f}" for place, (x, y) in enumerate(steps))
    known = ((1.0, "stock", "stock"), (limit, "measured limit", "limit"), (goal, "goal", "goal"))
    marks = [(value, label if kind == "stock" else f"{label}, {value:.3g}x", kind) for value, label, kind in known if value]
    return RoundsChart(
        _PLOT_WIDTH, _PLOT_HEIGHT, _MARGIN, _PLOT_WIDTH - _RIGHT,
        tuple((across(number), f"round {number}") for number in rounds),
        tuple(Line(up(tick), f"{tick:g}x", "grid") for tick in scale.ticks),
        tuple(Line(up(value), label, kind) for value, label, kind in marks),
        best, tuple(dots),
    )  # fmt: skip
