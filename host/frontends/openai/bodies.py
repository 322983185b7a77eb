"""Reads the bodies of requests, JSON objects and forms, within limits and with compression."""

from __future__ import annotations

import asyncio

from host.frontends.compression import SUPPORTED_ENCODINGS, decompress, max_compressed_size
from host.frontends.http.http_exchange import HttpExchange
from host.frontends.http.inference_header import MAX_INLINE_BYTES
from host.frontends.openai.fields import Fields, model_name, parse_object
from host.frontends.openai.openai_errors import OpenAIError, invalid_value, unsupported_route

_MAX_PARTS = 64
_MAX_HEADER_BYTES = 8192  # of one part
_MAX_VALUE_BYTES = 65536  # of a field that is no file

MISSING_PACKAGE = "the package python-multipart is not installed: pip install 'pbhost[audio]'"


def can_parse_forms() -> bool:
    """Returns whether the package that parses forms is installed."""
    try:
        import python_multipart  # noqa: F401
    except ImportError:
        return False
    return True


def parse_form(content_type: bytes, body: bytes, file_field: str) -> dict[str, list[str | bytes]]:
    """Returns the values of each field: texts, and bytes for the field `file_field`. Blocks.

    Raises OpenAIError.
    """
    if not can_parse_forms():
        raise unsupported_route(MISSING_PACKAGE)
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary or len(boundary) > 256:
        raise invalid_value("the body must be multipart/form-data with a boundary", "content-type")
    parts = _Parts(file_field, lambda value: parse_options_header(value)[1].get(b"name", b""))
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": parts.begin,
                "on_header_field": parts.add_header_name,
                "on_header_value": parts.add_header_value,
                "on_header_end": parts.end_header,
                "on_part_data": parts.add_data,
                "on_part_end": parts.end,
                "on_end": parts.end_form,
            },
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise _bad_form(str(error)) from None
    if not parts.complete:
        raise _bad_form("its end is missing")
    return parts.values


class _Parts:
    """Collects the parts that the parser finds. `read_name` reads a content-disposition."""

    def __init__(self, file_field: str, read_name: object) -> None:
        assert callable(read_name)
        self.values: dict[str, list[str | bytes]] = {}
        self.complete = False
        self._file_field = file_field
        self._read_name = read_name
        self._count = 0
        self._header_name = b""
        self._header_value = b""
        self._name = ""
        self._header_bytes = 0
        self._data: list[memoryview] = []
        self._size = 0

    def begin(self) -> None:
        """Begins a part."""
        self._count += 1
        if self._count > _MAX_PARTS:
            raise _bad_form(f"it has more than {_MAX_PARTS} parts")
        self._name = ""
        self._header_bytes = self._size = 0
        self._data = []

    def add_header_name(self, data: bytes, start: int, end: int) -> None:
        """Adds a piece of the name of a header."""
        self._count_header(end - start)
        self._header_name += data[start:end]

    def add_header_value(self, data: bytes, start: int, end: int) -> None:
        """Adds a piece of the value of a header."""
        self._count_header(end - start)
        self._header_value += data[start:end]

    def end_header(self) -> None:
        """Reads a complete header."""
        if self._header_name.lower() == b"content-disposition":
            self._name = self._read_name(self._header_value).decode("utf-8", "replace")
        self._header_name = self._header_value = b""

    def add_data(self, data: bytes, start: int, end: int) -> None:
        """Adds a piece of the value of the part."""
        self._size += end - start
        if self._size > _MAX_VALUE_BYTES and self._name != self._file_field:
            raise invalid_value(
                f"'{self._name[:80]}' must have at most {_MAX_VALUE_BYTES} bytes", self._name[:80]
            )
        self._data.append(memoryview(data)[start:end])

    def end(self) -> None:
        """Keeps the value of a part."""
        if not self._name:
            raise _bad_form("a part has no name")
        value = b"".join(self._data)
        self._data = []
        known = self.values.setdefault(self._name, [])
        if self._name == self._file_field:
            known.append(value)
            return
        try:
            known.append(value.decode())
        except UnicodeDecodeError:
            raise invalid_value(
                f"'{self._name[:80]}' must be text in UTF-8", self._name[:80]
            ) from None

    def end_form(self) -> None:
        """Notes the end of the form."""
        self.complete = True

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _MAX_HEADER_BYTES:
            raise _bad_form(f"the headers of a part have more than {_MAX_HEADER_BYTES} bytes")


def _bad_form(reason: str) -> OpenAIError:
    return invalid_value(f"the body is not a form: {reason}", "body")


class BodyReader:
    """Reads bodies of at most `max_size` bytes (`--http-max-input-size`)."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size

    async def read(self, exchange: HttpExchange) -> tuple[int, Fields, str]:
        """Returns the size of a body, its fields, and the model that it names.

        Raises HostError. A body that declares too large a size is refused before it is read.
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

        Raises HostError. A body that declares too large a size is refused before it is read.
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
        if encoding in SUPPORTED_ENCODINGS:
            packed = await exchange.read_body(max_compressed_size(self._max_size), self._too_large)
            return await decompress(packed, self._max_size, exchange.reserved)
        if encoding not in ("", "identity"):
            raise invalid_value(
                f"content-encoding '{encoding[:80]}' is not supported; send gzip, deflate or none",
                "content-encoding",
            )
        return await exchange.read_body(self._max_size, self._too_large)

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
