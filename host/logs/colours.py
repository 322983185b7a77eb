"""Colours of texts at a terminal, where there is one that shows them."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from typing import TextIO


class Colour(enum.Enum):
    """A colour or weight; the value is its parameter of the escape sequence (ECMA-48, SGR)."""

    BOLD = 1
    DIM = 2
    RED = 31
    GREEN = 32
    YELLOW = 33
    CYAN = 36


def shows_colours(stream: TextIO | None, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a stream is a terminal that shows colours, and the user has not refused them.

    Source: https://no-color.org.
    """
    if stream is None or environ.get("NO_COLOR") or environ.get("TERM", "dumb") == "dumb":
        return False
    try:
        return stream.isatty()
    except ValueError:  # it is closed
        return False


def paint(text: str, colour: Colour, shown: bool = True) -> str:
    """Returns the text in a colour, or the text itself if colours are not shown."""
    return f"\x1b[{colour.value}m{text}\x1b[0m" if shown and text else text
