"""The pictures of README.md and docs/, in docs/pictures/.

`python -m tests.pictures` draws and takes them all again; screenshots need Chromium. `sources.txt`
has the hash of all files that a screenshot shows, so that tests find stale ones without a browser.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By

import pbhost
from tests.browser import WebPage, open_browser
from tests.conftest import DEADLINE, ROOT, RunningHost

FOLDER = ROOT / "docs" / "pictures"
DIAGRAMS = sorted(FOLDER.glob("*.txt"))
SOURCES = FOLDER / "sources.sha256"
_COMMON = ("common.css", "common.js")
_PAGES = ROOT / "host" / "frontends" / "http"

_CELL, _LINE = 8, 22  # width and height of a character of a diagram
_CORNERS = {"┌": ("┐", "└"), "╔": ("╗", "╚")}  # upper right and lower left, by upper left
_FILLS = {"┌": "#eef4fb", "╔": "#e9f6ec"}
_STROKES = {"┌": "#3b6ea5", "╔": "#2f7d5b"}
_WORDS = re.compile(r"[^\s┌┐└┘│─╔╗╚╝║═◄►▲▼]+(?: [^\s┌┐└┘│─╔╗╚╝║═◄►▲▼]+)*")
_MARKER = (
    '<marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8"'
    ' orient="auto-start-reverse"><path d="M0 1L10 5L0 9z" fill="#555"/></marker>'
)


def diagram(text: str) -> str:
    """Draws a text of boxes, arrows and words as SVG.

    A box has corners `┌┐└┘` or `╔╗╚╝`, and its first line is bold. An arrow is `◄───►` or, from
    top to bottom, `▲│▼`.
    """
    rows = text.splitlines()
    width, height = _CELL * (max(map(len, rows)) + 2), _LINE * (len(rows) + 1)
    view = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    parts = [
        f'<svg {view} font-family="sans-serif" font-size="14">',
        f"<defs>{_MARKER}</defs>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#fff"/>',
    ]
    titles = set()
    for top, left, bottom, right, corner in _boxes(rows):
        titles.add((top + 1, left))
        parts.append(
            f'<rect x="{_x(left)}" y="{_y(top)}" width="{_CELL * (right - left)}"'
            f' height="{_LINE * (bottom - top)}" rx="6" fill="{_FILLS[corner]}"'
            f' stroke="{_STROKES[corner]}"/>'
        )
    for x1, y1, x2, y2 in _arrows(rows):
        parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#555"'
            ' marker-start="url(#tip)" marker-end="url(#tip)"/>'
        )
    for row, line in enumerate(rows):
        for words in _WORDS.finditer(line):
            edge = max(line.rfind(side, 0, words.start()) for side in "│║")
            bold = ' font-weight="bold"' if (row, edge) in titles else ""
            middle = _x((words.start() + words.end() - 1) / 2)
            parts.append(
                f'<text x="{middle:g}" y="{_y(row) + 5}" text-anchor="middle"{bold}>'
                f"{escape(words[0], quote=False)}</text>"
            )
    return "\n".join([*parts, "</svg>\n"])


def _x(column: float) -> float:
    return _CELL * (column + 1)


def _y(row: float) -> float:
    return _LINE * (row + 1)


def _boxes(rows: list[str]) -> Iterator[tuple[int, int, int, int, str]]:
    """Top, left, bottom, right and upper left corner of each box."""
    for top, line in enumerate(rows):
        for left, corner in enumerate(line):
            if corner in _CORNERS:
                upper_right, lower_left = _CORNERS[corner]
                right = line.index(upper_right, left)
                below = (row for row in range(top, len(rows)) if rows[row][left:][:1] == lower_left)
                yield top, left, next(below), right, corner


def _arrows(rows: list[str]) -> Iterator[tuple[float, float, float, float]]:
    """The ends of each arrow."""
    for row, line in enumerate(rows):
        for found in re.finditer("◄─+►", line):
            yield _x(found.start()), _y(row), _x(found.end() - 1), _y(row)
        for found in re.finditer("▲", line):
            end = next(at for at in range(row, len(rows)) if rows[at][found.start()] == "▼")
            yield _x(found.start()), _y(row - 0.5), _x(found.start()), _y(end + 0.5)


def _dashboard(browser: webdriver.Chrome, host: RunningHost) -> None:
    """Shows the dashboard of a server that several clients ask for a minute."""
    page = WebPage(browser, host, "/dashboard")
    page.wait_for("#models tbody", "add_sub")
    browser.find_element(By.XPATH, "//th//button[contains(., 'Req/s')]").click()
    with _clients(host):
        threading.Event().wait(60)  # each plot gets a point every two seconds


def _api_page(browser: webdriver.Chrome, host: RunningHost) -> None:
    """Shows a model, and what it answers."""
    page = WebPage(browser, host, "/docs#add_sub")
    page.wait_for("body", "SUM")


@contextmanager
def _clients(host: RunningHost) -> Iterator[None]:
    """Sends requests to two examples until the end of the block."""
    over = threading.Event()
    row = [[1.0, 2.0, 3.0, 4.0]]

    def ask(pause: float, send: Callable[[pbhost.Client], object]) -> None:
        with pbhost.Client(host.url) as client:
            while not over.wait(pause):
                send(client)

    loads: list[tuple[float, Callable[[pbhost.Client], object]]] = [
        (0.005, lambda client: client.infer("add_sub", INPUT0=row, INPUT1=row)),
        (0.01, lambda client: client.infer("add_sub", INPUT0=row, INPUT1=row)),
        (0.05, lambda client: list(client.stream("generate", PROMPT=["The rabbit-hole"]))),
    ]
    threads = [threading.Thread(target=ask, args=load) for load in loads]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(DEADLINE)


SCREENSHOTS: dict[str, tuple[Callable[[webdriver.Chrome, RunningHost], None], str]] = {
    "dashboard": (_dashboard, "dashboard"),
    "api-page": (_api_page, "api_page"),
}
"""By name, what prepares the page, and the folder of its sources."""


def sources(name: str) -> str:
    """The hash of the style, the script and the markup that a screenshot shows."""
    folder = _PAGES / SCREENSHOTS[name][1]
    files = [*(_PAGES / name for name in _COMMON), *sorted(folder.glob("page.*s"))]
    files.append(folder / "page.html")
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def taken() -> dict[str, str]:
    """The hash, by name, of the sources when each screenshot was taken."""
    pairs = (line.split() for line in SOURCES.read_text().splitlines())
    return {name: digest for digest, name in pairs}


def draw() -> None:
    """Draws the diagrams."""
    for path in DIAGRAMS:
        path.with_suffix(".svg").write_text(diagram(path.read_text()))


def take() -> None:
    """Takes the screenshots, of a server with the examples."""
    ports = [f"--{kind}-port=0" for kind in ("grpc", "http", "metrics")]
    host = RunningHost(str(ROOT / "model_repository"), "--id=examples", *ports).wait_started()
    try:
        for name, (prepare, _) in SCREENSHOTS.items():
            with (
                tempfile.TemporaryDirectory() as profile,
                open_browser(Path(profile)) as browser,
            ):
                prepare(browser, host)
                browser.save_screenshot(str(FOLDER / f"{name}.png"))
    finally:
        host.stop()
    SOURCES.write_text("".join(f"{sources(name)}  {name}\n" for name in SCREENSHOTS))


if __name__ == "__main__":
    draw()
    take()
