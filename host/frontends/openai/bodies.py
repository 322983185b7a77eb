"""Reads the bodies of requests as JSON objects, within limits and with compression."""

from __future__ import annotations

import asyncio

from host.errors import ErrorCode, HostError
from host.frontends.compression import SUPPORTED_ENCODINGS, decompress, max_compressed_size
from host.frontends.http.exchange import HttpExchange
from host.frontends.http.inference_header import MAX_INLINE_BYTES
from host.frontends.openai.errors import OpenAIError, invalid_value
from host.frontends.openai.fields import Fields, model_name, parse_object
from host.frontends.openai.form import parse_form


class _TooLarge(HostError):
    """The body is too large; carries no text of its own."""


class BodyReader:
    """Reads bodies of at most `max_size` bytes (`--http-max-input-size`)."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size

    async def read(self, exchange: HttpExchange) -> tuple[int, Fields, str]:
        """Returns the size of a body, its fields, and the model that it names.

        Raises OpenAIError. A body that declares too large a size is refused before it is read.
        """
        body = await self._read_bytes(exchange)
        if len(body) > MAX_INLINE_BYTES:
            fields = await asyncio.to_thread(parse_object, body)
        else:
            fields = parse_object(body)
        return len(body), fields, model_name(fields)

    async def read_form(
        self, exchange: HttpExchange, file_field: str
    ) -> dict[str, list[str | bytes]]:
        """Returns the values of the fields of a form; those of `file_field` are bytes.

        Raises OpenAIError. A body that declares too large a size is refused before it is read.
        """
        body = await self._read_bytes(exchange)
        content_type = exchange.headers.get(b"content-type", b"")
        if len(body) > MAX_INLINE_BYTES:
            return await asyncio.to_thread(parse_form, content_type, body, file_field)
        return parse_form(content_type, body, file_field)

    def allows(self, size: int) -> bool:
        """Returns whether a body of this size is within the limit."""
        return size <= self._max_size

    def check_size(self, size: int) -> None:
        """Raises OpenAIError if the inputs of a request exceed the limit."""
        if size > self._max_size:
            raise self._too_large(size)

    async def _read_bytes(self, exchange: HttpExchange) -> bytes:
        encoding = exchange.headers.get(b"content-encoding", b"identity").decode("latin-1")
        try:
            if encoding in SUPPORTED_ENCODINGS:
                most = max_compressed_size(self._max_size)
                packed = await exchange.read_body(most, self._refuse)
                return await decompress(packed, self._max_size, exchange.reserved)
            if encoding not in ("", "identity"):
                raise invalid_value(
                    f"content-encoding '{encoding[:80]}' is not supported; send gzip, deflate or"
                    " none",
                    "content-encoding",
                )
            return await exchange.read_body(self._max_size, self._refuse)
        except _TooLarge as error:
            raise self._too_large(int(error.message)) from None

    @staticmethod
    def _refuse(size: int) -> HostError:
        return _TooLarge(ErrorCode.INVALID_ARG, str(size))

    def _too_large(self, size: int) -> OpenAIError:
        return OpenAIError(
            f"the request has {size} bytes, at most {self._max_size} are allowed;"
            " --http-max-input-size sets the limit",
            "content_too_large",
            None,
            413,
        )


def set_request_id(exchange: HttpExchange, default: str) -> str:
    """Returns the id of a request, and answers it as `x-request-id`.

    The id is that of the client, if it has 1 to 128 visible characters.
    """
    request_id = visible_request_id(exchange.header("x-request-id")) or default
    exchange.response_headers += ((b"x-request-id", request_id.encode()),)
    return request_id


def visible_request_id(header: bytes | None) -> str:
    """Returns the value of `x-request-id`, "" unless it has 1 to 128 visible characters."""
    sent = (header or b"").decode("latin-1")
    visible = sent.isascii() and sent.isprintable() and " " not in sent
    return sent if visible and len(sent) <= 128 else ""
