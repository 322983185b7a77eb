"""Answers `POST /v1/audio/speech`: a text in, its sound out as it arrives."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from host.frontends.http.exchange import HttpExchange
from host.frontends.http.trace_events import receive_started, trace_request, trace_response
from host.frontends.openai.bodies import set_request_id
from host.frontends.openai.contract import Contract
from host.frontends.openai.errors import (
    OpenAIError,
    invalid_value,
    model_failure,
    unsupported_field,
)
from host.frontends.openai.fields import SPEECH, Fields, check_fields
from host.frontends.openai.handler import Handler
from host.frontends.openai.inputs import build_request
from host.frontends.openai.outputs import raise_error, read_texts
from host.inference.request import InferRequest
from host.logs.formats import model_fields

_log = logging.getLogger("pbhost")

_DEFAULT_FORMAT = "mp3"
_CONTENT_TYPES = {
    "mp3": b"audio/mpeg",
    "opus": b"audio/ogg",
    "aac": b"audio/aac",
    "flac": b"audio/flac",
    "wav": b"audio/wav",
    "pcm": b"audio/pcm",
}


class SpeechHandler(Handler):
    """Answers requests for speech. Raises OpenAIError or HostError before the first sound."""

    async def answer(self, exchange: HttpExchange) -> None:
        """Answers one request."""
        tracing = self._core.request_tracer
        receive_started_ns = receive_started(tracing)
        _, sent, name = await self._bodies.read(exchange)
        contract, version = await self._models.find_when_loaded(name, SPEECH, exchange.client)
        fields = check_fields(sent, SPEECH, contract.defaults)
        _check_support(contract, fields)
        request_id = set_request_id(exchange, f"speech-{uuid.uuid4().hex}")
        request = build_request(contract, fields, SPEECH, fields["input"], version, request_id)
        self._forward_headers(exchange, [request])
        kind = _CONTENT_TYPES[fields.get("response_format", _DEFAULT_FORMAT)]
        with trace_request(tracing, exchange, request, receive_started_ns):
            async with aclosing(self._pieces(contract, request)) as pieces:
                await _stream(exchange, contract, request, pieces, kind)

    async def _pieces(
        self, contract: Contract, request: InferRequest
    ) -> AsyncGenerator[bytes, None]:
        """Yields the sound as it arrives. Leaving early cancels the call."""
        async with aclosing(self._responses(request)) as responses:
            async for response in responses:
                raise_error(response)
                for tensor in response.outputs:
                    if contract.outputs.get(tensor.name) == "audio":
                        yield b"".join(read_texts(tensor))


async def _stream(
    exchange: HttpExchange,
    contract: Contract,
    request: InferRequest,
    pieces: AsyncGenerator[bytes, None],
    kind: bytes,
) -> None:
    """Sends the sound. An error after its start ends the connection: clients notice that."""
    try:
        async for piece in pieces:
            if not piece:
                continue
            if not exchange.response_started:
                await exchange.start_response(kind)
            with trace_response(request):
                await exchange.send_chunk(piece)
    except OpenAIError as error:
        if not exchange.response_started:
            raise
        extra = model_fields(contract.model, max(request.model_version, 0))
        _log.error("speech %s was cut off: %s", request.id, error.message, extra=extra)
        return  # without its end, the body is not complete
    if not exchange.response_started:
        raise model_failure(f"model '{contract.model}' gave no sound")
    await exchange.send_chunk(b"", more=False)


def _check_support(contract: Contract, fields: Fields) -> None:
    """Refuses what the server or the model does not give. Raises OpenAIError."""
    if fields.get("stream_format") == "sse":
        raise invalid_value("'stream_format' must be audio: the sound itself", "stream_format")
    given = contract.defaults.get("response_format", _DEFAULT_FORMAT)
    if fields.get("response_format", given) != given and not contract.takes("response_format"):
        raise unsupported_field(
            f"model '{contract.model}' gives '{given}' only: it has no input 'response_format'",
            "response_format",
        )
