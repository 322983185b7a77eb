"""RPCs of grpcio's server on one event loop, answered by a server on another one."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from host import Options, Server
from host.ray import servicer
from host.ray.direct_rpcs import DirectRpcs, run_on
from host.ray.rpc_methods import RpcMethods
from host.ray.servicer import Rpc
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


class Methods(RpcMethods):
    """What a replica is."""

    def __init__(self, server: Server) -> None:
        self.rpcs = server.grpc_application


async def put_by_ray(*_: Any) -> None:
    """The function of Ray, which must not be called."""
    raise AssertionError("the request went through Ray")


class GrpcServer:
    """Ray's one in a replica: it puts functions of its own into each handler."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        methods = handlers[0]._method_handlers
        handlers[0]._method_handlers = {
            path: handler._replace(unary_unary=put_by_ray, stream_stream=put_by_ray)
            for path, handler in methods.items()
        }
        self._server.add_generic_rpc_handlers(handlers)


@pytest.fixture(scope="module")
def models(module_repository: RepositoryBuilder) -> RepositoryBuilder:
    module_repository.copy("identity", "stream")
    module_repository.add("waits", WAITS, WAITS_CONFIG)
    return module_repository


@pytest.fixture(scope="module", params=["another loop", "the same loop"])
def direct(
    request: pytest.FixtureRequest, models: RepositoryBuilder
) -> Iterator[tuple[str, DirectRpcs]]:
    """The address of a gRPC server, and what it passes RPCs to."""
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

    def run(loop: asyncio.AbstractEventLoop, make: Callable[[], Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(make(), loop).result(DEADLINE)

    async def start_server() -> tuple[Server, DirectRpcs]:
        server = Server(options)
        await server.start()
        return server, DirectRpcs(Methods(server))

    async def start_grpc() -> tuple[Any, int]:
        opened = grpc.aio.server()
        servicer.add_servicer(object(), GrpcServer(opened))
        port = opened.add_insecure_port("127.0.0.1:0")
        await opened.start()
        return opened, port

    server, rpcs = run(loops[-1], start_server)
    servicer.answer_locally(rpcs)
    opened, port = run(loops[0], start_grpc)
    yield f"127.0.0.1:{port}", rpcs
    run(loops[0], lambda: opened.stop(None))
    servicer._local_rpcs = None
    run(loops[-1], server.stop)
    for loop, thread in zip(loops, threads, strict=True):
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_unary_rpcs_have_responses_and_errors(direct: tuple[str, DirectRpcs]) -> None:
    address, rpcs = direct
    with grpcclient.InferenceServerClient(address) as client:
        sent = np.arange(4, dtype=np.float32)
        assert client.is_server_ready()
        result = client.infer("identity", [tensor("INPUT0", sent)])
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), sent)
        with pytest.raises(grpcclient.InferenceServerException, match="unknown model") as caught:
            client.infer("missing", [tensor("INPUT0", sent)])
        assert caught.value.status() == "StatusCode.NOT_FOUND"
    assert rpcs.ongoing == 0


def test_streams_have_responses_in_order_and_errors(direct: tuple[str, DirectRpcs]) -> None:
    address, rpcs = direct
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with grpcclient.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for command in ("many=500 final", "last_error=enough"):
            text = np.array([command.encode()], dtype=np.object_)
            client.async_stream_infer("stream", [tensor("COMMAND", text)])
        for number in range(500):
            result, error = answers.get(timeout=DEADLINE)
            assert error is None and result.as_numpy("NUMBER")[0] == number
        assert rpcs.ongoing == 1
        assert "enough" in str(answers.get(timeout=DEADLINE)[1])
        client.stop_stream()
    wait_until(lambda: rpcs.ongoing == 0, "the stream to end")


def test_a_cancelled_request_cancels_its_model(
    direct: tuple[str, DirectRpcs], tmp_path: Path
) -> None:
    address, rpcs = direct
    answers: queue.Queue[Any] = queue.Queue()
    text = np.array([str(tmp_path).encode()], dtype=np.object_)
    with grpcclient.InferenceServerClient(address) as client:
        sent = client.async_infer(
            "waits", [tensor("COMMAND", text)], lambda result, error: answers.put(error)
        )
        wait_until((tmp_path / "began").exists, "the request to run")
        sent.cancel()
        wait_until((tmp_path / "cancelled").exists, "the model to see the cancellation")
        assert "cancel" in str(answers.get(timeout=DEADLINE)).lower()
    wait_until(lambda: rpcs.ongoing == 0, "the request to end")


class Stream:
    """Responses that never come; knows whether they were closed."""

    def __init__(self, messages: AsyncIterator[bytes]) -> None:
        self.messages = messages
        self.closed = False

    def __aiter__(self) -> AsyncIterator[list[bytes]]:
        return self

    async def __anext__(self) -> list[bytes]:
        await anext(self.messages)
        raise AssertionError("no message was sent")

    async def aclose(self) -> None:
        self.closed = True


class Streams:
    """Methods of a replica whose streams can be looked at."""

    def __init__(self) -> None:
        self.opened: list[Stream] = []

    def open_stream(self, rpc: Any, messages: AsyncIterator[bytes], context: Any) -> Stream:
        self.opened.append(Stream(messages))
        return self.opened[-1]


class Reading:
    """The messages of grpcio, whose pending read must not be cancelled."""

    def __init__(self) -> None:
        self.began, self.cancelled = asyncio.Event(), False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        raise AssertionError


@pytest.fixture(params=["another loop", "the same loop"])
def replica_loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop | None]:
    """The event loop of a replica; None for that of the test."""
    if request.param == "the same loop":
        yield None
        return
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def make_rpcs(methods: Any) -> DirectRpcs:
    return DirectRpcs(methods)


async def read_all(rpcs: DirectRpcs, requests: AsyncIterator[bytes]) -> None:
    async for _ in rpcs.stream(Rpc("service", "Stream", True), requests, None):
        pass


def test_a_cancelled_stream_leaves_the_read_of_grpcio_alone(
    replica_loop: asyncio.AbstractEventLoop | None,
) -> None:
    async def case() -> None:
        methods, requests = Streams(), Reading()
        loop = replica_loop or asyncio.get_running_loop()
        rpcs = await run_on(loop, make_rpcs(methods))
        task = asyncio.ensure_future(read_all(rpcs, requests))
        await requests.began.wait()
        await cancel(task)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not requests.cancelled
        assert methods.opened[0].closed and rpcs.ongoing == 0

    asyncio.run(asyncio.wait_for(case(), DEADLINE))


def test_a_stream_that_is_cancelled_while_it_is_opened_is_closed() -> None:
    loop = asyncio.new_event_loop()
    busy, go_on = threading.Event(), threading.Event()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def block() -> None:
        busy.set()
        assert go_on.wait(DEADLINE)

    async def case() -> None:
        methods = Streams()
        rpcs = await run_on(loop, make_rpcs(methods))
        loop.call_soon_threadsafe(block)
        busy.wait(DEADLINE)
        task = asyncio.ensure_future(read_all(rpcs, Reading()))
        await asyncio.sleep(0)  # it asks for the stream now
        assert rpcs.ongoing == 1
        task.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await run_on(loop, asyncio.sleep(0))
        assert rpcs.ongoing == 0
        assert [one.closed for one in methods.opened] in ([], [True])

    asyncio.run(asyncio.wait_for(case(), DEADLINE))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
