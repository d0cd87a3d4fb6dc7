"""Writes docs/compatibility.md from the tests: ``python -m tests.calling.compatibility``.

A row is a test marked ``way(how, outcome, note)`` in this folder; `conftest.py` makes the test fail when the router saw
anything else than the declared outcome. Read from the sources, so nothing has to run to see whether the page is current.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "compatibility.md"
SECTIONS = {
    "test_eager.py": "Eager calls",
    "test_compiled.py": "Compiled and exported programs",
    "test_sharded.py": "Several processes",
}
OUTCOMES = {
    "served": "served",
    "partly served": "partly served",
    "stock": "stock, counted as a miss",
    "unseen": "stock, never reaches the router",
}

_HEAD = """# Compatibility

Every row is a test: it proves what the router saw (its counters), and that results are stock's, to the rounding that a
kernel's class allows where it was served and bit for bit elsewhere. "Served" supposes a kernel for each key that is asked
for. Written by `python -m tests.calling.compatibility`; a test fails when this page is not what the tests say.
"""
_FOOT = """
PyTorch's own samples (`OpInfo`) of every intercepted op and dtype run with the router on and nothing to serve (same dtype,
shape, strides and bits, gradients included) and with every call served by a kernel for any layout (class `stock` by the
judge's rule): `tests/calling/test_op_samples.py`. Random views (strides, offsets, expands, overlaps):
`tests/runtime/test_router_bitwise.py` and `test_views.py`. Other libraries' overrides are chained in every order of
installing and removing: `tests/runtime/test_chain_orders.py`.
"""


class Way(NamedTuple):
    """One row: how a call is made, what becomes of it, a remark, and the test that proves it."""

    how: str
    outcome: str
    note: str
    test: str


def ways(path: Path) -> Iterator[Way]:
    """The marked tests of a file, in its order."""
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in ("way", "pytest.mark.way"):
                how, outcome, note = (ast.literal_eval(argument) for argument in decorator.args)
                yield Way(how, OUTCOMES[outcome], note, node.name)


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, title in SECTIONS.items():
        rows = [f"| {way.how} | {way.outcome} | {way.note} | `{way.test}` |" for way in ways(HERE / name)]
        head = ["| way of calling | outcome | remark | test |", "|---|---|---|---|"]
        parts.append("\n".join([f"\n## {title}\n", f"In `tests/calling/{name}`.\n", *head, *rows, ""]))
    return "".join([*parts, _FOOT])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
