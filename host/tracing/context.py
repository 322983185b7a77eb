"""W3C trace context: reads it from request headers, and writes it for child requests."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

Header = Callable[[str], str | None]
"""Returns the value of a request header or metadata key, by its lowercase name."""

TRACE_HEADERS = ("traceparent", "tracestate")
"""The headers that `parse_trace_context` reads."""

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class RemoteSpan:
    """The span of the client that a request belongs to; `state` is its `tracestate` header."""

    trace: int
    span: int
    state: str = ""


def parse_trace_context(header: Header) -> RemoteSpan | None:
    """Parses the headers `traceparent` and `tracestate`; None without a valid `traceparent`."""
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
    """The OpenTelemetry span ids of one request to one model.

    `parent` is the span above the request, 0 if there is none. `root` is the span of the endpoint
    that received the request, 0 for a BLS request or an ensemble step. `model` and `compute` are
    the spans of the model and of its `execute`. `state` is the `tracestate` of the client.
    """

    trace_id: int
    parent: int
    root: int
    model: int
    compute: int
    state: str = ""

    @classmethod
    def for_client_request(cls, remote: RemoteSpan | None) -> SpanIds:
        """New span ids for a request of a client, in its trace if it has sent one."""
        if remote is None:
            return cls(_random_id(128), 0, _random_id(64), _random_id(64), _random_id(64))
        new_ids = _random_id(64), _random_id(64), _random_id(64)
        return cls(remote.trace, remote.span, *new_ids, state=remote.state)

    def for_child_request(self, parent: int) -> SpanIds:
        """New span ids for a BLS request or an ensemble step of this request."""
        return SpanIds(self.trace_id, parent, 0, _random_id(64), _random_id(64), self.state)

    def trace_headers(self, span: int) -> str:
        """The W3C headers that name `span` as the parent, as JSON."""
        headers = {"traceparent": f"00-{self.trace_id:032x}-{span:016x}-01"}
        if self.state:
            headers["tracestate"] = self.state
        return json.dumps(headers, separators=(",", ":"))


def _random_id(bits: int) -> int:
    return random.getrandbits(bits) or 1
