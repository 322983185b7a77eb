"""The port of a replica, with the replica on the event loop of Ray or on another one."""

from __future__ import annotations

import asyncio
import errno
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient

from host import Options, Server
from host.ray.replica_port import RAY_SERVICE, ReplicaPort
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

    @property
    def open_requests(self) -> int:
        """Inference RPCs in progress."""
        return self.server.grpc_application.open_requests


def run(loop: asyncio.AbstractEventLoop, make: Callable[[], Any]) -> Any:
    """The result of a coroutine on an event loop of another thread."""
    return asyncio.run_coroutine_threadsafe(make(), loop).result(DEADLINE)


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
    yield Served(f"127.0.0.1:{number}", port, server, health, loops[0])
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
        text = np.array([b"respond keeps"], dtype=np.object_)
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
