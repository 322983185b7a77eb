"""The channel to a server: its address, credentials and options, and the errors of RPCs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from host.errors import ErrorCode, HostError, TooManyRequests, invalid_argument, unavailable

Metadata = Sequence[tuple[str, str]]

_URL = re.compile(r"(?:(grpcs?)://)?([^/:\s]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})/?")
_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a client that is closed has no connection
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A server that restarts is found again as soon as a retry can use it.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
_COMPRESSION = {
    "none": grpc.Compression.NoCompression,
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}
_CODES = {
    grpc.StatusCode.CANCELLED: ErrorCode.CANCELLED,
    grpc.StatusCode.INVALID_ARGUMENT: ErrorCode.INVALID_ARG,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.NOT_FOUND: ErrorCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: ErrorCode.ALREADY_EXISTS,
    grpc.StatusCode.PERMISSION_DENIED: ErrorCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED: ErrorCode.UNSUPPORTED,
    grpc.StatusCode.INTERNAL: ErrorCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE: ErrorCode.UNAVAILABLE,
    grpc.StatusCode.UNAUTHENTICATED: ErrorCode.UNAUTHENTICATED,
}
# A server may answer with UNAVAILABLE too, so only the text tells that there is no connection.
_NO_CONNECTION = ("failed to connect", "DNS resolution failed")
_RETRY_METADATA = "grpc-retry-pushback-ms"


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """How to reach a server.

    `address`: host and port. `credentials`: None without TLS. `metadata`: sent with each RPC.
    """

    url: str
    address: str
    credentials: grpc.ChannelCredentials | None
    compression: grpc.Compression
    metadata: Metadata

    @property
    def options(self) -> list[tuple[str, int]]:
        """The options of the channel."""
        return list(_OPTIONS)


def read_settings(
    url: str,
    api_key: str,
    headers: Mapping[str, str],
    ca_file: str,
    certificate_file: str,
    key_file: str,
    compression: str,
) -> ChannelSettings:
    """Returns the settings that the arguments of a client give. Raises HostError INVALID_ARG."""
    found = _URL.fullmatch(url)
    if found is None:
        hint = ""
        if url.startswith(("http://", "https://")):
            hint = ": the client speaks gRPC, whose port is 8001 by default"
        raise invalid_argument(f"expected grpc://HOST:PORT or grpcs://HOST:PORT, got '{url}'{hint}")
    scheme, host, port = found.groups()
    if int(port) > 65535:
        raise invalid_argument(f"expected a port up to 65535, got '{url}'")
    credentials = None
    if scheme == "grpcs":
        credentials = _read_credentials(ca_file, certificate_file, key_file)
    elif ca_file or certificate_file or key_file:
        raise invalid_argument(f"certificates need TLS: use grpcs://{host}:{port}")
    if compression not in _COMPRESSION:
        raise invalid_argument(
            f"expected a compression of {', '.join(_COMPRESSION)}, got '{compression}'"
        )
    sent = dict(headers)
    if api_key:
        if any(name.lower() == "authorization" for name in sent):
            raise invalid_argument("expected either api_key or the header 'authorization'")
        sent["authorization"] = f"Bearer {api_key}"
    return ChannelSettings(
        f"{scheme or 'grpc'}://{host}:{port}",
        f"{host}:{port}",
        credentials,
        _COMPRESSION[compression],
        to_metadata(sent),
    )


def _read_credentials(
    ca_file: str, certificate_file: str, key_file: str
) -> grpc.ChannelCredentials:
    if bool(certificate_file) != bool(key_file):
        raise invalid_argument("a client certificate needs both certificate_file and key_file")
    return grpc.ssl_channel_credentials(
        root_certificates=_read_file(ca_file),
        private_key=_read_file(key_file),
        certificate_chain=_read_file(certificate_file),
    )


def _read_file(path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise invalid_argument(f"cannot read '{path}': {error.strerror}") from error


def to_metadata(headers: Mapping[str, str]) -> Metadata:
    """Returns headers as gRPC sends them. Raises HostError INVALID_ARG."""
    for name, value in headers.items():
        if not re.fullmatch(r"[0-9A-Za-z_.-]+", name) or name.lower().endswith("-bin"):
            raise invalid_argument(f"header '{name}' cannot be sent: its name is invalid")
        if not isinstance(value, str) or not re.fullmatch(r"[ -~]*", value):
            raise invalid_argument(
                f"header '{name}' cannot be sent: expected a str of printable ASCII characters"
            )
    return tuple((name.lower(), value) for name, value in headers.items())


def to_host_error(error: Any, url: str) -> HostError:
    """Returns the error of an RPC as one of the server."""
    status: grpc.StatusCode = error.code()
    code = _CODES.get(status, ErrorCode.UNKNOWN)
    details = error.details() or f"status {status.name}"
    if code is ErrorCode.DEADLINE_EXCEEDED:
        return HostError(code, f"{url} has not responded within the timeout")
    if code is ErrorCode.UNAVAILABLE and details.startswith(_NO_CONNECTION):
        tls = "with" if url.startswith("grpcs") else "without"
        return HostError(
            code,
            f"no answer from {url}: {details}; is it the address of the gRPC port, {tls} TLS?",
        )
    if code is ErrorCode.RESOURCE_EXHAUSTED:
        after = dict(error.trailing_metadata() or ()).get(_RETRY_METADATA)
        if isinstance(after, str) and after.isdigit():
            return TooManyRequests(details, int(after) / 1000)
    return HostError(code, details)


def closed_error() -> HostError:
    """The error of calls of a client that is closed."""
    return unavailable("this client is closed; create another one")
