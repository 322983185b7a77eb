"""Answers `POST /v1/images/generations` and `POST /v1/audio/speech`: a text in, media out."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from host.errors import HostError
from host.frontends.http import json_text as json
from host.frontends.http.http_exchange import JSON, HttpExchange, trace_response
from host.frontends.http.routes import Route
from host.frontends.openai.bodies import set_request_id
from host.frontends.openai.contract import Contract
from host.frontends.openai.fields import IMAGES, SPEECH, Fields, check_fields
from host.frontends.openai.inference_handler import Handler, gather
from host.frontends.openai.inputs import build_request, choice_fields
from host.frontends.openai.openai_errors import invalid_value, model_failure, unsupported_field
from host.inference.request import InferRequest
from host.logs.formats import model_fields

_NEED_AN_INPUT = {"size": "auto", "background": "auto", "output_format": "png"}
"""Fields that say how images must be, with the value that every model may have."""


class ImageHandler(Handler):
    """Answers requests for images. Raises OpenAIError or HostError."""

    async def answer(self, exchange: HttpExchange, route: Route) -> None:
        """Answers one request."""
        _, sent, name = await self._bodies.read(exchange)
        contract, version = await self._models.find_when_loaded(name, IMAGES, exchange.client)
        fields = check_fields(sent, IMAGES, contract.defaults)
        _check_image_support(contract, fields)
        request_id = set_request_id(exchange, f"img-{uuid.uuid4().hex}")
        count = 1 if contract.takes("n") else fields.get("n", 1)
        requests = [
            build_request(contract, variant, IMAGES, fields["prompt"], version, request_id)
            for variant in choice_fields(contract, fields, count)
        ]
        with self._trace(exchange, requests):
            answers = await gather(self._infer(contract, request) for request in requests)
            images = [image for some in answers for image in some]
            wanted = fields.get("n", 1)
            if len(images) != wanted:
                raise model_failure(
                    f"model '{contract.model}' gave {len(images)} images, expected {wanted}"
                )
            body = await asyncio.to_thread(_write, images)
            with trace_response(requests[0]):
                await exchange.send_response(JSON, (body,))

    async def _infer(self, contract: Contract, request: InferRequest) -> list[bytes]:
        async with aclosing(self._files(contract, request, "image")) as images:
            return [image async for image in images]


def _write(images: list[bytes]) -> bytes:
    data = [{"b64_json": base64.b64encode(image).decode()} for image in images]
    return json.dump({"created": int(time.time()), "data": data})


def _check_image_support(contract: Contract, fields: Fields) -> None:
    """Refuses what the server or the model does not give. Raises OpenAIError."""
    if fields.get("response_format") == "url":
        raise invalid_value(
            "'response_format' must be b64_json: this server keeps no images", "response_format"
        )
    if fields.get("stream"):
        raise invalid_value("'stream' is not supported for images", "stream")
    for field, common in _NEED_AN_INPUT.items():
        if fields.get(field, common) != common and not contract.takes(field):
            raise unsupported_field(
                f"model '{contract.model}' does not take '{field}': it has no input '{field}'",
                field,
            )


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

    async def answer(self, exchange: HttpExchange, route: Route) -> None:
        """Answers one request."""
        _, sent, name = await self._bodies.read(exchange)
        contract, version = await self._models.find_when_loaded(name, SPEECH, exchange.client)
        fields = check_fields(sent, SPEECH, contract.defaults)
        _check_speech_support(contract, fields)
        request_id = set_request_id(exchange, f"speech-{uuid.uuid4().hex}")
        request = build_request(contract, fields, SPEECH, fields["input"], version, request_id)
        kind = _CONTENT_TYPES[fields.get("response_format", _DEFAULT_FORMAT)]
        with self._trace(exchange, [request]):
            async with aclosing(self._files(contract, request, "audio")) as pieces:
                await _stream(exchange, contract, request, pieces, kind)


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
            if not exchange.response_started:
                await exchange.start_response(kind)
            with trace_response(request):
                await exchange.send_chunk(piece)
    except HostError as error:
        if not exchange.response_started:
            raise
        extra = model_fields(contract.model, max(request.model_version, 0))
        _log.error(
            "speech %s was cut off: %s", request.id, error.message or error.code.value, extra=extra
        )
        return  # without its end, the body is not complete
    if not exchange.response_started:
        raise model_failure(f"model '{contract.model}' gave no sound")
    await exchange.send_chunk(b"", more=False)


def _check_speech_support(contract: Contract, fields: Fields) -> None:
    """Refuses what the server or the model does not give. Raises OpenAIError."""
    if fields.get("stream_format") == "sse":
        raise invalid_value("'stream_format' must be audio: the sound itself", "stream_format")
    given = contract.defaults.get("response_format", _DEFAULT_FORMAT)
    if fields.get("response_format", given) != given and not contract.takes("response_format"):
        raise unsupported_field(
            f"model '{contract.model}' gives '{given}' only: it has no input 'response_format'",
            "response_format",
        )
