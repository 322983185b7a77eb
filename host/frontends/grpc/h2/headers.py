"""Decodes and checks header blocks (HPACK; RFC 9113 sections 8.2 and 8.3), with a cache."""

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
_FIELD_OVERHEAD = 32  # bytes that RFC 9113 section 6.5.2 adds for each field of a list
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_BAD_VALUE = re.compile(rb"[\0\r\n]").search
_CONTENT_LENGTH = re.compile(rb"[0-9]{1,19}").fullmatch
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_REQUIRED = frozenset((b":method", b":scheme", b":path"))
_CONNECTION_SPECIFIC = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)


class MalformedRequest(Exception):
    """Raised for a request that breaks the rules of HTTP/2; its stream is reset."""


class HeaderDecoder(Generic[T]):
    """Decodes the header blocks of a connection, and parses each list of fields with `parse`.

    Clients send equal blocks again. A block that does not change the dynamic table means the same
    until the table changes, so its result is cached.
    """

    def __init__(self, parse: Callable[[Fields, int], T], max_size: int) -> None:
        self._parse = parse
        self._decoder = Decoder(max_header_list_size=max_size)
        self._cache: dict[bytes, T] = {}

    def decode_request(self, block: bytes) -> T:
        """Decodes the block of a request and returns the result of `parse`.

        Raises MalformedRequest, or H2ConnectionError if the block cannot be decoded or its list is
        larger than `max_size` bytes.
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
        """Decodes and checks trailers, which are not used. Raises as `decode_request` does."""
        fields, _ = self._decode(block)
        for name, value in fields:
            _check_field(name, value)  # refuses pseudo-headers too

    def skip_block(self, block: bytes) -> None:
        """Decodes a block only to update the dynamic table. Raises H2ConnectionError."""
        self._decode(block)

    def _decode(self, block: bytes) -> tuple[Fields, bool]:
        """Returns the fields, and whether the dynamic table is unchanged."""
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
    """Returns a value that changes with the table: each added entry becomes the first."""
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
    # Spaces around a value are allowed, as gRPC clients send such metadata.
    if not _NAME(name):
        raise MalformedRequest(f"field name {name!r}")
    if _BAD_VALUE(value):
        raise MalformedRequest(f"value of {name!r}")
    if name in _CONNECTION_SPECIFIC or (name == b"te" and value != b"trailers"):
        raise MalformedRequest(f"field {name!r} has no place in HTTP/2")
