"""Parses forms with files (multipart/form-data, RFC 7578)."""

from __future__ import annotations

from host.frontends.openai.errors import OpenAIError, invalid_value, unsupported_route

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
