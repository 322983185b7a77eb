"""Clients that start a request and do not finish it, at every endpoint, with and without TLS."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import hpack
import psutil
import pytest
import tritonclient.grpc as grpcclient
import trustme

from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # how a ClientHello begins
HEAD = b"POST /v2/logging HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
BLOCK = hpack.Encoder().encode(
    [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/inference.GRPCInferenceService/ServerLive"),
        (":authority", "x"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


CALL = PREFACE + SETTINGS + frame(1, 4, 1, BLOCK)

Case = tuple[str, bytes, bytes]
"""An endpoint, the bytes that a client sends before it falls silent, and the expected response."""

SLOW: dict[str, Case] = {
    "http nothing": ("http", b"", b""),
    "http half a head": ("http", HEAD, b"408 Request Timeout"),
    "http no body": ("http", HEAD + b"\r\n", b"408 Request Timeout"),
    "http half a body": ("http", HEAD + b"\r\n{", b"408 Request Timeout"),
    "http half a chunk": (
        "http",
        HEAD.replace(b"content-length: 100", b"transfer-encoding: chunked") + b"\r\n10\r\n{",
        b"408 Request Timeout",
    ),
    "metrics half a head": ("metrics", b"GET /metrics HTTP/1.1\r\n", b"408 Request Timeout"),
    "grpc nothing": ("grpc", b"", b""),
    "grpc half a preface": ("grpc", PREFACE[:10], b""),
    "grpc no settings": ("grpc", PREFACE, b""),
    "grpc no message": ("grpc", CALL, b"The request did not arrive in time"),
    "grpc half a message": (
        "grpc",
        CALL + frame(0, 0, 1, b"\0\0\0\1\0half of it"),
        b"The request did not arrive in time",
    ),
    "grpc half a header block": ("grpc", PREFACE + SETTINGS + frame(1, 0, 1, BLOCK), b"too slow"),
    "grpc half a frame": (
        "grpc",
        PREFACE + SETTINGS + frame(6, 0, 0, b"12345678")[:-1],
        b"too slow",
    ),
}

OVER_TLS = (
    "http half a head", "http half a body", "grpc nothing", "grpc half a message",
    "grpc half a frame",
)  # fmt: skip

LIMITS = [
    "--http-header-timeout-secs=4",
    "--http-body-timeout-secs=4",
    "--grpc-handshake-timeout-secs=4",
    "--grpc-body-timeout-secs=4",
    "--grpc-engine=h2",
]
"""Seconds that a client on a machine under load may need to send its bytes."""


@dataclass
class Endpoints:
    """A host, and how to get into it."""

    host: RunningHost
    tls: ssl.SSLContext | None
    client: grpcclient.InferenceServerClient

    def connect(self, endpoint: str, bare: bool = False) -> socket.socket:
        urls = {"http": self.host.http_url, "metrics": self.host.metrics_url}
        port = int(urls.get(endpoint, self.host.url).rpartition(":")[2])
        made = socket.create_connection(("127.0.0.1", port), DEADLINE)
        if self.tls is None or bare or endpoint == "metrics":
            return made
        self.tls.set_alpn_protocols(["h2" if endpoint == "grpc" else "http/1.1"])
        return self.tls.wrap_socket(made, server_hostname="127.0.0.1")

    def descriptors(self) -> int:
        return psutil.Process(self.host.process.pid).num_fds()


@pytest.fixture(scope="module")
def kinds(
    module_repository: RepositoryBuilder,
    module_serve: Serve,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Endpoints]]:
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "root.pem"))
    pem = folder / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(pem))
    tls = ssl.create_default_context(cafile=str(folder / "root.pem"))
    files = [
        f"--{endpoint}-{flag}"
        for endpoint in ("http", "grpc")
        for flag in ("use-ssl=true", f"server-cert={pem}", f"server-key={pem}")
    ]
    hosts = [module_serve(module_repository, *LIMITS, *more) for more in ([], files)]
    plain, secret = (host.wait_started() for host in hosts)
    with (
        plain.client() as client,
        grpcclient.InferenceServerClient(
            secret.url, ssl=True, root_certificates=str(folder / "root.pem")
        ) as other,
    ):
        wait_until(lambda: client.is_server_live() and other.is_server_live(), "both hosts")
        yield {"plain": Endpoints(plain, None, client), "tls": Endpoints(secret, tls, other)}


def rest(connection: socket.socket) -> bytes:
    """All data until the end of the connection or of a gRPC call; fails if neither comes."""
    said = b""
    while True:
        try:
            part = connection.recv(1 << 16)
        except (ConnectionError, ssl.SSLError):
            return said
        said += part
        if not part or b"The request did not arrive in time" in said:
            return said


def check(endpoints: Endpoints, cases: Mapping[str, Case], *, bare: bool = False) -> None:
    """Three clients say each of these, all at the same time, and are told that at their ends.

    Meanwhile, another one is served.
    """
    with ExitStack() as closing:
        assert endpoints.client.is_server_live()
        before = endpoints.descriptors()
        slow: list[tuple[str, socket.socket]] = []
        for name in [*cases] * 3:
            endpoint, sent, _ = cases[name]
            connection = closing.enter_context(endpoints.connect(endpoint, bare))
            connection.sendall(sent)
            slow.append((name, connection))
        assert endpoints.client.is_server_live()
        wrong: dict[str, bytes] = {}
        for name, connection in slow:
            said, told = rest(connection), cases[name][2]
            if told not in said or (not told and b"HTTP/1.1" in said):
                wrong[name] = said
        assert not wrong
        closing.close()
        wait_until(lambda: endpoints.descriptors() <= before, "the descriptors to be given back")
    assert "Traceback" not in endpoints.host.output


def test_stalled_clients_are_disconnected_and_others_are_served(
    kinds: dict[str, Endpoints],
) -> None:
    check(kinds["plain"], SLOW)


def test_clients_that_stall_after_the_handshake_are_disconnected(
    kinds: dict[str, Endpoints],
) -> None:
    check(kinds["tls"], {name: SLOW[name] for name in OVER_TLS})


def test_a_stalled_handshake_times_out(kinds: dict[str, Endpoints]) -> None:
    cases = {
        f"{endpoint} {what}": (endpoint, sent, b"")
        for endpoint in ("http", "grpc")
        for what, sent in (("nothing", b""), ("half", HELLO))
    }
    check(kinds["tls"], cases, bare=True)
