"""RPCs over HTTP, to servers that answer as only a socket can."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from tritonclient.grpc import service_pb2 as pb

from host.cli.model_client import ModelClient
from host.cli.server_client import ConnectionOptions
from host.client.channel import Rpc, read_settings
from host.client.http_transport import HttpTransport
from host.client.messages import new_request
from host.errors import ErrorCode, HostError
from tests.conftest import DEADLINE

_RESULT_BODY = b'{"model_name": "m", "outputs": []}'
RESULT = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(_RESULT_BODY), _RESULT_BODY)

Serve = Callable[[socket.socket], None]


@contextmanager
def serving(serve: Serve) -> Iterator[str]:
    """The URL of a server that serves its connections with this function, one after the other."""

    def run() -> None:
        while True:
            connection = listener.accept()[0]
            with connection:
                connection.settimeout(DEADLINE)
                if stopped.is_set():
                    return
                with suppress(ConnectionError):
                    serve(connection)

    stopped = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE)
        address = listener.getsockname()
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"http://127.0.0.1:{address[1]}"
        finally:
            stopped.set()
            socket.create_connection(address).close()
            thread.join(DEADLINE)


def read_request(connection: socket.socket) -> bytes:
    """Returns a request; b"" at the end of the connection."""
    request = b""
    while not (end := request.find(b"\r\n\r\n") + 4) > 3:
        received = connection.recv(1 << 16)
        if not received:
            return b""
        request += received
    length = 0
    for line in request[:end].lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    while len(request) < end + length:
        request += connection.recv(1 << 16)
    return request


def send_slowly(connection: socket.socket, answer: bytes) -> bool:
    """Sends a byte now and then; returns False if the client closes the connection first."""
    connection.settimeout(0.05)
    for number in range(len(answer)):
        connection.sendall(answer[number : number + 1])
        with suppress(TimeoutError):
            if not connection.recv(1):
                return False
    return True


def call(url: str, timeout: float, headers: dict[str, str] | None = None) -> object:
    """Asks a server for its metadata. Raises HostError."""
    settings = read_settings(url, "", headers or {}, "", "", "", "none")
    transport = HttpTransport(settings)
    try:
        message = pb.ServerMetadataRequest()
        return transport.call(Rpc("ServerMetadata", message, timeout, settings.metadata))
    finally:
        transport.close()


@pytest.mark.parametrize("part", ["status", "fields", "body"])
def test_the_timeout_limits_a_call_whose_answer_arrives_byte_by_byte(part: str) -> None:
    body = b'{"name": "%s"}' % (b"n" * 60)
    parts = {
        "status": b"HTTP/1.1 200 %s\r\n" % (b"O" * 60),
        "fields": b"Server: %s\r\nContent-Length: %d\r\n\r\n" % (b"s" * 60, len(body)),
        "body": body,
    }
    finished = []

    def serve(connection: socket.socket) -> None:
        read_request(connection)
        for name, data in parts.items():
            if name == part:
                finished.append(send_slowly(connection, data))
                return
            connection.sendall(data)

    with serving(serve) as url, pytest.raises(HostError) as caught:
        call(url, 0.5)
    assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED
    assert finished == [False]


def test_the_timeout_limits_a_body_of_unknown_length() -> None:
    def serve(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
        send_slowly(connection, b'{"name": "a server with a long name"}')

    with serving(serve) as url, pytest.raises(HostError) as caught:
        call(url, 0.5)
    assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED


def test_a_header_of_the_user_replaces_that_of_the_client() -> None:
    requests = []

    def serve(connection: socket.socket) -> None:
        while request := read_request(connection):
            requests.append(request)
            connection.sendall(RESULT)

    headers = ["Host: model.example", "CONTENT-TYPE: application/x-tensors"]
    given = ConnectionOptions(header=headers)
    with serving(serve) as url, ModelClient(url, given, DEADLINE) as client:
        list(client.infer(new_request("m", "", "", [], {}), False))
    fields = requests[0].partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
    assert [one for one in fields if one.startswith(b"host:")] == [b"host: model.example"]
    kinds = [one for one in fields if one.startswith(b"content-type:")]
    assert kinds == [b"content-type: application/x-tensors"]


@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request"])
def test_an_answer_that_is_nested_too_deeply_is_an_error(status: bytes) -> None:
    body = b"[" * 100_000

    def serve(connection: socket.socket) -> None:
        read_request(connection)
        head = b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n"
        connection.sendall(head % (status, len(body)) + body)

    with serving(serve) as url, pytest.raises(HostError) as caught:
        call(url, DEADLINE)
    assert caught.value.message.startswith("unexpected answer")


@contextmanager
def closing_kept_connections(requests: list[bytes], begin: bytes = b"") -> Iterator[ModelClient]:
    """A client of a server that closes its first connection when a second request arrives there.

    It sends `begin` before, a part of an answer.
    """

    def serve(connection: socket.socket) -> None:
        first = not requests
        while request := read_request(connection):
            requests.append(request)
            if first and len(requests) == 2:
                connection.sendall(begin)
                return
            connection.sendall(RESULT)

    with serving(serve) as url, ModelClient(url, ConnectionOptions(), DEADLINE) as client:
        yield client


def test_a_request_is_sent_again_if_the_server_closes_the_kept_connection() -> None:
    requests: list[bytes] = []
    with closing_kept_connections(requests) as client:
        for _ in range(3):
            list(client.infer(new_request("m", "", "", [], {}), False))
    assert len(requests) == 4


@pytest.mark.parametrize("case", ["sequence", "part of an answer"])
def test_a_request_that_may_have_had_an_effect_is_not_sent_again(case: str) -> None:
    requests: list[bytes] = []
    begin, parameters = (b"", {"sequence_id": 7}) if case == "sequence" else (b"HTTP/1.1 2", {})
    with closing_kept_connections(requests, begin) as client:
        list(client.infer(new_request("m", "", "", [], parameters), False))
        with pytest.raises(HostError) as caught:
            list(client.infer(new_request("m", "", "", [], parameters), False))
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert len(requests) == 2


def test_a_redirect_names_its_target() -> None:
    def serve(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(
            b"HTTP/1.1 308 Permanent Redirect\r\nLocation: https://models.example/v2\r\n"
            b"Content-Length: 0\r\n\r\n"
        )

    with serving(serve) as url, pytest.raises(HostError) as caught:
        call(url, DEADLINE)
    assert "redirects to https://models.example/v2" in caught.value.message
