"""Draws docs/explanation/performance.svg: a bar for the ratio to the peer of each measured rate.

python -m benchmarks.plot
"""

from __future__ import annotations

import math
import re
from html import escape

from benchmarks.page import PAGE, tables

PICTURE = PAGE.with_suffix(".svg")

_RATES = re.compile(r"requests/s|responses/s")
_RATIO = re.compile(r"\*\*([\d.]+)x\*\*")
_WIDTH, _LEFT, _RIGHT = (
    1040,
    510,
    60,
)  # widths of the picture, of the names, and of the figures at the right
_ROW, _TOP, _BAR = 22, 60, 14
_AHEAD, _BEHIND = "#2f7d5b", "#b5533c"
TITLE = "Rates of pbhost, as multiples of the other server's"


def ratios(text: str) -> dict[str, float]:
    """The name and the ratio of each measured rate in the tables of a page.

    In tables of rivals, the name begins with the rival, which stands in the heading.
    """
    found = {}
    for headings, *rows in tables(text):
        if "ratio" not in headings:
            continue
        place = headings.index("ratio")
        rival = headings[place - 1]
        for row in rows:
            ratio = _RATIO.fullmatch(row[place])
            if ratio and _RATES.search(headings[1] + row[0]):
                name = row[0].replace("`", "")
                found[name if rival == "peer" else f"{rival}: {name}"] = float(ratio[1])
    return found


def _text(x: float, y: float, anchor: str, words: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words, quote=False)}</text>'
    )


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    size = f'width="{width:.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{colour}"/>'


def chart(values: dict[str, float]) -> str:
    """Draws the SVG. Bars extend right or left from the line of equal rates, on a log2 scale."""
    low = min(-1, *(math.floor(math.log2(ratio)) for ratio in values.values()))
    high = max(1, *(math.ceil(math.log2(ratio)) for ratio in values.values()))
    height = _TOP + _ROW * len(values)

    def x(power: float) -> float:
        return _LEFT + (power - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    view = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
    parts = [
        f'<svg {view} font-family="sans-serif" font-size="13">',
        f"<title>{escape(TITLE, quote=False)}</title>",
        _bar(0, 0, _WIDTH, height, "#fff"),
        _text(10, 20, "start", TITLE),
    ]
    for power in range(low, high + 1):
        parts += [
            _bar(x(power), _TOP - 8, 1, height - _TOP, "#ccc" if power else "#222"),
            _text(x(power), _TOP - 12, "middle", f"{2.0**power:g}x"),
        ]
    for index, (name, ratio) in enumerate(values.items()):
        y, begin, end = _TOP + _ROW * index, x(0), x(math.log2(ratio))
        colour = _AHEAD if ratio >= 1 else _BEHIND
        parts += [
            _text(_LEFT - 10, y + 12, "end", name),
            _bar(min(begin, end), y, abs(end - begin), _BAR, colour),
            _text(max(begin, end) + 5, y + 12, "start", f"{ratio:.2f}x"),
        ]
    return "\n".join([*parts, "</svg>\n"])


def draw() -> None:
    """Writes the picture of the current page."""
    PICTURE.write_text(chart(ratios(PAGE.read_text())))


if __name__ == "__main__":
    draw()
