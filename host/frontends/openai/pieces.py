"""Cuts a streamed text: at stop sequences, at ends of JSON objects, between characters of UTF-8."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence


class StopSearch:
    """Searches a text, which comes in pieces, for the first of several stop sequences.

    It holds back the longest end of the text that may begin a stop sequence.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self._longest = max(map(len, stops), default=0)
        self.found = False

    def feed(self, piece: str) -> str:
        """Returns the text that is certain by now; nothing after a stop sequence."""
        if self.found or not self._stops:
            return "" if self.found else piece
        text = self._held + piece
        ends = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.found = True
            self._held = ""
            return text[: min(ends)]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Returns the text that was held back; the text is complete."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Returns the length of the longest end of the text that begins a stop sequence."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


def utf8_decoder() -> codecs.IncrementalDecoder:
    """Returns a decoder that holds half characters back; invalid bytes become U+FFFD."""
    return codecs.getincrementaldecoder("utf-8")("replace")


class JsonObjectEnd:
    """Finds the end of a JSON object in the pieces of a text."""

    _outside = re.compile(r'["{}]')
    _inside = re.compile(r'["\\]')

    def __init__(self) -> None:
        self._skip = 0  # characters of the next piece that are escaped
        self._depth = 0
        self._in_string = False

    def find(self, text: str, start: int = 0) -> int:
        """Returns the place after the object in the next piece, read from `start`.

        Returns 0 if the object is not complete.
        """
        at = start + self._skip
        while at < len(text):
            found = (self._inside if self._in_string else self._outside).search(text, at)
            if found is None:
                at = len(text)
                break
            at = found.end()
            match found[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    at += 1  # the next character is escaped
                case "{":
                    self._depth += 1
                case "}":
                    self._depth -= 1
                    if not self._depth:
                        return at
        self._skip = max(at - len(text), 0)
        return 0
