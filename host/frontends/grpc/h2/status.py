"""gRPC status codes, and the HPACK header blocks of responses."""

from __future__ import annotations

import enum
import functools
import re

_LITERAL = b"\x00"  # HPACK: a literal field without indexing
_STATUS_200 = b"\x88"
_STATUS = b"\x08"  # HPACK: `:status` from the static table, with a literal value
_CONTENT_TYPE = b"\x0f\x10"  # HPACK: `content-type` from the static table, with a literal value
_UNSAFE = re.compile(rb"[^ -$&-~]|\A | \Z")  # proxies cut spaces at the ends of a field


class StatusCode(enum.IntEnum):
    """The statuses that the engine itself sends."""

    OK = 0
    DEADLINE_EXCEEDED = 4
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class RpcError(Exception):
    """Ends a call with a status of the engine itself."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def _hpack_string(value: bytes) -> bytes:
    """Encodes a string in HPACK, without Huffman coding."""
    length = len(value)
    if length < 127:
        return bytes((length,)) + value
    head, length = bytearray((127,)), length - 127
    while length > 127:
        head.append(length & 127 | 128)
        length >>= 7
    head.append(length)
    return bytes(head) + value


def hpack_field(name: str, value: bytes) -> bytes:
    """Encodes a header field in HPACK."""
    return _LITERAL + _hpack_string(name.encode()) + _hpack_string(value)


RESPONSE_HEADERS = _STATUS_200 + _CONTENT_TYPE + b"\x10application/grpc"
"""The header block of a response."""

ACCEPT_ENCODING = hpack_field("grpc-accept-encoding", b"identity,deflate,gzip")


@functools.cache
def response_headers(encoding: str) -> bytes:
    """Returns the header block of a response whose messages may be compressed."""
    return RESPONSE_HEADERS + hpack_field("grpc-encoding", encoding.encode())


@functools.lru_cache(256)
def trailers(status: int, message: str = "", max_bytes: int = 0) -> bytes:
    """Returns the trailers of a response; cuts the message to `max_bytes` bytes (0: no limit)."""
    block = hpack_field("grpc-status", b"%d" % status)
    if message:
        block += hpack_field("grpc-message", percent_encode(message, max_bytes))
    return block


def http_error_headers(status: int) -> bytes:
    """Returns the header block that answers a request that is not gRPC."""
    return _STATUS + _hpack_string(b"%d" % status)


def percent_encode(message: str, max_bytes: int = 0) -> bytes:
    """Percent-encodes a message, cut to at most `max_bytes` bytes (0: no limit)."""
    if max_bytes:
        message = message[:max_bytes]  # of a long text, only this part can be needed
    data = message.encode("utf-8", "replace")
    encoded = _UNSAFE.sub(_escape, data)
    while max_bytes and len(encoded) > max_bytes:
        # Cut the text, not its escapes: a byte becomes up to three.
        excess = (len(encoded) - max_bytes + 2) // 3
        data = data[: len(data) - excess].decode("utf-8", "ignore").encode()
        encoded = _UNSAFE.sub(_escape, data)
    return encoded


def _escape(found: re.Match[bytes]) -> bytes:
    return b"%%%02X" % found[0][0]
