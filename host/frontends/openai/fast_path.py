"""The fast path of `POST /v1/embeddings`: answers requests with one text without a task.

Requests with an error, with several texts, or with unusual options use the full endpoint
(`embeddings`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from host.core import Core
from host.errors import HostError, unavailable, unexpected_failure
from host.frontends.http.exchange import JSON
from host.frontends.http.inference_header import MAX_INLINE_BYTES
from host.frontends.http1.cycle import STATUS_LINES, Header
from host.frontends.http1.parser import FastHandler, ResponseCallback
from host.frontends.inference_core import OpenRequests
from host.frontends.openai.bodies import BodyReader, visible_request_id
from host.frontends.openai.contract import Contract
from host.frontends.openai.embeddings import (
    new_request_id,
    output_size,
    prepare_requests,
    write_answer,
)
from host.frontends.openai.errors import OpenAIError, from_host_error
from host.frontends.openai.fields import EMBEDDINGS, Fields, model_name, parse_object
from host.frontends.openai.models import ModelDirectory
from host.frontends.openai.routes import EMBEDDINGS as ENDPOINT
from host.frontends.openai.routes import find_openai_route
from host.frontends.request_headers import HeaderForwarding, Restrictions
from host.inference.call import Call
from host.inference.request import InferResponse

_log = logging.getLogger("pbhost")
_HEAD = b"%bcontent-type: %b\r\ncontent-length: %d\r\nx-request-id: %b\r\n"


class FastEmbeddings:
    """Finds and runs the fast path. `enabled`: no key and no origin has to be checked."""

    def __init__(
        self,
        core: Core,
        models: ModelDirectory,
        bodies: BodyReader,
        restrictions: Restrictions,
        forwarding: HeaderForwarding,
        open_requests: OpenRequests,
        enabled: bool,
    ) -> None:
        self._core = core
        self._models = models
        self._bodies = bodies
        self._enabled = enabled and ENDPOINT.category not in restrictions and not forwarding
        self._open_requests = open_requests
        self._writers: set[asyncio.Task[None]] = set()

    def find_handler(
        self, method: str, url: bytes, headers: Sequence[Header]
    ) -> FastHandler | None:
        """Returns the handler of requests with this head; None if they need the full endpoint."""
        if not self._enabled or method != "POST":
            return None
        route = find_openai_route(url.partition(b"?")[0])
        if route is None or route.endpoint is not ENDPOINT:
            return None
        known = dict(reversed(headers))
        if known.get(b"content-encoding", b"identity") not in (b"", b"identity"):
            return None
        length = int(known[b"content-length"])
        if length > MAX_INLINE_BYTES or not self._bodies.allows(length):
            return None
        given_id = visible_request_id(known.get(b"x-request-id"))

        def start(body: bytes, done: ResponseCallback) -> Call | None:
            return self._start_request(body, given_id, done)

        return start

    def _start_request(self, body: bytes, given_id: str, done: ResponseCallback) -> Call | None:
        """Starts one request; None if the full endpoint must handle it or report its error."""
        core = self._core
        if core.request_tracer is not None or self._open_requests.draining:
            return None
        try:
            core.refuse_while_loading()
            sent = parse_object(body)
            if type(sent.get("input")) is not str:
                return None
            name = model_name(sent)
            contract, version = self._models.find(name, EMBEDDINGS)
            if contract.decoupled:
                return None
            fields, _, (request,) = prepare_requests(contract, sent, version, self._bodies)
            request.id = given_id or new_request_id()
            call = core.infer(request)
        except (OpenAIError, HostError):
            return None
        self._open_requests.count += 1
        request_id = request.id.encode()

        def finish(response: InferResponse | HostError) -> None:
            self._open_requests.request_finished()
            if isinstance(response, HostError):
                ended = call.cancelled
                error = unavailable("Server exiting") if ended else response
                done(*_error_answer(error, request_id))
            elif output_size(response) <= MAX_INLINE_BYTES:
                done(*_answer(contract, fields, name, response, request_id))
            else:
                self._write_in_thread(contract, fields, name, response, request_id, done)

        call.subscribe_single(finish)
        return call

    def _write_in_thread(
        self,
        contract: Contract,
        fields: Fields,
        name: str,
        response: InferResponse,
        request_id: bytes,
        done: ResponseCallback,
    ) -> None:
        async def write() -> None:
            done(*await asyncio.to_thread(_answer, contract, fields, name, response, request_id))

        task = asyncio.create_task(write())
        self._writers.add(task)
        task.add_done_callback(self._writers.discard)


def _answer(
    contract: Contract, fields: Fields, name: str, response: InferResponse, request_id: bytes
) -> tuple[bytes, Sequence[bytes]]:
    """Returns head and body of the answer to a response. Raises nothing."""
    try:
        body = write_answer(contract, fields, 1, name, (response,))
    except (OpenAIError, HostError) as error:
        return _error_answer(error, request_id)
    except Exception as error:  # a defect of ours; the client must get an answer
        _log.error("unexpected failure of an OpenAI request", exc_info=error)
        return _error_answer(unexpected_failure(error), request_id)
    return _HEAD % (STATUS_LINES[200], JSON, len(body), request_id), (body,)


def _error_answer(
    error: OpenAIError | HostError, request_id: bytes
) -> tuple[bytes, Sequence[bytes]]:
    if isinstance(error, HostError):
        error = from_host_error(error)
    body = error.body()
    head = _HEAD % (STATUS_LINES[error.status], JSON, len(body), request_id)
    return head + b"".join(b"%b: %b\r\n" % header for header in error.headers), (body,)
