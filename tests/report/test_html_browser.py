"""Pages in a real browser: headless Chromium, installed by the test where it is missing and the system lets it."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import zlib
from collections import Counter
from pathlib import Path

import pytest
from html_samples import EXAMPLE, read_page, told_run
from test_html import HOSTILE, RESULTS, told

from torch_autokern.report.html import page
from torch_autokern.report.measurement import load_measurement

pytestmark = pytest.mark.long
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Without a network apt gives up at once instead of trying each mirror again.
APT = ("-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=15", "-o", "Acquire::https::Timeout=15")
WIDTH, HEIGHT = 1100, 1400


def _found() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser() -> str:
    """The browser's command; a skip with the reason where there is none and none can be installed."""
    if _found() is None:
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            pytest.skip("no Chromium, and only root can install one with apt-get")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        said = ""
        for words in (("update",), ("install", "-y", "--no-install-recommends", "chromium")):
            try:
                done = subprocess.run(
                    ["apt-get", *APT, *words], env=environment, capture_output=True, text=True, timeout=240, check=False
                )
            except subprocess.TimeoutExpired:
                pytest.skip(f"no Chromium: apt-get {words[0]} took longer than four minutes")
            said = (done.stderr or done.stdout).strip()
        if _found() is None:
            pytest.skip(f"no Chromium can be installed here: {said[-300:]}")
    command = _found()
    assert command is not None
    probe = _run(command, "--dump-dom", "data:text/html,<p>it starts</p>")
    if "it starts" not in probe:
        pytest.skip(f"{command} does not start here: {probe[-300:]}")
    return command


def _run(command: str, *words: str) -> str:
    """Start the browser once, with a home of its own that goes away."""
    with_home = ["timeout", "-k", "5", "90", command, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                 "--disable-dev-shm-usage", "--no-first-run", "--incognito"]  # fmt: skip
    done = subprocess.run([*with_home, *words], capture_output=True, text=True, check=False, timeout=120)
    return done.stdout if done.stdout or done.returncode == 0 else done.stderr


def _dom(browser: str, path: Path) -> str:
    return _run(browser, "--dump-dom", path.as_uri())


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _pixels(browser: str, path: Path, *words: str, width: int = WIDTH, height: int = HEIGHT) -> list[bytes]:
    """A screenshot's rows of pixels, three or four bytes each, a filter's number before them (PNG, 8 bits, not interlaced)."""
    image = path.with_suffix(".png")
    _run(browser, *words, f"--window-size={width},{height}", f"--screenshot={image}", path.as_uri())
    data = image.read_bytes()
    wide, high, depth, colour = struct.unpack(">IIBB", data[16:26])
    assert (wide, high, depth) == (width, height, 8) and colour in (2, 6)
    packed, place = b"", 8
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        packed += data[place + 8 : place + 8 + length] if data[place + 4 : place + 8] == b"IDAT" else b""
        place += 12 + length
    raw, size = zlib.decompress(packed), wide * (3 if colour == 2 else 4)
    return [raw[row * (size + 1) : (row + 1) * (size + 1)] for row in range(high)]


def _unfiltered(rows: list[bytes], width: int = 520) -> list[bytes]:
    """The rows as they are painted: PNG's five filters taken back (PNG specification, 9.2)."""
    found: list[bytes] = []
    before = bytes(len(rows[0]) - 1)
    step = len(before) // width
    for row in rows:
        kind, line = row[0], bytearray(row[1:])
        for place in range(len(line) if kind else 0):
            left = line[place - step] if place >= step else 0
            up, corner = before[place], before[place - step] if place >= step else 0
            near = min((left, up, corner), key=lambda value: abs(left + up - corner - value))
            line[place] = (line[place] + (0, left, up, (left + up) // 2, near)[kind]) & 255
        before = bytes(line)
        found.append(before)
    return found


def _elements(text: str) -> Counter[str]:
    # The browser adds the tbody that HTML implies; ours are written out.
    return Counter(tag for tag, _ in read_page(text).tags)


def test_browser_reads_the_page_as_it_was_written(browser: str, tmp_path: Path) -> None:
    written = page(told(EXAMPLE))
    dom = _dom(browser, _write(tmp_path / "run.html", written))
    assert _elements(dom) == _elements(written), "the browser had to mend the page"
    assert set(read_page(dom).ids) == set(read_page(written).ids)


def test_hostile_words_run_nothing_in_a_browser(browser: str, tmp_path: Path) -> None:
    told_run(tmp_path / "run", HOSTILE)
    written = page(told(tmp_path / "run"))
    dom = _dom(browser, _write(tmp_path / "hostile.html", written))
    title = re.search("<title>(.*?)</title>", dom)
    assert title is not None and title[1] == "Search run"
    assert _elements(dom) == _elements(written) and "script" not in _elements(dom)


def test_pages_policy_stops_a_script_that_escaping_would_have_missed(browser: str, tmp_path: Path) -> None:
    written = page(told(EXAMPLE))
    attack = "<script>document.title='owned'</script>"
    with_policy = written.replace("</main>", f"{attack}</main>")
    without = re.sub("<meta http-equiv[^>]*>", "", with_policy)
    titles = []
    for number, text in enumerate((with_policy, without)):
        found = re.search("<title>(.*?)</title>", _dom(browser, _write(tmp_path / f"{number}.html", text)))
        titles.append(found[1] if found else "")
    assert titles == ["Search run", "owned"], "the second shows that the attack would have worked"


def test_pages_are_painted_light_and_dark(browser: str, tmp_path: Path) -> None:
    pages = {"run": page(told(EXAMPLE)), "headline": page(load_measurement(RESULTS / "headline.json"), "headline")}
    for name, text in pages.items():
        path = _write(tmp_path / f"{name}.html", text)
        light = _pixels(browser, path)
        dark = _pixels(browser, path, "--blink-settings=preferredColorScheme=0")
        assert light != dark, "the page follows the person's choice of light or dark"
        painted = sum(len(set(row[1:])) > 8 for row in light)
        assert painted > HEIGHT // 4, "words and charts stand on the page, not one colour"


def test_wide_tables_stay_inside_a_narrow_window(browser: str, tmp_path: Path) -> None:
    """Tables and charts scroll in boxes of their own: the page's right margin stays empty, and would not without the boxes."""
    text = page(told(EXAMPLE))
    unboxed = text.replace(".scroll { overflow-x: auto; }", "")
    assert unboxed != text
    empty = []
    for name, body in (("boxed", text), ("unboxed", unboxed)):
        # Headless windows are at least 500 wide; the first table stands in the upper 750.
        rows = _pixels(browser, _write(tmp_path / f"{name}.html", body), width=520, height=750)
        margins = {row[-len(row) // 52 :] for row in _unfiltered(rows)}  # ten of 520 pixels
        empty.append(len(margins) == 1)
    assert empty == [True, False]
