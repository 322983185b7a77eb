"""How to reach a server: its address, credentials and options, and RPCs and their errors."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import grpc

from host.client.tls import read_file, read_tls
from host.errors import ErrorCode, HostError, TooManyRequests, invalid_argument, unavailable

Metadata = Sequence[tuple[str, str]]


class Rpc(NamedTuple):
    """An RPC to carry out. `timeout` in seconds; None is no limit.

    `repeatable`: it may be sent once more if the server closes a kept HTTP connection at that
    moment. Clients that repeat failed RPCs themselves do not need it.
    """

    method: str
    message: Any
    timeout: float | None
    metadata: Metadata
    repeatable: bool = False


class NoAnswer(HostError):
    """The server is not there, or has not responded in time. `reason`: of the connection."""

    def __init__(self, code: ErrorCode, message: str, reason: str) -> None:
        super().__init__(code, message)
        self.reason = reason


_URL = re.compile(r"(?:(grpcs?|https?)://)?([^/:\s]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})/?")
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
_GRPC_NAME = re.compile(r"(?!.*-bin$)[\w.-]+", re.ASCII | re.IGNORECASE)
_HTTP_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_ASCII, _LATIN = re.compile(r"[ -~]*"), re.compile(r"[\t -~\x80-\xff]*")
_RETRY_METADATA = "grpc-retry-pushback-ms"


@dataclass(frozen=True, slots=True)
class ChannelSettings:
    """How to reach a server.

    `address`: host and port. `metadata`: sent with each RPC. `credentials` of gRPC and `tls` of
    HTTP: None without TLS. `http_encoding`: compression of HTTP bodies, "" for none.
    """

    url: str
    address: str
    metadata: Metadata
    credentials: grpc.ChannelCredentials | None = None
    compression: grpc.Compression = grpc.Compression.NoCompression
    tls: ssl.SSLContext | None = None
    http_encoding: str = ""

    @property
    def over_http(self) -> bool:
        """Whether RPCs are HTTP requests."""
        return self.url.startswith("http")

    def open_channel(self, library: Any) -> Any:
        """Opens a channel of `grpc` or `grpc.aio`; it connects with its first RPC."""
        if self.credentials is None:
            return library.insecure_channel(self.address, _OPTIONS, self.compression)
        return library.secure_channel(self.address, self.credentials, _OPTIONS, self.compression)


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
        raise invalid_argument(
            f"expected grpc://HOST:PORT, grpcs://, http:// or https://, got '{url}'"
        )
    scheme, host, port = found.groups()
    scheme = scheme or "grpc"
    if not 0 < int(port) < 65536:
        raise invalid_argument(f"expected a port from 1 to 65535, got '{url}'")
    if compression not in _COMPRESSION:
        raise invalid_argument(
            f"expected a compression of {', '.join(_COMPRESSION)}, got '{compression}'"
        )
    if bool(certificate_file) != bool(key_file):
        raise invalid_argument("a client certificate needs both certificate_file and key_file")
    encrypted = scheme in ("grpcs", "https")
    if not encrypted and (ca_file or certificate_file):
        raise invalid_argument(f"certificates need TLS: use {scheme}s://{host}:{port}")
    sent = dict(headers)
    if api_key:
        if any(name.lower() == "authorization" for name in sent):
            raise invalid_argument("expected either api_key or the header 'authorization'")
        sent["authorization"] = f"Bearer {api_key}"
    metadata = to_metadata(sent, scheme in ("http", "https"))
    settings = ChannelSettings(f"{scheme}://{host}:{port}", f"{host}:{port}", metadata)
    tls = None
    if encrypted and (settings.over_http or ca_file or certificate_file):
        tls = read_tls(ca_file, certificate_file, key_file)  # gRPC does not check the files
    if settings.over_http:
        encoding = "" if compression == "none" else compression
        return replace(settings, tls=tls, http_encoding=encoding)
    credentials = None
    if encrypted:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=read_file(ca_file),
            private_key=read_file(key_file),
            certificate_chain=read_file(certificate_file),
        )
    return replace(settings, credentials=credentials, compression=_COMPRESSION[compression])


def to_metadata(headers: Mapping[str, str], over_http: bool) -> Metadata:
    """Returns headers as gRPC or HTTP sends them. Raises HostError INVALID_ARG."""
    for name, value in headers.items():
        if not (_HTTP_NAME if over_http else _GRPC_NAME).fullmatch(name):
            raise invalid_argument(f"header '{name}' cannot be sent: its name is invalid")
        form, kind = (_LATIN, "Latin-1") if over_http else (_ASCII, "ASCII")
        if not isinstance(value, str) or not form.fullmatch(value):
            raise invalid_argument(
                f"header '{name}' cannot be sent: expected a str of printable {kind} characters"
            )
    return tuple((name.lower(), value) for name, value in headers.items())


def to_host_error(error: Any, url: str) -> HostError:
    """Returns the error of an RPC as one of the server."""
    status: grpc.StatusCode = error.code()
    code = _CODES.get(status, ErrorCode.UNKNOWN)
    details = error.details() or f"status {status.name}"
    if code is ErrorCode.DEADLINE_EXCEEDED:
        return timed_out(url, details)
    if code is ErrorCode.UNAVAILABLE and details.startswith(_NO_CONNECTION):
        return no_answer(url, details, "gRPC")
    if code is ErrorCode.RESOURCE_EXHAUSTED:
        after = dict(error.trailing_metadata() or ()).get(_RETRY_METADATA)
        if isinstance(after, str) and after.isdigit():
            return TooManyRequests(details, int(after) / 1000)
    return HostError(code, details)


def no_answer(url: str, reason: str, protocol: str) -> NoAnswer:
    """The error of a server that is not there. `protocol`: gRPC or HTTP."""
    tls = "with" if url.startswith(("grpcs", "https")) else "without"
    text = f"no answer from {url}: {reason}; is it the address of the {protocol} port, {tls} TLS?"
    return NoAnswer(ErrorCode.UNAVAILABLE, text, reason)


def timed_out(url: str, reason: str) -> HostError:
    """The error of a call that has taken too long."""
    text = f"{url} has not responded within the timeout"
    return NoAnswer(ErrorCode.DEADLINE_EXCEEDED, text, reason)


def closed_error() -> HostError:
    """The error of calls of a client that is closed."""
    return unavailable("this client is closed; create another one")


def cancelled_error() -> HostError:
    """The error of calls that are in progress when a client is closed."""
    return HostError(ErrorCode.CANCELLED, "this client was closed before the call had ended")
