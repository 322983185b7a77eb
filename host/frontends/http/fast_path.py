"""The fast path of the infer endpoint: answers most inference requests without a task.

A request head is parsed once, and later requests with the same head reuse the result. Requests
with an error, and requests with unusual options, use the full endpoint (`infer`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Sequence
from functools import partial

from host.errors import HostError, internal, unavailable
from host.frontends.classification import classify
from host.frontends.compression import choose_encoding
from host.frontends.http.exchange import BINARY, HTTP_STATUS, JSON
from host.frontends.http.infer_request import to_request
from host.frontends.http.infer_response import encode_infer_response
from host.frontends.http.inference_header import MAX_INLINE_BYTES, InferenceHeaderReader
from host.frontends.http.json_text import error_body
from host.frontends.http.routes import INFER, Route, find_route
from host.frontends.http.steps import Steps
from host.frontends.http1.cycle import STATUS_LINES, Header
from host.frontends.http1.parser import Body, FastHandler, ResponseCallback
from host.frontends.inference_core import InferenceCore, OpenRequests
from host.frontends.request_headers import HeaderForwarding, Restrictions
from host.inference.call import Call
from host.inference.request import Classification, InferResponse
from host.models.registry import parse_version

_Answer = tuple[bytes, Sequence[Body]]
"""The head of a response, without its empty last line, and the parts of its body."""

_log = logging.getLogger("pbhost")
_HEADER_LENGTH_NAME = b"inference-header-content-length"
# bytes; a larger body arrives in several parts anyway
_MAX_BODY_BYTES = MAX_INLINE_BYTES
_HEAD_TEMPLATE = b"%bcontent-type: %b\r\ncontent-length: "
_JSON_HEAD = _HEAD_TEMPLATE % (STATUS_LINES[200], JSON)
_BINARY_HEAD = _HEAD_TEMPLATE % (STATUS_LINES[200], BINARY)


class FastInference:
    """Finds and runs the fast path. `max_input_size` is `--http-max-input-size`.

    `enabled`: no API key has to be checked.
    """

    def __init__(
        self,
        core: InferenceCore,
        restrictions: Restrictions,
        forwarding: HeaderForwarding,
        max_input_size: int,
        header_reader: InferenceHeaderReader,
        open_requests: OpenRequests,
        enabled: bool = True,
    ) -> None:
        self._core = core
        self._enabled = enabled and "inference" not in restrictions and not forwarding
        self._max_body_bytes = min(max_input_size, _MAX_BODY_BYTES)
        self._header_reader = header_reader
        self._open_requests = open_requests

    def find_handler(
        self, method: str, url: bytes, headers: Sequence[Header]
    ) -> FastHandler | None:
        """Returns the handler of requests with this head; None if they need the full endpoint."""
        if not self._enabled or method != "POST":
            return None
        route = find_route(url.partition(b"?")[0])
        if route is None or route.endpoint is not INFER:
            return None
        known = dict(reversed(headers))
        if known.get(b"content-encoding", b"identity") not in (b"", b"identity"):
            return None
        if choose_encoding(known.get(b"accept-encoding", b"")):
            return None
        length = int(known[b"content-length"])
        header_length = known.get(_HEADER_LENGTH_NAME, b"%d" % length)
        if (
            length > self._max_body_bytes
            or not header_length.isdigit()
            or not 0 < int(header_length) <= length
        ):
            return None
        try:
            version = parse_version(route.version)
        except HostError:
            return None
        return partial(self._start_request, route, version, int(header_length))

    def _start_request(
        self, route: Route, version: int, header_length: int, body: bytes, done: ResponseCallback
    ) -> Call | None:
        """Starts one request; `done` gets the response. None if it needs the full endpoint."""
        core, open_requests = self._core, self._open_requests
        if core.request_tracer is not None or open_requests.draining:
            return None
        try:
            head = self._header_reader.read(body[:header_length])
            request = to_request(head, route.resource, version, body, header_length, core.regions)
            outputs_in_shared_memory = tuple(request.output_placement or ())
            call = core.infer(request, True)
        except HostError:
            return None
        open_requests.count += 1
        classes = request.classification

        def finish(response: InferResponse | HostError) -> None:
            open_requests.count -= 1
            if open_requests.draining:
                open_requests.signal_if_drained()
            if isinstance(response, HostError) and call.cancelled:
                response = unavailable("Server exiting")
            answer = _encode_answer(response, classes, head.binary_names, outputs_in_shared_memory)
            _send_in_turns(answer, done)

        call.subscribe_single(finish)
        return call


def _send_in_turns(answer: Steps[_Answer], done: ResponseCallback) -> None:
    """Passes an answer to `done`: at once if it takes one step, else after turns of the loop."""
    try:
        next(answer)
    except StopIteration as ended:
        done(*ended.value)
    else:
        asyncio.get_running_loop().call_soon(_send_in_turns, answer, done)


def _encode_answer(
    response: InferResponse | HostError,
    classes: Classification | None,
    binary_names: Container[str],
    outputs_in_shared_memory: Container[str],
) -> Steps[_Answer]:
    """Returns the answer to a response, or to its error. Raises nothing."""
    try:
        if isinstance(response, HostError):
            return _encode_error(response)
        if classes is not None:
            response = classify(response, classes)
        json, chunks = yield from encode_infer_response(
            response, binary_names, outputs_in_shared_memory
        )
        if not chunks:
            return b"%b%d\r\n" % (_JSON_HEAD, len(json)), (json,)
        parts: list[Body] = [json]
        size = len(json)
        for chunk in chunks:
            part = chunk if type(chunk) is bytes else memoryview(chunk).cast("B")
            size += len(part)
            parts.append(part)
        head = b"%b%d\r\n%b: %d\r\n" % (_BINARY_HEAD, size, _HEADER_LENGTH_NAME, len(json))
        return head, parts
    except HostError as error:
        return _encode_error(error)
    except Exception:  # a defect of ours; the client must get an answer
        _log.exception("unexpected failure of an HTTP request")
        return _encode_error(internal("unexpected failure"))


def _encode_error(error: HostError) -> _Answer:
    body = error_body(error.message or error.code.value)
    head = _HEAD_TEMPLATE % (STATUS_LINES[HTTP_STATUS[error.code]], JSON)
    return b"%b%d\r\n" % (head, len(body)), (body,)
