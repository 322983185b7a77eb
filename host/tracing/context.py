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
class RemoteSpan:
    """The span outside of the server that a request is part of; `state` is its `tracestate`."""

    trace: int
    span: int
    state: str = ""


def parse_trace_context(header: Header) -> RemoteSpan | None:
    """What the headers `traceparent` and `tracestate` say; None if they say nothing valid."""
    text = header("traceparent")
    found = None if text is None else _TRACEPARENT.fullmatch(text.strip())
    if found is None:
        return None
    version, trace, span = found[1], int(found[2], 16), int(found[3], 16)
    if not trace or not span or version == "ff" or (version == "00" and found[5]):
        return None
    return RemoteSpan(trace, span, header("tracestate") or "")


@dataclass(frozen=True, slots=True)
class SpanIds:
    """The ids of the spans of one request in one model, in OpenTelemetry's sense.

    `parent` is what is above all of them, 0 for nothing; `root` is the request's own span at the
    door, 0 for a request of a model; `state` is the `tracestate` that came from outside.
    """

    trace_id: int
    parent: int
    root: int
    model: int
    compute: int
    state: str = ""

    @classmethod
    def for_client_request(cls, remote: RemoteSpan | None) -> SpanIds:
        """Of a request of a client."""
        if remote is None:
            return cls(_random_id(128), 0, _random_id(64), _random_id(64), _random_id(64))
        new_ids = _random_id(64), _random_id(64), _random_id(64)
        return cls(remote.trace, remote.span, *new_ids, state=remote.state)

    def for_child_request(self, parent: int) -> SpanIds:
        """Of a request that is made on behalf of this one."""
        return SpanIds(self.trace_id, parent, 0, _random_id(64), _random_id(64), self.state)

    def trace_headers(self, span: int) -> str:
        """The W3C headers that make what follows a child of one of the spans, as JSON."""
        headers = {"traceparent": f"00-{self.trace_id:032x}-{span:016x}-01"}
        if self.state:
            headers["tracestate"] = self.state
        return json.dumps(headers, separators=(",", ":"))


def _random_id(bits: int) -> int:
    return random.getrandbits(bits) or 1
