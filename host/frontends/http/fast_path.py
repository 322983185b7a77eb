"""Inference requests that are answered without a task: the infer endpoint for most clients.

What the head of a request says is worked out once, and each request with that head costs little
more than its inference. Whatever is out of the ordinary, and every request that has a fault, is
left to the endpoint that answers everything (`infer`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from host.core import Core
from host.errors import ErrorCode, HostError, unavailable
from host.frontends.classification import classify
from host.frontends.forwarding import Forwarding
from host.frontends.http.compression import chosen_encoding
from host.frontends.http.exchange import BINARY, JSON, STATUS
from host.frontends.http.infer import binary_outputs
from host.frontends.http.infer_head import HeadReader
from host.frontends.http.infer_request import to_request
from host.frontends.http.infer_response import encode_infer_response
from host.frontends.http.json_text import error_body
from host.frontends.http.routes import Route, find_route
from host.frontends.http1.cycle import STATUS_LINES, Header
from host.frontends.http1.header_cache import Body, Done, Start
from host.frontends.open_requests import OpenRequests
from host.frontends.restrictions import Restrictions
from host.inference.request import Call, Classes, InferResponse
from host.models.registry import parse_version

_HEADER_LENGTH = b"inference-header-content-length"
_LONGEST = 65536  # bytes of a body: a larger one comes in several parts anyway
_TYPED = b"%bcontent-type: %b\r\ncontent-length: "
_JSON_HEAD = _TYPED % (STATUS_LINES[200], JSON)
_BINARY_HEAD = _TYPED % (STATUS_LINES[200], BINARY)

_Submitted = tuple[Call, Classes | None, Container[str], tuple[str, ...]]
"""What was asked to be classified, which outputs are bytes, and which are in client's memory."""


class PromptInference:
    """`most` is `--http-max-input-size`, `open_requests` those of the door."""

    def __init__(
        self,
        core: Core,
        restrictions: Restrictions,
        forwarding: Forwarding,
        most: int,
        heads: HeadReader,
        open_requests: OpenRequests,
    ) -> None:
        self._core = core
        self._usual = "inference" not in restrictions and not forwarding
        self._longest = min(most, _LONGEST)
        self._heads = heads
        self._open = open_requests

    def starter(self, method: str, url: bytes, headers: Sequence[Header]) -> Start | None:
        """What answers requests with this head; None if that is not done here."""
        if not self._usual or method != "POST":
            return None
        route = find_route(url.partition(b"?")[0])
        if route is None or route.endpoint.name != "infer":
            return None
        known = dict(reversed(headers))
        if known.get(b"content-encoding", b"identity") not in (b"", b"identity"):
            return None
        if chosen_encoding(known.get(b"accept-encoding", b"")):
            return None
        length = int(known[b"content-length"])
        begin = known.get(_HEADER_LENGTH, b"%d" % length)
        if length > self._longest or not begin.isdigit() or not 0 < int(begin) <= length:
            return None
        try:
            version = parse_version(route.version)
        except HostError:
            return None
        return _Plan(self, route, version, int(begin)).start

    def submit(self, route: Route, version: int, begin: int, body: bytes) -> _Submitted | None:
        """Start a request; None if it is for others, who tell what is wrong with it."""
        if self._core.tracing is not None or self._open.exiting:
            return None
        try:
            head = self._heads.read(body[:begin])
            request = to_request(head, route.subject, version, body, begin, self._core.regions)
            slots = tuple(request.slots or ())
            call = self._core.infer(request, unary=True)
        except HostError:
            return None
        self._open.count += 1
        return call, request.classes, binary_outputs(head), slots

    def leave(self) -> None:
        """A request that was submitted is answered."""
        self._open.leave()


class _Plan:
    """What all requests with one head have in common."""

    __slots__ = ("_begin", "_inference", "_route", "_version")

    def __init__(self, inference: PromptInference, route: Route, version: int, begin: int) -> None:
        self._inference = inference
        self._route = route
        self._version = version
        self._begin = begin

    def start(self, body: bytes, done: Done) -> Call | None:
        """Answer one of them."""
        inference = self._inference
        submitted = inference.submit(self._route, self._version, self._begin, body)
        if submitted is None:
            return None
        call, classes, binary, slots = submitted

        def finish(response: InferResponse | HostError) -> None:
            inference.leave()
            try:
                if isinstance(response, HostError):
                    raise response
                answer = _answer(response, classes, binary, slots)
            except HostError as error:
                ended = error.code is ErrorCode.CANCELLED and call.cancelled
                answer = _refusal(unavailable("Server exiting") if ended else error)
            done(*answer)

        call.subscribe_single(finish)
        return call


def _answer(
    response: InferResponse,
    classes: Classes | None,
    binary: Container[str],
    slots: Container[str],
) -> tuple[bytes, Sequence[Body]]:
    """The head of a response, which may be added to, and the parts of its body."""
    if classes is not None:
        response = classify(response, classes)
    json, chunks = encode_infer_response(response, binary, slots)
    if not chunks:
        return b"%b%d\r\n" % (_JSON_HEAD, len(json)), (json,)
    parts: list[Body] = [json]
    size = len(json)
    for chunk in chunks:
        part = chunk if type(chunk) is bytes else memoryview(chunk).cast("B")
        size += len(part)
        parts.append(part)
    head = b"%b%d\r\n%b: %d\r\n" % (_BINARY_HEAD, size, _HEADER_LENGTH, len(json))
    return head, parts


def _refusal(error: HostError) -> tuple[bytes, Sequence[Body]]:
    body = error_body(error.message or error.code.value)
    head = _TYPED % (STATUS_LINES[STATUS[error.code]], JSON)
    return b"%b%d\r\n" % (head, len(body)), (body,)
