"""docs/compatibility.md is what the tests say."""

from __future__ import annotations

from compatibility import HERE, PAGE, SECTIONS, page, ways


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.calling.compatibility"


def test_every_marked_test_is_on_the_page_once() -> None:
    marked = [way for path in sorted(HERE.glob("test_*.py")) for way in ways(path)]
    assert {path.name for path in HERE.glob("test_*.py") if list(ways(path))} == set(SECTIONS)
    assert len({way.how for way in marked}) == len(marked) > 30
    assert all(page().count(f"`{way.test}`") == 1 for way in marked)
