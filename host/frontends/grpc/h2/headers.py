"""Decodes and checks header blocks (RFC 9113 sections 8.2 and 8.3), with a cache."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from host.frontends.grpc.h2.frames import H2ConnectionError, H2ErrorCode
from host.frontends.grpc.h2.grpc_messages import INTERPRETED_FIELDS, read_timeout
from host.frontends.grpc.h2.hpack import (
    CONNECTION_SPECIFIC,
    NAME_BYTES,
    Field,
    HpackDecoder,
    UsualRequest,
)

Fields = list[Field]
T = TypeVar("T")

_CACHE_SIZE = 64  # blocks of one connection
_RECENT_BLOCKS = 8  # of one connection, by their hash
_MAX_CACHED_BYTES = 1024  # bytes of a block
_NAME = re.compile(b"[%b]+" % re.escape(NAME_BYTES)).fullmatch
_BAD_VALUE = re.compile(rb"[\0\r\n]").search
_CONTENT_LENGTH = re.compile(rb"[0-9]{1,19}").fullmatch
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_REQUIRED = frozenset((b":method", b":scheme", b":path"))
_WITH_RULES = CONNECTION_SPECIFIC | {b"te", b"content-length"}


class MalformedRequest(Exception):
    """Raised for a request that breaks the rules of HTTP/2; its stream is reset."""


class HeaderDecoder(Generic[T]):
    """Decodes the header blocks of a connection, and parses each list of fields with `parse`.

    `parse` gets the fields, their size, and what is in a usual request, or None. Some clients send
    equal blocks again. A block that does not change the dynamic table means the same until the
    table changes, so its result is cached when it recurs.

    Attributes:
        known: The results of blocks that have recurred.
    """

    def __init__(
        self, parse: Callable[[Fields, int, UsualRequest | None], T], max_size: int
    ) -> None:
        self._parse = parse
        self._decoder = HpackDecoder(max_size)
        self.known: dict[bytes, T] = {}
        self._recent: deque[int] = deque(maxlen=_RECENT_BLOCKS)  # hashes of blocks that have not

    def decode_request(self, block: bytes) -> T:
        """Decodes the block of a request that is not known and returns the result of `parse`.

        Raises MalformedRequest, or H2ConnectionError if the block cannot be decoded or its list is
        larger than `max_size` bytes.
        """
        decoder = self._decoder
        before = decoder.table_changes
        try:
            fields, size, usual = decoder.decode(block)
        except ValueError as error:
            raise _undecodable(error) from None
        changed = decoder.table_changes != before
        if changed:
            self.known.clear()
        if usual is None:
            usual = check_request(fields)
        understood = self._parse(fields, size, usual)
        if not changed and len(block) <= _MAX_CACHED_BYTES:
            number = hash(block)
            if number not in self._recent:
                self._recent.append(number)
            else:
                if len(self.known) >= _CACHE_SIZE:
                    self.known.clear()
                self.known[block] = understood
        return understood

    def decode_trailers(self, block: bytes) -> None:
        """Decodes and checks trailers, which are not used. Raises as `decode_request` does."""
        _check_trailers(self.skip_block(block))

    def skip_block(self, block: bytes) -> Fields:
        """Decodes a block only to update the dynamic table. Raises H2ConnectionError."""
        before = self._decoder.table_changes
        try:
            fields, *_ = self._decoder.decode(block)
        except ValueError as error:
            raise _undecodable(error) from None
        if self._decoder.table_changes != before:
            self.known.clear()
        return fields


def _undecodable(error: ValueError) -> H2ConnectionError:
    return H2ConnectionError(H2ErrorCode.COMPRESSION_ERROR, f"header block: {error}")


def check_request(fields: Fields) -> UsualRequest | None:
    """Checks the fields of a request, and returns what is in it if it is usual.

    Raises MalformedRequest.
    """
    pseudo: set[bytes] = set()
    lengths: set[bytes] = set()
    values: list[bytes] = []  # of other fields
    interpreted: list[Field] = []
    timeout: float | None = None
    usual = True
    for field in fields:
        name, value = field
        if name in INTERPRETED_FIELDS:
            interpreted.append(field)
        if name[:1] == b":":
            if values or name not in _PSEUDO or name in pseudo or not value:
                raise MalformedRequest(
                    f"pseudo-header {name!r} is unknown, empty, late or repeated"
                )
            pseudo.add(name)
            continue
        values.append(value)
        if not _NAME(name):
            raise MalformedRequest(f"field name {name!r}")
        if name in _WITH_RULES:
            _check_rules(name, value)
            if name == b"content-length":
                usual = False
                if not _CONTENT_LENGTH(value) or lengths - {value}:
                    raise MalformedRequest(f"content-length {value!r}")
                lengths.add(value)
        elif name == b"grpc-timeout":
            usual = usual and timeout is None
            timeout = read_timeout(value)
            usual = usual and timeout is not None
        elif name[-4:] == b"-bin" and name[:5] != b"grpc-":
            usual = False
    if _BAD_VALUE(b"".join(values)):
        raise MalformedRequest("a value with NUL, CR or LF")
    if not pseudo >= _REQUIRED:
        raise MalformedRequest("a request without method, scheme or path")
    return (tuple(interpreted), timeout) if usual else None


def _check_trailers(fields: Fields) -> None:
    for name, value in fields:
        # Spaces around a value are allowed, as gRPC clients send such metadata.
        if not _NAME(name):  # refuses pseudo-headers too
            raise MalformedRequest(f"field name {name!r}")
        if _BAD_VALUE(value):
            raise MalformedRequest(f"value of {name!r}")
        _check_rules(name, value)


def _check_rules(name: bytes, value: bytes) -> None:
    if name in CONNECTION_SPECIFIC or (name == b"te" and value != b"trailers"):
        raise MalformedRequest(f"field {name!r} has no place in HTTP/2")
