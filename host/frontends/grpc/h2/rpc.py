"""Parses the header fields of a gRPC request."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from host.frontends.grpc.h2.headers import Fields
from host.frontends.grpc.h2.hpack_decoder import Field
from host.frontends.grpc.h2.messages import ENCODINGS
from host.frontends.grpc.h2.status import RpcError, StatusCode
from host.frontends.grpc.methods import Method
from host.frontends.request_headers import Header

_BINARY = b"-bin"
_TRANSPORT_HEADERS = frozenset((b"te", b"content-type"))
_TIMEOUT_PATTERN = re.compile(r"([0-9]{1,8})([HMSmun])").fullmatch
_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
# The order in which grpcio chooses at each level among the encodings that a client accepts.
_PREFERENCES = {"low": ("gzip", "deflate"), "medium": ("deflate", "gzip")}
_PREFERENCES["high"] = _PREFERENCES["medium"]


MethodT = TypeVar("MethodT", bound=Method, covariant=True)


@dataclass(slots=True)  # not frozen, which takes longer to make
class Rpc(Generic[MethodT]):
    """The parsed header of a call; also the RpcContext of its handler.

    `timeout` is in seconds. `encoding` is the compression of the request messages,
    `response_encoding` that of the response messages; empty means none. `fields` are all fields.
    """

    method: MethodT
    timeout: float | None = None
    encoding: str = ""
    response_encoding: str = ""
    fields: Sequence[Field] = ()

    def metadata(self, key: str) -> str | None:
        """Returns the value of a metadata key, or None if it is missing or binary."""
        wanted = key.encode()
        if not _is_metadata(wanted) or wanted.endswith(_BINARY):
            return None
        for name, value in self.fields:
            if name == wanted:
                return value.decode("latin-1")
        return None

    def invocation_metadata(self) -> Sequence[Header]:
        """Returns all metadata; values of `-bin` keys are bytes."""
        return tuple(_decode_metadata(*field) for field in self.fields if _is_metadata(field[0]))


def parse_rpc(fields: Fields, methods: dict[bytes, Method], compression_level: str) -> Rpc[Method]:
    """Parses the fields of a request with a gRPC content type. Raises RpcError."""
    known = dict(reversed(fields))  # the first value counts, as in grpcio
    method = methods.get(known[b":path"])
    if method is None:
        path = known[b":path"].decode("latin-1")
        raise RpcError(StatusCode.UNIMPLEMENTED, f"Method not found: {path}")
    if known.get(b"te") != b"trailers":
        raise RpcError(
            StatusCode.INTERNAL, "expected the header 'te: trailers', as gRPC asks for it"
        )
    encoding = known.get(b"grpc-encoding", b"identity").decode("latin-1")
    if encoding not in ENCODINGS and encoding != "identity":
        raise RpcError(
            StatusCode.UNIMPLEMENTED,
            f"grpc-encoding '{encoding}' is not supported, expected identity, deflate or gzip",
        )
    timeout = _parse_timeout(known.get(b"grpc-timeout"))
    for field in fields:
        if field[0].endswith(_BINARY) and _is_metadata(field[0]):
            _decode_metadata(*field)  # the request is refused if it is wrong
    return Rpc(
        method,
        timeout,
        encoding,
        _choose_response_encoding(known.get(b"grpc-accept-encoding", b""), compression_level),
        fields,
    )


def _is_metadata(name: bytes) -> bool:
    """Whether a field is metadata: not part of HTTP or gRPC themselves, as in grpcio."""
    return name[:1] != b":" and not name.startswith(b"grpc-") and name not in _TRANSPORT_HEADERS


def _decode_metadata(name_bytes: bytes, value: bytes) -> Header:
    """Raises RpcError."""
    name = name_bytes.decode()
    if not name_bytes.endswith(_BINARY):
        return name, value.decode("latin-1")
    try:
        # Clients omit the padding, and may join several values with commas.
        padded = (part.strip() + b"=" * (-len(part.strip()) % 4) for part in value.split(b","))
        return name, b",".join(base64.b64decode(part, validate=True) for part in padded)
    except ValueError:
        raise RpcError(StatusCode.INTERNAL, f"metadata '{name}' is not in base64") from None


def _parse_timeout(value: bytes | None) -> float | None:
    if value is None:
        return None
    found = _TIMEOUT_PATTERN(value.decode("latin-1"))
    if found is None:
        text = value.decode("latin-1")
        raise RpcError(
            StatusCode.INTERNAL,
            f"grpc-timeout '{text}' is not up to 8 digits and one of H M S m u n",
        )
    return int(found[1]) * _SECONDS[found[2]]


def _choose_response_encoding(accepted: bytes, level: str) -> str:
    preferences = _PREFERENCES.get(level)
    if preferences is None:
        return ""
    names = {name.strip() for name in accepted.decode("latin-1").split(",")}
    return next((name for name in preferences if name in names), "")
