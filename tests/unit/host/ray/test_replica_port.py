"""The port of a replica, with the replica on the event loop of Ray or on another one."""

from __future__ import annotations

import asyncio
import errno
import queue
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2, service_pb2_grpc

from host.errors import ErrorCode, HostError
from host.ray.replica_port import RAY_SERVICE, ReplicaPort, run_on, serve_replica_port
from pbhost import Options, Server
from tests.clients import tensor
from tests.conftest import DEADLINE, RepositoryBuilder, wait_until

WAITS = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        folder = pb_utils.get_input_tensor_by_name(requests[0], "COMMAND").as_numpy()[0].decode()
        open(os.path.join(folder, "began"), "w").close()
        while not requests[0].is_cancelled():
            pass
        open(os.path.join(folder, "cancelled"), "w").close()
        return [pb_utils.InferenceResponse([])]
"""
WAITS_CONFIG = """
input [{name: "COMMAND", data_type: TYPE_STRING, dims: [1]}]
output [{name: "ANSWER", data_type: TYPE_STRING, dims: [1]}]
"""


class Replica:
    """What a replica is to its port."""

    def __init__(self, server: Server) -> None:
        self.services = server.grpc_application.services


class Health:
    """Ray's own method, which must run on Ray's event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.healthy = True
        self._loop = loop

    async def answer(self, message: bytes, context: Any) -> bytes:
        assert asyncio.get_running_loop() is self._loop
        context.set_code(grpc.StatusCode.OK if self.healthy else grpc.StatusCode.UNAVAILABLE)
        context.set_details("success" if self.healthy else "it stops")
        return b"\n\x07success"


@dataclass
class Served:
    """A port, the server behind it, and the event loop of Ray."""

    address: str
    port: ReplicaPort
    server: Server
    health: Health
    ray_loop: asyncio.AbstractEventLoop
    replica_loop: asyncio.AbstractEventLoop

    @property
    def open_requests(self) -> int:
        """Inference RPCs in progress."""
        return self.server.grpc_application.open_requests


def run(loop: asyncio.AbstractEventLoop, make: Callable[[], Any]) -> Any:
    """The result of a coroutine on an event loop of another thread."""
    return asyncio.run_coroutine_threadsafe(make(), loop).result(DEADLINE)


class Streaming:
    """A ModelStreamInfer of the model `stream`."""

    def __init__(self, channel: Any) -> None:
        self._sent: queue.Queue[Any] = queue.Queue()
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self.call = stub.ModelStreamInfer(iter(self._sent.get, None), timeout=DEADLINE)

    def send(self, command: str) -> None:
        """Sends a request."""
        request = service_pb2.ModelInferRequest(model_name="stream")
        request.inputs.add(name="COMMAND", datatype="BYTES", shape=[1])
        request.raw_input_contents.append(struct.pack("<I", len(command)) + command.encode())
        self._sent.put(request)

    def receive(self) -> None:
        """Waits for a response."""
        assert not next(self.call).error_message


@contextmanager
def hold(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Lets an event loop run nothing meanwhile."""
    held, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        held.set()
        assert go_on.wait(DEADLINE)

    loop.call_soon_threadsafe(wait)
    assert held.wait(DEADLINE)
    try:
        yield
    finally:
        go_on.set()


def listening_ports() -> set[int]:
    """The ports of this process."""
    sockets = psutil.Process().net_connections()
    return {one.laddr.port for one in sockets if one.status == "LISTEN"}


@pytest.fixture(scope="module")
def models(module_repository: RepositoryBuilder) -> RepositoryBuilder:
    module_repository.copy("identity", "stream")
    module_repository.add("waits", WAITS, WAITS_CONFIG)
    return module_repository


@pytest.fixture(params=["another loop", "the same loop"])
def served(request: pytest.FixtureRequest, models: RepositoryBuilder) -> Iterator[Served]:
    """A server on an event loop, and its port on that of Ray."""
    options = Options(
        model_repository=[str(models.path)],
        allow_grpc=False, allow_http=False, allow_metrics=False,
    )  # fmt: skip
    loops = [asyncio.new_event_loop()]
    if request.param == "another loop":
        loops.append(asyncio.new_event_loop())
    threads = [threading.Thread(target=loop.run_forever) for loop in loops]
    for thread in threads:
        thread.start()
    health = Health(loops[0])

    async def start_server() -> Server:
        return await Server(options).start()

    async def open_port() -> tuple[ReplicaPort, int]:
        port = ReplicaPort(Replica(server), loops[-1], {"Healthz": health.answer})
        return port, await port.start(0)

    server = run(loops[-1], start_server)
    port, number = run(loops[0], open_port)
    yield Served(f"127.0.0.1:{number}", port, server, health, loops[0], loops[-1])
    run(loops[0], lambda: port.stop(None))
    run(loops[-1], server.stop)
    for loop, thread in zip(loops, threads, strict=True):
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_unary_rpcs_have_responses_and_errors(served: Served) -> None:
    with grpcclient.InferenceServerClient(served.address) as client:
        sent = np.arange(4, dtype=np.float32)
        assert client.is_server_ready()
        result = client.infer("identity", [tensor("INPUT0", sent)])
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), sent)
        with pytest.raises(grpcclient.InferenceServerException, match="unknown model") as caught:
            client.infer("missing", [tensor("INPUT0", sent)])
        assert caught.value.status() == "StatusCode.NOT_FOUND"
    assert served.open_requests == 0


def test_streams_have_responses_in_order_and_errors(served: Served) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpcclient.InferenceServerClient(served.address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for command in ("many=500 final", "last_error=enough"):
            text = np.array([command.encode()], dtype=np.object_)
            client.async_stream_infer("stream", [tensor("COMMAND", text)])
        for number in range(500):
            result, error = answers.get(timeout=DEADLINE)
            assert error is None and result.as_numpy("NUMBER")[0] == number
        assert served.open_requests == 1
        assert "enough" in str(answers.get(timeout=DEADLINE)[1])
        client.stop_stream()
    wait_until(lambda: served.open_requests == 0, "the stream to end")


def test_a_cancelled_request_cancels_its_model(served: Served, tmp_path: Path) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    text = np.array([str(tmp_path).encode()], dtype=np.object_)
    with grpcclient.InferenceServerClient(served.address) as client:
        sent = client.async_infer(
            "waits", [tensor("COMMAND", text)], lambda result, error: answers.put(error)
        )
        wait_until((tmp_path / "began").exists, "the request to run")
        sent.cancel()
        wait_until((tmp_path / "cancelled").exists, "the model to see the cancellation")
        assert "cancel" in str(answers.get(timeout=DEADLINE)).lower()
    wait_until(lambda: served.open_requests == 0, "the request to end")


def test_ray_answers_for_the_health_of_the_replica(served: Served) -> None:
    with grpc.insecure_channel(served.address) as typed:
        channel: Any = typed
        check = channel.unary_unary(f"/{RAY_SERVICE}/Healthz")
        assert check(b"", timeout=DEADLINE) == b"\n\x07success"
        served.health.healthy = False
        with pytest.raises(grpc.RpcError) as caught:
            check(b"", timeout=DEADLINE)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNAVAILABLE and error.details() == "it stops"


def test_a_port_that_closes_finishes_open_requests(served: Served) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpcclient.InferenceServerClient(served.address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        text = np.array([b"thread:respond cancelled"], dtype=np.object_)
        client.async_stream_infer("stream", [tensor("COMMAND", text)])
        assert answers.get(timeout=DEADLINE)[1] is None
        stopped = asyncio.run_coroutine_threadsafe(served.port.stop(DEADLINE), served.ray_loop)

        number = int(served.address.split(":")[1])

        def closed() -> bool:
            sockets = psutil.Process().net_connections()
            return all(one.status != "LISTEN" or one.laddr.port != number for one in sockets)

        wait_until(closed, "the port to accept no more connections")
        assert not stopped.done() and served.open_requests == 1
        client.stop_stream(cancel_requests=True)
        stopped.result(DEADLINE)
    run(served.ray_loop, served.port.wait_for_termination)


def test_a_port_that_another_process_has_is_told_as_ray_expects(served: Served) -> None:
    number = int(served.address.split(":")[1])

    async def open_again() -> None:
        await ReplicaPort(Replica(served.server), served.ray_loop, {}).start(number)

    with pytest.raises(RuntimeError) as caught:
        run(served.ray_loop, open_again)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EADDRINUSE


def test_a_stream_that_is_cancelled_leaves_the_others_of_its_connection(served: Served) -> None:
    with grpc.insecure_channel(served.address) as channel:
        clients = [Streaming(channel), Streaming(channel)]
        for client in clients:
            client.send("thread:respond cancelled")
            client.receive()
        clients[0].call.cancel()
        wait_until(lambda: served.open_requests == 1, "the cancelled stream to end")
        clients[1].send("thread:respond cancelled")
        clients[1].receive()
        clients[1].call.cancel()
    wait_until(lambda: served.open_requests == 0, "the other stream to end")


def test_a_stream_that_is_cancelled_before_it_is_opened_leaves_nothing(served: Served) -> None:
    with hold(served.replica_loop), grpc.insecure_channel(served.address) as channel:
        client = Streaming(channel)
        client.send("thread:respond cancelled")
        client.call.cancel()
    with grpc.insecure_channel(served.address) as channel:
        client = Streaming(channel)
        client.send("thread:respond cancelled")
        client.receive()
        client.call.cancel()
    wait_until(lambda: served.open_requests == 0, "the streams to end")


def test_a_client_that_sends_frames_without_effect_is_closed(served: Served) -> None:
    """The port is open to others than HAProxy."""
    host, number = served.address.split(":")
    priority = struct.pack(">IBI", 5 << 8 | 2, 0, 1) + bytes(5)
    with socket.create_connection((host, int(number)), DEADLINE) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
        with suppress(ConnectionError):  # it may be reset before all is read
            for _ in range(1000):  # more than two minutes at the rate that is allowed
                connection.sendall(priority * 1000)
            while connection.recv(1 << 16):
                pass
    with grpcclient.InferenceServerClient(served.address) as client:
        assert client.is_server_ready()


def test_nothing_waits_for_an_event_loop_that_has_stopped_or_is_held() -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def answer() -> int:
        return 1

    async def use_held_loop() -> None:
        assert await run_on(loop, answer(), DEADLINE) == 1
        with hold(loop), pytest.raises(TimeoutError, match=r"not answered within 0\.01 s"):
            await run_on(loop, answer(), 0.01)
        assert await run_on(loop, answer(), DEADLINE) == 1  # the other one is cancelled by now

    async def use_stopped_loop() -> None:
        async def answer_ray(message: bytes, context: Any) -> bytes:
            return b""

        port = ReplicaPort(SimpleNamespace(services=dict), loop, {"Healthz": answer_ray})
        with pytest.raises(TimeoutError, match="has stopped"):
            await port.start(0)
        with pytest.raises(TimeoutError, match="has stopped"):
            await port.stop(DEADLINE)
        await port.wait_for_termination()

    async def ask_stopped_ray() -> None:
        port = ReplicaPort(SimpleNamespace(services=dict), asyncio.get_running_loop(), {})
        port._ray_loop = loop
        method: Any = port._ray_method("Healthz", Health(loop).answer)
        with pytest.raises(HostError, match="Healthz of Ray Serve: .* has stopped") as caught:
            await method.handler(b"", None)
        assert caught.value.code is ErrorCode.UNAVAILABLE

    before = listening_ports()
    asyncio.run(asyncio.wait_for(use_held_loop(), DEADLINE))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    asyncio.run(asyncio.wait_for(use_stopped_loop(), DEADLINE))
    asyncio.run(asyncio.wait_for(ask_stopped_ray(), DEADLINE))
    assert listening_ports() <= before  # ports of earlier tests may close meanwhile
    loop.close()


async def known(
    service_handler_factory: Any, grpc_options: Any, *, event_loop: Any,
    enable_so_reuseport: bool = False,
) -> Any:  # fmt: skip
    """Ray's own function."""


async def longer(
    service_handler_factory: Any, grpc_options: Any, *, event_loop: Any,
    enable_so_reuseport: bool = False, tls: bool,
) -> Any:  # fmt: skip
    """That of another version."""


def blocking(
    service_handler_factory: Any, grpc_options: Any, *, event_loop: Any,
    enable_so_reuseport: bool = False,
) -> Any:  # fmt: skip
    """That of another version, which is no coroutine function."""


class RayReplica:
    """Ray's own class."""

    def _direct_ingress_service_handler_factory(
        self, service_method: str, streaming_type: Any
    ) -> Any:
        """Makes a handler."""


class OtherReplica:
    """That of another version."""

    def _direct_ingress_service_handler_factory(self, method: str, streaming_type: Any) -> Any:
        """Makes a handler."""


def ray_module(function: Any, replica: Any = RayReplica) -> SimpleNamespace:
    """What Ray's module has."""
    return SimpleNamespace(start_grpc_server=function, Replica=replica)


STREAMING_TYPES = SimpleNamespace(gRPCStreamingType=SimpleNamespace(UNARY_UNARY=1))


@pytest.mark.parametrize(
    ("replica", "types", "expected"),
    [
        (ray_module(known), STREAMING_TYPES, ""),
        (None, STREAMING_TYPES, "the module ray.serve._private.replica"),
        (SimpleNamespace(), STREAMING_TYPES, "start_grpc_server(service_handler_factory, "),
        (ray_module(longer), STREAMING_TYPES, "enable_so_reuseport=False)"),
        (ray_module(blocking), STREAMING_TYPES, "the coroutine function"),
        (ray_module(known, None), STREAMING_TYPES, "Replica._direct_ingress_service_handler_fac"),
        (ray_module(known, OtherReplica), STREAMING_TYPES, "(self, service_method, streaming_type"),
        (ray_module(known), None, "proxy_request_response"),
        (ray_module(known), SimpleNamespace(), "gRPCStreamingType"),
        (
            ray_module(known),
            SimpleNamespace(gRPCStreamingType=SimpleNamespace()),
            "gRPCStreamingType.UNARY_UNARY",
        ),
    ],
    ids=[
        "known", "no module", "no function", "other parameters", "no coroutine function",
        "no class", "other factory", "no module of types", "no type", "no unary type",
    ],
)  # fmt: skip
def test_a_version_of_ray_that_is_not_known_keeps_its_own_server(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    replica: Any,
    types: Any,
    expected: str,
) -> None:
    for name, module in {
        "ray": SimpleNamespace(__version__="3.4.5"),
        "ray.serve": SimpleNamespace(),
        "ray.serve._private": SimpleNamespace(**({"replica": replica} if replica else {})),
        "ray.serve._private.proxy_request_response": types,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    before = getattr(replica, "start_grpc_server", None)

    async def case() -> bool:
        return serve_replica_port(SimpleNamespace(services=dict))

    replaced = asyncio.run(case())
    warnings = [one.getMessage() for one in caplog.records]
    assert replaced == (not expected)
    if replaced:
        assert replica.start_grpc_server is not before and not warnings
        assert asyncio.run(case())  # also of the function that has taken its place
        return
    assert getattr(replica, "start_grpc_server", None) is before
    (warning,) = warnings
    assert expected in warning and "Ray 3.4.5" in warning and "slower" in warning
