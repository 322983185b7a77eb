"""Decodes header blocks (HPACK), checks the fields (RFC 9113 8.2, 8.3), and caches the result."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Generic, TypeVar

from hpack import Decoder, HPACKError

from host.frontends.grpc.h2.frames import H2ConnectionError, H2ErrorCode

Fields = list[tuple[bytes, bytes]]
T = TypeVar("T")

_CACHE_SIZE = 64  # blocks of one connection
_MAX_CACHED_BYTES = 1024  # bytes of a block
_FIELD_OVERHEAD = 32  # added to each field in the size of a header list (RFC 9113)
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_BAD_VALUE = re.compile(rb"[\0\r\n]").search
_CONTENT_LENGTH = re.compile(rb"[0-9]{1,19}").fullmatch
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_REQUIRED = frozenset((b":method", b":scheme", b":path"))
_CONNECTION_SPECIFIC = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)


class MalformedRequest(Exception):
    """A request that violates HTTP/2; its stream is reset."""


class HeaderDecoder(Generic[T]):
    """Decodes the header blocks of one connection; `parse` interprets each list of fields.

    Clients repeat themselves: a block that does not change the decoder's table means the same until
    the table changes, so its result is cached.
    """

    def __init__(self, parse: Callable[[Fields, int], T], max_size: int) -> None:
        self._parse = parse
        self._decoder = Decoder(max_header_list_size=max_size)
        self._cache: dict[bytes, T] = {}

    def decode_request(self, block: bytes) -> T:
        """The parsed request.

        Raises MalformedRequest, or H2ConnectionError if the block cannot be decoded or is larger
        than `max_size` bytes.
        """
        known = self._cache.get(block)
        if known is not None:
            return known
        fields, stable = self._decode(block)
        _check_request(fields)
        size = sum(len(name) + len(value) + _FIELD_OVERHEAD for name, value in fields)
        understood = self._parse(fields, size)
        if stable and len(block) <= _MAX_CACHED_BYTES:
            if len(self._cache) >= _CACHE_SIZE:
                self._cache.clear()
            self._cache[block] = understood
        return understood

    def decode_trailers(self, block: bytes) -> None:
        """Checks the fields after a request, which are not used. Raises as `decode_request`."""
        fields, _ = self._decode(block)
        for name, value in fields:
            _check_field(name, value)  # a pseudo-header is no valid name of a field

    def skip_block(self, block: bytes) -> None:
        """Decodes a block only to keep the table up to date. Raises H2ConnectionError."""
        self._decode(block)

    def _decode(self, block: bytes) -> tuple[Fields, bool]:
        """The fields, and whether the table is unchanged."""
        table = self._decoder.header_table
        before = _table_state(table)
        try:
            fields = [(bytes(name), bytes(value)) for name, value in self._decode_fields(block)]
        except (HPACKError, LookupError, ValueError) as error:
            code = H2ErrorCode.COMPRESSION_ERROR
            raise H2ConnectionError(code, f"header block: {type(error).__name__}") from None
        stable = before == _table_state(table)
        if not stable:
            self._cache.clear()
        return fields, stable

    def _decode_fields(self, block: bytes) -> Fields:
        return [(name, value) for name, value in self._decoder.decode(block, raw=True)]


def _table_state(table: object) -> tuple[int, int, int]:
    """Changes whenever entries were added or dropped: an addition makes a new first entry."""
    entries = table.dynamic_entries  # type: ignore[attr-defined]
    return id(entries[0]) if entries else 0, len(entries), table.maxsize  # type: ignore[attr-defined]


def _check_request(fields: Fields) -> None:
    pseudo: set[bytes] = set()
    lengths: set[bytes] = set()
    ordinary = False
    for name, value in fields:
        if name[:1] == b":":
            if ordinary or name not in _PSEUDO or name in pseudo or not value:
                raise MalformedRequest(
                    f"pseudo-header {name!r} is unknown, empty, late or repeated"
                )
            pseudo.add(name)
            continue
        ordinary = True
        _check_field(name, value)
        if name == b"content-length":
            if not _CONTENT_LENGTH(value) or lengths - {value}:
                raise MalformedRequest(f"content-length {value!r}")
            lengths.add(value)
    if not pseudo >= _REQUIRED:
        raise MalformedRequest("a request without method, scheme or path")


def _check_field(name: bytes, value: bytes) -> None:
    # Spaces around values are accepted: gRPC clients send them, and other servers accept them.
    if not _NAME(name):
        raise MalformedRequest(f"field name {name!r}")
    if _BAD_VALUE(value):
        raise MalformedRequest(f"value of {name!r}")
    if name in _CONNECTION_SPECIFIC or (name == b"te" and value != b"trailers"):
        raise MalformedRequest(f"field {name!r} has no place in HTTP/2")
