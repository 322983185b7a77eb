"""Clients that abuse HTTP/2 and HTTP/1.1 beneath the requests, or do not take their responses."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress

import grpc
import numpy as np
import pytest
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)
from tritonclient.grpc import service_pb2 as pb

from tests import uploads
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.faults.campaign import REPEATS, fault
from tests.faults.hostile_http2 import HostileConnection
from tests.faults.models import add_models

RECEIVE_BUFFER = 64 << 20
"""Bytes of large requests that the host holds at once."""
WINDOW = SettingsFrame.INITIAL_WINDOW_SIZE


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    """A host whose clients may take two seconds for what they must do."""
    add_models(module_repository)
    uploads.add_model(module_repository)
    return module_serve(
        module_repository,
        "--grpc-engine=h2",
        "--grpc-body-timeout-secs=2",
        "--http-body-timeout-secs=2",
        "--http-header-timeout-secs=2",
        "--response-send-timeout-secs=2",
        f"--receive-buffer-byte-size={RECEIVE_BUFFER}",
    ).wait_started()


def infer_message(values: int = 1) -> bytes:
    """A request to `identity` with this many numbers."""
    request = pb.ModelInferRequest(model_name="identity")
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[values])
    request.raw_input_contents.append(np.zeros(values, np.float32).tobytes())
    data: bytes = request.SerializeToString()
    return data


def change_the_window(host: RunningHost) -> None:
    """Each SETTINGS frame changes the windows of 1,000 open streams."""
    with HostileConnection(host) as client:
        if not client.send(client.headers("ModelStreamInfer") for _ in range(1000)):
            return
        for _ in range(20):
            frames = [SettingsFrame(0, settings={WINDOW: 1000 + n % 2}) for n in range(100)]
            if not client.send(frames):
                return


def change_the_window_within_a_frame(host: RunningHost) -> None:
    """One SETTINGS frame has 128 values of the same setting."""
    values = b"".join(b"\0\4" + (1000 + n).to_bytes(4, "big") for n in range(128))
    frame = len(values).to_bytes(3, "big") + b"\4\0\0\0\0\0" + values
    with HostileConnection(host) as client:
        client.send(client.headers("ModelStreamInfer") for _ in range(1000))
        client.send_bytes(frame * 200)


def ping(host: RunningHost) -> None:
    with HostileConnection(host) as client:
        for _ in range(20):
            if not client.send([PingFrame(0, b"12345678")] * 1000):
                return


def ping_without_reading(host: RunningHost) -> None:
    """The acknowledgements of PING frames stay with the server."""
    with HostileConnection(host, reads=False) as client:
        for _ in range(20):
            if not client.send([PingFrame(0, b"12345678")] * 1000):
                return


def reset_streams(host: RunningHost) -> None:
    """Opens streams and resets them at once (CVE-2023-44487)."""
    with HostileConnection(host) as client:
        for _ in range(50):
            frames = []
            for _ in range(100):
                opened = client.headers()
                frames += [opened, RstStreamFrame(opened.stream_id, error_code=8)]
            if not client.send(frames):
                return


def cancel_requests(host: RunningHost) -> None:
    """Sends whole requests and resets their streams at once."""
    message = infer_message()
    with HostileConnection(host) as client:
        for _ in range(20):
            frames = []
            for _ in range(50):
                frames += client.call(message)
                frames.append(RstStreamFrame(frames[-1].stream_id, error_code=8))
            if not client.send(frames):
                return


def send_empty_data(host: RunningHost) -> None:
    with HostileConnection(host) as client:
        opened = client.headers()
        client.send([opened])
        for _ in range(20):
            if not client.send([DataFrame(opened.stream_id, b"")] * 1000):
                return


def send_one_byte_at_a_time(host: RunningHost) -> None:
    """A request of 100 kB in frames of one byte."""
    message = infer_message(25_000)
    data = b"\0" + len(message).to_bytes(4, "big") + message
    with HostileConnection(host) as client:
        opened = client.headers()
        client.send([opened])
        for start in range(0, len(data), 1000):
            parts = data[start : start + 1000]
            if not client.send(DataFrame(opened.stream_id, bytes([byte])) for byte in parts):
                return


def open_windows_by_one(host: RunningHost) -> None:
    """A response goes out byte by byte, as the window of its stream is opened by one each time."""
    with HostileConnection(host, {WINDOW: 0}) as client:
        frames = client.call(infer_message(5000))
        client.send(frames)
        for _ in range(20):
            updates = [WindowUpdateFrame(frames[0].stream_id, window_increment=1)] * 1000
            if not client.send(updates):
                return


def open_the_connection_window(host: RunningHost) -> None:
    with HostileConnection(host) as client:
        for _ in range(20):
            if not client.send([WindowUpdateFrame(0, window_increment=1)] * 1000):
                return


def prioritise(host: RunningHost) -> None:
    with HostileConnection(host) as client:
        client.send([client.headers()])
        for _ in range(20):
            frame = PriorityFrame(1, depends_on=0, stream_weight=5)
            if not client.send([frame] * 1000):
                return


def continue_headers(host: RunningHost) -> None:
    """A header block that never ends (CVE-2024-27316)."""
    with HostileConnection(host) as client:
        opened = client.headers(flags=())
        client.send([opened])
        block = b"\x40\x01a\x7f\x80\x07" + b"b" * 1023
        for _ in range(500):
            if not client.send([ContinuationFrame(opened.stream_id, block * 10)]):
                return


def send_many_header_fields(host: RunningHost) -> None:
    """Each request has fields that push all others out of the header table."""
    message = infer_message()
    with HostileConnection(host) as client:
        for number in range(100):
            more = [(f"x-{number}-{n}", "v" * 100) for n in range(50)]
            if not client.send(client.call(message, more)):
                return


def leave_responses_unread(host: RunningHost) -> None:
    """Unary responses of 1 MB whose callers have a deadline and never open their window."""
    message = infer_message(1 << 18)
    with ExitStack() as stack:
        resets = []
        for _ in range(12):
            client = stack.enter_context(HostileConnection(host, {WINDOW: 0}))
            frames = client.call(message, [("grpc-timeout", "1S")])
            client.send(frames)
            reset = b"\0\0\4\3\0" + frames[0].stream_id.to_bytes(4, "big")
            resets.append((client, reset))
        wait_until(
            lambda: all(client.closed or client.received(reset) for client, reset in resets),
            "the server to reset each stream",
        )


def leave_connections_unread(host: RunningHost) -> None:
    """Connections from which no byte is read, each with requests for 1 MB."""
    message = infer_message(1 << 18)
    with ExitStack() as stack:
        for _ in range(6):
            client = stack.enter_context(
                HostileConnection(host, {WINDOW: (1 << 31) - 1}, reads=False)
            )
            for _ in range(4):
                if not client.send(client.call(message)):
                    break


def half_send_messages(host: RunningHost) -> None:
    """The client announces 1 MB, sends half of it and closes the connection."""
    data = b"\0" + (1 << 20).to_bytes(4, "big") + bytes(1 << 14)
    for _ in range(50):
        with HostileConnection(host) as client:
            opened = client.headers()
            client.send([opened, DataFrame(opened.stream_id, data[:16384])])


def send_more_than_there_is_memory_for(host: RunningHost) -> None:
    """Eight clients send 40 MiB each, in turns; half of them leave before the end."""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(upload(host, 40 << 20))
            for upload in [uploads.GrpcUpload, uploads.HttpUpload] * 4
        ]
        for turn in range(41):
            for client in clients if turn < 30 else clients[:4]:
                client.send(1 << 20)
    message = infer_message(60 << 18)
    with grpc.insecure_channel(
        host.url,
        options=[("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)],
    ) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", bytes, bytes)

        def served() -> bool:
            with suppress(grpc.RpcError):
                return bool(infer(message, timeout=DEADLINE))
            return False

        wait_until(served, "the host to release the memory of all clients")


def connect_and_close(host: RunningHost) -> None:
    """Connections that say nothing, half a preface, or nonsense."""
    ports = [host.port, int(host.http_url.rpartition(":")[2])]
    words = [b"", b"PRI * HT", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n", bytes(range(256))]
    for number in range(500):
        address = ("127.0.0.1", ports[number % 2])
        with closing(socket.create_connection(address, DEADLINE)) as connection:
            with suppress(ConnectionError):
                connection.sendall(words[number % len(words)])


def hold_idle_connections(host: RunningHost) -> None:
    """200 connections per endpoint that stay silent until the server closes them or they leave."""
    ports = [host.port, int(host.http_url.rpartition(":")[2])]
    with ExitStack() as stack:
        for port in ports * 200:
            stack.enter_context(closing(socket.create_connection(("127.0.0.1", port), DEADLINE)))


def pipeline_http(host: RunningHost) -> None:
    """2,000 requests in one go, whose responses are not read."""
    address = ("127.0.0.1", int(host.http_url.rpartition(":")[2]))
    with closing(socket.create_connection(address, DEADLINE)) as connection:
        connection.settimeout(2)
        with suppress(OSError):
            connection.sendall(b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n" * 2000)


def send_chunks_of_one_byte(host: RunningHost) -> None:
    """A body of 20,000 chunks of one byte."""
    address = ("127.0.0.1", int(host.http_url.rpartition(":")[2]))
    head = (
        b"POST /v2/models/identity/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    with closing(socket.create_connection(address, DEADLINE)) as connection:
        with suppress(ConnectionError):
            connection.sendall(head + b"1\r\n{\r\n" * 20_000 + b"0\r\n\r\n")
            assert connection.recv(1 << 16)


def send_header_lines(host: RunningHost) -> None:
    """10,000 header lines, and a header line without an end."""
    address = ("127.0.0.1", int(host.http_url.rpartition(":")[2]))
    for lines in (b"a: b\r\n" * 10_000, b"a: " + b"b" * (4 << 20)):
        with closing(socket.create_connection(address, DEADLINE)) as connection:
            with suppress(ConnectionError):
                connection.sendall(b"GET /v2 HTTP/1.1\r\n" + lines)
                assert connection.recv(1 << 16)


FAULTS: list[Callable[[RunningHost], None]] = [
    change_the_window,
    change_the_window_within_a_frame,
    ping,
    ping_without_reading,
    reset_streams,
    cancel_requests,
    send_empty_data,
    send_one_byte_at_a_time,
    open_windows_by_one,
    open_the_connection_window,
    prioritise,
    continue_headers,
    send_many_header_fields,
    leave_responses_unread,
    leave_connections_unread,
    half_send_messages,
    send_more_than_there_is_memory_for,
    connect_and_close,
    hold_idle_connections,
    pipeline_http,
    send_chunks_of_one_byte,
    send_header_lines,
]


@pytest.mark.parametrize("act", FAULTS, ids=lambda act: act.__name__)
def test_a_connection_harms_no_other(host: RunningHost, act: Callable[[RunningHost], None]) -> None:
    with fault(act.__name__, host):
        for _ in range(REPEATS):
            act(host)
