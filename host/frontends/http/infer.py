"""The infer endpoint (docs/reference/protocol.md, "Inference request" to "Compression, size limits,
forwarded headers, restricted endpoints").
"""

from __future__ import annotations

from collections.abc import Container

from host.errors import HostError, invalid_argument, unsupported
from host.frontends.classification import classify
from host.frontends.compression import (
    SUPPORTED_ENCODINGS,
    choose_encoding,
    compress,
    decompress,
    decompressed_too_large,
    max_compressed_size,
)
from host.frontends.http.exchange import BINARY, JSON, MAX_BYTES, Header, HttpExchange
from host.frontends.http.infer_request import raw_request, to_request
from host.frontends.http.infer_response import ALL_NAMES, encode_infer_response
from host.frontends.http.inference_header import InferenceHeaderReader
from host.frontends.http.json_body import json_too_large
from host.frontends.http.routes import Route
from host.frontends.http.steps import run_in_turns
from host.frontends.http.tensors import JsonInputLimit
from host.frontends.http.trace_events import receive_started, trace_request, trace_response
from host.frontends.inference_core import InferenceCore
from host.frontends.request_headers import HeaderForwarding
from host.inference.request import InferRequest, InferResponse
from host.models.registry import parse_version

_HEADER_LENGTH = "Inference-Header-Content-Length"


class UnknownEncoding(HostError):
    """The content encoding is unknown; the response lists the supported ones."""

    headers: tuple[Header, ...] = ((b"accept-encoding", b"gzip, deflate"),)


class InferHandler:
    """Answers inference requests with one response each.

    `max_input_size` is `--http-max-input-size`.
    """

    def __init__(
        self,
        core: InferenceCore,
        forwarding: HeaderForwarding,
        max_input_size: int,
        header_reader: InferenceHeaderReader,
    ) -> None:
        self._core = core
        self._forwarding = forwarding
        self._max_input_size = max_input_size
        self._limit = JsonInputLimit(max_input_size)
        self._header_reader = header_reader

    async def infer(self, exchange: HttpExchange, route: Route) -> None:
        """Answers one request. Raises HostError. When the task is cancelled, so is the request."""
        config = await self._core.config_when_loaded(route.resource, route.version)
        if config.model_transaction_policy.decoupled:
            raise unsupported(
                "HTTP end point doesn't support models with decoupled transaction policy"
            )
        tracing = self._core.request_tracer
        receive_started_ns = receive_started(tracing)
        body, header_length = await self._read_body(exchange)
        version = parse_version(route.version)
        binary_names: Container[str] = ALL_NAMES
        if header_length == 0:
            request = raw_request(config, version, body, self._limit)
        else:
            header_length = len(body) if header_length is None else header_length
            head = await self._header_reader.read_any(
                body if header_length == len(body) else body[:header_length],
                len(config.input),
                len(config.output),
            )
            request = to_request(
                head, route.resource, version, body, header_length, self._core.regions
            )
            binary_names = head.binary_names
        if self._forwarding:
            request.parameters.update(self._forwarding.to_parameters(exchange.raw_headers()))
        del body  # the request holds the parts that it needs
        request.reserved_memory = exchange.release_body()
        outputs_in_shared_memory = request.output_placement or ()
        if tracing is None:
            response = await (await self._core.infer_when_loaded(request))
            await self._send_response(
                exchange, response, request, binary_names, outputs_in_shared_memory
            )
            return
        with trace_request(tracing, exchange, request, receive_started_ns):
            call = await self._core.infer_when_loaded(request)
            try:
                response = await call
            except HostError as error:
                with trace_response(request):
                    await exchange.send_error(error)
                return
            with trace_response(request):
                await self._send_response(
                    exchange, response, request, binary_names, outputs_in_shared_memory
                )

    async def _send_response(
        self,
        exchange: HttpExchange,
        response: InferResponse,
        request: InferRequest,
        binary_names: Container[str],
        outputs_in_shared_memory: Container[str],
    ) -> None:
        if request.classification is not None:
            response = classify(response, request.classification)
        json, chunks = await run_in_turns(
            encode_infer_response(response, binary_names, outputs_in_shared_memory)
        )
        headers: list[Header] = []
        kind = JSON
        if chunks:
            kind = BINARY
            headers.append((b"inference-header-content-length", b"%d" % len(json)))
        parts = [json, *chunks]
        accepted = exchange.headers.get(b"accept-encoding")
        if accepted is not None:
            encoding = choose_encoding(accepted)
            if encoding:
                parts = [await compress(parts, encoding)]
                headers.append((b"content-encoding", encoding.encode()))
        await exchange.send_response(kind, parts, headers)

    async def _read_body(self, exchange: HttpExchange) -> tuple[bytes, int | None]:
        """Returns the decompressed body, and the length of its JSON part, None for all.

        A body that declares too large a size is refused before it is read.
        """
        encoding = exchange.headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding in SUPPORTED_ENCODINGS:
            most = max_compressed_size(self._max_input_size)
            packed = await exchange.read_body(
                most, lambda size: decompressed_too_large(self._max_input_size)
            )
            body = await decompress(packed, self._max_input_size, exchange.reserved)
            header_length = exchange.length_header(_HEADER_LENGTH)
        elif encoding not in ("", "identity"):
            error = unsupported("Unsupported compression type")
            raise UnknownEncoding(error.code, error.message)
        else:
            declared = exchange.content_length()
            header_length = exchange.length_header(_HEADER_LENGTH)
            if declared is not None:
                _check_header_size(header_length, declared)
            body = await self._read_plain_body(exchange, header_length)
        _check_header_size(header_length, len(body))
        size = len(body) if header_length is None else header_length
        if size > self._max_input_size:
            raise self._json_too_large(size)
        return body, header_length

    async def _read_plain_body(self, exchange: HttpExchange, header_length: int | None) -> bytes:
        if header_length is None:
            return await exchange.read_body(self._max_input_size, self._json_too_large)
        if header_length == 0:
            return await exchange.read_body(self._max_input_size, self._limit.raw_too_large)
        if header_length > self._max_input_size:
            raise self._json_too_large(header_length)
        return await exchange.read_body(MAX_BYTES, _content_length_too_large)

    def _json_too_large(self, size: int) -> HostError:
        return json_too_large(size, self._max_input_size)


def _content_length_too_large(size: int) -> HostError:
    return invalid_argument(
        "Unable to parse Content-Length, value is out of range [ -2147483648, 2147483647 ],"
        f" got: {size}"
    )


def _check_header_size(size: int | None, whole: int) -> None:
    if size is not None and not 0 <= size <= whole:
        raise invalid_argument(
            f"inference header size should be in range (0, {whole}), got: {size}"
        )
