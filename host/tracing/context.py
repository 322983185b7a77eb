"""W3C trace context: what comes with a request from outside, and what is handed on."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

Header = Callable[[str], str | None]
"""The value of a header (or of metadata) that a client sent, by its lowercase name."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class Propagated:
    """The span outside of the server that a request is part of; `state` is its `tracestate`."""

    trace: int
    span: int
    state: str = ""


def extract(header: Header) -> Propagated | None:
    """What the headers `traceparent` and `tracestate` say; None if they say nothing valid."""
    text = header("traceparent")
    found = None if text is None else _TRACEPARENT.fullmatch(text.strip())
    if found is None:
        return None
    version, trace, span = found[1], int(found[2], 16), int(found[3], 16)
    if not trace or not span or version == "ff" or (version == "00" and found[5]):
        return None
    return Propagated(trace, span, header("tracestate") or "")


@dataclass(frozen=True, slots=True)
class Spans:
    """The ids of the spans of one request in one model, in OpenTelemetry's sense.

    `parent` is what is above all of them, 0 for nothing; `root` is the request's own span at the
    door, 0 for a request of a model; `state` is the `tracestate` that came from outside.
    """

    trace: int
    parent: int
    root: int
    model: int
    compute: int
    state: str = ""

    @classmethod
    def at_door(cls, outside: Propagated | None) -> Spans:
        """Of a request of a client."""
        if outside is None:
            return cls(_new(128), 0, _new(64), _new(64), _new(64))
        ours = _new(64), _new(64), _new(64)
        return cls(outside.trace, outside.span, *ours, state=outside.state)

    def below(self, parent: int) -> Spans:
        """Of a request that is made on behalf of this one."""
        return Spans(self.trace, parent, 0, _new(64), _new(64), self.state)

    def context(self, span: int) -> str:
        """The W3C headers that make what follows a child of one of the spans, as JSON."""
        headers = {"traceparent": f"00-{self.trace:032x}-{span:016x}-01"}
        if self.state:
            headers["tracestate"] = self.state
        return json.dumps(headers, separators=(",", ":"))


def _new(bits: int) -> int:
    return random.getrandbits(bits) or 1
