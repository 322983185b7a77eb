"""Header blocks into requests: HPACK, the rules for fields (RFC 9113 8.2, 8.3), and a memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Generic, TypeVar

from hpack import Decoder, HPACKError

from host.frontends.grpc.h2.frames import ConnectionFault, ErrorCode

Fields = list[tuple[bytes, bytes]]
T = TypeVar("T")

_REMEMBERED = 64  # blocks of one connection
_REMEMBER_UP_TO = 1024  # bytes of a block
_FIELD_COST = 32  # what RFC 9113 adds to each field when it counts the size of a list
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_BAD_VALUE = re.compile(rb"[\0\r\n]").search
_LENGTH = re.compile(rb"[0-9]{1,19}").fullmatch
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
_REQUIRED = frozenset((b":method", b":scheme", b":path"))
_OF_CONNECTIONS = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)


class Malformed(Exception):
    """A request that breaks the rules of HTTP/2: its stream is reset."""


class HeaderReader(Generic[T]):
    """Decodes the header blocks of one connection, and has `understand` read each list of fields.

    A client repeats itself: a block that does not change the decoder's table means the same until
    the table changes, so what it was understood as is remembered.
    """

    def __init__(self, understand: Callable[[Fields, int], T], most: int) -> None:
        self._understand = understand
        self._decoder = Decoder(max_header_list_size=most)
        self._known: dict[bytes, T] = {}

    def request(self, block: bytes) -> T:
        """What the block asks for.

        Raises Malformed, or ConnectionFault if it cannot be decoded or is larger than `most` bytes.
        """
        known = self._known.get(block)
        if known is not None:
            return known
        fields, stable = self._decode(block)
        _check_request(fields)
        size = sum(len(name) + len(value) + _FIELD_COST for name, value in fields)
        understood = self._understand(fields, size)
        if stable and len(block) <= _REMEMBER_UP_TO:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[block] = understood
        return understood

    def trailers(self, block: bytes) -> None:
        """Fields after the request: nobody asks for them. Raises as `request` does."""
        fields, _ = self._decode(block)
        for name, value in fields:
            _check_field(name, value)  # a pseudo-header has no name of a field

    def skip(self, block: bytes) -> None:
        """Keep the table in step. Raises ConnectionFault."""
        self._decode(block)

    def _decode(self, block: bytes) -> tuple[Fields, bool]:
        """The fields, and whether the table is as before."""
        table = self._decoder.header_table
        before = _state(table)
        try:
            fields = [(bytes(name), bytes(value)) for name, value in self._read(block)]
        except (HPACKError, LookupError, ValueError) as error:
            code = ErrorCode.COMPRESSION_ERROR
            raise ConnectionFault(code, f"header block: {type(error).__name__}") from None
        stable = before == _state(table)
        if not stable:
            self._known.clear()
        return fields, stable

    def _read(self, block: bytes) -> Fields:
        return [(name, value) for name, value in self._decoder.decode(block, raw=True)]


def _state(table: object) -> tuple[int, int, int]:
    """Differs whenever entries were added or dropped: an addition makes a new first entry."""
    entries = table.dynamic_entries  # type: ignore[attr-defined]
    return id(entries[0]) if entries else 0, len(entries), table.maxsize  # type: ignore[attr-defined]


def _check_request(fields: Fields) -> None:
    pseudo: set[bytes] = set()
    lengths: set[bytes] = set()
    ordinary = False
    for name, value in fields:
        if name[:1] == b":":
            if ordinary or name not in _PSEUDO or name in pseudo or not value:
                raise Malformed(f"pseudo-header {name!r} is unknown, empty, late or repeated")
            pseudo.add(name)
            continue
        ordinary = True
        _check_field(name, value)
        if name == b"content-length":
            if not _LENGTH(value) or lengths - {value}:
                raise Malformed(f"content-length {value!r}")
            lengths.add(value)
    if not pseudo >= _REQUIRED:
        raise Malformed("a request without method, scheme or path")


def _check_field(name: bytes, value: bytes) -> None:
    # A value with spaces around it passes: gRPC clients send such metadata, and servers take them.
    if not _NAME(name):
        raise Malformed(f"field name {name!r}")
    if _BAD_VALUE(value):
        raise Malformed(f"value of {name!r}")
    if name in _OF_CONNECTIONS or (name == b"te" and value != b"trailers"):
        raise Malformed(f"field {name!r} has no place in HTTP/2")
