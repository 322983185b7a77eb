"""The infer endpoint (protocol spec 1.6 to 1.9)."""

from __future__ import annotations

from collections.abc import Container

from host.core import Core
from host.errors import HostError, invalid_argument, unsupported
from host.frontends.classification import classify
from host.frontends.forwarding import Forwarding
from host.frontends.http.compression import (
    KNOWN,
    chosen_encoding,
    compress,
    decompress,
    most_compressed,
    too_large,
)
from host.frontends.http.exchange import BINARY, JSON, MOST_BYTES, Exchange, Header
from host.frontends.http.infer_head import HeadReader, InferHead
from host.frontends.http.infer_request import raw_request, to_request
from host.frontends.http.infer_response import EVERYTHING, encode_infer_response
from host.frontends.http.routes import Route
from host.frontends.http.tensors import JsonLimit
from host.frontends.http.traced import begun, sending, traced
from host.inference.request import InferRequest, InferResponse
from host.models.registry import parse_version

_HEADER_LENGTH = "Inference-Header-Content-Length"


class UnknownEncoding(HostError):
    """The body is encoded in a way that is not known; the client is told what is."""

    headers: tuple[Header, ...] = ((b"accept-encoding", b"gzip, deflate"),)


class Inference:
    """Answers requests to models of one response each. `most` is `--http-max-input-size`."""

    def __init__(self, core: Core, forwarding: Forwarding, most: int, heads: HeadReader) -> None:
        self._core = core
        self._forwarding = forwarding
        self._most = most
        self._limit = JsonLimit(most)
        self._heads = heads

    async def infer(self, exchange: Exchange, route: Route) -> None:
        """Answer one request. Raises HostError. When the task is cancelled, so is the request."""
        config = self._core.model_config(route.subject, route.version)
        if config.model_transaction_policy.decoupled:
            raise unsupported(
                "HTTP end point doesn't support models with decoupled transaction policy"
            )
        tracing = self._core.tracing
        begun_ns = begun(tracing)
        body, begin = await self._body(exchange)
        version = parse_version(route.version)
        binary: Container[str] = EVERYTHING
        if begin == 0:
            request = raw_request(config, version, body, self._limit)
        else:
            begin = len(body) if begin is None else begin
            head = self._heads.read(body if begin == len(body) else body[:begin])
            request = to_request(head, route.subject, version, body, begin, self._core.regions)
            binary = binary_outputs(head)
        if self._forwarding:
            request.parameters.update(self._forwarding.parameters(exchange.received_headers()))
        del body  # the request keeps what it needs, until it is answered
        slots = request.slots or ()
        if tracing is None:
            response = await self._core.infer(request)
            await self._answer(exchange, response, request, binary, slots)
            return
        with traced(tracing, exchange, request, begun_ns):
            response = await self._core.infer(request)
            with sending(request):
                await self._answer(exchange, response, request, binary, slots)

    async def _answer(
        self,
        exchange: Exchange,
        response: InferResponse,
        request: InferRequest,
        binary: Container[str],
        slots: Container[str],
    ) -> None:
        if request.classes is not None:
            response = classify(response, request.classes)
        json, chunks = encode_infer_response(response, binary, slots)
        headers: list[Header] = []
        kind = JSON
        if chunks:
            kind = BINARY
            headers.append((b"inference-header-content-length", b"%d" % len(json)))
        parts = [json, *chunks]
        accepted = exchange.headers.get(b"accept-encoding")
        if accepted is not None:
            encoding = chosen_encoding(accepted)
            if encoding:
                parts = [await compress(parts, encoding)]
                headers.append((b"content-encoding", encoding.encode()))
        await exchange.reply(kind, parts, headers)

    async def _body(self, exchange: Exchange) -> tuple[bytes, int | None]:
        """The whole body, decompressed, and where its JSON part ends if there is more than that.

        What is too large is refused before it is read, if that can be known.
        """
        encoding = exchange.headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding in KNOWN:
            most = most_compressed(self._most)
            packed = await exchange.body(most, lambda size: too_large(self._most))
            body = await decompress(packed, self._most)
            begin = exchange.length(_HEADER_LENGTH)
        elif encoding not in ("", "identity"):
            error = unsupported("Unsupported compression type")
            raise UnknownEncoding(error.code, error.message)
        else:
            declared = exchange.declared_length()
            begin = exchange.length(_HEADER_LENGTH)
            if declared is not None:
                _check_header_size(begin, declared)
            body = await self._plain_body(exchange, begin)
        _check_header_size(begin, len(body))
        size = len(body) if begin is None else begin
        if size > self._most:
            raise self._json_too_large(size)
        return body, begin

    async def _plain_body(self, exchange: Exchange, begin: int | None) -> bytes:
        if begin is None:
            return await exchange.body(self._most, self._json_too_large)
        if begin == 0:
            return await exchange.body(self._most, self._limit.raw_too_large)
        if begin > self._most:
            raise self._json_too_large(begin)
        return await exchange.body(MOST_BYTES, _beyond)

    def _json_too_large(self, size: int) -> HostError:
        return json_too_large(size, self._most)


def json_too_large(size: int, most: int) -> HostError:
    """The complaint about JSON of more than `most` bytes."""
    return invalid_argument(
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {most}"
        " bytes. Use --http-max-input-size to increase the limit."
    )


def _beyond(size: int) -> HostError:
    return invalid_argument(
        "Unable to parse Content-Length, value is out of range [ -2147483648, 2147483647 ],"
        f" got: {size}"
    )


def _check_header_size(size: int | None, whole: int) -> None:
    if size is not None and not 0 <= size <= whole:
        raise invalid_argument(
            f"inference header size should be in range (0, {whole}), got: {size}"
        )


def binary_outputs(head: InferHead) -> Container[str]:
    """Which outputs are answered as bytes behind the JSON part."""
    if isinstance(head.outputs, list) and head.outputs:
        return [output.name for output in head.outputs if output.binary]
    return EVERYTHING if head.binary_output else ()
