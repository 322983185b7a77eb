"""RPCs as HTTP requests, for servers of which only the HTTP port can be reached."""

from __future__ import annotations

import base64
import gzip
import http.client
import io
import json
import select
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote

from google.protobuf.json_format import ParseDict, ParseError
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from host.client.channel import (
    ChannelSettings,
    Metadata,
    NoAnswer,
    Rpc,
    cancelled_error,
    closed_error,
    no_answer,
    timed_out,
)
from host.client.messages import parameter_values, set_parameter
from host.client.signature import TensorSpec, encode_values
from host.errors import ErrorCode, HostError, TooManyRequests, internal, invalid_argument

_HEADER_LENGTH = "Inference-Header-Content-Length"
_RESERVED = {"content-length", "content-encoding", "transfer-encoding", _HEADER_LENGTH.lower()}
_CODES = {
    400: ErrorCode.INVALID_ARG,
    401: ErrorCode.UNAUTHENTICATED,
    403: ErrorCode.PERMISSION_DENIED,
    404: ErrorCode.NOT_FOUND,
    429: ErrorCode.RESOURCE_EXHAUSTED,
    500: ErrorCode.INTERNAL,
    501: ErrorCode.UNSUPPORTED,
    503: ErrorCode.UNAVAILABLE,
    504: ErrorCode.DEADLINE_EXCEEDED,
}
_NOT_READABLE = (
    ParseError, LookupError, TypeError, ValueError, AttributeError, RecursionError,
)  # fmt: skip
_CLOSED = ConnectionError, ssl.SSLEOFError
_MAX_IDLE = 64  # connections that are kept
_JOINED_BYTES = 65536  # of a body that is sent with its headers, in one write

Headers = http.client.HTTPMessage


class HttpRequest(NamedTuple):
    """An HTTP request. `read`: gives the message of an answer with status 200.

    `refused`: the message of status 400, and of an unknown model, where that is no error.
    """

    verb: str
    path: str
    read: Callable[[Headers, memoryview], Any]
    body: Sequence[bytes] = ()
    headers: Mapping[str, str] = MappingProxyType({})
    refused: Any = None


class HttpTransport:
    """Carries out RPCs (docs/reference/http.md). Any thread may call."""

    def __init__(self, settings: ChannelSettings) -> None:
        """Raises HostError INVALID_ARG for headers that the client sets itself."""
        _check_headers(settings.metadata)
        self.settings = settings
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: set[http.client.HTTPConnection] = set()
        self.closed = False

    def call(self, rpc: Rpc) -> Any:
        """Returns the response. Raises HostError."""
        return HttpCall(self).run(rpc)

    def close(self) -> None:
        """Closes all connections; calls in progress fail."""
        with self._lock:
            self.closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                _interrupt(connection)
        for connection in idle:
            connection.close()

    def take(self, new: bool) -> http.client.HTTPConnection:
        """Returns a connection that is open, or a `new` one. Raises HostError."""
        with self._lock:
            if self.closed:
                raise closed_error()
            kept = None if new else self._open_connection()
            connection = kept or self._new_connection()
            self._busy.add(connection)
            return connection

    def _open_connection(self) -> http.client.HTTPConnection | None:
        while self._idle:
            connection = self._idle.pop()
            poll = select.poll()
            poll.register(connection.sock, select.POLLIN)
            if not poll.poll(0):  # what can be read is the server's end of the connection
                return connection
            connection.close()
        return None

    def _new_connection(self) -> http.client.HTTPConnection:
        if self.settings.tls is None:
            return http.client.HTTPConnection(self.settings.address)
        return http.client.HTTPSConnection(self.settings.address, context=self.settings.tls)

    def give_back(self, connection: http.client.HTTPConnection, usable: bool) -> None:
        """Keeps a connection for the next call, or closes it."""
        with self._lock:
            self._busy.discard(connection)
            if usable and not self.closed and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()


class _KeptConnectionClosed(NoAnswer):
    """The server has closed a kept connection without a byte of an answer."""


class HttpCall:
    """One RPC, which another thread may cancel."""

    def __init__(self, transport: HttpTransport) -> None:
        self._transport = transport
        self._connection: http.client.HTTPConnection | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Closes the connection, so that the server does not go on."""
        self._cancelled = True
        if (connection := self._connection) is not None:
            _interrupt(connection)

    def run(self, rpc: Rpc) -> Any:
        """Returns the response. Raises HostError."""
        _check_headers(rpc.metadata)
        request = to_http(rpc.method, rpc.message)
        deadline = None if rpc.timeout is None else time.monotonic() + rpc.timeout
        given = dict(rpc.metadata)
        try:
            status, headers, body = self._exchange(request, given, deadline)
        except _KeptConnectionClosed:
            if not rpc.repeatable:
                raise
            status, headers, body = self._exchange(request, given, deadline, new=True)
        if status != 200:
            error = self._error(status, headers, body)
            if request.refused is None or (status != 400 and error.code is not ErrorCode.NOT_FOUND):
                raise error
            return request.refused
        try:
            return request.read(headers, memoryview(body))
        except _NOT_READABLE as error:
            raise self._unexpected_answer(status, headers) from error

    def _exchange(
        self,
        request: HttpRequest,
        given: Mapping[str, str],
        deadline: float | None,
        new: bool = False,
    ) -> tuple[int, Headers, bytes | bytearray]:
        """Returns status, headers and body. `new`: over a new connection. Raises HostError."""
        settings = self._transport.settings
        body = request.body
        headers = dict(request.headers)
        if settings.http_encoding:
            headers["Accept-Encoding"] = settings.http_encoding
            if body:
                body = [_compress(b"".join(body), settings.http_encoding)]
                headers["Content-Encoding"] = settings.http_encoding
        headers = replace_headers(headers, given)
        if request.verb == "POST":
            headers["Content-Length"] = str(sum(map(len, body)))
        connection = self._connection = self._transport.take(new)
        kept = connection.sock is not None
        receiver = _Receiver(deadline)
        usable = sent = False
        try:
            _connect(connection, deadline)
            if self._cancelled:  # before there was a connection to close
                raise ConnectionAbortedError
            has_host = "host" in given
            connection.putrequest(request.verb, request.path, has_host, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value)
            if sum(map(len, body)) <= _JOINED_BYTES:
                body = [b"".join(body)]
            # A server may answer without reading the body; if it has not, `getresponse` fails.
            with suppress(*_CLOSED):
                connection.endheaders(body[0])
                for part in body[1:]:
                    _set_timeout(connection, deadline)
                    connection.send(part)
                sent = True
            connection.response_class = partial(_open_response, receiver)  # type: ignore[assignment]
            response = connection.getresponse()
            received = _read_body(response)
            usable = sent and not response.will_close
            encoding = response.headers.get("Content-Encoding", "")
            return response.status, response.headers, _decompress(received, encoding)
        except TimeoutError as error:
            raise timed_out(settings.url, str(error)) from error
        except (OSError, ValueError, http.client.HTTPException, zlib.error) as error:
            if self._cancelled or self._transport.closed:
                raise cancelled_error() from error
            reason = str(error) or type(error).__name__
            if type(error) is http.client.BadStatusLine:  # its text are the bytes
                reason = "its answer is not one of HTTP/1.1"
            failure = no_answer(settings.url, reason, "HTTP")
            if kept and not receiver.begun and isinstance(error, _CLOSED):
                failure = _KeptConnectionClosed(failure.code, failure.message, failure.reason)
            raise failure from error
        finally:
            self._connection = None
            self._transport.give_back(connection, usable)

    def _error(self, status: int, headers: Headers, body: bytes | bytearray) -> HostError:
        try:
            text = str(json.loads(body)["error"])
        except _NOT_READABLE:
            return self._unexpected_answer(status, headers)
        code = _CODES.get(status, ErrorCode.UNKNOWN)
        after, exact = headers.get("Retry-After", ""), headers.get("Retry-After-Ms", "")
        if code is ErrorCode.RESOURCE_EXHAUSTED and after.isdigit():
            return TooManyRequests(text, int(exact) / 1000 if exact.isdigit() else int(after))
        return HostError(code, text)

    def _unexpected_answer(self, status: int, headers: Headers) -> HostError:
        url = self._transport.settings.url
        if 300 <= status < 400 and (location := headers.get("Location")):
            return internal(f"{url} redirects to {location} (status {status}): use that address")
        shown = "" if status == 200 else f" (status {status})"
        return internal(f"unexpected answer{shown} from {url}; is it the address of the HTTP port?")


def _check_headers(metadata: Metadata) -> None:
    for name, _ in metadata:
        if name in _RESERVED:
            raise invalid_argument(f"header '{name}' cannot be sent: the client sets it itself")


def _connect(connection: http.client.HTTPConnection, deadline: float | None) -> None:
    if connection.sock is None:
        connection.timeout = None if deadline is None else _left(deadline)
        connection.connect()  # without Nagle's algorithm
    _set_timeout(connection, deadline)


def _set_timeout(connection: http.client.HTTPConnection, deadline: float | None) -> None:
    connection.sock.settimeout(None if deadline is None else _left(deadline))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:  # 0 would be a socket that does not block
        raise TimeoutError("timed out")
    return left


def replace_headers(own: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Returns all headers; those given replace own ones, whose names may differ in their case."""
    names = {name.lower() for name in given}
    return {name: value for name, value in own.items() if name.lower() not in names} | dict(given)


def _interrupt(connection: http.client.HTTPConnection) -> None:
    """Ends what another thread does with a connection."""
    sock = connection.sock
    if sock is not None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended


class _Receiver(io.RawIOBase):
    """Receives an answer until a deadline, however many bytes at a time arrive.

    `begun`: whether a byte has arrived.
    """

    def __init__(self, deadline: float | None) -> None:
        self._deadline = deadline
        self.begun = False
        self._file = io.RawIOBase()  # until `open`

    def open(self, sock: socket.socket, file: io.RawIOBase) -> None:
        """Receives from a socket and its file."""
        self._sock, self._file = sock, file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(None if self._deadline is None else _left(self._deadline))
        count = self._file.readinto(buffer)
        self.begun = self.begun or bool(count)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _open_response(
    receiver: _Receiver, sock: socket.socket, method: str
) -> http.client.HTTPResponse:
    response = http.client.HTTPResponse(sock, method=method)
    receiver.open(sock, response.fp.detach())
    response.fp = io.BufferedReader(receiver)
    return response


def _read_body(response: http.client.HTTPResponse) -> bytes | bytearray:
    """Reads a whole body. Raises OSError and HTTPException."""
    length = response.length
    if length is None:
        return response.read()
    body = bytearray(length)
    position = 0
    while position < length:
        count = response.readinto(memoryview(body)[position:])
        if not count:
            raise http.client.IncompleteRead(b"", length - position)
        position += count
    response.read()  # so that the response knows of its end
    return body


def _compress(body: bytes, encoding: str) -> bytes:
    return gzip.compress(body, 6) if encoding == "gzip" else zlib.compress(body)


def _decompress(body: bytes | bytearray, encoding: str) -> bytes | bytearray:
    """Raises OSError, EOFError as a ValueError, and zlib.error for another form."""
    if not encoding or encoding == "identity":
        return body
    if encoding == "gzip":
        return zlib.decompress(body, wbits=31)
    if encoding == "deflate":
        return zlib.decompress(body)
    raise ValueError(f"unknown Content-Encoding '{encoding}'")


# The requests of each RPC


def to_http(method: str, message: Any) -> HttpRequest:
    """Returns an RPC as an HTTP request."""
    return _REQUESTS[method](message)


def _model_path(message: Any, end: str = "") -> str:
    path = f"/v2/models/{quote(message.name, safe='')}"
    return f"{path}/versions/{message.version}{end}" if message.version else f"{path}{end}"


def _read_as(kind: Callable[[], Any]) -> Callable[[Headers, memoryview], Any]:
    return lambda headers, body: ParseDict(
        json.loads(bytes(body)), kind(), ignore_unknown_fields=True
    )


def _nothing(kind: Callable[[], Any]) -> Callable[[Headers, memoryview], Any]:
    return lambda headers, body: kind()


def _read_index(headers: Headers, body: memoryview) -> Any:
    return ParseDict(
        {"models": json.loads(bytes(body))},
        pb.RepositoryIndexResponse(),
        ignore_unknown_fields=True,
    )


def _read_config(headers: Headers, body: memoryview) -> Any:
    config = ParseDict(
        json.loads(bytes(body)), model_config_pb2.ModelConfig(), ignore_unknown_fields=True
    )
    return pb.ModelConfigResponse(config=config)


def _ready(path: str, kind: Callable[..., Any]) -> HttpRequest:
    return HttpRequest(
        "GET", path, lambda headers, body: kind(ready=True), refused=kind(ready=False)
    )


def _post(path: str, content: Any, read: Callable[[Headers, memoryview], Any]) -> HttpRequest:
    body = json.dumps(content).encode()
    return HttpRequest("POST", path, read, [body], {"Content-Type": "application/json"})


def _control(message: Any, action: str, answer: Callable[[], Any]) -> HttpRequest:
    parameters: dict[str, Any] = {**parameter_values(message.parameters)}
    for name, value in message.parameters.items():
        if value.HasField("bytes_param"):
            parameters[name] = base64.b64encode(value.bytes_param).decode()
    path = f"/v2/repository/models/{quote(message.model_name, safe='')}/{action}"
    return _post(path, {"parameters": parameters}, _nothing(answer))


def _region(message: Any, action: str, answer: Callable[[], Any]) -> HttpRequest:
    content = {}
    if action == "register":
        content = {
            "key": message.key,
            "offset": message.offset,
            "byte_size": message.byte_size,
        }
    path = f"/v2/systemsharedmemory/region/{quote(message.name, safe='')}/{action}"
    return _post(path, content, _nothing(answer))


def _infer(message: Any) -> HttpRequest:
    contents = iter(message.raw_input_contents)
    parts = []
    inputs = []
    for tensor in message.inputs:
        parameters = parameter_values(tensor.parameters)
        if not parameters:  # it is not in shared memory
            content = next(contents)
            parameters["binary_data_size"] = len(content)
            parts.append(content)
        inputs.append(
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "parameters": parameters,
            }
        )
    header: dict[str, Any] = {"inputs": inputs, "parameters": parameter_values(message.parameters)}
    if message.id:
        header["id"] = message.id
    if message.outputs:
        header["outputs"] = [_output(output) for output in message.outputs]
    else:
        header["parameters"]["binary_data_output"] = True
    text = json.dumps(header).encode()
    path = f"/v2/models/{quote(message.model_name, safe='')}"
    if message.model_version:
        path = f"{path}/versions/{message.model_version}"
    headers = {"Content-Type": "application/octet-stream", _HEADER_LENGTH: str(len(text))}
    return HttpRequest("POST", f"{path}/infer", _read_infer, [text, *parts], headers)


def _output(output: Any) -> dict[str, Any]:
    parameters = parameter_values(output.parameters)
    if "shared_memory_region" not in parameters:
        parameters["binary_data"] = True
    return {"name": output.name, "parameters": parameters}


def _read_infer(headers: Headers, body: memoryview) -> Any:
    length = int(headers.get(_HEADER_LENGTH, len(body)))
    header = json.loads(bytes(body[:length]))
    response = pb.ModelInferResponse(
        model_name=header["model_name"],
        model_version=header.get("model_version", ""),
        id=header.get("id", ""),
    )
    for output in header["outputs"]:
        response.outputs.add(
            name=output["name"], datatype=output["datatype"], shape=output["shape"]
        )
        size = output.get("parameters", {}).get("binary_data_size")
        if size is not None:
            if not 0 <= size <= len(body) - length:
                raise ValueError(f"{size} bytes of {len(body) - length}")
            response.raw_output_contents.append(bytes(body[length : length + size]))
            length += size
        elif "data" in output:  # of a server without binary data
            spec = TensorSpec(output["name"], output["datatype"], tuple(output["shape"]))
            response.raw_output_contents.append(encode_values(spec, output["data"]))
    for name, value in header.get("parameters", {}).items():
        set_parameter(response, name, value)
    return response


_REQUESTS: Mapping[str, Callable[[Any], HttpRequest]] = {
    "ServerReady": lambda message: _ready("/v2/health/ready", pb.ServerReadyResponse),
    "ModelReady": lambda message: _ready(_model_path(message, "/ready"), pb.ModelReadyResponse),
    "ServerMetadata": lambda message: HttpRequest(
        "GET", "/v2", _read_as(pb.ServerMetadataResponse)
    ),
    "ModelMetadata": lambda message: HttpRequest(
        "GET", _model_path(message), _read_as(pb.ModelMetadataResponse)
    ),
    "ModelConfig": lambda message: HttpRequest(
        "GET", _model_path(message, "/config"), _read_config
    ),
    "ModelStatistics": lambda message: HttpRequest(
        "GET", _model_path(message, "/stats"), _read_as(pb.ModelStatisticsResponse)
    ),
    "RepositoryIndex": lambda message: _post("/v2/repository/index", {}, _read_index),
    "RepositoryModelLoad": lambda message: _control(
        message, "load", pb.RepositoryModelLoadResponse
    ),
    "RepositoryModelUnload": lambda message: _control(
        message, "unload", pb.RepositoryModelUnloadResponse
    ),
    "SystemSharedMemoryRegister": lambda message: _region(
        message, "register", pb.SystemSharedMemoryRegisterResponse
    ),
    "SystemSharedMemoryUnregister": lambda message: _region(
        message, "unregister", pb.SystemSharedMemoryUnregisterResponse
    ),
    "ModelInfer": _infer,
}
